"""What was measured of batch sizes and resolutions as a table, and what to take according to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

import polars as pl

from fvc_lib.services.tables import check_table
from fvc_lib.services.task_tables import MEASURED_FITS

_NEARLY = 1.05  # a larger batch that is faster by less than this is not worth its memory


@dataclass(frozen=True)
class FitRow:
    """One row of ``task_tables.MEASURED_FITS``."""

    varied: str
    batch_size: int
    image_size: int
    fits: bool | None
    peak_bytes: int | None
    seconds_per_epoch: float | None
    device: str
    detail: str


@dataclass(frozen=True)
class Recommendation:
    """A setting for this machine.

    Attributes:
        batch_size: images at once; None: none that was tried fits.
        image_size: pixels; the one that was asked for where it fits, else the largest that does.
        largest_image_size: the largest resolution that was tried and fits.
        sentence: the recommendation with its numbers.
    """

    batch_size: int | None
    image_size: int | None
    largest_image_size: int | None
    sentence: str


def fits_table(rows: Iterable[FitRow]) -> pl.DataFrame:
    """``rows`` in the schema of ``MEASURED_FITS``; without any, an empty table."""
    schema = {name: column.dtype.type for name, column in MEASURED_FITS.columns.items()}
    frame = pl.DataFrame([asdict(row) for row in rows], schema=schema, orient="row")
    return check_table(frame, MEASURED_FITS, "measured fits")


def recommended(fits: pl.DataFrame) -> Recommendation:
    """The fastest batch size that fits at the resolution asked for, and how far the resolution can go.

    Of batch sizes within 5 % of the fastest the smallest, because memory that is not needed is room for everything
    else. The batch size changes time and memory and not the result: the effective batch stays the same.
    """
    if fits.is_empty():
        return Recommendation(None, None, None, "Nothing was measured, so nothing is recommended.")
    by_batch, by_size = (_fitting(fits, varied) for varied in ("batch_size", "image_size"))
    largest = by_size["image_size"].max() if by_size.height else None
    largest_size = largest if isinstance(largest, int) else None
    if by_batch.height:
        return _of_batch_size(by_batch, by_size, largest_size)
    if largest_size is not None:
        row = by_size.filter(pl.col("image_size") == largest_size).row(0, named=True)
        sentence = (
            f"At the resolution asked for nothing that was tried fits. Take image_size {largest_size} with batch_size "
            f"{row['batch_size']}: {_cost(row)}."
        )
        return Recommendation(int(row["batch_size"]), largest_size, largest_size, sentence)
    if fits["fits"].is_null().all():
        return Recommendation(None, None, None, f"Nothing could be measured: {fits['detail'][0]}.")
    return Recommendation(
        None, None, None, "Nothing that was tried fits: lower image_size, turn gradient_checkpointing on, or give the "
        "run more memory.",
    )  # fmt: skip


def _of_batch_size(by_batch: pl.DataFrame, by_size: pl.DataFrame, largest_size: int | None) -> Recommendation:
    fastest = by_batch["seconds_per_epoch"].min()
    row = by_batch.filter(pl.col("seconds_per_epoch") <= fastest * _NEARLY).sort("batch_size").row(0, named=True)  # type: ignore[operator]
    sentence = (
        f"Take batch_size {row['batch_size']} at {row['image_size']} pixels: {_cost(row)}, of those that fit the "
        "fastest within 5 % and the smallest. The effective batch, and so the result, stays the same."
    )
    if largest_size is not None and largest_size > row["image_size"]:
        limit = by_size.filter(pl.col("image_size") == largest_size).row(0, named=True)
        sentence += (
            f" Up to {largest_size} pixels were found to fit with batch_size {limit['batch_size']}: {_cost(limit)}."
        )
    return Recommendation(int(row["batch_size"]), int(row["image_size"]), largest_size, sentence)


def _fitting(fits: pl.DataFrame, varied: str) -> pl.DataFrame:
    return fits.filter((pl.col("varied") == varied) & pl.col("fits").fill_null(False))


def _cost(row: dict[str, object]) -> str:
    return f"{row['seconds_per_epoch']:.3g} s per epoch, predicted peak {float(str(row['peak_bytes'])) / 1e9:.2f} GB"
