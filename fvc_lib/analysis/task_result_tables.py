"""Tables of the tasks image and video_text: the data, every metric beside its controls, and what fits the machine."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from fvc_lib.analysis.metric_direction import direction
from fvc_lib.analysis.wording import interval_text, metric_name, number_text, source_name, subject_name
from fvc_lib.services.task_tables import PARTS

_MODEL = "model"
_DIGITS_WITH_UNIT = 2


def part_table(rows: pl.DataFrame, counted: dict[str, str]) -> pl.DataFrame:
    """What each part of the split holds, in the order train, validation, test.

    Args:
        rows: of ``task_tables.IMAGES`` or ``VIDEO_TEXTS``.
        counted: names of columns of the answer, and the columns of ``rows`` whose different values they count.

    Returns:
        ``part split num_rows`` and the columns ``counted`` names; a part without rows is there with zeros.
    """
    parts = pl.DataFrame({"part": PARTS})
    found = rows.group_by("part").agg(
        split=pl.col("split_source").unique().sort().str.join(", "),
        num_rows=pl.len(),
        **{name: pl.col(column).drop_nulls().n_unique() for name, column in counted.items()},
    )
    joined = parts.join(found, on="part", how="left", maintain_order="left")
    return joined.with_columns(pl.col("split").fill_null("none"), pl.col("num_rows", *counted).fill_null(0))


def target_table(images: pl.DataFrame, targets: pl.DataFrame) -> pl.DataFrame:
    """The numbers that are known of the images: ``target unit num_images num_groups mean std least most``.

    Args:
        images: rows of ``task_tables.IMAGES``.
        targets: rows of ``task_tables.IMAGE_TARGETS``.
    """
    known = targets.join(images.select("image_id"), on="image_id", how="semi")
    value = pl.col("value")
    return known.group_by("target", "unit", maintain_order=True).agg(
        num_images=pl.len(), num_groups=pl.col("group_id").n_unique(), mean=value.mean(), std=value.std(),
        least=value.min(), most=value.max(),
    )  # fmt: skip


def training_means(images: pl.DataFrame, targets: pl.DataFrame) -> dict[str, float]:
    """The mean of each target over the training part: all that the mean predictor knows."""
    training = images.filter(pl.col("part") == "train").select("image_id")
    means = targets.join(training, on="image_id", how="semi").group_by("target").agg(pl.col("value").mean())
    return dict(means.sort("target").iter_rows())


def rejected_table(rejected: pl.DataFrame) -> pl.DataFrame:
    """What was left out: ``reason number one_of_them what_and_remedy``, most frequent first.

    Args:
        rejected: rows of ``tables.REJECTED``.
    """
    counted = rejected.group_by("reason").agg(
        number=pl.len(), one_of_them=pl.col("path").first(), what_and_remedy=pl.col("detail").first()
    )
    return counted.sort("number", "reason", descending=[True, False])


def metric_and_control_table(results: pl.DataFrame, subjects: Sequence[str]) -> pl.DataFrame:
    """Every metric of ``subjects`` beside the controls that have it.

    Args:
        results: rows of ``task_tables.TASK_RESULTS``.
        subjects: those shown, in this order; one that ends with a colon stands for all that begin so.

    Returns:
        ``of`` (where there are several subjects), ``metric unit better model``, a column for each control,
        ``num_samples num_groups``; numbers are text with their intervals.
    """
    rows = pl.concat([results.filter(_about(subject)) for subject in subjects]) if subjects else results.clear()
    controls = rows.filter(pl.col("source") != _MODEL)["source"].unique(maintain_order=True).to_list()
    columns = [_MODEL, *controls]
    known = {(row["source"], row["subject"], row["metric"]): row for row in rows.iter_rows(named=True)}
    shown = rows.select("subject", "metric").unique(maintain_order=True)
    told = []
    for subject, metric in shown.iter_rows():
        cells = {source: known.get((source, subject, metric)) for source in columns}
        first = next(row for row in cells.values() if row is not None)
        texts = {source_name(source): _text(row) for source, row in cells.items()}
        told.append(
            {
                "of": subject_name(subject),
                "metric": metric_name(metric),
                "unit": first["unit"],
                "better": _better(metric),
            }
            | texts
            | {"num_samples": first["num_samples"], "num_groups": first["num_groups"]}
        )
    texts_schema = {source_name(source): pl.String for source in columns}
    schema = {**dict.fromkeys(("of", "metric", "unit", "better"), pl.String), **texts_schema}
    table = pl.DataFrame(told, schema={**schema, "num_samples": pl.Int64, "num_groups": pl.Int64}, orient="row")
    needless = [] if shown["subject"].n_unique() > 1 else ["of"]
    needless += [] if (table["unit"] != "").any() else ["unit"]
    return table.drop(needless)


def class_table(results: pl.DataFrame) -> pl.DataFrame:
    """Each class: ``class precision recall f1 num_images num_groups``, the worst F1 first.

    Args:
        results: rows of ``task_tables.TASK_RESULTS``.
    """
    rows = results.filter(_about("class:") & (pl.col("source") == _MODEL))
    empty = {"class": pl.String, "precision": pl.Float64, "recall": pl.Float64, "f1": pl.Float64}
    if rows.is_empty():
        return pl.DataFrame(schema={**empty, "num_images": pl.Int64, "num_groups": pl.Int64})
    names = pl.col("subject").map_elements(subject_name, return_dtype=pl.String)
    rows = rows.with_columns(names.alias("class"))
    wide = rows.pivot("metric", index="class", values="value", on_columns=["precision", "recall", "f1"])
    counts = rows.group_by("class").agg(pl.col("num_samples").max().alias("num_images"), pl.col("num_groups").max())
    return wide.join(counts, on="class").sort("f1", "class", nulls_last=True)


def fits_shown(fits: pl.DataFrame) -> pl.DataFrame:
    """What fits the machine: ``varied batch_size image_size fits peak_bytes epoch_seconds remark``.

    Args:
        fits: rows of ``task_tables.MEASURED_FITS``.
    """
    known = pl.when(pl.col("fits")).then(pl.lit("yes")).otherwise(pl.lit("no"))
    answer = pl.when(pl.col("fits").is_null()).then(pl.lit("not known")).otherwise(known)
    return fits.select(
        pl.col("varied").str.replace("_", " "), "batch_size", "image_size", answer.alias("fits"), "peak_bytes",
        pl.col("seconds_per_epoch").alias("epoch_seconds"), pl.col("detail").alias("remark"),
    )  # fmt: skip


def _about(subject: str) -> pl.Expr:
    named = pl.col("subject")
    return named.str.starts_with(subject) if subject.endswith(":") else named == subject


def _better(metric: str) -> str:
    try:
        return direction(metric)
    except ValueError:
        return "higher"


def _text(row: dict[str, float | str | None] | None) -> str:
    if row is None:
        return "none"
    value, low, high = (_number(row[name]) for name in ("value", "low", "high"))
    if value is None:
        return "undefined"
    digits = _DIGITS_WITH_UNIT if row["unit"] or abs(value) >= 10 else 3
    return interval_text(value, low, high, digits) if low is not None else number_text(value, digits)


def _number(value: float | str | None) -> float | None:
    return float(value) if isinstance(value, int | float) else None
