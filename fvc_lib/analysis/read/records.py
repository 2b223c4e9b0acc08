"""Read a run's folder: its logs, tables and records, with foreign, torn and missing files."""

import datetime
import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pandera.polars as pa
import polars as pl

from fvc_lib.analysis.wording import time_text
from fvc_lib.services.atomic_files import as_mapping, as_text, path_to_text, read_json_object
from fvc_lib.services.errors import DataError
from fvc_lib.services.records.digests import document_damage
from fvc_lib.services.run_paths import ATTEMPT_VARIABLE, RunPaths, is_held
from fvc_lib.services.tables import column_types, read_table
from fvc_lib.services.tasks import STAGES

_FOLD = re.compile(r"^(?P<stage>.+)_fold_(?P<fold>\d+)$")


@dataclass(frozen=True)
class Answer:
    """A query's rows, and notes on what could not be read."""

    frame: pl.DataFrame
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class LogFile:
    """One JSONL file with its run's name, stage and fold, taken from paths since folders get copied."""

    path: Path
    run_id: str
    stage: str
    fold: int | None = None

    @classmethod
    def named(cls, path: Path, run_id: str) -> Self:
        """Make the file of a run from stage and fold in its name, as in ``04_fold_training_fold_2.jsonl``."""
        match = _FOLD.match(path.stem)
        return cls(path, run_id, match["stage"], int(match["fold"])) if match else cls(path, run_id, path.stem)


def log_files(run: RunPaths, folder: str, name: str | None = None) -> list[LogFile]:
    """Return the JSONL files in ``folder`` of ``run``, without subfolders; ``name`` is the run's, by default its id."""
    paths = sorted((run.root / folder).glob("*.jsonl"))
    return [LogFile.named(path, name or run.run_id) for path in paths if path.is_file()]


def as_list(value: object) -> list[Any]:
    """Return ``value`` if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def as_number(value: object) -> float | None:
    """Return ``value`` if it is a number, else None."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def read_tables(paths: Iterable[tuple[str, Path]], schema: pa.DataFrameSchema, without: Collection[str] = ()) -> Answer:
    """Stack the tables that exist among ``paths`` (run id, file), with ``run_id`` in front.

    A table that cannot be read or does not fit ``schema`` is left out, with a note. Columns ``without`` are left out.
    """
    frames, notes = [], []
    empty = pl.DataFrame(schema=column_types(schema)).drop(without, strict=False)
    for run_id, path in paths:
        if not path.is_file():
            continue
        try:
            frame = read_table(path, schema, without)
        except DataError as error:
            notes.append(f"{path_to_text(path)} was left out: {error}")
            continue
        frames.append(frame.select(pl.lit(run_id).alias("run_id"), pl.all()))
    empty = empty.select(pl.lit("").alias("run_id"), pl.all()).clear()
    return Answer(pl.concat([empty, *frames]), tuple(notes))


# --- The state of a run and its tasks, also after their process has died

GONE = "stopped without a word"
NOT_ENDED = "not ended when this page was made"


def run_status(run: RunPaths) -> dict[str, Any]:
    """Return ``status.json``, updated from each task's own file.

    A run or task in state ``running`` whose lock nobody holds gets the state ``GONE``.
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
    """Return ``state`` for a page. In a runner's kernel ``running`` becomes ``NOT_ENDED``: the page is read later."""
    return NOT_ENDED if state == "running" and os.environ.get(ATTEMPT_VARIABLE) else state


def _says_running(status: object) -> bool:
    return isinstance(status, dict) and status.get("state") == "running"


def earlier_attempt(run: RunPaths, table: Path) -> str:
    """Return the attempt that wrote ``table`` if the stage, or the run after it, has not ended well since; else empty.

    A stage that ended well wrote its table. For others the file's time must lie between the stage's last start and
    end. In a copied folder it may not; the table then counts as an earlier attempt's.
    """
    status = run_status(run)
    key = next((stage.name for stage in STAGES if table in stage.outputs(run, None)), "")
    stage = status["stages"].get(key)
    if not isinstance(stage, dict) or not table.is_file():  # an interactive notebook's; moved aside just now
        return ""
    if stage.get("state") == "done" and status.get("state") in ("failed", "interrupted", "requeue", GONE):
        ended = time_text(as_text(stage.get("finished_utc")))
        return f"of attempt {stage.get('attempts')} of {key}, which ended {ended}"
    if stage.get("state") not in _UNFINISHED:
        return ""
    written = datetime.datetime.fromtimestamp(table.stat().st_mtime, datetime.UTC)
    began, ended_at = _moment(stage.get("started_utc")), _moment(stage.get("finished_utc"))
    second = datetime.timedelta(seconds=1)  # to which the status is rounded
    is_own = began is not None and began <= written and (ended_at is None or written <= ended_at + second)
    if stage["state"] != "pending" and is_own:
        return ""
    attempts = read_json_object(run.run_json).get("attempts")
    starts = [_moment(each.get("started_utc")) for each in attempts or () if isinstance(each, dict)]
    number = sum(start is not None and start <= written for start in starts)
    which = f"number {number}, " if number else ""
    return f"of an earlier attempt, {which}written {written:%Y-%m-%d %H:%M} UTC: {key} is {stage['state']}"


_UNFINISHED = frozenset({"failed", "interrupted", "pending", "running", "waiting", "requeue", GONE})


def _moment(utc: object) -> datetime.datetime | None:
    try:
        moment = datetime.datetime.fromisoformat(str(utc))
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)


def failure(status: dict[str, object]) -> str | None:
    """Return a sentence on the first stage that failed; None if none did."""
    stages = status.get("stages")
    for name, stage in stages.items() if isinstance(stages, dict) else ():
        if not isinstance(stage, dict) or stage.get("state") not in ("failed", "interrupted", GONE):
            continue
        error = stage.get("error")
        reason = f"{error.get('name')}: {error.get('message')}" if isinstance(error, dict) else stage.get("reason")
        return f"Stage {name} {stage['state']}: {reason or 'no reason recorded'}"
    return None


def started_from_name(run_id: str) -> str | None:
    """Return the local start time in a run's id; None if it is no such id."""
    try:
        started = datetime.datetime.strptime(run_id[4:19], "%Y%m%d_%H%M%S")  # local, as named
    except ValueError:
        return None
    return started.strftime("%Y-%m-%d %H:%M (local)")
