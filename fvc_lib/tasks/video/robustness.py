"""Score a run's test videos after compression, scaling, blur and other disturbances.

Each video is scored by the network that was not trained on its group, with the run's weights, decoding, calibration
and threshold. A level is one disturbance: a recipe of ``video/reencode.py``, applied to the whole file. The undisturbed
videos are scored first and must get their stored scores.

Each score is appended to a file per level, so a killed sweep resumes. A stored score is used again only while recipe,
weights and decoding are the same.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import av
import numpy as np
import polars as pl

from fvc_lib.corpus.samples.videos import corpus_root
from fvc_lib.metrics.calibration import probabilities
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
_NOT_SWEPT = "canonical"  # a recipe for whole corpora, on which a run is trained
_TOLERANCE = 1e-4  # of a score computed again on the same device
_TOLERANCE_ELSEWHERE = 0.02  # in mixed precision or on another device

Scored = Mapping[str, Any]  # ``score`` and ``logit``, or ``failure``


def level_facts() -> pl.DataFrame:
    """Return a table of all levels, with columns ``level kind strength``."""
    rows = [(name, recipe.kind, recipe.level) for name, recipe in RECIPES.items()]
    return pl.DataFrame(rows, schema=["level", "kind", "strength"], orient="row")


def levels_named(names: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names of levels for ``names``, which name recipes or kinds of recipes; all levels if it is empty.

    Without names, levels whose encoder PyAV lacks are left out with a warning.

    Raises:
        UsageError: an unknown name, or a missing encoder.
    """
    swept = {name: recipe for name, recipe in RECIPES.items() if recipe.kind != _NOT_SWEPT}
    words = list(dict.fromkeys([*(recipe.kind for recipe in swept.values()), *swept]))
    for name in names:
        if name not in words:
            raise UsageError(f"levels: got {name!r}.{did_you_mean(name, words)} Known: {', '.join(words)}.")
    chosen = [name for name, recipe in swept.items() if not names or name in names or recipe.kind in names]
    absent = [name for name in chosen if not swept[name].is_available]
    if absent and names:
        raise UsageError(f"levels: PyAV {av.__version__} has no encoder for {', '.join(absent)}. Leave them out.")
    if absent:
        _logger.warning("PyAV %s has no encoder for %s: left out", av.__version__, ", ".join(absent))
    return tuple(name for name in chosen if name not in absent)


def score_levels(
    paths: RunPaths,
    levels: Sequence[str],
    *,
    workers: int = 0,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> tuple[pl.DataFrame, float]:
    """Score every test video of the run, undisturbed and at each of ``levels``; write ``tables/robustness.parquet``.

    Args:
        paths: a run of task video whose folds are all trained.
        levels: names, as ``levels_named`` returns them.
        workers: processes that decode and encode; 0: one per core.
        progress: called with (videos done, videos) over all levels.

    Returns:
        The table (ROBUSTNESS) of these levels and of those that an earlier call scored completely, and the largest
        difference of an undisturbed score from the stored one.

    Raises:
        UsageError: the run is of another task or not finished.
        DataError: undisturbed videos do not get their stored scores.
    """
    networks = networks_of_run(paths)
    predictions = pl.concat([read_table(paths.predictions(fold), PREDICTIONS) for fold in networks.folds])
    index, root = read_table(paths.index, INDEX, without=["perceptual_hash"]), corpus_root(networks.config)
    known = index.select("video_id", "path", "content_sha256")
    videos = predictions.join(known, on="video_id", how="inner", validate="1:1").sort("fold", "video_id")
    files = [str(root / path_from_text(text)) for text in videos["path"]]
    videos = videos.with_columns(pl.Series("path", files, dtype=pl.String))
    total, done, scored = (len(levels) + 1) * videos.height, 0, dict[str, dict[str, Scored]]()
    for level in (UNDISTURBED, *levels):

        def tell(number: int, before: int = done) -> None:
            progress(before + number, total)

        scored[level] = _scored_level(paths.robustness_scores(level), networks, videos, level, workers, tell)
        done += videos.height
        if level == UNDISTURBED:
            checked = _check_undisturbed(videos, scored[level], networks, paths)
    for level in RECIPES:
        earlier = {} if level in levels else _known(paths.robustness_scores(level), _identity(networks, level))
        if earlier.keys() >= set(videos["video_id"]):  # complete levels only
            scored[level] = earlier
    rows = [
        {**video, **scored[level][video["video_id"]], "level": level, "kind": RECIPES[level].kind if number else level}
        for number, level in enumerate((UNDISTURBED, *RECIPES))
        if level in scored
        for video in videos.select("video_id", "group_id", "label", "fold", "threshold").to_dicts()
    ]
    table = frame_of({name: [row[name] for row in rows] for name in ROBUSTNESS.columns}, ROBUSTNESS)
    write_table(table, ROBUSTNESS, paths.robustness)
    return table, checked


def _scored_level(
    file: Path,
    networks: Networks,
    videos: pl.DataFrame,
    level: str,
    workers: int,
    tell: Callable[[int], None],
) -> dict[str, Scored]:
    """Return the scores of a level by video id; earlier failures are tried again."""
    identity = _identity(networks, level)
    known = {video_id: row for video_id, row in _known(file, identity).items() if row["failure"] is None}
    todo = [video for video in videos.to_dicts() if video["video_id"] not in known]
    tell(len(known))
    recipe = "" if level == UNDISTURBED else level
    files = [FileToScore(Path(each["path"]), (each["fold"],), recipe, each["content_sha256"]) for each in todo]
    scored = score_files(networks, files, workers=workers)
    with JsonLines(file) as lines, closing(scored):
        for answer in scored:
            video = todo[answer.position]
            logit = answer.logits.get(video["fold"])
            temperature = networks.folds[video["fold"]].temperature
            score = None if logit is None else float(probabilities([logit], temperature)[0])
            row = {"score": score, "logit": logit, "failure": answer.failure or None}
            lines.append({"identity": identity, "video_id": video["video_id"], **row}, digest=True)
            known[video["video_id"]] = row
            tell(len(known))
    return known


def _identity(networks: Networks, level: str) -> str:
    """Return a hex SHA-256 of everything that a score depends on, except the video."""
    recipe = "" if level == UNDISTURBED else RECIPES[level].digest
    by_fold = {
        str(fold): [network.weights, network.temperature, network.prior_logit]
        for fold, network in networks.folds.items()
    }
    return sha256_of_json([recipe, networks.store.decode_hash, by_fold, networks.compute.describe()])


def _known(file: Path, identity: str) -> dict[str, Scored]:
    """Return the stored results of earlier calls by video id.

    Damaged lines and lines of another identity are skipped; of several lines on a video the last is taken.
    """
    known: dict[str, Scored] = {}
    for line in file.read_bytes().splitlines() if file.is_file() else ():
        try:
            row = checked_row(line)
        except ValueError:
            continue
        if row["identity"] == identity:
            known[row["video_id"]] = {name: row[name] for name in ("score", "logit", "failure")}
    return known


def _check_undisturbed(
    videos: pl.DataFrame, scored: Mapping[str, Scored], networks: Networks, paths: RunPaths
) -> float:
    """Return the largest difference of the undisturbed videos' scores from the stored ones.

    Raises:
        DataError: a video cannot be scored now, or gets another score.
    """
    failed = sorted((name, row["failure"]) for name, row in scored.items() if row["failure"] is not None)
    if failed:
        raise DataError(
            f"{len(failed)} of {videos.height} test videos cannot be scored now, the first {failed[0][0]}: "
            f"{failed[0][1]} Restore the corpus as it was; the same command resumes."
        )
    here = networks.compute
    is_same = here.amp_dtype is None and all(each.device == here.describe() for each in networks.folds.values())
    now = np.array([scored[name]["score"] for name in videos["video_id"]])
    difference = np.abs(now - videos["score"].to_numpy())
    worst = int(difference.argmax())
    if difference[worst] > (_TOLERANCE if is_same else _TOLERANCE_ELSEWHERE):
        raise DataError(
            f"{videos.height} undisturbed videos do not all get their stored score (largest difference: "
            f"{videos['video_id'][worst]}, {now[worst]:.4f} instead of {videos['score'][worst]:.4f}), so the effect of "
            "a disturbance is unknown. Decoding code or a library has changed: train again, "
            f"{command_text('--from', '03', '--resume', paths.root)}, or restore the versions in run.json."
        )
    return float(difference[worst])
