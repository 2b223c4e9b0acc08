"""Figures of a result: the model beside its controls and beside other runs, and how its scores lie."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis import theme
from fvc_lib.analysis.figure_parts import interval_point, value_label, videos_and_groups
from fvc_lib.analysis.headline import DISHONEST_CONTROLS, HEADLINE_METRIC, Score, judge, overall_scores
from fvc_lib.analysis.result_tables import LOWER_IS_BETTER
from fvc_lib.analysis.wording import (
    count_text,
    figure_text,
    interval_text,
    metric_name,
    number_text,
    source_name,
)


def controls_figure(
    results: pl.DataFrame, metric: str = HEADLINE_METRIC, *, confidence: float = 0.95, leaks: Sequence[str] = ()
) -> go.Figure:
    """The model's number and its controls' as points with interval bars: the first figure of a report.

    Args:
        results: one run's rows of ``tables.RESULTS``.
        metric: the metric compared; its chance line at 0.5 is drawn for the AUC and balanced accuracy.
        confidence: the coverage the intervals were made with, for the subtitle.
        leaks: findings of the run's leakage audit that did not pass, where it is known already.
    """
    scores = [score for score in overall_scores(results, metric) if score.value is not None]
    if not scores:
        return theme.nothing_to_show("Model and controls", f"No {metric_name(metric)} over all folds is recorded.")
    verdict = judge(scores, leaks) if metric == HEADLINE_METRIC else None
    figure = theme.figure(
        verdict.sentence if verdict else f"{metric_name(metric)} of the model beside its controls",
        f"{_counts(results)}; bars: {confidence:.0%} cluster-bootstrap intervals over groups",
        height=150 + 44 * len(scores),
    )
    for score in scores:
        figure.add_trace(_score_point(score))
        figure.add_annotation(value_label(_tick(score), score))
    if metric in {"roc_auc", "balanced_accuracy"}:
        figure.add_vline(x=0.5, line={"color": theme.NEUTRAL, "width": 1, "dash": "dash"}, layer="below")
        small = {"size": 11, "color": theme.NEUTRAL}
        figure.add_annotation(x=0.5, y=1, yref="paper", yanchor="bottom", text="chance", showarrow=False, font=small)
    if verdict:
        _stamp(figure, verdict.standing)
    figure.update_yaxes(categoryorder="array", categoryarray=[_tick(s) for s in reversed(scores)], showgrid=False)
    figure.update_yaxes(title_text="Scored by")
    figure.update_xaxes(title_text=figure_text(metric_name(metric)), range=_score_range(scores))
    figure.update_layout(showlegend=False, margin={"r": 170})
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
        f"{share:.0%} of the videos fall on the right side of their fold's threshold", videos_and_groups(predictions)
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


def run_comparison_figure(comparison: pl.DataFrame, metric: str = HEADLINE_METRIC) -> go.Figure:
    """The same metric of several runs as points with their intervals.

    Args:
        comparison: rows of ``queries.compare_runs``.
        metric: which of them.
    """
    rows = comparison.filter((pl.col("metric") == metric) & pl.col("value").is_not_null())
    if rows.is_empty():
        return theme.nothing_to_show("Runs compared", f"No chosen run has recorded its {metric_name(metric)}.")
    is_lower_better = metric in LOWER_IS_BETTER
    best = rows.sort("value", descending=not is_lower_better).row(0, named=True)
    finding = (
        f"{best['run_id']} has the {'lowest' if is_lower_better else 'highest'} {metric_name(metric)}, "
        f"{number_text(best['value'])}"
        if rows.height > 1
        else f"{metric_name(metric)} of one run: {interval_text(best['value'], best['low'], best['high'])}"
    )
    figure = theme.figure(
        finding,
        f"n = {count_text(rows.height, 'run')}; how bars overlap does not tell whether a difference is one, the "
        "pairwise comparison does; the best of many runs is partly luck; runs on other folds or data do not compare",
        height=150 + 40 * rows.height,
    )
    for row in rows.iter_rows(named=True):
        score = Score("model", row["value"], row["low"], row["high"])
        label = f"{row['run_id']} ({count_text(row['num_videos'], 'video')}, {count_text(row['num_groups'], 'group')})"
        figure.add_trace(interval_point(figure_text(label), score, theme.MODEL))
        figure.add_annotation(value_label(figure_text(label), score))
    figure.update_yaxes(title_text="Run", autorange="reversed", showgrid=False, type="category")
    figure.update_xaxes(title_text=figure_text(metric_name(metric)))
    figure.update_layout(showlegend=False, margin={"r": 170})
    return figure


def _tick(score: Score) -> str:
    name = figure_text(source_name(score.source))
    return f"{name}<br><i>not an honest split</i>" if score.source in DISHONEST_CONTROLS else name


def _score_point(score: Score) -> go.Scatter:
    color = theme.MODEL if score.source == "model" else theme.CONTROL
    return interval_point(_tick(score), score, color, hollow=score.source in DISHONEST_CONTROLS)


def _stamp(figure: go.Figure, standing: str) -> None:
    """The verdict in words, in its colour, over the column of values."""
    color = theme.STANDING_COLORS[standing]
    figure.add_annotation(
        x=1, xref="paper", y=1, yref="paper", xanchor="left", yanchor="bottom", xshift=14, yshift=6, showarrow=False,
        text=f"<b>{standing}</b>", font={"size": 13, "color": color}, bordercolor=color, borderwidth=1.5, borderpad=4,
    )  # fmt: skip


def _score_range(scores: Sequence[Score]) -> list[float]:
    """From a little below the lowest value shown to a little above the highest, at least [0.4, 1]."""
    values = [v for s in scores for v in (s.value, s.low, s.high) if v is not None]
    return [min(0.4, *values) - 0.03, max(1.0, *values) + 0.03]


def _counts(results: pl.DataFrame) -> str:
    rows = results.filter((pl.col("scope") == "all") & (pl.col("source") == "model"))
    rows = rows if rows.height else results.filter(pl.col("scope") == "all")
    num_videos, num_groups = rows.select("num_videos", "num_groups").row(0)
    return f"n = {count_text(num_videos, 'video')} in {count_text(num_groups, 'group')}"
