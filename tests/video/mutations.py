"""Seeded damage to good video files: what transfers, disks, careless tools and hostile hands do to them.

One case is named ``base:kind:seed`` and always gives the same bytes. The mutations know just enough of each container
to hit what parsers trust: elements with sizes (MP4 boxes, EBML, RIFF), transport packets, and numbers in headers.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Numbers that overflow, that are negative when read as signed, or that no memory can hold.
ABSURD_NUMBERS = (0, 1, 0x7FFF, 0xFFFF, 100_000, 1 << 24, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x7FFFFFFFFFFFFFFF)

_MP4_PARENTS = frozenset(b"moov trak mdia minf stbl edts dinf mvex moof traf udta".split())
_EBML_PARENTS = frozenset(
    bytes.fromhex(identifier)
    for identifier in (
        "1a45dfa3", "18538067", "1654ae6b", "ae", "e0", "1f43b675", "a0", "114d9b74", "4dbb", "1549a966", "1c53bb6b",
        "bb", "b7",
    )
)  # fmt: skip
_LARGEST_HEADER_FIELD = 4096  # bytes; a longer leaf holds frames
_TS_PACKET = 188


@dataclass(frozen=True)
class Element:
    """A part of a container: half-open spans in bytes. ``size_field`` is empty where the container has none."""

    start: int
    payload: int
    stop: int
    size_field: tuple[int, int]
    is_leaf: bool


def elements_of(content: bytes) -> list[Element]:
    """The elements of a file, parents before their children; empty for a container that is not known here."""
    if content[4:8] in (b"ftyp", b"styp", b"moov"):
        return list(_boxes(content, 0, len(content)))
    if content[:4] == b"\x1aE\xdf\xa3":
        return list(_ebml(content, 0, len(content)))
    if content[:4] == b"RIFF":
        return list(_riff(content, 0, len(content)))
    if content[:1] == b"\x47" and content[_TS_PACKET : _TS_PACKET + 1] == b"\x47":
        starts = range(0, len(content) - _TS_PACKET + 1, _TS_PACKET)
        return [Element(start, start + 4, start + _TS_PACKET, (start, start), True) for start in starts]
    return []


def _boxes(content: bytes, start: int, stop: int) -> Iterator[Element]:
    while start + 8 <= stop:
        size = int.from_bytes(content[start : start + 4], "big") or stop - start
        if size < 8 or start + size > stop:
            return
        is_parent = content[start + 4 : start + 8] in _MP4_PARENTS
        yield Element(start, start + 8, start + size, (start, start + 4), not is_parent)
        if is_parent:
            yield from _boxes(content, start + 8, start + size)
        start += size


def _ebml(content: bytes, start: int, stop: int) -> Iterator[Element]:
    while start + 2 <= stop:
        id_length, size_at = _vint_length(content[start]), start + _vint_length(content[start])
        if size_at >= stop:
            return
        length = _vint_length(content[size_at])
        raw = int.from_bytes(content[size_at : size_at + length], "big") & ((1 << 7 * length) - 1)
        payload = size_at + length
        end = stop if raw == (1 << 7 * length) - 1 else min(stop, payload + raw)
        is_parent = content[start : start + id_length] in _EBML_PARENTS
        yield Element(start, payload, end, (size_at, payload), not is_parent)
        if is_parent:
            yield from _ebml(content, payload, end)
        start = end


def _vint_length(first: int) -> int:
    return 9 - first.bit_length() if first else 8


def _riff(content: bytes, start: int, stop: int) -> Iterator[Element]:
    while start + 8 <= stop:
        is_list = content[start : start + 4] in (b"RIFF", b"LIST")
        end = min(stop, start + 8 + int.from_bytes(content[start + 4 : start + 8], "little"))
        yield Element(start, start + 12 if is_list else start + 8, end, (start + 4, start + 8), not is_list)
        if is_list:
            yield from _riff(content, start + 12, end)
        start = end + end % 2


def _truncate(content: bytes, draw: random.Random, _other: bytes) -> bytes:
    return content[: draw.randrange(len(content))]


def _lose_the_head(content: bytes, draw: random.Random, _other: bytes) -> bytes:
    return content[draw.randrange(1, len(content)) :]


def _lose_the_middle(content: bytes, draw: random.Random, _other: bytes) -> bytes:
    start, stop = _range(content, draw)
    return content[:start] + content[stop:]


def _flip_bits(content: bytes, draw: random.Random, _other: bytes) -> bytes:
    return flip_bits(content, draw, range(len(content)), draw.choice((1, 4, 16, 64)))


def _flip_bits_in_headers(content: bytes, draw: random.Random, _other: bytes) -> bytes:
    leaves = _header_fields(content)
    places = [place for leaf in leaves for place in range(leaf.start, leaf.stop)] or range(min(len(content), 512))
    return flip_bits(content, draw, places, draw.choice((1, 2, 8)))


def _zero_range(content: bytes, draw: random.Random, _other: bytes) -> bytes:
    start, stop = _range(content, draw)
    return content[:start] + bytes(stop - start) + content[stop:]


def _random_range(content: bytes, draw: random.Random, _other: bytes) -> bytes:
    start, stop = _range(content, draw)
    return content[:start] + draw.randbytes(stop - start) + content[stop:]


def _insert(content: bytes, draw: random.Random, _other: bytes) -> bytes:
    place = draw.randrange(len(content))
    return content[:place] + draw.randbytes(draw.choice((1, 7, 188, 4096))) + content[place:]


def _swap_elements(content: bytes, draw: random.Random, _other: bytes) -> bytes:
    first, second = sorted(draw.sample(_elements_or_pieces(content), 2), key=lambda element: element.start)
    if second.start < first.stop:  # one inside the other
        return content[: first.start] + content[second.start : second.stop] + content[first.stop :]
    moved = content[second.start : second.stop] + content[first.stop : second.start] + content[first.start : first.stop]
    return content[: first.start] + moved + content[second.stop :]


def _duplicate_element(content: bytes, draw: random.Random, _other: bytes) -> bytes:
    elements = _elements_or_pieces(content)
    chosen, place = draw.choice(elements), draw.choice(elements).stop
    return content[:place] + content[chosen.start : chosen.stop] + content[place:]


def _drop_elements(content: bytes, draw: random.Random, _other: bytes) -> bytes:
    elements = _elements_or_pieces(content)
    for chosen in sorted(draw.sample(elements, draw.randint(1, max(1, len(elements) // 20))), key=lambda e: -e.start):
        content = content[: chosen.start] + content[chosen.stop :]
    return content


def _resize_element(content: bytes, draw: random.Random, _other: bytes) -> bytes:
    sized = [element for element in elements_of(content) if element.size_field[0] < element.size_field[1]]
    if not sized:
        return _absurd_number(content, draw, _other)
    start, stop = draw.choice(sized).size_field
    old = int.from_bytes(content[start:stop], "big")
    new = draw.choice((*ABSURD_NUMBERS, old + 1, max(0, old - 1), 2 * old, old // 2, draw.randrange(1 << 32)))
    return content[:start] + (new % (1 << 8 * (stop - start))).to_bytes(stop - start, "big") + content[stop:]


def _absurd_number(content: bytes, draw: random.Random, _other: bytes) -> bytes:
    field = draw.choice(_header_fields(content) or [Element(0, 0, min(len(content), 256), (0, 0), True)])
    width = draw.choice((1, 2, 4, 4, 8))
    # Most header fields are aligned to their element; a shift hits the others.
    place = field.payload + draw.randrange(max(1, (field.stop - field.payload) // width)) * width
    place += draw.choice((0, 0, 1))
    number = (draw.choice(ABSURD_NUMBERS) % (1 << 8 * width)).to_bytes(width, draw.choice(("big", "little")))
    return (content[:place] + number + content[place + width :])[: len(content)]


def _splice(content: bytes, draw: random.Random, other: bytes) -> bytes:
    return content[: draw.randrange(len(content))] + other[draw.randrange(len(other)) :]


def _two_files_in_one(content: bytes, draw: random.Random, other: bytes) -> bytes:
    place = draw.randrange(len(content))
    return content[:place] + other + content[place:]


MUTATIONS: dict[str, Callable[[bytes, random.Random, bytes], bytes]] = {
    "truncate": _truncate,
    "lose the head": _lose_the_head,
    "lose the middle": _lose_the_middle,
    "flip bits": _flip_bits,
    "flip bits in headers": _flip_bits_in_headers,
    "zero a range": _zero_range,
    "random range": _random_range,
    "insert": _insert,
    "swap elements": _swap_elements,
    "duplicate an element": _duplicate_element,
    "drop elements": _drop_elements,
    "resize an element": _resize_element,
    "absurd number": _absurd_number,
    "splice": _splice,
    "two files in one": _two_files_in_one,
}


@dataclass(frozen=True)
class Case:
    """One mutation of one base file; ``name`` is all that is needed to make it again."""

    base: str
    kind: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.base}:{self.kind}:{self.seed}"

    def content(self, bases: dict[str, bytes]) -> bytes:
        """The damaged file."""
        draw = random.Random(self.name)  # a text seeds by its SHA-512, the same everywhere
        return MUTATIONS[self.kind](bases[self.base], draw, bases[draw.choice(sorted(bases))])


def cases(bases: Sequence[str], number: int, first_seed: int = 0) -> list[Case]:
    """``number`` cases that go through all kinds and, for each kind, through the bases."""
    kinds = list(MUTATIONS)
    found = []
    for seed in range(first_seed, first_seed + number):
        turn, place = divmod(seed, len(kinds))
        found.append(Case(bases[(turn + place) % len(bases)], kinds[place], seed))
    return found


def flip_bits(content: bytes, draw: random.Random, places: Sequence[int], number: int) -> bytes:
    """``content`` with ``number`` bits flipped, each in one of the bytes at ``places``."""
    damaged = bytearray(content)
    for _ in range(number):
        damaged[draw.choice(places)] ^= 1 << draw.randrange(8)
    return bytes(damaged)


def _range(content: bytes, draw: random.Random) -> tuple[int, int]:
    length = min(len(content), draw.choice((1, 4, 16, 64, 512, 4096, max(1, len(content) // 4))))
    start = draw.randrange(len(content) - length + 1)
    return start, start + length


def _header_fields(content: bytes) -> list[Element]:
    return [e for e in elements_of(content) if e.is_leaf and e.payload < e.stop <= e.payload + _LARGEST_HEADER_FIELD]


def _elements_or_pieces(content: bytes) -> list[Element]:
    """At least two elements; pieces of a sixteenth of the file where its container has none."""
    elements = elements_of(content)
    if len(elements) > 1:
        return elements
    step = max(1, len(content) // 16)
    return [Element(at, at, min(at + step, len(content)), (at, at), True) for at in range(0, len(content), step)]


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
