"""Seeded damage to good video files: what transfers, disks, careless tools and hostile hands do to them.

A case is named ``base:kind:seed`` and always gives the same bytes.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Numbers that overflow, that are negative when read as signed, or that no memory can hold.
ABSURD_NUMBERS = (0, 1, 0x7FFF, 0xFFFF, 100_000, 1 << 24, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x7FFFFFFFFFFFFFFF)
_HEADER_BYTES = 2048  # at either end of a file: headers, and indices that are written last


def _range(content: bytes, draw: random.Random) -> tuple[int, int]:
    length = min(len(content), draw.choice((1, 4, 16, 64, 512, 4096, max(1, len(content) // 4))))
    start = draw.randrange(len(content) - length + 1)
    return start, start + length


def _header_place(content: bytes, draw: random.Random) -> int:
    place = draw.randrange(min(len(content), _HEADER_BYTES))
    return draw.choice((place, len(content) - 1 - place))


def _cut(content: bytes, draw: random.Random, _other: bytes) -> bytes:
    place = draw.randrange(1, len(content))
    return draw.choice((content[:place], content[place:]))


def _changed_range(content: bytes, draw: random.Random, _other: bytes) -> bytes:
    start, stop = _range(content, draw)
    return content[:start] + draw.choice((b"", bytes(stop - start), draw.randbytes(stop - start))) + content[stop:]


def _flipped_bits(content: bytes, draw: random.Random, _other: bytes) -> bytes:
    return flip_bits(content, draw, range(len(content)), draw.choice((1, 4, 16, 64)))


def _flipped_header_bits(content: bytes, draw: random.Random, _other: bytes) -> bytes:
    places = [_header_place(content, draw) for _ in range(8)]
    return flip_bits(content, draw, places, draw.choice((1, 2, 8)))


def _absurd_number(content: bytes, draw: random.Random, _other: bytes) -> bytes:
    place, width = _header_place(content, draw), draw.choice((1, 2, 4, 4, 8))
    number = (draw.choice(ABSURD_NUMBERS) % (1 << 8 * width)).to_bytes(width, draw.choice(("big", "little")))
    return (content[:place] + number + content[place + width :])[: len(content)]


def _moved_range(content: bytes, draw: random.Random, _other: bytes) -> bytes:
    start, stop = _range(content, draw)
    kept = draw.choice((content, content[:start] + content[stop:]))
    place = draw.randrange(len(kept) + 1)
    return kept[:place] + content[start:stop] + kept[place:]


def _two_files(content: bytes, draw: random.Random, other: bytes) -> bytes:
    place = draw.randrange(len(content))
    return content[:place] + draw.choice((other + content[place:], other[draw.randrange(len(other)) :]))


MUTATIONS: dict[str, Callable[[bytes, random.Random, bytes], bytes]] = {
    "cut": _cut,
    "changed range": _changed_range,
    "flipped bits": _flipped_bits,
    "flipped header bits": _flipped_header_bits,
    "absurd number": _absurd_number,
    "moved range": _moved_range,
    "two files": _two_files,
}


@dataclass(frozen=True)
class Case:
    """One mutation of one base file."""

    base: str
    kind: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.base}:{self.kind}:{self.seed}"

    def content(self, bases: dict[str, bytes]) -> bytes:
        """Return the damaged file."""
        draw = random.Random(self.name)  # a text seeds by its SHA-512, the same everywhere
        return MUTATIONS[self.kind](bases[self.base], draw, bases[draw.choice(sorted(bases))])


def cases(bases: Sequence[str], number: int, first_seed: int = 0) -> list[Case]:
    """Return ``number`` cases that go through all kinds and, for each kind, through the bases."""
    kinds = list(MUTATIONS)
    return [
        Case(bases[(seed // len(kinds) + seed) % len(bases)], kinds[seed % len(kinds)], seed)
        for seed in range(first_seed, first_seed + number)
    ]


def flip_bits(content: bytes, draw: random.Random, places: Sequence[int], number: int) -> bytes:
    """Return ``content`` with ``number`` bits flipped, each in one of the bytes at ``places``."""
    damaged = bytearray(content)
    for _ in range(number):
        damaged[draw.choice(places)] ^= 1 << draw.randrange(8)
    return bytes(damaged)


def textured_frames(number: int = 16, width: int = 96, height: int = 64) -> list[npt.NDArray[np.uint8]]:
    """RGB frames (height, width, 3) of drifting noise: enough detail that most bytes of a file code pixels."""
    generator = np.random.default_rng(3)
    coarse = generator.integers(0, 256, (height // 4, width // 4, 3), np.uint8)
    picture = np.kron(coarse, np.ones((4, 4, 1), np.uint8))
    grain = generator.integers(-12, 13, (height, width, 1))
    drifting = (np.roll(picture, 2 * number, axis=1).astype(np.int64) for number in range(number))
    return [np.clip(frame + grain, 0, 255).astype(np.uint8) for frame in drifting]


# What an encoder and a container make of the same frames: arguments of ``conftest.write_video``.
GOOD_FILES: dict[str, dict[str, object]] = {
    "h264.mp4": {"options": {"bf": "2", "refs": "3"}},
    "h264_fragmented.mp4": {"container_options": {"movflags": "frag_keyframe+empty_moov"}},
    "hevc.mp4": {"codec": "libx265", "options": {"x265-params": "log-level=none:bframes=2"}},
    "av1.mp4": {"codec": "libsvtav1", "options": {"preset": "10"}},
    "mjpeg.mov": {"codec": "mjpeg", "pixel_format": "yuvj420p"},
    "mpeg4.avi": {"codec": "mpeg4", "options": {"bf": "1"}},
    "mpeg2.mpg": {"codec": "mpeg2video"},
    "h264.ts": {"options": {"bf": "2"}},
    "h264.mkv": {"options": {"bf": "2"}},
    "h264.flv": {"options": {"bf": "0"}},
    "vp8.webm": {"codec": "libvpx"},
    "vp9.webm": {"codec": "libvpx-vp9"},
    "gif.gif": {"codec": "gif", "pixel_format": "rgb8"},
    "elementary.h264": {"container": "h264"},
}
