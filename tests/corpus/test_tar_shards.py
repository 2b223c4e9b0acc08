"""Tars of whole videos, in WebDataset's layout, as corpora of both kinds."""

import gzip
import io
import json
import pickle
import tarfile
from pathlib import Path

import polars as pl
import pytest

from fvc_lib.corpus.listing import read_corpus
from fvc_lib.corpus.video_texts import read_tar_pairs, video_text_root
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, UsageError
from fvc_lib.video.decode.clip import decode_clip
from fvc_lib.video.decode.probe import probe_video


class Trap:
    """Unpickled it says so."""

    def __reduce__(self):
        return (pytest.fail, ("a member was unpickled",))


def write_tar(path: Path, members: dict[str, bytes | str | dict[str, object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            text = json.dumps(content) if isinstance(content, dict) else content
            data = text.encode() if isinstance(text, str) else text
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


@pytest.fixture
def tars(tmp_path, make_video):
    """Labels in every way that is read, and members that are not."""
    videos = [make_video(tmp_path / "videos" / f"{number}.mp4", number).read_bytes() for number in range(5)]
    folder = tmp_path / "corpus"
    write_tar(folder / "a-001.tar", {"s3.mp4": videos[3], "s3.json": {"label": "fake", "split": "test"}})
    write_tar(
        folder / "a-000.tar",
        {
            "x/s0.mp4": videos[0], "x/s0.cls": "1\n",
            "x/s1.MP4": videos[1], "x/s1.json": {"label": "real", "group": "g", "source": "tv", "score": 3},
            "s2.seg.mp4": videos[2], "s2.json": {"cls": 0, "group": "g", "generator": "net"},
            "s2.pyd": pickle.dumps(Trap()), "s2.npy": pickle.dumps(Trap()),
            "s4.mp4": videos[4], "s5.mp4": videos[4], "s5.json": "{", "s6.mp4": videos[4], "s6.cls": "7",
            "._s2.mp4": b"of macOS", "s7.json": {"label": "real", "status": "failed_to_download"},
            "s8.mp4": videos[4], "s8.cls": "real", "s8.json": {"is_fake": True}, "v1.2.cls": "real",
        },
    )  # fmt: skip
    return folder


def test_labels_groups_and_parts_are_read_beside_each_video(tars):
    listing = read_corpus(tars, label_map={"1": "fake", "0": "real"})
    found = {
        entry.path: (entry.label, entry.stated_group, entry.generator, entry.real_source, entry.official_split)
        for entry in listing.entries
    }
    assert found == {
        "a-000.tar/s2.seg.mp4": ("real", "g", "net", None, None),
        "a-000.tar/x/s0.mp4": ("fake", None, None, None, None),
        "a-000.tar/x/s1.MP4": ("real", "g", None, "tv", None),
        "a-001.tar/s3.mp4": ("fake", None, None, None, "test"),
    }
    assert (listing.kind, listing.name, listing.root) == ("tar_shards", "corpus", tars)
    rejected = {row["path"]: (row["reason"], row["detail"]) for row in listing.rejected.iter_rows(named=True)}
    assert {path: reason for path, (reason, _) in rejected.items()} == {
        "a-000.tar/s2.npy": "unknown_extension",
        "a-000.tar/s2.pyd": "unknown_extension",
        "a-000.tar/s4.mp4": "label_not_used",
        "a-000.tar/s5.mp4": "malformed_row",
        "a-000.tar/s6.mp4": "label_not_used",
        "a-000.tar/s7": "missing_video",
        "a-000.tar/s8.mp4": "conflicting_labels",
        "a-000.tar/v1.2.cls": "unknown_extension",
    }
    assert all(word in rejected["a-000.tar/s8.mp4"][1] for word in ("'.cls'", "'is_fake'"))


def test_tars_without_a_usable_label_are_refused_with_what_to_write(tmp_path):
    with pytest.raises(DataError, match=r"labelled real or fake; got 1 x '7'.*KEY\.cls.*label_map "):
        read_corpus(write_tar(tmp_path / "b.tar", {"s.mp4": b"", "s.cls": "7"}))
    with pytest.raises(DataError, match="got no data row"):
        read_corpus(write_tar(tmp_path / "c.tar", {"s.txt": "a text"}))


def test_a_tar_that_is_cut_gives_the_samples_before_the_cut(tars):
    path = tars / "a-000.tar"
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b"s2.json") + 600])
    listing = read_corpus(tars, label_map={"1": "fake"})
    assert [entry.path for entry in listing.entries] == ["a-000.tar/x/s0.mp4", "a-000.tar/x/s1.MP4", "a-001.tar/s3.mp4"]
    rejected = {row["path"]: row for row in listing.rejected.iter_rows(named=True)}
    assert {path: row["reason"] for path, row in rejected.items()} == {
        "a-000.tar": "truncated",
        "a-000.tar/s2.seg.mp4": "truncated",
    }
    assert "1 tars cannot be read, or not to their end: 'a-000.tar'" in listing.notes[0]
    entry = next(entry for entry in listing.entries if entry.path.endswith("s0.mp4"))
    assert len(decode_clip(listing.root / entry.path, 3, 16).frames) == 3


def test_compressed_tars_are_refused_with_what_to_do_and_stop_no_other(tars):
    (tars / "b.tar").write_bytes(gzip.compress((tars / "a-000.tar").read_bytes()))
    (tars / "c.tar.gz").write_bytes((tars / "b.tar").read_bytes())
    listing = read_corpus(tars, label_map={"1": "fake", "0": "real"})
    assert len(listing.entries) == 4
    details = {row["path"]: row["detail"] for row in listing.rejected.iter_rows(named=True)}
    assert all("is compressed" in details[name] and "gunzip" in details[name] for name in ("b.tar", "c.tar.gz"))
    with pytest.raises(
        DataError, match=r"the tars: nothing is labelled .* For example: the tar 'c\.tar\.gz' is compressed"
    ):
        read_corpus(tars / "c.tar.gz")


@pytest.mark.parametrize(
    ("beside", "label"),
    [
        ({"a.json": {"Is_Fake": True}}, "fake"),
        ({"a.json": {"label": "FAKE", "is_fake": True}, "a.cls": "fake"}, "fake"),
        ({"a.json": {"label": "real", "fake": True}}, None),
        ({"a.json": {"label": ["fake"]}}, None),
        ({"a.cls": b"\xff\xfe"}, None),
        ({"a.json": '{"label": "fake", "group": "\\ud800"}'}, None),
        ({"a.json": "[" * 100_000}, None),
    ],
)
def test_a_label_is_read_where_it_is_clear_and_refused_where_it_is_not(tmp_path, beside, label):
    write_tar(tmp_path / "0.tar", {"a.mp4": b"", **beside, "z.mp4": b"", "z.cls": "real"})
    listing = read_corpus(tmp_path, label_map={"true": "fake"})
    assert {entry.path: entry.label for entry in listing.entries}.get("0.tar/a.mp4") == label
    assert listing.rejected["path"].to_list() == ([] if label else ["0.tar/a.mp4"])


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ([("a.cls", b"real"), ("a.cls", b"fake")], ".cls is there more than once"),
        ([("a.json", b'{"label": "real", "Label": "fake"}')], "a name in two spellings"),
        ([("a.json", b'{"label": "real"}'), ("./a.json", b'{"label": "fake"}')], ".json is there more than once"),
        ([("a.cls", b"fake"), ("a.mp4", b"other")], "'a.mp4' in 0.tar is there more than once"),
    ],
)
def test_what_a_tar_says_twice_is_refused_and_named(tmp_path, members, named):
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for name, content in [("z.mp4", b""), ("z.cls", b"real"), ("a.mp4", b"video"), *members]:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    listing = read_corpus(tmp_path)
    assert [entry.path for entry in listing.entries] == ["0.tar/z.mp4"]
    assert listing.rejected["path"].to_list() == ["0.tar/a.mp4"]
    assert named in listing.rejected["detail"][0]


def test_a_pattern_is_a_corpus_named_after_the_folder_it_begins_with(tars):
    label_map = {"1": "fake", "0": "real"}
    whole, listing = (read_corpus(path, label_map=label_map) for path in (tars, tars / "a-{000..001}.tar"))
    assert (listing.entries, listing.root, listing.name) == (whole.entries, tars, "corpus")
    with pytest.raises(UsageError, match=r"Did you mean '.*corpus'"):
        read_corpus(tars.parent)


def test_a_manifest_beside_the_tars_labels_their_members(tars):
    rows = ["path,label,group", "a-000.tar/s4.mp4,real,g", "a-001.tar/s3.mp4,fake,g", "a-001.tar/none.mp4,fake,h"]
    (tars / "manifest.csv").write_text("\n".join(rows))
    for corpus in (tars, tars / "manifest.csv"):
        listing = read_corpus(corpus)
        assert [(entry.path, entry.label, entry.stated_group) for entry in listing.entries] == [
            ("a-000.tar/s4.mp4", "real", "g"),
            ("a-001.tar/s3.mp4", "fake", "g"),
        ]
        assert listing.rejected["reason"].to_list() == ["missing_video"]


def test_clips_that_video2dataset_cut_from_one_video_are_of_one_group(tmp_path):
    facts = [
        {"key": f"0_{number}", "status": "success", "url": f"u{number // 2}", "label": "real"} for number in range(4)
    ]
    members = {
        f"0_{number}.{kind}": facts[number] if kind == "json" else b""
        for number in range(4)
        for kind in ("mp4", "json")
    }
    listing = read_corpus(write_tar(tmp_path / "0.tar", members))
    assert listing.memberships == tuple((f"0.tar/0_{number}.mp4", f"url u{number // 2}") for number in range(4))


def test_what_webdatasets_own_writer_wrote_is_read(tmp_path):
    """``two_samples.tar`` was written by ``webdataset.ShardWriter`` (1.0.2) from dicts with the keys beside it."""
    listing = read_corpus(Path(__file__).parent / "two_samples.tar", label_map={"1": "fake", "false": "real"})
    assert [(entry.path, entry.label, entry.stated_group) for entry in listing.entries] == [
        ("two_samples.tar/set/000000.mp4", "fake", None),
        ("two_samples.tar/set/000001.mp4", "real", "g"),
    ]
    assert probe_video(listing.root / listing.entries[0].path).num_frames == 8
    assert listing.rejected["path"].to_list() == ["two_samples.tar/set/000001.pyd"]


def test_texts_stand_beside_videos_in_txt_or_json(tmp_path, make_video):
    videos = [make_video(tmp_path / f"{number}.mp4", number).read_bytes() for number in range(4)]
    folder = tmp_path / "pairs"
    write_tar(folder / "0.tar", {"a.mp4": videos[0], "a.txt": " a  red\nsquare ", "a.json": {"caption": "no"}})
    write_tar(folder / "1.tar", {
        "b.mp4": videos[1], "b.json": {"caption": "a blue one", "group": "g", "split": "test"},
        "c.mp4": videos[2], "d.mp4": videos[3], "d.json": {"text": "a green one", "split": "some"},
    })  # fmt: skip
    listing = read_tar_pairs(folder)
    assert listing.rows.select("path", "text", "part", "stated_group").rows() == [
        ("0.tar/a.mp4", "a red square", None, None),
        ("1.tar/b.mp4", "a blue one", "test", "g"),
    ]
    assert [row[4] for row in listing.rejections.rows] == ["no_text", "unknown_split"]
    assert listing.memberships == (("1.tar/b.mp4", "g"),)


def test_tables_called_like_tars_are_no_manifest_of_videos_and_texts(tmp_path, make_video):
    """video2dataset puts ``00000.parquet`` and ``00000_stats.json`` beside ``00000.tar``."""
    video = make_video(tmp_path / "a.mp4", 0).read_bytes()
    folder = write_tar(tmp_path / "v2d" / "00000.tar", {"0.mp4": video, "0.txt": "a red square"}).parent
    pl.DataFrame({"key": ["0"], "caption": ["a red square"]}).write_parquet(folder / "00000.parquet")
    (folder / "00000_stats.json").write_text("{}")
    config = RunConfig(task="video_text", corpus=str(folder))
    assert video_text_root(config) == folder
    config = RunConfig(task="video_text", corpus=str(folder / "{00000..00000}.tar"))
    assert video_text_root(config) == folder
    assert read_tar_pairs(config.corpus).rows["text"].to_list() == ["a red square"]
