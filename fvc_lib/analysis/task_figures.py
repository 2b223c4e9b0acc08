"""What figures of the tasks image and video_text share: a model's numbers, each beside its best control."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis import theme
from fvc_lib.analysis.figure_parts import interval_point, value_label
from fvc_lib.analysis.headline_measure import MeasuredScores, Score
from fvc_lib.analysis.metric_direction import direction
from fvc_lib.analysis.wording import count_text, figure_text, interval_text, metric_name, source_name, subject_name

_LOWEST_DRAWN = -1.0  # what is below stands at the edge; its number is beside it
_MOST_CHARACTERS = 40  # of a name on the axis


def beside_controls_figure(
    results: pl.DataFrame, shown: Sequence[tuple[str, str]], *, counted: tuple[str, str], confidence: float = 0.95
) -> go.Figure:
    """Numbers without a unit as points with intervals, and below each in grey what the best control reaches.

    Args:
        results: rows of ``task_tables.TASK_RESULTS``.
        shown: subject and metric of each row; those that are not recorded are left out. Higher must be better.
        counted: what was judged, in the singular and in the plural, for the n.
        confidence: coverage of the intervals.
    """
    rows = [row for each in shown if (row := _row(results, *each)) is not None]
    if not rows:
        return theme.nothing_to_show("The model beside its controls", "None of these numbers is recorded.")
    scores = [each for name, model, control in rows for each in _named(name, model, control)]
    figure = theme.figure(_finding(rows), _subtitle(results, shown, counted, confidence), height=150 + 36 * len(scores))
    for tick, score in scores:
        is_model = score.source == "model"
        color = theme.MODEL if is_model else theme.CONTROL
        figure.add_trace(interval_point(tick, _drawn(score), color, size=11 if is_model else 9))
        figure.add_annotation(value_label(tick, score))
    ticks = [tick for tick, _ in scores]
    figure.update_yaxes(title_text="Metric", categoryorder="array", categoryarray=ticks[::-1], showgrid=False)
    known = [v for _, s in scores for v in (_drawn(s).value, _drawn(s).low, s.high) if v is not None]
    figure.update_xaxes(title_text="Value (no unit)", range=[min(0.0, *known) - 0.03, max(1.0, *known) + 0.03])
    figure.update_layout(showlegend=False, margin={"r": 170})
    return figure


def runs_beside_controls_figure(
    runs: Sequence[tuple[str, MeasuredScores]], *, num_left_out: int = 0, confidence: float = 0.95
) -> go.Figure:
    """The one number of several runs of a task, and below each in grey what its best control reaches.

    Args:
        runs: what each run is called, and its scores; those of another measure than the first's are left out.
        num_left_out: chosen runs that are of other tasks, for the subtitle.
        confidence: coverage of the intervals.
    """
    scored = [
        (name, found) for name, found in runs if any(s.source == "model" and s.value is not None for s in found.scores)
    ]
    if not scored:
        return theme.nothing_to_show("Runs compared", "No chosen run of this task has recorded a result yet.")
    measure = scored[0][1].measure.name
    alike = [(name, found) for name, found in scored if found.measure.name == measure]
    rows = [row for name, found in alike for row in _of_run(name, found)]
    left = num_left_out + len(runs) - len(alike)
    beside = f"; {count_text(left, 'chosen run')} without it or of another task left out" if left else ""
    best_name, best = max(alike, key=lambda each: each[1].scores[0].value or 0.0)
    value = interval_text(best.scores[0].value, best.scores[0].low, best.scores[0].high)
    finding = f"{best_name} has the highest {measure}, {value}" if len(alike) > 1 else f"{measure} of one run: {value}"
    figure = theme.figure(
        finding,
        f"n = {count_text(len(alike), 'run')}; bars: {confidence:.0%} intervals; how they overlap does not tell "
        f"whether a difference is one; the best of many runs is partly luck{beside}",
        height=150 + 36 * len(rows),
    )
    for tick, score in rows:
        is_model = score.source == "model"
        figure.add_trace(
            interval_point(tick, score, theme.MODEL if is_model else theme.CONTROL, size=11 if is_model else 9)
        )
        figure.add_annotation(value_label(tick, score))
    figure.update_yaxes(title_text="Run", autorange="reversed", showgrid=False, type="category")
    known = [v for _, s in rows for v in (s.value, s.low, s.high) if v is not None]
    figure.update_xaxes(title_text=figure_text(measure), range=[min(0.0, *known) - 0.03, max(1.0, *known) + 0.03])
    figure.update_layout(showlegend=False, margin={"r": 170})
    return figure


def best_control(results: pl.DataFrame, subject: str, metric: str) -> Score | None:
    """The control with the best value of ``metric``; None where there is none."""
    found = results.filter(pl.col("subject") == subject, pl.col("metric") == metric, pl.col("source") != "model")
    found = found.drop_nulls("value").sort("value", "source", descending=[direction(metric) == "higher", False])
    return Score(*found.select("source", "value", "low", "high").row(0)) if found.height else None


def model_score(results: pl.DataFrame, subject: str, metric: str) -> Score | None:
    """The model's ``metric``; None where it is not recorded or not defined."""
    found = results.filter(pl.col("subject") == subject, pl.col("metric") == metric, pl.col("source") == "model")
    found = found.drop_nulls("value")
    return Score(*found.select("source", "value", "low", "high").row(0)) if found.height else None


def _row(results: pl.DataFrame, subject: str, metric: str) -> tuple[str, Score, Score | None] | None:
    model = model_score(results, subject, metric)
    if model is None:
        return None
    named = metric_name(metric)
    return (
        named if subject == "all" else f"{named}, {subject_name(subject)}",
        model,
        best_control(results, subject, metric),
    )


def _finding(rows: Sequence[tuple[str, Score, Score | None]]) -> str:
    name, model, control = rows[0]
    told = f"{name} is {interval_text(model.value, model.low, model.high)}"
    return f"{told}; {_control_text(control)}" if control else f"{told}, without a control beside it"


def _control_text(control: Score) -> str:
    return f"{source_name(control.source).lower()} reaches {interval_text(control.value, control.low, control.high)}"


def _is_scored(found: MeasuredScores) -> bool:
    return bool(found.scores) and found.scores[0].source == "model" and found.scores[0].value is not None


def _of_run(name: str, found: MeasuredScores) -> list[tuple[str, Score]]:
    """A run's own score and its best control's, each with what stands on the axis."""
    model = found.scores[0]
    shown = figure_text(name)
    counted = f"{count_text(found.num_samples or 0, found.measure.one)}, {count_text(found.num_groups or 0, 'group')}"
    rows = [(f"{shown}<br>{counted}", _drawn(model))]
    controls = [score for score in found.scores[1:] if score.value is not None]
    if controls:
        best = max(controls, key=lambda score: score.value or 0.0)
        rows.append((f"<i>{figure_text(source_name(best.source).lower())}<br>of {shown}</i>", _drawn(best)))
    return rows


def _drawn(score: Score) -> Score:
    """Where ``score`` is drawn: an R² has no lower end, and one far below 0 would leave the others no room."""
    value, low = (None if end is None else max(end, _LOWEST_DRAWN) for end in (score.value, score.low))
    return Score(score.source, value, low, score.high if score.high is None else max(score.high, _LOWEST_DRAWN))


def _subtitle(
    results: pl.DataFrame, shown: Sequence[tuple[str, str]], counted: tuple[str, str], confidence: float
) -> str:
    subject, metric = next(each for each in shown if model_score(results, *each) is not None)
    of_it = (pl.col("subject") == subject) & (pl.col("metric") == metric) & (pl.col("source") == "model")
    num_samples, num_groups = results.filter(of_it).select("num_samples", "num_groups").row(0)
    told = f"n = {count_text(num_samples, *counted)} of the test part in {count_text(num_groups, 'group')}"
    return f"{told}; bars: {confidence:.0%} cluster-bootstrap intervals over groups"


def _named(name: str, model: Score, control: Score | None) -> list[tuple[str, Score]]:
    """What stands on the axis beside the model's number, and beside its best control's."""
    shown = figure_text(name if len(name) <= _MOST_CHARACTERS else f"{name[: _MOST_CHARACTERS - 1]}…")
    if control is None:
        return [(shown, model)]
    return [(shown, model), (f"<i>{shown}, {figure_text(source_name(control.source).lower())}</i>", control)]
