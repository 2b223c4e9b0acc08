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
        upload.answer, upload.page = {"verdict": "fake", "says": "It looks fake", "reasons": ["Because."]}, "<html>"

    def ask(self, path: str, method: str = "GET", data: bytes | None = None, host: str = "", **query: Any) -> Any:
        url = urlsplit(self.address)
        address = f"http://{url.netloc}{path}?{urlencode({'token': self.desk.token, **query})}"
        request = Request(address, data, {"Host": host} if host else {}, method=method)
        with urlopen(request) as response:
            text = response.read().decode()
            is_json = response.headers["Content-Type"] == "application/json"
            return json.loads(text) if is_json else (text, response.headers)

    def enter(self) -> str:
        before = set(self.desk.visitors)
        self.ask("/")
        (key,) = set(self.desk.visitors) - before
        return key

    def put(self, key: str, name: str, content: bytes) -> dict[str, Any]:
        return dict(self.ask("/video", "PUT", content, visitor=key, name=name))

    def answer(self, key: str, name: str, content: bytes) -> dict[str, Any]:
        """Return the answer to an upload once it is judged."""
        number = str(self.put(key, name, content)["number"])
        while (found := self.ask("/videos", visitor=key)[number])["state"] != "done":
            time.sleep(0.01)
        return dict(found)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    served = Site(tmp_path)
    yield served
    served.go.set()


def test_an_upload_is_judged_whole_and_its_files_and_answer_go(site: Site, tmp_path: Path) -> None:
    key, content = site.enter(), bytes(range(250)) * 4
    found = site.answer(key, "../clip <one>.mp4", content)
    assert (found["verdict"], found["reasons"], found["page"]) == ("fake", ["Because."], True)
    assert "refused" not in found
    assert site.judged == [("clip _one_.mp4", content)]
    assert list(tmp_path.iterdir()) == []
    assert site.ask("/page", visitor=key, number=1)[0] == "<html>"
    site.ask("/leave", "POST", b"", visitor=key)
    with pytest.raises(HTTPError, match="404"):
        site.ask("/page", visitor=key, number=1)


@pytest.mark.fault(46)
def test_an_upload_that_fails_is_refused_and_the_next_is_judged(site: Site) -> None:
    key = site.enter()
    for content, error in ERRORS.items():
        assert str(error) in site.answer(key, "a.mp4", content)["refused"]
    assert site.answer(key, "b.mp4", b"x")["verdict"] == "fake"
    for visitor, content, words in ((key, bytes(1001), "1,000 bytes"), ("nobody", b"x", "too long")):
        with pytest.raises(HTTPError) as refused:
            site.put(visitor, "a.mp4", content)
        assert words in refused.value.read().decode()
    assert len(site.judged) == 3


@pytest.mark.fault(46)
def test_an_upload_that_breaks_off_is_not_judged(site: Site, tmp_path: Path) -> None:
    url = urlsplit(site.address)
    request = f"PUT /video?token={site.desk.token}&visitor={site.enter()}&name=a.mp4 HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    with socket.create_connection((url.hostname, url.port)) as connection:
        connection.sendall(f"{request}Content-Length: 100\r\n\r\nhalf".encode())
        while not list(tmp_path.iterdir()):
            time.sleep(0.01)
    while list(tmp_path.iterdir()):
        time.sleep(0.01)
    assert site.judged == []


def test_a_visitor_who_leaves_takes_what_waits_along_and_sees_nobody_elses_videos(site: Site, tmp_path: Path) -> None:
    one, other = site.enter(), site.enter()
    site.go.clear()
    site.put(one, "first.mp4", b"first")
    while not site.judged:
        time.sleep(0.01)
    site.put(one, "second.mp4", b"second")
    number = str(site.put(other, "third.mp4", b"third")["number"])
    assert list(site.ask("/videos", visitor=other)) == [number]
    assert site.ask("/videos", visitor=other)[number]["ahead"] == 2
    with pytest.raises(HTTPError, match="503"):
        site.ask("/")
    site.ask("/leave", "POST", b"", visitor=one)
    site.go.set()
    while site.ask("/videos", visitor=other)[number]["state"] != "done":
        time.sleep(0.01)
    assert [content for _, content in site.judged] == [b"first", b"third"]
    assert list(tmp_path.iterdir()) == []
    site.desk.visitors[other].seen -= 1000
    site.enter()
    assert other not in site.desk.visitors


def test_nobody_enters_without_the_token_or_from_elsewhere(site: Site) -> None:
    for path, method in (("/", "GET"), ("/video", "PUT"), ("/videos", "GET"), ("/page", "GET"), ("/leave", "POST")):
        with pytest.raises(HTTPError, match="403"):
            site.ask(path, method, b"x" if method != "GET" else None, token="other")
    with pytest.raises(HTTPError, match="400"):
        site.ask("/", host="elsewhere.example")
    assert site.desk.visitors == {}
    text, headers = site.ask("/")
    assert "http://" not in text
    assert "https://" not in text
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    with pytest.raises(UsageError, match="--port"):
        serve(site.desk, urlsplit(site.address).port or 0)
