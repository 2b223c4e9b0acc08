"""Pages of verdicts: a page with the evidence for each video, and ``run_notebooks.py verdict-page``.

``verdict-page`` serves a web page that judges uploaded videos, for people who do not program. One process serves the
page. The main thread judges the uploads one after the other. An upload stays in a temporary folder until it has been
judged. The page loads nothing from other servers.
"""

import hmac
import json
import queue
import re
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

import click

from fvc_lib.analysis.wording import interval_text
from fvc_lib.command_line.models import RUNS_DIR, find_model, verdict_detector
from fvc_lib.services.atomic_files import sha256_of_json
from fvc_lib.services.errors import FvcError, UsageError
from fvc_lib.services.stage_logs import Report, not_reported, part_text

if TYPE_CHECKING:
    from fvc_lib.tasks.video.verdicts.evidence import FileEvidence
    from fvc_lib.tasks.video.verdicts.judging import Verdicts

PAGES = "videos"  # folder next to verdicts.csv
MAX_PAGES = 50
MAP_MINUTES = 3.0  # time limit for the maps of all pages together
_FORMAT = 11  # version of the pages; if it changes, all pages are written again
# The answer to an upload: keys ``verdict``, ``score`` (text with interval), ``reasons`` (texts) and ``page`` (HTML).
# Score and page are empty for a file without a score. Or only the key ``refused``, with the reason.
Answer = dict[str, Any]
_MEGABYTE = 1_000_000


def write_video_pages(
    verdicts: "Verdicts",
    folder: Path,
    *,
    most: int = MAX_PAGES,
    map_minutes: float = MAP_MINUTES,
    overview: str = "../verdicts.html",
    progress: Report = not_reported,
) -> dict[str, str]:
    """Write a page ``folder/videos/NNNN_NAME.html`` for each file that has a score.

    A page that already shows the same verdict is not written again, unless a part of it failed. Pages of files that are
    not in ``verdicts`` are deleted.

    Args:
        verdicts: the verdicts on all files.
        folder: the folder with the tables of verdicts.
        most: the largest number of pages; the first files with a score get them. -1: all files.
        map_minutes: time limit in minutes for the maps (where a video looks fake) of all pages together; 0: no maps.
        overview: link to the page of all verdicts, relative to a video's page; empty: no link.
        progress: called with the number of finished pages, the number of all pages, and the part of a page that is
            being made.

    Returns:
        ``{path of a video, as in the table of verdicts: path of its page, relative to folder}``.

    Raises:
        OSError: a page cannot be written.
    """
    from fvc_lib.analysis.pages.answers import Known, write_video_page  # torch and plotly take seconds to load
    from fvc_lib.analysis.pages.page import stamp_of
    from fvc_lib.tasks.video.verdicts.evidence import file_evidence
    from fvc_lib.tasks.video.verdicts.rule import percent

    detector, rule, pages = verdicts.detector, verdicts.rule, dict[str, str]()
    tested, seconds_left = detector.known.tested, 60 * map_minutes
    known = Known(*(tested.filter(label=label)["score"].to_numpy() for label in ("real", "fake")))
    same: dict[str, Any] = {
        "standing": detector.standing.sentences[0] if rule.withheld else "",
        "limits": (*detector.standing.sentences, *verdicts.limits),
        "prior": percent(rule.prior or 0),
        "overview": overview,
    }
    scored = ((number, row) for number, row in enumerate(verdicts.rows(), 1) if row["score"] is not None)
    rows = list(islice(scored, None if most < 0 else most))
    for done, (number, row) in enumerate(rows):
        name = Path(row["path"]).name

        def report(part: str, some: int, of: int, done: int = done, name: str = name) -> None:
            progress(done, len(rows), f"{name}: {part_text(part, some, of)}")

        pages[row["path"]] = f"{PAGES}/{page_name(number, row['path'])}"
        path, stamp = folder / pages[row["path"]], sha256_of_json([_FORMAT, row, same, map_minutes])
        if stamp_of(path) != stamp:
            begin = time.monotonic()
            minutes = seconds_left / 60
            evidence = file_evidence(detector.networks, detector.known, row, map_minutes=minutes, tell=report)
            if evidence.occlusion is not None:
                # Never 0, which means "no maps wanted": later pages shall say that the time was up.
                seconds_left = max(1.0, seconds_left - (time.monotonic() - begin))
            path.parent.mkdir(parents=True, exist_ok=True)
            stamp = "failed" if evidence.failure else stamp
            write_video_page(path, row, known, stamp=stamp, **same, **page_parts(evidence))
        progress(done + 1, len(rows))
    for old in (folder / PAGES).glob("[0-9]*_*.html"):
        if f"{PAGES}/{old.name}" not in pages.values():
            old.unlink()
    return pages


def page_name(number: int, path: str) -> str:
    """Return the file name of a video's page, such as ``0007_Holiday.html`` for video 7, ``Holiday.mp4``.

    Characters other than ASCII letters, digits and underscores become dashes. At most 60 characters of the file's name
    stay.
    """
    plain = re.sub(r"[^A-Za-z0-9_]+", "-", Path(path).stem).strip("-")[:60]
    return f"{number:04d}_{plain}.html"


def page_parts(evidence: "FileEvidence") -> dict[str, Any]:
    """Return the keyword arguments of ``write_video_page`` that show the evidence on a file.

    They are ``evidence`` itself and three pictures: ``frames``, ``over_time`` (the score over time) and ``heat_map``. A
    picture is None if the evidence lacks its data.
    """
    from fvc_lib.analysis.pages.answers import frame_pictures, heat_map, over_time

    curve, mapped = evidence.windows, evidence.occlusion
    parts: dict[str, Any] = {"evidence": evidence, "frames": None, "over_time": None, "heat_map": None}
    if evidence.clips is not None:
        parts["frames"] = frame_pictures(evidence.clips)
    if curve is not None:
        parts["over_time"] = over_time(curve.begins, curve.ends, curve.scores, curve.middles, curve.seconds)
    if mapped is not None and mapped.values is not None and not mapped.why_hidden:
        parts["heat_map"] = heat_map(mapped.picture, mapped.values, mapped.top)
    return parts


@click.command("verdict-page", short_help="A page on which anybody can drop a video and read its verdict.")
@click.argument("model", default="latest")
@click.option("--port", type=click.IntRange(0, 65535), default=8866, show_default=True, help="0: any that is free.")
@click.option("--limit-mb", type=click.IntRange(min=1), default=500, show_default=True, help="Largest video, in MB.")
@click.option("--error-rate", default=0.1, show_default=True, metavar="SHARE",
              help="Share of the reals that may be called fake, and of the fakes that may be called real.")  # fmt: skip
@click.option("--map-minutes", type=click.FloatRange(min=0), default=3.0, show_default=True, metavar="MINUTES",
              help="Time limit of a video's maps of where it looks fake; 0: none.")  # fmt: skip
@click.option("--allow-code", is_flag=True, help="Let a bundle's own network run: read its file first.")
@click.option("--final", is_flag=True, help="Ask the run's one network of all groups (train_final), not the folds'.")
@RUNS_DIR
def verdict_page(
    model: str,
    port: int,
    limit_mb: int,
    error_rate: float,
    map_minutes: float,
    allow_code: bool,
    final: bool,
    runs_dir: Path,
) -> None:
    """Serve a web page on which users drop videos. MODEL judges them, and the page shows the answers for download.

    MODEL is 'latest', a run id, a part of a run id, a run folder, or an exported bundle. The page can be opened on this
    machine only. The printed address holds a token, without which the server refuses every request. Uploads are deleted
    when they have been judged. Ctrl-C ends the server.

    \b
    python run_notebooks.py verdict-page
    python run_notebooks.py verdict-page bundle_run_20260101_120000_0a1b2c3d --port 9000 --limit-mb 2000
    """  # noqa: D301 - click wants the backspace character itself before lines it shall not re-wrap
    from fvc_lib.tasks.decoding import scratch_folder  # torch takes a second to load
    from fvc_lib.tasks.video.verdicts.judging import judge_files
    from fvc_lib.tasks.video.verdicts.rule import rule_of

    folder = find_model(runs_dir, model)
    detector = verdict_detector(folder, allow_code=allow_code, final=final)
    rule = rule_of(error_rate, withheld=not detector.is_above_control)

    def judge(path: Path) -> Answer:
        """Judge the video ``path``, and return the answer; files go into the folder ``answer`` next to the video."""
        answers = path.parent / "answer"
        verdicts = judge_files(detector, [path], rule, answers)
        row = next(verdicts.rows())
        answer = {"verdict": row["verdict"] or "no prediction", "reasons": row["reasons"].splitlines()}
        if row["score"] is None:
            return {**answer, "score": "", "page": ""}
        (page,) = write_video_pages(verdicts, answers, most=1, map_minutes=map_minutes, overview="").values()
        score = interval_text(row["score"], row["score_low"], row["score_high"])
        return {**answer, "score": score, "page": (answers / page).read_text(encoding="utf-8")}

    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    with scratch_folder(detector.config) as uploads:
        server = UploadServer(port, uploads, limit_mb * _MEGABYTE)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        click.echo(f"model    {folder}\naddress  {server.address}\nOpen the address in a browser. Ctrl-C ends it.")
        try:
            server.judge_all(judge)
        except KeyboardInterrupt:
            server.shutdown()


class UploadServer(ThreadingHTTPServer):
    """The HTTP server of the page. Its threads receive uploads; the thread that calls ``judge_all`` judges them.

    Args:
        port: port of this machine to listen on; 0: any free port.
        folder: folder for uploads, used by no other process.
        limit_bytes: the largest size of an upload, in bytes.

    Raises:
        UsageError: the port cannot be used.
    """

    daemon_threads = True

    def __init__(self, port: int, folder: Path, limit_bytes: int) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes
        self.token = secrets.token_urlsafe(24)
        self._waiting: queue.Queue[tuple[Path, Future[Answer]]] = queue.Queue()
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise UsageError(f"--port {port}: {error.strerror or error}. Give another --port.") from error
        self.address = f"http://127.0.0.1:{self.server_address[1]}/?token={self.token}"

    def judge_all(self, judge: Callable[[Path], Answer]) -> None:
        """Judge the uploads one after the other; never returns.

        Args:
            judge: called with the path of an upload; returns the answer. If it raises an exception, the answer is
                ``{"refused": message}``.
        """
        while True:
            path, answer = self._waiting.get()
            try:
                answer.set_result(judge(path))
            except Exception as error:  # noqa: BLE001 - one bad file never ends the page
                answer.set_result({"refused": str(error) if isinstance(error, FvcError) else repr(error)})

    def take(self, name: str, size: int, stream: BufferedIOBase) -> Answer:
        """Store an upload, wait until it is judged, delete it, and return the answer.

        Args:
            name: the file's name, as the browser sends it.
            size: the upload's size in bytes.
            stream: the upload's content.

        Returns:
            The answer of ``judge``; or ``{"refused": reason}`` if the size is wrong, the upload breaks off or the
            judge fails.
        """
        if not 0 < size <= self.limit_bytes:
            limit = self.limit_bytes // _MEGABYTE
            return {"refused": f"This file has {size:,} bytes. The page takes files of 1 byte to {limit:,} MB."}
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            path = Path(folder) / _safe_name(name)
            with path.open("wb") as target:
                while piece := stream.read(min(_MEGABYTE, size - target.tell())):
                    target.write(piece)
            if path.stat().st_size < size:
                return {"refused": "The upload broke off. Drop the video again."}
            answer: Future[Answer] = Future()
            self._waiting.put((path, answer))
            return answer.result()


class _Handler(BaseHTTPRequestHandler):
    """Answers the browser's requests: ``GET /`` with the page, ``PUT /?name=...`` with a verdict as JSON.

    Every request must have the server's token in its address.
    """

    server: UploadServer
    timeout = 60.0  # seconds after which a connection that sends nothing is closed

    def do_GET(self) -> None:
        if self._query() is None or urlsplit(self.path).path != "/":
            self.send_error(404)
            return
        from fvc_lib.analysis.pages.page import render

        html = render("upload.html", nonce=self.server.token, limit_bytes=self.server.limit_bytes)
        self._send("text/html; charset=utf-8", html)

    def do_PUT(self) -> None:
        self.close_connection = True  # a refused upload is not read to its end
        query = self._query()
        if query is None:
            self.send_error(403)
            return
        length = self.headers.get("Content-Length", "")
        try:
            answer = self.server.take(query.get("name", ""), int(length) if length.isdecimal() else 0, self.rfile)
        except OSError as error:
            answer = {"refused": f"The file could not be stored: {error.strerror or error}."}
        self._send("application/json", json.dumps(answer))

    def _query(self) -> dict[str, str] | None:
        """Return the parameters in the address of the request; None if the token is missing or wrong."""
        query = dict(parse_qsl(urlsplit(self.path).query))
        token = query.get("token", "").encode()
        return query if hmac.compare_digest(token, self.server.token.encode()) else None

    def _send(self, kind: str, text: str) -> None:
        content = text.encode()
        policy = f"default-src 'none'; connect-src 'self'; script-src 'nonce-{self.server.token}'; "
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", f"{policy}style-src 'unsafe-inline'; img-src data:")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Log nothing: a request line holds the token."""


def _safe_name(name: str) -> str:
    """Return the last 80 characters of a file name, without folders, and with ``_`` for unusual characters.

    Dots, spaces and dashes at both ends are removed, so it is never the name of a hidden file. If nothing is left, the
    name is ``video``.
    """
    last = re.split(r"[/\\]", name)[-1]
    return re.sub(r"[^\w .()+=@,-]", "_", last)[-80:].strip(" .-") or "video"
