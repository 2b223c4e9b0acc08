import numpy as np
import pytest

from fvc_lib.corpus.copies.near_duplicates import near_duplicate_links
from fvc_lib.corpus.copies.perceptual_hash import hash_text, parse_hashes, perceptual_hash
from fvc_lib.corpus.samples.scenes import generator_for, texture
from tests.corpus.all_pairs import near_duplicate_pairs
from tests.corpus.test_near_duplicates import COPIES, footage, noisy

NUM_FRAMES, SIDE = 6, 64
GREEN, YELLOW, WHITE, RED = (30, 200, 40), (230, 220, 30), (245, 245, 245), (220, 30, 30)
DOWN, RIGHT = np.mgrid[:SIDE, :SIDE]
PLAIN = np.full((SIDE, SIDE, 3), 90.0)
PATHS = {
    "right": lambda share: (0.5, 0.2 + 0.6 * share),
    "left": lambda share: (0.5, 0.8 - 0.6 * share),
    "down": lambda share: (0.2 + 0.6 * share, 0.4),
    "still": lambda share: (0.5, 0.4),
}


def scene() -> np.ndarray:
    return texture(generator_for("a still scene"), SIDE, SIDE, (40, 20, 9), 40)[..., None] + np.full(3, 110.0)


def drawn(ground: np.ndarray, colour: tuple[int, int, int], path: str, reach: float = 9, shape: str = "square"):
    """uint8 (T, 3, H, W): something of one colour, of twice ``reach`` pixels, that moves over a ground."""
    frames = np.repeat(ground[None], NUM_FRAMES, axis=0)
    for number, frame in enumerate(frames):
        down, right = (SIDE * place for place in PATHS[path](number / (NUM_FRAMES - 1)))
        off = np.abs(DOWN - down), np.abs(RIGHT - right)
        inside = {"square": np.maximum(*off) < reach, "bar": (off[0] < reach / 2) & (off[1] < 1.6 * reach)}[shape]
        frame[inside] = colour
    return np.ascontiguousarray(frames.clip(0, 255).astype(np.uint8).transpose(0, 3, 1, 2))


def without_looks(text: str) -> str:
    return hash_text(parse_hashes([text])[0][0])


TWO_CLIPS = {
    "another colour": (drawn(PLAIN, GREEN, "right"), drawn(PLAIN, YELLOW, "right")),
    "a colour and none": (drawn(PLAIN, YELLOW, "down"), drawn(PLAIN, WHITE, "down")),
    "the other way": (drawn(PLAIN, GREEN, "right"), drawn(PLAIN, GREEN, "left")),
    "another colour in a scene": (drawn(scene(), GREEN, "down", 4), drawn(scene(), RED, "down", 4)),
    "another movement in a scene": (drawn(scene(), GREEN, "right", 4), drawn(scene(), GREEN, "down", 4)),
    "nothing moves in one": (drawn(scene(), GREEN, "right", 4), drawn(scene(), GREEN, "still", 4)),
}


@pytest.mark.parametrize("difference", TWO_CLIPS)
def test_clips_that_only_their_hashes_confuse_are_two(difference: str) -> None:
    hashes = [perceptual_hash(frames) for frames in TWO_CLIPS[difference]]
    assert near_duplicate_pairs([without_looks(text) for text in hashes], 10) == [(0, 1)]
    assert near_duplicate_pairs(hashes, 10) == near_duplicate_links(hashes, 10) == []


@pytest.mark.parametrize("edit", ["noise", "smaller", "brighter", "letterboxed", "one frame replaced"])
@pytest.mark.parametrize("clip", ["a colour and none", "another movement in a scene"])
def test_copies_of_drawn_clips_are_found(edit: str, clip: str) -> None:
    original = TWO_CLIPS[clip][0]
    copy = np.concatenate([footage(77, SIDE, SIDE)[:1], original[1:]])
    if edit != "one frame replaced":
        copy = noisy(original, 3) if edit == "noise" else COPIES[edit](original)
    assert near_duplicate_links([perceptual_hash(original), perceptual_hash(copy)], 10) == [(0, 1)]
