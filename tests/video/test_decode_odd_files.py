"""Decoding files that are legal and rare, or damaged: what they hold, or an error, and never a guess."""

import av
import numpy as np
import pytest

from fvc_lib.video.decode.clip import decode_clip
from fvc_lib.video.decode.pixels import FrameSink
from fvc_lib.video.decode.source import CorruptVideo, TruncatedVideo
from tests.video.conftest import numbered_frame, read_number


@pytest.mark.parametrize("codec", ["libx264", "libx265", "mpeg4"])
def test_frames_that_nothing_refers_to_are_not_decoded(make_video, monkeypatch, codec):
    options = {"bf": "3", "b_strategy": "0", "x264-params": "b-pyramid=none"}
    if codec == "libx265":
        options = {"x265-params": "log-level=none:bframes=3:b-adapt=0:b-pyramid=0"}
    path = make_video("b.mp4", 60, codec=codec, gop=60, options=options)
    decoded, offer = [], FrameSink.offer
    monkeypatch.setattr(FrameSink, "offer", lambda *arguments: decoded.append(arguments) or offer(*arguments))
    decode_clip(path, 2)
    assert 2 <= len(decoded) <= 60 // 3 + 4


@pytest.mark.parametrize(
    ("codec", "suffix"),
    [("mpeg4", "mkv"), ("flv", "flv"), ("msmpeg4", "mkv"), ("wmv2", "asf"), ("mpeg2video", "mkv"), ("libx264", "mkv")],
)
def test_a_recording_that_begins_between_keyframes_gives_no_frame_made_from_nothing(
    make_video, tmp_path, codec, suffix
):
    scene = np.random.default_rng(0).integers(60, 200, (48, 64, 3), np.uint8)  # stays, so that frames are predicted
    pictures = [np.concatenate([scene[:40], np.full((8, 64, 3), 5 * number, np.uint8)]) for number in range(30)]
    options = {"bf": "0", "sc_threshold": "0"} if codec == "libx264" else {}
    container = "asf" if suffix == "asf" else None
    whole = make_video(
        f"whole.{suffix}", 30, codec=codec, gop=10, frames=pictures, options=options, container=container
    )
    late = tmp_path / f"late.{suffix}"
    with av.open(str(whole)) as given, av.open(str(late), "w") as output:
        stream = output.add_stream_from_template(given.streams.video[0])
        for packet in [packet for packet in given.demux(video=0) if packet.size][4:]:
            packet.stream = stream
            output.mux(packet)
    clip = decode_clip(late, 20)
    assert clip.num_source_frames == 20
    np.testing.assert_array_equal(clip.frames, decode_clip(whole, 30).frames[10:])


@pytest.mark.parametrize("codec", ["msmpeg4", "wmv2", "flv", "mpeg4", "libx264"])
def test_packets_wrongly_called_keyframes_are_found_out(make_video, codec):
    """An AVI file without its index, which is optional: ffmpeg then calls every packet of some codecs a keyframe."""
    options = {"bf": "0"} if codec == "libx264" else {}
    path = make_video("whole.avi", 30, codec=codec, gop=10, options=options)
    whole = decode_clip(path, 30).frames
    content = path.read_bytes()
    content = content[: content.rindex(b"idx1")]
    path.write_bytes(content[:4] + (len(content) - 8).to_bytes(4, "little") + content[8:])
    clip = decode_clip(path, 7)
    assert clip.num_source_frames == 30
    np.testing.assert_array_equal(clip.frames, whole[clip.frame_indices])


def test_transport_streams_that_were_joined_are_one_whole_video(make_video, tmp_path):
    joined = tmp_path / "joined.ts"
    with joined.open("wb") as stream:
        for first in (0, 25, 50):
            times = [40 * number for number in range(first, first + 25)]
            frames = [numbered_frame(number, 64, 48) for number in range(first, first + 25)]
            part = make_video("part.ts", 25, times_ms=times, frames=frames, options={"bf": "2"})
            stream.write(part.read_bytes())
    with av.open(str(joined)) as container:
        assert any(packet.is_corrupt for packet in container.demux(video=0))  # what the counters make of a join
    assert [read_number(frame) for frame in decode_clip(joined, 75).frames] == list(range(75))


def test_frames_with_one_time_keep_the_clock_of_the_others(make_video):
    times = [40 * number for number in range(10)] + [1000 * number for number in range(1, 11)]
    times[5] = times[4]
    path = make_video("tie.mkv", 20, codec="ffv1", times_ms=times)
    clip = decode_clip(path, 20)
    assert [read_number(frame) for frame in clip.frames] == list(range(20))
    assert clip.pts_seconds.tolist() == [time / 1000 for time in times]


@pytest.mark.parametrize(
    ("name", "codec", "num_bytes"),
    [("a.flv", "flv", 2000), ("a.ts", "libx264", 100), ("a.ts", "libx264", 10 * 188), ("a.ts", "mpeg2video", 188)],
)
def test_a_file_cut_within_its_last_packet_is_an_error(make_video, name, codec, num_bytes):
    noise = np.random.default_rng(0).integers(0, 255, (20, 48, 64, 3), np.uint8)
    path = make_video(name, frames=list(noise), codec=codec)
    path.write_bytes(path.read_bytes()[:-num_bytes])
    with pytest.raises((TruncatedVideo, CorruptVideo)):
        decode_clip(path, 4)
