"""Families on packets and on what decoders tell: against naive loops, and what cannot be measured."""

import math
from statistics import median

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fvc_lib.services.registry import FEATURES
from fvc_lib.video.features.coding import measure_codec_motion, measure_packets, measure_quantisers, measure_timing
from fvc_lib.video.features.family import Stream

FAMILIES = ("codec_motion", "packets", "quantisers", "timing")


def stream_of(sizes, is_key=None, seconds=None, codec="h264", **told):
    """A ``Stream`` of packets of these sizes, with one keyframe, 25 a second, unless said otherwise."""
    count = len(sizes)
    is_key = np.arange(count) == 0 if is_key is None else np.array(is_key, bool)
    seconds = np.arange(count) / 25 if seconds is None else np.array(seconds, float)
    return Stream(codec, np.array(sizes, np.int64), is_key, seconds, **told)


def test_packets_are_compared_with_those_of_their_kind():
    is_key, place = np.arange(90) % 30 == 0, np.arange(90)
    for first in range(1, 88, 3):  # decoded as P B B, shown as B B P
        if not is_key[first : first + 3].any():
            place[first : first + 3] = first + 2, first, first + 1
    is_b = np.r_[False, place[1:] < np.maximum.accumulate(place)[:-1]]
    found = measure_packets(stream_of(np.where(is_key, 8000, np.where(is_b, 500, 2000)), is_key, place / 30))
    wanted = {"b_step": 2, "spread": 0, "largest": 0, "key_distance": 30, "odd_groups": 0, "tiny": 0, "key_step": 4}
    assert {name: found[name] for name in wanted} == wanted  # most frames except keyframes are B frames


def test_motion_vectors_are_counted_by_length_and_direction():
    found = measure_codec_motion(stream_of([9], motion=np.float32([[0, 0], [3, 4], [0, 5], [5, 0], [-5, 0]])))
    assert found == pytest.approx({"zero": 0.2, "length": 5, "disorder": 0, "directions": 2})


def test_frames_that_were_keyframes_before_show_their_period():
    draw = np.random.default_rng(1)
    sizes = 1000 * 2 ** draw.normal(0, 0.3, 200)
    plain = measure_packets(stream_of(sizes))
    sizes[7::11] *= 2
    again = measure_packets(stream_of(sizes))
    assert plain["periodicity"] < 4 < 8 < again["periodicity"]
    assert again["period"] == 11


def test_repeated_frames_are_tiny_and_of_layered_codecs_nothing_is_said():
    sizes = np.random.default_rng(2).integers(800, 1200, 80)
    sizes[[20, 41, 60, 77]] = 30
    assert measure_packets(stream_of(sizes))["tiny"] == pytest.approx(4 / 79)
    assert math.isnan(measure_packets(stream_of(sizes, codec="av1"))["tiny"])


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_timing_is_that_of_intervals_one_by_one(steps):
    times = np.cumsum([0, *steps]) / 1000
    usual = median(steps)
    ratios = [each / usual for each in steps]
    got = measure_timing(stream_of(np.ones(len(times)), seconds=np.random.default_rng(0).permutation(times)))
    assert got["longest_gap"] == pytest.approx(max(ratios))
    assert got["jitter"] == pytest.approx(sum(min(1, abs(each - 1)) for each in ratios) / len(ratios))
    # Whether an interval is just 1.5 times as long depends on the last digit of its times.
    if not any(abs(each - limit) < 1e-6 for each in ratios for limit in (0.5, 1.5, *np.arange(2.5, 310))):
        assert got["gaps"] == pytest.approx(sum(each > 1.5 for each in ratios) / len(ratios))
        assert got["crowded"] == pytest.approx(sum(each < 0.5 for each in ratios) / len(ratios))
        assert got["missing"] == pytest.approx(sum(max(0, round(each) - 1) for each in ratios) / len(times))


def test_quantisers_are_those_of_frames_compared_with_their_own_type():
    told = np.array([[0.4, 0.01], [0.5, 0.03], [0.6, 0.05], [0.7, 0.07], [np.nan, np.nan]], np.float32)
    intra = np.array([np.nan, 0.1, 0.3, np.nan, np.nan], np.float32)
    got = measure_quantisers(stream_of([9] * 5, frame_types="IPPB?", qp=told, intra=intra))
    assert got == pytest.approx(
        {"level": 0.55, "within": 0.04, "between": 0.05, "key_step": 0.15, "intra": 0.2}, rel=1e-5
    )


def test_what_cannot_be_told_of_a_still_is_missing():
    for name in FAMILIES:
        found = FEATURES.get(name).pooled([FEATURES.get(name).measure(stream_of([500]))])
        assert all(math.isnan(each) for each in found.values())


def test_without_times_the_packets_are_still_compared_and_timing_is_missing():
    stream = stream_of(np.random.default_rng(3).integers(500, 900, 80), seconds=np.full(80, np.nan))
    assert all(math.isnan(each) for each in measure_timing(stream).values())
    told = measure_packets(stream)
    assert {name for name, value in told.items() if math.isnan(value)} == {"b_step", "key_distance", "odd_groups"}
