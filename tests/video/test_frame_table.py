import dataclasses
from fractions import Fraction

import av
import numpy as np
import pytest

from fvc_lib.video.decode.frame_table import NO_PTS, FrameTable, check_not_empty, read_frame_table
from fvc_lib.video.decode.packets import packet_facts
from fvc_lib.video.decode.source import CorruptVideo, TruncatedVideo, open_video


def _table(pts, keys, shown=None, damage=None):
    return FrameTable(
        pts=np.array(pts, np.int64),
        dts=np.arange(len(pts)),
        num_bytes=np.arange(1, len(pts) + 1),
        is_key=np.isin(np.arange(len(pts)), keys),
        is_shown=np.ones(len(pts), bool) if shown is None else np.array(shown, bool),
        doubt="",
        begins_anew=True,
        stores_pts=True,
        damage=damage,
    )


def test_leading_pictures_start_one_keyframe_earlier():
    #  decoding order: I0 P3 B1 B2 | I6 B4 B5 P7; B4 and B5 lead I6 and refer to P3
    table = _table([0, 3, 1, 2, 6, 4, 5, 7], keys=[0, 4])
    assert table.decoding_starts(np.arange(8)).tolist() == [0, 0, 0, 0, 4, 0, 0, 4]
    assert table.presentation_order().tolist() == [0, 2, 3, 1, 5, 6, 4, 7]


def test_hidden_packets_are_no_frames():
    table = _table([0, 41, 42, 83], keys=[0], shown=[True, False, True, True])
    assert table.num_shown == 3
    assert table.presentation_order().tolist() == [0, 2, 3]


def test_nothing_is_never_a_video(tmp_path):
    check_not_empty(tmp_path, _table([0], keys=[0]))
    with pytest.raises(CorruptVideo, match="holds no frame"):
        check_not_empty(tmp_path, _table([], keys=[]))
    with pytest.raises(TruncatedVideo, match="5 of its 5"):
        check_not_empty(tmp_path, _table([], keys=[], damage="5 of its 5 frames are missing"))


@pytest.mark.parametrize(
    ("name", "options", "trusted"),
    [
        ("a.mp4", {"options": {"bf": "2"}}, True),
        ("a.mkv", {"options": {"bf": "2"}}, True),
        ("a.ts", {"options": {"bf": "2"}}, True),
        ("plain.avi", {"codec": "mpeg4"}, True),
        ("reordered.avi", {"options": {"bf": "2"}}, False),  # AVI stores no presentation times
        ("raw.h264", {"container": "h264"}, False),
        ("vp8.webm", {"codec": "libvpx", "options": {"auto-alt-ref": "1", "lag-in-frames": "16"}}, True),
        ("vp9.webm", {"codec": "libvpx-vp9", "options": {"lag-in-frames": "16", "cpu-used": "8"}}, True),
    ],
)
def test_the_table_says_what_a_full_decode_shows_or_that_it_does_not_know(make_video, name, options, trusted):
    path = make_video(name, 24, **options)
    with open_video(path) as source:
        table = read_frame_table(source)
    with av.open(str(path)) as container:
        times = [frame.pts for frame in container.decode(video=0)]
    assert (not table.doubt) == trusted
    assert table.damage is None
    assert table.num_shown == len(times) == 24
    if trusted:
        assert table.pts[table.presentation_order()].tolist() == times


def test_frames_trimmed_by_an_edit_list_are_not_counted(shared_media):
    path = shared_media / "decode" / "ExoPlayer__c88bea_sample_edit_list.mp4"
    with open_video(path) as source:
        table = read_frame_table(source)
    assert table.num_packets == 86
    assert table.num_shown == 77


def test_packets_tell_sizes_distances_of_keyframes_and_the_rate_over_time():
    #  10 frames a second for 2.5 s; a keyframe of 100 bytes every 5 frames, else 10 bytes
    table = _table(range(25), keys=range(0, 25, 5))
    table = dataclasses.replace(table, num_bytes=np.where(table.is_key, 100, 10))
    facts = packet_facts(table, Fraction(1, 10))
    assert (facts.packet_bytes_mean, facts.packet_bytes_median, facts.packet_bytes_p90) == (28, 10, 100)
    assert (facts.key_bytes_ratio, facts.key_distance_mean, facts.key_distance_max) == (10, 5, 5)
    assert (facts.reordered_share, facts.bits_per_second_std, facts.bits_per_second_max) == (0, 0, 8 * 280)
    single = packet_facts(_table([0, 3, 1, 2], keys=[0]), Fraction(1, 10))
    assert (single.key_distance_mean, single.bits_per_second_std, single.reordered_share) == (None, None, 0.25)


def test_damaged_times_give_no_rate_and_take_no_memory():
    assert packet_facts(_table([0, 1, 10**15], keys=[0]), Fraction(1, 10)).bits_per_second_max is None
    without = dataclasses.replace(_table([NO_PTS, NO_PTS], keys=[0]), doubt="no times")
    assert packet_facts(without, Fraction(1, 10)).reordered_share is None
