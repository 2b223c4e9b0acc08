#!/usr/bin/env python3
"""What each family of features of tiles finds of a manipulation that metadata cannot show.

Generated shots, each by a camera of its own, are written twice: as they are, and manipulated. Both are encoded alike,
with one codec, size, length and constant bit rate, in files that an empty box makes equally long. A logistic regression
on a family's columns, tested on other shots than it learned from, ranks manipulated above untouched: AUC within folds,
with the interval of a bootstrap that draws shots. Beside it the same on what the index has of a file without looking
at its packets.

    python -m benchmarks.planted_features [--shots 32] [--rates 0.25,1] [--videos LIST] [--json FILE]
"""

from __future__ import annotations

import argparse
import functools
import json
import struct
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedGroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fvc_lib.corpus.samples.footage import Planes, Shot, draw_camera, generator_for, render_shot, resize_plane
from fvc_lib.metrics.classification import roc_auc
from fvc_lib.metrics.cross_validation import within_folds
from fvc_lib.metrics.intervals import Interval, group_interval
from fvc_lib.services.registry import FEATURES
from fvc_lib.video.decode.probe import PacketFacts, probe_video
from fvc_lib.video.features.family import sample_video
from fvc_lib.video.features.worker import measured

HEIGHT, WIDTH, FRAMES, RATE = 192, 256, 12, 25
FAMILIES = [name for name in FEATURES.names() if FEATURES.get(name).of == "tiles"]
OF_PACKETS = {each.name for each in fields(PacketFacts)}
Luma = NDArray[np.float32]
Row = dict[str, float]
Change = Callable[[Planes, Planes, np.random.Generator], Planes]


@dataclass(frozen=True)
class Planted:
    """A manipulation, and the family that is there to find it.

    ``apply`` takes frames of a shot and of another one, uint8 (T, 3*H/2, W) as planar yuv420p, and a generator.
    """

    family: str
    name: str
    apply: Change


def on_luma(change: Callable[[Luma], NDArray[np.floating]]) -> Change:
    """Changes the luma (T, H, W), as float."""

    def apply(planes: Planes, _: Planes, __: np.random.Generator) -> Planes:
        changed = planes.copy()
        luma = change(planes[:, :HEIGHT].astype(np.float32))
        changed[:, :HEIGHT] = np.clip(np.rint(luma), 0, 255).astype(np.uint8)
        return changed

    return apply


def scale_up(luma: Luma) -> Luma:
    """The middle 80 % of the picture, as large as the whole."""
    top, left = HEIGHT // 10, WIDTH // 10
    return np.stack([resize_plane(each[top:-top, left:-left], HEIGHT, WIDTH) for each in luma])


def compressed_before(gop: int) -> Change:
    """Compress by MPEG-4 with a quantiser of 4 and keyframes ``gop`` frames apart."""

    def apply(planes: Planes, _: Planes, __: np.random.Generator) -> Planes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "before.mkv"
            encode(path, planes, "mpeg4", {"qmin": "4", "qmax": "4"}, gop)
            with av.open(str(path)) as container:
                return np.stack([frame.to_ndarray() for frame in container.decode(video=0)])

    return apply


PLANTED = (
    Planted("noise_residual", "noise removed, median of 3 x 3", on_luma(lambda y: ndimage.median_filter(y, (1, 3, 3)))),
    Planted("sharpness", "blur, sigma 0.8", on_luma(lambda y: ndimage.gaussian_filter(y, (0, 0.8, 0.8)))),
    Planted("spectrum", "scaled up from 80 %", on_luma(scale_up)),
    Planted("block_dct", "compressed before, few keyframes", compressed_before(12)),
    Planted("double_compression", "compressed before, keyframes alone", compressed_before(1)),
)


def encode(path: Path, planes: Planes, codec: str, options: Mapping[str, str], gop: int) -> None:
    """Write frames (T, 3*H/2, W) as they are."""
    with av.open(str(path), "w") as output:
        stream = output.add_stream(codec, rate=RATE, options=dict(options))
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.codec_context.gop_size, stream.codec_context.thread_count = gop, 1
        for each in planes:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(each), format="yuv420p")))
        output.mux(stream.encode(None))


def encode_alike(path: Path, planes: Planes, bits_per_pixel: float) -> Path:
    """H.264 at a constant bit rate, in a file as long as any other of that rate and as many frames."""
    kilobits = round(bits_per_pixel * WIDTH * HEIGHT * RATE / 1000)
    rate = f"bitrate={kilobits}:vbv-maxrate={kilobits}:vbv-bufsize={kilobits // 2}:nal-hrd=cbr:mbtree=0"
    encode(path, planes, "libx264", {"preset": "veryfast", "b": f"{kilobits}k", "x264-params": rate}, 12)
    return as_long_as(path, kilobits * 1000 // 8 * 2 * len(planes) // RATE)


def as_long_as(path: Path, num_bytes: int) -> Path:
    """The MP4 file, an empty box at its end."""
    missing = num_bytes - path.stat().st_size
    with path.open("ab") as file:
        file.write(struct.pack(">I4s", missing, b"free") + bytes(missing - 8))
    return path


def row_of(path: Path, families: Sequence[str]) -> Row:
    """Columns of the families; what the index has of a file as ``index_...``, without packets as ``metadata_...``."""
    sample, facts = sample_video(path), asdict(probe_video(path))
    columns: Row = {}
    for name in families:
        columns |= measured(sample, FEATURES.get(name))
    for name, value in facts.items():
        if value is None or isinstance(value, int | float):
            known = np.nan if value is None else float(value)
            columns |= {f"index_{name}": known} | ({} if name in OF_PACKETS else {f"metadata_{name}": known})
    return columns


def auc_of(rows: list[Row], measured_by: str, labels: NDArray, shots: NDArray) -> Interval:
    """Of a logistic regression on the columns of a family, or on what is called ``metadata`` or ``index``."""
    own = FEATURES.get(measured_by).columns() if measured_by in FEATURES.names() else ()
    names = [name for name in rows[0] if name in own or (not own and name.startswith(measured_by + "_"))]
    values = np.array([[row[name] for name in names] for row in rows])
    values = values[:, np.isfinite(values).any(0)]
    scores, folds = np.zeros(len(rows)), np.zeros(len(rows), np.int64)
    splits = StratifiedGroupKFold(5, shuffle=True, random_state=0).split(values, labels, shots)
    for fold, (train, test) in enumerate(splits):
        model = make_pipeline(
            SimpleImputer(keep_empty_features=True), StandardScaler(), LogisticRegression(C=0.1, max_iter=2000)
        )
        model.fit(values[train], labels[train])
        scores[test], folds[test] = model.decision_function(values[test]), fold
    return group_interval(labels, scores, shots.tolist(), within_folds(roc_auc, folds))


@functools.lru_cache(2)
def generated(number: int) -> Planes:
    """One of the generated shots."""
    name = f"planted {number}"
    return render_shot(Shot(name, WIDTH, HEIGHT, FRAMES, draw_camera(name)))


@functools.lru_cache(2)
def middle_of(path: Path) -> Planes:
    """The first frames of a real video, cut out of the middle at its own resolution."""
    cuts = []
    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            width, height = frame.width // 4 * 4, frame.height // 4 * 4
            planes = frame.reformat(width=width, height=height, format="yuv420p").to_ndarray()
            top, left = (height - HEIGHT) // 4 * 2, (width - WIDTH) // 4 * 2
            chroma = planes[height:].reshape(2, height // 2, width // 2)
            half = chroma[:, top // 2 : (top + HEIGHT) // 2, left // 2 : (left + WIDTH) // 2]
            cuts.append(
                np.concatenate([planes[top : top + HEIGHT, left : left + WIDTH], half.reshape(HEIGHT // 2, WIDTH)])
            )
            if len(cuts) == FRAMES:
                break
    return np.stack(cuts)


def measure_all(shots: list[Callable[[], Planes]], bits_per_pixel: float, names: set[str]) -> dict[str, list[Row]]:
    """Rows of each shot by what was done to it, "untouched" among them."""
    rows: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "video.mp4"
        for number, shot in enumerate(shots):
            planes, donor = shot(), shots[number - 1]()
            made = {"untouched": planes}
            for planted in PLANTED:
                if planted.name in names:
                    generator = generator_for(planted.name, number)
                    made[planted.name] = planted.apply(planes, donor[: len(planes)], generator)
            for name, frames in made.items():
                rows.setdefault(name, []).append(row_of(encode_alike(path, frames, bits_per_pixel), FAMILIES))
    return rows


def compare(rows: dict[str, list[Row]], planted: Planted, name: str) -> Interval:
    """How well the columns of ``name`` tell the manipulated from the untouched."""
    count = len(rows["untouched"])
    labels, shots = np.repeat([0, 1], count), np.tile(np.arange(count), 2)
    return auc_of(rows["untouched"] + rows[planted.name], name, labels, shots)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shots", type=int, default=32)
    parser.add_argument("--rates", default="0.25,1", help="bits per pixel")
    parser.add_argument("--videos", type=Path, help="a file that names real videos, one a line, in place of shots")
    parser.add_argument("--json", type=Path, help="where to write every column of every file")
    options = parser.parse_args()
    if options.videos:
        paths = [Path(line) for line in options.videos.read_text().splitlines() if line]
        shots = [functools.partial(middle_of, path) for path in paths]
    else:
        shots = [functools.partial(generated, number) for number in range(options.shots)]
    everything = {}
    for rate in options.rates.split(","):
        rows = measure_all(shots, float(rate), {planted.name for planted in PLANTED})
        everything[rate] = rows
        columns = ["metadata", *FAMILIES]
        print(f"\n{rate} bits per pixel, {len(shots)} shots\n")
        print("|", " | ".join(["manipulation", *columns]), "|\n|", "---|" * (len(columns) + 1), sep="")
        for planted in PLANTED:
            cells = []
            for name in columns:
                found = compare(rows, planted, name)
                mark = "**" if name == planted.family else ""
                cells.append(f"{mark}{found.value:.2f}{mark} [{found.low:.2f}, {found.high:.2f}]")
            print("|", " | ".join([planted.name, *cells]), "|", flush=True)
    if options.json:
        options.json.write_text(json.dumps(everything))


if __name__ == "__main__":
    sys.exit(main())
