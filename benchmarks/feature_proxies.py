#!/usr/bin/env python3
"""Which forensic features follow a video's size, length or codec, where nothing was done to its pictures.

Each generated shot is written in versions whose height, number of frames and codec are drawn independently of each
other and of the shot. What a feature's mean over a video has to do with them is printed, strongest first: those from
``PROXY`` on declare ``size_proxy``.

    python -m benchmarks.feature_proxies [--shots 10] [--versions 7] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import av
import numpy as np
import polars as pl

from fvc_lib.analysis.figures.corpus import feature_ties
from fvc_lib.corpus.samples.footage import Shot, draw_camera, generator_for, render_shot
from fvc_lib.services.registry import FEATURES
from fvc_lib.video.decode.probe import probe_video
from fvc_lib.video.features.family import sample_video
from fvc_lib.video.features.worker import measured

WIDTH, HEIGHT, FRAMES = 640, 480, 32
HEIGHTS, LENGTHS = (144, 192, 240, 336, 480), (8, 12, 20, 32)
CODECS = {
    "libx264": {"preset": "veryfast", "crf": "23"},
    "libx265": {"preset": "ultrafast", "crf": "26", "x265-params": "log-level=none:pools=none"},
    "mpeg4": {"qmin": "4", "qmax": "4"},
    "libvpx-vp9": {"deadline": "realtime", "cpu-used": "8", "crf": "33", "b": "0"},
}
PROXY = 0.8


def write(path: Path, planes: np.ndarray, height: int, codec: str) -> None:
    """Frames (T, 3*H/2, W), scaled to a height and compressed to about the same looks by any codec."""
    width = height * WIDTH // HEIGHT // 2 * 2
    with av.open(str(path), "w") as output:
        stream = output.add_stream(codec, rate=25, options=CODECS[codec])
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.thread_count = 1
        for each in planes:
            frame = av.VideoFrame.from_ndarray(each, format="yuv420p")
            small = frame.reformat(width, height, interpolation=av.video.reformatter.Interpolation.AREA)
            output.mux(stream.encode(small))
        output.mux(stream.encode(None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shots", type=int, default=10)
    parser.add_argument("--versions", type=int, default=7, help="of each shot")
    parser.add_argument("--json", type=Path, help="where to write the ties of all columns")
    options = parser.parse_args()
    rows, facts = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.shots):
            name = f"proxy {number}"
            planes = render_shot(Shot(name, WIDTH, HEIGHT, FRAMES, draw_camera(name)))
            draw = generator_for("versions", number)
            for version in range(options.versions):
                height, length, codec = (draw.choice(each) for each in (HEIGHTS, LENGTHS, [*CODECS]))
                path = Path(folder) / "video.mp4"
                write(path, planes[:length], int(height), str(codec))
                sample = sample_video(path)
                row = {"video_id": f"{number} {version}", "group_id": str(number), "label": "real"}
                facts.append({"video_id": row["video_id"], **asdict(probe_video(path))})
                for family in FEATURES.names():
                    row |= measured(sample, FEATURES.get(family))
                rows.append(row)
    ties = feature_ties(pl.DataFrame(rows, infer_schema_length=None), pl.DataFrame(facts, infer_schema_length=None))
    if options.json:
        options.json.write_text(json.dumps(ties.to_dicts()))
    of_means = ties.filter(
        pl.col("feature").str.ends_with("_mean") | ~pl.col("feature").str.contains("_(spread|low|high|least|most)$")
    )
    shown = of_means.with_columns(proxy=pl.max_horizontal("size", "length", "codec")).sort("proxy", descending=True)
    for row in shown.iter_rows(named=True):
        numbers = "  ".join(
            f"{each} {row[each]:.2f}" if row[each] is not None else f"{each} -   "
            for each in ("size", "length", "codec")
        )
        print(f"{'PROXY' if (row['proxy'] or 0) >= PROXY else '     '}  {row['feature']:45} {numbers}")


if __name__ == "__main__":
    sys.exit(main())
