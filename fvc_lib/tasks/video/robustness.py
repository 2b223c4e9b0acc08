"""Score a run's test videos after compression, scaling, blur and other disturbances.

Each video is scored by the network that was not trained on its group, with the run's weights, decoding, calibration
and threshold. A level is one disturbance: a recipe of ``video/reencode.py``, applied to the whole file. The undisturbed
videos are scored first and must get their stored scores.

Each score is appended to the journal of its level, so a killed sweep resumes. A stored score is used again only while
recipe, weights and decoding are the same.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl

from fvc_lib.corpus.samples.videos import run_listing
from fvc_lib.metrics.calibration import probabilities
from fvc_lib.services.atomic_files import path_from_text, path_to_text, sha256_of_json
from fvc_lib.services.errors import DataError, UsageError, command_text, did_you_mean
from fvc_lib.services.tables import ROBUSTNESS, frame_of
from fvc_lib.tasks.decoding import FileToScore
from fvc_lib.tasks.journal import Journal, found_in_blocks
from fvc_lib.tasks.video.predicting import Finding
from fvc_lib.tasks.video.verdicts.scoring import Networks, score_files
from fvc_lib.video.reencode import RECIPES

UNDISTURBED = "undisturbed"
_NOT_SWEPT = "canonical"  # kind of recipe that re-encodes a whole corpus before training; no disturbance
_TOLERANCE = 1e-4  # allowed difference of a score that is computed again on the same device
_TOLERANCE_ELSEWHERE = 0.02  # allowed difference in mixed precision or on another device


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
        UsageError: an unknown name.
    """
    swept = {name: recipe for name, recipe in RECIPES.items() if recipe.kind != _NOT_SWEPT}
    words = list(dict.fromkeys([*(recipe.kind for recipe in swept.values()), *swept]))
    if unknown := [name for name in names if name not in words]:
        raise UsageError(f"levels: got {unknown[0]!r}.{did_you_mean(unknown[0], words)} Known: {', '.join(words)}.")
    return tuple(name for name, recipe in swept.items() if not names or name in names or recipe.kind in names)


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
        folder: folder of the journals, one folder per level.
        levels: names of levels of disturbance (``levels_named``).
        workers: number of processes that decode and encode; 0: one per core.
        progress: called with (done, total), both numbers of videos summed over all levels.

    Returns:
        ``(table, difference)``: the table ROBUSTNESS of these levels and of levels that an earlier call scored
        completely, and the largest absolute difference between an undisturbed score and the stored score.

    Raises:
        DataError: undisturbed videos do not get their stored scores.
    """
    root = run_listing(networks.config).root
    videos = predictions.select("video_id", "group_id", "label", "fold", "threshold", stored="score")
    facts = index.select("video_id", "path", "content_sha256")
    videos = videos.join(facts, on="video_id", validate="1:1").sort("fold", "video_id")
    files = {root / path_from_text(row["path"]): row for row in videos.iter_rows(named=True)}
    temperatures = [networks.folds[fold].temperature for fold in videos["fold"]]
    asked, tables, checked = (UNDISTURBED, *levels), list[pl.DataFrame](), 0.0
    for level in (UNDISTURBED, *RECIPES):
        if level not in asked and not (folder / level).is_dir():
            continue
        with closing(Journal(folder / level, _identity(networks, level), Finding)) as journal:
            found = list(journal.known(list(files)).values())
            if level in asked:
                before = asked.index(level) * len(files)
                find = partial(_scored, networks, files, level, workers)
                tell = partial(lambda before, done, _: progress(before + done, len(asked) * len(files)), before)
                found = [one for some, _ in found_in_blocks(journal, list(files), find, tell) for one in some]
        if len(found) < len(files):
            continue
        calibrated = [(one.logits, temperature) for one, temperature in zip(found, temperatures, strict=True)]
        scored = videos.with_columns(
            score=pl.Series([next(iter(probabilities(*one)), None) for one in calibrated], dtype=pl.Float64),
            logit=pl.Series([next(iter(one.logits), None) for one in found], dtype=pl.Float64),
            failure=pl.Series([one.failure or None for one in found], dtype=pl.String),
        )
        if level == UNDISTURBED:
            checked = _check_undisturbed(scored, networks)
        kind = RECIPES[level].kind if level in RECIPES else level
        tables.append(scored.with_columns(level=pl.lit(level), kind=pl.lit(kind)))
    columns = pl.concat(tables).select(list(ROBUSTNESS.columns)).to_dict()
    return frame_of(columns, ROBUSTNESS), checked


def _scored(
    networks: Networks, files: Mapping[Path, Mapping[str, Any]], level: str, workers: int, todo: Sequence[Path]
) -> Generator[Finding]:
    """Yield the finding on each file of ``todo`` at a level, in any order.

    A finding has one logit: the output of the network that had not seen the video, with the prior logit added.

    Args:
        networks: the networks of all folds of the run.
        files: by path, at least the ``fold`` and ``content_sha256`` of the video.
        level: name of the level.
        workers: number of processes that decode and encode; 0: one per core.
        todo: paths of the files.
    """
    recipe = "" if level == UNDISTURBED else level
    asked = [FileToScore(path, (files[path]["fold"],), recipe, files[path]["content_sha256"]) for path in todo]
    with closing(score_files(networks, asked, workers=workers)) as answers:
        for answer in answers:
            file = asked[answer.position]
            # Without a digest, a failure is stored for the file as it is now: a restored file is scored.
            content = "" if answer.failure else file.content_sha256
            logits = tuple(answer.logits.values())
            yield Finding(path_to_text(file.path), content, logits=logits, failure=answer.failure, lasts=answer.lasts)


def _identity(networks: Networks, level: str) -> str:
    """Return a hex SHA-256 of everything that determines the scores of ``level``, except the video."""
    recipe = "" if level == UNDISTURBED else RECIPES[level].digest
    folds = [(fold, of.weights, of.temperature, of.prior_logit) for fold, of in networks.folds.items()]
    code = [networks.store.decode_hash, networks.measured_by]
    return sha256_of_json([recipe, code, folds, networks.compute.describe()])


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
