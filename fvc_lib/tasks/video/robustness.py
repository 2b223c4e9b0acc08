"""Score a run's test videos after compression, scaling, blur and other disturbances.

Each video is scored by the network that was not trained on its group, with the run's weights, decoding, calibration
and threshold. A level is a recipe of ``video/reencode.py``, applied to the whole file. The undisturbed videos are
scored first and must get their stored scores.

Each score is appended to a file per level, so a killed sweep resumes. A line counts while recipe, weights and decoding
are the same.
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
from fvc_lib.tasks.video.verdicts.scoring import Networks, networks_of_run, score_files
from fvc_lib.video.reencode import RECIPES

_logger = logging.getLogger(__name__)

UNDISTURBED = "undisturbed"
# A recipe for whole corpora, on which a run is trained.
_NOT_SWEPT = ("canonical",)
_TOLERANCE = 1e-4  # of a score computed again on the same device
_TOLERANCE_ELSEWHERE = 0.02  # in mixed precision or on another device


def levels_named(names: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the levels called ``names``, each a recipe or a kind of recipe; no name: all levels.

    Without names, levels whose encoder PyAV lacks are left out with a warning.

    Raises:
        UsageError: an unknown name, or a missing encoder.
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
        progress: called with (videos done, videos) over all levels.
        stop: called between videos; returns True to stop.

    Returns:
        The table (ROBUSTNESS) of these levels and of those that an earlier call scored completely, and the differences
        of the undisturbed scores from the stored ones.

    Raises:
        UsageError: the run is of another task or not finished.
        DataError: undisturbed videos do not get their stored scores.
        StoppedError: ``stop`` returned True; another call resumes.
    """
    networks = networks_of_run(paths)
    videos = _videos(paths, networks)
    earlier = [name for name in RECIPES if name not in levels and paths.robustness_scores(name).is_file()]
    total, done = (len(levels) + 1) * videos.height, 0
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for level in (UNDISTURBED, *levels):

        def tell(number: int, before: int = done) -> None:
            if progress is not None:
                progress(before + number, total)

        found[level] = _scored_level(paths, networks, videos, level, workers, tell, stop)
        done += videos.height
        if level == UNDISTURBED:
            checked = check_undisturbed(videos, found[level], _tolerance(networks), paths)
    for level in earlier:
        known = _known(paths, level, _identity(networks, level))
        if known.keys() >= set(videos["video_id"]):  # complete levels only
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


def _videos(paths: RunPaths, networks: Networks) -> pl.DataFrame:
    """Return PREDICTIONS of all folds with absolute ``path`` and ``content_sha256``, sorted by fold and id."""
    predictions = pl.concat([read_table(paths.predictions(fold), PREDICTIONS) for fold in networks.folds])
    index = read_table(paths.index, INDEX, without=["perceptual_hash"]).select("video_id", "path", "content_sha256")
    root = corpus_root(networks.config)
    joined = predictions.join(index, on="video_id", how="inner", validate="1:1").sort("fold", "video_id")
    files = [str(root / path_from_text(text)) for text in joined["path"]]
    return joined.with_columns(pl.Series("path", files, dtype=pl.String))


def _scored_level(
    paths: RunPaths,
    networks: Networks,
    videos: pl.DataFrame,
    level: str,
    workers: int,
    tell: Callable[[int], None],
    stop: Callable[[], bool],
) -> dict[str, Mapping[str, Any]]:
    """Return ``score`` and ``logit``, or ``failure``, by video id; earlier failures are tried again."""
    identity = _identity(networks, level)
    known = {name: row for name, row in _known(paths, level, identity).items() if row["failure"] is None}
    todo = [video for video in videos.to_dicts() if video["video_id"] not in known]
    tell(len(known))
    recipe = "" if level == UNDISTURBED else level
    files = [FileToScore(Path(each["path"]), (each["fold"],), recipe, each["content_sha256"]) for each in todo]
    scored = score_files(networks, files, workers=workers, stop=stop)
    with JsonLines(paths.robustness_scores(level)) as lines, closing(scored):
        for each in scored:
            video = todo[each.position]
            logit = each.logits.get(video["fold"])
            row = {
                "identity": identity,
                "video_id": video["video_id"],
                "score": None if logit is None else networks.score(video["fold"], logit),
                "logit": logit,
                "failure": each.failure or None,
            }
            lines.append(row, digest=True)
            known[video["video_id"]] = row
            tell(len(known))
    return known


def _identity(networks: Networks, level: str) -> str:
    """Return a hex SHA-256 of everything but the video that a score depends on."""
    recipe = "" if level == UNDISTURBED else RECIPES[level].digest
    by_fold = {
        str(fold): [network.weights, network.temperature, network.prior_logit]
        for fold, network in networks.folds.items()
    }
    return sha256_of_json([recipe, networks.store.decode_hash, by_fold, networks.compute.describe()])


def _known(paths: RunPaths, level: str, identity: str) -> dict[str, Mapping[str, Any]]:
    """Return an earlier call's results; later lines win, torn lines and other identities are skipped."""
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


def _tolerance(networks: Networks) -> float:
    """Return the allowed difference from a stored score."""
    here = networks.compute
    same = all(network.device == here.describe() for network in networks.folds.values())
    return _TOLERANCE if same and here.amp_dtype is None else _TOLERANCE_ELSEWHERE


@dataclass(frozen=True)
class UndisturbedCheck:
    """The number of undisturbed videos, and the largest difference from a stored score."""

    num_videos: int
    largest_difference: float

    def sentence(self) -> str:
        """Return a sentence."""
        found = f"{self.num_videos} undisturbed videos got their stored scores"
        return f"{found}, to {self.largest_difference:.1e} at most." if self.largest_difference else f"{found} exactly."


def check_undisturbed(
    videos: pl.DataFrame, found: Mapping[str, Mapping[str, Any]], tolerance: float, paths: RunPaths
) -> UndisturbedCheck:
    """Compare the scores ``found`` for undisturbed videos with the stored ones.

    Args:
        videos: columns ``video_id score``.
        found: by video id, ``score`` or ``failure``.
        tolerance: largest allowed difference.
        paths: the run, for the message.

    Raises:
        DataError: a video cannot be scored now, or gets another score.
    """
    failed = {name: row["failure"] for name, row in found.items() if row["failure"] is not None}
    if failed:
        name, why = next(iter(sorted(failed.items())))
        raise DataError(
            f"{len(failed)} of {videos.height} test videos cannot be scored now, the first {name}: {why} Restore the "
            "corpus as it was; the same command resumes."
        )
    now = np.array([found[name]["score"] for name in videos["video_id"]])
    difference = np.abs(now - videos["score"].to_numpy())
    if (difference > tolerance).any():
        worst = int(difference.argmax())
        raise DataError(
            f"{int((difference > tolerance).sum())} of {videos.height} undisturbed videos do not get their stored "
            f"score (largest difference: {videos['video_id'][worst]}, {now[worst]:.4f} instead of "
            f"{videos['score'][worst]:.4f}), so the effect of a disturbance is unknown. Decoding code or a library has "
            f"changed: train again, {command_text('--from', '03', '--resume', paths.root)}, or restore the versions in "
            "run.json."
        )
    return UndisturbedCheck(videos.height, float(difference.max(initial=0)))


def level_facts() -> pl.DataFrame:
    """Return ``level kind strength`` of each level."""
    rows = [(name, recipe.kind, recipe.level) for name, recipe in RECIPES.items()]
    return pl.DataFrame(rows, schema=["level", "kind", "strength"], orient="row")
