import numpy as np
import pytest

from fvc_lib.corpus.samples.files import (
    Encoding,
    decode_frames,
    encode_to_size,
)
from fvc_lib.corpus.samples.scenes import Shot, draw_camera, render_shot
from fvc_lib.video.decode.probe import probe_video

CHOICES = [("libx264", "mp4"), ("libx264", "mkv"), ("mpeg4", "avi"), ("mpeg4", "mp4"), ("libvpx-vp9", "webm")]


@pytest.fixture(scope="module")
def frames():
    return render_shot(Shot("encoded", 144, 112, 24, draw_camera("encoded")))


@pytest.mark.parametrize(("codec", "suffix"), CHOICES)
def test_files_are_equal_to_the_byte_and_of_the_size_asked_for(codec, suffix, frames, tmp_path):
    encoding = Encoding(codec, suffix, 12, 0.5)
    content = encode_to_size(frames, encoding)
    assert content == encode_to_size(frames, encoding)
    assert abs(len(content) / encoding.target_bytes(frames) - 1) < 0.1
    decoded = decode_frames(content)
    assert decoded.shape == frames.shape
    assert np.abs(decoded.astype(int) - frames).mean() < 8
    (tmp_path / f"clip.{suffix}").write_bytes(content)
    probe = probe_video(tmp_path / f"clip.{suffix}")
    assert (probe.width, probe.height, probe.num_frames) == (144, 112, 24)
    assert probe.frames_per_second == pytest.approx(12, rel=1e-3)  # Matroska's time stamps are whole milliseconds
