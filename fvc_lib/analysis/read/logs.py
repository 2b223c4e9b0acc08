"""Reads JSONL files while they are written and after any crash: good lines kept, bad ones counted and told where.

File names never reach SQL: Python reads the bytes, block by block, and DuckDB sees a table of lines. So a name with
quotes, brackets or non-UTF-8 bytes is just a name, and a file of any size takes the memory of its good lines alone.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as arrow

from fvc_lib.analysis.read.records import Answer, LogFile, log_files, run_names, run_status
from fvc_lib.analysis.read.sandbox import connect
from fvc_lib.analysis.wording import count_text
from fvc_lib.services.atomic_files import path_to_text, sha256_of_file, sha256_of_json, write_bytes
from fvc_lib.services.run_paths import RunPaths

_BLOCK_BYTES = 1 << 23  # stays in the caches, and its memory is used again: fresh pages cost more than parsing
_TOLD_LINES = 3
_TOLD_FILES = 10


@dataclass(frozen=True)
class LineFormat:
    """The columns looked for in each line (DuckDB types) and the SQL condition that makes a line a good one."""

    columns: Mapping[str, str]
    good: str


METRIC_LINES = LineFormat(
    {
        "ts": "DOUBLE", "step": "BIGINT", "epoch": "BIGINT", "phase": "VARCHAR", "metric": "VARCHAR",
        "value": "DOUBLE", "flag": "VARCHAR", "fold": "BIGINT", "attempt": "BIGINT",
    },
    good="step IS NOT NULL AND phase IS NOT NULL AND metric IS NOT NULL AND (isfinite(value) OR flag IS NOT NULL)",
)  # fmt: skip

MEMORY_LINES = LineFormat(
    {
        "timestamp": "VARCHAR", "elapsed_seconds": "DOUBLE", "phase": "VARCHAR", "epoch": "BIGINT",
        "batch_idx": "BIGINT", "global_step": "BIGINT", "allocated_mb": "DOUBLE", "reserved_mb": "DOUBLE",
        "max_allocated_mb": "DOUBLE", "total_memory_mb": "DOUBLE", "usage_percent": "DOUBLE", "free_mb": "DOUBLE",
        "device": "VARCHAR", "rank": "BIGINT", "rss_mb": "DOUBLE",
    },
    good="timestamp IS NOT NULL AND (rss_mb IS NOT NULL OR allocated_mb IS NOT NULL)",
)  # fmt: skip

EVENT_LINES = LineFormat(
    {
        "timestamp": "VARCHAR", "elapsed_seconds": "DOUBLE", "phase": "VARCHAR", "epoch": "BIGINT",
        "batch_idx": "BIGINT", "global_step": "BIGINT", "kind": "VARCHAR", "message": "VARCHAR", "details": "JSON",
    },
    good="kind IS NOT NULL AND (timestamp IS NOT NULL OR elapsed_seconds IS NOT NULL)",
)  # fmt: skip


@dataclass(frozen=True)
class LineCount:
    """How many lines a file has that are not blank, and which of them could not be read.

    Attributes:
        num_bad: lines that are left out.
        first_bad: the numbers (1-based) of the first few of them.
    """

    num_lines: int = 0
    num_bad: int = 0
    first_bad: tuple[int, ...] = ()


@dataclass(frozen=True)
class LogLines:
    """Good lines of several files.

    Attributes:
        frame: columns ``file_number run_id stage file file_fold line`` (line 1-based) and those of the format.
        files: as asked for.
        counts: of each file.
        problems: of files that could not be opened, in words, by their number.
    """

    frame: pl.DataFrame
    files: tuple[LogFile, ...]
    counts: tuple[LineCount, ...]
    problems: Mapping[int, str]

    @property
    def notes(self) -> tuple[str, ...]:
        """In words, what could not be read."""
        return (*self.problems.values(), *skipped_notes(self.files, self.counts))


def read_log_lines(files: Sequence[LogFile], line_format: LineFormat) -> LogLines:
    """The good lines of ``files`` in file and line order.

    A line is good when it is one JSON object whose columns satisfy ``line_format``; torn, NUL-filled and glued lines
    are not and are counted, file by file. Blank lines count as nothing.
    """
    names = list(line_format.columns)
    structure = json.dumps(dict(line_format.columns))
    # TRY parses once; json_valid before from_json would parse twice. Only lines without a good object can be blank.
    query = f"""
        SELECT * EXCLUDE (text), coalesce({line_format.good}, false) AS good FROM (
            SELECT owner, line, text, {", ".join(f"fields.{name} AS {name}" for name in names)}
            FROM (SELECT *, TRY(from_json(text, '{structure}')) AS fields FROM lines)
        ) WHERE good OR NOT regexp_full_match(text, '\\s*')
    """
    problems: dict[int, str] = {}
    with connect() as connection:
        parts = []
        for block in _blocks(files, problems):
            connection.register("lines", block)
            parts.append(connection.sql(query).pl())
    rows = pl.concat(parts)
    kept = rows.filter("good")
    frame = kept.select(*_owner_columns(files, kept["owner"]), "line", *names)
    return LogLines(frame, tuple(files), _counted(rows, len(files)), problems)


def skipped_notes(files: Sequence[LogFile], counts: Sequence[LineCount]) -> tuple[str, ...]:
    """In words, how many lines were left out and where; nothing when none were."""
    bad = [(file, count) for file, count in zip(files, counts, strict=True) if count.num_bad]
    if not bad:
        return ()
    total, num_lines = sum(count.num_bad for _, count in bad), sum(count.num_lines for count in counts)
    where = [f"{path_to_text(f'{file.run_id}/{file.path.name}')}: {_bad_text(count)}" for file, count in bad]
    if len(where) > _TOLD_FILES:
        where = [*where[:_TOLD_FILES], f"and in {count_text(len(where) - _TOLD_FILES, 'more file')}"]
    verb = "is" if total == 1 else "are"
    return (
        f"{count_text(total, 'line')} of {num_lines:,} could not be read and {verb} left out ({'; '.join(where)}).",
    )


def _bad_text(count: LineCount) -> str:
    numbers = ", ".join(map(str, count.first_bad))
    more = count.num_bad - len(count.first_bad)
    return f"line {numbers}" if count.num_bad == 1 else f"lines {numbers}" + (f" and {more:,} more" if more else "")


def _blocks(files: Sequence[LogFile], problems: dict[int, str]) -> Iterator[arrow.Table]:
    """All lines of ``files`` as tables ``owner line text``, at least one; files that cannot be read go to problems."""
    parts: list[bytes] = []
    owners: list[int] = []
    first_lines: list[int] = []
    size = 0
    for owner, file in enumerate(files):
        line = 1
        try:
            for piece in _whole_lines(file.path):
                if parts and size + len(piece) > _BLOCK_BYTES:
                    yield _line_table(parts, owners, first_lines)
                    parts, owners, first_lines, size = [], [], [], 0
                parts.append(piece)
                owners.append(owner)
                first_lines.append(line)
                size += len(piece)
                line += piece.count(b"\n")
        except OSError as error:
            problems[owner] = f"{path_to_text(file.path)} could not be read: {error.strerror}."
    yield _line_table(parts, owners, first_lines)


def _whole_lines(path: Path) -> Iterator[bytes]:
    """The content of ``path`` in pieces that end where a line does; the last line is ended where it is not."""
    rest = b""
    with open(path, "rb", buffering=0, opener=_without_waiting) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a plain file")
        while piece := stream.read(_BLOCK_BYTES):
            if cut := piece.rfind(b"\n") + 1:
                yield rest + piece[:cut]
                rest = piece[cut:]
            else:
                rest += piece
    if rest:
        yield rest + b"\n"


def _without_waiting(path: str, flags: int) -> int:
    """A pipe that nobody writes into would be waited for."""
    return os.open(path, flags | os.O_NONBLOCK)


def _line_table(parts: Sequence[bytes], owners: Sequence[int], first_lines: Sequence[int]) -> arrow.Table:
    """Lines as an Arrow table over the bytes themselves; a million lines cost no Python object each."""
    content = _valid_utf8(b"".join(parts))
    ends = np.flatnonzero(np.frombuffer(content, np.uint8) == ord("\n")) + 1
    starts = np.concatenate([np.zeros(1, np.int64), ends])
    text = arrow.Array.from_buffers(
        arrow.large_string(), ends.size, [None, arrow.py_buffer(starts), arrow.py_buffer(content)]
    )
    num_lines = np.array([part.count(b"\n") for part in parts], np.int64)
    before = np.cumsum(num_lines) - num_lines
    line = np.arange(ends.size, dtype=np.int64) + np.repeat(np.array(first_lines, np.int64) - before, num_lines)
    owner = np.repeat(np.array(owners, np.int64), num_lines)
    return arrow.table({"owner": arrow.array(owner), "line": arrow.array(line), "text": text})


def _valid_utf8(content: bytes) -> bytes:
    """DuckDB takes Arrow text on trust, so bytes that are no UTF-8 are replaced before it sees them."""
    try:
        content.decode()
    except UnicodeDecodeError:
        return content.decode("utf-8", "replace").encode()
    return content


def _owner_columns(files: Sequence[LogFile], owner: pl.Series) -> list[pl.Series]:
    """For each line the number of its file, whose it is, and the fold that the file's name gives."""
    texts = {
        "run_id": [path_to_text(file.run_id) for file in files],
        "stage": [path_to_text(file.stage) for file in files],
        "file": [path_to_text(file.path.name) for file in files],
    }
    columns = [pl.Series(name, values, dtype=pl.String).gather(owner) for name, values in texts.items()]
    folds = pl.Series("file_fold", [file.fold for file in files], dtype=pl.Int64).gather(owner)
    return [owner.alias("file_number"), *columns, folds]


def _counted(rows: pl.DataFrame, num_files: int) -> tuple[LineCount, ...]:
    bad = rows.filter(~pl.col("good")).group_by("owner").agg(pl.len(), pl.col("line").head(_TOLD_LINES))
    bad_lines = {owner: (number, tuple(first)) for owner, number, first in bad.iter_rows()}
    lines = dict(rows.group_by("owner").len().iter_rows())
    return tuple(LineCount(lines.get(owner, 0), *bad_lines.get(owner, (0, ()))) for owner in range(num_files))


# ----------------------------------------------------------------------------------------------------
# Lines of metric logs as curves: one row per step of each metric, the last attempt's, in step order.


SCHEMA = pl.Schema(
    {
        "stage": pl.String,
        "fold": pl.Int64,
        "phase": pl.String,
        "metric": pl.String,
        "step": pl.Int64,
        "epoch": pl.Int64,
        "value": pl.Float64,
        "flag": pl.String,
        "attempt": pl.Int64,
        "ts": pl.Float64,
    }
)


def curves(lines: LogLines) -> pl.DataFrame:
    """The rows of ``lines`` that count, as curves.

    Where a file has the same (step, metric, phase, fold) several times, as after a resume, the last attempt counts;
    within an attempt, the last line.

    Returns:
        ``file_number`` and the columns of ``SCHEMA``, folder by folder of the files in their order, and within a
        folder by stage, fold (none last), phase, metric and step. ``value`` is null where ``flag`` says nan, inf or
        -inf.
    """
    frame = lines.frame.select(
        pl.Series("place", _places(lines.files), dtype=pl.UInt32).gather(lines.frame["file_number"]),
        "file_number",
        "line",
        "stage",
        pl.coalesce("fold", "file_fold").alias("fold"),
        # As numbers in the texts' own order: to sort a million texts takes three times as long.
        *(pl.col(name).cast(pl.Enum(lines.frame[name].unique().sort())) for name in ("phase", "metric")),
        "step",
        "epoch",
        pl.when(pl.col("value").is_finite()).then("value").alias("value"),
        "flag",
        pl.col("attempt").fill_null(1),
        "ts",
    )
    curve = ["place", "fold", "phase", "metric", "step", "file_number"]
    frame = frame.sort(*curve, "attempt", "line", nulls_last=True)
    is_last = pl.any_horizontal(pl.col(name).ne_missing(pl.col(name).shift(-1)) for name in curve)
    at_end = pl.int_range(pl.len()) == pl.len() - 1
    return frame.filter(is_last | at_end).select("file_number", *SCHEMA).cast({"phase": pl.String, "metric": pl.String})


def _places(files: Sequence[LogFile]) -> list[int]:
    """Where each file's rows come: folders in the order given, stages of a folder by name."""
    folders = {folder: number for number, folder in enumerate(dict.fromkeys(file.path.parent for file in files))}
    keys = [(folders[file.path.parent], path_to_text(file.stage)) for file in files]
    ranks = {key: rank for rank, key in enumerate(sorted(set(keys)))}
    return [ranks[key] for key in keys]


# ----------------------------------------------------------------------------------------------------
# A finished run's metric logs as one Parquet, believed only while it is a copy of the logs as they lie there.
#
# The logs stay the truth and are never deleted. Beside the rows the Parquet says which files it was made of, with size,
# times and SHA-256, and how many of their lines could not be read. A log that nobody has touched since is known by its
# times, without being read; any other, a copied one for instance, by its SHA-256. The Parquet bears a SHA-256 of
# itself:
# readers load files with flipped bits without a word, or panic about them.
#


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


# ----------------------------------------------------------------------------------------------------
# The curves of any number of runs, each from its compacted copy where that can be believed, else from its logs.


@dataclass(frozen=True)
class CurveFilter:
    """Which curves are wanted; empty means all of a kind."""

    metrics: Sequence[str] = ()
    phases: Sequence[str] = ()
    folds: Sequence[int] = ()

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The rows of ``frame`` that are wanted."""
        wanted = {"metric": self.metrics, "phase": self.phases, "fold": self.folds}
        chosen = [pl.col(column).is_in(list(values)) for column, values in wanted.items() if values]
        return frame.filter(*chosen) if chosen else frame


def read_curves(runs: Sequence[RunPaths], wanted: CurveFilter) -> Answer:
    """The wanted curves of ``runs``; ``queries.learning_curves`` tells columns and order."""
    runs = sorted(runs, key=lambda run: (path_to_text(run.run_id), run.root))
    names = run_names(runs)
    logs = [log_files(run, "metrics", name) for run, name in zip(runs, names, strict=True)]
    counts: dict[LogFile, LineCount] = {}
    problems: list[str] = []
    parts, rest = [], []
    for number, (run, files) in enumerate(zip(runs, logs, strict=True)):
        compacted = read_compacted(run, files)
        problems += compacted.problems
        if compacted.frame is None:
            rest.append(number)
        else:
            counts |= compacted.counts
            parts.append(wanted.apply(compacted.frame).select(_run_number(number), pl.all()))
    if rest or not parts:
        lines = read_log_lines([file for number in rest for file in logs[number]], METRIC_LINES)
        counts |= dict(zip(lines.files, lines.counts, strict=True))
        problems += lines.problems.values()
        owners = pl.Series("run", [number for number in rest for _ in logs[number]], dtype=pl.UInt32)
        found = wanted.apply(curves(lines))
        parts.append(found.select(owners.gather(found["file_number"]), pl.exclude("file_number")))
    frame = pl.concat(parts)
    if rest and len(parts) > 1:
        frame = frame.sort("run", maintain_order=True)
    run_ids = pl.Series("run_id", list(map(path_to_text, names)), dtype=pl.String)
    files = [file for files in logs for file in files]
    notes = (*problems, *skipped_notes(files, [counts[file] for file in files]))
    return Answer(frame.select(run_ids.gather(frame["run"]), pl.exclude("run")), notes)


def _run_number(number: int) -> pl.Expr:
    return pl.lit(number, dtype=pl.UInt32).alias("run")
