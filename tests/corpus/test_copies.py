"""Copies of videos and pictures: which pairs are found, and that nothing else is."""

import csv
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from PIL import Image

from fvc_lib.corpus.copies import near_duplicates
from fvc_lib.corpus.copies.near_duplicates import BlockSearch, Judge, blocks_for, near_duplicate_links
from fvc_lib.corpus.copies.perceptual_hash import WINDOWS, hash_text, parse_hashes, perceptual_hash
from fvc_lib.corpus.samples.footage import generator_for, texture
from fvc_lib.video.decode.clip import decode_clip
from tests.corpus.edited_pictures import EDITS, drawn, saved_anew, signature


def near_duplicate_pairs(hashes: Sequence[str | None], max_bits: int) -> list[tuple[int, int]]:
    """All index pairs (i < j), ascending; arguments and errors as for ``near_duplicate_links``."""
    judge = Judge(hashes, max_bits)
    count = len(judge.known)
    candidates = np.indices((count, count, len(WINDOWS), 2)).reshape(4, -1)
    near = candidates[:, candidates[0] != candidates[1]]
    near = near[:, judge.hashes_agree(near)]
    return sorted({tuple(sorted(pair)) for pair in judge.known[near[:2, judge.agree(near)]].T.tolist()})


# --- The search for near codes.


def scattered(rng: np.random.Generator, centres: np.ndarray, count: int) -> np.ndarray:
    """Codes 0 to 15 bits away from one of the centres, so that there are pairs on either side of any limit."""
    codes = rng.choice(centres, count)
    for place in range(count):
        for bit in rng.permutation(64)[: rng.integers(0, 9)]:
            codes[place] ^= np.uint64(1) << np.uint64(bit)
    return codes


CORPUS_SIZES = (1, 300, 3_000, 100_000, 10_000_000)


@settings(max_examples=30)
@given(
    st.integers(0, 2**32 - 1), st.integers(0, 9), st.integers(0, 12), st.integers(0, 12), st.sampled_from(CORPUS_SIZES)
)
def test_every_pair_is_found_once(seed: int, max_bits: int, num_queries: int, num_entries: int, size: int) -> None:
    """Few pairs of a key are compared as a matrix already, and in small pieces."""
    rng = np.random.default_rng(seed)
    centres = rng.integers(0, 2**64, 3, dtype=np.uint64)
    queries, entries = scattered(rng, centres, num_queries), scattered(rng, centres, num_entries)
    blocks = blocks_for(max_bits, size, size)
    found: list[tuple[int, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"_CANDIDATES": 8, "_LARGE_PAIRS": 6, "_TILE_PAIRS": 64}.items():
            patch.setattr(near_duplicates, name, value)
        for number in range(len(blocks)):
            search = BlockSearch(entries, blocks, number, max_bits)
            for part in search.pairs(queries, lambda q, e, near: np.nonzero(near(np.arange(len(e))))):
                found.extend(zip(*(places.tolist() for places in part), strict=True))
    apart = np.bitwise_count(queries[:, None] ^ entries)
    assert sorted(found) == list(map(tuple, np.argwhere(apart <= max_bits).tolist()))


MEDIA = Path(__file__).resolve().parents[3] / "shared" / "media"
NUM_WINDOWS = len(WINDOWS)


def footage(seed: int, height: int = 120, width: int = 160, num_frames: int = 6) -> np.ndarray:
    """uint8 (T, 3, H, W): a random scene under a moving camera."""
    rng = generator_for("test footage", seed)
    scene = texture(rng, height + 12, width + 12, (60, 24, 9), 40) + 120
    views = [scene[2 * t : 2 * t + height, t : t + width] for t in range(num_frames)]
    luma = np.clip(np.stack(views), 0, 255).astype(np.uint8)
    return np.repeat(luma[:, None], 3, axis=1)


def noisy(frames: np.ndarray, sigma: float = 6) -> np.ndarray:
    noise = generator_for("noise").normal(0, sigma, frames.shape)
    return np.clip(frames + noise, 0, 255).astype(np.uint8)


def mirror_bit_by_bit(value: int) -> int:
    """Sign of every odd horizontal frequency turned, one bit at a time, from the definition of the order of bits."""
    order = sorted(((v, h) for v in range(12) for h in range(12) if v + h), key=lambda f: (f[0] + f[1], f[0]))[:64]
    return value ^ sum(1 << bit for bit, (_, horizontal) in enumerate(order) if horizontal % 2)


def naive_pairs(hashes: list[str | None], max_bits: int) -> list[tuple[int, int]]:
    """The definition, on Python integers and fractions."""
    table = [parse_hashes([text])[0][0].tolist() if text else None for text in hashes]
    longest = max((len(frames) for frames in table if frames), default=0)
    times = range(longest)
    middle = times[1:-1] if longest > 2 else times
    views = [[(t, t) for t in times]]
    for start, end in ((1, 0), (0, 1), (1, 1)):
        kept = 1 - Fraction(start + end, 5)
        nearest = [math.floor(Fraction(start, 5) * (longest - 1) + kept * t + Fraction(1, 2)) for t in times]
        views += [list(zip(times, nearest, strict=True)), list(zip(nearest, times, strict=True))]

    def shows_part(ones: list[list[int]], others: list[list[int]]) -> bool:
        for window, mirrored in itertools.product(range(NUM_WINDOWS), (False, True)):

            def bits(t: int, u: int, window: int = window, mirrored: bool = mirrored) -> int:
                whole, part = ones[t][0], others[u][window]
                turned = mirror_bit_by_bit(whole) if mirrored else whole
                return (turned ^ part).bit_count() if whole and part else 65

            closely = any(bits(t, t) <= max(0, max_bits - 3) for t in middle)
            if closely and any(2 * sum(bits(t, u) <= max_bits for t, u in view) > longest for view in views):
                return True
        return False

    return [
        (i, j)
        for (i, a), (j, b) in itertools.combinations(enumerate(table), 2)
        if a and b and (shows_part(a, b) or shows_part(b, a))
    ]


@st.composite
def hash_lists(draw: st.DrawFn) -> list[str | None]:
    """Few centres, and hashes a few bits away from them, so that there are pairs, ties and near misses."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = num_videos, num_frames, _ = draw(st.integers(0, 7)), draw(st.integers(1, 6)), NUM_WINDOWS
    centres = rng.integers(0, 2**64, (3, NUM_WINDOWS), dtype=np.uint64)
    table = rng.permuted(centres[rng.integers(3, size=shape[:2])], axis=2)
    table[:, :, 0] = centres[rng.integers(3, size=shape[:2]), rng.integers(2, size=shape[:2])]
    for _ in range(5):
        bits = np.uint64(1) << rng.integers(0, 64, shape, dtype=np.uint64)
        table ^= np.where(rng.random(shape) < 0.5, bits, np.uint64(0))
    table[rng.random(shape) < 0.1] = 0
    for video, frame in np.argwhere(rng.random((num_videos, num_frames)) < 0.3):
        table[video, frame, 0] = mirror_bit_by_bit(int(table[video, frame, 0]))
    return [None if rng.random() < 0.15 else hash_text(frames) for frames in table]


@pytest.fixture(params=["compared", "looked up"])
def _either_way(request, monkeypatch):
    if request.param == "looked up":
        monkeypatch.setattr(near_duplicates, "blocks_for", lambda bits, *_: blocks_for(bits, 3_000, 90_000))


class TestAgainstTheNaiveDefinition:
    @pytest.mark.usefixtures("_either_way")
    @settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(hash_lists(), st.integers(0, 8))
    def test_links_connect_what_the_pairs_connect_and_no_more(self, hashes, max_bits):
        links, pairs = near_duplicate_links(hashes, max_bits), naive_pairs(hashes, max_bits)
        assert near_duplicate_pairs(hashes, max_bits) == pairs
        assert set(links) <= set(pairs)
        assert links == sorted(links)
        clusters = connected(len(hashes), pairs)
        assert connected(len(hashes), links) == clusters
        assert len(links) == len(hashes) - len(set(clusters))

    @pytest.mark.parametrize("shared", ["three frames", "all but a few bits"])
    @pytest.mark.usefixtures("_either_way")
    def test_codes_that_many_videos_share(self, shared, monkeypatch):
        """As a matrix: of a frame that many share, of half of the frames, and of copies no two of which are equal."""
        monkeypatch.setattr(near_duplicates, "_LARGE_PAIRS", 4)
        monkeypatch.setattr(near_duplicates, "_TILE_PAIRS", 128)
        rng = np.random.default_rng(5)
        table = rng.integers(1, 2**64, (24, 6, NUM_WINDOWS), dtype=np.uint64)
        if shared == "all but a few bits":
            table[:] = table[:1]
            table[::3] ^= rng.integers(1, 2**64, (6, NUM_WINDOWS), dtype=np.uint64)  # another video, copied likewise
            table ^= np.uint64(1) << rng.integers(0, 64, table.shape, dtype=np.uint64)
        else:
            table[:, 2:5, 0] = table[0, 2, 0]
            table[7, :, 0] = table[20, :, 0]
            table[8, 3:, 0] = mirror_bit_by_bit(int(table[8, 3, 0]))
            table[9, [0, 2, 3], 0] = 0
        hashes = [hash_text(frames) for frames in table]
        clusters = connected(len(hashes), near_duplicate_pairs(hashes, 8))
        assert len(set(clusters)) == {"three frames": 23, "all but a few bits": 2}[shared]
        assert connected(len(hashes), near_duplicate_links(hashes, 8)) == clusters


def connected(count, pairs):
    """The smallest member of each one's connected component."""
    smallest = list(range(count))
    for _ in range(count):
        for a, b in pairs:
            smallest[a] = smallest[b] = min(smallest[a], smallest[b])
    return smallest


def shrunk(frames):
    rows, columns = (
        np.linspace(0, side - 1, count).astype(int) for side, count in zip(frames.shape[2:], (70, 110), strict=True)
    )
    return frames[:, :, rows][:, :, :, columns]


COPIES = {
    "noise": noisy,
    "smaller": shrunk,
    "mirrored": lambda frames: frames[..., ::-1],
    "cropped in a corner": lambda frames: frames[:, :, 12:, 16:],
    "cropped all round": lambda frames: frames[:, :, 5:-5, 7:-7],
    "brighter": lambda frames: (frames * 0.8 + 40).astype(np.uint8),
    "letterboxed": lambda frames: np.pad(frames, ((0, 0), (0, 0), (30, 30), (0, 0))),
    "mirrored and cropped": lambda frames: frames[:, :, :-12, :-16][..., ::-1],
    "one frame replaced": lambda frames: np.concatenate([footage(77)[:1], frames[1:]]),
}


@pytest.mark.parametrize("copy", COPIES)
def test_copies_are_found_and_strangers_are_not(copy):
    originals = [footage(seed) for seed in range(3)]
    videos = [*originals, *map(COPIES[copy], originals)]
    hashes = [perceptual_hash(np.ascontiguousarray(frames)) for frames in videos]
    assert near_duplicate_pairs(hashes, 10) == [(i, i + 3) for i in range(3)]


PLAIN = {
    "black": np.zeros((6, 3, 90, 120), np.uint8),
    "grey": np.full((6, 3, 90, 120), 127, np.uint8),
    "stripes": np.broadcast_to((np.arange(120) // 9 % 2 * 180 + 40).astype(np.uint8), (6, 3, 90, 120)),
    "gradient": np.broadcast_to(np.arange(90, dtype=np.uint8)[:, None] * 2, (6, 3, 90, 120)),
    "grainy grey": noisy(np.full((6, 3, 90, 120), 127, np.uint8), 4),
    "one pixel": np.full((6, 3, 1, 1), 200, np.uint8),
}


def test_plain_pictures_join_nothing():
    hashes = [perceptual_hash(np.ascontiguousarray(PLAIN[name])) for name in PLAIN for _ in range(2)]
    assert near_duplicate_pairs(hashes, 32) == []
    assert not parse_hashes(hashes)[0].any()


@pytest.mark.parametrize("text", ["", "A" * 320 + "-", "A" * 324, "é" * 320])
def test_a_text_that_is_no_hash_is_refused(text):
    with pytest.raises(ValueError, match="wanted 6 frames of 456 bytes"):
        near_duplicate_links([perceptual_hash(footage(1)), text], 10)


@pytest.mark.long
@pytest.mark.skipif(not MEDIA.is_dir(), reason="the shared media folder is not beside this checkout")
def test_real_videos_of_different_groups_are_not_joined():
    with (MEDIA / "manifest.csv").open(encoding="utf-8", newline="") as text:
        groups = {row["path"]: row["group"] for row in csv.DictReader(text) if row["path"].startswith("labelled/")}
    paths = sorted(groups)
    pairs = near_duplicate_pairs([perceptual_hash(decode_clip(MEDIA / path, 6, 96).frames) for path in paths], 10)
    assert pairs, "the labelled clips hold several takes of one signer and several forgeries of one portrait"
    assert [(paths[i], paths[j]) for i, j in pairs if groups[paths[i]] != groups[paths[j]]] == []


# --- Videos that only their looks tell apart.

NUM_FRAMES, SIDE = 6, 64
GREEN, YELLOW, WHITE, RED = (30, 200, 40), (230, 220, 30), (245, 245, 245), (220, 30, 30)
DOWN, RIGHT = np.mgrid[:SIDE, :SIDE]
GREY = np.full((SIDE, SIDE, 3), 90.0)
PATHS = {
    "right": lambda share: (0.5, 0.2 + 0.6 * share),
    "left": lambda share: (0.5, 0.8 - 0.6 * share),
    "down": lambda share: (0.2 + 0.6 * share, 0.4),
    "still": lambda share: (0.5, 0.4),
}


def scene() -> np.ndarray:
    return texture(generator_for("a still scene"), SIDE, SIDE, (40, 20, 9), 40)[..., None] + np.full(3, 110.0)


def moving(ground: np.ndarray, colour: tuple[int, int, int], path: str, reach: float = 9) -> np.ndarray:
    """uint8 (T, 3, H, W): a square of one colour, of twice ``reach`` pixels, that moves over a ground."""
    frames = np.repeat(ground[None], NUM_FRAMES, axis=0)
    for number, frame in enumerate(frames):
        down, right = (SIDE * place for place in PATHS[path](number / (NUM_FRAMES - 1)))
        frame[np.maximum(np.abs(DOWN - down), np.abs(RIGHT - right)) < reach] = colour
    return np.ascontiguousarray(frames.clip(0, 255).astype(np.uint8).transpose(0, 3, 1, 2))


TWO_CLIPS = {
    "another colour": (moving(GREY, GREEN, "right"), moving(GREY, YELLOW, "right")),
    "a colour and none": (moving(GREY, YELLOW, "down"), moving(GREY, WHITE, "down")),
    "the other way": (moving(GREY, GREEN, "right"), moving(GREY, GREEN, "left")),
    "another colour in a scene": (moving(scene(), GREEN, "down", 4), moving(scene(), RED, "down", 4)),
    "another movement in a scene": (moving(scene(), GREEN, "right", 4), moving(scene(), GREEN, "down", 4)),
    "nothing moves in one": (moving(scene(), GREEN, "right", 4), moving(scene(), GREEN, "still", 4)),
}


@pytest.mark.parametrize("difference", TWO_CLIPS)
def test_clips_that_only_their_hashes_confuse_are_two(difference: str) -> None:
    hashes = [perceptual_hash(frames) for frames in TWO_CLIPS[difference]]
    assert near_duplicate_pairs([hash_text(codes) for codes in parse_hashes(hashes)[0]], 10) == [(0, 1)]
    assert near_duplicate_pairs(hashes, 10) == near_duplicate_links(hashes, 10) == []


@pytest.mark.parametrize("edit", ["noise", "smaller", "brighter", "letterboxed", "one frame replaced"])
@pytest.mark.parametrize("clip", ["a colour and none", "another movement in a scene"])
def test_copies_of_drawn_clips_are_found(edit: str, clip: str) -> None:
    original = TWO_CLIPS[clip][0]
    copy = np.concatenate([footage(77, SIDE, SIDE)[:1], original[1:]])
    if edit != "one frame replaced":
        copy = noisy(original, 3) if edit == "noise" else COPIES[edit](original)
    assert near_duplicate_links([perceptual_hash(original), perceptual_hash(copy)], 10) == [(0, 1)]


# --- Pictures.

NUM_DISHES = 6


@pytest.fixture(scope="module")
def dishes() -> list[Image.Image]:
    return drawn(NUM_DISHES)


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_copy_is_linked_to_its_original_and_to_nothing_else(edit: str, dishes: list[Image.Image]) -> None:
    signatures = [*map(signature, dishes), *(signature(EDITS[edit](dish)) for dish in dishes)]
    assert near_duplicate_links(signatures, 10) == [(place, place + NUM_DISHES) for place in range(NUM_DISHES)]


def test_of_one_luma_and_other_colours_two_pictures_are_two(dishes: list[Image.Image]) -> None:
    pixels = np.asarray(dishes[0]).astype(np.float64)
    luma = pixels @ [0.299, 0.587, 0.114]
    opposite = np.clip(2 * luma[..., None] - pixels, 0, 255).astype(np.uint8)  # red for cyan, in equal luma
    pair = [signature(dishes[0]), signature(Image.fromarray(opposite))]
    assert near_duplicate_links([hash_text(codes) for codes in parse_hashes(pair)[0]], 10) == [(0, 1)]
    assert near_duplicate_links(pair, 10) == []


def test_plain_pictures_are_like_nothing() -> None:
    grey = Image.new("RGB", (64, 64), (90, 90, 90))
    assert near_duplicate_links([signature(grey), signature(saved_anew(grey))], 10) == []
