import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fvc_lib.video.decode.clip import decode_clip, uniform_places
from tests.video.conftest import read_number

# name, encoder options: what makes finding a frame hard
CASES = {
    "b_frames.mp4": {"options": {"bf": "3", "b_strategy": "0"}},
    "open_gop.mp4": {"options": {"bf": "3", "x264-params": "open-gop=1:b-adapt=0"}},
    "one_gop.mp4": {"gop": 100},
    "fragmented.mp4": {"container_options": {"movflags": "frag_keyframe+empty_moov"}, "options": {"bf": "2"}},
    "b_frames.mkv": {"options": {"bf": "2"}},
    "b_frames.ts": {"options": {"bf": "2"}},
    "open_gop.ts": {"options": {"bf": "3", "x264-params": "open-gop=1:b-adapt=0"}},
    "flash.flv": {"options": {"bf": "2"}},
    "odd.mp4": {"width": 63, "height": 47, "pixel_format": "yuv444p", "codec": "libx264"},
    "ten_bit.mp4": {"pixel_format": "yuv420p10le"},
    "old.avi": {"codec": "mpeg4"},
    "b_frames.avi": {"options": {"bf": "2", "b_strategy": "0"}},
    "mpeg4_b.avi": {"codec": "mpeg4", "options": {"bf": "2"}},
    "mpeg4_b.mp4": {"codec": "mpeg4", "options": {"bf": "2"}},
    "mpeg2.mpg": {"codec": "mpeg2video", "options": {"bf": "2"}},
    "mpeg2.ts": {"codec": "mpeg2video", "options": {"bf": "2"}},
    "stills.mov": {"codec": "mjpeg", "pixel_format": "yuvj420p"},
    "vp8.webm": {"codec": "libvpx", "options": {"auto-alt-ref": "1", "lag-in-frames": "16"}},
    "vp9.webm": {"codec": "libvpx-vp9", "options": {"auto-alt-ref": "1", "lag-in-frames": "16", "cpu-used": "8"}},
    "raw.h264": {"container": "h264", "options": {"bf": "2"}},
    "animation.gif": {"codec": "gif", "pixel_format": "gray"},
    "variable.mp4": {"times_ms": [number * number * 7 for number in range(20)], "options": {"bf": "2"}},
    "variable.mkv": {"times_ms": [number * number * 7 for number in range(20)]},
    "hevc.mp4": {"codec": "libx265", "options": {"x265-params": "log-level=none:bframes=3:open-gop=0"}},
    "hevc_open_gop.mkv": {"codec": "libx265", "options": {"x265-params": "log-level=none:bframes=3:open-gop=1"}},
    "hevc_ten_bit.ts": {
        "codec": "libx265",
        "pixel_format": "yuv420p10le",
        "options": {"x265-params": "log-level=none:bframes=3"},
    },
    "av1.mp4": {"codec": "libsvtav1", "options": {"preset": "12", "svtav1-params": "hierarchical-levels=3"}},
    "av1.mkv": {"codec": "libsvtav1", "options": {"preset": "12", "svtav1-params": "hierarchical-levels=3"}},
    "interlaced.mp4": {"options": {"bf": "2", "x264-params": "tff=1"}},
    "interlaced.ts": {"codec": "mpeg2video", "options": {"bf": "2", "flags": "+ildct+ilme"}},
    "alpha.webm": {"codec": "libvpx-vp9", "pixel_format": "yuva420p", "options": {"cpu-used": "8"}},
    "alpha.mov": {"codec": "prores_ks", "pixel_format": "yuva444p10le"},
    "full_range.mp4": {"pixel_format": "yuvj420p"},
    "rgb.mkv": {"codec": "ffv1", "pixel_format": "bgr0"},
    "live.mkv": {"container_options": {"live": "1"}, "options": {"bf": "2"}},  # neither duration nor index
    "pictures.apng": {"codec": "apng", "pixel_format": "rgb24", "container": "apng"},
    "media.wmv": {"codec": "wmv2", "container": "asf"},
    "late.mp4": {"times_ms": [5000 + 40 * number for number in range(20)], "options": {"bf": "2"}},
}


@pytest.mark.parametrize("name", CASES)
def test_every_frame_is_the_one_its_index_says(make_video, name):
    path = make_video(name, **CASES[name])
    for num_frames in (1, 2, 5, 20):
        clip = decode_clip(path, num_frames)
        expected = np.round(np.linspace(0, 19, num_frames)).astype(int).tolist()
        assert clip.num_source_frames == 20
        assert clip.frame_indices.tolist() == expected
        assert [read_number(frame) for frame in clip.frames] == expected


def test_a_clip_is_described_with_its_types_and_times(make_video):
    path = make_video("variable.mkv", times_ms=[0, 10, 500, 510, 3000], num_frames=5)
    clip = decode_clip(path, 5, 32)
    assert (clip.frames.dtype, clip.frames.shape) == (np.uint8, (5, 3, 32, 32))
    assert clip.frame_indices.dtype == np.int64
    assert clip.pts_seconds.tolist() == pytest.approx([0, 0.01, 0.5, 0.51, 3])
    assert (clip.content.top, clip.content.height, clip.content.width) == (4, 24, 32)
    assert not clip.frames[:, :, :4].any()
    assert clip.frames[:, :, 4:28].min() > 0


def test_fewer_frames_than_asked_are_repeated(make_video):
    clip = decode_clip(make_video("short.mp4", 3), 7)
    assert clip.frame_indices.tolist() == [0, 0, 1, 1, 1, 2, 2]
    assert [read_number(frame) for frame in clip.frames] == [0, 0, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
@pytest.mark.parametrize("mirrored", [False, True])
def test_frames_stand_upright(make_video, degrees, mirrored):
    picture = np.full((48, 64, 3), 40, np.uint8)
    picture[:24, :32] = 220  # bright upper left quarter
    path = make_video("turned.mp4", 2, frames=[picture, picture], display=(-degrees, mirrored))
    # The container turns first and mirrors after.
    upright = np.rot90(picture, -degrees // 90)[:, :: -1 if mirrored else 1]
    for size in (None, 32):
        clip = decode_clip(path, 1, size)
        shown = clip.content.cut(clip.frames[0])
        assert shown.shape[1] / shown.shape[2] == pytest.approx(upright.shape[0] / upright.shape[1], rel=0.05)
        for y, x in itertools.product((0.25, 0.75), (0.25, 0.75)):
            wanted = upright[int(y * upright.shape[0]), int(x * upright.shape[1]), 0]
            assert abs(int(shown[0, int(y * shown.shape[1]), int(x * shown.shape[2])]) - wanted) < 15


def test_pixels_that_are_not_square_are_letterboxed_as_displayed(make_video):
    path = make_video("wide.mp4", 2, sample_aspect_ratio=Fraction(3, 2))
    clip = decode_clip(path, 1, 96)  # 64 x 48 pixels shown as 96 x 48
    assert (clip.content.width, clip.content.height, clip.content.top) == (96, 48, 24)
    assert decode_clip(path, 1).frames.shape == (1, 3, 48, 64)


@pytest.mark.parametrize("arguments", [{"num_frames": 0}, {"num_frames": 1, "size": 0}])
def test_senseless_arguments_are_named(tmp_path, arguments):
    with pytest.raises(ValueError, match=r"got"):
        decode_clip(tmp_path / "never_opened.mp4", **arguments)


@given(st.integers(1, 500), st.integers(1, 40))
def test_places_are_spread_from_the_first_to_the_last(num_source_frames, num_frames):
    places = uniform_places(num_source_frames, num_frames)
    assert len(places) == num_frames
    assert places[0] == 0
    assert (np.diff(places) >= 0).all()
    if num_frames > 1:
        assert places[-1] == num_source_frames - 1
        ideal = [Fraction(k * (num_source_frames - 1), num_frames - 1) for k in range(num_frames)]
        half = Fraction(1, 2) + Fraction(1, 10**9)
        assert all(abs(int(place) - exact) <= half for place, exact in zip(places, ideal, strict=True))
