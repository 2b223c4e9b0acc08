"""Pairs of videos and texts: which are usable, what must stay together, and one split into train, validation and test.

Groups join what shows the same footage: one stated group, one file, one content, or perceptual near-duplicates. Equal
texts join nothing, since a text may stand beside many videos: how many test texts training has too is said instead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import polars as pl

from fvc_lib.corpus.copies.groups import Grouping, GroupMember, Merge, join_groups
from fvc_lib.corpus.copies.near_duplicates import near_duplicate_links
from fvc_lib.corpus.index import video_ids, written_when_refused
from fvc_lib.corpus.listing import Refusal, Rejections, counts_text, recognised
from fvc_lib.corpus.probing import ProbeResult, probe_files
from fvc_lib.corpus.samples.captions import generate_sample_captions
from fvc_lib.corpus.sources.video_text_manifest import PairListing, PairRow, find_manifest, read_pairs
from fvc_lib.corpus.split import split_parts
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, StoppedError
from fvc_lib.services.registry import PAIR_LAYOUTS
from fvc_lib.services.tables import PARTS, VIDEO_TEXTS, check_table

# --- What became of a corpus of videos and texts, in sentences; and the refusal of one that nothing can be made of.


_REMEDIES = {
    "missing_video": "Fetch the files that are missing, or drop their rows.",
    "no_path": "Fill the column 'path'.",
    "no_text": "Fill the column 'text'.",
    "malformed_row": "Give every row as many cells as the header, in UTF-8.",
    "outside_corpus": "Put the manifest into the folder that holds the videos: files outside it are never read.",
    "unknown_split": "Write train, validation or test into the column 'split', or nothing.",
}
_WHY = {
    "same_source": "by a file listed in both",
    "same_content": "by equal content",
    "near_duplicate": "by near-duplicates",
}


def notes_of(
    pairs: pl.DataFrame, listing: PairListing, rejections: Rejections, merges: Sequence[Merge], num_copies: int
) -> Iterator[str]:
    """Sentences with counts on a VIDEO_TEXTS table.

    Args:
        pairs: the table.
        listing: what the manifest lists.
        rejections: its rows that are not used.
        merges: links that joined what the manifest keeps apart.
        num_copies: files whose content another listed file has.
    """
    by_text = pairs.group_by("text_id").agg(pl.col("video_id").n_unique().alias("videos"))["videos"]
    by_video = pairs.group_by("video_id").agg(pl.col("text_id").n_unique().alias("texts"))["texts"]
    yield (
        f"{listing.num_rows:,} rows of the manifest give {pairs.height:,} pairs of {len(by_video):,} videos and "
        f"{len(by_text):,} different texts."
    )
    yield _several(by_text, "texts stand beside several videos") + " Equal texts are one text."
    yield _several(by_video, "videos have several texts")
    if rejections.rows:
        reasons = counts_text(row[4] for row in rejections.rows)
        missing = sum(row[4] == "missing_video" for row in rejections.rows)
        yield f"{len(rejections.rows):,} rows are not used ({reasons}); the files of {missing:,} of them are missing."
    if num_copies:
        yield f"{num_copies:,} files have the content of another one: their texts stand beside that video."
    if merges:
        reasons = ", ".join(f"{sum(m.why == why for m in merges):,} {how}" for why, how in _WHY.items())
        yield f"{len(merges):,} links joined groups beyond what the manifest states: {reasons}."
    sizes = pairs.group_by("part").agg(pl.len(), *(pl.col(f"{name}_id").n_unique() for name in ("video", "group")))
    rows = {row["part"]: row for row in sizes.iter_rows(named=True)}
    told = "; ".join(
        f"{part} {rows[part]['len']:,} pairs of {rows[part]['video_id']:,} videos in {rows[part]['group_id']:,} groups"
        for part in PARTS
        if part in rows
    )
    yield f"Parts: {told}."
    yield _known_texts(pairs)


def _several(counts: pl.Series, what: str) -> str:
    several = counts.filter(counts > 1)
    most = f", at most {int(several.to_numpy().max()):,}" if len(several) else ""
    return f"{len(several):,} {what}{most}."


def _known_texts(pairs: pl.DataFrame) -> str:
    """How much of the test could be known by heart from training."""
    trained = pairs.filter(pl.col("part") == "train")["text_id"].unique()
    test = pairs.filter(pl.col("part") == "test")
    texts = test["text_id"].unique()
    known = test.filter(pl.col("text_id").is_in(trained.implode()))
    if known.is_empty():
        return f"None of the {len(texts):,} different test texts stands beside a training video."
    return (
        f"{known['text_id'].n_unique():,} of the {len(texts):,} different test texts ({known.height:,} of "
        f"{test.height:,} test pairs) also stand beside training videos: a model may know them by heart."
    )


def refuse_lost(listing: PairListing, rejections: Rejections, max_rejected_share: float) -> None:
    """Stop on a manifest of which nothing, or too little, can be used.

    Asked before rows that are only repeated, or are copies across the split, are rejected: those are no loss.

    Raises:
        DataError: no usable row, or more than ``max_rejected_share`` of the rows lost.
    """
    lost = rejections.rows
    allowed = max_rejected_share * listing.num_rows
    if listing.num_rows and len(lost) < listing.num_rows and len(lost) <= allowed:
        return
    reasons = counts_text(row[4] for row in lost) or "the manifest has no row"
    remedies = " ".join(
        dict.fromkeys(_REMEDIES.get(row[4], "Repair or replace the files that cannot be read.") for row in lost)
    )
    examples = " For example: " + " ".join(row[5] for row in lost[:3]) if lost else ""
    usable = listing.num_rows - len(lost)
    raise DataError(
        f"corpus {str(listing.root)!r}: {usable:,} of {listing.num_rows:,} pairs of a video and a text can be used; at "
        f"most {max_rejected_share:.0%} may be lost ({reasons}). {remedies}{examples}"
    )


def refuse_empty_parts(empty: Sequence[str], num_groups: int) -> None:
    """Stop on a split that leaves nothing to learn from, to choose the epoch by, or to be tested on.

    Raises:
        DataError: names the part that is empty.
    """
    if empty:
        raise DataError(
            f"split: no pair is left for {' and '.join(empty)}; got {num_groups:,} groups, wanted some in each of "
            f"{', '.join(PARTS)}. Add videos that are not of one group, or change the manifest's split."
        )


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
        corpus = Path(config.corpus)
        listing: PairListing = recognised(PAIR_LAYOUTS, corpus).read(corpus, config.manifest_separator)
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
