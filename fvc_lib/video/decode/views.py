"""Decode clips of other views than ``clip.decode_clip``: windows of neighbouring frames, several clips, and crops."""

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

Boxes = npt.NDArray[np.floating]  # (T, 4): left, top, width and height in pixels

NOT_FOUND = "nothing found to crop to: the middle of the picture"
_MOST_ASPECT = 4  # a longer picture gets black bars, so that the square it is decoded into stays small
# Frames that a crop is searched in have at most this side and these bytes together.
_CROP_SIDE, _CROP_BYTES = 1280, 256 << 20


class CropError(FvcError):
    """The function that finds a crop fails, or returns no box."""


@dataclass(frozen=True)
class SeenClip:
    """The part of a video that one of its clips shows.

    Attributes:
        clip: its number, from 0.
        num_source_frames: of the whole video.
        first_frame, middle_frame, last_frame: places in the presentation order.
        stride: frames from one to the next; 0: spread over the video.
        num_repeated: frames that repeat the last one of a video that is too short.
        left, top, width, height: the part of the middle frame that is seen, as shares of the upright picture.
        note: how the clip differs from the requested view; empty: it does not.
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
    """Decode the clips of a video.

    Args:
        path: a local file.
        num_frames: T, of one clip.
        side: S, of a square frame in pixels.
        view: which frames, how many clips (N), and which part of the picture.

    Returns:
        uint8 (N T, 3, S, S), the clips concatenated, and what each shows.

    Raises:
        VideoError: as ``clip.decode_clip``.
        CropError: the crop fails.
    """
    decoded = decode_places(Path(path), *wanted_of(Path(path), num_frames, side, view))
    return seen_of(decoded, num_frames, side, view)


def wanted_of(path: Path, num_frames: int, side: int, view: View) -> tuple[PlacesOf, int]:
    """Return what ``decode_places`` must decode for ``seen_of``; arguments and errors as ``decode_view``."""

    def places_of(num_source_frames: int) -> IntArray:
        return np.unique(clip_places(view, num_frames, num_source_frames)[0])

    return places_of, decoded_side(path, num_frames, side, view)


def seen_of(decoded: Clip, num_frames: int, side: int, view: View) -> tuple[Pixels, list[SeenClip]]:
    """Return the result of ``decode_view``, given the frames that ``wanted_of`` asks for."""
    places, stride = clip_places(view, num_frames, decoded.num_source_frames)
    box = decoded.content
    frames, seen = np.empty((*places.shape, 3, side, side), np.uint8), []
    for number, own in enumerate(np.searchsorted(decoded.frame_indices, places)):
        note = _note_on_time(view, stride, places[number])
        if view.crop or view.fit != "letterbox":
            frames[number], boxes, found = seen_part(view, box.cut(decoded.frames[own]), side)
            note = note if found else "; ".join(filter(None, (note, NOT_FOUND)))
            part = boxes[num_frames // 2]
        else:
            frames[number], part = decoded.frames[own], np.array([0, 0, box.width, box.height], float)
        shares = (part / [box.width, box.height, box.width, box.height]).tolist()
        first, middle, last = (int(places[number][place]) for place in (0, num_frames // 2, -1))
        repeated = int((np.diff(places[number]) == 0).sum())
        row = (number, decoded.num_source_frames, first, middle, last, stride, repeated, *shares, note)
        seen.append(SeenClip(*row))
    return frames.reshape(-1, 3, side, side), seen


def clip_places(view: View, num_frames: int, num_source_frames: int) -> tuple[IntArray, int]:
    """Return int64 (N, T) places in the presentation order, and the stride between them (0: spread over the video).

    Windows are spread evenly from the video's first frame to its last; a single one is in the middle. A video that is
    too short gets a smaller stride; if neighbours are too few, its last frame is repeated. Several uniform clips are
    interleaved.
    """
    n = num_source_frames
    if not view.stride:
        return uniform_places(n, view.clips * num_frames).reshape(num_frames, view.clips).T, 0
    stride = min(view.stride, max(1, (n - 1) // (num_frames - 1))) if num_frames > 1 else view.stride
    last_start = max(0, n - 1 - (num_frames - 1) * stride)
    starts = np.array([last_start // 2]) if view.clips == 1 else uniform_places(last_start + 1, view.clips)
    return np.minimum(starts[:, None] + stride * np.arange(num_frames), n - 1), stride


def _note_on_time(view: View, stride: int, places: IntArray) -> str:
    if not view.stride or (stride == view.stride and places[-1] - places[0] == stride * (len(places) - 1)):
        return ""
    repeated = f", last frame {int((places == places[-1]).sum())} times" if len(np.unique(places)) < len(places) else ""
    return f"short: stride {stride} for {view.stride}{repeated}"


def decoded_side(path: Path, num_frames: int, side: int, view: View) -> int:
    """Return the side of the square that frames are letterboxed to before a part of them is cut out."""
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


def seen_part(view: View, pictures: Pixels, side: int) -> tuple[Pixels, Boxes, bool]:
    """Cut the part that ``view`` shows out of the pictures of a clip.

    Args:
        view: its ``fit`` or ``crop`` leaves something out.
        pictures: uint8 (T, 3, H, W), without bars, at ``decoded_side``.
        side: S.

    Returns:
        uint8 (T, 3, S, S), the boxes (T, 4), and whether the crop was found (else the middle is shown).

    Raises:
        CropError: the crop fails.
    """
    height, width = pictures.shape[2:]
    if view.crop:
        found = boxes_of(view, pictures)
        boxes = centre_boxes(len(pictures), height, width) if found is None else found
        cut = [cut_out(picture, box, side) for picture, box in zip(pictures, boxes, strict=True)]
        return np.stack(cut), boxes, found is not None
    top, left = round((height - side) / 2), round((width - side) / 2)
    part = pictures[:, :, max(0, top) : max(0, top) + side, max(0, left) : max(0, left) + side]
    frames, down, across = np.zeros((len(pictures), 3, side, side), np.uint8), max(0, -top), max(0, -left)
    frames[:, :, down : down + part.shape[2], across : across + part.shape[3]] = part
    box = np.array([max(0, left), max(0, top), part.shape[3], part.shape[2]], float)
    return frames, np.tile(box, (len(pictures), 1)), True


def centre_boxes(num_frames: int, height: int, width: int) -> Boxes:
    """Return the largest square in the middle of each frame."""
    side = min(height, width)
    return np.tile(np.array([(width - side) / 2, (height - side) / 2, side, side]), (num_frames, 1))


def boxes_of(view: View, pictures: Pixels) -> Boxes | None:
    """Return the squares within ``pictures`` (T, 3, H, W) that the crop finds, with the margin; None: nothing found.

    Raises:
        CropError: the user's function fails, or returns no box.
    """
    try:
        found: Any = CROPS.get(view.crop).find(np.ascontiguousarray(pictures.transpose(0, 2, 3, 1)))
        if found is None:
            return None
        boxes = np.broadcast_to(np.asarray(found, float), (len(pictures), 4))
    except Exception as error:
        raise CropError(f"crop {view.crop!r} fails: {type(error).__name__}: {error}") from error
    if not np.isfinite(boxes).all() or (boxes[:, 2:] <= 0).any():
        raise CropError(
            f"crop {view.crop!r}: got {found!r}, wanted finite left, top, width > 0 and height > 0, or None"
        )
    return square_boxes(boxes, view.margin, *pictures.shape[2:])


def square_boxes(boxes: Boxes, margin: float, height: int, width: int) -> Boxes:
    """Return boxes as squares ``1 + margin`` times as large, moved and if necessary shrunk into the picture."""
    sides = np.minimum(boxes[:, 2:].max(1) * (1 + margin), min(height, width))
    left = np.clip(boxes[:, 0] + boxes[:, 2] / 2 - sides / 2, 0, width - sides)
    top = np.clip(boxes[:, 1] + boxes[:, 3] / 2 - sides / 2, 0, height - sides)
    return np.stack([left, top, sides, sides], axis=1)


def cut_out(picture: Pixels, box: Boxes, side: int) -> Pixels:
    """Return uint8 (3, S, S) of a box (4,) in ``picture`` (3, H, W), antialiased where it is made smaller."""
    from PIL import Image

    left, top, width, height = box.tolist()
    image = Image.fromarray(np.ascontiguousarray(picture.transpose(1, 2, 0)))
    ends = (min(left + width, image.width), min(top + height, image.height))
    cut = image.resize((side, side), Image.Resampling.BILINEAR, box=(left, top, *ends))
    return np.asarray(cut).transpose(2, 0, 1)
