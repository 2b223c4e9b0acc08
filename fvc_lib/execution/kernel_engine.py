"""Running one notebook in one kernel so that its record tells the truth.

papermill does the parameters and the record; what it gets wrong is corrected here: cells that never ran are not called
completed, the record is replaced atomically, the kernel is this interpreter whatever the notebook's metadata says, and
it talks over sockets in a private folder (default TCP ports are open to every user of a node).
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import papermill
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import CellExecutionError, DeadKernelError
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import Engine, NotebookExecutionManager, papermill_engines
from papermill.exceptions import PapermillExecutionError

from fvc_lib.services.atomic_files import write_text

KERNEL_START_TIMEOUT_SECONDS = 300  # a cold, shared file system can take minutes to import a scientific stack

# Without a handler of its own Python prints a library's warnings to stderr in the middle of our progress.
logging.getLogger("papermill").addHandler(logging.NullHandler())


@dataclass(frozen=True)
class CellError:
    """The exception that ended a notebook: its type's name, message and the number in the cell's ``In [n]``."""

    name: str
    message: str
    cell: int


@dataclass(frozen=True)
class KernelOutcome:
    """How an execution ended: ``error`` when a cell raised, ``died`` when the kernel went away by itself."""

    error: CellError | None
    died: bool
    return_code: int | None  # of the kernel process when it died; negative for a signal

    @property
    def ok(self) -> bool:
        """Every cell ran and none raised."""
        return self.error is None and not self.died


class _Manager(AsyncKernelManager):
    """A kernel of this interpreter on private IPC sockets."""

    def __init__(self, folder: Path) -> None:
        super().__init__(transport="ipc", connection_file=str(folder / "k.json"))

    @property
    def kernel_spec(self) -> KernelSpec:
        """Always the running interpreter: the notebook's own kernel name may not exist here."""
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="Python 3", language="python")


class _Record(NotebookExecutionManager):  # type: ignore[misc]
    """papermill's bookkeeping, saved atomically and without claiming what did not happen."""

    def save(self, **kwargs: Any) -> None:
        """Replace the record in one step."""
        if kwargs.get("nb"):
            self.nb = kwargs["nb"]
        if self.output_path:
            write_text(Path(self.output_path), nbformat.writes(self.nb))
        self.last_save_time = self.now()

    def notebook_complete(self, **kwargs: Any) -> None:
        """Close the record; a cell that never ran stays ``pending``."""
        self.end_time = self.now()
        self.nb.metadata.papermill["end_time"] = self.end_time.isoformat()
        self.nb.metadata.papermill["duration"] = (self.end_time - self.start_time).total_seconds()
        self.save()


class _Client(PapermillNotebookClient):  # type: ignore[misc]
    """Executes cell by cell and remembers how the kernel ended."""

    on_start: Callable[[int], None] | None = None
    return_code: int | None = None
    error: CellError | None = None

    def start_new_kernel_client(self) -> Any:
        """Tell who is watching which process to watch, before the kernel's first reply."""
        if self.on_start is not None:
            self.on_start(self.km.provisioner.pid)
        return super().start_new_kernel_client()

    def papermill_execute_cells(self) -> None:
        """Run the cells in order; the first that raises, or the kernel's death, ends it."""
        for index, cell in enumerate(self.nb.cells):
            self.nb_man.cell_start(cell, index)
            try:
                self.execute_cell(cell, index)
            except CellExecutionError as error:
                # Kept here because papermill takes sys.exit(0) for success, with cells left that never ran.
                self.error = CellError(error.ename, error.evalue, cell.execution_count or 0)
                self.nb_man.cell_exception(cell, cell_index=index, exception=error)
                return
            except BaseException as error:
                self.nb_man.cell_exception(cell, cell_index=index, exception=error)
                self._note_death(error)
                raise
            finally:
                self.nb_man.cell_complete(cell, cell_index=index)

    def _note_death(self, error: BaseException) -> None:
        if isinstance(error, DeadKernelError):
            process = getattr(self.km.provisioner, "process", None)
            self.return_code = process.poll() if process is not None else None


def execute(
    source: Path,
    record: Path,
    parameters: Mapping[str, Any],
    *,
    folder: Path,
    environment: Mapping[str, str],
    log: Path,
    on_start: Callable[[int], None],
) -> KernelOutcome:
    """Run ``source`` with ``parameters`` in a new kernel and keep ``record`` current while it runs.

    Args:
        source: the notebook; it is read, never written.
        record: the executed copy, replaced after every cell.
        parameters: checked names and values of the parameters cell.
        folder: the kernel's working directory.
        environment: the kernel's whole environment.
        log: gets what the kernel process and native libraries write past the notebook; appended to.
        on_start: called with the kernel's process id.
    """
    with tempfile.TemporaryDirectory(prefix="fvc-") as private:
        engine = _engine(_Manager(Path(private)), dict(environment), folder, log, on_start)
        name = f"fvc-{Path(private).name}"  # papermill has one registry for all threads
        papermill_engines.register(name, engine)
        try:
            papermill.execute_notebook(
                str(source).replace("{", "{{").replace("}", "}}"),  # papermill formats paths with the parameters
                str(record).replace("{", "{{").replace("}", "}}"),
                parameters=dict(parameters),
                engine_name=name,
                kernel_name="python3",
                language="python",
                progress_bar=False,
                start_timeout=KERNEL_START_TIMEOUT_SECONDS,
            )
        except PapermillExecutionError:
            pass  # the client has it
        except DeadKernelError:
            return KernelOutcome(None, True, engine.client.return_code)
        except RuntimeError as error:
            if "Kernel" not in str(error):
                raise
            return KernelOutcome(None, True, None)  # it never became ready, or went away while starting
        finally:
            papermill_engines._engines.pop(name, None)
        return KernelOutcome(engine.client.error, False, None)


def _engine(
    manager: _Manager, environment: dict[str, str], folder: Path, log: Path, on_start: Callable[[int], None]
) -> Any:
    """Papermill wants an engine class; this one is bound to one kernel."""

    class BoundEngine(Engine):  # type: ignore[misc]
        client: _Client | None = None

        @classmethod
        def execute_notebook(cls, nb: Any, kernel_name: str, output_path: str | None = None, **options: Any) -> Any:
            record = _Record(nb, output_path=output_path, progress_bar=False)
            record.notebook_start()
            try:
                cls.client = _Client(
                    record,
                    km=manager,
                    kernel_name=kernel_name,
                    startup_timeout=options["start_timeout"],
                    log=logging.getLogger("papermill"),
                )
                cls.client.on_start = on_start
                with log.open("ab") as stream:
                    cls.client.execute(env=environment, cwd=str(folder), stdout=stream, stderr=stream, cleanup_kc=True)
            finally:
                record.notebook_complete()
            return record.nb

    return BoundEngine
