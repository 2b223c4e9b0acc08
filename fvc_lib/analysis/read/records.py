"""What lies in a run's folder: its logs by name, its tables and its records, foreign, torn or missing ones included."""

import fcntl
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pandera.polars as pa
import polars as pl

from fvc_lib.services.atomic_files import as_mapping, path_to_text, read_json_object, this_host
from fvc_lib.services.digests import document_damage
from fvc_lib.services.errors import DataError
from fvc_lib.services.run_paths import ATTEMPT_VARIABLE, RunPaths
from fvc_lib.services.tables import read_table

_FOLD = re.compile(r"^(?P<stage>.+)_fold_(?P<fold>\d+)$")


@dataclass(frozen=True)
class Answer:
    """A query's rows, and in words what could not be read for them (empty when all could)."""

    frame: pl.DataFrame
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class LogFile:
    """One JSONL file and whose it is: what its run is called here, not what its lines say, since folders get copied."""

    path: Path
    run_id: str
    stage: str
    fold: int | None = None

    @classmethod
    def named(cls, path: Path, run_id: str) -> Self:
        """The file of a run whose stage and fold its own name gives, as in ``04_fold_training_fold_2.jsonl``."""
        match = _FOLD.match(path.stem)
        return cls(path, run_id, match["stage"], int(match["fold"])) if match else cls(path, run_id, path.stem)


def run_names(runs: Sequence[RunPaths]) -> list[str]:
    """What each of ``runs`` is called beside the others: its id, of like ids with the experiment, else the whole path.

    A run that was copied into another experiment keeps its id; called alike, two runs would be counted as one.
    """
    roots = {run.root for run in runs}
    ids = Counter(root.name for root in roots)
    names = {root: root.name if ids[root.name] == 1 else f"{root.parent.name}/{root.name}" for root in roots}
    often = Counter(names.values())
    return [names[run.root] if often[names[run.root]] == 1 else str(run.root) for run in runs]


def log_files(run: RunPaths, folder: str, name: str | None = None) -> list[LogFile]:
    """The JSONL files right in ``folder`` of ``run``, not below it; the run is called ``name`` (None: its id)."""
    paths = entries(run, folder)
    return [LogFile.named(path, name or run.run_id) for path in paths if path.suffix == ".jsonl"]


def entries(run: RunPaths, folder: str) -> list[Path]:
    """What lies in ``folder`` of ``run``, by name; nothing where there is no such folder."""
    where = run.root / folder
    return sorted(where.iterdir()) if where.is_dir() else []


def read_tables(paths: Iterable[tuple[str, Path]], schema: pa.DataFrameSchema) -> Answer:
    """All tables that exist among ``paths`` (run id, file), stacked, with ``run_id`` in front.

    A table that cannot be read or does not fit its schema is left out and noted: one foreign run folder must not hide
    the others.
    """
    frames, notes = [], []
    empty = pl.DataFrame(schema={name: column.dtype.type for name, column in schema.columns.items()})
    for run_id, path in paths:
        if not path.is_file():
            continue
        try:
            frame = read_table(path, schema)
        except DataError as error:
            notes.append(f"{path_to_text(path)} was left out: {error}")
            continue
        frames.append(frame.select(pl.lit(run_id).alias("run_id"), pl.all()))
    empty = empty.select(pl.lit("").alias("run_id"), pl.all()).clear()
    return Answer(pl.concat([empty, *frames]), tuple(notes))


# --- Where a run and its tasks stand, from what they left: also when whoever ran them has died without a word

GONE = "stopped without a word"
NOT_ENDED = "not ended when this page was made"
_FRESH_SECONDS = 60.0  # a holder on another host renews its claim every few seconds


def run_status(run: RunPaths) -> dict[str, Any]:
    """``status.json`` with each task's own file over it, and with the states that are true now.

    A run or task that says it is running while nobody holds its lock has the state ``stopped without a word``.
    """
    status = read_json_object(run.status_json)
    status["stages"] = stages = dict(as_mapping(status.get("stages")))
    folder = run.task_status("").parent
    if folder.is_dir():
        for path in sorted(folder.glob("[!.]*.json")):
            if (own := read_json_object(path)) and not document_damage(path, own):
                stages[path.stem] = own
    if not _says_running(status) and not any(map(_says_running, stages.values())):
        return status
    whole = is_held(run.root / "run.lock")
    for key, stage in stages.items():
        if _says_running(stage) and not whole and not is_held(run.task_lock(key)):
            stages[key] = {**stage, "state": GONE}
    if _says_running(status) and not whole and not any(map(_says_running, stages.values())):
        status["state"] = GONE
    return status


def shown_state(state: object) -> object:
    """``state`` as a page shows it. One that a runner's kernel makes is read when all has ended: on that nothing runs,
    not even the run that the page belongs to.
    """
    return NOT_ENDED if state == "running" and os.environ.get(ATTEMPT_VARIABLE) else state


def is_held(lock: Path) -> bool:
    """Whether a living process holds ``lock``, as far as this host can tell; nothing is written and nobody kept."""
    try:
        with lock.open("rb") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            except OSError:
                pass  # no locks on this disk: the claim alone tells
            claim = json.loads(stream.read(4096) or b"{}")
            age_seconds = time.time() - lock.stat().st_mtime
    except (OSError, ValueError):
        return False
    elsewhere = isinstance(claim, dict) and claim.get("host") not in (None, this_host())
    return elsewhere and abs(age_seconds) < _FRESH_SECONDS


def _says_running(status: object) -> bool:
    return isinstance(status, dict) and status.get("state") == "running"
