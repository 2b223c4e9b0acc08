from __future__ import annotations

import numpy as np
import pytest

from fvc_lib.metrics.shuffled import shuffled_label_aucs


def test_dealt_labels_give_chance_in_a_range_that_groups_make_wider():
    generator = np.random.default_rng(0)
    groups = np.repeat(np.arange(40), 10)
    labels = groups % 2
    scores = (labels + generator.normal(0, 1, 40)[groups])[:, None]
    found = shuffled_label_aucs(labels, scores, groups)
    assert found.shape == (1, 200)
    assert found.mean() == pytest.approx(0.5, abs=0.03)
    alone = shuffled_label_aucs(labels, scores, np.arange(400))
    assert found.std() > 2 * alone.std()


def test_every_deal_keeps_the_number_of_fake_groups_of_one_size():
    labels, groups = [0, 0, 1, 1, 0, 0], ["a", "a", "b", "b", "c", "c"]
    found = shuffled_label_aucs(labels, [[1.0, 0], [1, 0], [2, 0], [2, 0], [3, 0], [3, 0]], groups, num=30)
    assert set(found[0].tolist()) == {0.0, 0.5, 1.0}
    assert set(found[1].tolist()) == {0.5}
    with pytest.raises(ValueError, match="scores"):
        shuffled_label_aucs(labels, [1, 2, 3, 4, 5, 6], groups)
