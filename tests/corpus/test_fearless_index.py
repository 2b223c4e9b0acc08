"""Files nobody should have to fear: each through the worker processes of an index, and each with a row that helps."""

import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from fvc_lib.corpus.probing import probe_file
from fvc_lib.services.isolated_workers import run_isolated
from tests.corpus.indexing import index_of

MakeVideo = Callable[..., Path]
PROBE = "fvc_lib.corpus.probing:probe_file"
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 12345\n"

# What each file of media/broken is, by the first part of its name: how its index row counts it, or "used".
BROKEN = {
    "ExoPlayer__1b63dd": "unreadable",  # encrypted, cenc
    "ExoPlayer__1efacc": "unreadable",  # encrypted fragments without their header
    "ExoPlayer__2e3011": "unreadable",  # encrypted segment without its header
    "ExoPlayer__3a7cc1": "unreadable",  # encrypted, cbcs
    "ExoPlayer__3d3c63": "truncated",  # a header without its media data
    "ExoPlayer__48dc17": "no_video",
    "ExoPlayer__4f0596": "no_video",
    "ExoPlayer__7763cb": "corrupt",
    "ExoPlayer__8d1ecc": "corrupt",  # tables of a transport stream, no frame
    "ExoPlayer__a1c1f9": "corrupt",
    "ExoPlayer__a929e9": "unreadable",  # encrypted WebM
    "ExoPlayer__bf78e9": "no_video",
    "ExoPlayer__c17251": "unreadable",
    "ExoPlayer__c19206": "no_video",
    "ExoPlayer__ca3b18": "corrupt",
    "ExoPlayer__e8855b": "no_video",
    "ExoPlayer__f50d4f": "used",  # mdat claims more than there is, all frames are
    "LivePortrait__92391d": "unreadable",  # a Git LFS pointer
    "SadTalker__e69de2": "unreadable",  # empty
    "VideoDeepFakeDetection__d3f5a1": "unreadable",  # two bytes
    "decord__5e5bec": "corrupt",
    "jcodec__6bca4a": "truncated",  # Matroska, cut
    "jcodec__7ae267": "truncated",
    "jcodec__8c0c4e": "no_video",
    "jcodec__defa29": "corrupt",
    "moviepy__a58e2e": "no_video",
    "moviepy__d22ee0": "used",  # only its sound fails
    "moviepy__e69de2": "unreadable",  # empty
    "mp4parse-rust__2dfd4c": "corrupt",
    "mp4parse-rust__2f8f23": "unreadable",
    "mp4parse-rust__41cd15": "truncated",
    "mp4parse-rust__548b28": "unreadable",
    "mp4parse-rust__6e4075": "unreadable",
    "mp4parse-rust__740b55": "truncated",
    "mp4parse-rust__9fe1e6": "used",
    "mp4parse-rust__aa44c3": "unreadable",
    "mp4parse-rust__ac5cbd": "truncated",
    "mp4parse-rust__cc45d5": "truncated",
    "mp4parse-rust__e7bd70": "truncated",
}


def stem(path: str) -> str:
    """``ExoPlayer__1b63dd`` of ``fake/ExoPlayer__1b63dd_bear.mp4``."""
    found = re.match(r"(?:fake/)?(.+__[0-9a-f]{6})", path)
    assert found is not None, path
    return found[1]


@pytest.fixture
def corpus(tmp_path: Path, make_video: MakeVideo) -> Path:
    """One good video of each label; tests add bad ones."""
    for label in ("real", "fake"):
        make_video(tmp_path / "corpus" / label / "good.mp4", len(label) + ord(label[0]))
    return tmp_path / "corpus"


@pytest.mark.fault(7, 8, 9)
def test_every_broken_file_has_the_row_it_should(shared: Path, corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(shared / "media/broken", corpus / "fake", dirs_exist_ok=True)
    made = index_of(corpus, tmp_path / "out", workers=2, max_rejected_share=1.0)
    rows = {stem(path): reason for path, reason in made.rejected.select("path", "reason").iter_rows()}
    rows |= {stem(path): "used" for path in made.index["path"] if not path.endswith("good.mp4")}
    assert rows == BROKEN
    for detail in made.rejected["detail"]:
        assert re.fullmatch(r".{10,}\. .{10,}[.!]", detail, re.DOTALL), detail  # what it is, and what to do


@pytest.mark.fault(7)
def test_absurd_frame_sizes_are_rejected_without_taking_memory(tmp_path: Path, make_video: MakeVideo) -> None:
    """Frames of 65,535 pixels a side; ffmpeg itself declines them, with the word for damage."""
    mp4 = make_video(tmp_path / "a.mp4", 1).read_bytes()
    entry = mp4.index(b"avc1", mp4.index(b"stsd"))
    claims = {
        "entry.mp4": mp4[: entry + 28] + b"\xff" * 4 + mp4[entry + 32 :],
        "screen.gif": b"GIF89a" + b"\xff" * 4 + bytes(3) + b"\x2c" + struct.pack("<HHHH", 0, 0, 65_535, 65_535)
        + b"\x00\x02\x02\x44\x01\x00\x3b",
    }  # fmt: skip
    paths = [str(write(tmp_path / name, content)) for name, content in claims.items()]
    for answer in run_isolated(PROBE, paths, workers=1):
        assert answer.value["reason"] in {"corrupt", "refused"}, answer


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


IMPOSTORS = {
    "lfs.mp4": (LFS_POINTER, "git lfs pull"),
    "page.mp4": (b"\n<!DOCTYPE html>\n<title>Not found</title>" * 9, "web page"),
    "s3.mp4": (b'<?xml version="1.0"?>\n<Error><Code>NoSuchKey</Code></Error>', "error message"),
    "bom.mp4": (b"\xef\xbb\xbf<!DOCTYPE html><html>", "web page"),
    "error.mp4": (b'{"error": "video is private"}', "text"),
    "list.mp4": (b"#EXTM3U\n#EXTINF:9,\nhttp://127.0.0.1:1/a.ts\n", "playlist"),
    "packed.mp4": (b"PK\3\4" + bytes(99), "archive"),
    "tar.mp4": (b"a" + bytes(256) + b"ustar" + bytes(800), "archive"),
    "segment.m4s": (b"\0\0\0\x10styp" + bytes(90), "segment"),
    "unfinished.mp4": (b"\0\0\0\x10ftypisom\0\0\0\0\0\0\xff\xffmdat" + bytes(900), "moov"),
    "zeros.mp4": (bytes(5000), "zeros"),
    "empty.mp4": (b"", "empty"),
}


@pytest.mark.fault(9)
def test_what_is_no_video_is_called_what_it_is(corpus: Path, tmp_path: Path) -> None:
    for name, (content, _) in IMPOSTORS.items():
        (corpus / "real" / name).write_bytes(content)
    made = index_of(corpus, tmp_path / "out", max_rejected_share=1.0)
    rejected = made.rejected
    assert made.index.height == 2
    details = {Path(path).name: detail for path, detail in rejected.select("path", "detail").iter_rows()}
    assert set(rejected["reason"]) == {"unreadable"}
    for name, (_, said) in IMPOSTORS.items():
        assert said in details[name], name


def test_an_image_sequence_pattern_opens_one_file_only(tmp_path: Path, make_video: MakeVideo) -> None:
    """To ffmpeg's image reader ``%d`` in a name means all numbered files beside it."""
    picture = make_video(tmp_path / "0.mp4", 3).rename(tmp_path / "0.png")
    assert picture.exists()
    answer = probe_file(str(tmp_path / "%d.png"))
    assert answer["reason"] == "unreadable"
    assert "no such file" in answer["detail"]
