"""The result by platform, kind of fake, length, size and codec: an average may hide where a network fails.

Every number is of the predictions as they are, nothing is trained or chosen again, and its interval draws whole groups.
Slices are many and small: some look bad or good by chance, and no interval here is adjusted for their number.

Manipulation is a matter of fakes, and a slice of fakes alone has no AUC. So each kind of fake is set against all
reals: its AUC says how well this kind is told from real videos, and the kinds can be compared because the reals are the
same. Their numbers of videos therefore do not add up to all videos.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import polars as pl

from fvc_lib.metrics.classification import FloatArray, IntArray, divide, weighted_metric
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError
from fvc_lib.services.tables import LABELS, SLICES, check_table
from fvc_lib.tasks.video.results import interval_rows, measured

# Below so many groups of a class that a number is about, the slice is small: at ten groups an interval of a share near
# one half is already some 0.6 wide.
SMALL_BELOW_GROUPS = 10
NOT_KNOWN = "not known"
ALL_OTHERS = "all others"
MOST_VALUES = 12  # the rest of a column's values make one slice

# Bins are half open, [from, to); in seconds, and in pixels of a frame, so that upright videos count like flat ones.
DURATION_EDGES_SECONDS = (5, 15, 60, 300)
RESOLUTION_EDGES = ((320, 240), (640, 360), (1280, 720), (1920, 1080))

MANIPULATION = "manipulation"
_CATEGORIES = ("platform", "label_source", MANIPULATION, "codec")


@weighted_metric
def share_called_fake(labels: IntArray, decisions: FloatArray, weights: FloatArray) -> FloatArray:
    """Weight of the rows that were called fake over that of all; whatever they are."""
    del labels
    return divide(weights @ decisions, weights.sum(axis=1))


_OF_BOTH_CLASSES = ("roc_auc", "balanced_accuracy")
_OF_CLASS = {"fake": "true_positive_rate", "real": "false_positive_rate"}  # fakes found, reals called fake


@dataclass(frozen=True)
class _Slice:
    """Some of the predictions, by what they have in common; ``classes`` are those that make a slice of their own."""

    slice_by: str
    value: str
    rows: pl.DataFrame
    classes: Sequence[str] = ("fake", "real")


def slice_table(index: pl.DataFrame, predictions: pl.DataFrame, config: RunConfig) -> pl.DataFrame:
    """AUC within folds, balanced accuracy, and the shares of fakes and of reals called fake, in every slice (SLICES).

    Slices are by ``platform``, ``label_source``, ``manipulation``, ``duration``, ``resolution`` and ``codec``. What
    the index knows of no video, or what is the same for all of them, makes no slice; a value that it does not know of
    some is ``not known``. A metric that needs a class which a slice lacks is null. The table does not depend on the
    order of the rows.

    Args:
        index: INDEX schema, or what of it there is.
        predictions: PREDICTIONS schema, all folds together.
        config: replicates, confidence and seed of the intervals.

    Raises:
        DataError: a predicted video that the index does not hold.
    """
    known = _known_of(index, predictions)
    rows = [row for part in _slices(known) for row in _rows_of(part, config)]
    types = {name: column.dtype.type for name, column in SLICES.columns.items()}
    return check_table(pl.DataFrame(rows, schema=types, orient="row"), SLICES, "slices")


def _known_of(index: pl.DataFrame, predictions: pl.DataFrame) -> pl.DataFrame:
    """The predictions with a text column for everything that slices are by."""
    absent = predictions.join(index, on="video_id", how="anti")
    if absent.height:
        raise DataError(
            f"{absent.height} predicted videos are not in the index, e.g. {absent['video_id'].min()!r}. Both must come "
            "from one run: run 01_data_index and what follows it again."
        )
    seconds = [f"{edge} s" for edge in DURATION_EDGES_SECONDS]
    pixels, sizes = [w * h for w, h in RESOLUTION_EDGES], [f"{w}x{h}" for w, h in RESOLUTION_EDGES]
    described = index.select(
        "video_id",
        *_CATEGORIES,
        duration=_binned(pl.col("duration_seconds"), DURATION_EDGES_SECONDS, seconds),
        resolution=_binned(pl.col("width") * pl.col("height"), pixels, sizes),
    )
    return predictions.join(described, on="video_id").sort("video_id")


def _binned(value: pl.Expr, edges: Sequence[int], names: Sequence[str]) -> pl.Expr:
    """The name of the half-open bin that ``value`` lies in; null where it is not known."""
    labels = [f"under {names[0]}", *(f"{low} to {high}" for low, high in pairwise(names))]
    known = value.cast(pl.Float64).fill_nan(None)
    below = [pl.when(known < edge).then(pl.lit(label)) for edge, label in zip(edges, labels, strict=True)]
    return pl.coalesce(*below, pl.when(known >= edges[-1]).then(pl.lit(f"{names[-1]} and more")))


def _slices(known: pl.DataFrame) -> Iterator[_Slice]:
    for column in ("platform", "label_source"):
        yield from _by_value(known, column)
    real = known.filter(pl.col("label") == "real")
    for kind in _by_value(known.filter(pl.col("label") == "fake"), MANIPULATION):
        yield _Slice(MANIPULATION, kind.value, pl.concat([kind.rows, real]).sort("video_id"), classes=("fake",))
    for column in ("duration", "resolution", "codec"):
        yield from _by_value(known, column)


def _by_value(known: pl.DataFrame, column: str) -> Iterator[_Slice]:
    """The most frequent values first, then the rest; nothing where there is but one."""
    if known.get_column(column).null_count() == known.height:
        return
    filled = known.with_columns(pl.col(column).fill_null(NOT_KNOWN))
    counts = filled.group_by(column).len().sort(["len", column], descending=[True, False])
    if counts.height < 2:
        return
    values = counts.get_column(column).to_list()
    shown = values if len(values) <= MOST_VALUES else values[: MOST_VALUES - 1]
    for value in shown:
        yield _Slice(column, value, filled.filter(pl.col(column) == value))
    if len(shown) < len(values):
        yield _Slice(column, ALL_OTHERS, filled.filter(~pl.col(column).is_in(shown)))


def _rows_of(part: _Slice, config: RunConfig) -> Iterator[tuple[object, ...]]:
    """SLICES rows of one slice."""
    rows = part.rows
    groups = {label: rows.filter(pl.col("label") == label)["group_id"].n_unique() for label in LABELS}
    numbers = [int((rows["label"] == label).sum()) for label in LABELS]
    sizes = (rows.height, *numbers, rows["group_id"].n_unique())
    is_small = min(groups.values()) < SMALL_BELOW_GROUPS
    found = interval_rows(rows, [measured(name, rows) for name in _OF_BOTH_CLASSES], config)
    for name, ends in zip(_OF_BOTH_CLASSES, found, strict=True):
        yield (part.slice_by, part.value, name, *ends[:3], *sizes, is_small)
    for label in part.classes:
        of_class = rows.filter(pl.col("label") == label)
        share: Sequence[float | int | None] = (None, None, None)
        if of_class.height:
            decisions = measured("balanced_accuracy", of_class)[1]
            share = interval_rows(of_class, [(share_called_fake, decisions)], config)[0][:3]
        yield (part.slice_by, part.value, _OF_CLASS[label], *share, *sizes, groups[label] < SMALL_BELOW_GROUPS)
