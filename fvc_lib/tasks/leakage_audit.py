"""Count overlaps between training and test videos, and compute the AUC that a split by row would have claimed.

A group holds videos that belong together, such as copies; a clean split keeps groups whole. Overlaps are counted from
the facts of each file: content, source, stated group and perceptual hash. ``group_id`` alone would not show a fault in
the grouping itself. A group that is divided between folds is refused earlier, by ``check_folds`` of ``corpus.folds``;
an overlap found here ends notebook 05.

A split by row (videos assigned to folds without regard to their groups) trains on copies of its test videos. The AUC
that it would have claimed is computed from the predictions; no network is trained. If a video's group is also in the
training part, the video's score is the share of fakes among the group's training videos. Otherwise it is the model's
score.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import polars as pl

from fvc_lib.corpus.copies.near_duplicates import near_duplicate_links
from fvc_lib.corpus.probing import IMAGE_FILES, VIDEO_FILES, probe_files
from fvc_lib.corpus.protocols import training_rows
from fvc_lib.metrics.intervals import Interval
from fvc_lib.services.config import RESCALE_RATE, RunConfig
from fvc_lib.services.tables import LEAKAGE_AUDIT, check_table, frame_of
from fvc_lib.services.tasks import OFFICIAL
from fvc_lib.tasks.video import controls
from fvc_lib.tasks.video.calibration import RecordedSelection
from fvc_lib.tasks.video.results import measured, with_targets

Row = tuple[str, int | None, float | None, str, bool | None]  # the columns of LEAKAGE_AUDIT
Links = Sequence[tuple[int, int]]  # near-duplicates, as pairs of row numbers

_CARRIES_AUC = 0.6  # from this AUC on, metadata count as predicting the labels
_MOST_CARRIERS = 3
_ROUNDS_OF_ONE_COLUMN = 25  # boosting rounds; one column needs fewer


def leakage_audit(
    index: pl.DataFrame,
    folds: pl.DataFrame,
    predictions: pl.DataFrame,
    config: RunConfig,
    *,
    selections: Sequence[RecordedSelection | None] = (),
    before: tuple[int, str] | None = None,
    protocol: pl.DataFrame | None = None,
    left_out: Collection[str] = (),
) -> pl.DataFrame:
    """Return the table LEAKAGE_AUDIT, one row per check: a count or a metric, a sentence, and whether it passed.

    ``passed`` is null for checks that only inform. The order of the rows in the arguments does not matter.

    Args:
        index: INDEX schema.
        folds: FOLDS schema.
        predictions: PREDICTIONS schema, all folds together, after ``results.check_predictions``.
        config: gives ``near_duplicate_bits``, replicates, confidence and seed.
        selections: the record of every fold's choices (``calibration.read_selection``), None for a missing record.
            Empty: do not check whether choices were recorded before the outer test labels were read.
        before: ``(replaced, forked_from)`` of ``results.earlier_openings``: how many trainings read the outer test
            labels and were later replaced, and the id of the run that this run was copied from. None: not reported.
        protocol: PROTOCOL schema, the part of every video in every training; None: protocol ``kfold``. Under other
            protocols overlaps are summed over all trainings. Groups in several parts of the corpus's official split are
            reported, but the check neither passes nor fails.
        left_out: ids of videos without a clip (``results.undecoded``).
    """
    index, folds, predictions = (table.sort("video_id") for table in (index, folds, predictions))
    rows: list[Row] = []
    leaking = set[str]()  # groups in several parts of the corpus's official split
    if protocol is not None and protocol["protocol"][0] == OFFICIAL:  # no verdict: papers use this very split
        of_folds = (training_rows(protocol, fold).leaking for fold in protocol["fold"].unique())
        leaking = set().union(*of_folds)
        found = f"{len(leaking):,} groups in several parts of the corpus's own split.{_first_of(sorted(leaking))}"
        rows.append(("official_split_leaks", len(leaking), None, found, None))
    if selections:
        rows.append(_late_choices(selections))
    if before is not None:  # no verdict: only the author knows why a training was repeated
        replaced, forked_from = before
        found = (
            f"{replaced} trainings of this run opened an outer fold and were then replaced. The run was forked from: "
            f"{forked_from or 'none'}. A fork may have seen those results. Repeating a training because of its result "
            "uses the outer folds to choose."
        )
        rows.append(("opened_before", replaced, None, found, None))
    trainings = controls.trainings_of(protocol, config, left_out)
    may_leak = pl.col("group_id").is_in(sorted(leaking))
    dealt = [rows.filter(~may_leak) for rows in trainings or [folds]]
    rows += _overlaps(index, dealt, config.near_duplicate_bits)
    if predictions["fold"].n_unique() > 1:
        rows.append(_claim(predictions, config, protocol))
    rows += _metadata_carriers(index, predictions, config, protocol, trainings)
    return check_table(frame_of(rows, LEAKAGE_AUDIT), LEAKAGE_AUDIT, "leakage audit")


def _late_choices(selections: Sequence[RecordedSelection | None]) -> Row:
    """Return the row of the check that choices were recorded before the outer test labels were read.

    Args:
        selections: the record of every fold's choices (epoch, threshold and temperature); None: missing.
    """
    records = [record for record in selections if record is not None]
    late = sum(record.earlier > 0 for record in records)
    missing = len(selections) - len(records)
    found = (
        f"Epoch, threshold and temperature of {len(records) - late} of {len(selections)} folds were on disk before the "
        f"outer labels were opened; {late} chosen again after that, {missing} without a record."
    )
    return "chosen_after_opening", late, None, found, late + missing == 0


def _overlaps(index: pl.DataFrame, trainings: Sequence[pl.DataFrame], near_duplicate_bits: int) -> Iterator[Row]:
    """Yield one row per kind of overlap between folds, such as a group or a file content in two folds.

    Args:
        index: INDEX schema.
        trainings: one FOLDS table per training; counts are summed over them.
        near_duplicate_bits: largest number of bits in which perceptual hashes of near-duplicates differ; 0: no row.
    """
    facts = index.drop("label", "group_id")
    numbered = [rows.with_columns(training=number) for number, rows in enumerate(trainings)]
    known = pl.concat(numbered).join(facts, on="video_id", how="left", maintain_order="left")
    known = known.with_row_index("row")
    for name, column in (
        ("groups", "group_id"),
        ("videos", "video_id"),
        ("stated_groups", "stated_group"),
        ("sources", "source_id"),
        ("contents", "content_sha256"),
    ):
        yield _in_two(known, "fold", column, name)
    if not near_duplicate_bits:
        return
    links: list[tuple[int, int]] = []
    for part in known.partition_by("training"):
        first = part["row"][0]
        hashes = part["perceptual_hash"].to_list()
        near = near_duplicate_links(hashes, near_duplicate_bits)
        links += [(first + one, first + other) for one, other in near]
    yield _near_copies(known, "fold", "near_duplicates", links, known["perceptual_hash"].null_count())


def _in_two(rows: pl.DataFrame, part: str, column: str, name: str) -> Row:
    """Return the row of the check that no value of ``column`` occurs in several parts of the same training.

    Args:
        rows: one row per video and training, with the column ``training``.
        part: name of the column of parts, such as ``fold``.
        column: name of the column whose values are checked.
        name: plural word for these values, such as ``groups``.
    """
    parts = rows.drop_nulls(column).group_by("training", column).agg(pl.col(part).n_unique())
    count = parts.filter(pl.col(part) > 1).height
    found = f"{count:,} of {parts.height:,} {name} in more than one {part}."
    return f"{name}_in_two_{part}s", count, None, found, count == 0


def _first_of(names: Sequence[str]) -> str:
    """Return a sentence with the first three of ``names``, after a leading space; an empty text if there are none."""
    return f" The first: {', '.join(names[:3])}." if names else ""


def _near_copies(rows: pl.DataFrame, part: str, name: str, links: Links, num_without_hash: int) -> Row:
    """Return the row of the check that no two near-duplicate files are in different parts, such as folds.

    Only the pairs in ``links`` are compared. They are a spanning forest of the graph of all near-duplicates. So if no
    link joins two parts, no other near-duplicates are in different parts.

    Args:
        rows: the files, with the column ``path``.
        part: name of the column of parts, such as ``fold``.
        name: plural word for the check's name, such as ``near_duplicates``.
        links: pairs of row numbers in ``rows``.
        num_without_hash: number of files that could not be compared.
    """
    parts = rows[part].to_list()
    names = rows["path"].to_list()
    across = [(names[one], names[other]) for one, other in links if parts[one] != parts[other]]
    joined = [" and ".join(pair) for pair in across]
    found = (
        f"{len(across):,} of {len(links):,} near-duplicate links between {part}s; {num_without_hash:,} files without a "
        f"hash not compared.{_first_of(joined)}"
    )
    return f"{name}_in_two_{part}s", len(across), None, found, not across


def _claim(predictions: pl.DataFrame, config: RunConfig, protocol: pl.DataFrame | None) -> Row:
    """Return the row with the AUC that a split by row would have claimed; no network is trained.

    A split by row assigns videos to folds without regard to their groups. If a video's group is then also in the
    training part, its score is the share of fakes among the group's training videos. Otherwise it is the model's score.
    The sentence in the row gives this AUC and the model's real AUC.
    """
    predictions = with_targets(predictions, protocol)
    by_row = controls.split_by_row(predictions.select("video_id", "group_id", "label", "fold"), seed=config.seed)
    lookup = with_targets(controls.group_lookup(by_row), protocol)
    is_met = pl.len().over("group_id") > pl.len().over("group_id", "fold")
    met = by_row.select(met=is_met)["met"]
    score = pl.when(met).then("score").otherwise(predictions["score"])
    helped = lookup.with_columns(score=score)
    honest = controls.auc_within_folds(predictions, config)
    claimed = controls.auc_within_folds(helped, config)
    found = (
        f"The model's AUC is {_interval(honest)}. Split by row, {met.sum():,} of {met.len():,} videos have others of "
        f"their group in training. A model that recognises these groups would have claimed {_interval(claimed)}. "
        "Nothing was trained for it."
    )
    return "auc_claimed_by_row", int(met.sum()), claimed.row()[0], found, None


def _metadata_carriers(
    index: pl.DataFrame,
    predictions: pl.DataFrame,
    config: RunConfig,
    protocol: pl.DataFrame | None,
    trainings: controls.Trainings,
) -> Iterator[Row]:
    """Yield up to two rows that warn that metadata, such as the frame size, predict the labels.

    A classifier is trained on all metadata columns and tested on other videos. If its AUC is below ``_CARRIES_AUC``
    (0.6), there is no row. Otherwise the first row has this AUC, and names the columns with the highest AUCs of their
    own. The second row follows if frame size and rate alone reach 0.6 and the videos were not rescaled.
    """
    folds = predictions.select("video_id", "group_id", "label", "fold")

    def scored(names: Sequence[str], rounds: int = _ROUNDS_OF_ONE_COLUMN) -> pl.DataFrame:
        scores = controls.tested(
            lambda rows: controls.metadata_only(index, rows, names, rounds=rounds), folds, trainings
        )
        return with_targets(scores, protocol)

    def auc(scores: pl.DataFrame) -> float:
        metric, values = measured("roc_auc", scores)
        return float(metric(controls.fake_labels(scores), values))

    if trainings is None and folds["fold"].n_unique() < 2:
        return
    whole = auc(scored(controls.METADATA, rounds=100))
    if not whole >= _CARRIES_AUC:  # NaN where each fold has one class
        return
    varied = [name for name in controls.METADATA if index[name].n_unique() > 1]
    alone = {name: auc(scored([name])) for name in varied}
    best = sorted(alone, key=lambda name: -alone[name])[:_MOST_CARRIERS]
    carriers = ", ".join(f"{name} ({alone[name]:.2f})" for name in best)
    found = f"Metadata predicts the labels. The columns with the highest AUC of their own: {carriers}."
    yield "metadata_carriers", None, whole, found, None
    size = controls.auc_within_folds(scored(controls.SIZE_AND_RATE), config)
    if not config.rescale and size.value >= _CARRIES_AUC and size.low > 0.5:
        found = (
            f"Frame size and rate alone predict the labels: AUC {_interval(size)}. To do about it: -p rescale ROWS "
            f"gives all videos ROWS rows and {RESCALE_RATE} frames a second, where none has less of either. Else "
            "-p protocol metadata_matched tests videos that are alike."
        )
        yield "size_and_rate", None, size.value, found, None


def _interval(interval: Interval) -> str:
    return f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


# Tasks image and video_text have one split instead of folds.


def split_audit(
    rows: pl.DataFrame,
    root: Path,
    config: RunConfig,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> pl.DataFrame:
    """Return the table LEAKAGE_AUDIT of a split into train, validation and test part, one row per check.

    The checks look for groups, files, contents and near-duplicates in two parts, and for files that have changed. A
    file with several rows, such as a video with several texts, counts once.

    Args:
        rows: IMAGES, or VIDEO_TEXTS for task ``video_text``.
        root: folder that ``path`` is relative to. Files that changed since they were indexed are read again.
        config: gives ``task``, ``near_duplicate_bits``, ``cache_dir`` and ``workers``.
        progress: called with (done, total) numbers of files.
    """
    files = rows.select("path", "part", "group_id", "content_sha256").unique().sort("path", "part", "group_id")
    kind = IMAGE_FILES if config.task == "image" else VIDEO_FILES
    cache = Path(config.cache_dir) / "index"
    paths = files["path"].to_list()
    probed, _ = probe_files(kind, root, paths, cache, workers=config.workers, progress=progress)
    found = [probed[path] for path in paths]
    contents = [file.content_sha256 or None for file in found]
    files = files.with_columns(now=pl.Series(contents, dtype=pl.String), training=0)
    changed = files.filter(pl.col("now").ne_missing(pl.col("content_sha256")))["path"].to_list()
    text = f"{len(changed):,} of {files.height:,} files differ from the index.{_first_of(changed)}"
    checks = [
        _in_two(files, "part", "group_id", "groups"),
        _in_two(files, "part", "path", "files"),
        _in_two(files, "part", "now", "contents"),
        ("files_unlike_the_index", len(changed), None, text, not changed),
    ]
    if config.near_duplicate_bits:
        hashes = [file.perceptual_hash for file in found]
        links = near_duplicate_links(hashes, config.near_duplicate_bits)
        checks.append(_near_copies(files, "part", "near_copies", links, hashes.count(None)))
    return check_table(frame_of(checks, LEAKAGE_AUDIT), LEAKAGE_AUDIT, "leakage audit")
