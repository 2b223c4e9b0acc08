"""Shards: shares of a stage's files, which several processes handle at the same time.

A shard stores its results (probe results, clips and features) under the content hash of the file, in the caches that
the stage's notebook reads. So the notebook's tables do not depend on the number of shards. If the process of a shard
dies, the next process for this shard does only the missing files. After two deaths in a row, the files that were being
processed at the last death are processed one at a time. If the process dies again while it works on such a file alone,
the file is rejected.
"""

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, Self

from fvc_lib.execution.run.status import run_lock
from fvc_lib.services.atomic_files import read_json_object, write_json
from fvc_lib.services.errors import StoppedError, UsageError
from fvc_lib.services.isolated_workers import SUSPECTS

_WRITE_SECONDS = 0.5
_ALONE_AFTER = 2  # deaths in a row


@dataclass(frozen=True)
class Shard:
    """One of several shares of a stage's files.

    Attributes:
        number: number of the share, from 0.
        of: number of all shares.
    """

    number: int
    of: int

    @classmethod
    def named(cls, text: str) -> Self:
        """Return the shard that a text such as ``3/16`` names: number 3, counted from 0, of 16 shards.

        Raises:
            UsageError: ``text`` does not have this form, or the number is not less than the number of shards.
        """
        number, _, of = text.partition("/")
        if not (number.isdecimal() and of.isdecimal() and int(number) < int(of)):
            raise UsageError(f"shard: got {text!r}, wanted NUMBER/OF, the number from 0, for example 3/16.")
        return cls(int(number), int(of))

    def has(self, text: str) -> bool:
        """Return whether a file belongs to this shard. Every file belongs to exactly one of the ``of`` shards.

        ``text`` identifies the file: its path or its content hash.
        """
        digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
        return int.from_bytes(digest[:8], "big") % self.of == self.number

    def __str__(self) -> str:
        return f"{self.number}_of_{self.of}"


@dataclass
class ShardRecord:
    """The progress of one shard (a share of a stage's files) since its last start, and the deaths of its processes.

    Files are named by the paths that the workers get.
    """

    state: Literal["running", "done", "stopped", "failed"] = "stopped"
    done: int = 0  # number of finished files
    total: int = 0  # number of files in the shard; 0 until the first report
    deaths: int = 0  # number of times in a row that the shard's process died
    in_hand: list[str] = field(default_factory=list)  # files being processed; recorded after the first death only
    alone: list[str] = field(default_factory=list)  # files to process one at a time, because one may kill the process
    given_up: list[str] = field(default_factory=list)  # rejected files


def record_path(folder: Path, stage: str, shard: Shard) -> Path:
    """Return the path of the file with the ``ShardRecord`` of a shard (a share of a stage's files).

    ``folder`` is the run folder, or the output folder of ``predict``.
    """
    return folder / "shards" / stage / f"{shard}.json"


def read_shard(path: Path) -> ShardRecord:
    """Return a shard's record from the file ``path``; an empty record if the file is missing or damaged."""
    try:
        return ShardRecord(**read_json_object(path))
    except TypeError:
        return ShardRecord()


class ShardAtWork:
    """The shard (share of a stage's files) that this process works on, with its record in the file ``path``.

    If the record says ``running`` at the start, the earlier process of this shard died. After two deaths in a row, the
    files that were being processed at the last death are processed one at a time. If the process dies again while it
    works on such a file alone, that file is the cause, and it is rejected.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        before = read_shard(path)
        self._now = ShardRecord("running", given_up=before.given_up)
        if before.state == "running":  # the earlier process died
            self._now.deaths = before.deaths + 1
            given_up = {*before.given_up, *(set(before.in_hand) & set(before.alone))}
            alone = {*before.alone, *(before.in_hand if self._now.deaths >= _ALONE_AFTER else ())} - given_up
            self._now.alone, self._now.given_up = sorted(alone), sorted(given_up)
        self._write()

    def report(self, done: int, total: int, part: str = "", what: str = "") -> None:
        """Record that ``done`` of ``total`` files are finished. The record is written at most every 0.5 s.

        ``part`` and ``what`` are ignored. They exist so that the method can be used as a progress callback.
        """
        self._now.done, self._now.total = done, total
        if time.monotonic() - self._written >= _WRITE_SECONDS:
            self._write()

    def note_in_hand(self, files: Sequence[str]) -> None:
        """Record the paths of the files that are being processed now.

        If the process dies now, one of these files is the likely cause. The paths are written only if a process of this
        shard has died before.
        """
        self._now.in_hand = list(files)
        if self._now.deaths:
            self._write()

    def end(self, state: Literal["done", "stopped", "failed"]) -> None:
        """Record how the work on the shard ended.

        ``done`` also resets the number of deaths, and the list of files to process one at a time.
        """
        self._now.state, self._now.in_hand = state, []
        if state == "done":
            self._now.deaths, self._now.alone, self._now.done = 0, [], self._now.total
        self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        write_json(self._path, asdict(self._now))


@contextmanager
def work_on(folder: Path, stage: str, shard: Shard) -> Iterator[ShardAtWork]:
    """Lock a shard (a share of a stage's files) during the block, and yield the object that records its progress.

    At the end the record's state is ``done``, ``stopped`` (by a signal or Ctrl-C) or ``failed`` (another exception).

    Args:
        folder: the run folder, or the output folder of ``predict``.
        stage: name of the stage.
        shard: the shard.

    Raises:
        UsageError: another process works on the shard or on the whole run.
    """
    with run_lock(folder, [f"{stage}_shard_{shard}"]):
        at_work = ShardAtWork(path := record_path(folder, stage, shard))
        SUSPECTS.read(path.parent)
        SUSPECTS.in_hand = at_work.note_in_hand
        try:
            yield at_work
        except BaseException as error:
            at_work.end("stopped" if isinstance(error, StoppedError | KeyboardInterrupt) else "failed")
            raise
        else:
            at_work.end("done")
        finally:
            SUSPECTS.in_hand = None


def shards_line(folder: Path, stage: str, of: int) -> str:
    """Return one line of text about the progress of all shards (shares of the files) of a stage.

    It has the number of finished shards, the number of finished files, and the rejected files. ``of`` is the number of
    shards.

    ``folder`` is the run folder, or the output folder of ``predict``.
    """
    records = [read_shard(record_path(folder, stage, Shard(number, of))) for number in range(of)]
    done = sum(record.done for record in records)
    total = sum(record.total for record in records)
    line = f"{stage} shards: {sum(record.state == 'done' for record in records)} of {of} done"
    if total:
        line += f"; {done:,} of {total:,} files of those begun"
    if given_up := sorted({file for record in records for file in record.given_up}):
        line += f"; {len(given_up)} rejected: {', '.join(given_up[:3])}"
    return line
