"""Predictions of several runs on the same folds as those of one detector.

First the runs that differ in their seed alone are averaged, then these detectors: the plain mean of their calibrated
scores, or log odds weighted as ``stacking`` found. For outer fold k every run gives what its network of fold k says,
which has seen no video of that fold's groups; neither have the weights of fold k.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from fvc_lib.metrics.calibration import probabilities
from fvc_lib.metrics.classification import FloatArray, roc_auc
from fvc_lib.metrics.cross_validation import within_folds
from fvc_lib.metrics.stacking import Stacking, mean_log_odds
from fvc_lib.services.errors import DataError
from fvc_lib.services.parameters import run_config
from fvc_lib.services.records.ensembles import FoldRule, Method
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import FOLDS, PREDICTIONS, PROTOCOL, check_table, read_table
from fvc_lib.services.tasks import KFOLD
from fvc_lib.tasks.recipe import TrainingOutcome, read_outcome
from fvc_lib.tasks.video.controls import fake_labels
from fvc_lib.tasks.video.results import check_predictions, made_samples, undecoded
from fvc_lib.tasks.video.selection import read_selection
from fvc_lib.tasks.video.summary import TrainingSummary


@dataclass(frozen=True)
class Member:
    """A finished run in an ensemble.

    Attributes:
        run: where it lies.
        predictions: PREDICTIONS of all folds by ``video_id``, the same videos for all members.
        detector: place of its detector; runs that differ in their seed alone share one.
    """

    run: RunPaths
    predictions: pl.DataFrame
    detector: int

    @property
    def log_odds(self) -> FloatArray:
        """float64 (N,): calibrated, those of its score."""
        return (self.predictions["logit"] / self.predictions["temperature"]).to_numpy()

    def outcome(self, fold: int) -> TrainingOutcome[TrainingSummary] | None:
        """Return the outcome of the training of ``fold``; None where it cannot be read."""
        return read_outcome(self.run.fold_outcome(fold), TrainingSummary)


def checked_member(run: RunPaths, predictions: pl.DataFrame, detector: int) -> Member:
    """Return a member after checking that it has one prediction for each video of its folds.

    Raises:
        LeakageError, DataError: as ``results.check_predictions``.
    """
    config, folds = run_config(run), read_table(run.folds, FOLDS)
    parts = None if config.protocol == KFOLD else read_table(run.protocol, PROTOCOL)
    left_out = undecoded(folds, made_samples(run, config), parts)
    try:
        check_predictions(folds, predictions, left_out=left_out)
    except DataError as error:
        raise type(error)(f"{run.run_id}: {error}") from error
    return Member(run, predictions, detector)


def of_detectors(log_odds: FloatArray, detectors: Sequence[int]) -> FloatArray:
    """(N, C) log odds of each detector's mean over its runs, from those of the runs (N, R); NaN is no answer."""
    places = np.asarray(detectors)
    return np.stack([mean_log_odds(log_odds[:, places == place]) for place in range(places.max() + 1)], axis=1)


def of_ensemble(log_odds: FloatArray, detectors: Sequence[int], rule: FoldRule, method: Method) -> FloatArray:
    """(N,) log odds of the ensemble from those of its runs (N, R), all by the networks of one fold."""
    each = of_detectors(log_odds, detectors)
    if method == "mean":
        return mean_log_odds(each)
    return Stacking(np.array(rule.weights), rule.intercept).log_odds(each)


def mean_rules(members: Sequence[Member]) -> list[FoldRule]:
    """Of each fold equal weights, and the mean of the thresholds that its runs chose on inner validation."""
    return [
        FoldRule(
            weights=[1 / num_detectors(members)] * num_detectors(members),
            intercept=0.0,
            threshold=mean_threshold(members, fold),
            base_rate=base_rate(members, fold),
            num_videos=0,
            num_groups=0,
        )
        for fold in folds_of(members)
    ]


def num_detectors(members: Sequence[Member]) -> int:
    """How many detectors there are."""
    return max(member.detector for member in members) + 1


def folds_of(members: Sequence[Member]) -> list[int]:
    """Return the outer folds, in order."""
    return sorted(members[0].predictions["fold"].unique().to_list())


def mean_threshold(members: Sequence[Member], fold: int) -> float:
    """Return the mean over detectors of the mean threshold over their runs."""
    chosen = [(m.detector, m.predictions.filter(fold=fold)["threshold"][0]) for m in members]
    table = pl.DataFrame(chosen, schema=["detector", "threshold"], orient="row").group_by("detector").mean()
    return min(1.0, math.fsum(table["threshold"]) / table.height)


def base_rate(members: Sequence[Member], fold: int) -> float | None:
    """Return the share of fakes at which the scores of ``fold`` are calibrated; None where members differ."""
    rates = set[float | None]()
    for recorded in (read_selection(member.run.fold_checkpoints(fold)) for member in members):
        chosen = recorded.selection if recorded else None
        known = chosen is not None and chosen.num_real > 0 and chosen.num_fake > 0
        rates.add(round(chosen.num_fake / chosen.num_videos, 12) if chosen and known else None)
    return rates.pop() if len(rates) == 1 else None


def combined(members: Sequence[Member], rules: Sequence[FoldRule], method: Method) -> pl.DataFrame:
    """PREDICTIONS of the ensemble, by ``video_id``; its log odds are its logits, at a temperature of 1.

    The shuffled-label control is the mean of the members' of those that were judged by the same shuffle; where there
    are several shuffles, that which scores highest. It is missing, as the control on two sources of reals is, where one
    member has none.
    """
    first, detectors = members[0].predictions, [member.detector for member in members]
    every = np.stack([member.log_odds for member in members], axis=1)
    found, threshold = np.empty(first.height), np.empty(first.height)
    for fold, rule in zip(folds_of(members), rules, strict=True):
        rows = (first["fold"] == fold).to_numpy()
        found[rows] = of_ensemble(every[rows], detectors, rule, method)
        threshold[rows] = rule.threshold
    table = first.with_columns(
        score=pl.Series(probabilities(found, 1.0)), threshold=pl.Series(threshold), logit=pl.Series(found),
        temperature=pl.lit(1.0), **_shuffled(members), **_of_sources(members),
    )  # fmt: skip
    return check_table(table.select(list(PREDICTIONS.columns)), PREDICTIONS, "the ensemble's predictions")


def _mean(members: Sequence[Member], column: str) -> pl.Series:
    """Return the mean over detectors of the mean over runs; null where one of them has none."""
    values = np.stack([m.predictions[column].cast(pl.Float64).fill_null(np.nan).to_numpy() for m in members])
    places = np.array([member.detector for member in members])
    means = np.stack([values[places == place].mean(0) for place in np.unique(places)]).mean(0)
    return pl.Series(column, means).fill_nan(None)


def _shuffled(members: Sequence[Member]) -> dict[str, pl.Series]:
    without = pl.col("control_score").is_null() | pl.col("control_label").is_null()
    lacking = np.any([m.predictions.select(without).to_series().to_numpy() for m in members], axis=0)
    by_labels: dict[tuple[str | None, ...], list[Member]] = {}
    for member in members:
        by_labels.setdefault(tuple(member.predictions["control_label"]), []).append(member)
    found = []
    for labels, alike in by_labels.items():
        table = members[0].predictions.with_columns(
            pl.Series("control_label", labels, pl.String), _mean(alike, "control_score")
        )
        judged = table.filter(pl.Series(~lacking)).with_columns(label="control_label")
        auc = -math.inf
        if judged.height:
            auc = within_folds(roc_auc, judged["fold"])(fake_labels(judged), judged["control_score"].to_numpy())
        found.append((-math.inf if math.isnan(auc) else auc, table))
    _, table = max(found, key=lambda each: each[0])
    kept = pl.when(pl.Series(~lacking))
    return {name: table.select(kept.then(name).alias(name))[name] for name in ("control_score", "control_label")}


def _of_sources(members: Sequence[Member]) -> dict[str, pl.Series]:
    label, score = members[0].predictions["source_label"], _mean(members, "source_score")
    alike = np.all([m.predictions["source_label"].eq_missing(label).to_numpy() for m in members], axis=0)
    kept = pl.when(pl.Series(alike) & score.is_not_null() & label.is_not_null())
    return {each.name: pl.select(kept.then(each).alias(each.name))[each.name] for each in (score, label)}
