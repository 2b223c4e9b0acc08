"""Decode untrusted files with a run's settings, in worker processes.

The clips are written to temporary files in the run's cache folder.
"""

import os
import shutil
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fvc_lib.corpus.probing import VIDEO_FILES, ProbeResult, file_state
from fvc_lib.services.atomic_files import path_from_text, path_to_text, process_lives, this_host
from fvc_lib.services.config import RunConfig
from fvc_lib.services.isolated_workers import run_isolated
from fvc_lib.services.parameters import resolve_config
from fvc_lib.tasks.video.verdicts.untrusted import look, original
from fvc_lib.video.clips.making import decode_item, decode_limits, failure_of
from fvc_lib.video.clips.store import ClipStore, Pixels, load_clip_file
from fvc_lib.video.features.measuring import TIMEOUT_SECONDS

FILE_SECONDS = 60.0  # the time limit in seconds for an empty file; every megabyte adds one second
_SCRATCH = "scoring"


@dataclass(frozen=True)
class FileToScore:
    """A video file to decode and judge.

    Attributes:
        path: path of the video.
        folds: numbers of the folds whose networks judge the file.
        recipe: key of ``video.reencode.RECIPES``: how to re-encode the file before decoding; empty: not at all.
        content_sha256: SHA-256 that the content must have. A file with other content is not decoded. Empty: any
            content.
    """

    path: Path
    folds: tuple[int, ...]
    recipe: str = ""
    content_sha256: str = ""


@dataclass(frozen=True)
class DecodedFile:
    """The result of decoding one file: success, or the reason of the failure. The clip itself is in a file.

    Attributes:
        position: index of the file in the caller's list of files.
        failure: the reason why there is no clip; empty after success.
        lasts: whether another attempt would have the same result; False if the worker died or ran out of time.
        forensic: forensic features by column name, of the requested families; unknown values are left out.
    """

    position: int
    failure: str = ""
    lasts: bool = True
    forensic: Mapping[str, float] = field(default_factory=dict)


def decoded_files(
    store: ClipStore,
    files: Sequence[FileToScore],
    clips: Sequence[Path],
    families: Sequence[str] = (),
    *,
    workers: int = 0,
) -> Generator[DecodedFile]:
    """Decode each of N video files into a new clip file, and yield one result per file.

    Results are yielded as soon as a file is decoded, in any order.

    Args:
        store: the clip store whose decode settings are used; nothing is written to it.
        files: the N videos.
        clips: the N clip files to write; ``clips[i]`` belongs to ``files[i]``.
        families: names of families of forensic features to measure as well.
        workers: number of processes; 0: one per core.

    Raises:
        OSError: a clip cannot be written.
        DataError: the user's crop function fails.
        FvcError: the decoding code was changed since it was imported here.
    """
    items = [item_to_decode(store, file, clip, families) for file, clip in zip(files, clips, strict=True)]
    has_recipe = bool(store.recipe) or any(file.recipe for file in files)
    limits = decode_limits(store, workers, recipes=has_recipe)
    limits["timeout_seconds"] += TIMEOUT_SECONDS if families else 0
    with closing(run_isolated(f"{original.__module__}:{original.__name__}", items, **limits)) as answers:
        for answer in answers:
            value = answer.value or {}
            failure = f"the decoder gave up: {answer.detail}" if answer.failure else failure_of(value)
            yield DecodedFile(answer.position, failure, answer.failure is None, value.get("forensic", {}))


def frames_of(config: RunConfig, root: Path, paths: Sequence[str]) -> dict[str, Pixels]:
    """Return the frames of each video of ``paths`` that could be decoded, uint8 (T, 3, S, S), by path.

    They are the frames that the run's model gets. The paths are relative to the corpus folder ``root``.

    Raises:
        OSError: a clip cannot be written.
        DataError: the user's crop function fails.
        FvcError: the decoding code was changed since it was imported here.
    """
    store = ClipStore.of(config)
    found = dict[str, Pixels]()
    files = [FileToScore(root / path_from_text(path), (), store.recipe) for path in paths]
    with scratch_folder(config) as scratch:
        clips = [scratch / f"{number}.npy" for number in range(len(files))]
        for decoded in decoded_files(store, files, clips, workers=config.workers):
            if not decoded.failure:
                frames = found[paths[decoded.position]] = np.empty(store.shape, np.uint8)
                load_clip_file(clips[decoded.position], frames, store.shape)
    return found


def looked_at(
    store: ClipStore, files: Sequence[Path], clips: Sequence[Path], families: Sequence[str], *, workers: int = 0
) -> Generator[tuple[ProbeResult, DecodedFile]]:
    """Probe ``files`` and decode them into ``clips``; each file is read only once (``untrusted.look``).

    To probe a file means to measure its facts, such as size, codec and perceptual hash.

    Args:
        store: the clip store whose decode settings are used; nothing is written to it.
        files: N video files.
        clips: N clip files to write.
        families: names of families of forensic features to measure as well.
        workers: number of processes; 0: one per core.

    Yields:
        ``(probe, decoded)`` for every file as soon as it is decoded: the results of probing and of decoding.

    Raises:
        OSError: a clip cannot be written.
        DataError: the user's crop function fails.
        FvcError: the decoding code was changed since it was imported here.
    """
    pairs = zip(files, clips, strict=True)
    items = [item_to_decode(store, FileToScore(path, ()), clip, families) for path, clip in pairs]
    limits = decode_limits(store, workers, recipes=bool(store.recipe))
    whole = limits["timeout_seconds"] + VIDEO_FILES.timeout_seconds
    seconds_of_clips = FILE_SECONDS * (store.view.clips + bool(families))
    least = whole if store.recipe or store.view.crop else seconds_of_clips
    # The limit depends on the size, not on the duration that the file states: a hostile file may state a wrong one.
    states = [file_state(path) or {"size_bytes": 0} for path in files]
    limits["timeout_seconds"] = [least + round(state["size_bytes"] / 1e6) for state in states]
    with closing(run_isolated(f"{look.__module__}:{look.__name__}", items, **limits)) as answers:
        for answer in answers:
            value = dict(answer.value or {})
            path = path_to_text(files[answer.position])
            if answer.failure:
                detail = f"the decoder gave up on this file: {answer.detail}. Re-encode it, or leave it out."
                value = {"reason": answer.failure, "detail": detail}
            decoded = DecodedFile(answer.position, failure_of(value), forensic=value.get("forensic", {}))
            yield ProbeResult.read(path, value), decoded


def item_to_decode(store: ClipStore, file: FileToScore, clip: Path, families: Sequence[str] = ()) -> dict[str, Any]:
    """Return the argument (a dict) for a worker function that decodes one video.

    The worker functions are in ``tasks/video/verdicts/untrusted.py``.

    Args:
        store: the clip store whose decode settings are used.
        file: the video to decode.
        clip: the clip file that the worker writes.
        families: names of families of forensic features to measure as well.
    """
    item = decode_item(store, file.path, clip, file.content_sha256)
    return item | {"recipe": file.recipe, "families": list(families)}


@contextmanager
def scratch_folder(config: RunConfig) -> Iterator[Path]:
    """Yield a new temporary folder in the run's cache folder, and delete it at the end.

    Folders that killed processes of this machine left behind are deleted too. If the run's cache folder cannot be made
    on this machine, the machine's default cache folder is used instead.
    """
    above = Path(config.cache_dir) / _SCRATCH
    try:
        above.mkdir(parents=True, exist_ok=True)
    except OSError:
        above = Path(resolve_config().cache_dir) / _SCRATCH
        above.mkdir(parents=True, exist_ok=True)
    for old in above.glob(f"{this_host()}.*.*"):
        pid = old.name.rsplit(".", 2)[1]
        if pid.isdecimal() and not process_lives(int(pid)):
            shutil.rmtree(old, ignore_errors=True)
    prefix = f"{this_host()}.{os.getpid()}."
    with tempfile.TemporaryDirectory(prefix=prefix, dir=above, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
