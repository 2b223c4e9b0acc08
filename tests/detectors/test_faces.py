import numpy as np
import pytest
import torch

from fvc_lib.detectors import faces
from fvc_lib.detectors.faces import face_boxes, keep_best, largest_track


@pytest.mark.detectors
def test_the_best_box_of_a_group_covers_others_and_no_other_group_s():
    boxes = torch.tensor([[0.0, 0, 10, 10], [1, 0, 11, 10], [0, 0, 10, 10], [30, 30, 40, 40], [0, 0, 10, 5]])
    scores, groups = torch.tensor([0.8, 0.9, 0.7, 0.1, 0.6]), torch.tensor([0, 0, 1, 0, 0])
    assert keep_best(boxes, scores, groups, 0.7).tolist() == [1, 2, 4, 3]
    assert keep_best(boxes, scores, groups, 0.4).tolist() == [1, 2, 3]
    assert keep_best(boxes[:0], scores[:0], groups[:0], 0.7).tolist() == []


def test_the_track_is_the_face_that_fills_most_over_all_frames():
    steady = [[10.0 + step, 10, 30 + step, 30] for step in range(3)]
    once = [60.0, 0, 90, 30]
    found = [np.array([once, steady[0]]), np.array([steady[1]]), np.array([steady[2]])]
    assert {frame: box.tolist() for frame, box in largest_track(found).items()} == dict(enumerate(steady))
    assert largest_track([np.empty((0, 4))] * 3) == {}
    assert largest_track([*found[:1], *[np.empty((0, 4))] * 3]) == {}, "in one frame of four: mostly a mistake"


def test_a_face_that_stays_has_one_box_and_one_that_moves_a_box_of_one_size(monkeypatch):
    frames = np.zeros((5, 100, 400, 3), np.uint8)
    for step, one_box in ((2, True), (10, False)):
        found = iter([np.array([[50.0 + step * frame, 20, 70 + step * frame, 40]]) for frame in range(5)])
        monkeypatch.setattr(faces, "faces_in", lambda _, found=found: next(found))
        boxes = face_boxes(frames)
        assert (len(np.unique(boxes, axis=0)) == 1) == one_box
        assert len(np.unique(boxes[:, 2:])) == 1
        middles = boxes[:, 0] + boxes[:, 2] / 2
        assert np.allclose(middles, 64 if one_box else 60 + step * np.arange(5))
