"""Tables of scores that anyone's detectors gave to videos: CSV, TSV or Parquet, brought to one row per video."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from posixpath import normpath

import polars as pl

from fvc_lib.corpus import frame_names
from fvc_lib.corpus.copies.groups import Components
from fvc_lib.corpus.corpus_files import counts_text, some_of
from fvc_lib.corpus.label_table import GROUP_COLUMNS, SPLIT_COLUMNS, LabelTable, read_label_table
from fvc_lib.corpus.listing import label_map_hint
from fvc_lib.services.atomic_files import AnyPath, escape_text
from fvc_lib.services.errors import DataError, UsageError, did_you_mean

VIDEO_COLUMNS = ("video", "video_id", "path", "video_path", "id", "filename", "file")
FACTS = ("group_id", "generator", "real_source", "corpus")  # what may be known of a video beside its label
_ALTERNATIVES = {
    "group_id": GROUP_COLUMNS, "generator": ("generator", "manipulation"), "real_source": ("real_source", "source"),
    "corpus": ("corpus", "dataset"),
}  # fmt: skip
# Numbers that tables carry beside scores, this project's own predictions among them.
_NO_SCORES = frozenset(
    {
        *SPLIT_COLUMNS, "fold", "seed", "row", "frame", "threshold", "temperature", "logit", "control_score",
        "control_label", "control_logit", "source_score", "source_label",
        "duration_seconds", "num_frames", "width", "height", "frames_per_second",
        "size_bytes", "bits_per_second", "score_real", "year", "age", "is_fake", "is_real", "target", "y", "y_true",
        "label_id", "class_id", "index", "frame_count",
    }
)  # fmt: skip
_MISSING = ("", "nan", "null", "none", "na", "n/a", "<na>", "-")
_PREFIX = "score_"
ONE_DETECTOR = "score"  # what the only detector is called where the table does not name it


@dataclass(frozen=True)
class ScoreTable:
    """Scores of detectors, one row per video in the order of the ids."""

    videos: pl.DataFrame  # ``video_id label group_id generator real_source corpus``, text, null where nothing is known
    scores: pl.DataFrame  # a Float64 column per detector, null where it gave no score; rows as in ``videos``
    notes: tuple[str, ...] = ()  # what was left out or assumed, sentences

    @property
    def has_groups(self) -> bool:
        """Whether the table says of any video which group it belongs to."""
        return self.videos["group_id"].null_count() < self.videos.height


def read_score_table(
    path: AnyPath,
    *,
    label_map: Mapping[str, str] | None = None,
    detectors: Sequence[str] = (),
    higher_is_real: bool = False,
    unused_labels: bool = False,
) -> ScoreTable:
    """Read and check a table: one row per video and detector (``detector``, ``score``) or a column per detector.

    Args:
        path: CSV or TSV (separated by comma, semicolon or tab; UTF-8 or UTF-16) or Parquet.
        label_map: labels in lower case that mean real or fake, beside these themselves.
        detectors: names of those that count; none: all. Of a table with a column each, they say which columns.
        higher_is_real: scores rank reals above fakes, and are turned round (1 - score of probabilities, else -score).
        unused_labels: ``label_map`` may name labels that no row has, as where a corpus has others.

    Raises:
        UsageError: no such table, a column is missing or cannot be meant, or ``detectors`` names an unknown one.
        DataError: a cell that is no finite number, a video with two labels or two scores of one detector, or labels
            that are not two kinds; the message names the row.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"{str(path)!r}: no such file. Give a CSV, TSV or Parquet table of scores.")
    table = read_label_table(path)
    text = _as_frame(table)
    table = replace(table, rows=())  # which take several times the memory of the frame
    video = _one_of(table, VIDEO_COLUMNS)
    label = _one_of(table, ("label", "class"))
    facts = {fact: table.optional(names) for fact, names in _ALTERNATIVES.items()}
    notes: list[str] = []
    given = pl.col(video).str.strip_chars()
    text = text.with_columns(video_id=given, said=pl.col(label).str.strip_chars().str.to_lowercase())
    if (empty := text.filter(pl.col("video_id") == "")).height:
        raise DataError(f"{table.name} row {empty['row'][0]}: the cell of {video!r} is empty. Every row needs a video.")
    # One video by two paths, as ./a.mp4 and a.mp4, is one.
    same = pl.col("video_id").map_elements(lambda name: normpath(name.replace("\\", "/")), return_dtype=pl.String)
    text = text.with_columns(pl.col("video_id").first().over(same))
    text = _with_labels(table.name, label, text, label_map or {}, notes, unused_labels)
    is_long = "detector" in table.columns
    if is_long:
        found = _long(table, text, detectors, notes)
    else:
        named = {video, label, *filter(None, facts.values())}
        found = _wide(table, text, _detector_columns(table, text, named, detectors, notes), notes)
    _refuse_duplicates(table.name, found)
    text, found = _per_video(table.name, text, found, facts["group_id"], notes)
    videos = _videos(table.name, text, facts)
    wide = found.pivot("detector", index="video_id", values="score", maintain_order=True)
    scores = videos.select("video_id").join(wide, on="video_id", how="left", maintain_order="left").drop("video_id")
    if empty_ones := [name for name in scores.columns if scores[name].null_count() == scores.height]:
        raise DataError(f"{table.name}: no video has a score of {some_of(empty_ones)}. Leave it out, or fill it.")
    if higher_is_real:
        scores = scores.with_columns(_turned(scores[name]) for name in scores.columns)
        notes.append("Scores were turned round: the table's own are higher for reals.")
    return ScoreTable(videos, scores, tuple(notes))


def _as_frame(table: LabelTable) -> pl.DataFrame:
    """All cells as text, with ``row``, the 1-based number of the data row."""
    if not table.rows:
        raise DataError(f"{table.name}: has a header and no row. Give a table with scores.")
    for number, row in enumerate(table.rows, start=1):
        if row is None:
            raise DataError(f"{table.name} row {number}: its number of cells is not the header's. Quote or repair it.")
    columns = zip(*table.rows, strict=True)
    named = {name: [escape_text(cell) for cell in cells] for name, cells in zip(table.columns, columns, strict=True)}
    return pl.DataFrame({name: cells for name, cells in named.items() if name}).with_row_index("row", offset=1)


def _one_of(table: LabelTable, names: Sequence[str]) -> str:
    """Return the first column of ``names`` that exists."""
    lower = {column.lower(): column for column in reversed(table.columns)}
    for name in names:
        if name in lower:
            return lower[name]
    near = did_you_mean(names[0], table.columns)
    wanted = " or ".join(map(repr, names[:3]))
    raise UsageError(f"{table.name}: wanted a column {wanted}, found {some_of(table.columns)}.{near}")


def _with_labels(
    name: str, column: str, text: pl.DataFrame, label_map: Mapping[str, str], notes: list[str], unused: bool
) -> pl.DataFrame:
    """Return the rows labelled real or fake; ``notes`` count the others."""
    meaning = {"real": "real", "fake": "fake", **label_map}
    labelled = text.with_columns(label=pl.col("said").replace_strict(meaning, default=None, return_dtype=pl.String))
    counts = counts_text(text["said"].to_list())
    if not unused and (never := sorted(set(label_map).difference(text["said"]))):
        raise UsageError(f"label_map: no row of {name} is labelled {some_of(never)}; got {counts}.")
    kinds = labelled["label"].drop_nulls().unique().to_list()
    if len(kinds) < 2:
        raise DataError(
            f"{name}: wanted both real and fake in the column {column!r}; got {counts}. "
            f"{label_map_hint(text['said'], '--label-map')}"
        )
    left = labelled.filter(pl.col("label").is_null())
    if left.height:
        notes.append(
            f"{left.height:,} rows are labelled neither real nor fake and are left out: "
            f"{counts_text(left['said'].to_list())}."
        )
    return labelled.filter(pl.col("label").is_not_null())


def _long(table: LabelTable, text: pl.DataFrame, wanted: Sequence[str], notes: list[str]) -> pl.DataFrame:
    """``row video_id detector score`` of a table with a row for each."""
    table.require(("score",))
    named = text.with_columns(detector=pl.col("detector").str.strip_chars())
    if (empty := named.filter(pl.col("detector") == "")).height:
        raise DataError(f"{table.name} row {empty['row'][0]}: the cell of 'detector' is empty. Every row needs one.")
    _refuse_unknown(table.name, wanted, named["detector"].unique().to_list())
    chosen = named.filter(pl.col("detector").is_in(wanted)) if wanted else named
    return chosen.select("row", "video_id", "detector", score=_numbers(table, chosen, "score", notes))


def _wide(table: LabelTable, text: pl.DataFrame, columns: Mapping[str, str], notes: list[str]) -> pl.DataFrame:
    parts = [
        text.select("row", "video_id", detector=pl.lit(name), score=_numbers(table, text, column, notes))
        for column, name in columns.items()
    ]
    return pl.concat(parts)


def _detector_columns(
    table: LabelTable, text: pl.DataFrame, named: set[str], wanted: Sequence[str], notes: list[str]
) -> dict[str, str]:
    """Which columns have scores, and the detector of each."""
    others = [name for name in table.columns if name and name not in named and name.lower() not in _NO_SCORES]
    prefixed = [name for name in others if name.lower().startswith(_PREFIX) and len(name) > len(_PREFIX)]
    if wanted:
        by_name = {name: name for name in table.columns} | {name[len(_PREFIX) :]: name for name in prefixed}
        _refuse_unknown(table.name, wanted, list(by_name))
        return {by_name[name]: name for name in wanted}
    alone = [name for name in others if name.lower() == "score"]
    if alone:
        chosen = {alone[0]: ONE_DETECTOR}
    elif prefixed:
        chosen = {name: name[len(_PREFIX) :] for name in prefixed}
    else:
        # A column without a single number holds something else.
        numbers = {name: _parsed(text[name].str.strip_chars()) for name in others}
        is_fake = (text["label"] == "fake").cast(pl.Float64)
        chosen = {name: name for name, column in numbers.items() if _may_be_scores(column, is_fake)}
        if len(chosen) > 1:
            notes.append(
                f"Every numeric column was taken for a detector: {some_of(list(chosen))} (--detectors chooses)."
            )
    if not chosen:
        raise UsageError(
            f"{table.name}: no column has scores; found {some_of(table.columns)}. Wanted a column 'score', or one per "
            "detector; --detectors names one that is called otherwise, is the same everywhere or equals the label."
        )
    if ignored := [name for name in others if name not in chosen]:
        notes.append(f"Columns that were not read: {some_of(ignored)}.")
    return chosen


def _may_be_scores(numbers: pl.Series, is_fake: pl.Series) -> bool:
    """Whether a column that nobody calls a score differs among videos, and otherwise than the label itself."""
    known = pl.DataFrame([numbers.alias("number"), is_fake.alias("is_fake")]).drop_nulls("number")
    if known["number"].n_unique() == 1:
        return known.height == 1
    equal, opposite = (known["number"] == known["is_fake"]).all(), (known["number"] == 1 - known["is_fake"]).all()
    return known.height > 0 and not equal and not opposite


def _refuse_unknown(name: str, wanted: Sequence[str], known: Sequence[str]) -> None:
    for detector in wanted:
        if detector not in known:
            near = did_you_mean(detector, known)
            raise UsageError(f"{name}: no detector {detector!r}; found {some_of(sorted(known))}.{near}")


def _numbers(table: LabelTable, text: pl.DataFrame, column: str, notes: list[str]) -> pl.Series:
    """Return the cells as Float64, null for empty ones; ``notes`` mention decimal commas.

    Raises:
        DataError: a cell is no finite number, or its comma may separate thousands.
    """
    name, cells = table.name, text[column].str.strip_chars()
    is_missing = cells.str.to_lowercase().is_in(_MISSING)
    numbers = _parsed(cells)
    has_comma = cells.str.contains(",", literal=True) & numbers.is_not_null()
    if has_comma.any():
        place = has_comma.arg_true()[0]
        where = f"{name} row {text['row'][place]}: the score in column {column!r} is {cells[place]!r}"
        _refuse_thousands(table.separator, cells.filter(~is_missing), where)
        notes.append(f"Column {column!r} has decimal commas: {cells[place]} was read as {numbers[place]}.")
    bad = ~is_missing & ~(numbers.is_not_null() & numbers.is_finite().fill_null(value=False))
    if bad.any():
        place = bad.arg_true()[0]
        raise DataError(
            f"{name} row {text['row'][place]}: the score in column {column!r} is {cells[place]!r}, wanted a finite "
            f"number or an empty cell; {int(bad.sum()):,} of {cells.len():,} are so. Name the columns that are scores "
            "with --detectors, if this is none."
        )
    return pl.select(pl.when(is_missing).then(None).otherwise(numbers)).to_series().alias("score")


def _refuse_thousands(separator: str, cells: pl.Series, where: str) -> None:
    """Refuse commas in numbers unless semicolons, or tabs and an unambiguous number, show that they are decimal.

    Raises:
        DataError: a comma may separate thousands; ``where`` begins the message.
    """
    remedy = "Write 1.5 for one and a half and 1500 for fifteen hundred, in the whole column."
    if cells.str.contains(".", literal=True).any():
        raise DataError(f"{where}, and other scores there have a point: which one is the decimal mark? {remedy}")
    sure = ~cells.str.contains(r"^[+-]?[1-9]\d{0,2},\d{3}$") & cells.str.contains(",", literal=True)
    if separator != ";" and not (separator == "\t" and sure.any()):
        raise DataError(
            f"{where}: does the comma stand before decimals or between thousands? {remedy} Decimal commas are read "
            "where ';' separates the columns."
        )


def _parsed(cells: pl.Series) -> pl.Series:
    """Float64, null where a cell is no number; of a column with decimal commas, as many spreadsheets write, too."""
    has_comma = cells.str.contains(",", literal=True).any()
    points = cells.str.replace(",", ".", literal=True) if has_comma else cells
    return points.cast(pl.Float64, strict=False)


def _refuse_duplicates(name: str, found: pl.DataFrame) -> None:
    twice = found.group_by("video_id", "detector", maintain_order=True).agg(pl.col("row"), number=pl.len())
    if (twice := twice.filter(pl.col("number") > 1)).height:
        video, detector, rows, _ = twice.row(0)
        raise DataError(
            f"{name} rows {rows[0]} and {rows[1]}: video {video!r} has two scores of detector {detector!r}; "
            f"{twice.height:,} videos are so. Keep one row each, or give frames' scores as their mean per video."
        )


def _per_video(
    name: str, text: pl.DataFrame, found: pl.DataFrame, group: str | None, notes: list[str]
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return both with one video for the rows of its frames or parts, and with the mean of their scores.

    Raises:
        DataError: rows are pictures or parts of no one video, and state no group.
    """
    paths = [normpath(video.replace("\\", "/")) for video in text["video_id"]]
    facts = list(text.select("label", _stated(group).alias("group")).iter_rows())
    whole, problems = frame_names.videos_of(paths, facts, text["said"])
    refused = [place for place, problem in enumerate(problems) if problem and facts[place][1] is None]
    if refused:
        raise DataError(
            f"{name} row {text['row'][refused[0]]}: {problems[refused[0]]}; {len(refused):,} rows are so. Rows of one "
            "video count as one: name its frames VIDEO/000.png, with one label, or say in a column 'group' of which "
            "video each row is."
        )
    if single := sum(map(bool, problems)):
        notes.append(f"{single:,} rows are pictures or parts that count one by one, in the groups that they state.")
    video_of = {video: its for video, path, its in zip(text["video_id"], paths, whole, strict=True) if its != path}
    if not video_of:
        return text, found
    notes.append(
        f"{len(video_of):,} ids are frames or parts of {len(set(video_of.values())):,} videos by their names, such as "
        f"{min(video_of)!r}: a video's score is the mean of theirs."
    )
    named = pl.col("video_id").replace(video_of)
    mean = found.group_by(named, "detector", maintain_order=True).agg(pl.col("row").first(), pl.col("score").mean())
    return text.with_columns(named), mean.select(found.columns)


def _stated(column: str | None) -> pl.Expr:
    """Return the cells of a text column; null if they are empty."""
    cell = pl.lit(None, pl.String) if column is None else pl.col(column).str.strip_chars()
    return pl.when(~cell.str.to_lowercase().is_in(list(_MISSING))).then(cell)


def _videos(name: str, text: pl.DataFrame, facts: Mapping[str, str | None]) -> pl.DataFrame:
    """One row per video; what its rows say differently is refused."""
    known = {"label": pl.col("label"), **{fact: _stated(column) for fact, column in facts.items()}}
    rows = text.select("row", "video_id", **known)
    for fact in known:
        kinds = rows.drop_nulls(fact).group_by("video_id").agg(pl.col(fact).unique().sort(), pl.col("row").min())
        if (differing := kinds.filter(pl.col(fact).list.len() > 1).sort("row")).height:
            video, said, row = differing.row(0)
            raise DataError(
                f"{name} row {row}: video {video!r} has more than one {fact}: {some_of(said)}; {differing.height:,} "
                "videos are so. A video has one."
            )
    first = [pl.col(fact).drop_nulls().first() for fact in known]
    return rows.group_by("video_id").agg(first).sort("video_id").select("video_id", "label", *FACTS)


def _turned(scores: pl.Series) -> pl.Series:
    is_probability = scores.min() >= 0 and scores.max() <= 1  # type: ignore[operator]  # of numbers
    return 1 - scores if is_probability else -scores


def with_corpus(
    table: ScoreTable, index: pl.DataFrame, duplicates: Mapping[str, str] | None = None
) -> tuple[ScoreTable, pl.DataFrame]:
    """``table`` with what a corpus says of its videos, and the index's rows of these, ``video_id`` being the table's.

    A row is a video of the corpus where its id is the index's path, id or source id. Else it is the only one of that
    file name, with or without ending, whose folders are not others as far as both say them, and whose label is the
    table's. What the table says itself stands, and its groups are joined where the corpus's are one.

    Args:
        table: the scores.
        index: INDEX schema.
        duplicates: of files that the index leaves out, the path of the one of the same content that it has
            (``index.used_for``).

    Raises:
        DataError: no video is of that corpus.
    """
    names = _Names(index, duplicates or {})
    ids = table.videos["video_id"].to_list()
    found = [names.place(*row) for row in table.videos.select("video_id", "label").iter_rows()]
    if not any(place is not None for place in found):
        raise DataError(
            f"corpus: none of the table's {len(ids):,} videos is in it. The table has such as {ids[0]!r}, the corpus "
            f"such as {index['path'][0]!r}. Ids are to be paths, or names, of the corpus."
        )
    rows = [place for place in found if place is not None]
    matched = pl.Series("video_id", [video for video, place in zip(ids, found, strict=True) if place is not None])
    of_corpus = index[rows].with_columns(matched)
    notes = [f"{len(rows):,} of {len(ids):,} videos were found in the corpus."]
    if (twice := of_corpus.filter(pl.col("content_sha256").is_duplicated())).height:
        notes[0] += f" {twice.height:,} of them are files of the same content, or named twice: each row counts."
    said = of_corpus.select("video_id", *(pl.col(name).alias(f"{name}_of_corpus") for name in (*FACTS[:3], "label")))
    joined = table.videos.join(said, on="video_id", how="left", maintain_order="left")
    if differing := joined.filter(pl.col("label") != pl.col("label_of_corpus")).height:
        notes.append(f"{differing:,} videos have another label in the corpus; the table's counts.")
    groups = _joined_groups(joined["group_id"].to_list(), joined["group_id_of_corpus"].to_list())
    stated = joined.select("group_id", joined=pl.Series(groups, dtype=pl.String)).drop_nulls("group_id")
    if fewer := stated["group_id"].n_unique() - stated["joined"].n_unique():
        notes.append(f"Copies in the corpus join the table's groups: they are {fewer:,} fewer.")
    videos = joined.select(
        "video_id",
        "label",
        pl.Series("group_id", groups, dtype=pl.String),
        *(pl.coalesce(name, f"{name}_of_corpus").alias(name) for name in FACTS[1:3]),
        "corpus",
    )
    return ScoreTable(videos, table.scores, (*table.notes, *notes)), of_corpus


def _joined_groups(stated: Sequence[str | None], of_corpus: Sequence[str | None]) -> list[str | None]:
    """Return the connected components of both groupings, with the table's names; None for rows without a group."""
    parts, first = Components(len(stated)), dict[tuple[bool, str], int]()
    for is_stated, groups in ((True, stated), (False, of_corpus)):
        for row, group in enumerate(groups):
            if group is not None:
                parts.join(first.setdefault((is_stated, group), row), row)
    labels, taken, names = parts.label.tolist(), set(stated), dict[int, str]()
    for (is_stated, group), row in sorted(first.items(), key=lambda each: (not each[0][0], each[0][1])):
        if labels[row] not in names:
            names[labels[row]] = group if is_stated or group not in taken else f"{group} of the corpus {row}"
    return [names.get(label) for label in labels]


class _Names:
    """By what the videos of an index may be called."""

    def __init__(self, index: pl.DataFrame, duplicates: Mapping[str, str]) -> None:
        self._exact: dict[str, int | None] = {}  # None: several are called so
        self._by_stem: dict[str, list[tuple[PurePosixPath, int]]] = {}
        self._labels = index["label"].to_list()
        place_of: dict[str, int] = {}
        for number, (path, *ids) in enumerate(index.select("path", "video_id", "source_id").iter_rows()):
            place_of[path] = number
            self._add(path, number, ids)
        for path, used in duplicates.items():
            if used in place_of:
                self._add(path, place_of[used], ())

    def _add(self, path: str, number: int, ids: Sequence[str]) -> None:
        for name in dict.fromkeys((path, *ids)):
            self._exact[name] = None if name in self._exact else number
        pure = PurePosixPath(path)
        self._by_stem.setdefault(pure.stem, []).append((pure, number))

    def place(self, video: str, label: str) -> int | None:
        """Return the row of the index that matches the table's ``video``."""
        pure = PurePosixPath(video.replace("\\", "/"))
        for name in (video, str(pure)):
            if (exact := self._exact.get(name)) is not None:
                return exact
        fits: dict[tuple[int, bool], set[int]] = {}
        for stem in {pure.stem, pure.name}:
            for path, number in self._by_stem.get(stem, ()):
                shared = list(zip(reversed(pure.parts[:-1]), reversed(path.parts[:-1]), strict=False))
                if all(one == other for one, other in shared):
                    fits.setdefault((len(shared), path.name == pure.name), set()).add(number)
        best = fits[max(fits)] if fits else set()
        return next((number for number in best if self._labels[number] == label), None) if len(best) == 1 else None
