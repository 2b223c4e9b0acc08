"""Text files that keep their beginning and their end, however much is written: what a kernel says past its record."""

from __future__ import annotations

import os
import select
import threading
from pathlib import Path
from typing import BinaryIO

from fvc_lib.services.redaction import Redactor, StreamRedactor

HEAD_BYTES = 16_000_000
TAIL_BYTES = 4_000_000
_CHUNK_BYTES = 1 << 16


class BoundedLog:
    """Appends redacted text to a file of at most ``head_bytes`` + 2 * ``tail_bytes`` and a line that tells of the gap.

    The file is current after every ``write``, so that what a kernel said last outlives whoever wrote it down. Beyond
    the head the newest text follows; whenever that is twice ``tail_bytes`` long its older half is given up.

    Args:
        path: the file; what stands there already is kept and counts.
        redactor: hides secrets, across the borders of pieces too.
    """

    def __init__(
        self, path: Path, redactor: Redactor, *, head_bytes: int = HEAD_BYTES, tail_bytes: int = TAIL_BYTES
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.dropped_bytes = 0
        self._stream: BinaryIO = path.open("r+b" if path.exists() else "w+b", buffering=0)
        self._size = self._stream.seek(0, os.SEEK_END)
        self._head = max(head_bytes, self._size)
        self._tail = tail_bytes
        self._tail_start = 0  # where the newest text begins, once there is a gap
        self._redacting = StreamRedactor(redactor)

    def write(self, text: str) -> None:
        """Append ``text``; where the disk is full it is lost, which the next line in the file cannot tell either."""
        self._append(self._redacting.feed(text).encode("utf-8", "replace"))

    def close(self) -> None:
        """Write what was kept back and close."""
        self._append(self._redacting.close().encode("utf-8", "replace"))
        self._stream.close()

    def _append(self, data: bytes) -> None:
        try:
            while data:
                piece, data = data[: self._tail], data[self._tail :]
                self._stream.write(piece)
                self._size += len(piece)
                if self._size > self._head + 2 * self._tail:
                    self._give_up_the_middle()
        except OSError:  # a full disk must not end the work whose words it cannot hold
            self._size = self._stream.seek(0, os.SEEK_END)

    def _give_up_the_middle(self) -> None:
        start = self._tail_start or self._head
        self._stream.seek(self._size - self._tail)
        newest = self._stream.read(self._tail)
        self.dropped_bytes += self._size - self._tail - start
        gap = f"\n[... {self.dropped_bytes} bytes left out here ...]\n".encode()
        self._stream.seek(self._head)
        self._stream.write(gap + newest)
        self._stream.truncate()
        self._tail_start = self._head + len(gap)
        self._size = self._tail_start + len(newest)


class LogPipe:
    """The write end of a pipe for a kernel's standard output and error; a thread carries it to a bounded log."""

    def __init__(self, log: BoundedLog) -> None:
        self._log = log
        self._read, self.write_end = os.pipe()
        self._closing, self._closed = os.pipe()
        self._thread = threading.Thread(target=self._carry, name="fvc-kernel-log", daemon=True)
        self._thread.start()

    def kernel_has_it(self) -> None:
        """Close our copy of the write end: the pipe ends when the kernel and its children have ended."""
        os.close(self.write_end)
        self.write_end = -1

    def close(self) -> None:
        """Carry what is still in the pipe and stop, though a process that outlived the kernel may hold it open."""
        if self.write_end >= 0:
            self.kernel_has_it()
        os.close(self._closed)
        self._thread.join()
        os.close(self._closing)
        os.close(self._read)
        self._log.close()

    def _carry(self) -> None:
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        poll.register(self._closing, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._read not in ready:  # asked to close, and nothing is left to carry
                return
            data = os.read(self._read, _CHUNK_BYTES)
            if not data:
                return
            self._log.write(data.decode("utf-8", "replace"))
