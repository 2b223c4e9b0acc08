from __future__ import annotations

import numpy as np
import pytest

from benchmarks.decode.floor import Floor, PacketFacts, necessary_runs
from benchmarks.decode.videos import Encoding, Video, make_video
from fvc_lib.video.decode.clip import decode_clip


def packets(text: str) -> list[PacketFacts]:
    """``K0 P4 r2 b1 b3``: keyframe, reference and droppable pictures with their presentation times."""
    return [PacketFacts(int(word[1:]), word[0] == "K", word[0] != "b") for word in text.split()]


def test_a_wanted_frame_needs_its_keyframe_the_references_between_and_itself():
    group = packets("K0 P4 r2 b1 b3 P8 r6 b5 b7")
    assert necessary_runs(group, {7}) == [[0, 1, 2, 5, 6, 7]]
    assert necessary_runs(group, {0, 4}) == [[0, 1, 2, 4]]


def test_a_leading_picture_of_an_open_group_needs_the_group_before_and_later_frames_do_not_need_it():
    open_group = packets("K0 P3 b1 b2 K6 r4 b5 P9 b7 b8")
    assert necessary_runs(open_group, {6}) == [[0, 1, 4, 5, 6]]
    assert necessary_runs(open_group, {8}) == [[4, 7, 8]]
    assert necessary_runs(open_group, {6, 8}) == [[0, 1, 4, 5, 6, 7, 8]]


@pytest.mark.parametrize(
    ("codec", "options"),
    [
        ("libx264", (("bf", "3"), ("preset", "veryfast"))),
        ("libx265", (("preset", "superfast"), ("x265-params", "log-level=error"))),  # open groups
        ("mpeg4", ()),
    ],
)
def test_the_floor_gives_the_frames_of_decode_clip_from_fewer_packets(tmp_path, codec, options):
    path = make_video(Video("small", Encoding(codec, 128, 96, 50, 15, 300, options)), tmp_path)
    for num_frames in (1, 4, 9):
        floor = Floor(path, num_frames, 64)
        clip = decode_clip(path, num_frames, 64)
        box = clip.content
        inside = clip.frames[:, :, box.top : box.top + box.height, box.left : box.left + box.width]
        np.testing.assert_array_equal(floor.decode(), inside)
        np.testing.assert_array_equal(floor.decode(), inside)  # a second time from the same packets
        assert num_frames <= floor.num_necessary < floor.num_packets == 50
