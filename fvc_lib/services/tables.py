"""Schemas of the tables that stages exchange, checked on every write and every read.

``video_id`` names a video by its content, so it is the same on any machine. ``group_id`` has no default: rows of one
group are never on both sides of a split. Labels are ``real`` and ``fake`` in tables, and 0 and 1 only inside a model.

The record of a finished stage (``checkpoints/stage_*.json``) lists the SHA-256 of its tables. Every read
checks it, because a table with a flipped bit may still fit its schema.
"""

import io
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandera.polars as pa
import polars as pl
from pandera.errors import SchemaError, SchemaErrors

from fvc_lib.services.atomic_files import AnyPath, atomic_output
from fvc_lib.services.errors import DataError, command_text
from fvc_lib.services.records.digests import note_rewritten, undamaged_file

LABELS = ("real", "fake")
PARTS = ("train", "validation", "test")
LEFT_OUT = "left_out"
_ROWS_AT_ONCE = 1 << 16  # written to Parquet; an index takes some 3 KiB of memory for each of them


def check_table(frame: pl.DataFrame, schema: pa.DataFrameSchema, origin: str) -> pl.DataFrame:
    """Return ``frame`` unchanged if it fits ``schema``.

    Raises:
        DataError: it does not fit; the message names table and column, with up to five failing values.
    """
    try:
        return schema.validate(frame, lazy=True)
    except (SchemaErrors, SchemaError) as error:
        rows = error.failure_cases.head(5).iter_rows(named=True) if isinstance(error, SchemaErrors) else ()
        cases = (f"column {row.get('column')!r}: {row.get('check')} (got {row.get('failure_case')!r})" for row in rows)
        problem = "; ".join(cases) or str(error)
        message = f"{origin}: does not fit the {schema.name} schema: {problem}. Run the stage that writes it again."
        raise DataError(message) from error


def write_table(frame: pl.DataFrame, schema: pa.DataFrameSchema, path: AnyPath) -> None:
    """Check ``frame`` and replace ``path`` atomically; the suffix chooses Parquet, Feather (Arrow IPC) or CSV."""
    path = Path(path)
    check_table(frame, schema, str(path))
    if path.suffix not in {".parquet", ".feather", ".csv"}:
        raise ValueError(f"{path}: got suffix {path.suffix!r}, wanted .parquet, .feather or .csv")
    with atomic_output(path) as temporary, temporary.open("wb") as stream:
        if path.suffix == ".parquet":
            frame.write_parquet(stream, statistics=True, row_group_size=_ROWS_AT_ONCE)
        elif path.suffix == ".feather":
            # Uncompressed so that every Feather reader (pandas, R) opens it without a codec.
            frame.write_ipc(stream, compression="uncompressed")
        else:
            frame.write_csv(stream)
        stream.flush()
        note_rewritten(path, temporary)


def frame_of(data: Mapping[str, Any] | Sequence[Any] | None, schema: pa.DataFrameSchema) -> pl.DataFrame:
    """Return ``data`` (columns by name, rows, or None for no rows) as a frame with the column types of ``schema``.

    Nothing else of the schema is checked.
    """
    return pl.DataFrame(data, schema=column_types(schema), orient=None if isinstance(data, Mapping) else "row")


def column_types(schema: pa.DataFrameSchema) -> dict[str, Any]:
    """Return the polars type of every column by name."""
    return {name: column.dtype.type for name, column in schema.columns.items()}


def read_table(path: AnyPath, schema: pa.DataFrameSchema, without: Collection[str] = ()) -> pl.DataFrame:
    """Read the table at ``path``, check it against ``schema`` and return it.

    The columns ``without`` are left out. From Parquet they are not even read.

    Raises:
        DataError: the file is missing, unreadable, changed since its stage wrote it, or does not fit; the message
            has the remedy.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such table. Run the stage that writes it; its name: {command_text('--list')}")
    try:
        # Opened, not by name: polars reads '[' and '*' in a path as a pattern.
        with undamaged_file(path) as stream:
            if path.suffix == ".parquet":
                frame = pl.scan_parquet(stream).drop(without, strict=False).collect()
            elif path.suffix == ".feather":
                frame = pl.read_ipc(io.BytesIO(stream.read())).drop(without, strict=False)
            else:
                found = pl.read_csv(io.BytesIO(stream.read()), schema_overrides=column_types(schema))
                frame = found.drop(without, strict=False)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(f"{path}: cannot be read as a table: {error}. Run the stage that writes it again.") from error
    schema = schema.remove_columns(list(without)) if without else schema
    return check_table(frame, schema, str(path))


def csv_for_people(frame: pl.DataFrame, *, header: bool = True) -> str:
    """Return ``frame`` as CSV in which a spreadsheet finds no formula: texts like one get an apostrophe in front.

    A formula begins with ``=``, ``+``, ``-``, ``@``, a tab or a carriage return. Numbers stored as text stay unchanged.
    Use ``write_table`` for tables that a stage reads.
    """
    text = pl.col(pl.String)
    is_formula = text.str.contains(r"(?s)^[=+\-@\t\r].") & text.cast(pl.Float64, strict=False).is_null()
    shown = frame.with_columns(pl.when(is_formula).then("'" + text).otherwise(text).name.keep())
    return shown.write_csv(include_header=header)


def text_column(*, checks: pa.Check | None = None, unique: bool = False, nullable: bool = False) -> pa.Column:
    """Return a column of text."""
    return pa.Column(pl.String, checks, unique=unique, nullable=nullable)


def label_column() -> pa.Column:
    """Return a text column that allows only ``real`` and ``fake``."""
    return text_column(checks=pa.Check.isin(LABELS))


def group_column() -> pa.Column:
    """Return a column of group names, which must not be empty."""
    return text_column(checks=pa.Check.str_length(min_value=1))


def finite_column(*, nullable: bool = False) -> pa.Column:
    """Return a column of finite float64."""
    finite = pa.Check(lambda data: data.lazyframe.select(pl.col(data.key).is_finite()), name="is_finite")
    return pa.Column(pl.Float64, finite, nullable=nullable)


def _part() -> pa.Column:
    return text_column(checks=pa.Check.isin(PARTS))


def _of_video(*, unique: bool = False) -> dict[str, pa.Column]:
    """Return the columns video_id, group_id, label, and fold (the fold that tests the video)."""
    of = {"video_id": text_column(unique=unique), "group_id": group_column(), "label": label_column()}
    return {**of, "fold": pa.Column(pl.Int64, pa.Check.ge(0))}


def _numbers(*names: str) -> dict[str, pa.Column]:
    """Return columns of float64 that may be null."""
    return {name: pa.Column(pl.Float64, nullable=True) for name in names}


def _sha256(*, nullable: bool = False, unique: bool = False) -> pa.Column:
    return text_column(checks=pa.Check.str_length(64, 64), nullable=nullable, unique=unique)


def _table(name: str, key: list[str] | None = None, /, **columns: pa.Column) -> pa.DataFrameSchema:
    """Return a schema that allows exactly these columns, in this order, with unique rows in the columns ``key``."""
    return pa.DataFrameSchema(columns, unique=key, strict=True, ordered=True, name=name)


# Of the stream's packets, one a coded frame; what each means says ``video.decode.packets.PacketFacts``.
_OF_PACKETS = (
    "packet_bytes_mean", "packet_bytes_std", "packet_bytes_p10", "packet_bytes_median", "packet_bytes_p90",
    "key_bytes_ratio", "key_distance_mean", "key_distance_max", "reordered_share", "bits_per_second_std",
    "bits_per_second_max",
)  # fmt: skip
# Of task video

INDEX = _table(
    "index",
    video_id=text_column(unique=True, checks=pa.Check.str_length(min_value=8)),
    path=text_column(unique=True),  # relative to the corpus root, with '/'
    label=label_column(),
    group_id=group_column(),
    source_id=text_column(),  # the platform's id, or the path: what the label source calls the video
    label_source=text_column(),  # name of the layout: folder, manifest, fvc2018, faceforensics ...
    corpus=text_column(),  # what its corpus is called: FaceForensics++, or after the folder or manifest
    stated_group=text_column(nullable=True),  # the group the label source gave, before any were joined
    manipulation=text_column(nullable=True),
    platform=text_column(nullable=True),
    generator=text_column(nullable=True),  # what made a fake
    real_source=text_column(nullable=True),  # where a real video was taken from
    official_split=text_column(checks=pa.Check.isin(PARTS), nullable=True),  # the corpus's own
    attributes=text_column(nullable=True),  # JSON object: what else the corpus says of it, for slices
    codec=text_column(),
    container=text_column(),
    pixel_format=text_column(nullable=True),
    width=pa.Column(pl.Int64, pa.Check.gt(0)),
    height=pa.Column(pl.Int64, pa.Check.gt(0)),
    frames_per_second=pa.Column(pl.Float64, nullable=True),
    num_frames=pa.Column(pl.Int64, pa.Check.gt(0)),
    duration_seconds=pa.Column(pl.Float64, nullable=True),
    rotation_degrees=pa.Column(pl.Int64, pa.Check.isin([0, 90, 180, 270])),
    has_audio=pa.Column(pl.Boolean),
    size_bytes=pa.Column(pl.Int64, pa.Check.gt(0)),
    bits_per_second=pa.Column(pl.Float64, nullable=True),
    **_numbers(*_OF_PACKETS),
    content_sha256=text_column(checks=pa.Check.str_length(64, 64)),
    perceptual_hash=text_column(nullable=True),
)

REJECTED = _table(
    "rejected",
    path=text_column(),
    source_id=text_column(nullable=True),
    row=pa.Column(pl.Int64, nullable=True),  # 1-based data row of the manifest that listed it
    label=text_column(nullable=True),
    reason=text_column(),  # one of a small vocabulary, for counting
    detail=text_column(),  # what exactly, and the remedy
)

FOLDS = _table(
    "folds",
    **_of_video(unique=True),
)

# Which part a video plays in each training of the run's protocol. FOLDS has those that are tested, and by which.
PROTOCOL = _table(
    "protocol",
    ["fold", "video_id"],
    protocol=text_column(),
    fold=pa.Column(pl.Int64, pa.Check.ge(0)),  # number of the training
    target=text_column(nullable=True),  # of a tested video: a corpus, a generator; null: none
    part=text_column(checks=pa.Check.isin((*PARTS, LEFT_OUT))),
    # Why it is left out; of another part that the corpus's own split has its group in several
    reason=text_column(nullable=True),
    video_id=text_column(),
    group_id=group_column(),
    label=label_column(),
)

AUGMENTED = _table(
    "augmented_metadata",
    clip_id=text_column(unique=True),
    video_id=text_column(),
    group_id=group_column(),
    label=label_column(),
    augmentation_index=pa.Column(pl.Int64, pa.Check.ge(0)),  # 0 is the original clip
    operations=text_column(),  # JSON: what was drawn, with parameters
    settings_hash=text_column(),
    clip_path=text_column(),  # relative to the clip store
)

SEEN_CLIPS = _table(
    "seen_clips",
    video_id=text_column(),
    group_id=group_column(),
    label=label_column(),
    path=text_column(),
    clip=pa.Column(pl.Int64, pa.Check.ge(0)),  # of the video's clips, from 0
    num_source_frames=pa.Column(pl.Int64, pa.Check.gt(0)),
    **{name: pa.Column(pl.Int64, pa.Check.ge(0)) for name in ("first_frame", "middle_frame", "last_frame")},
    stride=pa.Column(pl.Int64, pa.Check.ge(0)),  # 0: spread over the video
    num_repeated=pa.Column(pl.Int64, pa.Check.ge(0)),  # frames that repeat the one before
    # What is seen of the middle frame, as shares of the upright picture
    **{name: pa.Column(pl.Float64, pa.Check.in_range(0, 1)) for name in ("left", "top")},
    **{name: pa.Column(pl.Float64, pa.Check.in_range(0, 1.001)) for name in ("width", "height")},
    note=text_column(nullable=True),  # what was not as asked for
)


def _are_features(data: Any) -> bool:
    features = [name for name in data.lazyframe.collect_schema() if name not in FEATURES.columns]
    kinds = data.lazyframe.select(features).collect_schema()
    finite = data.lazyframe.select(pl.all_horizontal(pl.lit(True), pl.col(features).is_finite().all())).collect()
    return set(kinds.values()) <= {pl.Float32} and bool(finite.item(0, 0))


# One column per feature and way to pool it, as the families of ``fvc_lib/video/features/`` declare them: float32, null
# where it could not be measured. A video of which nothing could be has a row of nulls.
FEATURES = pa.DataFrameSchema(
    {"video_id": text_column(unique=True), "group_id": group_column(), "label": label_column()},
    checks=pa.Check(_are_features, error="features are finite float32"),
    name="features",
)

PREDICTIONS = _table(
    "predictions",
    **_of_video(unique=True),
    score=pa.Column(pl.Float64, pa.Check.in_range(0, 1)),  # probability of fake
    threshold=pa.Column(pl.Float64, pa.Check.in_range(0, 1)),  # chosen on inner validation, constant in a fold
    # The network's output, brought to the share of fakes it was trained on; score = sigmoid(logit / temperature).
    logit=finite_column(),
    temperature=pa.Column(pl.Float64, pa.Check.gt(0)),  # chosen on inner validation, constant in a fold
    # The same training on labels shuffled by group: its score, and the shuffled label it is judged by.
    control_score=pa.Column(pl.Float64, pa.Check.in_range(0, 1), nullable=True),
    control_label=text_column(checks=pa.Check.isin(LABELS), nullable=True),
    # The same training on which of two sources a real comes from: its score, and 1 for the source with fewer videos.
    source_score=pa.Column(pl.Float64, pa.Check.in_range(0, 1), nullable=True),
    source_label=pa.Column(pl.Int64, pa.Check.in_range(0, 1), nullable=True),
)

# Logits of the network of all groups on the videos that chose its epoch, temperature and threshold.
FINAL_VALIDATION = _table(
    "final_validation",
    video_id=text_column(unique=True),
    group_id=group_column(),
    label=label_column(),
    logit=finite_column(),  # as in PREDICTIONS
    temperature=pa.Column(pl.Float64, pa.Check.gt(0)),
)

# A run's verdicts on files; null is not known. No verdict: a failure, or a copy of a video of the run.
VERDICTS = _table(
    "verdicts",
    video_id=text_column(nullable=True),  # of a video of the run its id there, else the content hash's beginning
    path=text_column(unique=True),  # absolute
    sha256=text_column(nullable=True),
    score=pa.Column(pl.Float64, pa.Check.in_range(0, 1), nullable=True),  # probability of fake, mean over folds
    **_numbers("score_low", "score_high"),  # range over the folds' networks, where several judged
    probability=pa.Column(pl.Float64, pa.Check.in_range(0, 1), nullable=True),  # of fake, at the share asked for
    verdict=text_column(checks=pa.Check.isin([*LABELS, "undecided"]), nullable=True),
    reasons=text_column(),  # a sentence a line
    model_id=text_column(),  # the run, and a digest of its networks' weights
    failure=text_column(nullable=True),
)

# Scores of the run's networks on its disturbed test videos; each level has all videos.
ROBUSTNESS = _table(
    "robustness",
    ["video_id", "level"],
    **_of_video(),
    threshold=pa.Column(pl.Float64, pa.Check.in_range(0, 1)),  # the fold's, as stored
    level=text_column(),  # undisturbed, or the recipe's name
    kind=text_column(),  # levels of one kind differ in strength only
    score=pa.Column(pl.Float64, pa.Check.in_range(0, 1), nullable=True),  # null: see failure
    logit=finite_column(nullable=True),
    failure=text_column(nullable=True),  # why there is no score
)

# Of each level and metric, on the videos that have a score both undisturbed and at the level.
ROBUSTNESS_RESULTS = _table(
    "robustness_results",
    ["level", "metric"],
    level=text_column(),
    kind=text_column(),
    strength=text_column(),
    metric=text_column(),
    **_numbers("value", "low", "high"),  # interval over groups, where it was made
    # The same metric of the same videos, and value minus that, paired
    **_numbers("undisturbed", "difference", "difference_low", "difference_high"),
    **_numbers("p_value", "holm_p_value"),  # the second is corrected for the number of levels
    num_videos=pa.Column(pl.Int64, pa.Check.ge(0)),
    num_groups=pa.Column(pl.Int64, pa.Check.ge(0)),
    num_failed=pa.Column(pl.Int64, pa.Check.ge(0)),  # videos that have no score at the level
    trial=text_column(nullable=True),  # that it is of a trial on a part of the corpus
)

# Logits of a fold's network on the inner validation videos that chose its epoch, temperature and threshold; ``fold``
# is the training's number. Logits and temperature are as in PREDICTIONS.
VALIDATION_PREDICTIONS = _table(
    "validation_predictions",
    **_of_video(unique=True),
    logit=finite_column(),
    temperature=pa.Column(pl.Float64, pa.Check.gt(0)),
)

# Every video that was tested, mistakes first, the furthest from their threshold before the others.
SCORES = _table(
    "scores",
    path=text_column(),
    **_of_video(unique=True),
    score=pa.Column(pl.Float64, pa.Check.in_range(0, 1)),
    threshold=pa.Column(pl.Float64, pa.Check.in_range(0, 1)),
    called=label_column(),
    is_right=pa.Column(pl.Boolean),
    score_std=pa.Column(pl.Float64, nullable=True),  # over runs that differ in their seed alone; null: one run
    num_seeds=pa.Column(pl.Int64, pa.Check.ge(1)),
    trial=text_column(nullable=True),  # that it is of a trial on a part of the corpus
)

# A strip of frames of some of them, for the report.
VIDEO_FRAMES = _table(
    "video_frames", video_id=text_column(unique=True), group_id=group_column(), jpeg_base64=text_column()
)

RESULTS = _table(
    "kfold_results",
    source=text_column(),  # model, or the control's name
    scope=text_column(),  # all: a vote per video; all_by_group: a vote per group; or fold_K
    metric=text_column(),
    **_numbers("value", "low", "high"),  # interval over groups; scope "all" only
    **_numbers("fold_mean", "fold_std"),  # scope "all" only
    num_videos=pa.Column(pl.Int64),
    num_groups=pa.Column(pl.Int64),
)

# Of a bundle: the out-of-fold scores, and by what its run's videos are known again. Groups are numbers.
KNOWN_VIDEOS = _table(
    "known_videos",
    group_id=group_column(),
    label=label_column(),
    content_sha256=_sha256(),
    perceptual_hash=text_column(nullable=True),
    fold=pa.Column(pl.Int64, pa.Check.ge(0), nullable=True),  # whose network had not seen it; null: no score is stored
    score=pa.Column(pl.Float64, pa.Check.in_range(0, 1), nullable=True),
    logit=finite_column(nullable=True),
    temperature=pa.Column(pl.Float64, pa.Check.in_range(1e-6, 1e6), nullable=True),
    # Calibrated log odds of fake by the network of all groups, where the video chose its epoch; null: not known.
    final_logit=finite_column(nullable=True),
)
KNOWN_FILES = _table("known_files", content_sha256=_sha256(unique=True), part=_part())
KNOWN_TEXTS = _table(
    "known_texts",
    text=text_column(unique=True, checks=pa.Check.str_length(min_value=1)),
    part=text_column(checks=pa.Check.str_matches(rf"^({'|'.join(PARTS)})( ({'|'.join(PARTS)}))*$")),  # one or several
)

GROUP_LINKS = _table(
    "group_links",
    group_id=group_column(),  # the group that both sides are in now
    why=text_column(),  # same_source, same_content or near_duplicate
    evidence=text_column(),  # the source id, the start of the content hash, or the two paths
    first=text_column(),  # stated group, or path of a video that had none
    second=text_column(),
)

# Every row of a corpus's label tables, with absent videos and labels that are not trained on.
ANNOTATIONS = _table(
    "annotations",
    source_id=text_column(),
    origin=text_column(),  # the table it stands in
    row=pa.Column(pl.Int64, pa.Check.ge(1)),  # 1-based data row
    label=text_column(nullable=True),  # as it stands there, in lower case
    stated_group=text_column(nullable=True),
    group_id=group_column(),  # after all that the annotations alone join
    platform=text_column(nullable=True),
    is_present=pa.Column(pl.Boolean),  # there is a file for it
)

SLICES = _table(
    "slices",
    slice_by=text_column(),  # platform, label_source, manipulation, duration, resolution, codec ...
    value=text_column(),
    metric=text_column(),
    **_numbers("number", "low", "high"),  # interval over groups
    num_videos=pa.Column(pl.Int64, pa.Check.ge(1)),
    num_real=pa.Column(pl.Int64),
    num_fake=pa.Column(pl.Int64),
    num_groups=pa.Column(pl.Int64, pa.Check.ge(1)),
    is_small=pa.Column(pl.Boolean),  # too few groups of a class for its number to say much
)

LEAKAGE_AUDIT = _table(
    "leakage_audit",
    check=text_column(),
    count=pa.Column(pl.Int64, nullable=True),  # what was counted, where something was
    number=pa.Column(pl.Float64, nullable=True),  # a metric, where one was computed
    finding=text_column(),  # one sentence
    passed=pa.Column(pl.Boolean, nullable=True),  # null: for information, nothing to pass
)

# Of the tasks with one split instead of folds, made of whole groups like those; what cannot be used is in REJECTED

IMAGES = _table(
    "images",
    image_id=text_column(unique=True, checks=pa.Check.str_length(min_value=8)),  # from content
    path=text_column(unique=True),  # relative to the corpus root, with '/'
    class_label=text_column(nullable=True),  # null: the corpus says none of this image
    group_id=group_column(),  # dish, stated group or content: never on both sides of the split
    part=_part(),
    split_source=text_column(checks=pa.Check.isin(("official", "made"))),
    source=text_column(),  # food101, nutrition5k, folder or manifest
    width=pa.Column(pl.Int64, pa.Check.gt(0)),
    height=pa.Column(pl.Int64, pa.Check.gt(0)),
    size_bytes=pa.Column(pl.Int64, pa.Check.gt(0)),
    content_sha256=_sha256(),
)

# Known numbers only: an image without a row for a target has no such number.
IMAGE_TARGETS = _table(
    "image_targets",
    ["image_id", "target"],
    image_id=text_column(),
    group_id=group_column(),
    target=text_column(),  # calories, mass, fat, carbohydrate, protein, or the manifest's column
    unit=text_column(),  # kcal, g, or empty
    value=finite_column(),
)

# Of the test part, images with a class.
IMAGE_PREDICTIONS = _table(
    "image_predictions",
    image_id=text_column(unique=True),
    group_id=group_column(),
    path=text_column(),
    class_label=text_column(),
    predicted_label=text_column(),
    probability=pa.Column(pl.Float64, pa.Check.in_range(0, 1)),  # of the predicted class
    rank_of_class=pa.Column(pl.Int64, pa.Check.ge(1)),  # 1: top-1; ties count against the model
)

# Of the test part, where the number is known.
TARGET_PREDICTIONS = _table(
    "target_predictions",
    ["image_id", "target"],
    image_id=text_column(),
    group_id=group_column(),
    path=text_column(),
    target=text_column(),
    unit=text_column(),
    value=finite_column(),
    predicted=finite_column(),
)

# One row per pair of a video and a text: many to many.
VIDEO_TEXTS = _table(
    "video_texts",
    pair_id=text_column(unique=True),
    video_id=text_column(checks=pa.Check.str_length(min_value=8)),  # from content, as in tables.INDEX
    path=text_column(),  # relative to the manifest, with '/'
    text_id=text_column(),  # from the text: equal texts are one
    text=text_column(checks=pa.Check.str_length(min_value=1)),
    group_id=group_column(),
    part=_part(),
    split_source=text_column(checks=pa.Check.isin(("official", "made"))),
    num_frames=pa.Column(pl.Int64, pa.Check.gt(0)),
    duration_seconds=pa.Column(pl.Float64, nullable=True),
    content_sha256=_sha256(),
)

# Of the test part: the rank of the first match of each query.
RETRIEVAL_RANKS = _table(
    "retrieval_ranks",
    ["direction", "query_id"],
    direction=text_column(checks=pa.Check.isin(("video_to_text", "text_to_video"))),
    query_id=text_column(),  # video_id or text_id
    group_id=group_column(),
    rank=pa.Column(pl.Int64, pa.Check.ge(1)),  # ties count against the model
    num_candidates=pa.Column(pl.Int64, pa.Check.ge(1)),
    num_positives=pa.Column(pl.Int64, pa.Check.ge(1)),
)

CAPTIONS = _table(
    "captions",
    video_id=text_column(unique=True),
    group_id=group_column(),
    path=text_column(),
    caption=text_column(),  # as the model wrote it; may be empty
    references=text_column(),  # the video's texts, one per line
)

# Long, like tables.RESULTS.
TASK_RESULTS = _table(
    "task_results",
    ["source", "subject", "metric"],
    source=text_column(),  # model, or the control's name: majority_class, mean_predictor, chance, ...
    subject=text_column(),  # all, class:NAME, target:NAME, video_to_text, text_to_video, captions
    metric=text_column(),
    unit=text_column(),  # kcal, g, or empty for a number without one
    **_numbers("value", "low", "high"),  # interval over groups, where it was made
    num_samples=pa.Column(pl.Int64),
    num_groups=pa.Column(pl.Int64),
)
