"""One kernel and the client that runs a notebook's cells in it.

nbclient sends cells and waits for their ends; jupyter_client speaks with the kernel. Added here: a kernel on sockets in
a private folder (default TCP ports are open to every user of a node, default IPC names collide), outputs that are
bounded and redacted before they are kept anywhere, a record that is current while a cell runs, and a kernel's death
noticed when it happens. Nothing is shared between executions: any number may run in threads of one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from queue import Empty
from typing import Any

import zmq
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.connect import write_connection_file
from nbclient.client import NotebookClient
from nbclient.exceptions import CellExecutionComplete, CellExecutionError
from nbformat import NotebookNode

from fvc_lib.execution.kernel.outputs import BoundedLog, CellOutputs, LogPipe, weight
from fvc_lib.execution.run.stage_end import CellError
from fvc_lib.services.redaction import Redactor

START_TIMEOUT_SECONDS = 300.0  # a cold, shared file system can take minutes to import a scientific stack
LEAVE_SECONDS = 10.0  # for threads that do not end and exit handlers that hang
LAST_OUTPUTS_SECONDS = 30  # after a cell's reply; a kernel that never says "idle" must not hold the run up
MESSAGES_WAITING = 32
LONGEST_MESSAGE = 4_000
WIDGET_BYTES = 400_000  # of all widgets' state together, in the record's metadata
MAX_WIDGETS = 500  # more are a loop's
MAX_COPIES = 20  # of one display that is shown several times and can be updated
_OF_ONE_CELL = frozenset({"status", "execute_input"})  # of another cell these messages say nothing
_SOCKET_PATH_LIMIT = 100  # the system's is 107 bytes, and zmq cuts nothing off: it refuses
_LAUNCHER = Path(__file__).with_name("ipykernel_launcher.py")
# Without a handler of its own Python prints a library's warnings to stderr in the middle of our progress.
_LOG = logging.getLogger("fvc.kernel")
_LOG.addHandler(logging.NullHandler())
_LOG.propagate = False


class KernelNeverStartedError(RuntimeError):
    """The kernel's process ended, or did not answer in time, before the first cell."""


class KernelProcess:
    """One kernel of this interpreter, whatever the notebook's metadata says, in a session of its own.

    Args:
        private: a folder that only this kernel uses.
        environment: its whole environment.
        folder: its working directory.
        log: gets what it and its native libraries write past the notebook; closed with the kernel.
    """

    def __init__(self, private: Path, environment: Mapping[str, str], folder: Path, log: BoundedLog) -> None:
        connection = str(private / "k.json")
        write_connection_file(connection, transport="ipc", ip=str(private / "s"))
        (private / "ipython").mkdir()  # nobody's startup files and settings, and no profile that two kernels create
        self._pipe = LogPipe(log)
        # -E and the like are not given: the kernel sees what a command typed by the user would see.
        command = [sys.executable, str(_LAUNCHER), "-f", connection, f"--ipython-dir={private / 'ipython'}"]
        try:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env={**environment, "JPY_PARENT_PID": str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=self._pipe.write_end,
                stderr=self._pipe.write_end,
                start_new_session=True,  # Ctrl-C in the terminal is ours to pass on
            )
        except OSError:
            self._pipe.close()
            raise
        self._pipe.kernel_has_it()
        self._sockets = [private / f"s-{number}" for number in range(1, 6)]
        self.client = AsyncKernelClient(connection_file=connection)
        self.client.allow_stdin = False
        # So few messages wait here before the kernel has to: what a flood of them takes is a few pieces of text.
        self.client.context.setsockopt(zmq.RCVHWM, MESSAGES_WAITING)
        self.client.load_connection_file()

    @property
    def pid(self) -> int:
        """The kernel's process id."""
        return self._process.pid

    @property
    def return_code(self) -> int | None:
        """None while it lives; negative for a signal."""
        return self._process.poll()

    async def ended(self) -> None:
        """Wait until the process has ended; looked at less and less often, at least four times a second."""
        seconds = 0.005
        while self.return_code is None:
            await asyncio.sleep(seconds)
            seconds = min(0.25, 1.5 * seconds)

    async def connect(self) -> None:
        """Wait until the kernel answers on both channels.

        Raises:
            KernelNeverStartedError: it ended or did not answer in time.
        """
        end = time.monotonic() + START_TIMEOUT_SECONDS
        while not all(path.exists() for path in self._sockets):  # zmq itself would try again ever more slowly
            self._still_starting(end)
            await asyncio.sleep(0.005)
        self.client.start_channels(stdin=False, hb=False)
        requested = heard = False
        while not heard:
            self._still_starting(end)
            if not requested:
                self.client.kernel_info()
                requested = True
            with contextlib.suppress(Empty):
                await self.client.shell_channel.get_msg(timeout=0.2)
                requested = False  # answered; if nothing is published now we are not yet subscribed: request it again
                await self.client.iopub_channel.get_msg(timeout=0.2)
                heard = True

    async def leave(self) -> None:
        """Request its end, so that its exit handlers run, and wait a while for it."""
        if self.return_code is None and self.client.channels_running:
            with contextlib.suppress(zmq.ZMQError):
                self.client.control_channel.send(self.client.session.msg("shutdown_request", {"restart": False}))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ended(), LEAVE_SECONDS)

    def close(self) -> None:
        """Kill whatever is left, workers included, and close everything."""
        with contextlib.suppress(OSError):  # nobody is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.client.stop_channels()
        if not self.client.context.closed:
            self.client.context.destroy(linger=0)
        self._pipe.close()

    def _still_starting(self, end: float) -> None:
        if self.return_code is not None:
            raise KernelNeverStartedError(f"the kernel's process ended with status {self.return_code} while it started")
        if time.monotonic() > end:
            raise KernelNeverStartedError(f"the kernel did not answer within {START_TIMEOUT_SECONDS:.0f} s")


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A temporary folder for one kernel, short enough for the names of its sockets."""
    short = len(os.fsencode(tempfile.gettempdir())) + len("/fvc-xxxxxxxx/s-1") <= _SOCKET_PATH_LIMIT
    with tempfile.TemporaryDirectory(prefix="fvc-", dir=None if short else "/tmp") as folder:
        yield Path(folder)


class BoundedClient(NotebookClient):
    """nbclient's client, whose cells' outputs go into ``outputs`` instead of into the notebook.

    Args:
        notebook: its cells are run; it gets no outputs.
        redactor: hides secrets in widgets' state.
    """

    def __init__(self, notebook: NotebookNode, redactor: Redactor) -> None:
        super().__init__(
            notebook, log=_LOG, iopub_timeout=LAST_OUTPUTS_SECONDS, raise_on_iopub_timeout=False, record_timing=False
        )
        self.outputs: CellOutputs | None = None
        self.execution_count: int | None = None
        self._kernel: KernelProcess | None = None
        self._redactor = redactor
        self._displays: dict[str, list[tuple[CellOutputs, NotebookNode]]] = {}
        self._hooked_bytes = 0

    async def run_cell(self, kernel: KernelProcess, index: int, outputs: CellOutputs) -> CellError | None:
        """Run the cell at ``index``; what it shows goes into ``outputs``. Returns the exception that it raised.

        Raises:
            DeadKernelError: the kernel's process ended meanwhile; what it had said before is in ``outputs``.
        """
        self._kernel, self.kc, self.outputs, self.execution_count = kernel, kernel.client, outputs, None
        try:
            await self.async_execute_cell(self.nb.cells[index], index)
        except CellExecutionError as error:
            message = self._redactor.text(str(error.evalue))
            if len(message) > LONGEST_MESSAGE:  # status.json is read every second by whoever watches
                message = message[:LONGEST_MESSAGE] + " [...]"
            return CellError(str(error.ename), message, self.execution_count or 0)
        return None

    async def _async_poll_output_msg(self, parent_msg_id: str, cell: NotebookNode, cell_index: int) -> None:
        """Take messages until the cell is done.

        Unlike nbclient's, what a thread of an earlier cell says now is shown here: it would be lost there.
        """
        assert self._kernel is not None
        while True:
            message = await self._kernel.client.iopub_channel.get_msg(timeout=None)
            if message["parent_header"].get("msg_id") == parent_msg_id or message["msg_type"] not in _OF_ONE_CELL:
                try:
                    self.process_message(message, cell, cell_index)
                except CellExecutionComplete:
                    return

    async def _async_poll_kernel_alive(self) -> None:
        """Wait for the kernel's end instead of asking once a second; its last words are taken first."""
        assert self._kernel is not None
        assert self.task_poll_for_reply is not None
        await self._kernel.ended()
        while await self._kernel.client.iopub_channel.socket.poll(20):
            await asyncio.sleep(0.001)
        self.task_poll_for_reply.cancel()

    def process_message(self, msg: dict[str, Any], cell: NotebookNode, cell_index: int) -> None:
        """Put what the kernel's message says into the outputs, a widget, or wherever else it belongs.

        Raises:
            CellExecutionComplete: it says that the cell is done.
        """
        kind, content = msg["msg_type"], msg["content"]
        if kind == "status":
            if content["execution_state"] == "idle":
                raise CellExecutionComplete
        elif kind == "execute_input":
            self.execution_count = content.get("execution_count")
        elif kind.startswith("comm_"):
            opens = kind == "comm_open" and len(self.widget_state) >= MAX_WIDGETS
            if not opens and weight(content) <= WIDGET_BYTES:
                self.handle_comm_msg([], msg, 0)
        elif hooks := self.output_hook_stack.get(msg["parent_header"].get("msg_id")):
            self._put_into_widget(hooks[-1], msg)
        elif self.outputs is not None:
            self._put(kind, content, self.outputs)

    def keep_widgets(self, notebook: NotebookNode) -> None:
        """Put the widgets' state into the metadata of ``notebook``, where it is not too much."""
        if self.widget_state and weight(self.widget_state) <= WIDGET_BYTES:
            self.widget_state = self._redactor.tree(self.widget_state)
            self.set_widgets_metadata()
            notebook.metadata.widgets = self.nb.metadata.widgets

    def _put(self, kind: str, content: dict[str, Any], outputs: CellOutputs) -> None:
        display = (content.get("transient") or {}).get("display_id")
        if kind == "stream":
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

    def _update(self, display: str | None, content: dict[str, Any]) -> None:
        for owner, output in self._displays.get(display or "", []):
            owner.replace(output, content)

    def _put_into_widget(self, hook: Any, message: dict[str, Any]) -> None:
        if message["msg_type"] == "clear_output":
            hook.clear_output([], message, 0)
            return
        self._hooked_bytes += weight(message["content"])
        if self._hooked_bytes <= WIDGET_BYTES and message["msg_type"] != "update_display_data":
            hook.output([], {**message, "content": self._redactor.tree(message["content"])}, None, 0)
