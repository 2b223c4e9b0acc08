"""Videos written anew: what a recipe promises of frames, times, sizes and orientation, and where its files lie."""

from dataclasses import fields, replace
from fractions import Fraction

import av
import numpy as np
import pytest
from hypothesis import given, strategies as st

from fvc_lib.corpus.probing import probe_files, reencoded_files
from fvc_lib.services.errors import UsageError
from fvc_lib.video.decode.clip import decode_clip
from fvc_lib.video.decode.probe import probe_video
from fvc_lib.video.decode.source import RefusedVideo, UnreadableVideo
from fvc_lib.video.reencode import RECIPES, Recipe, recipe_named, reencode, reencoded
from tests.video.conftest import read_number
from tests.video.mutations import textured_frames

NUM_FRAMES, WIDTH, HEIGHT = 24, 96, 64


@pytest.fixture(scope="module")
def plain(tmp_path_factory, encode_video):
    """24 H.264 frames at 25 per second, with detail that compression costs something."""
    path = tmp_path_factory.mktemp("plain") / "plain.mp4"
    frames = textured_frames(NUM_FRAMES, WIDTH, HEIGHT)
    return encode_video(path, NUM_FRAMES, width=WIDTH, height=HEIGHT, frames=frames)


def _made(video, name, folder):
    reencode(video, folder / f"{name}.mp4", recipe_named(name))
    return folder / f"{name}.mp4"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_keeps_what_it_does_not_change(name, tmp_path, plain):
    recipe, target = RECIPES[name], _made(plain, name, tmp_path)
    before, made = decode_clip(plain, NUM_FRAMES, 64), probe_video(target)
    kept = recipe.shown(before.pts_seconds)[0].tolist()
    assert made.num_frames == len(kept) == {"rate": 12, "trim": 18}.get(recipe.kind, 24)
    assert (made.width, made.height, made.has_audio) == (WIDTH * recipe.scale, HEIGHT * recipe.scale, False)
    after = decode_clip(target, len(kept), 64)
    assert after.pts_seconds == pytest.approx(before.pts_seconds[kept] - before.pts_seconds[kept[0]], abs=2e-5)
    difference = np.abs(before.frames[kept].astype(int) - after.frames).mean((1, 2, 3))
    is_same = recipe.kind in ("lossless", "rate", "trim")
    assert (difference == 0).all() if is_same else (difference > 0).all()
    assert difference.max() < 40
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def test_stronger_levels_leave_less_of_the_picture(tmp_path, plain):
    before = decode_clip(plain, NUM_FRAMES).frames.astype(float)
    for kind in ("h264", "jpeg", "blur", "noise"):
        made = [_made(plain, name, tmp_path) for name, recipe in RECIPES.items() if recipe.kind == kind]
        losses = [np.square(before - decode_clip(path, NUM_FRAMES).frames).mean() for path in made]
        assert losses == sorted(losses)
        assert losses[0] < losses[-1]
        if kind == "h264":
            coded = [path.stat().st_size for path in made]
            assert coded == sorted(coded, reverse=True)
            assert coded[0] > 2 * coded[-1]


@pytest.mark.parametrize(
    "options",
    [
        {"container": "webm", "codec": "libvpx-vp9"},
        {"display": (90, False), "pixel_format": "yuvj420p", "codec": "mjpeg", "container": "mp4"},
    ],
)
def test_canonical_files_have_closed_groups_of_16_and_no_trace_of_the_source(tmp_path, make_video, options):
    with av.open(str(_made(make_video("source", 40, **options), "canonical", tmp_path))) as container:
        stream = container.streams.video[0]
        packets = [packet for packet in container.demux(stream) if packet.size]
        order = [packet.pts for packet in packets]
        keys = sorted(packet.pts for packet in packets if packet.is_keyframe)
        assert [sorted(order).index(key) for key in keys] == [0, 16, 32]
        # Closed: nothing shown before a keyframe comes after it.
        assert all(max(order[: order.index(key)], default=-1) < key for key in keys)
        assert (stream.codec_context.name, stream.pix_fmt, stream.profile) == ("h264", "yuv420p", "High")
        assert (len(container.streams), stream.metadata.get("rotate")) == (1, None)


def test_times_of_a_variable_rate_pixels_that_are_not_square_and_turns_are_kept(tmp_path, encode_video):
    times = [0, 40, 55, 300, 1000, 1001, 1400, 2000]
    source = encode_video(
        tmp_path / "odd.mp4", 8, times_ms=times, display=(90, False), sample_aspect_ratio=Fraction(2, 3),
        pixel_format="yuv444p", width=64, height=48,
    )  # fmt: skip
    before = decode_clip(source, 8, 64)
    for name in ("canonical", "lossless", "blur_1", "size_half"):
        after = decode_clip(_made(source, name, tmp_path), 8, 64)
        assert after.pts_seconds == pytest.approx([time / 1000 for time in times], abs=2e-5)
        assert after.content == before.content  # upright, and of the same shape
        assert np.abs(before.frames.astype(int) - after.frames).mean() < 10


@pytest.mark.parametrize(
    ("name", "pixel_format", "codec", "width", "height"),
    [("a.mp4", "gray", "libx264", 64, 48), ("a.mp4", "yuv420p10le", "libx264", 64, 48),
     ("a.mp4", "yuv444p", "libx264", 63, 47), ("a.mov", "yuvj420p", "mjpeg", 64, 48), ("a.gif", "rgb8", "gif", 33, 21)],
)  # fmt: skip
def test_grey_deep_odd_and_full_range_pictures_look_the_same(
    tmp_path, make_video, name, pixel_format, codec, width, height
):
    source = make_video(name, 6, codec=codec, pixel_format=pixel_format, width=width, height=height)
    before, after = (decode_clip(path, 6, 64) for path in (source, _made(source, "lossless", tmp_path)))
    assert after.content == before.content
    assert np.abs(before.frames.astype(int) - after.frames).mean() < 0.6
    canonical = probe_video(_made(source, "canonical", tmp_path))
    assert (canonical.width, canonical.height) == (width - width % 2, height - height % 2)


def test_files_are_kept_by_content_and_recipe_and_one_bad_video_costs_itself(tmp_path, plain, monkeypatch):
    copy, bad = tmp_path / "copy.mp4", tmp_path / "bad.mp4"
    copy.write_bytes(plain.read_bytes())
    bad.write_bytes(plain.read_bytes()[:2000])
    made = reencoded(copy, "canonical", tmp_path / "cache")
    kind = reencoded_files("canonical", tmp_path / "cache")
    found, _ = probe_files(kind, tmp_path, ["copy.mp4", "bad.mp4"], tmp_path)
    assert (found["copy.mp4"].probe.codec, found["bad.mp4"].reason) == ("h264", "not_reencoded")
    assert list((tmp_path / "cache").rglob("*.mp4")) == [made]
    content = made.read_bytes()
    with monkeypatch.context() as patch:  # another file with that content has the same file, and no encoder runs
        patch.setattr("fvc_lib.video.reencode.reencode", lambda *_: pytest.fail("made again"))
        assert reencoded(plain, "canonical", tmp_path / "cache") == made
    assert reencoded(plain, "blur_1", tmp_path / "cache") != made
    for damage in (content[:-100], b"", b"another"):
        made.write_bytes(damage)
        assert reencoded(plain, "canonical", tmp_path / "cache").read_bytes() == content, "a damaged file is made anew"


def test_every_field_of_a_recipe_the_code_and_pyav_decide_where_its_files_lie(monkeypatch):
    recipe = RECIPES["canonical"]
    others = {"options": (("preset", "slow"),), "scale": Fraction(1, 3)}
    digests = {recipe.digest, RECIPES["canonical"].digest}
    for field in fields(Recipe):
        value = getattr(recipe, field.name)
        other = others.get(field.name) or (f"{value} too" if isinstance(value, str) else value + 1)
        digests.add(replace(recipe, **{field.name: other}).digest)
    monkeypatch.setattr("av.__version__", "0.0.1")
    digests.add(recipe.digest)
    monkeypatch.setattr("fvc_lib.video.reencode.code_hash", lambda module, within: f"another {module} in {within}")
    digests.add(recipe.digest)
    assert len(digests) == 1 + len(fields(Recipe)) + 2


def test_unknown_recipes_and_files_are_named(tmp_path):
    with pytest.raises(UsageError, match=r"sepia.*canonical, lossless"):
        recipe_named("sepia")
    with pytest.raises(UnreadableVideo):
        reencoded(tmp_path / "none.mp4", "canonical", tmp_path)


def made(source, tmp_path, height=32, rate=25, *, canonical=False):
    return _made(source, f"{'canonical_' if canonical else ''}rescale_{height}_at_{rate}", tmp_path)


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
def test_each_moment_shows_the_frame_nearest_in_time(tmp_path, make_video, times_ms, rate):
    source = make_video("a.mp4", len(times_ms), times_ms=times_ms, height=32)
    target = made(source, tmp_path, rate=rate)
    clip = decode_clip(target, probe_video(target).num_frames)
    seen = [read_number(frame) for frame in clip.frames]
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


def test_pictures_that_no_memory_holds_are_refused_with_the_reason(tmp_path, make_video):
    with pytest.raises(RefusedVideo, match="737280 x 2160"):
        made(make_video("wide.mp4", 2, width=8192, height=24), tmp_path, 2160)


def test_a_file_that_cannot_be_written_is_no_error_of_the_video(make_video):
    with pytest.raises(OSError, match="/proc"):
        reencode(make_video("a.mp4", 5), "/proc/x.mp4", recipe_named("lossless"))
