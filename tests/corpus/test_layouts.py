"""Folders as people have them: read by the layout that they have, or refused with the path that would work."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from fvc_lib.corpus.listing import Listing, read_corpus
from fvc_lib.services.errors import UsageError
from tests.corpus.published import MINIATURES, text, touch

DFDC_ROWS = {"a.mp4": {"label": "REAL", "split": "train"}, "b.mp4": {"label": "FAKE", "original": "a.mp4"}}


def counted(listing: Listing) -> Counter[tuple[str | None, str | None]]:
    return Counter((entry.label, entry.official_split) for entry in listing.entries)


@pytest.mark.parametrize("spelt", [str, int], ids=["unpadded text", "integers"])
def test_lists_of_faceforensics_match_however_their_ids_are_written(tmp_path, spelt):
    MINIATURES["faceforensics"](tmp_path)
    for part, pairs in {"train": [["000", "001"]], "val": [], "test": [["002", "003"]]}.items():
        written = [[spelt(int(each)) for each in pair] for pair in pairs]
        text(tmp_path, f"splits/{part}.json", [json.dumps(written)])
    ids = {str(number): f"{'ab'[number % 2] * 11} {number}" for number in range(4)}
    text(tmp_path, "conversion_dict.json", [json.dumps(ids)])
    listing = read_corpus(tmp_path)
    assert Counter(entry.official_split for entry in listing.entries) == {"train": 4, "test": 4}
    assert {link for entry in listing.entries for link in entry.links} >= {f"youtube {'a' * 11}", f"youtube {'b' * 11}"}


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
    assert (listing.kind, counted(listing)) == (kind, counts)


def refused(path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        read_corpus(path)
    assert caught.value.exit_code == 2
    return str(caught.value)


def meant(message: str) -> list[str]:
    """The paths that a refusal proposes."""
    return re.findall("'([^']+)'", message.partition("Did you mean ")[2].partition("?")[0])


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
    paths = meant(refused(tmp_path / given))
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
    message = refused(tmp_path)
    assert "DFDC" not in message
    assert "'real/' and 'fake/'" in message
