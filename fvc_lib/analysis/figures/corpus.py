"""Figures and tables of a corpus: labels by property, sizes of groups, and forensic features.

A tie is a number in [0, 1] that says how closely a feature follows another property of the video, such as its size.
"""

import numpy as np
import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.wording import count_text
from fvc_lib.metrics.classification import roc_auc

_MOST_VALUES = 14
_GROUP_COLORS = {
    "real only": theme.REAL, "fake only": theme.FAKE, "real and fake": theme.MODEL, "neither": theme.CONTROL,
}  # fmt: skip


def index_overview_figure(counts: pl.DataFrame, by: str) -> go.Figure:
    """Return a bar chart of the number of real and fake videos for each value of one property.

    The 14 most frequent values are drawn, and the others are summed as "other".

    Args:
        counts: rows of ``queries.index_counts`` with ``value label num_videos``.
        by: name of the property, such as ``codec``.
    """
    if counts.is_empty():
        return theme.nothing_to_show(f"Videos by {by}", "The index has no videos yet.")
    number = pl.col("num_videos")
    by_value = counts.group_by("value").agg(all=number.sum(), most=number.max())
    names = by_value.sort("all", "value", descending=[True, False])["value"]
    shown = names.head(_MOST_VALUES).to_list()
    is_shown = pl.col("value").is_in(shown)
    value = pl.when(is_shown).then("value").otherwise(pl.lit("other")).alias("value")
    per_label = dict(counts.group_by("label").agg(number.sum()).iter_rows())
    total = sum(per_label.values())
    # The second percentage is the accuracy of guessing the more frequent label of each value. It describes the sample
    # and tests nothing. The test is the metadata-only control.
    guessed = max(per_label.values()) / total
    guessed_by_value = by_value["most"].sum() / total
    return theme.bar_chart(
        f"Knowing the {by} raises a guess of the label from {guessed:.0%} to {guessed_by_value:.0%} of these videos",
        theme.by_label(per_label),
        counts.group_by(value, "label").agg(number.sum()),
        theme.LABEL_COLORS,
        names=[*shown, *["other"] * (len(names) > _MOST_VALUES)],
        titles=(by.capitalize(), "Videos"),
    )


def group_sizes_figure(members: pl.DataFrame, *, members_are: str = "video") -> go.Figure:
    """Return a bar chart of the number of groups of each size: 1, 2 to 3, 4 to 7 members and so on.

    A bar is divided into groups with reals only, fakes only, both, and neither.

    Args:
        members: one row per member of a group, with ``group_id label``.
        members_are: name of a member in the singular, such as ``video``.
    """
    if members.is_empty():
        return theme.nothing_to_show("Sizes of the groups", f"There is no {members_are} yet.")
    has_real, has_fake = (pl.col("label").eq(label).any() for label in ("real", "fake"))
    one_label = pl.when(has_real).then(pl.lit("real only")).when(has_fake).then(pl.lit("fake only"))
    one_or_none = one_label.otherwise(pl.lit("neither"))
    kind = pl.when(has_real & has_fake).then(pl.lit("real and fake")).otherwise(one_or_none)
    groups = members.group_by("group_id").agg(pl.len().alias("size"), kind=kind)
    step = pl.col("size").log(2).floor().cast(pl.Int64)
    last_step = groups.select(step.max()).item()
    names = ["1", *(f"{1 << power} to {(2 << power) - 1}" for power in range(1, last_step + 1))]
    name_of_step = step.replace_strict(dict(enumerate(names)))
    sizes = groups.group_by(name_of_step, "kind").len()
    share = pl.col("size").max() / pl.col("size").sum()
    largest_share = groups.select(share).item()
    counted = f"n = {count_text(groups.height, 'group')} of {count_text(members.height, members_are)}"
    return theme.bar_chart(
        f"The largest group holds {largest_share:.0%} of all {members_are}s",
        f"{counted}; a group stays whole in every split",
        sizes,
        _GROUP_COLORS,
        names=names,
        titles=(f"{members_are.capitalize()}s in the group", "Groups"),
    )


# --- Forensic features: how they follow label, size and codec, and which of them a model relied on

# Properties of a video that a feature may follow, computed from columns of the index.
TIES = {
    "size": pl.col("width") * pl.col("height"),
    "length": pl.col("num_frames"),
    "bit_rate": pl.col("bits_per_second"),
}
STRONG = 0.5  # a feature with at least this tie counts as a proxy of the property
_FEWEST = 5  # fewest videos for a tie


def feature_ties(features: pl.DataFrame, index: pl.DataFrame) -> pl.DataFrame:
    """Return a table of the ties between forensic features and other properties of the videos, one row per feature.

    A tie is a number in [0, 1] that says how closely a feature follows a property. The properties are size (width *
    height), length (number of frames), bit rate and codec.

    Args:
        features: rows of FEATURES, one column per feature.
        index: rows of INDEX, which hold the properties of the videos.

    Returns:
        The columns ``feature size length bit_rate codec strongest auc missing``, sorted by ``strongest``, the largest
        first.

        - ``size``, ``length`` and ``bit_rate`` are ties to numbers: absolute rank correlations (Spearman).
        - ``codec`` is the tie to the codec: the correlation ratio of ranks.
        - ``strongest`` is the largest of the four ties.
        - ``auc`` is the ROC AUC of the feature alone, or 1 minus it, whichever is larger. Null with only one label.
        - ``missing`` is the share of videos without a value of the feature.

        A tie is null with fewer than five videos, or if the feature or the property does not vary.
    """
    facts = features.join(index.drop("group_id", "label", strict=False), on="video_id", how="left")
    facts = facts.with_columns(**TIES, codec=pl.col("codec").fill_null(""))
    rows = []
    for name in features.drop("video_id", "group_id", "label").columns:
        known = facts.filter(pl.col(name).is_finite())
        auc = None
        if known["label"].n_unique() == 2:
            above = float(roc_auc(theme.fake_labels(known), known[name].cast(pl.Float64)))
            auc = max(above, 1 - above)
        ties = [_tie(known, name, tie) for tie in (*TIES, "codec")]
        strongest = max((tie for tie in ties if tie is not None), default=None)
        rows.append((name, *ties, strongest, auc, 1 - known.height / facts.height))
    numbers = dict.fromkeys((*TIES, "codec", "strongest", "auc", "missing"), pl.Float64)
    table = pl.DataFrame(rows, {"feature": pl.String, **numbers}, orient="row")
    return table.sort("strongest", "feature", descending=[True, False], nulls_last=True)


def _tie(known: pl.DataFrame, name: str, other: str) -> float | None:
    """Return the tie in [0, 1] of a feature to a property: how closely the feature follows it.

    ``known`` has one row per video, with the feature in column ``name`` and the property in column ``other``. For a
    number it is the absolute rank correlation. For the codec it is the square root of the share of the variance of
    ranks that lies between codecs. Return None with fewer than five videos, or if a column does not vary.
    """
    pairs = known.select(pl.col(name).rank(), other).drop_nulls()
    if pairs.height < _FEWEST or min(column.n_unique() for column in pairs) == 1:
        return None
    if other == "codec":
        shares = pairs.select(pl.col(name).mean().over("codec").var(ddof=0) / pl.col(name).var(ddof=0))
        return float(np.sqrt(shares.item()))
    return abs(float(pairs.select(pl.corr(name, other, method="spearman")).item()))
