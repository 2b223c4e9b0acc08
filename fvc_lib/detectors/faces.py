"""``crop face``: find the face in a clip by MTCNN, from the package facenet-pytorch, which includes the weights.

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
    "make setup-detectors, or pip install 'fvc_lib[faces]' && pip install --no-deps facenet-pytorch==2.6.0 (it pins an "
    "old torch)"
)
_LOOKS = 8  # frames of a clip that are searched, spread evenly
_SEARCHED_SIDE = 640  # pixels of the longer side of a searched frame; a face must be at least 20 pixels wide in it
_SURE = 0.9  # least probability of a face that counts
_STILL = 2.0  # a face whose positions span at most this multiple of its side gets one box


def face_boxes(frames: npt.NDArray[np.uint8]) -> Boxes | None:
    """Return a square around the largest face for every frame, float (T, 4): left, top, width and height in pixels.

    Returns None if there is no face.

    Up to 8 frames are searched, and faces are followed by the overlap of their boxes. The face with the largest area
    summed over these frames is taken. If it hardly moves, one fixed box holds it in all frames. If it moves, a box of
    constant size follows it; between searched frames its position is interpolated linearly. So the crop is steady.

    Args:
        frames: uint8 (T, H, W, 3), RGB.

    Raises:
        UsageError: the package is not installed.
    """
    looks = np.unique(np.round(np.linspace(0, len(frames) - 1, _LOOKS)).astype(int))
    found = [faces_in(frames[look]) for look in looks]
    track = largest_track(found)
    if not track:
        return None
    boxes = np.array([found[look][number] for look, number in track])  # (K, 4) of left, top, right, bottom
    side = np.median((boxes[:, 2:] - boxes[:, :2]).max(1))
    ends = np.concatenate([boxes[:, :2].min(0), boxes[:, 2:].max(0)])
    whole = (ends[2:] - ends[:2]).max()
    middles = (boxes[:, :2] + boxes[:, 2:]) / 2
    if whole <= _STILL * side:
        side, middles = whole, ((ends[:2] + ends[2:]) / 2)[None].repeat(len(boxes), 0)
    at = looks[[look for look, _ in track]]
    way = np.stack([np.interp(np.arange(len(frames)), at, middles[:, axis]) for axis in (0, 1)], axis=1)
    return np.concatenate([way - side / 2, np.full((len(frames), 2), side)], axis=1)


def largest_track(found: list[Boxes]) -> list[tuple[int, int]]:
    """Follow faces over frames, and return the boxes of the face with the largest total area.

    A track is a series of boxes of the same face. A box continues the track whose last box it overlaps most, by more
    than a tenth (intersection over union). A track takes at most one box per frame. Tracks that have a box in less
    than a third of the frames are dropped, because most of them are not faces.

    Args:
        found: for every frame (K, 4), left, top, right and bottom of K boxes.

    Returns:
        Pairs (index of the frame, index of the box in it), one per box of the track; empty if there is no track.
    """
    tracks: list[list[tuple[int, int]]] = []
    for frame, boxes in enumerate(found):
        free = list(tracks)
        for number in np.argsort(-_areas(boxes), kind="stable").tolist():
            shares = [_overlap(found[track[-1][0]][track[-1][1]], boxes[number]) for track in free]
            if shares and max(shares) > 0.1:
                free.pop(int(np.argmax(shares))).append((frame, number))
            else:
                tracks.append([(frame, number)])
    tracks = [track for track in tracks if 3 * len(track) >= len(found)]
    return max(tracks, key=lambda track: sum(_areas(found[frame])[number] for frame, number in track), default=[])


def faces_in(frame: npt.NDArray[np.uint8]) -> Boxes:
    """Return float64 (K, 4), left, top, right and bottom in pixels of the K faces in a frame, uint8 (H, W, 3)."""
    from PIL import Image

    picture = Image.fromarray(np.ascontiguousarray(frame))
    scale = min(1.0, _SEARCHED_SIDE / max(picture.size))
    width, height = (max(1, round(side * scale)) for side in picture.size)
    if min(width, height) < 20:
        return np.empty((0, 4))
    boxes, sure = _mtcnn().detect(picture.resize((width, height), Image.Resampling.BILINEAR))
    if boxes is None:
        return np.empty((0, 4))
    boxes = np.asarray(boxes, float)[np.asarray(sure, float) >= _SURE]
    return boxes[_areas(boxes) > 0] / scale


def _areas(boxes: Boxes) -> Boxes:
    sides = np.clip(boxes[:, 2:] - boxes[:, :2], 0, None)
    return np.asarray(sides[:, 0] * sides[:, 1])


def _overlap(one: Boxes, other: Boxes) -> float:
    """Return the intersection over union of two boxes (4,)."""
    common = np.concatenate([np.maximum(one[:2], other[:2]), np.minimum(one[2:], other[2:])])
    areas = _areas(np.stack([common, one, other]))
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
        boxes: (N, 4), left, top, right and bottom.
        scores: (N,).
        groups: (N,); boxes of different groups do not compete.
        threshold: a box is removed if its intersection over union with a better box is larger.

    Returns:
        int64 (K,), the indices of the remaining boxes, by descending score.
    """
    import torch

    corners, owner = boxes.double().numpy(), groups.numpy()
    left = np.argsort(-scores.double().numpy(), kind="stable")
    areas, kept = _areas(corners), []
    while left.size:
        best, left = left[0], left[1:]
        kept.append(int(best))
        common = np.concatenate(
            [np.maximum(corners[best, :2], corners[left, :2]), np.minimum(corners[best, 2:], corners[left, 2:])], axis=1
        )
        shared = _areas(common)
        union = areas[best] + areas[left] - shared
        left = left[(shared <= threshold * union) | (owner[left] != owner[best])]
    return torch.tensor(kept, dtype=torch.int64)


CROPS.register(
    Crop(
        name="face",
        find=face_boxes,
        packages=("torch", "torchvision", "facenet_pytorch"),
        code="fvc_lib.detectors.faces",
        remedy=REMEDY,
    )
)
