"""Score a run's test videos after compression, scaling, blur and other disturbances.

Each video is scored by the network that was not trained on its group, with the run's weights, decoding, calibration
and threshold. A level is one disturbance: a recipe of ``video/reencode.py``, applied to the whole file. The undisturbed
videos are scored first and must get their stored scores.

Each score is appended to a file per level, so a killed sweep resumes. A stored score is used again only while recipe,
weights and decoding are the same.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import av
import polars as pl

from fvc_lib.corpus.samples.videos import run_listing
from fvc_lib.metrics.calibration import probabilities
from fvc_lib.services.atomic_files import path_from_text, sha256_of_json
from fvc_lib.services.errors import DataError, UsageError, command_text, did_you_mean
from fvc_lib.services.stage_logs import JsonLines, checked_row
from fvc_lib.services.tables import ROBUSTNESS, frame_of
from fvc_lib.tasks.decoding import FileToScore
from fvc_lib.tasks.video.verdicts.scoring import Networks, score_files
from fvc_lib.video.reencode import RECIPES

UNDISTURBED = "undisturbed"
_NOT_SWEPT = "canonical"  # kind of recipe that re-encodes a whole corpus before training; no disturbance
_TOLERANCE = 1e-4  # allowed difference of a score that is computed again on the same device
_TOLERANCE_ELSEWHERE = 0.02  # allowed difference in mixed precision or on another device
_SCORED = {"video_id": pl.String, "score": pl.Float64, "logit": pl.Float64, "failure": pl.String}


def level_facts() -> pl.DataFrame:
    """Return a table of all levels of disturbance, with columns ``level kind strength``.

    ``level`` is the name of a recipe in ``video.reencode.RECIPES``, ``kind`` the kind of disturbance.
    """
    rows = [(name, recipe.kind, recipe.level) for name, recipe in RECIPES.items()]
    return pl.DataFrame(rows, schema=["level", "kind", "strength"], orient="row")


def levels_named(names: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names of the levels of disturbance that ``names`` selects; an empty ``names`` selects all levels.

    An element of ``names`` is the name of a level, or of a kind of disturbance, which selects all its levels.

    Raises:
        UsageError: an unknown name, or PyAV lacks the encoder of a level.
    """
    swept = {name: recipe for name, recipe in RECIPES.items() if recipe.kind != _NOT_SWEPT}
    words = list(dict.fromkeys([*(recipe.kind for recipe in swept.values()), *swept]))
    for name in names:
        if name not in words:
            raise UsageError(f"levels: got {name!r}.{did_you_mean(name, words)} Known: {', '.join(words)}.")
    chosen = [name for name, recipe in swept.items() if not names or name in names or recipe.kind in names]
    absent = [name for name in chosen if not swept[name].is_available]
    if absent:
        raise UsageError(f"levels: PyAV {av.__version__} has no encoder for {', '.join(absent)}. Name other levels.")
    return tuple(chosen)


def score_levels(
    networks: Networks,
    index: pl.DataFrame,
    predictions: pl.DataFrame,
    folder: Path,
    levels: Sequence[str],
    *,
    workers: int = 0,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> tuple[pl.DataFrame, float]:
    """Score every test video of a run, undisturbed and at each of ``levels``.

    Args:
        networks: the networks of all folds of the run.
        index: INDEX of the run.
        predictions: PREDICTIONS of the run, all folds together.
        folder: folder of the files ``LEVEL.jsonl``, to which scores are appended.
        levels: names, as ``levels_named`` returns them.
        workers: number of processes that decode and encode; 0: one per core.
        progress: called with (done, total), both numbers of videos summed over all levels.

    Returns:
        ``(table, difference)``: the table ROBUSTNESS of these levels and of levels that an earlier call scored
        completely, and the largest absolute difference between an undisturbed score and the stored score.

    Raises:
        DataError: undisturbed videos do not get their stored scores.
    """
    root, checked = run_listing(networks.config).root, 0.0
    videos = predictions.select("video_id", "group_id", "label", "fold", "threshold", stored="score")
    facts = index.select("video_id", "path", "content_sha256")
    videos = videos.join(facts, on="video_id", validate="1:1").sort("fold", "video_id")
    files = [str(root / path_from_text(text)) for text in videos["path"]]
    videos = videos.with_columns(path=pl.Series(files, dtype=pl.String))
    total, done = (len(levels) + 1) * videos.height, 0
    for level in (UNDISTURBED, *levels):

        def tell(number: int, before: int = done) -> None:
            progress(before + number, total)

        file = folder / f"{level}.jsonl"
        _score_level(file, networks, videos, level, workers, tell)
        done += videos.height
        if level == UNDISTURBED:
            scored = videos.join(_stored(file, networks, level), on="video_id")
            checked = _check_undisturbed(scored, networks)
    tables = []
    for level in (UNDISTURBED, *RECIPES):
        scored = videos.join(_stored(folder / f"{level}.jsonl", networks, level), on="video_id")
        if scored.height == videos.height:
            kind = RECIPES[level].kind if level in RECIPES else level
            tables.append(scored.with_columns(level=pl.lit(level), kind=pl.lit(kind)))
    columns = pl.concat(tables).select(list(ROBUSTNESS.columns)).to_dict()
    return frame_of(columns, ROBUSTNESS), checked


def _score_level(
    file: Path,
    networks: Networks,
    videos: pl.DataFrame,
    level: str,
    workers: int,
    tell: Callable[[int], None],
) -> None:
    """Score the videos of a level that have no stored score, and append the results to ``file``.

    Videos that failed earlier are tried again.

    Args:
        file: the file of the level.
        networks: the networks of all folds of the run.
        videos: one row per test video, with at least the columns ``video_id path fold content_sha256``.
        level: name of the level.
        workers: number of processes that decode and encode; 0: one per core.
        tell: called with the number of videos of this level that are done.
    """
    known = _stored(file, networks, level).filter(pl.col("failure").is_null())
    todo = videos.join(known, on="video_id", how="anti").to_dicts()
    done = videos.height - len(todo)
    tell(done)
    recipe = "" if level == UNDISTURBED else level
    files = [FileToScore(Path(row["path"]), (row["fold"],), recipe, row["content_sha256"]) for row in todo]
    scored, identity = score_files(networks, files, workers=workers), _identity(networks, level)
    with JsonLines(file) as lines, closing(scored):
        for answer in scored:
            video, row = todo[answer.position], dict[str, Any](failure=answer.failure or None)
            if not answer.failure:
                row["logit"] = answer.logits[video["fold"]]
                row["score"] = float(probabilities([row["logit"]], networks.folds[video["fold"]].temperature)[0])
            lines.append({"identity": identity, "video_id": video["video_id"], **row}, digest=True)
            done += 1
            tell(done)


def _identity(networks: Networks, level: str) -> str:
    """Return a hex SHA-256 of everything that determines the scores of ``level``, except the video."""
    recipe = "" if level == UNDISTURBED else RECIPES[level].digest
    folds = [(fold, of.weights, of.temperature, of.prior_logit) for fold, of in networks.folds.items()]
    code = [networks.store.decode_hash, networks.measured_by]
    return sha256_of_json([recipe, code, folds, networks.compute.describe()])


def _stored(file: Path, networks: Networks, level: str) -> pl.DataFrame:
    """Return the stored results of a level, one row per video, with columns ``video_id score logit failure``.

    Damaged lines and lines of another identity (``_identity``) are skipped. If a video has several lines, the last one
    counts.
    """
    identity, rows = _identity(networks, level), dict[str, Mapping[str, Any]]()
    for line in file.read_bytes().splitlines() if file.is_file() else ():
        try:
            row = checked_row(line)
        except ValueError:
            continue
        if row["identity"] == identity:
            rows[row["video_id"]] = row
    return pl.DataFrame(list(rows.values()), schema=_SCORED)


def _check_undisturbed(scored: pl.DataFrame, networks: Networks) -> float:
    """Return the largest absolute difference between the undisturbed videos' scores and their stored scores.

    Args:
        scored: one row per video, with columns ``video_id score stored failure``.
        networks: the networks that gave the scores.

    Raises:
        DataError: a video cannot be scored now, or a difference is larger than rounding explains.
    """
    failed = scored.drop_nulls("failure").sort("video_id")
    if failed.height:
        first, failure = failed.select("video_id", "failure").row(0)
        raise DataError(
            f"{failed.height} of {scored.height} test videos cannot be scored now, the first {first}: {failure} "
            "Restore the corpus as it was; the same command resumes."
        )
    here = networks.compute
    is_same = here.amp_dtype is None and all(of.device == here.describe() for of in networks.folds.values())
    worst = max((scored["score"] - scored["stored"]).abs())
    if worst > (_TOLERANCE if is_same else _TOLERANCE_ELSEWHERE):
        raise DataError(
            f"{scored.height} undisturbed videos do not all get their stored score (largest difference: {worst:.4f}), "
            "so the effect of a disturbance is unknown. Decoding code or a library has changed: train again, "
            f"{command_text('--from', '03', '--resume', networks.name)}, or restore the versions in run.json."
        )
    return float(worst)
