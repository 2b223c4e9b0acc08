"""What the files of a corpus give away by themselves, before and after every video was written anew."""

from collections.abc import Callable, Collection, Iterator

import numpy as np
import polars as pl

from fvc_lib.corpus.rescaling import shown_rows
from fvc_lib.services.config import RunConfig
from fvc_lib.tasks.video import controls
from fvc_lib.tasks.video.results import with_targets

# By what a row is called; the first is the metadata control itself.
_LOOKED_AT = {
    "all metadata": (*controls.CATEGORIES, *controls.NUMBERS),
    "size and rate": controls.SIZE_AND_RATE,
    **{name: (name,) for name in (*controls.SIZE_AND_RATE, *controls.LENGTH, "bits_per_second", "size_bytes")},
}


def given_away(
    originals: pl.DataFrame,
    index: pl.DataFrame,
    predictions: pl.DataFrame,
    config: RunConfig,
    *,
    protocol: pl.DataFrame | None = None,
    left_out: Collection[str] = (),
) -> pl.DataFrame:
    """How well columns of the index tell the labels, of the files as they were and as they were written anew.

    Args:
        originals: INDEX of the files as they were.
        index: INDEX.
        predictions: PREDICTIONS: videos, labels and folds as the model was judged.
        config: replicates, confidence and seed.
        protocol: PROTOCOL schema; None: that of ``kfold``.
        left_out: as ``results.kfold_results`` has it.

    Returns:
        ``what before before_low before_high after after_low after_high``: AUC out of fold of a gradient boosting on
        these columns, as the metadata control has it, and the ends of the interval over groups.
    """
    folds = predictions.select("video_id", "group_id", "label", "fold").sort("video_id")
    trainings = None if protocol is None else controls.trainings_of(protocol, config, left_out)

    def told(table: pl.DataFrame, names: tuple[str, ...]) -> Iterator[float | None]:
        control: Callable[[pl.DataFrame], pl.DataFrame] = lambda rows: controls.metadata_only(table, rows, names)  # noqa: E731
        scored = with_targets(controls.tested(control, folds, trainings), protocol)
        yield from controls.auc_within_folds(scored, "group_id", config).row()[:3]

    rows = [(what, *told(originals, names), *told(index, names)) for what, names in _LOOKED_AT.items()]
    return pl.DataFrame(rows, schema=_GIVEN_AWAY, orient="row")


_GIVEN_AWAY = {"what": pl.String} | dict.fromkeys(
    ("before", "before_low", "before_high", "after", "after_low", "after_high"), pl.Float64
)


def size_dependence(before: pl.DataFrame, after: pl.DataFrame, originals: pl.DataFrame) -> pl.DataFrame:
    """How much each feature goes with the height that a video had, measured before and after videos were rescaled.

    Args:
        before: ``video_id`` and a column of numbers for each feature (``tables/features.parquet``), of the files as
            they were; null or NaN is missing.
        after: the same of the files as they were written anew.
        originals: INDEX of the files as they were.

    Returns:
        ``feature before after num_before num_after``: Spearman's rank correlation with the height, from -1 to 1, of
        the features that both have, the strongest before first, and of how many videos it is. Null where a feature, or
        the height, is the same for all.
    """
    height = originals.select("video_id").with_columns(shown_rows(originals))
    names = [name for name, kind in before.schema.items() if kind.is_float() and name in after.columns]
    found: dict[str, list[object]] = {"feature": list(names)}
    for side, table in (("before", before), ("after", after)):
        known = table.select("video_id", *names).fill_nan(None).join(height, on="video_id", how="inner")
        rank = [known.select(name, "rows").drop_nulls() for name in names]
        found[side] = [
            each.select(pl.corr(name, "rows", method="spearman")).item() for name, each in zip(names, rank, strict=True)
        ]
        found[f"num_{side}"] = [each.height for each in rank]
    table = pl.DataFrame(found, schema=_DEPENDENCE).with_columns(pl.col("before", "after").fill_nan(None))
    return table.sort(pl.col("before").abs(), descending=True, nulls_last=True, maintain_order=True)


_STRONG, _NAMED = 0.5, 3  # a correlation that is named, and how many features are
_DEPENDENCE = {
    "feature": pl.String, "before": pl.Float64, "after": pl.Float64, "num_before": pl.Int64, "num_after": pl.Int64,
}  # fmt: skip


def dependence_sentence(dependence: pl.DataFrame) -> str:
    """What ``size_dependence`` found, in a sentence."""
    known = dependence.drop_nulls(["before", "after"])
    if known.is_empty():
        return "Whether features go with the original size cannot be said: all videos had one height, or none is known."
    weaker = known.filter(pl.col("after").abs() < pl.col("before").abs()).height
    before, after = (float(np.median(known[side].abs().to_numpy())) for side in ("before", "after"))
    told = (
        f"Of {known.height} features {weaker} go less with the original height once videos are rescaled; the median "
        f"correlation is {after:.2f} after {before:.2f}."
    )
    still = known.filter(pl.col("after").abs() >= _STRONG).sort(pl.col("after").abs(), descending=True)["feature"]
    if still.is_empty():
        return told
    named = ", ".join(still.head(_NAMED)) + (" ..." if still.len() > _NAMED else "")
    return f"{told} {still.len()} still go with it ({_STRONG:g} or more: {named}): size survives as sharpness."
