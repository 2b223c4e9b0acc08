"""Several corpora in one index: their names, ids and groups, and what is refused."""

from pathlib import Path

import polars as pl
import pytest

from fvc_lib.corpus.index import group_annotations
from fvc_lib.corpus.listing import Listing, read_corpora
from fvc_lib.services.atomic_files import path_from_text
from fvc_lib.services.errors import UsageError
from fvc_lib.services.tables import GROUP_LINKS, read_table
from tests.corpus.indexing import index_of
from tests.corpus.published import MINIATURES, text, touch


def groups_of(listing: Listing) -> dict[str, str]:
    return group_annotations(listing)[0]


@pytest.fixture(scope="module")
def corpora(make_video, tmp_path_factory) -> list[Path]:
    """A folder and a manifest whose first real videos are one file; a fake is a re-encoded copy of the other's."""
    folder = tmp_path_factory.mktemp("several")
    make_video(folder / "clips/real/one.mp4", 1)
    make_video(folder / "clips/fake/two.mp4", 2)
    make_video(folder / "clips/fake/three.mp4", 3)
    make_video(folder / "listed/a.mp4", 1)
    make_video(folder / "listed/b.mp4", 3, crf=30)
    make_video(folder / "listed/c.mp4", 5)
    text(folder, "listed/list.csv", ["path,label,group", "a.mp4,real,g", "b.mp4,fake,h", "c.mp4,fake,i"])
    return [folder / "clips", folder / "listed/list.csv"]


def indexed(corpora: list[Path], out: Path) -> pl.DataFrame:
    return index_of(corpora[0], out, more_corpora=list(map(str, corpora[1:]))).index


def test_several_corpora_are_one_index_in_any_order(corpora, tmp_path):
    index = indexed(corpora, tmp_path)
    assert indexed(corpora[::-1], tmp_path).equals(index)
    assert dict(index.select("path", "corpus").iter_rows()) == {
        "clips/real/one.mp4": "clips", "clips/fake/two.mp4": "clips", "clips/fake/three.mp4": "clips",
        "list/a.mp4": "list", "list/b.mp4": "list", "list/c.mp4": "list",
    }  # fmt: skip
    assert dict(index.group_by("corpus").agg(pl.col("label_source").unique().first()).iter_rows()) == {
        "clips": "folder", "list": "manifest",
    }  # fmt: skip
    ids = dict(index.select("path", "video_id").iter_rows())
    shared = ids["clips/real/one.mp4"].removesuffix("-clips")
    assert len(shared) == 16
    assert ids["list/a.mp4"] == f"{shared}-list"
    alone = dict(indexed(corpora[:1], tmp_path / "alone").select("path", "video_id").iter_rows())
    assert alone["real/one.mp4"] == shared
    assert alone["fake/two.mp4"] == ids["clips/fake/two.mp4"]  # no other corpus has it: its id stays
    group = dict(index.select("path", "group_id").iter_rows())
    assert group["clips/real/one.mp4"] == group["list/a.mp4"]  # one content
    assert group["clips/fake/three.mp4"] == group["list/b.mp4"]  # looks alike
    assert len(set(group.values())) == 4
    why = dict(read_table(tmp_path / "group_links.parquet", GROUP_LINKS).select("group_id", "why").iter_rows())
    assert why == {"list: g": "same_content", "list: h": "near_duplicate"}
    root = read_corpora(corpora, tmp_path / "index").root
    assert all((root / path_from_text(path)).is_file() for path in index["path"])


def test_what_is_known_of_a_corpus_is_known_of_it_among_others(corpora, tmp_path):
    indexed(corpora[:1], tmp_path)
    indexes = index_of(corpora[1], tmp_path, more_corpora=[str(corpora[0])])
    assert (indexes.report.num_known, indexes.index.height) == (3, 6)


def test_deeperforensics_joins_the_sequences_of_faceforensics_and_dfd_is_a_corpus_of_its_own(tmp_path):
    MINIATURES["faceforensics"](tmp_path / "ff")
    MINIATURES["dfd"](tmp_path / "ff")
    MINIATURES["deeperforensics"](tmp_path / "deeper")
    listing = read_corpora([tmp_path / "deeper", tmp_path / "ff"], tmp_path / "links")
    groups = groups_of(listing)
    original = groups["FaceForensics++/original_sequences/youtube/c23/videos/000.mp4"]
    assert groups["DeeperForensics/manipulated_videos/end_to_end/000_M101.mp4"] == original
    assert {entry.corpus for entry in listing.entries} == {"FaceForensics++", "DFD", "DeeperForensics"}


def test_two_corpora_of_one_name_are_told_apart_by_their_paths_in_any_order(tmp_path):
    for above in ("c23", "c40"):
        touch(tmp_path, f"{above}/clips/real/a.mp4", f"{above}/clips/fake/b.mp4")
    paths = [tmp_path / "c40/clips", tmp_path / "c23/clips"]
    names = {entry.path: entry.corpus for entry in read_corpora(paths, tmp_path / "links").entries}
    assert names == {entry.path: entry.corpus for entry in read_corpora(paths[::-1], tmp_path / "links").entries}
    assert set(names.values()) == {"clips (c23 clips)", "clips (c40 clips)"}


@pytest.mark.parametrize("more", ["clips", "linked", "clips/real/inner"])
def test_corpora_that_overlap_are_refused(more, tmp_path):
    touch(
        tmp_path, "clips/real/a.mp4", "clips/fake/b.mp4", "clips/real/inner/real/a.mp4", "clips/real/inner/fake/b.mp4"
    )
    (tmp_path / "linked").symlink_to(tmp_path / "clips")
    with pytest.raises(UsageError, match=r"both list '.*b\.mp4'"):
        read_corpora([tmp_path / "clips", tmp_path / more], tmp_path / "links")


def test_files_outside_of_joined_corpora_are_found(tmp_path):
    touch(tmp_path, "far/x.mp4", "far/y.mp4", "clips/real/a.mp4")
    text(tmp_path, "listed/m.csv", ["path,label", f"{tmp_path}/far/x.mp4,real", "../far/y.mp4,fake"])
    listing = read_corpora([tmp_path / "listed/m.csv", tmp_path / "clips"], tmp_path / "links", allow_outside=True)
    assert len(listing.entries) == 3
    assert all((listing.root / path_from_text(entry.path)).is_file() for entry in listing.entries)
