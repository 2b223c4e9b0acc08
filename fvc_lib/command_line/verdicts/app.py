"""``run_notebooks.py app``: a web page that judges videos, for people who do not program.

One process serves the page and judges one video after the other. An upload is deleted when it has been judged, or when
its visitor leaves. The answer is sent once and not stored. The page loads nothing from other servers.
"""

import asyncio
import errno
import json
import queue
import re
import secrets
import shutil
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fvc_lib.analysis.wording import interval_text
from fvc_lib.command_line.models import find_model, verdict_detector
from fvc_lib.command_line.shared_options import ALLOW_CODE, ERROR_RATE, FINAL, RUNS_DIR
from fvc_lib.services.errors import FvcError, UsageError

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

_MEGABYTE = 1_000_000
_TELL_SECONDS = 0.5  # between two lines on an upload
_WORDS = {"fake": "It looks fake", "real": "It looks real"}
CANNOT_TELL = "We cannot tell"
_STYLES = "style-src 'unsafe-inline'; img-src data:"
_SAFE = {"Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}


@dataclass
class Upload:
    """A visitor's video: first its file, then the answer.

    Attributes:
        path: the stored file, in a folder of its own.
        step: what is being done, in words; empty while the upload waits, and at the end.
        answer: ``verdict`` (``fake``, ``real``, ``undecided`` or ``no prediction``), ``says`` (the verdict in plain
            words), ``reasons`` (sentences) and, if there is a score, ``score`` (with its range, as text) and later
            ``page`` (the HTML page with the evidence). If the video was not judged, only ``refused``: the reason. Empty
            before it is known.
        is_done: whether the answer is complete.
    """

    path: Path
    step: str = ""
    answer: dict[str, object] = field(default_factory=dict)
    is_done: bool = False


class Desk:
    """The queue of uploaded videos that the web page judges one after the other, with the limits for uploads.

    Its ``token`` is a random text that every request to the page must contain.

    Args:
        folder: folder for uploads, used by no other process.
        limit_bytes: the largest size of an upload, in bytes.
        most_visitors: the largest number of uploads at once; a page sends one after the other.
    """

    def __init__(self, folder: Path, limit_bytes: int, most_visitors: int) -> None:
        self.folder, self.limit_bytes, self.most_visitors = folder, limit_bytes, most_visitors
        self.token = secrets.token_urlsafe(24)
        self.waiting = queue.Queue[Upload]()

    def judge_all(self, judge: Callable[[Upload], None]) -> None:
        """Judge the uploads one after the other; never returns.

        Args:
            judge: fills in the answer of an upload. If it raises an exception, its message becomes ``refused``.
        """
        while True:
            upload = self.waiting.get()
            if not upload.path.exists():  # its visitor has left
                continue
            try:
                judge(upload)
            except Exception as error:  # noqa: BLE001 - one bad file never ends the page
                upload.answer = {"refused": str(error) if isinstance(error, FvcError) else repr(error)}
            shutil.rmtree(upload.path.parent, ignore_errors=True)
            upload.step, upload.is_done = "", True


async def _lines_on(upload: Upload) -> AsyncIterator[str]:
    """Yield the upload's answer and step as lines of JSON until it is done, then delete its file.

    The server closes the iterator when the visitor leaves.
    """
    try:
        while not upload.is_done:
            yield json.dumps({**upload.answer, "step": upload.step}) + "\n"
            await asyncio.sleep(_TELL_SECONDS)
        yield json.dumps({**upload.answer, "is_done": True}) + "\n"
    finally:
        shutil.rmtree(upload.path.parent, ignore_errors=True)


def _safe_name(name: str) -> str:
    """Return the last 80 characters of a file name, without folders, and with ``_`` for unusual characters.

    Dots, spaces and dashes at both ends are removed, so it is never the name of a hidden file. If nothing is left, the
    name is ``video``.
    """
    last = re.split(r"[/\\]", name)[-1]
    return re.sub(r"[^\w .()+=@,-]", "_", last)[-80:].strip(" .-") or "video"


def web_app(desk: Desk) -> "Starlette":
    """Return the web application. Every request must have the desk's token in its address.

    ``GET /`` returns the page. ``PUT /video`` stores an uploaded video in the queue. Its response is lines of JSON with
    the progress and at last the answer.
    """
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import ClientDisconnect
    from starlette.responses import HTMLResponse, StreamingResponse
    from starlette.routing import Route

    from fvc_lib.analysis.pages.page import render

    def check_token(request: "Request") -> None:
        token = request.query_params.get("token", "").encode()
        if not secrets.compare_digest(token, desk.token.encode()):
            raise HTTPException(403, "Open the whole address that the command printed.", _SAFE)

    async def front(request: "Request") -> "Response":
        check_token(request)
        nonce = secrets.token_urlsafe(16)
        policy = f"default-src 'none'; connect-src 'self'; script-src 'nonce-{nonce}'; {_STYLES}"
        html = render("app.html", nonce=nonce, limit_bytes=desk.limit_bytes)
        return HTMLResponse(html, headers={**_SAFE, "Content-Security-Policy": policy})

    async def store(request: "Request") -> "Response":
        check_token(request)
        if len(list(desk.folder.iterdir())) >= desk.most_visitors:
            raise HTTPException(503, "Too many people use this page now. Try again in some minutes.", _SAFE)
        folder = Path(tempfile.mkdtemp(dir=desk.folder))
        upload = Upload(folder / _safe_name(request.query_params.get("name", "")))
        try:
            with upload.path.open("wb") as target:
                async for piece in request.stream():
                    target.write(piece)
                    if target.tell() > desk.limit_bytes:
                        raise OSError(errno.EFBIG, f"this page takes files of up to {desk.limit_bytes:,} bytes")
        except (ClientDisconnect, OSError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            why = getattr(error, "strerror", None) or "the upload broke off"
            raise HTTPException(507, f"The file could not be stored: {why}.", _SAFE) from error
        desk.waiting.put(upload)
        return StreamingResponse(_lines_on(upload), media_type="application/x-ndjson", headers=_SAFE)

    # A foreign page whose name leads to this machine is refused.
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
    return Starlette(routes=[Route("/", front), Route("/video", store, methods=["PUT"])], middleware=[hosts])


def serve(desk: Desk, port: int) -> str:
    """Serve the page in a thread until the process ends, and return the page's address with the token.

    Raises:
        UsageError: the port cannot be used.
    """
    import uvicorn

    try:
        listening = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise UsageError(f"--port {port}: {error.strerror or error}. Give another --port.") from error
    server = uvicorn.Server(uvicorn.Config(web_app(desk), log_level="error", access_log=False))
    threading.Thread(target=server.run, args=([listening],), daemon=True).start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}/?token={desk.token}"


@click.command("app")
@click.argument("model", default="latest")
@click.option("--port", type=click.IntRange(0, 65535), default=8866, show_default=True, help="0: any that is free.")
@click.option("--limit-mb", type=click.IntRange(min=1), default=500, show_default=True, help="Largest video, in MB.")
@click.option("--visitors", type=click.IntRange(min=1), default=8, show_default=True, help="Pages that judge at once.")
@ERROR_RATE
@click.option("--map-minutes", type=click.FloatRange(min=0), default=3.0, show_default=True, metavar="MINUTES",
              help="Time limit of a video's maps of where it looks fake; 0: none.")  # fmt: skip
@ALLOW_CODE
@FINAL
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
    when they have been judged, and answers are not stored. Ctrl-C ends the server.

    \b
    fvc app
    fvc app bundle_run_20260101_120000_0a1b2c3d --port 9000 --limit-mb 2000
    """
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        remedy = "make setup-app, or pip install 'fvc_lib[app]'"
        raise UsageError(f"the page needs {' and '.join(missing)}, not installed: {remedy}")
    from fvc_lib.command_line.verdicts.pages import write_video_pages  # plotly and torch take seconds to load
    from fvc_lib.tasks.decoding import scratch_folder
    from fvc_lib.tasks.video.verdicts.judging import judge_files
    from fvc_lib.tasks.video.verdicts.rule import rule_of

    folder = find_model(runs_dir, model)
    detector = verdict_detector(folder, allow_code=allow_code, final=final)
    rule = rule_of(error_rate, withheld=not detector.is_above_control)

    def judge(upload: Upload) -> None:
        """Fill in the verdict on an upload, then the page with its evidence.

        Files are written into the folder ``answer`` next to the video.
        """
        answers, upload.step = upload.path.parent / "answer", "looking at the frames"
        verdicts = judge_files(detector, [upload.path], rule, answers)
        row = next(verdicts.rows())
        verdict = row["verdict"] or "no prediction"
        reasons = row["reasons"].splitlines()
        upload.answer = {"verdict": verdict, "says": _WORDS.get(verdict, CANNOT_TELL), "reasons": reasons}
        if row["score"] is not None:
            upload.answer |= {"score": interval_text(row["score"], row["score_low"], row["score_high"])}
            upload.step = "making the page"
            (page,) = write_video_pages(verdicts, answers, most=1, map_minutes=map_minutes, overview="").values()
            upload.answer |= {"page": (answers / page).read_text(encoding="utf-8")}

    with scratch_folder(detector.config) as uploads:
        desk = Desk(uploads, limit_mb * _MEGABYTE, visitors)
        address = serve(desk, port)
        click.echo(f"model    {folder}\naddress  {address}\nOpen the address in a browser. Ctrl-C ends it.")
        desk.judge_all(judge)
