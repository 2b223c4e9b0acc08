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

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis.dashboard.panels import PANELS, QUICK_REPLICATES, Selection, Shown, of_folds
from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.figures.theme import add_band, add_line, add_reference, fake_labels, videos_and_groups
from fvc_lib.analysis.read.queries import predictions as read_predictions
from fvc_lib.metrics import calibration, classification
from fvc_lib.metrics.classification import ConfusionCurve, FloatArray, IntArray, Metric
from fvc_lib.metrics.cross_validation import within_folds
from fvc_lib.metrics.intervals import GroupCounts, count_groups, draw_half_samples, group_codes, interval_ends

_FEWEST_GROUPS = 2  # of a class or a bin; one group does not show how groups vary
_SAME = 1e-9  # a recall of 3 / 10 and the grid's 0.3 differ in their last bits
_ONE_CLASS = "Predictions of both classes are needed; none or one is recorded."
_COVERAGES = np.linspace(0.05, 1.0, 96)
_MOST_POINTS = 2000  # of a curve: more would make a page of tens of megabytes

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
        folds: numbers of the F folds with both classes.
        fold_heights: float64 (F, G), the curves of ``folds``.
    """

    grid: FloatArray
    mean: FloatArray
    low: FloatArray
    high: FloatArray
    area: float
    folds: tuple[int, ...]
    fold_heights: FloatArray


def curve_band(
    labels: npt.ArrayLike,
    scores: npt.ArrayLike,
    groups: Sequence[str],
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

    Raises:
        ValueError: labels are not 0 and 1, scores are not finite, or there are not N scores.
    """
    checked = classification.check_labels(labels)
    values = classification.check_scores(scores, checked.size)
    fold_of_row, grid = np.asarray(folds), np.linspace(0.0, 1.0, 201)
    usable = [int(fold) for fold in np.unique(fold_of_row) if np.unique(checked[fold_of_row == fold]).size == 2]
    rows = [np.flatnonzero(fold_of_row == fold) for fold in usable] or [np.arange(checked.size)]
    group_of_row, num_groups = group_codes(groups, checked.size)
    blocks = draw_half_samples(checked, group_of_row, num_groups, replicates=replicates, seed=seed)
    replicated = [_mean_curves(counts[:, group_of_row], checked, values, rows, grid, heights) for counts in blocks]
    everything = np.ones((1, checked.size))
    mean = _mean_curves(everything, checked, values, rows, grid, heights)[0]
    sizes = count_groups(checked, group_of_row)
    low, high = interval_ends(mean, np.concatenate(replicated).T, classification.SHARE, sizes, confidence)
    if len(sizes.per_class) < 2 or min(sizes.per_class) < _FEWEST_GROUPS:
        low, high = np.full((2, grid.size), np.nan)
    metric = within_folds(area, fold_of_row) if usable else area
    own = [_mean_curves(everything, checked, values, [of_fold], grid, heights)[0] for of_fold in rows if usable]
    fold_heights = np.array(own).reshape(-1, grid.size)
    return CurveBand(grid, mean, low, high, float(metric(checked, values)), tuple(usable), fold_heights)


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
    return classification.divide(total, pairs[:, None])


def true_positive_rates(curve: ConfusionCurve, grid: FloatArray) -> FloatArray:
    """Return the true positive rates (R, G) at the false positive rates ``grid`` (G,).

    Where the curve is vertical, the highest rate is returned.
    """
    heights = np.full((len(curve.num_fake), grid.size), np.nan)
    for number in np.flatnonzero((curve.num_fake > 0) & (curve.num_real > 0)):
        # np.interp takes the last of several equal x, which is the top of a vertical piece.
        heights[number] = np.interp(grid, curve.false_positive_rates[number], curve.true_positive_rates[number])
    return heights


def precisions(curve: ConfusionCurve, grid: FloatArray) -> FloatArray:
    """Return the precision (R, G) at the highest threshold whose recall is at least ``grid`` (G,).

    Rows without fakes or reals are NaN. The area of this step function is the average precision. Straight lines
    between its points would overstate precision: J. Davis and M. Goadrich, "The relationship between precision-recall
    and ROC curves", ICML 2006.
    """
    recalls = classification.divide(curve.true_positives, curve.num_fake[:, None])
    heights_at = classification.divide(curve.true_positives, curve.true_positives + curve.false_positives)
    heights = np.full((len(recalls), grid.size), np.nan)
    for number in np.flatnonzero((curve.num_fake > 0) & (curve.num_real > 0)):
        # At recall 0 the first threshold that finds any fake: a row of weight 0 has no precision.
        first = int(np.argmax(recalls[number] > 0))
        column = np.maximum(np.searchsorted(recalls[number], grid - _SAME), first)
        heights[number] = heights_at[number, np.minimum(column, recalls.shape[1] - 1)]
    return heights


roc_band = partial(curve_band, heights=true_positive_rates, area=classification.roc_auc)
pr_band = partial(curve_band, heights=precisions, area=classification.average_precision)


@Metric
def share_of_fakes(labels: IntArray, scores: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the weighted share of fakes, which is the precision of guessing."""
    del scores
    return classification.divide(weights @ labels, weights.sum(axis=1))


def roc_figure(
    predictions: pl.DataFrame, *, replicates: int = 2000, seed: int = 0, confidence: float = 0.95
) -> go.Figure:
    """Return a figure of the ROC curve averaged over folds, its band over groups, and the curves of single folds."""
    if predictions["label"].n_unique() < 2:
        return theme.nothing_to_show("ROC curve", _ONE_CLASS)
    band = roc_band(*_columns(predictions), replicates=replicates, seed=seed, confidence=confidence)
    # The metric of the results rather than a point of the mean curve, which lies higher where scores tie.
    share = _within(classification.true_positive_rate_at_5_percent, predictions, band)
    finding = f"At 5% false alarms the model finds {share:.0%} of the fakes; AUC {band.area:.3f}"
    drawn = _curve_figure(predictions, band, confidence, finding, "FPR %{x:.3f}<br>TPR %{y:.3f}<extra></extra>")
    add_reference(drawn, "Chance", 0, 1)
    drawn.update_layout(legend={"x": 0.98, "y": 0.04, "xanchor": "right", "yanchor": "bottom"})
    return theme.shares(
        drawn, "False positive rate (share of reals called fake)", "True positive rate (share of fakes found)"
    )


def pr_figure(
    predictions: pl.DataFrame, *, replicates: int = 2000, seed: int = 0, confidence: float = 0.95
) -> go.Figure:
    """Return a figure of the precision-recall curve averaged over folds, its band, and the share of fakes as a line."""
    if predictions["label"].n_unique() < 2:
        return theme.nothing_to_show("Precision and recall", _ONE_CLASS)
    band = pr_band(*_columns(predictions), replicates=replicates, seed=seed, confidence=confidence)
    chance = _within(share_of_fakes, predictions, band)
    finding = (
        f"Where half of the fakes are found, {band.mean[band.grid.size // 2]:.0%} of what is called fake is fake; "
        f"average precision {band.area:.3f}, by guessing {chance:.3f}"
    )
    hover = "recall %{x:.3f}<br>precision %{y:.3f}<extra></extra>"
    drawn = _curve_figure(predictions, band, confidence, finding, hover)
    add_reference(drawn, "Guessing (share of fakes)", chance, chance)
    drawn.update_layout(legend={"x": 0.02, "y": 0.04, "xanchor": "left", "yanchor": "bottom"})
    return theme.shares(drawn, "Recall (share of fakes found)", "Precision (share of fakes among those called fake)")


def _columns(predictions: pl.DataFrame) -> tuple[IntArray, FloatArray, list[str], IntArray]:
    scores, groups = predictions["score"].to_numpy(), predictions["group_id"].to_list()
    return fake_labels(predictions), scores, groups, predictions["fold"].to_numpy()


def _within(metric: Metric, predictions: pl.DataFrame, band: CurveBand) -> float:
    """Return ``metric`` within folds; over all rows together if no fold of ``band`` has both classes."""
    labels, scores, _, folds = _columns(predictions)
    return float((within_folds(metric, folds) if band.folds else metric)(labels, scores))


def _curve_figure(predictions: pl.DataFrame, band: CurveBand, confidence: float, finding: str, hover: str) -> go.Figure:
    """Return a figure with the band, the curves of single folds and their mean."""
    has_band = bool(np.isfinite([band.low, band.high]).all())
    note = f"band: {confidence:.0%} pointwise, over groups" if has_band else "too few groups for a band"
    drawn = theme.figure(finding, f"{videos_and_groups(predictions)}; curves compare within folds; {note}", height=460)
    if has_band:
        add_band(drawn, band.grid, band.low, band.high)
    look = {"width": 1, "legendgroup": "folds"}
    for fold, heights in zip(band.folds, band.fold_heights, strict=True):
        look |= {"hovertemplate": f"fold {fold}<br>{hover}", "showlegend": fold == band.folds[0]}
        add_line(drawn, band.grid, heights, "Single folds", theme.translucent(theme.CONTROL, 0.6), **look)
    add_line(drawn, band.grid, band.mean, "Model", theme.MODEL, width=2.5, hovertemplate=hover)
    return drawn


# --- Calibration


def binned_shares(
    labels: IntArray,
    scores: FloatArray,
    groups: Sequence[str],
    *,
    replicates: int = 1000,
    seed: int = 0,
    confidence: float = 0.95,
) -> pl.DataFrame:
    """Return the share of fakes in each of the ten bins of scores that holds a video, with an interval over groups.

    Half-samples that leave a bin empty do not count for that bin.

    Returns:
        One row per bin: ``mean_score fake_share low high num_videos num_groups``. ``low`` and ``high`` are NaN in bins
        of one group.
    """
    bins = calibration.reliability_bins(labels, scores)
    filled = np.flatnonzero(bins.counts)
    inside = calibration.bin_of(scores)[:, None] == filled
    group_of_row, num_groups = group_codes(groups, labels.size)
    # Summed by group first: sums of whole numbers are exact in any order, and rows need no weights of their own.
    videos, fakes = np.zeros((2, num_groups, filled.size))
    np.add.at(videos, group_of_row, inside)
    np.add.at(fakes, group_of_row, inside * labels[:, None])
    in_bin = (videos > 0).sum(0)
    blocks = draw_half_samples(labels, group_of_row, num_groups, replicates=replicates, seed=seed)
    shares = np.concatenate([classification.divide(counts @ fakes, counts @ videos) for counts in blocks])
    own = bins.fake_shares[filled]
    ends = np.full((2, filled.size), np.nan)
    for place in np.flatnonzero(in_bin >= _FEWEST_GROUPS):
        sizes = GroupCounts((int(in_bin[place]),), int(in_bin[place]))
        found = interval_ends(own[[place]], shares[:, place][None], classification.SHARE, sizes, confidence)
        ends[:, place] = np.concatenate(found)
    columns = {"mean_score": bins.mean_scores[filled], "fake_share": own, "low": ends[0], "high": ends[1]}
    return pl.DataFrame({**columns, "num_videos": bins.counts[filled], "num_groups": in_bin})


def calibration_figure(
    predictions: pl.DataFrame, *, replicates: int = 1000, seed: int = 0, confidence: float = 0.95
) -> go.Figure:
    """Return a figure of the share of fakes against the mean score in ten bins, before and after the temperature.

    The temperature is the divisor of the logits that was chosen in training to calibrate scores.
    """
    if predictions.is_empty():
        return theme.nothing_to_show("Calibration", "No predictions are recorded.")
    labels, scores, groups, _ = _columns(predictions)
    before = calibration.probabilities(predictions["logit"].to_numpy(), 1.0)
    now, then = (calibration.expected_calibration_error(labels, values) for values in (scores, before))
    shares = binned_shares(labels, scores, groups, replicates=replicates, seed=seed, confidence=confidence)
    drawn = theme.figure(
        f"A score is off the share of fakes by {now:.2f} on average; before its temperature by {then:.2f}",
        f"{videos_and_groups(predictions)}; {shares.height} of 10 bins hold videos, the larger the point "
        f"the more; bars: {confidence:.0%} intervals, none for a bin of one group; the error (ECE) is biased "
        "upwards when bins hold few",
        height=460,
    )
    add_reference(drawn, "Perfectly calibrated", 0, 1)
    old = calibration.reliability_bins(labels, before)
    hover = "mean score %{x:.2f}<br>share of fakes %{y:.2f}<br>%{customdata} videos<extra></extra>"
    look = {"mode": "markers+lines", "hovertemplate": hover}
    ring = {"color": "white", "size": 8, "symbol": "diamond", "line": {"color": theme.CONTROL, "width": 1.5}}
    earlier = {"width": 1, "dash": "dot", "marker": ring, "customdata": old.counts, **look}
    add_line(drawn, old.mean_scores, old.fake_shares, "Before temperature", theme.CONTROL, connectgaps=True, **earlier)
    mean, share, low, high, counts, _ = (column.to_numpy() for column in shares)
    sizes = {"size": 6 + 14 * np.sqrt(counts / counts.max()), "opacity": 0.85}
    line = add_line(drawn, mean, share, "Score", theme.MODEL, width=1.5, marker=sizes, customdata=counts, **look)
    line.error_y = theme.error_bar(share, low, high, theme.MODEL)
    drawn.update_layout(legend={"x": 0.02, "y": 0.98})
    return theme.shares(
        drawn, "Mean score in the bin (probability of fake)", "Share of fakes in the bin (of its videos)"
    )


# --- Abstaining: the share of wrong decisions among the most certain videos


def risk_coverage_figure(
    predictions: pl.DataFrame, *, replicates: int = 500, seed: int = 0, confidence: float = 0.95
) -> go.Figure:
    """Return a figure of the share of wrong decisions if only the most certain videos are decided.

    The x axis is the share of videos that are decided. Certainty is the distance of the score from the threshold.
    """
    if predictions.is_empty():
        return theme.nothing_to_show("Abstaining", "No predictions are recorded.")
    labels, scores, groups, _ = _columns(predictions)
    thresholds = predictions["threshold"].to_numpy()
    curve = calibration.risk_coverage(labels, scores, thresholds)
    everything, half = float(curve.risks[-1]), float(_risk_at(curve, np.array([0.5]))[0])
    group_of_row, num_groups = group_codes(groups, labels.size)
    risks = []
    for block in draw_half_samples(labels, group_of_row, num_groups, replicates=replicates, seed=seed):
        for counts in block.astype(bool):
            rows = np.flatnonzero(counts[group_of_row])
            drawn_curve = calibration.risk_coverage(labels[rows], scores[rows], thresholds[rows])
            risks.append(_risk_at(drawn_curve, _COVERAGES))
    sizes = GroupCounts((num_groups,), num_groups)
    low, high = interval_ends(_risk_at(curve, _COVERAGES), np.array(risks).T, classification.SHARE, sizes, confidence)
    gain = "" if half < everything else ": abstaining gains nothing"
    drawn = theme.figure(
        f"Deciding every video, {everything:.0%} are wrong; deciding only the surest half, {half:.0%}{gain}",
        f"{videos_and_groups(predictions)}; sure: far from the fold's threshold; area {curve.area:.3f}; "
        f"band: {confidence:.0%} pointwise, over groups",
    )
    top = max(0.5, float(curve.risks.max()))
    if np.isfinite(low).all():
        add_band(drawn, _COVERAGES, low, high)
        top = max(top, float(high.max()))
    places = theme.thinned(curve.risks.size, _MOST_POINTS)
    hover = "decided %{x:.0%}<br>wrong %{y:.1%}<br>at least %{customdata:.3f} from the threshold"
    look = {"line_shape": "hv", "customdata": curve.confidences[places], "hovertemplate": hover}
    add_line(drawn, curve.coverages[places], curve.risks[places], "Model", theme.MODEL, width=2.5, **look)
    add_reference(drawn, "Deciding every video", everything, everything)
    theme.shares(drawn, "Coverage (share of videos decided, the surest first)", "Risk (share of these decided wrongly)")
    return drawn.update_layout(legend={"x": 0.02, "y": 0.98}, yaxis={"range": [-0.01, top + 0.03]})


def _risk_at(curve: calibration.RiskCoverage, coverages: FloatArray) -> FloatArray:
    """Return the risk at the smallest coverage of ``curve`` that is at least ``coverages`` (C,): float64 (C,)."""
    index = np.searchsorted(curve.coverages, coverages - _SAME)
    return curve.risks[np.minimum(index, curve.risks.size - 1)]


# --- Panels of the dashboard


def _declare(name: str, at: int, draw: Callable[..., go.Figure]) -> None:
    @PANELS.register_panel(name, at=at, follows=("folds",), tasks=("video",))
    def shown(selection: Selection) -> Shown:
        return draw(of_folds(selection, read_predictions([selection.detailed]).frame), replicates=QUICK_REPLICATES)


_declare("roc", 41, roc_figure)
_declare("pr", 42, pr_figure)
_declare("calibration", 43, calibration_figure)
