"""Loaders of published corpora: labels, makers, groups and official parts of miniatures in the releases' layouts."""

import json
from collections import Counter
from pathlib import Path

import polars as pl
import pytest

from fvc_lib.corpus.corpus_files import Entry
from fvc_lib.corpus.index import group_annotations
from fvc_lib.corpus.listing import Listing, by_rank, read_corpus
from fvc_lib.corpus.protocols import make_protocol, official_leaks, training_rows
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError
from fvc_lib.services.registry import CORPORA
from tests.corpus.published import MINIATURES, text, touch


def group_of(listing: Listing) -> dict[str, str]:
    """Group by path, from what the corpus states alone."""
    return group_annotations(listing)[0]


def by_path(listing: Listing) -> dict[str, Entry]:
    return {entry.path: entry for entry in listing.entries}


# Of each miniature: its loader, how many are real and fake, groups, official parts, makers, and sources of reals.
EXPECTED: dict[str, tuple[str, tuple[int, int], int, dict[str | None, int], set[str], set[str]]] = {
    "faceforensics": ("faceforensics", (4, 4), 1, {"train": 4, "test": 4}, {"Deepfakes", "FaceShifter"}, {"youtube"}),
    "dfd": ("faceforensics", (3, 1), 2, {None: 4}, {"DeepFakeDetection"}, {"actors"}),
    "celeb_df": ("celeb_df", (5, 1), 4, {"train": 4, "test": 2}, {"celeb-df synthesis"}, {"celebrities", "youtube"}),
    "celeb_df_plus": (
        "celeb_df", (3, 4), 3, {"train": 5, "test": 2}, {"celeb-df synthesis", "GHOST", "DaGAN", "IP_LAP"},
        {"celebrities", "youtube"},
    ),
    "dfdc": ("dfdc", (3, 3), 4, {"train": 4, "test": 2}, {"dfdc"}, {"dfdc"}),
    "dfdc_tested_by_metadata": ("dfdc", (3, 3), 4, {"train": 4, "test": 2}, {"dfdc"}, {"dfdc"}),
    "dfdc_preview": ("dfdc_preview", (2, 1), 2, {"train": 2, "test": 1}, {"method_A"}, {"dfdc preview"}),
    "deeperforensics": (
        "deeperforensics", (0, 3), 2, {"train": 1, "validation": 1, "test": 1}, {"DeeperForensics"}, set(),
    ),
    "fakeavceleb": ("fakeavceleb", (2, 1), 2, {None: 3}, {"faceswap"}, {"voxceleb2"}),
    "genvideo": ("genvideo", (2, 3), 5, {"test": 3, "train": 2}, {"Sora", "Gen2", "ZeroScope"}, {"genvideo real"}),
    "genvideo_in_the_root_too": (
        "genvideo", (2, 4), 6, {"test": 3, "train": 3}, {"Sora", "Gen2", "ZeroScope", "Real"}, {"genvideo real"},
    ),
    "genvidbench": (
        "genvidbench", (4, 4), 4, {"train": 3, "test": 5}, {"pika", "cogvideo", "mora"}, {"vript", "hd_vg_130m"},
    ),
    "aigvdbench": ("aigvdbench", (2, 2), 2, {"test": 3, "train": 1}, {"CogVideoX", "Sora"}, {"youtube"}),
    "wilddeepfake": ("wilddeepfake", (3, 2), 4, {"train": 3, "test": 2}, {None}, {"internet"}),
}  # fmt: skip


@pytest.mark.parametrize("name", MINIATURES)
def test_a_release_is_read_as_it_unpacks(name: str, tmp_path: Path) -> None:
    MINIATURES[name](tmp_path)
    listing = read_corpus(tmp_path)
    kind, labels, num_groups, parts, makers, sources = EXPECTED[name]
    assert listing.kind == kind
    assert (listing.name == "Celeb-DF++") == (name == "celeb_df_plus")
    count = Counter(entry.label for entry in listing.entries)
    assert (count["real"], count["fake"]) == labels
    assert Counter(entry.official_split for entry in listing.entries) == parts
    assert {entry.generator for entry in listing.entries if entry.label == "fake"} == makers
    assert {entry.real_source for entry in listing.entries if entry.label == "real"} == sources
    assert not any(entry.generator for entry in listing.entries if entry.label == "real")
    assert len(set(group_of(listing).values())) == num_groups
    assert listing.rejected.is_empty()
    (loader,) = (loader for loader in by_rank(CORPORA) if loader.title and loader.recognises(tmp_path))
    assert loader.name == kind


def test_a_fake_is_tied_to_its_target_its_source_and_their_youtube_videos(tmp_path: Path) -> None:
    MINIATURES["faceforensics"](tmp_path)
    (tmp_path / "conversion_dict.json").unlink()
    listing = read_corpus(tmp_path)
    groups = group_of(listing)
    original, swapped = "original_sequences/youtube/c23/videos", "manipulated_sequences/Deepfakes"
    assert groups[f"{original}/000.mp4"] == groups[f"{original}/001.mp4"] == groups[f"{swapped}/c23/videos/000_001.mp4"]
    assert groups[f"{original}/002.mp4"] == groups[f"{swapped}/c40/videos/002_003.mp4"] != groups[f"{original}/000.mp4"]
    assert any("conversion_dict.json is not there" in note for note in listing.notes)
    compression = json.loads(by_path(listing)[f"{swapped}/c40/videos/002_003.mp4"].attributes or "")
    assert compression == {"compression": "c40"}


def test_the_real_lists_of_faceforensics_make_478_groups_and_have_seven_leaks(shared: Path, tmp_path: Path) -> None:
    lists = shared / "corpora/faceforensics"
    pairs = []
    for part in ("train", "val", "test"):
        content = (lists / f"split_{part}.json").read_text(encoding="utf-8")
        text(tmp_path, f"splits/{part}.json", [content])
        pairs += json.loads(content)
    text(tmp_path, "conversion_dict.json", [(lists / "conversion_dict.json").read_text(encoding="utf-8")])
    for first, second in pairs:
        touch(tmp_path, *(f"original_sequences/youtube/c23/videos/{each}.mp4" for each in (first, second)))
        touch(tmp_path, f"manipulated_sequences/Deepfakes/c23/videos/{first}_{second}.mp4")
    listing = read_corpus(tmp_path)
    groups = group_of(listing)
    reals = [entry for entry in listing.entries if entry.label == "real"]
    assert len(reals) == 1000
    assert len({link for entry in reals for link in entry.links}) == 977
    assert len(set(groups.values())) == 478
    assert Counter(entry.official_split for entry in reals) == {"train": 720, "validation": 140, "test": 140}
    rows = [(each.path, each.path, groups[each.path], each.label, each.official_split) for each in listing.entries]
    index = pl.DataFrame(rows, schema=["video_id", "path", "group_id", "label", "official_split"], orient="row")
    assert official_leaks(index).height == 7
    table = make_protocol(index, RunConfig(protocol="official_strict"), lambda *_: (None, None))
    assert not training_rows(table, 0).leaking
    parts = dict(table.group_by("part").len().iter_rows())
    assert parts["test"] == 140 + 70
    assert 0 < parts["left_out"] < 100


@pytest.mark.parametrize(
    ("name", "gone", "expected"),
    [
        ("faceforensics", "original_sequences", "'original_sequences/youtube"),
        ("faceforensics", "splits/val.json", "splits/val.json"),
        ("celeb_df", "Celeb-synthesis", "'Celeb-synthesis'"),
        ("celeb_df", "Celeb-real", "'Celeb-real'"),
        ("deeperforensics", "manipulated_videos", "'manipulated_videos"),
        ("fakeavceleb", "meta_data.csv", "/meta_data.csv"),
        ("fakeavceleb", "RealVideo-RealAudio", "'RealVideo-RealAudio'"),
        ("aigvdbench", "Real", "'Real'"),
        ("aigvdbench", "val.jsonl", "val.jsonl"),
        ("dfdc", "dfdc_train_part_1/metadata.json", "dfdc_train_part_1/metadata.json"),
        ("dfdc_preview", "dataset.json", "/dataset.json"),
    ],
)
def test_a_tree_unpacked_halfway_is_refused_with_what_was_expected(
    name: str, gone: str, expected: str, tmp_path: Path
) -> None:
    MINIATURES[name](tmp_path)
    (tmp_path / gone).rename(tmp_path.parent / f"gone_{tmp_path.name}")
    with pytest.raises(DataError, match=expected):
        read_corpus(tmp_path)


@pytest.mark.parametrize(
    ("name", "file", "content"),
    [
        ("faceforensics", "conversion_dict.json", "[1]"),
        ("celeb_df", "List_of_testing_videos.txt", "YouTube-real/00170.mp4"),
        ("dfdc", "dfdc_train_part_0/metadata.json", '{"a.mp4": {"label": "?"}}'),
        ("dfdc", "test/labels.csv", ""),
        ("dfdc_preview", "dataset.json", '{"method_A/1/1.mp4": {}}'),
        ("fakeavceleb", "meta_data.csv", "source\nid1,id2"),
    ],
)
def test_a_damaged_list_is_named(name: str, file: str, content: str, tmp_path: Path) -> None:
    MINIATURES[name](tmp_path)
    (tmp_path / file).write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=file):
        read_corpus(tmp_path)


def test_a_prompt_s_number_ties_reals_to_fakes_though_it_begins_a_name_like_a_youtube_id(tmp_path: Path) -> None:
    MINIATURES["genvidbench"](tmp_path)
    groups = group_of(read_corpus(tmp_path))
    assert groups["Pair2/hd_vg_130m/00001_a_boy_x.mp4"] == groups["Pair2/mora/0001_y.mp4"]
    assert groups["Pair2/hd_vg_130m/-2Zdu3hMGVw_3_10to99.mp4"] == groups["Pair1/vript/vript/-2Zdu3hMGVw-Scene-001.mp4"]


def test_a_celebrity_s_video_without_a_row_is_not_used_because_its_other_people_are_not_known(tmp_path: Path) -> None:
    MINIATURES["fakeavceleb"](tmp_path)
    name = "FakeVideo-RealAudio/African/men/id00076/00110_id00200_fsgan.mp4"
    touch(tmp_path, name)
    listing = read_corpus(tmp_path)
    assert any("men/id00076/gone.mp4'" in note for note in listing.notes)
    assert listing.rejected.select("path", "reason").rows() == [(name, "not_listed")]
    assert {entry.generator for entry in listing.entries} == {"faceswap", None}


def test_the_test_part_of_dfdc_may_be_the_corpus_and_is_said_to_be_without_originals(tmp_path: Path) -> None:
    MINIATURES["dfdc_tested_by_metadata"](tmp_path)
    touch(tmp_path, "test/not_named.mp4")
    listing = read_corpus(tmp_path)
    assert listing.rejected["path"].to_list() == ["test/not_named.mp4"]
    assert any("test videos" in note for note in listing.notes)
    alone = read_corpus(tmp_path / "test")
    assert [(entry.label, entry.official_split) for entry in alone.entries] == [("real", "test"), ("fake", "test")]


def test_archives_and_strange_folders_of_pictures_are_named(tmp_path: Path) -> None:
    MINIATURES["wilddeepfake"](tmp_path / "whole")
    touch(tmp_path, "whole/real_train/1/fake/0/0.png", "whole/real_test/3.tar.gz")
    listing = read_corpus(tmp_path / "whole")
    assert listing.rejected.select("path", "reason").rows() == [
        ("real_test/3.tar.gz", "unknown_extension"), ("real_train/1/fake/0", "unknown_name")
    ]  # fmt: skip
    touch(tmp_path, "packed/deepfake_in_the_wild/real_train/1.tar.gz", "packed/deepfake_in_the_wild/fake_test/1.tar.gz")
    with pytest.raises(DataError, match=r"looks like WildDeepfake.*2 x unknown_extension.*Unpack"):
        read_corpus(tmp_path / "packed")
