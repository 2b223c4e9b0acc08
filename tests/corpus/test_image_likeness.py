import numpy as np
import pytest
from PIL import Image

from fvc_lib.corpus.copies.near_duplicates import near_duplicate_links
from fvc_lib.corpus.copies.perceptual_hash import SamePictures
from tests.corpus.edited_pictures import EDITS, drawn, saved_anew, signature

NUM_DISHES = 6


def links(signatures: list[tuple[str, str]]) -> list[tuple[int, int]]:
    hashes, thumbnails = zip(*signatures, strict=True)
    return near_duplicate_links(hashes, 10, SamePictures(thumbnails))


@pytest.fixture(scope="module")
def dishes() -> list[Image.Image]:
    return drawn(NUM_DISHES)


@pytest.fixture(scope="module")
def originals(dishes: list[Image.Image]) -> list[tuple[str, str]]:
    return [signature(dish) for dish in dishes]


def test_different_dishes_are_not_linked(originals: list[tuple[str, str]]) -> None:
    assert links(originals) == []


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_copy_is_linked_to_its_original_and_to_nothing_else(
    edit: str, dishes: list[Image.Image], originals: list[tuple[str, str]]
) -> None:
    copies = [signature(EDITS[edit](dish)) for dish in dishes]
    assert links(originals + copies) == [(place, place + NUM_DISHES) for place in range(NUM_DISHES)]


def test_of_one_luma_and_other_colours_two_pictures_are_two(dishes: list[Image.Image]) -> None:
    pixels = np.asarray(dishes[0]).astype(np.float64)
    luma = pixels @ [0.299, 0.587, 0.114]
    opposite = np.clip(2 * luma[..., None] - pixels, 0, 255).astype(np.uint8)  # red for cyan, in equal luma
    pair = [signature(dishes[0]), signature(Image.fromarray(opposite))]
    judge = SamePictures([thumbnail for _, thumbnail in pair])
    one, none = np.array([0, 0]), np.zeros(2, np.int64)
    assert judge(one, np.array([0, 1]), none, none == 1).tolist() == [True, False]


def test_plain_pictures_are_like_nothing() -> None:
    grey = Image.new("RGB", (64, 64), (90, 90, 90))
    assert links([signature(grey), signature(saved_anew(grey))]) == []
    judge = SamePictures([signature(grey)[1]] * 2)
    place = np.zeros(1, np.int64)
    assert judge(place, place + 1, place, place == 1).tolist() == [False]
