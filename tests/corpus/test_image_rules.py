from collections import Counter

import polars as pl
import pytest

from fvc_lib.corpus.corpus_files import Rejections
from fvc_lib.corpus.images import (
    learnable,
    one_of_each_content,
    wanted_targets,
    with_groups,
    without_copies_across,
)
from fvc_lib.corpus.sources.images import ListedImage
from fvc_lib.services.errors import UsageError

UNITS = {"calories": "kcal", "mass": "g", "rating": ""}


def image(path: str, group: str | None = None, part: str | None = None, label: str | None = "pie", **values):
    return ListedImage(path, label, group, part, **values)


def table(images: list[ListedImage], contents: str) -> pl.DataFrame:
    """The images as read from files of these contents; equal contents are copies."""
    content_of = dict(zip((each.path for each in images), contents, strict=True))
    frame = learnable(images, ["calories", "mass"], Rejections())
    shown = [content_of[path] for path in frame["path"]]
    return frame.with_columns(
        copy=pl.Series([ord(name) for name in shown]), content_sha256=pl.Series([name * 64 for name in shown])
    )


def test_copies_join_groups_but_not_across_an_official_split() -> None:
    images = [
        image("a", "g1"), image("b", "g1"), image("c", "g2"), image("d", "g3", "train"), image("e", "g4", "test"),
        image("f"), image("g", "g5"), image("h", "g4"), image("i"), image("j", label="soup"), image("k"),
    ]  # fmt: skip
    grouped, notes = with_groups(table(images, "12233456775"), looked_for=False)
    groups = dict(grouped.select("path", "group_id").rows())
    assert groups["a"] == groups["b"] == groups["c"]
    assert groups["e"] == groups["h"]
    assert groups["g"] == groups["k"] == "g5"  # a picture without a stated group stays with its copies
    assert groups["i"] == groups["j"]
    assert len(set(groups.values())) == 6
    assert any("4 images" in note and "near_duplicate_bits" in note for note in notes)


def test_what_looks_like_the_official_test_is_not_trained_on() -> None:
    images = [
        image("a", part="train"), image("b", part="test"), image("c", part="validation"), image("d"),
        image("e", part="train"), image("f", part="train"), image("g", part="validation"), image("h", "g", "test"),
        image("i", "g"),
    ]  # fmt: skip
    rejections = Rejections()
    grouped, _ = with_groups(table(images, "111123344"))
    assert set(without_copies_across(grouped, "known", "copy", rejections)["path"]) == set("beghi")
    assert Counter(rejections.frame()["reason"]) == {"copy_across_split": 4}


@pytest.mark.parametrize(
    ("images", "contents", "kept", "reasons"),
    [
        (  # of copies the official test image stays, then the first by path, with what any of them states
            [
                image("a", part="train"), image("b", part="test"), image("c", part="train", label=None),
                image("d", part="train", label="soup"),
                image("e", part="train", label="soup", targets={"mass": 1.0}), image("f"),
            ],
            "112223", "bdf", {"duplicate_content": 2},
        ),
        (  # copies that contradict each other are all left out
            [
                image("a"), image("b", label="soup"), image("c", label=None, targets={"calories": 1.0}),
                image("d", label=None, targets={"mass": 1.0}),
                image("e", label=None, targets={"calories": 9.0, "mass": 2.0}),
                image("f", label=None, targets={"calories": 9.0}), image("g", label=None, targets={"mass": 3.0}),
            ],
            "1112234", "fg", {"conflicting_labels": 5},
        ),
        ([image("a", row=1), image("a", row=2)], "11", "a", {"duplicate_content": 1}),
    ],
)  # fmt: skip
def test_one_image_of_each_content_stays(images, contents, kept, reasons) -> None:
    for order in (1, -1):
        rejections = Rejections()
        remaining = one_of_each_content(table(images[::order], contents[::order]), rejections)
        assert "".join(remaining["path"]) == kept
        assert remaining.filter(path="d")["value:mass"].to_list() == [1.0] * kept.count("d")
        assert Counter(rejections.frame()["reason"]) == Counter(reasons)


def test_targets_are_asked_for_by_name() -> None:
    assert wanted_targets((), UNITS) == UNITS
    assert wanted_targets(("none",), UNITS) == {}
    assert list(wanted_targets(("rating", "calories"), UNITS)) == ["rating", "calories"]
    for wanted, units in ((("none", "mass"), UNITS), (("calories_kcal",), UNITS), (("mass",), {})):
        with pytest.raises(UsageError):
            wanted_targets(wanted, units)
