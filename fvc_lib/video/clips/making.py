"""Fill the clip store from an index (the table of a corpus' videos).

Every video is decoded once in a worker process. An untrusted file may crash or hang this process, or use up its memory;
then only this video fails. Augmented clips are computed from stored clips by threads, while other videos are decoded.
"""

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fvc_lib.services.atomic_files import AnyPath, path_from_text, sweep_temporaries
from fvc_lib.services.errors import DataError, FvcError
from fvc_lib.services.isolated_workers import available_cores, run_isolated
from fvc_lib.services.records.digests import read_document
from fvc_lib.services.registry import CROPS, PLAIN_VIEW
from fvc_lib.services.tables import AUGMENTED, SEEN_CLIPS, frame_of, write_table
from fvc_lib.video.augmentations import Pixels, apply_augmentation, draw_augmentation
from fvc_lib.video.clips.store import FIRST_BLEND, ClipStore
from fvc_lib.video.reencode import TIMEOUT_SECONDS as REENCODE_SECONDS
from fvc_lib.video.self_blending import draw_self_blend, self_blended

TIMEOUT_SECONDS = 120.0  # time limit of decoding one clip of one video
CROP_ADDRESS_BYTES = 24 << 30  # address space of a process that crops: torch's CUDA libraries alone take gigabytes
_CROP_WORKER_BYTES = 1 << 30  # resident memory of such a process, with torch and a network that finds faces
_AGAIN = "Delete the clip next to it (.npy) and run 03_augmentation again."
DECODE_FUNCTION = "fvc_lib.video.clips.worker:make_original"  # run in the worker processes


@dataclass(frozen=True)
class ClipReport:
    """The result of ``make_clips``: the numbers of new and of reused clips, and the videos that failed.

    Attributes:
        made: number of new clips.
        reused: number of clips that were in the store before.
        failed: a tuple (video id, reason) for every video that could not be decoded.
    """

    made: int
    reused: int
    failed: tuple[tuple[str, str], ...]


def make_clips(
    store: ClipStore,
    index: pl.DataFrame,
    corpus_root: AnyPath,
    augmentations_per_video: int,
    metadata_csv: AnyPath | None,
    *,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    workers: int = 0,
) -> ClipReport:
    """Make and store the missing clips of every video: one original clip, some augmented ones, and pseudo-fakes.

    Pseudo-fakes are clips whose face is blended with a changed copy of itself. Fake videos get them, too, because a
    control (a training on shuffled labels) may treat a fake video as real. A video gets no pseudo-fakes if one of its
    clips shows no face.

    Args:
        store: the store that clips are written to, which also states the number of pseudo-fakes.
        index: an INDEX table, one row per video.
        corpus_root: the folder that the column ``path`` of ``index`` is relative to.
        augmentations_per_video: number of augmented clips of every video; the original clip is not counted.
        metadata_csv: the table to write (AUGMENTED), one row per clip, in the order of ``index``. None: no table.
        progress: called with (videos done, videos in all).
        workers: number of decoding processes (fewer if memory is short) and of augmenting threads; 0: one per core.
            The clips do not depend on it.

    Raises:
        OSError: clips or the table cannot be written. (A video that cannot be decoded is only listed in the result.)
        FvcError: the code that decodes or crops was edited while this process runs.
        DataError: the user's function that crops fails.
    """
    store.note_use()
    blends = range(FIRST_BLEND, FIRST_BLEND + store.self_blended)
    numbers = [*range(augmentations_per_video + 1), *blends]
    videos = index.select("video_id", "path", "label", "group_id", "content_sha256").to_dicts()
    missing = {
        video["video_id"]: [number for number in numbers if not store.has(video["video_id"], number)]
        for video in videos
    }
    for folder in {store.clip_path(name, number).parent for name, those in missing.items() for number in those}:
        sweep_temporaries(folder)
    failed: dict[str, str] = {}
    jobs = []
    decoded = _decoded(store, videos, missing, Path(corpus_root), workers)
    with ThreadPoolExecutor(workers or available_cores()) as pool, closing(decoded):
        for done, (video_id, failure) in enumerate(decoded, start=1):
            if failure:
                failed[video_id] = failure
            elif copies := [number for number in missing[video_id] if number]:
                jobs.append(pool.submit(_augment, store, video_id, copies))
            progress(done, len(videos))
        for job in jobs:
            job.result()
    rows, made = [], 0
    for video in videos:
        video_id = video["video_id"]
        if video_id in failed:
            continue
        there = [number for number in numbers if number < FIRST_BLEND or store.has(video_id, number)]
        rows += [_row(store, video, number) for number in there]
        made += len(set(there).intersection(missing[video_id]))
    if metadata_csv is not None:
        write_table(frame_of(rows, AUGMENTED), AUGMENTED, metadata_csv)
    reasons = [(video["video_id"], failed[video["video_id"]]) for video in videos if video["video_id"] in failed]
    return ClipReport(made, len(rows) - made, tuple(reasons))


def write_seen(store: ClipStore, index: pl.DataFrame, path: AnyPath) -> pl.DataFrame:
    """Write and return the table SEEN_CLIPS, which states the frames and the part of the picture that a clip shows.

    The table has one row per original clip. With the plain view (whole pictures, spread over the video) the table
    is empty, and no file is written.

    Args:
        store: the store of the clips.
        index: an INDEX table, one row per video. Videos without clips in the store get no row in the result.
        path: the file to write.

    Raises:
        DataError: a record in the store is damaged.
        OSError: the table cannot be written.
    """
    rows: list[dict[str, Any]] = []
    videos = index.select("video_id", "group_id", "label", "path").to_dicts() if store.view != PLAIN_VIEW else []
    for video in videos:
        if store.has(video["video_id"], 0):
            record = store.seen_path(video["video_id"])
            seen = read_document(record).get("clips")
            if seen is None:
                raise DataError(f"{str(record)!r} is missing or damaged. {_AGAIN}")
            rows += [{**video, **clip, "note": clip["note"] or None} for clip in seen]
    table = frame_of({name: [row[name] for row in rows] for name in SEEN_CLIPS.columns}, SEEN_CLIPS)
    if store.view != PLAIN_VIEW:
        write_table(table, SEEN_CLIPS, path)
    return table


def notes_of(seen: pl.DataFrame) -> pl.DataFrame:
    """Count the clips that differ from the requested view, by the kind of difference (note) and by label.

    A view is the rule that selects frames and part of the picture. A clip that cannot follow the view has a note that
    states why, for example that the video is too short. If a note is more frequent for one label, a model can learn the
    label from that difference.

    Args:
        seen: a SEEN_CLIPS table, one row per original clip.

    Returns:
        A table with the columns ``note``, ``label``, ``clips`` (number of clips with this note and label) and ``of``
        (number of all clips with this label).
    """
    of = seen.group_by("label").len("of")
    noted = seen.drop_nulls("note").group_by("note", "label").len("clips")
    return noted.join(of, on="label").sort("note", "label")


def decode_item(store: ClipStore, source: AnyPath, target: Path, content_sha256: str = "") -> dict[str, Any]:
    """Return the job for a worker process that decodes one video into a clip file.

    The job is a mapping. The worker process passes it as the argument ``item`` to ``clips.worker.make_original``, which
    describes its keys.

    Args:
        store: its settings determine the clip.
        source: the video.
        target: the clip file to write.
        content_sha256: expected SHA-256 of the video; empty: it is not checked.
    """
    return {
        "source": str(source),
        "target": str(target.absolute()),
        "content_sha256": content_sha256,
        "num_frames": store.num_frames,
        "fixed_size": store.fixed_size,
        "view": asdict(store.view),
        "code": store.decode_code,
        "crop": store.crop_code,
        "recipe": "",
        "encoded": [store.recipe, ""] if store.recipe else [],
        "seen": "",
    }


def decode_limits(store: ClipStore, workers: int, *, recipes: bool = False) -> dict[str, Any]:
    """Return the limits of decoding processes: their number, the time per video and the memory.

    The limits are keyword arguments of ``run_isolated``, which runs a function in worker processes.

    Args:
        store: its view determines time and memory: several clips need more time, crop functions need more memory.
        workers: number of processes; 0: one per core.
        recipes: whether videos are re-encoded before they are decoded, which needs much more time.
    """
    seconds = REENCODE_SECONDS if recipes else TIMEOUT_SECONDS * store.view.clips
    memory = {"memory_bytes": CROP_ADDRESS_BYTES, "worker_bytes": _CROP_WORKER_BYTES} if store.view.crop else {}
    return {"workers": workers, "timeout_seconds": seconds, **memory}


def failure_of(value: dict[str, Any]) -> str:
    """Return a text that states why a video could not be decoded; empty if it was decoded.

    ``value`` is the mapping that ``clips.worker.make_original`` returned in the worker process. Faults that are not the
    video's raise an error.

    Raises:
        OSError: the clip could not be written.
        FvcError: the worker has loaded newer code than this process.
        DataError: the function that crops fails.
    """
    if "code_changed" in value:
        raise FvcError(
            "the code that decodes or crops was changed since it was loaded here. Restart the kernel or the command."
        )
    if "crop_error" in value:
        raise DataError(f"{value['crop_error']}. Mend the function, or choose another crop.")
    if "write_error" in value:
        raise OSError(*value["write_error"])
    return str(value.get("video_error", ""))


def _decoded(
    store: ClipStore, videos: list[dict[str, Any]], missing: dict[str, list[int]], corpus_root: Path, workers: int
) -> Generator[tuple[str, str]]:
    """Decode the videos that have no original clip yet, and yield (video id, reason) for all videos.

    The reason is a text that states why a video failed. It is empty if the original clip is now in the store.

    Args:
        store: the store that clips are written to.
        videos: rows of INDEX.
        missing: for every video id, the augmentation indices of the clips to make; 0 is the original.
        corpus_root: the folder that the paths in ``videos`` are relative to.
        workers: number of processes; 0: one per core.
    """
    todo, items = [], []
    for video in videos:
        video_id = video["video_id"]
        if 0 not in missing[video_id]:
            yield video_id, ""
            continue
        source = corpus_root / path_from_text(video["path"])
        item = decode_item(store, source, store.clip_path(video_id, 0), video["content_sha256"])
        item |= {
            "encoded": [store.recipe, str(store.cache_dir)] if store.recipe else [],  # later stages read the same files
            "seen": str(store.seen_path(video_id).absolute()) if store.view != PLAIN_VIEW else "",
        }
        todo.append(video_id)
        items.append(item)
    limits = decode_limits(store, workers, recipes=bool(store.recipe))
    with closing(run_isolated(DECODE_FUNCTION, items, **limits)) as answers:
        for answer in answers:
            if answer.failure is None:
                yield todo[answer.position], failure_of(answer.value)
            else:
                died = f"{items[answer.position]['source']!r}: {answer.failure}: {answer.detail}."
                yield todo[answer.position], f"{died} Re-encode it, or leave it out."


def _augment(store: ClipStore, video_id: str, copies: list[int]) -> None:
    original = store.read(video_id, 0)
    clips = original.reshape(store.view.clips, store.num_frames, *original.shape[1:])
    blends = [number for number in copies if number >= FIRST_BLEND]
    if blends:
        _blend(store, video_id, clips, blends)
    for number in copies[: len(copies) - len(blends)]:
        plan = draw_augmentation(video_id, number, store.augmentation, store.num_frames)
        store.write(video_id, number, np.concatenate([apply_augmentation(clip, plan) for clip in clips]))


def _blend(store: ClipStore, video_id: str, clips: Pixels, numbers: list[int]) -> None:
    """Make pseudo-fakes of a video, and write them to the store; write none if one of the clips shows no face.

    Args:
        store: the store to write to.
        video_id: id of the video.
        clips: the N original clips of the video, uint8 (N, T, 3, S, S).
        numbers: augmentation indices of the pseudo-fakes to make.
    """
    points_of = CROPS.get("face").points
    assert points_of is not None
    pictures = [np.ascontiguousarray(clip.transpose(0, 2, 3, 1)) for clip in clips]
    points = [found for each in pictures if (found := points_of(each)) is not None]
    if len(points) == len(clips):
        for number in numbers:
            blend = draw_self_blend(video_id, number)
            blended = [self_blended(clip, found, blend) for clip, found in zip(clips, points, strict=True)]
            store.write(video_id, number, np.concatenate(blended))


def _row(store: ClipStore, video: dict[str, Any], number: int) -> tuple[Any, ...]:
    """Return the row of the table AUGMENTED for one clip of a video, as a tuple in the order of its columns.

    ``video`` is the video's row of the table INDEX. ``number`` is the augmentation index of the clip.
    """
    video_id, label = video["video_id"], video["label"]
    if number >= FIRST_BLEND:
        operations, label = draw_self_blend(video_id, number).to_json(), "fake"
    else:
        operations = draw_augmentation(video_id, number, store.augmentation, store.num_frames).to_json()
    clip_path = store.clip_path(video_id, number).relative_to(store.cache_dir).as_posix()
    of_video = (f"{video_id}_{number}", video_id, video["group_id"], label)
    return (*of_video, number, operations, store.settings_hash, clip_path)
