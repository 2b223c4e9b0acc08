"""The crop ``face``: find the face in a clip by MTCNN, from the package facenet-pytorch, which includes the weights.

K. Zhang et al., "Joint face detection and alignment using multitask cascaded convolutional networks", 2016.
"""

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fvc_lib.detectors.packages import imported
from fvc_lib.services.registry import CROPS, Crop

Boxes = npt.NDArray[np.floating]

REMEDY = (
    "make setup-detectors, or pip install 'fvc_lib[detectors]' && pip install --no-deps facenet-pytorch==2.6.0 (which "
    "pins an old torch)"
)
_LOOKS = 8  # frames of a clip that are searched, spread evenly
_SEARCHED_SIDE = 640  # pixels of the longer side of a searched frame; a face must be at least 20 pixels wide in it
_SURE = 0.9  # least probability of a face that counts
_STILL = 2.0  # a face whose positions span at most this multiple of its side gets one box


def face_boxes(frames: npt.NDArray[np.uint8]) -> Boxes | None:
    """Find the largest face of a clip, and return a square around it for every frame; None if there is no face.

    Up to 8 frames are searched, and faces are followed by the overlap of their boxes. The face with the largest area
    summed over these frames is taken. If it hardly moves, one fixed square holds it in all frames. If it moves, a
    square of constant size follows it. Between searched frames the position is interpolated linearly.

    Args:
        frames: uint8 (T, H, W, 3), RGB.

    Returns:
        float (T, 4): left, top, width and height in pixels. Squares may reach beyond the picture.

    Raises:
        UsageError: the package is not installed.
    """
    followed = _followed(frames)
    if followed is None:
        return None
    at, faces = followed
    begins, ends = faces[:, :2], faces[:, 2:4]  # (K, 2) of left and top, and of right and bottom
    side = np.median((ends - begins).max(1))
    middles = (begins + ends) / 2
    first, last = begins.min(0), ends.max(0)
    if (last - first).max() <= _STILL * side:
        side = (last - first).max()
        middles[:] = (first + last) / 2
    way = _interpolated(len(frames), at, middles)
    return np.concatenate([way - side / 2, np.full((len(frames), 2), side)], axis=1)


def face_points(frames: npt.NDArray[np.uint8]) -> Boxes | None:
    """Find the largest face of a clip as ``face_boxes`` does, and return five points of it; None if there is no face.

    Args:
        frames: uint8 (T, H, W, 3), RGB.

    Returns:
        float (T, 5, 2), x and y in pixels of both eyes, the nose and both corners of the mouth in every frame.

    Raises:
        UsageError: the package is not installed.
    """
    followed = _followed(frames)
    if followed is None:
        return None
    at, faces = followed
    return _interpolated(len(frames), at, faces[:, 4:]).reshape(-1, 5, 2)


def _followed(frames: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.int64], Boxes] | None:
    """Return ``(indices, faces)`` of the largest face of a clip, in the K searched frames in which it was found.

    ``indices`` (K,) are the indices of these frames. ``faces`` (K, 14) hold the box and five points of the face in each
    of them, as described for ``faces_in``. The result is None if there is no face.
    """
    looks = np.unique(np.round(np.linspace(0, len(frames) - 1, _LOOKS)).astype(int))
    found = [faces_in(frames[look]) for look in looks]
    track = largest_track(found)
    if not track:
        return None
    return looks[[*track]], np.array([*track.values()])


def _interpolated(num_frames: int, at: npt.NDArray[np.int64], values: Boxes) -> Boxes:
    """Interpolate values linearly over time: from ``values`` (K, V) at the frame indices ``at`` (K,) to all T frames.

    The result is (T, V), where T is ``num_frames``.
    """
    return np.stack([np.interp(np.arange(num_frames), at, column) for column in values.T], axis=1)


def largest_track(found: list[Boxes]) -> dict[int, Boxes]:
    """Follow faces over frames, and return the track of the face with the largest total area.

    A track is a series of boxes of the same face. A box continues the track whose last box it overlaps most, by more
    than a tenth (intersection over union). A track takes at most one box per frame. Tracks that have a box in less
    than a third of the frames are dropped, because most of them are not faces.

    Args:
        found: for every searched frame, float (K, 4): left, top, right and bottom of its K boxes in pixels.

    Returns:
        The boxes of the track, rows of ``found``, by the index of their frame; empty if there is no track.
    """
    tracks: list[dict[int, Boxes]] = []
    for frame, boxes in enumerate(found):
        free = list(tracks)
        for box in boxes[np.argsort(-_areas(boxes), kind="stable")]:
            shares = [_overlap([*track.values()][-1], box) for track in free]
            if shares and max(shares) > 0.1:
                free.pop(int(np.argmax(shares)))[frame] = box
            else:
                tracks.append({frame: box})
    tracks = [track for track in tracks if 3 * len(track) >= len(found)]
    return max(tracks, key=lambda track: _areas(np.array([*track.values()])).sum(), default={})


def faces_in(frame: npt.NDArray[np.uint8]) -> Boxes:
    """Return the K faces in a frame, uint8 (H, W, 3), that MTCNN finds with a probability of at least 0.9.

    A row of float64 (K, 14) has left, top, right and bottom of the box in pixels. Then follow x and y of the left and
    the right eye, the nose, and the left and the right corner of the mouth, as seen in the picture.
    """
    from PIL import Image

    picture = Image.fromarray(np.ascontiguousarray(frame))
    scale = min(1.0, _SEARCHED_SIDE / max(picture.size))
    width, height = (max(1, round(side * scale)) for side in picture.size)
    if min(width, height) < 20:
        return np.empty((0, 14))
    small = picture.resize((width, height), Image.Resampling.BILINEAR)
    boxes, sure, points = _mtcnn().detect(small, landmarks=True)
    if boxes is None:
        return np.empty((0, 14))
    found = np.concatenate([np.asarray(boxes, float), np.asarray(points, float).reshape(-1, 10)], axis=1)
    found = found[np.asarray(sure, float) >= _SURE]
    return found[_areas(found) > 0] / scale


def _areas(boxes: Boxes) -> Boxes:
    sides = np.clip(boxes[:, 2:4] - boxes[:, :2], 0, None)
    return np.asarray(sides[:, 0] * sides[:, 1])


def _overlap(one: Boxes, other: Boxes) -> float:
    """Return the intersection over union of two boxes, float (4,): left, top, right and bottom."""
    common = np.concatenate([np.maximum(one[:2], other[:2]), np.minimum(one[2:4], other[2:4])])
    areas = _areas(np.stack([common, one[:4], other[:4]]))
    return float(areas[0] / (areas[1] + areas[2] - areas[0]))


@cache
def _mtcnn() -> Any:
    package = imported("facenet_pytorch", "face", REMEDY)
    # torchvision's batched_nms needs a compiled part, which the wheel on PyPI lacks for the CPU build of torch.
    imported("facenet_pytorch.models.utils.detect_face", "face", REMEDY).batched_nms = keep_best
    return package.MTCNN(keep_all=True, device="cpu", post_process=False)


def keep_best(boxes: Any, scores: Any, groups: Any, threshold: float) -> Any:
    """Remove boxes that overlap a box of higher score, like torchvision's ``batched_nms``.

    Args:
        boxes: tensor (N, 4), left, top, right and bottom.
        scores: tensor (N,), higher is better.
        groups: tensor (N,), numbers of groups; a box is only removed because of a box of the same group.
        threshold: a box is removed if its intersection over union with a better box is larger than this.

    Returns:
        int64 (K,), the indices of the remaining boxes, by descending score.
    """
    import torch

    boxes = boxes.double()
    shared = imported("torchvision.ops", "face", REMEDY).box_iou(boxes, boxes)
    covers = (shared > threshold) & (groups[:, None] == groups)
    kept = list[int]()
    for number in scores.argsort(descending=True, stable=True).tolist():
        if not covers[number, kept].any():
            kept.append(number)
    return torch.tensor(kept, dtype=torch.int64)


CROPS.register(
    Crop(
        name="face",
        find=face_boxes,
        points=face_points,
        packages=("torch", "torchvision", "facenet_pytorch"),
        code="fvc_lib.detectors.faces",
        remedy=REMEDY,
    )
)
