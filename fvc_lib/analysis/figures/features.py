"""Figures of forensic features: how each family's values are spread over real and over fake videos."""

from collections.abc import Mapping

import numpy as np
import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.read.feature_ties import auc_interval
from fvc_lib.analysis.wording import figure_text, interval_text

_COLUMNS, _ROW_PIXELS = 2, 170  # two, so that names do not meet on a telephone


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
