"""``length_matched`` and ``metadata_matched``: folds of a subset in which the matched columns do not tell the label.

Coarsened exact matching (S. Iacus, G. King and G. Porro, "Causal inference without balance checking: coarsened exact
matching", Political Analysis 20, 2012): videos are sorted into cells of equal codec and similar length and size, and as
many reals as fakes are taken from each cell. Within a wide cell a remaining difference can still tell the label. So
cells are halved until a classifier on the matched columns alone is at chance; the last cells hold equal values only.
"""

from collections.abc import Callable

import numpy as np
import polars as pl

from fvc_lib.corpus.copies.groups import Components
from fvc_lib.corpus.folds import MATCHES_DRAWN, groups_text, make_folds, most_folds
from fvc_lib.services.errors import DataError
from fvc_lib.services.tables import FOLDS, LABELS, LEFT_OUT
from fvc_lib.services.tasks import LENGTH_MATCHED

LENGTH = ("num_frames", "duration_seconds")
_METADATA = (*LENGTH, "codec", "width", "height")
_UNMATCHED = "no video of the other label is left that is like it"
CELLS_PER_OCTAVE = (1, 2, 4, 8, 16, 0)  # 0: equal values only
_CHANCE = 0.55  # with few videos an interval holds chance whatever the value is

# Returns the AUC, and the low end of its interval, of a classifier that sees the named columns alone.
# Arguments: the index's rows that are taken, their folds, and the columns.
Tells = Callable[[pl.DataFrame, pl.DataFrame, tuple[str, ...]], tuple[float | None, float | None]]


def matched(index: pl.DataFrame, protocol: str, num_folds: int, seed: int, tells: Tells) -> pl.DataFrame:
    """Return ``video_id group_id label fold target part reason``, one row per video and fold.

    Raises:
        DataError: too few videos of both labels are alike, or the matched columns still tell the label.
    """
    columns = LENGTH if protocol == LENGTH_MATCHED else _METADATA
    for cells in CELLS_PER_OCTAVE:
        chosen = matched_videos(index, columns, cells, seed)
        if most_folds(chosen) < num_folds:
            break
        taken = index.filter(pl.col("video_id").is_in(chosen["video_id"].implode()))
        folds = _fold_pairs(chosen, num_folds, seed)
        value, low = tells(taken, folds, columns)
        if low is None or value is None or (low <= 0.5 and (cells == 0 or value <= _CHANCE)):
            return parts_of_folds(index, folds, num_folds)
    groups = " and ".join(
        f"{groups_text(chosen.filter(pl.col('label') == label)['group_id'].n_unique())} with {label} videos"
        for label in LABELS
    )
    raise DataError(
        f"protocol {protocol}: where reals and fakes are alike in {', '.join(columns)}, so that these do not tell them "
        f"apart, {chosen.height} of {index.height} videos are left, in {groups}; wanted {num_folds} groups of each "
        "label or more. Cut or re-encode the videos alike before they are indexed, set num_folds lower, or use -p "
        "protocol kfold and look at the control on metadata."
    )


def _fold_pairs(chosen: pl.DataFrame, num_folds: int, seed: int) -> pl.DataFrame:
    """Return FOLDS with a real and its matched fake in one fold; apart, a model learns the wrong label of the other.

    If the connected groups are too large to be dealt evenly, only whole groups stay together.
    """
    numbered = chosen.with_columns(
        pl.col("group_id").rank("dense").cast(pl.Int64).alias("group") - 1, pl.col("pair").rank("dense").cast(pl.Int64)
    )
    num_groups = chosen["group_id"].n_unique()
    connected = Components(num_groups + chosen["pair"].n_unique())
    for group, pair in numbered.select("group", "pair").iter_rows():
        connected.join(group, num_groups - 1 + pair)
    label = pl.Series(connected.label).gather(numbered["group"]).cast(pl.String)
    together = chosen.with_columns(group_id=label)
    largest = label.value_counts()["count"].to_numpy().max()
    if most_folds(together) < num_folds or largest > chosen.height / num_folds:
        return make_folds(chosen, num_folds, seed)
    dealt = make_folds(together, num_folds, seed).drop("group_id")
    return dealt.join(chosen.select("video_id", "group_id"), on="video_id").select(*FOLDS.columns).sort("video_id")


def matched_videos(index: pl.DataFrame, columns: tuple[str, ...], cells: int, seed: int) -> pl.DataFrame:
    """Return ``video_id group_id label pair`` of equally many reals and fakes of each cell.

    Of a group with many videos in a cell, videos of other groups come first, so that as many groups as possible stay.
    The rest is drawn.

    Args:
        index: INDEX rows.
        columns: the columns to match.
        cells: number of cells per doubling of a value; 0: one per value.
        seed: of the draw.
    """
    cell = []
    for name in columns:
        is_exact = name == "codec" or not cells
        value = pl.col(name) if is_exact else (pl.col(name).cast(pl.Float64).log(2) * cells).floor()
        cell.append(value.cast(pl.String).fill_null("not known"))
    drawn = np.random.default_rng([seed, MATCHES_DRAWN]).permutation(index.height)
    known = index.sort("video_id").with_columns(pl.Series("drawn", drawn), cell=pl.concat_str(cell, separator="|"))
    known = known.with_columns(in_group=pl.col("drawn").rank("ordinal").over("cell", "label", "group_id"))
    order = pl.struct("in_group", "drawn").rank("ordinal").over("cell", "label")
    of_label = [(pl.col("label") == label).sum().over("cell") for label in LABELS]
    taken = known.with_columns(order=order).filter(pl.col("order") <= pl.min_horizontal(*of_label))
    return taken.select("video_id", "group_id", "label", pair=pl.format("{} {}", "cell", "order")).sort("video_id")


def parts_of_folds(index: pl.DataFrame, folds: pl.DataFrame, num_folds: int) -> pl.DataFrame:
    """Return folds as parts of each training; videos without a fold are left out of all."""
    trainings = pl.DataFrame({"fold": range(num_folds)}, schema={"fold": pl.Int64})
    home = pl.col("home")
    part = (
        pl.when(home.is_null()).then(pl.lit(LEFT_OUT))
        .when(home == pl.col("fold")).then(pl.lit("test"))
        .otherwise(pl.lit("train"))
    )  # fmt: skip
    return (
        index.select("video_id", "group_id", "label")
        .join(folds.select("video_id", home="fold"), on="video_id", how="left")
        .join(trainings, how="cross")
        .with_columns(
            part=part, target=pl.lit(None, pl.String), reason=pl.when(home.is_null()).then(pl.lit(_UNMATCHED))
        )
    )
