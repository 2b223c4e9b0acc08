"""Re-encode videos by a recipe, a named way to compress, shrink, blur or cut them, with one frame in memory at a time.

The recipe ``canonical`` gives all videos of a corpus the same encoding, so that a model cannot guess labels from
container and encoder settings. ``rescale_480_at_8`` gives all videos 480 rows and 8 frames a second.
``canonical_rescale_480_at_8`` does both. A run applies one such recipe to its videos (``RunConfig.recipe``). The other
recipes imitate what platforms do to videos. The robustness sweep measures how much they change detectors' scores.

Only the pictures of the best video stream are written, without sound and metadata. Pictures are turned upright. The
times of frames are shifted to begin at 0. The aspect ratio of pixels and the colour tags do not change. High dynamic
range is not tone mapped. Rescaled videos have square pixels and a constant frame rate; every output frame is the source
frame nearest in time.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt
from av.video.frame import VideoFrame
from av.video.reformatter import ColorRange, VideoReformatter
from av.video.stream import VideoStream

from fvc_lib.services.atomic_files import (
    AnyPath,
    atomic_output,
    read_json_object,
    sha256_of_file,
    sha256_of_json,
    write_json,
)
from fvc_lib.services.code_versions import code_hash
from fvc_lib.services.errors import UsageError
from fvc_lib.video.decode.decoding import decode
from fvc_lib.video.decode.frame_table import IntArray, Seconds, read_frame_table
from fvc_lib.video.decode.pixels import SCALER, FrameConverter, Orientation
from fvc_lib.video.decode.source import (
    UnsupportedVideo,
    VideoSource,
    check_size,
    digest_of_video,
    ffmpeg_errors,
    open_video,
)

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Recipe:
    """A named way to change the frames of a video and encode them again.

    Attributes:
        name: name in commands and tables.
        kind: kind of change; recipes of the same kind differ only in their level.
        level: strength of the change in words, with the unit.
        codec: ffmpeg's name of the encoder.
        crf: constant rate factor of the encoder; 0: lossless, so that only the other settings change pixels.
        options: names and values of further options of the encoder.
        scale: factor on width and height.
        height: number of rows of the upright picture, even; the width keeps the aspect ratio. 0: as the source.
        rate: frames per second; frames are left out or repeated. 0: as the source.
        strength: strength of a change of the pixels before they are encoded; 0: no change. For kind ``jpeg`` it is the
            quality of a JPEG (Pillow's scale, colour at half the resolution). For ``blur`` it is the sigma of a
            Gaussian blur in pixels of the video. For ``noise`` it is the sigma of Gaussian noise in grey levels, with a
            new pattern in every frame.
        every: only every ``every``-th frame is written.
        trim_front, trim_back: shares of the frames that are cut off at the start and at the end; the number of frames
            is rounded down, and at least one frame stays.
    """

    name: str
    kind: str
    level: str
    codec: str = "libx264"
    crf: int = 0
    options: tuple[tuple[str, str], ...] = ()
    scale: Fraction = Fraction(1)
    height: int = 0
    rate: int = 0
    strength: int = 0
    every: int = 1
    trim_front: float = 0
    trim_back: float = 0

    @property
    def digest(self) -> str:
        """Return a hexadecimal SHA-256 of all that a re-encoded file depends on: recipe, code and PyAV's version."""
        fields = {**asdict(self), "scale": str(self.scale)}
        return sha256_of_json([fields, code_hash(__name__, "fvc_lib.video"), av.__version__])

    def shown(self, times: Seconds) -> tuple[IntArray, Seconds]:
        """Return a tuple: the indices of the source frames to write, and the times at which they are shown.

        Args:
            times: float64 (n,), ascending, in seconds, of all frames in presentation order.

        Returns:
            Ascending frame indices, int64 (m,), which may repeat; and their presentation times in seconds after the
            first frame, float64 (m,).
        """
        if not self.rate:
            first = min(int(len(times) * self.trim_front), len(times) - 1)
            end = max(len(times) - int(len(times) * self.trim_back), first + 1)
            places = np.arange(first, end, self.every)
            return places, times[places] - times[places[0]]
        since = times - times[0]
        # The last frame is assumed to last as long as the mean of the others.
        seconds = float(since[-1]) * len(times) / max(1, len(times) - 1)
        num_shown = max(1, int(seconds * self.rate + 0.5))
        shown = np.arange(num_shown) / self.rate
        # Of two equally near frames the earlier is shown. The tolerance is for containers that round to milliseconds.
        changes_at = (since[1:] + since[:-1]) / 2 + _SAME_SECONDS
        return np.searchsorted(changes_at, shown), shown

    def num_shown(self, num_frames: int, seconds: float | None) -> int:
        """Return the largest possible number of distinct source frames in the re-encoded video.

        Args:
            num_frames: number of frames of the source video.
            seconds: duration of the source video; None if unknown.
        """
        return min(num_frames, max(1, int(seconds * self.rate + 0.5))) if self.rate and seconds else num_frames

    @property
    def is_scaled(self) -> bool:
        """Return whether the recipe resizes the pictures of a video."""
        return self.scale != 1 or bool(self.height)


_SAME_SECONDS = 1e-3

# Macroblock trees are off. With them the bytes that x264 writes vary from call to call at 96 x 64, 112 x 112 and 320 x
# 240 pixels (in core 165, whose vector code reads uninitialised memory), so runs would not be reproducible.
_X264 = (("preset", "medium"), ("mbtree", "0"))
_CLOSED_16 = (("g", "16"), ("keyint_min", "16"), ("sc_threshold", "0"), ("flags", "+cgop"))
_X265 = (("preset", "medium"), ("x265-params", "pools=none:frame-threads=1:log-level=none"))

RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("canonical", "canonical", "H.264 CRF 23", "libx264", 23, _X264 + _CLOSED_16),
        Recipe("lossless", "lossless", "no change"),
        *(
            Recipe(f"h264_crf{crf}", "h264", f"CRF {crf}", "libx264", crf, _X264) for crf in (23, 28, 35, 40)
        ),
        Recipe("h265_crf28", "h265", "CRF 28", "libx265", 28, _X265),
        Recipe("size_half", "size", "1/2 width and height", scale=Fraction(1, 2)),
        Recipe("size_quarter", "size", "1/4 width and height", scale=Fraction(1, 4)),
        *(Recipe(f"jpeg_{quality}", "jpeg", f"quality {quality}", strength=quality) for quality in (90, 70, 50)),
        *(Recipe(f"blur_{sigma}", "blur", f"sigma {sigma} px", strength=sigma) for sigma in (1, 2, 4)),
        *(Recipe(f"noise_{sigma}", "noise", f"sigma {sigma} of 255", strength=sigma) for sigma in (4, 8, 16)),
        Recipe("rate_half", "rate", "every 2nd frame", every=2),
        Recipe("trim_front", "trim", "first 25 % cut off", trim_front=0.25),
        Recipe("trim_back", "trim", "last 25 % cut off", trim_back=0.25),
    )
}  # fmt: skip


_RESCALING = re.compile(r"(canonical_)?rescale_([1-9][0-9]*)_at_([1-9][0-9]*)")


def recipe_named(name: str) -> Recipe:
    """Return the recipe (way to re-encode videos) with the given name.

    The name is a key of ``RECIPES``, or describes a rescaling, such as ``rescale_480_at_8`` (480 rows, 8 frames a
    second) or ``canonical_rescale_480_at_8``.

    Raises:
        UsageError: there is no such recipe.
    """
    if name in RECIPES:
        return RECIPES[name]
    match = _RESCALING.fullmatch(name)
    if match is None:
        raise UsageError(f"recipe {name!r}: no such recipe. Recipes: {', '.join(RECIPES)}.")
    height, rate = int(match[2]), int(match[3])
    return replace(
        RECIPES["canonical" if match[1] else "lossless"],
        name=name, kind="rescale", level=f"{height} rows, {rate} frames a second", height=height, rate=rate,
    )  # fmt: skip


# --- Re-encoded files in the cache; their names contain the recipe and the SHA-256 of the source


REENCODED_FOLDER = "reencoded"
TIMEOUT_SECONDS = 3600.0  # time limit of one video, which may be hours long


def reencoded_folder(recipe: str, cache_dir: AnyPath) -> Path:
    """Return the folder in ``cache_dir`` for videos that are re-encoded by the recipe with the name ``recipe``.

    The folder's name contains the hash ``Recipe.digest``, so a changed recipe gets another folder.
    """
    return Path(cache_dir) / REENCODED_FOLDER / f"{recipe}_{recipe_named(recipe).digest[:32]}"


def reencoded(path: AnyPath, recipe: str, cache_dir: AnyPath) -> Path:
    """Re-encode a video into the cache, and return the path of the result; an undamaged earlier result is used again.

    Args:
        path: the source video.
        recipe: name of the recipe.
        cache_dir: the cache.

    Raises:
        VideoError: the video cannot be read or encoded.
        OSError: the file cannot be written.
    """
    content_sha256 = digest_of_video(Path(path))
    target = reencoded_folder(recipe, cache_dir) / content_sha256[:2] / f"{content_sha256}.mp4"
    record = target.with_suffix(".json")
    if not target.is_file() or sha256_of_file(target) != read_json_object(record).get("sha256"):
        reencode(path, target, recipe_named(recipe))
        write_json(record, {"sha256": sha256_of_file(target)})
    return target


# --- One video


_TIME_BASE = Fraction(1, 90_000)
_YUV, _RGB = "yuv420p", "bgr0"
_LOSSLESS = (("qp", "0"), ("preset", "ultrafast"))


def reencode(source: AnyPath, target: AnyPath, recipe: Recipe) -> None:
    """Re-encode the video at ``source`` to ``target``, atomically and with the same bytes every time.

    Lossy recipes write 8-bit 4:2:0 colour; the last column or row of an odd size is dropped.

    Recipes with ``crf`` 0 are lossless. Usually they keep the pixel format. They write 8-bit RGB if H.264 does not
    support the format, a side is odd, or frames are turned, blurred, made noisy or compressed as JPEG. Recipes that
    also resize frames write 8-bit 4:2:0 instead of RGB.

    Raises:
        VideoError: the video cannot be read, or the encoder refuses it.
        OSError: the file cannot be written.
    """
    with atomic_output(target) as temporary, ExitStack() as attempts, open_video(source) as opened:

        def begin(video: VideoSource, _: int, times: Seconds | None) -> _Writer:
            assert times is not None  # ``decode`` passes the times if ``in_order``
            attempts.close()
            container = av.open(str(temporary), "w", format="mp4", options={"fflags": "+bitexact"})
            return _Writer(attempts.enter_context(container), video, recipe, times)

        decode(opened, read_frame_table(opened), begin, in_order=True).sink.end()


class _Writer:
    """A sink (receiver of decoded frames) that changes a video's frames by a recipe and writes them to a container.

    Args:
        output: the open container of PyAV to write to.
        source: the video that is decoded.
        recipe: the recipe.
        times: float64 (n,), presentation times of all frames in seconds, ascending.
    """

    def __init__(self, output: Any, source: VideoSource, recipe: Recipe, times: Seconds) -> None:
        self._output, self._source, self._recipe = output, source, recipe
        self._places, self._seconds = recipe.shown(times)
        self.wanted = set(range(len(times)))
        self._last_pts = -1
        self._converter = FrameConverter(None, None)  # it also records the orientation
        self._reformatter = VideoReformatter()
        self._stream: Any = None  # begins with the first frame
        self._format, self._size = "", (0, 0)  # width and height as stored, before frames are turned

    def offer(self, place: int | None, frame: VideoFrame) -> None:
        """Change a decoded frame by the recipe, and write it to the container.

        The recipe determines how often a frame is written: once, several times or not at all.

        Args:
            place: index of the frame in presentation order, ascending from call to call; None for a frame that only
                states the orientation.
            frame: the decoded frame.
        """
        self._converter.observe(frame)
        if place is None:
            return
        self.wanted.discard(place)
        shown = self._seconds[self._places == place].tolist()
        if not shown:
            return
        with ffmpeg_errors(self._source.path, UnsupportedVideo):
            stream = self._stream = self._stream or self._begun(frame)
            changed = self._changed(place, frame)
            changed.time_base = _TIME_BASE
            for seconds in shown:
                # Times ascend strictly, because players merge two frames with the same time.
                self._last_pts = max(self._last_pts + 1, round(seconds / _TIME_BASE))
                changed.pts = self._last_pts
                self._write(stream.encode(changed))

    def end(self) -> None:
        """Write the frames that the encoder still holds; call it after the last frame."""
        with ffmpeg_errors(self._source.path, UnsupportedVideo):
            self._write(self._stream.encode(None))

    def _write(self, packets: list[Any]) -> None:
        try:
            self._output.mux(packets)
        except OSError as error:  # of the disk; as an error of ffmpeg it would count as one of the video
            raise OSError(error.errno, error.strerror, error.filename) from error

    def _begun(self, frame: VideoFrame) -> VideoStream:
        """Add a video stream to the container, and return it.

        The encoder is set up by the recipe, and by the size, colours and orientation of ``frame``, the first frame.
        """
        recipe, turned = self._recipe, self._converter.orientation.transposed
        self._format, self._size = self._written_as(frame)
        width, height = self._size[::-1] if turned else self._size
        span = float(self._seconds[-1])
        mean = Fraction((len(self._seconds) - 1) / span).limit_denominator(1001) if span > 0 else Fraction(25)
        options = {**dict(recipe.options), **({"crf": str(recipe.crf)} if recipe.crf else dict(_LOSSLESS))}
        stream: VideoStream = self._output.add_stream(
            "libx264rgb" if self._format == _RGB else recipe.codec,
            rate=max(Fraction(recipe.rate or mean), Fraction(1, 1001)),
            options={**options, "flags": f"{options.get('flags', '')}+bitexact"},
            width=width,
            height=height,
            pix_fmt=self._format,
            time_base=_TIME_BASE,
            thread_count=1,
        )
        context = stream.codec_context
        aspect = Fraction(1) if recipe.height else self._source.sample_aspect_ratio
        if aspect and aspect > 0:
            context.sample_aspect_ratio = 1 / aspect if turned else aspect
        if self._format != _RGB:
            context.colorspace, context.color_primaries = frame.colorspace, frame.color_primaries
            context.color_trc = frame.color_trc
            is_full = not recipe.crf and _is_full_range(frame)
            context.color_range = ColorRange.JPEG if is_full else ColorRange.MPEG
        return stream

    def _written_as(self, frame: VideoFrame) -> tuple[str, tuple[int, int]]:
        """Return the pixel format and the (width, height) of the frames to encode.

        Width and height are those before frames are turned for display; a quarter turn swaps them. If the recipe states
        a height, the upright picture is resized to this height. It keeps its aspect ratio, and gets square pixels.
        """
        recipe, name = self._recipe, str(frame.format.name)
        width, height = frame.width, frame.height
        turned = self._converter.orientation != Orientation()
        is_odd_or_turned = width % 2 or height % 2 or (turned and name != _YUV)
        in_rgb = recipe.strength or (not recipe.crf and is_odd_or_turned)
        if in_rgb and not recipe.is_scaled:
            return _RGB, (width, height)
        wide, scale = Fraction(width), recipe.scale
        if recipe.height:
            wide *= max(self._source.sample_aspect_ratio or 0, 0) or 1
            scale = recipe.height / (wide if self._converter.orientation.transposed else Fraction(height))
        if recipe.is_scaled:
            width, height = (max(2, 2 * round(side * scale / 2)) for side in (wide, height))
        check_size(self._source.path, width, height)
        size = (width - width % 2, height - height % 2)
        if recipe.crf or turned:
            return _YUV, size
        known = {video_format.name for video_format in av.codec.Codec(recipe.codec, "w").video_formats or ()}
        return (name if name in known else _YUV if recipe.is_scaled else _RGB), size

    def _changed(self, place: int, frame: VideoFrame) -> VideoFrame:
        """Apply the recipe's changes to ``frame``, and return it in the size and pixel format that the encoder needs.

        ``place`` is the frame's index in presentation order, which seeds the noise.
        """
        width, height = self._size
        if self._format == _RGB:
            pixels = np.empty((3, *self._converter.output_shape(frame)), np.uint8)
            self._converter.convert(frame, pixels)
            rows = np.ascontiguousarray(np.moveaxis(_changed_pixels(self._recipe, place, pixels), 0, -1))
            return VideoFrame.from_ndarray(rows, format="rgb24").reformat(format=_RGB)
        # If a side is odd, a row or column is cut off; scaling would interpolate all pixels.
        is_cut = not self._recipe.is_scaled and (frame.width // 2, frame.height // 2) == (width // 2, height // 2)
        is_full = _is_full_range(frame)
        # Lossless recipes keep full-range levels. Lossy ones convert them to limited range, the usual one in videos.
        full = ColorRange.JPEG if not self._recipe.crf else ColorRange.MPEG
        size = (frame.width, frame.height) if is_cut else (width, height)
        made = self._reformatter.reformat(
            frame, *size, self._format,
            interpolation=int(SCALER), threads=1,
            src_color_range=ColorRange.JPEG if is_full else None, dst_color_range=full if is_full else None,
        )  # fmt: skip
        return made if self._format != _YUV else _upright(made, width, height, self._converter.orientation)


def _changed_pixels(recipe: Recipe, place: int, pixels: Pixels) -> Pixels:
    # takes 10 MB, which most workers do not need
    from fvc_lib.video.augmentations import AugmentationPlan, Blur, Jpeg, Noise

    if not recipe.strength:
        return pixels
    seed = int.from_bytes(hashlib.sha256(f"{recipe.name} {place}".encode()).digest()[:7], "big")
    kinds = {"jpeg": Jpeg(recipe.strength), "blur": Blur(recipe.strength), "noise": Noise(recipe.strength, seed)}
    return np.asarray(AugmentationPlan((kinds[recipe.kind],)).applied(pixels[None])[0])


def _is_full_range(frame: VideoFrame) -> bool:
    return frame.color_range == ColorRange.JPEG or str(frame.format.name).startswith("yuvj")


def _upright(frame: VideoFrame, width: int, height: int, orientation: Orientation) -> VideoFrame:
    """Return the upper left ``width`` x ``height`` pixels (even numbers) of a yuv420p frame, turned for display."""
    planes = []
    for plane, part in zip(frame.planes, (1, 2, 2), strict=True):
        rows = np.frombuffer(memoryview(plane), np.uint8).reshape(-1, plane.line_size)
        upright = orientation.apply(rows[: height // part, : width // part])
        planes.append(np.ascontiguousarray(upright).reshape(-1))
    shown = (width, height)[::-1] if orientation.transposed else (width, height)
    packed = np.concatenate(planes).reshape(shown[1] * 3 // 2, shown[0])
    return VideoFrame.from_ndarray(packed, format=_YUV)
