import numpy as np
import pytest

from fvc_lib.corpus.samples.files import (
    Encoding,
    crop_frames,
    decode_frames,
    encode_to_size,
    rescale_frames,
    split_planes,
)
from fvc_lib.corpus.samples.scenes import Shot, draw_camera, render_shot
from fvc_lib.video.decode.clip import probe_video

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


def test_footage_that_compresses_well_gets_the_same_size(frames):
    encoding = Encoding("libx264", "mp4", 12, 0.4)
    frozen = frames[np.minimum(np.arange(24), 11)]
    sizes = [len(encode_to_size(footage, encoding)) for footage in (frames, frozen)]
    assert abs(sizes[0] / sizes[1] - 1) < 0.1


def test_target_size_counts_luma_pixels():
    assert Encoding("mpeg4", "avi", 12, 0.5).target_bytes(np.zeros((24, 168, 144), np.uint8)) == 24 * 112 * 144 // 16


def test_crop_cuts_the_same_place_from_all_planes(frames):
    cropped = crop_frames(frames, 6, 10, 96, 120)
    assert cropped.shape == (24, 144, 120)
    for t in (0, 23):
        luma, *chroma = split_planes(frames[t])
        cut_luma, *cut_chroma = split_planes(cropped[t])
        assert np.array_equal(cut_luma, luma[6:102, 10:130])
        for plane, cut in zip(chroma, cut_chroma, strict=True):
            assert np.array_equal(cut, plane[3:51, 5:65])


def test_rescaling_keeps_the_picture(frames):
    smaller = rescale_frames(frames, 84, 108)
    assert smaller.shape == (24, 126, 108)
    back = rescale_frames(smaller, 112, 144)
    assert np.abs(back.astype(int) - frames).mean() < 5
    assert np.array_equal(rescale_frames(frames, 112, 144), frames)


def test_planes_are_views(frames):
    packed = frames[0].copy()
    for plane in split_planes(packed):
        plane[:] = 7
    assert (packed == 7).all()
