"""The table of frames that packets give, what it says of missing ones, and the plan of a decode made from it."""

import dataclasses
from fractions import Fraction
from types import SimpleNamespace

import av
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fvc_lib.video.decode.clip import decode_clip
from fvc_lib.video.decode.decoding import decode, plan_decoding
from fvc_lib.video.decode.frame_table import NO_PTS, FrameTable, missing_bytes, read_frame_table, seconds_of
from fvc_lib.video.decode.pixels import FrameSink
from fvc_lib.video.decode.probe import packet_facts
from fvc_lib.video.decode.source import TruncatedVideo, open_video


@pytest.fixture(scope="module")
def opened(encode_video, tmp_path_factory):
    with open_video(encode_video(tmp_path_factory.mktemp("plan") / "a.mp4", 2)) as source:
        yield source


def table_of(pts, keys, **changed):
    pts = np.array(pts, np.int64)
    is_key, shown = np.isin(np.arange(len(pts)), keys), np.ones(len(pts), bool)
    sizes = np.ones(len(pts), np.int64)
    table = FrameTable(pts, np.arange(len(pts)), sizes, is_key, is_key, shown, doubt="", stores_pts=True, damage="")
    return dataclasses.replace(table, **changed)


def test_leading_pictures_start_one_keyframe_earlier_and_hidden_packets_are_no_frames():
    #  decoding order: I0 P3 B1 B2 | I6 B4 B5 P7; B4 and B5 lead I6 and refer to P3
    table = table_of([0, 3, 1, 2, 6, 4, 5, 7], keys=[0, 4])
    assert table.decoding_starts(np.arange(8)).tolist() == [0, 0, 0, 0, 4, 0, 0, 4]
    assert table.presentation_order().tolist() == [0, 2, 3, 1, 5, 6, 4, 7]
    hidden = table_of([0, 41, 42, 83], keys=[0], is_shown=np.array([True, False, True, True]))
    assert (hidden.num_shown, hidden.presentation_order().tolist()) == (3, [0, 2, 3])


@pytest.mark.parametrize(
    ("name", "options", "trusted"),
    [
        ("a.mp4", {"options": {"bf": "2"}}, True),
        ("a.ts", {"options": {"bf": "2"}}, True),
        ("plain.avi", {"codec": "mpeg4"}, True),
        ("reordered.avi", {"options": {"bf": "2"}}, False),  # AVI stores no presentation times
        ("raw.h264", {"container": "h264"}, False),
        ("live.mkv", {"options": {"bf": "2"}, "container_options": {"live": "1"}}, True),
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
    assert (not table.doubt, table.damage) == (trusted, "")
    assert table.num_shown == len(times) == 24
    if trusted:
        assert table.pts[table.presentation_order()].tolist() == times


def test_packets_tell_sizes_distances_of_keyframes_and_the_rate_over_time():
    #  10 frames a second for 2.5 s; a keyframe of 100 bytes every 5 frames, else 10 bytes
    sizes = np.where(np.arange(25) % 5, 10, 100)
    facts = packet_facts(table_of(range(25), keys=range(0, 25, 5), num_bytes=sizes), Fraction(1, 10))
    assert (facts.packet_bytes_mean, facts.packet_bytes_median, facts.packet_bytes_p90) == (28, 10, 100)
    assert (facts.key_bytes_ratio, facts.key_distance_mean, facts.key_distance_max) == (10, 5, 5)
    assert (facts.reordered_share, facts.bits_per_second_std, facts.bits_per_second_max) == (0, 0, 8 * 280)
    single = packet_facts(table_of([0, 3, 1, 2], keys=[0]), Fraction(1, 10))
    assert (single.key_distance_mean, single.bits_per_second_std, single.reordered_share) == (None, None, 0.25)
    assert packet_facts(table_of([0, 1, 10**15], keys=[0]), Fraction(1, 10)).bits_per_second_max is None
    assert packet_facts(table_of([NO_PTS] * 2, keys=[0], doubt="no times"), Fraction(1, 10)).reordered_share is None


@given(st.integers(-(10**9), 10**9), st.sampled_from([(1, 15360), (1, 24000), (1001, 30000), (1, 90000), (1, 1000)]))
def test_seconds_are_the_floats_of_exact_fractions(pts, time_base):
    base = Fraction(*time_base)
    assert seconds_of(np.array([pts]), base)[0] == float(pts * base)


# Sizes that containers state


@pytest.mark.parametrize(("name", "codec", "num_lost"), [("a.avi", "mpeg4", 40), ("a.mkv", "libx264", 20)])
def test_a_cut_file_lacks_frames_unless_only_its_index_was_cut(make_video, name, codec, num_lost):
    noise = np.random.default_rng(0).integers(0, 255, (30, 48, 64, 3), np.uint8)
    path = make_video(name, 30, codec=codec, frames=noise)
    content, frames = path.read_bytes(), decode_clip(path, 5).frames
    assert missing_bytes(content[:4096], len(content)) == missing_bytes(bytes(40), 4) == 0
    assert missing_bytes(content[:4096], len(content) - num_lost) == num_lost
    path.write_bytes(content[:-num_lost])
    np.testing.assert_array_equal(decode_clip(path, 5).frames, frames)
    for keep in (0.5, 0.8):
        path.write_bytes(content[: int(len(content) * keep)])
        with pytest.raises(TruncatedVideo, match="bytes"):
            decode_clip(path, 4)


# Plans


@st.composite
def groups_and_wanted(draw):
    """Groups of pictures, open ones with pictures that lead their keyframe, and places that are wanted."""
    pts, keys = [0], [0]
    for _ in range(draw(st.integers(1, 6))):
        leading = draw(st.integers(0, 2)) if len(pts) > 1 else 0
        if len(pts) > 1:
            keys.append(len(pts))
            top = max(pts)
            pts += [top + leading + 1, *range(top + 1, top + leading + 1)]
        pts += range(max(pts) + 1, max(pts) + 1 + draw(st.integers(0, 40)))
    return table_of(pts, keys), draw(st.sets(st.integers(0, len(pts) - 1), min_size=1))


@settings(max_examples=200)
@given(drawn=groups_and_wanted())
def test_runs_hold_what_wanted_frames_need_once_and_nothing_behind_the_last(opened, drawn):
    table, wanted = drawn
    plan = plan_decoding(opened, table, wanted)
    positions = table.presentation_order()[sorted(wanted)].tolist()
    fed = [position for start, end in plan.runs for position in range(start, end)]
    assert fed == sorted(set(fed))
    assert all(table.is_key[start] and end - 1 in positions for start, end in plan.runs)
    for position in positions:
        keys = [key for key in np.flatnonzero(table.is_key).tolist() if key <= position]
        leads = len(keys) > 1 and table.pts[position] < table.pts[keys[-1]]
        assert set(range(keys[-2] if leads else keys[-1], position + 1)) <= set(fed)


def test_a_plan_joins_runs_that_meet(opened):
    table = table_of(range(300), keys=range(0, 300, 100))
    assert plan_decoding(opened, table, {99, 100, 250}).runs == ((0, 101), (200, 251))


def test_the_whole_video_is_decoded_where_packets_leave_doubt_and_damage_is_refused(make_video):
    path = make_video("a.mp4", 30)
    with open_video(path) as source:
        table = read_frame_table(source)
    doubtful = dataclasses.replace(table, doubt="several frames have one time")
    deep = dataclasses.replace(table, pts=np.append(table.pts[:1], np.roll(table.pts[1:], 1)))  # the 2nd is shown last
    for changed in (doubtful, deep):
        with open_video(path) as source:
            done = decode(source, changed, lambda source, count, _: FrameSink(source, 32, np.arange(count)))
        assert not done.is_sparse
        np.testing.assert_array_equal(done.sink.frames, decode_clip(path, 30, 32).frames)
    damaged = dataclasses.replace(table, damage="3 of its 63 frames are missing")
    with open_video(path) as source, pytest.raises(TruncatedVideo):
        decode(source, damaged, lambda source, count, _: FrameSink(source, 32, np.arange(count)))


def test_open_groups_are_decoded_in_runs_and_in_order_when_wanted_whole(make_video):
    path = make_video("b.mp4", 60, gop=20, options={"bf": "3", "x264-params": "open-gop=1:b-adapt=0"})
    came, wanted = [], set(range(60))
    sink = SimpleNamespace(wanted=wanted, offer=lambda place, _: (came.append(place), wanted.discard(place)))
    with open_video(path) as source:
        table = read_frame_table(source)
        assert plan_decoding(source, table, range(60)).runs == ((0, 60),)
        done = decode(source, table, lambda *_: sink, in_order=True)
    assert (done.is_sparse, came) == (True, list(range(60)))
