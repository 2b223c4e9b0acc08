"""Tars of whole videos, in WebDataset's layout, as corpora of both kinds."""

import io
import json
import pickle
import tarfile
from pathlib import Path

import polars as pl
import pytest

from fvc_lib.corpus.listing import read_corpus
from fvc_lib.corpus.video_texts import index_video_texts, read_tar_pairs, video_text_root
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, UsageError
from fvc_lib.video.decode.clip import decode_clip


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
        "a-000.tar/s5.mp4": "label_not_used",
        "a-000.tar/s6.mp4": "label_not_used",
    }
    assert "'s2.pyd' in a-000.tar was refused unread" in rejected["a-000.tar/s2.pyd"][1]


def test_a_tar_alone_is_a_corpus_whose_videos_are_read_where_they_lie(tars):
    listing = read_corpus(tars / "a-001.tar")
    assert [entry.path for entry in listing.entries] == ["a-001.tar/s3.mp4"]
    frames = decode_clip(listing.root / listing.entries[0].path, 3, 16).frames
    assert frames.tolist() == decode_clip(tars.parent / "videos" / "3.mp4", 3, 16).frames.tolist()


def test_tars_without_a_usable_label_are_refused_with_what_to_write(tars, tmp_path):
    with pytest.raises(DataError, match=r"labelled real or fake; got 1 x '7'.*KEY\.cls.*label_map 1=fake"):
        read_corpus(write_tar(tmp_path / "b.tar", {"s.mp4": b"", "s.cls": "7"}))
    with pytest.raises(DataError, match="got no video"):
        read_corpus(write_tar(tmp_path / "c.tar", {"s.txt": "a text"}))
    with pytest.raises(UsageError, match="label_map: no row of the tars is labelled '9'"):
        read_corpus(tars, label_map={"9": "fake", "1": "fake", "0": "real"})


@pytest.mark.parametrize("cut", [700, 20_000])
def test_a_tar_that_is_cut_stops_it_and_is_named(tars, cut):
    path = tars / "a-000.tar"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(UsageError, match=r"the tar 'a-000\.tar': no readable tar file.*Fetch it again"):
        read_corpus(tars)


def test_a_folder_without_a_tar_is_told_what_corpora_look_like(tmp_path):
    with pytest.raises(UsageError, match=r"a tar file, or a folder of them, with KEY\.mp4"):
        read_corpus(tmp_path)


def test_texts_stand_beside_videos_in_txt_or_json(tmp_path, make_video):
    videos = [make_video(tmp_path / f"{number}.mp4", number).read_bytes() for number in range(4)]
    folder = tmp_path / "pairs"
    write_tar(folder / "0.tar", {"a.mp4": videos[0], "a.txt": " a  red\nsquare ", "a.json": {"caption": "no"}})
    write_tar(folder / "1.tar", {
        "b.mp4": videos[1], "b.json": {"caption": "a blue one", "group": "g", "split": "test"},
        "c.mp4": videos[2], "d.mp4": videos[3], "d.json": {"text": "a green one", "split": "some"},
    })  # fmt: skip
    listing = read_tar_pairs(folder)
    assert [(row.path, row.text, row.part, row.stated_group) for row in listing.rows] == [
        ("0.tar/a.mp4", "a red square", None, None),
        ("1.tar/b.mp4", "a blue one", "test", "g"),
    ]
    assert [row[4] for row in listing.rejections.rows] == ["no_text", "unknown_split"]
    assert listing.memberships == (("1.tar/b.mp4", "g"),)


def test_pairs_in_tars_are_indexed_as_those_of_a_manifest(tmp_path, make_video):
    rows, plain, tars = [], tmp_path / "plain", tmp_path / "tars"
    for number in range(8):
        content = make_video(plain / f"v{number}.mp4", number).read_bytes()
        text, part = f"scene number {number}", ("train", "validation", "test")[number % 3]
        rows.append((f"v{number}.mp4", text, part))
        members = {f"v{number}.mp4": content, f"v{number}.txt": text, f"v{number}.json": {"split": part}}
        write_tar(tars / f"{number}.tar", members)
    pl.DataFrame(rows, schema=["path", "text", "split"], orient="row").write_csv(plain / "manifest.csv")
    found = {}
    for corpus in (plain, tars):
        config = RunConfig(task="video_text", corpus=str(corpus), cache_dir=str(tmp_path / "cache"), workers=1)
        found[corpus] = index_video_texts(config)
        assert video_text_root(config) == corpus == found[corpus].root
    left, right = (found[corpus].pairs.drop("path", "group_id") for corpus in (plain, tars))
    assert left.equals(right)
    assert left.height == 8
