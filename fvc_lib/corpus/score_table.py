"""Read tables of the scores that detectors gave to videos (CSV, TSV or Parquet), as one row per video.

The detectors may be other people's. A fact is anything that a table states about a video besides scores, such as its
label, leakage group (videos of the same source) or generator.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from posixpath import normpath

import polars as pl

from fvc_lib.corpus.copies.groups import GroupMember, join_groups
from fvc_lib.corpus.corpus_files import counts_text, some_of, videos_of
from fvc_lib.corpus.index import build_index, used_for
from fvc_lib.corpus.label_table import GROUP_COLUMNS, MISSING, LabelTable, read_label_table
from fvc_lib.corpus.listing import TRUTHS, label_map_hint
from fvc_lib.services.atomic_files import AnyPath, escape_text
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, UsageError, did_you_mean
from fvc_lib.services.tables import INDEX, REJECTED, read_table

# Names of the columns that may hold a fact, in lower case. The first column with a value in a row is read.
_COLUMNS = {
    "video_id": ("video", "video_id", "path", "video_path", "id", "filename", "file"), "label": ("label", "class"),
    "group_id": GROUP_COLUMNS, "generator": ("generator", "manipulation"), "real_source": ("real_source", "source"),
    "corpus": ("corpus", "dataset"),
}  # fmt: skip
FACTS = tuple(_COLUMNS)[2:]  # facts about a video that a table may leave out
# Columns of numbers that are no scores, in tables of other people and of this project.
_NO_SCORES = (
    "split part fold seed row frame threshold temperature logit control_score control_label control_logit source_score "
    "source_label duration_seconds num_frames width height frames_per_second size_bytes bits_per_second score_real "
    "year age is_fake is_real target y y_true label_id class_id index frame_count"
)
ONE_DETECTOR = "score"  # name of the only detector if the table does not name it
_NAMED = re.compile("^(prob|score)|_(prob|score)$", re.IGNORECASE)  # names of columns that hold scores
_AFFIX = re.compile("^(prob|score)_|_(prob|score)$", re.IGNORECASE)  # what a detector's name leaves out of them


@dataclass(frozen=True)
class ScoreTable:
    """Scores of one or several detectors for the same videos, one row per video, sorted by id."""

    videos: pl.DataFrame  # text columns ``video_id label group_id generator real_source corpus``; null: not known
    scores: pl.DataFrame  # one Float64 column per detector, named after it; rows as in ``videos``; null: no score
    notes: tuple[str, ...] = ()  # sentences about rows and columns that were left out

    @property
    def has_groups(self) -> bool:
        """True if the table states the group of at least one video."""
        return self.videos["group_id"].null_count() < self.videos.height


def read_score_table(
    path: AnyPath,
    *,
    label_map: Mapping[str, str] | None = None,
    detectors: Sequence[str] = (),
    higher_is_real: bool = False,
    columns: Mapping[str, str] | None = None,
    where: Mapping[str, str] | None = None,
) -> ScoreTable:
    """Read and check a table of scores.

    The table has one row per video and detector, with the columns ``detector`` and ``score``. Or it has one row per
    video, with one column per detector. Rows of frames or parts of a video are joined: the score of the video is the
    mean of their scores. Ids of videos are read as paths, so a leading ``./`` makes no difference.

    Args:
        path: CSV or TSV (separated by comma, semicolon or tab; UTF-8 or UTF-16) or Parquet.
        label_map: maps further labels, in lower case, to real or fake.
        detectors: names of the detectors or columns to read; empty: all.
        higher_is_real: set this if higher scores mean real. Scores become 1 - score if all scores of a detector are
            from 0 to 1, else -score.
        columns: maps the name of a column that FVC reads to its name in the file, such as ``{"label": "target"}``.
        where: maps names of columns to values; only rows with all these values are read. None or empty: all rows.

    Raises:
        UsageError: the table does not exist, a column is missing, no row has a value of ``where``, or ``detectors`` has
            an unknown name.
        DataError: a score is no finite number, a video has two labels or two scores of the same detector, or not both
            labels, real and fake, occur. The message names the row.
    """
    table, notes = read_label_table(path), list[str]()
    table = table.renamed(columns or {}, [*chain(*_COLUMNS.values()), "detector", ONE_DETECTOR])
    name, columns_of = table.name, _columns(table)
    cells = _cells(table)
    if where:
        cells = _where(name, cells, where, notes)
    no_text = pl.lit(None, pl.String)
    facts = {fact: pl.coalesce(*columns, no_text) for fact, columns in columns_of.items()}
    others = pl.exclude("row", "word", *chain(*columns_of.values()))
    cells = cells.select("row", others, word=facts.pop("label").fill_null("").str.to_lowercase(), **facts)
    plain_path = pl.col("video_id").str.replace_all("\\", "/", literal=True).map_elements(normpath, pl.String)
    cells = cells.with_columns(plain_path)
    _refuse(name, cells.filter(pl.col("video_id").is_null()), "its cell of the video is empty. Name it")
    cells = _labelled(name, cells, {**TRUTHS.get(table.label_column, {}), **(label_map or {})}, notes)
    scores = _scores(name, cells, detectors, notes).with_columns(score=_number("text"))
    bad = scores.filter(pl.col("text").is_not_null() & ~pl.col("score").is_finite().fill_null(value=False))
    got = f"the score of {bad['detector'].first()!r} is {bad['text'].first()!r}"
    _refuse(name, bad, f"{got}, wanted a finite number such as 0.5 (see --detectors)")
    twice = scores.filter(pl.struct("video_id", "detector").is_duplicated())
    _refuse(name, twice, "has two scores of one detector. Keep one, or give the mean of frames' scores")
    cells = _join_frames(name, cells, notes)
    videos = _videos(name, cells)
    scores = scores.drop("video_id").join(cells.select("row", "video_id"), on="row", maintain_order="left")
    wide = scores.pivot("detector", index="video_id", values="score", aggregate_function="mean", maintain_order=True)
    wide = videos.select("video_id").join(wide, on="video_id", how="left", maintain_order="left").drop("video_id")
    if empty := [detector for detector in wide.columns if not wide[detector].count()]:
        raise DataError(f"{name}: no video has a score of {some_of(empty)}. Leave it out, or fill it.")
    if higher_is_real:
        wide = wide.select((int(wide[each].is_between(0, 1).all()) - pl.col(each)).alias(each) for each in wide.columns)
        notes.append("Scores were reversed: in the table, higher scores mean real.")
    return ScoreTable(videos, wide, tuple(notes))


def _refuse(name: str, bad: pl.DataFrame, problem: str) -> None:
    """Raise ``DataError`` if ``bad``, the rows with a problem, is not empty.

    Args:
        name: file name of the table.
        bad: the rows with a problem; ``row`` and ``video_id`` of the first are in the message.
        problem: text of the message.
    """
    if bad.height:
        row, video = bad.select("row", "video_id").row(0)
        raise DataError(f"{name} row {row}, video {video!r}: {problem}; rows with this problem: {bad.height:,}.")


def _number(column: str) -> pl.Expr:
    """Return an expression for the numbers in a column of texts; null for a text that is no number."""
    return pl.col(column).cast(pl.Float64, strict=False)


def _columns(table: LabelTable) -> dict[str, list[str]]:
    """Map every fact (such as ``video_id``, ``label`` or ``group_id``) to the names of its columns in the table.

    A fact may have several columns; the caller reads the first one that has a value in a row. The list is empty if no
    column of the table states the fact.

    Raises:
        UsageError: the table has no column for videos or labels.
    """
    lower = {column.lower(): column for column in table.columns}
    found = {fact: [lower[name] for name in names if name in lower] for fact, names in _COLUMNS.items()}
    if lacking := [_COLUMNS[fact][0] for fact in ("video_id", "label") if not found[fact]]:
        raise UsageError(
            f"{table.name}: wanted a column {lacking[0]!r}, found {some_of(table.columns)}."
            f"{did_you_mean(lacking[0], table.columns)} Say which it is: --columns {lacking[0]}=NAME."
        )
    return found


def _cells(table: LabelTable) -> pl.DataFrame:
    """Return the table as a data frame of stripped texts, null for missing values.

    An additional column ``row`` holds the 1-based number of the data row.

    Raises:
        DataError: there is no row, or a row has more or fewer cells than the header.
    """
    if None in table.rows or not table.rows:
        where = f" row {table.rows.index(None) + 1}: its number of cells" if table.rows else ": a header and no row"
        raise DataError(f"{table.name}{where} is not as wanted. Write one row per video with a cell for every column.")
    names = [column or f"unnamed {place}" for place, column in enumerate(table.columns)]
    rows = [[escape_text(cell.strip()) for cell in row] for row in table.rows if row]
    frame = pl.DataFrame(rows, schema=dict.fromkeys(names, pl.String), orient="row").drop("row", strict=False)
    is_missing = pl.all().str.to_lowercase().is_in((*MISSING, "na", "n/a", "-"))
    return frame.select(pl.when(~is_missing).then(pl.all())).with_row_index("row", offset=1)


def _where(name: str, cells: pl.DataFrame, where: Mapping[str, str], notes: list[str]) -> pl.DataFrame:
    """Return the rows of ``cells`` in which each column named in ``where`` has the value given there.

    A sentence with the number of rows returned is added to ``notes``. ``name`` names the table in error messages.

    Raises:
        UsageError: there is no such column, or no row with all these values.
    """
    if unknown := [column for column in where if column not in cells.columns]:
        raise UsageError(
            f"{name}: no column {unknown[0]!r} for --where; found {some_of(cells.columns[1:])}."
            f"{did_you_mean(unknown[0], cells.columns)}"
        )
    wanted = ", ".join(map("=".join, where.items()))
    rows = cells.filter(*(pl.col(column) == value for column, value in where.items()))
    if rows.is_empty():
        values = "; ".join(f"{column} has {counts_text(cells[column].drop_nulls())}" for column in where)
        raise UsageError(f"{name}: no row with {wanted}; the column {values}.")
    notes.append(f"{rows.height:,} of {cells.height:,} rows are read: {wanted}.")
    return rows


def _labelled(name: str, cells: pl.DataFrame, label_map: Mapping[str, str], notes: list[str]) -> pl.DataFrame:
    """Return the rows that are labelled real or fake, with the additional column ``label``.

    For a real video, a text in the column ``generator`` is moved to the column ``real_source``, if that is empty.
    Tables often write there where a real video is from.

    Args:
        name: file name of the table, for messages.
        cells: rows of the table with the column ``word``, the label in lower case.
        label_map: maps further labels, in lower case, to real or fake.
        notes: receives a sentence that counts the other rows.

    Raises:
        DataError: no row is labelled real, or none is labelled fake.
    """
    meaning = {"real": "real", "fake": "fake", **label_map}
    label = pl.col("word").replace_strict(meaning, default=None, return_dtype=pl.String)
    used = cells.with_columns(label=label).drop_nulls("label")
    counts = counts_text(cells["word"])
    if used["label"].n_unique() < 2:
        hint = label_map_hint("--label-map")
        raise DataError(f"{name}: wanted both real and fake in the column of labels; got {counts}. {hint}")
    if others := cells.height - used.height:
        notes.append(f"{others:,} rows are labelled neither real nor fake and are left out (labels: {counts}).")
    is_real = pl.col("label") == "real"
    source = pl.coalesce("real_source", pl.when(is_real).then("generator"))
    return used.with_columns(real_source=source, generator=pl.when(~is_real).then("generator"))


def _scores(name: str, cells: pl.DataFrame, wanted: Sequence[str], notes: list[str]) -> pl.DataFrame:
    """Return a table ``row video_id detector text`` with one row per score; ``text`` is the text of the score's cell.

    A table may have one column per detector. Then the ``wanted`` columns are read. If ``wanted`` is empty, columns are
    chosen by their names and values (``_score_columns``).

    Args:
        name: file name of the table, for messages.
        cells: rows of the table with the columns ``video_id`` and ``label``.
        wanted: names of the detectors or columns to read; empty: all.
        notes: receives a note on the columns that are read and those that are not.

    Raises:
        UsageError: no column has scores, or a wanted detector is missing.
        DataError: a row names no detector.
    """
    columns = [each for each in cells.columns if each not in ("row", "word", *_COLUMNS)]
    if "detector" in columns:
        if "score" not in columns:
            raise UsageError(f"{name}: wanted a column 'score' next to 'detector'.")
        _refuse(name, cells.filter(pl.col("detector").is_null()), "its cell of 'detector' is empty. Fill it")
        long = cells.select("row", "video_id", "detector", text="score")
        found = long["detector"].unique().sort().to_list()
    else:
        others = [each for each in columns if each.lower() not in _NO_SCORES.split() and each[:8] != "unnamed "]
        column_of = _score_columns(cells, others)
        if wanted:
            column_of = {each: each for each in columns} | column_of
        found = list(column_of)
        long = cells.select("row", "video_id", **column_of)
        long = long.unpivot(index=["row", "video_id"], variable_name="detector", value_name="text")
        read = [column_of[each] for each in wanted or found if each in found]
        if ignored := [each for each in others if each not in read]:
            notes.append(f"Read as scores: {some_of(read)}; not read: {some_of(ignored)} (--detectors chooses).")
    if not found:
        raise UsageError(
            f"{name}: no column has scores; found {some_of(cells.columns[1:])}. Wanted a column 'score', or one per "
            "detector; --detectors selects a column with another name."
        )
    if unknown := [each for each in wanted if each not in found]:
        raise UsageError(
            f"{name}: no detector {unknown[0]!r}; found {some_of(found)}.{did_you_mean(unknown[0], found)}"
        )
    return long.filter(pl.col("detector").is_in(list(wanted or found)))


def _score_columns(cells: pl.DataFrame, columns: Sequence[str]) -> dict[str, str]:
    """Map the name of each detector to its column, in a table with one column per detector.

    Columns are chosen by the first of these rules that finds one:

    1. the column ``score``;
    2. columns of numbers that are named ``prob...``, ``score...``, ``..._prob`` or ``..._score``;
    3. columns of numbers in [0, 1] that are neither constant nor equal to the label.

    Args:
        cells: rows of the table with the column ``label``.
        columns: names of the columns that may hold scores.
    """
    if only := [column for column in columns if column.lower() == ONE_DETECTOR]:
        return {ONE_DETECTOR: only[0]}
    numbers = cells.select(map(_number, columns))
    named = [column for column in columns if _NAMED.search(column) and numbers[column].count()]
    short = {_AFFIX.sub("", column): column for column in named}
    if named:
        return short if len(short) == len(named) else {column: column for column in named}
    is_fake = cells["label"] == "fake"
    is_in_range = {column: numbers[column].is_between(0, 1).all() for column in columns}
    varies = [column for column in columns if is_in_range[column] and numbers[column].drop_nulls().n_unique() > 1]
    labels = [is_fake.cast(pl.Float64), (~is_fake).cast(pl.Float64)]
    return {column: column for column in varies if not any((numbers[column] == label).all() for label in labels)}


def _join_frames(name: str, cells: pl.DataFrame, notes: list[str]) -> pl.DataFrame:
    """Return ``cells`` with the ids of frames and of parts of a video replaced by the id of their video.

    Args:
        name: file name of the table, for messages.
        cells: rows of the table with the column ``video_id``, whose values may be names of frames or parts.
        notes: receives a sentence that counts the replaced ids.

    Raises:
        DataError: rows without a group are named like frames or parts of one video, but cannot be of one video, for
            example because their labels differ.
    """
    facts = cells.select("label", "group_id").rows()
    videos, problems = videos_of(cells["video_id"].to_list(), facts, cells["word"])
    joined = cells.with_columns(
        before="video_id", video_id=pl.Series(videos, dtype=pl.String), problem=pl.Series(problems)
    )
    refused = joined.filter(pl.col("problem") != "", pl.col("group_id").is_null())
    remedy = "name its frames VIDEO/000.png, with one label, or name the video of each row in a column 'group'"
    _refuse(name, refused, f"{refused['problem'].first()!r}. Rows of one video count as one: {remedy}")
    parts = joined.filter(pl.col("before") != pl.col("video_id"))
    if parts.height:
        ids, wholes = parts["before"].n_unique(), parts["video_id"].n_unique()
        notes.append(
            f"{ids:,} ids are frames or parts of {wholes:,} videos by their names: scores are means of theirs."
        )
    return joined


def _videos(name: str, cells: pl.DataFrame) -> pl.DataFrame:
    """Join the rows of each video to one row; return the table of videos, sorted by id.

    It has the columns video_id, label and ``FACTS`` (group, generator, source and corpus). If several rows state a
    fact, the first one is used.

    Args:
        name: file name of the table, for messages.
        cells: rows of the table; a video may have several rows, such as one per detector.

    Raises:
        DataError: rows of the same video have different labels or facts.
    """
    long = cells.unpivot(["label", *FACTS], index=["row", "video_id"]).drop_nulls("value")
    differing = long.filter(pl.col("value").n_unique().over("video_id", "variable") > 1).sort("row")
    _refuse(name, differing, f"has more than one {differing['variable'].first()!r}. Keep the right rows")
    return cells.group_by("video_id").agg(pl.col("label", *FACTS).drop_nulls().first()).sort("video_id")


# --- The corpus of a table's videos.


def with_corpus(
    table: ScoreTable, index: pl.DataFrame, duplicates: Mapping[str, str] | None = None
) -> tuple[ScoreTable, pl.DataFrame]:
    """Add the groups and other facts that a corpus states about its videos to a table of scores for the same videos.

    A row of the table matches a video of the corpus if the row's id is the video's path, id or source id in the index.
    Without such a match, paths are compared without extension: one path must be the end of the other, and the labels
    must be equal. A row that matches several videos is treated as a row without a match.

    Facts that the table states are not changed. Groups of the table are joined if their videos share a group of the
    corpus.

    Args:
        table: the scores.
        index: INDEX table of the corpus.
        duplicates: maps the path of a file that the index leaves out to the path of the file of equal content in the
            index (``index.used_for``).

    Returns:
        (table, rows): the completed table, and the INDEX rows of the matching videos, with the ``video_id`` of
        ``table``.

    Raises:
        DataError: no video of the table is in the corpus.
    """
    videos = table.videos
    of_corpus = _found(videos, index, duplicates or {})
    if of_corpus.is_empty():
        raise DataError(
            f"corpus: none of the table's {videos.height:,} videos is in it. The table has such as "
            f"{videos['video_id'][0]!r}, the corpus such as {index['path'][0]!r}. Ids are paths or names of the corpus."
        )
    notes = [*table.notes, f"{of_corpus.height:,} of {videos.height:,} videos were found in the corpus."]
    known = of_corpus.select("video_id", "label", "group_id", "generator", "real_source")
    joined = videos.join(known, on="video_id", how="left", maintain_order="left", suffix=" of corpus")
    if differing := joined.filter(pl.col("label") != pl.col("label of corpus")).height:
        notes.append(f"{differing:,} videos have another label in the corpus; the table's counts.")
    members = [GroupMember(video, video, None, group) for video, group in videos.select("video_id", "group_id").rows()]
    group_ids, _ = join_groups(members, (), known.select("video_id", "corpus: " + pl.col("group_id")).iter_rows())
    group = pl.Series(group_ids, dtype=pl.String)
    videos = joined.with_columns(
        pl.coalesce("generator", "generator of corpus"),
        pl.coalesce("real_source", "real_source of corpus"),
        group_id=pl.when(pl.coalesce("group_id", "group_id of corpus").is_not_null()).then(group),
    ).select(videos.columns)
    return ScoreTable(videos, table.scores, tuple(notes)), of_corpus


def _found(videos: pl.DataFrame, index: pl.DataFrame, duplicates: Mapping[str, str]) -> pl.DataFrame:
    """Return the rows of ``index`` that match ``videos``, in the order of ``videos`` and with their ids.

    Names are matched exactly or by the end of the path, see ``with_corpus``. Videos that match no row or several rows
    are left out.

    Args:
        videos: table with the columns ``video_id`` and ``label``.
        index: INDEX table of the corpus.
        duplicates: maps the path of a file that is not in ``index`` to the path of a file of equal content that is.
    """
    known = index.with_row_index("place").select("place", "path", "video_id", "source_id", of_corpus="label")
    copies = pl.DataFrame(list(duplicates.items()), schema={"name": pl.String, "path": pl.String}, orient="row")
    names = known.unpivot(["path", "video_id", "source_id"], index=["place", "of_corpus"], value_name="name")
    names = pl.concat([names.drop("variable"), copies.join(known, on="path").select("place", "of_corpus", "name")])
    whole = "/" + pl.col("name").str.replace(r"(?i)\.[a-z3]\w{1,4}$", "")
    end_of_path = {"whole": whole, "stem": whole.str.extract("([^/]*)$")}
    asked = videos.select("label", name="video_id").with_columns(**end_of_path)
    one, other = pl.col("whole"), pl.col("whole of corpus")
    is_exact = pl.col("name") == pl.col("name of corpus")
    pairs = asked.join(names.with_columns(**end_of_path), on="stem", suffix=" of corpus")
    pairs = pairs.filter(one.str.ends_with(other) | other.str.ends_with(one))
    pairs = pairs.filter(is_exact == is_exact.any().over("name"))
    found = pairs.group_by("name").agg(pl.all().first(), num_places=pl.col("place").n_unique())
    found = found.filter(is_exact | (pl.col("label") == pl.col("of_corpus")), num_places=1)
    chosen = videos.select(name="video_id").join(found, on="name", maintain_order="left")
    return index[chosen["place"]].with_columns(chosen["name"].alias("video_id"))


def found_in_corpus(table: ScoreTable, config: RunConfig, folder: Path) -> tuple[ScoreTable, pl.DataFrame]:
    """Index the corpus ``config.corpus``, and complete a table of scores by the groups and facts of this corpus.

    The tables of the index are written to ``folder``.

    Returns:
        (table, rows), as ``with_corpus`` returns them: the completed table, and the INDEX rows of the matching videos.

    Raises:
        UsageError: ``config.corpus`` is no corpus.
        DataError: no video of the corpus can be read, or no video of the corpus is in the table.
    """
    # Files that the table does not score may be broken.
    of_all = {
        "max_rejected_share": 1.0, "more_corpora": (), "dev_groups": 0, "annotations_only": False, "canonical": False,
        "rescale": 0,
    }  # fmt: skip
    build_index(config.corpus, config.model_copy(update=of_all), folder / "corpus")
    index = read_table(folder / "corpus/index.parquet", INDEX)
    return with_corpus(table, index, used_for(read_table(folder / "corpus/rejected.parquet", REJECTED)))
