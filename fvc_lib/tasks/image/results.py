"""Results of task image: each metric of the test part with an interval over groups, next to a control's.

Controls know the training part alone. ``majority_class`` predicts the most frequent class and ranks classes by
frequency; ``mean_predictor`` predicts each target's mean. Intervals cover the choice of test groups, not of training
runs.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl

from fvc_lib.metrics.classification import IntArray, Metric
from fvc_lib.metrics.declaration import declaration
from fvc_lib.metrics.intervals import intervals_over_groups
from fvc_lib.metrics.multiclass import class_scores, confusion_matrix, macro_measures, top_k_measure
from fvc_lib.metrics.regression import regression_measures
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
    _check_predictions(images, targets, classes, numbers)
    rows = _class_rows(images, classes, config) if classes.height else []
    for (target,), predicted in numbers.group_by("target", maintain_order=True):
        rows += _target_rows(str(target), predicted, _training_values(images, targets, str(target)), config)
    table = tables.check_table(tables.frame_of(rows, tables.TASK_RESULTS), tables.TASK_RESULTS, "image results")
    tables.write_table(table, tables.TASK_RESULTS, paths.task_results)
    return table


def confusion(paths: RunPaths) -> pl.DataFrame:
    """Return the confusion matrix of the test part as ``class_label predicted_label count``, without zeros."""
    predictions = tables.read_table(paths.image_predictions, tables.IMAGE_PREDICTIONS)
    classes, labels, predicted = _numbered(predictions, ())
    if not classes:
        return pl.DataFrame(schema={"class_label": pl.String, "predicted_label": pl.String, "count": pl.Int64})
    matrix = confusion_matrix(labels, predicted, len(classes))
    truth, taken = np.nonzero(matrix)
    return pl.DataFrame(
        {
            "class_label": [classes[number] for number in truth],
            "predicted_label": [classes[number] for number in taken],
            "count": matrix[truth, taken],
        }
    )


def worst_mistakes(paths: RunPaths, number: int = 12) -> pl.DataFrame:
    """Return the wrong predictions with the highest probability (IMAGE_PREDICTIONS), the worst first."""
    predictions = tables.read_table(paths.image_predictions, tables.IMAGE_PREDICTIONS)
    wrong = predictions.filter(pl.col("class_label") != pl.col("predicted_label"))
    return wrong.sort("probability", "image_id", descending=[True, False]).head(number)


def _class_rows(images: pl.DataFrame, predictions: pl.DataFrame, config: RunConfig) -> list[Row]:
    trained = images.filter((pl.col("part") == "train") & pl.col("class_label").is_not_null())
    counts = trained.group_by("class_label").len().sort("len", "class_label", descending=[True, False])
    rank_of = {label: frequency_rank for frequency_rank, label in enumerate(counts["class_label"], start=1)}
    classes, labels, predicted = _numbered(predictions, tuple(rank_of))
    majority = np.full(labels.size, classes.index(next(iter(rank_of))))
    # Classes without training pictures rank last.
    majority_ranks = np.array([rank_of.get(label, len(classes)) for label in predictions["class_label"]])
    ranks = predictions["rank_of_class"].to_numpy()
    groups = predictions["group_id"].to_list()
    rows = _measured_rows(MODEL, "all", _class_measures(ranks, labels, predicted), groups, config)
    rows += _per_class_rows(MODEL, classes, labels, predicted, groups)
    rows += _measured_rows(MAJORITY_CLASS, "all", _class_measures(majority_ranks, labels, majority), groups, config)
    return rows


def _class_measures(ranks: IntArray, labels: IntArray, predicted: IntArray) -> dict[str, tuple[Metric, str]]:
    measures = {"top1": top_k_measure(ranks, 1), "top5": top_k_measure(ranks, 5), **macro_measures(labels, predicted)}
    return {name: (measure, "") for name, measure in measures.items()}


def _per_class_rows(
    source: str, classes: Sequence[str], labels: IntArray, predicted: IntArray, groups: Sequence[str]
) -> list[Row]:
    """Return precision, recall and F1 of each class; a class has too few pictures for an interval."""
    scores = class_scores(labels, predicted, len(classes))
    group_of = np.array(groups, dtype=object)
    rows: list[Row] = []
    for number, name in enumerate(classes):
        own = labels == number
        if not own.any():
            continue
        sizes = int(own.sum()), len(set(group_of[own]))
        for metric in ("precision", "recall", "f1"):
            value = float(getattr(scores, metric)[number])
            rows.append((source, f"class:{name}", metric, "", value, None, None, *sizes))
    return rows


def _target_rows(target: str, predictions: pl.DataFrame, training: pl.Series, config: RunConfig) -> list[Row]:
    values, groups = predictions["value"].to_numpy(), predictions["group_id"].to_list()
    unit, subject = predictions["unit"][0], f"target:{target}"
    mean = np.full(values.size, np.mean(training.to_numpy()))
    predicted_by = {MODEL: predictions["predicted"].to_numpy(), MEAN_PREDICTOR: mean}
    rows: list[Row] = []
    for source, predicted in predicted_by.items():
        measures = regression_measures(values, predicted)
        in_unit = {name for name in measures if (found := declaration(name)) and found.unit == "target"}
        named = {name: (measure, unit if name in in_unit else "") for name, measure in measures.items()}
        rows += _measured_rows(source, subject, named, groups, config)
    return rows


def _measured_rows(
    source: str, subject: str, measures: Mapping[str, tuple[Metric, str]], groups: Sequence[str], config: RunConfig
) -> list[Row]:
    """Return a row per measure."""
    intervals = intervals_over_groups(
        [measure for measure, _ in measures.values()], groups,
        replicates=config.bootstrap_replicates, seed=config.seed, confidence=config.confidence,
    )  # fmt: skip
    named = zip(measures.items(), intervals, strict=True)
    return [(source, subject, name, unit, *found.row()) for (name, (_, unit)), found in named]


def _numbered(predictions: pl.DataFrame, known: Sequence[str]) -> tuple[tuple[str, ...], IntArray, IntArray]:
    """Return the sorted classes that occur or are ``known``, and the true and predicted classes as numbers (N,)."""
    columns = predictions["class_label"].to_list(), predictions["predicted_label"].to_list()
    classes = tuple(sorted({*columns[0], *columns[1], *known}))
    number_of = {label: number for number, label in enumerate(classes)}
    labels, predicted = (np.array([number_of[label] for label in column], dtype=np.int64) for column in columns)
    return classes, labels, predicted


def _training_values(images: pl.DataFrame, targets: pl.DataFrame, target: str) -> pl.Series:
    trained = images.filter(pl.col("part") == "train").select("image_id")
    return targets.filter(pl.col("target") == target).join(trained, on="image_id", how="semi")["value"]


def _check_predictions(
    images: pl.DataFrame, targets: pl.DataFrame, classes: pl.DataFrame, numbers: pl.DataFrame
) -> None:
    """Raise ``DataError`` unless there is one prediction per labelled test picture and per known value."""
    test = images.filter(pl.col("part") == "test")
    due_classes = test.filter(pl.col("class_label").is_not_null()).select("image_id", "class_label", "group_id")
    due_numbers = targets.join(test.select("image_id"), on="image_id", how="semi").select(
        "image_id", "target", "value", "group_id"
    )
    _refuse_other("class predictions", due_classes, classes.select(due_classes.columns))
    _refuse_other("predicted numbers", due_numbers, numbers.select(due_numbers.columns))


def _refuse_other(what: str, due: pl.DataFrame, made: pl.DataFrame) -> None:
    for problem, here, there in (("missing", due, made), ("of other pictures, labels or groups", made, due)):
        found = here.join(there, on=due.columns, how="anti")["image_id"].unique().sort()
        if found.len():
            raise DataError(
                f"{what}: {found.len()} are {problem} than those of the test part: {', '.join(found.head(5))}. Run "
                "10_image_recognition again."
            )
