"""Pairwise differences of runs as points with interval bars around zero.

A dashboard shows ``difference_figure(compare(runs, metric=...))`` and below it the ``lines`` of the same comparison,
which say what was refused and why.
"""

from __future__ import annotations

import math
from functools import lru_cache

import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis.dashboard.panels import NOTHING, PANELS, TABLES, Selection, Shown, runs_alike, stamps
from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.pages.display import HtmlTable
from fvc_lib.analysis.read.comparison import Comparison, PairComparison, compare, difference_text, lines, p_text
from fvc_lib.analysis.read.queries import parameter_differences
from fvc_lib.analysis.read.records import run_names
from fvc_lib.analysis.wording import count_text, figure_text, metric_name
from fvc_lib.metrics.declaration import direction
from fvc_lib.services.atomic_files import path_to_text
from fvc_lib.services.run_paths import RunPaths

_MOST_PAIRS = 20  # beyond that a chart is no longer read; the table has all


def difference_figure(comparison: Comparison) -> go.Figure:
    """Each pair's difference with its interval; filled where a difference is shown, hollow where none is.

    Args:
        comparison: of ``compare``; without a pair the figure says why in words.
    """
    name = metric_name(comparison.metric)
    if not comparison.pairs:
        # A reason may end with a command, after which the next must not seem to go on.
        reasons = " | ".join(refusal.reason for refusal in comparison.refusals)
        return theme.nothing_to_show(f"Differences in {name}", reasons or "Choose two or more runs.")
    pairs = comparison.pairs[:_MOST_PAIRS]
    figure = theme.figure(_finding(comparison), _subtitle(comparison, len(pairs)), height=170 + 46 * len(pairs))
    for pair in pairs:
        figure.add_trace(_point(pair))
        figure.add_annotation(_label(pair))
    figure.add_vline(x=0, line={"color": theme.NEUTRAL, "width": 1, "dash": "dash"})
    better = (
        "below 0: the second is better" if direction(comparison.metric) == "lower" else "above 0: the second is better"
    )
    figure.update_xaxes(title_text=figure_text(f"{name}, second run minus first ({better})"), range=_range(pairs))
    ticks = [_tick(pair) for pair in reversed(pairs)]
    figure.update_yaxes(title_text="Pair of runs", categoryorder="array", categoryarray=ticks, showgrid=False)
    figure.update_layout(showlegend=False, margin={"r": 270})
    return figure


def _finding(comparison: Comparison) -> str:
    if len(comparison.pairs) == 1:
        return comparison.pairs[0].finding
    shown = sum(pair.is_shown for pair in comparison.pairs)
    what = (
        f"of {count_text(len(comparison.pairs), 'pair')} of runs show a difference in {metric_name(comparison.metric)}"
    )
    return f"{shown or 'None'} {what}"


def _subtitle(comparison: Comparison, num_shown: int) -> str:
    sizes = sorted({(pair.difference.num_rows, pair.difference.num_groups) for pair in comparison.pairs})
    parts = [f"n = {count_text(rows, 'video')} in {count_text(groups, 'group')}" for rows, groups in sizes]
    parts.append(f"bars: {comparison.confidence:.0%} cluster bootstrap over groups, same draws for both runs")
    parts.append("p adjusted for all pairs (Holm)")
    if num_shown < len(comparison.pairs):
        parts.append(f"the first {num_shown} of {len(comparison.pairs)} pairs")
    if comparison.refusals:
        parts.append(f"{count_text(len(comparison.refusals), 'refusal')}, told below")
    return "; ".join(parts)


def _tick(pair: PairComparison) -> str:
    return f"{figure_text(pair.second)}<br>minus {figure_text(pair.first)}"


def _point(pair: PairComparison) -> go.Scatter:
    value, low, high = pair.difference.value, pair.difference.low, pair.difference.high
    color = theme.MODEL if pair.is_shown else theme.NEUTRAL
    ends = (high - value, value - low) if math.isfinite(low) and math.isfinite(high) else (0.0, 0.0)
    return go.Scatter(
        x=[value if math.isfinite(value) else None], y=[_tick(pair)], mode="markers", cliponaxis=False,
        marker={"size": 11, "color": color if pair.is_shown else "white", "line": {"color": color, "width": 2}},
        error_x={
            "type": "data", "symmetric": False, "array": [ends[0]], "arrayminus": [ends[1]],
            "color": color, "thickness": 2, "width": 5,
        },
        hovertemplate="%{x:+.3f}<extra></extra>",
    )  # fmt: skip


def _label(pair: PairComparison) -> dict[str, object]:
    """The numbers in a column right of the plot, where no bar crosses them."""
    return {
        "x": 1, "xref": "paper", "xanchor": "left", "xshift": 14, "y": _tick(pair), "showarrow": False, "align": "left",
        "text": figure_text(f"{difference_text(pair)}, Holm p {p_text(pair.holm_p_value)}"),
        "font": {"size": 12, "color": theme.MODEL if pair.is_shown else theme.NEUTRAL},
    }  # fmt: skip


def _range(pairs: tuple[PairComparison, ...]) -> list[float]:
    """Around zero, so that how far a bar lies from it is seen."""
    ends = [end for pair in pairs for end in (pair.difference.value, pair.difference.low, pair.difference.high)]
    reach = max([abs(end) for end in ends if math.isfinite(end)], default=0.0) or 0.01
    return [-1.1 * reach, 1.1 * reach]


# --- Panels of the dashboard


_REPLICATES = 1000


@PANELS.register_panel("parameters", at=72, follows=("runs",), reads=("params.yaml",))
def _parameters_panel(selection: Selection) -> Shown:
    """A row for each parameter that differs, a column for each run; where several differ no result has one cause.

    Of runs of one task: what another task is asked differs in nearly everything.
    """
    runs = runs_alike(selection)
    if len(runs) < 2:
        return NOTHING
    differing = parameter_differences(runs).frame
    beside = "chosen runs" if len(runs) == len(selection.runs) else "chosen runs of this task"
    if differing.is_empty():
        return f"Parameters of the {len(runs)} {beside}: no difference."
    columns = [f"run {number}" for number in range(len(runs))]  # not their ids: a copy has the same
    grouped = differing.group_by("parameter", maintain_order=True).agg("value", pl.col("changes_numbers").first())
    values = [pl.col("value").list.get(number).alias(name) for number, name in enumerate(columns)]
    names = dict(zip(columns, map(path_to_text, run_names(runs)), strict=True))
    table = grouped.select("parameter", *values, "changes_numbers")
    verb = "differs" if table.height == 1 else "differ"
    caption = f"{count_text(table.height, 'parameter')} {verb} between the {len(columns)} {beside}"
    return HtmlTable(table, caption=caption, names={**names, "changes_numbers": "Can change a number"})


@PANELS.register_panel("comparison", at=73, follows=("runs",), tasks=("video",))
def _difference_panel(selection: Selection) -> Shown:
    return difference_figure(_compared(selection))


@PANELS.register_panel("comparison in words", at=74, follows=("runs",), tasks=("video",))
def _words_panel(selection: Selection) -> Shown:
    compared = _compared(selection)
    # Without a pair the figure itself says why there is none.
    return "\n".join(lines(compared)) if compared.pairs else NOTHING


def _compared(selection: Selection) -> Comparison:
    return _comparison(selection.runs, tuple(stamp for run in selection.runs for stamp in stamps(run, TABLES)))


@lru_cache(maxsize=4)
def _comparison(runs: tuple[RunPaths, ...], files: tuple[object, ...]) -> Comparison:
    """Of ``runs`` as their files are now; asked for by two panels."""
    del files
    return compare(runs, replicates=_REPLICATES)
