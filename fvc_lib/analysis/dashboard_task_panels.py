"""The panels of the tasks image and video_text: what the test part says, beside what knows nothing, and in detail."""

from __future__ import annotations

from pathlib import Path

import plotly.graph_objects as go
import polars as pl
from pandera.polars import DataFrameSchema

from fvc_lib.analysis.dashboard_panel import NOTHING, TABLES, Panel, Shown, confidence_of, runs_alike, task_of
from fvc_lib.analysis.dashboard_selection import Selection
from fvc_lib.analysis.headline import judge, measured_scores
from fvc_lib.analysis.html_table import HtmlTable
from fvc_lib.analysis.image_figures import confusion_figure, fits_figure, target_scatter_figure
from fvc_lib.analysis.queries import task_results
from fvc_lib.analysis.records import read_tables, run_names
from fvc_lib.analysis.target_error_figures import target_errors_figure
from fvc_lib.analysis.task_figures import beside_controls_figure, runs_beside_controls_figure
from fvc_lib.analysis.task_result_tables import class_table, metric_and_control_table, training_means
from fvc_lib.analysis.video_text_figures import DIRECTIONS, found_within_figure
from fvc_lib.analysis.wording import count_text
from fvc_lib.services import task_tables
from fvc_lib.services.path_text import path_to_text
from fvc_lib.services.run_paths import RunPaths

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
