"""Open a stage's notebook: its run, parameters and logs.

The runner gives a notebook its run folder as a parameter. In JupyterLab it works on the newest run with that run's
parameters, so that it shows what the headless run showed.
"""

import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import polars as pl

from fvc_lib.services.atomic_files import path_to_text, sweep_temporaries, temporary_of
from fvc_lib.services.config import RunConfig, meaning
from fvc_lib.services.errors import DataError, StoppedError, UsageError
from fvc_lib.services.isolated_workers import SUSPECTS
from fvc_lib.services.parameters import run_config
from fvc_lib.services.progress import Report
from fvc_lib.services.run_paths import ATTEMPT_VARIABLE, RunPaths, find_run, stage_key
from fvc_lib.services.stage_logs import MemorySampler, MetricLog
from fvc_lib.services.tasks import TASK_OF_STAGE

WRITE_INTERVAL_SECONDS = 0.5
BETWEEN_CELLS_SECONDS = 0.05


@dataclass(frozen=True)
class Progress:
    """The progress of a task: ``done`` of ``total`` units of ``what``; ``part`` names the next one."""

    what: str
    done: int
    total: int
    part: str = ""


def progress_path(run: RunPaths, stage: str, fold: int | None) -> Path:
    """Return the path of a task's progress file."""
    return run.logs / f"{stage_key(stage, fold)}.progress.json"


def read_progress(path: Path) -> Progress | None:
    """Return the latest progress; None before there is any."""
    try:
        return Progress(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def file_reporter(path: Path, what: str) -> Report:
    """Return a callback ``(done, total, part)`` that replaces ``path`` at most twice a second and at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    last = -WRITE_INTERVAL_SECONDS

    def report(done: int, total: int, part: str = "") -> None:
        nonlocal last
        now = time.monotonic()
        if done < total and now - last < WRITE_INTERVAL_SECONDS:
            return
        last = now
        temporary = temporary_of(path)
        temporary.write_text(json.dumps(asdict(Progress(what, done, total, part))))
        temporary.replace(path)

    return report


def bar_reporter(what: str) -> Report:
    """Return a callback ``(done, total, part)`` that draws a bar in a live notebook or terminal."""
    from tqdm.auto import tqdm

    bar: Any = None

    def report(done: int, total: int, part: str = "") -> None:
        nonlocal bar
        if bar is None:
            bar = tqdm(total=total, desc=what)
        bar.total = total
        bar.set_postfix_str(part, refresh=False)
        bar.update(done - bar.n)
        bar.refresh()
        if done >= total:
            bar.close()

    return report


def progress_reporter(run: RunPaths, stage: str, what: str) -> Report:
    """Return ``reporter_to`` for the progress file of a notebook that is no stage of the run."""
    return reporter_to(progress_path(run, stage, None), what)


def reporter_to(path: Path, what: str) -> Report:
    """Return ``bar_reporter`` in a live notebook, else ``file_reporter``, whose ``path`` the command watches."""
    return file_reporter(path, what) if ATTEMPT_VARIABLE in os.environ else bar_reporter(what)


@dataclass
class StageSession:
    """One open notebook: its run, configuration and logs."""

    stage: str
    paths: RunPaths
    config: RunConfig
    parameters: tuple[str, ...]
    fold: int | None
    attempt: int
    headless: bool
    memory: MemorySampler
    cell: Mapping[str, Any] = field(default_factory=dict)  # the values of the parameters cell
    at_end: Callable[[], None] | None = None  # what ``close`` calls; None where the runner records the stage
    stop_requested: bool = False
    _polling: bool = False  # while a stage polls ``stop``, a signal only sets the flag; else it ends the cell

    def settings(self) -> pl.DataFrame:
        """Return the notebook's parameters: columns parameter, value (the run's, which counts), meaning.

        A column ``in_the_cell`` has other values of the parameters cell, if there are any.
        """
        values = self.config.model_dump(mode="json")
        used = [_as_text(values[name]) for name in self.parameters]
        cell = [_as_text(self.cell.get(name, values[name])) for name in self.parameters]
        differs = [there if there != value else "" for there, value in zip(cell, used, strict=True)]
        columns = {
            "parameter": list(self.parameters),
            "value": used,
            **({"in_the_cell": differs} if any(differs) else {}),
            "meaning": [meaning(name) for name in self.parameters],
        }
        return pl.DataFrame(columns, schema=dict.fromkeys(columns, pl.String))

    def read(self, table: str, fold: int | None = None, without: Collection[str] = ()) -> pl.DataFrame:
        """Read a table of the run and check it against its schema.

        Args:
            table: its name in ``RunPaths``, such as ``index`` or ``predictions``.
            fold: the fold, if there is one table per fold; None: this notebook's.
            without: columns to leave out.

        Raises:
            DataError: it is missing or damaged.
        """
        from fvc_lib.services import tables  # pandera takes half a second to load, and runners read no table

        return tables.read_table(self._path(table, fold), getattr(tables, _schema(table)), without)

    def write(self, table: str, rows: pl.DataFrame) -> None:
        """Write a table of the run after checking it against its schema; see ``read``."""
        from fvc_lib.services import tables

        tables.write_table(rows, getattr(tables, _schema(table)), self._path(table, None))

    def _path(self, table: str, fold: int | None) -> Path:
        found = getattr(self.paths, table)
        path: Path = found if isinstance(found, Path) else found(self.fold if fold is None else fold)
        return path

    def metric_log(self) -> MetricLog:
        """Open this stage's metric log for appending."""
        path = self.paths.metrics(self.stage, self.fold)
        return MetricLog(
            path,
            run_id=self.paths.run_id,
            fold=self.fold,
            attempt=self.attempt,
            on_trouble=self.memory.disk_full,
        )

    def progress(self, what: str) -> Report:
        """Return a callback ``(done, total)``: a bar when live, a line on the runner's terminal when headless."""
        if self.headless:
            return file_reporter(progress_path(self.paths, self.stage, self.fold), what)
        return bar_reporter(what)

    def stop(self) -> bool:
        """Return whether the stage is to stop; from the first call on, signals set a flag and end no cell."""
        self._polling = True
        return self.stop_requested

    def check(self, claim: str, holds: bool) -> None:
        """Show that ``claim`` holds, or end the stage.

        Raises:
            DataError: it does not.
        """
        if not holds:
            raise DataError(f"check failed: {claim}. The record above shows the values; nothing after it was run.")
        print(f"✓ {claim}")

    def close(self, *written: Path) -> pl.DataFrame:
        """Close the logs; the last call of every notebook. Returns columns file (in the run folder) and size_bytes."""
        if self.at_end is not None:
            self.at_end()
        gc.collect()  # so that the log's last line shows what the notebook really keeps
        self.memory.close()
        print(f"peak memory of this notebook: {self.memory.peak_bytes / 1e9:.2f} GB; {self.memory.budget.describe()}")
        return pl.DataFrame(
            {
                "file": [path_to_text(path.relative_to(self.paths.root)) for path in written],
                "size_bytes": [path.stat().st_size for path in written],
            },
            schema={"file": pl.String, "size_bytes": pl.Int64},
        )

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: end the running cell, or between two cells the next one."""
        self.stop_requested = True
        if self._polling:
            return
        if not _in_a_cell(frame):  # an exception here would replace the kernel's answer, and the run would hang
            again = threading.Timer(BETWEEN_CELLS_SECONDS, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
            return
        raise StoppedError(f"stopped by {signal.Signals(number).name}; finished work is kept")


def open_stage(stage: str, namespace: Mapping[str, Any], *, only_looks: bool = False) -> StageSession:
    """Open ``stage`` with the values of its parameters cell.

    Args:
        stage: the notebook's name without suffix.
        namespace: ``globals()`` of the notebook right after its parameters cell: ``run_dir``, for a fold stage
            ``fold``, and fields of RunConfig. Its ``In``, the cells run so far, says what papermill put in.
        only_looks: it writes no tables; interactively it begins no run and may look at one that is worked on.

    Raises:
        UsageError: no such run; the run is being worked on, and the notebook writes into it; a value in the cell was
            edited that differs from the run's own; or papermill was given a name that no field has.
    """
    parameters = tuple(name for name in RunConfig.model_fields if name in namespace)
    task = TASK_OF_STAGE.get(stage)
    given = {name: namespace[name] for name in parameters} | ({"task": task} if task else {})
    attempt = os.environ.get(ATTEMPT_VARIABLE)
    run_dir = str(namespace["run_dir"])
    at_end, inputs = None, namespace.get("In", ())
    if attempt is not None:  # the runner has checked everything, and its values count before this kernel's environment
        paths = find_run(Path(run_dir).parents[1], run_dir)
        config = run_config(paths)
    else:
        from fvc_lib.execution.run import which_run

        which_run.refuse_unknown_parameters(stage, inputs)
        paths, config = which_run.find_or_begin(stage, run_dir, given, only_looks)
    fold = int(namespace["fold"]) if "fold" in namespace else None
    if fold is not None and not 0 <= fold < config.num_trainings:
        raise UsageError(
            f"fold: got {fold}, wanted 0 to {config.num_trainings - 1}: this run has {config.num_trainings} folds."
        )
    if attempt is None and not only_looks:
        which_run.note_interactive_training(paths, stage, fold, config)
        at_end = which_run.end_of_notebook(paths, stage, fold, config, inputs)
    log, events = paths.memory(stage, fold), paths.memory_events(stage, fold)
    if attempt is None:  # an interactive notebook leaves the run's own memory log as it is
        name = f"{stage_key(stage, fold)}.interactive_memory"
        log, events = paths.logs / f"{name}.jsonl", paths.logs / f"{name}_events.jsonl"
    memory = MemorySampler(log, events=events, mem_gb=config.mem_gb)
    SUSPECTS.read(paths.shards / stage, stage)
    session = StageSession(
        stage, paths, config, parameters, fold, int(attempt or 1), attempt is not None, memory, given, at_end
    )
    if session.headless:
        sweep_temporaries(paths.root)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, session.on_signal)
    return session


def _in_a_cell(frame: FrameType | None) -> bool:
    """Return whether ``frame`` was called from a cell, whose namespace is ``__main__``."""
    while frame is not None and frame.f_globals is not vars(sys.modules["__main__"]):
        frame = frame.f_back
    return frame is not None


def _schema(table: str) -> str:
    """Return the name in ``services.tables`` of the schema of ``table``."""
    others = {"augmented_metadata": "AUGMENTED", "original_index": "INDEX"}
    return others.get(table, table.upper())


def _as_text(value: object) -> str:
    return ", ".join(str(part) for part in value) if isinstance(value, list | tuple) else str(value)
