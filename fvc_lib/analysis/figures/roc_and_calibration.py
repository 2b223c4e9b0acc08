"""Figures of the quality of scores: ROC curve, calibration, and abstaining (deciding only the surest videos).

Each fold has a different network, and scores of two networks need not share a scale. The ROC curve is therefore
computed within folds and averaged vertically. The weight of a fold is its number of pairs of a fake and a real, so the
area under the mean curve equals the AUC within folds.

The band is a pointwise interval: one at each false positive rate. It comes from half-samples (random halves of the
groups). The intervals of the metrics come from the same half-samples.

``predictions`` are one run's rows of ``tables.PREDICTIONS``. ``replicates`` is the number of half-samples, ``seed``
their seed, and ``confidence`` the coverage of intervals and bands.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis.dashboard.panels import PANELS, QUICK_REPLICATES, Shown
from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.figures.theme import add_line, fake_labels, videos_and_groups
from fvc_lib.analysis.read.queries import Selection, of_folds, predictions as read_predictions
from fvc_lib.metrics import calibration
from fvc_lib.metrics.classification import (
    SHARE,
    FloatArray,
    IntArray,
    confusion_curve,
    divide,
    roc_auc,
    true_positive_rate_at_5_percent,
)
from fvc_lib.metrics.cross_validation import within_folds
from fvc_lib.metrics.intervals import (
    count_groups,
    draw_half_samples,
    group_codes,
    interval_ends,
    intervals_over_groups,
    measure_of_rows,
)

_GRID = np.linspace(0.0, 1.0, 201)
_BIN_VIDEOS, _MOST_BINS = 10, 10  # of the calibration figure: videos in a bin, and bins
_DIAGONAL: dict[str, Any] = {"dash": "dash", "width": 1, "hoverinfo": "skip"}
_COVERAGES = np.linspace(0.1, 1.0, 10)

# --- ROC curve


@dataclass(frozen=True)
class CurveBand:
    """A mean ROC curve over folds, with a band (an interval at each of the G false positive rates).

    Attributes:
        grid: float64 (G,), ascending false positive rates in [0, 1].
        mean: float64 (G,), true positive rates of the mean curve.
        low: float64 (G,), pointwise lower ends of the band. All are NaN if a class has fewer than two groups.
        high: float64 (G,), pointwise upper ends of the band, or NaN as ``low``.
        area: exact ROC AUC within folds.
        fold_heights: float64 (F, G), true positive rates of the F folds that have both classes.
    """

    grid: FloatArray
    mean: FloatArray
    low: FloatArray
    high: FloatArray
    area: float
    fold_heights: FloatArray


def roc_band(
    labels: IntArray,
    scores: FloatArray,
    groups: npt.ArrayLike,
    folds: npt.ArrayLike,
    *,
    replicates: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> CurveBand:
    """Return the average of the folds' ROC curves, with a band that shows how it varies with the groups.

    Curves are averaged vertically: T. Fawcett, "An introduction to ROC analysis", Pattern Recognition Letters 27
    (2006). If no fold has both classes, the curve of all rows together is returned.

    Args:
        labels: int (N,), where 1 is fake.
        scores: float (N,), higher for fakes.
        groups: (N,), the name of the group of each row.
        folds: int (N,), the fold of each row.
        replicates: number of half-samples (random halves of the groups) behind the band.
        seed: seed of the half-samples.
        confidence: coverage of the band at each false positive rate.
    """
    fold_of_row = np.asarray(folds)
    of_folds = [np.flatnonzero(fold_of_row == fold) for fold in np.unique(fold_of_row)]
    usable = [rows for rows in of_folds if np.unique(labels[rows]).size == 2]
    rows = usable or [np.arange(labels.size)]
    everything = np.ones((1, labels.size))
    mean = _mean_curves(everything, labels, scores, rows)[0]
    group_of_row, num_groups = group_codes(groups, labels.size)
    blocks = draw_half_samples(labels, group_of_row, num_groups, replicates=replicates, seed=seed)
    drawn = [_mean_curves(counts[:, group_of_row], labels, scores, rows) for counts in blocks]
    sizes = count_groups(labels, group_of_row)
    low, high = interval_ends(mean, np.concatenate(drawn).T, SHARE, sizes, confidence)
    if len(sizes.per_class) < 2 or min(sizes.per_class) < 2:  # one group does not show how groups vary
        low, high = np.full((2, _GRID.size), np.nan)
    area = within_folds(roc_auc, fold_of_row) if usable else roc_auc
    heights = [_mean_curves(everything, labels, scores, [of_fold])[0] for of_fold in usable]
    return CurveBand(_GRID, mean, low, high, area(labels, scores), np.array(heights).reshape(-1, _GRID.size))


def _mean_curves(weights: FloatArray, labels: IntArray, scores: FloatArray, folds: list[IntArray]) -> FloatArray:
    """Return R mean ROC curves over folds: true positive rates (R, G) at the G false positive rates of ``_GRID``.

    The weight of a fold is its number of pairs of a fake and a real. A curve is NaN if no fold has both classes.

    Args:
        weights: (R, N), the weights of the N rows for each of the R curves.
        labels: int (N,), where 1 is fake.
        scores: float (N,).
        folds: for each fold, the indices of its rows, an int array.
    """
    total, pairs = np.zeros((len(weights), _GRID.size)), np.zeros(len(weights))
    for rows in folds:
        curve = confusion_curve(labels[rows], scores[rows], weights[:, rows])
        rates = zip(curve.false_positive_rates, curve.true_positive_rates, strict=True)
        # np.interp takes the last of several equal x, which is the top of a vertical piece.
        heights = np.array([np.interp(_GRID, x, y) for x, y in rates])
        fold_pairs = curve.num_fake * curve.num_real
        weighted = heights * fold_pairs[:, None]
        total += np.where(fold_pairs[:, None] > 0, weighted, 0.0)
        pairs += fold_pairs
    return divide(total, pairs[:, None])


def roc_figure(predictions: pl.DataFrame, **how: Any) -> go.Figure:
    """Return a figure of the ROC curve averaged over folds, with its band and the curves of single folds.

    ``predictions`` are rows of ``tables.PREDICTIONS`` of all folds. ``how`` are ``replicates``, ``seed`` and
    ``confidence`` of ``roc_band``.
    """
    if predictions["label"].n_unique() < 2:
        return theme.nothing_to_show("ROC curve", "Predictions of both classes are needed.")
    labels, scores, groups, folds = _columns(predictions)
    band = roc_band(labels, scores, groups, folds, **how)
    # The same metric as in RESULTS. The mean curve interpolates and may lie higher where scores tie.
    found = true_positive_rate_at_5_percent
    measure = within_folds(found, folds) if len(band.fold_heights) else found
    share = float(measure(labels, scores))
    drawn = theme.figure(
        f"At 5% false alarms the model finds {share:.0%} of the fakes; AUC {band.area:.3f}",
        f"{videos_and_groups(predictions)}; curves compare within folds; band: pointwise interval over groups",
        height=460,
    )
    if np.isfinite([band.low, band.high]).all():
        around = np.append(_GRID, _GRID[::-1])
        heights = np.append(band.high, band.low[::-1])
        look = {"width": 0, "fill": "toself", "fillcolor": theme.translucent(theme.MODEL, 0.13), "hoverinfo": "skip"}
        add_line(drawn, around, heights, "Interval", theme.MODEL, **look)
    grey = theme.translucent(theme.CONTROL, 0.6)
    for number, heights in enumerate(band.fold_heights):
        add_line(drawn, _GRID, heights, "Single folds", grey, width=1, legendgroup="folds", showlegend=number == 0)
    hover = "FPR %{x:.3f}<br>TPR %{y:.3f}<extra></extra>"
    add_line(drawn, _GRID, band.mean, "Model", theme.MODEL, width=2.5, hovertemplate=hover)
    add_line(drawn, [0, 1], [0, 1], "Chance", theme.NEUTRAL, **_DIAGONAL)
    drawn.update_layout(legend=theme.LEGEND)
    return theme.shares(
        drawn, "False positive rate (share of reals called fake)", "True positive rate (share of fakes found)"
    )


def _columns(predictions: pl.DataFrame) -> tuple[IntArray, FloatArray, npt.NDArray[Any], IntArray]:
    """Return ``(labels, scores, groups, folds)`` of N predictions, four arrays (N,). A label of 1 is fake."""
    scores, groups, folds = (predictions[name].to_numpy() for name in ("score", "group_id", "fold"))
    return fake_labels(predictions), scores, groups, folds


# --- Shares of some videos: calibration, and wrong decisions among the surest


def shares_of(
    parts: Sequence[npt.NDArray[np.bool_]], values: npt.NDArray[Any], groups: npt.NDArray[Any], **how: Any
) -> pl.DataFrame:
    """Return the share of ones among ``values`` in several parts of the N videos, with intervals over groups.

    Args:
        parts: one mask, bool (N,), for each part. Parts may overlap.
        values: (N,), 0 or 1 for each video.
        groups: (N,), the name of the group of each video.
        how: ``replicates``, ``seed`` and ``confidence`` of ``intervals_over_groups``.

    Returns:
        One row per part: ``share low high num_videos num_groups``. ``low`` and ``high`` are null if the part has one
        group only.
    """
    rows = []
    for part in parts:
        columns = np.column_stack([values[part], np.ones(part.sum())])
        measure = measure_of_rows("share", columns, lambda sums: divide(sums[:, 0], sums[:, 1]), SHARE)
        rows.append(intervals_over_groups([measure], groups[part], **how)[0].row())
    names = ["share", "low", "high", "num_videos", "num_groups"]
    return pl.DataFrame(rows, schema=names, schema_overrides=dict.fromkeys(names[:3], pl.Float64), orient="row")


def _draw_shares(drawn: go.Figure, x: FloatArray, shares: pl.DataFrame, name: str, color: str, mode: str) -> None:
    """Add points with error bars to the figure ``drawn``.

    Args:
        drawn: the figure.
        x: horizontal positions (P,).
        shares: outcome of ``shares_of`` for P parts: the heights and the ends of the bars.
        name: name in the legend.
        color: ``#RRGGBB``.
        mode: plotly's ``markers`` or ``markers+lines``.
    """
    share, low, high = shares.select("share", "low", "high").fill_null(np.nan).to_numpy().T
    look = {"mode": mode, "error_y": theme.error_bar(share, low, high, color)}
    hover = "%{x:.2f}, %{y:.2f}<br>%{customdata} videos<extra></extra>"
    add_line(drawn, x, share, name, color, customdata=shares["num_videos"], hovertemplate=hover, **look)


def calibration_figure(predictions: pl.DataFrame, **how: Any) -> go.Figure:
    """Return a figure of calibration: the share of fakes against the mean score, in bins of equally many videos.

    The figure shows the scores before and after the temperature, the divisor of the logits that was chosen in training
    to calibrate them. With 20 or more videos, a bin holds at least ten. ``predictions`` are rows of
    ``tables.PREDICTIONS``. ``how`` are ``replicates``, ``seed`` and ``confidence`` of the intervals.
    """
    if predictions.is_empty():
        return theme.nothing_to_show("Calibration", "No predictions are recorded.")
    labels, scores, groups, _ = _columns(predictions)
    before = calibration.probabilities(predictions["logit"].to_numpy(), 1.0)
    now, then = (calibration.expected_calibration_error(labels, values) for values in (scores, before))
    number = min(max(labels.size // _BIN_VIDEOS, 2), _MOST_BINS, labels.size)
    drawn = theme.figure(
        f"A score is off the share of fakes by {now:.2f} on average; before its temperature by {then:.2f}",
        f"{videos_and_groups(predictions)}, in {number} bins of equally many videos; bars: intervals over groups, none "
        "for a bin of one group; the error (ECE) is of bins of 0.1, and biased upwards when these hold few",
        height=460,
    )
    add_line(drawn, [0, 1], [0, 1], "Perfectly calibrated", theme.NEUTRAL, **_DIAGONAL)
    for values, name, color in ((before, "Before temperature", theme.SERIES[1]), (scores, "Score", theme.MODEL)):
        order = np.lexsort((predictions["video_id"].to_numpy(), values))
        rank = np.empty(labels.size, np.int64)
        rank[order] = np.arange(labels.size)
        bin_of_video = rank * number // labels.size
        parts = [bin_of_video == place for place in range(number)]
        means = np.array([values[part].mean() for part in parts])
        fakes = shares_of(parts, labels, groups, **how)
        _draw_shares(drawn, means, fakes, name, color, "markers")
    drawn.update_layout(legend=theme.LEGEND)
    return theme.shares(
        drawn, "Mean score in the bin (probability of fake)", "Share of fakes in the bin (of its videos)"
    )


def risk_coverage_figure(predictions: pl.DataFrame, **how: Any) -> go.Figure:
    """Return a figure of the share of wrong decisions if only the surest 10, 20, ... 100 percent of videos are decided.

    A decision is surer if the score is farther from the threshold of its fold. ``predictions`` are rows of
    ``tables.PREDICTIONS``. ``how`` are ``replicates``, ``seed`` and ``confidence`` of the intervals.
    """
    if predictions.is_empty():
        return theme.nothing_to_show("Abstaining", "No predictions are recorded.")
    labels, scores, groups, _ = _columns(predictions)
    thresholds = predictions["threshold"].to_numpy()
    wrong = (scores >= thresholds) != labels
    distances = np.abs(scores - thresholds)
    least = np.quantile(distances, 1 - _COVERAGES, method="lower")
    surest = [distances >= limit for limit in least]
    shares = shares_of(surest, wrong, groups, **how)
    half, everything = shares["share"][4], shares["share"][9]
    drawn = theme.figure(
        f"Deciding every video, {everything:.0%} are wrong; deciding only the surest half, {half:.0%}",
        f"{videos_and_groups(predictions)}; sure: far from the fold's threshold; bars: intervals over groups",
    )
    coverage = (shares["num_videos"] / labels.size).to_numpy()
    _draw_shares(drawn, coverage, shares, "Model", theme.MODEL, "markers+lines")
    theme.shares(drawn, "Coverage (share of videos decided, the surest first)", "Risk (share of these decided wrongly)")
    return drawn.update_yaxes(range=None, rangemode="tozero")


# --- Panels of the dashboard


def _declare(name: str, at: int, draw: Callable[..., go.Figure]) -> None:
    @PANELS.register_panel(name, at=at, follows=("folds",), tasks=("video",))
    def shown(selection: Selection) -> Shown:
        return draw(of_folds(selection, read_predictions([selection.detailed]).frame), replicates=QUICK_REPLICATES)


_declare("roc", 41, roc_figure)
_declare("calibration", 43, calibration_figure)
