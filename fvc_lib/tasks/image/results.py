"""Results of task image: metrics of the test part with intervals over groups, for the model and for controls.

A control predicts without looking at the picture, from the training part's labels. ``majority_class`` predicts the most
frequent class and ranks classes by frequency; ``mean_predictor`` predicts each target's mean. An interval shows how a
metric varies with the test groups that were drawn. It does not show how it varies between training runs.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl

from fvc_lib.metrics.classification import Metric
from fvc_lib.metrics.declaration import declaration
from fvc_lib.metrics.intervals import intervals_over_groups
from fvc_lib.metrics.recognition import class_measures, class_scores, regression_measures
from fvc_lib.services.config import RunConfig
from fvc_lib.services.tables import TASK_RESULTS, frame_of

MODEL = "model"
MAJORITY_CLASS = "majority_class"
MEAN_PREDICTOR = "mean_predictor"

Row = tuple[object, ...]


def image_results(
    images: pl.DataFrame, targets: pl.DataFrame, classes: pl.DataFrame, numbers: pl.DataFrame, config: RunConfig
) -> pl.DataFrame:
    """Return the metrics of model and controls on the test part (TASK_RESULTS).

    Args:
        images: IMAGES of all parts.
        targets: IMAGE_TARGETS of all parts.
        classes: IMAGE_PREDICTIONS of the test part.
        numbers: TARGET_PREDICTIONS of the test part.
        config: gives replicates, confidence and seed.
    """
    classes, training = classes.sort("image_id"), images.filter(part="train")
    rows = _class_rows(training["class_label"].drop_nulls(), classes, config) if classes.height else []
    for (target,), predicted in numbers.sort("target", "image_id").group_by("target", maintain_order=True):
        known = targets.filter(target=target).join(training, on="image_id", how="semi")["value"]
        rows += _target_rows(str(target), predicted, known, config)
    return frame_of(rows, TASK_RESULTS)


def _class_rows(trained: pl.Series, predictions: pl.DataFrame, config: RunConfig) -> list[Row]:
    """Return the result rows on classes, of the model and of the control that predicts the most frequent class.

    Args:
        trained: class labels of the training pictures.
        predictions: IMAGE_PREDICTIONS of the test part.
        config: gives replicates, confidence and seed.
    """
    by_frequency = trained.value_counts().sort("count", "class_label", descending=[True, False])["class_label"]
    true = predictions["class_label"]
    labels, predicted = true.to_numpy(), predictions["predicted_label"].to_numpy()
    groups = predictions["group_id"].to_list()
    own = class_measures(predictions["rank_of_class"], labels, predicted)
    rows = measured_rows(MODEL, own, groups, config)
    # Metrics of a single class have no interval, because a class has too few pictures.
    sizes = predictions.group_by("class_label").agg(pl.len(), pl.col("group_id").n_unique()).sort("class_label").rows()
    for metric, values in class_scores(labels, predicted).items():
        for value, (name, *size) in zip(values.tolist(), sizes, strict=True):
            rows.append((MODEL, f"class:{name}", metric, "", value, None, None, *size))
    rank_of = {name: rank for rank, name in enumerate(by_frequency, start=1)}
    majority = class_measures(list(map(rank_of.__getitem__, true)), labels, np.full(labels.shape, by_frequency[0]))
    return rows + measured_rows(MAJORITY_CLASS, majority, groups, config)


def _target_rows(target: str, predictions: pl.DataFrame, training: pl.Series, config: RunConfig) -> list[Row]:
    values, groups = predictions["value"].to_numpy(), predictions["group_id"].to_list()
    mean = np.full(values.size, np.mean(training.to_numpy()))
    rows: list[Row] = []
    for source, predicted in ((MODEL, predictions["predicted"].to_numpy()), (MEAN_PREDICTOR, mean)):
        measures = regression_measures(values, predicted)
        rows += measured_rows(source, measures, groups, config, f"target:{target}", predictions["unit"][0])
    return rows


def measured_rows(
    source: str,
    measures: Mapping[str, Metric],
    groups: Sequence[str],
    config: RunConfig,
    subject: str = "all",
    unit: str = "",
) -> list[Row]:
    """Return one row of TASK_RESULTS per metric, with its interval over groups.

    Args:
        source: the model or a control.
        measures: the metrics by name.
        groups: group id of each test sample.
        config: gives replicates, confidence and seed.
        subject: what is measured, such as ``target:NAME``; ``all`` for the classes of pictures.
        unit: unit of the target, such as ``kcal``. It is written for metrics in that unit, such as the mean absolute
            error; the unit of other metrics is empty.
    """
    intervals = intervals_over_groups(
        list(measures.values()), groups,
        replicates=config.bootstrap_replicates, seed=config.seed, confidence=config.confidence,
    )  # fmt: skip
    return [
        (source, subject, name, unit if (known := declaration(name)) and known.unit == "target" else "", *one.row())
        for name, one in zip(measures, intervals, strict=True)
    ]
