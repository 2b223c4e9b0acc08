import hashlib

import numpy as np
import pytest

from fvc_lib.corpus.samples.scenes import Shot, draw_camera, generator_for, render_shot, resize_plane


def shot(name: str = "a", **changes: int) -> Shot:
    return Shot(**{"name": name, "width": 160, "height": 120, "num_frames": 8, "camera": draw_camera(name), **changes})


def test_rendering_is_the_same_to_the_byte():
    frames = render_shot(shot())
    assert frames.shape == (8, 180, 160)
    assert frames.dtype == np.uint8
    assert np.array_equal(frames, render_shot(shot()))
    assert not np.array_equal(frames, render_shot(shot("b")))


def test_rendered_bytes_are_those_of_this_corpus_version():
    # Whoever changes this digest changes the corpus: give it another CORPUS_VERSION, so that old ones are not reused.
    digest = hashlib.sha256(render_shot(shot("pinned")).tobytes()).hexdigest()
    assert digest[:16] == "6792c179a03be61e"


def test_footage_is_camera_like():
    frames = render_shot(shot())
    luma = frames[:, :120].astype(float)
    assert (np.abs(np.diff(luma, axis=0)).mean(axis=(1, 2)) > 1).all(), "noise and shake change every frame"
    assert luma.std(axis=(1, 2)).min() > 15, "there is something to see"
    assert frames.min() >= 16
    assert frames.max() <= 240


@pytest.mark.parametrize("target", [(5, 9), (20, 30), (33, 47), (1, 1)])
def test_resize_equals_interpolation_point_by_point(target):
    plane = generator_for("plane").uniform(0, 255, (20, 30))
    expected = np.empty(target)
    for row in range(target[0]):
        for column in range(target[1]):
            y = min(max((row + 0.5) * 20 / target[0] - 0.5, 0), 19)
            x = min(max((column + 0.5) * 30 / target[1] - 0.5, 0), 29)
            along_rows = [np.interp(x, np.arange(30), plane[r]) for r in (int(y), min(int(y) + 1, 19))]
            expected[row, column] = np.interp(y - int(y), [0, 1], along_rows)
    np.testing.assert_allclose(resize_plane(plane, *target), expected, atol=1e-3)


def test_generators_depend_on_their_parts_only():
    assert generator_for("a", 1).random() == generator_for("a", 1).random()
    assert generator_for("a", 12).random() != generator_for("a1", 2).random()
