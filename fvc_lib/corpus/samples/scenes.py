"""Render synthetic footage that looks filmed: textured places, moving things, hand shake, exposure drift, noise.

Frames are planar yuv420p, uint8 (T, 3*H/2, W), as encoders and decoders use: no colour conversion is needed. Only
element-wise arithmetic is used (no reductions, no BLAS): the bytes depend neither on thread counts nor on the width
of a CPU's vector units.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Planes = npt.NDArray[np.uint8]  # (T, 3*H/2, W): luma rows, then both chroma planes as PyAV packs them
Plane = npt.NDArray[np.float32]  # (H, W)

MARGIN_PIXELS = 28  # largest distance of the camera from the centre of its canvas


@dataclass(frozen=True)
class Camera:
    """Properties of a device that affect every frame."""

    noise_sigma: float  # standard deviation of luma noise in grey levels at mid grey
    shake_pixels: float
    pan_pixels: float  # drift over the whole shot
    exposure_drift: float  # relative change of brightness over the shot
    vignette: float  # relative darkening of the corners
    warmth: float  # shift of both chroma planes in levels


@dataclass(frozen=True)
class Shot:
    """A piece of footage to render; equal values give equal bytes."""

    name: str  # seeds the scene
    width: int
    height: int
    num_frames: int
    camera: Camera


def generator_for(*parts: object) -> np.random.Generator:
    """Return a random generator that is seeded by the texts of ``parts``, and by nothing else.

    Equal parts give equal draws on every machine, whatever was drawn before.
    """
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big")))


def draw_camera(name: str) -> Camera:
    """Return a handheld camera with properties seeded by ``name``; they have the same ranges for reals and fakes."""
    rng = generator_for("camera", name)
    ranges = ((2.5, 4.5), (1.0, 3.5), (-18.0, 18.0), (-0.18, 0.18), (0.05, 0.25), (-8.0, 8.0))
    return Camera(*(rng.uniform(*limits) for limits in ranges))


def render_shot(shot: Shot) -> Planes:
    """Return the frames of ``shot``, planar yuv420p in video range, uint8 (T, 3*H/2, W).

    Width and height must be multiples of 4.
    """
    rng = generator_for("shot", shot.name)
    place_luma, place_chroma = _draw_place(rng, shot)
    things = [_draw_thing(rng, shot) for _ in range(int(rng.integers(1, 4)))]
    path, gain = _camera_path(rng, shot), _exposure(rng, shot)
    rows = np.linspace(-1, 1, shot.height, dtype=np.float32)[:, None]
    columns = np.linspace(-1, 1, shot.width, dtype=np.float32)
    falloff = 1 - np.float32(shot.camera.vignette / 2) * (rows * rows + columns * columns)
    # A noise sheet larger than the frame; neighbours are correlated, as after demosaicing.
    white = rng.normal(0, shot.camera.noise_sigma, (shot.height + 65, shot.width + 65)).astype(np.float32)
    noise = (white[1:, 1:] + white[:-1, 1:] + white[1:, :-1] + white[:-1, :-1]) / np.float32(1.6)
    shift = np.array([-shot.camera.warmth, shot.camera.warmth], np.float32)[:, None, None]
    frames = np.empty((shot.num_frames, shot.height * 3 // 2, shot.width), np.uint8)
    for t, (frame, (top, left)) in enumerate(zip(frames, path.tolist(), strict=True)):
        luma = place_luma[top : top + 2 * shot.height : 2, left : left + 2 * shot.width : 2].copy()
        half = np.s_[top // 2 : top // 2 + shot.height : 2, left // 2 : left // 2 + shot.width : 2]
        chroma = place_chroma[:, *half].copy()
        for thing in things:
            thing.paste(luma, chroma, t / max(shot.num_frames - 1, 1))
        luma = _soften(luma) * (falloff * gain[t])
        # A random window of the noise sheet, randomly mirrored.
        down, right = (int(v) for v in rng.integers(0, 65, 2))
        flips = int(rng.integers(0, 4))
        window = noise[down : down + shot.height, right : right + shot.width]
        luma += window[:: -1 if flips & 1 else 1, :: -1 if flips & 2 else 1] * (0.6 + luma / np.float32(320.0))
        levels = np.clip(np.rint(chroma + 128 + shift), 16, 240).astype(np.uint8)
        frame[: shot.height] = np.clip(np.rint(luma), 16, 235).astype(np.uint8)
        frame[shot.height :] = levels.reshape(shot.height // 2, shot.width)
    return frames


def resize_plane(plane: npt.NDArray[np.generic], height: int, width: int) -> Plane:
    """Resize (H, W) bilinearly with half-pixel centres, by gathers and element-wise sums only."""
    rows, row_weight = _taps(plane.shape[0], height)
    columns, column_weight = _taps(plane.shape[1], width)
    source = plane.astype(np.float32)
    upper, lower = source[rows], source[np.minimum(rows + 1, plane.shape[0] - 1)]
    mixed = upper + (lower - upper) * row_weight[:, None]
    left, right = mixed[:, columns], mixed[:, np.minimum(columns + 1, plane.shape[1] - 1)]
    return np.asarray(left + (right - left) * column_weight, np.float32)


def texture(rng: np.random.Generator, height: int, width: int, cells: tuple[int, ...], contrast: float) -> Plane:
    """Return a random texture, (height, width), with values around 0: a sum of smooth noise of several scales.

    Args:
        rng: decides the texture.
        height: in pixels.
        width: in pixels.
        cells: size of the spots of every scale, in pixels.
        contrast: largest amplitude of one scale.
    """
    total = np.zeros((height, width), np.float32)
    for cell in cells:
        grid = rng.uniform(-1.0, 1.0, (height // cell + 2, width // cell + 2))
        total += resize_plane(grid, height, width)
    return total * np.float32(contrast)


@dataclass(frozen=True)
class _Thing:
    """Something that crosses the view, and may pause on its way."""

    luma: Plane
    chroma: tuple[float, float]
    inside: npt.NDArray[np.bool_]  # (h, w), h and w even
    start: tuple[float, float]  # centre (row, column) in pixels
    travel: tuple[float, float]
    pause_from: float  # share of the shot; the thing rests for a quarter of it

    def paste(self, luma: Plane, chroma: npt.NDArray[np.float32], share: float) -> None:
        """Draw the thing into luma (H, W) and chroma (2, H/2, W/2), in place, clipped at the borders.

        ``share`` is the time in the shot, from 0 to 1.
        """
        moved = min(share, self.pause_from) + max(0.0, share - self.pause_from - 0.25)
        top, left = (
            2 * round((self.start[axis] + self.travel[axis] * moved - self.inside.shape[axis] / 2) / 2)
            for axis in (0, 1)
        )
        rows = slice(max(top, 0), min(top + self.inside.shape[0], luma.shape[0]))
        columns = slice(max(left, 0), min(left + self.inside.shape[1], luma.shape[1]))
        if rows.start >= rows.stop or columns.start >= columns.stop:
            return
        own = np.s_[rows.start - top : rows.stop - top, columns.start - left : columns.stop - left]
        inside = self.inside[own]
        np.copyto(luma[rows, columns], self.luma[own], where=inside)
        half = np.s_[rows.start // 2 : rows.stop // 2, columns.start // 2 : columns.stop // 2]
        for plane, level in zip(chroma, self.chroma, strict=True):
            np.copyto(plane[half], np.float32(level), where=inside[::2, ::2])


def _taps(source: int, target: int) -> tuple[npt.NDArray[np.int64], Plane]:
    position = np.clip((np.arange(target) + 0.5) * (source / target) - 0.5, 0, source - 1)
    first = np.floor(position).astype(np.int64)
    return first, (position - first).astype(np.float32)


def _draw_place(rng: np.random.Generator, shot: Shot) -> tuple[Plane, npt.NDArray[np.float32]]:
    """Return (luma, chroma) of the place of a shot, (H, W) and (2, H/2, W/2).

    H and W are those of the frames plus margins, times two, so that the camera can move by half pixels.
    """
    height, width = 2 * (shot.height + 2 * MARGIN_PIXELS), 2 * (shot.width + 2 * MARGIN_PIXELS)
    luma = np.float32(rng.uniform(100, 140)) + texture(rng, height, width, (160, 90), 42)
    luma += texture(rng, height, width, (24, 9), 9)
    chroma = np.stack([texture(rng, height // 2, width // 2, (90, 40), 12) for _ in range(2)])
    # Light that falls off in one direction, as on a sky or a wall.
    luma += np.linspace(-1, 1, height, dtype=np.float32)[:, None] * np.float32(rng.uniform(-35, 35))
    luma += np.linspace(-1, 1, width, dtype=np.float32) * np.float32(rng.uniform(-35, 35))
    for _ in range(int(rng.integers(5, 10))):
        _add_block(rng, luma, chroma)
    return luma, chroma


def _add_block(rng: np.random.Generator, luma: Plane, chroma: npt.NDArray[np.float32]) -> None:
    """Draw a large still rectangle of random place, brightness, colour and texture into luma and chroma, in place."""
    height, width = luma.shape
    h, w = (2 * int(rng.integers(side // 10, side // 3)) for side in (height // 2, width // 2))
    top, left = 2 * int(rng.integers(0, (height - h) // 2)), 2 * int(rng.integers(0, (width - w) // 2))
    luma[top : top + h, left : left + w] = np.float32(rng.uniform(50, 200)) + texture(rng, h, w, (40, 8), 9)
    for plane in chroma:
        plane[top // 2 : (top + h) // 2, left // 2 : (left + w) // 2] = np.float32(rng.uniform(-22, 22))


def _draw_thing(rng: np.random.Generator, shot: Shot) -> _Thing:
    h, w = (2 * int(rng.integers(side // 10, side // 5)) for side in (shot.height, shot.width))
    rows, columns = np.linspace(-1, 1, h)[:, None], np.linspace(-1, 1, w)
    for _ in range(int(rng.integers(1, 4))):  # squares, not powers: the same to the last bit everywhere
        rows, columns = rows * rows, columns * columns
    inside = rows + columns <= 1.0
    return _Thing(
        luma=np.float32(rng.uniform(60, 190)) + texture(rng, h, w, (16, 6), 10),
        chroma=(rng.uniform(-28, 28), rng.uniform(-28, 28)),
        inside=inside,
        start=(rng.uniform(0.1, 0.9) * shot.height, rng.uniform(0.1, 0.9) * shot.width),
        travel=(rng.uniform(-0.3, 0.3) * shot.height, rng.uniform(-0.6, 0.6) * shot.width),
        pause_from=rng.uniform(0.2, 1.5),
    )


def _camera_path(rng: np.random.Generator, shot: Shot) -> npt.NDArray[np.int64]:
    """Return the offsets (down, right) of the view from the canvas's corner, (T, 2), in half pixels.

    They are a slow pan plus smoothed random shake.
    """
    steps = rng.normal(0, shot.camera.shake_pixels, (shot.num_frames + 4, 2))
    shake = (steps[:-4] + 2 * steps[1:-3] + 3 * steps[2:-2] + 2 * steps[3:-1] + steps[4:]) / 4
    angle_share = rng.uniform(-0.4, 0.4)
    pan = np.linspace(-0.5, 0.5, shot.num_frames)[:, None] * shot.camera.pan_pixels * np.array([angle_share, 1.0])
    limit = 2 * MARGIN_PIXELS
    half_pixels = np.rint(2 * (shake + pan)).astype(np.int64)
    return np.asarray(np.clip(half_pixels, -limit, limit) + limit)


def _exposure(rng: np.random.Generator, shot: Shot) -> npt.NDArray[np.float32]:
    """Return a factor of brightness per frame, (T,): a slow drift, and in 30% of the shots a lamp that is switched."""
    drift = 1.0 + shot.camera.exposure_drift * np.linspace(-0.5, 0.5, shot.num_frames)
    if rng.random() < 0.3:
        moment, strength = rng.uniform(0.2, 0.8), rng.uniform(-0.15, 0.15)
        drift += strength * np.clip((np.linspace(0, 1, shot.num_frames) - moment) * 8, 0, 1)
    return drift.astype(np.float32)


def _soften(luma: Plane) -> Plane:
    """Blur as a lens does: three taps in each direction, borders unchanged."""
    soft = luma.copy()
    soft[1:-1] = (luma[:-2] + 2 * luma[1:-1] + luma[2:]) / 4
    wide = soft.copy()
    wide[:, 1:-1] = (soft[:, :-2] + 2 * soft[:, 1:-1] + soft[:, 2:]) / 4
    return wide
