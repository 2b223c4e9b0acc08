"""The schemas of the tasks image and video_text: one split instead of folds, made of whole groups like those.

Read and written with ``tables.read_table`` and ``write_table``; what cannot be used stands in ``tables.REJECTED``.
"""

from __future__ import annotations

import pandera.polars as pa
import polars as pl

from fvc_lib.services.table_columns import finite_column, group_column, text_column

PARTS = ("train", "validation", "test")


def _part() -> pa.Column:
    return text_column(checks=pa.Check.isin(PARTS))


def _sha256() -> pa.Column:
    return text_column(checks=pa.Check.str_length(64, 64))


IMAGES = pa.DataFrameSchema(
    {
        "image_id": text_column(unique=True, checks=pa.Check.str_length(min_value=8)),  # from content
        "path": text_column(unique=True),  # relative to the corpus root, with '/'
        "class_label": text_column(nullable=True),  # null: the corpus says none of this image
        "group_id": group_column(),  # dish, stated group or content: never on both sides of the split
        "part": _part(),
        "split_source": text_column(checks=pa.Check.isin(("official", "made"))),
        "source": text_column(),  # food101, nutrition5k, folder or manifest
        "width": pa.Column(pl.Int64, pa.Check.gt(0)),
        "height": pa.Column(pl.Int64, pa.Check.gt(0)),
        "size_bytes": pa.Column(pl.Int64, pa.Check.gt(0)),
        "content_sha256": _sha256(),
    },
    strict=True,
    ordered=True,
    name="images",
)

# Only what is known: an image without a row for a target has no such number.
IMAGE_TARGETS = pa.DataFrameSchema(
    {
        "image_id": text_column(),
        "group_id": group_column(),
        "target": text_column(),  # calories, mass, fat, carbohydrate, protein, or the manifest's column
        "unit": text_column(),  # kcal, g, or empty
        "value": finite_column(),
    },
    unique=["image_id", "target"],
    strict=True,
    ordered=True,
    name="image_targets",
)

# Of the test part, images with a class.
IMAGE_PREDICTIONS = pa.DataFrameSchema(
    {
        "image_id": text_column(unique=True),
        "group_id": group_column(),
        "path": text_column(),
        "class_label": text_column(),
        "predicted_label": text_column(),
        "probability": pa.Column(pl.Float64, pa.Check.in_range(0, 1)),  # of the predicted class
        "rank_of_class": pa.Column(pl.Int64, pa.Check.ge(1)),  # 1: top-1; ties count against the model
    },
    strict=True,
    ordered=True,
    name="image_predictions",
)

# Of the test part, where the number is known.
TARGET_PREDICTIONS = pa.DataFrameSchema(
    {
        "image_id": text_column(),
        "group_id": group_column(),
        "path": text_column(),
        "target": text_column(),
        "unit": text_column(),
        "value": finite_column(),
        "predicted": finite_column(),
    },
    unique=["image_id", "target"],
    strict=True,
    ordered=True,
    name="target_predictions",
)

MEASURED_FITS = pa.DataFrameSchema(
    {
        "varied": text_column(checks=pa.Check.isin(("batch_size", "image_size"))),
        "batch_size": pa.Column(pl.Int64, pa.Check.gt(0)),  # images at once
        "image_size": pa.Column(pl.Int64, pa.Check.gt(0)),  # pixels
        "fits": pa.Column(pl.Boolean, nullable=True),  # null: could not be tried, see detail
        "peak_bytes": pa.Column(pl.Int64, pa.Check.ge(0), nullable=True),  # predicted for the whole training process
        "seconds_per_epoch": pa.Column(pl.Float64, pa.Check.ge(0), nullable=True),  # over the training part
        "device": text_column(),
        "detail": text_column(),  # how memory ended, or why nothing could be measured; else empty
    },
    strict=True,
    ordered=True,
    name="measured_fits",
)

# One row per pair of a video and a text: a text may stand beside many videos, a video beside several texts.
VIDEO_TEXTS = pa.DataFrameSchema(
    {
        "pair_id": text_column(unique=True),
        "video_id": text_column(checks=pa.Check.str_length(min_value=8)),  # from content, as in tables.INDEX
        "path": text_column(),  # relative to the manifest, with '/'
        "text_id": text_column(),  # from the text: equal texts are one
        "text": text_column(checks=pa.Check.str_length(min_value=1)),
        "group_id": group_column(),
        "part": _part(),
        "split_source": text_column(checks=pa.Check.isin(("official", "made"))),
        "num_frames": pa.Column(pl.Int64, pa.Check.gt(0)),
        "duration_seconds": pa.Column(pl.Float64, nullable=True),
        "content_sha256": _sha256(),
    },
    strict=True,
    ordered=True,
    name="video_texts",
)

# Of the test part: at which place a query found the first of what belongs to it.
RETRIEVAL_RANKS = pa.DataFrameSchema(
    {
        "direction": text_column(checks=pa.Check.isin(("video_to_text", "text_to_video"))),
        "query_id": text_column(),  # video_id or text_id
        "group_id": group_column(),
        "rank": pa.Column(pl.Int64, pa.Check.ge(1)),  # ties count against the model
        "num_candidates": pa.Column(pl.Int64, pa.Check.ge(1)),
        "num_positives": pa.Column(pl.Int64, pa.Check.ge(1)),
    },
    unique=["direction", "query_id"],
    strict=True,
    ordered=True,
    name="retrieval_ranks",
)

CAPTIONS = pa.DataFrameSchema(
    {
        "video_id": text_column(unique=True),
        "group_id": group_column(),
        "path": text_column(),
        "caption": text_column(),  # as the model wrote it; may be empty
        "references": text_column(),  # the texts that stand beside the video, one per line
    },
    strict=True,
    ordered=True,
    name="captions",
)

# Long, like tables.RESULTS: what, of which part, by whom.
TASK_RESULTS = pa.DataFrameSchema(
    {
        "source": text_column(),  # model, or the control's name: majority_class, mean_predictor, chance, ...
        "subject": text_column(),  # all, class:NAME, target:NAME, video_to_text, text_to_video, captions
        "metric": text_column(),
        "unit": text_column(),  # kcal, g, or empty for a number without one
        "value": pa.Column(pl.Float64, nullable=True),
        "low": pa.Column(pl.Float64, nullable=True),  # cluster bootstrap over groups, where it was made
        "high": pa.Column(pl.Float64, nullable=True),
        "num_samples": pa.Column(pl.Int64),
        "num_groups": pa.Column(pl.Int64),
    },
    unique=["source", "subject", "metric"],
    strict=True,
    ordered=True,
    name="task_results",
)
