"""Sizes and colours of clips are those of the publishers' code; the real MTCNN finds faces."""

import importlib
from pathlib import Path

import numpy as np
import pytest
from av import open as open_video

from fvc_lib.detectors.faces import face_boxes, face_points
from fvc_lib.detectors.packages import imported
from fvc_lib.services.registry import DETECTORS, View

pytestmark = [pytest.mark.detectors, pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")]

LABELLED = Path(__file__).parents[4] / "shared" / "media" / "labelled"
# From the hub's pages: number of frames, stride, and length of the resized shorter side.
PYTORCHVIDEO = {
    "x3d_xs": (4, 12, 182),
    "x3d_s": (13, 6, 182),
    "x3d_m": (16, 5, 256),
    "slow_r50": (8, 8, 256),
    "slowfast_r50": (32, 2, 256),
}


@pytest.mark.parametrize("name", ["r3d_18", "mc3_18", "r2plus1d_18", "s3d", "mvit_v2_s", "swin3d_t"])
def test_torchvision_s_networks_see_what_torchvision_s_own_transforms_give(name):
    weights = imported("torchvision.models", name).get_model_weights(name).KINETICS400_V1
    published, spec = weights.transforms(), DETECTORS.get(name)
    assert [spec.side, spec.side] == published.crop_size
    assert View(fit=spec.frame_fit).resized(spec.side) == published.resize_size[0]
    mean, deviation = tuple(published.mean), tuple(published.std)
    assert spec.normalisation == f"mean {mean}, deviation {deviation}, of fractions of white"
    assert spec.num_frames >= (weights.meta.get("min_temporal_size") or 1)


@pytest.mark.parametrize("name", PYTORCHVIDEO)
def test_pytorchvideo_s_networks_see_pictures_as_large_as_the_hub_says(name):
    num_frames, stride, resized = PYTORCHVIDEO[name]
    spec = DETECTORS.get(name)
    assert (spec.num_frames, View(spec.frame_sampling).stride) == (num_frames, stride)
    assert View(fit=spec.frame_fit).resized(spec.side) == resized


@pytest.mark.parametrize(
    ("video", "wanted"),  # left, top, right and bottom of the face as shares, estimated by eye
    [
        ("real/LivePortrait__838c5a_s18.mp4", (0.47, 0.16, 0.68, 0.54)),
        ("fake/CogVideoX-experiments__54c854_persona_panino.mp4", None),  # only lips and hands
    ],
)
def test_a_face_is_found_where_it_is_and_none_where_there_is_none(video, wanted):
    if importlib.util.find_spec("facenet_pytorch") is None or not LABELLED.is_dir():
        pytest.skip("needs facenet-pytorch, and the videos beside the project")
    with open_video(str(LABELLED / video)) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)][::20])
    boxes, points = face_boxes(frames), face_points(frames)
    if wanted is None:
        assert boxes is points is None
        return
    left_eye, right_eye, nose, *mouth = ((points - boxes[:, None, :2]) / boxes[:, None, 2:]).mean(0)
    assert left_eye[0] < nose[0] < right_eye[0]
    assert all(0 < eye[1] < nose[1] < corner[1] < 1 for eye in (left_eye, right_eye) for corner in mouth)
    height, width = frames.shape[1:3]
    left, top, side = (boxes[:, axis].mean() for axis in (0, 1, 2))
    found = [left / width, top / height, (left + side) / width, (top + side) / height]
    assert np.allclose(found, wanted, atol=0.06)
