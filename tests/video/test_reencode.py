"""Videos written anew: what a recipe promises of frames, times, sizes and orientation, and where its files lie."""

from dataclasses import fields, replace
from fractions import Fraction

import av
import numpy as np
import pytest

from fvc_lib.services.errors import UsageError
from fvc_lib.video.decode.clip import decode_clip
from fvc_lib.video.decode.probe import probe_video
from fvc_lib.video.decode.source import UnreadableVideo, UnsupportedVideo
from fvc_lib.video.reencode import RECIPES, Recipe, recipe_named, reencode, reencode_files, reencoded
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


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.is_available])
def test_a_recipe_keeps_what_it_does_not_change(name, tmp_path, plain):
    recipe, target = RECIPES[name], _made(plain, name, tmp_path)
    made, kept = probe_video(target), list(recipe.chosen(NUM_FRAMES))
    assert made.num_frames == len(kept) == {"rate": 12, "trim": 18}.get(recipe.kind, 24)
    assert (made.width, made.height, made.has_audio) == (WIDTH * recipe.scale, HEIGHT * recipe.scale, False)
    before, after = decode_clip(plain, NUM_FRAMES, 64), decode_clip(target, len(kept), 64)
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


def test_a_picture_that_leaves_nothing_is_refused_with_the_reason(tmp_path, encode_video):
    source = encode_video(tmp_path / "thin.mp4", 3, width=1, height=48, pixel_format="yuv444p")
    with pytest.raises(UnsupportedVideo, match="1 x 48"):
        reencode(source, tmp_path / "made.mp4", RECIPES["canonical"])
    assert not (tmp_path / "made.mp4").exists()


def test_files_are_kept_by_content_and_recipe_and_one_bad_video_costs_itself(tmp_path, plain, monkeypatch):
    copy, bad = tmp_path / "copy.mp4", tmp_path / "bad.mp4"
    copy.write_bytes(plain.read_bytes())
    bad.write_bytes(plain.read_bytes()[:2000])
    found = {each.source: each for each in reencode_files([copy, bad], "canonical", tmp_path / "cache", workers=1)}
    assert (found[bad].path, found[bad].reason) == (None, "unreadable")
    made = found[copy].path
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
    others = {"options": (("preset", "slow"),), "scale": Fraction(1, 3), "jpeg_quality": 60}
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
