#!/usr/bin/env python3
"""What forensic features still tell where labels differ in size, length, codec or rate alone, and what takes it away.

Generated shots, each by a camera of its own, are written twice: as one label has them and as the other. Then every file
is measured as it is, and after the re-encodings that a run may choose (``-p rescale``, ``-p canonical``). A logistic
regression on a family's columns, tested on other shots than it learned from, ranks one label above the other: AUC
within folds, with the interval of a bootstrap that draws shots. 0.5 is what nothing but noise would reach.

    python -m benchmarks.single_differences [--shots 20] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np

from benchmarks.feature_proxies import CODECS
from benchmarks.planted_features import Row, auc_of, row_of
from fvc_lib.corpus.samples.footage import Planes, Shot, draw_camera, render_shot
from fvc_lib.metrics.intervals import Interval
from fvc_lib.services.registry import FEATURES
from fvc_lib.video.reencode import recipe_named, reencode

WIDTH, HEIGHT, FRAMES = 480, 360, 48
TREATMENTS = (
    "",
    "rescale_360_at_10",
    "rescale_180_at_10",
    "rescale_90_at_10",
    "canonical",
    "canonical_rescale_90_at_10",
)


@dataclass(frozen=True)
class Written:
    """How a label's files are written."""

    height: int = HEIGHT
    frames: int = FRAMES
    rate: int = 30
    codec: str = "libx264"


DIFFERENCES = {
    "size: 360 or 180 rows": Written(height=180),
    "length: 48 or 24 frames": Written(frames=24),
    "codec: H.264 or MPEG-4": Written(codec="mpeg4"),
    "rate: 30 or 20 a second, 48 or 32 frames": Written(rate=20),
}


def write(path: Path, planes: Planes, how: Written) -> None:
    """Frames (T, 3*H/2, W), 30 a second; of a lower rate those nearest in time."""
    chosen = planes[np.rint(np.arange(0, how.frames * how.rate // 30) * 30 / how.rate).astype(int)]
    width = how.height * WIDTH // HEIGHT // 2 * 2
    with av.open(str(path), "w") as output:
        stream = output.add_stream(how.codec, rate=how.rate, options=CODECS[how.codec])
        stream.width, stream.height, stream.pix_fmt = width, how.height, "yuv420p"
        stream.codec_context.thread_count = 1
        for each in chosen:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(each), format="yuv420p")
            area = av.video.reformatter.Interpolation.AREA
            output.mux(stream.encode(frame.reformat(width, how.height, interpolation=area)))
        output.mux(stream.encode(None))


def measure(num_shots: int) -> dict[str, dict[str, list[Row]]]:
    """Rows by how a file was written and by treatment, shot after shot."""
    ways = {"usual": Written(), **DIFFERENCES}
    rows: dict[str, dict[str, list[Row]]] = {way: {each: [] for each in TREATMENTS} for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "source.mp4", Path(folder) / "target.mkv"
        for number in range(num_shots):
            name = f"single {number}"
            planes = render_shot(Shot(name, WIDTH, HEIGHT, FRAMES, draw_camera(name)))
            for way, how in ways.items():
                write(source, planes, how)
                for treatment in TREATMENTS:
                    if treatment:
                        reencode(source, target, recipe_named(treatment))
                    rows[way][treatment].append(row_of(target if treatment else source, FEATURES.names()))
            print(f"shot {number + 1} of {num_shots}", file=sys.stderr, flush=True)
    return rows


def cell(found: dict[str, Interval]) -> str:
    """The family that tells most, and how many tell anything."""
    best = max(found, key=lambda name: found[name].value)
    telling = sum(each.low > 0.5 for each in found.values())
    return f"{found[best].value:.2f} [{found[best].low:.2f}, {found[best].high:.2f}] {best}; {telling} of {len(found)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shots", type=int, default=20)
    parser.add_argument("--json", type=Path, help="where every column of every file is kept, and where to go on from")
    options = parser.parse_args()
    if options.json and options.json.is_file():
        rows = json.loads(options.json.read_text())
    else:
        rows = measure(options.shots)
        if options.json:
            options.json.write_text(json.dumps(rows))
    shots = len(rows["usual"][""])
    labels, groups = np.repeat([0, 1], shots), np.tile(np.arange(shots), 2)
    print("|", " | ".join(["the labels differ in", *(each or "as they are" for each in TREATMENTS)]), "|")
    print("|---" * (len(TREATMENTS) + 1) + "|")
    for way in DIFFERENCES:
        cells = []
        for treatment in TREATMENTS:
            both = rows["usual"][treatment] + rows[way][treatment]
            cells.append(cell({name: auc_of(both, name, labels, groups) for name in FEATURES.names()}))
        print("|", " | ".join([way, *cells]), "|", flush=True)


if __name__ == "__main__":
    sys.exit(main())
