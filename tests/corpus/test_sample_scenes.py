import hashlib

import numpy as np

from fvc_lib.corpus.samples.scenes import Shot, draw_camera, render_shot


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
