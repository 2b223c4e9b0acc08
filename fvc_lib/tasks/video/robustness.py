"""How a run's networks score its own test videos once these are compressed, made smaller, blurred, cut.

Each video is judged by the one network that was not trained on its group, with the weights, decoding and calibration
that its stored score was made with; labels, groups, folds and thresholds stay as they are. Every level is a recipe of
``video/reencode.py``, applied to the whole file before it is decoded. First all are scored as they are: that must give
the stored scores, else nothing else here would mean anything.

What is scored is appended to a file per level at once, so a killed sweep goes on where it was. A line counts as long as
the recipe, the weights and the decoding are what it was made with.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
import polars as pl

from fvc_lib.corpus.samples.videos import corpus_root
from fvc_lib.services.atomic_files import path_from_text, sha256_of_json
from fvc_lib.services.errors import DataError, UsageError, command_text, did_you_mean
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.stage_logs import JsonLines, checked_row
from fvc_lib.services.tables import INDEX, PREDICTIONS, ROBUSTNESS, frame_of, read_table, write_table
from fvc_lib.tasks.decoding import FileToScore
from fvc_lib.tasks.video.verdicts.scoring import RunNetworks, score_files
from fvc_lib.video.reencode import RECIPES

_logger = logging.getLogger(__name__)

UNDISTURBED = "undisturbed"
# Beside the recipes of one video after another this is a corpus's: a run of its own is trained on it.
_NOT_SWEPT = ("canonical",)
# A score computed again on the same device differs by rounding; in mixed precision, or on another device, by more.
_SAME, _ELSEWHERE = 1e-4, 0.02


def levels_named(names: Sequence[str] = ()) -> tuple[str, ...]:
    """The levels that ``names`` (of recipes, or of kinds of recipes for all their levels) stand for; none: all.

    Levels whose encoder this PyAV lacks are left out where all are asked for, with a warning.

    Raises:
        UsageError: an unknown name, or an encoder that is not here.
    """
    swept = {name: recipe for name, recipe in RECIPES.items() if recipe.kind not in _NOT_SWEPT}
    kinds = dict.fromkeys(recipe.kind for recipe in swept.values())
    found: dict[str, None] = {}
    for name in names:
        fitting = [each for each, recipe in swept.items() if name in (each, recipe.kind)]
        if not fitting:
            known = [*kinds, *swept]
            raise UsageError(
                f"levels: got {name!r}.{did_you_mean(name, known)} Kinds: {', '.join(kinds)}; levels: "
                f"{', '.join(swept)}."
            )
        found |= dict.fromkeys(fitting)
    absent = [name for name in found or swept if not swept[name].is_available]
    if absent and found:
        raise UsageError(f"levels: PyAV {av.__version__} has no encoder for {', '.join(absent)}. Leave them out.")
    if absent:
        _logger.warning("PyAV %s has no encoder for %s: left out", av.__version__, ", ".join(absent))
    return tuple(name for name in swept if name in (found or swept) and name not in absent)


def score_levels(
    paths: RunPaths,
    levels: Sequence[str],
    *,
    workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> "tuple[pl.DataFrame, UndisturbedCheck]":
    """Score every test video of the run as it is and at each of ``levels``; writes ``tables/robustness.parquet``.

    Args:
        paths: a run of task video whose folds are all trained.
        levels: as ``levels_named`` gave them.
        workers: processes that decode and encode; 0: one per core.
        progress: called with (videos done, videos in all) over all levels.
        stop: asked between videos.

    Returns:
        The table (ROBUSTNESS): these levels, and others that an earlier call scored and that still hold; and how far
        the undisturbed scores are from the stored ones.

    Raises:
        UsageError: the run is of another task or not finished.
        DataError: the videos, scored as they are, do not get the scores that the run has stored.
        StoppedError: ``stop`` said so; another call goes on.
    """
    networks = RunNetworks(paths)
    videos = _videos(paths, networks)
    earlier = [name for name in RECIPES if name not in levels and paths.robustness_scores(name).is_file()]
    total, done = (len(levels) + 1) * videos.height, 0
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for level in (UNDISTURBED, *levels):

        def tell(number: int, before: int = done) -> None:
            if progress is not None:
                progress(before + number, total)

        found[level] = _scored_level(networks, videos, level, workers, tell, stop)
        done += videos.height
        if level == UNDISTURBED:
            checked = check_undisturbed(videos, found[level], _tolerance(networks), paths)
    for level in earlier:
        known = _known(paths, level, _identity(networks, level))
        if known.keys() >= set(videos["video_id"]):  # no level of which some videos alone are known
            found[level] = known
    order = [UNDISTURBED, *RECIPES]
    rows = [
        {**video, "level": level, "kind": _kind(level), **{name: scored[name] for name in _SCORED}}
        for level in sorted(found, key=order.index)
        for video in videos.select("video_id", "group_id", "label", "fold", "threshold").to_dicts()
        if (scored := found[level].get(video["video_id"])) is not None
    ]
    table = frame_of({name: [row[name] for row in rows] for name in ROBUSTNESS.columns}, ROBUSTNESS)
    write_table(table, ROBUSTNESS, paths.robustness)
    return table, checked


_SCORED = ("score", "logit", "failure")


def _kind(level: str) -> str:
    return level if level == UNDISTURBED else RECIPES[level].kind


def _videos(paths: RunPaths, networks: RunNetworks) -> pl.DataFrame:
    """PREDICTIONS of all folds with ``path`` (whole) and ``content_sha256``, by fold and id."""
    predictions = pl.concat([read_table(paths.predictions(fold), PREDICTIONS) for fold in networks.outcomes])
    index = read_table(paths.index, INDEX, without=["perceptual_hash"]).select("video_id", "path", "content_sha256")
    root = corpus_root(networks.config)
    joined = predictions.join(index, on="video_id", how="inner", validate="1:1").sort("fold", "video_id")
    files = [str(root / path_from_text(text)) for text in joined["path"]]
    return joined.with_columns(pl.Series("path", files, dtype=pl.String))


def _scored_level(
    networks: RunNetworks,
    videos: pl.DataFrame,
    level: str,
    workers: int,
    tell: Callable[[int], None],
    stop: Callable[[], bool],
) -> dict[str, Mapping[str, Any]]:
    """By video id what was found: ``score`` and ``logit``, or ``failure``; earlier failures are tried again."""
    paths, identity = networks.paths, _identity(networks, level)
    known = {name: row for name, row in _known(paths, level, identity).items() if row["failure"] is None}
    todo = [video for video in videos.to_dicts() if video["video_id"] not in known]
    tell(len(known))
    recipe = "" if level == UNDISTURBED else level
    files = [FileToScore(Path(each["path"]), (each["fold"],), recipe, each["content_sha256"]) for each in todo]
    scored = score_files(networks, files, workers=workers, stop=stop)
    with JsonLines(paths.robustness_scores(level)) as lines, closing(scored):
        for each in scored:
            video = todo[each.position]
            row = {
                "identity": identity,
                "video_id": video["video_id"],
                "score": each.scores.get(video["fold"]),
                "logit": each.logits.get(video["fold"]),
                "failure": each.failure or None,
            }
            lines.append(row, digest=True)
            known[video["video_id"]] = row
            tell(len(known))
    return known


def _identity(networks: RunNetworks, level: str) -> str:
    """Hex SHA-256 of all that decides a score besides the video's content."""
    recipe = "" if level == UNDISTURBED else RECIPES[level].digest
    by_fold = {
        str(fold): [outcome.training.best_weights, outcome.training.temperature, outcome.training.selection.prior_logit]
        for fold, outcome in networks.outcomes.items()
    }
    return sha256_of_json([recipe, networks.store.decode_hash, by_fold, networks.compute.describe()])


def _known(paths: RunPaths, level: str, identity: str) -> dict[str, Mapping[str, Any]]:
    """What an earlier call found, the later line winning; torn lines and those of another identity are passed over."""
    found: dict[str, Mapping[str, Any]] = {}
    try:
        content = paths.robustness_scores(level).read_bytes()
    except FileNotFoundError:
        return found
    for line in content.splitlines():
        try:
            row = checked_row(line)
            if row["identity"] == identity:
                found[row["video_id"]] = {name: row[name] for name in _SCORED}
        except (ValueError, LookupError, TypeError):
            continue
    return found


def _tolerance(networks: RunNetworks) -> float:
    """How far a score may lie from the stored one: rounding, or more on another device or in mixed precision."""
    here = networks.compute
    same = all(outcome.device == here.describe() for outcome in networks.outcomes.values())
    return _SAME if same and here.amp_dtype is None else _ELSEWHERE


@dataclass(frozen=True)
class UndisturbedCheck:
    """Scores computed again beside the stored ones: how many, and the largest difference."""

    num_videos: int
    largest_difference: float

    def sentence(self) -> str:
        """For the notebook."""
        found = f"{self.num_videos} videos scored again as they are got their stored scores"
        return f"{found}, to {self.largest_difference:.1e} at most." if self.largest_difference else f"{found} exactly."


def check_undisturbed(
    videos: pl.DataFrame, found: Mapping[str, Mapping[str, Any]], tolerance: float, paths: RunPaths
) -> UndisturbedCheck:
    """Compare what was ``found`` of undisturbed videos with their stored scores.

    Args:
        videos: columns ``video_id score``.
        found: by video id, ``score`` or ``failure``.
        tolerance: of a score.
        paths: for the message.

    Raises:
        DataError: a video cannot be scored any more, or gets another score.
    """
    failed = {name: row["failure"] for name, row in found.items() if row["failure"] is not None}
    if failed:
        name, why = next(iter(sorted(failed.items())))
        raise DataError(
            f"{len(failed)} of {videos.height} test videos, which the run has scored, cannot be scored now, the first "
            f"{name}: {why} Bring the corpus back as it was; the same command goes on."
        )
    now = np.array([found[name]["score"] for name in videos["video_id"]])
    difference = np.abs(now - videos["score"].to_numpy())
    if (difference > tolerance).any():
        worst = int(difference.argmax())
        raise DataError(
            f"{int((difference > tolerance).sum())} of {videos.height} videos, scored again as they are, do not get "
            f"the score that the run has stored (most: {videos['video_id'][worst]}, {now[worst]:.4f} instead of "
            f"{videos['score'][worst]:.4f}), so what a disturbance changes cannot be told. The code that decodes, or a "
            f"library, has changed since: train again, {command_text('--from', '03', '--resume', paths.root)}, or go "
            "back to what the run was made with (run.json)."
        )
    return UndisturbedCheck(videos.height, float(difference.max(initial=0)))


def level_facts() -> pl.DataFrame:
    """Columns ``level kind strength``: what each level is."""
    rows = [(name, recipe.kind, recipe.level) for name, recipe in RECIPES.items()]
    return pl.DataFrame(rows, schema=["level", "kind", "strength"], orient="row")
