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
    canvas = np.random.default_rng(0).normal(size=(240, 240))
    canvas = np.clip(128 + 300 * gaussian_filter(canvas, 2), 0, 255).astype(np.uint8)
    return [canvas[60 + 2 * n : 156 + 2 * n, 80 - 4 * n : 208 - 4 * n] for n in range(NUM_FRAMES)]


@pytest.fixture
def read(tmp_path, moving, encode_video):
    """Encodes the moving texture, and reads its stream with what the decoder says of each frame."""

    def reading(name, codec, *, strict=False, **settings):
        path = encode_video(tmp_path / name, NUM_FRAMES, codec=codec, width=128, height=96, frames=moving, **settings)
        notes = FrameNotes()
        with open_video(path) as opened:
            table = read_frame_table(opened)
        with open_video(path) as source:
            export(source)
            if strict:
                source.be_strict()
            for packet in source.packets():
                for frame in packet.decode():
                    notes.observe(frame)
            return notes.added_to(stream_of(source, table))

    return reading


@pytest.mark.parametrize("strict", [False, True])
def test_quantisers_types_and_motion_of_h264(read, strict):
    options = {"qp": "30", "preset": "medium", "aq-mode": "0", "bf": "0"}
    stream = read("a.mp4", "libx264", gop=6, options=options, strict=strict)
    assert stream.codec == "h264"
    assert stream.frame_types == "IPPPPPIPPPPP"
    assert stream.qp.shape == (NUM_FRAMES, 2)
    of_p = np.array([letter == "P" for letter in stream.frame_types])
    np.testing.assert_allclose(stream.qp[of_p], [[30 / 51, 0]] * 10, rtol=1e-6)
    assert (stream.qp[~of_p, 0] < 30 / 51).all()  # x264 spends more on I frames
    assert np.median(stream.motion, axis=0).tolist() == [4, -2]
    assert np.isnan(stream.intra[~of_p]).all()
    assert (stream.intra[of_p] >= 0).all()
    assert stream.intra[of_p].max() < 0.3


def test_motion_towards_a_later_frame_points_the_same_way(read):
    stream = read("a.mp4", "libx264", gop=12, options={"bf": "2", "b-adapt": "0", "qp": "20"})
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
    stream = read(name, codec, options=options)
    assert np.isfinite(stream.qp[:, 0]).all() == has_qp
    assert bool(len(stream.motion)) == has_motion
    assert len(stream.frame_types) == len(stream.qp) == len(stream.intra)
    if codec == "mpeg4":
        np.testing.assert_allclose(stream.qp[:, 0], 2 * 5 / 62, rtol=1e-6)


def test_packets_are_those_of_the_frame_table_and_hidden_ones_have_no_time(encode_video, tmp_path):
    with open_video(encode_video(tmp_path / "a.mp4", NUM_FRAMES, options={"bf": "2"})) as opened:
        table = read_frame_table(opened)
        shown, time_base = np.arange(NUM_FRAMES) != 5, opened.stream.time_base
        stream = stream_of(opened, replace(table, is_shown=shown))
    assert stream.sizes.tolist() == table.num_bytes.tolist()
    assert stream.is_key.tolist() == table.is_key.tolist()
    assert (np.isnan(stream.pts_seconds) == ~shown).all()
    np.testing.assert_allclose(stream.pts_seconds[shown], table.pts[shown] * float(time_base))


def test_times_that_a_container_does_not_store_are_unknown(read):
    stream = read("a.h264", "libx264", container="h264")
    assert np.isnan(stream.pts_seconds).all()
    assert len(stream.sizes) == NUM_FRAMES


def test_a_sample_has_what_is_told_of_its_frames_however_they_are_found(tmp_path, moving, encode_video):
    options = {"bf": "2", "crf": "25", "preset": "fast"}
    of = {}
    for name in ("a.mp4", "a.ts", "a.h264"):  # found by their times, and the last by decoding everything
        container = "h264" if name == "a.h264" else None
        path = encode_video(
            tmp_path / name, NUM_FRAMES, options=options, container=container, width=128, height=96, frames=moving
        )
        of[name] = sample_video(path).stream
    assert len(of["a.mp4"].frame_types) == NUM_FRAMES
    for stream in of.values():
        assert stream.frame_types == of["a.mp4"].frame_types
        np.testing.assert_array_equal(stream.qp, of["a.mp4"].qp)
        np.testing.assert_array_equal(stream.intra, of["a.mp4"].intra)
        np.testing.assert_array_equal(stream.motion, of["a.mp4"].motion)
