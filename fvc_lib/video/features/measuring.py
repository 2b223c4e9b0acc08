"""Measure the forensic features of all videos of an index (a table of videos), and cache the values.

Videos are measured in worker processes: if an untrusted file crashes or hangs its process, or uses up its memory, only
this video is lost. Values are cached by the video's content, the code that samples frames and the code of the family.
So after an interruption, or with an added family, only missing values are measured.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fvc_lib.services.atomic_files import AnyPath, path_from_text, sweep_temporaries
from fvc_lib.services.isolated_workers import run_isolated
from fvc_lib.services.records.digests import read_document, write_document
from fvc_lib.services.tables import FEATURES, write_table
from fvc_lib.video.features.family import FeatureFamily, families_named
from fvc_lib.video.features.worker import code_of, code_of_samples
from fvc_lib.video.reencode import TIMEOUT_SECONDS as REENCODE_SECONDS, recipe_named

FEATURES_FOLDER = "features"
TIMEOUT_SECONDS = 240.0  # time limit of one video
# The function of the worker processes. A module that names this one depends on every family: fvc_lib.video.features.*
MEASURE_FUNCTION = "fvc_lib.video.features.worker:measure_item"

Measured = Mapping[str, Any]  # by family: [hash of its code, values of its columns]


@dataclass(frozen=True)
class FeatureReport:
    """The result of ``measure_features``: the numbers of measured and of reused videos, and the videos that failed.

    Attributes:
        measured: number of videos that were measured.
        reused: number of videos whose values were all cached.
        failed: a tuple (video id, reason) for every video that failed.
    """

    measured: int
    reused: int
    failed: tuple[tuple[str, str], ...]


def features_folder(cache_dir: AnyPath, recipe: str = "") -> Path:
    """Return the folder in ``cache_dir`` for cached feature values.

    Its name contains a hash of the code that samples frames, so that changed code gets another folder. It also depends
    on ``recipe``, the name of the way in which videos are re-encoded before they are measured; empty: none.
    """
    by_recipe = f"_{recipe}_{recipe_named(recipe).digest[:16]}" if recipe else ""
    return Path(cache_dir) / FEATURES_FOLDER / f"{code_of_samples()[:32]}{by_recipe}"


def values_path(folder: Path, content_sha256: str) -> Path:
    """Return the path of the JSON file with a video's cached values, such as ``ab/abcd.json``.

    ``folder`` is a result of ``features_folder``; ``content_sha256`` is the video's SHA-256.
    """
    return folder / content_sha256[:2] / f"{content_sha256}.json"


def measure_features(
    index: pl.DataFrame,
    corpus_root: AnyPath,
    families: str,
    cache_dir: AnyPath,
    table: AnyPath | None,
    *,
    recipe: str = "",
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    workers: int = 0,
) -> FeatureReport:
    """Measure the forensic features of every video, and write the table FEATURES.

    The table has one row per video, in the order of ``index``. Only families without cached values for a video are
    measured.

    Args:
        index: an INDEX table, one row per video.
        corpus_root: the folder that the column ``path`` of ``index`` is relative to.
        families: names of feature families, separated by commas, or ``all``.
        cache_dir: where values are cached.
        table: the table to write, with nulls for a video that failed. None: no table.
        recipe: recipe (named way to re-encode) that is applied to every video first; empty: none.
        progress: called with (videos done, videos in all).
        workers: number of processes (fewer if memory is short); 0: one per core. Values do not depend on it.

    Raises:
        OSError: the cache or the table cannot be written. (A video that fails is only listed in the result.)
        UsageError: a family is unknown or cannot be imported.
    """
    chosen = families_named(families)
    codes = {family.name: code_of(family) for family in chosen}
    folder = features_folder(cache_dir, recipe)
    sweep_temporaries(folder)
    videos = index.select("video_id", "path", "content_sha256").rows()
    records = [values_path(folder, content) for _, _, content in videos]
    encoded = [recipe, str(cache_dir)] if recipe else []
    items = []
    for place, (_, path, content) in enumerate(videos):
        cached = _cached(records[place], codes)
        if missing := [name for name in codes if name not in cached]:
            source = str(Path(corpus_root) / path_from_text(path))
            item = {"source": source, "content_sha256": content, "families": missing, "encoded": encoded}
            items.append({**item, "place": place})
    failed: dict[int, str] = {}
    num_reused = len(videos) - len(items)
    progress(num_reused, len(videos))
    seconds = REENCODE_SECONDS if recipe else TIMEOUT_SECONDS
    answers = run_isolated(MEASURE_FUNCTION, items, workers=workers, timeout_seconds=seconds)
    with closing(answers):
        for done, answer in enumerate(answers, start=num_reused + 1):
            item = items[answer.position]
            place = item["place"]
            died = f"{item['source']!r}: {answer.failure}: {answer.detail}. Re-encode it, or leave it out."
            value = answer.value or {"video_error": died}
            if "measured" in value:
                write_document(records[place], {**read_document(records[place]), **value["measured"]})
            else:
                failed[place] = value["video_error"]
            progress(done, len(videos))
    if table is not None:
        rows = [_row(chosen, {} if place in failed else _cached(records[place], codes)) for place in range(len(videos))]
        columns = dict.fromkeys((column for family in chosen for column in family.columns()), pl.Float32)
        frame = pl.DataFrame(np.reshape(rows, (len(rows), len(columns))), schema=columns).fill_nan(None)
        write_table(index.select("video_id", "group_id", "label").hstack(frame), FEATURES, table)
    of_failed = tuple((videos[place][0], failed[place]) for place in sorted(failed))
    return FeatureReport(len(items) - len(failed), num_reused, of_failed)


def _cached(record: Path, codes: Mapping[str, str]) -> Measured:
    """Return the cached values of a video that are still valid, as a mapping from family names to entries.

    An entry of the JSON file ``record`` is valid if it was measured by the current code. ``codes`` maps family names to
    the hash of this code.
    """
    return {name: entry for name, entry in read_document(record).items() if codes.get(name) == entry[0]}


def _row(families: Sequence[FeatureFamily], measured: Measured) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return a video's values for all C columns of ``families``, float32 (C,).

    Columns of a family that ``measured`` (cached entries by family name) lacks are NaN.
    """
    parts = [
        np.array(measured[each.name][1], np.float64) if each.name in measured else np.full(len(each.columns()), np.nan)
        for each in families
    ]
    return np.concatenate(parts).astype(np.float32)
