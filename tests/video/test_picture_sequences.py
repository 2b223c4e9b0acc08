"""Folders of pictures as videos: their order, sizes, rate and content, and pictures that are damaged."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fvc_lib.services.clip_settings import View
from fvc_lib.video.decode.clip import decode_clip, probe_video
from fvc_lib.video.decode.source import CorruptVideo, UnreadableVideo, UnsupportedVideo, picture_names, sha256_of_video
from fvc_lib.video.decode.views import decode_view


def picture(number: int, width: int = 48, height: int = 40) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)


def write(folder: Path, numbers: range, suffix: str = "png", prefix: str = "") -> Path:
    folder.mkdir(parents=True)
    for number in numbers:
        Image.fromarray(picture(number)).save(folder / f"{prefix}{number}.{suffix}")
    return folder


def test_pictures_are_frames_bit_by_bit_in_the_order_of_their_numbers(tmp_path):
    folder = write(tmp_path / "sequence", range(8, 13))
    (folder / ".DS_Store").write_bytes(b"x")
    (folder / "notes.txt").write_text("no picture")
    assert picture_names(folder) == ["8.png", "9.png", "10.png", "11.png", "12.png"]
    clip = decode_clip(folder, 5)
    assert np.array_equal(clip.frames, np.stack([picture(number).transpose(2, 0, 1) for number in range(8, 13)]))
    windows, (seen,) = decode_view(folder, 2, 40, View(sampling="window:2", fit="crop"))
    assert np.array_equal(windows[1], picture(11).transpose(2, 0, 1)[:, :, 4:44])
    assert (seen.first_frame, seen.last_frame) == (1, 3)


def test_sizes_may_vary_and_each_picture_is_fitted_alone(tmp_path):
    folder = write(tmp_path / "sequence", range(3))
    Image.fromarray(picture(1, width=20, height=60)).save(folder / "1.png")
    frames = decode_clip(folder, 3, 60).frames
    assert np.array_equal(frames[1][:, :, 20:40], picture(1, 20, 60).transpose(2, 0, 1))
    assert not frames[1][:, :, :20].any()
    assert frames[0][:, 5:55].any(axis=(0, 1)).all()  # 48 x 40 became 60 x 50


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_no_rate_is_stated_because_none_is_known(tmp_path, suffix):
    probe = probe_video(write(tmp_path / "sequence", range(4), suffix))
    assert (probe.num_frames, probe.width, probe.height) == (4, 48, 40)
    assert probe.frames_per_second is probe.duration_seconds is probe.bits_per_second is None
    assert probe.bits_per_second_max is None
    assert probe.size_bytes == sum(path.stat().st_size for path in (tmp_path / "sequence").iterdir())


def test_the_content_is_that_of_the_pictures_in_their_order_whatever_they_are_called(tmp_path):
    one, other = write(tmp_path / "one", range(3)), write(tmp_path / "other", range(3), prefix="frame_")
    assert sha256_of_video(one) == sha256_of_video(other)
    (other / "frame_2.png").rename(other / "frame_0b.png")  # the third becomes the second
    assert sha256_of_video(one) != sha256_of_video(other)


def cut(content: bytes) -> bytes:
    return content[:-30]


def without_end(content: bytes) -> bytes:
    return content[:-12]


def bit_flipped(content: bytes) -> bytes:
    return content[:900] + bytes([content[900] ^ 1]) + content[901:]


def with_more(content: bytes) -> bytes:
    return content + b"more"


def emptied(content: bytes) -> bytes:
    return content[:0]


@pytest.mark.parametrize("damage", [cut, without_end, bit_flipped, with_more, emptied])
def test_a_damaged_picture_is_named_and_its_sequence_refused(tmp_path, damage: Callable[[bytes], bytes]):
    folder = write(tmp_path / "sequence", range(4))
    (folder / "2.png").write_bytes(damage((folder / "2.png").read_bytes()))
    with pytest.raises(CorruptVideo, match=r"2\.png: .*Unpack its archive again"):
        probe_video(folder)


def test_a_cut_jpeg_is_named(tmp_path):
    folder = write(tmp_path / "sequence", range(3), "jpg")
    (folder / "1.jpg").write_bytes((folder / "1.jpg").read_bytes()[:-200])
    with pytest.raises(CorruptVideo, match=r"1\.jpg: its data are damaged or cut off"):
        decode_clip(folder, 3)


def test_folders_that_are_no_sequence_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnreadableVideo, match="nor a folder of PNG or JPEG pictures"):
        probe_video(tmp_path / "empty")
    mixed = write(tmp_path / "mixed", range(2))
    Image.fromarray(picture(2)).save(mixed / "2.jpg")
    with pytest.raises(UnsupportedVideo, match="both PNG and JPEG"):
        probe_video(mixed)
