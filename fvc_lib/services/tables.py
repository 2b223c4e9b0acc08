"""Declare the schemas of the tables that stages exchange, and check tables on every write and every read.

``video_id`` identifies a video by its content, so it is the same on any machine. ``group_id`` names a group of related
videos, and no row may lack it. A group is never in both the training and the test part of a split. Labels are ``real``
and ``fake`` in tables, and 0 and 1 only inside a model.

The record of a finished stage (``checkpoints/stage_*.json``) lists the SHA-256 of its tables. Every read
checks it, because a table with a flipped bit may still fit its schema.
"""

import io
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl

from fvc_lib.services.atomic_files import AnyPath, atomic_output
from fvc_lib.services.errors import DataError, command_text
from fvc_lib.services.records.digests import note_rewritten, undamaged_file

LABELS = ("real", "fake")
PARTS = ("train", "validation", "test")
LEFT_OUT = "left_out"
_ROWS_AT_ONCE = 1 << 16  # rows of a Parquet row group; a row of an index takes some 3 KiB of memory while written


@dataclass(frozen=True)
class Column:
    """The type of a column and the values that it allows.

    Attributes:
        dtype: the polars type.
        wanted: the allowed values in words, for messages.
        fits: maps the column's expression to a Boolean expression that is True where a value is allowed; None: all
            values are allowed.
        is_unique: whether no value may occur twice.
        has_nulls: whether values may be null (missing).
    """

    dtype: Any
    wanted: str = "a value"
    fits: Callable[[pl.Expr], pl.Expr] | None = None
    is_unique: bool = False
    has_nulls: bool = False

    def wrong(self, name: str) -> pl.Expr:
        """Return a polars expression that is True in rows whose value in the column ``name`` is not allowed."""
        value = pl.col(name)
        wrong = pl.lit(False) if self.fits is None else ~self.fits(value).fill_null(True)
        wrong = wrong if self.has_nulls else wrong | value.is_null()
        return wrong | value.is_duplicated() if self.is_unique else wrong


@dataclass(frozen=True)
class TableSchema:
    """The columns of a table, in order.

    Attributes:
        name: name of the table.
        columns: the columns by name.
        key: names of columns; no two rows may have the same values in all of them. Empty: not checked.
        further: the type and values of all columns that are not in ``columns``; None: there may be no such columns.
    """

    name: str
    columns: Mapping[str, Column]
    key: tuple[str, ...] = ()
    further: Column | None = None


def check_table(frame: pl.DataFrame, schema: TableSchema, origin: str) -> pl.DataFrame:
    """Check that ``frame`` has the columns and values that ``schema`` declares, and return ``frame`` unchanged.

    ``origin`` names the table in messages.

    Raises:
        DataError: ``frame`` does not fit; the message names the table, the columns and up to five wrong values.
    """
    if problems := "; ".join(_problems(frame, schema)):
        message = f"{origin}: does not fit the {schema.name} schema: {problems}. Run the stage that writes it again."
        raise DataError(message)
    return frame


def _problems(frame: pl.DataFrame, schema: TableSchema) -> Iterator[str]:
    columns = dict(schema.columns)
    if schema.further is not None:
        columns.update({name: schema.further for name in frame.columns if name not in columns})
    wanted = {name: column.dtype for name, column in columns.items()}
    found = dict(frame.schema)
    for name in sorted({*wanted, *found}):
        if wanted.get(name) != found.get(name):
            yield f"column {name!r}: got {found.get(name, 'none')}, wanted {wanted.get(name, 'none')}"
    if wanted != found:
        return
    if schema.further is None and list(wanted) != frame.columns:
        yield f"columns: wanted the order {', '.join(wanted)}"
    for name, column in columns.items():
        values = frame.filter(column.wrong(name))[name].head(5)
        if len(values):
            unique = ", without a repetition" if column.is_unique else ""
            yield f"column {name!r}: wanted {column.wanted}{unique} (got {', '.join(map(repr, values))})"
    if schema.key and frame.select(schema.key).is_duplicated().any():
        yield f"columns {', '.join(schema.key)}: rows repeat"


def write_table(frame: pl.DataFrame, schema: TableSchema, path: AnyPath) -> None:
    """Check ``frame`` against ``schema``, and write it to ``path`` atomically.

    The suffix of ``path`` chooses the format: ``.parquet``, ``.feather`` (Arrow IPC), or CSV for any other.

    Raises:
        DataError: ``frame`` does not fit ``schema``.
        OSError: the disk is full or read-only.
    """
    path = Path(path)
    check_table(frame, schema, str(path))
    with atomic_output(path) as temporary, temporary.open("wb") as stream:
        try:
            if path.suffix == ".parquet":
                frame.write_parquet(stream, statistics=True, row_group_size=_ROWS_AT_ONCE)
            elif path.suffix == ".feather":
                # Uncompressed so that every Feather reader (pandas, R) opens it without a codec.
                frame.write_ipc(stream, compression="uncompressed")
            else:
                frame.write_csv(stream)
        except (OSError, pl.exceptions.PolarsError):
            # The error of polars does not always say that the disk is full: the next write does.
            stream.write(bytes(1 << 20))
            stream.flush()
            raise
        stream.flush()
        note_rewritten(path, temporary)


def frame_of(data: Mapping[str, Any] | Sequence[Any] | None, schema: TableSchema) -> pl.DataFrame:
    """Return ``data`` as a polars DataFrame with the columns and types of ``schema``.

    ``data`` is a mapping of column names to values, or a sequence of rows; None: the result has no rows. Allowed values
    and keys are not checked.
    """
    return pl.DataFrame(data, schema=column_types(schema), orient=None if isinstance(data, Mapping) else "row")


def column_types(schema: TableSchema) -> dict[str, Any]:
    """Return the polars types of the columns of ``schema``, by column name."""
    return {name: column.dtype for name, column in schema.columns.items()}


def read_table(path: AnyPath, schema: TableSchema, without: Collection[str] = ()) -> pl.DataFrame:
    """Read the table at ``path``, check it against ``schema``, and return it.

    The columns named in ``without`` are removed from the result. The file is not changed.

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
                frame = pl.read_parquet(stream)
            elif path.suffix == ".feather":
                frame = pl.read_ipc(io.BytesIO(stream.read()))
            else:
                frame = pl.read_csv(io.BytesIO(stream.read()), schema_overrides=column_types(schema))
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(f"{path}: cannot be read as a table: {error}. Run the stage that writes it again.") from error
    return check_table(frame, schema, str(path)).drop(without, strict=False)


def csv_for_people(frame: pl.DataFrame, *, header: bool = True) -> str:
    """Return ``frame`` as CSV text that is safe to open in a spreadsheet. ``header`` adds a line of column names.

    A spreadsheet runs a text as a formula if it begins with ``=``, ``+``, ``-``, ``@``, a tab or a carriage return. An
    apostrophe is put before such a text, unless it is a number. Use ``write_table`` for tables that a stage reads.
    """
    text = pl.col(pl.String)
    is_formula = text.str.contains(r"(?s)^[=+\-@\t\r].") & text.cast(pl.Float64, strict=False).is_null()
    harmless = pl.when(is_formula).then("'" + text).otherwise(text)
    shown = frame.with_columns(harmless.name.keep())
    return shown.write_csv(include_header=header)


# Types of columns, and the values that they allow.
_KINDS: Mapping[str, Column] = {
    "text": Column(pl.String, "a text"),
    "word": Column(pl.String, "a text that is not empty", lambda value: value != ""),
    "id": Column(pl.String, "at least 8 characters", lambda value: value.str.len_chars() >= 8),
    "sha256": Column(pl.String, "64 characters", lambda value: value.str.len_chars() == 64),
    "int": Column(pl.Int64, "a number"),
    "count": Column(pl.Int64, "0 or more", lambda value: value >= 0),
    "positive": Column(pl.Int64, "1 or more", lambda value: value >= 1),
    "number": Column(pl.Float64, "a number"),
    "finite": Column(pl.Float64, "a finite number", pl.Expr.is_finite),
    "above_0": Column(pl.Float64, "a number above 0", lambda value: value > 0),
    "share": Column(pl.Float64, "0 to 1", lambda value: value.is_between(0, 1)),
    "temperature": Column(pl.Float64, "1e-6 to 1e6", lambda value: value.is_between(1e-6, 1e6)),
    "flag": Column(pl.Boolean, "true or false"),
}


def _column(text: str) -> Column:
    """Return the ``Column`` (type and allowed values) that a short declaration such as ``text null`` describes.

    The first word of ``text`` is a kind of column from ``_KINDS``, such as ``count``, or a list of allowed values such
    as ``real|fake``. The words ``unique`` (no value repeats) and ``null`` (values may be missing) may follow.
    """
    kind, *marks = text.split()
    words = kind.split("|")
    if "|" in kind:
        wanted = " or ".join(words)
        column = Column(pl.String, wanted, lambda value: value.is_in(words))
    else:
        column = _KINDS[kind]
    return replace(column, is_unique="unique" in marks, has_nulls="null" in marks)


def _table(name: str, key: Sequence[str] = (), /, **columns: str | Column) -> TableSchema:
    """Return a table schema called ``name`` that allows exactly ``columns``, in this order.

    A keyword is the name of a column. Its value is a ``Column``, or a short declaration such as ``text null``. No two
    rows may have the same values in all columns of ``key``; empty: not checked.
    """
    made = {column: _column(kind) if isinstance(kind, str) else kind for column, kind in columns.items()}
    return TableSchema(name, made, tuple(key))


# Columns that identify a video, and the fold that tests it.
_OF_VIDEO = {"video_id": "text unique", "group_id": "word", "label": "real|fake", "fold": "count"}


# Facts about the stream's packets, one per coded frame; ``video.decode.packets.PacketFacts`` explains them.
_OF_PACKETS = (
    "packet_bytes_mean", "packet_bytes_std", "packet_bytes_p10", "packet_bytes_median", "packet_bytes_p90",
    "key_bytes_ratio", "key_distance_mean", "key_distance_max", "reordered_share", "bits_per_second_std",
    "bits_per_second_max",
)  # fmt: skip
# Tables of task video

INDEX = _table(
    "index",
    video_id="id unique",
    path="text unique",  # relative to the corpus root, with '/'
    label="real|fake",
    group_id="word",
    source_id="text",  # the video's name in the label source: the platform's id, or the path
    label_source="text",  # name of the layout: folder, manifest, fvc2018, faceforensics ...
    corpus="text",  # name of its corpus: FaceForensics++, or the folder's or manifest's name
    stated_group="text null",  # the group the label source gave, before any were joined
    manipulation="text null",
    platform="text null",
    generator="text null",  # the program that made a fake
    real_source="text null",  # where a real video was taken from
    official_split="train|validation|test null",  # stated by the corpus
    attributes="text null",  # JSON object: further statements of the corpus, for slices
    codec="text",
    container="text",
    pixel_format="text null",
    width="positive",
    height="positive",
    frames_per_second="number null",
    num_frames="positive",
    duration_seconds="number null",
    rotation_degrees="count",
    has_audio="flag",
    size_bytes="positive",
    bits_per_second="number null",
    **dict.fromkeys(_OF_PACKETS, "number null"),
    content_sha256="sha256",
    perceptual_hash="text null",
)

REJECTED = _table(
    "rejected",
    path="text",
    source_id="text null",
    row="int null",  # 1-based data row of the manifest that listed it
    label="text null",
    reason="text",  # one of a few fixed texts, so that reasons can be counted
    detail="text",  # the exact problem and the remedy
)

FOLDS = _table(
    "folds",
    **_OF_VIDEO,
)

# The part of each video in each training of the run's protocol. FOLDS only has the training that tests each video.
PROTOCOL = _table(
    "protocol",
    ["fold", "video_id"],
    protocol="text",
    fold="count",  # number of the training
    target="text null",  # for a tested video: name of what the training tests on, such as a corpus or generator
    part="train|validation|test|left_out",
    # Why a video is left out; in other parts: a remark that the corpus's split has the video's group in several parts
    reason="text null",
    video_id="text",
    group_id="word",
    label="real|fake",
)

AUGMENTED = _table(
    "augmented_metadata",
    clip_id="text unique",
    video_id="text",
    group_id="word",
    label="real|fake",
    augmentation_index="count",  # 0 is the original clip
    operations="text",  # JSON: the drawn operations with their parameters
    settings_hash="text",
    clip_path="text",  # relative to the clip store
)

SEEN_CLIPS = _table(
    "seen_clips",
    video_id="text",
    group_id="word",
    label="real|fake",
    path="text",
    clip="count",  # number among the video's clips, from 0
    **dict.fromkeys(("first_frame", "middle_frame", "last_frame"), "count"),
    stride="count",  # 0: spread over the video
    # The part of the middle frame that the clip shows, as shares of the upright picture
    **dict.fromkeys(("left", "top"), "share"),
    **dict.fromkeys(("width", "height"), "above_0"),
    note="text null",  # deviation from the settings
)


# One column per feature and way to pool it, as the families of ``fvc_lib/video/features/`` declare them: float32, null
# where it could not be measured. A video without any measured feature has a row of nulls.
FEATURES = TableSchema(
    "features",
    {name: _column(_OF_VIDEO[name]) for name in ("video_id", "group_id", "label")},
    further=Column(pl.Float32, "a finite number", pl.Expr.is_finite, has_nulls=True),
)

PREDICTIONS = _table(
    "predictions",
    **_OF_VIDEO,
    score="share",  # probability of fake
    threshold="share",  # chosen on training groups, constant in a fold
    # The network's output, corrected for the share of fakes in training; score = sigmoid(logit / temperature).
    logit="finite",
    temperature="above_0",  # chosen on training groups, constant in a fold
    # The shuffled-label control (the same training on labels shuffled by group): its score, and the shuffled label.
    control_score="share null",
    control_label="real|fake null",
    # The real-source control (a training that tells two sources of real videos apart): its score, and 1 for a video
    # of the source with fewer videos, else 0.
    source_score="share null",
    source_label="count null",
)

# Logits of the final network, which is trained on all groups, on the videos that chose its epoch and temperature.
FINAL_VALIDATION = _table(
    "final_validation",
    video_id="text unique",
    group_id="word",
    label="real|fake",
    logit="finite",  # as in PREDICTIONS
    temperature="above_0",
)

# A run's verdicts on files; null: unknown. A file that failed, or that is a copy of a video of the run, has none.
VERDICTS = _table(
    "verdicts",
    video_id="text null",  # the video's id in the run if the run has the video, else the start of its content hash
    path="text unique",  # absolute
    sha256="text null",
    score="share null",  # probability of fake, mean over folds
    score_low="number null",
    score_high="number null",  # range over the folds' networks; null: one network
    probability="share null",  # of fake, at the requested share of fakes
    verdict="real|fake|undecided null",
    reasons="text",  # one sentence per line
    model_id="text",  # name of the run, and a digest of its networks' weights
    failure="text null",
)

# Scores of the run's networks on its disturbed test videos; each level has all videos.
ROBUSTNESS = _table(
    "robustness",
    ["video_id", "level"],
    **{**_OF_VIDEO, "video_id": "text"},
    threshold="share",  # the stored threshold of the video's fold
    level="text",  # undisturbed, or the name of the disturbance, such as a re-encoding
    kind="text",  # kind of disturbance; its levels differ only in strength
    score="share null",  # null: ``failure`` has the reason
    logit="finite null",
    failure="text null",  # why there is no score
)

# One row per level and metric, on the videos that have a score both undisturbed and at the level.
ROBUSTNESS_RESULTS = _table(
    "robustness_results",
    ["level", "metric"],
    level="text",
    kind="text",
    strength="text",
    metric="text",
    value="number null",
    low="number null",
    high="number null",  # interval over groups; null: none was computed
    # The metric of the same videos undisturbed, and the paired difference ``value - undisturbed``
    undisturbed="number null",
    difference="number null",
    difference_low="number null",
    difference_high="number null",
    p_value="number null",
    holm_p_value="number null",  # ``p_value`` corrected for the number of levels (Holm)
    num_videos="count",
    num_groups="count",
    num_failed="count",  # videos that have no score at the level
    trial="text null",  # a sentence if the run is a trial on a part of the corpus
)

# Logits of the videos that chose a fold's temperature and threshold, by networks that were not trained on their groups;
# ``fold`` is the training's number. Logits and temperature are as in PREDICTIONS.
VALIDATION_PREDICTIONS = _table(
    "validation_predictions",
    **_OF_VIDEO,
    logit="finite",
    temperature="above_0",
)

# Every tested video: mistakes first, sorted by descending distance from the threshold.
SCORES = _table(
    "scores",
    path="text",
    **_OF_VIDEO,
    score="share",
    threshold="share",
    called="real|fake",
    is_right="flag",
    score_std="number null",  # over runs that differ in their seed alone; null: one run
    num_seeds="positive",
    trial="text null",  # a sentence if the run is a trial on a part of the corpus
)

# Strips of frames of the first videos in SCORES, for the report.
VIDEO_FRAMES = _table("video_frames", video_id="text unique", group_id="word", jpeg_base64="text")

RESULTS = _table(
    "kfold_results",
    source="text",  # model, or the control's name
    # all: a vote per video; all_by_group: a vote per group; fold_K; target:NAME; source:NAME (within a source); or
    # across_sources (by models that saw none of the video's source); or within_pixels (without fakes that pixels
    # cannot show); or by_case (a vote per case, several videos of one event)
    scope="text",
    metric="text",
    value="number null",
    low="number null",
    high="number null",  # interval over groups; scope "all" only
    fold_mean="number null",
    fold_std="number null",  # scope "all" only
    num_videos="int",
    num_groups="int",
)

# For a bundle (a run's networks in one file for other machines): out-of-fold scores, and hashes that identify the run's
# videos. ``group_id`` is a number as text.
KNOWN_VIDEOS = _table(
    "known_videos",
    group_id="word",
    label="real|fake",
    content_sha256="sha256",
    perceptual_hash="text null",
    fold="count null",  # the fold whose network was not trained on the video; null: no score is stored
    score="share null",
    logit="finite null",
    temperature="temperature null",
    # Calibrated log odds of fake by the final network, if the video was among those that chose its epoch; else null.
    final_logit="finite null",
)
KNOWN_FILES = _table("known_files", content_sha256="sha256 unique", part="train|validation|test")
KNOWN_TEXTS = _table("known_texts", text="word unique")

GROUP_LINKS = _table(
    "group_links",
    group_id="word",  # the group that both sides are in now
    why="text",  # same_source, same_content or near_duplicate
    evidence="text",  # the source id, the start of the content hash, or the two paths
    first="text",  # stated group, or path of a video that had none
    second="text",
)

# Every row of a corpus's label tables, with absent videos and labels that are not trained on.
ANNOTATIONS = _table(
    "annotations",
    source_id="text",
    origin="text",  # path of the label table
    row="positive",  # 1-based data row
    label="text null",  # as in the table, in lower case
    stated_group="text null",
    group_id="word",  # after joining groups by the annotations alone
    platform="text null",
    is_present="flag",  # whether its file exists
)

SLICES = _table(
    "slices",
    slice_by="text",  # platform, label_source, manipulation, duration, resolution, codec ...
    value="text",
    metric="text",
    number="number null",
    low="number null",
    high="number null",  # interval over groups
    num_videos="positive",
    num_real="int",
    num_fake="int",
    num_groups="positive",
    is_small="flag",  # too few groups of a class for a reliable number
)

LEAKAGE_AUDIT = _table(
    "leakage_audit",
    check="text",
    count="int null",  # null: nothing was counted
    number="number null",  # a metric; null: none was computed
    finding="text",  # one sentence
    passed="flag null",  # null: for information only
)

# Tables of tasks with one split of whole groups instead of folds; REJECTED has the unusable samples

IMAGES = _table(
    "images",
    image_id="id unique",  # from content
    path="text unique",  # relative to the corpus root, with '/'
    class_label="text null",  # null: the corpus states none
    group_id="word",  # dish, stated group or content: never on both sides of the split
    part="train|validation|test",
    split_source="official|made",
    source="text",  # food101, nutrition5k, folder or manifest
    width="positive",
    height="positive",
    size_bytes="positive",
    content_sha256="sha256",
)

# Known numbers only: an image has no row for a target whose number is unknown.
IMAGE_TARGETS = _table(
    "image_targets",
    ["image_id", "target"],
    image_id="text",
    group_id="word",
    target="text",  # calories, mass, fat, carbohydrate, protein, or the manifest's column
    unit="text",  # kcal, g, or empty
    value="finite",
)

# Test images with a class.
IMAGE_PREDICTIONS = _table(
    "image_predictions",
    image_id="text unique",
    group_id="word",
    path="text",
    class_label="text",
    predicted_label="text",
    probability="share",  # of the predicted class
    rank_of_class="positive",  # 1: top-1; ties count against the model
)

# Test images with a known number.
TARGET_PREDICTIONS = _table(
    "target_predictions",
    ["image_id", "target"],
    image_id="text",
    group_id="word",
    path="text",
    target="text",
    unit="text",
    value="finite",
    predicted="finite",
)

# One row per pair of a video and a text; the relation is many to many.
VIDEO_TEXTS = _table(
    "video_texts",
    pair_id="text unique",
    video_id="id",  # from content, as in tables.INDEX
    path="text",  # relative to the manifest, with '/'
    text_id="text",  # from the text: equal texts have one id
    text="word",
    group_id="word",
    part="train|validation|test",
    split_source="official|made",
    num_frames="positive",
    duration_seconds="number null",
    content_sha256="sha256",
)

# The rank of the first matching candidate for each test query.
RETRIEVAL_RANKS = _table(
    "retrieval_ranks",
    ["direction", "query_id"],
    direction="video_to_text|text_to_video",
    query_id="text",  # video_id or text_id
    group_id="word",
    rank="positive",  # ties count against the model
    num_candidates="positive",
    num_positives="positive",
)

CAPTIONS = _table(
    "captions",
    video_id="text unique",
    group_id="word",
    path="text",
    caption="text",  # as the model wrote it; may be empty
    references="text",  # the video's texts, one per line
)

# One row per source, subject and metric.
TASK_RESULTS = _table(
    "task_results",
    ["source", "subject", "metric"],
    source="text",  # model, or the control's name: majority_class, mean_predictor, chance, ...
    subject="text",  # all, class:NAME, target:NAME, video_to_text, text_to_video, captions
    metric="text",
    unit="text",  # kcal, g, or empty for a number without one
    value="number null",
    low="number null",
    high="number null",  # interval over groups; null: none was computed
    num_samples="int",
    num_groups="int",
)
