"""Videos brought to one height and one rate: sizes, shapes, the frames that are shown, and bytes that repeat."""

from fractions import Fraction

import av
import numpy as np
import pytest
from hypothesis import given, strategies as st

from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError
from fvc_lib.video.decode.clip import decode_clip
from fvc_lib.video.decode.probe import probe_video
from fvc_lib.video.decode.source import RefusedVideo
from fvc_lib.video.reencode import recipe_named, reencode


def made(source, tmp_path, height=32, rate=25, *, canonical=False):
    recipe = f"{'canonical_' if canonical else ''}rescale_{height}_at_{rate}"
    reencode(source, tmp_path / f"{recipe}.mp4", recipe_named(recipe))
    return tmp_path / f"{recipe}.mp4"


@pytest.mark.parametrize(
    ("options", "width"),
    [
        ({"width": 64, "height": 48}, 42),
        ({"width": 63, "height": 47, "pixel_format": "yuv444p"}, 42),
        ({"width": 20, "height": 16}, 40),  # enlarged
        ({"width": 64, "height": 48, "display": (90, False)}, 24),
        ({"width": 64, "height": 48, "sample_aspect_ratio": Fraction(3, 2)}, 64),
        ({"width": 64, "height": 48, "sample_aspect_ratio": Fraction(3, 2), "display": (-90, False)}, 16),
        ({"width": 64, "height": 48, "pixel_format": "yuv420p10le"}, 42),
        ({"width": 64, "height": 48, "pixel_format": "gray"}, 42),
        ({"width": 64, "height": 48, "pixel_format": "yuv420p", "codec": "libvpx-vp9"}, 42),
    ],
)
def test_every_size_becomes_one_height_upright_of_the_same_shape(tmp_path, make_video, options, width):
    source = make_video("a.webm" if "codec" in options else "a.mp4", 6, **options)
    before = decode_clip(source, 6, 64)
    for canonical in (False, True):
        target = made(source, tmp_path, canonical=canonical)
        after, found = decode_clip(target, 6, 64), probe_video(target)
        assert (found.width, found.height, found.rotation_degrees, found.num_frames) == (width, 32, 0, 6)
        assert abs(before.content.width - after.content.width) <= 2
        assert abs(before.content.height - after.content.height) <= 2
        inside = (slice(None), slice(None), slice(24, 40), slice(24, 40))  # no black bar of either
        assert np.abs(before.frames[inside].astype(int) - after.frames[inside]).mean() < 12
        with av.open(str(target)) as container:
            stream = container.streams.video[0]
            assert stream.sample_aspect_ratio in (None, 0, 1)
            assert next(packet.pts for packet in container.demux(stream) if packet.is_keyframe) == 0
            assert not canonical or stream.pix_fmt == "yuv420p"


def test_what_has_that_height_and_rate_already_keeps_every_bit_and_time(tmp_path, make_video):
    source = make_video("a.mp4", 12, height=32)
    target = made(source, tmp_path)
    before, after = decode_clip(source, 12, None), decode_clip(target, 12, None)
    assert (before.frames == after.frames).all()
    assert after.pts_seconds == pytest.approx(before.pts_seconds, abs=1e-4)


@pytest.mark.parametrize(
    ("times_ms", "rate"),
    [
        ([20 * n for n in range(25)], 25),  # every other one
        ([33, 67, 100, 133, 167, 200, 233, 267, 300], 10),  # a container's clock of milliseconds
        ([125 * n for n in range(8)], 25),  # frames are repeated
        ([40 * n for n in range(25)], 8),
        ([0, 40, 55, 300, 1000, 1001, 1400, 2000], 10),  # variable
        ([0], 8),
    ],
)
def test_each_moment_shows_the_frame_nearest_in_time(tmp_path, make_video, number_of, times_ms, rate):
    source = make_video("a.mp4", len(times_ms), times_ms=times_ms, height=32)
    target = made(source, tmp_path, rate=rate)
    clip = decode_clip(target, probe_video(target).num_frames)
    seen = [number_of(frame) for frame in clip.frames]
    shown, _ = recipe_named(f"rescale_32_at_{rate}").shown(np.array(times_ms) / 1000)
    assert seen == shown.tolist()
    assert clip.pts_seconds == pytest.approx([number / rate for number in range(len(seen))], abs=2e-5)
    assert len(set(seen)) <= recipe_named(f"rescale_32_at_{rate}").num_shown(len(times_ms), len(seen) / rate)


@given(st.lists(st.integers(1, 400), max_size=40), st.integers(1, 60))
def test_moments_are_even_and_frames_go_forward(gaps_ms, rate):
    times = np.cumsum([5, *gaps_ms]) / 1000
    places, seconds = recipe_named(f"rescale_480_at_{rate}").shown(times)
    assert (np.diff(places) >= 0).all()
    assert (places[0], seconds[0]) == (0, 0)
    assert np.allclose(np.diff(seconds), 1 / rate)
    asked = (times - times[0])[:, None]
    assert (np.abs(asked[places, 0] - seconds) <= np.abs(asked - seconds).min(0) + 2.1e-3).all()
    if rate < 1000 / max(gaps_ms, default=1000):  # no gap as long as a step: nothing is shown twice
        assert len(set(places.tolist())) >= len(places) - 1  # the last may stay for as long as a frame lasts


def test_the_bytes_are_the_same_every_time(tmp_path, make_video):
    source = make_video("a.mp4", 10, width=90, height=70)
    for canonical in (False, True):
        first = made(source, tmp_path, 48, 10, canonical=canonical).read_bytes()
        assert made(source, tmp_path, 48, 10, canonical=canonical).read_bytes() == first


def test_pictures_and_times_that_no_disk_holds_are_refused_with_the_reason(tmp_path, make_video):
    with pytest.raises(RefusedVideo, match="737280 x 2160"):
        made(make_video("wide.mp4", 2, width=8192, height=24), tmp_path, 2160)
    apart = make_video("apart.mp4", 3, times_ms=[0, 40, 80_000_000], height=32)
    with pytest.raises(RefusedVideo, match="3,000,000"):
        made(apart, tmp_path)


def test_the_recipe_says_both_numbers_and_nonsense_is_refused():
    names = [RunConfig(rescale=480).recipe, RunConfig(rescale=480, canonical=True).recipe, "rescale_480_at_9"]
    assert names[:2] == ["rescale_480_at_8", "canonical_rescale_480_at_8"]
    recipes = [recipe_named(name) for name in names]
    assert [recipe.is_lossless for recipe in recipes] == [True, False, True]
    assert recipes[1].options == recipe_named("canonical").options
    assert len({recipe.digest for recipe in recipes}) == 3
    with pytest.raises(UsageError, match="rescale_480"):
        recipe_named("rescale_480")
    for value in (481, 8, 4000):
        with pytest.raises(ValueError, match="rescale"):
            RunConfig(rescale=value)
