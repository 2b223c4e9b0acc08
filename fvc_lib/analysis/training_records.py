"""What each finished training says of itself, with or without folds, as rows: foreign and torn records included."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from fvc_lib.analysis.records import Answer, entries, read_json_object, run_names
from fvc_lib.services.path_text import path_to_text
from fvc_lib.services.run_paths import RunPaths

_FOLD = re.compile(r"^fold_(0|[1-9]\d{0,8})$")

SCHEMA = pl.Schema(
    {
        "run_id": pl.String,
        "stage": pl.String,
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
        "num_train_samples": pl.Int64,
        "num_validation_samples": pl.Int64,
        "num_test_samples": pl.Int64,
        "peak_rss_bytes": pl.Int64,
        "peak_device_bytes": pl.Int64,
    }
)
# Names in a record, and the columns they fill.
_OF_BOTH = {name: name for name in ("model", "device", "peak_rss_bytes", "peak_device_bytes")}
_OF_FOLD = _OF_BOTH | {f"num_{part}_videos": f"num_{part}_samples" for part in ("train", "validation", "test")}
_OF_STAGE = _OF_BOTH | {f"num_{part}": f"num_{part}_samples" for part in ("train", "validation", "test")}
_OF_TRAINING = {
    name: name
    for name in ("best_epoch", "threshold", "temperature", "steps", "nonfinite_steps", "micro_batch", "seconds")
}
# Chosen where videos are told real from fake alone.
_OF_TRAINING_OF_STAGE = {name: name for name in _OF_TRAINING if name not in ("threshold", "temperature")}
# Null there says something: no accelerator.
_MAY_BE_NULL = frozenset({"peak_device_bytes"})
_FOLD_STAGE = "04_fold_training"


def read_training(runs: Sequence[RunPaths]) -> Answer:
    """The finished trainings of ``runs``; ``queries.training_summary`` tells the columns."""
    rows: list[dict[str, Any]] = []
    untold: dict[tuple[str, str, tuple[str, ...]], list[int]] = {}
    for run, run_id in zip(runs, map(path_to_text, run_names(runs)), strict=True):
        for path, stage, fold in _trainings(run):
            found, wrong = _rows(read_json_object(path), of_fold=fold is not None)
            rows += [{"run_id": run_id, "stage": stage, "fold": fold, **row} for row in found]
            if wrong:
                of_which = untold.setdefault((run_id, stage, tuple(wrong)), [])
                of_which += [] if fold is None else [fold]
    notes = [
        f"{run_id}: outcome.json of {_of_which(stage, folds)} does not tell {', '.join(wrong)}."
        for (run_id, stage, wrong), folds in untold.items()
    ]
    return Answer(pl.DataFrame(rows, schema=SCHEMA), tuple(notes))


def _of_which(stage: str, folds: Sequence[int]) -> str:
    return f"fold {', '.join(map(str, folds))}" if folds else stage


def _trainings(run: RunPaths) -> list[tuple[Path, str, int | None]]:
    """Record, stage and fold of each finished training, folds in order; without a fold, the stage has none."""
    names = [folder.name for folder in entries(run, "checkpoints")]
    folds = sorted(int(match[1]) for name in names if (match := _FOLD.match(name)))
    found: list[tuple[Path, str, int | None]] = [(run.fold_outcome(fold), _FOLD_STAGE, fold) for fold in folds]
    found += [(run.stage_outcome(name), path_to_text(name), None) for name in names if not _FOLD.match(name)]
    return [each for each in found if each[0].is_file()]


def _rows(outcome: Mapping[str, Any], *, of_fold: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of one outcome, and the names of what it does not tell or tells in another type."""
    wrong: list[str] = []
    if not isinstance(outcome.get("training"), dict):
        return [], ["training"]
    of_both = dict(_told(outcome, _OF_FOLD if of_fold else _OF_STAGE, wrong))
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
        own = dict(_told(training, _OF_TRAINING if of_fold else _OF_TRAINING_OF_STAGE, wrong, f"{key}."))
        rows.append({"trained": trained, "epochs": epochs, **of_both, **own})
    return rows, wrong


def _told(
    record: Mapping[str, Any], columns: Mapping[str, str], wrong: list[str], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Each column with its value where that is of its type, else with None and the record's name added to ``wrong``."""
    for name, column in columns.items():
        value = record.get(name)
        if value is None and name in record and name in _MAY_BE_NULL:
            yield column, None
        elif _fits(value, SCHEMA[column]):
            yield column, value
        else:
            wrong.append(prefix + name)
            yield column, None


def _fits(value: Any, kind: pl.DataType) -> bool:
    if kind == pl.String:
        return isinstance(value, str)
    if isinstance(value, bool):
        return False
    if kind == pl.Int64:
        return isinstance(value, int) and abs(value) < 2**63
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**53)
