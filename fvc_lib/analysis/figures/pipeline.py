"""Where a run's time went: its stages and their attempts over time, what ran at once, and what was waited for."""

from __future__ import annotations

import re

import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis.dashboard.panels import PANELS, Selection, Shown
from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.figures.theme import of_fold
from fvc_lib.analysis.read.queries import memory_samples
from fvc_lib.analysis.read.records import run_status
from fvc_lib.analysis.read.sql import ask
from fvc_lib.analysis.wording import clean_text, count_text, duration_text, figure_text
from fvc_lib.services.run_paths import RunPaths

STATE_COLORS = {
    "done": theme.MODEL, "running": theme.REAL, "failed": theme.NOT_ABOVE_CONTROL,
    "interrupted": theme.NOT_ABOVE_CONTROL, "stopped without a word": theme.NOT_ABOVE_CONTROL,
}  # fmt: skip
BEFORE = "an earlier attempt"
_FOLD = re.compile(r"_fold_(\d+)$")
_MINUTES_FROM = 600.0  # seconds; a longer run is shown in minutes, and one of many hours in hours
_HOURS_FROM = 6 * 3600.0


def pipeline_spans(run: RunPaths) -> pl.DataFrame:
    """When each stage was at work, attempt by attempt, in the order of the run.

    The last attempt's times are those of its status; an earlier one, which the status forgets, was at work while it
    left memory samples. One that is still going ends at its last sample.

    Returns:
        ``key fold attempt state started finished``; times are seconds since the run's first sign of life.
    """
    status = run_status(run)["stages"]
    rows = [row for key, stage in status.items() if isinstance(stage, dict) for row in _spans_of(str(key), stage)]
    last = pl.DataFrame(rows, schema=_SCHEMA)
    sampled = ask(_SAMPLED, {"samples": memory_samples([run]).frame}).with_columns(
        key=pl.when(pl.col("fold").is_null()).then("stage").otherwise(pl.format("{}_fold_{}", "stage", "fold"))
    )
    ends = sampled.group_by("key").agg(pl.col("finished").max().alias("last_sample"))
    last = last.join(ends, on="key", how="left", maintain_order="left")
    last = last.with_columns(finished=pl.coalesce("finished", "last_sample", "started")).select(*_SCHEMA)
    known = last.select("key", pl.col("attempt").alias("attempts"))
    earlier = sampled.join(known, on="key").filter(pl.col("attempt") < pl.col("attempts"))
    earlier = earlier.with_columns(state=pl.lit(BEFORE)).select(*_SCHEMA)
    spans = pl.concat([last, earlier.cast(pl.Schema(_SCHEMA))]).filter(pl.col("finished") >= pl.col("started"))
    begin = spans["started"].min()
    moved = spans.with_columns(pl.col("started", "finished") - (begin if isinstance(begin, float) else 0.0))
    first = pl.col("started").min().over("key")
    return moved.sort(first, "key", "attempt")


def pipeline_figure(spans: pl.DataFrame) -> go.Figure:
    """The stages as bars over time, a row for each stage and fold; attempts before the last are pale."""
    if spans.is_empty():
        return theme.nothing_to_show("Time of the stages", "No stage has recorded when it began.")
    keys = spans["key"].unique(maintain_order=True).to_list()
    unit, seconds = _unit(float(spans["finished"].max() or 0.0))  # type: ignore[arg-type]  # a column of floats
    attempts = count_text(spans.height, "attempt")
    figure = theme.figure(
        _finding(spans), f"n = {count_text(len(keys), 'stage')} in {attempts}; pale: an attempt that another followed",
        height=140 + 28 * len(keys),
    )  # fmt: skip
    named: set[str] = set()
    for row in spans.iter_rows(named=True):
        figure.add_trace(_bar(row, seconds, unit, first=row["state"] not in named))
        named.add(row["state"])
    figure.update_yaxes(title_text="Stage", autorange="reversed", showgrid=False, type="category")
    figure.update_yaxes(categoryorder="array", categoryarray=[figure_text(key) for key in keys])
    figure.update_xaxes(title_text=f"Time since the run began ({unit})", rangemode="tozero")
    figure.update_layout(
        barmode="overlay", bargap=0.3, margin={"r": 60},
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1, "yanchor": "bottom"},
    )  # fmt: skip
    return figure


_SCHEMA = {
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
    fold, attempts = _FOLD.search(key), stage.get("attempts")
    return [
        {
            "key": key,
            "fold": int(fold[1]) if fold else None,
            "attempt": attempts if isinstance(attempts, int) else 1,
            "state": clean_text(stage.get("state") or "not recorded"),
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


def _bar(row: dict[str, object], seconds: float, unit: str, *, first: bool) -> go.Bar:
    started, finished = float(str(row["started"])), float(str(row["finished"]))
    state = str(row["state"])
    color = theme.translucent(theme.CONTROL, 0.45) if state == BEFORE else STATE_COLORS.get(state, theme.NEUTRAL)
    name = figure_text(state)
    took = duration_text(finished - started)
    return go.Bar(
        x=[(finished - started) / seconds], base=[started / seconds], y=[figure_text(row["key"])], orientation="h",
        marker={"color": color}, name=name, legendgroup=name, showlegend=first, meta=of_fold(_whole(row["fold"])),
        text=[took if state != BEFORE else ""], textposition="auto", textangle=0, cliponaxis=False,
        insidetextfont={"color": "white", "size": 11}, outsidetextfont={"size": 11},
        hovertemplate=f"%{{y}}, attempt {row['attempt']}: {name}<br>{took}, from %{{base:.1f}} {unit}<extra></extra>",
    )  # fmt: skip


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _unit(longest: float) -> tuple[str, float]:
    if longest < _MINUTES_FROM:
        return "s", 1.0
    return ("min", 60.0) if longest < _HOURS_FROM else ("h", 3600.0)


def _finding(spans: pl.DataFrame) -> str:
    """How long it all took, what share of the work was the longest stage's, and how much ran at once."""
    took = float(spans["finished"].max() or 0.0)  # type: ignore[arg-type]  # a column of floats
    lengths = spans.with_columns(
        stage=pl.col("key").str.replace(_FOLD.pattern, ""), seconds=pl.col("finished") - pl.col("started")
    )
    by_stage = lengths.group_by("stage").agg(pl.col("seconds").sum()).sort("seconds", "stage", descending=True)
    work = float(by_stage["seconds"].sum())
    share = by_stage["seconds"][0] / work if work else 0.0
    return (
        f"The run took {duration_text(took)}, with at most {count_text(_most_at_once(spans), 'stage')} at once; "
        f"{by_stage['stage'][0]} has {share:.0%} of the work"
    )


def _most_at_once(spans: pl.DataFrame) -> int:
    begins = spans.select(at="started", step=pl.lit(1))
    ends = spans.select(at="finished", step=pl.lit(-1))
    # Status tells whole seconds: what ends in the second in which the next begins is not beside it.
    changes = pl.concat([begins, ends]).sort("at", "step")
    return int(changes["step"].cum_sum().max() or 1)  # type: ignore[arg-type]  # a column of whole numbers


@PANELS.register_panel("pipeline", at=61, follows=("highlight",), reads=("status.json", "status", "memory"))
def _panel(selection: Selection) -> Shown:
    return pipeline_figure(pipeline_spans(selection.detailed))
