"""The record of one execution: the notebook as it ran, current on disk, claiming nothing that did not happen.

Its metadata are papermill's, so that what reads papermill's records reads ours.
"""

from __future__ import annotations

import html
import json
import keyword
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from papermill.execute import ERROR_MARKER_TAG
from papermill.parameterize import parameterize_notebook

from fvc_lib.execution.run.status import StageStatus
from fvc_lib.services.atomic_files import temporary_of, write_bytes
from fvc_lib.services.errors import UsageError
from fvc_lib.services.redaction import Redactor

# How far the file may be behind: a kill of this process leaves a record that shows what was running this long ago.
BEHIND_SECONDS = 0.2
# While a cell runs on its outputs are saved this often, and never for more than a tenth of the time.
REFRESH_SECONDS = 5.0


class Record:
    """A notebook that is executed, and the file that tells of it.

    The file is replaced atomically; only the last save is forced to the disk, since a power cut ends the kernel too.

    Args:
        source: the notebook; it is read, never written.
        path: the record.
        parameters: checked names and values of the parameters cell.
        redactor: hides secrets in sources, parameters and metadata.

    Raises:
        UsageError: a parameter's name is none.
    """

    def __init__(self, source: Path, path: Path, parameters: dict[str, Any], redactor: Redactor) -> None:
        for name in parameters:  # papermill writes names into a cell as they are
            if not name.isidentifier() or keyword.iskeyword(name):
                raise UsageError(f"parameter {name!r} is no name. Parameters are names of the parameters cell.")
        self.path, self._redactor = path, redactor
        notebook = nbformat.reads(source.read_text(encoding="utf-8"), as_version=4)
        notebook.metadata.setdefault("papermill", {})
        for cell in notebook.cells:
            cell.metadata.setdefault("tags", [])
        notebook = parameterize_notebook(notebook, parameters, kernel_name="python3", language="python")
        notebook.cells = [cell for cell in notebook.cells if ERROR_MARKER_TAG not in cell.metadata.get("tags", [])]
        self.sources = [cell.source for cell in notebook.cells]  # what runs; the record's own are redacted
        self._started = time.monotonic()
        notebook.metadata.papermill.update(
            input_path=str(source), output_path=str(path), parameters=parameters, start_time=_now(), end_time=None,
            duration=None, exception=None,
        )  # fmt: skip
        self.notebook: NotebookNode = nbformat.from_dict(redactor.tree(notebook))
        for cell in self.notebook.cells:
            state = {"exception": None, "start_time": None, "end_time": None, "duration": None, "status": "pending"}
            cell.metadata.papermill = nbformat.from_dict(state)
            if cell.cell_type == "code":
                cell.execution_count, cell.outputs = None, []
        self._cell_started = self._saved = 0.0
        self._saving_took = 0.0
        self._changed = True
        self.save()

    def begin(self, cell: NotebookNode) -> None:
        """``cell`` runs from now on."""
        self._cell_started = time.monotonic()
        cell.metadata.papermill.update(status="running", exception=False, start_time=_now())
        self._changed = True

    def end(self, cell: NotebookNode, *, failed: bool) -> None:
        """``cell`` has ended."""
        state = cell.metadata.papermill
        state.update(status="failed" if failed else "completed", end_time=_now())
        state.duration = round(time.monotonic() - self._cell_started, 6)
        if failed:
            state.exception = self.notebook.metadata.papermill.exception = True
        self._changed = True

    def seconds_to_save(self) -> float:
        """After how long the file is due for ``save``; 0 when it is."""
        wanted = BEHIND_SECONDS if self._changed else max(REFRESH_SECONDS, 10 * self._saving_took)
        return max(0.0, self._saved + wanted - time.monotonic())

    def close(self) -> None:
        """The last save; cells that never ran stay ``pending``."""
        state = self.notebook.metadata.papermill
        state.end_time, state.duration = _now(), round(time.monotonic() - self._started, 6)
        self.save(last=True)

    def save(self, *, last: bool = False) -> None:
        """Replace the file."""
        began = time.monotonic()
        # Without indentation: with it JSON is written by Python's slow encoder, a number of a figure on each line.
        content = (json.dumps(self.notebook, ensure_ascii=False) + "\n").encode("utf-8", "replace")
        if last:
            write_bytes(self.path, content)
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary = temporary_of(self.path)  # swept when we are gone
            temporary.write_bytes(content)
            temporary.replace(self.path)
        self._saved, self._changed = time.monotonic(), False
        self._saving_took = self._saved - began


def _now() -> str:
    return datetime.now(UTC).isoformat()


# ----------------------------------------------------------------------------------------------------
# A record that tells its own end: a banner at its top, and at the cell that ran what ended it.


_STYLE = "border-left: 6px solid {color}; padding: 0.5em 1em; background: {ground}; color: #222"
_COLORS = {"failed": ("#b71c1c", "#fdecea"), "interrupted": ("#b26a00", "#fff4e0")}
KERNEL_DIED = "KernelDied"


def tell_end(record: Path, stage: StageStatus, lines: Sequence[str], log_tail: str = "") -> None:
    """Write into ``record`` how its execution ended.

    A cell that ran when the kernel died gets an error output that says so. One that was asked to stop is ``stopped``
    and no failure. The banner carries papermill's tag, so that a repetition removes it.

    Args:
        record: the notebook, as the engine left it.
        stage: how it ended.
        lines: what happened, where it was and what to do next.
        log_tail: the end of the kernel's log, where that is all there is to read.
    """
    notebook = json.loads(record.read_text(encoding="utf-8", errors="replace"))
    states = [cell["metadata"].get("papermill", {}).get("status") for cell in notebook["cells"]]
    where = ""
    if "failed" in states:
        place = states.index("failed")
        where = f"cell {place + 1} of {len(states)}"
        _tell_in_cell(notebook["cells"][place], stage, lines)
    if stage.state == "interrupted":
        notebook["metadata"]["papermill"]["exception"] = None
    notebook["cells"].insert(0, _banner(stage, lines, where, log_tail, with_id=notebook.get("nbformat_minor", 0) >= 5))
    write_bytes(record, (json.dumps(notebook, ensure_ascii=False) + "\n").encode("utf-8", "replace"))


def _tell_in_cell(cell: dict[str, Any], stage: StageStatus, lines: Sequence[str]) -> None:
    if stage.state == "interrupted":
        cell["metadata"]["papermill"].update(status="stopped", exception=False)
    if stage.error is not None or any(output["output_type"] == "error" for output in cell["outputs"]):
        return
    name = "Stopped" if stage.state == "interrupted" else KERNEL_DIED
    traceback = [f"{name}: {lines[0]}", *lines[1:]]
    cell["outputs"].append(dict(nbformat.v4.new_output("error", ename=name, evalue=lines[0], traceback=traceback)))


def _banner(stage: StageStatus, lines: Sequence[str], where: str, log_tail: str, *, with_id: bool) -> dict[str, Any]:
    color, ground = _COLORS.get(stage.state, _COLORS["failed"])
    title = "Stopped" if stage.state == "interrupted" else "Failed"
    parts = [f"<b>{title}{', at ' + where if where else ''}</b>", *map(html.escape, lines)]
    body = "<br>\n".join(parts)
    if log_tail:
        body += f"<pre>{html.escape(log_tail)}</pre>"
    # No blank line within, which would end the HTML block in Markdown.
    body = "\n".join(line or "&nbsp;" for line in body.splitlines())
    source = f'<div style="{_STYLE.format(color=color, ground=ground)}">\n{body}\n</div>'
    cell = dict(nbformat.v4.new_markdown_cell(source, metadata={"tags": [ERROR_MARKER_TAG]}))
    if not with_id:
        del cell["id"]
    return cell
