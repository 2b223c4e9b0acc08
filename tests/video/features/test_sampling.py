from contextlib import suppress

import av
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fvc_lib.video.decode.source import VideoError
from fvc_lib.video.features.family import TILE, families_named, tile_corners
from fvc_lib.video.features.sampling import RUN_LENGTH, RUNS, run_places, sample_video
from fvc_lib.video.features.worker import measure_video


@settings(max_examples=50)
@given(st.integers(1, 3000))
def test_runs_are_neighbours_spread_from_the_first_frame_to_the_last(num_frames):
    runs = np.stack(run_places(num_frames))
    assert runs.shape == (max(1, min(RUNS, num_frames // RUN_LENGTH)), min(RUN_LENGTH, num_frames))
    assert (np.diff(runs) == 1).all()
    assert (np.diff(runs.ravel()) > 0).all()
    assert runs[0, 0] == 0
    assert runs[-1, -1] == num_frames - 1 or len(runs) == 1


def pictures(num_frames: int, width: int, height: int) -> list[np.ndarray]:
    """Smooth colours with a number's worth of light, so that a wrong frame or tile cannot pass for the right one."""
    rows, columns = np.mgrid[:height, :width]
    colours = np.stack([columns * 255 // width, rows * 255 // height, (rows + columns) % 256], axis=-1)
    return [np.clip(colours * 0.8 + 2 * number, 0, 255).astype(np.uint8) for number in range(num_frames)]


VIDEOS = {
    "h264.mp4": {"options": {"bf": "3", "b_strategy": "0", "crf": "12"}},
    "full.mp4": {"pixel_format": "yuvj420p", "options": {"crf": "12"}},
    "chroma.mp4": {"pixel_format": "yuv444p", "options": {"crf": "12"}},
    "deep.mkv": {"codec": "libx265", "pixel_format": "yuv420p10le", "options": {"x265-params": "log-level=none:crf=8"}},
    "lossless.mkv": {"codec": "ffv1", "pixel_format": "bgr0"},
    "grey.mkv": {"codec": "ffv1", "pixel_format": "gray"},
    "grey10.mkv": {"codec": "ffv1", "pixel_format": "gray10le"},
    "old.avi": {"codec": "mpeg4", "options": {"bf": "2", "qmax": "4"}},  # no time stamps: decoded as a stream
    "pictures.mkv": {"codec": "mjpeg", "pixel_format": "yuvj422p", "options": {"qmax": "2"}},
}


@pytest.mark.parametrize("name", VIDEOS)
def test_tiles_are_those_of_a_sequential_decode(make_video, name):
    width, height, count = 150, 138, 30  # 2 x 2 tiles
    path = make_video(name, count, width=width, height=height, frames=pictures(count, width, height), **VIDEOS[name])
    with av.open(str(path)) as container:
        lumas = [luma_of(frame) for frame in container.decode(video=0)]
    runs, corners = sample_video(path).runs, tile_corners(height, width)
    assert (len(runs), len(corners)) == (RUNS, 4)
    for run, places in zip(runs, run_places(count), strict=True):
        assert run.luma.shape == (RUN_LENGTH, 4, TILE, TILE)
        wanted = np.stack([lumas[place] for place in places])
        np.testing.assert_allclose(run.small, wanted, atol=0.51)  # small already
        for number, (top, left) in enumerate(corners.tolist()):
            part = wanted[:, top : top + TILE, left : left + TILE]
            np.testing.assert_allclose(run.luma[:, number], part, atol=0.51)


def luma_of(frame: av.VideoFrame) -> np.ndarray:
    """Float (H, W), 0 to 255: the first plane as coded; of RGB as BT.601 weighs it."""
    if frame.format.is_rgb:
        return frame.to_ndarray(format="rgb24") @ [0.299, 0.587, 0.114]
    is_deep, plane = frame.format.components[0].bits > 8, frame.planes[0]
    pixels = np.frombuffer(memoryview(plane), np.uint16 if is_deep else np.uint8).reshape(plane.height, -1)
    return pixels[:, : plane.width] / (4 if is_deep else 1)


def test_small_frames_have_no_tiles_and_large_ones_are_averaged(make_video):
    small = sample_video(make_video("small.mp4", 6, width=16, height=16)).runs
    assert [run.luma.shape for run in small] == [(4, 0, TILE, TILE)]
    path = make_video("large.mp4", 1, width=640, height=322)
    (run,) = sample_video(path).runs
    assert run.luma.shape == (1, 9, TILE, TILE)
    assert run.small.shape == (1, 80, 160)
    with av.open(str(path)) as container:
        luma = luma_of(next(container.decode(video=0)))
    np.testing.assert_allclose(run.small[0], luma[:320].reshape(80, 4, 160, 4).mean((1, 3)), rtol=1e-6)


@pytest.mark.long
def test_every_real_file_gives_numbers_or_declares_them_missing(shared_media):
    families, seen = families_named("all"), 0
    for path in sorted((shared_media / "decode").iterdir()):
        with suppress(VideoError):
            found = measure_video(path, families)
            assert [list(found[family.name]) for family in families] == [list(family.columns()) for family in families]
            seen += 1
    assert seen > 80
