"""A journal: a file with one line per finding (a model's prediction for one file), written as soon as it is known.

If the process is killed, the same call with the same folder continues, and predicts no file twice. Several processes
may each handle a shard (a share of the files). Every shard then writes its own journal, and ``take_in`` appends these
to the folder's journal.
"""

import errno
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from fvc_lib.corpus.probing import file_state
from fvc_lib.services.atomic_files import path_to_text, sweep_temporaries
from fvc_lib.services.isolated_workers import SUSPECTS
from fvc_lib.services.run_paths import SHARDS
from fvc_lib.services.stage_logs import JsonLines, checked_row
from fvc_lib.video.decode.file_parts import sha256_of_video
from fvc_lib.video.decode.source import VideoError

JOURNAL = "findings.jsonl"
_OF_SHARD = "findings.{}.jsonl"
BLOCK_FILES = 1000  # files that are judged together; limits the memory, however many files there are


# The type of a finding on one file. It is a dataclass with the fields ``path`` (text for the tables), ``sha256`` (of
# the content) and ``lasts`` (whether another attempt would give the same finding). Its other fields are JSON values, or
# tuples of them.
Found = TypeVar("Found", bound=Any)


class Journal(Generic[Found]):
    """A file of the findings (predictions) of one model, which stores new findings and reads those of earlier calls.

    Only one process may write to it. A stored finding is used again if the file that it is about still has the same
    size and modification time, or the same content. Memory holds only the byte offsets of earlier lines.

    Args:
        folder: folder of the journal; made where it is missing.
        identity: text that identifies the model and all settings that affect its findings. Lines with another
            identity are skipped.
        kind: class of a finding.
        shard: name of a shard, such as ``3_of_16``. Findings are then written to the shard's journal, and the folder's
            journal is only read. Empty: no shard.
    """

    def __init__(self, folder: Path, identity: str, kind: Callable[..., Found], *, shard: str = "") -> None:
        self._identity, self._kind = identity, kind
        self._states: dict[str, dict[str, int] | None] = {}  # by path, before the block's files are opened
        name = _OF_SHARD.format(shard) if shard else JOURNAL
        own = folder / name
        self._lines = JsonLines(own)
        self._streams: list[BinaryIO] = []
        self._places: dict[str, tuple[BinaryIO, int]] = {}  # by path, the stream and byte offset of its last line
        for path in dict.fromkeys((folder / JOURNAL, own)):
            if path.is_file():
                stream, place = path.open("rb"), 0
                self._streams.append(stream)
                for line in stream:
                    if (row := self._row(line)) is not None:
                        self._places[row["path"]] = stream, place
                    place += len(line)

    def _row(self, line: bytes) -> dict[str, Any] | None:
        """Return the row in a line of the journal; None if the line is torn or damaged, or has another identity."""
        try:
            row = checked_row(line)
            return row if row["by"] == self._identity else None
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    def known(self, block: Sequence[Path]) -> dict[str, Found]:
        """Return the stored findings that are still valid for the files of ``block``, by path.

        Paths are absolute, as tables store them (``path_to_text``). A finding is valid while the file has the same
        size and modification time, or the same content.
        """
        self._states = {path_to_text(path): file_state(path) for path in block}
        found = {}
        for path, (text, state) in zip(block, self._states.items(), strict=True):
            if state is None or text not in self._places:
                continue
            stream, place = self._places[text]
            stream.seek(place)
            row = checked_row(stream.readline())
            finding = row["finding"]
            with suppress(OSError, VideoError):
                if row["state"] == state or sha256_of_video(path) == finding.get("sha256"):
                    values: dict[str, Any] = {n: tuple(v) if type(v) is list else v for n, v in finding.items()}
                    found[text] = self._kind(path=text, **values)
        return found

    def append(self, found: Found) -> None:
        """Append the finding ``found`` to the journal.

        A finding after a crash or a timeout (``found.lasts`` is False) is not stored, because another attempt may give
        another result. The file of the finding must belong to the ``block`` of the last call of ``known``.
        """
        if found.lasts and (state := self._states[found.path]) is not None:
            values = {name: value for name, value in asdict(found).items() if name not in ("path", "lasts") and value}
            self._lines.append(
                {"by": self._identity, "path": found.path, "state": state, "finding": values}, digest=True
            )

    def close(self) -> None:
        """Flush the findings to the disk and close the files."""
        for stream in self._streams:
            stream.close()
        self._lines.close()


def take_in(folder: Path, stage: str) -> None:
    """Append the journals of the shards (shares of the files) to the journal of ``folder``, and delete them.

    Temporary files of killed calls are deleted too. No process may be writing to any of the journals. If this call is
    killed, the next one appends the same lines again, which does no harm.

    The call also reads the shards' records of files that may have killed a process (``SUSPECTS``). This process then
    handles these files one at a time, and skips the files that killed a process twice.

    Args:
        folder: folder of the journals.
        stage: name of the work that was divided into shards.

    Raises:
        OSError: the disk is full.
    """
    sweep_temporaries(folder)
    SUSPECTS.read(folder / SHARDS / stage)
    journals = sorted(folder.glob(_OF_SHARD.format("*_of_*")))
    if not journals:
        return
    with JsonLines(folder / JOURNAL) as lines:
        for path in journals:
            with path.open("rb") as stream:
                while some := stream.readlines(1 << 20):
                    lines.append_lines([line for line in some if line.endswith(b"\n")])  # the last line may be torn
        if lines.lines_lost:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(lines.path))
    for path in journals:
        path.unlink()


def found_in_blocks(
    journal: Journal[Found],
    files: Sequence[Path],
    find: Callable[[list[Path]], Generator[Found]],
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Iterator[tuple[list[Found], int]]:
    """Get the findings (predictions) on ``files`` in blocks of up to ``BLOCK_FILES`` files, and yield each block.

    A block is the pair ``(findings, num_known)``. ``findings`` is a list in the order of ``files``. ``num_known`` is
    the number of these findings that earlier calls had stored in the journal.

    Args:
        journal: holds the findings of earlier calls, and stores new ones at once.
        files: absolute paths without repeats.
        find: function that yields the findings on a list of files, in any order.
        progress: called with (done, total) numbers of files.
    """
    done = 0
    for start in range(0, len(files), BLOCK_FILES):
        block = files[start : start + BLOCK_FILES]
        found = journal.known(block)
        num_known = len(found)
        progress(done + num_known, len(files))
        todo = [path for path in block if path_to_text(path) not in found]
        with closing(find(todo)) as answers:
            for finding in answers:
                found[finding.path] = finding
                journal.append(finding)
                progress(done + len(found), len(files))
        done += len(block)
        yield [found[path_to_text(path)] for path in block], num_known


def find_out(
    journal: Journal[Found],
    files: Sequence[Path],
    find: Callable[[list[Path]], Generator[Found]],
    progress: Callable[[int, int], None],
) -> None:
    """Get the findings (predictions) on all ``files``, store them in ``journal``, and close the journal.

    Files whose findings are in the journal already are skipped. ``find`` yields the findings on a list of files.
    ``progress`` is called with (done, total) numbers of files.
    """
    with closing(journal):
        for _ in found_in_blocks(journal, files, find, progress):
            pass
