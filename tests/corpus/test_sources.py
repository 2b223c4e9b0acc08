"""Label folders, manifests and several corpora: what is read, and what is refused."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from fvc_lib.corpus import label_table
from fvc_lib.corpus.index import group_annotations
from fvc_lib.corpus.listing import read_corpora, read_corpus
from fvc_lib.services.atomic_files import path_from_text
from fvc_lib.services.errors import DataError, UsageError
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.tables import GROUP_LINKS, read_table
from tests.corpus.indexing import index_of
from tests.corpus.published import MINIATURES, text, touch


def write_csv(path: Path, *rows: tuple[str, ...]) -> Path:
    return text(path.parent, path.name, [",".join(row) for row in rows])


def test_links_out_of_the_corpus_are_refused_by_name(tmp_path: Path) -> None:
    touch(tmp_path, "outside/secret.mp4", "corpus/real/a.mp4", "corpus/fake/b.mp4", "corpus/more/c.mp4")
    corpus = tmp_path / "corpus"
    (corpus / "real/link.mp4").symlink_to(tmp_path / "outside/secret.mp4")
    (corpus / "real/folder").symlink_to(tmp_path / "outside")
    (corpus / "fake/more").symlink_to(corpus / "more")
    (corpus / "fake/circle").symlink_to(corpus / "fake")
    (corpus / "fake/self.mp4").symlink_to(corpus / "fake/self.mp4")
    (corpus / "fake/inside.mp4").symlink_to(corpus / "more/c.mp4")
    listing = read_corpus(corpus)
    assert [entry.path for entry in listing.entries] == ["fake/b.mp4", "fake/inside.mp4", "real/a.mp4"]
    assert dict(listing.rejected.select("path", "reason").iter_rows()) == {
        "real/link.mp4": "outside_corpus",
        "real/folder": "linked_folder",
        "fake/more": "linked_folder",
        "fake/circle": "linked_folder",
        "fake/self.mp4": "missing_video",
    }


def test_reads_rows_with_optional_columns(tmp_path: Path) -> None:
    touch(tmp_path, "a.mp4", "sub/b.mp4")
    manifest = write_csv(
        tmp_path / "m.csv",
        ("ignored", "path", "label", "group", "manipulation", "platform"),
        ("1", "a.mp4", " Real ", "g1", "", "youtube"),
        ("2", "./sub//b.mp4", "FAKE", "", "splice", "NaN"),
    )
    assert [
        (e.path, e.label, e.stated_group, e.manipulation, e.platform, e.row) for e in read_corpus(manifest).entries
    ] == [
        ("a.mp4", "real", "g1", None, "youtube", 1),
        ("sub/b.mp4", "fake", None, "splice", None, 2),
    ]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (("file", "label"), "wanted a column 'path' or 'video_path', found 'file', 'label'"),
        (("path", "lable"), "found 'path', 'lable'. Did you mean 'lable'"),
        (("path", "video_path", "label"), "mean the same"),
        (("path", "path", "label"), "exists twice"),
        (("path|label",), "found 'path|label'.*comma, semicolon or tab"),
        (
            ("path", "label", "Split"),
            "column of the split has 1 x 'x'; wanted one of train, .*, or nothing.*'my_split'",
        ),
        (("path", "label", "Manipulaton"), "'Manipulaton' is not known. Did you mean 'manipulation'"),
        (("path", "label", "grup"), "'grup' is not known. Did you mean 'group'"),
        (("", ""), "is empty"),
    ],
)
def test_bad_headers(tmp_path: Path, header: tuple[str, ...], message: str) -> None:
    manifest = write_csv(tmp_path / "m.csv", header, tuple("x" for _ in header))
    with pytest.raises(UsageError, match=message):
        read_corpus(manifest)


def test_a_split_is_the_official_one(tmp_path: Path) -> None:
    said = {"Train": "train", "training": "train", "val": "validation", "dev": "validation", " TEST ": "test",
            "": None}  # fmt: skip
    names = [f"{number}.mp4" for number in range(len(said))]
    touch(tmp_path, *names)
    rows = [(name, "real", part) for name, part in zip(names, said, strict=True)]
    entries = read_corpus(write_csv(tmp_path / "m.csv", ("path", "label", "Split"), *rows)).entries
    assert [entry.official_split for entry in entries] == list(said.values())
    assert {entry.attributes for entry in entries} == {None}


def test_no_usable_label_at_all_is_an_error_with_the_labels_found(tmp_path: Path) -> None:
    manifest = write_csv(tmp_path / "m.csv", ("path", "label"), ("a.mp4", "1"), ("b.mp4", "0"), ("c.mp4", "0"))
    with pytest.raises(DataError, match=r"2 x '0', 1 x '1'.*label_map 1=fake,0=real") as caught:
        read_corpus(manifest)
    touch(tmp_path, "a.mp4", "b.mp4", "c.mp4")
    label_map = resolve_config({"label_map": str(caught.value).rpartition("label_map ")[2].rstrip(".")}).label_map
    listing = read_corpus(manifest, label_map=label_map)
    assert [entry.label for entry in listing.entries] == ["fake", "real", "real"]
    assert read_corpus(manifest, label_map={"1": "fake"}).rejected["reason"].to_list() == ["label_not_used"] * 2
    with pytest.raises(DataError, match="no data row"):
        read_corpus(write_csv(tmp_path / "empty.csv", ("path", "label")))


def test_a_table_with_other_headers_is_read_by_the_columns_that_are_named(tmp_path: Path) -> None:
    touch(tmp_path, "a.mp4", "b.mp4", "c.mp4")
    header = ("File", "path", "is_fake", "target", "Subject")
    rows = [("a.mp4", "0", "FALSE", "0", "g"), ("b.mp4", "1", "true", "1", "h"), ("c.mp4", "1", "1", "1", "h")]
    manifest = write_csv(tmp_path / "m.csv", header, *rows)
    given = {"columns": "path=file,label=Is_Fake,group=subject"}
    listing = read_corpus(manifest, columns=resolve_config(given).columns)
    assert [(entry.path, entry.label, entry.stated_group) for entry in listing.entries] == [
        ("a.mp4", "real", "g"), ("b.mp4", "fake", "h"), ("c.mp4", "fake", "h"),
    ]  # fmt: skip
    turned = read_corpus(manifest, columns={"path": "file", "label": "is_fake"}, label_map={"1": "real"})
    assert turned.entries[-1].label == "real", "what the user says counts more than the column's name"
    for columns, error, message in (
        ({"path": "file", "label": "target"}, DataError, r"m\.csv, column 'target'.*2 x '1', 1 x '0'.*label_map"),
        ({"path": "file", "label": "targt"}, UsageError, r"m\.csv: no column 'targt' for 'label'.*Did you mean"),
        ({"file": "path"}, UsageError, "'file' is not read; .*Names that are read: .*'label'"),
        ({"path": "file", "group": "file"}, UsageError, "another column"),
    ):
        with pytest.raises(error, match=message):
            read_corpus(manifest, columns=columns)


def test_the_videos_of_a_case_are_of_one_group_and_have_one_label(tmp_path: Path) -> None:
    touch(tmp_path, *(f"{name}.mp4" for name in "abcd"))
    header = ("path", "label", "group", "case")
    rows = [
        ("a.mp4", "fake", "g", "1"),
        ("b.mp4", "fake", "h", "1"),
        ("c.mp4", "real", "", "2"),
        ("d.mp4", "real", "", ""),
    ]
    listing = read_corpus(write_csv(tmp_path / "m.csv", header, *rows))
    group_of, _ = group_annotations(listing)
    groups = [group_of[f"{name}.mp4"] for name in "abcd"]
    assert groups[0] == groups[1]
    assert len(set(groups)) == 3
    cases = [json.loads(entry.attributes or "{}").get("case") for entry in listing.entries]
    assert cases == ["1", "1", "2", None]
    with pytest.raises(DataError, match=r"m\.csv: 'case 1' has real and fake"):
        read_corpus(write_csv(tmp_path / "m.csv", header, *rows, ("d.mp4", "real", "", "1")))


def test_a_manifest_next_to_label_folders_is_pointed_out_and_a_table_in_another_encoding_is_named(
    tmp_path: Path,
) -> None:
    touch(tmp_path, "real/ü.mp4", "fake/b.mp4")
    manifest = tmp_path / "manifest.csv"
    assert read_corpus(tmp_path).notes == ()
    manifest.write_bytes("path,label\nreal/ü.mp4,real\nfake/b.mp4,fake\n".encode("latin-1"))
    assert [note.split()[:1] for note in read_corpus(tmp_path).notes] == [["manifest.csv"]]
    (detail,) = read_corpus(manifest).rejected["detail"]
    assert "save the table as UTF-8" in detail


@pytest.mark.fault(35)
def test_paths_out_of_the_corpus_are_refused_with_their_row(tmp_path: Path) -> None:
    touch(tmp_path, "outside.mp4", "corpus/in.mp4", "corpus/sub/deep.mp4")
    corpus = tmp_path / "corpus"
    (corpus / "link.mp4").symlink_to(tmp_path / "outside.mp4")
    (corpus / "up").symlink_to(tmp_path)
    paths = [
        "../outside.mp4", str(tmp_path / "outside.mp4"), "link.mp4", "up/outside.mp4", "sub/../../outside.mp4",
        "../corpus/in.mp4", "sub/../in.mp4", str(corpus / "sub/deep.mp4"), "~/x.mp4", "",
    ]  # fmt: skip
    listing = read_corpus(write_csv(corpus / "m.csv", ("path", "label"), *((path, "real") for path in paths)))
    assert [entry.path for entry in listing.entries] == ["in.mp4", "sub/deep.mp4"]
    by_row = dict(listing.rejected.select("row", "reason").iter_rows())
    assert by_row == dict.fromkeys(range(1, 7), "outside_corpus") | {9: "missing_video", 10: "no_path"}


def test_paths_out_of_the_corpus_and_links_are_read_where_that_is_allowed(tmp_path: Path) -> None:
    touch(tmp_path, "elsewhere/a.mp4", "elsewhere/b.mp4", "elsewhere/c.mp4", "corpus/in.mp4")
    corpus, elsewhere = tmp_path / "corpus", tmp_path / "elsewhere"
    (corpus / "link.mp4").symlink_to(elsewhere / "a.mp4")
    paths = ["../elsewhere/b.mp4", str(elsewhere / "c.mp4"), "link.mp4", str(corpus / "in.mp4"), "../gone.mp4"]
    manifest = write_csv(corpus / "m.csv", ("path", "label"), *((path, "real") for path in paths))
    listing = read_corpus(manifest, allow_outside=True)
    assert {entry.path for entry in listing.entries} == {paths[0], paths[1], "link.mp4", "in.mp4"}
    assert all((listing.root / path_from_text(entry.path)).read_bytes() == b"x" for entry in listing.entries)
    assert dict(listing.rejected.select("path", "reason").iter_rows()) == {"../gone.mp4": "missing_video"}


@pytest.mark.parametrize(
    ("separator", "encoding", "suffix"),
    [(",", "utf-8-sig", "csv"), (";", "utf-16", "csv"), ("\t", "utf-16-be-bom", "tsv")],
)
def test_separator_and_encoding_are_recognised(tmp_path: Path, separator: str, encoding: str, suffix: str) -> None:
    touch(tmp_path, "é.mp4")
    text = f"path{separator}label{separator}manipulation\r\né.mp4{separator}fake{separator}a b\r\n"
    coded = b"\xfe\xff" + text.encode("utf-16-be") if encoding == "utf-16-be-bom" else text.encode(encoding)
    (tmp_path / f"m.{suffix}").write_bytes(coded)
    (entry,) = read_corpus(tmp_path / f"m.{suffix}").entries
    assert (entry.path, entry.label, entry.manipulation) == ("é.mp4", "fake", "a b")


def test_duplicates_and_conflicts(tmp_path: Path) -> None:
    touch(tmp_path, "a.mp4", "b.mp4")
    rows = [
        ("a.mp4", "real", "g1"), ("./a.mp4", "real", "g2"), ("b.mp4", "real", ""), ("b.mp4", "fake", ""),
        ("gone.mp4", "fake", ""), ("gone.mp4", "fake", ""),
    ]  # fmt: skip
    listing = read_corpus(write_csv(tmp_path / "m.csv", ("path", "label", "group"), *rows))
    assert [entry.path for entry in listing.entries] == ["a.mp4"]
    assert dict(listing.rejected.select("row", "reason").iter_rows()) == {
        2: "duplicate_path",
        3: "conflicting_labels",
        4: "conflicting_labels",
        5: "missing_video",
        6: "duplicate_path",
    }
    assert listing.memberships == (("a.mp4", "g1"), ("a.mp4", "g2"))


def test_parquet(tmp_path: Path) -> None:
    touch(tmp_path, "a.mp4", "b.mp4", "c.mp4")
    frame = pl.DataFrame(
        {
            "video_path": [b"a.mp4", b"b.mp4", b"c.mp4"],
            "label": ["real", None, "Fake"],
            "group": [7.0, 7.0, float("nan")],
        },
        schema_overrides={"label": pl.Categorical},
    )
    frame.write_parquet(tmp_path / "m.parquet")
    listing = read_corpus(tmp_path / "m.parquet")
    assert [(e.path, e.label, e.stated_group) for e in listing.entries] == [
        ("a.mp4", "real", "7.0"),
        ("c.mp4", "fake", None),
    ]
    (tmp_path / "bad.parquet").write_bytes(b"path,label\n")
    with pytest.raises(UsageError, match="not a Parquet table"):
        read_corpus(tmp_path / "bad.parquet")


def test_a_parquet_file_that_unpacks_to_far_more_than_it_is_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(label_table, "_MOST_CELL_BYTES", 1 << 20)
    path = tmp_path / "bomb.parquet"
    for paths in (["x" * 40_000] * 90, ["x" * 4_000_000]):
        pl.DataFrame({"path": paths, "label": "real"}).write_parquet(path)
        with pytest.raises(UsageError, match=r"bomb\.parquet: its cells take more than"):
            read_corpus(path)


DFDC_ROWS = {"a.mp4": {"label": "REAL", "split": "train"}, "b.mp4": {"label": "FAKE", "original": "a.mp4"}}


def labelled(root: Path, *folders: str) -> None:
    touch(root, *(f"{folder}/{number}.mp4" for folder in folders for number in range(2)))


def made(*folders: str, files: tuple[str, ...] = (), **tables: object) -> Callable[[Path], None]:
    """Return what makes folders of two videos each, other files, and tables of JSON by their name without ending."""

    def make(root: Path) -> None:
        labelled(root, *folders)
        touch(root, *files)
        for name, content in tables.items():
            text(root, f"{name}.json", [json.dumps(content)])

    return make


IN_PARTS = made("train/real", "train/fake", "val/real", "val/fake", "test/real", "test/fake")
SIX = {(label, part): 2 for label in ("real", "fake") for part in ("train", "validation", "test")}
FOUR = {("real", None): 2, ("fake", None): 2}


@pytest.mark.parametrize(
    ("make", "kind", "counts"),
    [
        (IN_PARTS, "folder", SIX),
        (made("0_real", "1_fake"), "folder", FOUR),
        (
            made("Train/0_Real", "Train/1_Fake", "Test/0_Real", "Test/1_Fake"), "folder",
            {pair: 2 for pair in SIX if pair[1] != "validation"},
        ),
        (made("real", "fake", metadata={"name": "street scenes", "clips": 4}), "folder", FOUR),
        (made("real", "fake", metadata=DFDC_ROWS), "folder", FOUR),
        (made("real", "fake", dataset={"version": 2}), "folder", FOUR),
        (made("Real", "FAKE", files=("masks/0.png", "train/readme.txt", "license.txt")), "folder", FOUR),
        (
            made("real/train", "real/test", "fake/train", "fake/test"), "folder",
            {(label, None): 4 for label in ("real", "fake")},
        ),
        (made(files=tuple(DFDC_ROWS), metadata=DFDC_ROWS), "dfdc", {("real", "train"): 1, ("fake", "train"): 1}),
    ],
)  # fmt: skip
def test_a_layout_is_recognised_by_what_it_holds(
    make: Callable[[Path], None], kind: str, counts: dict[tuple[str, str | None], int], tmp_path: Path
) -> None:
    make(tmp_path)
    listing = read_corpus(tmp_path)
    assert (listing.kind, Counter((entry.label, entry.official_split) for entry in listing.entries)) == (kind, counts)


@pytest.mark.parametrize(
    ("make", "given", "works"),
    [
        (lambda root: labelled(root, "outer/real", "outer/fake"), "", ["outer"]),
        (lambda root: MINIATURES["celeb_df"](root / "Celeb-DF-v2"), "", ["Celeb-DF-v2"]),
        (lambda root: MINIATURES["faceforensics"](root / "zip/FaceForensics++"), "", ["zip/FaceForensics++"]),
        (lambda root: labelled(root, "download/a/0_real", "download/a/1_fake"), "", ["download/a"]),
        (lambda root: labelled(root, "a/real", "a/fake", "b/train/real", "b/train/fake"), "", ["a", "b"]),
        (lambda root: labelled(root, "real", "fake"), "real", [""]),
        (IN_PARTS, "test/fake", ["test"]),
        (lambda root: text(root, "files/labels.csv", ["path,label", "a.mp4,real"]), "files", ["files/labels.csv"]),
    ],
)
def test_one_folder_too_high_or_too_low_is_refused_with_the_path_that_works(make, given, works, tmp_path):
    make(tmp_path)
    with pytest.raises(UsageError) as caught:
        read_corpus(tmp_path / given)
    paths = re.findall("'([^']+)'", str(caught.value).partition("Did you mean ")[2].partition("?")[0])
    assert paths == [str(tmp_path / each) for each in works]
    for path in paths:
        read_corpus(path)


@pytest.mark.parametrize(
    "make",
    [
        made(files=("a.mp4", "b.mp4"), metadata={"name": "holiday"}),
        lambda root: (touch(root, "a.mp4", "b.mp4"), text(root, "metadata.json", ["{"])),
        made(files=("clips/a.mp4",), dataset={"splits": []}),
        made(files=("original/000.mp4", "Deepfakes/000_001.mp4")),
        made(files=("a.png", "b.png")),
    ],
)
def test_what_says_nothing_of_labels_is_refused_with_the_accepted_shapes(make, tmp_path):
    make(tmp_path)
    with pytest.raises(UsageError, match="'real/' and 'fake/'") as caught:
        read_corpus(tmp_path)
    assert (caught.value.exit_code, "DFDC" in str(caught.value)) == (2, False)


@pytest.fixture(scope="module")
def corpora(make_video, tmp_path_factory) -> list[Path]:
    """A folder and a manifest whose first real videos are one file; a fake is a re-encoded copy of the other's."""
    folder = tmp_path_factory.mktemp("several")
    seeds = {
        "clips/real/one": 1,
        "clips/fake/two": 2,
        "clips/fake/three": 3,
        "listed/a": 1,
        "listed/b": 3,
        "listed/c": 5,
    }
    for name, seed in seeds.items():
        make_video(folder / f"{name}.mp4", seed, **({"crf": 30} if name == "listed/b" else {}))
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
    assert index_of(corpora[1], tmp_path / "alone", more_corpora=[str(corpora[0])]).report.num_known == 3
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


def test_deeperforensics_joins_the_sequences_of_faceforensics_and_dfd_is_a_corpus_of_its_own(tmp_path):
    MINIATURES["faceforensics"](tmp_path / "ff")
    MINIATURES["dfd"](tmp_path / "ff")
    MINIATURES["deeperforensics"](tmp_path / "deeper")
    listing = read_corpora([tmp_path / "deeper", tmp_path / "ff"], tmp_path / "links")
    groups = group_annotations(listing)[0]
    original = groups["FaceForensics++/original_sequences/youtube/c23/videos/000.mp4"]
    assert groups["DeeperForensics/manipulated_videos/end_to_end/000_M101.mp4"] == original
    assert {entry.corpus for entry in listing.entries} == {"FaceForensics++", "DFD", "DeeperForensics"}


def test_two_corpora_of_one_name_are_refused_and_a_link_names_one_of_them(tmp_path):
    paths = [tmp_path / "c40/clips", tmp_path / "c23/clips"]
    for path in paths:
        labelled(path, "real", "fake")
    with pytest.raises(UsageError, match="'clips', 'clips', wanted different ones"):
        read_corpora(paths, tmp_path / "links")
    (tmp_path / "other").symlink_to(paths[1])
    entries = read_corpora([paths[0], tmp_path / "other"], tmp_path / "links").entries
    assert {entry.corpus for entry in entries} == {"clips", "other"}


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
