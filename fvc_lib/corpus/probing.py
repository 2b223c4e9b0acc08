"""Probe many files in worker processes and remember every result at once, so that a killed index continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import av

from fvc_lib.corpus.remembered_files import FileState, file_state, remembered_rows, store_for
from fvc_lib.services.atomic_files import sha256_of_file, sha256_of_json
from fvc_lib.services.isolated_workers import Answer, run_isolated
from fvc_lib.services.metric_log import JsonLines
from fvc_lib.services.path_text import path_from_text
from fvc_lib.video.code_version import code_hash
from fvc_lib.video.probe import VideoProbe

DEFAULT_TIMEOUT_SECONDS = 120.0
DEFAULT_PROBE_FUNCTION = "fvc_lib.corpus.probe_worker:probe_file"

_PROBING_CODE = ("perceptual_hash.py", "probe_worker.py")
# Failures that lie in the file's content. Others (permissions, a crash, a busy machine) may be gone next time.
_LASTING = frozenset({"no_video", "truncated", "corrupt", "refused"})


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What became of one file: ``probe`` and the hashes, or ``reason`` and ``detail`` why there are none."""

    path: str
    probe: VideoProbe | None = None
    content_sha256: str = ""
    perceptual_hash: str | None = None
    reason: str = ""
    detail: str = ""


def probe_files(
    root: Path,
    paths: Sequence[str],
    work_dir: Path,
    *,
    workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    probe_function: str = DEFAULT_PROBE_FUNCTION,
) -> tuple[dict[str, ProbeResult], int]:
    """Probe every path, reusing what ``work_dir`` knows of files with unchanged size and modification time.

    Args:
        root: the corpus folder.
        paths: table texts relative to ``root``.
        work_dir: where results are appended as JSON lines, one file per corpus folder.
        workers: processes; 0: one per available core.
        progress: called with (done, total) after each file.
        timeout_seconds: per file; then it is given up as ``timeout``.
        probe_function: ``module:name`` run in the worker.

    Returns:
        The result of each path, and how many of them were known before.
    """
    store = store_for(work_dir, "probes", root)
    states = {path: file_state(root / path_from_text(path)) for path in paths}
    version = _code_version()
    results = _read_known(store, version, states)
    todo = [path for path in paths if path not in results]
    num_known = len(results)
    if progress is not None:
        progress(num_known, len(paths))
    with JsonLines(store) as lines:
        for result in _probe(root, todo, workers, timeout_seconds, probe_function):
            results[result.path] = result
            state = states[result.path]
            if state is not None and (result.probe is not None or result.reason in _LASTING):
                lines.append({"version": version, **asdict(state), **asdict(result)})
            if progress is not None:
                progress(len(results), len(paths))
    return results, num_known


def _probe(
    root: Path, paths: Sequence[str], workers: int, timeout_seconds: float, probe_function: str
) -> Iterator[ProbeResult]:
    items = [str(root / path_from_text(path)) for path in paths]
    for answer in run_isolated(probe_function, items, workers=workers, timeout_seconds=timeout_seconds):
        yield _result(paths[answer.position], answer)


def _result(path: str, answer: Answer) -> ProbeResult:
    if answer.failure is not None:
        detail = f"the decoder gave up on this file: {answer.detail}. Re-encode it, or leave it out."
        return ProbeResult(path, reason=answer.failure, detail=detail)
    if "reason" in answer.value:
        return ProbeResult(path, reason=answer.value["reason"], detail=answer.value["detail"])
    return ProbeResult(
        path,
        VideoProbe(**answer.value["probe"]),
        answer.value["content_sha256"],
        answer.value["perceptual_hash"],
    )


def _code_version() -> str:
    """Hash over the code that makes a result: what older code found is not used."""
    here = {name: sha256_of_file(Path(__file__).with_name(name)) for name in _PROBING_CODE}
    return sha256_of_json([av.__version__, code_hash("probe"), code_hash("decode"), here])[:16]


def _read_known(store: Path, version: str, states: Mapping[str, FileState | None]) -> dict[str, ProbeResult]:
    """Earlier results of files in these states; torn, foreign and outdated lines are passed over, a later line wins.

    What is known of other files or of earlier states is not held in memory.
    """
    known: dict[str, ProbeResult] = {}
    for row in remembered_rows(store, version):
        found = _known_row(row)
        if found is not None and found[0] == states.get(found[1].path):
            known[found[1].path] = found[1]
    return known


def _known_row(row: dict[str, Any]) -> tuple[FileState, ProbeResult] | None:
    try:
        state = FileState(**{field.name: row[field.name] for field in fields(FileState)})
        values = {field.name: row[field.name] for field in fields(ProbeResult)}
        if values["probe"] is not None:
            values["probe"] = VideoProbe(**values["probe"])
        return state, ProbeResult(**values)
    except (KeyError, TypeError):
        return None
