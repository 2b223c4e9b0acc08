"""Measure the forensic features of every video of an index, each in a worker process, and keep what was measured.

A file nobody vouches for may crash, hang or exhaust its process: that costs the one video. What a video gave is kept
in the cache by its content, the code that samples it and the code of each family, so that a stage that was killed, or
a family that was added, measures only what is missing.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from fvc_lib.services.atomic_files import AnyPath, path_from_text, sweep_temporaries
from fvc_lib.services.errors import FvcError
from fvc_lib.services.isolated_workers import Answer, run_isolated
from fvc_lib.services.records.digests import read_document, write_document
from fvc_lib.services.tables import FEATURES, write_table
from fvc_lib.video.features.family import FeatureFamily, families_named
from fvc_lib.video.features.worker import code_of, code_of_samples
from fvc_lib.video.reencode import TIMEOUT_SECONDS as REENCODE_SECONDS, recipe_named

FEATURES_FOLDER = "features"
TIMEOUT_SECONDS = 240.0  # for one video; then it is given up
# Run in the worker processes; whoever depends on this module depends on every family: fvc_lib.video.features.*
MEASURE_FUNCTION = "fvc_lib.video.features.worker:measure_item"

_Kept = dict[str, list[Any]]  # by family: the code that measured, and the values


@dataclass(frozen=True)
class FeatureReport:
    """What was done: videos measured and reused, and (video id, what was wrong) of those that failed."""

    measured: int
    reused: int
    failed: tuple[tuple[str, str], ...]


class FeatureStore:
    """What was measured, one small file per content of a video: ``features/<code of samples>/ab/abcd.json``.

    Args:
        cache_dir: the cache that runs share.
        recipe: by which videos are re-encoded before they are measured; empty: not at all.
    """

    def __init__(self, cache_dir: AnyPath, recipe: str = "") -> None:
        made_by = f"_{recipe}_{recipe_named(recipe).digest[:16]}" if recipe else ""
        self.folder = Path(cache_dir) / FEATURES_FOLDER / f"{code_of_samples()[:32]}{made_by}"

    def path(self, content_sha256: str) -> Path:
        """Where what a video gave is kept."""
        return self.folder / content_sha256[:2] / f"{content_sha256}.json"

    def read(self, content_sha256: str, families: Sequence[FeatureFamily], codes: dict[str, str]) -> _Kept:
        """What is kept of a video and was measured by the code ``codes``; a damaged file counts as none."""
        kept = read_document(self.path(content_sha256))
        named = (family.name for family in families)
        return {name: kept[name] for name in named if name in kept and kept[name][0] == codes[name]}

    def add(self, content_sha256: str, measured: _Kept) -> None:
        """Keep more of a video, beside what other families gave."""
        path = self.path(content_sha256)
        write_document(path, {**read_document(path), **measured})


def measure_features(
    index: pl.DataFrame,
    corpus_root: AnyPath,
    families: str,
    cache_dir: AnyPath,
    table: AnyPath | None,
    *,
    recipe: str = "",
    progress: Callable[[int, int], None] | None = None,
    workers: int = 0,
) -> FeatureReport:
    """Measure every video, and write the table of features (FEATURES), a row per video in the order of ``index``.

    Args:
        index: an INDEX table.
        corpus_root: what its ``path`` column is relative to.
        families: names separated by commas, or ``all``.
        cache_dir: where what was measured is kept.
        table: the table to write; a video that failed has a row of nulls. None: no table.
        recipe: by which every video is re-encoded first; empty: not at all.
        progress: called with (videos done, videos in all).
        workers: processes that measure, as memory allows; 0: one per core. Values do not depend on it.

    Raises:
        OSError: the cache or the table cannot be written. A video that fails is reported instead.
        UsageError: a family is unknown or cannot be imported.
        FvcError: a family was edited while this process runs the code before.
    """
    chosen = families_named(families)
    codes = {family.name: code_of(family) for family in chosen}
    store = FeatureStore(cache_dir, recipe)
    sweep_temporaries(store.folder)
    videos = index.select("video_id", "path", "content_sha256").rows()
    values = np.full((len(videos), sum(len(family.columns()) for family in chosen)), np.nan, np.float32)
    failed: dict[int, str] = {}
    todo, items = [], []
    for position, (_, path, content) in enumerate(videos):
        kept = store.read(content, chosen, codes)
        _fill(values[position], chosen, kept)
        if missing := {name: codes[name] for name in codes if name not in kept}:
            todo.append(position)
            source = str(Path(corpus_root) / path_from_text(path))
            encoded = [recipe, str(cache_dir)] if recipe else []
            items.append({"source": source, "content_sha256": content, "families": missing, "encoded": encoded})
    done = len(videos) - len(todo)
    if progress is not None:
        progress(done, len(videos))
    limits: dict[str, Any] = {"workers": workers}
    limits["timeout_seconds"] = REENCODE_SECONDS if recipe else TIMEOUT_SECONDS
    with closing(run_isolated(MEASURE_FUNCTION, items, **limits)) as answers:
        for answer in answers:
            position, item = todo[answer.position], items[answer.position]
            found, failure = _values_in(answer, str(item["source"]))
            if failure is not None:
                failed[position] = failure
                values[position] = np.nan
            else:
                measured = {name: [codes[name], found[name]] for name in found}
                store.add(videos[position][2], measured)
                _fill(values[position], chosen, measured)
            done += 1
            if progress is not None:
                progress(done, len(videos))
    if table is not None:
        columns = [column for family in chosen for column in family.columns()]
        frame = pl.DataFrame(values, schema=dict.fromkeys(columns, pl.Float32)).fill_nan(None)
        write_table(index.select("video_id", "group_id", "label").hstack(frame), FEATURES, table)
    of_failed = tuple((videos[position][0], failed[position]) for position in sorted(failed))
    return FeatureReport(len(todo) - len(failed), len(videos) - len(todo), of_failed)


def _fill(row: npt.NDArray[np.float32], families: Sequence[FeatureFamily], kept: _Kept) -> None:
    """Write into a video's row (C,) what is kept of it."""
    start = 0
    for family in families:
        end = start + len(family.columns())
        if family.name in kept:
            row[start:end] = np.array(kept[family.name][1], np.float64)
        start = end
    row[~np.isfinite(row)] = np.nan


def _values_in(answer: Answer, source: str) -> tuple[dict[str, list[float | None]], str | None]:
    """Values by family, or what is wrong with the video."""
    if answer.failure is not None:
        return {}, f"{source!r}: {answer.failure}: {answer.detail}. Re-encode it, or leave it out."
    if "code_changed" in answer.value:
        raise FvcError("the code of a feature was changed since it was loaded here. Restart the kernel or the command.")
    return answer.value.get("values", {}), answer.value.get("video_error")
