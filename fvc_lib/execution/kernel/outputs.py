"""What of a cell's output its record holds: never more than a record may weigh, whatever is printed or shown.

Of a stream the beginning and the end stand in the record and all of it in a linked file; an output too heavy to stand
in the record is a link. Everything is redacted before it is kept anywhere.
"""

import base64
import binascii
import html
import json
import os
import re
import select
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import nbformat
from nbformat import NotebookNode

from fvc_lib.services.records.redaction import Redactor, StreamRedactor

# Text files that keep their beginning and their end, however much is written: what a kernel says past its record.

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


# Files for what a cell printed or showed beyond what its record holds, and the links to them.

MAX_FILES = 100
MAX_BYTES = 256_000_000  # of all shown outputs together; printed text has the bounded log's limit for each stream
LINK_KEY = "fvc_overflow"  # in an output's metadata: the file's path from the run folder
# A drawing may hold scripts, and there is no way to forbid them in its file: it is kept to be read.
_SUFFIXES = {
    "text/html": ".html", "image/svg+xml": ".svg.txt", "image/png": ".png", "image/jpeg": ".jpg",
    "text/markdown": ".md", "text/latex": ".tex", "application/pdf": ".pdf", "text/plain": ".txt",
}  # fmt: skip


# First in a page that a cell made: a reader who opens it from the record runs no script of it and loads nothing.
_HARMLESS_PAGE = (
    '<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'; font-src data:\">\n"
)


class OutputFiles:
    """The overflow of one task, in a folder that is made when the first file is needed.

    Those of an earlier attempt are replaced one by one. ``record`` is the notebook that links to them, and ``root``
    the run's folder, which contains both.
    """

    def __init__(self, folder: Path, record: Path, root: Path, redactor: Redactor) -> None:
        self._folder, self._record, self._root, self._redactor = folder, record, root, redactor
        self._sizes: dict[Path, int] = {}

    def log(self, name: str) -> BoundedLog:
        """A new file for printed text."""
        path = self._folder / re.sub(r"[^\w.-]", "_", name)  # a cell may call its stream what it likes
        path.unlink(missing_ok=True)
        return BoundedLog(path, self._redactor)

    def keep(self, stem: str, data: Mapping[str, Any]) -> list[Path]:
        """Write each representation of a shown output; none where files or space allowed for them are used up."""
        rich = {mime: value for mime, value in data.items() if mime != "text/plain"} or dict(data)
        written = []
        for mime, value in rich.items():
            content, path = _content(mime, value), self._folder / (stem + _SUFFIXES.get(mime, ".json"))
            others = {other: size for other, size in self._sizes.items() if other != path}
            if len(others) >= MAX_FILES or sum(others.values()) + len(content) > MAX_BYTES:
                break
            self._folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            self._sizes[path] = len(content)
            written.append(path)
        return written

    def link(self, path: Path) -> str:
        """An HTML link to ``path`` that works from the record's own folder."""
        target = os.path.relpath(path, self._record.parent)
        return f'<a href="{html.escape(target)}">{html.escape(self.name(path))}</a>'

    def name(self, path: Path) -> str:
        """``path`` as seen from the run folder."""
        return os.path.relpath(path, self._root)


def _content(mime: str, value: Any) -> bytes:
    if mime.startswith("image/") and mime != "image/svg+xml" and isinstance(value, str):
        try:
            return base64.b64decode(value, validate=False)
        except binascii.Error:
            pass
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if mime == "text/html":
        text = _HARMLESS_PAGE + text
    return text.encode("utf-8", "replace")


RECORD_BYTES = 4_000_000  # a record stays under 5 MB; the rest is for what every cell may say when this is used up
STREAM_BYTES = 128_000  # of one stream of one cell, half of it for its end
OUTPUT_BYTES = 1_500_000  # of one shown output
FLOOR_BYTES = 2_000  # what a cell may always say
ERROR_BYTES = 60_000


def weight(value: Any) -> int:
    """How many bytes ``value`` takes in a record."""
    return len(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


class RecordBudget:
    """What is left of a record's weight, shared by its cells in their order."""

    def __init__(self, record_bytes: int = RECORD_BYTES) -> None:
        self.left = record_bytes

    def share(self) -> int:
        """What the next cell may show: half of what is left; each stream may take a quarter as much beside it."""
        return max(FLOOR_BYTES, self.left // 2)


class CellOutputs:
    """The outputs of one cell, kept within its share of the record.

    ``label`` begins the names of its files.
    """

    def __init__(
        self, cell: NotebookNode, label: str, budget: RecordBudget, files: OutputFiles, redactor: Redactor
    ) -> None:
        self._outputs: list[NotebookNode] = cell.outputs
        self._label, self._budget, self._files, self._redactor = label, budget, files, redactor
        self._share = budget.share()
        self._used = 0
        self._shown = self._left_out = 0
        self._note, self._last_error = _new_output("display_data"), _new_output("error")
        self._streams: dict[str, _Stream] = {}
        self._clear_next = False

    def print(self, name: str, text: str) -> None:
        """Add to stream ``name``."""
        self._clear_if_due()
        if name not in self._streams:
            limit = min(STREAM_BYTES, max(FLOOR_BYTES, self._share // 4))
            self._streams[name] = _Stream(name, f"{self._label}_{name}.txt", limit, self._files, self._redactor)
        stream = self._streams[name]
        before = stream.weight
        stream.write(text, self._outputs)
        self._used += stream.weight - before

    def show(self, kind: str, content: dict[str, Any]) -> NotebookNode:
        """Add a ``display_data``, ``execute_result`` or ``error``; returns the output that stands in the record."""
        self._clear_if_due()
        self._shown += 1
        output = _new_output(kind)
        if self._left_out and kind != "error":
            self._left_out += 1
            return output
        if kind == "error":
            room = min(ERROR_BYTES, max(2 * FLOOR_BYTES, self._share - self._used))
            output.update(_bounded_error(self._redactor.tree(content), room))
        else:
            output.update(self._bounded(content, f"{self._label}_output_{self._shown}"))
            if kind == "execute_result":
                output["execution_count"] = content.get("execution_count")
        if self._room_for(weight(output)):
            self._outputs.append(output)
        elif kind == "error":  # the last one is always told: it ended the cell
            self._outputs[:] = [other for other in self._outputs if other is not self._last_error]
            self._outputs.append(output)
            self._last_error = output
        else:
            self._left_out += 1
        return output

    def replace(self, output: NotebookNode, content: dict[str, Any]) -> None:
        """Put what ``content`` shows in the place of ``output`` (``update_display_data``)."""
        before = weight(output)
        output.update(self._bounded(content, f"{self._label}_updated_{id(output) % 10_000}"))
        self._used += weight(output) - before

    def clear(self, wait: bool) -> None:
        """Forget what was shown, now or when something follows."""
        self._clear_next = True
        if not wait:
            self._clear_if_due()

    def settle(self) -> None:
        """Bring the record's copy up to date: the end of each long stream, and how much was left out."""
        for stream in self._streams.values():
            stream.settle(self._outputs)
        if self._left_out:
            note = f"[{self._left_out} more outputs are not in this record, which would be too large]"
            self._note["data"] = {"text/plain": note}
            if not any(output is self._note for output in self._outputs):
                self._outputs.append(self._note)

    def close(self) -> None:
        """Write what was kept back, close the files and take what the cell weighs off the record's budget."""
        for stream in self._streams.values():
            stream.close(self._outputs)
        self.settle()
        self._budget.left -= weight(self._outputs)

    def _bounded(self, content: dict[str, Any], stem: str) -> dict[str, Any]:
        """``data`` and ``metadata`` as they may stand in the record: themselves, or a link to a file that has them."""
        data, metadata = self._redactor.tree(content.get("data", {})), self._redactor.tree(content.get("metadata", {}))
        size = weight(data) + weight(metadata)
        limit = min(OUTPUT_BYTES, max(FLOOR_BYTES // 2, self._share - self._used))
        if size <= limit:
            return {"data": data, "metadata": metadata}
        written = self._files.keep(stem, data)
        megabytes = f"{size / 1e6:.1f} MB, too large for this record"
        if not written:
            return {"data": {"text/plain": f"[an output of {megabytes}, was not kept]"}, "metadata": {}}
        links = ", ".join(self._files.link(path) for path in written)
        names = ", ".join(self._files.name(path) for path in written)
        shown = {"text/plain": f"[{megabytes}: {names}]", "text/html": f"<p>[{megabytes}: {links}]</p>"}
        return {"data": shown, "metadata": {LINK_KEY: names}}

    def _room_for(self, size: int) -> bool:
        """Whether ``size`` more fits; what was replaced or cleared meanwhile is counted off first."""
        if self._used + size > self._share + FLOOR_BYTES and not self._left_out:
            self._used = weight(self._outputs)
        fits = self._used + size <= self._share + FLOOR_BYTES
        self._used += size if fits else 0
        return fits

    def _clear_if_due(self) -> None:
        if self._clear_next:
            self._clear_next = False
            self._outputs.clear()
            self._used = self._left_out = 0
            for stream in self._streams.values():
                stream.clear()


class _Stream:
    """One stream of one cell: where its text goes."""

    def __init__(self, name: str, file: str, limit: int, files: OutputFiles, redactor: Redactor) -> None:
        self._name, self._file, self._limit, self._files = name, file, limit, files
        self._redacting = StreamRedactor(redactor)
        self._log: BoundedLog | None = None
        self._head: list[NotebookNode] = []
        self._tail = ""
        self._total = 0  # characters that overflowed
        self._end: tuple[NotebookNode, NotebookNode] | None = None
        self.weight = 0

    def write(self, text: str, outputs: list[NotebookNode]) -> None:
        self._add(self._redacting.feed(text), outputs)

    def clear(self) -> None:
        self._head, self._tail, self._total, self._end, self.weight = [], "", 0, None, 0

    def close(self, outputs: list[NotebookNode]) -> None:
        self._add(self._redacting.close(), outputs)
        if self._log is not None:
            self._log.close()

    def settle(self, outputs: list[NotebookNode]) -> None:
        """Where it overflowed: a link and the end of the text."""
        if not self._total or self._log is None:
            return
        if self._end is None:
            self._end = (_new_output("display_data"), _new_output("stream", name=self._name, text=""))
            outputs.extend(self._end)
        link, end = self._end
        what = "beginning and end" if self._log.dropped_bytes else "the whole text"
        text = f"{self._name} goes on, {self._total + self._head_length():,} characters in all; {what}:"
        link["data"] = {
            "text/plain": f"[{text} {self._files.name(self._log.path)}]",
            "text/html": f"<p>[{text} {self._files.link(self._log.path)}]</p>",
        }
        link["metadata"] = {LINK_KEY: self._files.name(self._log.path)}
        end["text"] = _fitting(self._tail, self._limit // 2, from_end=True)

    def _add(self, text: str, outputs: list[NotebookNode]) -> None:
        if not text:
            return
        if self._log is None and self.weight <= self._limit // 2:
            self._add_to_head(text, outputs)
            return
        if self._log is None:
            self._log = self._files.log(self._file)
            self._log.write("".join(output["text"] for output in self._head))
        self._log.write(text)
        self._total += len(text)
        self._tail = (self._tail + text)[-self._limit // 2 :]

    def _add_to_head(self, text: str, outputs: list[NotebookNode]) -> None:
        if not (self._head and outputs and outputs[-1] is self._head[-1]):
            self._head.append(_new_output("stream", name=self._name, text=""))
            outputs.append(self._head[-1])
        output = self._head[-1]
        done, newline, line = output["text"].rpartition("\n")
        fresh = _without_rewritten(line + text)
        room = self._limit // 2 - self.weight + weight(line)
        fitting = _fitting(fresh, max(0, room), from_end=False)
        output["text"] = done + newline + fitting
        self.weight += weight(fitting) - weight(line)
        if len(fitting) < len(fresh):
            self.weight = self._limit  # full: what follows, this rest first, goes to the file
            self._add(fresh[len(fitting) :], outputs)

    def _head_length(self) -> int:
        return sum(len(output["text"]) for output in self._head)


def _without_rewritten(text: str) -> str:
    """Lines as a terminal shows them: of a progress bar that went back to the line's start, what it wrote last."""
    if "\r" not in text:
        return text
    return "\n".join(line[line.rstrip("\r").rfind("\r") + 1 :] for line in text.split("\n"))


def _fitting(text: str, room: int, *, from_end: bool) -> str:
    """As much of one end of ``text`` as weighs at most ``room`` bytes in a record."""
    if weight(text) <= room:
        return text
    shortest, longest = 0, min(len(text), room)
    while shortest < longest:
        middle = (shortest + longest + 1) // 2
        piece = text[len(text) - middle :] if from_end else text[:middle]
        shortest, longest = (middle, longest) if weight(piece) <= room else (shortest, middle - 1)
    return text[len(text) - shortest :] if from_end else text[:shortest]


def _bounded_error(content: dict[str, Any], room: int) -> dict[str, Any]:
    """What of an error weighs at most ``room`` bytes: of its traceback the end, which says what happened."""
    lines: list[str] = []
    left = room * 3 // 4
    for line in reversed([str(line) for line in content.get("traceback", [])]):
        lines.insert(0, _fitting(line, left, from_end=True))
        left -= weight(lines[0])
        if left <= 100 or len(lines[0]) < len(line):
            lines.insert(0, "[...]")
            break
    message = str(content.get("evalue", ""))
    return {
        "ename": str(content.get("ename", ""))[:200],
        "evalue": _fitting(message, room // 4, from_end=False),
        "traceback": lines,
    }


def _new_output(kind: str, **fields: Any) -> NotebookNode:
    """An output of its kind, still empty. nbformat's own constructor validates it, which costs a millisecond each."""
    if kind not in ("stream", "error"):
        fields = {"data": {}, "metadata": {}, **fields}
    output: NotebookNode = nbformat.from_dict({"output_type": kind, **fields})
    return output
