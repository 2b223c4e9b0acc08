"""What is seen of a video where that is not ``clip.decode_clip``: windows of neighbouring frames, and crops."""

import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.services.clip_settings import View
from fvc_lib.services.errors import FvcError
from fvc_lib.services.registry import CROPS
from fvc_lib.video.decode.clip import Clip, PlacesOf, decode_places, uniform_places
from fvc_lib.video.decode.frame_table import IntArray
from fvc_lib.video.decode.pixels import Pixels
from fvc_lib.video.decode.source import open_video

NOT_FOUND = "nothing found to crop to: the middle of the picture"
_MOST_ASPECT = 4  # a picture longer than this is cropped with black bars: the square it is decoded into is bounded
# A box is looked for, and cut out, in frames of at most this side and so many bytes together.
_CROP_SIDE, _CROP_BYTES = 1280, 256 << 20


class CropError(FvcError):
    """What looks for the part of the picture to be seen fails, or gives no box."""


@dataclass(frozen=True)
class SeenClip:
    """What one of a video's clips shows.

    Attributes:
        clip: its number, from 0.
        num_source_frames: of the whole video.
        first_frame, middle_frame, last_frame: places in the presentation order.
        stride: frames from one to the next; 0: spread over the video.
        num_repeated: frames that repeat the last one of a video which is too short.
        left, top, width, height: the middle frame's part that is seen, as shares of the upright picture.
        note: what was not as asked for; empty: nothing.
    """

    clip: int
    num_source_frames: int
    first_frame: int
    middle_frame: int
    last_frame: int
    stride: int
    num_repeated: int
    left: float
    top: float
    width: float
    height: float
    note: str = ""


def decode_view(path: AnyPath, num_frames: int, side: int, view: View) -> tuple[Pixels, list[SeenClip]]:
    """The clips of a video one after the other, and what each shows.

    Args:
        path: a local file.
        num_frames: of one clip.
        side: of the square, in pixels.
        view: how frames are sampled, how many clips, and what part of the picture.

    Returns:
        uint8 (N T, 3, S, S), and N rows.

    Raises:
        VideoError: as ``clip.decode_clip``.
        CropError: what is asked for the crop fails.
    """
    decoded = decode_places(Path(path), *wanted_of(Path(path), num_frames, side, view))
    return seen_of(decoded, num_frames, side, view)


def wanted_of(path: Path, num_frames: int, side: int, view: View) -> tuple[PlacesOf, int]:
    """What ``seen_of`` needs of a video, as ``decode_places`` takes it; arguments and errors as ``decode_view``."""

    def places_of(num_source_frames: int) -> IntArray:
        return np.unique(clip_places(view, num_frames, num_source_frames)[0])

    return places_of, decoded_side(path, num_frames, side, view)


def seen_of(decoded: Clip, num_frames: int, side: int, view: View) -> tuple[Pixels, list[SeenClip]]:
    """``decode_view`` of the frames that ``wanted_of`` asks for."""
    places, stride = clip_places(view, num_frames, decoded.num_source_frames)
    box, at = decoded.content, np.searchsorted(decoded.frame_indices, places)
    picture = decoded.frames[:, :, box.top : box.top + box.height, box.left : box.left + box.width]
    frames = np.zeros((*places.shape, 3, side, side), np.uint8)
    seen = []
    for number, own in enumerate(at):
        notes = _notes_on_time(view, stride, places[number])
        if view.crop:
            boxes = boxes_of(view, picture, own)
            notes += [NOT_FOUND] if boxes is None else []
            boxes = centre_boxes(len(own), box.height, box.width) if boxes is None else boxes
            for out, frame, part in zip(frames[number], own, boxes, strict=True):
                out[...] = cut_out(picture[frame], part, side)
            part = boxes[len(boxes) // 2]
        elif view.fit == "letterbox":
            frames[number] = decoded.frames[own]
            part = np.array([0, 0, box.width, box.height], float)
        else:
            part = centre(picture, own, frames[number])
        left, top, width, height = (part / [box.width, box.height, box.width, box.height]).tolist()
        first, middle, last = (int(places[number][place]) for place in (0, num_frames // 2, -1))
        repeated = int((np.diff(places[number]) == 0).sum())
        row = (number, decoded.num_source_frames, first, middle, last, stride, repeated, left, top, width, height)
        seen.append(SeenClip(*row, note="; ".join(notes)))
    return frames.reshape(-1, 3, side, side), seen


def clip_places(view: View, num_frames: int, num_source_frames: int) -> tuple[IntArray, int]:
    """int64 (N, T) places in the presentation order, and the stride between them (0: spread over the video).

    Windows are spread evenly from the video's first frame to its last; a single one stands in the middle. Of a video
    that is too short the stride is made smaller; where even neighbours are too few, its last frame is repeated. Several
    uniform clips are spread over the video alike, each a little later than the one before.
    """
    n = num_source_frames
    if not view.stride:
        return uniform_places(n, view.clips * num_frames).reshape(num_frames, view.clips).T, 0
    stride = min(view.stride, max(1, (n - 1) // (num_frames - 1))) if num_frames > 1 else view.stride
    last_start = max(0, n - 1 - (num_frames - 1) * stride)
    starts = np.array([last_start // 2]) if view.clips == 1 else uniform_places(last_start + 1, view.clips)
    return np.minimum(starts[:, None] + stride * np.arange(num_frames), n - 1), stride


def _notes_on_time(view: View, stride: int, places: IntArray) -> list[str]:
    if not view.stride or (stride == view.stride and places[-1] - places[0] == stride * (len(places) - 1)):
        return []
    repeated = f", last frame {int((places == places[-1]).sum())} times" if len(np.unique(places)) < len(places) else ""
    return [f"short: stride {stride} for {view.stride}{repeated}"]


def decoded_side(path: Path, num_frames: int, side: int, view: View) -> int:
    """Side of the square that frames are letterboxed to before a part of them is cut out."""
    if not view.crop and view.fit == "letterbox":
        return side
    with open_video(path, thorough=True) as opened:
        context = opened.stream.codec_context
        sides = (context.width * (opened.sample_aspect_ratio or Fraction(1)), Fraction(context.height))
    shorter, longer = max(Fraction(1), min(sides)), max(Fraction(1), *sides)
    if view.crop:
        bounded = math.isqrt(_CROP_BYTES // (3 * num_frames * view.clips))
        return max(side, min(_CROP_SIDE, bounded, round(longer)))
    return round(view.resized(side) * min(longer / shorter, Fraction(_MOST_ASPECT)))


def centre(picture: Pixels, own: IntArray, frames: Pixels) -> npt.NDArray[np.floating]:
    """Fill ``frames`` (T, 3, S, S) with the middle of ``picture``'s frames ``own``; where it lies."""
    side, (height, width) = frames.shape[-1], picture.shape[2:]
    top, left = round((height - side) / 2), round((width - side) / 2)
    rows, columns = slice(max(0, top), max(0, top) + side), slice(max(0, left), max(0, left) + side)
    part = picture[own, :, rows, columns]
    down, across = max(0, -top), max(0, -left)
    frames[:, :, down : down + part.shape[2], across : across + part.shape[3]] = part
    return np.array([columns.start, rows.start, part.shape[3], part.shape[2]], float)


def centre_boxes(num_frames: int, height: int, width: int) -> npt.NDArray[np.floating]:
    """Float (T, 4): the largest square in the middle of each frame, as left, top, width and height."""
    side = min(height, width)
    return np.tile(np.array([(width - side) / 2, (height - side) / 2, side, side]), (num_frames, 1))


def boxes_of(view: View, picture: Pixels, own: IntArray) -> npt.NDArray[np.floating] | None:
    """Float (T, 4) squares within the picture, with the margin; none where nothing was found.

    Raises:
        CropError: the user's function fails, or what it gives is no box.
    """
    try:
        found: Any = CROPS.get(view.crop).find(np.ascontiguousarray(picture[own].transpose(0, 2, 3, 1)))
        if found is None:
            return None
        boxes = np.broadcast_to(np.asarray(found, float), (len(own), 4))
    except Exception as error:
        raise CropError(f"crop {view.crop!r} fails: {type(error).__name__}: {error}") from error
    if not np.isfinite(boxes).all() or (boxes[:, 2:] <= 0).any():
        raise CropError(
            f"crop {view.crop!r}: got {found!r}, wanted finite left, top, width > 0 and height > 0, or None"
        )
    return square_boxes(boxes, view.margin, *picture.shape[2:])


def square_boxes(boxes: npt.NDArray[np.floating], margin: float, height: int, width: int) -> npt.NDArray[np.floating]:
    """Boxes (T, 4) as squares ``1 + margin`` times as large, moved and at most shrunk to lie in the picture."""
    sides = np.minimum(boxes[:, 2:].max(1) * (1 + margin), min(height, width))
    left = np.clip(boxes[:, 0] + boxes[:, 2] / 2 - sides / 2, 0, width - sides)
    top = np.clip(boxes[:, 1] + boxes[:, 3] / 2 - sides / 2, 0, height - sides)
    return np.stack([left, top, sides, sides], axis=1)


def cut_out(frame: Pixels, box: npt.NDArray[np.floating], side: int) -> Pixels:
    """uint8 (3, S, S) of a box in ``frame`` (3, H, W), filtered where it is made smaller."""
    from PIL import Image

    left, top, width, height = box.tolist()
    picture = Image.fromarray(np.ascontiguousarray(frame.transpose(1, 2, 0)))
    ends = (min(left + width, picture.width), min(top + height, picture.height))
    cut = picture.resize((side, side), Image.Resampling.BILINEAR, box=(left, top, *ends))
    return np.asarray(cut).transpose(2, 0, 1)
