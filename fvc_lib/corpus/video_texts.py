"""Pairs of videos and texts: which are usable, what must stay together, and one split into train, validation and test.

Groups join what shows the same footage: one stated group, one file, one content, or perceptual near-duplicates. Equal
texts join nothing, since a text may stand beside many videos: how many test texts training has too is said instead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import polars as pl

from fvc_lib.corpus.groups import Grouping, GroupMember, join_groups
from fvc_lib.corpus.index import video_ids
from fvc_lib.corpus.listing import Refusal, Rejections
from fvc_lib.corpus.near_duplicates import near_duplicate_links
from fvc_lib.corpus.part_split import split_parts
from fvc_lib.corpus.probing import ProbeResult, probe_files
from fvc_lib.corpus.refused_tables import written_when_refused
from fvc_lib.corpus.sample_captions import generate_sample_captions
from fvc_lib.corpus.video_text_manifest import PairListing, PairRow, find_manifest, read_pairs
from fvc_lib.corpus.video_text_notes import notes_of, refuse_empty_parts, refuse_lost
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import StoppedError
from fvc_lib.services.tables import check_table
from fvc_lib.services.task_tables import PARTS, VIDEO_TEXTS

Progress = Callable[[int, int], None]
_SAMPLE_FOLDER = "sample_captions"


@dataclass(frozen=True)
class VideoTextIndex:
    """What a corpus of videos and texts holds.

    Attributes:
        pairs: VIDEO_TEXTS table, sorted by ``pair_id``.
        rejected: REJECTED table of the manifest's rows that are not used.
        root: folder that ``path`` is relative to.
        notes: sentences on what was found and done, with counts.
    """

    pairs: pl.DataFrame
    rejected: pl.DataFrame
    root: Path
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Video:
    """What is known of a row's file."""

    content_sha256: str
    num_frames: int
    duration_seconds: float | None


def video_text_root(config: RunConfig) -> Path:
    """The folder that the ``path`` column of ``config``'s pairs is relative to; nothing is read or generated.

    Raises:
        UsageError: ``config.corpus`` is no manifest and no folder with one.
    """
    if not config.corpus:
        return (Path(config.data_dir) / _SAMPLE_FOLDER).absolute()
    return find_manifest(Path(config.corpus)).parent.absolute()


def index_video_texts(
    config: RunConfig,
    *,
    rejected_path: Path | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
) -> VideoTextIndex:
    """Read the manifest of ``config.corpus`` (without one, of the generated corpus), probe its videos, and split it.

    The result depends on the files, the manifest's rows and the seed: not on the rows' order, the worker count or
    where the corpus lies. Probes are kept under ``config.cache_dir`` as they come; a later call goes on from them.

    Args:
        config: ``corpus``, ``manifest_separator``, ``near_duplicate_bits``, ``max_rejected_share``, the split's shares
            and ``seed`` decide the result.
        rejected_path: where the REJECTED table goes when the corpus is refused, for the error to name it.
        progress: called with (done, total) of the clips generated, then of the files probed.
        stop: asked after each of them.

    Raises:
        UsageError: the corpus is no such manifest.
        DataError: no usable pair, too many lost, or too few groups for three parts.
        LeakageError: the manifest's own split has a group or a video on two sides.
        StoppedError: ``stop`` said so.
    """
    watched = _stopping(progress, stop)
    if config.corpus:
        listing = read_pairs(find_manifest(Path(config.corpus)), config.manifest_separator)
    else:
        sample = generate_sample_captions(video_text_root(config), progress=watched)
        listing = read_pairs(sample, ",")
    probes, _ = probe_files(
        listing.root, sorted({row.path for row in listing.rows}), Path(config.cache_dir) / "index",
        workers=config.probe_workers, progress=watched,
    )  # fmt: skip
    with written_when_refused(listing.rejections, rejected_path):
        return _index(listing, probes, config)


def _stopping(progress: Progress | None, stop: Callable[[], bool] | None) -> Progress:
    def watched(done: int, total: int) -> None:
        if progress is not None:
            progress(done, total)
        if stop is not None and done < total and stop():
            raise StoppedError(f"stopped after {done} of {total} files; what was done is kept. Run it again to go on.")

    return watched


def _index(listing: PairListing, probes: Mapping[str, ProbeResult], config: RunConfig) -> VideoTextIndex:
    rejections = listing.rejections
    rows = _readable(listing.rows, probes, rejections)
    videos = _videos(rows, probes)
    refuse_lost(listing, rejections, config.max_rejected_share)
    grouping, group_of = _group(listing, videos, probes, config.near_duplicate_bits)
    rows = _without_copies_across_the_split(rows, group_of, rejections)
    rows.sort(key=lambda row: (videos[row.path].content_sha256, row.text, row.path, row.row))
    split = split_parts(
        [group_of[row.path] for row in rows], [None] * len(rows), _official_parts(rows, group_of),
        validation_share=config.split_validation_share, test_share=config.split_test_share, seed=config.seed,
    )  # fmt: skip
    refuse_empty_parts(split.empty_parts, len(set(group_of.values())))
    places = _distinct(rows, videos, rejections)
    pairs = _table(places, rows, videos, group_of, split.parts, split.sources)
    num_copies = len({row.path for row in rows}) - pairs["video_id"].n_unique()
    notes = notes_of(pairs, listing, rejections, grouping.merges, num_copies)
    return VideoTextIndex(pairs, rejections.frame(), listing.root, (*notes, *split.notes))


def _readable(rows: Sequence[PairRow], probes: Mapping[str, ProbeResult], rejections: Rejections) -> list[PairRow]:
    """The rows whose file could be probed."""
    readable = []
    for row in rows:
        result = probes[row.path]
        if result.probe is not None:
            readable.append(row)
        else:
            rejections.add_file(row.path, Refusal(result.reason, result.detail), row=row.row)
    return readable


def _videos(rows: Sequence[PairRow], probes: Mapping[str, ProbeResult]) -> dict[str, _Video]:
    """What is known of the file of each path, sorted by path."""
    found = {}
    for path in sorted({row.path for row in rows}):
        result = probes[path]
        if result.probe is not None:
            found[path] = _Video(result.content_sha256, result.probe.num_frames, result.probe.duration_seconds)
    return found


def _first_paths(paths: Iterable[str], videos: Mapping[str, _Video]) -> dict[str, str]:
    """What the video of each content is called by: the first path of its files."""
    first: dict[str, str] = {}
    for path in sorted(paths):
        first.setdefault(videos[path].content_sha256, path)
    return first


def _group(
    listing: PairListing, videos: Mapping[str, _Video], probes: Mapping[str, ProbeResult], near_duplicate_bits: int
) -> tuple[Grouping, dict[str, str]]:
    """Groups of all readable files, and the group id of each path."""
    paths = list(videos)
    members = [GroupMember(path, path, videos[path].content_sha256) for path in paths]
    near = []
    if near_duplicate_bits:
        one_each = set(_first_paths(paths, videos).values())
        places = [place for place, path in enumerate(paths) if path in one_each]
        hashes = [probes[paths[place]].perceptual_hash for place in places]
        near = [(places[a], places[b]) for a, b in near_duplicate_links(hashes, near_duplicate_bits)]
    grouping = join_groups(members, near, listing.memberships)
    return grouping, dict(zip(paths, grouping.group_ids, strict=True))


def _without_copies_across_the_split(
    rows: Sequence[PairRow], group_of: Mapping[str, str], rejections: Rejections
) -> list[PairRow]:
    """Leave out training rows whose footage is, as another file, in the manifest's own test or validation part.

    A split that divides a stated group or one file contradicts its own manifest: those stay, for the split to refuse.
    """
    parts: defaultdict[str, set[str]] = defaultdict(set)
    said_of: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for row in rows:
        if row.part is not None:
            parts[group_of[row.path]].add(row.part)
            said_of["path", row.path].add(row.part)
            if row.stated_group is not None:
                said_of["group", row.stated_group].add(row.part)
    contradicted = {
        group_of[row.path]
        for row in rows
        if len(said_of["path", row.path]) > 1 or len(said_of["group", row.stated_group or ""]) > 1
    }
    kept = []
    for row in rows:
        group = group_of[row.path]
        last = max(parts[group], key=PARTS.index, default=row.part)
        if row.part in {None, last} or group in contradicted:
            kept.append(row)
            continue
        detail = (
            f"row {row.row}: is in {row.part}, but the {last} part shows the same footage (group {group!r}). "
            "Leave it out, or put both into one part; where they only look alike, lower near_duplicate_bits (0: off)."
        )
        rejections.add_file(row.path, Refusal("copy_across_split", detail), row=row.row)
    return kept


def _official_parts(rows: Sequence[PairRow], group_of: Mapping[str, str]) -> list[str | None]:
    """What the manifest says of each row, or of another row of its group."""
    said: defaultdict[str, set[str]] = defaultdict(set)
    for row in rows:
        if row.part is not None:
            said[group_of[row.path]].add(row.part)
    return [row.part or min(said[group_of[row.path]], default=None) for row in rows]


def _distinct(rows: Sequence[PairRow], videos: Mapping[str, _Video], rejections: Rejections) -> list[int]:
    """Places in ``rows`` of the first row of each pair of a content and a text."""
    first: dict[tuple[str, str], PairRow] = {}
    places = []
    for place, row in enumerate(rows):
        kept = first.setdefault((videos[row.path].content_sha256, row.text), row)
        if kept is row:
            places.append(place)
        else:
            detail = f"row {row.row}: the same video and text as row {kept.row}, which is used."
            rejections.add_file(row.path, Refusal("duplicate_pair", detail), row=row.row)
    return places


def _table(
    places: Sequence[int],
    rows: Sequence[PairRow],
    videos: Mapping[str, _Video],
    group_of: Mapping[str, str],
    parts: Sequence[str],
    sources: Sequence[str],
) -> pl.DataFrame:
    kept = [rows[place] for place in places]
    files = [videos[row.path] for row in kept]
    first_path = _first_paths({row.path for row in rows}, videos)
    hashes = {row.text: sha256(row.text.encode()).hexdigest() for row in kept}
    name_of_text = video_ids(hashes.values())
    name_of_video = video_ids(file.content_sha256 for file in files)
    text_id = [name_of_text[hashes[row.text]] for row in kept]
    video_id = [name_of_video[file.content_sha256] for file in files]
    columns = {
        "pair_id": [f"{video}_{text}" for video, text in zip(video_id, text_id, strict=True)],
        "video_id": video_id,
        "path": [first_path[file.content_sha256] for file in files],
        "text_id": text_id,
        "text": [row.text for row in kept],
        "group_id": [group_of[row.path] for row in kept],
        "part": [parts[place] for place in places],
        "split_source": [sources[place] for place in places],
        "num_frames": [file.num_frames for file in files],
        "duration_seconds": [file.duration_seconds for file in files],
        "content_sha256": [file.content_sha256 for file in files],
    }
    schema = {name: column.dtype.type for name, column in VIDEO_TEXTS.columns.items()}
    return check_table(pl.DataFrame(columns, schema=schema).sort("pair_id"), VIDEO_TEXTS, "the pairs")
