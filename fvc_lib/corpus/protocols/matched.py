"""``length_matched`` and ``metadata_matched``: folds of a subset in which what is matched tells no label.

Coarsened exact matching (S. Iacus, G. King and G. Porro, "Causal inference without balance checking: coarsened exact
matching", Political Analysis 20, 2012): videos are sorted into cells of equal codec and of like length and size, and of
each cell as many reals as fakes are taken. Within a wide cell the rest of a difference can still tell the label, so
cells are halved until a classifier that sees nothing else is at chance, out of fold; at last a cell holds equal
values only.
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
METADATA = (*LENGTH, "codec", "width", "height")
UNMATCHED = "no video of the other label is left that is like it"
CELLS_PER_OCTAVE = (1, 2, 4, 8, 16, 0)  # 0: equal values only
_CHANCE = 0.55  # with few videos an interval holds chance whatever the value is

# From the index's rows that are taken, folds of them, and the columns: AUC of what these columns tell, and its low end.
Tells = Callable[[pl.DataFrame, pl.DataFrame, tuple[str, ...]], tuple[float | None, float | None]]


def matched_columns(protocol: str) -> tuple[str, ...]:
    """Return the columns of the index that ``protocol`` matches."""
    return LENGTH if protocol == LENGTH_MATCHED else METADATA


def matched(index: pl.DataFrame, protocol: str, num_folds: int, seed: int, tells: Tells) -> pl.DataFrame:
    """Return ``video_id group_id label fold target part reason``, one row per video and fold.

    Raises:
        DataError: too few videos of both labels are alike, or the matched columns still tell the label.
    """
    columns = matched_columns(protocol)
    for cells in CELLS_PER_OCTAVE:
        chosen = matched_videos(index, columns, cells, seed)
        taken = index.filter(pl.col("video_id").is_in(chosen["video_id"].implode()))
        if taken.is_empty() or most_folds(taken) < num_folds:
            break
        folds = _fold_pairs(chosen, num_folds, seed)
        value, low = tells(taken, folds, columns)
        if low is None or value is None or (low <= 0.5 and value <= _CHANCE) or (cells == 0 and low <= 0.5):
            return parts_of_folds(index, folds, num_folds)
    groups = " and ".join(
        f"{groups_text(taken.filter(pl.col('label') == label)['group_id'].n_unique())} with {label} videos"
        for label in LABELS
    )
    raise DataError(
        f"protocol {protocol}: where reals and fakes are alike in {', '.join(columns)}, so that these do not tell them "
        f"apart, {taken.height} of {index.height} videos are left, in {groups}; wanted {num_folds} groups of each "
        "label or more. Cut or re-encode the videos alike before they are indexed, set num_folds lower, or use -p "
        "protocol kfold and look at the control on metadata."
    )


def _fold_pairs(chosen: pl.DataFrame, num_folds: int, seed: int) -> pl.DataFrame:
    """Return FOLDS with a real and its matched fake in one fold; apart, a model learns the wrong label of the other.

    If the connected groups are too large to be dealt evenly, only whole groups stay together.
    """
    groups, pairs = (chosen[name].unique().sort().to_list() for name in ("group_id", "pair"))
    connected = Components(len(groups) + len(pairs))
    place_of_group = {group: place for place, group in enumerate(groups)}
    place_of_pair = {pair: len(groups) + place for place, pair in enumerate(pairs)}
    for group, pair in chosen.select("group_id", "pair").iter_rows():
        connected.join(place_of_group[group], place_of_pair[pair])
    of_group = {group: f"{connected.label[place]}" for group, place in place_of_group.items()}
    together = chosen.with_columns(group_id=pl.col("group_id").replace_strict(of_group))
    largest = together["group_id"].value_counts()["count"].to_numpy().max()
    if most_folds(together) < num_folds or largest > chosen.height / num_folds:
        return make_folds(chosen, num_folds, seed)
    dealt = make_folds(together, num_folds, seed).drop("group_id")
    return dealt.join(chosen.select("video_id", "group_id"), on="video_id").select(*FOLDS.columns).sort("video_id")


def matched_videos(index: pl.DataFrame, columns: tuple[str, ...], cells: int, seed: int) -> pl.DataFrame:
    """Return ``video_id group_id label pair`` of equally many reals and fakes of each cell.

    ``cells`` is their number per doubling of a value; 0: equal values.

    Of a group that has many in a cell others' come first, so that as many groups as possible stay. The rest is drawn.
    """
    known = index.sort("video_id").with_columns(
        pl.Series("drawn", np.random.default_rng([seed, MATCHES_DRAWN]).permutation(index.height)),
        cell=_cell(columns, cells),
    )
    in_group = pl.col("drawn").rank("ordinal").over("cell", "label", "group_id")
    known = known.with_columns(in_group=in_group)
    order = pl.struct("in_group", "drawn").rank("ordinal").over("cell", "label")
    of_label = [(pl.col("label") == label).sum().over("cell") for label in LABELS]
    taken = known.with_columns(order=order).filter(pl.col("order") <= pl.min_horizontal(*of_label))
    pair = pl.format("{} {}", "cell", "order")
    return taken.select("video_id", "group_id", "label", pair=pair).sort("video_id")


def _cell(columns: tuple[str, ...], cells: int) -> pl.Expr:
    of = []
    for name in columns:
        value = pl.col(name)
        if name != "codec" and cells:
            value = (value.cast(pl.Float64).log(2) * cells).floor()
        of.append(value.cast(pl.String).fill_null("not known"))
    return pl.concat_str(of, separator="|")


def parts_of_folds(index: pl.DataFrame, folds: pl.DataFrame, num_folds: int) -> pl.DataFrame:
    """Return folds as parts of each training; videos without a fold are left out of all."""
    videos = index.select("video_id", "group_id", "label").join(
        folds.select("video_id", home="fold"), on="video_id", how="left"
    )
    part = (
        pl.when(pl.col("home").is_null()).then(pl.lit(LEFT_OUT))
        .when(pl.col("home") == pl.col("fold")).then(pl.lit("test"))
        .otherwise(pl.lit("train"))
    )  # fmt: skip
    return (
        videos.join(pl.DataFrame({"fold": range(num_folds)}, schema={"fold": pl.Int64}), how="cross")
        .with_columns(part=part, target=pl.lit(None, pl.String))
        .with_columns(reason=pl.when(pl.col("part") == LEFT_OUT).then(pl.lit(UNMATCHED)))
        .drop("home")
    )
