"""One decoding tells of a file what two tell: the facts and hash of the index, and the clip of a run."""

import numpy as np
import pytest

from fvc_lib.corpus.probing import probe_file
from fvc_lib.services.clip_settings import View
from fvc_lib.tasks.video.verdicts import looking
from fvc_lib.video.clips.store import crop_code, decode_code
from fvc_lib.video.clips.worker import make_original
from tests.kits.scored_run import write_video
from tests.kits.training import draw_clip

VIEWS = (View(), View("window:2", "crop:0.8", clips=2))
# Sparse and whole decodings, hidden frames, edit lists, times that are missing; and what is wrong.
REAL = (
    "decode/ExoPlayer__c88bea_sample_edit_list.mp4",
    "decode/ExoPlayer__3e4bec_sample_h264.ts",
    "decode/jcodec__9ab13f_10frames.webm",
    "decode/jcodec__5370a0_test_cat2.h264",
    "broken/mp4parse-rust__e7bd70_small.mp4",
)


def item_of(path, target, view):
    return {
        "source": str(path), "target": str(target), "num_frames": 5, "fixed_size": 32, "view": vars(view),
        "code": decode_code(view), "crop": crop_code(view), "recipe": "", "encoded": [],
    }  # fmt: skip


def looked_at_apart(path, target, view):
    said = probe_file(str(path))
    if "reason" not in said:
        said |= make_original(
            item_of(path, target, view) | {"content_sha256": said["content_sha256"], "seen": "", "recipe": ""}
        )
    return said


@pytest.mark.parametrize(("number", "name"), [*enumerate(REAL)])
def test_one_pass_says_what_two_say(shared_media, tmp_path, number, name):
    path, one, two, view = shared_media / name, tmp_path / "one.npy", tmp_path / "two.npy", VIEWS[number % 2]
    apart = looked_at_apart(path, two, view)
    assert looking.look(item_of(path, one, view)) == apart
    assert one.exists() is two.exists() is ("reason" not in apart)
    if one.exists():
        np.testing.assert_array_equal(np.load(one), np.load(two))


@pytest.fixture
def video(tmp_path):
    path = tmp_path / "a.mp4"
    write_video(path, draw_clip("a", 0, True))
    return path


def only_once(monkeypatch):
    for again in ("probe_file", "make_original"):
        monkeypatch.setattr(looking, again, None)


@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_a_good_video_is_decoded_once(video, tmp_path, monkeypatch, view):
    apart, item = looked_at_apart(video, tmp_path / "two.npy", view), item_of(video, tmp_path / "one.npy", view)
    only_once(monkeypatch)
    assert looking.look(item) == apart
    np.testing.assert_array_equal(np.load(tmp_path / "one.npy"), np.load(tmp_path / "two.npy"))


def test_what_is_no_fault_of_the_video_is_told_apart(video, tmp_path, monkeypatch):
    only_once(monkeypatch)
    item = item_of(video, tmp_path / "one.npy", View())
    assert looking.look(item | {"code": "other"}) == {"code_changed": True}
    assert looking.look(item | {"target": str(tmp_path / "no" / "one.npy")})["write_error"][0] == 2
    own = tmp_path / "bad.py"
    own.write_text("def bad(frames):\n    return [0, 0, 0, 8]\n")
    found = looking.look(item_of(video, tmp_path / "one.npy", View(crop=f"{own}:bad")))
    assert "wanted finite left" in found["crop_error"]
