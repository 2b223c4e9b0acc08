"""The plan of a decode: what goes to the decoder, from where, and what it says of itself before a frame is decoded."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fvc_lib.video.decode.frame_table import FrameTable, read_frame_table
from fvc_lib.video.decode.plan import Route, decode, plan_decoding
from fvc_lib.video.decode.source import TruncatedVideo, open_video


@pytest.fixture(scope="module")
def opened(encode_video, tmp_path_factory):
    with open_video(encode_video(tmp_path_factory.mktemp("plan") / "a.mp4", 2)) as source:
        yield source


def table_of(pts, keys, **changed):
    of_packets = {"pts": np.array(pts, np.int64), "dts": np.arange(len(pts)), "num_bytes": np.ones(len(pts), np.int64)}
    is_key, shown = np.isin(np.arange(len(pts)), keys), np.ones(len(pts), bool)
    settled = {"doubt": "", "begins_anew": True, "stores_pts": True, "damage": None}
    return FrameTable(**of_packets, is_key=is_key, is_shown=shown, **{**settled, **changed})


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
    assert plan.num_decoded == len(fed)
    assert all(table.is_key[start] and end - 1 in positions for start, end in plan.runs)
    for position in positions:
        keys = [key for key in np.flatnonzero(table.is_key).tolist() if key <= position]
        leads = len(keys) > 1 and table.pts[position] < table.pts[keys[-1]]
        assert set(range(keys[-2] if leads else keys[-1], position + 1)) <= set(fed)
    assert 1 <= plan.seeks <= len(plan.runs)


def test_neighbouring_groups_are_one_run_and_far_ones_cost_a_seek(opened):
    table = table_of(range(300), keys=range(0, 300, 100))
    assert plan_decoding(opened, table, {99, 100, 250}).runs == ((0, 101), (200, 251))
    assert [plan_decoding(opened, table, wanted).seeks for wanted in ({80, 150}, {40, 150})] == [1, 2]


def test_a_plan_says_what_is_done_and_why(opened):
    wanted = set(range(0, 60, 4))
    whole = str(plan_decoding(opened, table_of(range(60), keys=[0, 20]), wanted))
    assert whole.startswith("15 frames of 60, by runs of packets: time stamps name every frame. 54 of 60 packets")
    assert "nobody wants are left out" in whole
    doubtful = table_of(range(60), keys=[0], doubt="several frames have one time")
    plan = plan_decoding(opened, doubtful, wanted)
    assert plan.routes == (Route.PASS, Route.COUNT)
    assert "by one pass, because several frames have one time. 60 of 60" in str(plan)
    assert plan_decoding(opened, doubtful, wanted, in_order=True).routes == (Route.COUNT,)
    far = plan_decoding(opened, table_of([0, *range(2, 31), 1], keys=[0]), wanted={0})
    assert "more than a decoder holds back" in far.why
    with pytest.raises(TruncatedVideo, match="3 of its 63 frames are missing"):
        plan_decoding(opened, table_of([0], keys=[0], damage="3 of its 63 frames are missing"), {0})


class Listing:
    """Wants all frames, and keeps the places in the order in which they come."""

    def __init__(self, count):
        self.wanted, self.came = set(range(count)), []

    def offer(self, place, frame):
        self.came.append(place)
        self.wanted.discard(place)


def test_open_groups_that_are_wanted_whole_are_decoded_once_and_in_order(make_video):
    path = make_video("b.mp4", 60, gop=20, options={"bf": "3", "x264-params": "open-gop=1:b-adapt=0"})
    with open_video(path) as source:
        table = read_frame_table(source)
        assert plan_decoding(source, table, range(60)).runs == ((0, 60),)
        done = decode(source, table, lambda _, count, __: Listing(count), in_order=True)
    assert (done.route, done.sink.came) == (Route.RUNS, list(range(60)))
