#!/usr/bin/env python3
"""What each family of features between frames, and of packets, finds of a manipulation that metadata cannot show.

Generated shots, each by a camera of its own, are written as they are and manipulated, with one codec, size, length,
rate and about one bit rate, in files that an empty box makes equally long. A logistic regression on a family's columns,
tested on other shots than it learned from, ranks manipulated above untouched: AUC within folds, with the interval of a
bootstrap that draws shots. Beside it the same on what the index has of a file, ``metadata`` without and ``index`` with
its facts about packets.

    python -m benchmarks.planted_in_time [--shots 22] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from benchmarks.planted_features import Row, as_long_as, auc_of, row_of
from fvc_lib.corpus.samples.footage import Planes, Shot, draw_camera, generator_for, render_shot
from fvc_lib.services.registry import FEATURES

HEIGHT, WIDTH, FRAMES, MORE = 192, 256, 96, 18  # MORE: frames that a shot has beyond those that are shown
KILOBITS, FILE_BYTES = 400, 320_000
FAMILIES = [name for name in FEATURES.names() if FEATURES.get(name).of != "tiles"]


@dataclass(frozen=True)
class Encoding:
    """How frames become a file: H.264, a keyframe in so many frames or at chosen ones, at about so many kilobits."""

    kilobits: float = KILOBITS
    group: int = 48
    keys: frozenset[int] = frozenset()
    times: tuple[int, ...] = tuple(range(0, 40 * FRAMES, 40))  # thousandths of a second


PLAIN = Encoding()


def encode(path: Path, planes: Planes, how: Encoding) -> Path:
    """Write frames (T, 3*H/2, W)."""
    with av.open(str(path), "w") as output:
        options = {"preset": "veryfast", "sc_threshold": "0", "forced-idr": "1"}
        stream = output.add_stream("libx264", rate=25, options=options)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        context = stream.codec_context
        context.bit_rate, context.gop_size, context.thread_count = round(1000 * how.kilobits), how.group, 1
        context.time_base = Fraction(1, 1000)
        for number, pixels in enumerate(planes):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="yuv420p")
            frame.pts, frame.time_base = how.times[number], Fraction(1, 1000)
            if number in how.keys:
                frame.pict_type = av.video.frame.PictureType.I
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return path


def encode_alike(path: Path, planes: Planes, how: Encoding = PLAIN) -> Path:
    """As ``encode``, with as many bytes of video as the bit rate asks for, and in a file as long as any other."""
    wanted = how.kilobits * 1000 / 8 * len(planes) / 25
    for _ in range(3):
        encode(path, planes, how)
        ratio = wanted / path.stat().st_size
        if abs(ratio - 1) < 0.01:
            break
        how = replace(how, kilobits=how.kilobits * ratio)
    return as_long_as(path, FILE_BYTES)


def compressed(planes: Planes, how: Encoding) -> Planes:
    """What is left of frames after a file."""
    with tempfile.TemporaryDirectory() as folder, av.open(str(encode(Path(folder) / "a.mp4", planes, how))) as file:
        return np.stack([frame.to_ndarray() for frame in file.decode(video=0)])


# What is done to frames (T, 3*H/2, W), of which the first ``FRAMES`` would be shown, and how they are written.
Plant = Callable[[Planes, np.random.Generator], tuple[Planes, Encoding]]


def blended(planes: Planes, _: np.random.Generator) -> tuple[Planes, Encoding]:
    """Every second frame is the mean of its neighbours: a rate that was doubled."""
    mixed = planes[:FRAMES].copy()
    mixed[1:-1:2] = ((mixed[:-2:2].astype(np.uint16) + mixed[2::2] + 1) // 2).astype(np.uint8)
    return mixed, PLAIN


def repeated(planes: Planes, rng: np.random.Generator) -> tuple[Planes, Encoding]:
    """One frame in eight is shown twice, and the next one left out."""
    source = np.arange(FRAMES)
    source[rng.choice(np.arange(1, FRAMES), FRAMES // 8, replace=False)] -= 1
    return planes[source], PLAIN


def frozen(planes: Planes, rng: np.random.Generator) -> tuple[Planes, Encoding]:
    """Half a second is shown twice, over what came next."""
    begin = int(rng.integers(24, FRAMES - 40))
    source = np.arange(FRAMES)
    source[begin + 12 : begin + 24] -= 12
    return planes[source], PLAIN


def cut(planes: Planes, rng: np.random.Generator) -> tuple[Planes, Encoding]:
    """Three times six frames are left out, and the others shown at an even rate."""
    begins = np.array([12, 45, 78]) + rng.integers(0, 20, 3)
    return np.delete(planes, begins[:, None] + np.arange(6), axis=0), PLAIN


def dropped(planes: Planes, rng: np.random.Generator) -> tuple[Planes, Encoding]:
    """One frame in seven is left out, and the others are shown at an even rate."""
    return np.delete(planes, rng.choice(np.arange(1, len(planes) - 1), MORE, replace=False), axis=0), PLAIN


def twice(planes: Planes, rng: np.random.Generator) -> tuple[Planes, Encoding]:
    """Compressed before at the same rate, with a keyframe in 10 to 15 frames."""
    return compressed(planes[:FRAMES], Encoding(group=int(rng.integers(10, 16)))), PLAIN


def from_small(planes: Planes, _: np.random.Generator) -> tuple[Planes, Encoding]:
    """Compressed before at 60 % of the rate."""
    return compressed(planes[:FRAMES], Encoding(kilobits=0.6 * KILOBITS)), PLAIN


def part_from_small(planes: Planes, rng: np.random.Generator) -> tuple[Planes, Encoding]:
    """A third of the frames was compressed before, at 60 % of the rate."""
    begin, mixed = int(rng.integers(16, FRAMES - 48)), planes[:FRAMES].copy()
    mixed[begin : begin + 32] = compressed(mixed[begin : begin + 32], Encoding(kilobits=0.6 * KILOBITS))
    return mixed, PLAIN


def retimed(planes: Planes, rng: np.random.Generator) -> tuple[Planes, Encoding]:
    """Eight intervals are nearly twice as long and eight others as much shorter."""
    steps = np.full(FRAMES - 1, 40)
    chosen = rng.choice(len(steps), 16, replace=False)
    steps[chosen[:8]], steps[chosen[8:]] = 75, 5
    return planes[:FRAMES], Encoding(times=(0, *np.cumsum(steps).tolist()))


def joined(planes: Planes, rng: np.random.Generator) -> tuple[Planes, Encoding]:
    """Keyframes lie 12 frames apart, but around a joint in the middle, and no frame is changed."""
    joint = int(rng.integers(41, 55))
    keys = {*range(0, joint, 12), *range(joint, FRAMES, 12)}
    return planes[:FRAMES], Encoding(group=1000, keys=frozenset(keys))


def regular(planes: Planes, _: np.random.Generator) -> tuple[Planes, Encoding]:
    return planes[:FRAMES], Encoding(group=1000, keys=frozenset(range(0, FRAMES, 12)))


def untouched(planes: Planes, _: np.random.Generator) -> tuple[Planes, Encoding]:
    return planes[:FRAMES], PLAIN


# The manipulation, what it is compared with, and the families that find it.
PLANTED: tuple[tuple[Plant, Plant, tuple[str, ...]], ...] = (
    (blended, untouched, ("codec_motion", "packets", "quantisers")),
    (repeated, untouched, ("repeats", "packets", "codec_motion")),
    (frozen, untouched, ("repeats", "packets")),
    (cut, untouched, ("repeats", "packets")),
    (dropped, untouched, ("repeats", "packets")),
    (twice, untouched, ("packets", "quantisers")),
    (from_small, untouched, ("quantisers",)),
    (part_from_small, untouched, ("packets", "quantisers")),
    (retimed, untouched, ("timing",)),
    (joined, regular, ("packets",)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shots", type=int, default=22)
    parser.add_argument("--json", type=Path, help="where every column of every file is kept, and where to go on from")
    options = parser.parse_args()
    plants = {plant.__name__: plant for row in PLANTED for plant in row[:2]}
    rows: dict[str, list[Row]] = {name: [] for name in plants}
    if options.json and options.json.is_file():
        rows = json.loads(options.json.read_text())
    for number in range(len(rows["untouched"]), options.shots):
        name = f"planted {number}"
        planes = render_shot(Shot(name, WIDTH, HEIGHT, FRAMES + MORE, draw_camera(name)))
        with tempfile.TemporaryDirectory() as folder:
            for plant, make in plants.items():
                frames, how = make(planes, generator_for(plant, number))
                rows[plant].append(row_of(encode_alike(Path(folder) / "video.mp4", frames, how), FAMILIES))
        if options.json:
            options.json.write_text(json.dumps(rows))
    shots = len(rows["untouched"])
    labels, groups = np.repeat([0, 1], shots), np.tile(np.arange(shots), 2)
    columns = ["metadata", "index", *FAMILIES]
    print("|", " | ".join(["manipulation", *columns]), "|")
    for plant, beside, finders in PLANTED:
        cells = []
        for name in columns:
            found = auc_of(rows[beside.__name__] + rows[plant.__name__], name, labels, groups)
            mark = "**" if name in finders else ""
            cells.append(f"{mark}{found.value:.2f}{mark} [{found.low:.2f}, {found.high:.2f}]")
        print("|", " | ".join([plant.__name__, *cells]), "|", flush=True)


if __name__ == "__main__":
    sys.exit(main())
