"""Probe many videos or images in worker processes, and store each result as soon as it is known.

To probe a file is to decode it and to record its properties and hashes. A call that was killed can be repeated and
continues from the stored results. Workers are processes, so a decoder that crashes or hangs costs only one file.
"""

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import PIL

from fvc_lib.corpus.copies.perceptual_hash import GRID_SIDE, perceptual_hash
from fvc_lib.services.atomic_files import AnyPath, path_from_text, sha256_of_json
from fvc_lib.services.code_versions import code_hash
from fvc_lib.services.isolated_workers import run_isolated
from fvc_lib.services.stage_logs import JsonLines, checked_row
from fvc_lib.video.decode.clip import Clip, uniform_places
from fvc_lib.video.decode.file_parts import parts_of, sha256_of_video
from fvc_lib.video.decode.probe import VideoProbe, probe_and_decode
from fvc_lib.video.decode.source import RefusedVideo, VideoError
from fvc_lib.video.decode.still_image import ImageFacts, examine_image
from fvc_lib.video.reencode import TIMEOUT_SECONDS as REENCODE_SECONDS, recipe_named, reencoded

# --- One untrusted file, in a worker process. Every worker imports this module, so its imports are few.

HASH_FRAMES = 6  # frames per video that are decoded and hashed
HASH_SIZE = 160  # side in pixels of the square that frames are decoded to


def probe_file(path_text: str) -> dict[str, Any]:
    """Return the properties and hashes of the video file ``path_text``, or why it is unusable.

    A worker process calls this. The keys of the result are ``probe``, ``content_sha256`` and ``perceptual_hash``. For
    an unusable file they are ``reason`` and ``detail``. Six frames are decoded, so a file with damaged frames fails now
    and not in the middle of a run.
    """
    path = Path(path_text)
    try:
        probe, (clip,) = probe_and_decode(path, [(lambda count: uniform_places(count, HASH_FRAMES), HASH_SIZE)])
        return probed(path, probe, clip)
    except MemoryError:
        return _unusable(RefusedVideo(path, "its frames need more memory than a worker is given"))
    except VideoError as error:
        return _unusable(error)
    except OSError as error:
        return {"reason": "unreadable", "detail": f"{error.strerror}. Check that the file exists and may be read."}


def probe_reencoded(item: dict[str, Any]) -> dict[str, Any]:
    """Re-encode a video into the cache, and return the result of ``probe_file`` for the new file.

    A recipe is a named set of encoder settings.

    Args:
        item: a mapping with two keys: ``source`` is the path of the video; ``encoded`` is a list of the name of the
            recipe and the path of the cache folder.

    Returns:
        The properties and hashes of the new file. For a video that cannot be re-encoded, ``reason`` is
        ``not_reencoded``. If the new file cannot be written, the only key is ``write_error``: errno, message and file.
    """
    try:
        path = reencoded(item["source"], *item["encoded"])
    except VideoError as error:
        return {"reason": "not_reencoded", "detail": f"{error.reason}: {error.detail}. {error.remedy}"}
    except OSError as error:
        return {"write_error": [error.errno, error.strerror, error.filename]}
    values = probe_file(str(path))
    rate = recipe_named(item["encoded"][0]).rate
    if rate and "probe" in values:  # the rounding error of a quotient would reveal the length of a video
        values["probe"]["frames_per_second"] = float(rate)
    return values


def _unusable(error: VideoError) -> dict[str, Any]:
    return {"reason": error.reason, "detail": f"{error.detail}. {error.remedy}"}


def probed(path: Path, probe: VideoProbe, clip: Clip) -> dict[str, Any]:
    """Return the properties and hashes of a video that is decoded already.

    The result has the keys ``probe``, ``content_sha256`` and ``perceptual_hash``, as that of ``probe_file``.

    Args:
        path: the video file.
        probe: properties of the file.
        clip: the six frames of the file to hash.

    Raises:
        OSError: the file can no longer be read.
        VideoError: the file can no longer be read as a video.
    """
    box = clip.content
    rows = slice(box.top, box.top + box.height)
    columns = slice(box.left, box.left + box.width)
    picture = clip.frames[:, :, rows, columns]
    return {
        "probe": asdict(probe),
        "content_sha256": sha256_of_video(path),
        "perceptual_hash": perceptual_hash(np.ascontiguousarray(picture)),
    }


def probe_image(path_text: str) -> dict[str, Any]:
    """Decode the image file ``path_text``; return its properties and hash, or why it is unusable.

    The keys are ``facts`` and ``perceptual_hash``. For an unusable file they are ``reason`` and ``detail``.
    """
    try:
        facts, picture = examine_image(Path(path_text), shortest_side=GRID_SIDE)
    except VideoError as error:
        return _unusable(error)
    frame = np.ascontiguousarray(np.moveaxis(picture, -1, 0))
    return {"facts": asdict(facts), "perceptual_hash": perceptual_hash(frame[None])}


Progress = Callable[[int, int], None] | None  # called with (done, total)
State = dict[str, int] | None  # ``size_bytes`` and ``mtime_ns`` of a file; None: the file cannot be read

# --- Stored results, valid while the file and the code that made them are unchanged.


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of probing one file: its properties and hashes, or ``reason`` and ``detail`` if it is unusable."""

    path: str  # relative to the probed folder, escaped by ``path_to_text``; empty if re-encoding failed
    probe: VideoProbe | None = None  # properties of a video; None for images and unusable files
    content_sha256: str = ""  # hash of the content; empty for unusable files
    perceptual_hash: str | None = None
    reason: str = ""  # why the file is unusable, a short name such as ``truncated``; empty: it is usable
    detail: str = ""  # sentences for the user on that reason
    facts: ImageFacts | None = None  # properties of an image; None for videos and unusable files

    @property
    def lasts(self) -> bool:
        """True if the result depends only on the file's content, so that it may be stored.

        It is False for reasons that may pass, such as missing permissions or a timeout.
        """
        return not self.reason or self.reason in _LASTING

    @classmethod
    def read(cls, path: str, values: Mapping[str, Any]) -> "ProbeResult":
        """Return the result for ``path`` from ``values``, which a worker returned or a line of a store holds.

        ``values`` has the keys that ``probe_file`` and ``probe_image`` return.

        Raises:
            KeyError: a key is missing in ``values``.
            TypeError: a property of the file is unknown.
        """
        if values.get("reason"):
            return cls(path, reason=values["reason"], detail=values["detail"])
        if "facts" in values:
            facts = ImageFacts(**values["facts"])
            return cls(path, None, facts.content_sha256, values["perceptual_hash"], facts=facts)
        # A million videos have few codecs: equal names share one text in memory.
        probe: dict[str, Any] = dict(values["probe"])
        probe |= {name: sys.intern(text) for name, text in probe.items() if isinstance(text, str)}
        return cls(path, VideoProbe(**probe), values["content_sha256"], values["perceptual_hash"])


@dataclass(frozen=True)
class FileKind:
    """Settings for probing files of one kind, videos or images.

    To probe a file is to decode it in a worker process, and to record its properties and hashes.
    """

    store: str  # prefix of the names of the files with stored results
    function: str  # ``module:name`` of the function that workers call; it returns the input of ``ProbeResult.read``
    timeout_seconds: float  # longest time per file; a file that takes longer is rejected with the reason ``timeout``
    library: str  # version of the decoding library; stored results of another version are not used
    code: tuple[str, ...]  # modules that make a result; stored results of other versions of them are not used
    encoded: tuple[str, str] | None = None  # name of a recipe that is applied first, and the cache for the new files


_HASHING = "fvc_lib.corpus.copies.perceptual_hash"
DEFAULT_TIMEOUT_SECONDS = 120.0
VIDEO_FILES = FileKind(
    "probes", f"{__name__}:probe_file", DEFAULT_TIMEOUT_SECONDS, av.__version__, ("fvc_lib.video", _HASHING, __name__)
)
IMAGE_FILES = FileKind(
    "images", f"{__name__}:probe_image", 60.0, PIL.__version__,
    ("fvc_lib.video.decode.still_image", _HASHING, __name__),
)  # fmt: skip


def reencoded_files(recipe: str, cache_dir: AnyPath) -> FileKind:
    """Return the settings for probing videos that are re-encoded first.

    ``recipe`` is the name of the encoder settings. The re-encoded files are written to ``cache_dir`` and then probed.
    """
    function, encoded = f"{__name__}:probe_reencoded", (recipe, str(cache_dir))
    store = f"{VIDEO_FILES.store}_{recipe}"
    return replace(VIDEO_FILES, store=store, function=function, timeout_seconds=REENCODE_SECONDS, encoded=encoded)


# Reasons that lie in the content of a file. Results with other reasons (permissions, a crash, a busy machine) are not
# stored, because the file may be usable later.
_LASTING = frozenset({"no_video", "no_image", "truncated", "corrupt", "refused", "unsupported"})


def probe_files(
    kind: FileKind,
    root: AnyPath,
    paths: Sequence[str],
    work_dir: AnyPath,
    *,
    workers: int = 0,
    progress: Progress = None,
    writer: str = "",
) -> tuple[dict[str, ProbeResult], int]:
    """Probe files in worker processes: decode each file, and record its properties and hashes.

    Results are stored in ``work_dir``. Stored results are reused for files whose size and modification time are
    unchanged.

    Args:
        kind: ``VIDEO_FILES``, ``IMAGE_FILES`` or a result of ``reencoded_files``.
        root: the corpus folder.
        paths: paths relative to ``root``, escaped as in tables (``path_to_text``).
        work_dir: folder of stored results. They are JSON lines in one file per corpus folder and ``writer``. The files
            of all writers are read.
        workers: number of processes; 0: one per available core.
        progress: called with (done, total) after each file.
        writer: name of this process if several processes probe the same corpus; empty: this is the only one.

    Returns:
        (results, num_known): the result of each path, and the number of results that were stored before.

    Raises:
        OSError: a re-encoded file cannot be written.
    """
    root = Path(root)
    digest = hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()
    stem = f"{kind.store}_{digest[:16]}"
    store = Path(work_dir) / f"{stem}{writer and '.'}{writer}.jsonl"
    version = sha256_of_json([kind.library, code_hash(__name__, kind.code)])[:16]
    states = {path: file_state(root / path_from_text(path)) for path in paths}
    stores = sorted({store, *Path(work_dir).glob(f"{stem}*.jsonl")})
    results = _stored(version, stores, states)
    todo = [path for path in states if path not in results]
    num_known = len(results)
    report = progress or (lambda done, total: None)
    report(num_known, len(states))
    sources = [str(root / path_from_text(path)) for path in todo]
    items = [{"source": source, "encoded": kind.encoded} for source in sources] if kind.encoded else sources
    answers = run_isolated(kind.function, items, workers=workers, timeout_seconds=kind.timeout_seconds)
    with JsonLines(store) as lines, closing(answers):
        for answer in answers:
            path = todo[answer.position]
            values = dict(answer.value or {})
            if answer.failure is not None:
                detail = f"the decoder gave up on this file: {answer.detail}. Save it again, or leave it out."
                values = {"reason": answer.failure, "detail": detail}
            if "write_error" in values:
                raise OSError(*values["write_error"])
            results[path] = ProbeResult.read(path, values)
            state = states[path]
            if state is not None and results[path].lasts:
                lines.append({"version": version, **state, "path": path, **values}, digest=True)
            report(len(results), len(states))
    return results, num_known


def file_state(path: Path) -> State:
    """Return ``size_bytes`` and ``mtime_ns`` (modification time in nanoseconds) of ``path``; None if it is unreadable.

    ``path`` is a file, a member of a tar or a folder of pictures. A folder has the total size of its pictures, and the
    latest modification time among the folder and its pictures.
    """
    try:
        parts = parts_of(path)
        of_folder = path.stat().st_mtime_ns if path.is_dir() else 0
        newest = max(of_folder, *(part.mtime_ns for part in parts))
        return {"size_bytes": sum(part.size_bytes for part in parts), "mtime_ns": newest}
    except (OSError, ValueError):
        return None


def _stored(version: str, stores: Iterable[Path], states: Mapping[str, State]) -> dict[str, ProbeResult]:
    """Return the stored results by path, for files that have not changed since.

    Args:
        version: hash of the code and library that make results; lines of another version are skipped.
        stores: files of JSON lines; missing files and damaged lines are skipped. Of several lines for a path the last
            is used.
        states: present size and modification time of each file by path; they must equal the stored ones.
    """
    known: dict[str, ProbeResult] = {}
    for store in filter(Path.is_file, stores):
        with store.open("rb") as lines:
            for line in lines:
                with suppress(ValueError, KeyError, TypeError):
                    row = checked_row(line)
                    state = {"size_bytes": row["size_bytes"], "mtime_ns": row["mtime_ns"]}
                    if row["version"] == version and states.get(row["path"]) == state:
                        known[row["path"]] = ProbeResult.read(row["path"], row)
    return known
