"""Forensic features: how they follow label, size and codec, and which of them a model relied on."""

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
        ``feature size length bit_rate codec strongest auc missing``, the strongest tie first. Ties lie in [0, 1]:
        the absolute rank correlation (Spearman) with a number, the correlation ratio of ranks with the codec. They
        are null below five videos, or if either does not vary. ``auc`` is that of the feature alone in its better
        direction (0.5 to 1). ``missing`` is the share of videos without a value.
    """
    facts = features.join(index.drop("group_id", "label", strict=False), on="video_id", how="left")
    facts = facts.with_columns(**TIES, codec=pl.col("codec").fill_null(""))
    rows = []
    for name in features.columns:
        if name in ("video_id", "group_id", "label"):
            continue
        known = facts.filter(pl.col(name).is_finite())
        ties = {tie: _rank_correlation(known.select(name, tie).drop_nulls()) for tie in TIES}
        ties["codec"] = _correlation_ratio(known.select(pl.col(name).rank(), "codec"))
        auc = None
        if known["label"].n_unique() == 2:
            above = float(roc_auc(known["label"] == "fake", known[name].cast(pl.Float64), np.ones(known.height)))
            auc = max(above, 1 - above)
        strongest = max((tie for tie in ties.values() if tie is not None), default=None)
        missing = 1 - known.height / facts.height if facts.height else None
        rows.append({"feature": name, **ties, "strongest": strongest, "auc": auc, "missing": missing})
    numbers = dict.fromkeys((*TIES, "codec", "strongest", "auc", "missing"), pl.Float64)
    table = pl.DataFrame(rows, schema={"feature": pl.String, **numbers})
    return table.sort("strongest", "feature", descending=[True, False], nulls_last=True)


def _rank_correlation(pairs: pl.DataFrame) -> float | None:
    if pairs.height < _FEWEST or min(column.n_unique() for column in pairs) == 1:
        return None
    return abs(float(pairs.select(pl.corr(*pairs.columns, method="spearman")).item()))


def _correlation_ratio(ranks: pl.DataFrame) -> float | None:
    """Return the square root of the share of variance between codecs; ``ranks`` has the ranks and the codec."""
    if ranks.height < _FEWEST or min(column.n_unique() for column in ranks) == 1:
        return None
    rank = pl.col(ranks.columns[0])
    between = ranks.select(rank.mean().over("codec").var(ddof=0)).item()
    return float(np.sqrt(between / ranks.select(rank.var(ddof=0)).item()))


def family_figure(features: pl.DataFrame, family: str, columns: Mapping[str, tuple[str, str]]) -> go.Figure:
    """Draw one family's features in real and in fake videos as boxes of quartiles; whiskers at 5 and 95 percent.

    Args:
        features: FEATURES schema.
        family: its name.
        columns: name and unit of the feature in each column to draw.
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
            values = features.filter(label=label)[column].drop_nulls().cast(pl.Float64).to_numpy()
            if not values.size:
                continue
            low, first, middle, third, high = np.quantile(values, [0.05, 0.25, 0.5, 0.75, 0.95]).tolist()
            ends = {"q1": [first], "median": [middle], "q3": [third], "lowerfence": [low], "upperfence": [high]}
            box = go.Box(y=[label], orientation="h", name=label, whiskerwidth=0.5, hoverinfo="x", **ends)
            box.line.color, box.fillcolor = color, theme.translucent(color, 0.25)
            drawn.add_trace(box, **where)
        drawn.update_xaxes(title_text=figure_text(unit), nticks=4, tickangle=0, **where)
    drawn.update_yaxes(showgrid=False, type="category", autorange="reversed")
    return drawn.update_layout(showlegend=False)


def _auc_interval(known: pl.DataFrame) -> tuple[float, float, float] | None:
    """Return the AUC of a feature alone with its 95% interval over groups; None with one label or two groups.

    ``known`` has the feature, then ``label group_id``, without nulls. The AUC is above 0.5 if fakes are higher.
    """
    if known["label"].n_unique() < 2 or known["group_id"].n_unique() < 3:
        return None
    labels, scores = theme.fake_labels(known), known.to_series().cast(pl.Float64).to_numpy()
    interval = group_interval(labels, scores, known["group_id"].to_list(), roc_auc, replicates=500, seed=0)
    return interval.value, interval.low, interval.high


def importance_figures(families: pl.DataFrame, *, confidence: float = 0.95) -> list[go.Figure]:
    """Draw ``family features auc_lost low high`` as points with intervals; nothing for a trunk's unnamed features."""
    if families.is_empty():
        return []
    needed = families.filter(pl.col("low") > 0)["family"].head(3).to_list()
    rows = []
    for name, number, value, low, high in families.rows():
        rows.append(theme.Row(figure_text(f"{name} ({count_text(number, 'feature')})"), value, low, high))
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
