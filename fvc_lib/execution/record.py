"""The record of one execution: the notebook as it ran, current on disk, claiming nothing that did not happen.

Its metadata are papermill's, so that what reads papermill's records reads ours.
"""

from __future__ import annotations

import json
import keyword
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from papermill.execute import ERROR_MARKER_TAG
from papermill.parameterize import parameterize_notebook

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
