"""Slices and an audit of a made-up run, in the shape that 05 writes; their numbers are computed, not chosen."""

import numpy as np
import polars as pl

from fvc_lib.metrics.classification import roc_auc
from fvc_lib.metrics.intervals import group_interval
from fvc_lib.services import tables


def slices_of(index: pl.DataFrame, predictions: pl.DataFrame) -> pl.DataFrame:
    known = predictions.join(index.select("video_id", "codec", "platform"), on="video_id")
    known = known.with_columns(platform=pl.col("platform").fill_null("not known"))
    rows = []
    for by in ("codec", "platform"):
        for (value,), part in sorted(known.group_by(by)):
            labels = (part["label"] == "fake").cast(pl.Int64).to_numpy()
            interval = group_interval(labels, part["score"], part["group_id"].to_list(), roc_auc, replicates=100)
            number, low, high = (
                float(end) if np.isfinite(end) else None for end in (interval.value, interval.low, interval.high)
            )
            rows.append(
                {
                    "slice_by": by, "value": value, "metric": "roc_auc", "number": number, "low": low, "high": high,
                    "num_videos": part.height, "num_real": int((labels == 0).sum()), "num_fake": int(labels.sum()),
                    "num_groups": part["group_id"].n_unique(), "is_small": part["group_id"].n_unique() < 16,
                }
            )  # fmt: skip
    return pl.DataFrame(rows, schema={name: column.dtype for name, column in tables.SLICES.columns.items()})


def audit_of(predictions: pl.DataFrame) -> pl.DataFrame:
    shared = predictions.group_by("group_id").agg(pl.col("fold").n_unique()).filter(pl.col("fold") > 1).height
    rows = [
        {"check": "groups_in_two_folds", "count": shared, "number": None, "finding": "No group is in two folds.",
         "passed": shared == 0},
        {"check": "videos", "count": predictions.height, "number": None, "finding": "So many were judged.",
         "passed": None},
    ]  # fmt: skip
    return pl.DataFrame(rows, schema={name: column.dtype for name, column in tables.LEAKAGE_AUDIT.columns.items()})
