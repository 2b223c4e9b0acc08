"""Published corpora: labels, makers, groups and official parts of miniatures in the releases' layouts, and FVC-2018."""

import json
import re
from collections import Counter
from dataclasses import astuple
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from fvc_lib.corpus.folds import make_folds, most_folds
from fvc_lib.corpus.index import group_annotations, listed_videos, undisputed_labels
from fvc_lib.corpus.listing import by_rank, read_corpus
from fvc_lib.corpus.protocols import make_protocol, official_leaks, training_rows
from fvc_lib.corpus.sources.general import parse_video_url, read_fvc2018
from fvc_lib.metrics.classification import roc_auc
from fvc_lib.metrics.cross_validation import within_folds
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError
from fvc_lib.services.registry import CORPORA
from fvc_lib.services.tables import ANNOTATIONS, read_table
from fvc_lib.tasks.video.controls import fake_labels, group_lookup, split_by_row
from tests.corpus.indexing import index_of
from tests.corpus.published import MINIATURES, text, touch

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
    assert len(set(group_annotations(listing)[0].values())) == num_groups
    assert listing.rejected.is_empty()
    (loader,) = (loader for loader in by_rank(CORPORA) if loader.title and loader.recognises(tmp_path))
    assert loader.name == kind


def test_a_fake_is_tied_to_its_target_its_source_and_their_youtube_videos(tmp_path: Path) -> None:
    MINIATURES["faceforensics"](tmp_path)
    (tmp_path / "conversion_dict.json").unlink()
    listing = read_corpus(tmp_path)
    groups = group_annotations(listing)[0]
    original, swapped = "original_sequences/youtube/c23/videos", "manipulated_sequences/Deepfakes"
    assert groups[f"{original}/000.mp4"] == groups[f"{original}/001.mp4"] == groups[f"{swapped}/c23/videos/000_001.mp4"]
    assert groups[f"{original}/002.mp4"] == groups[f"{swapped}/c40/videos/002_003.mp4"] != groups[f"{original}/000.mp4"]
    assert any("conversion_dict.json is not there" in note for note in listing.notes)
    attributes = {entry.path: entry.attributes for entry in listing.entries}
    assert attributes[f"{swapped}/c40/videos/002_003.mp4"] == '{"compression": "c40"}'


def test_the_real_lists_of_faceforensics_make_478_groups_and_have_seven_leaks(shared: Path, tmp_path: Path) -> None:
    for name in ("conversion_dict", "split_train", "split_val", "split_test"):
        content = (shared / f"corpora/faceforensics/{name}.json").read_text(encoding="utf-8")
        for pair in json.loads(content) if name.startswith("split") else ():
            touch(tmp_path, *(f"original_sequences/youtube/c23/videos/{each}.mp4" for each in pair))
            touch(tmp_path, f"manipulated_sequences/Deepfakes/c23/videos/{'_'.join(pair)}.mp4")
        content = re.sub(r'"0*(\d+)"', r"\1" if name == "split_train" else r'"\1"', content)  # as in some copies
        text(tmp_path, f"{name.replace('split_', 'splits/')}.json", [content])
    listing = read_corpus(tmp_path)
    index = listed_videos(listing).with_columns(path="video_id")
    assert len({link for entry in listing.entries if entry.label == "real" for link in entry.links}) == 977
    assert index["group_id"].n_unique() == 478
    parts = dict(index.filter(label="real").group_by("official_split").len().iter_rows())
    assert parts == {"train": 720, "validation": 140, "test": 140}
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


def test_a_celebrity_s_video_without_a_row_is_not_used_because_its_other_people_are_not_known(tmp_path: Path) -> None:
    MINIATURES["fakeavceleb"](tmp_path)
    name = "FakeVideo-RealAudio/African/men/id00076/00110_id00200_fsgan.mp4"
    touch(tmp_path, name)
    listing = read_corpus(tmp_path)
    assert any("men/id00076/gone.mp4'" in note for note in listing.notes)
    assert listing.rejected.select("path", "reason").rows() == [(name, "not_listed")]
    assert {entry.generator for entry in listing.entries} == {"faceswap", None}


URLS = [
    ("https://www.youtube.com/watch?v=-J_x2Y7mbln", ("youtube", "-J_x2Y7mbln")),
    (" https://m.youtube.com/watch?v=AEPvSo8bE2I#x ", ("youtube", "AEPvSo8bE2I")),
    ("https://youtu.be/AEPvSo8bE2I?t=3", ("youtube", "AEPvSo8bE2I")),
    ("https://www.youtube.com/shorts/AEPvSo8bE2I/", ("youtube", "AEPvSo8bE2I")),
    ("www.youtube.com/v/AEPvSo8bE2I", ("youtube", "AEPvSo8bE2I")),
    ("https://www.facebook.com/some.page/videos/1542574069191584/", ("facebook", "1542574069191584")),
    ("https://www.facebook.com/page/videos/vb.100/1542574069191584/?type=3", ("facebook", "1542574069191584")),
    ("https://www.facebook.com/video.php?v=1542574069191584", ("facebook", "1542574069191584")),
    ("https://fb.watch/abc_-9/", ("facebook", "abc_-9")),
    ("https://twitter.com/user/status/123456789", ("twitter", "123456789")),
    ("https://mobile.twitter.com/user/status/123456789/video/1", ("twitter", "123456789")),
    ("https://x.com/i/status/123456789?s=20", ("twitter", "123456789")),
    ("https://vimeo.com/12345", None),
    ("https://notyoutube.com/watch?v=AEPvSo8bE2I", None),
    ("https://www.youtube.com/watch?v=../../etc/passwd", None),
    ("https://www.youtube.com/watch?v=", None),
    ("https://www.facebook.com/page", None),
    ("http://[broken", None),
]


def test_videos_are_known_by_their_urls() -> None:
    assert [(url, parse_video_url(url)) for url, _ in URLS] == URLS


def write_tables(folder: Path, seeds: str, duplicates: str) -> Path:
    (folder / "videos").mkdir(parents=True)
    (folder / "FVC.csv").write_bytes(f"cascade_id,video_url,label\n{seeds}".encode())
    (folder / "FVC_dup.csv").write_bytes(f"cascade_id,video_url,label\n{duplicates}".replace("\n", "\r\n").encode())
    return folder


YOUTUBE = "https://www.youtube.com/watch?v="


def test_videos_that_were_fetched_are_found_by_platform_id(tmp_path: Path) -> None:
    corpus = write_tables(
        tmp_path / "fvc",
        f"f0,{YOUTUBE}aaaaaaaaaaa,fake\nr0,{YOUTUBE}bbbbbbbbbbb,real\nr1,{YOUTUBE}BBBBBBBBBBB,real\n",
        f"f0,https://twitter.com/u/status/77,real\nf0,{YOUTUBE}ccccccccccc,debunked\n,{YOUTUBE}ddddddddddd,real\n"
        f",{YOUTUBE}eeeeeeeeeee,real\nr0,https://vimeo.com/1,real\n",
    )
    for name in (
        "aaaaaaaaaaa.mp4", "aaaaaaaaaaa.webm", "bbbbbbbbbbb.MKV", "77.mp4", "ccccccccccc.mp4", "ddddddddddd.mp4",
        "ddddddddddd.mp4.part", "ddddddddddd.f137.mp4", "eeeeeeeeeee.mp4", "unlisted.mp4", ".hidden.mp4",
    ):  # fmt: skip
        (corpus / "videos" / name).write_bytes(b"x")
    listing = read_corpus(corpus)
    assert listing.kind == "fvc2018"
    assert [(e.path, e.label, e.stated_group, e.platform, e.source_id) for e in listing.entries] == [
        ("videos/77.mp4", "real", "f0", "twitter", "77"),
        ("videos/aaaaaaaaaaa.mp4", "fake", "f0", "youtube", "aaaaaaaaaaa"),
        ("videos/bbbbbbbbbbb.MKV", "real", "r0", "youtube", "bbbbbbbbbbb"),
        ("videos/ddddddddddd.mp4", "real", None, "youtube", "ddddddddddd"),
        ("videos/eeeeeeeeeee.mp4", "real", None, "youtube", "eeeeeeeeeee"),
    ]
    assert dict(listing.rejected.select("path", "reason").iter_rows()) == {
        "videos/BBBBBBBBBBB": "missing_video",
        "videos/ccccccccccc": "label_not_used",
        "https://vimeo.com/1": "unknown_url",
        "videos/aaaaaaaaaaa.webm": "not_listed",
        "videos/ddddddddddd.mp4.part": "not_listed",
        "videos/ddddddddddd.f137.mp4": "not_listed",
        "videos/unlisted.mp4": "not_listed",
    }


def test_every_row_of_the_real_tables_is_accounted_for(shared: Path) -> None:
    listing = read_fvc2018(shared / "fvc2018")
    table = listing.annotations
    assert (table.height, table["stated_group"].n_unique(), listing.rejected.height, listing.entries) == (
        5579,
        380,
        5579,
        (),
    )
    assert set(table.null_count().row(0)) == {0}
    assert Counter(table["platform"]) == {"youtube": 3375, "facebook": 2063, "twitter": 141}
    assert Counter(table["label"]) == {"fake": 2920, "real": 2164, "uncertain": 340, "debunked": 89, "parody": 66}
    assert table.filter((pl.col("label") == "real") & pl.col("stated_group").str.starts_with("f")).height == 74
    # Labelled both fake and debunked, or real and parody: one usable row each.
    unusable = {"label_not_used": 495, "duplicate_path": 5, "conflicting_labels": 2}
    assert Counter(listing.rejected["reason"]) == {"missing_video": 5077, **unusable}
    # Cascades that share a video are one group.
    groups, merges = group_annotations(listing)
    assert len(groups) == 5572
    assert len(set(groups.values())) == 376
    assert {astuple(merge) for merge in merges} == {
        ("f138+3 more", "same_source", "CkLI6Qb4drI", "f140", "f142"),
        ("f138+3 more", "same_source", "FJcVcV46XBE", "f138", "f139"),
        ("f138+3 more", "same_source", "FJcVcV46XBE", "f138", "f140"),
        ("f144+1 more", "same_source", "CjZt_9iehWI", "f144", "f145"),
    }


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Four cascades in nine rows: one source in two of them, one label that is not used, two URLs of no video."""
    one, two, three, four, five, six = (
        f"{YOUTUBE}{name:a<11}" for name in ["one", "two", "three", "four", "five", "six"]
    )
    seeds = f"f1,{one},fake\nf2,{two},fake\nr1,{three},Real\n ,n/a,real\n"
    copies = f"f1,{four},fake\nf2,{four},fake\nr1,{five},debunked\nr2,n/a,real\n,{six},\n"
    return write_tables(tmp_path / "corpus", seeds, copies)


def test_every_row_is_kept_with_its_group_and_nothing_is_opened(corpus: Path, tmp_path: Path) -> None:
    (corpus / "videos/oneaaaaaaaa.mp4").write_bytes(b"no video")
    (corpus / "videos/fiveaaaaaaa.mp4").write_bytes(b"no video")
    indexed = index_of(corpus, tmp_path / "out", annotations_only=True)
    assert indexed.annotations.select("origin", "row", "source_id", "label", "group_id", "is_present").rows() == [
        ("FVC.csv", 1, "oneaaaaaaaa", "fake", "f1+1 more", True),
        ("FVC.csv", 2, "twoaaaaaaaa", "fake", "f1+1 more", False),
        ("FVC.csv", 3, "threeaaaaaa", "real", "r1", False),
        ("FVC.csv", 4, "FVC.csv row 4", "real", "source FVC.csv row 4", False),
        ("FVC_dup.csv", 1, "fouraaaaaaa", "fake", "f1+1 more", False),
        ("FVC_dup.csv", 2, "fouraaaaaaa", "fake", "f1+1 more", False),
        ("FVC_dup.csv", 3, "fiveaaaaaaa", "debunked", "r1", True),
        ("FVC_dup.csv", 4, "FVC_dup.csv row 4", "real", "r2", False),
        ("FVC_dup.csv", 5, "sixaaaaaaaa", None, "source sixaaaaaaaa", False),
    ]
    with pytest.raises(DataError, match="made from annotations only"):
        make_folds(indexed.index, 5, 0)
    assert indexed.group_links.rows() == [("f1+1 more", "same_source", "fouraaaaaaa", "f1", "f2")]
    assert Counter(indexed.rejected["reason"]) == {
        "missing_video": 3, "duplicate_path": 1, "label_not_used": 2, "unknown_url": 2, "not_opened": 1,
    }  # fmt: skip
    assert indexed.rejected.height == indexed.annotations.height
    assert dict(indexed.report.summary.rows())["rows of the label source"] == "9"
    with pytest.raises(DataError, match="-p annotations_only true"):
        index_of(corpus, tmp_path / "again")
    assert read_table(tmp_path / "again/annotations.parquet", ANNOTATIONS).height == 9


def test_recognising_the_group_of_the_real_tables_is_all_by_row_and_nothing_by_group(
    shared: Path, tmp_path: Path
) -> None:
    indexed = index_of(shared / "fvc2018", tmp_path, annotations_only=True)
    assert (indexed.annotations.height, indexed.index.height) == (5579, 0)
    assert set(indexed.annotations["source_id"]) == set(indexed.rejected["source_id"])
    labelled = undisputed_labels(indexed.annotations)
    assert most_folds(labelled) > 100
    folds = make_folds(labelled, 5, 0)
    aucs = []
    for dealt in (split_by_row(folds, seed=0), folds):
        oracle = group_lookup(dealt)
        aucs.append(float(within_folds(roc_auc, oracle["fold"])(fake_labels(oracle), oracle["score"].to_numpy())))
    assert aucs[0] > 0.99
    assert np.isclose(aucs[1], 0.5, atol=0.01)


def test_lists_of_deepfakebench_are_videos_of_frames_with_the_groups_of_their_corpora(tmp_path):
    def video(folder: str, label: str, number: int = 2) -> dict[str, object]:
        names = [f"{folder}/{frame:03}.png" for frame in range(number)]
        touch(tmp_path, *names)
        return {"label": label, "frames": [name.replace("/", "\\") for name in names]}

    real, fake = "FaceForensics++/original_sequences/youtube/c23/frames", "FaceForensics++/manipulated_sequences"
    one, other = video(f"{real}/000", "FF-real"), video(f"{real}/001", "FF-real")
    swap, celeb = video(f"{fake}/Deepfakes/c23/frames/000_003", "FF-DF"), "Celeb-DF-v2/Celeb"
    person = video(f"{celeb}-real/frames/id0_0000", "CelebDFv2_real")
    swapped = video(f"{celeb}-synthesis/frames/id0_id1_0000", "CelebDFv2_fake")
    unknown, empty = video("UADFV/x/frames/7", "odd"), {"label": "FF-real", "frames": []}
    content = {
        "FF": {
            "FF-real": {
                "train": {"c23": {"000": one}},
                "val": {"c23": {"001": other, "9": empty}},
                "test": {"c23": {"001": other}},
            },
            "FF-DF": {"test": {"c23": {"000_003": swap}}},
        },
        "Celeb": {"r": {"train": {"a": person}, "test": {"a": person}}, "f": {"test": {"b": swapped, "c": unknown}}},
    }
    path = text(tmp_path, "All.json", [json.dumps(content)])
    listing = read_corpus(path)
    found = {entry.path: entry for entry in listing.entries}
    assert [(found[name].label, found[name].official_split, found[name].stated_group) for name in sorted(found)] == [
        ("real", None, "celeb-df id0"),
        ("fake", "test", "celeb-df id0"),
        ("fake", "test", "ff++ sequence 000"),
        ("real", "train", "ff++ sequence 000"),
        ("real", "test", "ff++ sequence 001"),
    ]
    assert ("ff++ sequence 003",) in {entry.links for entry in listing.entries}
    assert sorted(listing.rejected["reason"]) == ["label_not_used", "not_a_file"]
    assert len(read_corpus(path, label_map={"odd": "fake"}).entries) == 6
    text(tmp_path, "bad.json", ['{"A": {"frames": 3}}'])
    with pytest.raises(DataError, match=r"bad\.json"):
        read_corpus(tmp_path / "bad.json")
