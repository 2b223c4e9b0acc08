import csv
import itertools
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from fvc_lib.corpus.copies import near_duplicates
from fvc_lib.corpus.copies.near_duplicates import blocks_for, near_duplicate_links
from fvc_lib.corpus.copies.perceptual_hash import WINDOWS, hash_text, parse_hashes, perceptual_hash
from fvc_lib.corpus.samples.scenes import generator_for, texture
from fvc_lib.video.decode.clip import decode_clip
from tests.corpus.all_pairs import near_duplicate_pairs

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
    num_videos, num_frames = draw(st.integers(0, 7)), draw(st.integers(1, 6))
    centres = rng.integers(0, 2**64, (3, NUM_WINDOWS), dtype=np.uint64)
    texts: list[str | None] = []
    for _ in range(num_videos):
        if rng.random() < 0.15:
            texts.append(None)
            continue
        frames = []
        for _ in range(num_frames):
            values = rng.permutation(centres[rng.integers(3)])
            values[0] = centres[rng.integers(3), rng.integers(2)]
            for window in range(NUM_WINDOWS):
                for bit in rng.integers(0, 64, int(rng.integers(0, 6))):
                    values[window] ^= np.uint64(1) << np.uint64(bit)
                if rng.random() < 0.1:
                    values[window] = 0
            if rng.random() < 0.3:
                values[0] = mirror_bit_by_bit(int(values[0]))
            frames.append(values)
        texts.append(hash_text(np.stack(frames)))
    return texts


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

    def test_many_copies_of_few_videos_and_strangers_that_share_a_frame(self):
        rng = np.random.default_rng(6)
        table = rng.integers(1, 2**64, (300, 4, NUM_WINDOWS), dtype=np.uint64)
        table[:200] = table[np.arange(200) % 3]
        table[:200] ^= np.uint64(1) << rng.integers(0, 64, (200, 4, NUM_WINDOWS), dtype=np.uint64)
        table[200:, 1] = table[200, 1]
        links = near_duplicate_links([hash_text(frames) for frames in table], 8)
        assert connected(300, links) == [number % 3 if number < 200 else number for number in range(300)]
        assert len(links) == 197


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


@pytest.fixture(scope="module")
def originals() -> list[np.ndarray]:
    return [footage(seed) for seed in range(3)]


@pytest.mark.parametrize("copy", COPIES)
def test_copies_are_found_and_strangers_are_not(copy, originals):
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
