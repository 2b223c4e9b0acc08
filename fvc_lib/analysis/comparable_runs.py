"""Which runs may be compared: trained to the end, on true labels, without a leak, judged on the very same videos."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from fvc_lib.analysis import records
from fvc_lib.analysis.headline import run_parameters, run_task
from fvc_lib.analysis.run_cautions import audit_failures
from fvc_lib.analysis.run_state import run_status
from fvc_lib.analysis.wording import clean_text, count_text
from fvc_lib.services.errors import DataError
from fvc_lib.services.path_text import path_to_text
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import FOLDS, PREDICTIONS, read_table

_TRAINING = "04_fold_training"
_DATA = ("video_id", "group_id", "label", "fold")
_ASPECTS = (("label", "another label"), ("group_id", "another group"), ("fold", "another fold"))


@dataclass(frozen=True)
class JudgedRun:
    """A run with all it predicted: ``tables.PREDICTIONS`` of all folds, ordered by ``video_id``."""

    name: str
    predictions: pl.DataFrame

    @property
    def data(self) -> pl.DataFrame:
        """What it was judged on: ``video_id group_id label fold``."""
        return self.predictions.select(_DATA)


@dataclass(frozen=True)
class Refusal:
    """Runs that are not compared, and why and what to do, in words."""

    runs: tuple[str, ...]
    reason: str


def run_names(runs: Sequence[RunPaths]) -> list[str]:
    """How each run is called in a comparison, on one line; of like ids with what tells them apart."""
    return [clean_text(path_to_text(name)) for name in records.run_names(runs)]


def read_judged_run(run: RunPaths, name: str) -> JudgedRun | Refusal:
    """What ``run`` predicted in all folds, or why that may not be compared. Reads only, and never raises."""
    asked = run_parameters(run)
    if run_task(asked) != "video":
        return Refusal((name,), f"{name}: {_of_another_task(run_task(asked))}")
    unfinished = _unfinished_training(run)
    if unfinished:
        return Refusal((name,), f"{name}: {unfinished}")
    if asked.get("shuffle_labels") is True:
        reason = "its labels were shuffled on purpose (shuffle_labels), so its numbers are of no task"
        return Refusal((name,), f"{name}: {reason}. Compare runs on true labels.")
    if leaks := audit_failures(run):
        reason = f"its leakage audit did not pass, so its numbers show nothing: {clean_text(leaks[0])}"
        return Refusal((name,), f"{name}: {reason} Mend what it names, and run it again.")
    try:
        folds = read_table(run.folds, FOLDS)
        numbers = sorted(folds["fold"].unique().to_list())
        missing = [str(fold) for fold in numbers if not run.predictions(fold).is_file()]
        if missing:
            which = f"fold{'s' * (len(missing) > 1)} {', '.join(missing)} of {len(numbers)}"
            return Refusal((name,), f"{name}: there are no predictions of {which}. {_go_on(run)}")
        parts = [read_table(run.predictions(fold), PREDICTIONS) for fold in numbers]
    except DataError as error:
        return Refusal((name,), f"{name}: {clean_text(error)}")
    if not any(part.height for part in parts):
        return Refusal((name,), f"{name}: its tables of predictions are empty. {_go_on(run)}")
    predictions = pl.concat(parts).sort("video_id")
    strange = predictions.join(folds, on=list(_DATA), how="anti")
    if strange.height or predictions["video_id"].is_duplicated().any():
        given = strange["video_id"] if strange.height else predictions["video_id"]
        what = f"{strange.height} of its predictions do not fit its own folds{_example(given)}"
        if not strange.height:
            what = "videos are predicted more than once"
        return Refusal((name,), f"{name}: {what}. Run {_TRAINING} again.")
    return JudgedRun(name, predictions)


def difference_of_data(first: JudgedRun, second: JudgedRun) -> str | None:
    """In words what the two runs were judged on that is not the same, with counts and examples; None: nothing."""
    one, other = first.data, second.data
    if one.equals(other):
        return None
    found = []
    for run, own, others in ((first, one, other), (second, other, one)):
        only = own.join(others, on="video_id", how="anti")["video_id"]
        if only.len():
            found.append(f"{only.len():,} of {count_text(own.height, 'video')} only in {run.name}{_example(only)}")
    both = one.join(other, on="video_id", suffix="_other")
    for column, what in _ASPECTS:
        changed = both.filter(pl.col(column) != pl.col(f"{column}_other"))["video_id"]
        if changed.len():
            found.append(f"{count_text(changed.len(), 'video')} with {what}{_example(changed)}")
    return "; ".join(found)


def alike(runs: Sequence[JudgedRun]) -> tuple[list[list[JudgedRun]], list[Refusal]]:
    """Runs judged on the same data together, in the order given, and for each further set of data a refusal."""
    sets: list[list[JudgedRun]] = []
    for run in runs:
        fitting = next((together for together in sets if together[0].data.equals(run.data)), None)
        if fitting is None:
            sets.append([run])
        else:
            fitting.append(run)
    return sets, [_refusal_between(sets[0], other) for other in sets[1:]]


def _refusal_between(ones: Sequence[JudgedRun], others: Sequence[JudgedRun]) -> Refusal:
    first, second = ones[0], others[0]
    names = [", ".join(run.name for run in together) for together in (ones, others)]
    reason = (
        f"{names[1]} and {names[0]} were not judged on the same videos and folds: {difference_of_data(first, second)}. "
        "A difference between them would say nothing about the models. A fork keeps videos and folds and changes "
        f"what is asked: run_notebooks.py --resume {first.name} --fork -p NAME VALUE"
    )
    return Refusal(tuple(run.name for run in (*ones, *others)), reason)


def _of_another_task(task: str) -> str:
    return (
        f"its task is {task}, and runs are compared pair by pair on the outer folds of task video alone. Its own "
        "number and its controls stand in its report and in the list of all runs."
    )


def _unfinished_training(run: RunPaths) -> str:
    stages = run_status(run)["stages"]
    states = {key: stage.get("state") for key, stage in stages.items() if isinstance(stage, dict)}
    unfinished = {key: state for key, state in states.items() if key.startswith(_TRAINING) and state != "done"}
    running = [key for key, state in unfinished.items() if state == "running"]
    if running:
        return f"it is being trained ({clean_text(running[0])}). Compare it when its training has ended."
    if unfinished:
        key, state = next(iter(unfinished.items()))
        return f"its training has not ended ({clean_text(key)}: {clean_text(state)}). {_go_on(run)}"
    return ""


def _go_on(run: RunPaths) -> str:
    return f"Go on with it: run_notebooks.py --resume {clean_text(path_to_text(run.run_id))}"


def _example(video_ids: pl.Series) -> str:
    return f" (for example {clean_text(video_ids.min())!r})" if video_ids.len() else ""
