from __future__ import annotations

import dataclasses

import av
import numpy as np
import pytest
from hypothesis import given, strategies as st

from benchmarks.decode.comparison import count_wrong_frames, worst_difference
from benchmarks.decode.peers import decode_pyav, uniform_places
from benchmarks.decode.videos import Encoding, Video, make_video, number_strip, read_numbers
from fvc_lib.video.decode.clip import decode_clip

SMALL = Video("small", Encoding("libx264", 160, 96, 30, 10, 300, (("preset", "veryfast"), ("bf", "2"))))


@given(number=st.integers(0, 2**16 - 1), width=st.integers(48, 300))
def test_a_number_is_read_back_from_its_strip(number, width):
    picture = np.broadcast_to(number_strip(number, width)[None, None, None], (1, 3, 40, width))
    assert read_numbers(picture) == [number]


@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
def test_a_repeated_video_has_all_frames_in_order_at_an_even_rate(tmp_path, suffix):
    video = dataclasses.replace(SMALL, repeats=4, suffix=suffix)
    path = make_video(video, tmp_path)
    with av.open(str(path)) as container:
        times = [float(frame.time) for frame in container.decode(video=0)]
    assert len(times) == video.num_frames == 120
    np.testing.assert_allclose(np.diff(times), 1 / 25, atol=1e-3)
    clip = decode_clip(path, 17, 96)
    box = clip.content
    inside = clip.frames[:, :, box.top : box.top + box.height, box.left : box.left + box.width]
    assert read_numbers(inside) == [place % 30 for place in uniform_places(120, 17)]


def test_frames_that_were_not_asked_for_are_counted(tmp_path):
    path = make_video(SMALL, tmp_path)
    frames = decode_pyav(path, 6, 96)
    assert count_wrong_frames(frames, SMALL, 6) == 0
    assert count_wrong_frames(frames[[0, 1, 1, 3, 4, 4]], SMALL, 6) == 2
    assert count_wrong_frames(frames[:5], SMALL, 6) == 6
    assert worst_difference(frames, frames) == 0
    assert worst_difference(frames[[1, 1, 2, 3, 4, 5]], frames) > 5
    assert worst_difference(frames[:5], frames) == 255
