"""Decoding real files, good and broken, against a naive full decode; they lie beside the repository."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest

from fvc_lib.video.decode.clip import decode_clip
from tests.video.conftest import full_decode

QUICK_PIXELS = 10_000_000  # all frames together
SLOW, LONG = pytest.mark.slow, pytest.mark.long
HUGE_PIXELS = 140_000_000  # what is rare in such a file is its size


def _real_files(folder: str, pixels: range = range(1 << 40)) -> list[str]:
    """Files of the manifest that have that many pixels in all their frames together."""
    manifest = Path(__file__).resolve().parents[3] / "shared" / "media" / "manifest.csv"
    if not manifest.is_file():
        return ["absent"]
    with manifest.open(encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["path"].startswith(folder)]
    return [row["path"] for row in rows if _total_pixels(row) in pixels]


def _total_pixels(row: dict[str, str]) -> int:
    numbers = [row["width"], row["height"], row["n_frames"]]
    return math.prod(int(number) if number.isdigit() else 1 for number in numbers)


@pytest.mark.parametrize(
    "name",
    [
        *_real_files("decode/", range(QUICK_PIXELS)),
        *(pytest.param(name, marks=SLOW) for name in _real_files("decode/", range(QUICK_PIXELS, HUGE_PIXELS))),
        *(pytest.param(name, marks=LONG) for name in _real_files("decode/", range(HUGE_PIXELS, 1 << 40))),
    ],
)
def test_real_files_give_the_frames_of_a_full_decode(shared_media, name):
    frames = full_decode(shared_media / name, 24)
    clip = decode_clip(shared_media / name, 7, 24)
    assert clip.num_source_frames == len(frames)
    for place, pixels in zip(clip.frame_indices, clip.frames, strict=True):
        np.testing.assert_array_equal(pixels, frames[place])
