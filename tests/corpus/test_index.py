import csv
import io
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path

import av
import numpy as np
import polars as pl
import pytest
from hypothesis import given, strategies as st

from fvc_lib.corpus import index
from fvc_lib.corpus.index import IndexReport, build_index, video_ids
from fvc_lib.corpus.probing import VIDEO_FILES
from fvc_lib.services.atomic_files import path_from_text, sha256_of_file
from fvc_lib.services.errors import DataError
from fvc_lib.services.tables import INDEX, REJECTED, read_table

MakeVideo = Callable[..., Path]


class Built:
    """Builds indexes below one folder and reads them back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: list[tuple[int, int]] = []

    def __call__(self, corpus: Path, **options: object) -> IndexReport:
        self.seen = []
        settings = {"near_duplicate_bits": 10, "max_rejected_share": 0.5, "workers": 1} | options
        return build_index(
            corpus,
            index_path=self.folder / "index.parquet",
            rejected_path=self.folder / "rejected.parquet",
            work_dir=self.folder / "work",
            progress=lambda done, total: self.seen.append((done, total)),
            **settings,  # type: ignore[arg-type]
        )

    @property
    def index(self) -> pl.DataFrame:
        return read_table(self.folder / "index.parquet", INDEX)

    @property
    def rejected(self) -> pl.DataFrame:
        return read_table(self.folder / "rejected.parquet", REJECTED)

    @property
    def groups(self) -> dict[str, str]:
        return dict(self.index.select("path", "group_id").iter_rows())

    @property
    def reasons(self) -> dict[str, str]:
        return dict(self.rejected.select("path", "reason").iter_rows())


@pytest.fixture
def build(tmp_path: Path) -> Built:
    return Built(tmp_path / "out")


@pytest.fixture
def corpus(tmp_path: Path, make_video: MakeVideo) -> Path:
    for seed in range(3):
        make_video(tmp_path / f"corpus/real/clip{seed}.mp4", seed)
        make_video(tmp_path / f"corpus/fake/clip{seed}.mp4", seed + 10)
    return tmp_path / "corpus"


def write_manifest(path: Path, *rows: tuple[str, ...], header: tuple[str, ...] = ("path", "label", "group")) -> Path:
    text = io.StringIO()
    csv.writer(text).writerows([header, *rows])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.getvalue(), newline="")
    return path


@pytest.fixture
def probe_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The real probe, but it logs each file it is given, and crashes, hangs or lacks rights on some names."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "odd_probe.py").write_text(
        "import ctypes, os, time\n"
        "from fvc_lib.corpus.probing import probe_file\n"
        "def probe(path):\n"
        "    with open(os.environ['PROBE_LOG'], 'a') as log:\n"
        "        name = os.path.basename(path)\n"
        "        log.write(name + '\\n')\n"
        "    if 'crash' in name: ctypes.string_at(0)\n"
        "    if 'hang' in name: time.sleep(1000)\n"
        "    if 'denied' in name and os.geteuid() == 0: os.setuid(65534)  # root may read everything\n"
        "    return probe_file(path)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    monkeypatch.setenv("PROBE_LOG", str(tmp_path / "probed.log"))
    return "odd_probe:probe"


def test_every_video_is_described(corpus: Path, build: Built) -> None:
    report = build(corpus, workers=2)
    index = build.index
    assert index.height == 6
    assert index["video_id"].to_list() == sorted(index["video_id"])
    for row in index.iter_rows(named=True):
        path = corpus / row["path"]
        assert row["content_sha256"] == sha256_of_file(path)
        own = row["content_sha256"][:16]
        assert (row["video_id"], row["group_id"], row["label"]) == (own, f"video {own}", path.parent.name)
        assert (row["codec"], row["width"], row["height"], row["num_frames"]) == ("h264", 128, 96, 8)
        assert row["size_bytes"] == path.stat().st_size
    assert (report.num_listed, report.num_indexed, report.num_known, report.merges) == (6, 6, 0, ())
    summary = {"videos in the index": "6", "  labelled real": "3", "leakage groups": "6"}
    assert dict(report.summary.rows()).items() >= summary.items()
    assert build.rejected.is_empty()
    assert build.seen == [(done, 6) for done in range(7)]


def test_tables_do_not_depend_on_place_order_workers_or_working_directory(
    corpus: Path, tmp_path: Path, make_video: MakeVideo, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_video(corpus / "fake/again.mp4", 11)
    (corpus / "real/broken.mp4").write_bytes(b"no video")
    first = Built(tmp_path / "first")
    first(corpus, workers=1)
    moved = tmp_path / "elsewhere" / "corpus"
    files = [path for path in corpus.rglob("*") if path.is_file()]
    random.Random(5).shuffle(files)
    for path in files:
        target = moved / path.relative_to(corpus)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    monkeypatch.chdir(moved.parent)
    second = Built(tmp_path / "second")
    second(Path("corpus"), workers=2)
    assert (first.folder / "index.parquet").read_bytes() == (second.folder / "index.parquet").read_bytes()
    assert first.rejected.equals(second.rejected)
    assert first.rejected.height == 2


def test_near_duplicates_join_stated_groups_and_say_why(tmp_path: Path, make_video: MakeVideo, build: Built) -> None:
    make_video(tmp_path / "a.mp4", 1)
    make_video(tmp_path / "b.mp4", 1, crf=35)
    make_video(tmp_path / "c.mp4", 2)
    make_video(tmp_path / "d.mp4", 3)
    rows = [("a.mp4", "real", "g1"), ("b.mp4", "fake", "g2"), ("c.mp4", "fake", "g2"), ("d.mp4", "real", "")]
    manifest = write_manifest(tmp_path / "m.csv", *rows)
    report = build(manifest)
    groups = build.groups
    assert groups["a.mp4"] == groups["b.mp4"] == groups["c.mp4"] == "g1+1 more"
    assert groups["d.mp4"].startswith("video ")
    assert [*map(astuple, report.merges)] == [("g1+1 more", "near_duplicate", "a.mp4 ~ b.mp4", "g1", "g2")]
    summary = {"leakage groups": "2", "  videos in the largest": "3", "  with both labels": "1"}
    assert dict(report.summary.rows()).items() >= summary.items()
    assert build(manifest, near_duplicate_bits=0).merges == ()
    assert build.groups["a.mp4"] == "g1"


def test_one_content_is_one_video_and_joins_its_groups(tmp_path: Path, make_video: MakeVideo, build: Built) -> None:
    for name, seed in {"a": 1, "b": 1, "c": 1, "d": 2, "e": 3, "f": 3, "g": 4}.items():
        make_video(tmp_path / f"{name}.mp4", seed)
    rows = [("c.mp4", "real", "g3"), ("b.mp4", "real", "g2"), ("a.mp4", "real", ""), ("d.mp4", "fake", "g3"),
            ("e.mp4", "real", "g5"), ("f.mp4", "fake", "g6"), ("g.mp4", "fake", "g5")]  # fmt: skip
    report = build(write_manifest(tmp_path / "m.csv", *rows), near_duplicate_bits=0)
    assert build.groups == {"a.mp4": "g2+1 more", "d.mp4": "g2+1 more", "g.mp4": "g5+1 more"}
    duplicate, conflicting = "duplicate_content", "conflicting_labels"
    assert build.reasons == {"b.mp4": duplicate, "c.mp4": duplicate, "e.mp4": conflicting, "f.mp4": conflicting}
    assert {(merge.why, merge.first, merge.second) for merge in report.merges} == {
        ("same_content", "a.mp4", "g2"),
        ("same_content", "a.mp4", "g3"),
        ("same_content", "g5", "g6"),
    }
    assert dict(report.summary.rows())["labelled videos lost"] == "40.0%"
    detail = build.rejected.filter(pl.col("path") == "f.mp4")["detail"].item()
    assert "'e.mp4', 'f.mp4'" in detail


def write_audio(path: Path) -> None:
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())


@pytest.mark.fault(8, 9)
def test_a_file_that_fails_is_a_row_with_a_reason(corpus: Path, make_video: MakeVideo, build: Built) -> None:
    (corpus / "real/empty.mp4").touch()
    (corpus / "real/page.mp4").write_text("<html>not found</html>")
    write_audio(corpus / "real/sound.mp4")
    whole = make_video(corpus / "real/cut.mp4", 20, num_frames=40).read_bytes()
    (corpus / "real/cut.mp4").write_bytes(whole[: len(whole) // 2])
    (corpus / "real/not an URL.txt").touch()
    report = build(corpus)
    assert build.index.height == 6
    assert build.reasons.pop("real/cut.mp4")
    assert build.reasons.items() >= {
        "real/empty.mp4": "unreadable", "real/page.mp4": "unreadable", "real/sound.mp4": "no_video",
        "real/not an URL.txt": "unknown_extension",
    }.items()  # fmt: skip
    assert all(build.rejected["detail"].str.len_chars() > 20)
    assert dict(report.summary.rows())["labelled videos lost"] == "40.0%"
    assert report.rejected["videos"].sum() == 5


def test_a_crash_and_a_hang_cost_one_file_each(
    corpus: Path, make_video: MakeVideo, build: Built, probe_function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_video(corpus / "real/crash.mp4", 30)
    make_video(corpus / "fake/hang.mp4", 31)
    monkeypatch.setattr(index, "VIDEO_FILES", replace(VIDEO_FILES, timeout_seconds=3.0))
    build(corpus, probe_function=probe_function, workers=2)
    assert build.index.height == 6
    assert build.reasons == {"real/crash.mp4": "crashed", "fake/hang.mp4": "timeout"}
    assert build.seen[-1] == (8, 8)
    # Neither is remembered: another day, another decoder version, it may work.
    report = build(corpus)
    assert (report.num_indexed, report.num_known) == (8, 6)


@pytest.mark.fault(30)
def test_names_of_any_bytes_go_through_the_tables(tmp_path: Path, make_video: MakeVideo, build: Built) -> None:
    names = [
        b"a 'b' \"c\".mp4",
        b"two\nlines.mp4",
        b"[x]*?{}.mp4",
        b"caf\xe9.mp4",
        "🎥<script>.mp4".encode(),
        b"\\xe9.mp4",
    ]
    for seed, name in enumerate(names):
        make_video(tmp_path / "corpus" / ("real" if seed % 2 else "fake") / os.fsdecode(name), seed)
    (tmp_path / "corpus/real" / os.fsdecode(b"bad\xff\n.mp4")).touch()
    build(tmp_path / "corpus")
    found = {os.fsencode(path_from_text(path).name) for path in build.index["path"]}
    assert found == set(names)
    for path, content in build.index.select("path", "content_sha256").iter_rows():
        assert sha256_of_file(tmp_path / "corpus" / path_from_text(path)) == content
    assert os.fsencode(path_from_text(build.rejected["path"].item())) == b"real/bad\xff\n.mp4"
    assert build(tmp_path / "corpus").num_known == 6


@pytest.mark.fault(7)
def test_one_label_alone_or_too_many_lost_is_refused_after_the_tables_are_written(corpus: Path, build: Built) -> None:
    (corpus / "real/bad.mp4").touch()
    with pytest.raises(DataError, match=r"14% of the labelled videos .* at most 10% .*1 x unreadable") as caught:
        build(corpus, max_rejected_share=0.1)
    assert caught.value.exit_code == 3
    assert build.index.height == 6
    assert build(corpus, max_rejected_share=0.15).num_indexed == 6
    for path in (corpus / "fake").iterdir():
        path.write_bytes(b"")
    with pytest.raises(DataError, match="no usable video labelled 'fake', only 3 of the other label"):
        build(corpus, max_rejected_share=0.9)
    assert (build.index.height, build.rejected.height) == (3, 4)


def test_results_of_unchanged_files_are_used_again_and_damaged_or_outdated_ones_are_not(
    corpus: Path, make_video: MakeVideo, build: Built
) -> None:
    write_audio(corpus / "real/sound.mp4")
    (corpus / "real/empty.mp4").touch()
    build(corpus)
    before = (build.index, build.rejected)
    report = build(corpus)
    assert report.num_known == 7  # files that were only unreadable are tried again
    assert build.seen == [(7, 8), (8, 8)]
    assert build.index.equals(before[0])
    assert build.rejected.equals(before[1])
    (store,) = (build.folder / "work").glob("probes_*.jsonl")
    lines = store.read_bytes().splitlines(keepends=True)
    outdated = json.dumps(json.loads(lines[1]) | {"version": "old", "content_sha256": "0" * 64}).encode()
    lacking = {key: value for key, value in json.loads(lines[2]).items() if key != "probe"}
    foreign = [b"[1, 2]", b"\x00\x00", b"\xff", outdated, json.dumps(lacking).encode(), lines[3][:-20]]
    store.write_bytes(lines[0] + b"\n".join(foreign))
    assert build(corpus).num_known == 1
    assert build.index.equals(before[0])
    make_video(corpus / "real/clip0.mp4", 40)
    os.utime(corpus / "fake/clip0.mp4", ns=(1, 1))
    assert build(corpus).num_known == 5
    assert not build.index.equals(before[0])


@pytest.mark.fault(32)
@given(st.lists(st.text("ab", min_size=10, max_size=10), max_size=12, unique=True), st.integers(1, 10))
def test_video_ids_are_distinct_prefixes(contents: list[str], length: int) -> None:
    ids = video_ids(contents, length)
    assert set(ids) == set(contents)
    assert len(set(ids.values())) == len(contents)
    assert all(content.startswith(own) and len(own) >= length for content, own in ids.items())
    assert video_ids(reversed(contents), length) == ids
