"""What each finished fold's training says of itself, as rows: foreign, older and torn records included."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import polars as pl

from fvc_lib.analysis.records import Answer, entries, read_json_object, run_names
from fvc_lib.services.path_text import path_to_text
from fvc_lib.services.run_paths import RunPaths

_FOLD = re.compile(r"^fold_(0|[1-9]\d{0,8})$")

SCHEMA = pl.Schema(
    {
        "run_id": pl.String,
        "fold": pl.Int64,
        "trained": pl.String,
        "model": pl.String,
        "device": pl.String,
        "epochs": pl.Int64,
        "best_epoch": pl.Int64,
        "threshold": pl.Float64,
        "temperature": pl.Float64,
        "steps": pl.Int64,
        "nonfinite_steps": pl.Int64,
        "micro_batch": pl.Int64,
        "seconds": pl.Float64,
        "num_train_videos": pl.Int64,
        "num_validation_videos": pl.Int64,
        "num_test_videos": pl.Int64,
        "peak_rss_bytes": pl.Int64,
        "peak_device_bytes": pl.Int64,
    }
)
_OF_FOLD = (
    "model", "device", "num_train_videos", "num_validation_videos", "num_test_videos", "peak_rss_bytes",
    "peak_device_bytes",
)  # fmt: skip
_OF_TRAINING = ("best_epoch", "threshold", "temperature", "steps", "nonfinite_steps", "micro_batch", "seconds")
# Null there says something: no accelerator.
_MAY_BE_NULL = frozenset({"peak_device_bytes"})


def read_training(runs: Sequence[RunPaths]) -> Answer:
    """The finished folds of ``runs``; ``queries.training_summary`` tells the columns."""
    rows: list[dict[str, Any]] = []
    untold: dict[tuple[str, ...], list[int]] = {}
    for run, run_id in zip(runs, map(path_to_text, run_names(runs)), strict=True):
        for fold in _folds(run):
            path = run.fold_outcome(fold)
            if not path.is_file():
                continue
            found, wrong = _rows(read_json_object(path))
            rows += [{"run_id": run_id, "fold": fold, **row} for row in found]
            if wrong:
                untold.setdefault((run_id, *wrong), []).append(fold)
    notes = [
        f"{run_id}: outcome.json of fold {', '.join(map(str, folds))} does not tell {', '.join(wrong)}."
        for (run_id, *wrong), folds in untold.items()
    ]
    return Answer(pl.DataFrame(rows, schema=SCHEMA), tuple(notes))


def _folds(run: RunPaths) -> list[int]:
    return sorted(int(match[1]) for path in entries(run, "checkpoints") if (match := _FOLD.match(path.name)))


def _rows(outcome: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of one outcome, and the names of what it does not tell or tells in another type."""
    wrong: list[str] = []
    if not isinstance(outcome.get("training"), dict):
        return [], ["training"]
    of_fold = dict(_told(outcome, _OF_FOLD, wrong))
    rows = []
    for trained, key in (("model", "training"), ("control", "control")):
        training = outcome.get(key)
        if not isinstance(training, dict):
            if training is not None:
                wrong.append(key)
            continue
        history = training.get("history")
        epochs = len(history) if isinstance(history, list) else None
        if epochs is None:
            wrong.append(f"{key}.history")
        own = dict(_told(training, _OF_TRAINING, wrong, f"{key}."))
        rows.append({"trained": trained, "epochs": epochs, **of_fold, **own})
    return rows, wrong


def _told(
    record: Mapping[str, Any], names: Sequence[str], wrong: list[str], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Each name with its value where that is of the column's type, else with None and the name added to ``wrong``."""
    for name in names:
        value = record.get(name)
        if value is None and name in record and name in _MAY_BE_NULL:
            yield name, None
        elif _fits(value, SCHEMA[name]):
            yield name, value
        else:
            wrong.append(prefix + name)
            yield name, None


def _fits(value: Any, kind: pl.DataType) -> bool:
    if kind == pl.String:
        return isinstance(value, str)
    if isinstance(value, bool):
        return False
    if kind == pl.Int64:
        return isinstance(value, int) and abs(value) < 2**63
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**53)
