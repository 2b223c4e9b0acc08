"""Where somebody who does not program drops a video, watches it being judged, and reads and keeps the page.

A browser sends a file in pieces, each acknowledged, so that neither a server's limit on messages nor the kernel's
memory decides how long a video may be. Files lie in one folder of this process, under a name that is safe, until
their page is made; then they are deleted. What is shown comes from Python as text and is never read as HTML.
"""

import contextlib
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fvc_lib.analysis.wording import bytes_text
from fvc_lib.services.errors import FvcError
from fvc_lib.services.progress import Tell, part_text

MEGABYTE = 1_000_000
_PIECE_BYTES = 1 << 20
_MOST_OF_A_NAME = 80  # characters


@dataclass(frozen=True)
class Judged:
    """What is shown of one video.

    Attributes:
        verdict: ``fake``, ``real``, ``undecided``; empty: no prediction.
        score: as it is shown, with its range; empty where there is none.
        reasons: why, sentences.
        page: the offline page, UTF-8; empty: none.
    """

    verdict: str
    score: str
    reasons: tuple[str, ...]
    page: bytes = b""


Judge = Callable[[Path, Tell], Judged]  # given a file, and what is told of how far its judging is
_TELL_SECONDS = 0.2  # between two messages on one part


def safe_name(name: str) -> str:
    """Return a valid file name: no folders or control characters, not hidden, at most 80 characters."""
    last = name.replace("\\", "/").rpartition("/")[2]
    plain = re.sub(r"[^\w .()+=@,-]", "_", last).strip(" .-")
    stem, dot, suffix = plain.rpartition(".")
    if not dot or len(suffix) > 8:
        return plain[:_MOST_OF_A_NAME] or "video"
    return f"{stem[: _MOST_OF_A_NAME - len(suffix)] or 'video'}.{suffix}"


class Uploads:
    """Files that a browser sends in pieces, and what is answered to each message.

    Args:
        folder: of this process alone; there.
        judge: is given each whole file, which is deleted afterwards.
        limit_bytes: of one file.
        send: takes an answer and its bytes.
    """

    def __init__(
        self,
        folder: Path,
        judge: Judge,
        limit_bytes: int,
        send: Callable[[Mapping[str, Any], list[bytes]], None],
    ) -> None:
        self._folder, self._judge, self._limit_bytes, self._send = folder, judge, limit_bytes, send
        self._coming: dict[str, tuple[Path, int]] = {}
        self._number = 0
        self._told = ("", "", 0.0)  # file, part and time of the last message on how far judging is

    def receive(self, message: Mapping[str, Any], pieces: list[Any]) -> None:
        """Answer one message of the browser; nothing that it holds raises."""
        file = str(message.get("file", ""))[:64]
        try:
            if message.get("kind") == "begin":
                self._begin(file, str(message.get("name", "")), message.get("size"))
            elif message.get("kind") == "piece":
                self._take(file, message.get("offset"), bytes(pieces[0]) if pieces else b"")
            elif message.get("kind") == "stop":
                self._forget(file)
        except FvcError as error:
            self._refuse(file, str(error))
        except OSError as error:
            self._refuse(file, f"The file could not be stored: {error.strerror or error}.")
        except Exception as error:  # noqa: BLE001 - one bad file never ends the page
            self._refuse(file, f"Something nobody has foreseen: {type(error).__name__}: {error}")

    def _refuse(self, file: str, why: str) -> None:
        self._forget(file)
        self._send({"file": file, "kind": "refused", "text": why}, [])

    def _begin(self, file: str, name: str, size: object) -> None:
        if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
            raise FvcError("An empty file. Drop a video.")
        if size > self._limit_bytes:
            raise FvcError(
                f"{bytes_text(size)} is more than the {bytes_text(self._limit_bytes)} that this page takes. Whoever "
                "started it can allow more (--limit-mb)."
            )
        self._forget(file)
        promised = sum(whole - path.stat().st_size for path, whole in self._coming.values())
        if shutil.disk_usage(self._folder).free - promised < 2 * size:
            raise FvcError(f"The disk of the machine that judges has no room for {bytes_text(size)}.")
        self._number += 1
        target = self._folder / str(self._number) / safe_name(name)
        target.parent.mkdir()
        target.touch()
        self._coming[file] = (target, size)
        self._send({"file": file, "kind": "next", "received": 0}, [])

    def _take(self, file: str, offset: object, piece: bytes) -> None:
        if file not in self._coming:
            raise FvcError("This upload is not known any more. Drop the video again.")
        target, size = self._coming[file]
        received = target.stat().st_size
        if offset != received or not piece or received + len(piece) > size:
            raise FvcError("A piece of the file was lost or came twice. Drop the video again.")
        with target.open("ab") as stream:
            stream.write(piece)
        received += len(piece)
        if received < size:
            self._send({"file": file, "kind": "next", "received": received}, [])
            return
        self._tell(file, "looking at it", 0, 0)
        found = self._judge(target, lambda part, done, total: self._tell(file, part, done, total))
        self._forget(file)
        answer = {"verdict": found.verdict, "score": found.score, "reasons": list(found.reasons)}
        self._send({"file": file, "kind": "judged", "name": target.name, **answer}, [found.page] if found.page else [])

    def _tell(self, file: str, part: str, done: int, total: int) -> None:
        now = time.monotonic()
        if (file, part) == self._told[:2] and now - self._told[2] < _TELL_SECONDS:
            return
        self._told = (file, part, now)
        text = part[:1].upper() + part_text(part, done, total)[1:]
        self._send({"file": file, "kind": "working", "text": text, "share": done / total if total else None}, [])

    def _forget(self, file: str) -> None:
        if file in self._coming:
            target, _ = self._coming.pop(file)
            with contextlib.suppress(OSError):
                shutil.rmtree(target.parent)


def verdict_desk(folder: Path, judge: Judge, limit_mb: int) -> Any:
    """Return the widget; ``folder`` belongs to this process, ``limit_mb`` limits one file."""
    import anywidget  # heavy, and nothing but a live page needs it
    import traitlets

    class VerdictDesk(anywidget.AnyWidget):
        _esm = _SCRIPT
        _css = _STYLE
        limit_text = traitlets.Unicode(bytes_text(limit_mb * MEGABYTE)).tag(sync=True)
        piece_bytes = traitlets.Int(_PIECE_BYTES).tag(sync=True)

    desk = VerdictDesk()
    uploads = Uploads(folder, judge, limit_mb * MEGABYTE, lambda answer, pieces: desk.send(dict(answer), pieces))
    desk.on_msg(lambda _, message, pieces: uploads.receive(message, pieces))
    return desk


_SCRIPT = """
function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}
function render({ model, el }) {
  const waiting = [];
  let current = null;
  const zone = element("label", "fvc-drop");
  const input = element("input");
  input.type = "file";
  input.multiple = true;
  input.setAttribute("aria-label", "Choose videos");
  zone.append(element("b", "", "Drop videos here, or click to choose them"),
              element("span", "", "Up to " + model.get("limit_text") + " each. They are judged one after the other on "
                                + "the machine that shows this page, and deleted afterwards."), input);
  const list = element("div", "fvc-judged");
  list.setAttribute("aria-live", "polite");
  el.append(zone, list);

  const add = (files) => {
    for (const file of files) {
      const card = element("article", "fvc-video");
      const title = element("h3", "", file.name);
      const badge = element("span", "fvc-badge", "waiting");
      badge.setAttribute("aria-live", "off");  // else its seconds would be read out
      const bar = element("progress");
      bar.max = 1; bar.value = 0;
      const state = element("p", "fvc-state", "waits until those dropped before it are judged");
      const head = element("header");
      head.append(title, badge);
      card.append(head, bar, state);
      list.prepend(card);
      waiting.push({ file, card, badge, bar, state, id: Math.random().toString(36).slice(2) });
    }
    proceed();
  };
  const proceed = () => {
    if (current || !waiting.length) return;
    current = waiting.shift();
    current.badge.textContent = "sending";
    current.state.textContent = "";
    model.send({ kind: "begin", file: current.id, name: current.file.name, size: current.file.size });
  };
  const tick = () => {
    const seconds = Math.round((Date.now() - current.begun) / 1000);
    current.badge.textContent = "judging, " + seconds + " s";
  };
  const finish = () => { clearInterval(current.timer); current = null; proceed(); };
  const sendPiece = async (upload, offset) => {
    try {
      const piece = await upload.file.slice(offset, offset + model.get("piece_bytes")).arrayBuffer();
      model.send({ kind: "piece", file: upload.id, offset }, undefined, [piece]);
    } catch (error) {
      model.send({ kind: "stop", file: upload.id });
      upload.badge.textContent = "not read";
      upload.state.textContent = "The browser cannot read this file any more.";
      upload.bar.remove();
      finish();
    }
  };
  const received = (message, buffers) => {
    if (!current || message.file !== current.id) return;
    const upload = current;
    if (message.kind === "next") {
      upload.bar.value = message.received / upload.file.size;
      sendPiece(upload, message.received);
    } else if (message.kind === "working") {
      if (message.share === null) upload.bar.removeAttribute("value"); else upload.bar.value = message.share;
      upload.begun = upload.begun || Date.now();
      upload.timer = upload.timer || setInterval(tick, 1000);
      tick();
      upload.state.textContent = message.text;
    } else if (message.kind === "refused") {
      upload.bar.remove();
      upload.badge.textContent = "not judged";
      upload.state.textContent = message.text;
      finish();
    } else if (message.kind === "judged") {
      upload.bar.remove();
      upload.badge.textContent = message.verdict || "no prediction";
      upload.card.dataset.verdict = message.verdict || "none";
      upload.state.textContent = message.score ? "score " + message.score : "";
      const reasons = element("ul");
      for (const reason of message.reasons) reasons.append(element("li", "", reason));
      upload.card.append(reasons);
      if (buffers && buffers.length) {
        const blob = new Blob([buffers[0]], { type: "text/html" });
        const address = URL.createObjectURL(blob);
        const open = element("a", "fvc-button", "Read the page");
        open.href = address; open.target = "_blank"; open.rel = "noopener";
        const keep = element("a", "fvc-button", "Download it");
        keep.href = address; keep.download = message.name.replace(/\\.[^.]*$/, "") + ".verdict.html";
        const links = element("p");
        links.append(open, keep);
        upload.card.append(links);
      }
      finish();
    }
  };
  const over = (event) => { event.preventDefault(); zone.classList.add("fvc-over"); };
  const left = () => zone.classList.remove("fvc-over");
  const dropped = (event) => { event.preventDefault(); left(); add(event.dataTransfer.files); };
  zone.addEventListener("dragover", over);
  zone.addEventListener("dragleave", left);
  zone.addEventListener("drop", dropped);
  input.addEventListener("change", () => { add(input.files); input.value = ""; });
  model.on("msg:custom", received);
  return () => model.off("msg:custom", received);
}
export default { render };
"""
_STYLE = """
.fvc-drop { display: flex; flex-direction: column; gap: .4rem; align-items: center; padding: 2rem 1rem; cursor: pointer;
  border: 2px dashed #8a93a3; border-radius: .75rem; text-align: center; color: #1f2933; background: #f7f8fa; }
.fvc-drop.fvc-over, .fvc-drop:focus-within { border-color: #1f5fbf; background: #eef4fd; }
.fvc-drop input { position: absolute; opacity: 0; width: 1px; height: 1px; }
.fvc-drop span { color: #52606d; font-size: .9rem; max-width: 36rem; }
.fvc-video { border: 1px solid #d5dae1; border-left: .4rem solid #8a93a3; border-radius: .5rem; padding: .75rem 1rem;
  margin: .75rem 0; background: #fff; color: #1f2933; overflow-wrap: anywhere; }
.fvc-video header { display: flex; justify-content: space-between; gap: 1rem; align-items: baseline; }
.fvc-video h3 { margin: 0; font-size: 1rem; }
.fvc-video progress { width: 100%; }
.fvc-video p, .fvc-video ul { margin: .4rem 0; line-height: 1.4; }
.fvc-badge { font-weight: 700; white-space: nowrap; }
.fvc-video[data-verdict="fake"] { border-left-color: #b3261e; }
.fvc-video[data-verdict="fake"] .fvc-badge { color: #b3261e; }
.fvc-video[data-verdict="real"] { border-left-color: #1b6e3c; }
.fvc-video[data-verdict="real"] .fvc-badge { color: #1b6e3c; }
.fvc-button { display: inline-block; margin-right: .75rem; padding: .35rem .8rem; border-radius: .4rem; color: #fff;
  background: #1f5fbf; text-decoration: none; }
"""
