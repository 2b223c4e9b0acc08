"""Decode many images once in worker processes, and remember every result, so that a killed index continues."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import PIL

from fvc_lib.corpus.remembered_files import FileState, file_state, remembered_rows, store_for
from fvc_lib.services.atomic_files import sha256_of_file, sha256_of_json
from fvc_lib.services.errors import StoppedError
from fvc_lib.services.isolated_workers import Answer, run_isolated
from fvc_lib.services.metric_log import JsonLines
from fvc_lib.services.path_text import path_from_text
from fvc_lib.video import jpeg_damage, still_image
from fvc_lib.video.still_image import ImageFacts

DEFAULT_TIMEOUT_SECONDS = 60.0
_PROBE_FUNCTION = "fvc_lib.corpus.image_probe_worker:probe_image"
# Failures that lie in the file's content. Others (permissions, a crash, a busy machine) may be gone next time.
_LASTING = frozenset({"no_image", "truncated", "corrupt", "refused"})


@dataclass(frozen=True, slots=True)
class ProbedImage:
    """What became of one file: ``facts``, or ``reason`` and ``detail`` why there are none."""

    path: str
    facts: ImageFacts | None = None
    reason: str = ""
    detail: str = ""


def probe_images(
    root: Path,
    paths: Sequence[str],
    work_dir: Path,
    *,
    workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
    stop: Callable[[], bool] | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> dict[str, ProbedImage]:
    """Decode every image, reusing what ``work_dir`` knows of files with unchanged size and modification time.

    Processes, not threads: handing over an image of 512 x 384 pixels costs 0.7 ms of CPU time beside 1.5 ms for
    decoding it, and for that a decoder that crashes or hangs on one file costs that file alone.

    Args:
        root: the corpus folder.
        paths: table texts relative to ``root``.
        work_dir: where results are appended as JSON lines, one file per corpus folder.
        workers: processes; 0: one per available core.
        progress: called with (done, total) after each image.
        stop: asked after each image.
        timeout_seconds: per file; then it is given up as ``timeout``.

    Raises:
        StoppedError: ``stop`` said so; what was found is remembered.
    """
    store = store_for(work_dir, "images", root)
    states = {path: file_state(root / path_from_text(path)) for path in paths}
    version = _code_version()
    results = _read_known(store, version, states)
    todo = [path for path in states if path not in results]
    if progress is not None:
        progress(len(results), len(states))
    with JsonLines(store) as lines, closing(_probe(root, todo, workers, timeout_seconds)) as probing:
        for result in probing:
            results[result.path] = result
            state = states[result.path]
            if state is not None and (result.facts is not None or result.reason in _LASTING):
                lines.append({"version": version, **asdict(state), **asdict(result)})
            if progress is not None:
                progress(len(results), len(states))
            if stop is not None and stop():
                raise StoppedError(f"stopped after {len(results):,} of {len(states):,} images; run it again to go on")
    return results


def _probe(root: Path, paths: Sequence[str], workers: int, timeout_seconds: float) -> Generator[ProbedImage]:
    items = [str(root / path_from_text(path)) for path in paths]
    for answer in run_isolated(_PROBE_FUNCTION, items, workers=workers, timeout_seconds=timeout_seconds):
        yield _result(paths[answer.position], answer)


def _result(path: str, answer: Answer) -> ProbedImage:
    if answer.failure is not None:
        detail = f"the decoder gave up on this file: {answer.detail}. Save it anew, or leave it out."
        return ProbedImage(path, reason=answer.failure, detail=detail)
    if "reason" in answer.value:
        return ProbedImage(path, reason=answer.value["reason"], detail=answer.value["detail"])
    return ProbedImage(path, ImageFacts(**answer.value))


def _code_version() -> str:
    """Hash over the code that makes a result: what older code found is not used."""
    modules = [sha256_of_file(Path(str(module.__file__))) for module in (still_image, jpeg_damage)]
    return sha256_of_json([PIL.__version__, *modules])[:16]


def _read_known(store: Path, version: str, states: Mapping[str, FileState | None]) -> dict[str, ProbedImage]:
    """Earlier results of files in these states; torn, foreign and outdated lines are passed over, a later line wins."""
    known: dict[str, ProbedImage] = {}
    for row in remembered_rows(store, version):
        found = _known_row(row, states)
        if found is not None:
            known[found.path] = found
    return known


def _known_row(row: dict[str, Any], states: Mapping[str, FileState | None]) -> ProbedImage | None:
    try:
        state = FileState(row["size_bytes"], row["mtime_ns"])
        if states.get(row["path"]) != state:
            return None
        facts = None if row["facts"] is None else ImageFacts(**row["facts"])
        return ProbedImage(row["path"], facts, row["reason"], row["detail"])
    except (KeyError, TypeError):
        return None
