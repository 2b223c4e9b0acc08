"""Indexes of videos: what is in their tables, files that fail, indexes that are killed, and re-encoded videos."""

import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import polars as pl
import pytest
from hypothesis import given, strategies as st
from PIL import Image

from fvc_lib.corpus.index import trial_groups, video_ids
from fvc_lib.corpus.probing import probe_file
from fvc_lib.metrics.classification import roc_auc
from fvc_lib.metrics.cross_validation import within_folds
from fvc_lib.services.atomic_files import path_from_text, sha256_of_file
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import INDEX, REJECTED, read_table, write_table
from fvc_lib.tasks.decoding import FileToScore, item_to_decode
from fvc_lib.tasks.video import controls
from fvc_lib.tasks.video.predicting import index_of_files
from fvc_lib.tasks.video.verdicts.unfamiliar import training_ranges
from fvc_lib.video.clips.making import make_clips
from fvc_lib.video.clips.store import ClipStore
from fvc_lib.video.clips.worker import make_original
from fvc_lib.video.decode.clip import decode_clip
from fvc_lib.video.decode.probe import probe_video
from fvc_lib.video.reencode import reencoded
from tests.corpus.indexing import index_of
from tests.corpus.published import text

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
def indexed(videos: Path) -> SimpleNamespace:
    return index_of(videos, videos.parent / "out", workers=2)


@pytest.fixture
def corpus(videos: Path, indexed: SimpleNamespace, tmp_path: Path) -> Path:
    """A copy of the six videos; its files are as old, but they were never probed here."""
    return Path(shutil.copytree(videos, tmp_path / "corpus"))


@pytest.mark.fault(31)
def test_every_video_is_described(videos: Path, indexed: SimpleNamespace) -> None:
    assert indexed.index.height == 6
    assert indexed.index["video_id"].is_sorted()
    for row in indexed.index.iter_rows(named=True):
        path = videos / row["path"]
        assert row["content_sha256"] == sha256_of_file(path)
        own = row["content_sha256"][:16]
        assert (row["video_id"], row["group_id"], row["label"]) == (own, f"video {own}", path.parent.name)
        assert (row["codec"], row["width"], row["height"], row["num_frames"]) == ("h264", 128, 96, 8)
        assert row["size_bytes"] == path.stat().st_size
    assert indexed.report.num_known == 0
    summary = {"videos in the index": "6", "leakage groups": "6", "labelled videos lost": "0.0%"}
    assert summary.items() <= dict(indexed.report.summary.rows()).items()
    assert indexed.rejected.height == indexed.group_links.height == 0


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
    for name, seed, quality in (("a", 1, {}), ("b", 1, {"crf": 35}), ("c", 2, {}), ("d", 3, {})):
        make_video(tmp_path / f"{name}.mp4", seed, **quality)
    rows = ["a.mp4,real,g1", "b.mp4,fake,g2", "c.mp4,fake,g2", "d.mp4,real,"]
    manifest = text(tmp_path, "m.csv", ["path,label,group", *rows])
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
    rows = ["c.mp4,real,g3", "b.mp4,real,g2", "a.mp4,real,", "d.mp4,fake,g3", "e.mp4,real,g5", "f.mp4,fake,g6"]
    manifest = text(tmp_path, "m.csv", ["path,label,group", *rows, "g.mp4,fake,g5"])
    made = index_of(manifest, tmp_path / "out", near_duplicate_bits=0)
    assert by_path(made.index, "group_id") == {"a.mp4": "g2+1 more", "d.mp4": "g2+1 more", "g.mp4": "g5+1 more"}
    reasons = dict.fromkeys(("b.mp4", "c.mp4"), "duplicate_content")
    assert by_path(made.rejected, "reason") == reasons | dict.fromkeys(("e.mp4", "f.mp4"), "conflicting_labels")
    assert set(made.group_links.select("why", "first", "second").rows()) == {
        ("same_content", "a.mp4", "g2"),
        ("same_content", "a.mp4", "g3"),
        ("same_content", "g5", "g6"),
    }
    assert dict(made.report.summary.rows())["labelled videos lost"] == "40.0%"
    assert made.report.labels.rows() == [("real", 4, 4, 4), ("fake", 3, 3, 3)]
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


@pytest.fixture
def two_good(tmp_path: Path, make_video: MakeVideo) -> Path:
    """One good video of each label; tests add bad ones."""
    for label in ("real", "fake"):
        make_video(tmp_path / "corpus" / label / "good.mp4", len(label) + ord(label[0]))
    return tmp_path / "corpus"


@pytest.mark.fault(7, 8, 9)
def test_every_broken_file_has_the_row_it_should(shared: Path, two_good: Path, tmp_path: Path) -> None:
    shutil.copytree(shared / "media/broken", two_good / "fake", dirs_exist_ok=True)
    made = index_of(two_good, tmp_path / "out", workers=2, max_rejected_share=1.0)
    rows = by_path(made.rejected, "reason") | dict.fromkeys(made.index["path"], "used")
    stem = re.compile("[^/]+__[0-9a-f]{6}")  # ExoPlayer__1b63dd of fake/ExoPlayer__1b63dd_bear.mp4
    assert {found[0]: reason for path, reason in rows.items() if (found := stem.search(path))} == BROKEN
    assert len(rows) == len(BROKEN) + 2
    for detail in made.rejected["detail"]:
        assert re.fullmatch(r".{10,}\. .{10,}[.!]", detail, re.DOTALL), detail  # what it is, and what to do


def test_an_image_sequence_pattern_opens_one_file_only(tmp_path: Path, make_video: MakeVideo) -> None:
    """To ffmpeg's image reader ``%d`` in a name means all numbered files beside it."""
    make_video(tmp_path / "0.mp4", 3).rename(tmp_path / "0.png")
    answer = probe_file(str(tmp_path / "%d.png"))
    assert answer["reason"] == "unreadable"
    assert "no such file" in answer["detail"]


# --- Indexes that are killed.

INDEXING = """
import sys
from pathlib import Path
from tests.corpus.indexing import index_of
index_of(Path(sys.argv[1]), Path(sys.argv[2]), workers=2)
"""


@pytest.mark.fault(14)
def test_a_video_that_may_not_be_read_is_a_row_with_the_remedy(corpus: Path, tmp_path: Path) -> None:
    (corpus / "real/clip0.mp4").chmod(0)
    as_user = [] if os.geteuid() else ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]  # root reads all
    command = [*as_user, sys.executable, "-c", INDEXING, str(corpus), str(tmp_path)]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True)
    (row,) = read_table(tmp_path / "rejected.parquet", REJECTED).iter_rows(named=True)
    assert (row["path"], row["reason"]) == ("real/clip0.mp4", "unreadable")
    assert re.search(r"(?i)permission denied.*chmod u\+r", row["detail"])


def stored(folder: Path) -> list[str]:
    """Paths of the files whose result is on the disk; a torn last line is none."""
    lines = [line for store in folder.glob("index/probes_*.jsonl") for line in store.read_bytes().split(b"\n")]
    return [json.loads(line)["path"] for line in lines[:-1] if line.endswith(b"}")]


@pytest.mark.long
def test_an_index_killed_again_and_again_ends_as_if_it_was_not(tmp_path: Path, make_video: MakeVideo) -> None:
    corpus, killed = tmp_path / "corpus", tmp_path / "killed"
    for number in range(40):  # each has a content of its own: a counter in a box that players skip
        path = make_video(corpus / ("real" if number % 2 else "fake") / f"clip{number:02d}.mp4", number % 6)
        path.write_bytes(path.read_bytes() + struct.pack(">I4sQ", 16, b"free", number))
    index_of(corpus, tmp_path / "undisturbed", workers=2)
    command = [sys.executable, "-c", INDEXING, str(corpus), str(killed)]
    for moment in (*sorted(random.Random(1).sample(range(1, 36), 2)), None):
        with subprocess.Popen(command, cwd=Path(__file__).parents[2]) as process:
            while moment is not None and len(stored(killed)) < moment:
                assert process.poll() is None, "it ended before it was killed"
                time.sleep(0.002)
            if moment is not None:
                process.kill()
        assert process.returncode == (0 if moment is None else -signal.SIGKILL)
    assert len(stored(killed)) == len(set(stored(killed))) == 40, "a finished file was probed again"
    for name in ("index.parquet", "rejected.parquet"):
        assert (killed / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes()


PLAIN = {"near_duplicate_bits": 0, "max_rejected_share": 0, "workers": 2}


def write_video(path: Path, frames: Sequence[np.ndarray], rate: int, **options: str) -> None:
    """Encode RGB frames, uint8 (H, W, 3); no bit is lost."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as output:
        stream = output.add_stream("libx264", rate=rate)
        stream.codec_context.options = {"qp": "0", **options}
        stream.height, stream.width, stream.pix_fmt = *frames[0].shape[:2], "yuv420p"
        for pixels in frames:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))


# --- Fakes have closer keyframes and no B-frames.


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pl.DataFrame]:
    """Indexes of pairs of a real and a fake with the same sixteen frames."""
    folder = tmp_path_factory.mktemp("canonical")
    for number in range(16):
        cells = np.random.default_rng(number // 2).integers(30, 220, (9, 9, 3))
        picture = np.kron(cells, np.ones((16, 16, 1))).astype(np.uint8)
        frames = [picture[step : step + 64, 2 * step : 2 * step + 96] for step in range(16)]
        options = {"g": "2", "bf": "0"} if number % 2 else {"g": "8", "bf": "2"}
        write_video(folder / "corpus" / ("fake" if number % 2 else "real") / f"{number}.mp4", frames, 10, **options)
    indexes = {"plain": {}, "canonical": {"canonical": True}, "trial": {"dev_groups": 5, "seed": 3}}
    made = {name: index_of(folder / "corpus", folder / "out", **PLAIN, **options) for name, options in indexes.items()}
    return {name: each.index for name, each in made.items()} | {"rejected": made["trial"].rejected}


def auc(index: pl.DataFrame, names: tuple[str, ...]) -> float:
    number = pl.col("path").str.extract(r"(\d+)").cast(pl.Int64)
    folds = index.select("video_id", "group_id", "label", fold=number // 2 % 4)
    scored = controls.metadata_only(index, folds, names)
    return float(within_folds(roc_auc, scored["fold"].to_numpy())(controls.fake_labels(scored), scored["score"]))


def test_the_planted_trace_is_gone_and_labels_frames_times_and_ids_stay(tables: dict[str, pl.DataFrame]) -> None:
    plain, canonical = tables["plain"], tables["canonical"]
    planted = ("key_distance_mean", "key_distance_max", "packet_bytes_mean", "bits_per_second", "size_bytes")
    for names in (planted, controls.METADATA):
        assert (auc(plain, names), auc(canonical, names)) == (1.0, 0.5)
    assert set(canonical["codec"]) == {"h264"}
    assert set(canonical["key_distance_max"]) == {None}  # sixteen frames are one group of pictures
    for name in ("video_id", "path", "label", "group_id", "content_sha256", "perceptual_hash", "width", "num_frames"):
        assert canonical[name].equals(plain[name]), name
    np.testing.assert_allclose(canonical["duration_seconds"], plain["duration_seconds"], rtol=1e-6)


def test_a_trial_has_so_many_whole_groups_of_both_labels_and_loses_nothing(tables: dict[str, pl.DataFrame]) -> None:
    assert tables["trial"]["group_id"].n_unique() == 5
    assert set(tables["trial"]["label"]) == {"real", "fake"}
    assert tables["rejected"]["reason"].to_list() == ["not_in_trial"] * 11
    labels = {f"g{n}": ["real", "fake"] if n == 7 else ["fake" if n < 4 else "real"] for n in range(30)}
    chosen = [trial_groups(labels, number, seed=1) for number in (4, 9, 99)]
    assert chosen[0] < chosen[1] < chosen[2] == set(labels)
    assert trial_groups(labels, 9, seed=2) != chosen[1]


# --- Reals have 144 x 96 pixels at 30 frames a second, fakes 96 x 64 at 20.


def drifting(number: int, size: tuple[int, int], rate: int) -> list[np.ndarray]:
    """A second of a picture that drifts, drawn alike at any size and rate."""
    # Without detail that a smaller size would have lost: that would survive as sharpness, and no recipe brings it back.
    coarse = Image.fromarray(np.random.default_rng(number).integers(30, 220, (6, 9, 3), np.uint8))
    picture = np.asarray(coarse.resize((360, 192), Image.Resampling.BICUBIC))
    lefts = [int(60 * step / rate) for step in range(rate)]
    shown = [Image.fromarray(picture[:, left : left + 288]) for left in lefts]
    return [np.asarray(image.resize(size, Image.Resampling.BOX)) for image in shown]


@pytest.fixture(scope="module")
def rescaled(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("rescale")
    for number in range(8):
        label, size, rate = ("fake", (96, 64), 20) if number % 2 else ("real", (144, 96), 30)
        write_video(folder / "corpus" / label / f"{number}.mp4", drifting(number, size, rate), rate, preset="ultrafast")
    made = index_of(folder / "corpus", folder, **PLAIN, rescale=32)
    originals = read_table(folder / "original_index.parquet", INDEX)
    return SimpleNamespace(folder=folder / "corpus", originals=originals, index=made.index, notes=made.report.notes)


def store_of(cache: Path, **changes: int) -> ClipStore:
    settings = {"rescale": 32, "num_frames": 2, "fixed_size": 32, "frame_sampling": "uniform", **changes}
    return ClipStore.of(RunConfig(model="frame_cnn", cache_dir=str(cache), **settings))


def test_labels_that_size_and_rate_told_are_at_chance_after_it(rescaled: SimpleNamespace) -> None:
    assert set(rescaled.index.select("height", "frames_per_second").rows()) == {(32, 8.0)}
    assert set(rescaled.originals.select("height", "frames_per_second").rows()) == {(96, 30.0), (64, 20.0)}
    same = ("video_id", "path", "label", "group_id", "content_sha256", "perceptual_hash")
    assert rescaled.index.select(same).equals(rescaled.originals.select(same))
    (note,) = rescaled.notes
    assert "32 rows" in note


def test_clips_and_judged_files_are_of_the_rescaled_videos(rescaled: SimpleNamespace, tmp_path: Path) -> None:
    store, row = store_of(rescaled.folder.parent), rescaled.index.row(0, named=True)
    assert store.decode_hash != store_of(rescaled.folder.parent, rescale=0).decode_hash
    assert make_clips(store, rescaled.index.head(1), rescaled.folder, 0, None, workers=1).failed == ()
    path = rescaled.folder / row["path"]
    wanted = decode_clip(reencoded(path, store.recipe, store.cache_dir), 2, 32).frames
    assert (store.read(row["video_id"], 0) == wanted).all()
    clip = tmp_path / "0.npy"
    assert make_original(item_to_decode(store_of(tmp_path / "cache"), FileToScore(path, (0,)), clip)) == {}
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == [clip], "a judged file fills no cache"
    assert (np.load(clip) == wanted).all()


def test_whether_a_file_is_familiar_is_asked_of_the_files_as_they_came(
    rescaled: SimpleNamespace, tmp_path: Path
) -> None:
    run = RunPaths(tmp_path)
    write_table(rescaled.index, INDEX, run.index)
    write_table(rescaled.originals, INDEX, run.original_index)
    facts = asdict(probe_video(rescaled.folder / rescaled.index["path"][0]))
    assert training_ranges(index_of_files(run)).reasons(facts) == []
    assert any("frames per second" in told for told in training_ranges(rescaled.index).reasons(facts))
    run.original_index.unlink()
    assert index_of_files(run).equals(rescaled.index)  # of a run that left its videos as they are
