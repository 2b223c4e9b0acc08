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

JUDGED: dict[str, Any] = {"verdict": "fake", "score": "0.9", "reasons": ["Because."], "page": "<html>"}


class Judge:
    """Keeps what it is given; a content of ``fail`` raises ``error``."""

    def __init__(self) -> None:
        self.files: list[tuple[str, bytes]] = []
        self.error: Exception = DataError("no video")

    def __call__(self, path: Path) -> dict[str, Any]:
        content = path.read_bytes()
        self.files.append((path.name, content))
        (path.parent / "answer").mkdir()
        if content == b"fail":
            raise self.error
        return JUDGED


@pytest.fixture
def judge() -> Judge:
    return Judge()


@pytest.fixture
def server(tmp_path: Path, judge: Judge) -> Iterator[UploadServer]:
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


def test_an_upload_is_judged_whole_and_then_deleted(server: UploadServer, judge: Judge) -> None:
    content = bytes(range(250)) * 4
    assert put(server, "../clip <one>.mp4", content) == JUDGED
    assert judge.files == [("clip _one_.mp4", content)]


@pytest.mark.parametrize("error", [DataError("no video"), ValueError("odd")])
@pytest.mark.fault(46)
def test_an_upload_that_fails_is_refused_and_the_next_is_judged(
    server: UploadServer, judge: Judge, error: Exception
) -> None:
    judge.error = error
    assert str(error) in put(server, "a.mp4", b"fail")["refused"]
    assert put(server, "b.mp4", b"x") == JUDGED


@pytest.mark.parametrize("content", [b"", bytes(1001)])
@pytest.mark.fault(46)
def test_a_size_beyond_the_limit_or_none_is_refused(server: UploadServer, judge: Judge, content: bytes) -> None:
    assert "bytes" in put(server, "a.mp4", content)["refused"]
    assert judge.files == []


@pytest.mark.fault(46)
def test_an_upload_that_breaks_off_is_not_judged(server: UploadServer, judge: Judge) -> None:
    request = f"PUT /?token={server.token}&name=a.mp4 HTTP/1.1\r\nContent-Length: 100\r\n\r\nhalf"
    with socket.create_connection(server.server_address[:2]) as connection:
        connection.sendall(request.encode())
        connection.shutdown(socket.SHUT_WR)
        assert b"broke off" in connection.makefile("rb").read()
    assert judge.files == []


def test_nobody_enters_without_the_token(server: UploadServer, judge: Judge) -> None:
    with pytest.raises(HTTPError, match="403"):
        put(server, "a.mp4", b"x", token="other")
    with pytest.raises(HTTPError, match="404"):
        urlopen(server.address.partition("?")[0])
    with urlopen(server.address) as page:
        text, policy = page.read().decode(), page.headers["Content-Security-Policy"]
    assert "http://" not in text
    assert "https://" not in text
    assert policy.startswith("default-src 'none'")
    assert judge.files == []
