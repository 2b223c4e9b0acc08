import os
from pathlib import Path

import pytest

from fvc_lib.corpus.video_texts import PairListing, read_pairs


def touch(root: Path, *names: str | bytes) -> None:
    for name in names:
        path = root / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def manifest_of(folder: Path, content: str | bytes, name: str = "manifest.csv") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def pairs(listing: PairListing) -> list[tuple[str, str]]:
    return listing.rows.select("path", "text").rows()


def reasons(listing: PairListing) -> list[tuple[int | None, str, str]]:
    return [(row[2], row[0], row[4]) for row in listing.rejections.rows]


@pytest.mark.parametrize(
    ("separator", "content"),
    [
        (",", 'path,text\na.mp4,"one, two"\nb.mp4,three\n'),
        ("\\t", "path\ttext\na.mp4\tone, two\nb.mp4\tthree\n"),
        ("|", "path | text\n a.mp4 | one, two\nb.mp4 |three\n"),
        ("|||", "path ||| text\na.mp4 ||| one, two\n\nb.mp4|||three\n"),
        ("αβ", "pathαβtext\na.mp4αβone, two\nb.mp4αβthree\n"),
    ],
)
def test_any_separator_separates(separator, content, tmp_path):
    touch(tmp_path, "a.mp4", "b.mp4")
    listing = read_pairs(manifest_of(tmp_path, content.encode("utf-8-sig"), "list.txt"), separator)
    assert pairs(listing) == [("a.mp4", "one, two"), ("b.mp4", "three")]
    assert listing.rows["row"].to_list() == [1, 2]
    assert listing.root == tmp_path


def test_rows_that_cannot_be_used_are_named_with_their_row(tmp_path):
    corpus = tmp_path / "corpus"
    touch(corpus, "a.mp4", b"\xff.mp4", "sub/b.mp4")
    touch(tmp_path, "secret.mp4")
    (corpus / "link.mp4").symlink_to(tmp_path / "secret.mp4")
    lines = [
        b"path,text,split,group",
        b"a.mp4,fine,,",
        b"gone.mp4,x,,",
        b"../secret.mp4,x,,",
        b"link.mp4,x,,",
        b"/etc/passwd,x,,",
        b"sub,x,,",
        b",x,,",
        b"a.mp4, \t ,,",
        b"a.mp4,bad \xff bytes,,",
        b"a.mp4,x,holdout,",
        b"a.mp4,x",
        b"\xff.mp4,odd name,TEST,g\xff",
        f"{corpus}/sub/b.mp4, absolute ,Val,".encode(),
    ]
    listing = read_pairs(manifest_of(corpus, b"\n".join(lines)), ",")
    assert listing.rows.rows() == [
        (1, "a.mp4", "fine", None, None),
        (12, "\\xff.mp4", "odd name", "test", "g\\xff"),
        (13, "sub/b.mp4", "absolute", "validation", None),
    ]
    assert reasons(listing) == [
        (2, "gone.mp4", "missing_video"),
        (3, "../secret.mp4", "outside_corpus"),
        (4, "link.mp4", "outside_corpus"),
        (5, "/etc/passwd", "outside_corpus"),
        (6, "sub", "not_a_file"),
        (7, "", "no_path"),
        (8, "a.mp4", "no_text"),
        (9, "a.mp4", "malformed_row"),
        (10, "a.mp4", "unknown_split"),
        (11, "", "malformed_row"),
    ]
    assert all(f"manifest.csv row {row[2]}: " in row[5] for row in listing.rejections.rows)
