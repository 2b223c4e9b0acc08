"""Clips and windows of a view, and the single decoding that gives a verdict its facts and its clip."""

import importlib.metadata
from fractions import Fraction
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, strategies as st

from fvc_lib.corpus.probing import probe_file
from fvc_lib.services.atomic_files import sha256_of_file
from fvc_lib.services.errors import DataError, FvcError
from fvc_lib.services.registry import FEATURES, PLAIN_VIEW, View
from fvc_lib.services.tables import AUGMENTED, SEEN_CLIPS, read_table
from fvc_lib.tasks.video.verdicts import untrusted
from fvc_lib.video.augmentations import AugmentationSettings, apply_augmentation
from fvc_lib.video.clips import worker
from fvc_lib.video.clips.making import make_clips, write_seen
from fvc_lib.video.clips.shards import ClipShards, write_shards
from fvc_lib.video.clips.store import ClipStore, crop_code, decode_code
from fvc_lib.video.clips.worker import make_original
from fvc_lib.video.decode.clip import decode_places
from fvc_lib.video.decode.views import (
    MOST_BYTES,
    MOST_WINDOWS,
    NOT_FOUND,
    clip_places,
    decode_view,
    decode_windows,
    square_boxes,
    window_places,
)
from fvc_lib.video.features.worker import measure_video
from tests.kits.scored_run import write_video
from tests.kits.training import draw_clip
from tests.video.conftest import full_decode, plan_of, read_number

HARD = {
    "b_frames.mp4": {"options": {"bf": "3", "b_strategy": "0"}},
    "open_gop.mp4": {"options": {"bf": "3", "x264-params": "open-gop=1:b-adapt=0"}},
    "variable.mp4": {"times_ms": [number * number * 7 for number in range(40)], "options": {"bf": "2"}},
    "vp9.webm": {"codec": "libvpx-vp9", "options": {"auto-alt-ref": "1", "lag-in-frames": "16", "cpu-used": "8"}},
    "old.avi": {"codec": "mpeg4", "options": {"bf": "2"}},  # no time stamps: decoded as a stream
}


@pytest.mark.parametrize("name", HARD)
def test_windows_are_the_frames_of_a_sequential_decode_to_the_bit(make_video, name):
    path = make_video(name, 40, **HARD[name])
    frames, seen = decode_view(path, 5, 32, View("window:3", clips=3))
    every = full_decode(path, 32)
    assert len(every) == 40
    starts = [0, 14, 27]  # the last window ends with frame 39
    wanted = [every[start + 3 * number] for start in starts for number in range(5)]
    np.testing.assert_array_equal(frames, wanted)
    assert [(row.first_frame, row.middle_frame, row.last_frame) for row in seen] == [
        (start, start + 6, start + 12) for start in starts
    ]
    assert {(row.stride, row.note) for row in seen} == {(3, "")}


@pytest.mark.parametrize(
    ("rate", "numbers"), [(8, [4, 7, 10, 13, 16, 20]), (10, [6, 8, 11, 14, 16, 18]), (60, [9, 10, 11, 12, 13, 14])]
)
def test_a_rate_takes_frames_so_many_a_second_from_the_middle_and_its_windows_follow(make_video, rate, numbers):
    path = make_video("a.mp4", 25)  # 25 a second
    view = View(f"rate:{rate}")
    frames, (seen,) = decode_view(path, 6, 64, view)
    assert [read_number(frame) for frame in frames] == numbers
    assert (seen.first_frame, seen.last_frame, seen.note) == (numbers[0], numbers[-1], "")
    windows = decode_windows(path, 6, 64, view, lambda index, pixels: None)
    assert windows.places[0].tolist() == numbers
    assert (np.diff(windows.places, axis=1).sum(1) == numbers[-1] - numbers[0]).all()


@given(st.integers(1, 400), st.integers(1, 24), st.integers(1, 9), st.integers(1, 6))
def test_places_lie_in_the_video_at_one_stride_and_windows_reach_from_end_to_end(n, num_frames, stride, clips):
    places, used = clip_places(View(f"window:{stride}", clips=clips), num_frames, n)
    assert places.shape == (clips, num_frames)
    assert places.min() >= 0
    assert places.max() < n
    if n < num_frames:  # every frame once, then the last one again
        assert (places == np.minimum(np.arange(num_frames), n - 1)).all()
        return
    assert used == stride if n >= (num_frames - 1) * stride + 1 else 1 <= used < stride
    assert (np.diff(places, axis=1) == used).all()
    if clips > 1:
        assert (places[0, 0], places[-1, -1]) == (0, n - 1)
    else:
        assert abs((places[0, 0] + places[0, -1]) - (n - 1)) <= 1


def test_several_uniform_clips_share_out_the_frames_of_one_long_one():
    whole, _ = clip_places(PLAIN_VIEW, 12, 100)
    parts, stride = clip_places(View(clips=3), 4, 100)
    assert stride == 0
    assert sorted(parts.ravel().tolist()) == whole[0].tolist()
    assert (np.diff(parts, axis=1) > 0).all()


def test_a_short_video_takes_a_smaller_stride_then_repeats_its_last_frame_and_says_so(make_video):
    for count, num_frames, numbers, stride in ((9, 4, [1, 3, 5, 7], 2), (3, 5, [0, 1, 2, 2, 2], 1)):
        frames, (seen,) = decode_view(make_video(f"{count}.mp4", count), num_frames, 64, View("window:4"))
        assert [read_number(frame) for frame in frames] == numbers
        assert (seen.stride, seen.note) == (stride, "the video is too short for stride 4")


@pytest.mark.parametrize(
    ("fit", "width", "height", "aspect"),
    [("crop", 96, 48, None), ("crop:0.875", 64, 48, None), ("crop", 48, 64, None), ("crop", 64, 48, Fraction(3, 2))],
)
def test_a_crop_is_the_middle_of_the_picture_with_its_shorter_side_resized(make_video, fit, width, height, aspect):
    """Against Pillow: resized as torchvision and transformers do (shorter side, then centre crop), on a smooth ramp."""
    from PIL import Image

    across, down = np.meshgrid(np.linspace(20, 235, width), np.linspace(20, 235, height))
    picture = np.stack([across, down, np.full_like(across, 90)], axis=2).round().astype(np.uint8)
    path = make_video(
        "a.mp4", 2, width=width, height=height, frames=[picture] * 2, sample_aspect_ratio=aspect,
        pixel_format="yuv444p", options={"qp": "0"},
    )  # fmt: skip
    frames, (seen,) = decode_view(path, 1, 28, View(fit=fit))
    shown = np.array([round(width * (aspect or 1)), height])
    size = np.round(shown * (int(28 / 0.875) if "0.875" in fit else 28) / min(shown)).astype(int)
    left, top = np.round((size - 28) / 2)
    wanted = Image.fromarray(picture).resize(size, Image.Resampling.BILINEAR).crop((left, top, left + 28, top + 28))
    assert np.abs(frames[0].astype(int) - np.asarray(wanted).transpose(2, 0, 1)).max() <= 3
    assert [seen.width * size[0], seen.height * size[1]] == pytest.approx([28, 28])


@pytest.mark.parametrize(("fit", "cut"), [("squash", 0), ("squash:0.8", 8)])
def test_a_squashed_picture_fills_the_square_without_the_ends_of_its_longer_side(make_video, fit, cut):
    from PIL import Image

    across, down = np.meshgrid(np.linspace(20, 235, 80), np.linspace(20, 235, 48))
    picture = np.stack([across, down, np.full_like(across, 90)], axis=2).round().astype(np.uint8)
    path = make_video(
        "a.mp4", 2, width=80, height=48, frames=[picture] * 2, pixel_format="yuv444p", options={"qp": "0"}
    )
    frames, (seen,) = decode_view(path, 1, 28, View(fit=fit))
    wanted = Image.fromarray(picture).crop((cut, 0, 80 - cut, 48)).resize((28, 28), Image.Resampling.BILINEAR)
    assert np.abs(frames[0].astype(int) - np.asarray(wanted).transpose(2, 0, 1)).max() <= 6
    assert [seen.left, seen.top, seen.width, seen.height] == pytest.approx([cut / 80, 0, 1 - cut / 40, 1], abs=0.01)


def test_boxes_become_squares_with_the_margin_inside_the_picture():
    boxes = np.array([[10.0, 10, 20, 10], [0, 0, 10, 20], [90, 40, 10, 10]])
    squares = square_boxes(boxes, 0.5, 50, 100)
    assert squares.tolist() == [[5, 0, 30, 30], [0, 0, 30, 30], [85, 35, 15, 15]]
    assert square_boxes(boxes, 4, 50, 100)[:, 2:].tolist() == [[50, 50]] * 3


CROP = '''
import numpy as np

def bright(frames):
    """The bright square, of each frame; nothing where there is none."""
    boxes = []
    for frame in frames:
        rows, columns = np.nonzero(frame.mean(2) > 128)
        if not len(rows):
            return None
        boxes.append([columns.min(), rows.min(), np.ptp(columns) + 1, np.ptp(rows) + 1])
    return boxes

def broken(frames):
    raise KeyError("face")

def nonsense(frames):
    return 1, 2, 0, 3
'''


@pytest.fixture
def corpus(tmp_path, make_video):
    """A video with a bright square that moves, and a dark one; and their rows of the index."""
    (tmp_path / "my_crop.py").write_text(CROP)
    root = tmp_path / "corpus"
    root.mkdir()
    moving = np.full((12, 96, 128, 3), 20, np.uint8)
    for number, frame in enumerate(moving):
        frame[30:46, 8 * number : 8 * number + 16] = 220
    rows = []
    for label, frames in (("real", moving), ("fake", np.full_like(moving, 20))):
        path = make_video(f"corpus/{label}.mp4", 12, width=128, height=96, frames=frames)
        digest = sha256_of_file(path)
        rows.append((digest[:16], path.name, label, label, digest))
    return root, pl.DataFrame(rows, ["video_id", "path", "label", "group_id", "content_sha256"], orient="row")


def store_of(folder: Path, view: View) -> ClipStore:
    return ClipStore(folder, 4, 32, AugmentationSettings(("flip", "frame_drop")), view)


def test_what_is_not_found_is_a_row_with_its_reason_and_a_clip_of_the_middle(tmp_path, corpus):
    root, index = corpus
    store = store_of(
        tmp_path / "cache", View("window:2", clips=2, crop=f"{tmp_path / 'my_crop.py'}:bright", margin=0.25)
    )
    report = make_clips(store, index, root, 1, None)
    assert (report.made, report.failed) == (4, ())
    table = write_seen(store, index, tmp_path / "seen_clips.csv")
    assert read_table(tmp_path / "seen_clips.csv", SEEN_CLIPS).equals(table)
    assert table["label"].to_list() == ["real", "real", "fake", "fake"]
    assert table["note"].to_list() == [None, None, NOT_FOUND, NOT_FOUND]
    found = table.row(0, named=True)
    assert found["width"] * 128 == pytest.approx(20, abs=2)
    assert (found["left"] + found["width"] / 2) * 128 == pytest.approx(8 * found["middle_frame"] + 8, abs=2)
    missed = table.row(2, named=True)
    assert (missed["left"], missed["width"], missed["height"]) == (0.125, 0.75, 1)
    clip = store.read(index["video_id"][0], 0)
    assert clip.shape == (8, 3, 32, 32)
    assert clip[:, :, 8:24, 8:24].min() > 150  # the square is in the middle of every frame
    assert np.percentile(clip[:, :, :2], 50) < 100


def test_copies_are_augmented_clip_by_clip_and_shards_give_each_part(tmp_path, corpus):
    root, index = corpus
    store = store_of(tmp_path / "cache", View("window:1", clips=3))
    make_clips(store, index, root, 1, tmp_path / "made.csv")
    made = read_table(tmp_path / "made.csv", AUGMENTED)
    shards, part = ClipShards(write_shards(store, made)), np.empty((4, 3, 32, 32), np.uint8)
    for row in made.filter(pl.col("augmentation_index") == 1).iter_rows(named=True):
        original, plan = store.read(row["video_id"], 0), plan_of(row["operations"])
        for first in (0, 4, 8):
            wanted = apply_augmentation(original[first : first + 4], plan)
            for source in (store, shards):
                source.load(row["video_id"], 1, part, first)
                np.testing.assert_array_equal(part, wanted)
    for first in (-1, 9):
        with pytest.raises(ValueError, match="uint8"):
            store.load(index["video_id"][0], 0, part, first)


@pytest.mark.parametrize(("function", "fact"), [("broken", "KeyError: 'face'"), ("nonsense", "width > 0")])
def test_a_crop_that_fails_stops_the_run_and_is_named(tmp_path, corpus, function, fact):
    root, index = corpus
    store = store_of(tmp_path / "cache", View(crop=f"{tmp_path / 'my_crop.py'}:{function}"))
    with pytest.raises(DataError, match=rf"my_crop.py:{function}.*{fact}"):
        make_clips(store, index, root, 0, None)


EDITED = "def whole(frames):\n    return 0, 0, 96, 96\n"
EDITS_ITSELF = """
from pathlib import Path

def whole(frames):
    Path(__file__).write_text("def whole(frames):\\n    return 0, 0, 8, 8\\n")
    return 0, 0, 96, 96
"""


@pytest.mark.parametrize("source", [EDITED, EDITS_ITSELF], ids=["edited before it runs", "edited while it runs"])
def test_an_edited_crop_never_stores_under_the_name_of_the_function_before(tmp_path, corpus, source):
    root, index = corpus
    crop = tmp_path / "my_crop.py"
    crop.write_text(source)
    store = store_of(tmp_path / "cache", View(crop=f"{crop}:whole"))
    folder = store.decode_folder
    if source is EDITED:
        crop.write_text(EDITED.replace("96, 96", "8, 8"))
    with pytest.raises(FvcError):
        make_clips(store, index, root, 0, None)
    assert not list(folder.rglob("*.npy"))


def test_a_stores_name_has_what_decides_its_pixels_and_nothing_else(tmp_path, monkeypatch):
    crop, moved = tmp_path / "my_crop.py", tmp_path / "elsewhere" / "my_crop.py"
    moved.parent.mkdir()
    for path in (crop, moved):
        path.write_text(CROP)
    views = [
        PLAIN_VIEW, View("window:1"), View("window:2"), View(fit="crop"), View(fit="crop:0.5"), View(clips=2),
        View(crop=f"{crop}:broken"), View(crop=f"{crop}:bright", margin=0.1), View(crop=f"{crop}:bright"),
    ]  # fmt: skip
    before = [store_of(tmp_path, view).decode_folder for view in views]
    assert len(set(before)) == len(views)
    assert store_of(tmp_path, View(crop=f"{moved}:bright")).decode_folder == before[-1]
    moved.write_text(CROP + "\n")
    assert store_of(tmp_path, View(crop=f"{moved}:bright")).decode_folder != before[-1]
    version = importlib.metadata.version
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda name: "0" if name == "pillow" else version(name))
        pillow = [store_of(tmp_path, view).decode_folder != folder for view, folder in zip(views, before, strict=True)]
    assert pillow == [bool(view.crop) for view in views]
    monkeypatch.setattr(View, "resized", lambda self, side: side + 1)
    assert not {store_of(tmp_path, view).decode_folder for view in views} & set(before)


@pytest.mark.parametrize(
    "text", ["window", "window:0", "window:-1", "window:4 ", "", "crop:0", "crop:1.5", "squash:0", "rate:0"]
)
def test_another_sampling_or_fit_is_refused(text):
    field, wanted = ("fit", r"crop:0\.875") if text.startswith(("crop", "squash")) else ("sampling", "window:STRIDE")
    with pytest.raises(ValueError, match=wanted):
        View(**{field: text})


VIEWS = (View(), View("window:2"), View("window:3", "crop:0.8", clips=2), View("uniform", "crop", clips=2))


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    path = tmp_path_factory.mktemp("windows") / "wide.mp4"
    coarse = np.random.default_rng(3).integers(0, 255, (30, 3, 5, 8)).astype(np.uint8)
    write_video(path, coarse.repeat(8, 2).repeat(8, 3))
    return path


def decoded(path, view, num_frames=4, side=24):
    kept = {}
    found = decode_windows(path, num_frames, side, view, lambda number, frame: kept.__setitem__(number, frame.copy()))
    return found, np.stack([kept[number] for number in range(len(kept))])


@pytest.mark.parametrize("view", [*VIEWS, "cropped"], ids=str)
def test_own_clips_are_those_that_the_run_decodes(video, tmp_path, view):
    if view == "cropped":
        own = tmp_path / "corner.py"
        own.write_text("def corner(frames):\n    return [0, 0, 8, 8]\n")
        view = View(crop=f"{own}:corner")
    found, kept = decoded(video, view)
    clips = decode_view(video, 4, 24, view)[0]
    np.testing.assert_array_equal(kept[found.stored[: found.num_clips]].reshape(clips.shape), clips)
    assert not view.crop or len(kept) == found.places.size  # every window is cropped by itself


def test_each_window_has_the_frames_of_its_places(video):
    found, kept = decoded(video, View())
    assert len(found.places) == 5
    for places, stored in zip(found.places, found.stored, strict=True):
        frames = decode_places(video, lambda _, wanted=places: wanted, 24).frames
        np.testing.assert_array_equal(kept[stored], frames)
    left, top, width, height = found.content
    assert (left, width) == (0, 24)
    assert not kept[:, :, :top].any()
    assert not kept[:, :, top + height :].any()


@given(
    n=st.integers(1, 20_000), frames=st.integers(1, 64), stride=st.integers(0, 9), rate=st.floats(0.5, 240),
    side=st.sampled_from([24, 224, 1024]),
)  # fmt: skip
def test_windows_lie_in_the_video_in_their_order_and_are_not_too_many(n, frames, stride, rate, side):
    view = View(f"window:{stride}" if stride else "uniform")
    places = window_places(view, frames, n, n / rate, side)
    assert places.shape[1] == frames
    assert 1 <= len(places) <= MOST_WINDOWS
    assert len(places) == 1 or places.size * 3 * side * side <= MOST_BYTES
    assert places.min() >= 0
    assert places.max() < n
    assert (np.diff(places, axis=1) >= 0).all()
    assert (np.diff(places[:, 0]) > 0).all() or len(places) == 1
    if len(places) > 1:
        assert places[0, 0] == 0
        assert places[-1, -1] == n - 1
        if not stride and frames > 1:  # spread windows leave nothing out between them
            assert (places[1:, 0] <= places[:-1, -1]).all()


@pytest.mark.parametrize("fit", ["letterbox", "crop", "squash:0.5"])
def test_a_worker_writes_frames_and_tells_where_they_are_or_what_is_wrong(video, tmp_path, fit):
    view = View(fit=fit)
    item = {"source": str(video), "target": str(tmp_path / "raw"), "content_sha256": "", "num_frames": 4,
            "fixed_size": 24, "view": vars(view), "code": decode_code(view), "crop": crop_code(view),
            "recipe": "", "encoded": []}  # fmt: skip
    told = worker.make_windows(item)
    found, kept = decoded(video, view)
    stored = np.fromfile(tmp_path / "raw", np.uint8).reshape(told["num_stored"], 3, 24, 24)
    np.testing.assert_array_equal(stored, kept)
    assert told["places"] == found.places.tolist()
    assert "changed since it was indexed" in worker.make_windows(item | {"content_sha256": "0" * 64})["video_error"]
    assert worker.make_windows(item | {"code": "other"}) == {"code_changed": True}
    assert worker.make_windows(item | {"target": str(tmp_path / "no" / "raw")})["write_error"][0] == 2


LOOKED = (View(), View("window:2", "crop:0.8", clips=2))
# Sparse and whole decodings, hidden frames, missing times; and a damaged file.
LOOKED_AT = (
    "decode/ExoPlayer__3e4bec_sample_h264.ts",
    "decode/jcodec__9ab13f_10frames.webm",
    "decode/jcodec__5370a0_test_cat2.h264",
    "broken/mp4parse-rust__e7bd70_small.mp4",
)


FAMILIES = ["noise_residual", "packets", "quantisers", "repeats"]


def item_of(path, target, view):
    return {
        "source": str(path), "target": str(target), "num_frames": 5, "fixed_size": 32, "view": vars(view),
        "code": decode_code(view), "crop": crop_code(view), "recipe": "", "encoded": [],
        "families": FAMILIES,
    }  # fmt: skip


def looked_at_apart(path, target, view):
    answer = probe_file(str(path))
    if "reason" not in answer:
        item = item_of(path, target, view)
        made = make_original(item | {"content_sha256": answer["content_sha256"], "seen": "", "recipe": ""})
        answer |= made or {"forensic": measured_apart(path)}
    return answer


def measured_apart(path):
    found = measure_video(path, [FEATURES.get(name) for name in FAMILIES])
    return {name: value for values in found.values() for name, value in values.items() if np.isfinite(value)}


@pytest.mark.parametrize(("number", "name"), [*enumerate(LOOKED_AT)])
def test_one_pass_gives_the_answers_of_two(shared_media, tmp_path, number, name):
    path, one, two, view = shared_media / name, tmp_path / "one.npy", tmp_path / "two.npy", LOOKED[number % 2]
    apart = looked_at_apart(path, two, view)
    assert untrusted.look(item_of(path, one, view)) == apart
    assert one.exists() is two.exists() is ("reason" not in apart)
    if one.exists():
        np.testing.assert_array_equal(np.load(one), np.load(two))


@pytest.mark.parametrize("view", LOOKED, ids=str)
def test_a_good_video_is_decoded_once(tmp_path, monkeypatch, view):
    video = tmp_path / "a.mp4"
    write_video(video, draw_clip("a", 0, True))
    apart = looked_at_apart(video, tmp_path / "two.npy", view)
    for again in ("probe_file", "make_original"):
        monkeypatch.setattr(untrusted, again, None)
    assert untrusted.look(item_of(video, tmp_path / "one.npy", view)) == apart
    np.testing.assert_array_equal(np.load(tmp_path / "one.npy"), np.load(tmp_path / "two.npy"))
