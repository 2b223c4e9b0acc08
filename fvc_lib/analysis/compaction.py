"""A finished run's metric logs as one Parquet, believed only while it is a copy of the logs as they lie there.

The logs stay the truth and are never deleted. Beside the rows the Parquet says which files it was made of, with size,
times and SHA-256, and how many of their lines could not be read. A log that nobody has touched since is known by its
times, without being read; any other, a copied one for instance, by its SHA-256. The Parquet bears a SHA-256 of itself:
readers load files with flipped bits without a word, or panic about them.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import polars as pl

from fvc_lib.analysis.log_lines import METRIC_LINES, LineCount, read_log_lines
from fvc_lib.analysis.metric_curves import SCHEMA, curves
from fvc_lib.analysis.records import LogFile, log_files
from fvc_lib.analysis.run_state import run_status
from fvc_lib.services.atomic_files import sha256_of_file, sha256_of_json, write_bytes
from fvc_lib.services.path_text import path_to_text
from fvc_lib.services.run_paths import RunPaths

_FINISHED = ("done", "failed")
_KEY = "fvc_compacted_metrics"
_SEAL = b"sha256 of this file with zeros here: "
_UNSEALED = b"0" * 64
_ROW_GROUP_ROWS = 1 << 16
# Changes whenever what counts as a good line or a row does: then all that was compacted before is stale.
_FORMAT = sha256_of_json([1, dict(METRIC_LINES.columns), METRIC_LINES.good, [f"{k} {v}" for k, v in SCHEMA.items()]])
# Times of files are this coarse on some disks: a log written so shortly before it was looked at may have been written
# again without a trace in its times.
_SETTLED_NS = 2_000_000_000


@dataclass(frozen=True)
class _Source:
    """A log as it was when it was compacted."""

    name: str
    size: int
    sha256: str
    modified_ns: int
    changed_ns: int
    inode: int
    seen_ns: int
    num_lines: int
    num_bad: int
    first_bad: tuple[int, ...]

    def is_still(self, file: LogFile) -> bool:
        """Whether ``file`` has the content that was compacted."""
        status = file.path.stat()
        if status.st_size != self.size:
            return False
        times = (status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        untouched = times == (self.modified_ns, self.changed_ns, self.inode)
        settled = max(self.modified_ns, self.changed_ns) + _SETTLED_NS < self.seen_ns
        return (untouched and settled) or sha256_of_file(file.path) == self.sha256


@dataclass(frozen=True)
class Compacted:
    """What ``read_compacted`` found.

    Attributes:
        frame: the run's curves, columns ``metric_curves.SCHEMA``; None: read the logs.
        counts: lines of each log.
        problems: in words, why a file that lies there was not believed; a merely outdated one is not worth a word.
    """

    frame: pl.DataFrame | None
    counts: Mapping[LogFile, LineCount]
    problems: tuple[str, ...] = ()


_NOTHING = Compacted(None, {})


def compact_metrics(run: RunPaths) -> bool:
    """Write ``run.compacted_metrics`` of a finished run, atomically; whether a file that can be believed lies there.

    Nothing is written while a stage runs, when a log cannot be read or is changed meanwhile, where there are no logs,
    or when the disk does not take it: queries then read the logs, with the same answers.
    """
    if not _is_finished(run):
        return False
    files = log_files(run, "metrics")
    if not files:
        return False
    if read_compacted(run, files).frame is not None:
        return True
    try:
        before = [_look(file) for file in files]
        lines = read_log_lines(files, METRIC_LINES)
        if lines.problems or [_look(file, seen) for file, seen in zip(files, before, strict=True)] != before:
            return False
        sources = [{**seen, **asdict(count)} for seen, count in zip(before, lines.counts, strict=True)]
        _write(run, curves(lines).drop("file_number"), sources)
    except OSError:
        return False
    return True


def read_compacted(run: RunPaths, files: Sequence[LogFile]) -> Compacted:
    """The curves of ``run`` from its compacted metrics, if those are of just ``files`` as they lie there now."""
    try:
        content = run.compacted_metrics.read_bytes()
    except FileNotFoundError:
        return _NOTHING
    except OSError as error:
        return _not_believed(run, error.strerror or "it cannot be opened")
    try:
        return _believed(content, files)
    except (pl.exceptions.PolarsError, OSError, ValueError, KeyError, TypeError) as error:
        return _not_believed(run, str(error) or type(error).__name__)


def _believed(content: bytes, files: Sequence[LogFile]) -> Compacted:
    if not _is_sealed(content):
        raise ValueError("its content is not what was written")
    told: dict[str, Any] = json.loads(pl.read_parquet_metadata(io.BytesIO(content))[_KEY])
    if told["format"] != _FORMAT:
        return _NOTHING
    sources = [_Source(**{**source, "first_bad": tuple(source["first_bad"])}) for source in told["sources"]]
    names = [path_to_text(log.path.name) for log in files]
    if [source.name for source in sources] != names or not all(map(_Source.is_still, sources, files)):
        return _NOTHING
    frame = pl.read_parquet(io.BytesIO(content))
    if frame.schema != SCHEMA:
        raise ValueError("its columns are not those of curves")
    counts = [LineCount(source.num_lines, source.num_bad, source.first_bad) for source in sources]
    return Compacted(frame, dict(zip(files, counts, strict=True)))


def _not_believed(run: RunPaths, why: str) -> Compacted:
    first_line = " ".join(why.split())[:200]
    text = f"{path_to_text(run.compacted_metrics)} is damaged or foreign ({first_line}); the logs were read instead."
    return Compacted(None, {}, (text,))


def _is_finished(run: RunPaths) -> bool:
    status = run_status(run)
    at_work = any(isinstance(stage, dict) and stage.get("state") == "running" for stage in status["stages"].values())
    return status.get("state") in _FINISHED and not at_work


def _look(file: LogFile, seen: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The log as it is now; what was ``seen`` before gives the digest, which is not computed twice, and the time."""
    seen_ns = time.time_ns()
    status = file.path.stat()
    return {
        "name": path_to_text(file.path.name),
        "size": status.st_size,
        "sha256": seen["sha256"] if seen else sha256_of_file(file.path),
        "modified_ns": status.st_mtime_ns,
        "changed_ns": status.st_ctime_ns,
        "inode": status.st_ino,
        "seen_ns": seen["seen_ns"] if seen else seen_ns,
    }


def _write(run: RunPaths, frame: pl.DataFrame, sources: Sequence[Mapping[str, Any]]) -> None:
    told = {"format": _FORMAT, "sources": sources}
    metadata = {_KEY: json.dumps(told, ensure_ascii=True), "seal": (_SEAL + _UNSEALED).decode()}
    stream = io.BytesIO()
    frame.write_parquet(stream, compression="lz4", row_group_size=_ROW_GROUP_ROWS, metadata=metadata)
    content = stream.getvalue()
    place = content.rfind(_SEAL) + len(_SEAL)
    write_bytes(run.compacted_metrics, content[:place] + _digest(content, place) + content[place + len(_UNSEALED) :])


def _is_sealed(content: bytes) -> bool:
    """Whether every byte of a compacted file is as it was written."""
    found = content.rfind(_SEAL)
    place = found + len(_SEAL)
    return found >= 0 and content[place : place + len(_UNSEALED)] == _digest(content, place)


def _digest(content: bytes, place: int) -> bytes:
    """Hex SHA-256 of ``content`` with zeros in ``place``, where the digest itself stands."""
    view = memoryview(content)
    digest = hashlib.sha256(view[:place])
    digest.update(_UNSEALED)
    digest.update(view[place + len(_UNSEALED) :])
    return digest.hexdigest().encode()
