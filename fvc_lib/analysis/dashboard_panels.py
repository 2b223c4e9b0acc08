"""The panels of the dashboard: what each shows, which choices it follows, and which files of a run it reads.

Headless they are simply shown one after the other. Live, a panel is drawn again only when a choice that it follows or
a file that it reads has changed, so that a slider answers at once however many runs are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis.calibration_figures import calibration_figure
from fvc_lib.analysis.comparison import Comparison, compare
from fvc_lib.analysis.comparison import lines as comparison_lines
from fvc_lib.analysis.comparison_figures import difference_figure
from fvc_lib.analysis.dashboard_selection import MOST_METRICS, Selection
from fvc_lib.analysis.figure_display import figure_bundle
from fvc_lib.analysis.figure_parts import with_fold_highlighted
from fvc_lib.analysis.headline import run_parameters
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
)
from fvc_lib.analysis.ranking_figures import pr_figure, roc_figure
from fvc_lib.analysis.records import read_tables, run_names
from fvc_lib.analysis.result_figures import controls_figure, run_comparison_figure
from fvc_lib.analysis.result_tables import UNCALIBRATED
from fvc_lib.analysis.run_cautions import audit_failures
from fvc_lib.analysis.slice_figures import slices_figure
from fvc_lib.analysis.training_figures import learning_curves_figure, memory_timeline_figure
from fvc_lib.analysis.wording import count_text
from fvc_lib.services.config import RunConfig
from fvc_lib.services.path_text import path_to_text
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import SLICES

Bundle = dict[str, Any]
Shown = Any  # a figure, a table or a text; plotly has no types

_REPLICATES = 500  # of the bands: a redraw must feel immediate; the results notebook's own have more
_COMPARISON_REPLICATES = 1000
_METRICS, _MEMORY, _TABLES = ("metrics",), ("memory",), ("tables", "kfold_results.feather")
_STATUS = ("status.json", "status", "memory")
NOTHING = "\N{ZERO WIDTH SPACE}"  # an empty output would be a gap in the numbering of displays


@dataclass(frozen=True)
class Panel:
    """One place of the dashboard.

    Attributes:
        name: what it shows.
        draw: makes it.
        follows: the fields of ``Selection`` that it depends on.
        reads: files and folders in a run's folder that it depends on.
    """

    name: str
    draw: Callable[[Selection], Shown]
    follows: tuple[str, ...]
    reads: tuple[str, ...]

    def bundle(self, selection: Selection) -> Bundle:
        """What is displayed in its place."""
        shown = self.draw(selection)
        if isinstance(shown, go.Figure):
            return figure_bundle(with_fold_highlighted(shown, selection.highlight))
        return {"text/plain": shown} if isinstance(shown, str) else shown._repr_mimebundle_()

    def key(self, selection: Selection) -> tuple[object, ...]:
        """Two equal keys mean that there is nothing to draw again."""
        runs = selection.runs if "runs" in self.follows else (selection.detailed,)
        chosen = tuple(getattr(selection, name) for name in self.follows)
        return (selection.detailed, chosen, *(stamp for run in runs for stamp in _stamps(run, self.reads)))


def panels() -> tuple[Panel, ...]:
    """All panels in their order."""
    curves = [
        Panel(
            f"learning curves {place + 1}",
            lambda chosen, place=place: _curves(chosen, place),  # type: ignore[misc]  # mypy cannot infer the default
            ("metrics", "folds", "smoothing", "highlight"),
            _METRICS,
        )
        for place in range(MOST_METRICS)
    ]
    scored = ("folds", "highlight")
    return (
        Panel("controls", _controls, (), (*_TABLES, "params.yaml")),
        *curves,
        Panel("folds", _folds, ("folds",), _TABLES),
        Panel("roc", lambda chosen: roc_figure(_scored(chosen), replicates=_REPLICATES), scored, _TABLES),
        Panel("pr", lambda chosen: pr_figure(_scored(chosen), replicates=_REPLICATES), scored, _TABLES),
        Panel("calibration", lambda c: calibration_figure(_scored(c), replicates=_REPLICATES), ("folds",), _TABLES),
        Panel("slices", _slices, (), (*_TABLES, "params.yaml")),
        Panel("memory", _memory, ("folds", "highlight"), _MEMORY),
        Panel("pipeline", lambda c: pipeline_figure(pipeline_spans(c.detailed)), ("highlight",), _STATUS),
        Panel("runs", lambda c: run_comparison_figure(compare_runs(c.runs).frame), ("runs",), _TABLES),
        Panel("parameters", _parameters, ("runs",), ("params.yaml",)),
        Panel("comparison", lambda chosen: difference_figure(_compared(chosen)), ("runs",), _TABLES),
        Panel("comparison in words", _comparison_in_words, ("runs",), _TABLES),
        Panel("notes", _notes, ("runs",), (*_METRICS, *_MEMORY, *_TABLES)),
    )


def dashboard_notes(selection: Selection) -> tuple[str, ...]:
    """In words, what of the chosen runs could not be read."""
    answers = (results(selection.runs), learning_curves(selection.runs), memory_samples(selection.runs))
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
    return controls_figure(results([run]).frame, confidence=_confidence(run), leaks=audit_failures(run))


def _slices(selection: Selection) -> Shown:
    run = selection.detailed
    table = read_tables([(path_to_text(run.run_id), run.slices)], SLICES).frame
    return slices_figure(table, confidence=_confidence(run))


def _confidence(run: RunPaths) -> float:
    """What the intervals in the run's tables were made with."""
    asked = run_parameters(run).get("confidence")
    return asked if isinstance(asked, float) else RunConfig().confidence


def _memory(selection: Selection) -> Shown:
    samples = memory_samples([selection.detailed]).frame
    if selection.folds:
        samples = samples.filter(pl.col("fold").is_in(selection.folds))
    return memory_timeline_figure(samples)


def _parameters(selection: Selection) -> Shown:
    """A row for each parameter that differs, a column for each run; where several differ no result has one cause."""
    differing = parameter_differences(selection.runs).frame
    if differing.is_empty():
        return f"Parameters of the {count_text(len(selection.runs), 'chosen run')}: no difference."
    columns = [f"run {number}" for number in range(len(selection.runs))]  # not their ids: a copy has the same
    grouped = differing.group_by("parameter", maintain_order=True).agg("value", pl.col("changes_numbers").first())
    values = [pl.col("value").list.get(number).alias(name) for number, name in enumerate(columns)]
    names = dict(zip(columns, map(path_to_text, run_names(selection.runs)), strict=True))
    table = grouped.select("parameter", *values, "changes_numbers")
    verb = "differs" if table.height == 1 else "differ"
    caption = f"{count_text(table.height, 'parameter')} {verb} between the {len(columns)} chosen runs"
    return HtmlTable(table, caption=caption, names={**names, "changes_numbers": "Can change a number"})


def _compared(selection: Selection) -> Comparison:
    return _comparison(selection.runs, tuple(stamp for run in selection.runs for stamp in _stamps(run, _TABLES)))


def _comparison_in_words(selection: Selection) -> Shown:
    compared = _compared(selection)
    # Without a pair the figure itself says why there is none.
    return "\n".join(comparison_lines(compared)) if compared.pairs else NOTHING


@lru_cache(maxsize=4)
def _comparison(runs: tuple[RunPaths, ...], stamps: tuple[object, ...]) -> Comparison:
    """Of ``runs`` as their files are now; asked for by two panels."""
    del stamps
    return compare(runs, replicates=_COMPARISON_REPLICATES)


def _notes(selection: Selection) -> Shown:
    return "\n".join(dashboard_notes(selection)) or "All lines of the chosen runs could be read."


def _stamps(run: RunPaths, reads: Iterable[str]) -> Iterable[tuple[str, int, int]]:
    """Name, time and size of each file that ``reads`` names in ``run``, or that lies in a folder it names."""
    for name in reads:
        place = run.root / name
        files = sorted(place.rglob("*")) if place.is_dir() else [place]
        for file in files:
            try:
                known = file.stat()
            except OSError:
                continue
            yield str(file), known.st_mtime_ns, known.st_size


def is_nothing(bundle: Bundle) -> bool:
    """Whether a panel has nothing to show for now."""
    return bundle.get("text/plain") == NOTHING
