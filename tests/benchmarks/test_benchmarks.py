"""Benchmarks: every module loads, the floor decodes the right frames, and both sides of a contest train the same."""

import importlib
import pkgutil
from dataclasses import replace

import numpy as np
import pytest

import benchmarks
from benchmarks.decode.floor import Floor
from benchmarks.decode.videos import Encoding, Video, make_video
from benchmarks.training.cases import Case, Training
from benchmarks.training.extras import Extras
from benchmarks.training.overhead import compete
from fvc_lib.video.decode.clip import decode_clip

MODULES = [module.name for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")]
SMALL = Case(num_frames=2, size=24, micro_batch=2, effective_batch_size=4)


def test_every_module_loads():
    for name in MODULES:
        importlib.import_module(name)
    assert len(MODULES) > 20


@pytest.mark.parametrize(
    ("codec", "options"),
    [
        ("libx264", (("bf", "3"), ("preset", "veryfast"))),
        ("libx265", (("preset", "superfast"), ("x265-params", "log-level=error"))),  # open groups
    ],
)
def test_the_floor_gives_the_frames_of_decode_clip_from_fewer_packets(tmp_path, codec, options):
    path = make_video(Video("small", Encoding(codec, 128, 96, 50, 15, 300, options)), tmp_path)
    floor, clip = Floor(path, 4, 64), decode_clip(path, 4, 64)
    np.testing.assert_array_equal(floor.decode(), clip.content.cut(clip.frames))
    assert 4 <= floor.num_necessary < floor.num_packets == 50


def test_both_sides_of_the_training_benchmark_do_the_same_work(tmp_path):
    # With equal class weights both round alike.
    training = replace(Training(SMALL, tmp_path, num_stored=12), loss_weights=(1.0, 1.0))
    training.store_clips()
    contest = compete(training, Extras(tmp_path / "x"), windows=3, epochs=3, num_validation=5, turns_per_block=1)
    ours, theirs = contest.state.best_model, contest.bare.best_model
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-6
    untrained = training.task(1, 1).build_model().state_dict()
    assert max(float((ours[name] - untrained[name]).abs().max()) for name in ours) > 1e-3
