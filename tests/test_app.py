"""The page on which anybody drops a video: uploads, limits, visitors and strangers. A real server on a free port."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode, urlsplit
from urllib.request import Request, urlopen

import pytest

from fvc_lib.command_line.verdicts.app import Desk, Upload, serve
from fvc_lib.services.errors import DataError, UsageError

pytestmark = pytest.mark.app
ERRORS = {b"fail": DataError("no video"), b"break": ValueError("odd")}  # by the content of the file


class Site:
    """A served desk whose judge waits for ``go``, and a browser that knows its token."""

    def __init__(self, folder: Path) -> None:
        self.desk, self.go, self.judged = Desk(folder, 1000, 2), threading.Event(), list[tuple[str, bytes]]()
        self.go.set()
        self.address = serve(self.desk, 0)
        threading.Thread(target=self.desk.judge_all, args=(self.judge,), daemon=True).start()

    def judge(self, upload: Upload) -> None:
        content = upload.path.read_bytes()
        self.judged.append((upload.path.name, content))
        (upload.path.parent / "answer").mkdir()
        assert self.go.wait(60)
        if content in ERRORS:
            raise ERRORS[content]
        upload.answer = {"verdict": "fake", "says": "It looks fake", "reasons": ["Because."], "page": "<html>"}

    def open(self, path: str, method: str = "GET", data: bytes | None = None, host: str = "", **query: Any) -> Any:
        url = urlsplit(self.address)
        address = f"http://{url.netloc}{path}?{urlencode({'token': self.desk.token, **query})}"
        return urlopen(Request(address, data, {"Host": host} if host else {}, method=method))

    def put(self, name: str, content: bytes) -> Any:
        """Return the response to an upload; its lines come as the upload is judged."""
        return self.open("/video", "PUT", content, name=name)

    def answer(self, name: str, content: bytes) -> dict[str, Any]:
        """Return the answer to an upload once it is judged."""
        with self.put(name, content) as response:
            return dict(json.loads(response.read().splitlines()[-1]))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    served = Site(tmp_path)
    yield served
    served.go.set()


def test_an_upload_is_judged_whole_and_its_files_go(site: Site, tmp_path: Path) -> None:
    content = bytes(range(250)) * 4
    found = site.answer("../clip <one>.mp4", content)
    assert (found["verdict"], found["reasons"], found["page"]) == ("fake", ["Because."], "<html>")
    assert found["is_done"]
    assert "refused" not in found
    assert site.judged == [("clip _one_.mp4", content)]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault(46)
def test_an_upload_that_fails_is_refused_and_the_next_is_judged(site: Site, tmp_path: Path) -> None:
    for content, error in ERRORS.items():
        assert str(error) in site.answer("a.mp4", content)["refused"]
    assert site.answer("b.mp4", b"x")["verdict"] == "fake"
    with pytest.raises(HTTPError) as refused:
        site.put("a.mp4", bytes(1001))
    assert "1,000 bytes" in refused.value.read().decode()
    assert len(site.judged) == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault(46)
def test_an_upload_that_breaks_off_is_not_judged(site: Site, tmp_path: Path) -> None:
    url = urlsplit(site.address)
    request = f"PUT /video?token={site.desk.token}&name=a.mp4 HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    with socket.create_connection((url.hostname, url.port)) as connection:
        connection.sendall(f"{request}Content-Length: 100\r\n\r\nhalf".encode())
        while not list(tmp_path.iterdir()):
            time.sleep(0.01)
    while list(tmp_path.iterdir()):
        time.sleep(0.01)
    assert site.judged == []


def test_a_visitor_who_leaves_takes_the_video_along_and_the_next_is_judged(site: Site, tmp_path: Path) -> None:
    site.go.clear()
    first = site.put("first.mp4", b"first")
    while not site.judged:
        time.sleep(0.01)
    second = site.put("second.mp4", b"second")
    assert json.loads(second.readline())["step"] == ""
    with pytest.raises(HTTPError, match="503"):
        site.put("third.mp4", b"third")
    second.close()
    while len(list(tmp_path.iterdir())) > 1:
        time.sleep(0.01)
    third = site.put("third.mp4", b"third")
    first.close()  # while it is judged
    site.go.set()
    assert json.loads(third.read().splitlines()[-1])["verdict"] == "fake"
    assert [content for _, content in site.judged] == [b"first", b"third"]
    assert list(tmp_path.iterdir()) == []


def test_nobody_enters_without_the_token_or_from_elsewhere(site: Site, tmp_path: Path) -> None:
    for path, method in (("/", "GET"), ("/video", "PUT")):
        with pytest.raises(HTTPError, match="403"):
            site.open(path, method, b"x" if method != "GET" else None, token="other")
    with pytest.raises(HTTPError, match="400"):
        site.open("/", host="elsewhere.example")
    assert list(tmp_path.iterdir()) == []
    with site.open("/") as response:
        text = response.read().decode()
    assert "http://" not in text
    assert "https://" not in text
    assert response.headers["Content-Security-Policy"].startswith("default-src 'none'")
    with pytest.raises(UsageError, match="--port"):
        serve(site.desk, urlsplit(site.address).port or 0)
