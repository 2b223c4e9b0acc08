"""Pairwise differences of runs as points with interval bars around zero.

A dashboard shows ``difference_figure(compare(runs, metric=...))`` and below it the ``lines`` of the same comparison,
which say what was refused and why.
"""

from __future__ import annotations

import math

import plotly.graph_objects as go

from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.read.comparison import Comparison, PairComparison, difference_text, p_text
from fvc_lib.analysis.wording import count_text, figure_text, metric_name
from fvc_lib.metrics.cross_validation import LOWER_IS_BETTER

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
        "below 0: the second is better" if comparison.metric in LOWER_IS_BETTER else "above 0: the second is better"
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
