"""Every metric of the model in one figure: a vote for each video, and a vote for each group."""

from __future__ import annotations

import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis import theme
from fvc_lib.analysis.figure_parts import interval_point
from fvc_lib.analysis.headline import Score
from fvc_lib.analysis.result_tables import BY_GROUP, BY_VIDEO, LOWER_IS_BETTER, UNCALIBRATED
from fvc_lib.analysis.wording import count_text, figure_text, metric_name

_VOTES = (
    (BY_VIDEO, "a vote for each video", theme.MODEL, False),
    (BY_GROUP, "a vote for each group", theme.REAL, True),
)
_NO_GAP = 0.0005  # less than the digits that are shown
_ASIDE = 0.14  # of a row's height: so far each kind of vote is from its middle


def metrics_figure(results: pl.DataFrame, *, confidence: float = 0.95) -> go.Figure:
    """The model's metrics over all folds as points with intervals, weighted in both ways.

    A large group of copies counts once when groups vote: where the two differ much, a few groups make the result.

    Args:
        results: one run's rows of ``tables.RESULTS``.
        confidence: coverage of the intervals, for the subtitle.
    """
    rows = results.filter((pl.col("source") == "model") & pl.col("scope").is_in([BY_VIDEO, BY_GROUP]))
    rows = rows.filter(pl.col("value").is_not_null() & ~pl.col("metric").is_in(UNCALIBRATED))
    if rows.is_empty():
        return theme.nothing_to_show("Every metric", "No metric over all folds is recorded.")
    metrics = rows["metric"].unique(maintain_order=True).to_list()
    figure = theme.figure(_finding(rows), _subtitle(rows, confidence), height=170 + 38 * len(metrics))
    for (scope, name, color, hollow), aside in zip(_VOTES, (-_ASIDE, _ASIDE), strict=True):
        for position, metric in enumerate(metrics):
            row = rows.filter((pl.col("scope") == scope) & (pl.col("metric") == metric))
            if row.is_empty():
                continue
            score = Score("model", *row.select("value", "low", "high").row(0))
            point = interval_point(name, score, color, hollow=hollow, size=9)
            point.update(y=[position + aside], legendgroup=scope, showlegend=position == 0)
            point.hovertemplate = f"{_tick(metric)}, {name}: %{{x:.3f}}<extra></extra>"
            figure.add_trace(point)
    figure.update_layout(legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1, "yanchor": "bottom"})
    figure.update_yaxes(title_text="Metric", range=[len(metrics) - 0.45, -0.55], showgrid=False)
    figure.update_yaxes(tickvals=list(range(len(metrics))), ticktext=[_tick(metric) for metric in metrics])
    lowest = min(0.0, *(v for v in (*rows["value"], *rows["low"]) if v is not None))
    figure.update_xaxes(title_text="Value (no unit)", range=[lowest - 0.02, 1.02])
    return figure


def _tick(metric: str) -> str:
    return f"{figure_text(metric_name(metric))}{' (lower is better)' if metric in LOWER_IS_BETTER else ''}"


def _finding(rows: pl.DataFrame) -> str:
    both = rows.pivot("scope", index="metric", values="value")
    if BY_GROUP not in both.columns or BY_VIDEO not in both.columns:
        return "Every metric over all folds, a vote for each video"
    both = both.with_columns(gap=(pl.col(BY_GROUP) - pl.col(BY_VIDEO)).abs()).drop_nulls().sort("gap", descending=True)
    if both.is_empty():
        return "No metric is defined both by video and by group"
    most = both.row(0, named=True)
    if most["gap"] < _NO_GAP:
        return f"Counting groups instead of videos changes none of {count_text(both.height, 'metric')}"
    return (
        f"Counting groups instead of videos moves {metric_name(most['metric'])} most, by {most['gap']:.3f} "
        f"to {most[BY_GROUP]:.3f}"
    )


def _subtitle(rows: pl.DataFrame, confidence: float) -> str:
    num_videos, num_groups = rows.select("num_videos", "num_groups").row(0)
    counted = f"n = {count_text(num_videos, 'video')} in {count_text(num_groups, 'group')}"
    return f"{counted}; bars: {confidence:.0%} cluster-bootstrap intervals over groups"
