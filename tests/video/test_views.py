import importlib.metadata
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import polars as pl
import pytest
from hypothesis import given, strategies as st

from fvc_lib.services.atomic_files import sha256_of_file
from fvc_lib.services.errors import DataError, FvcError
from fvc_lib.services.registry import PLAIN_VIEW, View
from fvc_lib.services.tables import AUGMENTED, SEEN_CLIPS, read_table
from fvc_lib.video.augmentations import AugmentationSettings, apply_augmentation
from fvc_lib.video.clips.making import make_clips, write_seen
from fvc_lib.video.clips.shards import ClipShards, write_shards
from fvc_lib.video.clips.store import ClipStore
from fvc_lib.video.decode.pixels import FrameConverter
from fvc_lib.video.decode.views import NOT_FOUND, clip_places, decode_view, square_boxes
from tests.video.conftest import plan_of

HARD = {
    "b_frames.mp4": {"options": {"bf": "3", "b_strategy": "0"}},
    "open_gop.mp4": {"options": {"bf": "3", "x264-params": "open-gop=1:b-adapt=0"}},
    "variable.mp4": {"times_ms": [number * number * 7 for number in range(40)], "options": {"bf": "2"}},
    "vp9.webm": {"codec": "libvpx-vp9", "options": {"auto-alt-ref": "1", "lag-in-frames": "16", "cpu-used": "8"}},
    "old.avi": {"codec": "mpeg4", "options": {"bf": "2"}},  # no time stamps: decoded as a stream
}


def sequential(path: Path, size: int) -> list[np.ndarray]:
    """Every frame of a video, decoded one after the other from the first to the last."""
    frames = []
    with av.open(str(path)) as container:
        converter = FrameConverter(size, container.streams.video[0].sample_aspect_ratio)
        for frame in container.decode(video=0):
            converter.observe(frame)
            frames.append(np.empty((3, size, size), np.uint8))
            converter.convert(frame, frames[-1])
    return frames


@pytest.mark.parametrize("name", HARD)
def test_windows_are_the_frames_of_a_sequential_decode_to_the_bit(make_video, name):
    path = make_video(name, 40, **HARD[name])
    frames, seen = decode_view(path, 5, 32, View("window:3", clips=3))
    every = sequential(path, 32)
    assert len(every) == 40
    starts = [0, 14, 27]  # the last window ends with frame 39
    wanted = [every[start + 3 * number] for start in starts for number in range(5)]
    np.testing.assert_array_equal(frames, wanted)
    assert [(row.first_frame, row.middle_frame, row.last_frame) for row in seen] == [
        (start, start + 6, start + 12) for start in starts
    ]
    assert {(row.stride, row.num_repeated, row.note) for row in seen} == {(3, 0, "")}


@given(st.integers(1, 400), st.integers(1, 24), st.integers(1, 9), st.integers(1, 6))
def test_places_lie_in_the_video_at_one_stride_and_windows_reach_from_end_to_end(n, num_frames, stride, clips):
    places, used = clip_places(View(f"window:{stride}", clips=clips), num_frames, n)
    assert places.shape == (clips, num_frames)
    assert places.min() >= 0
    assert places.max() < n
    steps = np.diff(places, axis=1)
    reach = (num_frames - 1) * stride + 1
    if n >= num_frames:
        assert used == stride if n >= reach else 1 <= used < stride
        assert (steps == used).all()
    else:  # every frame once, then the last one again
        assert (places == np.minimum(np.arange(num_frames), n - 1)).all()
    if clips > 1:
        assert places[0, 0] == 0
        assert places[-1, -1] == n - 1 or n < num_frames
    else:
        assert abs((places[0, 0] + places[0, -1]) - (n - 1)) <= 1 or n < num_frames


def test_several_uniform_clips_share_out_the_frames_of_one_long_one():
    whole, _ = clip_places(PLAIN_VIEW, 12, 100)
    parts, stride = clip_places(View(clips=3), 4, 100)
    assert stride == 0
    assert sorted(parts.ravel().tolist()) == whole[0].tolist()
    assert (np.diff(parts, axis=1) > 0).all()


def test_a_short_video_takes_a_smaller_stride_then_repeats_its_last_frame_and_says_so(make_video, number_of):
    for count, num_frames, numbers, facts in ((9, 4, [1, 3, 5, 7], (2, 0)), (3, 5, [0, 1, 2, 2, 2], (1, 2))):
        frames, (seen,) = decode_view(make_video(f"{count}.mp4", count), num_frames, 64, View("window:4"))
        assert [number_of(frame) for frame in frames] == numbers
        assert (seen.stride, seen.num_repeated) == facts
        assert seen.note == "the video is too short for stride 4"


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


@pytest.mark.parametrize("text", ["window", "window:0", "window:-1", "window:4 ", "", "crop:0", "crop:1.5", "squash"])
def test_another_sampling_or_fit_is_refused(text):
    field, wanted = ("fit", r"crop:0\.875") if text.startswith(("crop", "squash")) else ("sampling", "window:STRIDE")
    with pytest.raises(ValueError, match=wanted):
        View(**{field: text})
