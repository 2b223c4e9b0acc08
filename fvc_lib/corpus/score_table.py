"""Read tables of scores that detectors gave to videos (CSV, TSV or Parquet), as one row per video.

The detectors need not be this project's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from posixpath import normpath

import polars as pl

from fvc_lib.corpus.copies.groups import GroupMember, join_groups
from fvc_lib.corpus.corpus_files import counts_text, some_of, videos_of
from fvc_lib.corpus.index import build_index, used_for
from fvc_lib.corpus.label_table import GROUP_COLUMNS, MISSING, SPLIT_COLUMNS, LabelTable, read_label_table
from fvc_lib.corpus.listing import label_map_hint
from fvc_lib.services.atomic_files import AnyPath, escape_text
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, UsageError, did_you_mean
from fvc_lib.services.tables import INDEX, REJECTED, read_table

# The columns that may hold a fact, in lower case; the first that the table has is read.
_COLUMNS = {
    "video_id": ("video", "video_id", "path", "video_path", "id", "filename", "file"), "label": ("label", "class"),
    "group_id": GROUP_COLUMNS, "generator": ("generator", "manipulation"), "real_source": ("real_source", "source"),
    "corpus": ("corpus", "dataset"),
}  # fmt: skip
FACTS = tuple(_COLUMNS)[2:]  # facts about a video that a table may leave out
# Numbers that tables carry besides scores, this project's own predictions among them.
_NO_SCORES = (
    *SPLIT_COLUMNS, "fold", "seed", "row", "frame", "threshold", "temperature", "logit", "control_score",
    "control_label", "control_logit", "source_score", "source_label", "duration_seconds", "num_frames", "width",
    "height", "frames_per_second", "size_bytes", "bits_per_second", "score_real", "year", "age", "is_fake", "is_real",
    "target", "y", "y_true", "label_id", "class_id", "index", "frame_count",
)  # fmt: skip
_PREFIX = "score_"
ONE_DETECTOR = "score"  # name of the only detector where the table does not name it
_THOUSANDS = r"^[+-]?[1-9]\d{0,2},\d{3}$"
_NUMBER = pl.col("text").cast(pl.String).str.replace(",", ".", literal=True).cast(pl.Float64, strict=False)


@dataclass(frozen=True)
class ScoreTable:
    """Scores of detectors, one row per video in the order of the ids."""

    videos: pl.DataFrame  # ``video_id label group_id generator real_source corpus``, text, null where nothing is known
    scores: pl.DataFrame  # a Float64 column per detector, null where it gave no score; rows as in ``videos``
    notes: tuple[str, ...] = ()  # sentences on rows and columns that were left out or interpreted

    @property
    def has_groups(self) -> bool:
        """Whether the table states the group of any video."""
        return self.videos["group_id"].null_count() < self.videos.height


def read_score_table(
    path: AnyPath,
    *,
    label_map: Mapping[str, str] | None = None,
    detectors: Sequence[str] = (),
    higher_is_real: bool = False,
    unused_labels: bool = False,
) -> ScoreTable:
    """Read and check a table of scores.

    The table has one row per video and detector, with columns ``detector`` and ``score``, or one row per video with one
    column per detector. Ids of videos are read as paths, so a leading ``./`` makes no difference.

    Args:
        path: CSV or TSV (separated by comma, semicolon or tab; UTF-8 or UTF-16) or Parquet.
        label_map: maps further labels, in lower case, to real or fake.
        detectors: names of the detectors to read; empty: all. In a table with one column per detector, names of
            columns.
        higher_is_real: set this if higher scores mean real. Scores are then reversed: 1 - score if all scores of a
            detector are from 0 to 1, else -score.
        unused_labels: ``label_map`` may name labels that no row has.

    Raises:
        UsageError: no such table, a column is missing, or ``detectors`` names an unknown one.
        DataError: a cell that is no finite number, a video with two labels or two scores of one detector, or labels
            that are not two kinds; the message names the row.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"{str(path)!r}: no such file. Give a CSV, TSV or Parquet table of scores.")
    table, notes = read_label_table(path), list[str]()
    name, cells, column_of = table.name, _cells(table), _columns(table)
    cells = cells.with_columns(
        pl.lit(None, pl.String).alias(f"fact {fact}") if column is None else pl.col(column).alias(f"fact {fact}")
        for fact, column in column_of.items()
    ).with_columns(
        video_id=pl.col("fact video_id").str.replace_all("\\", "/", literal=True).map_elements(normpath, pl.String),
        word=pl.col("fact label").fill_null("").str.to_lowercase(),
    )
    _refuse(name, cells.filter(pl.col("video_id").is_null()), "its cell of the video is empty. Name it")
    cells = _labelled(name, cells, label_map or {}, notes, unused_labels)
    long = _long(table, cells, {*column_of.values()}, detectors, notes)
    scores = long.with_columns(score=_NUMBER)
    _refuse_numbers(name, scores, notes)
    twice = scores.filter(pl.struct("video_id", "detector").is_duplicated())
    _refuse(name, twice, "has two scores of one detector. Keep one, or give the mean of frames' scores")
    cells = _join_frames(name, cells, notes)
    scores = scores.join(cells.select("row", video="video_id"), on="row", maintain_order="left")
    means = scores.group_by("video", "detector", maintain_order=True).agg(pl.col("score").mean())
    videos = _one_row_each(name, cells)
    wide = means.pivot("detector", index="video", values="score", maintain_order=True)
    wide = videos.select(video="video_id").join(wide, on="video", how="left", maintain_order="left").drop("video")
    if empty := [detector for detector in wide.columns if wide[detector].null_count() == wide.height]:
        raise DataError(f"{name}: no video has a score of {some_of(empty)}. Leave it out, or fill it.")
    if higher_is_real:
        wide = wide.select((int(wide[each].is_between(0, 1).all()) - pl.col(each)).alias(each) for each in wide.columns)
        notes.append("Scores were turned round: the table's own are higher for reals.")
    return ScoreTable(videos, wide, tuple(notes))


def _refuse(name: str, bad: pl.DataFrame, problem: str) -> None:
    """Raise ``DataError`` if there are ``bad`` rows, with ``row`` and ``video_id``; the message names the first."""
    if bad.height:
        row, video = bad.select("row", "video_id").row(0)
        raise DataError(f"{name} row {row}, video {video!r}: {problem}; {bad.height:,} rows are so.")


def _cells(table: LabelTable) -> pl.DataFrame:
    """Return all cells as stripped text, null for missing values, with ``row``, the 1-based number of the data row."""
    if None in table.rows or not table.rows:
        where = f" row {table.rows.index(None) + 1}: its number of cells" if table.rows else ": a header and no row"
        raise DataError(f"{table.name}{where} is not as wanted. Write one row per video with a cell for every column.")
    rows = [[escape_text(cell) for cell in row] for row in table.rows if row]
    frame = pl.DataFrame(rows, schema=dict.fromkeys(map(str, range(len(table.columns))), pl.String), orient="row")
    frame.columns = [column or f"unnamed {place}" for place, column in enumerate(table.columns)]
    cell = pl.all().str.strip_chars()
    is_missing = cell.str.to_lowercase().is_in((*MISSING, "na", "n/a", "-"))
    return frame.select(pl.when(~is_missing).then(cell)).with_row_index("row", offset=1)


def _columns(table: LabelTable) -> dict[str, str | None]:
    """Map every fact of ``_COLUMNS`` to its column in the table, or None; case does not matter.

    Raises:
        UsageError: the table has no column for videos or labels.
    """
    lower = {column.lower(): column for column in reversed(table.columns)}
    found = {fact: next((lower[name] for name in names if name in lower), None) for fact, names in _COLUMNS.items()}
    for fact in ("video_id", "label"):
        if found[fact] is None:
            wanted = _COLUMNS[fact][0]
            raise UsageError(
                f"{table.name}: wanted a column {wanted!r}, found {some_of(table.columns)}."
                f"{did_you_mean(wanted, table.columns)}"
            )
    return found


def _labelled(
    name: str, cells: pl.DataFrame, label_map: Mapping[str, str], notes: list[str], unused_labels: bool
) -> pl.DataFrame:
    """Return the rows that are labelled real or fake, with a column ``label``; add a note that counts the others.

    Raises:
        UsageError: ``label_map`` names a label that no row has.
        DataError: the rows are not of both labels.
    """
    meaning = {"real": "real", "fake": "fake", **label_map}
    cells = cells.with_columns(label=pl.col("word").replace_strict(meaning, default=None, return_dtype=pl.String))
    counts = counts_text(cells["word"])
    if not unused_labels and (never := sorted(set(label_map).difference(cells["word"]))):
        raise UsageError(f"label_map: no row of {name} is labelled {some_of(never)}; got {counts}.")
    used = cells.drop_nulls("label")
    if used["label"].n_unique() < 2:
        hint = label_map_hint(cells["word"], "--label-map")
        raise DataError(f"{name}: wanted both real and fake in the column of labels; got {counts}. {hint}")
    if others := cells.height - used.height:
        notes.append(f"{others:,} rows are labelled neither real nor fake and are left out (labels: {counts}).")
    return used


def _long(
    table: LabelTable, cells: pl.DataFrame, taken: set[str | None], wanted: Sequence[str], notes: list[str]
) -> pl.DataFrame:
    """Return ``row video_id column detector text``: the cell ``text`` of every row and detector.

    In a table with one column per detector these are the ``wanted`` columns, else a column ``score``, else columns that
    begin with ``score_``, else all columns of numbers that are neither constant nor equal to the label.

    Raises:
        UsageError: no column has scores, or a wanted detector is missing.
        DataError: a row names no detector.
    """
    if "detector" in table.columns:
        table.require(("score",))
        _refuse(table.name, cells.filter(pl.col("detector").is_null()), "its cell of 'detector' is empty. Fill it")
        column_of = dict.fromkeys(cells["detector"].unique().sort(), "score")
    else:
        others = [each for each in table.columns if each and each not in taken and each.lower() not in _NO_SCORES]
        lower = {each.lower(): each for each in others}
        prefixed = {each[len(_PREFIX) :]: each for each in others if each.lower().startswith(_PREFIX)}
        named = dict.fromkeys([ONE_DETECTOR] * ("score" in lower), lower.get("score", "")) or prefixed
        column_of = {each: each for each in table.columns} | prefixed if wanted else named or _numeric(cells, others)
        if not column_of:
            raise UsageError(
                f"{table.name}: no column has scores; found {some_of(table.columns)}. Wanted a column 'score', or one "
                "per detector; --detectors names one that is called otherwise."
            )
        read = [column_of[each] for each in wanted or column_of if each in column_of]
        if ignored := [each for each in others if each not in read]:
            notes.append(f"Read as scores: {some_of(read)}; not read: {some_of(ignored)} (--detectors chooses).")
    if unknown := [each for each in wanted if each not in column_of]:
        near = did_you_mean(unknown[0], column_of)
        raise UsageError(f"{table.name}: no detector {unknown[0]!r}; found {some_of(list(column_of))}.{near}")
    long = pl.concat(
        cells.select("row", "video_id", pl.lit(column).alias("column"), pl.col(column).alias("text"), detector=detector)
        for column, detector in (
            [("score", pl.col("detector"))]
            if "detector" in table.columns
            else [(column_of[each], pl.lit(each)) for each in wanted or column_of]
        )
    )
    return long.filter(pl.col("detector").is_in(list(wanted))) if wanted else long


def _numeric(cells: pl.DataFrame, columns: Sequence[str]) -> dict[str, str]:
    """Map the columns that may be scores to themselves: numbers that are neither constant nor equal to the label."""
    is_fake = (pl.col("label") == "fake").cast(pl.Float64)
    is_label = _NUMBER.eq(is_fake).all() | _NUMBER.eq(1 - is_fake).all()
    long = cells.select("label", *columns).unpivot(columns, index="label", variable_name="column", value_name="text")
    facts = long.filter(_NUMBER.is_not_null()).group_by("column", maintain_order=True)
    may_be = facts.agg(is_score=(pl.len() == 1) | ((_NUMBER.n_unique() > 1) & ~is_label)).filter("is_score")
    return {column: column for column in may_be["column"]}


def _refuse_numbers(name: str, scores: pl.DataFrame, notes: list[str]) -> None:
    """Raise ``DataError`` for cells that are no finite numbers; add a note on decimal commas.

    Raises:
        DataError: see above, or the commas of a column may separate thousands.
    """
    bad = scores.filter(pl.col("text").is_not_null() & ~pl.col("score").is_finite().fill_null(value=False))
    for column, text in bad.select("column", "text").rows()[:1]:
        _refuse(name, bad, f"the score in column {column!r} is {text!r}, wanted a finite number (see --detectors)")
    comma = pl.col("text").str.contains(",", literal=True)
    written = scores.filter(comma.any().over("column"))
    is_decimal = comma & ~pl.col("text").str.contains(_THOUSANDS)
    unclear = written.filter(pl.col("text").str.contains(".", literal=True) | ~is_decimal.any().over("column"))
    _refuse(name, unclear, "the commas of its column may separate thousands. Write 1.5 for one and a half")
    if written.height:
        notes.append(f"Decimal commas were read as points in: {some_of(written['column'].unique().sort().to_list())}.")


def _join_frames(name: str, cells: pl.DataFrame, notes: list[str]) -> pl.DataFrame:
    """Return ``cells`` with the id of the video in place of ids of its frames or parts; add a note that counts them.

    Raises:
        DataError: pictures or parts look like those of one video but cannot be, and their rows state no group.
    """
    ids, facts = cells["video_id"].to_list(), cells.select("label", "fact group_id").rows()
    videos, problems = videos_of(ids, facts, cells["word"])
    remedy = (
        "Rows of one video count as one: name its frames VIDEO/000.png, with one label, or name in a column 'group'"
    )
    refused = cells.with_columns(problem=pl.Series(problems, dtype=pl.String))
    refused = refused.filter((pl.col("problem") != "") & pl.col("fact group_id").is_null())
    _refuse(name, refused, f"{refused['problem'].first()!r}. {remedy} the video of each row")
    joined = cells.with_columns(video_id=pl.Series(videos, dtype=pl.String))
    of_video = joined.filter(joined["video_id"] != cells["video_id"])
    if of_video.height:
        parts = pl.Series(ids).filter(joined["video_id"] != cells["video_id"]).n_unique()
        notes.append(
            f"{parts:,} ids are frames or parts of {of_video['video_id'].n_unique():,} videos by their names: a "
            "video's score is the mean of theirs."
        )
    return joined


def _one_row_each(name: str, cells: pl.DataFrame) -> pl.DataFrame:
    """Return one row per video, ``video_id label`` and ``FACTS``, sorted by id.

    Raises:
        DataError: rows of one video have different labels or facts.
    """
    rows = cells.select("row", "video_id", "label", **{fact: f"fact {fact}" for fact in FACTS})
    long = rows.unpivot(["label", *FACTS], index=["row", "video_id"]).drop_nulls("value")
    differing = long.filter(pl.col("value").n_unique().over("video_id", "variable") > 1).sort("row")
    _refuse(name, differing, f"has more than one {differing['variable'].first()!r}. Keep the right rows")
    return rows.group_by("video_id").agg(pl.col("label", *FACTS).drop_nulls().first()).sort("video_id")


# --- The corpus of a table's videos.


def with_corpus(
    table: ScoreTable, index: pl.DataFrame, duplicates: Mapping[str, str] | None = None
) -> tuple[ScoreTable, pl.DataFrame]:
    """Complete a table of scores by the groups and facts that a corpus has for its videos.

    A row of the table matches a video of the corpus if its id is the path, id or source id in the index. Otherwise the
    file names must be equal, with or without extension, the folders must agree as far as both names have them, and the
    label must be the same. A row that matches several videos counts as not found.

    Facts that the table states are kept. Groups of the table whose videos share a group of the corpus are joined.

    Args:
        table: the scores.
        index: INDEX table of the corpus.
        duplicates: maps the path of a file that the index leaves out to the path of the file of equal content in the
            index (``index.used_for``).

    Returns:
        The completed table, and the INDEX rows of the videos that were found, with the table's ``video_id``.

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
    notes = [f"{of_corpus.height:,} of {videos.height:,} videos were found in the corpus."]
    own = of_corpus.select("video_id", *FACTS[:3], "label")
    joined = videos.join(own, on="video_id", how="left", maintain_order="left", suffix=" of corpus")
    if differing := joined.filter(pl.col("label") != pl.col("label of corpus")).height:
        notes.append(f"{differing:,} videos have another label in the corpus; the table's counts.")
    members = [GroupMember(video, video, None, group) for video, group in videos.select("video_id", "group_id").rows()]
    grouping = join_groups(members, (), own.select("video_id", "corpus: " + pl.col("group_id")).iter_rows())
    has_group = pl.any_horizontal(pl.col("group_id", "group_id of corpus").is_not_null())
    videos = joined.select(
        "video_id",
        "label",
        *(pl.coalesce(name, f"{name} of corpus") for name in FACTS[1:3]),
        "corpus",
        group_id=pl.when(has_group).then(pl.Series(grouping.group_ids, dtype=pl.String)),
    ).select(videos.columns)
    return ScoreTable(videos, table.scores, (*table.notes, *notes)), of_corpus


def _found(videos: pl.DataFrame, index: pl.DataFrame, duplicates: Mapping[str, str]) -> pl.DataFrame:
    """Return the index rows of the ``videos`` that match a single one, with the ``video_id`` of ``videos``."""
    known = index.with_row_index("place").select("place", "path", "video_id", "source_id", of_corpus="label")
    copies = pl.DataFrame(list(duplicates.items()), schema={"name": pl.String, "path": pl.String}, orient="row")
    paths = pl.concat([known.select("place", "of_corpus", name="path"),
                       known.join(copies, on="path").select("place", "of_corpus", "name")])  # fmt: skip
    ids = known.unpivot(["video_id", "source_id"], index="place", value_name="name").select("place", "name")
    names = pl.concat([paths.select("place", "name"), ids])
    base, folder = pl.col("name").str.extract(r"([^/]*)$"), "/" + pl.col("name").str.extract("^(.*/)").fill_null("")
    stem = base.str.replace(r"(.)\.[^.]*$", "$1")
    asked = videos.select("label", name="video_id", video="video_id")
    near = (
        asked.with_columns(folder=folder, stem=pl.concat_list(base, stem).list.unique())
        .explode("stem")
        .join(paths.with_columns(stem=stem, there=folder), on="stem")
        .filter(pl.col("folder").str.ends_with(pl.col("there")) | pl.col("there").str.ends_with(pl.col("folder")))
    )
    fits = []
    for found in (asked.join(names, on="name").with_columns(of_corpus="label"), near):
        one = found.group_by("video").agg(pl.col("place").unique(), pl.col("label", "of_corpus").first())
        fits.append(one.filter((pl.col("place").list.len() == 1) & (pl.col("label") == pl.col("of_corpus"))))
    both = pl.concat([fits[0], fits[1].join(fits[0], on="video", how="anti")]).explode("place")
    chosen = videos.select(video="video_id").join(both, on="video", maintain_order="left")
    return index[chosen["place"]].with_columns(chosen["video"].alias("video_id"))


def found_in_corpus(table: ScoreTable, config: RunConfig, folder: Path) -> tuple[ScoreTable, pl.DataFrame]:
    """Index ``config.corpus`` as a run does, and return the result of ``with_corpus`` on it.

    The tables of the index are written to ``folder``.

    Raises:
        UsageError: ``config.corpus`` is no corpus.
        DataError: none of its videos can be read, or none is in the table.
    """
    folder.mkdir(parents=True, exist_ok=True)
    index_path, rejected_path = folder / "corpus_index.parquet", folder / "corpus_rejected.parquet"
    build_index(
        config.corpus,
        index_path=index_path,
        rejected_path=rejected_path,
        group_links_path=folder / "corpus_group_links.parquet",
        work_dir=Path(config.cache_dir) / "index",
        near_duplicate_bits=config.near_duplicate_bits,
        max_rejected_share=1.0,  # files that the table does not score may be broken
        workers=config.workers,
        allow_outside=config.allow_outside,
        label_map=config.label_map,
        unused_labels=True,  # some labels may be the table's alone
    )
    return with_corpus(table, read_table(index_path, INDEX), used_for(read_table(rejected_path, REJECTED)))
