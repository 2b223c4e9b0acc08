from collections import Counter
from dataclasses import astuple
from pathlib import Path

import polars as pl
import pytest

from fvc_lib.corpus.index import group_annotations
from fvc_lib.corpus.listing import read_corpus
from fvc_lib.corpus.sources.general import parse_video_url, read_fvc2018
from fvc_lib.services.errors import UsageError

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


def test_one_table_alone_or_without_its_columns_is_refused(tmp_path: Path) -> None:
    corpus = write_tables(tmp_path / "fvc", "", "")
    (corpus / "FVC_dup.csv").write_text("cascade,video_url,label\n")
    with pytest.raises(UsageError, match="wanted a column 'cascade_id', found 'cascade'"):
        read_corpus(corpus)
    (corpus / "FVC_dup.csv").unlink()
    with pytest.raises(UsageError, match=r"FVC_dup\.csv': No such file"):
        read_corpus(corpus)


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
