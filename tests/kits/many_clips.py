"""Thousands of small clips in little time: drifting textures, half of them with a patch that stands still."""

from __future__ import annotations

import csv
import multiprocessing
from pathlib import Path

import av
import numpy as np

CLIPS_PER_GROUP = 2  # the second is the first at a lower rate
SIDE, NUM_FRAMES = 64, 12


def write_clips(folder: Path, count: int, *, first_group: int = 0) -> Path:
    """``count`` clips of real and fake groups in ``folder``; the manifest that lists them. Equal calls, equal bytes."""
    (folder / "videos").mkdir(parents=True)
    rows = []
    for number in range(count):
        group = first_group + number // CLIPS_PER_GROUP
        label = "fake" if group % 2 else "real"
        rows.append((f"videos/{group:05d}_{number % CLIPS_PER_GROUP}.mp4", label, f"g{group:05d}"))
    with multiprocessing.get_context("forkserver").Pool(2) as pool:
        pool.map(_write_clip, [(folder / path, group) for path, _, group in rows], chunksize=20)
    manifest = folder / "manifest.csv"
    with manifest.open("w", newline="") as stream:
        csv.writer(stream).writerows([("path", "label", "group"), *rows])
    return manifest


def _write_clip(clip: tuple[Path, str]) -> None:
    path, group = clip
    generator = np.random.default_rng(int(group[1:]))
    picture = np.kron(generator.integers(0, 256, (8, 8, 3)), np.ones((SIDE // 8, SIDE // 8, 1))).astype(np.uint8)
    top, left = generator.integers(0, SIDE * 3 // 4, 2)
    patch = generator.integers(0, 256, (SIDE // 4, SIDE // 4, 3))
    crf = "20" if path.stem.endswith("_0") else "28"
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("h264", rate=10, options={"crf": crf, "preset": "ultrafast", "threads": "1"})
        stream.width, stream.height, stream.pix_fmt = SIDE, SIDE, "yuv420p"
        for number in range(NUM_FRAMES):
            pixels = np.roll(picture, number, axis=1)
            if int(group[1:]) % 2:
                pixels[top : top + SIDE // 4, left : left + SIDE // 4] = patch
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
