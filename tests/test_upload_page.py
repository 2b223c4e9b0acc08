"""Uploads of the verdict page: stored, judged once, deleted; hostile names, sizes and strangers are refused."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

import pytest

from fvc_lib.command_line.verdicts.pages import UploadServer
from fvc_lib.services.errors import DataError

Judged = list[tuple[str, bytes]]
JUDGED: dict[str, Any] = {"verdict": "fake", "score": "0.9", "reasons": ["Because."], "page": "<html>"}
ERRORS = {b"fail": DataError("no video"), b"break": ValueError("odd")}  # by the content of the file


@pytest.fixture
def judged() -> Judged:
    """Name and content of every file that was judged."""
    return []


@pytest.fixture
def server(tmp_path: Path, judged: Judged) -> Iterator[UploadServer]:
    def judge(path: Path) -> dict[str, Any]:
        judged.append((path.name, path.read_bytes()))
        (path.parent / "answer").mkdir()
        if path.read_bytes() in ERRORS:
            raise ERRORS[path.read_bytes()]
        return JUDGED

    served = UploadServer(0, tmp_path, 1000)
    for target in (lambda: served.serve_forever(0.01), lambda: served.judge_all(judge)):
        threading.Thread(target=target, daemon=True).start()
    yield served
    served.shutdown()
    served.server_close()
    assert list(tmp_path.iterdir()) == []


def put(server: UploadServer, name: str, content: bytes, token: str = "") -> dict[str, Any]:
    base = server.address.partition("?")[0]
    address = f"{base}?token={token or server.token}&name={quote(name)}"
    with urlopen(Request(address, data=content, method="PUT")) as response:
        return dict(json.load(response))


def test_an_upload_is_judged_whole_and_then_deleted(server: UploadServer, judged: Judged) -> None:
    content = bytes(range(250)) * 4
    assert put(server, "../clip <one>.mp4", content) == JUDGED
    assert judged == [("clip _one_.mp4", content)]


@pytest.mark.fault(46)
def test_an_upload_that_fails_is_refused_and_the_next_is_judged(server: UploadServer) -> None:
    for content, error in ERRORS.items():
        assert str(error) in put(server, "a.mp4", content)["refused"]
    assert put(server, "b.mp4", b"x") == JUDGED


@pytest.mark.parametrize("content", [b"", bytes(1001)])
@pytest.mark.fault(46)
def test_a_size_beyond_the_limit_or_none_is_refused(server: UploadServer, judged: Judged, content: bytes) -> None:
    assert "bytes" in put(server, "a.mp4", content)["refused"]
    assert judged == []


@pytest.mark.fault(46)
def test_an_upload_that_breaks_off_is_not_judged(server: UploadServer, judged: Judged) -> None:
    request = f"PUT /?token={server.token}&name=a.mp4 HTTP/1.1\r\nContent-Length: 100\r\n\r\nhalf"
    with socket.create_connection(server.server_address[:2]) as connection:
        connection.sendall(request.encode())
        connection.shutdown(socket.SHUT_WR)
        assert b"broke off" in connection.makefile("rb").read()
    assert judged == []


def test_nobody_enters_without_the_token(server: UploadServer, judged: Judged) -> None:
    with pytest.raises(HTTPError, match="403"):
        put(server, "a.mp4", b"x", token="other")
    with pytest.raises(HTTPError, match="404"):
        urlopen(server.address.partition("?")[0])
    with urlopen(server.address) as page:
        text, policy = page.read().decode(), page.headers["Content-Security-Policy"]
    assert "http://" not in text
    assert "https://" not in text
    assert policy.startswith("default-src 'none'")
    assert judged == []
