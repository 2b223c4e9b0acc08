"""Notes on a corpus whose videos are re-encoded to one height and one frame rate."""

import shutil
from pathlib import Path

import polars as pl

from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.video.reencode import recipe_named

# By whether the recipe is lossless: means over filmed and generated videos of 240 and 480 rows at 8 frames a second.
_BYTES_PER_PIXEL = {True: 0.3, False: 0.03}
_SAME_RATE = 0.01  # 23.976 and 24, 29.97 and 30 frames a second differ by less


def rescaling_notes(originals: pl.DataFrame, recipe: str) -> tuple[str, ...]:
    """Return notes that count enlarged videos and videos with repeated frames, and say how to avoid them.

    Args:
        originals: INDEX of the files before re-encoding.
        recipe: settings of the re-encoding (``RunConfig.recipe``). The notes are empty if it sets no height.
    """
    made = recipe_named(recipe)
    if not made.height or originals.is_empty():
        return ()
    turned = pl.col("rotation_degrees").is_in([90, 270])
    rows = originals.select(pl.when(turned).then("width").otherwise("height")).to_series().to_list()
    rates = originals["frames_per_second"].drop_nulls().to_list()
    small = sum(height < made.height for height in rows)
    slow = sum(rate < made.rate * (1 - _SAME_RATE) for rate in rates)
    notes = [f"Every video has {made.height} rows and {made.rate} frames a second now."]
    if small:
        notes.append(
            f"{small:,} of {originals.height:,} videos were enlarged and are blurred by it, which may still tell them "
            f"apart: -p rescale {max(min(rows) // 2 * 2, 16)} would enlarge none."
        )
    if slow:
        notes.append(
            f"{slow:,} of {originals.height:,} videos had fewer frames a second, and repeated frames may still tell "
            "them apart. Leave them out of the corpus to rule that out."
        )
    return tuple(notes)


def disk_sentence(recipe: str, cache_dir: AnyPath) -> str:
    """Return a sentence on the disk space that rescaled videos need per minute, and on the free space.

    The need is estimated for pictures of 16:9. The free space is that of the disk with ``cache_dir``.
    """
    made, folder = recipe_named(recipe), Path(cache_dir).absolute()
    a_minute = 60 * made.rate * made.height**2 * 16 / 9 * _BYTES_PER_PIXEL[made.is_lossless]
    there = next(each for each in (folder, *folder.parents) if each.is_dir())
    free = f"{shutil.disk_usage(there).free / 1e9:,.1f} GB are free"
    return f"rescaled videos take about {a_minute / 1e6:,.0f} MB a minute in {str(cache_dir)!r}, where {free}"
