"""Pseudo-fakes: a face is blended with a changed copy of itself, and nothing else of the clip changes."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from fvc_lib.services.registry import CROPS, Crop
from fvc_lib.services.tables import AUGMENTED, read_table
from fvc_lib.video.augmentations import AugmentationSettings
from fvc_lib.video.clips.making import make_clips
from fvc_lib.video.clips.store import FIRST_BLEND, ClipStore
from fvc_lib.video.self_blending import draw_self_blend, self_blended

# Both eyes, the nose, and both corners of the mouth, as offsets from the middle between the eyes.
FACE = np.array([[-8.0, 0], [8, 0], [0, 8], [-6, 16], [6, 16]])
WIDEST, HIGHEST = 1.15 * (1 + 3 * 0.08) * 16, 1.15 * (1 + 3 * 0.08) * 16  # half axes in pixels


@pytest.mark.parametrize("number", range(FIRST_BLEND, FIRST_BLEND + 8))
def test_the_face_changes_and_the_rest_of_the_picture_does_not(number):
    frames = np.random.default_rng(number).integers(0, 256, (3, 3, 80, 120), np.uint8)
    before = frames.copy()
    middles = np.array([[40.0, 25], [45, 30], [70, 28]])  # the face moves
    points = FACE + middles[:, None]
    blend = draw_self_blend("video", number)
    fake = self_blended(frames, points, blend)
    assert np.array_equal(frames, before)
    y, x = np.mgrid[:80, :120]
    for place, (left, top) in enumerate(middles):
        changed = (fake[place] != frames[place]).any(0)
        beyond = np.hypot((x - left) / WIDEST, (y - top - 0.65 * 16) / HIGHEST) > 1
        assert not changed[beyond].any()
        assert changed[int(top) + 4 : int(top) + 16, int(left) - 4 : int(left) + 4].mean() > 0.9
    assert self_blended(before, points, draw_self_blend("video", number)).tobytes() == fake.tobytes()
    assert draw_self_blend("other", number) != blend != draw_self_blend("video", number + 1)


def test_every_video_with_a_face_has_pseudo_fakes_whatever_the_order_of_files(tmp_path, make_video, monkeypatch):
    def points_of(frames):
        return None if frames.mean() < 40 else np.tile(FACE / 2 + 12, (len(frames), 1, 1))

    monkeypatch.setitem(CROPS._items, "face", Crop("face", points_of, points_of))
    root, rows = tmp_path / "corpus", []
    root.mkdir()
    for number, light in enumerate((20, 120, 200)):
        noise = np.random.default_rng(number).integers(0, 30, (6, 48, 48, 3), np.uint8)
        make_video(f"corpus/{number}.mp4", 6, width=48, height=48, frames=noise + np.uint8(light))
        rows.append((f"id{number}", f"{number}.mp4", "fake" if number == 2 else "real", f"g{number}", ""))
    index = pl.DataFrame(rows, ["video_id", "path", "label", "group_id", "content_sha256"], orient="row")
    plain = ClipStore(tmp_path / "one", 4, 32, AugmentationSettings(("flip",)))
    one = replace(plain, self_blended=2)
    two = replace(one, cache_dir=tmp_path / "two")
    assert one.settings_hash != plain.settings_hash
    assert make_clips(one, index, root, 1, tmp_path / "one.csv", workers=1).made == 3 * 2 + 2 * 2
    make_clips(two, index.reverse(), root, 1, tmp_path / "two.csv", workers=3)
    files = sorted((tmp_path / "one").rglob("*.npy"))
    assert len(files) == 10
    for path in files:
        assert path.read_bytes() == (tmp_path / "two" / path.relative_to(tmp_path / "one")).read_bytes()
    made = read_table(tmp_path / "one.csv", AUGMENTED).filter(augmentation_index=FIRST_BLEND)
    assert made.select("video_id", "group_id", "label").rows() == [("id1", "g1", "fake"), ("id2", "g2", "fake")]
    assert not np.array_equal(one.read("id1", 0), one.read("id1", FIRST_BLEND))
    again = make_clips(one, index, root, 1, None)
    assert (again.made, again.reused) == (0, 10)
