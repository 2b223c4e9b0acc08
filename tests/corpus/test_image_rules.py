from collections import Counter

import pytest

from fvc_lib.corpus.corpus_files import Rejections
from fvc_lib.corpus.images import (
    groups_of_images,
    joined_units,
    known_parts,
    settle_contents,
    strata_of,
    wanted_targets,
    without_copies_across,
)
from fvc_lib.corpus.sources.images import ImageListing, ListedImage
from fvc_lib.services.errors import UsageError

UNITS = {"calories": "kcal", "mass": "g", "rating": ""}


def copies(paths: str, sets: str) -> dict[str, str]:
    return {path: name * 64 for path, name in zip(paths, sets, strict=True)}


def image(path: str, group: str | None = None, part: str | None = None, label: str | None = "pie", **values):
    return ListedImage(path, "manifest", label, group, part, **values)


def test_pictures_without_a_stated_group_stay_with_their_copies_and_with_the_groups_of_those() -> None:
    images = [image("a"), image("b", label="soup"), image("c", "dish"), image("d"), image("e", "dish"), image("f")]
    groups, notes = groups_of_images(images, copies("abcdef", "112234"))
    assert groups["a"] == groups["b"] == f"image {'1' * 16}"
    assert groups["c"] == groups["d"] == groups["e"] == "dish"
    assert groups["f"] == f"image {'4' * 16}"
    assert "4 of 6" in notes[0]
    assert len(groups_of_images(images, copies("abcdef", "123456"), looked_for=False)[1]) == 1


def test_stated_groups_that_share_a_copy_are_one_group_but_not_across_an_official_split() -> None:
    images = [
        image("a", "g1"), image("b", "g1"), image("c", "g2"), image("d", "g3", "train"), image("e", "g4", "test"),
        image("f"), image("g", "g5"), image("h", "g4"),
    ]  # fmt: skip
    of = copies("abcdefgh", "12233456")
    groups, notes = groups_of_images(images, of)
    assert groups["a"] == groups["b"] == groups["c"]
    assert groups["e"] == groups["h"]
    assert len(set(groups.values())) == 5
    assert groups_of_images(images[::-1], of) == (groups, notes)
    of_two = [image("a", "g1", corpus="one"), image("b", "g2", corpus="two")]
    assert len(set(groups_of_images(of_two, copies("ab", "11"))[0].values())) == 2


def test_what_looks_like_the_official_test_is_not_trained_on() -> None:
    images = [
        image("a", part="train"), image("b", part="test"), image("c", part="validation"), image("d"),
        image("e", part="train"), image("f", part="train"), image("g", part="validation"), image("h", "g", "test"),
        image("i", "g"),
    ]  # fmt: skip
    for rows in (images, images[::-1]):
        rejections = Rejections()
        places = without_copies_across(rows, known_parts(rows), copies("abcdefghi", "111123344"), rejections)
        assert {rows[place].path for place in places} == set("beghi")
        assert Counter(rejections.frame()["reason"]) == {"copy_across_split": 4}


@pytest.mark.parametrize(
    ("images", "contents", "kept", "reasons"),
    [
        (  # of copies the official test image stays, then the one that says most
            [
                image("a", part="train"), image("b", part="test"), image("c", part="train", label=None),
                image("d", part="train", label="soup"),
                image("e", part="train", label="soup", targets=(("mass", 1.0),)), image("f"),
            ],
            "112223", "bef", {"copy_across_split": 1, "duplicate_content": 2},
        ),
        (  # copies that contradict each other are all left out
            [
                image("a"), image("b", label="soup"), image("c", label=None),
                image("d", label=None, targets=(("mass", 1.0),)),
                image("e", label=None, targets=(("calories", 9.0), ("mass", 2.0))),
                image("f", label=None, targets=(("calories", 9.0),)), image("g", label=None, targets=(("mass", 3.0),)),
            ],
            "1112234", "fg", {"conflicting_labels": 3, "conflicting_targets": 2},
        ),
        ([image("a", row=1), image("a", row=2)], "11", "a", {"duplicate_content": 1}),
    ],
)  # fmt: skip
def test_one_image_of_each_content_stays(images, contents, kept, reasons) -> None:
    of = dict(zip((each.path for each in images), contents, strict=True))
    for order in (images, images[::-1]):
        rejections = Rejections()
        assert "".join(each.path for each in settle_contents(order, of, rejections)) == kept
        assert Counter(rejections.frame()["reason"]) == reasons


def test_targets_are_asked_for_by_name_with_or_without_their_unit() -> None:
    assert wanted_targets((), UNITS) == UNITS
    assert wanted_targets(("none",), UNITS) == {}
    assert list(wanted_targets(("rating", "calories_kcal", "calories"), UNITS)) == ["rating", "calories"]
    for wanted, units in ((("none", "mass"), UNITS), (("masss",), UNITS), (("mass",), {})):
        with pytest.raises(UsageError):
            wanted_targets(wanted, units)
    with pytest.raises(UsageError, match=r"'mass'.*'g'.*'kg'"):
        joined_units([ImageListing(units={"mass": "g"}), ImageListing(units={"mass": "kg"})])


def test_images_without_a_class_are_spread_by_quarters_of_the_first_number_known() -> None:
    images = [image(f"{n}", label=None, targets=(("calories", float(n)),)) for n in range(1, 13)]
    images += [image("x", targets=(("calories", 99.0),)), image("y", label=None)]
    images += [image("z", label=None, targets=(("mass", 5.0),))]
    strata = strata_of(images, ["calories", "mass"])
    assert strata[:12] == [f"calories quarter {1 + n // 3}" for n in range(12)]
    assert strata[12:] == ["pie", None, "mass quarter 1"]
    assert strata_of(images[4:], ["calories", "mass"]) == [None] * 8 + ["pie", None, None]
