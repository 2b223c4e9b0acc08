"""What a careless split would have claimed, beside what this one claims; and the list of what was looked at."""

from __future__ import annotations

import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.figures.theme import interval_point, value_label
from fvc_lib.analysis.read.headline import HEADLINE_METRIC, Score
from fvc_lib.analysis.read.records import read_tables
from fvc_lib.analysis.wording import count_text, figure_text, metric_name
from fvc_lib.services.atomic_files import path_to_text
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import LEAKAGE_AUDIT

_SHOWN = {
    "group_lookup_by_row": "Recognising groups, split by row",
    "group_lookup_by_group": "Recognising groups, split by group",
    "model": "The network, split by group",
}


def audit_figure(results: pl.DataFrame, *, confidence: float = 0.95) -> go.Figure:
    """An oracle that only recognises a video's group, under a split by row and under this run's split, and the model.

    Args:
        results: one run's rows of ``tables.RESULTS``.
        confidence: coverage of the intervals, for the subtitle.
    """
    rows = results.filter((pl.col("scope") == "all") & (pl.col("metric") == HEADLINE_METRIC))
    known = {row["source"]: row for row in rows.iter_rows(named=True) if row["value"] is not None}
    by_row, by_group = (known.get(name) for name in ("group_lookup_by_row", "group_lookup_by_group"))
    if by_row is None or by_group is None:
        return theme.nothing_to_show("Leakage", "The group-lookup controls are not recorded.")
    figure = theme.figure(
        f"Split by row, merely recognising groups would have claimed an AUC of {by_row['value']:.3f}; "
        f"split by group it gets {by_group['value']:.3f}",
        f"n = {count_text(by_row['num_videos'], 'video')} in {count_text(by_row['num_groups'], 'group')}; the gap "
        f"is what a split by row lets leak; bars: {confidence:.0%} cluster bootstrap over groups",
        height=290,
    )
    for source, tick in _SHOWN.items():
        row = known.get(source)
        if row is None:
            continue
        score = Score(source, row["value"], row["low"], row["high"])
        color = {"model": theme.MODEL, "group_lookup_by_row": theme.NOT_ABOVE_CONTROL}.get(source, theme.CONTROL)
        figure.add_trace(interval_point(tick, score, color, hollow=source == "group_lookup_by_row"))
        figure.add_annotation(value_label(tick, score))
    figure.add_vline(x=0.5, line={"color": theme.NEUTRAL, "width": 1, "dash": "dash"}, layer="below")
    figure.update_xaxes(title_text=figure_text(metric_name(HEADLINE_METRIC)), range=[0.37, 1.03])
    figure.update_yaxes(title_text="Scored by", autorange="reversed", showgrid=False)
    figure.update_layout(showlegend=False, margin={"r": 170})
    return figure


def audit_table(audit: pl.DataFrame) -> pl.DataFrame:
    """The audit as a reader meets it: ``check finding verdict``; what was counted or measured is in the finding.

    Args:
        audit: one run's rows of ``tables.LEAKAGE_AUDIT``.
    """
    verdict = (
        pl.when(pl.col("passed"))
        .then(pl.lit("passed"))
        .when(pl.col("passed").is_null())
        .then(pl.lit("for information"))
        .otherwise(pl.lit("FAILED"))
    )
    return audit.select(pl.col("check").str.replace_all("_", " ", literal=True), "finding", verdict=verdict)


def failed_checks(audit: pl.DataFrame) -> list[str]:
    """The findings of checks that did not pass."""
    return audit.filter(~pl.col("passed").fill_null(value=True))["finding"].to_list()


def audit_facts(run: RunPaths) -> tuple[tuple[str, str], ...]:
    """For the head of a report: how many of a run's checks for leaks passed; nothing where none are recorded."""
    audit = read_tables([(path_to_text(run.run_id), run.leakage_audit)], LEAKAGE_AUDIT).frame
    judged = audit.filter(pl.col("passed").is_not_null())
    if judged.is_empty():
        return ()
    passed = int(judged["passed"].sum())
    return (("Leakage audit", f"{passed} of {count_text(judged.height, 'check')} passed"),)
