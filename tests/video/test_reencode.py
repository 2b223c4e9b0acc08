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
    if recipe.kind in ("lossless", "rate", "trim"):
        assert not difference.any()
    else:
        assert difference.min() > 0
        assert difference.max() < 40
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def test_stronger_levels_leave_less_of_the_picture(tmp_path, plain):
    def loss(name):
        after = decode_clip(_made(plain, name, tmp_path), NUM_FRAMES).frames
        return np.square(decode_clip(plain, NUM_FRAMES).frames.astype(float) - after).mean()

    for names in (["h264_crf23", "h264_crf28", "h264_crf35", "h264_crf40"], ["jpeg_90", "jpeg_70", "jpeg_50"]):
        losses = [loss(name) for name in names]
        assert losses == sorted(losses)
    for kind in ("blur", "noise"):
        losses = [loss(name) for name, recipe in RECIPES.items() if recipe.kind == kind]
        assert losses == sorted(losses)
        assert losses[0] < losses[-1]
    coded = [(tmp_path / f"h264_crf{crf}.mp4").stat().st_size for crf in (23, 28, 35, 40)]
    assert coded == sorted(coded, reverse=True)
    assert coded[0] > 2 * coded[-1]


def test_canonical_files_have_closed_groups_of_16_and_no_trace_of_the_source(tmp_path, encode_video):
    sources = [
        encode_video(tmp_path / "a.webm", 40, codec="libvpx-vp9"),
        encode_video(tmp_path / "b.mp4", 40, display=(90, False), pixel_format="yuvj420p", codec="mjpeg"),
    ]
    for source in sources:
        with av.open(str(_made(source, "canonical", tmp_path))) as container:
            stream = container.streams.video[0]
            packets = [packet for packet in container.demux(stream) if packet.size]
            keys = sorted(packet.pts for packet in packets if packet.is_keyframe)
            shown = sorted(packet.pts for packet in packets)
            assert [shown.index(key) for key in keys] == [0, 16, 32]
            assert (stream.codec_context.name, stream.pix_fmt, stream.profile) == ("h264", "yuv420p", "High")
            assert len(container.streams) == 1
            assert not stream.metadata.get("rotate")
            # Closed: nothing shown before a keyframe comes after it.
            order = [packet.pts for packet in packets]
            assert all(max(order[: order.index(key)], default=-1) < key for key in keys)


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
    ("pixel_format", "codec", "width", "height"),
    [("gray", "libx264", 64, 48), ("yuv420p10le", "libx264", 64, 48), ("yuv444p", "libx264", 63, 47),
     ("yuvj420p", "mjpeg", 64, 48), ("rgb8", "gif", 33, 21)],
)  # fmt: skip
def test_grey_deep_odd_and_full_range_pictures_look_the_same(
    tmp_path, encode_video, pixel_format, codec, width, height
):
    suffix = {"gif": "gif", "mjpeg": "mov"}.get(codec, "mp4")
    source = encode_video(
        tmp_path / f"odd.{suffix}", 6, codec=codec, pixel_format=pixel_format, width=width, height=height
    )
    before = decode_clip(source, 6, 64)
    without_loss = decode_clip(_made(source, "lossless", tmp_path), 6, 64)
    assert without_loss.content == before.content
    assert np.abs(before.frames.astype(int) - without_loss.frames).mean() < 0.6
    canonical = probe_video(_made(source, "canonical", tmp_path))
    assert (canonical.width, canonical.height) == (width - width % 2, height - height % 2)


def test_a_picture_that_leaves_nothing_is_refused_with_the_reason(tmp_path, encode_video):
    source = encode_video(tmp_path / "thin.mp4", 3, width=1, height=48, pixel_format="yuv444p")
    with pytest.raises(UnsupportedVideo, match="1 x 48"):
        reencode(source, tmp_path / "made.mp4", RECIPES["canonical"])
    assert not (tmp_path / "made.mp4").exists()


def test_files_are_kept_by_content_and_recipe_and_one_bad_video_costs_itself(tmp_path, plain, monkeypatch):
    copy = tmp_path / "copy.mp4"
    copy.write_bytes(plain.read_bytes())
    (tmp_path / "bad.mp4").write_bytes(plain.read_bytes()[:2000])
    found = list(reencode_files([copy, tmp_path / "bad.mp4"], "canonical", tmp_path / "cache", workers=1))
    by_name = {each.source.name: each for each in found}
    assert by_name["bad.mp4"].path is None
    assert by_name["bad.mp4"].reason == "unreadable"
    made = by_name["copy.mp4"].path
    content = made.read_bytes()
    # Of another file with that content it is the same file, and no encoder runs.
    monkeypatch.setattr("fvc_lib.video.reencode.reencode", lambda *_: pytest.fail("made again"))
    assert reencoded(plain, "canonical", tmp_path / "cache") == made
    monkeypatch.undo()
    assert reencoded(plain, "blur_1", tmp_path / "cache") != made
    reencode(plain, tmp_path / "again.mp4", RECIPES["canonical"])
    assert (tmp_path / "again.mp4").read_bytes() == content
    for damage in (content[:-100], b"", b"another"):
        made.write_bytes(damage)
        assert reencoded(plain, "canonical", tmp_path / "cache").read_bytes() == content, "a damaged file is made anew"


@pytest.mark.parametrize("name", [field.name for field in fields(Recipe)])
def test_every_field_of_a_recipe_decides_where_its_files_lie(name):
    recipe = RECIPES["canonical"]
    other = {"options": (("preset", "slow"),), "scale": Fraction(1, 3), "jpeg_quality": 60, "level": "none"}.get(name)
    value = getattr(recipe, name)
    changed = replace(recipe, **{name: other or (f"{value} too" if isinstance(value, str) else value + 1)})
    assert changed.digest != recipe.digest
    assert replace(changed, **{name: value}).digest == recipe.digest


def test_files_that_other_code_or_another_pyav_wrote_are_not_taken(monkeypatch):
    digests = [RECIPES["canonical"].digest]
    monkeypatch.setattr("av.__version__", "0.0.1")
    digests.append(RECIPES["canonical"].digest)
    monkeypatch.setattr("fvc_lib.video.reencode.code_hash", lambda module, within: f"another {module} in {within}")
    digests.append(RECIPES["canonical"].digest)
    assert len(set(digests)) == 3


def test_unknown_recipes_and_files_are_named(tmp_path):
    with pytest.raises(UsageError, match=r"sepia.*canonical, lossless"):
        recipe_named("sepia")
    with pytest.raises(UnreadableVideo):
        reencoded(tmp_path / "none.mp4", "canonical", tmp_path)
