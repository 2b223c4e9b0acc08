"""Curves with bands and calibration bins agree with scikit-learn and with the metrics of the results."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings, strategies as st
from sklearn.metrics import roc_auc_score, roc_curve

from fvc_lib.analysis.figures.roc_and_calibration import (
    calibration_figure,
    roc_band,
    roc_figure,
    shares_of,
)
from fvc_lib.analysis.read import queries
from fvc_lib.metrics.calibration import expected_calibration_error
from fvc_lib.metrics.classification import true_positive_rate_at_5_percent
from fvc_lib.metrics.cross_validation import within_folds
from fvc_lib.services.run_paths import RunPaths


def sample(seed: int, num_rows: int = 60, num_folds: int = 3, num_scores: int = 8) -> tuple[np.ndarray, ...]:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 2, num_rows)
    labels[: 2 * num_folds] = np.tile([0, 1], num_folds)  # both classes in each fold
    later = generator.integers(0, num_folds, num_rows - 2 * num_folds)
    folds = np.concatenate([np.repeat(np.arange(num_folds), 2), later])
    scores = generator.integers(0, num_scores, num_rows) / num_scores + 0.1 * labels
    numbers = generator.integers(0, 6, num_rows)
    groups = np.array([f"g{fold}_{number}" for fold, number in zip(folds, numbers, strict=True)])
    return labels, scores, groups, folds


@given(st.integers(0, 10_000))
@settings(max_examples=8, deadline=None)
def test_mean_curves_are_the_folds_curves_weighted_by_pairs(seed: int) -> None:
    labels, scores, groups, folds = sample(seed)
    roc = roc_band(labels, scores, groups, folds, replicates=2)
    curves, areas, weights = [], [], []
    for fold in range(3):
        inside = folds == fold
        own, given_scores = labels[inside], scores[inside]
        x, y, _ = roc_curve(own, given_scores, drop_intermediate=False)
        curves.append([y[x <= at + 1e-12].max() if np.isclose(x, at).any() else np.interp(at, x, y) for at in roc.grid])
        areas.append(roc_auc_score(own, given_scores))
        weights.append(own.sum() * (1 - own).sum())
    np.testing.assert_allclose(roc.fold_heights, curves, atol=1e-9)
    np.testing.assert_allclose(roc.mean, np.average(curves, axis=0, weights=weights), atol=1e-9)
    assert roc.area == pytest.approx(np.average(areas, weights=weights))


def test_the_title_states_the_share_of_the_results_also_where_scores_tie() -> None:
    labels, scores, groups, folds = sample(2)
    tied = np.floor(4 * np.clip(scores, 0, 1)) / 4
    rows = {"label": np.where(labels == 1, "fake", "real"), "score": tied, "group_id": groups, "fold": folds}
    share = within_folds(true_positive_rate_at_5_percent, folds)(labels, tied)
    curve = roc_band(labels, tied, groups, folds, replicates=2)
    assert f"{share:.0%}" != f"{np.interp(0.05, curve.grid, curve.mean):.0%}"
    assert f"{share:.0%}" in roc_figure(pl.DataFrame(rows), replicates=2).layout.title.text


def test_shares_are_those_of_the_parts_and_one_group_gives_no_interval() -> None:
    labels, groups = np.array([0, 0, 1, 1, 1, 0]), np.array(["a", "b", "c", "d", "d", "d"])
    parts = [np.arange(6) < 3, np.arange(6) >= 3]
    shares = shares_of(parts, labels, groups, replicates=200)
    np.testing.assert_allclose(shares["share"], [1 / 3, 2 / 3])
    assert shares.select("num_videos", "num_groups").rows() == [(3, 3), (3, 1)]
    assert shares["low"][0] <= 1 / 3 <= shares["high"][0]
    assert shares.select("low", "high").row(1) == (None, None)


def test_calibration_is_shown_before_and_after_the_temperature(run: RunPaths) -> None:
    predictions = queries.predictions([run]).frame
    labels = (predictions["label"] == "fake").cast(pl.Int64).to_numpy()
    before = 1 / (1 + np.exp(-predictions["logit"].to_numpy()))
    errors = [expected_calibration_error(labels, scores) for scores in (predictions["score"].to_numpy(), before)]
    figure = calibration_figure(predictions, replicates=20)
    assert all(f"{error:.2f}" in figure.layout.title.text for error in errors)
    bins = {trace.name: trace for trace in figure.data}
    assert {"Before temperature", "Score"} <= bins.keys()
    sizes = bins["Score"].customdata
    assert sum(sizes) == predictions.height
    assert max(sizes) - min(sizes) <= 1  # bins of equal mass
    assert min(sizes) >= 10
