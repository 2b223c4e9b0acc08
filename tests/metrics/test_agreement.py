from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from fvc_lib.metrics.agreement import (
    average_scores,
    percentile_ranks,
    rank_correlations,
    shares_of_equal_decisions,
)


def test_correlations_are_scipys_and_a_constant_has_none():
    generator = np.random.default_rng(0)
    scores = np.round(generator.normal(0, 1, (80, 3)), 1)
    scores[:, 1] += scores[:, 0]
    assert rank_correlations(scores) == pytest.approx(scipy.stats.spearmanr(scores).statistic, abs=1e-12)
    assert np.isnan(rank_correlations(np.column_stack([scores[:, 0], np.ones(80)]))[0, 1])


def test_equal_decisions_are_counted_pair_by_pair():
    shares = shares_of_equal_decisions([[0, 0, 1], [1, 1, 0], [1, 0, 0], [0, 0, 1]])
    assert shares.tolist() == [[1, 0.75, 0], [0.75, 1, 0.25], [0, 0.25, 1]]


def test_the_average_is_of_probabilities_where_all_are_and_else_of_ranks():
    assert average_scores([[0.2, 0.4], [0.6, 0.4]]) == pytest.approx([0.3, 0.5])
    assert average_scores([[-5.0, 1.0], [100.0, 0.0]]) == pytest.approx([0.5, 0.5])
    assert percentile_ranks([[3.0], [1.0], [3.0]])[:, 0] == pytest.approx([2 / 3, 1 / 6, 2 / 3])


def test_what_is_no_table_is_refused():
    with pytest.raises(ValueError, match=r"\(N, D\)"):
        percentile_ranks([[np.nan]])
