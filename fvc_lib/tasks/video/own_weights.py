"""Going on from the best weights of an own finished run: which fold's, and that they have not seen what tests them.

A fold goes on from the run's fold of the same number. The weights of that fold were trained on all other folds of the
run, so of the videos that test the new fold none may be like one of those, nor of the videos that choose its epoch and
threshold like one that was trained on. Alike are videos of one content, near-duplicates (by ``near_duplicate_bits``),
and all that stand in one group with them. The same corpus therefore wants the same split. What a run itself went on
from counts as well; what published weights have seen nobody knows.
"""

import logging
from dataclasses import dataclass

import polars as pl

from fvc_lib.corpus.copies.groups import Components
from fvc_lib.corpus.copies.near_duplicates import near_copies
from fvc_lib.detectors.weights import OwnWeights, first_weights, run_of_weights
from fvc_lib.engine.training_state import TrainingRecord
from fvc_lib.services.checkpoint_files import BEST
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import LeakageError, UsageError
from fvc_lib.services.parameters import run_config
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import FOLDS, INDEX, read_table
from fvc_lib.tasks.recipe import read_outcome
from fvc_lib.tasks.video.data import rows_to_train_on

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Seen:
    """What weights have seen: videos that were trained on, and those that chose the epoch (``_known``)."""

    trained: pl.DataFrame
    chosen_on: pl.DataFrame


def weights_to_go_on_from(
    paths: RunPaths, config: RunConfig, fold: int, validation: frozenset[str]
) -> OwnWeights | None:
    """Of the run that ``model_weights`` names, for ``fold``, whose inner validation videos are named; None: of none.

    Raises:
        UsageError: the run is not finished, or is of another network.
        LeakageError: its weights have seen what is to test or to choose; the message counts the videos.
        DataError: a table of either run is missing or damaged.
    """
    run = run_of_weights(config.model_weights)
    if run is None:
        return None
    own = _readable(run, config)
    number = fold % own.num_trainings
    path = run.fold_checkpoints(number) / BEST
    seen = _seen(run, own, number)
    if _is_split_later(run, own, number):
        raise UsageError(
            f"model_weights: {run.run_id} was trained with tune effort on the weights of a run without it, and which "
            "part of them its residual is held to cannot be told from what they began with. Go on from that run itself."
        )
    known = _known(paths)
    is_tested = known["fold"] == fold
    both = seen.trained.vstack(seen.chosen_on)
    bits = config.near_duplicate_bits
    tested = _num_alike(known, is_tested, both, bits)
    chooses = ~is_tested & known["video_id"].is_in(sorted(validation))
    chosen = _num_alike(known, chooses, seen.trained, bits)
    if tested or chosen:
        raise LeakageError(
            f"model_weights: the weights of fold {number} of {run.run_id} have seen videos like {tested} of those that "
            f"test fold {fold} here and {chosen} of those that choose its epoch. Go on from a run with the same "
            "corpus, seed, num_folds and inner_validation_share, or on a corpus that has none of its videos."
        )
    _logger.info(
        "fold %d goes on from fold %d of %s; none of the %d videos that those weights have seen is like one that tests "
        "it%s",
        fold, number, run.run_id, both.height, "" if bits else " (near-duplicates were not looked for)",
    )  # fmt: skip
    return OwnWeights(path, first_weights(own), f"{run.run_id}, fold {number}")


def _readable(run: RunPaths, config: RunConfig) -> RunConfig:
    own = run_config(run)
    differing = [
        f"{name} {getattr(own, name)!r} and here {getattr(config, name)!r}"
        for name in ("task", "head", "l2_normalise")
        if getattr(own, name) != getattr(config, name)
    ]
    if own.identity("model") != config.identity("model"):
        differing.append(f"model {own.model!r} and here {config.model!r}, or other code of it")
    if differing:
        raise UsageError(f"model_weights: {run.run_id} has {', '.join(differing)}. Give the same as that run has.")
    return own


def _seen(run: RunPaths, own: RunConfig, number: int) -> _Seen:
    outcome = read_outcome(run.fold_outcome(number), TrainingRecord)
    if outcome is None or not (run.fold_checkpoints(number) / BEST).is_file():
        raise UsageError(
            f"model_weights: fold {number} of {run.run_id} is not finished, or its {BEST} is gone. Finish that run "
            "first (--resume), or give another one."
        )
    rows = rows_to_train_on(run, own, number)
    split = rows.split(
        number, inner_validation_share=own.inner_validation_share, seed=own.seed, without=outcome.missing
    )
    known = _known(run)
    parts = [
        known.filter(pl.col("video_id").is_in(part["video_id"].to_list())) for part in (split.train, split.validation)
    ]
    before = run_of_weights(own.model_weights)
    if before is not None:
        earlier_config = run_config(before)
        earlier = _seen(before, earlier_config, number % earlier_config.num_trainings)
        parts = [part.vstack(other) for part, other in zip(parts, (earlier.trained, earlier.chosen_on), strict=True)]
    return _Seen(*parts)


def _is_split_later(run: RunPaths, own: RunConfig, number: int) -> bool:
    """Whether the weights were split (``tune effort``) after an own run had trained them as they were."""
    before = run_of_weights(own.model_weights)
    if before is None or not OwnWeights(run.fold_checkpoints(number) / BEST, "", "").is_split:
        return False
    earlier = run_config(before)
    number %= earlier.num_trainings
    began_whole = not OwnWeights(before.fold_checkpoints(number) / BEST, "", "").is_split
    return began_whole or _is_split_later(before, earlier, number)


def _known(run: RunPaths) -> pl.DataFrame:
    """Columns video_id, fold, group (with the run's name), content_sha256 and perceptual_hash, of all videos.

    The fold is -1 where the run's protocol never tests the video; it may have trained all the same.
    """
    group = pl.format("{} {}", pl.lit(run.run_id), "group_id")
    index = read_table(run.index, INDEX).select("video_id", "content_sha256", "perceptual_hash", group=group)
    folds = read_table(run.folds, FOLDS).select("video_id", "fold")
    known = index.join(folds, on="video_id", how="left").with_columns(pl.col("fold").fill_null(-1))
    return known.select("video_id", "fold", "group", "content_sha256", "perceptual_hash").sort("video_id")


def _num_alike(known: pl.DataFrame, counted: pl.Series, seen: pl.DataFrame, max_bits: int) -> int:
    """How many of ``known`` that are ``counted`` are connected with one of ``seen`` by content, looks and groups.

    Others may connect them: a video that takes no part here, of one group with a tested one, may be like one seen.
    """
    all_of_them = known.vstack(seen)
    connected = Components(all_of_them.height)
    for column in ("content_sha256", "group", "video_id"):
        first: dict[str, int] = {}
        for place, value in enumerate(all_of_them[column].to_list()):
            if value is not None:
                connected.join(first.setdefault(value, place), place)
    contents = all_of_them["content_sha256"].fill_null("").to_list()
    for one, other in near_copies(contents, all_of_them["perceptual_hash"].to_list(), max_bits):
        connected.join(one, other)
    labels = connected.label.tolist()
    of_seen = set(labels[known.height :])
    return sum(label in of_seen for label, counts in zip(labels, counted, strict=False) if counts)
