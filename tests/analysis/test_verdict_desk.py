"""What somebody drops on the page of verdicts: stored in pieces, judged once, deleted; hostile names, sizes, pieces."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from fvc_lib.analysis.dashboard.verdict_desk import Judged, Uploads, safe_name
from fvc_lib.services.errors import DataError


class Browser:
    """Sends a file as the page's script does, and keeps what is answered."""

    def __init__(self, folder: Path, limit_bytes: int = 1000, fails: Exception | None = None) -> None:
        self.answers: list[tuple[dict[str, Any], list[bytes]]] = []
        self.judged: list[tuple[str, bytes]] = []
        self._fails = fails
        self.uploads = Uploads(
            folder, self._judge, limit_bytes, lambda *answer: self.answers.append((dict(answer[0]), answer[1]))
        )

    def _judge(self, path: Path, tell: Any) -> Judged:
        self.judged.append((path.name, path.read_bytes()))
        for done in range(100):
            tell("half way", done, 100)
        tell("the end of it", 0, 0)
        if self._fails:
            raise self._fails
        return Judged("fake", "0.9", ("Because.",), b"<html>")

    def say(self, message: Mapping[str, Any], *pieces: bytes) -> dict[str, Any]:
        self.uploads.receive(message, [memoryview(piece) for piece in pieces])
        return self.answers[-1][0] if self.answers else {}

    def upload(self, name: str, content: bytes, piece: int = 300) -> dict[str, Any]:
        answer = self.say({"kind": "begin", "file": "a", "name": name, "size": len(content)})
        while answer["kind"] == "next":
            offset = answer["received"]
            answer = self.say({"kind": "piece", "file": "a", "offset": offset}, content[offset : offset + piece])
        return answer


def test_a_file_in_pieces_is_judged_whole_and_then_deleted(tmp_path):
    browser = Browser(tmp_path)
    content = bytes(range(250)) * 3
    answer = browser.upload("clip one.mp4", content)
    assert browser.judged == [("clip one.mp4", content)]
    assert (answer["kind"], answer["verdict"], answer["reasons"]) == ("judged", "fake", ["Because."])
    assert browser.answers[-1][1] == [b"<html>"]
    told = [(each["text"], each["share"]) for each, _ in browser.answers if each["kind"] == "working"]
    assert told[:2] == [("Looking at it", None), ("Half way, 0 of 100", 0.0)]
    assert told[-1] == ("The end of it", None)
    assert len(told) < 100, "as often as one can read, not for each step"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [DataError("no video"), ValueError("odd"), OSError(28, "no space")])
def test_what_cannot_be_judged_is_said_and_deleted_and_the_next_is_judged(tmp_path, error):
    browser = Browser(tmp_path, fails=error)
    answer = browser.upload("a.mp4", b"x")
    assert answer["kind"] == "refused"
    assert str(error.args[-1]) in answer["text"]
    assert list(tmp_path.iterdir()) == []
    browser._fails = None
    assert browser.upload("b.mp4", b"x")["kind"] == "judged"


@pytest.mark.parametrize("size", [1001, 0, -1, None, "1", True, 2.5])
def test_a_size_beyond_the_limit_or_none_is_refused_before_anything_is_stored(tmp_path, size):
    answer = Browser(tmp_path).say({"kind": "begin", "file": "a", "name": "a.mp4", "size": size})
    assert answer["kind"] == "refused"
    assert list(tmp_path.iterdir()) == []


def test_what_other_uploads_will_take_of_the_disk_is_not_given_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2500))
    browser = Browser(tmp_path)
    begin = {"kind": "begin", "name": "a.mp4", "size": 1000}
    assert browser.say({**begin, "file": "a"})["kind"] == "next"
    assert "no room for 1.0 kB" in browser.say({**begin, "file": "b"})["text"]
    assert browser.say({**begin, "file": "a"})["kind"] == "next"  # once more, in place of the first
    browser.say({"kind": "stop", "file": "a"})
    assert browser.say({**begin, "file": "b"})["kind"] == "next"


def test_more_than_was_announced_lost_or_unknown_pieces_are_refused(tmp_path):
    for message, piece in (
        ({"kind": "piece", "file": "a", "offset": 0}, b"x" * 11),  # more than was announced
        ({"kind": "piece", "file": "a", "offset": 5}, b"x"),  # one was lost
        ({"kind": "piece", "file": "a", "offset": 0}, b""),
        ({"kind": "piece", "file": "b", "offset": 0}, b"x"),
    ):
        browser = Browser(tmp_path)
        browser.say({"kind": "begin", "file": "a", "name": "a.mp4", "size": 10})
        assert browser.say(message, piece)["kind"] == "refused"
        assert not browser.judged
        browser.say({"kind": "stop", "file": "a"})
        assert list(tmp_path.iterdir()) == []


@given(st.text(max_size=300))
def test_a_stored_name_is_one_file_name_whatever_was_sent(name):
    safe = safe_name(name)
    assert safe == Path(safe).name
    assert 0 < len(safe) <= 90
    assert safe.isprintable()
    assert not safe.startswith((".", "-", " "))
    assert not set(safe) & set("/\\<>&\"'\0")


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\videos\\clip.mp4", "clip.mp4"),
        ("<script>alert(1)</script>.mp4", "script_.mp4"),
        ("Straße 1.MP4", "Straße 1.MP4"),
        (f"{'a' * 200}.mp4", f"{'a' * 77}.mp4"),
        ("...", "video"),
    ],
)
def test_a_name_keeps_what_a_reader_knows_it_by(name, safe):
    assert safe_name(name) == safe
