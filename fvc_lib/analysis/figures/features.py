"""Figures of forensic features: how each family's values are spread over real and over fake videos, what a model on
them loses without a family, and how its score follows single features.
"""

from collections.abc import Mapping

import numpy as np
import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.read.feature_ties import auc_interval
from fvc_lib.analysis.read.headline import Score
from fvc_lib.analysis.wording import count_text, figure_text, interval_text

_COLUMNS, _ROW_PIXELS, _CURVE_PIXELS = 2, 170, 210  # two, so that names do not meet on a telephone


def family_figure(features: pl.DataFrame, family: str, columns: Mapping[str, tuple[str, str]]) -> go.Figure:
    """One family's features in real and in fake videos, each in a box of quartiles with ends at 5 and 95 of 100.

    Args:
        features: the table of features.
        family: its name.
        columns: by column of the table the feature's name and unit.
    """
    shown = {column: said for column, said in columns.items() if features[column].drop_nulls().len()}
    if not shown:
        return theme.nothing_to_show(family, "No video has a value of this family.")
    found = {column: auc_interval(features[column], features["label"], features["group_id"]) for column in shown}
    told = {column: auc for column, auc in found.items() if auc is not None}
    finding = f"{family}: no feature can be compared, one of the labels has no value"
    if told:
        best = max(told, key=lambda column: abs(told[column][0] - 0.5))
        finding = (
            f"{family}: real and fake videos differ most in {shown[best][0]}, {_side(told[best][0])} in fakes, AUC "
            f"{interval_text(*told[best])}, the largest of {len(told)}"
        )
    known = features.filter(pl.any_horizontal(pl.col(list(shown)).is_not_null()))
    rows = -(-len(shown) // _COLUMNS)
    grid = make_subplots(rows=rows, cols=min(_COLUMNS, len(shown)), vertical_spacing=0.5 / rows if rows > 1 else 0)
    figure = theme.figure(
        finding, f"{theme.videos_and_groups(known)}; means over a video", height=110 + _ROW_PIXELS * rows
    )
    figure.update_layout({name: axis for name, axis in grid.layout.to_plotly_json().items() if "axis" in name})
    for number, (column, (name, unit)) in enumerate(shown.items()):
        axis = "" if not number else str(number + 1)
        for label, color in theme.LABEL_COLORS.items():
            values = features.filter(pl.col("label") == label)[column].drop_nulls().to_numpy()
            if values.size:
                figure.add_trace(_box(values, label, color, axis))
        figure.update_layout(
            {
                f"xaxis{axis}": {
                    "title": {"text": f"{figure_text(name)}<br>{figure_text(unit)}", "font": {"size": 12}},
                    "nticks": 4,
                    "tickangle": 0,
                },
                f"yaxis{axis}": {
                    "showgrid": False,
                    "type": "category",
                    "autorange": "reversed",
                    "showticklabels": number % _COLUMNS == 0,
                },
            }
        )
    return figure.update_layout(showlegend=False)


def _side(auc: float) -> str:
    return "higher" if auc > 0.5 else "lower"


def _box(values: np.ndarray, label: str, color: str, axis: str) -> go.Box:
    low, first, middle, third, high = np.quantile(values.astype(np.float64), [0.05, 0.25, 0.5, 0.75, 0.95]).tolist()
    return go.Box(
        y=[label], q1=[first], median=[middle], q3=[third], lowerfence=[low], upperfence=[high], orientation="h",
        name=label, line={"color": color}, fillcolor=theme.translucent(color, 0.25), xaxis=f"x{axis}", yaxis=f"y{axis}",
        whiskerwidth=0.5, hoverinfo="x",
    )  # fmt: skip


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
        height=120 + _CURVE_PIXELS * rows,
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
