"""One decoding gives the facts and hash of the index and the clip of a run, as two decodings do."""

import numpy as np
import pytest

from fvc_lib.corpus.probing import probe_file
from fvc_lib.services.registry import View
from fvc_lib.tasks.video.verdicts import untrusted
from fvc_lib.video.clips.store import crop_code, decode_code
from fvc_lib.video.clips.worker import make_original
from tests.kits.scored_run import write_video
from tests.kits.training import draw_clip

VIEWS = (View(), View("window:2", "crop:0.8", clips=2))
# Sparse and whole decodings, hidden frames, missing times; and a damaged file.
REAL = (
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


@pytest.fixture
def good(tmp_path):
    video = tmp_path / "a.mp4"
    write_video(video, draw_clip("a", 0, True))
    return video


def looked_at_apart(path, target, view):
    answer = probe_file(str(path))
    if "reason" not in answer:
        item = item_of(path, target, view)
        answer |= make_original(item | {"content_sha256": answer["content_sha256"], "seen": "", "recipe": ""})
    return answer


@pytest.mark.parametrize(("number", "name"), [*enumerate(REAL)])
def test_one_pass_gives_the_answers_of_two(shared_media, tmp_path, number, name):
    path, one, two, view = shared_media / name, tmp_path / "one.npy", tmp_path / "two.npy", VIEWS[number % 2]
    apart = looked_at_apart(path, two, view)
    assert untrusted.look(item_of(path, one, view)) == apart
    assert one.exists() is two.exists() is ("reason" not in apart)
    if one.exists():
        np.testing.assert_array_equal(np.load(one), np.load(two))


@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_a_good_video_is_decoded_once(tmp_path, good, monkeypatch, view):
    apart = looked_at_apart(good, tmp_path / "two.npy", view)
    for again in ("probe_file", "make_original"):
        monkeypatch.setattr(untrusted, again, None)
    assert untrusted.look(item_of(good, tmp_path / "one.npy", view)) == apart
    np.testing.assert_array_equal(np.load(tmp_path / "one.npy"), np.load(tmp_path / "two.npy"))


def test_trouble_that_is_no_fault_of_the_video_is_told_apart(tmp_path, good):
    item = item_of(good, tmp_path / "one.npy", View())
    assert untrusted.look(item | {"code": "other"})["code_changed"]
    assert untrusted.look(item | {"target": str(tmp_path)})["write_error"]
    own = tmp_path / "bad.py"
    own.write_text("def bad(frames):\n    return [0, 0, 0, 8]\n")
    answer = untrusted.look(item_of(good, tmp_path / "one.npy", View(crop=f"{own}:bad")))
    assert "wanted finite left" in answer["crop_error"]
