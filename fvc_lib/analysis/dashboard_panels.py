"""The panels of the dashboard: what each shows, which choices it follows, and which files of a run it reads.

Headless they are simply shown one after the other. Live, a panel is drawn again only when a choice that it follows or
a file that it reads has changed, so that a slider answers at once however many runs are chosen.
"""

from __future__ import annotations

from functools import lru_cache

import polars as pl

from fvc_lib.analysis.calibration_figures import calibration_figure
from fvc_lib.analysis.comparison import Comparison, compare
from fvc_lib.analysis.comparison import lines as comparison_lines
from fvc_lib.analysis.comparison_figures import difference_figure
from fvc_lib.analysis.dashboard_panel import (
    MEMORY,
    METRICS,
    NOTHING,
    TABLES,
    Panel,
    Shown,
    confidence_of,
    runs_alike,
    stamps,
)
from fvc_lib.analysis.dashboard_selection import MOST_METRICS, Selection
from fvc_lib.analysis.dashboard_task_panels import detail_panels, result_panels, run_panels
from fvc_lib.analysis.html_table import HtmlTable
from fvc_lib.analysis.pipeline_figures import pipeline_figure, pipeline_spans
from fvc_lib.analysis.queries import (
    compare_runs,
    fold_table,
    learning_curves,
    memory_samples,
    parameter_differences,
    predictions,
    results,
    task_results,
)
from fvc_lib.analysis.ranking_figures import pr_figure, roc_figure
from fvc_lib.analysis.records import read_tables, run_names
from fvc_lib.analysis.result_figures import controls_figure, run_comparison_figure
from fvc_lib.analysis.result_tables import UNCALIBRATED
from fvc_lib.analysis.run_cautions import audit_failures
from fvc_lib.analysis.slice_figures import slices_figure
from fvc_lib.analysis.training_figures import learning_curves_figure, memory_timeline_figure
from fvc_lib.analysis.wording import count_text
from fvc_lib.services.path_text import path_to_text
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import SLICES

_REPLICATES = 500  # of the bands: a redraw must feel immediate; the results notebook's own have more
_COMPARISON_REPLICATES = 1000
_STATUS = ("status.json", "status", "memory")
_VIDEO = ("video",)


def panels() -> tuple[Panel, ...]:
    """All panels in their order."""
    curves = [
        Panel(
            f"learning curves {place + 1}",
            lambda chosen, place=place: _curves(chosen, place),  # type: ignore[misc]  # mypy cannot infer the default
            ("metrics", "folds", "smoothing", "highlight"),
            METRICS,
        )
        for place in range(MOST_METRICS)
    ]
    return (
        Panel("controls", _controls, (), TABLES, _VIDEO),
        *result_panels(),
        *curves,
        *_of_folds(),
        *detail_panels(),
        Panel("memory", _memory, ("folds", "highlight"), MEMORY),
        Panel("pipeline", lambda c: pipeline_figure(pipeline_spans(c.detailed)), ("highlight",), _STATUS),
        Panel("runs", lambda c: run_comparison_figure(compare_runs(c.runs).frame), ("runs",), TABLES, _VIDEO),
        *run_panels(),
        Panel("parameters", _parameters, ("runs",), ("params.yaml",)),
        Panel("comparison", lambda chosen: difference_figure(_compared(chosen)), ("runs",), TABLES, _VIDEO),
        Panel("comparison in words", _comparison_in_words, ("runs",), TABLES, _VIDEO),
        Panel("notes", _notes, ("runs",), (*METRICS, *MEMORY, *TABLES)),
    )


def _of_folds() -> tuple[Panel, ...]:
    """What there is of runs that are judged fold by fold."""
    scored = ("folds", "highlight")
    return (
        Panel("folds", _folds, ("folds",), TABLES, _VIDEO),
        Panel("roc", lambda chosen: roc_figure(_scored(chosen), replicates=_REPLICATES), scored, TABLES, _VIDEO),
        Panel("pr", lambda chosen: pr_figure(_scored(chosen), replicates=_REPLICATES), scored, TABLES, _VIDEO),
        Panel(
            "calibration",
            lambda chosen: calibration_figure(_scored(chosen), replicates=_REPLICATES),
            ("folds",),
            TABLES,
            _VIDEO,
        ),
        Panel("slices", _slices, (), TABLES, _VIDEO),
    )


def dashboard_notes(selection: Selection) -> tuple[str, ...]:
    """In words, what of the chosen runs could not be read."""
    runs = selection.runs
    answers = (results(runs), task_results(runs), learning_curves(runs), memory_samples(runs))
    return tuple(dict.fromkeys(note for answer in answers for note in answer.notes))


def _curves(selection: Selection, place: int) -> Shown:
    if place >= len(selection.metrics):
        return NOTHING
    metric = selection.metrics[place]
    curves = learning_curves([selection.detailed], metrics=[metric], folds=selection.folds).frame
    return learning_curves_figure(curves, metric, smoothing=selection.smoothing)


def _folds(selection: Selection) -> Shown:
    table = fold_table([selection.detailed]).frame.drop("run_id", *UNCALIBRATED, strict=False)
    if selection.folds:
        table = table.filter(pl.col("fold").is_in(selection.folds))
    run_id = path_to_text(selection.detailed.run_id)
    return HtmlTable(table, caption=f"{run_id}: the network on each outer fold")


def _scored(selection: Selection) -> pl.DataFrame:
    scored = predictions([selection.detailed]).frame
    return scored.filter(pl.col("fold").is_in(selection.folds)) if selection.folds else scored


def _controls(selection: Selection) -> Shown:
    run = selection.detailed
    return controls_figure(results([run]).frame, confidence=confidence_of(run), leaks=audit_failures(run))


def _slices(selection: Selection) -> Shown:
    run = selection.detailed
    table = read_tables([(path_to_text(run.run_id), run.slices)], SLICES).frame
    return slices_figure(table, confidence=confidence_of(run))


def _memory(selection: Selection) -> Shown:
    samples = memory_samples([selection.detailed]).frame
    if selection.folds:
        samples = samples.filter(pl.col("fold").is_in(selection.folds))
    return memory_timeline_figure(samples)


def _parameters(selection: Selection) -> Shown:
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


def _compared(selection: Selection) -> Comparison:
    return _comparison(selection.runs, tuple(stamp for run in selection.runs for stamp in stamps(run, TABLES)))


def _comparison_in_words(selection: Selection) -> Shown:
    compared = _compared(selection)
    # Without a pair the figure itself says why there is none.
    return "\n".join(comparison_lines(compared)) if compared.pairs else NOTHING


@lru_cache(maxsize=4)
def _comparison(runs: tuple[RunPaths, ...], files: tuple[object, ...]) -> Comparison:
    """Of ``runs`` as their files are now; asked for by two panels."""
    del files
    return compare(runs, replicates=_COMPARISON_REPLICATES)


def _notes(selection: Selection) -> Shown:
    return "\n".join(dashboard_notes(selection)) or "All lines of the chosen runs could be read."
