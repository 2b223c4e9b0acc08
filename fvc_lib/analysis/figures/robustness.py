"""How a detector stands disturbed videos: every level, worst first, and the course over each kind's levels."""

from collections.abc import Sequence

import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis.figures.theme import (
    CONTROL,
    MODEL,
    NEUTRAL,
    draw_chance,
    draw_intervals,
    figure,
    interval_point,
    nothing_to_show,
    range_of,
    series_style,
)
from fvc_lib.analysis.read.headline import Score
from fvc_lib.analysis.read.robustness import MAIN_METRIC, UNDISTURBED
from fvc_lib.analysis.wording import count_text, figure_text, metric_name

_WITHOUT_STRENGTH = ("trim",)  # its levels differ in where, not in how much


def levels_figure(results: pl.DataFrame, *, confidence: float = 0.95) -> go.Figure:
    """ROC AUC of each level of ROBUSTNESS_RESULTS with its interval, worst first, undisturbed at the top."""
    main, name = results.filter(metric=MAIN_METRIC), metric_name(MAIN_METRIC)
    known = main.drop_nulls("value")
    if known.height < 2:
        return nothing_to_show(f"{name} by level", "No level has been scored.")
    rows = known.to_dicts()
    before = next((row for row in rows if row["level"] == UNDISTURBED), rows[0])
    worst = next(row for row in rows if row["level"] != UNDISTURBED)
    drawn = figure(
        f"Worst is {worst['kind']}, {worst['strength']}: {name} {worst['value']:.3f}, undisturbed "
        f"{before['value']:.3f}",
        f"{count_text(before['num_videos'], 'video')} in {count_text(before['num_groups'], 'group')}; bars: "
        f"{confidence:.0%} intervals over groups; hollow: undisturbed; line: its value",
        height=130 + 38 * len(rows),
    )
    points = []
    for row in rows:
        plain = row["level"] == UNDISTURBED
        score = Score(MAIN_METRIC, row["value"], row["low"], row["high"])
        tick = UNDISTURBED if plain else f"{row['kind']}, {row['strength']}"
        points.append((interval_point(figure_text(tick), score, MODEL, hollow=plain), score))
    shown = range_of([score for _, score in points], 0.5)
    draw_intervals(drawn, points, "", name, shown)
    draw_chance(drawn, 0.5)
    drawn.add_vline(x=before["value"], line={"color": NEUTRAL, "width": 1}, layer="below")
    return drawn


def curves_figure(results: pl.DataFrame, order: Sequence[str], *, confidence: float = 0.95) -> go.Figure:
    """ROC AUC over the levels of each kind that has several, from undisturbed to the strongest.

    ``order`` has all levels, of each kind from mild to strong, as ROBUSTNESS has them.
    """
    main, name = results.filter(metric=MAIN_METRIC).drop_nulls("value"), metric_name(MAIN_METRIC)
    before = main.filter(level=UNDISTURBED).to_dicts()
    courses = {
        str(kind): of_kind.sort("place").to_dicts()
        for (kind,), of_kind in main.filter(pl.col("level") != UNDISTURBED)
        .with_columns(place=pl.col("level").replace_strict({each: number for number, each in enumerate(order)}))
        .group_by("kind", maintain_order=True)
        if of_kind.height > 1 and kind not in _WITHOUT_STRENGTH
    }
    if not before or not courses:
        return nothing_to_show(f"{name} by strength", "No kind of disturbance has two levels.")
    fall = {kind: before[0]["value"] - course[-1]["value"] for kind, course in courses.items()}
    steepest = max(fall, key=lambda kind: fall[kind])
    drawn = figure(
        f"From undisturbed to the strongest level {name} changes most with {steepest}: {-fall[steepest]:+.3f}",
        f"Bars: {confidence:.0%} intervals over groups; steps are the stated levels of each kind, not a common scale",
        height=420,
    )
    for number, (kind, course) in enumerate(sorted(courses.items())):
        color, dash = series_style(number)
        rows = [before[0], *course]
        drawn.add_trace(
            go.Scatter(
                # Beside each other, so that no bar hides another.
                x=[place + 0.06 * (number - len(courses) / 2) for place in range(len(rows))],
                y=[row["value"] for row in rows],
                mode="lines+markers", name=figure_text(kind), line={"color": color, "dash": dash, "width": 2},
                text=[figure_text(row["strength"]) for row in rows],
                hovertemplate="%{text}: %{y:.3f}<extra>" + figure_text(kind) + "</extra>",
                error_y={
                    "type": "data", "symmetric": False, "color": color, "width": 3, "thickness": 1,
                    "array": [(row["high"] or row["value"]) - row["value"] for row in rows],
                    "arrayminus": [row["value"] - (row["low"] or row["value"]) for row in rows],
                },
            )
        )  # fmt: skip
    steps = max(map(len, courses.values()))
    drawn.update_xaxes(
        title_text="Level", tickvals=list(range(steps + 1)), ticktext=["none", *map(str, range(1, steps + 1))]
    )
    drawn.update_yaxes(title_text=name)
    drawn.add_hline(y=0.5, line={"color": CONTROL, "width": 1, "dash": "dash"}, layer="below")
    return drawn.update_layout(legend={"orientation": "h", "y": -0.22, "x": 0})
