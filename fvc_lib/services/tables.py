"""The schemas stages talk through, checked on every write and every read.

Videos are named by ``video_id`` (from content, so it is the same in any folder of any machine); every table carries
``group_id``, which has no default: rows of one group never sit on both sides of a split. Labels are ``real`` and
``fake`` here and 0 and 1 only inside a model.
"""

from __future__ import annotations

import io
from pathlib import Path

import pandera.polars as pa
import polars as pl
from pandera.errors import SchemaError, SchemaErrors

from fvc_lib.services.atomic_files import atomic_output
from fvc_lib.services.errors import DataError
from fvc_lib.services.table_columns import LABELS as LABELS
from fvc_lib.services.table_columns import group_column as _group
from fvc_lib.services.table_columns import label_column as _label
from fvc_lib.services.table_columns import text_column as _text

INDEX = pa.DataFrameSchema(
    {
        "video_id": _text(unique=True, checks=pa.Check.str_length(min_value=8)),
        "path": _text(unique=True),  # relative to the corpus root, with '/'
        "label": _label(),
        "group_id": _group(),
        "source_id": _text(),  # the platform's id, or the path: what the label source calls the video
        "label_source": _text(),  # folder, manifest or fvc2018
        "stated_group": _text(nullable=True),  # the group the label source gave, before any were joined
        "manipulation": _text(nullable=True),
        "platform": _text(nullable=True),
        "codec": _text(),
        "container": _text(),
        "pixel_format": _text(nullable=True),
        "width": pa.Column(pl.Int64, pa.Check.gt(0)),
        "height": pa.Column(pl.Int64, pa.Check.gt(0)),
        "frames_per_second": pa.Column(pl.Float64, nullable=True),
        "num_frames": pa.Column(pl.Int64, pa.Check.gt(0)),
        "duration_seconds": pa.Column(pl.Float64, nullable=True),
        "rotation_degrees": pa.Column(pl.Int64, pa.Check.isin([0, 90, 180, 270])),
        "has_audio": pa.Column(pl.Boolean),
        "size_bytes": pa.Column(pl.Int64, pa.Check.gt(0)),
        "bits_per_second": pa.Column(pl.Float64, nullable=True),
        "content_sha256": _text(checks=pa.Check.str_length(64, 64)),
        "perceptual_hash": _text(nullable=True),
    },
    strict=True,
    ordered=True,
    name="index",
)

REJECTED = pa.DataFrameSchema(
    {
        "path": _text(),
        "source_id": _text(nullable=True),
        "row": pa.Column(pl.Int64, nullable=True),  # 1-based data row of the manifest that listed it
        "label": _text(nullable=True),
        "reason": _text(),  # one of a small vocabulary, for counting
        "detail": _text(),  # what exactly, and the remedy
    },
    strict=True,
    ordered=True,
    name="rejected",
)

FOLDS = pa.DataFrameSchema(
    {
        "video_id": _text(unique=True),
        "group_id": _group(),
        "label": _label(),
        "fold": pa.Column(pl.Int64, pa.Check.ge(0)),
    },
    strict=True,
    ordered=True,
    name="folds",
)

AUGMENTED = pa.DataFrameSchema(
    {
        "clip_id": _text(unique=True),
        "video_id": _text(),
        "group_id": _group(),
        "label": _label(),
        "augmentation_index": pa.Column(pl.Int64, pa.Check.ge(0)),  # 0 is the original clip
        "operations": _text(),  # JSON: what was drawn, with parameters
        "settings_hash": _text(),
        "clip_path": _text(),  # relative to the clip store
    },
    strict=True,
    ordered=True,
    name="augmented_metadata",
)

PREDICTIONS = pa.DataFrameSchema(
    {
        "video_id": _text(unique=True),
        "group_id": _group(),
        "label": _label(),
        "fold": pa.Column(pl.Int64, pa.Check.ge(0)),
        "score": pa.Column(pl.Float64, pa.Check.in_range(0, 1)),  # probability of fake
        "threshold": pa.Column(pl.Float64, pa.Check.in_range(0, 1)),  # chosen on inner validation, constant in a fold
        # The network's output, brought to the share of fakes it was trained on; score = sigmoid(logit / temperature).
        "logit": pa.Column(pl.Float64, pa.Check(lambda data: data.lazyframe.select(pl.col(data.key).is_finite()))),
        "temperature": pa.Column(pl.Float64, pa.Check.gt(0)),  # chosen on inner validation, constant in a fold
        # The same training on labels shuffled by group: its score, and the shuffled label it is judged by.
        "control_score": pa.Column(pl.Float64, pa.Check.in_range(0, 1), nullable=True),
        "control_label": _text(checks=pa.Check.isin(LABELS), nullable=True),
    },
    strict=True,
    ordered=True,
    name="predictions",
)

RESULTS = pa.DataFrameSchema(
    {
        "source": _text(),  # model, or the control's name
        "scope": _text(),  # all: a vote per video; all_by_group: a vote per group; or fold_K
        "metric": _text(),
        "value": pa.Column(pl.Float64, nullable=True),
        "low": pa.Column(pl.Float64, nullable=True),  # cluster bootstrap over groups; scope "all" only
        "high": pa.Column(pl.Float64, nullable=True),
        "fold_mean": pa.Column(pl.Float64, nullable=True),  # scope "all" only
        "fold_std": pa.Column(pl.Float64, nullable=True),
        "num_videos": pa.Column(pl.Int64),
        "num_groups": pa.Column(pl.Int64),
    },
    strict=True,
    ordered=True,
    name="kfold_results",
)


GROUP_LINKS = pa.DataFrameSchema(
    {
        "group_id": _group(),  # the group that both sides are in now
        "why": _text(),  # same_source, same_content or near_duplicate
        "evidence": _text(),  # the source id, the start of the content hash, or the two paths
        "first": _text(),  # stated group, or path of a video that had none
        "second": _text(),
    },
    strict=True,
    ordered=True,
    name="group_links",
)

# Every row of a corpus's label tables, also of videos that are absent and of labels that are not trained on.
ANNOTATIONS = pa.DataFrameSchema(
    {
        "source_id": _text(),
        "origin": _text(),  # the table it stands in
        "row": pa.Column(pl.Int64, pa.Check.ge(1)),  # 1-based data row
        "label": _text(nullable=True),  # as it stands there, in lower case
        "stated_group": _text(nullable=True),
        "group_id": _group(),  # after all that the annotations alone join
        "platform": _text(nullable=True),
        "is_present": pa.Column(pl.Boolean),  # there is a file for it
    },
    strict=True,
    ordered=True,
    name="annotations",
)

SLICES = pa.DataFrameSchema(
    {
        "slice_by": _text(),  # platform, label_source, manipulation, duration, resolution, codec ...
        "value": _text(),
        "metric": _text(),
        "number": pa.Column(pl.Float64, nullable=True),
        "low": pa.Column(pl.Float64, nullable=True),  # cluster bootstrap over groups
        "high": pa.Column(pl.Float64, nullable=True),
        "num_videos": pa.Column(pl.Int64, pa.Check.ge(1)),
        "num_real": pa.Column(pl.Int64),
        "num_fake": pa.Column(pl.Int64),
        "num_groups": pa.Column(pl.Int64, pa.Check.ge(1)),
        "is_small": pa.Column(pl.Boolean),  # too few groups of a class for its number to say much
    },
    strict=True,
    ordered=True,
    name="slices",
)

LEAKAGE_AUDIT = pa.DataFrameSchema(
    {
        "check": _text(),
        "count": pa.Column(pl.Int64, nullable=True),  # what was counted, where something was
        "number": pa.Column(pl.Float64, nullable=True),  # a metric, where one was computed
        "finding": _text(),  # one sentence
        "passed": pa.Column(pl.Boolean, nullable=True),  # null: for information, nothing to pass
    },
    strict=True,
    ordered=True,
    name="leakage_audit",
)


def check_table(frame: pl.DataFrame, schema: pa.DataFrameSchema, origin: str) -> pl.DataFrame:
    """Return ``frame`` when it fits ``schema``.

    Raises:
        DataError: names the table, the column and what was found, with up to five failing values.
    """
    try:
        return schema.validate(frame, lazy=True)
    except SchemaErrors as error:
        cases = error.failure_cases.head(5)
        found = "; ".join(
            f"column {row.get('column')!r}: {row.get('check')} (got {row.get('failure_case')!r})"
            for row in cases.iter_rows(named=True)
        )
        raise DataError(
            f"{origin}: does not fit the {schema.name} schema: {found}. Run the stage that writes it again."
        ) from error
    except SchemaError as error:
        raise DataError(
            f"{origin}: does not fit the {schema.name} schema: {error}. Run the stage that writes it again."
        ) from error


def write_table(frame: pl.DataFrame, schema: pa.DataFrameSchema, path: Path) -> None:
    """Check ``frame`` and replace ``path`` atomically; the suffix chooses Parquet, Feather (Arrow IPC) or CSV."""
    check_table(frame, schema, str(path))
    if path.suffix not in {".parquet", ".feather", ".csv"}:
        raise ValueError(f"{path}: got suffix {path.suffix!r}, wanted .parquet, .feather or .csv")
    with atomic_output(path) as temporary, temporary.open("wb") as stream:
        if path.suffix == ".parquet":
            frame.write_parquet(stream, statistics=True)
        elif path.suffix == ".feather":
            # Uncompressed so that every Feather reader (pandas, R) opens it without a codec.
            frame.write_ipc(stream, compression="uncompressed")
        else:
            frame.write_csv(stream)


def read_table(path: Path, schema: pa.DataFrameSchema) -> pl.DataFrame:
    """Read ``path`` and check it.

    Raises:
        DataError: the file is missing, unreadable or does not fit; the message names the file and the remedy.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such table. Run the stage that writes it (run_notebooks.py --list names it).")
    try:
        # From bytes, not by name: polars reads '[' and '*' in a path as a pattern.
        content = io.BytesIO(path.read_bytes())
        if path.suffix == ".parquet":
            frame = pl.read_parquet(content)
        elif path.suffix == ".feather":
            frame = pl.read_ipc(content)
        else:
            overrides = {name: column.dtype.type for name, column in schema.columns.items()}
            frame = pl.read_csv(content, schema_overrides=overrides)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(f"{path}: cannot be read as a table: {error}. Run the stage that writes it again.") from error
    return check_table(frame, schema, str(path))
