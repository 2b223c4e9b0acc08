"""Protocols ``length_matched`` and ``metadata_matched``: make folds of videos whose metadata do not reveal the label.

Coarsened exact matching (S. Iacus, G. King and G. Porro, "Causal inference without balance checking: coarsened exact
matching", Political Analysis 20, 2012): videos are sorted into cells of equal codec and similar length and size, and as
many reals as fakes are taken from each cell. Reals and fakes in a wide cell may still differ enough to reveal the
label. So cells are halved until a classifier that sees only the matched columns is at chance. The narrowest cells hold
videos of equal values.
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
    """Return a table ``video_id group_id label fold target part reason`` with one row per video and fold.

    Args:
        index: INDEX table.
        protocol: ``length_matched`` or ``metadata_matched``; decides which columns are matched.
        num_folds: number of folds.
        seed: decides which of several alike videos are used, and their folds.
        tells: measures how well the matched columns predict the label.

    Raises:
        DataError: too few reals and fakes have similar metadata, or the matched columns still reveal the label.
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
    """Return the FOLDS table of the chosen videos, with a real and its matched fake in the same fold.

    If they were in two folds, a model would learn from the metadata of one the wrong label for the other. If pairs
    connect too many groups for even folds, pairs may be separated; groups never are.
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
    """Choose equally many reals and fakes from every cell (videos of similar values).

    Videos are drawn at random, but a second video of a group is drawn only when all groups of the cell have one. So as
    many groups as possible are kept.

    Args:
        index: INDEX rows.
        columns: the columns to match.
        cells: number of cells per doubling of a value; 0: only equal values share a cell.
        seed: decides the draw.

    Returns:
        Table ``video_id group_id label pair``, sorted by video; a real and a fake of equal ``pair`` are matched.
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
    """Return a table ``video_id group_id label home fold part target reason`` with one row per video and training.

    Training ``fold`` tests the videos of that fold and trains on the others. Videos that are not in ``folds`` are left
    out of all trainings.
    """
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
