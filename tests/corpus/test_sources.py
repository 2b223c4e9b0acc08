import csv
import os
from pathlib import Path

import polars as pl
import pytest

from fvc_lib.corpus import label_table
from fvc_lib.corpus.listing import Listing, read_corpus
from fvc_lib.services.atomic_files import path_from_text
from fvc_lib.services.errors import DataError, UsageError
from fvc_lib.services.parameters import resolve_config


def touch(root: Path, *names: str | bytes) -> None:
    for name in names:
        path = root / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def write_csv(path: Path, *rows: tuple[str, ...], encoding: str = "utf-8") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding=encoding, errors="surrogateescape") as stream:
        csv.writer(stream).writerows(rows)
    return path


def reasons(listing: Listing) -> dict[str, str]:
    return dict(listing.rejected.select("path", "reason").iter_rows())


class TestFolder:
    def test_links_out_of_the_corpus_are_refused_by_name(self, tmp_path: Path) -> None:
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
        assert reasons(listing) == {
            "real/link.mp4": "outside_corpus",
            "real/folder": "linked_folder",
            "fake/more": "linked_folder",
            "fake/circle": "linked_folder",
            "fake/self.mp4": "missing_video",
        }


class TestManifest:
    def test_reads_rows_with_optional_columns(self, tmp_path: Path) -> None:
        touch(tmp_path, "a.mp4", "sub/b.mp4")
        manifest = write_csv(
            tmp_path / "m.csv",
            ("ignored", "path", "label", "group", "manipulation", "platform"),
            ("1", "a.mp4", " Real ", "g1", "", "youtube"),
            ("2", "./sub//b.mp4", "FAKE", "", "splice", "NaN"),
        )
        first, second = read_corpus(manifest).entries
        assert (first.path, first.label, first.stated_group, first.manipulation, first.platform, first.row) == (
            "a.mp4", "real", "g1", None, "youtube", 1,
        )  # fmt: skip
        assert (second.path, second.label, second.stated_group, second.manipulation, second.platform) == (
            "sub/b.mp4", "fake", None, "splice", None,
        )  # fmt: skip

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
    def test_bad_headers(self, tmp_path: Path, header: tuple[str, ...], message: str) -> None:
        manifest = write_csv(tmp_path / "m.csv", header, tuple("x" for _ in header))
        with pytest.raises(UsageError, match=message):
            read_corpus(manifest)

    def test_a_split_is_the_official_one(self, tmp_path: Path) -> None:
        said = {"Train": "train", "training": "train", "val": "validation", "dev": "validation", " TEST ": "test",
                "": None}  # fmt: skip
        names = [f"{number}.mp4" for number in range(len(said))]
        touch(tmp_path, *names)
        rows = [(name, "real", part) for name, part in zip(names, said, strict=True)]
        entries = read_corpus(write_csv(tmp_path / "m.csv", ("path", "label", "Split"), *rows)).entries
        assert [entry.official_split for entry in entries] == list(said.values())
        assert {entry.attributes for entry in entries} == {None}

    def test_no_usable_label_at_all_is_an_error_with_the_labels_found(self, tmp_path: Path) -> None:
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

    @pytest.mark.fault(35)
    def test_paths_out_of_the_corpus_are_refused_with_their_row(self, tmp_path: Path) -> None:
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

    def test_paths_out_of_the_corpus_and_links_are_read_where_that_is_allowed(self, tmp_path: Path) -> None:
        touch(tmp_path, "elsewhere/a.mp4", "elsewhere/b.mp4", "elsewhere/c.mp4", "corpus/in.mp4")
        corpus, elsewhere = tmp_path / "corpus", tmp_path / "elsewhere"
        (corpus / "link.mp4").symlink_to(elsewhere / "a.mp4")
        paths = ["../elsewhere/b.mp4", str(elsewhere / "c.mp4"), "link.mp4", str(corpus / "in.mp4"), "../gone.mp4"]
        manifest = write_csv(corpus / "m.csv", ("path", "label"), *((path, "real") for path in paths))
        listing = read_corpus(manifest, allow_outside=True)
        assert {entry.path for entry in listing.entries} == {paths[0], paths[1], "link.mp4", "in.mp4"}
        assert all((listing.root / path_from_text(entry.path)).read_bytes() == b"x" for entry in listing.entries)
        assert reasons(listing) == {"../gone.mp4": "missing_video"}

    @pytest.mark.parametrize(
        ("separator", "encoding", "suffix"),
        [(",", "utf-8-sig", "csv"), (";", "utf-16", "csv"), ("\t", "utf-16-be-bom", "tsv")],
    )
    def test_separator_and_encoding_are_recognised(
        self, tmp_path: Path, separator: str, encoding: str, suffix: str
    ) -> None:
        touch(tmp_path, "é.mp4")
        text = f"path{separator}label{separator}manipulation\r\né.mp4{separator}fake{separator}a b\r\n"
        coded = b"\xfe\xff" + text.encode("utf-16-be") if encoding == "utf-16-be-bom" else text.encode(encoding)
        (tmp_path / f"m.{suffix}").write_bytes(coded)
        (entry,) = read_corpus(tmp_path / f"m.{suffix}").entries
        assert (entry.path, entry.label, entry.manipulation) == ("é.mp4", "fake", "a b")

    def test_duplicates_and_conflicts(self, tmp_path: Path) -> None:
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

    def test_parquet(self, tmp_path: Path) -> None:
        touch(tmp_path, "a.mp4", "b.mp4", "c.mp4")
        frame = pl.DataFrame(
            {
                "video_path": ["a.mp4", "b.mp4", "c.mp4"],
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
