"""How well scores rank fakes above reals: ROC and precision-recall curves, calibration, and abstaining.

Each fold has a different network, and scores of two networks need not share a scale. Curves are therefore computed
within folds and averaged vertically. The weight of a fold is its number of pairs of a fake and a real, so the area
under the mean curve equals the area metric within folds. Bands are pointwise, from the same half-samples (random halves
of the groups) as the intervals of the metrics.

``predictions`` are one run's rows of ``tables.PREDICTIONS``. ``replicates`` is the number of half-samples, ``seed``
their seed, and ``confidence`` the coverage of intervals and bands.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis.dashboard.panels import PANELS, QUICK_REPLICATES, Selection, Shown, of_folds
from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.figures.theme import add_line, add_reference, fake_labels, videos_and_groups
from fvc_lib.analysis.read.queries import predictions as read_predictions
from fvc_lib.metrics import calibration, classification
from fvc_lib.metrics.classification import SHARE, ConfusionCurve, FloatArray, IntArray, Metric, divide
from fvc_lib.metrics.cross_validation import within_folds
from fvc_lib.metrics.intervals import (
    count_groups,
    draw_half_samples,
    group_codes,
    interval_ends,
    intervals_over_groups,
    measure_of_rows,
)

_SAME = 1e-9  # a recall of 3 / 10 and the grid's 0.3 differ in their last bits
_COVERAGES = np.linspace(0.1, 1.0, 10)
# (curve under R sets of weights, grid (G,)) -> heights (R, G), NaN in rows where a class has no weight.
Heights = Callable[[ConfusionCurve, FloatArray], FloatArray]


@dataclass(frozen=True)
class CurveBand:
    """A mean curve over folds, with a band.

    Attributes:
        grid: float64 (G,), ascending x values in [0, 1].
        mean: float64 (G,), heights of the mean curve.
        low: float64 (G,), pointwise lower ends of the band; all NaN if a class has fewer than two groups.
        high: float64 (G,), pointwise upper ends, likewise.
        area: exact value of the curve's area metric within folds.
        fold_heights: float64 (F, G), the curves of the F folds with both classes.
    """

    grid: FloatArray
    mean: FloatArray
    low: FloatArray
    high: FloatArray
    area: float
    fold_heights: FloatArray


def curve_band(
    labels: IntArray,
    scores: FloatArray,
    groups: npt.ArrayLike,
    folds: npt.ArrayLike,
    *,
    heights: Heights,
    area: Metric,
    replicates: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> CurveBand:
    """Return the average of the folds' curves, with a band over groups.

    Curves are averaged vertically: T. Fawcett, "An introduction to ROC analysis", Pattern Recognition Letters 27
    (2006). If no fold has both classes, the curve of all rows together is returned.

    Args:
        labels: int (N,); 1 is fake.
        scores: float (N,).
        groups: N group names.
        folds: int (N,).
        heights: function of a curve and a grid that returns the heights there.
        area: the metric that equals the area under a curve of ``heights``.
        replicates: number of half-samples of the groups.
        seed: seed of the half-samples.
        confidence: coverage of the band.
    """
    fold_of_row, grid = np.asarray(folds), np.linspace(0.0, 1.0, 201)
    of_folds = [np.flatnonzero(fold_of_row == fold) for fold in np.unique(fold_of_row)]
    usable = [rows for rows in of_folds if np.unique(labels[rows]).size == 2]
    rows = usable or [np.arange(labels.size)]
    everything = np.ones((1, labels.size))
    mean = _mean_curves(everything, labels, scores, rows, grid, heights)[0]
    group_of_row, num_groups = group_codes(groups, labels.size)
    blocks = draw_half_samples(labels, group_of_row, num_groups, replicates=replicates, seed=seed)
    drawn = [_mean_curves(counts[:, group_of_row], labels, scores, rows, grid, heights) for counts in blocks]
    sizes = count_groups(labels, group_of_row)
    low, high = interval_ends(mean, np.concatenate(drawn).T, SHARE, sizes, confidence)
    if len(sizes.per_class) < 2 or min(sizes.per_class) < 2:  # one group does not show how groups vary
        low, high = np.full((2, grid.size), np.nan)
    metric = within_folds(area, fold_of_row) if usable else area
    own = [_mean_curves(everything, labels, scores, [of_fold], grid, heights)[0] for of_fold in usable]
    return CurveBand(grid, mean, low, high, metric(labels, scores), np.array(own).reshape(-1, grid.size))


def _mean_curves(
    weights: FloatArray, labels: IntArray, scores: FloatArray, folds: list[IntArray], grid: FloatArray, heights: Heights
) -> FloatArray:
    """Return heights (R, G) averaged over folds, weighted by pairs of a fake and a real.

    ``weights`` (R, N) are R sets of row weights, ``folds`` the row numbers of the folds. A row is NaN if no fold has
    both classes.
    """
    total, pairs = np.zeros((len(weights), grid.size)), np.zeros(len(weights))
    for rows in folds:
        curve = classification.confusion_curve(labels[rows], scores[rows], weights[:, rows])
        fold_pairs = curve.num_fake * curve.num_real
        total += np.where(fold_pairs[:, None] > 0, heights(curve, grid) * fold_pairs[:, None], 0.0)
        pairs += fold_pairs
    return divide(total, pairs[:, None])


def true_positive_rates(curve: ConfusionCurve, grid: FloatArray) -> FloatArray:
    """Return the true positive rates (R, G) at the false positive rates ``grid`` (G,).

    Where the curve is vertical, the highest rate is returned.
    """
    # np.interp takes the last of several equal x, which is the top of a vertical piece.
    rates = zip(curve.false_positive_rates, curve.true_positive_rates, strict=True)
    return np.array([np.interp(grid, x, y) for x, y in rates])


def precisions(curve: ConfusionCurve, grid: FloatArray) -> FloatArray:
    """Return the precision (R, G) at the highest threshold whose recall is at least ``grid`` (G,).

    The area of this step function is the average precision. Straight lines between its points would overstate
    precision: J. Davis and M. Goadrich, "The relationship between precision-recall and ROC curves", ICML 2006.
    """
    recalls = divide(curve.true_positives, curve.num_fake[:, None])
    heights = divide(curve.true_positives, curve.true_positives + curve.false_positives)
    columns = np.zeros((len(recalls), grid.size), np.int64)
    for number in np.flatnonzero(curve.num_fake > 0):
        # At recall 0 the first threshold that finds any fake: a row of weight 0 has no precision.
        first = int(np.argmax(recalls[number] > 0))
        columns[number] = np.maximum(np.searchsorted(recalls[number], grid - _SAME), first)
    return np.take_along_axis(heights, np.minimum(columns, recalls.shape[1] - 1), axis=1)


roc_band = partial(curve_band, heights=true_positive_rates, area=classification.roc_auc)
pr_band = partial(curve_band, heights=precisions, area=classification.average_precision)


@Metric
def share_of_fakes(labels: IntArray, scores: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the weighted share of fakes, which is the precision of guessing."""
    del scores
    return divide(weights @ labels, weights.sum(axis=1))


def roc_figure(predictions: pl.DataFrame, **how: Any) -> go.Figure:
    """Return a figure of the ROC curve averaged over folds, its band over groups, and the curves of single folds.

    ``how`` are ``replicates``, ``seed`` and ``confidence`` of ``curve_band``.
    """
    if predictions["label"].n_unique() < 2:
        return theme.nothing_to_show("ROC curve", "Predictions of both classes are needed.")
    band = roc_band(*_columns(predictions), **how)
    # The metric of the results rather than a point of the mean curve, which lies higher where scores tie.
    share = _within(classification.true_positive_rate_at_5_percent, predictions, band)
    finding = f"At 5% false alarms the model finds {share:.0%} of the fakes; AUC {band.area:.3f}"
    drawn = _curve_figure(predictions, band, finding, "FPR %{x:.3f}<br>TPR %{y:.3f}<extra></extra>")
    add_reference(drawn, "Chance", 0, 1)
    drawn.update_layout(legend={"x": 0.98, "y": 0.04, "xanchor": "right", "yanchor": "bottom"})
    return theme.shares(
        drawn, "False positive rate (share of reals called fake)", "True positive rate (share of fakes found)"
    )


def pr_figure(predictions: pl.DataFrame, **how: Any) -> go.Figure:
    """Return a figure of the precision-recall curve averaged over folds, its band, and the share of fakes as a line.

    ``how`` are ``replicates``, ``seed`` and ``confidence`` of ``curve_band``.
    """
    if predictions["label"].n_unique() < 2:
        return theme.nothing_to_show("Precision and recall", "Predictions of both classes are needed.")
    band = pr_band(*_columns(predictions), **how)
    chance = _within(share_of_fakes, predictions, band)
    finding = f"Average precision {band.area:.3f}, by guessing {chance:.3f}"
    drawn = _curve_figure(predictions, band, finding, "recall %{x:.3f}<br>precision %{y:.3f}<extra></extra>")
    add_reference(drawn, "Guessing (share of fakes)", chance, chance)
    drawn.update_layout(legend={"x": 0.02, "y": 0.04, "xanchor": "left", "yanchor": "bottom"})
    return theme.shares(drawn, "Recall (share of fakes found)", "Precision (share of fakes among those called fake)")


def _columns(predictions: pl.DataFrame) -> tuple[IntArray, FloatArray, npt.NDArray[Any], IntArray]:
    """Return labels, scores, groups and folds."""
    scores, groups, folds = (predictions[name].to_numpy() for name in ("score", "group_id", "fold"))
    return fake_labels(predictions), scores, groups, folds


def _within(metric: Metric, predictions: pl.DataFrame, band: CurveBand) -> float:
    """Return ``metric`` within folds; over all rows together if no fold of ``band`` has both classes."""
    labels, scores, _, folds = _columns(predictions)
    return float((within_folds(metric, folds) if len(band.fold_heights) else metric)(labels, scores))


def _curve_figure(predictions: pl.DataFrame, band: CurveBand, finding: str, hover: str) -> go.Figure:
    """Return a figure with the band, the curves of single folds and their mean."""
    subtitle = f"{videos_and_groups(predictions)}; curves compare within folds; band: pointwise interval over groups"
    drawn = theme.figure(finding, subtitle, height=460)
    if np.isfinite([band.low, band.high]).all():
        theme.add_band(drawn, band.grid, band.low, band.high)
    grey = theme.translucent(theme.CONTROL, 0.6)
    for number, heights in enumerate(band.fold_heights):
        look = {"legendgroup": "folds", "showlegend": number == 0, "hovertemplate": hover}
        add_line(drawn, band.grid, heights, "Single folds", grey, width=1, **look)
    add_line(drawn, band.grid, band.mean, "Model", theme.MODEL, width=2.5, hovertemplate=hover)
    return drawn


# --- Shares of some videos: calibration, and wrong decisions among the surest


def shares_of(
    parts: Sequence[npt.NDArray[np.bool_]], values: npt.NDArray[Any], groups: npt.NDArray[Any], **how: Any
) -> pl.DataFrame:
    """Return the mean of 0 and 1 ``values`` (N,) in each part of the videos, with an interval over the part's groups.

    Args:
        parts: masks, bool (N,).
        values: (N,).
        groups: (N,), group names.
        how: ``replicates``, ``seed`` and ``confidence`` of ``intervals_over_groups``.

    Returns:
        One row per part: ``share low high num_videos num_groups``. The ends are null in a part of one group.
    """
    rows = []
    for part in parts:
        columns = np.column_stack([values[part], np.ones(part.sum())])
        measure = measure_of_rows("share", columns, lambda sums: divide(sums[:, 0], sums[:, 1]), SHARE)
        rows.append(intervals_over_groups([measure], groups[part], **how)[0].row())
    names = {**dict.fromkeys(("share", "low", "high"), pl.Float64), "num_videos": pl.Int64, "num_groups": pl.Int64}
    return pl.DataFrame(rows, schema=names, orient="row")


def _bars(shares: pl.DataFrame) -> dict[str, Any]:
    share, low, high = shares.select("share", "low", "high").fill_null(np.nan).to_numpy().T
    return theme.error_bar(share, low, high, theme.MODEL)


def calibration_figure(predictions: pl.DataFrame, **how: Any) -> go.Figure:
    """Return a figure of the share of fakes against the mean score in ten bins, before and after the temperature.

    The temperature is the divisor of the logits that was chosen in training to calibrate scores. ``how`` are
    ``replicates``, ``seed`` and ``confidence`` of the intervals.
    """
    if predictions.is_empty():
        return theme.nothing_to_show("Calibration", "No predictions are recorded.")
    labels, scores, groups, _ = _columns(predictions)
    before = calibration.probabilities(predictions["logit"].to_numpy(), 1.0)
    now, then = (calibration.expected_calibration_error(labels, values) for values in (scores, before))
    drawn = theme.figure(
        f"A score is off the share of fakes by {now:.2f} on average; before its temperature by {then:.2f}",
        f"{videos_and_groups(predictions)}, in bins of 0.1; bars: intervals over groups, none for a bin of one group; "
        "the error (ECE) is biased upwards when bins hold few",
        height=460,
    )
    add_reference(drawn, "Perfectly calibrated", 0, 1)
    old, bins = (calibration.reliability_bins(labels, values) for values in (before, scores))
    look = {"mode": "markers+lines", "connectgaps": True}
    add_line(drawn, old.mean_scores, old.fake_shares, "Before temperature", theme.CONTROL, dash="dot", **look)
    filled = np.flatnonzero(bins.counts)
    shares = shares_of([calibration.bin_of(scores) == number for number in filled], labels, groups, **how)
    look |= {"error_y": _bars(shares), "customdata": shares["num_videos"].to_list()}
    look["hovertemplate"] = "mean score %{x:.2f}<br>share of fakes %{y:.2f}<br>%{customdata} videos<extra></extra>"
    add_line(drawn, bins.mean_scores[filled], shares["share"].to_numpy(), "Score", theme.MODEL, **look)
    drawn.update_layout(legend={"x": 0.02, "y": 0.98})
    return theme.shares(
        drawn, "Mean score in the bin (probability of fake)", "Share of fakes in the bin (of its videos)"
    )


def risk_coverage_figure(predictions: pl.DataFrame, **how: Any) -> go.Figure:
    """Return a figure of the share of wrong decisions if only the surest 10, 20, ... 100 percent are decided.

    A video is the surer, the farther its score is from the threshold of its fold. ``how`` are ``replicates``, ``seed``
    and ``confidence`` of the intervals.
    """
    if predictions.is_empty():
        return theme.nothing_to_show("Abstaining", "No predictions are recorded.")
    labels, scores, groups, _ = _columns(predictions)
    thresholds = predictions["threshold"].to_numpy()
    wrong = (scores >= thresholds) != labels
    distances = np.abs(scores - thresholds)
    least = np.quantile(distances, 1 - _COVERAGES, method="lower")
    shares = shares_of([distances >= limit for limit in least], wrong, groups, **how)
    half, everything = shares["share"][4], shares["share"][9]
    gain = "" if half < everything else ": abstaining gains nothing"
    drawn = theme.figure(
        f"Deciding every video, {everything:.0%} are wrong; deciding only the surest half, {half:.0%}{gain}",
        f"{videos_and_groups(predictions)}; sure: far from the fold's threshold; bars: intervals over groups",
    )
    hover = "decided %{x:.0%}<br>wrong %{y:.1%}<br>at least %{customdata:.3f} from the threshold"
    look = {"mode": "markers+lines", "error_y": _bars(shares), "customdata": least, "hovertemplate": hover}
    coverages = (shares["num_videos"] / labels.size).to_numpy()
    add_line(drawn, coverages, shares["share"].to_numpy(), "Model", theme.MODEL, **look)
    theme.shares(drawn, "Coverage (share of videos decided, the surest first)", "Risk (share of these decided wrongly)")
    return drawn.update_yaxes(range=[-0.02, max(0.5, shares["high"].max() or 0.0) + 0.03])  # type: ignore[operator]


# --- Panels of the dashboard


def _declare(name: str, at: int, draw: Callable[..., go.Figure]) -> None:
    @PANELS.register_panel(name, at=at, follows=("folds",), tasks=("video",))
    def shown(selection: Selection) -> Shown:
        return draw(of_folds(selection, read_predictions([selection.detailed]).frame), replicates=QUICK_REPLICATES)


_declare("roc", 41, roc_figure)
_declare("pr", 42, pr_figure)
_declare("calibration", 43, calibration_figure)
