from collections import Counter

from fvc_lib.corpus.image_listing import ListedImage
from fvc_lib.corpus.images import settle_contents
from fvc_lib.corpus.listing import Rejections


def settled(images: list[ListedImage], contents: dict[str, str]) -> tuple[list[ListedImage], Counter[str], list[str]]:
    rejections = Rejections()
    kept, notes = settle_contents(images, contents, rejections)
    reasons = Counter(rejections.frame()["reason"].to_list())
    assert len(kept) + sum(reasons.values()) == len(images)
    return kept, reasons, notes


def test_of_copies_the_official_test_image_stays_then_the_one_that_says_most() -> None:
    images = [
        ListedImage("a.jpg", "manifest", "pie", part="train"),
        ListedImage("b.jpg", "manifest", "pie", part="test"),
        ListedImage("c.jpg", "manifest", part="train"),
        ListedImage("d.jpg", "manifest", "soup", part="train"),
        ListedImage("e.jpg", "manifest", "soup", part="train", targets=(("mass", 1.0),)),
        ListedImage("f.jpg", "manifest", "soup", part="train"),
    ]
    contents = {"a.jpg": "1", "b.jpg": "1", "c.jpg": "2", "d.jpg": "2", "e.jpg": "2", "f.jpg": "3"}
    kept, reasons, notes = settled(images, contents)
    assert [image.path for image in kept] == ["b.jpg", "e.jpg", "f.jpg"]
    assert reasons == {"copy_across_split": 1, "duplicate_content": 2}
    assert notes == [
        "2 exact copies of other images are left out.",
        "1 training images are exact copies of official test or validation images: left out.",
    ]
    assert settled(images[::-1], contents)[0] == kept


def test_copies_that_contradict_each_other_are_all_left_out() -> None:
    images = [
        ListedImage("a.jpg", "folder", "pie"),
        ListedImage("b.jpg", "folder", "soup"),
        ListedImage("c.jpg", "folder"),
        ListedImage("d.jpg", "manifest", targets=(("mass", 1.0),)),
        ListedImage("e.jpg", "manifest", targets=(("calories", 9.0), ("mass", 2.0))),
        ListedImage("f.jpg", "manifest", targets=(("calories", 9.0),)),
        ListedImage("g.jpg", "manifest", targets=(("mass", 3.0),)),
    ]
    contents = dict(zip((image.path for image in images), "1112234", strict=True))
    kept, reasons, _ = settled(images, contents)
    assert [image.path for image in kept] == ["f.jpg", "g.jpg"]
    assert reasons == {"conflicting_labels": 3, "conflicting_targets": 2}


def test_a_path_listed_twice_is_one_image() -> None:
    images = [ListedImage("a.jpg", "manifest", "pie", row=1), ListedImage("a.jpg", "manifest", "pie", row=2)]
    kept, reasons, _ = settled(images, {"a.jpg": "1"})
    assert [image.row for image in kept] == [1]
    assert reasons == {"duplicate_content": 1}
