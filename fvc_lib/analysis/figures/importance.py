"""What a model on features relied on: what it loses without a family, and how its score follows single features."""

import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.read.headline import Score
from fvc_lib.analysis.wording import count_text, figure_text

_COLUMNS, _ROW_PIXELS = 2, 210


def figures_of(families: pl.DataFrame, curves: pl.DataFrame, *, confidence: float = 0.95) -> list[go.Figure]:
    """Those of families and of single features that there are; none of a trunk's features, which have no names."""
    if families.is_empty():
        return []
    return [importance_figure(families, confidence=confidence), dependence_figure(curves)]


def importance_figure(families: pl.DataFrame, *, confidence: float = 0.95) -> go.Figure:
    """``family features auc_lost low high`` as points with bars, the most important first."""
    shown = families.filter(pl.col("low") > 0)["family"].to_list()
    needed = f"Without {', '.join(shown[:3])} the AUC falls" if shown else "No family is shown to be needed by itself"
    figure = theme.figure(
        needed,
        f"Fall of the AUC within folds when a family's values are dealt out anew among the test videos, mean of ten "
        f"dealings; {confidence:.0%} intervals over groups. Families that tell the same stand in for each other",
        height=140 + 34 * families.height,
    )
    scores = [
        (f"{name} ({count_text(number, 'feature')})", Score(name, value, low, high))
        for name, number, value, low, high in families.rows()
    ]
    points = [(theme.interval_point(figure_text(tick), score, theme.MODEL, size=9), score) for tick, score in scores]
    theme.draw_intervals(figure, points, "Family", "Fall of the AUC")
    theme.draw_chance(figure, 0.0)
    return figure


def dependence_figure(curves: pl.DataFrame) -> go.Figure:
    """One panel per feature of ``feature unit fold value score``: the mean over folds, single folds pale behind it."""
    names = curves["feature"].unique(maintain_order=True).to_list()
    if not names:
        return theme.nothing_to_show("Partial dependence", "No feature has a value.")
    rows = -(-len(names) // _COLUMNS)
    grid = make_subplots(rows=rows, cols=min(_COLUMNS, len(names)), vertical_spacing=0.45 / rows if rows > 1 else 0)
    reach = curves.group_by("feature", "value", maintain_order=True).agg(pl.col("score").mean())
    spans = reach.group_by("feature", maintain_order=True).agg(span=pl.col("score").max() - pl.col("score").min())
    widest, span = spans.sort("span", descending=True).row(0)
    figure = theme.figure(
        f"The mean score moves by {span:.2f} with {widest}, and by less with the others shown",
        "Mean score of all test videos with one feature set to a value, from its 5th to its 95th percentile, all else "
        "as it is; pale: single folds. A cause is not shown by it",
        height=120 + _ROW_PIXELS * rows,
    )
    figure.update_layout({name: axis for name, axis in grid.layout.to_plotly_json().items() if "axis" in name})
    for number, name in enumerate(names):
        axis = "" if not number else str(number + 1)
        of, unit = curves.filter(pl.col("feature") == name), curves.filter(pl.col("feature") == name)["unit"][0]
        for key, points in of.group_by("fold", maintain_order=True):
            line = theme.fold_line(int(key[0]), is_first=False)
            figure.add_scatter(
                x=points["value"], y=points["score"], xaxis=f"x{axis}", yaxis=f"y{axis}", hoverinfo="skip", **line
            )
        mean = reach.filter(pl.col("feature") == name)
        figure.add_scatter(
            x=mean["value"], y=mean["score"], xaxis=f"x{axis}", yaxis=f"y{axis}", mode="lines+markers",
            line={"color": theme.MODEL, "width": 2}, marker={"size": 4},
            hovertemplate="%{x:.4g}: %{y:.3f}<extra></extra>",
        )  # fmt: skip
        figure.update_layout(
            {
                f"xaxis{axis}": {"title": {"text": figure_text(f"{name}, {unit}"), "font": {"size": 12}}, "nticks": 5},
                f"yaxis{axis}": {"title": {"text": "Mean score"}, "range": [-0.03, 1.03]},
            }
        )
    return figure.update_layout(showlegend=False)
