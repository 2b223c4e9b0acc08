from pathlib import Path

import numpy as np
import pytest

from fvc_lib.video.decode.clip import decode_clip
from fvc_lib.video.decode.frame_table import missing_bytes
from fvc_lib.video.decode.source import TruncatedVideo


@pytest.fixture
def whole_video(make_video):
    """30 frames of noise: enough bytes in each that a cut hits frames."""
    frames = np.random.default_rng(0).integers(0, 255, (30, 48, 64, 3), np.uint8)
    codecs = {".avi": "mpeg4", ".mkv": "libx264", ".webm": "libvpx"}
    return lambda name: make_video(name, 30, codec=codecs[Path(name).suffix], frames=frames)


@pytest.mark.parametrize("name", ["a.avi", "a.mkv", "a.webm"])
@pytest.mark.parametrize("keep", [0.5, 0.8])
def test_a_cut_file_lacks_what_was_cut(whole_video, name, keep):
    path = whole_video(name)
    content = path.read_bytes()
    assert missing_bytes(path) == 0
    path.write_bytes(content[: int(len(content) * keep)])
    assert missing_bytes(path) == len(content) - int(len(content) * keep)
    with pytest.raises(TruncatedVideo, match="bytes before the size its container states"):
        decode_clip(path, 4)


@pytest.mark.parametrize(("name", "num_lost"), [("a.avi", 40), ("a.mkv", 20)])
def test_a_file_that_lost_only_the_end_of_its_index_has_all_its_frames(whole_video, name, num_lost):
    path = whole_video(name)
    frames = decode_clip(path, 5).frames
    path.write_bytes(path.read_bytes()[:-num_lost])
    assert missing_bytes(path) == num_lost
    np.testing.assert_array_equal(decode_clip(path, 5).frames, frames)


def test_a_recording_that_states_no_size_lacks_nothing(make_video):
    path = make_video("live.mkv", 10, container_options={"live": "1"})
    assert missing_bytes(path) == 0
    path.write_bytes(path.read_bytes()[:-500])
    assert missing_bytes(path) == 0


@pytest.mark.parametrize("head", [b"", b"R", b"RIFF", b"\x1a\x45\xdf\xa3", b"\x1a\x45\xdf\xa3\x01", b"\x00" * 40])
def test_anything_may_stand_in_a_file(tmp_path, head):
    path = tmp_path / "odd"
    path.write_bytes(head)
    assert missing_bytes(path) == 0


def test_no_good_real_file_is_said_to_be_cut(shared_media):
    files = sorted((shared_media / "decode").iterdir())
    assert {path.name: missing_bytes(path) for path in files} == {path.name: 0 for path in files}
