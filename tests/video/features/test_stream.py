"""What is read of a file besides its pixels, of files whose quantisers, motion and times are known."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

from fvc_lib.video.decode.frame_table import read_frame_table
from fvc_lib.video.decode.source import open_video
from fvc_lib.video.features.sampling import FrameNotes, export, sample_video, stream_of

NUM_FRAMES = 12


@pytest.fixture(scope="module")
def moving():
    """Grey frames of a texture that moves by 4 pixels to the right and 2 up from each to the next."""
    canvas = gaussian_filter(np.random.default_rng(0).normal(size=(240, 240)), 2)
    canvas = np.clip(128 + 300 * canvas, 0, 255).astype(np.uint8)
    return [canvas[60 + 2 * n : 156 + 2 * n, 80 - 4 * n : 208 - 4 * n] for n in range(NUM_FRAMES)]


@pytest.fixture
def read(make_video, moving):
    """Encodes the moving texture, and returns its stream with the exported data of all frames, and its frame table."""

    def reading(name, codec, **settings):
        path = make_video(name, NUM_FRAMES, codec=codec, width=128, height=96, frames=moving, **settings)
        notes = FrameNotes()
        with open_video(path) as opened:
            table = read_frame_table(opened)
        with open_video(path) as source:
            export(source)
            for packet in source.packets():
                for frame in packet.decode():
                    notes.observe(frame)
            return notes.added_to(stream_of(source, table)), table

    return reading


def test_quantisers_types_and_motion_of_h264(read):
    options = {"qp": "30", "preset": "medium", "aq-mode": "0", "bf": "0"}
    stream, table = read("a.mp4", "libx264", gop=6, options=options)
    assert (stream.codec, stream.frame_types) == ("h264", "IPPPPPIPPPPP")
    of_p = np.array([letter == "P" for letter in stream.frame_types])
    np.testing.assert_allclose(stream.qp[of_p], [[30 / 51, 0]] * 10, rtol=1e-6)
    assert (stream.qp[~of_p, 0] < 30 / 51).all()  # x264 spends more on I frames
    assert np.median(stream.motion, axis=0).tolist() == [4, -2]
    assert np.isnan(stream.intra[~of_p]).all()
    assert (stream.intra[of_p] >= 0).all()
    assert stream.intra[of_p].max() < 0.3
    assert stream.sizes.tolist() == table.num_bytes.tolist()
    assert stream.is_key.tolist() == table.is_key.tolist()


def test_motion_towards_a_later_frame_points_the_same_way(read):
    stream, _ = read("a.mp4", "libx264", gop=12, options={"bf": "2", "b-adapt": "0", "qp": "20"})
    assert "B" in stream.frame_types
    # Blocks of B frames lie up to three frames from those they refer to.
    assert np.median(stream.motion[:, 0]) in {4, 8, 12}
    assert (stream.motion[:, 0] > 0).mean() > 0.8


@pytest.mark.parametrize(
    ("name", "codec", "options", "has_qp", "has_motion"),
    [
        ("a.mp4", "mpeg4", {"qmin": "5", "qmax": "5"}, True, True),
        ("a.webm", "libvpx-vp9", {"deadline": "realtime", "cpu-used": "8"}, True, False),
        ("a.mp4", "libx265", {"preset": "ultrafast", "x265-params": "log-level=none"}, False, False),
    ],
)
def test_what_a_decoder_does_not_tell_is_missing(read, name, codec, options, has_qp, has_motion):
    stream, _ = read(name, codec, options=options)
    assert np.isfinite(stream.qp[:, 0]).all() == has_qp
    assert bool(len(stream.motion)) == has_motion
    assert len(stream.frame_types) == len(stream.qp) == len(stream.intra)
    if codec == "mpeg4":
        np.testing.assert_allclose(stream.qp[:, 0], 2 * 5 / 62, rtol=1e-6)


def test_hidden_packets_and_containers_without_times_have_no_time(make_video, read):
    with open_video(make_video("a.mp4", NUM_FRAMES, options={"bf": "2"})) as opened:
        table = read_frame_table(opened)
        shown, time_base = np.arange(NUM_FRAMES) != 5, opened.stream.time_base
        seconds = stream_of(opened, replace(table, is_shown=shown)).pts_seconds
    np.testing.assert_allclose(seconds, np.where(shown, table.pts * float(time_base), np.nan))
    stream, _ = read("a.h264", "libx264", container="h264")
    assert np.isnan(stream.pts_seconds).all()
    assert len(stream.sizes) == NUM_FRAMES


def test_a_sample_has_the_same_data_however_its_frames_are_found(moving, make_video):
    settings = {"options": {"bf": "2", "crf": "25", "preset": "fast"}, "width": 128, "height": 96, "frames": moving}
    streams = [  # found by their times, and the last by decoding everything
        sample_video(make_video(name, NUM_FRAMES, container=container, **settings)).stream
        for name, container in (("a.mp4", None), ("a.ts", None), ("a.h264", "h264"))
    ]
    assert len(streams[0].frame_types) == NUM_FRAMES
    assert len({stream.frame_types for stream in streams}) == 1
    for stream in streams[1:]:
        for name in ("qp", "intra", "motion"):
            np.testing.assert_array_equal(getattr(stream, name), getattr(streams[0], name))
