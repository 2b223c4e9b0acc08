"""The declaration of families, and the samples of a video that they measure."""

import warnings
from contextlib import suppress
from dataclasses import replace

import av
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.ndimage import gaussian_filter

from fvc_lib.services.errors import UsageError
from fvc_lib.services.registry import FEATURES
from fvc_lib.video.decode.frame_table import read_frame_table
from fvc_lib.video.decode.source import VideoError, open_video
from fvc_lib.video.features.family import (
    GRID,
    POOLS,
    RUN_LENGTH,
    RUNS,
    TILE,
    Feature,
    FeatureFamily,
    Run,
    Stream,
    families_named,
    pool,
    run_places,
    sample_video,
    stream_of,
    tile_corners,
)
from fvc_lib.video.features.worker import measure_video

sides = st.integers(1, 1200)
values = st.one_of(st.just(float("nan")), st.floats(-1e3, 1e3, width=32))


@settings(max_examples=50)
@given(sides, sides)
def test_tiles_lie_on_the_grid_within_the_frame_and_never_overlap(height, width):
    corners = tile_corners(height, width)
    assert (corners % GRID == 0).all()
    assert (corners + TILE <= [height, width]).all()
    assert len(corners) == min(3, height // TILE) * min(3, width // TILE) <= 9
    apart = np.abs(corners[:, None] - corners).max(2)
    assert (apart[~np.eye(len(corners), dtype=bool)] >= TILE).all()


def test_tiles_reach_from_one_border_of_the_frame_to_the_other():
    corners = tile_corners(480, 850)
    assert corners.min(0).tolist() == [0, 0]
    assert corners.max(0).tolist() == [480 - TILE, (850 - TILE) // GRID * GRID]
    assert tile_corners(100, 70).tolist() == [[16, 0]]  # the middle, as near as the grid allows
    assert not len(tile_corners(63, 80))


@settings(max_examples=30)
@given(st.lists(st.lists(values, max_size=30), min_size=1, max_size=4))
def test_pools_are_numpys_statistics_of_the_finite_values(rows):
    pooled = pool([np.array(row, np.float64) for row in rows])
    for row, got in zip(rows, pooled, strict=True):
        finite = np.array(row)[np.isfinite(row)]
        if not finite.size:
            assert np.isnan(got).all()
            continue
        wanted = [finite.mean(), finite.std(), *np.quantile(finite, [0.1, 0.9]), finite.min(), finite.max()]
        np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-9)
    assert list(POOLS) == ["mean", "spread", "low", "high", "least", "most"]


def test_columns_of_a_stream_have_no_pool_and_infinity_counts_as_missing():
    features = (Feature("a", "bytes", "A."), Feature("b", "share", "B."))
    stream = FeatureFamily("packets", "none", features, lambda _: {}, "stream")
    missing = float("nan")
    pooled = stream.pooled([{"a": 3, "b": float("inf")}])
    assert pooled == pytest.approx({"packets_a": 3, "packets_b": missing}, nan_ok=True)
    assert stream.pooled([]) == pytest.approx({"packets_a": missing, "packets_b": missing}, nan_ok=True)
    tiles = FeatureFamily("light", "none", features[:1], lambda *_: {}, "tiles")
    assert tiles.pooled([{"a": [1.0, np.nan]}, {"a": [4.0]}])["light_a_mean"] == 2.5
    with pytest.raises(KeyError, match="a"):
        tiles.pooled([{"b": [1.0]}])


def test_families_are_chosen_by_name_and_a_wrong_name_is_told():
    assert [family.name for family in families_named("spectrum, sharpness,spectrum")] == ["sharpness", "spectrum"]
    assert [family.name for family in families_named("all")] == sorted(FEATURES.names())
    with pytest.raises(UsageError, match="'sharpness'"):
        families_named("sharpnes")
    with pytest.raises(UsageError, match="feature_families"):
        families_named(" , ")


@pytest.mark.parametrize("name", FEATURES.names())
def test_every_family_declares_its_columns_and_measures_what_it_declares(name):
    family = FEATURES.get(name)
    assert family.paper
    declared = [(feature.name.isidentifier(), bool(feature.unit), feature.meaning[-1]) for feature in family.features]
    assert set(declared) == {(True, True, ".")}
    of_others = [column for other in FEATURES.names() if other != name for column in FEATURES.get(other).columns()]
    assert not set(family.columns()) & set(of_others)
    draw, measured = np.random.default_rng(0), []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for num_frames, num_tiles in ((4, 3), (1, 2), (2, 0), (1, 0))[: 2 if family.of == "tiles" else 4]:
            luma = draw.integers(0, 256, (num_frames, num_tiles, TILE, TILE)).astype(np.float32)
            run = Run(luma, draw.uniform(0, 255, (num_frames, 9, 16)).astype(np.float32))
            numbers = np.arange(num_frames)
            stream = Stream("h264", draw.integers(1, 9999, num_frames), numbers == 0, numbers / 25.0)
            measured.append(family.measure({"tiles": run.luma[0], "pairs": run, "stream": stream}[family.of]))
    family.pooled(measured)
    if family.of != "stream":  # what packets do not tell is missing
        assert np.isfinite(list(family.pooled(measured[:1]).values())).all()


@settings(max_examples=50)
@given(st.integers(1, 3000))
def test_runs_are_neighbours_spread_from_the_first_frame_to_the_last(num_frames):
    runs = np.stack(run_places(num_frames))
    assert runs.shape == (max(1, min(RUNS, num_frames // RUN_LENGTH)), min(RUN_LENGTH, num_frames))
    assert (np.diff(runs) == 1).all()
    assert (np.diff(runs.ravel()) > 0).all()
    assert runs[0, 0] == 0
    assert runs[-1, -1] == num_frames - 1 or len(runs) == 1


def pictures(num_frames: int, width: int, height: int) -> list[np.ndarray]:
    """Smooth colours with a number's worth of light, so that a wrong frame or tile cannot pass for the right one."""
    rows, columns = np.mgrid[:height, :width]
    colours = np.stack([columns * 255 // width, rows * 255 // height, (rows + columns) % 256], axis=-1)
    return [np.clip(colours * 0.8 + 2 * number, 0, 255).astype(np.uint8) for number in range(num_frames)]


VIDEOS = {
    "h264.mp4": {"options": {"bf": "3", "b_strategy": "0", "crf": "12"}},
    "full.mp4": {"pixel_format": "yuvj420p", "options": {"crf": "12"}},
    "chroma.mp4": {"pixel_format": "yuv444p", "options": {"crf": "12"}},
    "deep.mkv": {"codec": "libx265", "pixel_format": "yuv420p10le", "options": {"x265-params": "log-level=none:crf=8"}},
    "lossless.mkv": {"codec": "ffv1", "pixel_format": "bgr0"},
    "grey.mkv": {"codec": "ffv1", "pixel_format": "gray"},
    "grey10.mkv": {"codec": "ffv1", "pixel_format": "gray10le"},
    "old.avi": {"codec": "mpeg4", "options": {"bf": "2", "qmax": "4"}},  # no time stamps: decoded as a stream
    "pictures.mkv": {"codec": "mjpeg", "pixel_format": "yuvj422p", "options": {"qmax": "2"}},
}


@pytest.mark.parametrize("name", VIDEOS)
def test_tiles_are_those_of_a_sequential_decode(make_video, name):
    width, height, count = 150, 138, 30  # 2 x 2 tiles
    path = make_video(name, count, width=width, height=height, frames=pictures(count, width, height), **VIDEOS[name])
    with av.open(str(path)) as container:
        lumas = [luma_of(frame) for frame in container.decode(video=0)]
    runs, corners = sample_video(path).runs, tile_corners(height, width)
    assert (len(runs), len(corners)) == (RUNS, 4)
    for run, places in zip(runs, run_places(count), strict=True):
        assert run.luma.shape == (RUN_LENGTH, 4, TILE, TILE)
        wanted = np.stack([lumas[place] for place in places])
        np.testing.assert_allclose(run.small, wanted, atol=0.51)  # small already
        for number, (top, left) in enumerate(corners.tolist()):
            part = wanted[:, top : top + TILE, left : left + TILE]
            np.testing.assert_allclose(run.luma[:, number], part, atol=0.51)


def luma_of(frame: av.VideoFrame) -> np.ndarray:
    """Float (H, W), 0 to 255: the first plane as coded; of RGB as BT.601 weighs it."""
    if frame.format.is_rgb:
        return frame.to_ndarray(format="rgb24") @ [0.299, 0.587, 0.114]
    is_deep, plane = frame.format.components[0].bits > 8, frame.planes[0]
    pixels = np.frombuffer(memoryview(plane), np.uint16 if is_deep else np.uint8).reshape(plane.height, -1)
    return pixels[:, : plane.width] / (4 if is_deep else 1)


def test_small_frames_have_no_tiles_and_large_ones_are_averaged(make_video):
    small = sample_video(make_video("small.mp4", 6, width=16, height=16)).runs
    assert [run.luma.shape for run in small] == [(4, 0, TILE, TILE)]
    path = make_video("large.mp4", 1, width=640, height=322)
    (run,) = sample_video(path).runs
    assert run.luma.shape == (1, 9, TILE, TILE)
    assert run.small.shape == (1, 80, 160)
    with av.open(str(path)) as container:
        luma = luma_of(next(container.decode(video=0)))
    np.testing.assert_allclose(run.small[0], luma[:320].reshape(80, 4, 160, 4).mean((1, 3)), rtol=1e-6)


@pytest.mark.long
def test_every_real_file_gives_numbers_or_declares_them_missing(shared_media):
    families, seen = families_named("all"), 0
    for path in sorted((shared_media / "decode").iterdir()):
        with suppress(VideoError):
            found = measure_video(path, families)
            assert [list(found[family.name]) for family in families] == [list(family.columns()) for family in families]
            seen += 1
    assert seen > 80


NUM_FRAMES = 12


@pytest.fixture(scope="module")
def moving():
    """Grey frames of a texture that moves by 4 pixels to the right and 2 up from each to the next."""
    canvas = gaussian_filter(np.random.default_rng(0).normal(size=(240, 240)), 2)
    canvas = np.clip(128 + 300 * canvas, 0, 255).astype(np.uint8)
    return [canvas[60 + 2 * n : 156 + 2 * n, 80 - 4 * n : 208 - 4 * n] for n in range(NUM_FRAMES)]


@pytest.fixture
def read(make_video, moving):
    """Encodes the moving texture, and returns its stream with the exported data of all frames, and its frame table."""

    def reading(name, codec, **settings):
        path = make_video(name, NUM_FRAMES, codec=codec, width=128, height=96, frames=moving, **settings)
        with open_video(path) as opened:
            return sample_video(path).stream, read_frame_table(opened)

    return reading


def test_quantisers_types_and_motion_of_h264(read):
    options = {"qp": "30", "preset": "medium", "aq-mode": "0", "bf": "0"}
    stream, table = read("a.mp4", "libx264", gop=6, options=options)
    assert (stream.codec, stream.frame_types) == ("h264", "IPPPPPIPPPPP")
    of_p = np.array([letter == "P" for letter in stream.frame_types])
    np.testing.assert_allclose(stream.qp[of_p], [[30 / 51, 0]] * 10, rtol=1e-6)
    assert (stream.qp[~of_p, 0] < 30 / 51).all()  # x264 spends more on I frames
    assert np.median(stream.motion, axis=0).tolist() == [4, -2]
    assert np.isnan(stream.intra[~of_p]).all()
    assert (stream.intra[of_p] >= 0).all()
    assert stream.intra[of_p].max() < 0.3
    assert stream.sizes.tolist() == table.num_bytes.tolist()
    assert stream.is_key.tolist() == table.is_key.tolist()


def test_motion_towards_a_later_frame_points_the_same_way(read):
    stream, _ = read("a.mp4", "libx264", gop=12, options={"bf": "2", "b-adapt": "0", "qp": "20"})
    assert "B" in stream.frame_types
    # Blocks of B frames lie up to three frames from those they refer to.
    assert np.median(stream.motion[:, 0]) in {4, 8, 12}
    assert (stream.motion[:, 0] > 0).mean() > 0.8


@pytest.mark.parametrize(
    ("name", "codec", "options", "has_qp", "has_motion"),
    [
        ("a.mp4", "mpeg4", {"qmin": "5", "qmax": "5"}, True, True),
        ("a.webm", "libvpx-vp9", {"deadline": "realtime", "cpu-used": "8"}, True, False),
        ("a.mp4", "libx265", {"preset": "ultrafast", "x265-params": "log-level=none"}, False, False),
    ],
)
def test_what_a_decoder_does_not_tell_is_missing(read, name, codec, options, has_qp, has_motion):
    stream, _ = read(name, codec, options=options)
    assert np.isfinite(stream.qp[:, 0]).all() == has_qp
    assert bool(len(stream.motion)) == has_motion
    assert len(stream.frame_types) == len(stream.qp) == len(stream.intra)
    if codec == "mpeg4":
        np.testing.assert_allclose(stream.qp[:, 0], 2 * 5 / 62, rtol=1e-6)


def test_hidden_packets_and_containers_without_times_have_no_time(make_video, read):
    with open_video(make_video("a.mp4", NUM_FRAMES, options={"bf": "2"})) as opened:
        table = read_frame_table(opened)
        shown, time_base = np.arange(NUM_FRAMES) != 5, opened.stream.time_base
        seconds = stream_of(opened, replace(table, is_shown=shown)).pts_seconds
    np.testing.assert_allclose(seconds, np.where(shown, table.pts * float(time_base), np.nan))
    stream, _ = read("a.h264", "libx264", container="h264")
    assert np.isnan(stream.pts_seconds).all()
    assert len(stream.sizes) == NUM_FRAMES


def test_a_sample_has_the_same_data_however_its_frames_are_found(moving, make_video):
    settings = {"options": {"bf": "2", "crf": "25", "preset": "fast"}, "width": 128, "height": 96, "frames": moving}
    streams = [  # found by their times, and the last by decoding everything
        sample_video(make_video(name, NUM_FRAMES, container=container, **settings)).stream
        for name, container in (("a.mp4", None), ("a.ts", None), ("a.h264", "h264"))
    ]
    assert len(streams[0].frame_types) == NUM_FRAMES
    assert len({stream.frame_types for stream in streams}) == 1
    for stream in streams[1:]:
        for name in ("qp", "intra", "motion"):
            np.testing.assert_array_equal(getattr(stream, name), getattr(streams[0], name))
