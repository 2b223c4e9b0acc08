"""How far forensic features follow what they should not: the original size, length, bit rate and codec of a video."""

import numpy as np
import numpy.typing as npt
import polars as pl

from fvc_lib.metrics.classification import roc_auc
from fvc_lib.metrics.intervals import group_interval

Values = npt.NDArray[np.float64]

# By what ties are called: the number of the index that a feature may follow.
NUMBERS = {
    "size": pl.col("width") * pl.col("height"),
    "length": pl.col("num_frames"),
    "bit_rate": pl.col("bits_per_second"),
}
STRONG = 0.5  # a tie from which on a feature is named as a proxy
_FEWEST = 5  # videos below which nothing is told
NOT_FEATURES = ("video_id", "group_id", "label")


def feature_ties(features: pl.DataFrame, index: pl.DataFrame) -> pl.DataFrame:
    """Per column of ``features`` (FEATURES) how far it follows size, length, bit rate and codec, strongest first.

    Columns ``feature size length bit_rate codec strongest auc missing``. Ties are 0 to 1: to numbers the size of
    Spearman's rank correlation, to the codec the correlation ratio of ranks; null below five videos, or where one of
    the two does not vary. ``auc`` is that of the feature alone, whichever side fakes are on (0.5 to 1); ``missing``
    the share of videos without a value.
    """
    facts = features.select("video_id").join(index, on="video_id", how="left", maintain_order="left")
    numbers = facts.select(**NUMBERS).cast(pl.Float64).fill_null(np.nan)
    codecs = facts["codec"].fill_null("").to_numpy()
    labels = (features["label"] == "fake").cast(pl.Int64).to_numpy()
    rows = []
    for name in features.columns:
        if name in NOT_FEATURES:
            continue
        values = features[name].cast(pl.Float64).fill_null(np.nan).to_numpy()
        known = np.isfinite(values)
        ties = {other: _rank_correlation(values, numbers[other].to_numpy()) for other in NUMBERS}
        ties["codec"] = _correlation_ratio(values[known], codecs[known])
        both = len(set(labels[known].tolist())) == 2
        auc = float(roc_auc(labels[known], values[known], np.ones(known.sum()))) if both else None
        rows.append(
            {
                "feature": name,
                **ties,
                "strongest": max((tie for tie in ties.values() if tie is not None), default=None),
                "auc": None if auc is None else max(auc, 1 - auc),
                "missing": float(1 - known.mean()) if len(known) else None,
            }
        )
    kinds = dict.fromkeys(["feature", *NUMBERS, "codec", "strongest", "auc", "missing"], pl.Float64)
    table = pl.DataFrame(rows, schema=kinds | {"feature": pl.String})
    return table.sort("strongest", "feature", descending=[True, False], nulls_last=True)


def auc_interval(values: pl.Series, labels: pl.Series, groups: pl.Series) -> tuple[float, float, float] | None:
    """AUC of one feature alone, fakes above, and its 95% interval over groups; none where a label has no value."""
    known = values.is_not_null()
    fakes = (labels.filter(known) == "fake").cast(pl.Int64).to_numpy()
    if len(set(fakes.tolist())) < 2 or groups.filter(known).n_unique() < 3:
        return None
    scores = values.filter(known).cast(pl.Float64).to_numpy()
    found = group_interval(fakes, scores, groups.filter(known).to_numpy(), roc_auc, replicates=500, seed=0)
    return found.value, found.low, found.high


def _rank_correlation(one: Values, other: Values) -> float | None:
    known = np.isfinite(one) & np.isfinite(other)
    return _correlation_of(_ranks(one[known]), _ranks(other[known]))


def _correlation_of(one: Values, other: Values) -> float | None:
    if one.size < _FEWEST or np.ptp(one) == 0 or np.ptp(other) == 0:
        return None
    return float(abs(np.corrcoef(one, other)[0, 1]))


def _correlation_ratio(values: Values, kinds: npt.NDArray[np.object_]) -> float | None:
    ranks = _ranks(values)
    names, codes = np.unique(kinds, return_inverse=True)
    if ranks.size < _FEWEST or len(names) < 2 or np.ptp(ranks) == 0:
        return None
    counts = np.bincount(codes)
    means = np.bincount(codes, weights=ranks) / counts
    between = float((counts * (means - ranks.mean()) ** 2).sum())
    return float(np.sqrt(between / ((ranks - ranks.mean()) ** 2).sum()))


def _ranks(values: Values) -> Values:
    ranks: Values = pl.Series(values).rank().to_numpy()
    return ranks
