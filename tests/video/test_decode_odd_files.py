"""Decoding files that are legal and rare, or damaged: what they hold, or an error, and never a guess."""

import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from av.bitstream import BitStreamFilterContext

from fvc_lib.video.decode import plan
from fvc_lib.video.decode.clip import decode_clip
from fvc_lib.video.decode.source import CorruptVideo, TruncatedVideo


def test_the_best_of_several_streams_is_read_and_no_other(tmp_path, number_of, numbered):
    path = tmp_path / "two.mkv"
    with av.open(str(path), "w") as output:
        streams = [output.add_stream("libx264", rate=25) for _ in range(2)]
        for stream, (width, height) in zip(streams, ((64, 48), (96, 64)), strict=True):
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(8):
            for offset, stream in ((100, streams[0]), (0, streams[1])):
                pixels = numbered(number + offset, stream.width, stream.height)
                output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="gray").reformat(format="yuv420p")))
        for stream in streams:
            output.mux(stream.encode(None))
    with av.open(str(path)) as container:
        best = container.streams.best("video")
        offset = 0 if best.width == 96 else 100
    clip = decode_clip(path, 8)
    assert [number_of(frame) for frame in clip.frames] == [offset + number for number in range(8)]


def test_size_and_orientation_may_change_in_mid_stream(tmp_path, number_of, numbered):
    """One transport stream: 64 x 48 upright, then 96 x 64 with a note to turn it by 180 degrees."""
    path = tmp_path / "changing.ts"
    with av.open(str(path), "w") as output:
        stream = output.add_stream("libx264", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        turn = BitStreamFilterContext("h264_metadata=display_orientation=insert:rotate=180", stream)
        for first, (width, height) in ((0, (64, 48)), (10, (96, 64))):
            encoder = av.CodecContext.create("libx264", "w")
            encoder.width, encoder.height, encoder.pix_fmt = width, height, "yuv420p"
            encoder.time_base, encoder.gop_size = Fraction(1, 25), 10
            encoder.options = {"bf": "2", "sc_threshold": "0"}
            packets = []
            for number in range(first, first + 10):
                frame = av.VideoFrame.from_ndarray(numbered(number, width, height), format="gray")
                frame = frame.reformat(format="yuv420p")
                frame.pts, frame.time_base = number, Fraction(1, 25)
                packets += encoder.encode(frame)
            packets += encoder.encode(None)
            turned = [result for packet in packets for result in turn.filter(packet)] if first else packets
            for packet in turned:
                packet.stream = stream
                output.mux(packet)
    clip = decode_clip(path, 20)
    assert clip.frames.shape == (20, 3, 48, 64)
    numbers = [number_of(frame) for frame in clip.frames[:10]]
    numbers += [number_of(frame[:, ::-1, ::-1]) for frame in clip.frames[10:]]
    assert numbers == list(range(20))


@pytest.mark.parametrize("codec", ["libx264", "libx265", "mpeg4"])
def test_frames_that_nothing_refers_to_are_not_decoded(make_video, monkeypatch, codec):
    options = {"bf": "3", "b_strategy": "0", "x264-params": "b-pyramid=none"}
    if codec == "libx265":
        options = {"x265-params": "log-level=none:bframes=3:b-adapt=0:b-pyramid=0"}
    path = make_video("b.mp4", 60, codec=codec, gop=60, options=options)
    decoded = []
    take = plan._Taker.take
    monkeypatch.setattr(
        plan._Taker, "take", lambda taker, frames, first: decoded.extend(frames) or take(taker, frames, first)
    )
    decode_clip(path, 2)
    assert len(decoded) <= 60 // 3 + 4


def test_times_that_no_decoder_could_reorder_do_not_abort_the_process(make_video, number_of):
    """One of 40 frames claims to be shown 30 places before its turn: more than a decoder holds back."""
    path = make_video("claims.mkv", 40, gop=40, options={"bf": "0", "sc_threshold": "0"})
    content = bytearray(path.read_bytes())
    block = next(place for place in range(len(content)) if content[place : place + 3] == b"\x81\x05\xf0")  # at 1,520 ms
    content[block + 1 : block + 3] = (305).to_bytes(2, "big")
    path.write_bytes(content)
    decode_it = "clip = decode_clip(pathlib.Path(sys.argv[1]), 6); print(clip.num_source_frames)"
    code = f"import sys, pathlib; from fvc_lib.video.decode.clip import decode_clip; {decode_it}"
    result = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, "40")


def _remux(source: Path, target: Path, keep) -> Path:
    """The packets of ``source`` for which ``keep(number)`` holds."""
    with av.open(str(source)) as given, av.open(str(target), "w") as output:
        stream = output.add_stream_from_template(given.streams.video[0])
        for number, packet in enumerate(packet for packet in given.demux(video=0) if packet.size):
            if keep(number):
                packet.stream = stream
                output.mux(packet)
    return target


@pytest.mark.parametrize(
    ("codec", "suffix"),
    [
        ("mpeg4", ".mkv"),
        ("flv", ".flv"),
        ("msmpeg4", ".mkv"),
        ("wmv2", ".asf"),
        ("mpeg2video", ".mkv"),
        ("libx264", ".mkv"),
    ],
)
def test_a_recording_that_begins_between_keyframes_gives_no_frame_made_from_nothing(
    make_video, tmp_path, codec, suffix
):
    scene = np.random.default_rng(0).integers(60, 200, (48, 64, 3), np.uint8)  # stays, so that frames are predicted
    pictures = [np.concatenate([scene[:40], np.full((8, 64, 3), 5 * number, np.uint8)]) for number in range(30)]
    options = {"bf": "0", "sc_threshold": "0"} if codec == "libx264" else {}
    container = "asf" if suffix == ".asf" else None
    path = f"whole{suffix}"
    whole = make_video(path, 30, codec=codec, gop=10, frames=pictures, options=options, container=container)
    frames = decode_clip(whole, 30).frames
    clip = decode_clip(_remux(whole, tmp_path / f"late{suffix}", lambda number: number >= 4), 20)
    assert clip.num_source_frames == 20
    np.testing.assert_array_equal(clip.frames, frames[10:])


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


def test_transport_streams_that_were_joined_are_one_whole_video(make_video, number_of, numbered, tmp_path):
    parts = []
    for part in range(3):
        times = [1000 * part + 40 * number for number in range(25)]
        frames = [numbered(25 * part + number, 64, 48) for number in range(25)]
        parts.append(make_video(f"{part}.ts", 25, times_ms=times, frames=frames, options={"bf": "2"}).read_bytes())
    joined = tmp_path / "joined.ts"
    joined.write_bytes(b"".join(parts))
    with av.open(str(joined)) as container:
        assert any(packet.is_corrupt for packet in container.demux(video=0))  # what the counters make of a join
    clip = decode_clip(joined, 75)
    assert [number_of(frame) for frame in clip.frames] == list(range(75))


def test_frames_with_one_time_keep_the_clock_of_the_others(make_video, number_of):
    times = [40 * number for number in range(10)] + [1000 * number for number in range(1, 11)]
    times[5] = times[4]
    path = make_video("tie.mkv", 20, codec="ffv1", times_ms=times)
    clip = decode_clip(path, 20)
    assert [number_of(frame) for frame in clip.frames] == list(range(20))
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


def test_names_may_hold_anything(make_video, number_of, tmp_path):
    path = make_video("plain.mp4", 4)
    for name in ("-dash.mp4", "http:x.mp4", 'a "b"\n[c]%03d {d} é 🎬.mp4', "\udcff\udcfe.mp4"):
        odd = tmp_path / name
        shutil.copy(path, odd)
        assert [number_of(frame) for frame in decode_clip(odd, 4).frames] == [0, 1, 2, 3]
