"""Results of task image: metrics of the test part with intervals over groups, for the model and for controls.

A control predicts without looking at the picture, from the training part's labels. ``majority_class`` predicts the most
frequent class and ranks classes by frequency; ``mean_predictor`` predicts each target's mean. An interval shows how a
metric varies with the test groups that were drawn. It does not show how it varies between training runs.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import polars as pl

from fvc_lib.metrics.classification import IntArray, Metric
from fvc_lib.metrics.declaration import declaration
from fvc_lib.metrics.intervals import intervals_over_groups
from fvc_lib.metrics.recognition import class_scores, macro_measures, regression_measures, top_k_measure
from fvc_lib.services import tables
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError
from fvc_lib.services.run_paths import RunPaths

MODEL = "model"
MAJORITY_CLASS = "majority_class"
MEAN_PREDICTOR = "mean_predictor"

Row = tuple[object, ...]


def image_results(paths: RunPaths, config: RunConfig) -> pl.DataFrame:
    """Return the metrics of model and controls (TASK_RESULTS), and write them to ``task_results.feather``.

    Raises:
        DataError: the predictions are not those of the run's test part.
    """
    images = tables.read_table(paths.images, tables.IMAGES)
    targets = tables.read_table(paths.image_targets, tables.IMAGE_TARGETS)
    classes = tables.read_table(paths.image_predictions, tables.IMAGE_PREDICTIONS).sort("image_id")
    numbers = tables.read_table(paths.target_predictions, tables.TARGET_PREDICTIONS).sort("target", "image_id")
    test, training = (images.filter(part=part) for part in ("test", "train"))
    _require("class predictions", test.drop_nulls("class_label"), classes, ["image_id", "class_label", "group_id"])
    due = targets.join(test, on="image_id", how="semi")
    _require("predicted numbers", due, numbers, ["image_id", "target", "value", "group_id"])
    rows = _class_rows(training["class_label"].drop_nulls(), classes, config) if classes.height else []
    for (target,), predicted in numbers.group_by("target", maintain_order=True):
        known = targets.filter(target=target).join(training, on="image_id", how="semi")["value"]
        rows += _target_rows(str(target), predicted, known, config)
    table = tables.check_table(tables.frame_of(rows, tables.TASK_RESULTS), tables.TASK_RESULTS, "image results")
    tables.write_table(table, tables.TASK_RESULTS, paths.task_results)
    return table


def _require(what: str, due: pl.DataFrame, made: pl.DataFrame, columns: list[str]) -> None:
    """Raise ``DataError`` unless ``made`` has exactly the rows of ``due``, by ``columns``."""
    if not due.select(columns).sort(columns).equals(made.select(columns).sort(columns)):
        raise DataError(
            f"{what}: got {made.height} rows that are not those of the test part, which has {due.height}. Run "
            "10_image_recognition again."
        )


def worst_mistakes(predictions: pl.DataFrame, number: int = 12) -> pl.DataFrame:
    """Return up to ``number`` wrong rows of ``predictions`` (IMAGE_PREDICTIONS), the highest probability first."""
    wrong = predictions.filter(pl.col("class_label") != pl.col("predicted_label"))
    return wrong.sort("probability", "image_id", descending=[True, False]).head(number)


def _class_rows(trained: pl.Series, predictions: pl.DataFrame, config: RunConfig) -> list[Row]:
    """Return the result rows of the model and of the majority-class control.

    Args:
        trained: class labels of the training pictures.
        predictions: IMAGE_PREDICTIONS of the test part.
        config: gives replicates, confidence and seed.
    """
    counts = trained.value_counts().sort("count", "class_label", descending=[True, False])
    by_frequency = counts["class_label"].to_list()
    classes = sorted({*predictions["class_label"], *predictions["predicted_label"], *by_frequency})
    number_of = {label: number for number, label in enumerate(classes)}
    labels, predicted = (
        predictions[column].replace_strict(number_of, return_dtype=pl.Int64).to_numpy()
        for column in ("class_label", "predicted_label")
    )
    # Classes without training pictures rank last.
    rank_of = {label: rank for rank, label in enumerate(by_frequency, start=1)}
    ranks = predictions["class_label"].replace_strict(rank_of, default=len(classes), return_dtype=pl.Int64).to_numpy()
    majority = np.full(labels.size, number_of[by_frequency[0]])
    groups, own_ranks = predictions["group_id"].to_list(), predictions["rank_of_class"].to_numpy()
    rows = _measured_rows(MODEL, _class_measures(own_ranks, labels, predicted), groups, config)
    # A class has too few pictures for an interval.
    scores, own = class_scores(labels, predicted), predictions.group_by("class_label")
    sizes = {label: (count, of) for label, count, of in own.agg(pl.len(), pl.col("group_id").n_unique()).iter_rows()}
    rows += [
        (MODEL, f"class:{name}", metric, "", float(values[place]), None, None, *sizes[name])
        for place, name in enumerate(classes[number] for number in np.unique(labels))
        for metric, values in scores.items()
    ]
    return rows + _measured_rows(MAJORITY_CLASS, _class_measures(ranks, labels, majority), groups, config)


def _class_measures(ranks: IntArray, labels: IntArray, predicted: IntArray) -> dict[str, Metric]:
    return {"top1": top_k_measure(ranks, 1), "top5": top_k_measure(ranks, 5), **macro_measures(labels, predicted)}


def _target_rows(target: str, predictions: pl.DataFrame, training: pl.Series, config: RunConfig) -> list[Row]:
    values, groups = predictions["value"].to_numpy(), predictions["group_id"].to_list()
    mean = np.full(values.size, np.mean(training.to_numpy()))
    rows: list[Row] = []
    for source, predicted in ((MODEL, predictions["predicted"].to_numpy()), (MEAN_PREDICTOR, mean)):
        measures = regression_measures(values, predicted)
        in_unit = {name for name in measures if (declared := declaration(name)) and declared.unit == "target"}
        units = dict.fromkeys(in_unit, predictions["unit"][0])
        rows += _measured_rows(source, measures, groups, config, f"target:{target}", units)
    return rows


def _measured_rows(
    source: str,
    measures: Mapping[str, Metric],
    groups: Sequence[str],
    config: RunConfig,
    subject: str = "all",
    units: Mapping[str, str] = MappingProxyType({}),
) -> list[Row]:
    """Return one result row with an interval per measure; ``units`` gives the unit by the measure's name."""
    intervals = intervals_over_groups(
        list(measures.values()), groups,
        replicates=config.bootstrap_replicates, seed=config.seed, confidence=config.confidence,
    )  # fmt: skip
    named = zip(measures, intervals, strict=True)
    return [(source, subject, name, units.get(name, ""), *interval.row()) for name, interval in named]
