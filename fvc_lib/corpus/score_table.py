"""Read tables of scores that detectors gave to videos (CSV, TSV or Parquet), as one row per video.

The detectors need not be this project's.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from posixpath import normpath

import polars as pl

from fvc_lib.corpus import frame_names
from fvc_lib.corpus.copies.groups import GroupMember, join_groups
from fvc_lib.corpus.corpus_files import counts_text, some_of
from fvc_lib.corpus.index import build_index, used_for
from fvc_lib.corpus.label_table import GROUP_COLUMNS, MISSING, SPLIT_COLUMNS, LabelTable, read_label_table
from fvc_lib.corpus.listing import label_map_hint
from fvc_lib.services.atomic_files import AnyPath, escape_text
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, UsageError, did_you_mean
from fvc_lib.services.tables import INDEX, REJECTED, read_table

_VIDEO_COLUMNS = ("video", "video_id", "path", "video_path", "id", "filename", "file")
_FACT_COLUMNS = {
    "group_id": GROUP_COLUMNS, "generator": ("generator", "manipulation"), "real_source": ("real_source", "source"),
    "corpus": ("corpus", "dataset"),
}  # fmt: skip
FACTS = tuple(_FACT_COLUMNS)  # further facts about a video
# Numbers that tables carry besides scores, this project's own predictions among them.
_NO_SCORES = frozenset(
    {
        *SPLIT_COLUMNS, "fold", "seed", "row", "frame", "threshold", "temperature", "logit", "control_score",
        "control_label", "control_logit", "source_score", "source_label",
        "duration_seconds", "num_frames", "width", "height", "frames_per_second",
        "size_bytes", "bits_per_second", "score_real", "year", "age", "is_fake", "is_real", "target", "y", "y_true",
        "label_id", "class_id", "index", "frame_count",
    }
)  # fmt: skip
_PREFIX = "score_"
ONE_DETECTOR = "score"  # name of the only detector where the table does not name it
_THOUSANDS = r"^[+-]?[1-9]\d{0,2},\d{3}$"


@dataclass(frozen=True)
class ScoreTable:
    """Scores of detectors, one row per video in the order of the ids."""

    videos: pl.DataFrame  # ``video_id label group_id generator real_source corpus``, text, null where nothing is known
    scores: pl.DataFrame  # a Float64 column per detector, null where it gave no score; rows as in ``videos``
    notes: tuple[str, ...] = ()  # sentences on what was left out or assumed

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
    column per detector.

    Args:
        path: CSV or TSV (separated by comma, semicolon or tab; UTF-8 or UTF-16) or Parquet.
        label_map: maps further labels, in lower case, to real or fake.
        detectors: names of the detectors to read; empty: all. In a table with one column per detector, names of
            columns.
        higher_is_real: set this if higher scores mean real. Scores are then reversed: 1 - score if all scores of a
            detector are from 0 to 1, else -score.
        unused_labels: ``label_map`` may name labels that no row has.

    Raises:
        UsageError: no such table, a column is missing or ambiguous, or ``detectors`` names an unknown one.
        DataError: a cell that is no finite number, a video with two labels or two scores of one detector, or labels
            that are not two kinds; the message names the row.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"{str(path)!r}: no such file. Give a CSV, TSV or Parquet table of scores.")
    table = read_label_table(path)
    name, notes = table.name, list[str]()
    cells = _cells(table)
    video, label = _first_column(table, _VIDEO_COLUMNS), _first_column(table, ("label", "class"))
    facts = {fact: table.optional(columns) for fact, columns in _FACT_COLUMNS.items()}
    _refuse_rows(
        name, cells.filter(pl.col(video).is_null()), f"the cell of {video!r} is empty. Every row needs a video"
    )
    cells = cells.with_columns(
        video_id=pl.col(video).str.replace_all("\\", "/", literal=True).map_elements(normpath, return_dtype=pl.String),
        word=pl.col(label).fill_null("").str.to_lowercase(),
        **{f"fact {fact}": pl.lit(None, pl.String) if column is None else column for fact, column in facts.items()},
    )
    # Of one video with two spellings of its path, as ./a.mp4 and a.mp4, the first stays.
    cells = cells.with_columns(pl.col(video).first().over("video_id").alias("video_id"))
    cells = _labelled(name, label, cells, label_map or {}, notes, unused_labels)
    if "detector" in table.columns:
        scores = _scores_by_row(table, cells, detectors, notes)
    else:
        no_scores = {video, label, *facts.values()}
        columns = _detector_columns(table, cells, no_scores, detectors, notes)
        scores = pl.concat(
            cells.select("row", "video_id", detector=pl.lit(detector), score=_numbers(table, cells, column, notes))
            for column, detector in columns.items()
        )
    twice = scores.filter(pl.struct("video_id", "detector").is_duplicated())
    if twice.height:
        rows = twice.group_by("video_id", "detector", maintain_order=True).agg("row")
        own, detector, (first, second, *_) = rows.row(0)
        raise DataError(
            f"{name} rows {first} and {second}: video {own!r} has two scores of detector {detector!r}; {rows.height:,} "
            "videos are so. Keep one row each, or give frames' scores as their mean per video."
        )
    video_of = _videos_of_frames(name, cells, notes)
    scores = scores.group_by(pl.col("video_id").replace(video_of), "detector", maintain_order=True).agg(
        pl.col("score").mean()
    )
    videos = _one_row_each(name, cells.with_columns(pl.col("video_id").replace(video_of)))
    wide = scores.pivot("detector", index="video_id", values="score", maintain_order=True)
    wide = videos.select("video_id").join(wide, on="video_id", how="left", maintain_order="left").drop("video_id")
    if empty := [detector for detector in wide.columns if wide[detector].null_count() == wide.height]:
        raise DataError(f"{name}: no video has a score of {some_of(empty)}. Leave it out, or fill it.")
    if higher_is_real:
        most = {name: 1 if wide[name].is_between(0, 1).all() else 0 for name in wide.columns}
        wide = wide.with_columns((most[name] - pl.col(name)).alias(name) for name in wide.columns)
        notes.append("Scores were turned round: the table's own are higher for reals.")
    return ScoreTable(videos, wide, tuple(notes))


def _refuse_rows(name: str, bad: pl.DataFrame, problem: str) -> None:
    if bad.height:
        raise DataError(f"{name} row {bad['row'][0]}: {problem}; {bad.height:,} rows are so.")


def _cells(table: LabelTable) -> pl.DataFrame:
    """Return all cells as stripped text, null for missing values, with ``row``, the 1-based number of the data row."""
    if not table.rows:
        raise DataError(f"{table.name}: has a header and no row. Give a table with scores.")
    for number, row in enumerate(table.rows, start=1):
        if row is None:
            raise DataError(f"{table.name} row {number}: its number of cells is not the header's. Quote or repair it.")
    columns = zip(table.columns, zip(*table.rows, strict=True), strict=True)
    frame = pl.DataFrame({name: [escape_text(cell) for cell in cells] for name, cells in columns if name})
    cell = pl.all().str.strip_chars()
    return frame.select(
        pl.when(~cell.str.to_lowercase().is_in((*MISSING, "na", "n/a", "-"))).then(cell)
    ).with_row_index("row", offset=1)


def _first_column(table: LabelTable, names: Sequence[str]) -> str:
    """Return the table's column for the first of ``names`` that it has, compared without case.

    Raises:
        UsageError: the table has none of them.
    """
    lower = {column.lower(): column for column in reversed(table.columns)}
    for name in names:
        if name in lower:
            return lower[name]
    near = did_you_mean(names[0], table.columns)
    wanted = " or ".join(map(repr, names[:3]))
    raise UsageError(f"{table.name}: wanted a column {wanted}, found {some_of(table.columns)}.{near}")


def _labelled(
    name: str, column: str, cells: pl.DataFrame, label_map: Mapping[str, str], notes: list[str], unused_labels: bool
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
    if cells["label"].drop_nulls().n_unique() < 2:
        hint = label_map_hint(cells["word"], "--label-map")
        raise DataError(f"{name}: wanted both real and fake in the column {column!r}; got {counts}. {hint}")
    others = cells.filter(pl.col("label").is_null())["word"]
    if len(others):
        notes.append(
            f"{len(others):,} rows are labelled neither real nor fake and are left out: {counts_text(others)}."
        )
    return cells.drop_nulls("label")


def _scores_by_row(table: LabelTable, cells: pl.DataFrame, wanted: Sequence[str], notes: list[str]) -> pl.DataFrame:
    """Return ``row video_id detector score`` from a table that has one row per video and detector."""
    table.require(("score",))
    empty = cells.filter(pl.col("detector").is_null())
    _refuse_rows(table.name, empty, "the cell of 'detector' is empty. Every row needs one")
    _refuse_unknown(table.name, wanted, cells["detector"].unique().to_list())
    chosen = cells.filter(pl.col("detector").is_in(list(wanted))) if wanted else cells
    return chosen.select("row", "video_id", "detector", score=_numbers(table, chosen, "score", notes))


def _detector_columns(
    table: LabelTable, cells: pl.DataFrame, taken: set[str | None], wanted: Sequence[str], notes: list[str]
) -> dict[str, str]:
    """Map each column of scores to the name of its detector.

    These are the ``wanted`` columns, else a column ``score``, else columns that begin with ``score_``, else all columns
    of numbers that are neither constant nor equal to the label.

    Raises:
        UsageError: no column has scores, or a wanted one is missing.
    """
    others = [name for name in table.columns if name and name not in taken and name.lower() not in _NO_SCORES]
    prefixed = {name[len(_PREFIX) :]: name for name in others if name.lower().startswith(_PREFIX) and name != _PREFIX}
    if wanted:
        column_of = {name: name for name in table.columns} | prefixed
        _refuse_unknown(table.name, wanted, list(column_of))
        return {column_of[name]: name for name in wanted}
    chosen = {name: ONE_DETECTOR for name in others if name.lower() == "score"} or {
        column: detector for detector, column in prefixed.items()
    }
    if not chosen:
        # Numbers that are the same everywhere, or are the label itself, are no scores.
        is_fake = (cells["label"] == "fake").cast(pl.Float64)
        for name in others:
            pairs = pl.DataFrame({"number": _parsed(cells[name]), "is_fake": is_fake}).drop_nulls()
            number = pairs["number"]
            is_label = (number == pairs["is_fake"]).all() or (number == 1 - pairs["is_fake"]).all()
            if pairs.height == 1 or (number.n_unique() > 1 and not is_label):
                chosen[name] = name
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


def _refuse_unknown(name: str, wanted: Sequence[str], known: Sequence[str]) -> None:
    for detector in wanted:
        if detector not in known:
            near = did_you_mean(detector, known)
            raise UsageError(f"{name}: no detector {detector!r}; found {some_of(sorted(known))}.{near}")


def _parsed(cells: pl.Series) -> pl.Series:
    """Return the cells as Float64, null where a cell is no number; a comma counts as a decimal point."""
    return cells.str.replace(",", ".", literal=True).cast(pl.Float64, strict=False)


def _numbers(table: LabelTable, cells: pl.DataFrame, column: str, notes: list[str]) -> pl.Series:
    """Return the cells as Float64, null for missing ones; add a note on decimal commas.

    Raises:
        DataError: a cell is no finite number, or its comma may separate thousands.
    """
    texts, numbers = cells[column], _parsed(cells[column])
    bad = cells.filter(texts.is_not_null() & ~numbers.is_finite().fill_null(value=False))
    if bad.height:
        problem = f"the score in column {column!r} is {bad[column][0]!r}, wanted a finite number or an empty cell"
        remedy = "Name the columns that are scores with --detectors, if this is none"
        _refuse_rows(table.name, bad, f"{problem}. {remedy}")
    commas = cells.filter(texts.str.contains(",", literal=True).fill_null(value=False))
    if commas.height:
        has_points = texts.str.contains(".", literal=True).any()
        if has_points or (table.separator != ";" and commas[column].str.contains(_THOUSANDS).all()):
            raise DataError(
                f"{table.name} row {commas['row'][0]}: the score in column {column!r} is {commas[column][0]!r}: does "
                "the comma stand before decimals or between thousands? Write 1.5 for one and a half and 1500 for "
                "fifteen hundred, in the whole column."
            )
        first = commas[column][0]
        notes.append(f"Column {column!r} has decimal commas: {first} was read as {first.replace(',', '.')}.")
    return numbers


def _videos_of_frames(name: str, cells: pl.DataFrame, notes: list[str]) -> dict[str, str]:
    """Map the ids of frames, and of parts of a video, to the id of the video; add a note that counts them.

    Raises:
        DataError: pictures or parts look like those of one video but cannot be, and their rows state no group.
    """
    paths = [normpath(video.replace("\\", "/")) for video in cells["video_id"]]
    facts = cells.select("label", "fact group_id").rows()
    videos, problems = frame_names.videos_of(paths, facts, cells["word"])
    alone = cells.with_columns(problem=pl.Series(problems, dtype=pl.String)).filter(pl.col("problem") != "")
    refused = alone.filter(pl.col("fact group_id").is_null())
    if refused.height:
        remedy = "Rows of one video count as one: name its frames VIDEO/000.png, with one label, or name in a column "
        _refuse_rows(name, refused, f"{refused['problem'][0]}. {remedy}'group' the video of each row")
    if alone.height:
        notes.append(
            f"{alone.height:,} rows are pictures or parts that count one by one, in the groups that they state."
        )
    named = zip(cells["video_id"], paths, videos, strict=True)
    video_of = {own: video for own, path, video in named if video != path}
    if video_of:
        notes.append(
            f"{len(video_of):,} ids are frames or parts of {len(set(video_of.values())):,} videos by their names, such "
            f"as {min(video_of)!r}: a video's score is the mean of theirs."
        )
    return video_of


def _one_row_each(name: str, cells: pl.DataFrame) -> pl.DataFrame:
    """Return one row per video, ``video_id label`` and ``FACTS``, sorted by id.

    Raises:
        DataError: rows of one video have different labels or facts.
    """
    rows = cells.select("row", "video_id", "label", **{fact: f"fact {fact}" for fact in FACTS})
    for fact in ("label", *FACTS):
        kinds = rows.drop_nulls(fact).group_by("video_id").agg(pl.col(fact).unique().sort(), pl.col("row").min())
        differing = kinds.filter(pl.col(fact).list.len() > 1).sort("row")
        if differing.height:
            video, values, _ = differing.row(0)
            _refuse_rows(name, differing, f"video {video!r} has more than one {fact}: {some_of(values)}")
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
    places = _places(table.videos, index, duplicates or {})
    known = table.videos.select("video_id", place=pl.Series(places, dtype=pl.Int64)).drop_nulls()
    if known.is_empty():
        raise DataError(
            f"corpus: none of the table's {len(places):,} videos is in it. The table has such as "
            f"{table.videos['video_id'][0]!r}, the corpus such as {index['path'][0]!r}. Ids are paths or names "
            "of the corpus."
        )
    of_corpus = index[known["place"]].with_columns(known["video_id"])
    notes = [f"{known.height:,} of {len(places):,} videos were found in the corpus."]
    if twice := int(of_corpus["content_sha256"].is_duplicated().sum()):
        notes[0] += f" {twice:,} of them are files of the same content, or named twice: each row counts."
    own = of_corpus.select("video_id", *FACTS[:3], "label")
    joined = table.videos.join(own, on="video_id", how="left", maintain_order="left", suffix=" of corpus")
    if differing := joined.filter(pl.col("label") != pl.col("label of corpus")).height:
        notes.append(f"{differing:,} videos have another label in the corpus; the table's counts.")
    members = [GroupMember(video, video, None, group) for video, group in joined.select("video_id", "group_id").rows()]
    corpus_groups = own.select("video_id", pl.lit("corpus: ") + pl.col("group_id")).iter_rows()
    grouping = join_groups(members, (), corpus_groups)
    has_group = pl.any_horizontal(pl.col("group_id", "group_id of corpus").is_not_null())
    joined = joined.with_columns(joined=pl.when(has_group).then(pl.Series(grouping.group_ids, dtype=pl.String)))
    stated = joined.drop_nulls("group_id")
    if fewer := stated["group_id"].n_unique() - stated["joined"].n_unique():
        notes.append(f"Copies in the corpus join the table's groups: they are {fewer:,} fewer.")
    facts = (pl.coalesce(name, f"{name} of corpus").alias(name) for name in FACTS[1:3])
    videos = joined.select("video_id", "label", pl.col("joined").alias("group_id"), *facts, "corpus")
    return ScoreTable(videos, table.scores, (*table.notes, *notes)), of_corpus


def _places(videos: pl.DataFrame, index: pl.DataFrame, duplicates: Mapping[str, str]) -> list[int | None]:
    """Return for each video the number of its row in the index, or None if there is none or several."""
    place_of = {path: place for place, path in enumerate(index["path"])}
    paths = [*place_of.items(), *((path, place_of[used]) for path, used in duplicates.items() if used in place_of)]
    names, by_stem = defaultdict[str, set[int]](set), defaultdict[str, list[tuple[PurePosixPath, int]]](list)
    for name, place in [
        *paths,
        *((own, n) for n, row in enumerate(index.select("video_id", "source_id").rows()) for own in row),
    ]:
        names[name].add(place)
    for name, place in paths:
        by_stem[PurePosixPath(name).stem].append((PurePosixPath(name), place))
    labels, found = index["label"].to_list(), list[int | None]()
    for video, label in videos.select("video_id", "label").iter_rows():
        path = PurePosixPath(video.replace("\\", "/"))
        fits = names.get(video, set()) or names.get(str(path), set())
        if len(fits) != 1:
            alike = (each for stem in {path.stem, path.name} for each in by_stem.get(stem, ()))
            folders = path.parts[-2::-1]
            fits = {n for other, n in alike if all(a == b for a, b in zip(folders, other.parts[-2::-1], strict=False))}
            fits = {place for place in fits if labels[place] == label} if len(fits) == 1 else set()
        found.append(min(fits) if len(fits) == 1 else None)
    return found


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
        max_rejected_share=1.0,  # what the table does not score may be as broken as it likes
        workers=config.workers,
        allow_outside=config.allow_outside,
        label_map=config.label_map,
        unused_labels=True,  # some words may be the table's alone
    )
    return with_corpus(table, read_table(index_path, INDEX), used_for(read_table(rejected_path, REJECTED)))
