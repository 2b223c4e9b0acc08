"""``run_notebooks.py app``: a web page that judges videos, for people who do not program.

One process serves the page and judges one video after the other. An upload is deleted when it has been judged; the
answers are deleted when the visitor leaves the page. The page loads nothing from other servers.
"""

import hmac
import queue
import re
import secrets
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fvc_lib.analysis.wording import interval_text
from fvc_lib.command_line.models import find_model, verdict_detector
from fvc_lib.command_line.options import RUNS_DIR
from fvc_lib.command_line.verdicts.pages import write_video_pages
from fvc_lib.services.errors import FvcError, UsageError

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

_MEGABYTE = 1_000_000
_MOST_WAITING = 20  # uploads of one visitor that are not judged yet
_GONE_AFTER = 120.0  # seconds without a request after which a visitor has left; an open page asks every second
_WORDS = {"fake": "It looks fake", "real": "It looks real"}
CANNOT_TELL = "We cannot tell"
_STYLES = "style-src 'unsafe-inline'; img-src data:"


@dataclass
class Upload:
    """A visitor's video: first its file, then the answer.

    Attributes:
        name: the file's name as the visitor sees it.
        path: the stored file, in a folder of its own.
        state: ``waiting``, ``judging`` or ``done``.
        step: what is being done, in words; empty if nothing is.
        verdict: ``fake``, ``real``, ``undecided`` or ``no prediction``; empty before it is known.
        says: the verdict in plain words.
        score: the score with its range as text; empty if there is none.
        reasons: sentences on the verdict.
        refused: why the video was not judged; empty if it was.
        page: the HTML page with the evidence; empty if there is none.
    """

    name: str
    path: Path
    state: str = "waiting"
    step: str = ""
    verdict: str = ""
    says: str = ""
    score: str = ""
    reasons: list[str] = field(default_factory=list)
    refused: str = ""
    page: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return what the page shows: all attributes but the path; ``page`` says whether there is one."""
        shown = {name: value for name, value in vars(self).items() if name != "path"}
        return shown | {"page": bool(self.page)}


@dataclass
class Visitor:
    """An open page: its uploads by number, and when it last asked, in seconds of the monotonic clock."""

    uploads: dict[int, Upload] = field(default_factory=dict)
    seen: float = field(default_factory=time.monotonic)


class Desk:
    """The visitors, their uploads, and the queue of uploads to judge.

    Args:
        folder: folder for uploads, used by no other process.
        limit_bytes: the largest size of an upload, in bytes.
        most_visitors: the largest number of open pages.
    """

    def __init__(self, folder: Path, limit_bytes: int, most_visitors: int) -> None:
        self.folder, self.limit_bytes, self.most_visitors = folder, limit_bytes, most_visitors
        self.token, self.visitors = secrets.token_urlsafe(24), dict[str, Visitor]()
        self._waiting: queue.Queue[Upload] = queue.Queue()
        self._numbers = 0

    def enter(self) -> str:
        """Return the key of a new visitor; empty if there are too many. Visitors who are gone are forgotten first."""
        now = time.monotonic()
        for key in [key for key, visitor in self.visitors.items() if now - visitor.seen > _GONE_AFTER]:
            self.leave(key)
        if len(self.visitors) >= self.most_visitors:
            return ""
        key = secrets.token_urlsafe(16)
        self.visitors[key] = Visitor()
        return key

    def leave(self, key: str) -> None:
        """Forget a visitor, and delete the visitor's files. The video that is being judged is deleted afterwards."""
        visitor = self.visitors.pop(key, Visitor())
        for upload in visitor.uploads.values():
            if upload.state == "waiting":
                upload.state = "left"
                shutil.rmtree(upload.path.parent, ignore_errors=True)

    def place_for(self, name: str) -> tuple[int, Path]:
        """Return a number and a path for a new upload; the path's folder is made and is empty."""
        self._numbers += 1
        folder = self.folder / str(self._numbers)
        folder.mkdir()
        return self._numbers, folder / _safe_name(name)

    def ahead(self, number: int) -> int:
        """Return the number of uploads, of all visitors, that will be judged before upload ``number``."""
        uploads = [pair for visitor in self.visitors.values() for pair in visitor.uploads.items()]
        return sum(other < number and upload.state in ("waiting", "judging") for other, upload in uploads)

    def hand_in(self, upload: Upload) -> None:
        """Put an upload into the queue."""
        self._waiting.put(upload)

    def judge_all(self, judge: Callable[[Upload], None]) -> None:
        """Judge the uploads one after the other; never returns.

        Args:
            judge: fills in the answer of an upload. If it raises an exception, its message becomes ``refused``.
        """
        while True:
            upload = self._waiting.get()
            if upload.state == "left":
                continue
            upload.state = "judging"
            try:
                judge(upload)
            except Exception as error:  # noqa: BLE001 - one bad file never ends the page
                upload.refused = str(error) if isinstance(error, FvcError) else repr(error)
            shutil.rmtree(upload.path.parent, ignore_errors=True)
            upload.state, upload.step = "done", ""


def _safe_name(name: str) -> str:
    """Return the last 80 characters of a file name, without folders, and with ``_`` for unusual characters.

    Dots, spaces and dashes at both ends are removed, so it is never the name of a hidden file. If nothing is left, the
    name is ``video``.
    """
    last = re.split(r"[/\\]", name)[-1]
    return re.sub(r"[^\w .()+=@,-]", "_", last)[-80:].strip(" .-") or "video"


def web_app(desk: Desk) -> "Starlette":
    """Return the web application. Every request must have the desk's token in its address.

    ``GET /`` gives the page; ``PUT /video`` stores an upload; ``GET /videos`` says how far the visitor's uploads are;
    ``GET /page`` gives the evidence on one; ``POST /leave`` forgets the visitor.
    """
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import ClientDisconnect
    from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse
    from starlette.routing import Route

    from fvc_lib.analysis.pages.page import render

    def visitor_of(request: "Request") -> Visitor | None:
        visitor = desk.visitors.get(request.query_params.get("visitor", ""))
        if visitor is not None:
            visitor.seen = time.monotonic()
        return visitor

    def with_token(answer: Callable[["Request"], Any]) -> Callable[["Request"], Any]:
        async def checked(request: "Request") -> "Response":
            token = request.query_params.get("token", "").encode()
            if not hmac.compare_digest(token, desk.token.encode()):
                return PlainTextResponse("Open the whole address that the command printed.", 403)
            response: Response = await answer(request)
            response.headers.setdefault("Content-Security-Policy", f"default-src 'none'; {_STYLES}")
            safe = {"Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
            response.headers.update(safe)
            return response

        return checked

    async def front(_: "Request") -> "Response":
        key, nonce = desk.enter(), secrets.token_urlsafe(16)
        if not key:
            return PlainTextResponse("Too many people use this page now. Try again in some minutes.", 503)
        html = render("app.html", nonce=nonce, limit_bytes=desk.limit_bytes, visitor=key)
        policy = f"default-src 'none'; connect-src 'self'; script-src 'nonce-{nonce}'; {_STYLES}"
        return HTMLResponse(html, headers={"Content-Security-Policy": policy})

    async def store(request: "Request") -> "Response":
        visitor, size = visitor_of(request), request.headers.get("Content-Length", "")
        if visitor is None:
            return JSONResponse({"refused": "This page was open for too long. Load it again."})
        if not size.isdecimal() or not 0 < int(size) <= desk.limit_bytes:
            limit = desk.limit_bytes // _MEGABYTE
            return JSONResponse({"refused": f"This file has {size or 'an unknown number of'} bytes. The page takes "
                                            f"files of 1 byte to {limit:,} MB."})  # fmt: skip
        if sum(upload.state == "waiting" for upload in visitor.uploads.values()) >= _MOST_WAITING:
            return JSONResponse(
                {"refused": f"{_MOST_WAITING} of your videos are waiting. Add more when some are done."}
            )
        name = request.query_params.get("name", "")
        number, path = desk.place_for(name)
        try:
            with path.open("wb") as target:
                async for piece in request.stream():
                    target.write(piece)
            whole = path.stat().st_size == int(size)
        except (ClientDisconnect, OSError) as error:
            shutil.rmtree(path.parent, ignore_errors=True)
            why = getattr(error, "strerror", None) or "the upload broke off"
            return JSONResponse({"refused": f"The file could not be stored: {why}."})
        if not whole:
            shutil.rmtree(path.parent, ignore_errors=True)
            return JSONResponse({"refused": "The upload broke off. Drop the video again."})
        visitor.uploads[number] = upload = Upload(name, path)
        desk.hand_in(upload)
        return JSONResponse({"number": number})

    async def answers(request: "Request") -> "Response":
        visitor = visitor_of(request) or Visitor()
        shown = {number: upload.as_json() for number, upload in visitor.uploads.items()}
        return JSONResponse({number: found | {"ahead": desk.ahead(number)} for number, found in shown.items()})

    async def evidence(request: "Request") -> "Response":
        visitor, number = visitor_of(request), request.query_params.get("number", "")
        upload = visitor.uploads.get(int(number)) if visitor and number.isdecimal() else None
        if upload is None or not upload.page:
            return PlainTextResponse("There is no such page, or its visitor has left.", 404)
        return HTMLResponse(upload.page)

    async def leave(request: "Request") -> "Response":
        desk.leave(request.query_params.get("visitor", ""))
        return PlainTextResponse("")

    routes = [
        Route("/", with_token(front)),
        Route("/video", with_token(store), methods=["PUT"]),
        Route("/videos", with_token(answers)),
        Route("/page", with_token(evidence)),
        Route("/leave", with_token(leave), methods=["POST"]),
    ]
    # A foreign page whose name leads to this machine is refused.
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
    return Starlette(routes=routes, middleware=[hosts])


def serve(desk: Desk, port: int) -> tuple[str, Callable[[], None]]:
    """Serve the page in a thread; return ``(address, stop)``: the address with its token, and a function that ends it.

    Raises:
        UsageError: the port cannot be used.
    """
    import uvicorn

    listening = socket.socket()
    try:
        listening.bind(("127.0.0.1", port))
        listening.listen()  # so that a browser that comes at once waits
    except OSError as error:
        listening.close()
        raise UsageError(f"--port {port}: {error.strerror or error}. Give another --port.") from error
    settings = uvicorn.Config(web_app(desk), log_level="error", access_log=False, timeout_graceful_shutdown=1)
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()

    def stop() -> None:
        server.should_exit = True
        thread.join()
        listening.close()

    return f"http://127.0.0.1:{listening.getsockname()[1]}/?token={desk.token}", stop


@click.command("app")
@click.argument("model", default="latest")
@click.option("--port", type=click.IntRange(0, 65535), default=8866, show_default=True, help="0: any that is free.")
@click.option("--limit-mb", type=click.IntRange(min=1), default=500, show_default=True, help="Largest video, in MB.")
@click.option("--visitors", type=click.IntRange(min=1), default=8, show_default=True, help="Most pages open at once.")
@click.option("--error-rate", default=0.1, show_default=True, metavar="SHARE",
              help="Share of the reals that may be called fake, and of the fakes that may be called real.")  # fmt: skip
@click.option("--map-minutes", type=click.FloatRange(min=0), default=3.0, show_default=True, metavar="MINUTES",
              help="Time limit of a video's maps of where it looks fake; 0: none.")  # fmt: skip
@click.option("--allow-code", is_flag=True, help="Let a bundle's own network run: read its file first.")
@click.option("--final", is_flag=True, help="Ask the run's one network of all groups (train_final), not the folds'.")
@RUNS_DIR
def app(
    model: str,
    port: int,
    limit_mb: int,
    visitors: int,
    error_rate: float,
    map_minutes: float,
    allow_code: bool,
    final: bool,
    runs_dir: Path,
) -> None:
    """Serve a web page on which users drop videos. MODEL judges them, and the page shows the answers for download.

    MODEL is 'latest', a run id, a part of a run id, a run folder, or an exported bundle. The page can be opened on this
    machine only. The printed address holds a token, without which the server refuses every request. Uploads are deleted
    when they have been judged, answers when the visitor leaves. Ctrl-C ends the server.

    \b
    fvc app
    fvc app bundle_run_20260101_120000_0a1b2c3d --port 9000 --limit-mb 2000
    """
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        remedy = "make setup-app, or pip install 'fvc_lib[app]'"
        raise UsageError(f"the page needs {' and '.join(missing)}, not installed: {remedy}")
    from fvc_lib.tasks.decoding import scratch_folder  # torch takes a second to load
    from fvc_lib.tasks.video.verdicts.judging import judge_files
    from fvc_lib.tasks.video.verdicts.rule import rule_of

    folder = find_model(runs_dir, model)
    detector = verdict_detector(folder, allow_code=allow_code, final=final)
    rule = rule_of(error_rate, withheld=not detector.is_above_control)

    def judge(upload: Upload) -> None:
        """Fill in the verdict on an upload, then its page; files go into the folder ``answer`` next to the video."""
        answers, upload.step = upload.path.parent / "answer", "looking at the frames"
        verdicts = judge_files(detector, [upload.path], rule, answers)
        row = next(verdicts.rows())
        upload.verdict, upload.reasons = row["verdict"] or "no prediction", row["reasons"].splitlines()
        upload.says = _WORDS.get(upload.verdict, CANNOT_TELL)
        if row["score"] is None:
            return
        upload.score = interval_text(row["score"], row["score_low"], row["score_high"])

        def report(done: int, total: int, part: str = "", what: str = "") -> None:
            del done, total, what
            upload.step = f"making the page: {part.rpartition(': ')[2]}"

        pages = write_video_pages(verdicts, answers, most=1, map_minutes=map_minutes, overview="", progress=report)
        upload.page = (answers / next(iter(pages.values()))).read_text(encoding="utf-8")

    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    with scratch_folder(detector.config) as uploads:
        desk = Desk(uploads, limit_mb * _MEGABYTE, visitors)
        address, stop = serve(desk, port)
        click.echo(f"model    {folder}\naddress  {address}\nOpen the address in a browser. Ctrl-C ends it.")
        try:
            desk.judge_all(judge)
        except KeyboardInterrupt:
            stop()
