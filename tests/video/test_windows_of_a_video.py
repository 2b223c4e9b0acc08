"""Every window of a video from one pass: the frames that a clip at that place has, and windows that cover the video."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fvc_lib.services.registry import View
from fvc_lib.video.clips import worker
from fvc_lib.video.clips.store import crop_code, decode_code
from fvc_lib.video.decode.clip import decode_places
from fvc_lib.video.decode.views import MOST_BYTES, MOST_WINDOWS, decode_view, decode_windows, window_places
from tests.kits.scored_run import write_video

VIEWS = (View(), View("window:2"), View("window:3", "crop:0.8", clips=2), View("uniform", "crop", clips=2))


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    path = tmp_path_factory.mktemp("windows") / "wide.mp4"
    coarse = np.random.default_rng(3).integers(0, 255, (30, 3, 5, 8)).astype(np.uint8)
    write_video(path, coarse.repeat(8, 2).repeat(8, 3))
    return path


def decoded(path, view, num_frames=4, side=24):
    kept = {}
    found = decode_windows(path, num_frames, side, view, lambda number, frame: kept.__setitem__(number, frame.copy()))
    return found, np.stack([kept[number] for number in range(len(kept))])


@pytest.mark.parametrize("view", [*VIEWS, "cropped"], ids=str)
def test_own_clips_are_those_that_the_run_decodes(video, tmp_path, view):
    if view == "cropped":
        own = tmp_path / "corner.py"
        own.write_text("def corner(frames):\n    return [0, 0, 8, 8]\n")
        view = View(crop=f"{own}:corner")
    found, kept = decoded(video, view)
    clips = decode_view(video, 4, 24, view)[0]
    np.testing.assert_array_equal(kept[found.stored[: found.num_clips]].reshape(clips.shape), clips)
    assert not view.crop or len(kept) == found.places.size  # every window is cropped by itself


def test_each_window_has_the_frames_of_its_places(video):
    found, kept = decoded(video, View())
    assert len(found.places) == 5
    for places, stored in zip(found.places, found.stored, strict=True):
        frames = decode_places(video, lambda _, wanted=places: wanted, 24).frames
        np.testing.assert_array_equal(kept[stored], frames)
    left, top, width, height = found.content
    assert (left, width) == (0, 24)
    assert not kept[:, :, :top].any()
    assert not kept[:, :, top + height :].any()


@given(
    n=st.integers(1, 20_000), frames=st.integers(1, 64), stride=st.integers(0, 9), rate=st.floats(0.5, 240),
    side=st.sampled_from([24, 224, 1024]),
)  # fmt: skip
def test_windows_lie_in_the_video_in_their_order_and_are_not_too_many(n, frames, stride, rate, side):
    view = View(f"window:{stride}" if stride else "uniform")
    places = window_places(view, frames, n, n / rate, side)
    assert places.shape[1] == frames
    assert 1 <= len(places) <= MOST_WINDOWS
    assert len(places) == 1 or places.size * 3 * side * side <= MOST_BYTES
    assert places.min() >= 0
    assert places.max() < n
    assert (np.diff(places, axis=1) >= 0).all()
    assert (np.diff(places[:, 0]) > 0).all() or len(places) == 1
    if len(places) > 1:
        assert places[0, 0] == 0
        assert places[-1, -1] == n - 1
        if not stride and frames > 1:  # spread windows leave nothing out between them
            assert (places[1:, 0] <= places[:-1, -1]).all()


def test_a_worker_writes_frames_and_tells_where_they_are_or_what_is_wrong(video, tmp_path):
    view = View()
    item = {"source": str(video), "target": str(tmp_path / "raw"), "content_sha256": "", "num_frames": 4,
            "fixed_size": 24, "view": vars(view), "code": decode_code(view), "crop": crop_code(view),
            "recipe": "", "encoded": []}  # fmt: skip
    told = worker.make_windows(item)
    found, kept = decoded(video, view)
    stored = np.fromfile(tmp_path / "raw", np.uint8).reshape(told["num_stored"], 3, 24, 24)
    np.testing.assert_array_equal(stored, kept)
    assert told["places"] == found.places.tolist()
    assert "changed since it was indexed" in worker.make_windows(item | {"content_sha256": "0" * 64})["video_error"]
    assert worker.make_windows(item | {"code": "other"}) == {"code_changed": True}
    assert worker.make_windows(item | {"target": str(tmp_path / "no" / "raw")})["write_error"][0] == 2
