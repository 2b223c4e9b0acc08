"""What was looked at to say that nothing leaked from one part of a split to another, for tasks with one split.

Overlaps are counted anew from the files as they are now, what is in them and what they look like, and not from
``group_id`` alone: a fault in the grouping would be one in every check that trusts it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import polars as pl

from fvc_lib.corpus.image_likeness import SamePictures
from fvc_lib.corpus.image_probing import probe_images
from fvc_lib.corpus.near_duplicates import near_duplicate_links
from fvc_lib.corpus.probing import probe_files
from fvc_lib.services.config import RunConfig
from fvc_lib.services.tables import LEAKAGE_AUDIT, check_table

Progress = Callable[[int, int], None]
Row = tuple[str, int | None, float | None, str, bool | None]
Links = Sequence[tuple[int, int]]


def image_split_audit(
    images: pl.DataFrame,
    root: Path,
    config: RunConfig,
    *,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
) -> pl.DataFrame:
    """Every check with its count, a sentence, and whether it passed (LEAKAGE_AUDIT); row order does not matter.

    Args:
        images: IMAGES schema, as it is trained on.
        root: folder that ``path`` is relative to. Every file is looked at again, where it is not as it was remembered.
        config: ``near_duplicate_bits``, ``cache_dir`` and ``probe_workers``.
        progress: called with (files looked at, files).
        stop: asked after each file.

    Raises:
        StoppedError: ``stop`` said so.
    """
    files = images.select("path", "part", "group_id", "content_sha256").sort("path")
    probed = probe_images(
        root, files["path"].to_list(), Path(config.cache_dir) / "index",
        workers=config.probe_workers, progress=progress, stop=stop,
    )  # fmt: skip
    found = [probed[path] for path in files["path"]]
    known = [each.facts.content_sha256 if each.facts is not None else None for each in found]
    files = files.with_columns(now=pl.Series(known, dtype=pl.String))
    links: Links | None = None
    if config.near_duplicate_bits:
        seen = [place for place, content in enumerate(known) if content is not None]
        judge = SamePictures([found[place].thumbnail for place in seen])
        hashes = [found[place].perceptual_hash for place in seen]
        near = near_duplicate_links(hashes, config.near_duplicate_bits, judge)
        links = [(seen[one], seen[other]) for one, other in near]
    return _audit(files, "image", links, [each.perceptual_hash is not None for each in found])


def video_text_split_audit(
    pairs: pl.DataFrame,
    root: Path,
    config: RunConfig,
    *,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
) -> pl.DataFrame:
    """The same of VIDEO_TEXTS; each video is counted once for all of its texts."""
    files = pairs.select("path", "part", "group_id", "content_sha256").unique().sort("path", "part", "group_id")
    paths = files["path"].unique(maintain_order=True).to_list()
    probed, _ = probe_files(
        root, paths, Path(config.cache_dir) / "index", workers=config.probe_workers, progress=progress, stop=stop
    )
    found = [probed[path] for path in files["path"]]
    known = [each.content_sha256 if each.probe is not None else None for each in found]
    files = files.with_columns(now=pl.Series(known, dtype=pl.String))
    links: Links | None = None
    if config.near_duplicate_bits:
        links = near_duplicate_links([each.perceptual_hash for each in found], config.near_duplicate_bits)
    return _audit(files, "video", links, [each.perceptual_hash is not None for each in found])


def _audit(files: pl.DataFrame, thing: str, links: Links | None, has_hash: Sequence[bool]) -> pl.DataFrame:
    """Of ``path part group_id content_sha256 now``, the last the content at present, null of what cannot be read."""
    rows = [
        _in_two_parts(files, "group_id", "groups_in_two_parts", "group"),
        _in_two_parts(files, "path", "files_in_two_parts", "file"),
        _in_two_parts(files, "now", "contents_in_two_parts", "file content"),
        _near_copies(files, thing, links, has_hash),
        _as_indexed(files),
    ]
    types = {name: column.dtype.type for name, column in LEAKAGE_AUDIT.columns.items()}
    return check_table(pl.DataFrame(rows, schema=types, orient="row"), LEAKAGE_AUDIT, "leakage audit")


def _in_two_parts(files: pl.DataFrame, column: str, check: str, thing: str) -> Row:
    parts = files.drop_nulls(column).group_by(column).agg(pl.col("part").n_unique())
    count = int((parts["part"] > 1).sum())
    return check, count, None, f"{count:,} of {_counted(parts.height, thing)} in more than one part.", count == 0


def _near_copies(files: pl.DataFrame, thing: str, links: Links | None, has_hash: Sequence[bool]) -> Row:
    """Connected by as few links as possible, so 0 across parts is 0 pairs across parts."""
    check = "near_copies_in_two_parts"
    if links is None:
        return check, None, None, "Near-copies were not looked for (near_duplicate_bits is 0).", None
    part, path = files["part"].to_list(), files["path"].to_list()
    across = [(path[one], path[other]) for one, other in links if part[one] != part[other]]
    example = f", e.g. {across[0][0]!r} and {across[0][1]!r}" if across else ""
    without = len(has_hash) - sum(has_hash)
    unknown = f"; {_counted(without, thing)} too plain to be compared" if without else ""
    finding = (
        f"{len(across):,} of {_counted(len(links), 'link')} between {thing}s that look alike go from one part to "
        f"another{example}{unknown}."
    )
    return check, len(across), None, finding, not across


def _as_indexed(files: pl.DataFrame) -> Row:
    other = files.filter(pl.col("now").ne_missing(pl.col("content_sha256")))["path"].to_list()
    example = f", e.g. {other[0]!r}" if other else ""
    finding = f"{len(other):,} of {_counted(files.height, 'file')} not as the index found it{example}."
    return "files_unlike_the_index", len(other), None, finding, not other


def _counted(number: int, thing: str) -> str:
    return f"{number:,} {thing if number == 1 else f'{thing}s'}"
