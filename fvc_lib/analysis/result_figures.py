"""Figures of a result: the model beside its controls, its ROC curve, its scores and how far to believe them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis import theme
from fvc_lib.analysis.headline import DISHONEST_CONTROLS, HEADLINE_METRIC, Score, judge, overall_scores
from fvc_lib.analysis.roc_bands import roc_band
from fvc_lib.analysis.wording import (
    count_text,
    figure_text,
    interval_text,
    metric_name,
    number_text,
    source_name,
)
from fvc_lib.metrics.calibration import expected_calibration_error, reliability_bins

STANDING_COLORS = {
    "above control": theme.ABOVE_CONTROL,
    "not above control": theme.NOT_ABOVE_CONTROL,
    "no control": theme.NEUTRAL,
    "no result": theme.NEUTRAL,
}


def controls_figure(results: pl.DataFrame, metric: str = HEADLINE_METRIC, *, confidence: float = 0.95) -> go.Figure:
    """The model's number and its controls' as points with interval bars: the first figure of a report.

    Args:
        results: one run's rows of ``tables.RESULTS``.
        metric: the metric compared; its chance line at 0.5 is drawn for the AUC and balanced accuracy.
        confidence: the coverage the intervals were made with, for the subtitle.
    """
    scores = [score for score in overall_scores(results, metric) if score.value is not None]
    if not scores:
        return theme.nothing_to_show("Model and controls", f"No {metric_name(metric)} over all folds is recorded.")
    verdict = judge(scores) if metric == HEADLINE_METRIC else None
    figure = theme.figure(
        verdict.sentence if verdict else f"{metric_name(metric)} of the model beside its controls",
        f"{_counts(results)}; bars: {confidence:.0%} cluster-bootstrap intervals over groups",
        height=150 + 44 * len(scores),
    )
    for score in scores:
        figure.add_trace(_score_point(score))
        figure.add_annotation(_value_label(_tick(score), score))
    if metric in {"roc_auc", "balanced_accuracy"}:
        figure.add_vline(x=0.5, line={"color": theme.NEUTRAL, "width": 1, "dash": "dash"}, layer="below")
        small = {"size": 11, "color": theme.NEUTRAL}
        figure.add_annotation(x=0.5, y=1, yref="paper", yanchor="bottom", text="chance", showarrow=False, font=small)
    if verdict:
        _stamp(figure, verdict.standing)
    figure.update_yaxes(categoryorder="array", categoryarray=[_tick(s) for s in reversed(scores)], showgrid=False)
    figure.update_xaxes(title_text=figure_text(metric_name(metric)), range=_score_range(scores))
    figure.update_layout(showlegend=False, margin={"r": 170})
    return figure


def roc_figure(
    predictions: pl.DataFrame, *, replicates: int = 2000, seed: int = 0, confidence: float = 0.95
) -> go.Figure:
    """The ROC curve averaged over folds, each fold's own behind it, with a cluster-bootstrap band over groups.

    Args:
        predictions: one run's rows of ``tables.PREDICTIONS``.
        replicates: bootstrap replicates of the band.
        seed: of the draws.
        confidence: pointwise coverage of the band.
    """
    if predictions["label"].n_unique() < 2:
        return theme.nothing_to_show("ROC curve", "Predictions of both classes are needed; none or one is recorded.")
    band = roc_band(
        fake_labels(predictions), predictions["score"].to_numpy(), predictions["group_id"].to_list(),
        predictions["fold"].to_numpy(), replicates=replicates, seed=seed, confidence=confidence,
    )  # fmt: skip
    figure = theme.figure(
        f"At 5% false alarms the model finds {band.true_positive_rate_at(0.05):.0%} of the fakes; AUC {band.area:.3f}",
        f"{_videos_and_groups(predictions)}; curves compare within folds; "
        f"band: {confidence:.0%} pointwise cluster bootstrap over groups",
        height=460,
    )
    if band.has_interval:
        figure.add_trace(_band_trace(band.false_positive_rates, band.low, band.high))
    for position, (fold, rates) in enumerate(zip(band.folds, band.fold_rates, strict=True)):
        figure.add_trace(
            go.Scatter(
                x=band.false_positive_rates, y=rates, mode="lines", name="Single folds", legendgroup="folds",
                line={"color": theme.translucent(theme.CONTROL, 0.6), "width": 1}, showlegend=position == 0,
                hovertemplate=f"fold {fold}<br>FPR %{{x:.3f}}<br>TPR %{{y:.3f}}<extra></extra>",
            )
        )  # fmt: skip
    figure.add_trace(
        go.Scatter(
            x=band.false_positive_rates, y=band.mean, mode="lines", name="Model",
            line={"color": theme.MODEL, "width": 2.5},
            hovertemplate="FPR %{x:.3f}<br>TPR %{y:.3f}<extra></extra>",
        )
    )  # fmt: skip
    figure.add_trace(_diagonal("Chance"))
    figure.update_xaxes(title_text="False positive rate (share of reals called fake)", range=[-0.01, 1.01])
    figure.update_yaxes(title_text="True positive rate (share of fakes found)", range=[-0.01, 1.01])
    figure.update_layout(legend={"x": 0.98, "y": 0.04, "xanchor": "right", "yanchor": "bottom"})
    return figure


def score_distribution_figure(predictions: pl.DataFrame) -> go.Figure:
    """How the scores of reals and of fakes lie, and the mean decision threshold.

    Args:
        predictions: one run's rows of ``tables.PREDICTIONS``.
    """
    if predictions.is_empty():
        return theme.nothing_to_show("Scores", "No predictions are recorded.")
    right = ((pl.col("score") >= pl.col("threshold")) == (pl.col("label") == "fake")).mean()
    share = float(predictions.select(right).item())
    figure = theme.figure(
        f"{share:.0%} of the videos fall on the right side of their fold's threshold", _videos_and_groups(predictions)
    )
    for label, color in theme.LABEL_COLORS.items():
        scores = predictions.filter(pl.col("label") == label)["score"].to_numpy()
        figure.add_trace(
            go.Histogram(
                x=scores, name=f"{label} (n = {scores.size})", xbins={"start": 0, "end": 1.0001, "size": 0.05},
                marker={"color": theme.translucent(color, 0.6), "line": {"color": color, "width": 1}},
                hovertemplate="score %{x}<br>%{y} videos<extra>" + label + "</extra>",
            )
        )  # fmt: skip
    for threshold in predictions["threshold"].unique().sort():
        figure.add_vline(x=threshold, line={"color": theme.INK, "width": 1, "dash": "dot"})
    figure.update_layout(
        barmode="overlay", legend={"orientation": "h", "y": 1, "yanchor": "bottom", "x": 1, "xanchor": "right"}
    )
    figure.update_xaxes(title_text="Score (probability of fake); dotted: thresholds of the folds", range=[0, 1])
    figure.update_yaxes(title_text="Videos")
    return figure


def calibration_figure(predictions: pl.DataFrame, num_bins: int = 10) -> go.Figure:
    """Share of fakes against mean score, point areas by how many videos a bin has.

    Args:
        predictions: one run's rows of ``tables.PREDICTIONS``.
        num_bins: bins of one width over [0, 1].
    """
    if predictions.is_empty():
        return theme.nothing_to_show("Calibration", "No predictions are recorded.")
    labels, scores = fake_labels(predictions), predictions["score"].to_numpy()
    edges = np.linspace(0.0, 1.0, num_bins + 1)
    bins = reliability_bins(labels, scores, edges)
    error = expected_calibration_error(labels, scores, edges=edges)
    filled = bins.counts > 0
    figure = theme.figure(
        f"A score is off the share of fakes by {error:.2f} on average",
        f"{_videos_and_groups(predictions)}; {filled.sum()} of {num_bins} bins hold videos; "
        "ECE is biased upwards when few do",
    )
    figure.add_trace(_diagonal("Perfectly calibrated"))
    figure.add_trace(
        go.Scatter(
            x=bins.mean_scores[filled], y=bins.fake_shares[filled], mode="markers+lines", name="Model",
            line={"color": theme.MODEL, "width": 1.5},
            marker={
                "color": theme.MODEL, "size": 6 + 18 * np.sqrt(bins.counts[filled] / max(bins.counts.max(), 1)),
                "opacity": 0.85, "line": {"color": "white", "width": 1},
            },
            customdata=bins.counts[filled],
            hovertemplate="mean score %{x:.2f}<br>share of fakes %{y:.2f}<br>%{customdata} videos<extra></extra>",
        )
    )  # fmt: skip
    figure.update_xaxes(title_text="Mean score in the bin (probability of fake)", range=[-0.02, 1.02])
    figure.update_yaxes(title_text="Share of fakes in the bin", range=[-0.04, 1.04])
    figure.update_layout(legend={"x": 0.02, "y": 0.98})
    return figure


def run_comparison_figure(comparison: pl.DataFrame, metric: str = HEADLINE_METRIC) -> go.Figure:
    """The same metric of several runs as points with their intervals.

    Args:
        comparison: rows of ``queries.compare_runs``.
        metric: which of them.
    """
    rows = comparison.filter((pl.col("metric") == metric) & pl.col("value").is_not_null())
    if rows.is_empty():
        return theme.nothing_to_show("Runs compared", f"No chosen run has recorded its {metric_name(metric)}.")
    best = rows.sort("value", descending=True).row(0, named=True)
    finding = (
        f"{best['run_id']} has the highest {metric_name(metric)}, {number_text(best['value'])}"
        if rows.height > 1
        else f"{metric_name(metric)} of one run: {interval_text(best['value'], best['low'], best['high'])}"
    )
    figure = theme.figure(
        finding,
        f"{count_text(rows.height, 'run')}; overlapping bars show no difference; "
        "runs on other folds or data do not compare",
        height=150 + 40 * rows.height,
    )
    for row in rows.iter_rows(named=True):
        score = Score("model", row["value"], row["low"], row["high"])
        label = f"{row['run_id']} ({count_text(row['num_videos'], 'video')}, {count_text(row['num_groups'], 'group')})"
        figure.add_trace(_point(figure_text(label), score, theme.MODEL, hollow=False))
        figure.add_annotation(_value_label(figure_text(label), score))
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_xaxes(title_text=figure_text(metric_name(metric)))
    figure.update_layout(showlegend=False, margin={"r": 170})
    return figure


def fake_labels(predictions: pl.DataFrame) -> npt.NDArray[np.int64]:
    """``label`` as int64 (N,): 1 is fake."""
    return (predictions["label"] == "fake").cast(pl.Int64).to_numpy()


def _tick(score: Score) -> str:
    name = figure_text(source_name(score.source))
    return f"{name}<br><i>not an honest split</i>" if score.source in DISHONEST_CONTROLS else name


def _score_point(score: Score) -> go.Scatter:
    color = theme.MODEL if score.source == "model" else theme.CONTROL
    return _point(_tick(score), score, color, hollow=score.source in DISHONEST_CONTROLS)


def _point(tick: str, score: Score, color: str, *, hollow: bool) -> go.Scatter:
    value = score.value if score.value is not None else float("nan")
    known = score.low is not None and score.high is not None
    bars = {"high": score.high, "low": score.low} if known else {"high": value, "low": value}
    return go.Scatter(
        x=[value], y=[tick], mode="markers", name=tick,
        cliponaxis=False,
        marker={"size": 11, "color": "white" if hollow else color, "line": {"color": color, "width": 2}},
        error_x={
            "type": "data", "symmetric": False, "array": [(bars["high"] or value) - value],
            "arrayminus": [value - (bars["low"] or value)], "color": color, "thickness": 2, "width": 5,
        },
        hovertemplate="%{x:.3f}<extra></extra>",
    )  # fmt: skip


def _stamp(figure: go.Figure, standing: str) -> None:
    """The verdict in words, in its colour, over the column of values."""
    color = STANDING_COLORS[standing]
    figure.add_annotation(
        x=1, xref="paper", y=1, yref="paper", xanchor="left", yanchor="bottom", xshift=14, yshift=6, showarrow=False,
        text=f"<b>{standing}</b>", font={"size": 13, "color": color}, bordercolor=color, borderwidth=1.5, borderpad=4,
    )  # fmt: skip


def _value_label(tick: str, score: Score) -> dict[str, object]:
    """The numbers of a point, in a column right of the plot where no line crosses them."""
    return {
        "x": 1, "xref": "paper", "xanchor": "left", "xshift": 14, "y": tick, "showarrow": False,
        "text": interval_text(score.value, score.low, score.high),
        "font": {"size": 12, "color": theme.MODEL if score.source == "model" else theme.NEUTRAL},
    }  # fmt: skip


def _score_range(scores: Sequence[Score]) -> list[float]:
    """From a little below the lowest value shown to a little above the highest, at least [0.4, 1]."""
    values = [v for s in scores for v in (s.value, s.low, s.high) if v is not None]
    return [min(0.4, *values) - 0.03, max(1.0, *values) + 0.03]


def _band_trace(x: npt.NDArray[np.float64], low: npt.NDArray[np.float64], high: npt.NDArray[np.float64]) -> go.Scatter:
    return go.Scatter(
        x=np.concatenate([x, x[::-1]]), y=np.concatenate([high, low[::-1]]), fill="toself", mode="lines",
        line={"width": 0}, fillcolor=theme.translucent(theme.MODEL, 0.13), name="Interval", hoverinfo="skip",
    )  # fmt: skip


def _diagonal(name: str) -> go.Scatter:
    return go.Scatter(
        x=[0, 1], y=[0, 1], mode="lines", name=name, hoverinfo="skip",
        line={"color": theme.NEUTRAL, "width": 1, "dash": "dash"},
    )  # fmt: skip


def _videos_and_groups(predictions: pl.DataFrame) -> str:
    fakes = int((predictions["label"] == "fake").sum())
    reals = predictions.height - fakes
    groups = count_text(predictions["group_id"].n_unique(), "group")
    return f"n = {count_text(predictions.height, 'video')} ({reals:,} real, {fakes:,} fake) in {groups}"


def _counts(results: pl.DataFrame) -> str:
    rows = results.filter((pl.col("scope") == "all") & (pl.col("source") == "model"))
    rows = rows if rows.height else results.filter(pl.col("scope") == "all")
    num_videos, num_groups = rows.select("num_videos", "num_groups").row(0)
    return f"n = {count_text(num_videos, 'video')} in {count_text(num_groups, 'group')}"
