"""Combine several finished runs into one detector, an ensemble, and write its folder.

Runs that differ in their seed alone form one detector, the mean of their calibrated scores. The detectors are then
combined by the mean of their calibrated scores, or by a weighted sum of their log odds (stacking). For outer fold k
every run answers with its network of fold k, which has seen no video of that fold's groups. The weights of fold k were
not fitted on these groups either.

Plain stacking fits the weights for fold k on the out-of-fold predictions of the other folds. That leaks: the networks
that made those had been trained on fold k's videos. Here the weights for fold k are fitted on the answers of the
networks *of* fold k to their inner validation videos. These videos trained no network of fold k, and fold k tests none
of their groups. But the videos are few, and they chose epoch, temperature and threshold of the same networks. So a
network looks a little better on them than it is, most so the network with the most epochs or settings to choose from.
Both effects can make the weights worse, and so lower the ensemble's measured result. They cannot raise it.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import get_args

import numpy as np
import polars as pl

from fvc_lib import __version__
from fvc_lib.metrics.calibration import probabilities
from fvc_lib.metrics.classification import FloatArray, roc_auc
from fvc_lib.metrics.combination import Stacking, fit_stacking, mean_log_odds
from fvc_lib.metrics.cross_validation import within_folds
from fvc_lib.metrics.declaration import UNCALIBRATED
from fvc_lib.metrics.intervals import one_vote_per_group
from fvc_lib.metrics.operating_points import operating_point, threshold_at
from fvc_lib.services.atomic_files import path_to_text, sha256_of_file, write_text
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, LeakageError, UsageError
from fvc_lib.services.parameters import run_config
from fvc_lib.services.records.digests import write_document
from fvc_lib.services.records.ensembles import FORMAT, RECORD, EnsembleRecord, FoldRule, MemberRecord, Method
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import (
    FOLDS,
    INDEX,
    LEAKAGE_AUDIT,
    PREDICTIONS,
    PROTOCOL,
    RESULTS,
    VALIDATION_PREDICTIONS,
    check_table,
    frame_of,
    read_table,
    write_table,
)
from fvc_lib.services.tasks import KFOLD
from fvc_lib.tasks.recipe import read_outcome
from fvc_lib.tasks.video.controls import fake_labels
from fvc_lib.tasks.video.results import check_predictions, kfold_results, made_samples, undecoded
from fvc_lib.tasks.video.selection import read_selection
from fvc_lib.tasks.video.summary import TrainingSummary

_OF_DATA = ("metadata_carriers", "official_split_leaks")  # audit checks on the data, which is the same for all members
_KEY = ["video_id", "group_id", "label"]


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


def checked_member(run: RunPaths, predictions: pl.DataFrame, detector: int) -> Member:
    """Return ``run`` as a member, after checking that each video of its folds has exactly one prediction.

    Raises:
        LeakageError, DataError: as ``results.check_predictions``.
    """
    config = run_config(run)
    try:
        check_predictions(read_table(run.folds, FOLDS), predictions, left_out=_left_out(run, config))
    except DataError as error:
        raise type(error)(f"{run.run_id}: {error}") from error
    return Member(run, config, predictions, detector)


def _left_out(run: RunPaths, config: RunConfig) -> list[str]:
    parts = None if config.protocol == KFOLD else read_table(run.protocol, PROTOCOL)
    return undecoded(read_table(run.folds, FOLDS), made_samples(run, config), parts)


def of_detectors(log_odds: FloatArray, detectors: Sequence[int]) -> FloatArray:
    """Average the probabilities of fake over the runs of each detector, and return them as log odds.

    Args:
        log_odds: float64 (N, R), of N videos by R runs; NaN is missing.
        detectors: R numbers from 0 to C - 1, the detector of each run.

    Returns:
        float64 (N, C), by detector.
    """
    places = np.asarray(detectors)
    return np.stack([mean_log_odds(log_odds[:, places == place]) for place in range(places.max() + 1)], axis=1)


def of_ensemble(log_odds: FloatArray, detectors: Sequence[int], rule: FoldRule, method: Method) -> FloatArray:
    """Return the ensemble's log odds (N,) from those of N videos by R runs' networks of one fold, (N, R)."""
    each = of_detectors(log_odds, detectors)
    if method == "mean":
        return mean_log_odds(each)
    return Stacking(np.array(rule.weights), rule.intercept).log_odds(each)


# Rules


def rules_of(members: Sequence[Member], method: Method) -> list[FoldRule]:
    """Return the weights of the detectors and the threshold in each fold, in the order of folds.

    ``mean`` gives equal weights, and the mean of the thresholds that the runs chose on inner validation. ``stacking``
    fits weights on inner validation videos alone.

    Raises:
        UsageError: another method.
        LeakageError: predictions of videos that a network was trained on, or that its fold tests.
        DataError: predictions are missing, or detectors have no inner validation video in common in any fold.
    """
    if method not in get_args(Method):
        raise UsageError(f"method: got {method!r}, wanted {' or '.join(get_args(Method))}.")
    detectors, rules = [member.detector for member in members], []
    number = max(detectors) + 1
    for fold in sorted(members[0].predictions["fold"].unique()):
        chosen = [member.predictions.filter(fold=fold)["threshold"][0] for member in members]
        means = pl.DataFrame({"detector": detectors, "threshold": chosen}).group_by("detector").mean()["threshold"]
        rule = FoldRule(
            weights=[1 / number] * number, intercept=0.0, threshold=min(1.0, math.fsum(means) / number),
            base_rate=_base_rate(members, fold), num_videos=0, num_groups=0,
        )  # fmt: skip
        rules.append(_stacked(members, fold, rule) if method == "stacking" else rule)
    if method == "stacking" and not any(rule.num_videos for rule in rules):
        raise DataError(
            "the detectors have no inner validation video in common in any fold, so no weights can be fitted: "
            "they have other seeds, or other inner_validation_share. Take --method mean."
        )
    return rules


def _base_rate(members: Sequence[Member], fold: int) -> float | None:
    """Return the share of fakes at which the scores of ``fold`` are calibrated; None if members differ or lack it."""
    rates = set[float | None]()
    for recorded in (read_selection(member.run.fold_checkpoints(fold)) for member in members):
        chosen = recorded.selection if recorded else None
        known = chosen is not None and chosen.num_real > 0 and chosen.num_fake > 0
        rates.add(round(chosen.num_fake / chosen.num_videos, 12) if chosen and known else None)
    return rates.pop() if len(rates) == 1 else None


def _stacked(members: Sequence[Member], fold: int, rule: FoldRule) -> FoldRule:
    """Return ``rule`` with weights fitted on the inner validation videos of ``fold``; every group has one vote.

    Runs may have different inner validation videos. A detector's score of a video is the mean over those of its runs
    that have the video. Only videos with a score of every detector are used.
    """
    tables = [
        inner_predictions(member, fold).select(*_KEY, (pl.col("logit") / pl.col("temperature")).alias(str(number)))
        for number, member in enumerate(members)
    ]
    table = reduce(lambda one, other: one.join(other, on=_KEY, how="full", coalesce=True), tables).sort("video_id")
    log_odds = of_detectors(table.drop(_KEY).fill_null(np.nan).to_numpy(), [member.detector for member in members])
    there = np.isfinite(log_odds).all(1)
    log_odds, table = log_odds[there], table.filter(pl.Series(there))
    labels, groups, threshold = fake_labels(table), table["group_id"].to_list(), rule.threshold
    fitted = fit_stacking(labels, log_odds, one_vote_per_group(groups))
    if len(set(labels.tolist())) == 2:
        scores = probabilities(fitted.log_odds(log_odds), 1.0)
        threshold = min(1.0, threshold_at(operating_point(members[0].config.operating_point), labels, scores))
    fields = {"weights": fitted.weights.tolist(), "intercept": fitted.intercept, "threshold": threshold}
    return rule.model_copy(update={**fields, "num_videos": table.height, "num_groups": len(set(groups))})


def inner_predictions(member: Member, fold: int) -> pl.DataFrame:
    """Return the predictions (VALIDATION_PREDICTIONS) of a member's fold network for its inner validation videos.

    Groups that an official split has in several parts are left out.

    Raises:
        LeakageError: a video's group is in the training or test part of the fold.
        DataError: the table is missing or damaged.
    """
    from fvc_lib.tasks.video.data import rows_to_train_on  # brings torch

    run, config = member.run, member.config
    table = read_table(run.folds, FOLDS) if config.protocol == KFOLD else read_table(run.protocol, PROTOCOL)
    rows, made = rows_to_train_on(table, config, fold), made_samples(run, config)["video_id"]
    split = rows.split(
        fold, inner_validation_share=config.inner_validation_share, seed=config.seed,
        without=set(rows.folds["video_id"]) - set(made),
    )  # fmt: skip
    inner = read_table(run.validation_predictions(fold), VALIDATION_PREDICTIONS)
    inner = inner.filter(~pl.col("group_id").is_in(sorted(split.leaking)))
    for part, what in ((split.train, "was trained on"), (split.test, "tests")):
        shared = inner.join(part, on="group_id", how="semi")
        if shared.height:
            raise LeakageError(
                f"{run.run_id}: the predictions that weights for fold {fold} would be fitted on have {shared.height} "
                f"videos of groups that the fold {what}, for example {shared['video_id'].min()!r}. Weights fitted on "
                "them would believe what that network remembers."
            )
    return inner


# Predictions


def combined(members: Sequence[Member], rules: Sequence[FoldRule], method: Method) -> pl.DataFrame:
    """Return PREDICTIONS of the ensemble, sorted by ``video_id``; the logits are its log odds, at a temperature of 1.

    The table also has the scores of two controls, which are averaged over members. For the shuffled-label control
    (trained on shuffled labels), members with the same shuffled labels are averaged; of several shuffles the one with
    the highest AUC is taken. A control's score is null where a member has none. The score of the real-source control
    (trained to name the source of a real video) is also null where members were trained on different sources.
    """
    first, detectors = members[0].predictions, [member.detector for member in members]
    log_odds = np.stack(
        [(each.predictions["logit"] / each.predictions["temperature"]).to_numpy() for each in members], 1
    )
    logits, threshold = np.empty(first.height), np.empty(first.height)
    for fold, rule in zip(sorted(first["fold"].unique()), rules, strict=True):
        rows = (first["fold"] == fold).to_numpy()
        logits[rows] = of_ensemble(log_odds[rows], detectors, rule, method)
        threshold[rows] = rule.threshold
    has_control, same_sources = pl.Series(np.ones(first.height, bool)), pl.Series(np.ones(first.height, bool))
    shuffles: dict[tuple[str | None, ...], list[Member]] = {}
    for member in members:
        table = member.predictions
        has_control &= table["control_score"].is_not_null() & table["control_label"].is_not_null()
        same_sources &= table["source_label"].eq_missing(first["source_label"])
        shuffles.setdefault(tuple(table["control_label"]), []).append(member)
    controls: list[tuple[float, pl.DataFrame]] = []
    for labels, alike in shuffles.items():
        shuffled = pl.Series(labels, dtype=pl.String)
        control = first.select("fold", label=shuffled, control_score=_mean(alike, "control_score"))
        judged, auc = control.filter(has_control), math.nan
        if judged.height:
            auc = within_folds(roc_auc, judged["fold"])(fake_labels(judged), judged["control_score"].to_numpy())
        controls.append((-math.inf if math.isnan(auc) else auc, control))
    _, control = max(controls, key=lambda pair: pair[0])
    source_label, source_score = first["source_label"], _mean(members, "source_score")
    has_source = same_sources & source_label.is_not_null() & source_score.is_not_null()
    table = first.with_columns(
        score=pl.Series(probabilities(logits, 1.0)), threshold=pl.Series(threshold), logit=pl.Series(logits),
        temperature=pl.lit(1.0), control_score=pl.when(has_control).then(control["control_score"]),
        control_label=pl.when(has_control).then(control["label"]),
        source_score=pl.when(has_source).then(source_score), source_label=pl.when(has_source).then(source_label),
    )  # fmt: skip
    return check_table(table.select(list(PREDICTIONS.columns)), PREDICTIONS, "the ensemble's predictions")


def _mean(members: Sequence[Member], column: str) -> pl.Series:
    """Return the mean of ``column`` over each detector's runs, then over detectors; null if a member has no value."""
    values = np.stack([m.predictions[column].cast(pl.Float64).fill_null(np.nan).to_numpy() for m in members])
    places = np.array([member.detector for member in members])
    means = np.stack([values[places == place].mean(0) for place in np.unique(places)]).mean(0)
    return pl.Series(column, means).fill_nan(None)


# The folder


def write_ensemble(
    folder: RunPaths,
    members: Sequence[Member],
    names: Sequence[str],
    rules: Sequence[FoldRule],
    method: Method,
    predictions: pl.DataFrame,
    config: RunConfig,
) -> tuple[pl.DataFrame, pl.DataFrame, EnsembleRecord]:
    """Write the ensemble's folder: the tables that a run has, an audit of the members, and at last the record.

    An earlier record is deleted first, so a folder with a record is complete.

    Args:
        folder: the paths of the ensemble.
        members: the runs.
        names: the names of the detectors.
        rules: the weights and threshold of each fold (``rules_of``).
        method: how the detectors are combined.
        predictions: PREDICTIONS of the ensemble (``combined``).
        config: the parameters of the first member, with the ensemble's settings of intervals.

    Returns:
        RESULTS, LEAKAGE_AUDIT and the record.
    """  # fmt: skip
    folder.tables.mkdir(parents=True, exist_ok=True)
    (folder.root / RECORD).unlink(missing_ok=True)
    first, folds = members[0].run, sorted(predictions["fold"].unique())
    index, all_folds = read_table(first.index, INDEX), read_table(first.folds, FOLDS)
    parts = read_table(first.protocol, PROTOCOL) if first.protocol.is_file() else None
    write_table(index, INDEX, folder.index)
    write_table(all_folds, FOLDS, folder.folds)
    if parts is not None:
        write_table(parts, PROTOCOL, folder.protocol)
    for fold in folds:
        write_table(predictions.filter(fold=fold), PREDICTIONS, folder.predictions(fold))
    write_text(folder.params_yaml, config.to_yaml())
    results = kfold_results(
        index, all_folds, predictions, config, left_out=_left_out(first, members[0].config),
        protocol=None if config.protocol == KFOLD else parts,
    )  # fmt: skip
    results = results.filter(~pl.col("metric").str.ends_with(UNCALIBRATED))  # an ensemble has no temperature
    write_table(results, RESULTS, folder.results)
    audit = _audit(members, rules, method)
    write_table(audit, LEAKAGE_AUDIT, folder.leakage_audit)
    files = [folder.params_yaml, folder.results, *sorted(folder.tables.glob("*.parquet"))]
    record = EnsembleRecord(
        format=FORMAT,
        name=path_to_text(folder.run_id),
        method=method,
        made_with={"fvc": __version__},
        detectors=list(names),
        members=[_member_record(member, folder, folds) for member in members],
        folds=list(rules),
        files={str(path.relative_to(folder.root)): sha256_of_file(path) for path in files if path.is_file()},
    )
    write_document(folder.root / RECORD, record.model_dump(mode="json"))
    return results, audit, record


def _member_record(member: Member, folder: RunPaths, folds: Sequence[int]) -> MemberRecord:
    outcomes = [read_outcome(member.run.fold_outcome(fold), TrainingSummary) for fold in folds]
    return MemberRecord(
        run_id=path_to_text(member.run.run_id),
        path=path_to_text(os.path.relpath(member.run.root, folder.root)),
        detector=member.detector,
        model=member.config.identity("model"),
        seed=member.config.seed,
        run_hash=member.config.config_hash,
        weights=[outcome.training.best_weights if outcome else "" for outcome in outcomes],
        predictions=[sha256_of_file(member.run.predictions(fold)) for fold in folds],
    )


def _audit(members: Sequence[Member], rules: Sequence[FoldRule], method: Method) -> pl.DataFrame:
    """Return the leakage audit of the ensemble (LEAKAGE_AUDIT).

    It states how many checks of each member's audit passed, and on which videos the weights were fitted.
    """
    shared, videos = members[0].predictions, sum(rule.num_videos for rule in rules)
    alike = (
        f"All {len(members)} runs predicted the same {shared.height:,} videos of {shared['group_id'].n_unique():,} "
        "groups, with the same labels and folds."
    )
    rows: list[tuple[object, ...]] = [("members_alike", len(members), None, alike, True)]
    if method == "stacking":
        fitted = (
            "Weights were fitted on inner validation videos alone, which trained no network of their fold and are not "
            f"tested by it: {videos:,} in all folds."
        )
        rows.append(("weights_fitted_inside", videos, None, fitted, True))
    for number, member in enumerate(members):
        audit = read_table(member.run.leakage_audit, LEAKAGE_AUDIT)
        judged = audit.drop_nulls("passed")
        passed = f"{member.run.run_id}: {judged['passed'].sum()} of {judged.height} checks of its own audit passed."
        rows.append(("member_audit", judged.height, None, passed, bool(judged["passed"].all())))
        rows += [] if number else audit.filter(pl.col("check").is_in(_OF_DATA)).rows()
    return check_table(frame_of(rows, LEAKAGE_AUDIT), LEAKAGE_AUDIT, "the ensemble's audit")
