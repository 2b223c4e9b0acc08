"""Figures of a run while and after it trains: learning curves, and the time of its stages."""

import re
from typing import Any

import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from fvc_lib.analysis.dashboard.panels import METRICS, MOST_METRICS, NOTHING, PANELS, Selection, Shown
from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.figures.theme import of_fold
from fvc_lib.analysis.read.queries import learning_curves, memory_samples
from fvc_lib.analysis.read.records import NOT_ENDED, run_status, shown_state
from fvc_lib.analysis.read.sql import ask
from fvc_lib.analysis.wording import clean_text, count_text, duration_text, figure_text, metric_name, number_text
from fvc_lib.metrics.declaration import is_share
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tasks import TASK_OF_STAGE

_PANELS_PER_ROW = 3
_SMALL = 7  # up to here a curve shows its points too


def learning_curves_figure(curves: pl.DataFrame, metric: str = "loss", *, smoothing: float = 0.0) -> go.Figure:
    """One small panel per fold (and run) of ``queries.learning_curves``, all on one scale: train and validation.

    ``smoothing`` 0 draws what was logged; towards 1 an exponential mean over ever more points, over a pale original.
    """
    rows = curves.filter((pl.col("metric") == metric) & pl.col("value").is_not_null())
    if rows.is_empty():
        return theme.nothing_to_show(f"Learning curves of {metric_name(metric)}", "No value of it has been logged yet.")
    name = _curve_name(rows, metric)
    panels = rows.select("run_id", "stage", "fold").unique(maintain_order=True)
    columns = min(_PANELS_PER_ROW, panels.height)
    num_rows = -(-panels.height // columns)
    height = 170 + 190 * num_rows
    figure = make_subplots(
        rows=num_rows, cols=columns, shared_yaxes=True, shared_xaxes=False, horizontal_spacing=0.03,
        vertical_spacing=62 / height if num_rows > 1 else 0,
        subplot_titles=[figure_text(_series_name(panel, panels)) for panel in panels.iter_rows(named=True)],
    )  # fmt: skip
    finding, subtitle = _training_finding(rows, name)
    figure.update_layout(theme.figure(finding, subtitle, height=height).layout)
    for position, series in enumerate(panels.iter_rows()):
        keys = zip(("run_id", "stage", "fold"), series, strict=True)
        inside = rows.filter(*(pl.col(name).eq_missing(pl.lit(value)) for name, value in keys))
        where = {"row": position // columns + 1, "col": position % columns + 1}
        for phase in inside["phase"].unique(maintain_order=True):
            points = inside.filter(pl.col("phase") == phase).sort("step")
            _add_curve(figure, points, phase, smoothing, first=position == 0, where=where)
    figure.update_annotations(font={"size": 12, "color": theme.NEUTRAL})
    figure.update_xaxes(title_text="Step", row=num_rows)
    figure.update_yaxes(title_text=figure_text(name), col=1)
    if is_share(metric):  # a curve that never moves would get an axis from below nothing to above everything
        figure.update_yaxes(range=[-0.03, 1.03])
    # Beside the subtitle: the panels' own titles take the place above them.
    beside = {"y": 1 - 42 / height, "yref": "container", "yanchor": "top"}
    figure.update_layout(legend={"orientation": "h", "x": 1, "xanchor": "right", **beside})
    return figure


def smoothed(values: pl.Series, smoothing: float) -> pl.Series:
    """Exponential mean with weight 1 - ``smoothing`` on the newest; ``ValueError`` where that is outside [0, 1)."""
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing: got {smoothing}, wanted a number in [0, 1).")
    return values.cast(pl.Float64).ewm_mean(alpha=1 - smoothing, adjust=True)


def _series_name(row: dict[str, object], among: pl.DataFrame) -> str:
    """Of run, stage and fold what tells this series from the others."""
    parts = [str(row["run_id"])] if among["run_id"].n_unique() > 1 else []
    if row["fold"] is None or among["stage"].n_unique() > 1:
        parts.append(str(row["stage"]))
    if row["fold"] is not None:
        parts.append(f"fold {row['fold']}")
    return ", ".join(parts)


def _curve_name(rows: pl.DataFrame, metric: str) -> str:
    """The metric's name; the losses of tasks that add up several kinds of loss have no unit."""
    sums = set(TASK_OF_STAGE) & set(rows["stage"])
    return "Loss" if metric == "loss" and sums else metric_name(metric)


def _training_finding(rows: pl.DataFrame, name: str) -> tuple[str, str]:
    last = rows.sort("step").group_by("run_id", "stage", "fold", "phase", maintain_order=True).last()
    by_phase = last.group_by("phase", maintain_order=True).agg(pl.col("value").mean())
    last_values = ", ".join(f"{number_text(value)} in {phase}" for phase, value in by_phase.iter_rows())
    panels = rows.select("run_id", "stage", "fold").n_unique()
    counted = f"n = {count_text(rows.height, 'logged value')} in {count_text(panels, 'panel')}"
    subtitle = f"{counted}; the title has the mean of each curve's last value"
    return f"{name} ends at {last_values}", subtitle


def _add_curve(
    figure: go.Figure, points: pl.DataFrame, phase: str, smoothing: float, *, first: bool, where: dict[str, int]
) -> None:
    color = {"train": theme.CONTROL, "validation": theme.MODEL}.get(phase, theme.SERIES[1])
    dash = "solid" if phase in ("train", "validation") else "dot"
    steps, values, fold = points["step"].to_numpy(), points["value"], of_fold(points["fold"][0])
    if smoothing > 0:
        pale = {"color": theme.translucent(color, 0.3), "width": 1}
        figure.add_trace(
            go.Scatter(
                x=steps, y=values.to_numpy(), mode="lines", line=pale, showlegend=False, hoverinfo="skip", meta=fold
            ),
            **where,
        )
    figure.add_trace(
        go.Scatter(
            x=steps, y=smoothed(values, smoothing).to_numpy(), name=figure_text(phase), legendgroup=figure_text(phase),
            showlegend=first, mode=_mode(points),
            line={"color": color, "width": 2, "dash": dash}, marker={"size": 5},
            customdata=points["epoch"].to_list(), meta=fold,
            hovertemplate="step %{x}, epoch %{customdata}<br>%{y:.4f}",
        ),
        **where,
    )  # fmt: skip


def _mode(points: pl.DataFrame) -> str:
    return "lines+markers" if points.height <= _SMALL else "lines"


# --- Where a run's time went: its stages and their attempts over time, what ran at once, and what was waited for

STATE_COLORS = {
    "done": theme.MODEL, "running": theme.REAL, NOT_ENDED: theme.REAL, "failed": theme.NOT_ABOVE_CONTROL,
    "interrupted": theme.NOT_ABOVE_CONTROL, "stopped without a word": theme.NOT_ABOVE_CONTROL,
}  # fmt: skip
BEFORE = "an earlier attempt"
_FOLD_SUFFIX = re.compile(r"_fold_(\d+)$")
_MINUTES_FROM = 600.0  # seconds; a longer run is shown in minutes, and one of many hours in hours
_HOURS_FROM = 6 * 3600.0


def pipeline_spans(run: RunPaths) -> pl.DataFrame:
    """When each stage was at work, in the order of the run: ``key fold attempt state started finished``.

    Times are seconds since the run's first sign of life. The last attempt's are those of its status; an earlier one,
    which the status forgets, was at work while it left memory samples. One that is still going ends at its last sample.
    """
    status = run_status(run)["stages"]
    rows = [row for key, stage in status.items() if isinstance(stage, dict) for row in _spans_of(str(key), stage)]
    last = pl.DataFrame(rows, schema=_SPANS)
    sampled = ask(_SAMPLED, {"samples": memory_samples([run]).frame}).with_columns(
        key=pl.when(pl.col("fold").is_null()).then("stage").otherwise(pl.format("{}_fold_{}", "stage", "fold"))
    )
    ends = sampled.group_by("key").agg(pl.col("finished").max().alias("last_sample"))
    last = last.join(ends, on="key", how="left", maintain_order="left")
    last = last.with_columns(finished=pl.coalesce("finished", "last_sample", "started")).select(*_SPANS)
    known = last.select("key", pl.col("attempt").alias("attempts"))
    earlier = sampled.join(known, on="key").filter(pl.col("attempt") < pl.col("attempts"))
    earlier = earlier.with_columns(state=pl.lit(BEFORE)).select(*_SPANS)
    spans = pl.concat([last, earlier.cast(pl.Schema(_SPANS))]).filter(pl.col("finished") >= pl.col("started"))
    begin = spans["started"].min()
    moved = spans.with_columns(pl.col("started", "finished") - (begin if isinstance(begin, float) else 0.0))
    first = pl.col("started").min().over("key")
    return moved.sort(first, "key", "attempt")


def pipeline_figure(spans: pl.DataFrame) -> go.Figure:
    """The stages as bars over time, a row for each stage and fold; attempts before the last are pale."""
    if spans.is_empty():
        return theme.nothing_to_show("Time of the stages", "No stage has recorded when it began.")
    keys = spans["key"].unique(maintain_order=True).to_list()
    unit, seconds = _time_unit(float(spans["finished"].max() or 0.0))  # type: ignore[arg-type]  # a column of floats
    counted = f"n = {count_text(len(keys), 'stage')} in {count_text(spans.height, 'attempt')}"
    subtitle = f"{counted}; pale: an attempt that another followed"
    figure = theme.figure(_pipeline_finding(spans), subtitle, height=140 + 28 * len(keys))
    named: set[str] = set()
    for row in spans.iter_rows(named=True):
        figure.add_trace(_stage_bar(row, seconds, unit, first=row["state"] not in named))
        named.add(row["state"])
    figure.update_yaxes(title_text="Stage", autorange="reversed", showgrid=False, type="category")
    figure.update_yaxes(categoryorder="array", categoryarray=[figure_text(key) for key in keys])
    figure.update_xaxes(title_text=f"Time since the run began ({unit})", rangemode="tozero")
    figure.update_layout(
        barmode="overlay", bargap=0.3, margin={"r": 60},
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1, "yanchor": "bottom"},
    )  # fmt: skip
    return figure


_SPANS = {
    "key": pl.String, "fold": pl.Int64, "attempt": pl.Int64, "state": pl.String, "started": pl.Float64,
    "finished": pl.Float64,
}  # fmt: skip
_SAMPLED = """
    SELECT stage, fold, attempt, min(at_seconds) AS started, max(at_seconds) AS finished FROM (
        SELECT *, coalesce(try_cast(timestamp AS DOUBLE), epoch(try_cast(timestamp AS TIMESTAMPTZ))) AS at_seconds
        FROM samples
    ) WHERE at_seconds IS NOT NULL GROUP BY stage, fold, attempt
"""


def _spans_of(key: str, stage: dict[str, object]) -> list[dict[str, object]]:
    started, finished = (_epoch(stage.get(name)) for name in ("started_utc", "finished_utc"))
    if started is None:
        return []
    fold, attempts = _FOLD_SUFFIX.search(key), stage.get("attempts")
    return [
        {
            "key": key,
            "fold": int(fold[1]) if fold else None,
            "attempt": attempts if isinstance(attempts, int) else 1,
            "state": clean_text(shown_state(stage.get("state")) or "not recorded"),
            "started": started,
            # A stage that was begun again has the end of its attempt before until it has an end of its own.
            "finished": finished if finished is not None and finished >= started else None,
        }
    ]


def _epoch(text: object) -> float | None:
    if not isinstance(text, str):
        return None
    moment = pl.Series([text]).str.to_datetime(time_zone="UTC", strict=False).dt.epoch("ms")[0]
    return None if moment is None else moment / 1000


def _stage_bar(row: dict[str, Any], seconds: float, unit: str, *, first: bool) -> go.Bar:
    started, finished, state = row["started"], row["finished"], row["state"]
    color = theme.translucent(theme.CONTROL, 0.45) if state == BEFORE else STATE_COLORS.get(state, theme.NEUTRAL)
    name = figure_text(state)
    took = duration_text(finished - started)
    return go.Bar(
        x=[(finished - started) / seconds], base=[started / seconds], y=[figure_text(row["key"])], orientation="h",
        marker={"color": color}, name=name, legendgroup=name, showlegend=first, meta=of_fold(row["fold"]),
        text=[took if state != BEFORE else ""], textposition="auto", textangle=0, cliponaxis=False,
        insidetextfont={"color": "white", "size": 11}, outsidetextfont={"size": 11},
        hovertemplate=f"%{{y}}, attempt {row['attempt']}: {name}<br>{took}, from %{{base:.1f}} {unit}<extra></extra>",
    )  # fmt: skip


def _time_unit(longest: float) -> tuple[str, float]:
    if longest < _MINUTES_FROM:
        return "s", 1.0
    return ("min", 60.0) if longest < _HOURS_FROM else ("h", 3600.0)


def _pipeline_finding(spans: pl.DataFrame) -> str:
    """How long it was at work, what share of that was the longest stage's, and how much ran at once."""
    most, at_work = _at_once(spans)
    shown, whole = duration_text(at_work), duration_text(spans["finished"].max())  # type: ignore[arg-type]  # floats
    took = shown if shown == whole else f"{shown} of work within {whole}"
    lengths = spans.with_columns(
        stage=pl.col("key").str.replace(_FOLD_SUFFIX.pattern, ""), seconds=pl.col("finished") - pl.col("started")
    )
    by_stage = lengths.group_by("stage").agg(pl.col("seconds").sum()).sort("seconds", "stage", descending=True)
    work = float(by_stage["seconds"].sum())
    share = by_stage["seconds"][0] / work if work else 0.0
    return (
        f"The run took {took}, with at most {count_text(most, 'stage')} at once; "
        f"{by_stage['stage'][0]} has {share:.0%} of the work"
    )


def _at_once(spans: pl.DataFrame) -> tuple[int, float]:
    """Return the most stages at once, and for how many seconds at least one was at work: pauses do not count."""
    begins = spans.select(at="started", step=pl.lit(1))
    ends = spans.select(at="finished", step=pl.lit(-1))
    # Status tells whole seconds: what ends in the second in which the next begins is not beside it.
    changes = pl.concat([begins, ends]).sort("at", "step").with_columns(running=pl.col("step").cum_sum())
    lasting = changes.select((pl.col("at").shift(-1) - pl.col("at")).filter(pl.col("running") > 0))
    return int(changes["running"].max() or 1), float(lasting["at"].sum())  # type: ignore[arg-type]  # whole numbers


# --- Panels of the dashboard


def _declare_curves(number: int) -> None:
    @PANELS.register_panel(
        f"learning curves {number + 1}",
        at=30 + number,
        follows=("metrics", "folds", "smoothing", "highlight"),
        reads=METRICS,
    )
    def draw(selection: Selection) -> Shown:
        if number >= len(selection.metrics):
            return NOTHING
        metric = selection.metrics[number]
        curves = learning_curves([selection.detailed], metrics=[metric], folds=selection.folds).frame
        return learning_curves_figure(curves, metric, smoothing=selection.smoothing)


for _number in range(MOST_METRICS):
    _declare_curves(_number)


@PANELS.register_panel("pipeline", at=61, follows=("highlight",), reads=("status.json", "status", "memory"))
def _pipeline_panel(selection: Selection) -> Shown:
    return pipeline_figure(pipeline_spans(selection.detailed))
