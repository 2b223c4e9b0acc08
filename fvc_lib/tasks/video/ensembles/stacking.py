"""Weights of an ensemble's detectors in each outer fold, fitted on inner validation videos alone.

Plain stacking fits the weights for fold k on the out-of-fold predictions of the other folds. That leaks: the networks
that made those had been trained on fold k's videos. Here the weights for fold k are fitted on what the networks *of*
fold k say of their own inner validation videos. No network of fold k was trained on one of these, and neither they nor
any of their group is tested by fold k; so nothing of fold k has been seen by anything that is asked about it. What it
does not guarantee: those videos chose epoch, temperature and threshold of the same networks, so they flatter each of
them a little, most the one that had the most to choose from; and they are few. Both cost the ensemble some of its
number, and can add nothing to it.
"""

from collections.abc import Sequence

import numpy as np
import polars as pl

from fvc_lib.metrics.calibration import probabilities
from fvc_lib.metrics.classification import log_loss
from fvc_lib.metrics.intervals import one_vote_per_group
from fvc_lib.metrics.operating_points import operating_point, threshold_at
from fvc_lib.metrics.stacking import fit_stacking
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, LeakageError, command_text
from fvc_lib.services.parameters import run_config
from fvc_lib.services.records.ensembles import FoldRule
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import VALIDATION_PREDICTIONS, read_table
from fvc_lib.tasks.video import data
from fvc_lib.tasks.video.controls import fake_labels
from fvc_lib.tasks.video.ensembles.combine import Member, base_rate, folds_of, mean_threshold, of_detectors
from fvc_lib.tasks.video.results import made_samples
from fvc_lib.tasks.video.selection import Selection, read_selection

_SAME_LOG_LOSS = 1e-3  # a network that is asked again in other batches rounds otherwise
_KEY = ["video_id", "group_id", "label"]


def stacked_rules(members: Sequence[Member]) -> list[FoldRule]:
    """How the detectors count in each fold; where no video is there to fit on, all alike.

    A detector of several runs says of a video what those of them do that were not trained on it. Videos count that
    every detector says something of, each group with one vote.

    Raises:
        LeakageError: predictions of videos that a network was trained on, or that its fold tests.
        DataError: predictions that are missing or are not those which a run chose by, or no video in any fold that all
            detectors have.
    """
    configs = [run_config(member.run) for member in members]
    rules = [_rule(members, configs, fold) for fold in folds_of(members)]
    if not any(rule.num_videos for rule in rules):
        raise DataError(
            "the detectors have no inner validation video in common in any fold, so no weights can be fitted: "
            "they have other seeds, or other inner_validation_share. Take --method mean."
        )
    return rules


def _rule(members: Sequence[Member], configs: Sequence[RunConfig], fold: int) -> FoldRule:
    table: pl.DataFrame | None = None
    for number, (member, config) in enumerate(zip(members, configs, strict=True)):
        said = inner_predictions(member.run, config, fold)
        own = said.select(*_KEY, (pl.col("logit") / pl.col("temperature")).alias(str(number)))
        table = own if table is None else table.join(own, on=_KEY, how="full", coalesce=True)
    assert table is not None
    table = table.sort("video_id")
    runs = table.select(str(number) for number in range(len(members))).fill_null(np.nan).to_numpy()
    log_odds = of_detectors(runs, [member.detector for member in members])
    there = np.isfinite(log_odds).all(1)
    log_odds, table = log_odds[there], table.filter(pl.Series(there))
    labels, groups = fake_labels(table), table["group_id"].to_list()
    fitted = fit_stacking(labels, log_odds, one_vote_per_group(groups))
    threshold = mean_threshold(members, fold)
    if len(set(labels.tolist())) == 2:
        scores = probabilities(fitted.log_odds(log_odds), 1.0)
        threshold = min(1.0, threshold_at(operating_point(configs[0].operating_point), labels, scores))
    return FoldRule(
        weights=fitted.weights.tolist(),
        intercept=fitted.intercept,
        threshold=threshold,
        base_rate=base_rate(members, fold),
        num_videos=table.height,
        num_groups=len(set(groups)),
    )


def inner_predictions(run: RunPaths, config: RunConfig, fold: int) -> pl.DataFrame:
    """Return VALIDATION_PREDICTIONS of one fold's training.

    Groups that an official split has in several parts are left out.

    Raises:
        LeakageError, DataError: as ``stacked_rules``.
    """
    chosen = read_selection(run.fold_checkpoints(fold))
    if chosen is None:
        raise DataError(f"{run.run_id}: what was chosen for fold {fold} is not on record. Take --method mean.")
    table = read_table(run.validation_predictions(fold), VALIDATION_PREDICTIONS)
    rows = data.rows_to_train_on(run, config, fold)
    without = set(rows.folds["video_id"]) - set(made_samples(run, config)["video_id"])
    split = rows.split(fold, inner_validation_share=config.inner_validation_share, seed=config.seed, without=without)
    table = table.filter(~pl.col("group_id").is_in(sorted(split.leaking)))
    for part, what in ((split.train, "was trained on"), (split.test, "tests")):
        shared = table.filter(pl.col("group_id").is_in(part["group_id"].implode()))
        if shared.height:
            raise LeakageError(
                f"{run.run_id}: the predictions that weights for fold {fold} would be fitted on have {shared.height} "
                f"videos of groups that the fold {what}, for example {shared['video_id'].min()!r}. Weights fitted on "
                "them would believe what that network remembers."
            )
    if not split.leaking:
        _refuse_others(run, fold, table, chosen.selection)
    return table


def _refuse_others(run: RunPaths, fold: int, table: pl.DataFrame, chosen: Selection) -> None:
    labels = fake_labels(table)
    counts = (table.height, int((labels == 0).sum()), int((labels == 1).sum()))
    loss = log_loss(labels, probabilities(table["logit"].to_numpy(), chosen.temperature)) if table.height else np.nan
    is_same = counts == (chosen.num_videos, chosen.num_real, chosen.num_fake)
    if not (is_same and abs(loss - chosen.log_loss) <= _SAME_LOG_LOSS * max(1.0, chosen.log_loss)):
        raise DataError(
            f"{run.run_id}: inner validation predictions of fold {fold} are not those by which its temperature was "
            f"chosen: {counts[0]} videos with a log loss of {loss:.4f}, and it was {chosen.num_videos} with "
            f"{chosen.log_loss:.4f}. Train the fold again: {command_text('--force', '04', '--resume', run.root)}"
        )
