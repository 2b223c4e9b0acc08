"""The MP4 index against what ffmpeg reads from the packets, and against damage."""

import random
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from fvc_lib.video.decode import frame_table
from fvc_lib.video.decode.frame_table import read_frame_table, read_sample_table
from fvc_lib.video.decode.source import VideoError, open_video

PLAIN = {
    "b_frames.mp4": {"options": {"bf": "3", "b_strategy": "0"}},
    "no_b_frames.mp4": {"options": {"bf": "0"}},
    "index_first.mp4": {"container_options": {"movflags": "faststart"}, "options": {"bf": "2"}},
    "signed_offsets.mp4": {"container_options": {"movflags": "negative_cts_offsets"}, "options": {"bf": "2"}},
    "no_edit_list.mp4": {"container_options": {"use_editlist": "0"}, "options": {"bf": "2"}},
    "late.mp4": {"times_ms": [5000 + 40 * number for number in range(20)], "options": {"bf": "2"}},
    "variable.mov": {"times_ms": [number * number * 7 for number in range(20)], "options": {"bf": "2"}},
    "all_keys.mov": {"codec": "mjpeg", "pixel_format": "yuvj420p"},
    "mpeg4.mp4": {"codec": "mpeg4"},
    "open_gop.mp4": {"options": {"bf": "3", "x264-params": "open-gop=1:b-adapt=0"}},
}
NOT_PLAIN = {
    "fragmented.mp4": {"container_options": {"movflags": "frag_keyframe+empty_moov"}},
    "vp9.mp4": {"codec": "libvpx-vp9", "options": {"cpu-used": "8"}},  # may hold hidden references
}


def _samples(path: Path):
    with open_video(path) as source:
        return read_sample_table(path, source.stream.id, len(source.stream.index_entries))


def _by_packets(path: Path, monkeypatch):
    with monkeypatch.context() as patch, open_video(path) as source:
        patch.setattr(frame_table, "read_sample_table", lambda *_: None)
        return read_frame_table(source)


@pytest.mark.parametrize("name", PLAIN)
def test_the_index_tells_what_the_packets_tell(make_video, monkeypatch, name):
    path = make_video(name, 20, **PLAIN[name])
    assert _samples(path) is not None
    with open_video(path) as source:
        table = read_frame_table(source)
    packets = _by_packets(path, monkeypatch)
    for column in ("pts", "dts", "is_key", "is_shown"):
        np.testing.assert_array_equal(getattr(table, column), getattr(packets, column), column)
    for value in ("trusted", "stores_pts", "damage"):
        assert getattr(table, value) == getattr(packets, value)


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_the_index_does_not_tell_plainly_is_left_to_the_packets(make_video, monkeypatch, name):
    path = make_video(name, 20, **NOT_PLAIN[name])
    if name != "vp9.mp4":
        assert _samples(path) is None
    with open_video(path) as source:
        table = read_frame_table(source)
    np.testing.assert_array_equal(table.pts, _by_packets(path, monkeypatch).pts)


def test_real_files_tell_the_same_both_ways(shared_media, monkeypatch):
    compared = 0
    for path in sorted((shared_media / "decode").iterdir()):
        with open_video(path) as source:
            if source.container_name != "mov":
                continue
            table = read_frame_table(source)
        packets = _by_packets(path, monkeypatch)
        np.testing.assert_array_equal(table.pts, packets.pts, path.name)
        np.testing.assert_array_equal(table.is_key, packets.is_key, path.name)
        assert (table.trusted, table.damage) == (packets.trusted, packets.damage), path.name
        compared += _samples(path) is not None
    assert compared > 30


def test_a_trimming_edit_list_is_not_plain(make_video):
    path = make_video("whole.mp4", 20, options={"bf": "2"})
    content = bytearray(path.read_bytes())
    entry = content.index(b"elst") + 12  # behind version, flags and count
    duration, media_time, rate = struct.unpack(">IiI", content[entry : entry + 12])
    for changed in ((duration // 2, media_time, rate), (duration, media_time + 5000, rate), (duration, media_time, 1)):
        content[entry : entry + 12] = struct.pack(">IiI", *changed)
        path.write_bytes(content)
        assert read_sample_table(path, 1, 20) is None


def test_samples_behind_the_end_of_the_file_are_noticed(make_video):
    path = make_video("whole.mp4", 20, container_options={"movflags": "faststart"})
    whole = read_sample_table(path, 1, 20)
    assert whole is not None
    assert whole.is_complete
    path.write_bytes(path.read_bytes()[:-1])
    samples = read_sample_table(path, 1, 20)
    assert samples is not None
    assert not samples.is_complete


def test_damaged_indexes_are_refused_without_taking_memory(make_video, tmp_path):
    """Every number of the index in turn is made absurd; what is claimed is never allocated."""
    whole = make_video("whole.mp4", 20, options={"bf": "2"}).read_bytes()
    start, stop = whole.index(b"moov"), len(whole)
    damaged = tmp_path / "damaged.mp4"
    generator = random.Random(0)
    refused = 0
    tracemalloc.start()
    for place in range(start, stop - 4):
        number = generator.choice((0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 0x10000, 0, 1))
        damaged.write_bytes(whole[:place] + struct.pack(">I", number) + whole[place + 4 :])
        tracemalloc.reset_peak()
        samples = read_sample_table(damaged, 1, 20)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20, place
        refused += samples is None
    tracemalloc.stop()
    assert refused > 100


def test_no_samples_or_no_such_track_is_no_index(make_video, tmp_path):
    path = make_video("whole.mp4", 4)
    assert read_sample_table(path, 1, 0) is None
    assert read_sample_table(path, 1, 5) is None
    assert read_sample_table(path, 2, 4) is None
    text = tmp_path / "text.mp4"
    text.write_text("no boxes here, only words")
    assert read_sample_table(text, 1, 4) is None
    with pytest.raises(VideoError):
        _samples(text)
