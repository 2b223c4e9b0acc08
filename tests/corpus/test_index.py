import csv
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import polars as pl
import pytest
from hypothesis import given, strategies as st

from fvc_lib.corpus import index
from fvc_lib.corpus.index import video_ids
from fvc_lib.corpus.probing import VIDEO_FILES
from fvc_lib.services.atomic_files import path_from_text, sha256_of_file
from fvc_lib.services.errors import DataError
from fvc_lib.services.tables import INDEX, REJECTED, read_table
from tests.corpus.indexing import Indexed, index_of

MakeVideo = Callable[..., Path]


def by_path(table: pl.DataFrame, column: str) -> dict[str, str]:
    return dict(table.select("path", column).iter_rows())


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory, make_video: MakeVideo) -> Path:
    folder = tmp_path_factory.mktemp("videos") / "corpus"
    for seed in range(3):
        make_video(folder / f"real/clip{seed}.mp4", seed)
        make_video(folder / f"fake/clip{seed}.mp4", seed + 10)
    return folder


@pytest.fixture(scope="module")
def indexed(videos: Path) -> Indexed:
    return index_of(videos, videos.parent / "out", workers=2)


@pytest.fixture
def corpus(videos: Path, indexed: Indexed, tmp_path: Path) -> Path:
    """A copy of the six videos; its files are as old, but they were never probed here."""
    return Path(shutil.copytree(videos, tmp_path / "corpus"))


def write_manifest(path: Path, *rows: tuple[str, ...]) -> Path:
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([("path", "label", "group"), *rows])
    return path


def test_every_video_is_described(videos: Path, indexed: Indexed) -> None:
    assert indexed.index.height == 6
    assert indexed.index["video_id"].to_list() == sorted(indexed.index["video_id"])
    for row in indexed.index.iter_rows(named=True):
        path = videos / row["path"]
        assert row["content_sha256"] == sha256_of_file(path)
        own = row["content_sha256"][:16]
        assert (row["video_id"], row["group_id"], row["label"]) == (own, f"video {own}", path.parent.name)
        assert (row["codec"], row["width"], row["height"], row["num_frames"]) == ("h264", 128, 96, 8)
        assert row["size_bytes"] == path.stat().st_size
    assert indexed.report.num_known == 0
    summary = {"videos in the index": "6", "leakage groups": "6", "labelled videos lost": "0.0%"}
    assert dict(indexed.report.summary.rows()).items() >= summary.items()
    assert indexed.rejected.is_empty()
    assert indexed.group_links.is_empty()


def test_tables_do_not_depend_on_place_order_workers_or_working_directory(
    corpus: Path, tmp_path: Path, make_video: MakeVideo, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_video(corpus / "fake/again.mp4", 11)
    (corpus / "real/broken.mp4").write_bytes(b"no video")
    first = index_of(corpus, tmp_path / "first")
    files = [path for path in corpus.rglob("*") if path.is_file()]
    random.Random(5).shuffle(files)
    for path in files:
        target = tmp_path / "elsewhere/corpus" / path.relative_to(corpus)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    monkeypatch.chdir(tmp_path / "elsewhere")
    second = index_of(Path("corpus"), tmp_path / "second", workers=2)
    assert (tmp_path / "first/index.parquet").read_bytes() == (tmp_path / "second/index.parquet").read_bytes()
    assert first.rejected.equals(second.rejected)
    assert by_path(first.rejected, "reason").keys() == {"fake/clip1.mp4", "real/broken.mp4"}


def test_near_duplicates_join_stated_groups_and_say_why(tmp_path: Path, make_video: MakeVideo) -> None:
    make_video(tmp_path / "a.mp4", 1)
    make_video(tmp_path / "b.mp4", 1, crf=35)
    make_video(tmp_path / "c.mp4", 2)
    make_video(tmp_path / "d.mp4", 3)
    rows = [("a.mp4", "real", "g1"), ("b.mp4", "fake", "g2"), ("c.mp4", "fake", "g2"), ("d.mp4", "real", "")]
    manifest = write_manifest(tmp_path / "m.csv", *rows)
    made = index_of(manifest, tmp_path / "out")
    groups = by_path(made.index, "group_id")
    assert groups["a.mp4"] == groups["b.mp4"] == groups["c.mp4"] == "g1+1 more"
    assert groups["d.mp4"].startswith("video ")
    assert made.group_links.rows() == [("g1+1 more", "near_duplicate", "a.mp4 ~ b.mp4", "g1", "g2")]
    summary = {"leakage groups": "2", "  with both labels": "1"}
    assert dict(made.report.summary.rows()).items() >= summary.items()
    without = index_of(manifest, tmp_path / "out", near_duplicate_bits=0)
    assert without.group_links.is_empty()
    assert by_path(without.index, "group_id")["a.mp4"] == "g1"


def test_one_content_is_one_video_and_joins_its_groups(tmp_path: Path, make_video: MakeVideo) -> None:
    for name, seed in {"a": 1, "b": 1, "c": 1, "d": 2, "e": 3, "f": 3, "g": 4}.items():
        make_video(tmp_path / f"{name}.mp4", seed)
    rows = [("c.mp4", "real", "g3"), ("b.mp4", "real", "g2"), ("a.mp4", "real", ""), ("d.mp4", "fake", "g3"),
            ("e.mp4", "real", "g5"), ("f.mp4", "fake", "g6"), ("g.mp4", "fake", "g5")]  # fmt: skip
    made = index_of(write_manifest(tmp_path / "m.csv", *rows), tmp_path / "out", near_duplicate_bits=0)
    assert by_path(made.index, "group_id") == {"a.mp4": "g2+1 more", "d.mp4": "g2+1 more", "g.mp4": "g5+1 more"}
    duplicate, conflicting = "duplicate_content", "conflicting_labels"
    assert by_path(made.rejected, "reason") == {
        "b.mp4": duplicate, "c.mp4": duplicate, "e.mp4": conflicting, "f.mp4": conflicting,
    }  # fmt: skip
    assert set(made.group_links.select("why", "first", "second").rows()) == {
        ("same_content", "a.mp4", "g2"),
        ("same_content", "a.mp4", "g3"),
        ("same_content", "g5", "g6"),
    }
    assert dict(made.report.summary.rows())["labelled videos lost"] == "40.0%"
    assert "'e.mp4', 'f.mp4'" in by_path(made.rejected, "detail")["f.mp4"]


def write_audio(path: Path) -> None:
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())


@pytest.mark.fault(8, 9, 30)
def test_a_file_that_fails_is_a_row_with_a_reason_and_names_may_have_any_bytes(
    corpus: Path, make_video: MakeVideo, tmp_path: Path
) -> None:
    (corpus / "real/empty.mp4").touch()
    (corpus / "real/page.mp4").write_text("<html>not found</html>")
    write_audio(corpus / "real/sound.mp4")
    whole = make_video(corpus / "real/cut.mp4", 20, num_frames=40).read_bytes()
    (corpus / "real/cut.mp4").write_bytes(whole[: len(whole) // 2])
    (corpus / "real/not an URL.txt").touch()
    odd = [b"a 'b' \"c\".mp4", b"two\nlines.mp4", b"[x]*?{}.mp4", b"caf\xe9.mp4", b"\\xe9.mp4"]
    for seed, name in enumerate(odd):
        make_video(corpus / "fake" / os.fsdecode(name), 40 + seed)
    (corpus / "real" / os.fsdecode(b"bad\xff\n.mp4")).touch()
    made = index_of(corpus, tmp_path / "out")
    names = {os.fsencode(path_from_text(path).name) for path in made.index["path"]}
    assert names == {*odd, b"clip0.mp4", b"clip1.mp4", b"clip2.mp4"}
    assert all(
        sha256_of_file(corpus / path_from_text(path)) == content
        for path, content in by_path(made.index, "content_sha256").items()
    )
    reasons = {path_from_text(path).name: reason for path, reason in by_path(made.rejected, "reason").items()}
    assert reasons.pop("cut.mp4")
    assert reasons == {
        "empty.mp4": "unreadable", "page.mp4": "unreadable", "sound.mp4": "no_video",
        "not an URL.txt": "unknown_extension", os.fsdecode(b"bad\xff\n.mp4"): "unreadable",
    }  # fmt: skip
    assert all(made.rejected["detail"].str.len_chars() > 20)
    assert made.report.rejected["videos"].sum() == 6
    known = index_of(corpus, tmp_path / "out").report.num_known
    assert known == 11 + sum(reason not in {"unreadable", "unknown_extension"} for reason in made.rejected["reason"])


PROBE = """
import ctypes, os, time
from fvc_lib.corpus.probing import probe_file
def probe(path):
    name = os.path.basename(path)
    if "crash" in name: ctypes.string_at(0)
    if "hang" in name: time.sleep(1000)
    return probe_file(path)
"""


def test_a_crash_and_a_hang_cost_one_file_each(
    tmp_path: Path, make_video: MakeVideo, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = tmp_path / "corpus"
    for seed, name in enumerate(("real/good.mp4", "real/crash.mp4", "fake/good.mp4", "fake/hang.mp4")):
        make_video(corpus / name, seed)
    (tmp_path / "odd_probe.py").write_text(PROBE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(index, "VIDEO_FILES", replace(VIDEO_FILES, function="odd_probe:probe", timeout_seconds=2.0))
        made = index_of(corpus, tmp_path / "out", workers=2)
    assert set(made.index["path"]) == {"real/good.mp4", "fake/good.mp4"}
    assert by_path(made.rejected, "reason") == {"real/crash.mp4": "crashed", "fake/hang.mp4": "timeout"}
    # Neither is remembered: another day, another decoder version, it may work.
    again = index_of(corpus, tmp_path / "out")
    assert (again.index.height, again.report.num_known) == (4, 2)


@pytest.mark.fault(7)
def test_one_label_alone_or_too_many_lost_is_refused_after_the_tables_are_written(corpus: Path, tmp_path: Path) -> None:
    (corpus / "real/bad.mp4").touch()
    out = tmp_path / "out"
    with pytest.raises(DataError, match=r"14% of the labelled videos .* at most 10% .*1 x unreadable") as caught:
        index_of(corpus, out, max_rejected_share=0.1)
    assert caught.value.exit_code == 3
    assert read_table(out / "index.parquet", INDEX).height == 6
    for path in (corpus / "fake").iterdir():
        path.write_bytes(b"")
    with pytest.raises(DataError, match="no usable video labelled 'fake', only 3 of the other label"):
        index_of(corpus, out, max_rejected_share=0.9)
    assert read_table(out / "index.parquet", INDEX).height == 3
    assert read_table(out / "rejected.parquet", REJECTED).height == 4


def test_results_of_unchanged_files_are_used_again_and_damaged_or_outdated_ones_are_not(
    corpus: Path, make_video: MakeVideo, tmp_path: Path
) -> None:
    write_audio(corpus / "real/sound.mp4")
    out = tmp_path / "out"
    first, again = index_of(corpus, out), index_of(corpus, out)
    assert again.report.num_known == 7
    assert again.index.equals(first.index)
    assert again.rejected.equals(first.rejected)
    (store,) = (out / "index").glob("probes_*.jsonl")
    lines = store.read_bytes().splitlines(keepends=True)
    outdated = json.dumps(json.loads(lines[1]) | {"version": "old", "content_sha256": "0" * 64}).encode()
    lacking = {key: value for key, value in json.loads(lines[2]).items() if key != "probe"}
    foreign = [b"[1, 2]", b"\x00\x00", b"\xff", outdated, json.dumps(lacking).encode(), lines[3][:-20]]
    store.write_bytes(lines[0] + b"\n".join(foreign))
    mended = index_of(corpus, out)
    assert mended.report.num_known == 1
    assert mended.index.equals(first.index)
    make_video(corpus / "real/clip0.mp4", 40)
    os.utime(corpus / "fake/clip0.mp4", ns=(1, 1))
    changed = index_of(corpus, out)
    assert changed.report.num_known == 5
    assert not changed.index.equals(first.index)


@pytest.mark.fault(32)
@given(st.lists(st.text("ab", min_size=10, max_size=10), max_size=12, unique=True), st.integers(1, 10))
def test_video_ids_are_distinct_prefixes(contents: list[str], length: int) -> None:
    ids = video_ids(contents, length)
    assert set(ids) == set(contents)
    assert len(set(ids.values())) == len(contents)
    assert all(content.startswith(own) and len(own) >= length for content, own in ids.items())
    assert video_ids(reversed(contents), length) == ids
