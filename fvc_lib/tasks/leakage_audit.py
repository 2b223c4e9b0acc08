"""Count what could leak between training and test, and compute what a split by row would have claimed.

A group holds videos that belong together, such as copies; a clean split keeps groups whole. Overlaps are counted from
the facts of each file: content, source, stated group and perceptual hash. ``group_id`` alone would not show a fault in
the grouping itself.

A split by row (videos dealt to folds without regard to their groups) trains on copies of its test videos. Its claim is
computed from the predictions; no network is trained. Where a video's group is also in the training part, its score is
the share of fakes among the group's training videos. Otherwise it is the model's score.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import polars as pl

from fvc_lib.corpus.copies.near_duplicates import near_duplicate_links
from fvc_lib.corpus.copies.perceptual_hash import SamePictures
from fvc_lib.corpus.probing import IMAGE_FILES, VIDEO_FILES, FileKind, probe_files
from fvc_lib.corpus.protocols import training_rows
from fvc_lib.metrics.intervals import Interval
from fvc_lib.services.config import RunConfig
from fvc_lib.services.tables import LEAKAGE_AUDIT, check_table, frame_of
from fvc_lib.services.tasks import OFFICIAL
from fvc_lib.tasks.video import controls
from fvc_lib.tasks.video.results import with_targets
from fvc_lib.tasks.video.selection import EarlierOpenings, RecordedSelection

Row = tuple[str, int | None, float | None, str, bool | None]  # the columns of LEAKAGE_AUDIT
Links = Sequence[tuple[int, int]] | None  # pairs of row numbers of near-duplicates; None: not searched for
T = TypeVar("T")

_LINKS = ("same_source", "same_content", "near_duplicate")
_CARRIES_AUC = 0.6  # metadata columns are named from this AUC on
_MOST_CARRIERS = 3
_ROUNDS_OF_ONE_COLUMN = 25  # boosting rounds; one column needs fewer


def leakage_audit(
    index: pl.DataFrame,
    folds: pl.DataFrame,
    predictions: pl.DataFrame,
    links: pl.DataFrame,
    config: RunConfig,
    *,
    augmented: pl.DataFrame | None = None,
    selections: Sequence[RecordedSelection | None] | None = None,
    before: EarlierOpenings | None = None,
    protocol: pl.DataFrame | None = None,
    left_out: Collection[str] = (),
) -> pl.DataFrame:
    """Return one row per check (LEAKAGE_AUDIT): its count or number, a sentence, and whether it passed.

    The order of the rows in the tables does not matter.

    Args:
        index: INDEX schema.
        folds: FOLDS schema.
        predictions: PREDICTIONS schema, all folds together.
        links: GROUP_LINKS schema.
        config: gives ``near_duplicate_bits``, replicates, confidence and seed.
        augmented: AUGMENTED schema; None: do not check augmented copies.
        selections: what each fold's training chose, and when (``selection.read_selection``); None: do not check
            whether choices were recorded before the outer test labels were opened.
        before: earlier times that outer labels were opened (``results.earlier_openings``); None: do not report them.
        protocol: PROTOCOL schema, the rule that splits the corpus into parts; None: ``kfold``. Under other protocols
            overlaps are summed over all trainings. Groups in several parts of the corpus's official split are
            reported, not judged.
        left_out: ids of videos without a clip (``results.undecoded``).
    """
    index, folds, predictions = (table.sort("video_id") for table in (index, folds, predictions))
    trainings = controls.trainings_of(protocol, config)
    leaking = set[str]()  # groups in several parts of the corpus's official split
    if protocol is not None:
        leaking = set().union(*(training_rows(protocol, fold).leaking for fold in protocol["fold"].unique()))
    rows = [
        *_groups(index, links),
        *_overlaps(index, trainings or [folds], config.near_duplicate_bits, leaking),
        _predictions_of_other_folds(folds, predictions),
    ]
    if protocol is not None and protocol["protocol"][0] == OFFICIAL:  # no verdict: papers use this very split
        example = f", e.g. {min(leaking)!r}" if leaking else ""
        found = f"{len(leaking):,} groups in several parts of the corpus's own split{example}."
        rows.append(("official_split_leaks", len(leaking), None, found, None))
    if augmented is not None:
        rows.append(_strayed_copies(folds, augmented))
    if selections is not None:
        rows.append(_late_choices(selections))
    if before is not None:  # no verdict: only the author knows why a training was repeated
        found = (
            f"{before.replaced} trainings of this run opened an outer fold and were then replaced; the records of "
            f"{before.unknown} more are damaged. The run was forked from: {before.forked_from or 'none'}. A fork may "
            "have seen those results. Repeating a training because of its result uses the outer folds to choose."
        )
        rows.append(("opened_before", before.replaced + before.unknown, None, found, None))
    if predictions["fold"].n_unique() > 1:
        rows += _claims(predictions, config, protocol)
    if trainings is not None or predictions["fold"].n_unique() > 1:
        rows += _metadata_carriers(index, predictions, config, protocol, left_out)
    return check_table(frame_of(rows, LEAKAGE_AUDIT), LEAKAGE_AUDIT, "leakage audit")


def _groups(index: pl.DataFrame, links: pl.DataFrame) -> Iterator[Row]:
    sizes = index.group_by("group_id").agg(pl.len(), pl.col("label").n_unique().alias("labels"))
    largest = max(sizes["len"], default=0)
    found = f"{index.height:,} videos in {sizes.height:,} groups; the largest has {largest:,}."
    yield "groups", sizes.height, None, found, None
    mixed = sizes.filter(pl.col("labels") > 1).height
    yield "groups_of_both_labels", mixed, None, f"{mixed:,} groups with both real and fake videos.", None
    for why in _LINKS:
        joined = links.filter(why=why).sort("first", "second")
        found = f"{joined.height:,} links between groups of the corpus because of: {why.replace('_', ' ')}."
        if joined.height:
            first, second, evidence = joined.select("first", "second", "evidence").row(0)
            found += f" E.g. {first!r} and {second!r} ({evidence})."
        yield f"joined_by_{why}", joined.height, None, found, None


def _overlaps(
    index: pl.DataFrame, trainings: Sequence[pl.DataFrame], near_duplicate_bits: int, leaking: Collection[str]
) -> Iterator[Row]:
    """Yield one row per kind of overlap between folds, without the groups ``leaking``; counts are summed."""
    facts, links = index.drop("label", "group_id"), list[tuple[int, int]]()
    tables = [
        folds.filter(~pl.col("group_id").is_in(sorted(leaking))).with_columns(training=number)
        for number, folds in enumerate(trainings)
    ]
    known = pl.concat(tables).join(facts, on="video_id", how="left", maintain_order="left")
    for name, column in (
        ("groups", "group_id"),
        ("videos", "video_id"),
        ("stated_groups", "stated_group"),
        ("sources", "source_id"),
        ("contents", "content_sha256"),
    ):
        yield _in_two(known, "fold", column, name)
    for number in range(len(tables) * bool(near_duplicate_bits)):
        rows = known.with_row_index("row").filter(training=number)
        places, hashes = rows["row"].to_list(), rows["perceptual_hash"].to_list()
        links += [(places[one], places[other]) for one, other in near_duplicate_links(hashes, near_duplicate_bits)]
    without_hash = known["perceptual_hash"].null_count()
    yield _near_copies(known, "fold", "near_duplicates", links if near_duplicate_bits else None, without_hash)


def _in_two(rows: pl.DataFrame, part: str, column: str, name: str) -> Row:
    """Return the check that counts values of ``column`` with more than one value of ``part`` in one ``training``."""
    parts = rows.drop_nulls(column).group_by("training", column).agg(pl.col(part).n_unique())
    count = parts.filter(pl.col(part) > 1).height
    found = f"{count:,} of {parts.height:,} {name.replace('_', ' ')} in more than one {part}."
    return f"{name}_in_two_{part}s", count, None, found, count == 0


def _near_copies(rows: pl.DataFrame, part: str, name: str, links: Links, num_without_hash: int) -> Row:
    """Return the check that counts near-duplicate ``links`` whose two rows differ in ``part``.

    The links are a spanning forest, so no link across parts means no pair across parts.
    """
    check = f"{name}_in_two_{part}s"
    if links is None:
        return check, None, None, "Near-duplicates were not searched for (near_duplicate_bits is 0).", None
    parts, names = rows[part].to_list(), rows["video_id" if part == "fold" else "path"]
    across = [(one, other) for one, other in links if parts[one] != parts[other]]
    found = f"{len(across):,} of {len(links):,} near-duplicate links between {part}s"
    if across:
        found += f", e.g. {names[across[0][0]]!r} and {names[across[0][1]]!r}"
    return check, len(across), None, f"{found}; {num_without_hash:,} without a hash not compared.", not across


def _predictions_of_other_folds(folds: pl.DataFrame, predictions: pl.DataFrame) -> Row:
    own = predictions.join(folds, on=["video_id", "fold", "group_id"], how="semi").height
    wrong = predictions.height - own + int(predictions["video_id"].is_duplicated().sum())
    found = f"{wrong:,} of {predictions.height:,} predictions made twice, or by another fold's model."
    return "predictions_not_by_their_own_fold", wrong, None, found, wrong == 0


def _strayed_copies(folds: pl.DataFrame, augmented: pl.DataFrame) -> Row:
    copies = augmented.filter(pl.col("augmentation_index") > 0)
    strayed = copies.join(folds, on=["video_id", "group_id"], how="anti").height
    found = f"{strayed:,} of {copies.height:,} augmented copies in another group than their video; copies only train."
    return "augmented_copies_out_of_place", strayed, None, found, strayed == 0


def _late_choices(selections: Sequence[RecordedSelection | None]) -> Row:
    """Return the check that each fold's choices were recorded before its outer test labels were opened.

    The choices are the epoch, the threshold and the temperature.
    """
    records = [record for record in selections if record is not None]
    unknown, missing = sum(not record.is_complete for record in records), len(selections) - len(records)
    late = sum(record.is_complete and bool(record.earlier) for record in records)
    found = (
        f"Epoch, threshold and temperature of {len(records) - unknown - late} of {len(selections)} folds were on disk "
        f"before the outer labels were opened; {late} chosen again after that, {unknown} with a damaged earlier "
        f"record, {missing} without a record."
    )
    return "chosen_after_opening", late + unknown, None, found, late + unknown + missing == 0


def _claims(predictions: pl.DataFrame, config: RunConfig, protocol: pl.DataFrame | None) -> Iterator[Row]:
    """Yield the model's AUC, and the AUC that a split by row would have claimed for it."""
    predictions = with_targets(predictions, protocol)
    auc = controls.auc_within_folds(predictions, "group_id", config)
    name = "mean AUC over targets" if "target" in predictions.columns else "AUC within folds"
    yield "auc_by_group", None, auc.row()[0], f"The model's {name} is {_interval(auc)}.", None
    by_row = controls.split_by_row(predictions.select("video_id", "group_id", "label", "fold"), seed=config.seed)
    lookup = with_targets(controls.group_lookup(by_row), protocol)
    met = by_row.select(met=pl.len().over("group_id") > pl.len().over("group_id", "fold"))["met"]
    helped = lookup.with_columns(score=pl.when(met).then(pl.col("score")).otherwise(predictions["score"]))
    claimed, count = controls.auc_within_folds(helped, "group_id", config), int(met.sum())
    found = (
        f"Split by row, {count / met.len():.0%} of the videos have others of their group in training. A model that "
        f"recognises these groups would have claimed an AUC of {_interval(claimed)}. Nothing was trained for it."
    )
    yield "auc_claimed_by_row", count, claimed.row()[0], found, None


def _metadata_carriers(
    index: pl.DataFrame,
    predictions: pl.DataFrame,
    config: RunConfig,
    protocol: pl.DataFrame | None,
    left_out: Collection[str],
) -> Iterator[Row]:
    """Yield rows on metadata columns that predict the labels with an AUC of at least ``_CARRIES_AUC``.

    Every column is judged alone, on videos that its model was not trained on.
    """
    folds = predictions.select("video_id", "group_id", "label", "fold")
    trainings = controls.trainings_of(protocol, config, left_out)

    def judged(**options: Any) -> Interval:
        scored = controls.tested(lambda rows: controls.metadata_only(index, rows, **options), folds, trainings)
        return controls.auc_within_folds(with_targets(scored, protocol), "group_id", config)

    whole = judged().value
    if not whole >= _CARRIES_AUC:  # NaN where each fold has one class
        return
    names = [name for name in (*controls.CATEGORIES, *controls.NUMBERS) if name in index.columns]
    varied = [name for name in names if index[name].n_unique() > 1]
    alone = {name: judged(names=[name], rounds=_ROUNDS_OF_ONE_COLUMN).value for name in varied}
    best = sorted(alone, key=lambda name: -alone[name])[:_MOST_CARRIERS]
    carriers = ", ".join(f"{name} ({alone[name]:.2f})" for name in best if alone[name] >= _CARRIES_AUC)
    found = f"Metadata predicts the labels by {carriers or 'several columns together'}; AUC of each column alone."
    yield "metadata_carriers", None, whole, found, None
    if config.rescale:
        return
    size = judged(names=controls.SIZE_AND_RATE, rounds=_ROUNDS_OF_ONE_COLUMN)
    if size.value >= _CARRIES_AUC and size.low > 0.5:
        found = (
            f"Frame size and rate alone predict the labels: AUC {_interval(size)}; -p rescale 480 brings every video "
            "to one height and one rate (docs/numbers.md)."
        )
        yield "size_and_rate", None, size.value, found, None


def _interval(interval: Interval) -> str:
    return f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


# Tasks image and video_text have one split instead of folds.


def image_split_audit(
    images: pl.DataFrame,
    root: Path,
    config: RunConfig,
    *,
    progress: Callable[[int, int], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> pl.DataFrame:
    """Return one row per check of a split of pictures (LEAKAGE_AUDIT).

    Args:
        images: IMAGES schema, the pictures of the training.
        root: folder that ``path`` is relative to. Files that changed since they were indexed are read again.
        config: gives ``near_duplicate_bits``, ``cache_dir`` and ``workers``.
        progress: called with (files read, files).
        stop: called after each file; may raise ``StoppedError``.
    """
    files, found = _read_again(IMAGE_FILES, images, root, config, progress, stop)
    contents = [image.facts.content_sha256 if image.facts is not None else None for image in found]
    readable, links = [number for number, content in enumerate(contents) if content is not None], None
    if config.near_duplicate_bits:
        judge = SamePictures([found[number].thumbnail for number in readable])
        hashes = [found[number].perceptual_hash for number in readable]
        near = near_duplicate_links(hashes, config.near_duplicate_bits, judge)
        links = [(readable[one], readable[other]) for one, other in near]
    return _split_audit(files, contents, links, sum(image.perceptual_hash is None for image in found))


def video_text_split_audit(
    pairs: pl.DataFrame,
    root: Path,
    config: RunConfig,
    *,
    progress: Callable[[int, int], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> pl.DataFrame:
    """Return one row per check of a split of VIDEO_TEXTS (LEAKAGE_AUDIT); a video with several texts counts once.

    Arguments are those of ``image_split_audit``.
    """
    files, found = _read_again(VIDEO_FILES, pairs, root, config, progress, stop)
    contents = [video.content_sha256 if video.probe is not None else None for video in found]
    hashes = [video.perceptual_hash for video in found]
    links = near_duplicate_links(hashes, config.near_duplicate_bits) if config.near_duplicate_bits else None
    return _split_audit(files, contents, links, hashes.count(None))


def _read_again(
    kind: FileKind[T], rows: pl.DataFrame, root: Path, config: RunConfig,
    progress: Callable[[int, int], None] | None, stop: Callable[[], bool] | None,
) -> tuple[pl.DataFrame, list[T]]:  # fmt: skip
    """Return a table ``path part group_id content_sha256`` of the files, and the facts of each file as it is now."""
    files = rows.select("path", "part", "group_id", "content_sha256").unique().sort("path", "part", "group_id")
    probed, _ = probe_files(
        kind, root, files["path"].to_list(), Path(config.cache_dir) / "index",
        workers=config.workers, progress=progress, stop=stop,
    )  # fmt: skip
    return files, [probed[path] for path in files["path"]]


def _split_audit(
    files: pl.DataFrame, contents: Sequence[str | None], links: Links, num_without_hash: int
) -> pl.DataFrame:
    """Return the checks as LEAKAGE_AUDIT.

    Args:
        files: table of ``_read_again`` with F rows.
        contents: F, the SHA-256 of each file now; None where it cannot be read.
        links: near-duplicates among the rows of ``files``.
        num_without_hash: files that could not be compared.
    """
    files = files.with_columns(now=pl.Series(contents, dtype=pl.String), training=0)
    changed = files.filter(pl.col("now").ne_missing(pl.col("content_sha256")))["path"].to_list()
    found = f"{len(changed):,} of {files.height:,} files differ from the index. The first: {changed[:3]}."
    rows = [
        _in_two(files, "part", "group_id", "groups"),
        _in_two(files, "part", "path", "files"),
        _in_two(files, "part", "now", "contents"),
        _near_copies(files, "part", "near_copies", links, num_without_hash),
        ("files_unlike_the_index", len(changed), None, found, not changed),
    ]
    return check_table(frame_of(rows, LEAKAGE_AUDIT), LEAKAGE_AUDIT, "leakage audit")
