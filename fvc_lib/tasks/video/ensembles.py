"""Combine several finished runs into an ensemble, and write its folder.

Runs that differ in their seed alone count as one detector, whose score is the mean of the runs' calibrated scores. The
score of the ensemble is the mean over its detectors. A test video of outer fold k is scored by every run's network of
fold k, which has seen no video of that fold's groups.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import polars as pl

from fvc_lib import __version__
from fvc_lib.metrics.calibration import probabilities
from fvc_lib.metrics.classification import FloatArray, roc_auc
from fvc_lib.metrics.cross_validation import within_folds
from fvc_lib.metrics.declaration import UNCALIBRATED
from fvc_lib.services.atomic_files import path_to_text, sha256_of_file, write_text
from fvc_lib.services.config import RunConfig
from fvc_lib.services.records.digests import write_document
from fvc_lib.services.records.ensembles import FORMAT, EnsembleRecord, FoldRule, MemberRecord
from fvc_lib.services.run_paths import ENSEMBLE_RECORD, RunPaths
from fvc_lib.services.tables import (
    FOLDS,
    INDEX,
    LEAKAGE_AUDIT,
    PREDICTIONS,
    PROTOCOL,
    RESULTS,
    check_table,
    frame_of,
    read_table,
    write_table,
)
from fvc_lib.services.tasks import KFOLD
from fvc_lib.tasks.shared_training import read_outcome
from fvc_lib.tasks.video.calibration import read_selection
from fvc_lib.tasks.video.controls import fake_labels
from fvc_lib.tasks.video.predicting import of_ensemble
from fvc_lib.tasks.video.results import kfold_results, made_samples, undecoded
from fvc_lib.tasks.video.summary import TrainingSummary

_OF_DATA = ("metadata_carriers", "official_split_leaks")  # audit checks on the data, which is the same for all members


@dataclass(frozen=True)
class Member:
    """A finished run in an ensemble.

    Attributes:
        run: the paths of the run.
        config: the run's parameters.
        predictions: PREDICTIONS of all folds, sorted by ``video_id``; all members have the same videos.
        detector: 0-based number of the detector that the run belongs to; runs that differ in their seed alone share it.
    """

    run: RunPaths
    config: RunConfig
    predictions: pl.DataFrame
    detector: int


# Predictions


def combined(members: Sequence[Member]) -> pl.DataFrame:
    """Return the table PREDICTIONS of the ensemble, sorted by ``video_id``.

    The logits are the ensemble's log odds of fake; the temperature is 1.

    The table also has the scores of two controls, averaged over members. The shuffled-label control is trained on
    shuffled labels. Only members with the same shuffled labels are averaged; if there are several shuffles, the one
    with the highest AUC is used. The real-source control is trained to name the source of a real video. A control's
    score is null if a member has none. The score of the real-source control is also null if members were trained on
    different sources.
    """
    first = members[0].predictions
    log_odds = _values(members, pl.col("logit") / pl.col("temperature"))
    logits = of_ensemble(log_odds, [member.detector for member in members])
    threshold = np.minimum(1.0, _mean_over_runs(members, "threshold"))
    source = [member.predictions["source_label"] for member in members]
    same_source = pl.all_horizontal(label.eq_missing(source[0]) for label in source)
    by_source = pl.Series(_mean_over_runs(members, "source_score")).fill_nan(None)
    has_source = by_source.is_not_null() & source[0].is_not_null() & first.select(same_source).to_series()
    control = _control(members)
    table = first.with_columns(
        score=pl.Series(probabilities(logits, 1.0)),
        threshold=pl.Series(threshold),
        logit=pl.Series(logits),
        temperature=pl.lit(1.0),
        control_score=control["score"],
        control_label=pl.when(control["score"].is_not_null()).then(control["label"]),
        source_score=pl.when(has_source).then(by_source),
        source_label=pl.when(has_source).then(source[0]),
    )
    return check_table(table.select(list(PREDICTIONS.columns)), PREDICTIONS, "the ensemble's predictions")


def _control(members: Sequence[Member]) -> pl.DataFrame:
    """Return the mean scores of the shuffled-label control, for the one shuffle of the labels with the highest AUC.

    The columns are ``fold label score``, with one row per video in the order of the members' predictions. A score is
    null where a member has none.
    """
    alike: dict[tuple[str | None, ...], list[Member]] = {}
    for member in members:
        alike.setdefault(tuple(member.predictions["control_label"]), []).append(member)
    is_everywhere = np.isfinite(_values(members, pl.col("control_score"))).all(1)
    found = list[tuple[float, pl.DataFrame]]()
    for labels, same in alike.items():
        scores = np.where(is_everywhere, _mean_over_runs(same, "control_score"), np.nan)
        columns = {"label": pl.Series(labels, dtype=pl.String), "score": pl.Series(scores)}
        control = same[0].predictions.select("fold", **columns).fill_nan(None)
        judged, auc = control.drop_nulls(), -1.0
        if judged.height:
            auc = float(within_folds(roc_auc, judged["fold"])(fake_labels(judged), judged["score"].to_numpy()))
        found.append((-1.0 if math.isnan(auc) else auc, control))
    return max(found, key=itemgetter(0))[1]


def _values(members: Sequence[Member], column: pl.Expr) -> FloatArray:
    """Return a column of the predictions of R members, float64 (N, R) for N videos; NaN where it is null."""
    columns = [member.predictions.select(column.cast(pl.Float64).fill_null(np.nan)) for member in members]
    return np.hstack([values.to_numpy() for values in columns])


def _mean_over_runs(members: Sequence[Member], column: str) -> FloatArray:
    """Return the mean of ``column`` over each detector's runs and then over detectors, float64 (N,).

    N is the number of videos. An element is NaN if a member has no value.
    """
    values, places = _values(members, pl.col(column)), np.array([member.detector for member in members])
    return np.asarray(np.stack([values[:, places == place].mean(1) for place in np.unique(places)]).mean(0))


# The folder


def write_ensemble(
    folder: RunPaths,
    members: Sequence[Member],
    names: Sequence[str],
    predictions: pl.DataFrame,
    config: RunConfig,
) -> tuple[pl.DataFrame, pl.DataFrame, EnsembleRecord]:
    """Write the ensemble's folder: the tables that a run has, an audit of the members, and finally the record.

    The threshold of a fold is the mean of the thresholds that the runs chose. An earlier record is deleted first, so a
    folder with a record is complete.

    Args:
        folder: the paths of the ensemble.
        members: the runs.
        names: the names of the detectors.
        predictions: PREDICTIONS of the ensemble (``combined``).
        config: the parameters of the first member, but with the ensemble's replicates, seed and confidence of
            intervals.

    Returns:
        ``(results, audit, record)``: the tables RESULTS and LEAKAGE_AUDIT, and the record.

    Raises:
        LeakageError, DataError: the predictions do not fit the folds (``results.check_predictions``).
    """
    (folder.root / ENSEMBLE_RECORD).unlink(missing_ok=True)
    first = members[0]
    index = read_table(first.run.index, INDEX)
    all_folds = read_table(first.run.folds, FOLDS)
    parts = None if config.protocol == KFOLD else read_table(first.run.protocol, PROTOCOL)
    made = made_samples(first.run.augmented_metadata, first.run.features, config)
    left_out = undecoded(all_folds, made, parts)
    write_table(index, INDEX, folder.index)
    write_table(all_folds, FOLDS, folder.folds)
    if parts is not None:
        write_table(parts, PROTOCOL, folder.protocol)
    rules = list[FoldRule]()
    for fold in predictions["fold"].unique().sort():
        table = predictions.filter(fold=fold)
        write_table(table, PREDICTIONS, folder.predictions(fold))
        recorded = [read_selection(member.run.fold_checkpoints(fold)) for member in members]
        rates = {record.selection.base_rate if record else None for record in recorded}
        rules.append(FoldRule(threshold=table["threshold"][0], base_rate=rates.pop() if len(rates) == 1 else None))
    write_text(folder.params_yaml, config.to_yaml())
    results = kfold_results(index, all_folds, predictions, config, left_out=left_out, protocol=parts)
    results = results.filter(~pl.col("metric").str.ends_with(UNCALIBRATED))  # an ensemble has no temperature
    write_table(results, RESULTS, folder.results)
    audit = _audit(members)
    write_table(audit, LEAKAGE_AUDIT, folder.leakage_audit)
    files = [folder.params_yaml, folder.results, *sorted(folder.tables.glob("*.parquet"))]
    record = EnsembleRecord(
        format=FORMAT,
        name=path_to_text(folder.run_id),
        method="mean",
        made_with={"fvc": __version__},
        detectors=list(names),
        members=[_member_record(member, folder, range(len(rules))) for member in members],
        folds=rules,
        files={str(path.relative_to(folder.root)): sha256_of_file(path) for path in files},
    )
    write_document(folder.root / ENSEMBLE_RECORD, record.model_dump(mode="json"))
    return results, audit, record


def _member_record(member: Member, folder: RunPaths, folds: Sequence[int]) -> MemberRecord:
    run, config = member.run, member.config
    outcomes = [read_outcome(run.fold_outcome(fold), TrainingSummary) for fold in folds]
    return MemberRecord(
        run_id=path_to_text(run.run_id),
        path=path_to_text(os.path.relpath(run.root, folder.root)),
        detector=member.detector,
        model=config.identity("model"),
        seed=config.seed,
        weights=[outcome.training.best_weights if outcome else "" for outcome in outcomes],
    )


def _audit(members: Sequence[Member]) -> pl.DataFrame:
    """Return the ensemble's table LEAKAGE_AUDIT.

    It has one row per member, with the number of passed checks of the member's own audit. The checks of the data follow
    the first of these rows. They are listed once, because all members have the same data.
    """
    rows = list[tuple[object, ...]]()
    for number, member in enumerate(members):
        audit = read_table(member.run.leakage_audit, LEAKAGE_AUDIT)
        judged = audit["passed"].drop_nulls()
        passed = f"{member.run.run_id}: {judged.sum()} of {len(judged)} checks of its own audit passed."
        rows.append(("member_audit", len(judged), None, passed, judged.all()))
        if number == 0:
            rows += audit.filter(pl.col("check").is_in(_OF_DATA)).rows()
    return check_table(frame_of(rows, LEAKAGE_AUDIT), LEAKAGE_AUDIT, "the ensemble's audit")
