import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings, strategies as st
from sklearn.metrics import roc_auc_score, roc_curve

from fvc_lib.analysis.figures.roc_and_calibration import pr_band, roc_band, roc_figure
from fvc_lib.metrics.classification import roc_auc, true_positive_rate_at
from fvc_lib.metrics.cross_validation import within_folds
from fvc_lib.metrics.intervals import group_interval


def sample(seed: int, num_rows: int = 60, num_folds: int = 3, num_scores: int = 8) -> tuple[np.ndarray, ...]:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 2, num_rows)
    labels[: 2 * num_folds] = np.tile([0, 1], num_folds)  # both classes in each fold
    folds = np.concatenate(
        [np.repeat(np.arange(num_folds), 2), generator.integers(0, num_folds, num_rows - 2 * num_folds)]
    )
    scores = generator.integers(0, num_scores, num_rows) / num_scores + 0.1 * labels
    groups = np.array(
        [f"g{fold}_{number}" for fold, number in zip(folds, generator.integers(0, 6, num_rows), strict=True)]
    )
    return labels, scores, groups, folds


@given(st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_the_mean_curve_is_the_folds_curves_weighted_by_pairs(seed: int) -> None:
    labels, scores, groups, folds = sample(seed)
    band = roc_band(labels, scores, groups, folds, replicates=2)
    curves, areas, weights = [], [], []
    for fold in range(3):
        inside = folds == fold
        x, y, _ = roc_curve(labels[inside], scores[inside], drop_intermediate=False)
        curves.append(
            [y[x <= at + 1e-12].max() if np.isclose(x, at).any() else np.interp(at, x, y) for at in band.grid]
        )
        areas.append(roc_auc_score(labels[inside], scores[inside]))
        weights.append(labels[inside].sum() * (1 - labels[inside]).sum())
    np.testing.assert_allclose(band.fold_heights, curves, atol=1e-9)
    np.testing.assert_allclose(band.mean, np.average(curves, axis=0, weights=weights), atol=1e-9)
    assert band.area == pytest.approx(np.average(areas, weights=weights))


def test_a_class_of_one_group_has_no_band_as_it_has_no_interval() -> None:
    labels, scores, groups, folds = sample(3)
    groups = np.where(labels == 0, "all reals", groups)
    alone = roc_band(labels, scores, groups, folds, replicates=50)
    assert group_interval(labels, scores, groups, within_folds(roc_auc, folds), replicates=50).replicates == 0
    assert not alone.has_interval
    assert np.isfinite(alone.mean).all()
    assert not pr_band(labels, scores, groups, folds, replicates=50).has_interval


def test_the_title_tells_the_share_that_the_results_tell_also_where_scores_tie() -> None:
    labels, scores, groups, folds = sample(2)
    tied = np.floor(4 * np.clip(scores, 0, 1)) / 4
    rows = {"label": np.where(labels == 1, "fake", "real"), "score": tied, "group_id": groups, "fold": folds}
    told = within_folds(true_positive_rate_at, folds)(labels, tied)
    curve = roc_band(labels, tied, groups, folds, replicates=2)
    assert f"{told:.0%}" != f"{np.interp(0.05, curve.grid, curve.mean):.0%}"
    figure = roc_figure(pl.DataFrame(rows), replicates=2)
    assert f"finds {told:.0%} of the fakes" in figure.layout.title.text


def test_folds_of_one_class_are_left_out_and_no_fold_with_both_pools() -> None:
    labels, scores, groups, folds = sample(1)
    labels = np.where(folds == 2, 0, labels)
    assert roc_band(labels, scores, groups, folds, replicates=2).folds == (0, 1)
    labels = (folds == 0).astype(int)
    pooled = roc_band(labels, scores, groups, folds, replicates=2)
    assert pooled.folds == ()
    assert pooled.area == pytest.approx(roc_auc_score(labels, scores))
