"""Figures and tables that compare results: targets, disturbed videos, detectors, pairs of runs, and audits.

A protocol is the rule that splits videos into training and test. A target is a corpus or generator that a protocol uses
for testing only. A control is a simple predictor that the model must beat.
"""

import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis.audit.numbers import MEASURE, Audit
from fvc_lib.analysis.dashboard.panels import NOTHING, PANELS, Shown
from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.figures.theme import Row
from fvc_lib.analysis.pages.display import HtmlSentences
from fvc_lib.analysis.read.comparison import compare, lines
from fvc_lib.analysis.read.detector_comparison import DetectorComparison
from fvc_lib.analysis.read.headline import DISHONEST_CONTROLS, HEADLINE_METRIC, judge, overall_scores
from fvc_lib.analysis.read.queries import Selection
from fvc_lib.analysis.read.robustness import UNDISTURBED
from fvc_lib.analysis.read.runs import TARGET_SCOPE
from fvc_lib.analysis.wording import figure_text, interval_text, metric_name, number_text, source_name

_MAIN = HEADLINE_METRIC
_NAME = metric_name(_MAIN)

# --- Targets of a protocol: corpora or generators


def target_table(results: pl.DataFrame, prefix: str = TARGET_SCOPE) -> pl.DataFrame:
    """Return the ROC AUC of the model and its controls, one row per target or source.

    A target is a corpus or generator of fakes that is only tested on. A source is where some videos of a corpus come
    from.

    The row with the lowest ROC AUC of the model comes first. Columns:

    - ``target`` or ``source``: its name.
    - ``videos`` and ``groups``: their numbers.
    - one column for the model and one for each control: the ROC AUC with its interval, as text.
    - ``standing``: whether the model is above its controls.

    Without such results the table is empty.

    Args:
        results: rows of tables.RESULTS. Its column ``scope`` says which videos a result is about.
        prefix: ``target:`` or ``source:``, the beginning of ``scope`` in the rows to show.
    """
    model = results.filter(pl.col("scope").str.starts_with(prefix), source="model", metric=_MAIN)
    rows = []
    for counts in model.sort("value", "scope", nulls_last=True).iter_rows(named=True):
        of_scope = results.filter(scope=counts["scope"])
        scores = overall_scores(of_scope.with_columns(scope=pl.lit("all")))
        name = {prefix.removesuffix(":"): counts["scope"].removeprefix(prefix)}
        row = {**name, "videos": counts["num_videos"], "groups": counts["num_groups"]}
        row |= {source_name(score.source): interval_text(score.value, score.low, score.high) for score in scores}
        rows.append({**row, "standing": judge(scores).standing})
    return pl.DataFrame(rows)


# --- Disturbed videos: ROBUSTNESS_RESULTS


def levels_figure(results: pl.DataFrame, *, confidence: float = 0.95) -> go.Figure:
    """Return a figure of the ROC AUC on disturbed videos, one row per level.

    A level is one kind of disturbance, such as blur, at one strength. The row of undisturbed videos is on top. The
    levels follow by ascending ROC AUC.

    Args:
        results: rows of ``tables.ROBUSTNESS_RESULTS``.
        confidence: coverage of the recorded intervals, which the subtitle states.
    """
    known = results.filter(metric=_MAIN).drop_nulls("value").to_dicts()
    if len(known) < 2:
        return theme.nothing_to_show(f"{_NAME} by level", "No level has been scored.")
    before, worst = known[:2]
    rows = []
    for row in known:
        tick = UNDISTURBED if row is before else f"{row['kind']}, {row['strength']}"
        rows.append(Row(figure_text(tick), row["value"], row["low"], row["high"], hollow=row is before))
    lowest = f"{worst['kind']}, {worst['strength']}: {worst['value']:.3f}"
    counted = theme.in_groups(before["num_videos"], "video", before["num_groups"])
    drawn = theme.interval_chart(
        f"{_NAME} is {before['value']:.3f} undisturbed, and lowest at {lowest}",
        f"{counted}; bars: {confidence:.0%} intervals over groups; hollow: undisturbed; line: its value",
        rows, names="Disturbance", values=_NAME,
    )  # fmt: skip
    return drawn.add_vline(x=before["value"], line={"color": theme.NEUTRAL, "width": 1}, layer="above")


# --- Detectors: quality against cost

_COSTS = {"milliseconds_per_clip": "ms a clip", "num_parameters": "parameters"}


def cost_figure(comparison: DetectorComparison) -> go.Figure:
    """Return a figure of the ROC AUC of each detector with its costs, the one with the fewest parameters on top.

    Bars are intervals over groups. A point is hollow if a run of the detector is not above its controls, the simple
    predictors that it must beat.
    """
    names = sorted(comparison.runs, key=lambda name: comparison.costs[name].get("num_parameters", 0))
    intervals = comparison.metrics[_MAIN].values
    best = max(names, key=lambda name: intervals[name].value)
    counted = intervals[best]
    rows = []
    for name in names:
        of_detector = comparison.costs[name]
        costs = [f"{round(of_detector[cost], 1):,} {unit}" for cost, unit in _COSTS.items() if cost in of_detector]
        tick = "<br>".join([figure_text(theme.shortened(name, 40)), ", ".join(costs)])
        is_above = comparison.num_above_controls[name] == len(comparison.runs[name])
        rows.append(Row(tick, *intervals[name].row()[:3], hollow=not is_above))
    return theme.interval_chart(
        f"{best} has the highest {_NAME}",
        f"{theme.in_groups(counted.num_rows, 'video', counted.num_groups)}; bars: {comparison.confidence:.0%} "
        "intervals over groups of the mean over seeds; hollow: not above controls",
        rows, names="Detector and its costs", values=_NAME,
    )  # fmt: skip


# --- Pairs of runs


@PANELS.register_panel("comparison", at=73, follows=("runs",), tasks=("video",))
def _pairs_panel(selection: Selection) -> Shown:
    """Compare every pair of chosen runs. Return sentences on the difference in ROC AUC of each pair.

    Further sentences name the runs that cannot be compared. With one chosen run the panel is empty.
    """
    if len(selection.runs) < 2:
        return NOTHING
    compared = compare(selection.runs, replicates=1000)
    return HtmlSentences(lines(compared))


# --- An audit of anyone's scores


def detectors_figure(audit: Audit) -> go.Figure:
    """Return a figure of the ROC AUC of every detector, and of the controls (simple predictors), with intervals.

    The marker of a detector is filled if the data show that the detector is better than its controls, else hollow. The
    marker of a control is hollow if its training and test videos share groups.

    A control can have several values, one for each detector, because detectors may have scored different videos. The
    figure has the value for the detector with the highest ROC AUC.
    """
    first = audit.detectors[0]
    rows = []
    for detector in audit.detectors:
        tick = figure_text(theme.shortened(detector, 26)) + " (apart)" * (detector in audit.apart)
        verdict = judge(audit.scores(detector), measure=MEASURE)
        rows.append(Row(tick, *audit.compared(detector), hollow=verdict.standing != "above control"))
    controls = audit.controls.filter(detector=first).select("source", "value", "low", "high")
    for source, value, low, high in controls.iter_rows():
        tick = figure_text(source_name(source))
        rows.append(Row(tick, value, low, high, theme.CONTROL, source in DISHONEST_CONTROLS))
    counted = theme.in_groups(audit.num_videos, "video", audit.num_groups)
    if 0 < audit.num_common < audit.num_videos:
        counted = f"n = the {audit.num_common:,} videos that all but those apart answered"
    standing = ", the highest" if len(audit.detectors) > 1 else ""
    return theme.interval_chart(
        f"{_NAME} of {first}{standing}: {number_text(rows[0].value)}",
        f"{counted}; bars: {audit.settings.confidence:.0%} intervals over groups; grey: controls; hollow: not shown "
        "to be above all controls, or no honest split",
        rows, names="Detector or control", values=_NAME,
    )  # fmt: skip
