"""Read a run's folder: its tables, records and state, even if files are damaged, missing or not from this project."""

import datetime
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandera.polars as pa
import polars as pl

from fvc_lib.services.atomic_files import as_mapping, path_to_text, read_json_object
from fvc_lib.services.errors import DataError
from fvc_lib.services.run_paths import RunPaths, is_held
from fvc_lib.services.tables import column_types, read_table
from fvc_lib.services.tasks import STAGES


@dataclass(frozen=True)
class Answer:
    """The rows of a query, and notes on files and lines that could not be read."""

    frame: pl.DataFrame
    notes: tuple[str, ...] = ()


def as_list(value: object) -> list[Any]:
    """Return ``value`` if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def as_number(value: object) -> float | None:
    """Return ``value`` if it is a number, else None."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def read_tables(paths: Iterable[tuple[str, Path]], schema: pa.DataFrameSchema, without: Collection[str] = ()) -> Answer:
    """Return the rows of all tables in ``paths``, with the additional first column ``run_id``.

    Args:
        paths: pairs of a run id and a file. A missing file is skipped. A file that cannot be read or does not fit
            ``schema`` is skipped with a note.
        schema: schema of the tables.
        without: columns to leave out.
    """
    empty = pl.DataFrame(schema=column_types(schema)).drop(without, strict=False)
    frames, notes = [empty.select(pl.lit("").alias("run_id"), pl.all()).clear()], []
    for run_id, path in paths:
        if path.is_file():
            try:
                frames.append(read_table(path, schema, without).select(pl.lit(run_id).alias("run_id"), pl.all()))
            except DataError as error:
                notes.append(f"{path_to_text(path)} was left out: {error}")
    return Answer(pl.concat(frames), tuple(notes))


# --- The state of a run and its tasks, also after their process has died

GONE = "stopped without a word"


def run_status(run: RunPaths) -> dict[str, Any]:
    """Return the content of ``status.json``; its ``stages`` is always a dict, by key of the stage.

    A run or stage in state ``running`` whose lock no process holds gets the state ``GONE``.
    """
    status = read_json_object(run.status_json)
    stages = {key: stage for key, stage in as_mapping(status.get("stages")).items() if isinstance(stage, dict)}
    status["stages"] = stages
    if "running" in (status.get("state"), *(stage.get("state") for stage in stages.values())):
        whole = is_held(run.root / "run.lock")
        working = [key for key in stages if whole or is_held(run.task_lock(key))]
        for key, stage in stages.items():
            if stage.get("state") == "running" and key not in working:
                stages[key] = {**stage, "state": GONE}
        if status.get("state") == "running" and not whole and not working:
            status["state"] = GONE
    return status


def earlier_attempt(run: RunPaths, table: Path) -> str:
    """Return text on the attempt that wrote ``table`` if the table may be outdated; empty if it is up to date.

    The table of a stage that is done is outdated if the run has failed since. The table of any other stage is outdated
    if it is older than the stage's last start. In a copied folder file times may be wrong, and the table may count as
    outdated.
    """
    status = run_status(run)
    key = next((stage.name for stage in STAGES if table in stage.outputs(run, None)), "")
    stage = status["stages"].get(key, {})
    state = stage.get("state", "interactive")
    if not table.is_file() or state in ("interactive", "by hand"):
        return ""
    if state == "done":
        ended_badly = status.get("state") in ("failed", "interrupted", "requeue", GONE)
        return f"of attempt {stage.get('attempts')} of {key}; the run has failed since" if ended_badly else ""
    written = datetime.datetime.fromtimestamp(table.stat().st_mtime, datetime.UTC)
    if state != "pending" and str(stage.get("started_utc")) <= f"{written:%Y-%m-%dT%H:%M:%SZ}":
        return ""
    return f"of an earlier attempt, written {written:%Y-%m-%d %H:%M} UTC: {key} is {state}"


def failure(status: dict[str, Any]) -> str | None:
    """Return a sentence on the first stage of ``run_status`` that failed; None if none did."""
    for name, stage in status["stages"].items():
        if stage.get("state") in ("failed", "interrupted", GONE):
            error = as_mapping(stage.get("error"))
            reason = f"{error.get('name')}: {error.get('message')}" if error else stage.get("reason")
            return f"Stage {name} {stage['state']}: {reason or 'no reason recorded'}"
    return None
