import hashlib
import os
import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest

from fvc_lib.corpus.samples import captions as sample_captions
from fvc_lib.corpus.samples.captions import (
    COLOURS,
    MOTIONS,
    SHAPES,
    SIDE_PIXELS,
    Drawing,
    _levels,
    draw,
    make_clip,
    plan_clips,
)
from fvc_lib.corpus.samples.files import split_planes


def parts_of(drawing: Drawing) -> tuple[str, str, str, str]:
    return drawing.colour, drawing.shape, drawing.motion, drawing.ground


def test_no_test_caption_is_read_in_training_but_every_two_of_its_words_are():
    captions = {
        part: {clip.drawing.caption: parts_of(clip.drawing) for clip in plan_clips() if clip.part == part}
        for part in ("train", "validation", "test")
    }
    assert [len(captions[part]) for part in captions] == [280, 40, 64]
    assert not any(captions[a].keys() & captions[b].keys() for a, b in combinations(captions, 2))
    pairs = {pair for parts in captions["train"].values() for pair in combinations(parts, 2)}
    assert {pair for part in captions for parts in captions[part].values() for pair in combinations(parts, 2)} <= pairs


@pytest.mark.parametrize(("motion", "direction"), MOTIONS.items())
def test_things_move_as_the_caption_says_and_stay_in_the_picture(motion, direction):
    for number in range(8):
        drawing = Drawing(f"moving {number}", "red", list(SHAPES)[number % 5], motion, "grey road")
        thing = np.rint(_levels(COLOURS["red"])[1]).astype(np.uint8)
        places = [np.argwhere(split_planes(frame)[1] == thing) for frame in draw(drawing)]
        centres = np.array([place.mean(axis=0) for place in places])
        along = np.argmax(np.abs(direction))
        steps = np.diff(centres, axis=0) * (1, 1)
        assert (np.sign(centres[-1] - centres[0])[along]) == direction[along]
        assert abs(centres[-1] - centres[0])[along] > SIDE_PIXELS / 2 * 0.25  # of chroma pixels
        assert np.abs(steps[:, 1 - along]).max() < 0.3
        assert all(place.min() > 0 or place.max() < SIDE_PIXELS // 2 - 1 for place in places)
        assert len({len(place) > 0.6 * len(places[0]) for place in places}) == 1


@pytest.fixture
def few_clips(monkeypatch):
    clips = plan_clips()[:6]
    monkeypatch.setattr(sample_captions, "plan_clips", lambda: clips)
    return clips


def test_bytes_depend_neither_on_place_nor_on_hash_seed(few_clips, tmp_path):
    here = [hashlib.sha256(make_clip(clip.drawing)).hexdigest() for clip in few_clips[:3]]
    program = (
        "import hashlib\n"
        "from fvc_lib.corpus.samples.captions import plan_clips\n"
        "from fvc_lib.corpus.samples.captions import make_clip\n"
        "print([hashlib.sha256(make_clip(clip.drawing)).hexdigest() for clip in plan_clips()[:3]])\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "2"}
    there = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert there.stdout.strip() == str(here)
