"""Open a stage's notebook: its run, parameters and logs.

``run_notebooks.py`` executes a notebook without a user (headless) and gives it the run folder as a parameter. In
JupyterLab (live) a notebook works on the newest run with that run's parameters, so that it shows the same results.
"""

import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import polars as pl

from fvc_lib.services.atomic_files import path_to_text, sweep_temporaries, temporary_of
from fvc_lib.services.config import OF_MODEL, RunConfig, meaning
from fvc_lib.services.errors import DataError, StoppedError
from fvc_lib.services.isolated_workers import SUSPECTS
from fvc_lib.services.parameters import resolve_config, run_config
from fvc_lib.services.run_paths import ATTEMPT_VARIABLE, RunPaths, find_run, stage_key
from fvc_lib.services.stage_logs import MemorySampler, MetricLog, Report
from fvc_lib.services.tasks import TASK_OF_STAGE

WRITE_INTERVAL_SECONDS = 0.5
BETWEEN_CELLS_SECONDS = 0.05


@dataclass(frozen=True)
class Progress:
    """The progress of a task.

    Attributes:
        what: what is counted, for example ``steps`` or ``videos``.
        done: number of finished units.
        total: number of all units.
        part: description of the unit that is being processed; may be empty.
    """

    what: str
    done: int
    total: int
    part: str = ""


def progress_path(run: RunPaths, stage: str, fold: int | None) -> Path:
    """Return the path of the progress file of a stage, or of one fold of it; ``fold`` None: a stage without folds."""
    return run.logs / f"{stage_key(stage, fold)}.progress.json"


def read_progress(path: Path) -> Progress | None:
    """Return the progress in the file ``path``; None if the file is missing or cannot be read."""
    try:
        return Progress(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def file_reporter(path: Path, what: str) -> Report:
    """Return a callback ``(done, total, part)`` that writes a ``Progress`` into the file ``path``.

    It writes at most every 0.5 s, and always when ``done`` reaches ``total``. ``what`` names the units that are
    counted, for example ``videos``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    last = -WRITE_INTERVAL_SECONDS

    def report(done: int, total: int, part: str = "", what: str = what) -> None:
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
    """Return a callback ``(done, total, part)`` that draws a progress bar titled ``what`` in a notebook or terminal."""
    from tqdm.auto import tqdm

    bar = tqdm(desc=what)

    def report(done: int, total: int, part: str = "", what: str = what) -> None:
        bar.set_description(what, refresh=False)
        bar.total = total
        bar.n = done
        bar.set_postfix_str(part)
        if done >= total:
            bar.close()

    return report


def reporter_to(path: Path, what: str) -> Report:
    """Return a callback ``(done, total, part)`` that shows the progress of some work.

    In a notebook that a user runs, it draws a bar. If ``run_notebooks.py`` executes the notebook, the callback writes
    the file ``path``, from which ``run_notebooks.py`` shows the progress.

    Args:
        path: the progress file.
        what: name of the units that are counted, for example ``videos``.
    """
    return file_reporter(path, what) if ATTEMPT_VARIABLE in os.environ else bar_reporter(what)


@dataclass
class StageSession:
    """One open notebook: its run, configuration and logs.

    Attributes:
        stage: name of the stage, which is the notebook's name.
        paths: the paths of the run's files.
        config: the run's configuration.
        parameters: names of the configuration's fields in the notebook's parameters cell.
        fold: number of the outer fold, from 0; None for a stage without folds.
        attempt: number of the task's attempt, from 1.
        headless: whether ``run_notebooks.py`` executes the notebook; else a user does, in JupyterLab.
        memory: the sampler that logs the memory of this process.
        stop_requested: whether a signal has asked the stage to stop.
    """

    stage: str
    paths: RunPaths
    config: RunConfig
    parameters: tuple[str, ...]
    fold: int | None
    attempt: int
    headless: bool
    memory: MemorySampler
    stop_requested: bool = False
    _metric_log: MetricLog | None = None
    _polling: bool = False  # whether the stage calls ``stop``; if so, a signal does not end the running cell

    def settings(self) -> pl.DataFrame:
        """Return a table of the notebook's parameters, with the values that the run has for them.

        The columns are ``parameter``, ``value`` and ``meaning``; all are texts.
        """
        values = self.config.model_dump(mode="json")
        if not set(OF_MODEL).isdisjoint(self.parameters):  # else the model's file need not be imported
            values = self.config.effective_values()
        shown = [values[name] for name in self.parameters]
        texts = [", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value) for value in shown]
        columns = {
            "parameter": list(self.parameters),
            "value": texts,
            "meaning": [meaning(name) for name in self.parameters],
        }
        return pl.DataFrame(columns, schema=dict.fromkeys(columns, pl.String))

    def read(self, table: str, fold: int | None = None, without: Collection[str] = ()) -> pl.DataFrame:
        """Read a table of the run and check it against its schema.

        Args:
            table: name of the table's path in ``RunPaths``, such as ``index`` or ``predictions``.
            fold: number of the fold, for a table that exists once per fold; None: the fold of this notebook.
            without: names of columns to leave out.

        Raises:
            DataError: the table is missing or damaged.
        """
        from fvc_lib.services.tables import (
            read_table,  # polars takes a quarter of a second to load, and runners read no table
        )

        return read_table(*self._table(table, fold), without)

    def write(self, table: str, rows: pl.DataFrame) -> None:
        """Check ``rows`` against the schema of a table of the run, then write them as this table.

        Args:
            table: name of the table's path in ``RunPaths``, such as ``index`` or ``scores``.
            rows: the table's rows.
        """
        from fvc_lib.services.tables import write_table

        path, schema = self._table(table, None)
        write_table(rows, schema, path)

    def _table(self, table: str, fold: int | None) -> tuple[Path, Any]:
        """Return the path and the schema of the table called ``table`` in ``RunPaths``.

        ``fold`` is the number of the fold, for a table that exists once per fold; None: the fold of this notebook.
        """
        from fvc_lib.services import tables

        path = getattr(self.paths, table)
        schema = {"augmented_metadata": "AUGMENTED", "original_index": "INDEX"}.get(table, table.upper())
        if not isinstance(path, Path):  # a method, which gives the path of one fold
            path = path(self.fold if fold is None else fold)
        return path, getattr(tables, schema)

    def training_options(self) -> dict[str, Any]:
        """Return the options that a training function takes (``TrainingOptions``), as a dict of keyword arguments.

        These are the metric log, the memory log, the progress callback, the number of the attempt, and the method
        ``stop``. The metric log is opened here; the method ``close`` closes it.
        """
        path = self.paths.metrics(self.stage, self.fold)
        run_id = self.paths.run_id
        self._metric_log = MetricLog(path, run_id=run_id, fold=self.fold, attempt=self.attempt)
        logs = {"metric_log": self._metric_log, "memory": self.memory, "progress": self.progress("steps")}
        return {**logs, "attempt": self.attempt, "stop": self.stop}

    def progress(self, what: str) -> Report:
        """Return a callback ``(done, total, part)`` that shows how many units of this notebook's work are finished.

        It draws a bar in a notebook that a user runs, else it writes the progress file. ``what`` names the units.
        """
        return reporter_to(progress_path(self.paths, self.stage, self.fold), what)

    def stop(self) -> bool:
        """Return whether a signal has asked the stage to stop.

        After the first call, a signal no longer ends the running cell. So the stage has to call this method regularly,
        and end when it returns True.
        """
        self._polling = True
        return self.stop_requested

    def check(self, claim: str, holds: bool) -> None:
        """Print ``claim``, a sentence about the results, with a check mark if ``holds`` is True.

        Raises:
            DataError: ``holds`` is false; the message has the claim.
        """
        if not holds:
            raise DataError(f"check failed: {claim}. The record above shows the values; nothing after it was run.")
        print(f"✓ {claim}")

    def close(self, *written: Path) -> pl.DataFrame:
        """Close the logs, and print the peak memory; every notebook ends with this call.

        Args:
            written: paths of the files that the notebook has written.

        Returns:
            A table of these files with columns ``file`` (path relative to the run folder) and ``size_bytes``.
        """
        gc.collect()  # so that the log's last line does not count objects that nobody uses
        self.memory.close()
        if self._metric_log:
            self._metric_log.close()
        print(f"peak memory of this notebook: {self.memory.peak_bytes / 1e9:.2f} GB; {self.memory.budget.describe()}")
        names = [path_to_text(path.relative_to(self.paths.root)) for path in written]
        sizes = [path.stat().st_size for path in written]
        return pl.DataFrame({"file": names, "size_bytes": sizes}, schema={"file": pl.String, "size_bytes": pl.Int64})

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal that asks the stage to stop.

        ``stop_requested`` is set to True. If the stage has called the method ``stop`` before, nothing else happens: the
        stage will call it again, and end. Otherwise an exception ends the running cell. If no cell is running at this
        moment, this process sends itself the signal again after 0.05 s.

        The arguments are those of a handler of Python's ``signal.signal``.

        Raises:
            StoppedError: a cell is running, and the stage has not called ``stop``. The error ends the cell.
        """
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
    """Open the notebook of ``stage``: find or begin its run, check the parameters cell, and open the logs.

    Args:
        stage: the notebook's name without suffix.
        namespace: ``globals()`` of the notebook right after its parameters cell. It has ``run_dir`` (empty: the newest
            run), ``fold`` for a stage with folds, and fields of ``RunConfig``. IPython's list ``In`` holds the sources
            of the cells run so far, among them the cell with papermill's values.
        only_looks: whether the notebook only reads an existing run. Another process may work on the run meanwhile.

    Raises:
        UsageError: there is no such run; another process works on the run, and the notebook writes into it; a value
            that the user edited differs from the run's value; or papermill was given an unknown parameter.
    """
    parameters = tuple(name for name in RunConfig.model_fields if name in namespace)
    attempt = os.environ.get(ATTEMPT_VARIABLE)
    run_dir = str(namespace["run_dir"])
    fold = int(namespace["fold"]) if "fold" in namespace else None
    key = f"{stage}.interactive_memory"
    if attempt is not None:  # the runner has checked everything, and its values count before this kernel's environment
        paths = find_run(Path(run_dir).parents[1], run_dir)
        config = run_config(paths.params_yaml)
        log = paths.memory(stage, fold)
        events = paths.memory_events(stage, fold)
    else:
        from fvc_lib.execution.run import which_run

        which_run.refuse_unknown_parameters(stage, namespace.get("In", ()))
        edited = which_run.edited_values({name: namespace[name] for name in parameters}, TASK_OF_STAGE.get(stage))
        if only_looks:
            paths = find_run(resolve_config(edited).runs_dir, run_dir or "latest")
            config = run_config(paths.params_yaml)
        else:
            paths, config, _ = which_run.open_run(
                stage, run_dir, edited, command="interactive, from a notebook", state="interactive"
            )
            which_run.begin_interactive(paths, stage, fold, config)
        # Another file than the memory log of the headless run, which is not changed.
        log, events = paths.logs / f"{key}.jsonl", paths.logs / f"{key}_events.jsonl"
    memory = MemorySampler(log, events=events, mem_gb=config.mem_gb)
    SUSPECTS.read(paths.shards / stage)
    session = StageSession(stage, paths, config, parameters, fold, int(attempt or 1), attempt is not None, memory)
    if session.headless:
        sweep_temporaries(paths.root)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, session.on_signal)
    return session


def _in_a_cell(frame: FrameType | None) -> bool:
    """Return whether the stack frame ``frame`` runs inside a notebook cell.

    That is the case if its globals, or those of one of its callers, are the globals of the module ``__main__``.
    """
    while frame is not None and frame.f_globals is not vars(sys.modules["__main__"]):
        frame = frame.f_back
    return frame is not None
