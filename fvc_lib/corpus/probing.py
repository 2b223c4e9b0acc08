"""Probe many files in worker processes and remember every result at once, so that a killed index continues.

Processes, not threads: handing over an image of 512 x 384 pixels costs 0.7 ms of CPU time beside 1.5 ms for decoding
it, and for that a decoder that crashes or hangs on one file costs that file alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import av
import av.logging
import numpy as np

from fvc_lib.corpus.copies.perceptual_hash import perceptual_hash
from fvc_lib.services.atomic_files import path_from_text, sha256_of_file, sha256_of_json
from fvc_lib.services.code_version import code_hash
from fvc_lib.services.errors import StoppedError
from fvc_lib.services.isolated_workers import Answer, run_isolated
from fvc_lib.services.stage_logs import JsonLines
from fvc_lib.video.decode.clip import VideoProbe, decode_clip, probe_video
from fvc_lib.video.decode.source import RefusedVideo, VideoError, check_size

# --- What is done with one untrusted file, in a worker process: probe, a few frames for the hash, content hash.
# Imported by every worker, so it imports only what that needs.


HASH_FRAMES = 6
HASH_SIZE = 160  # side in pixels of the square the frames are decoded to

# Above 268 million pixels ffmpeg itself declines, with the same error as for damage; its log tells the difference.
_IMPOSSIBLE_SIZE = re.compile(r"Picture size (\d+)x(\d+) is invalid")


def probe_file(path_text: str) -> dict[str, Any]:
    """``probe``, ``content_sha256`` and ``perceptual_hash`` of a file, or ``reason`` and ``detail`` why not.

    The frames are those that a clip of six frames is made of, so a file whose frames are missing or damaged is found
    now and not in the middle of a run.
    """
    path = Path(path_text)
    try:
        probe = probe_video(path)
        clip = decode_clip(path, HASH_FRAMES, HASH_SIZE)
        content_sha256 = sha256_of_file(path)
    except VideoError as error:
        shown = error if isinstance(error, RefusedVideo) else _claimed_too_much(path) or error
        return {"reason": shown.reason, "detail": f"{shown.detail}. {shown.remedy}"}
    except MemoryError:
        shown = RefusedVideo(path, "its frames need more memory than a worker is given")
        return {"reason": shown.reason, "detail": f"{shown.detail}. {shown.remedy}"}
    except OSError as error:
        return {"reason": "unreadable", "detail": f"{error.strerror}. Check that the file exists and may be read."}
    box = clip.content
    picture = clip.frames[:, :, box.top : box.top + box.height, box.left : box.left + box.width]
    return {
        "probe": asdict(probe),
        "content_sha256": content_sha256,
        "perceptual_hash": perceptual_hash(np.ascontiguousarray(picture)),
    }


def _claimed_too_much(path: Path) -> RefusedVideo | None:
    """The refusal, when what fails in ``path`` are frames of an impossible size.

    The log is one for the whole process and Python handlers would print it: it is on only here, in a worker of one
    thread.
    """
    av.logging.set_level(av.logging.ERROR)
    try:
        with av.logging.Capture() as messages, contextlib.suppress(VideoError):
            probe_video(path)
    finally:
        av.logging.set_level(None)
    for _, _, message in messages:
        claimed = _IMPOSSIBLE_SIZE.search(message)
        if claimed is not None:
            try:
                check_size(path, int(claimed[1]), int(claimed[2]))
            except RefusedVideo as refusal:
                return refusal
    return None


# --- What was found out about files before, for as long as they are unchanged and the code that found it is the same.


@dataclass(frozen=True, slots=True)
class FileState:
    """What tells that a file is unchanged."""

    size_bytes: int
    mtime_ns: int


def file_state(path: Path) -> FileState | None:
    """Of ``path`` now; None where it cannot be looked at."""
    try:
        status = path.stat()
    except OSError:
        return None
    return FileState(status.st_size, status.st_mtime_ns)


def store_for(work_dir: Path, kind: str, root: Path) -> Path:
    """The file of JSON lines in ``work_dir`` about the files below ``root``."""
    return work_dir / f"{kind}_{hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()[:16]}.jsonl"


def remembered_rows(store: Path, version: str) -> Iterator[dict[str, Any]]:
    """The rows of ``store`` that code of ``version`` wrote, oldest first; torn and foreign lines are passed over."""
    if not store.is_file():
        return
    with store.open("rb") as stream:
        for line in stream:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and row.get("version") == version:
                yield row


DEFAULT_TIMEOUT_SECONDS = 120.0
DEFAULT_PROBE_FUNCTION = "fvc_lib.corpus.probing:probe_file"

_PROBING_CODE = ("fvc_lib.video", "fvc_lib.corpus.copies.perceptual_hash", "fvc_lib.corpus.probing")


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What became of one file: ``probe`` and the hashes, or ``reason`` and ``detail`` why there are none."""

    path: str
    probe: VideoProbe | None = None
    content_sha256: str = ""
    perceptual_hash: str | None = None
    reason: str = ""
    detail: str = ""


Result = TypeVar("Result")


@dataclass(frozen=True)
class FileKind(Generic[Result]):
    """How files of one kind are probed.

    Attributes:
        store: what the file of remembered results is called by.
        function: ``module:name`` run in the workers; it gives ``reason`` and ``detail``, or what ``read`` needs.
        version: of the code that makes a result: what other code found is not used.
        lasting: reasons that lie in the file's content. Others (permissions, a crash, a busy machine) may be gone next
            time and are not remembered.
        remedy: for a file at which the worker dies.
        read: the result of a path from what the worker said or what is remembered of it; raises KeyError or TypeError
            on something else.
    """

    store: str
    function: str
    version: str
    lasting: frozenset[str]
    remedy: str
    read: Callable[[str, Mapping[str, Any]], Result]


def probe_all(
    kind: FileKind[Result],
    root: Path,
    paths: Sequence[str],
    work_dir: Path,
    *,
    workers: int,
    progress: Callable[[int, int], None] | None,
    stop: Callable[[], bool] | None,
    timeout_seconds: float,
) -> tuple[dict[str, Result], int]:
    """Probe every path once, reusing what ``work_dir`` knows of files with unchanged size and modification time.

    Args:
        kind: what is done.
        root: the corpus folder.
        paths: table texts relative to ``root``.
        work_dir: where results are appended as JSON lines, one file per corpus folder.
        workers: processes; 0: one per available core.
        progress: called with (done, total) after each file.
        stop: asked after each file.
        timeout_seconds: per file; then it is given up as ``timeout``.

    Returns:
        The result of each path, and how many of them were known before.

    Raises:
        StoppedError: ``stop`` said so; what was found is remembered.
    """
    store = store_for(work_dir, kind.store, root)
    states = {path: file_state(root / path_from_text(path)) for path in paths}
    results = _read_known(kind, store, states)
    todo = [path for path in states if path not in results]
    num_known = len(results)
    if progress is not None:
        progress(num_known, len(states))
    items = [str(root / path_from_text(path)) for path in todo]
    with JsonLines(store) as lines, closing(_answers(kind.function, items, workers, timeout_seconds)) as answers:
        for answer in answers:
            path = todo[answer.position]
            said = _what_was_said(kind, answer)
            results[path] = kind.read(path, said)
            state = states[path]
            if state is not None and ("reason" not in said or said["reason"] in kind.lasting):
                lines.append({"version": kind.version, **asdict(state), "path": path, **said})
            if progress is not None:
                progress(len(results), len(states))
            if stop is not None and stop():
                raise StoppedError(f"stopped after {len(results):,} of {len(states):,} files; run it again to go on")
    return results, num_known


def probe_files(
    root: Path,
    paths: Sequence[str],
    work_dir: Path,
    *,
    workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
    stop: Callable[[], bool] | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    probe_function: str = DEFAULT_PROBE_FUNCTION,
) -> tuple[dict[str, ProbeResult], int]:
    """Probe every video; arguments, result and errors as of ``probe_all``. ``probe_function`` is run in the workers."""
    kind = FileKind(
        "probes", probe_function, _code_version(), frozenset({"no_video", "truncated", "corrupt", "refused"}),
        "Re-encode it, or leave it out.", _read_result,
    )  # fmt: skip
    return probe_all(
        kind, root, paths, work_dir, workers=workers, progress=progress, stop=stop, timeout_seconds=timeout_seconds
    )


def _read_result(path: str, said: Mapping[str, Any]) -> ProbeResult:
    if said.get("reason"):
        return ProbeResult(path, reason=said["reason"], detail=said["detail"])
    return ProbeResult(path, VideoProbe(**said["probe"]), said["content_sha256"], said["perceptual_hash"])


def _answers(function: str, items: Sequence[str], workers: int, timeout_seconds: float) -> Generator[Answer]:
    yield from run_isolated(function, items, workers=workers, timeout_seconds=timeout_seconds)


def _what_was_said(kind: FileKind[Result], answer: Answer) -> dict[str, Any]:
    if answer.failure is not None:
        detail = f"the decoder gave up on this file: {answer.detail}. {kind.remedy}"
        return {"reason": answer.failure, "detail": detail}
    return dict(answer.value)


def _code_version() -> str:
    return sha256_of_json([av.__version__, code_hash("fvc_lib.corpus.probing", _PROBING_CODE)])[:16]


def _read_known(kind: FileKind[Result], store: Path, states: Mapping[str, FileState | None]) -> dict[str, Result]:
    """Earlier results of files in these states; torn, foreign and outdated lines are passed over, a later line wins.

    What is known of other files or of earlier states is not held in memory.
    """
    known: dict[str, Result] = {}
    for row in remembered_rows(store, kind.version):
        try:
            if states.get(row["path"]) == FileState(row["size_bytes"], row["mtime_ns"]):
                known[row["path"]] = kind.read(row["path"], row)
        except (KeyError, TypeError):
            continue
    return known
