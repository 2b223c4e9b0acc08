from __future__ import annotations

import numpy as np
import pytest
import sklearn.metrics

from fvc_lib.analysis.audit.slice_auc import sliced_class


@pytest.mark.parametrize("sliced_label", [0, 1])
def test_every_slice_has_the_auc_of_its_rows_against_the_other_class_under_weights_with_ties(sliced_label):
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, 200)
    scores = np.round(generator.normal(labels, 1), 1)
    slices = np.where(labels == sliced_label, generator.integers(-1, 3, 200), -1)
    weights = generator.integers(0, 4, (5, 200)).astype(float)
    found = sliced_class(labels, scores, slices, sliced_label=sliced_label).aucs(weights)
    for number in range(3):
        rows = (slices == number) | (labels != sliced_label)
        for replicate, drawn in enumerate(weights):
            wanted = sklearn.metrics.roc_auc_score(labels[rows], scores[rows], sample_weight=drawn[rows])
            assert found[number, replicate] == pytest.approx(wanted, abs=1e-12)


def test_a_slice_that_was_not_drawn_is_undefined_and_an_empty_one_is_refused():
    labels, scores = np.array([0, 0, 1, 1]), np.array([0.1, 0.6, 0.5, 0.9])
    cut = sliced_class(labels, scores, np.array([-1, -1, 0, 1]), sliced_label=1)
    assert np.allclose(cut.aucs(np.array([[1.0, 1, 1, 0]])), [[0.5], [np.nan]], equal_nan=True)
    for wrong in ([-1, -1, 0, 2], [0, -1, 0, 1], [-1, -1, -1, -1]):
        with pytest.raises(ValueError, match="slice_of_row"):
            sliced_class(labels, scores, np.array(wrong), sliced_label=1)
