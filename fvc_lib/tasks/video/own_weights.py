"""Begin a training with the best weights of an own finished run, and refuse weights that have seen its test videos.

A fold goes on from the run's fold of the same number. Its weights were trained on all other folds of that run. So no
video that tests the new fold may be like one of those, and no video that chooses its epoch like one that was trained
on. Videos are alike if they have one content, are near-duplicates (``near_duplicate_bits``) or share a group with such
a video. The same corpus therefore needs the same split. What that run itself went on from counts as well; what
published weights have seen is unknown.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

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

SEEN_BEFORE = pl.Schema({"content_sha256": pl.String, "perceptual_hash": pl.String})


@dataclass(frozen=True)
class _Seen:
    """The videos that trained some weights, and those that chose their epoch; columns of ``_known``."""

    trained: pl.DataFrame
    chosen_on: pl.DataFrame


def weights_to_go_on_from(
    paths: RunPaths, config: RunConfig, fold: int | None, validation: frozenset[str]
) -> OwnWeights | None:
    """Return the weights that ``fold`` begins with; None where ``model_weights`` names no run.

    Args:
        paths: the new run.
        config: its parameters.
        fold: to train; None: the network of all groups, which goes on from the first fold.
        validation: ids of the videos that choose its epoch.

    Raises:
        UsageError: the named run is not finished, or has another network.
        LeakageError: its weights have seen videos that test or choose; the message counts them.
        DataError: a table of either run is missing or damaged.
    """
    source = run_of_weights(config.model_weights)
    if source is None:
        return None
    before = run_config(source)
    _refuse_another_network(source, before, config)
    number = 0 if fold is None else fold % before.num_trainings
    seen = _seen(source, before, number)
    if _is_split_later(source, number):
        raise UsageError(
            f"model_weights: {source.run_id} was trained with tune effort on the weights of a run without it, so the "
            "part of them that its residual is held to is unknown. Go on from that run itself."
        )
    known = _known(paths)
    is_tested = known["fold"] == (len(known) if fold is None else fold)  # a fold that there is not
    both = seen.trained.vstack(seen.chosen_on)
    bits = config.near_duplicate_bits
    tested = _num_alike(known, is_tested, both, bits)
    chooses = ~is_tested & known["video_id"].is_in(sorted(validation))
    chosen = _num_alike(known, chooses, seen.trained, bits)
    if chosen and fold is None:
        raise LeakageError(
            f"model_weights: the weights of fold {number} of {source.run_id} have seen videos like {chosen} of those "
            "that choose the epoch of the network of all groups. Leave train_final out, or go on from a run on "
            "a corpus that has none of its videos."
        )
    if tested or chosen:
        raise LeakageError(
            f"model_weights: the weights of fold {number} of {source.run_id} have seen videos like {tested} of those "
            f"that test fold {fold} here and {chosen} of those that choose its epoch. Go on from a run with the same "
            "corpus, seed, num_folds and inner_validation_share, or on a corpus that has none of its videos."
        )
    _logger.info(
        "fold %s goes on from fold %d of %s; none of the %d videos that those weights have seen is like one that tests "
        "it%s",
        fold, number, source.run_id, both.height, "" if bits else " (near-duplicates were not looked for)",
    )  # fmt: skip
    return OwnWeights(_weights(source, number), first_weights(config), f"{source.run_id}, fold {number}")


def seen_before(run: RunPaths) -> pl.DataFrame:
    """Return ``content_sha256 perceptual_hash`` of what the runs saw that ``run`` went on from; mostly no rows.

    Raises:
        UsageError: one of them is not finished.
        DataError: a table of one is missing or damaged.
    """
    parts, source = [pl.DataFrame(schema=SEEN_BEFORE)], run_of_weights(run_config(run).model_weights)
    if source is not None:
        config = run_config(source)
        seen = [_seen(source, config, number) for number in range(config.num_trainings)]
        parts += [part.select(SEEN_BEFORE.names()) for each in seen for part in (each.trained, each.chosen_on)]
    return pl.concat(parts).unique(maintain_order=True)


def _weights(run: RunPaths, number: int) -> Path:
    return run.fold_checkpoints(number) / BEST


def _refuse_another_network(source: RunPaths, before: RunConfig, config: RunConfig) -> None:
    differing = [
        f"{name} {getattr(before, name)!r} and here {getattr(config, name)!r}"
        for name in ("task", "head", "l2_normalise")
        if getattr(before, name) != getattr(config, name)
    ]
    if before.identity("model") != config.identity("model"):
        differing.append(f"model {before.model!r} and here {config.model!r}, or other code of it")
    if differing:
        raise UsageError(f"model_weights: {source.run_id} has {', '.join(differing)}. Give the same as that run has.")


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
        config = run_config(before)
        earlier = _seen(before, config, number % config.num_trainings)
        parts = [part.vstack(other) for part, other in zip(parts, (earlier.trained, earlier.chosen_on), strict=True)]
    return _Seen(*parts)


def _is_split_later(run: RunPaths, number: int) -> bool:
    """Return whether ``tune effort`` split the weights after an own run had trained them whole."""
    before = run_of_weights(run_config(run).model_weights)
    if before is None or not OwnWeights(_weights(run, number), "", "").is_split:
        return False
    number %= run_config(before).num_trainings
    return not OwnWeights(_weights(before, number), "", "").is_split or _is_split_later(before, number)


def _known(run: RunPaths) -> pl.DataFrame:
    """Return ``video_id fold group content_sha256 perceptual_hash`` of all videos; a group has the run's name.

    The fold is -1 where the run's protocol never tests the video; the video may have trained all the same.
    """
    group = pl.format("{} {}", pl.lit(run.run_id), "group_id")
    index = read_table(run.index, INDEX).select("video_id", "content_sha256", "perceptual_hash", group=group)
    folds = read_table(run.folds, FOLDS).select("video_id", "fold")
    known = index.join(folds, on="video_id", how="left").with_columns(pl.col("fold").fill_null(-1))
    return known.select("video_id", "fold", "group", "content_sha256", "perceptual_hash").sort("video_id")


def _num_alike(known: pl.DataFrame, counted: pl.Series, seen: pl.DataFrame, max_bits: int) -> int:
    """Count the ``counted`` videos of ``known`` that content, looks and groups connect with one of ``seen``.

    Other videos may connect them: one that takes no part here may share a group with a tested one and be like one seen.
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
