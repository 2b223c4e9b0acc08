"""How much of a result recognising the group would give, on labels alone: the same folds dealt by row and by group."""

from __future__ import annotations

import polars as pl

from fvc_lib.corpus.folds import make_folds
from fvc_lib.learning import controls
from fvc_lib.learning.results import interval_rows, measured
from fvc_lib.services.config import RunConfig

_COLUMNS = {
    "split": pl.String, "value": pl.Float64, "low": pl.Float64, "high": pl.Float64, "num_rows": pl.Int64,
    "num_groups": pl.Int64,
}  # fmt: skip


def group_recognition(videos: pl.DataFrame, config: RunConfig) -> pl.DataFrame:
    """AUC of an oracle that only knows the labels of a group's other videos, ``by row`` and ``by group``.

    Needs no file: labels and groups are enough, so it can be asked of a corpus's annotations
    (``corpus.annotations.undisputed_labels``).

    Args:
        videos: columns ``video_id group_id label``, each video once.
        config: number of folds, replicates, confidence and seed.

    Returns:
        ``split value low high num_rows num_groups``; the value is the AUC within folds, its ends are of a bootstrap
        over groups.

    Raises:
        DataError: fewer groups with a label than folds.
    """
    folds = make_folds(videos, config.num_folds, config.seed)
    dealt = {"by row": controls.split_by_row(folds, seed=config.seed), "by group": folds}
    scored = {split: controls.group_lookup(rows) for split, rows in dealt.items()}
    found = [(split, *interval_rows(rows, [measured("roc_auc", rows)], config)[0]) for split, rows in scored.items()]
    return pl.DataFrame(found, schema=_COLUMNS, orient="row")
