"""How well the score ranks fakes above reals: ROC and precision-recall curves, calibration, and what abstaining gains.

Each fold has a network of its own, whose scores need not share a scale with the others'. So curves are made within
folds and averaged vertically, each weighing its pairs of a fake and a real: the area under the mean is the area metric
within folds. Bands are pointwise, from the same draws of groups as the intervals of the metrics.

``predictions`` are one run's rows of ``tables.PREDICTIONS``; ``replicates``, ``seed`` and ``confidence`` are those of
the half-samples of the groups.
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
from fvc_lib.analysis.figures.theme import band_trace, diagonal, fake_labels, fold_line, level_line, videos_and_groups
from fvc_lib.analysis.read.queries import predictions as read_predictions
from fvc_lib.metrics import calibration, classification
from fvc_lib.metrics.calibration import RiskCoverage
from fvc_lib.metrics.classification import ConfusionCurve, FloatArray, IntArray, Metric, RankedRows
from fvc_lib.metrics.cross_validation import within_folds
from fvc_lib.metrics.intervals import GroupCounts, count_groups, draw_half_samples, group_codes, interval_ends

GRID_POINTS = 201
_HALF = 0.5
_FEWEST_GROUPS = 2  # of a class or a bin: of one there is no telling how groups vary
_SAME = 1e-9  # a recall of 3 / 10 and the grid's 0.3 differ in their last bits

# (curve under R sets of weights, grid (G,)) -> heights (R, G), NaN in rows where a class has no weight.
Heights = Callable[[ConfusionCurve, FloatArray], FloatArray]


@dataclass(frozen=True)
class CurveBand:
    """A mean curve over folds on a grid of G points in [0, 1], ascending from 0 to 1.

    ``grid``, ``mean``, ``low`` and ``high`` (pointwise; NaN where a class has fewer than two groups) are float64 (G,),
    ``area`` is the exact value of the curve's own area metric within folds, ``fold_heights``, float64 (F, G), the own
    curves of ``folds``, those that hold both classes.
    """

    grid: FloatArray
    mean: FloatArray
    low: FloatArray
    high: FloatArray
    area: float
    folds: tuple[int, ...]
    fold_heights: FloatArray

    @property
    def has_interval(self) -> bool:
        """Whether the band could be computed at all."""
        return bool(np.isfinite(self.low).all() and np.isfinite(self.high).all())


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

    Vertical averaging: T. Fawcett, "An introduction to ROC analysis", Pattern Recognition Letters 27 (2006). ``labels``
    are int (N,), 1 is fake, ``scores`` float (N,), ``folds`` int (N,); ``area`` is the metric that is the area under
    one curve of ``heights``.

    Raises:
        ValueError: labels are not 0 and 1, or scores are not finite or not as many.
    """
    checked = classification.check_labels(labels)
    values = classification.check_scores(scores, checked.size)
    fold_of_row = np.asarray(folds)
    grid = np.linspace(0.0, 1.0, GRID_POINTS)
    usable = [int(f) for f in np.unique(fold_of_row) if np.unique(checked[fold_of_row == f]).size == 2]
    rows = [np.flatnonzero(fold_of_row == fold) for fold in usable]
    if not usable:  # one class in every fold: one pooled curve says more than none
        rows = [np.arange(checked.size)]
    group_of_row, num_groups = group_codes(groups, checked.size)
    blocks = draw_half_samples(checked, group_of_row, num_groups, replicates=replicates, seed=seed)
    # Sorted once: a block of draws from very many groups is a single one.
    ranked = [classification.rank_rows(checked, values, of_fold) for of_fold in rows]
    drawn = [_mean_curves(counts, group_of_row, ranked, grid, heights) for counts in blocks]
    mean = _mean_curves(np.ones((1, num_groups)), group_of_row, ranked, grid, heights)[0]
    sizes = count_groups(checked, group_of_row)
    low, high = interval_ends(mean, np.concatenate(drawn).T, classification.SHARE, sizes, confidence)
    if len(sizes.per_class) < 2 or min(sizes.per_class) < _FEWEST_GROUPS:
        low, high = np.full_like(low, np.nan), np.full_like(high, np.nan)
    own = [heights(each.curve(np.ones((1, each.rows.size))), grid)[0] for each in ranked] if usable else []
    return CurveBand(
        grid,
        mean,
        low,
        high,
        float((within_folds(area, fold_of_row) if usable else area)(checked, values)),
        tuple(usable),
        np.array(own).reshape(-1, grid.size),
    )


def _mean_curves(
    counts: FloatArray, group_of_row: IntArray, ranked: list[RankedRows], grid: FloatArray, heights: Heights
) -> FloatArray:
    """(R, G) heights averaged over folds by their pairs, groups counting ``counts``; NaN where no fold has both."""
    total, pairs = np.zeros((len(counts), grid.size)), np.zeros(len(counts))
    for of_fold in ranked:
        curve = of_fold.curve(counts[:, group_of_row[of_fold.rows]])
        fold_pairs = curve.num_fake * curve.num_real
        total += np.where(fold_pairs[:, None] > 0, heights(curve, grid) * fold_pairs[:, None], 0.0)
        pairs += fold_pairs
    return classification.divide(total, pairs[:, None])


def true_positive_rates(curve: ConfusionCurve, grid: FloatArray) -> FloatArray:
    """(R, G) at the grid's false positive rates, the upper one where the curve is vertical."""
    heights = np.full((len(curve.num_fake), grid.size), np.nan)
    for number, (x, y) in enumerate(zip(curve.false_positive_rates, curve.true_positive_rates, strict=True)):
        if np.isfinite(x[-1]) and np.isfinite(y[-1]):
            # np.interp takes the last of several equal x, which is the top of a vertical piece.
            heights[number] = np.interp(grid, x, y)
    return heights


def precisions(curve: ConfusionCurve, grid: FloatArray) -> FloatArray:
    """(R, G) precision at the strictest threshold that finds at least the grid's recall; NaN without fakes or reals.

    The step function whose area is the average precision, not a straight line between its points, which would be too
    good: J. Davis and M. Goadrich, "The relationship between precision-recall and ROC curves", ICML 2006.
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


@classification.weighted_metric
def share_of_fakes(labels: IntArray, scores: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the precision of guessing."""
    del scores
    return classification.divide(weights @ labels, weights.sum(axis=1))


def roc_figure(
    predictions: pl.DataFrame, *, replicates: int = 2000, seed: int = 0, confidence: float = 0.95
) -> go.Figure:
    """Return the ROC curve averaged over folds, with a band over groups and each fold's curve behind it."""
    if predictions["label"].n_unique() < 2:
        return theme.nothing_to_show("ROC curve", "Predictions of both classes are needed; none or one is recorded.")
    band = roc_band(*_columns(predictions), replicates=replicates, seed=seed, confidence=confidence)
    # The metric of the results and no point of the mean curve, which ties would let lie above it.
    found = _within(classification.true_positive_rate_at, predictions, band)
    figure = _curve_figure(
        predictions, band, confidence,
        f"At 5% false alarms the model finds {found:.0%} of the fakes; AUC {band.area:.3f}",
        "FPR %{x:.3f}<br>TPR %{y:.3f}<extra></extra>",
    )  # fmt: skip
    figure.add_trace(diagonal("Chance"))
    figure.update_xaxes(title_text="False positive rate (share of reals called fake)", range=[-0.01, 1.01])
    figure.update_yaxes(title_text="True positive rate (share of fakes found)", range=[-0.01, 1.01])
    figure.update_layout(legend={"x": 0.98, "y": 0.04, "xanchor": "right", "yanchor": "bottom"})
    return figure


def pr_figure(
    predictions: pl.DataFrame, *, replicates: int = 2000, seed: int = 0, confidence: float = 0.95
) -> go.Figure:
    """Return the precision-recall curve averaged over folds with a band, beside the share of fakes."""
    if predictions["label"].n_unique() < 2:
        why = "Predictions of both classes are needed; none or one is recorded."
        return theme.nothing_to_show("Precision and recall", why)
    band = pr_band(*_columns(predictions), replicates=replicates, seed=seed, confidence=confidence)
    chance = _within(share_of_fakes, predictions, band)
    at_half = band.mean[int(np.argmin(np.abs(band.grid - _HALF)))]
    figure = _curve_figure(
        predictions, band, confidence,
        f"Where half of the fakes are found, {at_half:.0%} of what is called fake is fake; "
        f"average precision {band.area:.3f}, by guessing {chance:.3f}",
        "recall %{x:.3f}<br>precision %{y:.3f}<extra></extra>",
    )  # fmt: skip
    figure.add_trace(level_line("Guessing (share of fakes)", (chance, chance)))
    figure.update_xaxes(title_text="Recall (share of fakes found)", range=[-0.01, 1.01])
    figure.update_yaxes(title_text="Precision (share of fakes among those called fake)", range=[-0.01, 1.02])
    figure.update_layout(legend={"x": 0.02, "y": 0.04, "xanchor": "left", "yanchor": "bottom"})
    return figure


def _columns(predictions: pl.DataFrame) -> tuple[IntArray, FloatArray, list[str], IntArray]:
    scores, groups = predictions["score"].to_numpy(), predictions["group_id"].to_list()
    return fake_labels(predictions), scores, groups, predictions["fold"].to_numpy()


def _within(metric: Metric, predictions: pl.DataFrame, band: CurveBand) -> float:
    """``metric`` within folds, pooled where the band is of a pooled curve."""
    labels, scores, _, folds = _columns(predictions)
    return float((within_folds(metric, folds) if band.folds else metric)(labels, scores))


def _curve_figure(predictions: pl.DataFrame, band: CurveBand, confidence: float, finding: str, hover: str) -> go.Figure:
    """Draw the band, the folds' curves and their mean."""
    note = f"band: {confidence:.0%} pointwise, over groups"
    note = note if band.has_interval else "too few groups for a band"
    figure = theme.figure(finding, f"{videos_and_groups(predictions)}; curves compare within folds; {note}", height=460)
    if band.has_interval:
        figure.add_trace(band_trace(band.grid, band.low, band.high))
    for position, fold in enumerate(band.folds):
        look = fold_line(fold, is_first=position == 0)
        heights = band.fold_heights[position]
        figure.add_trace(go.Scatter(x=band.grid, y=heights, hovertemplate=f"fold {fold}<br>{hover}", **look))
    line = {"color": theme.MODEL, "width": 2.5}
    figure.add_trace(go.Scatter(x=band.grid, y=band.mean, mode="lines", name="Model", line=line, hovertemplate=hover))
    return figure


# --- Calibration: how far a score can be believed as a probability, before and after its temperature


@dataclass(frozen=True)
class BinnedShares:
    """The B filled bins of a reliability diagram, each (B,); ``low`` and ``high`` are NaN in bins of one group."""

    mean_scores: FloatArray
    fake_shares: FloatArray
    low: FloatArray
    high: FloatArray
    counts: IntArray
    num_groups: IntArray


def binned_shares(
    labels: IntArray,
    scores: FloatArray,
    groups: list[str],
    *,
    num_bins: int = 10,
    replicates: int = 1000,
    seed: int = 0,
    confidence: float = 0.95,
) -> BinnedShares:
    """Return the share of fakes in each bin of equal width, with an interval over groups.

    A replicate draws groups as the intervals of the metrics do; a bin that it leaves empty has no share in it.
    """
    edges = calibration.equal_width_edges(num_bins)
    bins = calibration.reliability_bins(labels, scores, edges)
    filled = np.flatnonzero(bins.counts)
    inside = np.searchsorted(edges[1:-1], scores, side="right")[:, None] == filled
    group_of_row, num_groups = group_codes(groups, labels.size)
    in_bin = np.array([np.unique(group_of_row[column]).size for column in inside.T], dtype=np.int64)
    # Summed by group first: sums of whole numbers are exact in any order, and no weight of a row is ever held.
    fakes, videos = (
        np.stack([np.bincount(group_of_row, weights=column, minlength=num_groups) for column in columns.T], axis=1)
        for columns in (inside * labels[:, None], inside)
    )
    blocks = draw_half_samples(labels, group_of_row, num_groups, replicates=replicates, seed=seed)
    shares = np.concatenate([classification.divide(counts @ fakes, counts @ videos) for counts in blocks])
    own = classification.divide(fakes.sum(0), videos.sum(0))
    sizes = [GroupCounts((int(number),), int(number)) for number in in_bin]
    ends = [
        interval_ends(own[[place]], shares[:, place][None], classification.SHARE, of_bin, confidence)
        for place, of_bin in enumerate(sizes)
    ]
    low, high = (np.array([end[side][0] for end in ends]) for side in (0, 1))
    known = in_bin >= _FEWEST_GROUPS
    return BinnedShares(
        bins.mean_scores[filled], bins.fake_shares[filled], np.where(known, low, np.nan), np.where(known, high, np.nan),
        bins.counts[filled], in_bin,
    )  # fmt: skip


def calibration_figure(
    predictions: pl.DataFrame, num_bins: int = 10, *, replicates: int = 1000, seed: int = 0, confidence: float = 0.95
) -> go.Figure:
    """Share of fakes against mean score in bins, with intervals; the score before its temperature behind it."""
    if predictions.is_empty():
        return theme.nothing_to_show("Calibration", "No predictions are recorded.")
    labels, scores = fake_labels(predictions), predictions["score"].to_numpy()
    before = _probabilities(predictions["logit"].to_numpy())
    edges, groups = calibration.equal_width_edges(num_bins), predictions["group_id"].to_list()
    now, then = (calibration.expected_calibration_error(labels, values, edges=edges) for values in (scores, before))
    shares = binned_shares(
        labels, scores, groups, num_bins=num_bins, replicates=replicates, seed=seed, confidence=confidence
    )
    figure = theme.figure(
        f"A score is off the share of fakes by {now:.2f} on average; before its temperature by {then:.2f}",
        f"{videos_and_groups(predictions)}; {shares.counts.size} of {num_bins} bins hold videos, the larger the point "
        f"the more; bars: {confidence:.0%} intervals, none for a bin of one group; the error (ECE) is biased "
        "upwards when bins hold few",
        height=460,
    )
    figure.add_trace(diagonal("Perfectly calibrated"))
    old = calibration.reliability_bins(labels, before, edges)
    held = old.counts > 0
    figure.add_trace(
        go.Scatter(
            x=old.mean_scores[held], y=old.fake_shares[held], mode="markers+lines", name="Before temperature",
            line={"color": theme.CONTROL, "width": 1, "dash": "dot"}, customdata=old.counts[held],
            marker={"color": "white", "size": 8, "symbol": "diamond", "line": {"color": theme.CONTROL, "width": 1.5}},
            hovertemplate="before<br>mean score %{x:.2f}<br>share of fakes %{y:.2f}<br>%{customdata} videos"
            "<extra></extra>",
        )
    )  # fmt: skip
    figure.add_trace(_bins_trace(shares))
    figure.update_xaxes(title_text="Mean score in the bin (probability of fake)", range=[-0.02, 1.02])
    figure.update_yaxes(title_text="Share of fakes in the bin (of its videos)", range=[-0.04, 1.04])
    figure.update_layout(legend={"x": 0.02, "y": 0.98})
    return figure


def _bins_trace(shares: BinnedShares) -> go.Scatter:
    known = np.isfinite(shares.low)
    up = np.where(known, shares.high - shares.fake_shares, 0.0)
    down = np.where(known, shares.fake_shares - shares.low, 0.0)
    return go.Scatter(
        x=shares.mean_scores, y=shares.fake_shares, mode="markers+lines", name="Score",
        line={"color": theme.MODEL, "width": 1.5},
        error_y={
            "type": "data", "symmetric": False, "array": up, "arrayminus": down, "color": theme.MODEL,
            "thickness": 1.2, "width": 4,
        },
        marker={
            "color": theme.MODEL, "size": 6 + 14 * np.sqrt(shares.counts / max(shares.counts.max(), 1)),
            "opacity": 0.85, "line": {"color": "white", "width": 1},
        },
        customdata=np.stack([shares.counts, shares.num_groups], axis=1),
        hovertemplate="mean score %{x:.2f}<br>share of fakes %{y:.2f}<br>"
        "%{customdata[0]} videos in %{customdata[1]} groups<extra></extra>",
    )  # fmt: skip


def _probabilities(logits: FloatArray) -> FloatArray:
    return np.exp(-np.logaddexp(0.0, -logits))


# --- Abstaining: the share of wrong decisions among the videos a run is surest of

_GRID = np.linspace(0.05, 1.0, 96)
_MOST_POINTS = 2000


def risk_coverage_figure(
    predictions: pl.DataFrame, *, replicates: int = 500, seed: int = 0, confidence: float = 0.95
) -> go.Figure:
    """Return the share of wrong decisions against the share of videos decided, the most certain first."""
    if predictions.is_empty():
        return theme.nothing_to_show("Abstaining", "No predictions are recorded.")
    labels, scores = fake_labels(predictions), predictions["score"].to_numpy()
    thresholds = predictions["threshold"].to_numpy()
    curve = calibration.risk_coverage(labels, scores, thresholds)
    everything, half = float(curve.risks[-1]), float(_risk_at(curve, np.array([_HALF]))[0])
    group_of_row, num_groups = group_codes(predictions["group_id"].to_list(), labels.size)
    drawn = []
    for counts in draw_half_samples(labels, group_of_row, num_groups, replicates=replicates, seed=seed):
        for of_group in counts.astype(np.int64):
            rows = np.repeat(np.arange(labels.size), of_group[group_of_row])
            drawn.append(_risk_at(calibration.risk_coverage(labels[rows], scores[rows], thresholds[rows]), _GRID))
    sizes = GroupCounts((num_groups,), num_groups)
    low, high = interval_ends(_risk_at(curve, _GRID), np.array(drawn).T, classification.SHARE, sizes, confidence)
    figure = theme.figure(
        _finding(everything, half),
        f"{videos_and_groups(predictions)}; sure: far from the fold's threshold; area {curve.area:.3f}; "
        f"band: {confidence:.0%} pointwise, over groups{_sampled(curve.risks.size)}",
    )
    if np.isfinite(low).all():
        figure.add_trace(band_trace(_GRID, low, high))
    # More points than a screen has columns would make a page of tens of megabytes.
    shown = np.unique(np.linspace(0, curve.risks.size - 1, min(curve.risks.size, _MOST_POINTS)).round().astype(int))
    figure.add_trace(
        go.Scatter(
            x=curve.coverages[shown], y=curve.risks[shown], mode="lines", name="Model",
            line={"color": theme.MODEL, "width": 2.5}, line_shape="hv", customdata=curve.confidences[shown],
            hovertemplate="decided %{x:.0%}<br>wrong %{y:.1%}<br>at least %{customdata:.3f} from the threshold"
            "<extra></extra>",
        )
    )  # fmt: skip
    figure.add_trace(level_line("Deciding every video", (everything, everything)))
    figure.update_xaxes(title_text="Coverage (share of videos decided, the surest first)", range=[0, 1.01])
    top = max(0.5, float(curve.risks.max()), float(np.nanmax(high)) if np.isfinite(high).any() else 0.0)
    figure.update_yaxes(title_text="Risk (share of these decided wrongly)", range=[-0.01, top + 0.03])
    figure.update_layout(legend={"x": 0.02, "y": 0.98})
    return figure


def _sampled(num_points: int) -> str:
    return f"; {_MOST_POINTS:,} of the curve's {num_points:,} points" if num_points > _MOST_POINTS else ""


def _finding(everything: float, half: float) -> str:
    text = f"Deciding every video, {everything:.0%} are wrong; deciding only the surest half, {half:.0%}"
    return text if half < everything else f"{text}: abstaining gains nothing"


def _risk_at(curve: RiskCoverage, coverages: FloatArray) -> FloatArray:
    """Return the risk of the smallest decided set that covers at least each of ``coverages``."""
    index = np.searchsorted(curve.coverages, coverages - 1e-9)
    return curve.risks[np.minimum(index, curve.risks.size - 1)]


# --- Panels of the dashboard


@PANELS.register_panel("roc", at=41, follows=("folds", "highlight"), tasks=("video",))
def _roc_panel(selection: Selection) -> Shown:
    return roc_figure(_scored(selection), replicates=QUICK_REPLICATES)


@PANELS.register_panel("pr", at=42, follows=("folds", "highlight"), tasks=("video",))
def _pr_panel(selection: Selection) -> Shown:
    return pr_figure(_scored(selection), replicates=QUICK_REPLICATES)


@PANELS.register_panel("calibration", at=43, follows=("folds",), tasks=("video",))
def _calibration_panel(selection: Selection) -> Shown:
    return calibration_figure(_scored(selection), replicates=QUICK_REPLICATES)


def _scored(selection: Selection) -> pl.DataFrame:
    return of_folds(selection, read_predictions([selection.detailed]).frame)
