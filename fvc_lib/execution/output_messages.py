"""From a kernel's messages to a cell's outputs: printed, shown, shown anew, taken back, or a widget's."""

from __future__ import annotations

import logging
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from nbclient.client import NotebookClient
from nbformat import NotebookNode

from fvc_lib.execution.bounded_outputs import CellOutputs, weight
from fvc_lib.services.redaction import Redactor

WIDGET_BYTES = 400_000  # of all widgets' state together, in the record's metadata
MAX_WIDGETS = 500  # more are a loop's
MAX_COPIES = 20  # of one display that is shown several times and can be updated

# Without a handler of its own Python prints a library's warnings to stderr in the middle of our progress.
_LOG = logging.getLogger("fvc.kernel")
_LOG.addHandler(logging.NullHandler())
_LOG.propagate = False


class OutputMessages:
    """Puts each message where it belongs; what one notebook's cells have shown can be updated by later ones."""

    def __init__(self, notebook: NotebookNode, client: BlockingKernelClient, redactor: Redactor) -> None:
        self._widgets = NotebookClient(notebook, log=_LOG)  # of nbclient, what it knows of widgets
        self._widgets.kc = client
        self._redactor = redactor
        self._displays: dict[str, list[tuple[CellOutputs, NotebookNode]]] = {}
        self._hooked_bytes = 0

    def put(self, message: dict[str, Any], outputs: CellOutputs) -> None:
        """Put what ``message`` says into ``outputs`` or wherever else it belongs; other messages are passed over."""
        kind, content = message["msg_type"], message["content"]
        display = (content.get("transient") or {}).get("display_id")
        if kind.startswith("comm_"):
            self._put_comm(message)
        elif hooks := self._widgets.output_hook_stack.get(message["parent_header"].get("msg_id")):
            self._put_into_widget(hooks[-1], message)
        elif kind == "stream":
            outputs.print(content["name"], content["text"])
        elif kind in {"display_data", "execute_result", "error"}:
            shown = outputs.show(kind, content)
            if display:
                self._update(display, content)
                copies = self._displays.setdefault(display, [])
                copies.append((outputs, shown))
                del copies[:-MAX_COPIES]
        elif kind == "update_display_data":
            self._update(display, content)
        elif kind == "clear_output":
            outputs.clear(bool(content.get("wait")))

    def keep_widgets(self) -> None:
        """Put the widgets' state into the notebook's metadata, where it is not too much."""
        if self._widgets.widget_state and weight(self._widgets.widget_state) <= WIDGET_BYTES:
            self._widgets.widget_state = self._redactor.tree(self._widgets.widget_state)
            self._widgets.set_widgets_metadata()

    def _update(self, display: str | None, content: dict[str, Any]) -> None:
        for owner, output in self._displays.get(display or "", []):
            owner.replace(output, content)

    def _put_comm(self, message: dict[str, Any]) -> None:
        opens = message["msg_type"] == "comm_open"
        if opens and len(self._widgets.widget_state) >= MAX_WIDGETS:
            return
        if weight(message["content"]) <= WIDGET_BYTES:
            self._widgets.handle_comm_msg([], message, 0)

    def _put_into_widget(self, hook: Any, message: dict[str, Any]) -> None:
        if message["msg_type"] == "clear_output":
            hook.clear_output([], message, 0)
            return
        self._hooked_bytes += weight(message["content"])
        if self._hooked_bytes <= WIDGET_BYTES and message["msg_type"] != "update_display_data":
            hook.output([], {**message, "content": self._redactor.tree(message["content"])}, None, 0)
