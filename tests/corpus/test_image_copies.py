from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from fvc_lib.corpus.image_listing import ListedImage
from fvc_lib.corpus.images import Copies, copies_among, groups_of_images, known_parts, without_copies_across
from fvc_lib.corpus.listing import Rejections
from fvc_lib.corpus.probing import ProbedImage
from fvc_lib.video.decode.still_image import ImageFacts
from tests.corpus.edited_pictures import drawn, saved_anew, signature


def copies(of: Mapping[str, str], *, looked_for: bool = True) -> Copies:
    return Copies({path: name * 64 for path, name in of.items()}, looked_for)


def image(path: str, group: str | None = None, part: str | None = None, **values: str) -> ListedImage:
    return ListedImage(path, "manifest", "pie", group, part, **values)


def left(images: list[ListedImage], of: Mapping[str, str]) -> tuple[list[str], Counter[str], list[str]]:
    """Paths that stay, reasons of the others, notes."""
    rejections = Rejections()
    places, notes = without_copies_across(images, known_parts(images), copies(of), rejections)
    assert len(places) + len(rejections.rows) == len(images)
    return [images[place].path for place in places], Counter(rejections.frame()["reason"].to_list()), notes


def test_pictures_without_a_stated_group_stay_with_their_copies_and_with_the_groups_of_those() -> None:
    images = [image("a"), image("b"), image("c", "dish"), image("d"), image("e", "dish"), image("f")]
    groups, notes = groups_of_images(images, copies(dict(zip("abcdef", "112234", strict=True))))
    assert groups["a"] == groups["b"] == f"image {'1' * 16}"
    assert groups["c"] == groups["d"] == groups["e"] == "dish"
    assert groups["f"] == f"image {'4' * 16}"
    (note,) = notes
    assert note.startswith("4 images are copies of one another or look so")
    assert note.endswith("2 sets, the largest of 2 (with 'c'). No set is divided by the split.")


def test_stated_groups_that_share_a_copy_are_one_group_but_not_across_an_official_split() -> None:
    images = [
        image("a", "g1"), image("b", "g1"), image("c", "g2"), image("d", "g3", "train"), image("e", "g4", "test"),
        image("f"), image("g", "g5"), image("h", "g4"),
    ]  # fmt: skip
    of = copies(dict(zip("abcdefgh", "12233456", strict=True)))
    groups, notes = groups_of_images(images, of)
    assert groups["a"] == groups["b"] == groups["c"]
    assert groups["e"] == groups["h"]
    assert len(set(groups.values())) == 5
    assert groups["f"] == f"image {'4' * 16}"
    assert notes[0] == "1 times two stated groups share a copy of a picture: they are one group."
    assert groups_of_images(images[::-1], of) == (groups, notes)
    assert groups_of_images(images[:2], of) == (
        {"a": "g1", "b": "g1"}, ["No two of 2 images are copies of one another."]
    )  # fmt: skip
    of_two = [image("a", "g1", corpus="one"), image("b", "g2", corpus="two")]
    assert len(set(groups_of_images(of_two, copies({"a": "1", "b": "1"}))[0].values())) == 2


def test_where_copies_were_not_looked_for_it_is_said() -> None:
    _, notes = groups_of_images([image("a"), image("b", "g")], copies({"a": "1", "b": "2"}, looked_for=False))
    assert len(notes) == 1
    assert notes[0].startswith("1 images have no stated group and stay together only with equal files")


def test_a_set_of_more_than_one_class_is_named() -> None:
    images = [image("a"), replace(image("b"), class_label="soup"), image("c"), image("d")]
    _, notes = groups_of_images(images, copies(dict(zip("abcd", "1122", strict=True))))
    assert notes[1] == "1 of these sets have pictures of more than one class, such as that of 'a': look at them."


def test_what_looks_like_the_official_test_is_not_trained_on() -> None:
    images = [
        image("a", part="train"), image("b", part="test"), image("c", part="validation"), image("d"),
        image("e", part="train"), image("f", part="train"), image("g", part="validation"), image("h", "g", "test"),
        image("i", "g"),
    ]  # fmt: skip
    kept, reasons, notes = left(images, dict(zip("abcdefghi", "111123344", strict=True)))
    assert kept == ["b", "e", "g", "h", "i"]
    assert reasons == {"copy_across_split": 4}
    assert [note.partition(" look like")[0] for note in notes] == [
        "3 of 4 images of the training part (75.0%)",
        "1 of 2 images of the validation part (50.0%)",
    ]
    assert left(images[::-1], dict(zip("abcdefghi", "111123344", strict=True)))[0] == kept[::-1]


def test_equal_files_are_copies_and_equal_looks_when_they_are_asked_for() -> None:
    first, second = drawn(2)
    pictures = {"a": ("3", first), "b": ("2", saved_anew(first)), "c": ("2", saved_anew(first)), "d": ("1", second)}
    probed = [
        ProbedImage(path, ImageFacts(96, 96, 100, content * 64), *signature(picture))
        for path, (content, picture) in pictures.items()
    ]
    for order in (probed, probed[::-1]):
        looked, not_looked = copies_among(order, 10), copies_among(order, 0)
        assert looked.of == {"a": "2" * 64, "b": "2" * 64, "c": "2" * 64, "d": "1" * 64}
        assert not_looked.of == {"a": "3" * 64, "b": "2" * 64, "c": "2" * 64, "d": "1" * 64}
        assert (looked.looked_for, not_looked.looked_for) == (True, False)
    assert copies_among([], 10).of == {}
