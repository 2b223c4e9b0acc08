"""Forensic features: how they follow label, size and codec, and which of them a model relied on.

A tie is a number in [0, 1] that says how closely a feature follows another property of the video.
"""

from collections.abc import Mapping

import numpy as np
import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.wording import count_text, figure_text, interval_text
from fvc_lib.metrics.classification import roc_auc
from fvc_lib.metrics.intervals import group_interval

# Numbers of the index that a feature may follow.
TIES = {
    "size": pl.col("width") * pl.col("height"),
    "length": pl.col("num_frames"),
    "bit_rate": pl.col("bits_per_second"),
}
STRONG = 0.5  # from this tie on, a feature counts as a proxy
_FEWEST = 5  # videos


def feature_ties(features: pl.DataFrame, index: pl.DataFrame) -> pl.DataFrame:
    """Return how closely each column of ``features`` (FEATURES) follows size, length, bit rate and codec.

    Returns:
        One row per feature: ``feature size length bit_rate codec strongest auc missing``, the strongest tie first. A
        tie to a number is the absolute rank correlation (Spearman), a tie to the codec the correlation ratio of ranks.
        Ties are null with fewer than five videos, or if one of the two does not vary. ``auc`` is the ROC AUC of the
        feature alone, in the direction that makes it at least 0.5. ``missing`` is the share of videos without a value.
    """
    facts = features.join(index.drop("group_id", "label", strict=False), on="video_id", how="left")
    facts = facts.with_columns(**TIES, codec=pl.col("codec").fill_null(""))
    rows = []
    for name in features.drop("video_id", "group_id", "label").columns:
        known = facts.filter(pl.col(name).is_finite())
        ties = {tie: _tie(known, name, tie) for tie in (*TIES, "codec")}
        auc = None
        if known["label"].n_unique() == 2:
            above = float(roc_auc(theme.fake_labels(known), known[name].cast(pl.Float64)))
            auc = max(above, 1 - above)
        rows.append({"feature": name, **ties, "auc": auc, "missing": known.height})
    numbers = dict.fromkeys((*TIES, "codec", "auc", "missing"), pl.Float64)
    strongest = pl.max_horizontal(*TIES, "codec").alias("strongest")
    missing = 1 - pl.col("missing") / facts.height if facts.height else pl.lit(None, pl.Float64)
    table = pl.DataFrame(rows, schema={"feature": pl.String, **numbers}).select(
        "feature", *TIES, "codec", strongest, "auc", missing=missing
    )
    return table.sort("strongest", "feature", descending=[True, False], nulls_last=True)


def _tie(known: pl.DataFrame, name: str, other: str) -> float | None:
    """Return the tie between the feature ``name`` and the column ``other``; None with too few values.

    For a number it is the absolute rank correlation. For the codec it is the root of the share of the variance of ranks
    that lies between codecs.
    """
    pairs = known.select(pl.col(name).rank(), other).drop_nulls()
    if pairs.height < _FEWEST or min(column.n_unique() for column in pairs) == 1:
        return None
    if other == "codec":
        shares = pairs.select(pl.col(name).mean().over("codec").var(ddof=0) / pl.col(name).var(ddof=0))
        return float(np.sqrt(shares.item()))
    return abs(float(pairs.select(pl.corr(name, other, method="spearman")).item()))


def family_figure(features: pl.DataFrame, family: str, columns: Mapping[str, tuple[str, str]]) -> go.Figure:
    """Return a box plot of the features of one family in real and in fake videos.

    Boxes are quartiles, and whiskers end at 5 and 95 percent.

    Args:
        features: rows of FEATURES.
        family: name of the family.
        columns: maps each column of ``features`` to draw to the name of the feature and its unit.
    """
    shown = {column: text for column, text in columns.items() if features[column].drop_nulls().len()}
    if not shown:
        return theme.nothing_to_show(family, "No video has a value of this family.")
    finding = f"{family}: no feature can be compared, one of the labels has no value"
    aucs = {column: _auc_interval(features.select(column, "label", "group_id").drop_nulls()) for column in shown}
    known = {column: auc for column, auc in aucs.items() if auc is not None}
    if known:
        best = max(known, key=lambda column: abs(known[column][0] - 0.5))
        side = "higher" if known[best][0] > 0.5 else "lower"
        auc = f"AUC {interval_text(*known[best])}, the largest of {len(known)}"
        finding = f"{family}: real and fake videos differ most in {shown[best][0]}, {side} in fakes, {auc}"
    measured = features.filter(pl.any_horizontal(pl.col(list(shown)).is_not_null()))
    # Two columns, so that names do not overlap on a phone.
    drawn, places = theme.panel_grid(
        finding, f"{theme.videos_and_groups(measured)}; means over a video", [name for name, _ in shown.values()],
        columns=2, panel_height=150, shared_yaxes=True,
    )  # fmt: skip
    for (column, (_, unit)), where in zip(shown.items(), places, strict=True):
        for label, color in theme.LABEL_COLORS.items():
            values = features.filter(label=label)[column].drop_nulls().cast(pl.Float64)
            if values.is_empty():
                continue
            low, first, middle, third, high = np.quantile(values, [0.05, 0.25, 0.5, 0.75, 0.95])
            ends = {"q1": [first], "median": [middle], "q3": [third], "lowerfence": [low], "upperfence": [high]}
            look = {"line": {"color": color}, "fillcolor": theme.translucent(color, 0.25), "hoverinfo": "x"}
            box = go.Box(y=[label], orientation="h", name=label, whiskerwidth=0.5, **look, **ends)
            drawn.add_trace(box, **where)
        drawn.update_xaxes(title_text=figure_text(unit), nticks=4, tickangle=0, **where)
    drawn.update_yaxes(showgrid=False, type="category", autorange="reversed")
    return drawn.update_layout(showlegend=False)


def _auc_interval(known: pl.DataFrame) -> tuple[float, float, float] | None:
    """Return ``(value, low, high)``: the ROC AUC of a feature alone, with its 95% interval over groups.

    None if there is one label only, or fewer than three groups. ``known`` has the feature as its first column, then
    ``label group_id``, without nulls. The value is above 0.5 if the feature is higher in fakes.
    """
    if known["label"].n_unique() < 2 or known["group_id"].n_unique() < 3:
        return None
    scores, groups = known.to_series().cast(pl.Float64).to_numpy(), known["group_id"].to_list()
    interval = group_interval(theme.fake_labels(known), scores, groups, roc_auc, replicates=500, seed=0)
    return interval.value, interval.low, interval.high


def importance_figures(families: pl.DataFrame, *, confidence: float = 0.95) -> list[go.Figure]:
    """Return a list with one figure: how far the AUC falls without each family of features.

    ``families`` has the columns ``family features auc_lost low high``. If it is empty, which is so if the features have
    no names, the list is empty.
    """
    if families.is_empty():
        return []
    needed = families.filter(pl.col("low") > 0)["family"].head(3).to_list()
    rows = [
        theme.Row(figure_text(f"{name} ({count_text(number, 'feature')})"), value, low, high)
        for name, number, value, low, high in families.rows()
    ]
    drawn = theme.interval_chart(
        f"Without {', '.join(needed)} the AUC falls" if needed else "No single family is shown to be needed",
        "Fall of the AUC within folds when a family's values are permuted among the test videos, mean of ten "
        f"permutations; {confidence:.0%} intervals over groups. Families with the same information stand in for each "
        "other",
        rows,
        names="Family",
        values="Fall of the AUC",
        shown=None,
        chance=0.0,
    )
    return [drawn]
