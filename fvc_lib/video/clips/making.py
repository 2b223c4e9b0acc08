"""Fill the clip store from an index: decode each video once in a worker process, then augment what was stored.

Decoding touches files nobody vouches for, so it happens where a crash, a hang or a memory limit costs that one video.
Augmenting is arithmetic on our own clips and happens in threads beside it; a video's copies are begun as soon as its
original is there, and no more videos than a few are in hand at once.
"""

import csv
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import polars as pl

from fvc_lib.services.atomic_files import AnyPath, path_from_text, sweep_temporaries
from fvc_lib.services.clip_settings import PLAIN_VIEW
from fvc_lib.services.errors import DataError, FvcError
from fvc_lib.services.isolated_workers import Answer, available_cores, run_isolated
from fvc_lib.services.records.digests import read_document
from fvc_lib.services.tables import AUGMENTED, SEEN_CLIPS, frame_of, write_table
from fvc_lib.video.augmentations import apply_augmentation, draw_augmentation
from fvc_lib.video.clips.clip_file import Pixels
from fvc_lib.video.clips.store import ClipStore, contact_sheet
from fvc_lib.video.decode.views import SeenClip, with_box
from fvc_lib.video.reencode import TIMEOUT_SECONDS as REENCODE_SECONDS

TIMEOUT_SECONDS = 120.0  # for decoding one video; then it is given up
CROP_ADDRESS_BYTES = 24 << 30  # of one decoding process with a crop
_CROP_WORKER_BYTES = 1 << 30  # resident, with torch and a network that finds faces
DECODE_FUNCTION = "fvc_lib.video.clips.worker:make_original"  # run in the worker processes

Row = tuple[Any, ...]


@dataclass(frozen=True)
class ClipReport:
    """What was done: clips made and reused, and (video id, what was wrong) of the videos that failed."""

    made: int
    reused: int
    failed: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class _Video:
    """One row of the index, its place there, and which of its clips are not in the store."""

    position: int
    missing: tuple[int, ...]
    video_id: str
    path: str
    label: str
    group_id: str
    content_sha256: str


@dataclass(frozen=True)
class _Outcome:
    """One finished video: the table's rows of its clips, or what is wrong with it."""

    video: _Video
    rows: tuple[Row, ...] = ()
    failure: str | None = None


def make_clips(
    store: ClipStore,
    index: pl.DataFrame,
    corpus_root: AnyPath,
    augmentations_per_video: int,
    metadata_csv: AnyPath | None,
    *,
    progress: Callable[[int, int], None] | None = None,
    workers: int = 0,
) -> ClipReport:
    """Make the original clip and ``augmentations_per_video`` augmented ones of every video, reusing what is there.

    ``metadata_csv`` grows by a video's rows as soon as its clips are there, in the order they are finished; a killed
    run may leave its last line torn. At the end it is replaced by the whole table, checked against ``AUGMENTED``, in
    the order of ``index``.

    Args:
        store: where clips are kept.
        index: an INDEX table.
        corpus_root: what its ``path`` column is relative to.
        augmentations_per_video: clips besides the original.
        metadata_csv: the table to write, one row per clip, with paths below ``store.cache_dir``; None: no table.
        progress: called with (videos done, videos in all).
        workers: processes that decode, as memory allows, and threads that augment; 0: one per core. Clips are the same.

    Raises:
        OSError: clips or the table cannot be written. A video that fails is reported instead.
        FvcError: the code that decodes or crops was edited while this process runs the one before.
        DataError: the user's function that crops fails.
    """
    corpus_root, metadata_csv = Path(corpus_root), None if metadata_csv is None else Path(metadata_csv)
    store.note_use()
    numbers = range(augmentations_per_video + 1)
    videos = list(_videos(store, index, numbers))
    # What a killed writer was at is missing. The whole store may be millions of files, of other runs for the most part.
    for folder in {store.clip_path(each.video_id, number).parent for each in videos for number in each.missing}:
        sweep_temporaries(folder)
    rows: dict[int, tuple[Row, ...]] = {}
    made, failed, known = 0, {}, sum(not video.missing for video in videos)
    with ExitStack() as stack:
        stream = None
        if metadata_csv is not None:
            metadata_csv.parent.mkdir(parents=True, exist_ok=True)
            stream = stack.enter_context(metadata_csv.open("w", encoding="utf-8", newline=""))
            _append(stream, [tuple(AUGMENTED.columns)])
        decoded = _decoded(store, videos, corpus_root, workers)
        stack.enter_context(closing(decoded))
        outcomes = stack.enter_context(closing(_augmented(store, decoded, numbers, workers)))
        for done, outcome in enumerate(outcomes, start=1):
            video = outcome.video
            if outcome.failure is not None:
                failed[video.position] = (video.video_id, outcome.failure)
            else:
                made += len(video.missing)
                rows[video.position] = outcome.rows
                if stream is not None:
                    _append(stream, outcome.rows)
            if progress is not None:
                progress(max(done, known), len(videos))
    table = [row for position in sorted(rows) for row in rows[position]]
    if metadata_csv is not None:
        schema = {name: column.dtype.type for name, column in AUGMENTED.columns.items()}
        write_table(pl.DataFrame(table, schema=schema, orient="row"), AUGMENTED, metadata_csv)
    return ClipReport(made, len(table) - made, tuple(failed[position] for position in sorted(failed)))


def write_seen(store: ClipStore, index: pl.DataFrame, path: AnyPath) -> pl.DataFrame:
    """Write what each clip of the videos of ``index`` (INDEX) shows, SEEN_CLIPS, one row per clip; and return it.

    Videos without a clip have no row. Where clips show whole pictures spread over the video, there is nothing to say:
    no row, and no file.

    Raises:
        DataError: the record beside a clip is damaged.
        OSError: the table cannot be written.
    """
    rows: list[dict[str, Any]] = []
    for video_id, group_id, label, source in index.select("video_id", "group_id", "label", "path").iter_rows():
        if store.view == PLAIN_VIEW or not store.has(video_id, 0):
            continue
        beside = store.seen_path(video_id)
        try:
            seen = [asdict(SeenClip(**each)) for each in read_document(beside)["clips"]]
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise DataError(f"{str(beside)!r}: {error}. Delete the file and run 03_augmentation again.") from error
        video = {"video_id": video_id, "group_id": group_id, "label": label, "path": source}
        rows += [{**video, **each, "note": each["note"] or None} for each in seen]
    table = frame_of({name: [row[name] for row in rows] for name in SEEN_CLIPS.columns}, SEEN_CLIPS)
    if store.view != PLAIN_VIEW:
        write_table(table, SEEN_CLIPS, path)
    return table


def notes_of(seen: pl.DataFrame) -> pl.DataFrame:
    """Columns ``note label clips of``: how many of each label's clips are not as asked for, by the reason.

    What is missed more often in one label than in the other tells the label by itself.
    """
    of = seen.group_by("label").len("of")
    noted = seen.drop_nulls("note").group_by("note", "label").len("clips")
    return noted.join(of, on="label").sort("note", "label")


def sheet_of(
    store: ClipStore, seen: pl.DataFrame, corpus_root: AnyPath, video_id: str, numbers: Sequence[int]
) -> Pixels:
    """Copies of a video's clips as rows, uint8 (H, W, 3); before each original the picture, with what is seen of it.

    ``seen`` is what ``write_seen`` gave, ``numbers`` are augmentation indices, the original's 0 among them.
    """
    rows = seen.filter(pl.col("video_id") == video_id)
    clips = [part for number in numbers for part in np.split(store.read(video_id, number), store.view.clips)]
    if rows.height:
        shows = [SeenClip(**row) for row in rows.drop("video_id", "group_id", "label", "path").fill_null("").to_dicts()]
        framed = with_box(Path(corpus_root) / path_from_text(rows["path"][0]), shows, store.fixed_size)
        clips = [
            np.concatenate([framed[place : place + 1] if place < len(framed) else np.full_like(framed[:1], 255), clip])
            for place, clip in enumerate(clips)
        ]
    return contact_sheet(clips)


def _videos(store: ClipStore, index: pl.DataFrame, numbers: range) -> Iterator[_Video]:
    columns = index.select("video_id", "path", "label", "group_id", "content_sha256")
    for position, values in enumerate(columns.iter_rows()):
        missing = tuple(number for number in numbers if not store.has(values[0], number))
        if 0 not in missing and store.view != PLAIN_VIEW and not store.seen_path(values[0]).is_file():
            missing = (0, *missing)
        yield _Video(position, missing, *values)


def _decoded(
    store: ClipStore, videos: list[_Video], corpus_root: Path, workers: int
) -> Generator[tuple[_Video, str | None], None, None]:
    """Every video whose original clip is there, and those that failed with the reason, as they become known."""
    todo = []
    for video in videos:
        if 0 in video.missing:
            todo.append(video)
        else:
            yield video, None
    sources = [str(corpus_root / path_from_text(video.path)) for video in todo]
    items = [
        {
            "source": source,
            "target": str(store.clip_path(video.video_id, 0).absolute()),
            "content_sha256": video.content_sha256,
            "num_frames": store.num_frames,
            "fixed_size": store.fixed_size,
            "view": asdict(store.view),
            "code": store.decode_code,
            "crop": store.crop_code,
            "encoded": [store.recipe, str(store.cache_dir), True] if store.recipe else [],
            "seen": str(store.seen_path(video.video_id).absolute()) if store.view != PLAIN_VIEW else "",
        }
        for source, video in zip(sources, todo, strict=True)
    ]
    limits = decode_limits(store, workers, recipes=bool(store.recipe))
    answers = run_isolated(DECODE_FUNCTION, items, **limits)
    with closing(answers):
        for answer in answers:
            yield todo[answer.position], _failure(answer, sources[answer.position])


def decode_limits(store: ClipStore, workers: int, *, recipes: bool = False) -> dict[str, Any]:
    """How many processes decode for ``store``, for how long a video, and in how much memory: for ``run_isolated``.

    With ``recipes`` videos are written anew first, as a whole.
    """
    seconds = REENCODE_SECONDS if recipes else TIMEOUT_SECONDS * store.view.clips
    limits: dict[str, Any] = {"workers": workers, "timeout_seconds": seconds}
    if store.view.crop:  # torch, of whose CUDA build the libraries alone are gigabytes of addresses
        limits |= {"memory_bytes": CROP_ADDRESS_BYTES, "worker_bytes": _CROP_WORKER_BYTES}
    return limits


def _failure(answer: Answer, source: str) -> str | None:
    """What is wrong with the video, or None.

    Raises:
        OSError: its clip could not be written, so no other could either.
        FvcError: the worker would have stored what newer code makes under the name of the code before.
        DataError: the function that crops fails.
    """
    if answer.failure is not None:
        return (
            f"{source!r}: {answer.failure}: the decoder gave up on this file: {answer.detail}. "
            "Re-encode it, or leave it out."
        )
    if "code_changed" in answer.value:
        raise FvcError(
            "the code that decodes or crops was changed since it was loaded here. Restart the kernel or the command."
        )
    if "crop_error" in answer.value:
        raise DataError(f"{answer.value['crop_error']}. Mend the function, or choose another crop.")
    if "write_error" in answer.value:
        raise OSError(*answer.value["write_error"])
    failure: str | None = answer.value.get("video_error")
    return failure


def _augmented(
    store: ClipStore, decoded: Iterable[tuple[_Video, str | None]], numbers: range, workers: int
) -> Generator[_Outcome, None, None]:
    """Make the copies of each decoded video in a thread; outcomes in the order of ``decoded``, a few in flight."""
    threads = workers or available_cores()
    waiting: deque[Future[_Outcome]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for video, failure in decoded:
                waiting.append(pool.submit(_augment, store, video, failure, numbers))
                while waiting and (waiting[0].done() or len(waiting) > 2 * threads):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _augment(store: ClipStore, video: _Video, failure: str | None, numbers: range) -> _Outcome:
    if failure is not None:
        return _Outcome(video, failure=failure)
    plans = [draw_augmentation(video.video_id, number, store.augmentation, store.num_frames) for number in numbers]
    copies = [number for number in video.missing if number]
    if copies:
        original = store.read(video.video_id, 0)
        for number in copies:
            parts = original.reshape(store.view.clips, store.num_frames, *original.shape[1:])
            copy = np.concatenate([apply_augmentation(part, plans[number]) for part in parts])
            store.write(video.video_id, number, copy)
    return _Outcome(video, tuple(_row(store, video, number, plans[number].to_json()) for number in numbers))


def _row(store: ClipStore, video: _Video, number: int, operations: str) -> Row:
    """One row of AUGMENTED, in the order of its columns."""
    clip_id = f"{video.video_id}_{number}"
    clip_path = store.clip_path(video.video_id, number).relative_to(store.cache_dir).as_posix()
    return (
        clip_id, video.video_id, video.group_id, video.label, number, operations, store.settings_hash, clip_path,
    )  # fmt: skip


def _append(stream: TextIO, lines: Iterable[Row]) -> None:
    csv.writer(stream, lineterminator="\n").writerows(lines)
    stream.flush()
