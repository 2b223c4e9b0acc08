"""Figures of the data: what the index holds and how the folds came out."""

from __future__ import annotations

import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis import theme
from fvc_lib.analysis.wording import count_text, figure_text

_MOST_BARS = 14
# Above the plot on the left; on the right it would lie under the figure's own buttons.
LEGEND = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "traceorder": "normal"}


def index_overview_figure(counts: pl.DataFrame, by: str) -> go.Figure:
    """Videos by label and one property, widest bars first, rarer values gathered in "other".

    Args:
        counts: rows of ``queries.index_counts``.
        by: what was counted by, in words for the axis.
    """
    if counts.is_empty():
        return theme.nothing_to_show(f"Videos by {by}", "The index has no videos yet.")
    totals = (
        counts.group_by("value").agg(pl.col("num_videos").sum()).sort("num_videos", "value", descending=[True, False])
    )
    kept = totals["value"].head(_MOST_BARS).to_list()
    merged = _gathered(counts, kept)
    order = kept + ([_OTHER] if totals.height > _MOST_BARS else [])
    figure = theme.figure(_index_finding(counts, by), _videos_by_label(counts), height=150 + 34 * len(order))
    for label, color in theme.LABEL_COLORS.items():
        rows = merged.filter(pl.col("label") == label)
        figure.add_trace(
            _bars([figure_text(v) for v in rows["value"]], rows["num_videos"].to_list(), label, color, horizontal=True)
        )
    names = [figure_text(value) for value in reversed(order)]
    figure.update_yaxes(title_text=figure_text(by.capitalize()), showgrid=False, type="category")
    figure.update_yaxes(categoryorder="array", categoryarray=names)
    figure.update_xaxes(title_text="Videos")
    figure.update_layout(barmode="stack", legend=LEGEND)
    return figure


def fold_balance_figure(balance: pl.DataFrame) -> go.Figure:
    """Videos of each outer fold by label.

    Args:
        balance: rows of ``queries.fold_balance``.
    """
    if balance.is_empty():
        return theme.nothing_to_show("Folds", "No folds are recorded yet.")
    folds = balance.pivot("label", index="fold", values="num_videos").fill_null(0).sort("fold")
    shares = [
        row.get("fake", 0) / max(row.get("fake", 0) + row.get("real", 0), 1) for row in folds.iter_rows(named=True)
    ]
    low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
    figure = theme.figure(
        f"Each fold holds {low if low == high else f'{low} to {high}'} fakes",
        f"{_videos_by_label(balance)}; {count_text(folds.height, 'fold')}; numbers on the bars: groups",
        height=340,
    )
    for label, color in theme.LABEL_COLORS.items():
        rows = balance.filter(pl.col("label") == label)
        names = [f"fold {fold}" for fold in rows["fold"]]
        bars = _bars(names, rows["num_videos"].to_list(), label, color, horizontal=False)
        figure.add_trace(bars.update(text=rows["num_groups"].to_list(), textposition="inside", textangle=0))
    figure.update_yaxes(title_text="Videos")
    figure.update_xaxes(showgrid=False, title_text="Outer fold", type="category")
    figure.update_layout(barmode="group", bargap=0.35, legend=LEGEND)
    return figure


_OTHER = "other"


def _gathered(counts: pl.DataFrame, kept: list[str]) -> pl.DataFrame:
    value = pl.when(pl.col("value").is_in(kept)).then("value").otherwise(pl.lit(_OTHER)).alias("value")
    return counts.with_columns(value).group_by("label", "value", maintain_order=True).agg(pl.col("num_videos").sum())


def _index_finding(counts: pl.DataFrame, by: str) -> str:
    """How far the property tells the label: the share of these videos right by guessing its more frequent label.

    A description of the sample, not a test: the metadata-only control is the test.
    """
    per_value = counts.group_by("value").agg(pl.col("num_videos").max().alias("majority"))
    total = int(counts["num_videos"].sum())
    by_value = int(per_value["majority"].sum()) / total
    by_guess = max(counts.group_by("label").agg(pl.col("num_videos").sum())["num_videos"].to_list()) / total
    return f"Knowing the {by} raises a guess of the label from {by_guess:.0%} to {by_value:.0%} of these videos"


def _videos_by_label(counts: pl.DataFrame) -> str:
    totals = dict(counts.group_by("label").agg(pl.col("num_videos").sum()).iter_rows())
    real, fake = totals.get("real", 0), totals.get("fake", 0)
    return f"n = {count_text(real + fake, 'video')} ({real:,} real, {fake:,} fake)"


def _bars(names: list[str], values: list[int], label: str, color: str, *, horizontal: bool) -> go.Bar:
    x, y = (values, names) if horizontal else (names, values)
    shown = "%{y}: %{x}" if horizontal else "%{x}: %{y}"
    return go.Bar(
        x=x, y=y, orientation="h" if horizontal else "v", name=label, marker={"color": color},
        insidetextfont={"color": "white", "size": 11}, hovertemplate=shown + f" videos<extra>{label}</extra>",
    )  # fmt: skip
