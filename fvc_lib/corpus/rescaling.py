"""Notes on a corpus that is brought to one height and one frame rate."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl

from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.services.tables import INDEX, read_table
from fvc_lib.video.reencode import Recipe, recipe_named

# Of a frame, in the mean over filmed and generated videos at 240 and 480 rows and 8 frames a second (one video: 0.13 to
# 0.65 without loss).
_BYTES_PER_PIXEL = {True: 0.3, False: 0.03}
_SAME_RATE = 0.01  # 23.976 and 24, 29.97 and 30 frames a second differ by less


def rescaling_notes(originals: pl.DataFrame, recipe: str) -> tuple[str, ...]:
    """Return notes on enlarged videos and repeated frames, with values that avoid them.

    Args:
        originals: INDEX of the files as they are.
        recipe: by which they are written anew (``RunConfig.recipe``).
    """
    made = recipe_named(recipe)
    return tuple(_notes(originals, made)) if made.height and originals.height else ()


def shown_rows(originals: pl.DataFrame) -> pl.Series:
    """Return the displayed height in pixels of each video of an INDEX."""
    turned = pl.col("rotation_degrees").is_in([90, 270])
    return originals.select(rows=pl.when(turned).then("width").otherwise("height")).to_series()


def _notes(originals: pl.DataFrame, made: Recipe) -> Iterator[str]:
    rows = shown_rows(originals)
    rates = originals["frames_per_second"].drop_nulls()
    small, slow = int((rows < made.height).sum()), int((rates < made.rate * (1 - _SAME_RATE)).sum())
    least, slowest = int(rows.to_numpy().min()), float(rates.to_numpy().min(initial=np.inf))
    had = f"{least} rows and {slowest:.4g} frames a second" if rates.len() else f"{least} rows"
    yield f"Every video has {made.height} rows and {made.rate} frames a second now; the least had {had}."
    if small:
        yield (
            f"{small:,} of {originals.height:,} videos were enlarged and are blurred by it, so that what was small may "
            f"still be told: -p rescale {max(least // 2 * 2, 16)} would enlarge none."
        )
    if slow:
        yield (
            f"{slow:,} of {originals.height:,} videos had fewer frames a second, so that frames of theirs are repeated "
            f"and they may still be told: -p rescale_rate {max(1, int(slowest + _SAME_RATE))} would repeat none."
        )


def expected_bytes(seconds: float, recipe: str) -> int:
    """About how much disk so many seconds of video of 16:9 take once ``recipe`` has rescaled them; 0: it does not."""
    made = recipe_named(recipe)
    return int(seconds * made.rate * made.height**2 * 16 / 9 * _BYTES_PER_PIXEL[made.is_lossless])


def disk_sentence(recipe: str, cache_dir: AnyPath, index: Path | None) -> str:
    """Return a sentence on the disk that rescaled videos take, and the free space."""
    there = next(
        folder for folder in (Path(cache_dir).absolute(), *Path(cache_dir).absolute().parents) if folder.is_dir()
    )
    free = f"in {str(cache_dir)!r}, where {shutil.disk_usage(there).free / 1e9:,.1f} GB are free"
    if index is None or not index.is_file():
        return f"rescaled videos take about {expected_bytes(60, recipe) / 1e6:,.0f} MB a minute {free}"
    seconds = float(read_table(index, INDEX, without=["perceptual_hash"])["duration_seconds"].sum())
    taken = f"{expected_bytes(seconds, recipe) / 1e9:,.1f} GB for {seconds / 60:,.0f} minutes"
    return f"rescaled videos take about {taken} {free}; those that are there already are not made again"
