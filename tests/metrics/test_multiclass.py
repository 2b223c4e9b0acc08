from __future__ import annotations

import numpy as np
import pytest
import sklearn.metrics
from hypothesis import given, settings, strategies as st

from fvc_lib.metrics.intervals import intervals_over_groups
from fvc_lib.metrics.multiclass import (
    class_scores,
    confusion_matrix,
    macro_f1,
    macro_measures,
    ranks_of_class,
    top_k_accuracy,
    top_k_measure,
)

CLASSES = 5


def macro_scores(labels: np.ndarray, predicted: np.ndarray) -> list[float]:
    nothing = np.zeros(len(labels))
    return [measure(nothing, nothing) for measure in macro_measures(labels, predicted).values()]


@st.composite
def decisions(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Few rows of many classes: classes without rows, without predictions and without either are the rule."""
    rows = draw(st.lists(st.tuples(st.integers(0, CLASSES - 1), st.integers(0, CLASSES - 1)), min_size=1, max_size=12))
    labels, predicted = np.array(rows).T
    return labels, predicted


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.integers(1, 7), st.integers(1, 6))
def test_a_rank_is_the_worst_place_among_equal_scores(seed: int, num_rows: int, num_classes: int) -> None:
    generator = np.random.default_rng(seed)
    scores = generator.choice([-np.inf, 0.0, 0.5, 1.0, np.inf], (num_rows, num_classes))
    labels = generator.integers(0, num_classes, num_rows)
    naive = []
    for row, label in zip(scores, labels, strict=True):
        others = [score for place, score in enumerate(row) if place != label]
        naive.append(1 + sum(other >= row[label] for other in others))
    assert ranks_of_class(scores, labels).tolist() == naive


@settings(max_examples=20)
@given(st.integers(0, 1000), st.integers(1, 6))
def test_top_k_equals_scikit_learn_without_ties(seed: int, k: int) -> None:
    generator = np.random.default_rng(seed)
    scores = generator.permuted(np.tile(np.arange(7.0), (9, 1)), axis=1)
    labels = generator.integers(0, 7, 9)
    expected = sklearn.metrics.top_k_accuracy_score(labels, scores, k=k, labels=np.arange(7))
    assert top_k_accuracy(ranks_of_class(scores, labels), k) == pytest.approx(expected, abs=1e-12)


@settings(max_examples=20)
@given(decisions())
def test_class_scores_and_macro_equal_scikit_learn_with_zero_division_zero(
    sample: tuple[np.ndarray, np.ndarray],
) -> None:
    labels, predicted = sample
    present = np.unique(labels)
    scores = class_scores(labels, predicted, CLASSES)
    expected = sklearn.metrics.precision_recall_fscore_support(labels, predicted, labels=present, zero_division=0)
    for found, wanted in zip((scores.precision, scores.recall, scores.f1, scores.support), expected, strict=True):
        np.testing.assert_allclose(found[present], wanted, atol=1e-12)
    averaged = sklearn.metrics.precision_recall_fscore_support(
        labels, predicted, labels=present, average="macro", zero_division=0
    )[:3]
    np.testing.assert_allclose(macro_scores(labels, predicted), averaged, atol=1e-12)
    assert macro_f1(labels, predicted) == pytest.approx(averaged[-1], abs=1e-12)


def test_what_a_class_is_given_that_is_never_predicted_or_never_there() -> None:
    scores = class_scores(np.array([0, 0, 1]), np.array([0, 2, 0]), 4)
    np.testing.assert_array_equal(scores.precision, [0.5, 0.0, 0.0, np.nan])  # 1 never predicted, 2 never true
    np.testing.assert_array_equal(scores.recall, [0.5, 0.0, np.nan, np.nan])
    np.testing.assert_array_equal(scores.f1, [0.5, 0.0, 0.0, np.nan])
    assert macro_f1(np.array([0, 0, 1]), np.array([0, 2, 0])) == 0.25  # of the classes 0 and 1


@settings(max_examples=20)
@given(decisions(), st.integers(0, 2**32 - 1))
def test_whole_weights_mean_repeated_rows(sample: tuple[np.ndarray, np.ndarray], seed: int) -> None:
    labels, predicted = sample
    counts = np.random.default_rng(seed).integers(0, 3, (2, labels.size))
    nothing = np.zeros(labels.size)
    values = macro_measures(labels, predicted)["macro_f1"](nothing, nothing, counts)
    hits = top_k_measure(predicted + 1, 2)(nothing, nothing, counts)
    for row, value, hit in zip(counts, values, hits, strict=True):
        if not row.sum():
            assert np.isnan(value)
            assert np.isnan(hit)
            continue
        repeated = np.repeat(np.arange(labels.size), row)
        assert value == pytest.approx(macro_f1(labels[repeated], predicted[repeated]), abs=1e-12)
        assert hit == pytest.approx(top_k_accuracy(predicted[repeated] + 1, 2), abs=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ranks_of_class([[0.1, np.nan]], [0]), "NaN in row 0"),
        (lambda: ranks_of_class([[0.1, 0.2]], [2]), "wanted classes 0 .. 1"),
        (lambda: ranks_of_class([[0.1, 0.2]], [0, 1]), "got 2 rows, wanted 1"),
        (lambda: ranks_of_class([0.1, 0.2], [0, 1]), r"wanted \(N, C\)"),
        (lambda: top_k_accuracy([0, 1], 1), "wanted 1 for the first place"),
        (lambda: top_k_accuracy([1], 0), "k: got 0"),
        (lambda: macro_f1([0, 1], [0]), "got 1 rows, wanted 2"),
        (lambda: macro_f1([0, -1], [0, 0]), "wanted classes 0 .. C - 1"),
        (lambda: macro_f1([], []), "at least one row"),
        (lambda: macro_f1([0.5], [0.5]), "whole numbers"),
        (lambda: confusion_matrix([0], [3], 3), "predicted: got values from 3 to 3"),
        (lambda: intervals_over_groups([top_k_measure([1, 1], 1)], ["a", "b", "c"]), "got 3 rows, wanted the 2"),
    ],
)
def test_what_cannot_be_meant_is_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
