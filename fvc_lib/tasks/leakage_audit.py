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
from typing import TypeVar

import polars as pl

from fvc_lib.corpus.copies.near_duplicates import near_duplicate_links
from fvc_lib.corpus.copies.perceptual_hash import SamePictures
from fvc_lib.corpus.probing import IMAGE_FILES, VIDEO_FILES, FileKind, probe_files
from fvc_lib.corpus.protocols import training_rows
from fvc_lib.metrics.intervals import Interval
from fvc_lib.services.config import RunConfig
from fvc_lib.services.tables import LEAKAGE_AUDIT, LEFT_OUT, PARTS, check_table, frame_of
from fvc_lib.services.tasks import OFFICIAL
from fvc_lib.tasks.video import controls
from fvc_lib.tasks.video.results import with_targets
from fvc_lib.tasks.video.selection import EarlierOpenings, RecordedSelection

Row = tuple[str, int | None, float | None, str, bool | None]  # the columns of LEAKAGE_AUDIT
Control = Callable[[pl.DataFrame], pl.DataFrame]
T = TypeVar("T")

OFFICIAL_LEAKS = "official_split_leaks"
_LINK_REASONS = {
    "same_source": "they share a source id",
    "same_content": "their files have the same content",
    "near_duplicate": "their pictures are near-duplicates",
}
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
            overlaps are counted in every training. Groups in several parts of the corpus's official split are
            reported, not judged.
        left_out: ids of videos without a clip (``results.undecoded``).
    """
    trainings = None if protocol is None else controls.trainings_of(protocol, config)
    leaking = _leaking_groups(protocol)
    index, folds, predictions = (table.sort("video_id") for table in (index, folds, predictions))
    rows = [
        *_groups(index, links),
        *_overlaps(index, [folds] if trainings is None else trainings, config.near_duplicate_bits, leaking),
        *_official_leaks(protocol, leaking),
        _predictions_of_other_folds(folds, predictions),
        *([] if augmented is None else [_strayed_copies(folds, augmented)]),
        *([] if selections is None else [_late_choices(selections)]),
        *([] if before is None else [_opened_before(before)]),
        *_claims(predictions, config, protocol),
        *_metadata_carriers(index, predictions, config, protocol, left_out),
    ]
    return check_table(frame_of(rows, LEAKAGE_AUDIT), LEAKAGE_AUDIT, "leakage audit")


def _groups(index: pl.DataFrame, links: pl.DataFrame) -> Iterator[Row]:
    sizes = index.group_by("group_id").agg(pl.len(), pl.col("label").n_unique().alias("labels"))
    largest = _count(int(sizes["len"].max() or 0), "video")  # type: ignore[arg-type]
    found = f"{_count(index.height, 'video')} in {_count(sizes.height, 'group')}, the largest of {largest}"
    yield "groups", sizes.height, None, f"{found}.", None
    mixed = int((sizes["labels"] > 1).sum())
    yield "groups_of_both_labels", mixed, None, f"{_count(mixed, 'group')} with both real and fake videos.", None
    for why, reason in _LINK_REASONS.items():
        joined = links.filter(pl.col("why") == why).sort("first", "second")
        example = ""
        if joined.height:
            first, second, evidence = joined.select("first", "second", "evidence").row(0)
            example = f", e.g. {first!r} and {second!r} ({evidence})"
        found = f"{_count(joined.height, 'link')} between groups of the corpus because {reason}{example}."
        yield f"joined_by_{why}", joined.height, None, found, None


def _leaking_groups(protocol: pl.DataFrame | None) -> frozenset[str]:
    """Return the ids of groups that are in several parts of the corpus's official split; empty for other protocols."""
    if protocol is None:
        return frozenset()
    return frozenset().union(*(training_rows(protocol, fold).leaking for fold in protocol["fold"].unique()))


def _official_leaks(protocol: pl.DataFrame | None, leaking: frozenset[str]) -> Iterator[Row]:
    """Yield a row about the leaks of a published split; no verdict, since papers must be compared on the same split."""
    if protocol is None or protocol["protocol"][0] != OFFICIAL:
        return
    rows = protocol.filter(pl.col("group_id").is_in(sorted(leaking)), pl.col("part") != LEFT_OUT)
    counts = ", ".join(f"{_count(rows.filter(part=part).height, 'video')} of {part}" for part in PARTS)
    example = f" ({counts}), e.g. {min(leaking)!r}" if leaking else ""
    found = f"{_count(len(leaking), 'group')} in several parts of the corpus's own split{example}."
    yield OFFICIAL_LEAKS, len(leaking), None, found, None


def _overlaps(
    index: pl.DataFrame, trainings: Sequence[pl.DataFrame], near_duplicate_bits: int, leaking: frozenset[str]
) -> Iterator[Row]:
    """Yield one row per kind of overlap.

    With several trainings the count is the sum over them, and the sentence describes the training with most overlaps.
    """
    of_trainings = [list(_overlaps_of(index, folds, near_duplicate_bits, leaking)) for folds in trainings]
    for rows in zip(*of_trainings, strict=True):
        check, count, number, found, passed = max(rows, key=lambda row: row[1] or 0)
        if len(rows) > 1:
            count = None if count is None else sum(row[1] or 0 for row in rows)
            found = f"In the worst of {len(rows)} trainings: {found}"
        yield check, count, number, found, passed


def _overlaps_of(
    index: pl.DataFrame, folds: pl.DataFrame, near_duplicate_bits: int, leaking: frozenset[str]
) -> Iterator[Row]:
    folds = folds.filter(~pl.col("group_id").is_in(sorted(leaking))) if leaking else folds
    known = folds.join(index.drop("label", "group_id"), on="video_id", how="left", maintain_order="left")
    for check, column, thing in (
        ("groups", "group_id", "group"),
        ("videos", "video_id", "video"),
        ("stated_groups", "stated_group", "stated group"),
        ("sources", "source_id", "source"),
        ("contents", "content_sha256", "file content"),
    ):
        yield _in_two(known, "fold", column, f"{check}_in_two_folds", thing)
    check = "near_duplicates_in_two_folds"
    hashes, pairs = known["perceptual_hash"].to_list(), None
    if near_duplicate_bits:
        pairs = near_duplicate_links(hashes, near_duplicate_bits)
    yield _near_copies(known, "fold", "video_id", check, "video", pairs, hashes.count(None))


def _in_two(rows: pl.DataFrame, part: str, column: str, check: str, thing: str) -> Row:
    """Return the check that counts values of ``column`` which occur with more than one value of ``part``."""
    parts = rows.drop_nulls(column).group_by(column).agg(pl.col(part).n_unique())
    count = int((parts[part] > 1).sum())
    return check, count, None, f"{count:,} of {_count(parts.height, thing)} in more than one {part}.", count == 0


def _near_copies(
    rows: pl.DataFrame,
    part: str,
    name: str,
    check: str,
    thing: str,
    links: Sequence[tuple[int, int]] | None,
    num_without_hash: int,
) -> Row:
    """Return the check that counts near-duplicate ``links`` (pairs of row numbers) whose two rows differ in ``part``.

    The links are a spanning forest, so no link across parts means no pair across parts.
    """
    if links is None:
        return check, None, None, "Near-duplicates were not searched for (near_duplicate_bits is 0).", None
    parts, names = rows[part].to_list(), rows[name].to_list()
    across = [(names[one], names[other]) for one, other in links if parts[one] != parts[other]]
    example = f", e.g. {across[0][0]!r} and {across[0][1]!r}" if across else ""
    unknown = f"; {_count(num_without_hash, thing)} without a hash not compared" if num_without_hash else ""
    found = f"{len(across):,} of {_count(len(links), 'near-duplicate link')} between {part}s{example}{unknown}."
    return check, len(across), None, found, not across


def _predictions_of_other_folds(folds: pl.DataFrame, predictions: pl.DataFrame) -> Row:
    due = folds.join(predictions, on="video_id", how="inner", suffix="_predicted")
    moved = due.filter(
        (pl.col("fold") != pl.col("fold_predicted")) | (pl.col("group_id") != pl.col("group_id_predicted"))
    ).height
    wrong = moved + int(predictions["video_id"].is_duplicated().sum()) + predictions.height - due.height
    found = f"{wrong} of {_count(predictions.height, 'prediction')} made twice, or by another fold's model."
    return "predictions_not_by_their_own_fold", wrong, None, found, wrong == 0


def _strayed_copies(folds: pl.DataFrame, augmented: pl.DataFrame) -> Row:
    copies = augmented.filter(pl.col("augmentation_index") > 0)
    placed = copies.join(folds, on="video_id", how="left", suffix="_of_video", maintain_order="left")
    strayed = placed.filter(pl.col("group_id").ne_missing(pl.col("group_id_of_video"))).height
    found = f"{strayed} of {copies.height:,} augmented copies in another group than their video; copies only train."
    return "augmented_copies_out_of_place", strayed, None, found, strayed == 0


def _late_choices(selections: Sequence[RecordedSelection | None]) -> Row:
    """Return the check that each fold's choices were recorded before its outer test labels were opened.

    The choices are the epoch, the threshold and the temperature.
    """
    records = [record for record in selections if record is not None]
    complete = [record for record in records if record.is_complete]
    unknown, missing = len(records) - len(complete), len(selections) - len(records)
    late = sum(bool(record.earlier) for record in complete)
    found = (
        f"Epoch, threshold and temperature of {len(complete) - late} of {_count(len(selections), 'fold')} were on disk "
        f"before the outer labels were opened; {late} chosen again after that, {unknown} with a damaged earlier "
        f"record, {missing} without a record."
    )
    return "chosen_after_opening", late + unknown, None, found, late + unknown + missing == 0


def _opened_before(before: EarlierOpenings) -> Row:
    """Return a row about earlier openings of test labels, without a verdict.

    Only the author knows why a training was repeated.
    """
    parts = [f"{_count(before.replaced, 'training')} of this run opened an outer fold and was then replaced"]
    if before.forked_from:
        parts.append(f"the run was forked from {before.forked_from!r}, whose results may have been seen")
    if before.unknown:
        parts.append(f"of {_count(before.unknown, 'replaced training')} the record is damaged")
    if before != EarlierOpenings():
        parts.append("a training that is repeated because of a result has used the outer folds to choose")
    return "opened_before", before.replaced + before.unknown, None, f"{'; '.join(parts)}.", None


def _claims(predictions: pl.DataFrame, config: RunConfig, protocol: pl.DataFrame | None) -> Iterator[Row]:
    """Yield the model's AUC, and the AUC that a split by row would have claimed for it."""
    if predictions["fold"].n_unique() < 2:
        return
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
    trainings = None if protocol is None else controls.trainings_of(protocol, config, left_out)
    if trainings is None and folds["fold"].n_unique() < 2:
        return

    def judged(names: Sequence[str] | None = None) -> Interval:
        def control(rows: pl.DataFrame) -> pl.DataFrame:
            if names is None:
                return controls.metadata_only(index, rows)
            return controls.metadata_only(index, rows, names, rounds=_ROUNDS_OF_ONE_COLUMN)

        return controls.auc_within_folds(
            with_targets(controls.tested(control, folds, trainings), protocol), "group_id", config
        )

    whole = judged().value
    if not whole >= _CARRIES_AUC:  # NaN where each fold has one class
        return
    names = [name for name in (*controls.CATEGORIES, *controls.NUMBERS) if name in index.columns]
    alone = {name: judged([name]).value for name in names if index[name].n_unique() > 1}
    best = sorted(alone, key=lambda name: -alone[name])[:_MOST_CARRIERS]
    carriers = ", ".join(f"{name} ({alone[name]:.2f})" for name in best if alone[name] >= _CARRIES_AUC)
    found = f"Metadata predicts the labels by {carriers or 'several columns together'}; AUC of each column alone."
    yield "metadata_carriers", None, whole, found, None
    if config.rescale:
        return
    size = judged(controls.SIZE_AND_RATE)
    if size.value >= _CARRIES_AUC and size.low > 0.5:
        found = (
            f"Frame size and rate alone predict the labels: AUC {_interval(size)}; -p rescale 480 brings every video "
            "to one height and one rate (docs/numbers.md)."
        )
        yield "size_and_rate", None, size.value, found, None


def _interval(interval: Interval) -> str:
    value, low, high = interval.row()[:3]
    if value is None:
        return "undefined"
    return f"{value:.3f}" if low is None or high is None else f"{value:.3f} [{low:.3f}, {high:.3f}]"


def _count(number: int, thing: str) -> str:
    """Return ``1 group`` or ``3 groups``."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


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
    readable = [number for number, content in enumerate(contents) if content is not None]
    links = None
    if config.near_duplicate_bits:
        judge = SamePictures([found[number].thumbnail for number in readable])
        hashes = [found[number].perceptual_hash for number in readable]
        near = near_duplicate_links(hashes, config.near_duplicate_bits, judge)
        links = [(readable[one], readable[other]) for one, other in near]
    return _split_audit(files, contents, "image", links, sum(image.perceptual_hash is None for image in found))


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
    return _split_audit(files, contents, "video", links, hashes.count(None))


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
    files: pl.DataFrame,
    contents: Sequence[str | None],
    thing: str,
    links: Sequence[tuple[int, int]] | None,
    num_without_hash: int,
) -> pl.DataFrame:
    """Return the checks as LEAKAGE_AUDIT.

    Args:
        files: table of ``_read_again`` with F rows.
        contents: F, the SHA-256 of each file now; None where it cannot be read.
        thing: word for one file.
        links: pairs of row numbers of near-duplicates; None: they were not searched for.
        num_without_hash: files that could not be compared.
    """
    files = files.with_columns(now=pl.Series(contents, dtype=pl.String))
    changed = files.filter(pl.col("now").ne_missing(pl.col("content_sha256")))["path"].to_list()
    example = f", e.g. {changed[0]!r}" if changed else ""
    found = f"{len(changed):,} of {_count(files.height, 'file')} differ from the index{example}."
    rows = [
        _in_two(files, "part", "group_id", "groups_in_two_parts", "group"),
        _in_two(files, "part", "path", "files_in_two_parts", "file"),
        _in_two(files, "part", "now", "contents_in_two_parts", "file content"),
        _near_copies(files, "part", "path", "near_copies_in_two_parts", thing, links, num_without_hash),
        ("files_unlike_the_index", len(changed), None, found, not changed),
    ]
    return check_table(frame_of(rows, LEAKAGE_AUDIT), LEAKAGE_AUDIT, "leakage audit")
