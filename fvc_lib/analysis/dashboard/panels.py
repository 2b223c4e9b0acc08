"""The panels of the dashboard: what each shows, which choices it follows, and which files of a run it reads.

Headless they are simply shown one after the other. Live, a panel is drawn again only when a choice that it follows or
a file that it reads has changed, so that a slider answers at once however many runs are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import polars as pl
from pandera.polars import DataFrameSchema

from fvc_lib.analysis.dashboard.selection import MOST_METRICS, Selection
from fvc_lib.analysis.figures.comparison import difference_figure
from fvc_lib.analysis.figures.image import confusion_figure, fits_figure, target_scatter_figure
from fvc_lib.analysis.figures.pipeline import pipeline_figure, pipeline_spans
from fvc_lib.analysis.figures.ranking import calibration_figure, pr_figure, roc_figure
from fvc_lib.analysis.figures.results import UNCALIBRATED, controls_figure, run_comparison_figure, slices_figure
from fvc_lib.analysis.figures.tasks import (
    beside_controls_figure,
    class_table,
    metric_and_control_table,
    runs_beside_controls_figure,
    target_errors_figure,
    training_means,
)
from fvc_lib.analysis.figures.theme import with_fold_highlighted
from fvc_lib.analysis.figures.training import learning_curves_figure, memory_timeline_figure
from fvc_lib.analysis.figures.video_text import DIRECTIONS, found_within_figure
from fvc_lib.analysis.pages.display import figure_bundle
from fvc_lib.analysis.pages.html_table import HtmlTable
from fvc_lib.analysis.read.comparison import Comparison, compare
from fvc_lib.analysis.read.comparison import lines as comparison_lines
from fvc_lib.analysis.read.headline import audit_failures, judge, measured_scores, run_parameters, run_task
from fvc_lib.analysis.read.queries import (
    compare_runs,
    fold_table,
    learning_curves,
    memory_samples,
    parameter_differences,
    predictions,
    results,
    task_results,
)
from fvc_lib.analysis.read.records import read_tables, run_names
from fvc_lib.analysis.wording import count_text
from fvc_lib.services import tables as task_tables
from fvc_lib.services.atomic_files import path_to_text
from fvc_lib.services.config import TASKS, RunConfig
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import SLICES

# ----------------------------------------------------------------------------------------------------
# One place of the dashboard: what it draws, for which tasks, and what it depends on.


Bundle = dict[str, Any]
Shown = Any  # a figure, a table or a text; plotly has no types

METRICS, MEMORY = ("metrics",), ("memory",)
TABLES = ("tables", "kfold_results.feather", "task_results.feather", "params.yaml")
NOTHING = "\N{ZERO WIDTH SPACE}"  # an empty output would be a gap in the numbering of displays
_NO_PLACE = {"text/html": '<div style="display:none"></div>'}  # text alone would take a line


@dataclass(frozen=True)
class Panel:
    """One place of the dashboard.

    Attributes:
        name: what it shows.
        draw: makes it.
        follows: the fields of ``Selection`` that it depends on.
        reads: files and folders in a run's folder that it depends on.
        tasks: of the runs in detail of which it has something to show.
    """

    name: str
    draw: Callable[[Selection], Shown]
    follows: tuple[str, ...]
    reads: tuple[str, ...]
    tasks: tuple[str, ...] = TASKS

    def bundle(self, selection: Selection) -> Bundle:
        """What is displayed in its place; for a run of another task nothing."""
        shown = self.draw(selection) if task_of(selection.detailed) in self.tasks else NOTHING
        if isinstance(shown, go.Figure):
            return figure_bundle(with_fold_highlighted(shown, selection.highlight))
        if isinstance(shown, str):
            return {"text/plain": shown, **(_NO_PLACE if shown == NOTHING else {})}
        return dict(shown._repr_mimebundle_())

    def key(self, selection: Selection) -> tuple[object, ...]:
        """Two equal keys mean that there is nothing to draw again."""
        runs = selection.runs if "runs" in self.follows else (selection.detailed,)
        chosen = tuple(getattr(selection, name) for name in self.follows)
        return (selection.detailed, chosen, *(stamp for run in runs for stamp in stamps(run, self.reads)))


def task_of(run: RunPaths) -> str:
    """What ``run`` is about."""
    return run_task(run_parameters(run))


def runs_alike(selection: Selection) -> tuple[RunPaths, ...]:
    """The chosen runs that are about the same as the one in detail."""
    task = task_of(selection.detailed)
    return tuple(run for run in selection.runs if task_of(run) == task)


def is_nothing(bundle: Bundle) -> bool:
    """Whether a panel has nothing to show for now."""
    return bundle.get("text/plain") == NOTHING


def confidence_of(run: RunPaths) -> float:
    """What the intervals in the run's tables were made with."""
    asked = run_parameters(run).get("confidence")
    return asked if isinstance(asked, float) else RunConfig().confidence


def stamps(run: RunPaths, reads: Iterable[str]) -> Iterable[tuple[str, int, int]]:
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


# ----------------------------------------------------------------------------------------------------
# The panels of the tasks image and video_text: what the test part says, beside what knows nothing, and in detail.


_IMAGE, _VIDEO_TEXT = ("image",), ("video_text",)
_BOTH = (*_IMAGE, *_VIDEO_TEXT)
_CLASSES = (("all", "top1"), ("all", "top5"), ("all", "macro_f1"))
_SHOWN_CAPTIONS = 12


def result_panels() -> tuple[Panel, ...]:
    """What a run found in the test part: the first that a reader wants to know."""
    return (
        Panel("standing", _standing, (), TABLES, _BOTH),
        Panel("classes beside controls", _classes, (), TABLES, _IMAGE),
        Panel("targets beside the mean", _target_errors, (), TABLES, _IMAGE),
        Panel("retrieval beside chance", _retrieval, (), TABLES, _VIDEO_TEXT),
    )


def detail_panels() -> tuple[Panel, ...]:
    """What stands behind the numbers."""
    return (
        Panel("confusion", lambda c: confusion_figure(_image_predictions(c)), (), TABLES, _IMAGE),
        Panel("classes", _class_table, (), TABLES, _IMAGE),
        Panel("targets", _targets, (), TABLES, _IMAGE),
        Panel("batch sizes that fit", lambda c: _fits(c, "batch_size"), (), TABLES, _IMAGE),
        Panel("resolutions that fit", lambda c: _fits(c, "image_size"), (), TABLES, _IMAGE),
        Panel("ranks", lambda c: found_within_figure(_ranks(c)), (), TABLES, _VIDEO_TEXT),
        Panel("caption metrics", _caption_metrics, (), TABLES, _VIDEO_TEXT),
        Panel("captions", _captions, (), TABLES, _VIDEO_TEXT),
    )


def run_panels() -> tuple[Panel, ...]:
    """The chosen runs beside one another."""
    return (Panel("runs of the task", _runs, ("runs",), TABLES, _BOTH),)


def _standing(selection: Selection) -> Shown:
    run = selection.detailed
    verdict = judge(measured_scores(run, task_of(run)).scores)
    table = pl.DataFrame({"standing": [verdict.standing], "in_words": [verdict.sentence]})
    return HtmlTable(table, caption=f"{path_to_text(run.run_id)} beside what knows nothing of its test part")


def _classes(selection: Selection) -> go.Figure:
    run = selection.detailed
    found = _results(selection)
    return beside_controls_figure(found, _CLASSES, counted=("image", "images"), confidence=confidence_of(run))


def _target_errors(selection: Selection) -> Shown:
    found = _results(selection)
    # A corpus without numbers has no such panel; one whose results are to come has one that says so.
    if found.height and not found["subject"].str.starts_with("target:").any():
        return NOTHING
    return target_errors_figure(found, confidence=confidence_of(selection.detailed))


def _retrieval(selection: Selection) -> go.Figure:
    run = selection.detailed
    found = _results(selection)
    metrics = found.filter(pl.col("metric").str.starts_with("recall@"))["metric"].unique(maintain_order=True)
    shown = [(direction, metric) for direction in DIRECTIONS for metric in metrics]
    return beside_controls_figure(found, shown, counted=("query", "queries"), confidence=confidence_of(run))


def _class_table(selection: Selection) -> Shown:
    table = class_table(_results(selection))
    return HtmlTable(table, caption="Each class of the test part, the worst F1 first") if table.height else NOTHING


def _targets(selection: Selection) -> Shown:
    run = selection.detailed
    predicted = _read(run, run.target_predictions, task_tables.TARGET_PREDICTIONS)
    if predicted.is_empty():
        return NOTHING
    images = _read(run, run.images, task_tables.IMAGES)
    means = training_means(images, _read(run, run.image_targets, task_tables.IMAGE_TARGETS))
    return target_scatter_figure(predicted, _results(selection), means, confidence=confidence_of(run))


def _fits(selection: Selection, varied: str) -> Shown:
    run = selection.detailed
    fits = _read(run, run.measured_fits, task_tables.MEASURED_FITS)
    return fits_figure(fits, varied) if (fits["varied"] == varied).any() else NOTHING


def _caption_metrics(selection: Selection) -> Shown:
    table = metric_and_control_table(_results(selection), ["captions"])
    confidence = f"{confidence_of(selection.detailed):.0%} cluster-bootstrap intervals over groups"
    return HtmlTable(table, caption=f"Captions of the test part, with {confidence}") if table.height else NOTHING


def _captions(selection: Selection) -> Shown:
    run = selection.detailed
    captions = _read(run, run.captions, task_tables.CAPTIONS)
    if captions.is_empty():
        return NOTHING
    repeats = pl.col("references").str.split("\n").list.contains(pl.col("caption"))
    # Half of them such as repeat no reference, if there are so many; the ids decide which.
    known = captions.with_columns(as_a_reference=repeats).sort("video_id")
    num_other = max(_SHOWN_CAPTIONS // 2, _SHOWN_CAPTIONS - int(known["as_a_reference"].sum()))
    other, same = known.filter(~pl.col("as_a_reference")).head(num_other), known.filter("as_a_reference")
    shown = pl.concat([other, same.head(_SHOWN_CAPTIONS - other.height)])
    right = count_text(int(known["as_a_reference"].sum()), "caption")
    caption = f"{right} of n = {known.height:,} repeat a reference word by word; {shown.height} of all"
    # The path last: on a phone it would leave the texts no room.
    columns = ("caption", pl.col("references").str.replace_all("\n", " / "), "as_a_reference", "path")
    return HtmlTable(shown.select(columns), caption=caption, names={"path": "Video", "as_a_reference": "Same"})


def _runs(selection: Selection) -> go.Figure:
    """Of the chosen runs those that are about the same as the one in detail."""
    named = dict(zip(selection.runs, map(path_to_text, run_names(selection.runs)), strict=True))
    alike = runs_alike(selection)
    scored = [(named[run], measured_scores(run, task_of(run))) for run in alike]
    return runs_beside_controls_figure(
        scored, num_left_out=len(named) - len(alike), confidence=confidence_of(selection.detailed)
    )


def _image_predictions(selection: Selection) -> pl.DataFrame:
    run = selection.detailed
    return _read(run, run.image_predictions, task_tables.IMAGE_PREDICTIONS)


def _ranks(selection: Selection) -> pl.DataFrame:
    run = selection.detailed
    return _read(run, run.retrieval_ranks, task_tables.RETRIEVAL_RANKS)


def _results(selection: Selection) -> pl.DataFrame:
    return task_results([selection.detailed]).frame


def _read(run: RunPaths, table: Path, schema: DataFrameSchema) -> pl.DataFrame:
    return read_tables([(path_to_text(run.run_id), table)], schema).frame


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
