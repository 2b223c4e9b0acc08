"""Render synthetic footage that looks filmed, encode it to a chosen file size, and write the sample corpora.

Footage has textured places, moving things, hand shake, exposure drift and noise. Frames are planar yuv420p, uint8
(T, 3*H/2, W), for T frames of height H and width W. Encoders and decoders use this format, so no colour conversion is
needed. Only element-wise arithmetic is used (no reductions, no BLAS): the bytes depend neither on thread counts nor on
the width of a CPU's vector units.

Manipulated footage compresses better or worse than camera footage. At a fixed quality, the bit rate would therefore
reveal the label. So every clip is encoded repeatedly, until its file has the size that its ``Encoding`` demands.
"""

import hashlib
import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import av
import numpy as np
import numpy.typing as npt
import polars as pl

from fvc_lib.services.atomic_files import write_bytes, write_text

Planes = npt.NDArray[np.uint8]  # (T, 3*H/2, W): luma rows, then both chroma planes as PyAV packs them
Plane = npt.NDArray[np.floating]  # float32 (H, W); stays float32 in arithmetic with Python's numbers

MARGIN_PIXELS = 28  # largest distance, along each axis, of the camera from the centre of the place it films


@dataclass(frozen=True)
class Camera:
    """Properties of a camera and its operator that affect every frame."""

    noise_sigma: float  # standard deviation of luma noise in grey levels at mid grey
    shake_pixels: float  # strength of random hand shake
    pan_pixels: float  # slow movement over the whole shot, mostly sideways
    exposure_drift: float  # relative change of brightness over the shot
    vignette: float  # relative darkening of the corners
    warmth: float  # shift of both chroma planes in levels


@dataclass(frozen=True)
class Shot:
    """Description of a shot, which is one piece of synthetic footage; equal descriptions give equal bytes."""

    name: str  # seeds the place, the moving things and the path of the camera
    width: int
    height: int
    num_frames: int
    camera: Camera


def generator_for(*parts: object) -> np.random.Generator:
    """Return a random generator whose seed is a hash of ``parts`` as text.

    Equal parts give equal draws on every machine, whatever was drawn before.
    """
    text = "\x1f".join(map(str, parts))
    digest = hashlib.sha256(text.encode()).digest()
    seed = int.from_bytes(digest[:16], "big")
    return np.random.Generator(np.random.PCG64(seed))


def draw_camera(name: str) -> Camera:
    """Return a handheld camera with random properties seeded by ``name``; reals and fakes have the same ranges."""
    rng = generator_for("camera", name)
    least = (2.5, 1.0, -18.0, -0.18, 0.05, -8.0)
    most = (4.5, 3.5, 18.0, 0.18, 0.25, 8.0)
    return Camera(*rng.uniform(least, most).tolist())


def render_shot(shot: Shot) -> Planes:
    """Render the T frames of ``shot``: moving patches before a background, filmed by a shaking camera with noise.

    The result is planar yuv420p in video range, uint8 (T, 3*H/2, W).
    The height H and the width W must be multiples of 4.
    """
    rng = generator_for("shot", shot.name)
    height = shot.height
    width = shot.width
    place, place_chroma = _draw_place(rng, shot)
    things = [_Thing(rng, shot) for _ in range(int(rng.integers(1, 4)))]
    path = _camera_path(rng, shot)
    gain = _exposure(rng, shot)
    down, right = (np.linspace(-1, 1, side, dtype=np.float32) for side in (height, width))
    squared_distance = (down * down)[:, None] + right * right
    falloff = 1 - shot.camera.vignette / 2 * squared_distance
    # A noise sheet that is larger than the frame. Neighbouring pixels are correlated, as after demosaicing.
    white = rng.normal(0, shot.camera.noise_sigma, (height + 65, width + 65)).astype(np.float32)
    noise = (white[1:, 1:] + white[:-1, 1:] + white[1:, :-1] + white[:-1, :-1]) / 1.6
    warmth = shot.camera.warmth
    shift = np.array([-warmth, warmth], np.float32)[:, None, None]
    frames = np.empty((shot.num_frames, height * 3 // 2, width), np.uint8)
    for t, (frame, (top, left)) in enumerate(zip(frames, path.tolist(), strict=True)):
        luma = place[top:, left:][: 2 * height : 2, : 2 * width : 2].copy()
        chroma = place_chroma[:, top // 2 :, left // 2 :][:, :height:2, :width:2].copy()
        share = t / max(shot.num_frames - 1, 1)
        for thing in things:
            thing.paste(luma, chroma, share)
        luma = _soften(luma) * (falloff * gain[t])
        # Add a random window of the noise sheet, randomly mirrored.
        row, column = rng.integers(0, 65, 2).tolist()
        flips = int(rng.integers(0, 4))
        window = noise[row : row + height, column : column + width]
        step_down = -1 if flips & 1 else 1
        step_right = -1 if flips & 2 else 1
        luma += window[::step_down, ::step_right] * (0.6 + luma / 320.0)
        frame[:height] = np.clip(np.rint(luma), 16, 235)
        levels = np.clip(np.rint(chroma + 128 + shift), 16, 240)
        frame[height:] = levels.reshape(height // 2, width)
    return frames


def resize_plane(plane: npt.NDArray[np.generic], height: int, width: int) -> Plane:
    """Return ``plane`` (H, W), resized bilinearly with half-pixel centres to (height, width), float32."""
    rows, row_weight = _taps(plane.shape[0], height)
    columns, column_weight = _taps(plane.shape[1], width)
    source: Plane = plane.astype(np.float32)
    upper = source[rows]
    lower = source[np.minimum(rows + 1, plane.shape[0] - 1)]
    mixed = upper + (lower - upper) * row_weight[:, None]
    left = mixed[:, columns]
    right = mixed[:, np.minimum(columns + 1, plane.shape[1] - 1)]
    resized: Plane = left + (right - left) * column_weight
    return resized


def _taps(source: int, target: int) -> tuple[npt.NDArray[np.int64], Plane]:
    centre = (np.arange(target) + 0.5) * (source / target)
    position = np.clip(centre - 0.5, 0, source - 1)
    first = np.floor(position).astype(np.int64)
    return first, (position - first).astype(np.float32)


def split_planes(planes: Planes) -> tuple[Planes, Planes, Planes]:
    """Return (luma, blue chroma, red chroma) of a packed frame (3*H/2, W), as views: (H, W), (H/2, W/2), (H/2, W/2)."""
    height = planes.shape[0] * 2 // 3
    width = planes.shape[1]
    chroma = planes[height:].reshape(2, height // 2, width // 2)
    return planes[:height], chroma[0], chroma[1]


def texture(rng: np.random.Generator, height: int, width: int, cells: tuple[int, ...], contrast: float) -> Plane:
    """Return a random texture, float32 (height, width), with values around 0.

    It is the sum of smooth noise with small and large spots.

    Args:
        rng: decides the texture.
        height: in pixels.
        width: in pixels.
        cells: sizes of the spots in pixels; noise of each size is added.
        contrast: largest amplitude of the noise of one size, in grey levels.
    """
    total = np.zeros((height, width), np.float32)
    for cell in cells:
        num_spots = (height // cell + 2, width // cell + 2)
        noise = rng.uniform(-1.0, 1.0, num_spots)
        total += resize_plane(noise, height, width)
    return total * contrast


class _Thing:
    """A textured patch that moves straight through a shot and may pause; ``rng`` decides its appearance and path."""

    def __init__(self, rng: np.random.Generator, shot: Shot) -> None:
        size = (shot.height, shot.width)
        self.sides = h, w = tuple(2 * int(rng.integers(side // 10, side // 5)) for side in size)
        rows = np.linspace(-1, 1, h)[:, None]
        columns = np.linspace(-1, 1, w)
        for _ in range(int(rng.integers(1, 4))):  # squaring gives the same bits on every machine; powers do not
            rows, columns = rows * rows, columns * columns
        self.inside = rows + columns <= 1.0  # (h, w)
        self.luma = rng.uniform(60, 190) + texture(rng, h, w, (16, 6), 10)
        self.chroma = rng.uniform(-28, 28, 2).tolist()
        self.start = rng.uniform(0.1, 0.9, 2) * size  # centre (row, column)
        self.travel = rng.uniform((-0.3, -0.6), (0.3, 0.6)) * size
        self.pause_from = rng.uniform(0.2, 1.5)  # time in shots at which the thing rests for a quarter of the shot

    def paste(self, luma: Plane, chroma: Plane, share: float) -> None:
        """Draw the patch into one frame: into ``luma`` (H, W) and ``chroma`` (2, H/2, W/2), which are changed in place.

        Parts outside the frame are cut off. ``share`` is the time in the shot, from 0 (first frame) to 1 (last frame);
        it decides the position of the patch.
        """
        after_pause = max(0.0, share - self.pause_from - 0.25)
        moved = min(share, self.pause_from) + after_pause
        centre = self.start + self.travel * moved
        exact_corner = centre - np.array(self.sides) / 2
        corner = [2 * round(place / 2) for place in exact_corner.tolist()]
        rows, columns = (
            slice(max(first, 0), max(0, min(first + side, length)))
            for first, side, length in zip(corner, self.sides, luma.shape, strict=True)
        )
        target = luma[rows, columns]
        own = np.s_[rows.start - corner[0] :, columns.start - corner[1] :]
        h, w = target.shape
        inside = self.inside[own][:h, :w]
        np.copyto(target, self.luma[own][:h, :w], where=inside)
        half_rows = slice(rows.start // 2, rows.stop // 2)
        half_columns = slice(columns.start // 2, columns.stop // 2)
        for plane, level in zip(chroma, self.chroma, strict=True):
            half = plane[half_rows, half_columns]
            half[inside[::2, ::2]] = level


def _draw_place(rng: np.random.Generator, shot: Shot) -> tuple[Plane, Plane]:
    """Draw the still background that a shot films; return (luma, chroma), float32 (H, W) and (2, H/2, W/2).

    The background is larger than the frames by ``MARGIN_PIXELS`` on every side. It has two pixels per pixel of a frame
    in both directions, so that the camera can move by half pixels. Chroma values are positive and negative.
    """
    height = 2 * (shot.height + 2 * MARGIN_PIXELS)
    width = 2 * (shot.width + 2 * MARGIN_PIXELS)
    luma = rng.uniform(100, 140) + texture(rng, height, width, (160, 90), 42)
    luma += texture(rng, height, width, (24, 9), 9)
    chroma = np.stack([texture(rng, height // 2, width // 2, (90, 40), 12) for _ in range(2)])
    # Light that falls off in one direction, as on a sky or a wall.
    luma += np.linspace(-1, 1, height, dtype=np.float32)[:, None] * rng.uniform(-35, 35)
    luma += np.linspace(-1, 1, width, dtype=np.float32) * rng.uniform(-35, 35)
    for _ in range(int(rng.integers(5, 10))):  # large still rectangles
        h, w = (2 * int(rng.integers(side // 10, side // 3)) for side in (height // 2, width // 2))
        free = (height - h, width - w)
        top, left = (2 * int(rng.integers(0, space // 2)) for space in free)
        level = rng.uniform(50, 200)
        luma[top : top + h, left : left + w] = level + texture(rng, h, w, (40, 8), 9)
        of_chroma = np.s_[top // 2 : (top + h) // 2, left // 2 : (left + w) // 2]
        for plane in chroma:
            plane[of_chroma] = rng.uniform(-22, 22)
    return luma, chroma


def _camera_path(rng: np.random.Generator, shot: Shot) -> npt.NDArray[np.int64]:
    """Return the position of the camera in each of T frames, int64 (T, 2), in half pixels.

    A position is the distance (down, right) of the frame's upper left corner from that of the filmed background. It is
    the sum of a slow pan and smoothed random shake.
    """
    steps = rng.normal(0, shot.camera.shake_pixels, (shot.num_frames + 4, 2))
    shake = (steps[:-4] + 2 * steps[1:-3] + 3 * steps[2:-2] + 2 * steps[3:-1] + steps[4:]) / 4
    angle_share = rng.uniform(-0.4, 0.4)
    distance = np.linspace(-0.5, 0.5, shot.num_frames)[:, None] * shot.camera.pan_pixels
    pan = distance * np.array([angle_share, 1.0])
    limit = 2 * MARGIN_PIXELS
    half_pixels = np.rint(2 * (shake + pan)).astype(np.int64)
    return np.asarray(np.clip(half_pixels, -limit, limit) + limit)


def _exposure(rng: np.random.Generator, shot: Shot) -> npt.NDArray[np.float32]:
    """Return for each of T frames the factor by which its brightness is multiplied, float32 (T,).

    The factor drifts slowly over the shot. In 30% of the shots it also changes within an eighth of the shot, as if a
    lamp was switched.
    """
    drift = 1.0 + shot.camera.exposure_drift * np.linspace(-0.5, 0.5, shot.num_frames)
    if rng.random() < 0.3:
        moment = rng.uniform(0.2, 0.8)
        strength = rng.uniform(-0.15, 0.15)
        time = np.linspace(0, 1, shot.num_frames)
        drift += strength * np.clip((time - moment) * 8, 0, 1)
    return drift.astype(np.float32)


def _soften(luma: Plane) -> Plane:
    """Return ``luma`` (H, W), blurred as by a lens: with weights 1/4, 1/2, 1/4 along both axes, borders unchanged."""
    soft = luma.copy()
    soft[1:-1] = (luma[:-2] + 2 * luma[1:-1] + luma[2:]) / 4
    wide = soft.copy()
    wide[:, 1:-1] = (soft[:, :-2] + 2 * soft[:, 1:-1] + soft[:, 2:]) / 4
    return wide


# --- Encode and decode.

# One thread, fixed speed and, where the format allows it, no version strings: so the bytes depend on the frames only.
_CODEC_OPTIONS = {
    "libx264": {"preset": "superfast", "threads": "1", "flags": "+bitexact", "g": "30"},
    # A small tolerance (bt): else the first frames of a short clip take too many bits, however low the rate.
    "mpeg4": {"threads": "1", "flags": "+bitexact", "g": "15", "qmin": "1", "lmin": "1", "bt": "20000"},
    "libvpx-vp9": {
        "deadline": "realtime", "cpu-used": "8", "threads": "1", "row-mt": "0", "lag-in-frames": "0",
        "flags": "+bitexact", "g": "60",
    },
}  # fmt: skip


@dataclass(frozen=True)
class Encoding:
    """Settings of an encoder: codec, container, frame rate and wanted file size."""

    codec: str  # encoder name
    suffix: str  # extension of the file name; decides the container
    frames_per_second: int
    bits_per_pixel: float  # file size in bits, divided by the pixels of all frames

    def target_bytes(self, frames: Planes) -> int:
        """Return the wanted file size of ``frames`` (T, 3*H/2, W), in bytes."""
        return int(frames.size * 2 // 3 * self.bits_per_pixel / 8)

    def bits_per_second(self, frames: Planes) -> int:
        """Return the bit rate at which ``frames`` (T, 3*H/2, W) take about the wanted file size."""
        return self.target_bytes(frames) * 8 * self.frames_per_second // len(frames)


def encode_to_size(frames: Planes, encoding: Encoding) -> bytes:
    """Encode frames (T, 3*H/2, W) to a file of about ``encoding.target_bytes``, and return the bytes of the file.

    The clip is encoded up to six times, until the size is within 3% of the target. The bit rates are chosen by the
    secant method in logarithms of rate and size. The file nearest to the target is returned.
    """
    target = encoding.target_bytes(frames)
    log_rate = math.log(target * 8 * encoding.frames_per_second / len(frames))
    slope = 1.0
    last_rate = last_miss = 0.0
    best, best_miss = b"", math.inf
    for attempt in range(6):
        content = encode_frames(frames, encoding, round(math.exp(log_rate)))
        miss = math.log(len(content) / target)
        if abs(miss) < abs(best_miss):
            best, best_miss = content, miss
        if abs(miss) <= 0.03:
            break
        if attempt and log_rate != last_rate:
            secant = (miss - last_miss) / (log_rate - last_rate)
            slope = min(max(secant, 0.4), 1.5)
        last_rate, last_miss = log_rate, miss
        log_rate -= min(max(miss / slope, -1.0), 1.0)
    return best


def encode_frames(frames: Planes, encoding: Encoding, bits_per_second: int) -> bytes:
    """Encode frames (T, 3*H/2, W) once, at about ``bits_per_second``; return the bytes of the file."""
    buffer = io.BytesIO()
    container = {"mkv": "matroska"}.get(encoding.suffix, encoding.suffix)
    with av.open(buffer, "w", format=container, options={"fflags": "+bitexact"}) as output:
        stream = cast(av.VideoStream, output.add_stream(encoding.codec, rate=encoding.frames_per_second))
        stream.width, stream.height = frames.shape[2], frames.shape[1] * 2 // 3
        stream.pix_fmt, stream.bit_rate = "yuv420p", bits_per_second
        stream.codec_context.thread_count = 1
        stream.options = dict(_CODEC_OPTIONS[encoding.codec])
        for planes in frames:
            frame = av.VideoFrame.from_ndarray(planes, format="yuv420p")
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return buffer.getvalue()


def decode_frames(content: bytes) -> Planes:
    """Return all frames of the video file with the bytes ``content``, uint8 (T, 3*H/2, W)."""
    with av.open(io.BytesIO(content), "r") as source:
        source.streams.video[0].codec_context.thread_count = 1
        frames = [frame.to_ndarray() for frame in source.decode(video=0)]
        return np.stack(frames).astype(np.uint8, copy=False)


# --- Write a corpus.

_MAX_THREADS = 4  # a thread holds the frames of up to two clips, about 20 MB


def generate(
    folder: Path,
    notice: str,
    plan: Mapping[Any, Callable[[], Sequence[bytes]]],
    manifest: pl.DataFrame,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the missing files of a generated corpus to ``folder``, on a few threads.

    If ``NOTICE.txt`` in the folder names another version of the corpus, all its files are made again. Files that do not
    belong to the corpus are left alone.

    Args:
        folder: folder of the corpus; it is made if it is missing.
        notice: text of ``NOTICE.txt``; it states the version of the generator.
        plan: maps a tuple of paths (relative to the folder, with '/') to a function that returns the contents of these
            files, in the same order.
        manifest: the table to write to ``manifest.csv``.
        progress: called with (files done, files in all) after each item of ``plan``.

    Returns:
        The path of ``manifest.csv``.

    Raises:
        OSError: a file cannot be written. A later call continues with the missing files.
    """
    version = folder / "NOTICE.txt"
    if not version.is_file() or version.read_bytes() != notice.encode():
        for path in (path for paths in plan for path in paths):
            (folder / path).unlink(missing_ok=True)
        write_text(version, notice)

    def make(paths: tuple[str, ...]) -> int:
        if not all((folder / path).is_file() for path in paths):
            for path, content in zip(paths, plan[paths](), strict=True):
                write_bytes(folder / path, content)
        return len(paths)

    with ThreadPoolExecutor(max_workers=min(os.cpu_count() or 1, _MAX_THREADS)) as makers:
        for done in accumulate(makers.map(make, plan)):
            if progress is not None:
                progress(done, sum(map(len, plan)))
    path = folder / "manifest.csv"
    text = manifest.write_csv()
    if not path.is_file() or path.read_bytes() != text.encode():  # an unchanged file keeps its modification time
        write_text(path, text)
    return path
