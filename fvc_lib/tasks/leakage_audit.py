"""What was looked at to say that nothing leaked, what was found, and what a careless split would have claimed.

Overlaps are counted anew from what the index knows of each file (content, source, stated group, perceptual hash), not
from ``group_id`` alone: a fault in the grouping would be one in every check that trusts it.

What a split by row would have claimed is computed from the predictions as they are; no network is trained for it:

- the interval that comes out when every video counts as a draw of its own, copies or not;
- an oracle that knows nothing but the labels of a group's other videos, where a split by row trains on some of them;
- the network helped by that oracle: its own calibrated score where a group is new, and the share of fakes among the
  group's training videos where the split by row has shown the group before. That is what a network claims which
  recognises what it was trained on and otherwise does what this one does;
- the threshold chosen on the test videos themselves, by which decisions look better than any that was chosen before.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import polars as pl

from fvc_lib.corpus.copies.likeness import SamePictures
from fvc_lib.corpus.copies.near_duplicates import near_duplicate_links
from fvc_lib.corpus.probing import IMAGE_FILES, VIDEO_FILES, FileKind, probe_files
from fvc_lib.corpus.protocols.protocol import training_rows
from fvc_lib.metrics.classification import best_threshold
from fvc_lib.services.config import RunConfig
from fvc_lib.services.tables import LEAKAGE_AUDIT, LEFT_OUT, PARTS, check_table, frame_of
from fvc_lib.services.tasks import OFFICIAL
from fvc_lib.tasks.video import controls
from fvc_lib.tasks.video.results import measured, with_targets
from fvc_lib.tasks.video.selection import EarlierOpenings, RecordedSelection

Row = tuple[str, int | None, float | None, str, bool | None]
T = TypeVar("T")

OFFICIAL_LEAKS = "official_split_leaks"
_WHY = {
    "same_source": "one source id stands in both",
    "same_content": "files of one content stand in both",
    "near_duplicate": "their pictures are near-duplicates",
}


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
    """Every check with its count or number, a sentence, and whether it passed (LEAKAGE_AUDIT).

    The result does not depend on the order of any table's rows.

    Args:
        index: INDEX schema.
        folds: FOLDS schema.
        predictions: PREDICTIONS schema, all folds together.
        links: GROUP_LINKS schema.
        config: ``near_duplicate_bits``, replicates, confidence and seed.
        augmented: AUGMENTED schema; without it the copies of training videos are not looked at.
        selections: the record of each fold's training (``selection.read_selection``); without it the times at which
            outer folds were opened are not looked at.
        before: what was opened before those records were made (``selection.earlier_openings``).
        protocol: PROTOCOL schema; None: that of ``kfold``. What is counted across folds is then counted across the
            parts of each training, and what the corpus's own split has in several parts is named, not judged.
        left_out: videos without a clip (``results.undecoded``), from which metadata can learn nothing either.
    """
    trainings = None if protocol is None else controls.trainings_of(protocol, config)
    leaking = _leaking(protocol)
    index, folds, predictions = (table.sort("video_id") for table in (index, folds, predictions))
    rows = [
        *_joined(index, links),
        *_overlaps(index, [folds] if trainings is None else trainings, config.near_duplicate_bits, leaking),
        *_official_leaks(protocol, leaking),
        _predicted_once(folds, predictions),
        *([] if augmented is None else [_copies(index, augmented)]),
        *([] if selections is None else [_openings(selections), _as_recorded(predictions, selections)]),
        *([] if before is None else [_opened_before(before)]),
        *_claims(predictions, config, protocol),
        *_metadata_carriers(index, predictions, config, protocol, left_out),
    ]
    return check_table(frame_of(rows, LEAKAGE_AUDIT), LEAKAGE_AUDIT, "leakage audit")


_CARRIES_AUC = 0.6  # from here on what metadata tells is worth naming
_CHANCE_AUC = 0.5
_MOST_CARRIERS = 3
_ROUNDS_ALONE = 25  # a column by itself needs fewer trees


def _metadata_carriers(
    index: pl.DataFrame,
    predictions: pl.DataFrame,
    config: RunConfig,
    protocol: pl.DataFrame | None,
    left_out: Collection[str],
) -> Iterator[Row]:
    """Where metadata alone tells the labels: the columns that tell most, each judged by itself out of fold."""
    folds = predictions.select("video_id", "group_id", "label", "fold")
    trainings = None if protocol is None else controls.trainings_of(protocol, config, left_out)
    if trainings is None and folds["fold"].n_unique() < 2:
        return

    def scored_by(control: Callable[[pl.DataFrame], pl.DataFrame]) -> pl.DataFrame:
        return with_targets(controls.tested(control, folds, trainings), protocol)

    def auc(control: Callable[[pl.DataFrame], pl.DataFrame]) -> float:
        scored = scored_by(control)
        metric, scores = measured("roc_auc", scored)
        return metric(controls.fake_labels(scored), scores)

    whole = auc(lambda rows: controls.metadata_only(index, rows))
    if not whole >= _CARRIES_AUC:  # NaN where folds are of one class each
        return
    names = [name for name in (*controls.CATEGORIES, *controls.NUMBERS) if name in index.columns]
    names = [name for name in names if index[name].n_unique() > 1]

    def alone_as(name: str) -> float:
        return auc(lambda rows: controls.metadata_only(index, rows, [name], rounds=_ROUNDS_ALONE))

    alone = {name: alone_as(name) for name in names}
    ranked = sorted(names, key=lambda name: -alone[name])
    named = [f"{name} ({alone[name]:.2f})" for name in ranked[:_MOST_CARRIERS] if alone[name] >= _CARRIES_AUC]
    carriers = ", ".join(named) or "no column by itself, only several together"
    yield "metadata_carriers", None, whole, f"What metadata tells is carried by {carriers}; AUC of each alone.", None
    if config.rescale:
        return
    of_size = scored_by(lambda rows: controls.metadata_only(index, rows, controls.SIZE_AND_RATE, rounds=_ROUNDS_ALONE))
    told = controls.auc_within_folds(of_size, "group_id", config)
    if told.value >= _CARRIES_AUC and told.low > _CHANCE_AUC:
        found = (
            f"Frame size and rate alone tell the labels apart: AUC {told.value:.3f} [{told.low:.3f}, {told.high:.3f}]"
        )
        remedy = "-p rescale 480 brings every video to one height and one rate"
        yield "size_and_rate", None, told.value, f"{found}; {remedy} (docs/numbers.md).", None


def _joined(index: pl.DataFrame, links: pl.DataFrame) -> Iterator[Row]:
    sizes = index.group_by("group_id").agg(pl.len(), pl.col("label").n_unique().alias("labels"))
    largest = _counted(int(sizes["len"].max() or 0), "video")  # type: ignore[arg-type]
    found = f"{_counted(index.height, 'video')} in {_counted(sizes.height, 'group')}, the largest of {largest}"
    yield "groups", sizes.height, None, f"{found}.", None
    mixed = int((sizes["labels"] > 1).sum())
    found = f"Real and fake videos stand together in {_counted(mixed, 'group')}; these stay whole as well."
    yield "groups_of_both_labels", mixed, None, found, None
    for why, reason in _WHY.items():
        of_kind = links.filter(pl.col("why") == why).sort("first", "second")
        example = ""
        if of_kind.height:
            first, second, evidence = of_kind.select("first", "second", "evidence").row(0)
            example = f", e.g. {first!r} and {second!r} ({evidence})"
        found = f"{_counted(of_kind.height, 'link')} joined what the labels kept apart because {reason}{example}."
        yield f"joined_by_{why}", of_kind.height, None, found, None


def _leaking(protocol: pl.DataFrame | None) -> frozenset[str]:
    """Groups that the corpus's own split has in several parts, and protocol ``official`` leaves there."""
    if protocol is None:
        return frozenset()
    return frozenset().union(*(training_rows(protocol, fold).leaking for fold in protocol["fold"].unique()))


def _official_leaks(protocol: pl.DataFrame | None, leaking: frozenset[str]) -> Iterator[Row]:
    """No check: the split was published so, and its numbers are compared with others'."""
    if protocol is None or protocol["protocol"][0] != OFFICIAL:
        return
    rows = protocol.filter(pl.col("group_id").is_in(sorted(leaking)), pl.col("part") != LEFT_OUT)
    counts = ", ".join(f"{_counted(rows.filter(part=part).height, 'video')} of {part}" for part in PARTS)
    example = f" ({counts}), e.g. {min(leaking)!r}" if leaking else ""
    lie = "lies" if len(leaking) == 1 else "lie"
    said = f"{_counted(len(leaking), 'group')} {lie} in several parts of the corpus's own split{example}."
    yield OFFICIAL_LEAKS, len(leaking), None, said, None


def _overlaps(
    index: pl.DataFrame, trainings: Sequence[pl.DataFrame], near_duplicate_bits: int, leaking: frozenset[str]
) -> Iterator[Row]:
    """Everything that must not stand in two folds, each counted for itself; of several trainings added up."""
    each = [list(_overlaps_of(index, folds, near_duplicate_bits, leaking)) for folds in trainings]
    if len(each) == 1:
        yield from each[0]
        return
    for rows in zip(*each, strict=True):
        counts = [row[1] for row in rows if row[1] is not None]
        worst = max(rows, key=lambda row: row[1] or 0)
        passed = None if worst[4] is None else all(row[4] for row in rows)
        said = f"In the worst of {len(rows)} trainings: {worst[3]}"
        yield worst[0], sum(counts) if counts else None, None, said, passed


def _overlaps_of(
    index: pl.DataFrame, folds: pl.DataFrame, near_duplicate_bits: int, leaking: frozenset[str]
) -> Iterator[Row]:
    folds = folds.filter(~pl.col("group_id").is_in(sorted(leaking))) if leaking else folds
    known = folds.join(index.drop("label", "group_id"), on="video_id", how="left", maintain_order="left")
    for check, column, thing in (
        ("groups", "group_id", "group"),
        ("videos", "video_id", "video"),
        ("stated_groups", "stated_group", "group that the corpus states"),
        ("sources", "source_id", "source"),
        ("contents", "content_sha256", "file content"),
    ):
        yield _in_two(known, "fold", column, f"{check}_in_two_folds", thing)
    yield _near_duplicates(known, near_duplicate_bits)
    other = folds.join(index, on="video_id", how="left", suffix="_indexed").filter(
        pl.col("group_id").ne_missing(pl.col("group_id_indexed"))
    )
    found = f"{_counted(other.height, 'video')} of the folds in another group than the index says."
    yield "groups_unlike_the_index", other.height, None, found, other.height == 0


def _in_two(rows: pl.DataFrame, part: str, column: str, check: str, thing: str) -> Row:
    """How many values of ``column`` stand in more than one ``part`` or fold."""
    parts = rows.drop_nulls(column).group_by(column).agg(pl.col(part).n_unique())
    count = int((parts[part] > 1).sum())
    return check, count, None, f"{count:,} of {_counted(parts.height, thing)} in more than one {part}.", count == 0


def _near_duplicates(known: pl.DataFrame, max_bits: int) -> Row:
    """Recounted from the hashes: connected by as few links as possible, so 0 across folds is 0 pairs across folds."""
    check = "near_duplicates_in_two_folds"
    if max_bits == 0:
        return check, None, None, "Near-duplicates were not looked for (near_duplicate_bits is 0).", None
    fold = known["fold"].to_numpy()
    pairs = np.array(near_duplicate_links(known["perceptual_hash"].to_list(), max_bits), np.int64).reshape(-1, 2)
    across = int((fold[pairs[:, 0]] != fold[pairs[:, 1]]).sum())
    without = known["perceptual_hash"].null_count()
    unknown = f"; {_counted(without, 'video')} without a hash could not be compared" if without else ""
    found = (
        f"{across} of {_counted(len(pairs), 'link')} between videos of near-duplicate pictures (at most {max_bits} of "
        f"64 bits apart) go from one fold to another{unknown}."
    )
    return check, across, None, found, across == 0


def _predicted_once(folds: pl.DataFrame, predictions: pl.DataFrame) -> Row:
    due = folds.join(predictions, on="video_id", how="inner", suffix="_predicted")
    moved = due.filter(
        (pl.col("fold") != pl.col("fold_predicted")) | (pl.col("group_id") != pl.col("group_id_predicted"))
    ).height
    wrong = moved + int(predictions["video_id"].is_duplicated().sum()) + predictions.height - due.height
    found = f"{wrong} of {_counted(predictions.height, 'prediction')} made twice, or by another fold's model."
    return "predictions_not_by_their_own_fold", wrong, None, found, wrong == 0


def _copies(folds: pl.DataFrame, augmented: pl.DataFrame) -> Row:
    """A copy takes its video's place, and so its fold; one in another group would not."""
    copies = augmented.filter(pl.col("augmentation_index") > 0)
    placed = copies.join(folds, on="video_id", how="left", suffix="_of_video", maintain_order="left")
    strayed = placed.filter(pl.col("group_id").ne_missing(pl.col("group_id_of_video"))).height
    found = (
        f"{strayed} of {_counted(copies.height, 'augmented copy', 'augmented copies')} in another group than the "
        "video they are of; copies train, and inner validation and test read originals only."
    )
    return "augmented_copies_out_of_place", strayed, None, found, strayed == 0


def _openings(selections: Sequence[RecordedSelection | None]) -> Row:
    """An attempt that died after it had opened a fold leaves a fold that is opened twice, for one selection."""
    records = [record for record in selections if record is not None]
    unknown = sum(not record.is_complete for record in records)
    records = [record for record in records if record.is_complete]
    anew, lacking = sum(bool(record.earlier) for record in records), len(selections) - len(records) - unknown
    again = sum(record.openings > 1 and not record.earlier for record in records)
    died = f" ({_counted(again, 'fold')} more than once, as an attempt had died in between)" if again else ""
    found = (
        f"Epoch, threshold and temperature of {len(records) - anew} of {_counted(len(selections), 'fold')} were on the "
        f"disk before the outer labels were opened{died}; {anew} chosen anew after that, {lacking} without a record"
        f"{f', {unknown} opened before for what is not known, since an earlier record was damaged' if unknown else ''}."
    )
    return "chosen_after_opening", anew + unknown, None, found, anew + lacking + unknown == 0


def _as_recorded(predictions: pl.DataFrame, selections: Sequence[RecordedSelection | None]) -> Row:
    """A record that was in time proves nothing of predictions that were made with something else."""
    wrong, compared = 0, 0
    for fold, record in enumerate(selections):
        made = predictions.filter(pl.col("fold") == fold).select("threshold", "temperature").unique()
        if record is not None and made.height:
            compared += 1
            wrong += made.rows() != [(record.selection.threshold, record.selection.temperature)]
    found = f"{wrong} of {_counted(compared, 'fold')} predicted with another threshold or temperature than on record."
    return "predictions_unlike_their_record", wrong, None, found, wrong == 0


def _opened_before(before: EarlierOpenings) -> Row:
    """No check: a training may be repeated for any reason, and only its author knows whether the result was one."""
    was = "was" if before.replaced == 1 else "were"
    found = f"{_counted(before.replaced, 'training')} of this run had opened an outer fold with other weights and {was}"
    found += " then replaced"
    if before.forked_from:
        found += f"; the run was forked from {before.forked_from!r}, whose results may have been seen"
    if before.unknown:
        found += (
            f"; of {_counted(before.unknown, 'more training')} that was replaced the record is damaged, so whether an "
            "outer fold had been opened is not known"
        )
    if before != EarlierOpenings():
        found += ": whoever trains again because of a result has chosen on the outer folds"
    return "opened_before", before.replaced + before.unknown, None, f"{found}.", None


def _claims(predictions: pl.DataFrame, config: RunConfig, protocol: pl.DataFrame | None) -> Iterator[Row]:
    if predictions["fold"].n_unique() < 2:
        return
    predictions = with_targets(predictions, protocol)
    honest, low, high = _auc(predictions, "group_id", config)
    of = "mean AUC over targets" if "target" in predictions.columns else "AUC within folds"
    yield "auc_by_group", None, honest, f"The model's {of} is {_interval(honest, low, high)}.", None
    yield _row_interval(predictions, config, low, high)
    folds = predictions.select("video_id", "group_id", "label", "fold")
    by_row = controls.split_by_row(folds, seed=config.seed)
    lookup = with_targets(controls.group_lookup(by_row), protocol)
    oracle = _auc(lookup, "group_id", config)
    said = f"Split by row, whoever only recognises groups would have claimed {_interval(*oracle)}."
    yield "auc_of_group_lookup_by_row", None, oracle[0], said, None
    met = (pl.len().over("group_id") - pl.len().over("group_id", "fold")) > 0
    seen = by_row.select(met=met)["met"]
    helped = lookup.with_columns(score=pl.when(seen).then(pl.col("score")).otherwise(predictions["score"]))
    claimed, count = _auc(helped, "group_id", config), int(seen.sum())
    said = (
        f"Split by row, {count / seen.len():.0%} of the videos have others of their group in training; recognising "
        f"those, and scoring the rest as it does, the model would have claimed {_interval(*claimed)}. Computed from "
        "its predictions and the groups' labels; nothing was trained for it."
    )
    yield "auc_claimed_by_row", count, claimed[0], said, None
    yield _threshold_on_test(predictions)


def _row_interval(predictions: pl.DataFrame, config: RunConfig, low: float | None, high: float | None) -> Row:
    """How many times narrower the interval looks when every video is taken for a draw of its own."""
    check, (value, row_low, row_high) = "interval_by_row", _auc(predictions, "video_id", config)
    if low is None or high is None or row_low is None or row_high is None:
        return check, None, None, "Too few groups of a class for an interval.", None
    said = f"Taking every video for independent of its copies would have claimed {_interval(value, row_low, row_high)}"
    if row_high == row_low:
        return check, None, None, f"{said}.", None
    ratio = (high - low) / (row_high - row_low)
    return check, None, ratio, f"{said}; the interval over groups is {ratio:.2f} times as wide.", None


def _threshold_on_test(predictions: pl.DataFrame) -> Row:
    labels, scores = controls.fake_labels(predictions), predictions["score"].to_numpy()
    fold, chosen = predictions["fold"].to_numpy(), np.empty(scores.size)

    def decided(rows: pl.DataFrame) -> float:
        metric, decisions = measured("balanced_accuracy", rows)
        return metric(labels, decisions)

    for number in np.unique(fold):
        chosen[fold == number] = best_threshold(labels[fold == number], scores[fold == number])
    honest, claimed = decided(predictions), decided(predictions.with_columns(threshold=pl.Series(chosen)))
    said = (
        f"Balanced accuracy is {honest:.3f} at the thresholds that inner validation chose; chosen on the test videos "
        f"themselves they would have claimed {claimed:.3f}."
    )
    return "balanced_accuracy_at_test_thresholds", None, float(claimed) if np.isfinite(claimed) else None, said, None


def _auc(
    scored: pl.DataFrame, unit: Literal["group_id", "video_id"], config: RunConfig
) -> tuple[float | None, float | None, float | None]:
    """AUC within folds with the interval that comes of drawing ``unit``."""
    return controls.auc_within_folds(scored, unit, config).row()[:3]


def _interval(value: float | None, low: float | None, high: float | None) -> str:
    if value is None:
        return "undefined"
    return f"{value:.3f}" if low is None or high is None else f"{value:.3f} [{low:.3f}, {high:.3f}]"


def _counted(number: int, thing: str, things: str = "") -> str:
    """``1 group`` or ``3 groups``; ``group that ...`` becomes ``groups that ...``."""
    noun, _, rest = thing.partition(" that ")
    plural = (things or (f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s")) + (f" that {rest}" if rest else "")
    return f"{number:,} {thing if number == 1 else plural}"


# What was looked at to say that nothing leaked from one part of a split to another, for tasks with one split.
# Overlaps are counted anew from the files as they are now, what is in them and what they look like, and not from
# ``group_id`` alone: a fault in the grouping would be one in every check that trusts it.

Progress = Callable[[int, int], None]
Links = Sequence[tuple[int, int]]


def image_split_audit(
    images: pl.DataFrame,
    root: Path,
    config: RunConfig,
    *,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
) -> pl.DataFrame:
    """Every check with its count, a sentence, and whether it passed (LEAKAGE_AUDIT); row order does not matter.

    Args:
        images: IMAGES schema, as it is trained on.
        root: folder that ``path`` is relative to. Every file is looked at again, where it is not as it was remembered.
        config: ``near_duplicate_bits``, ``cache_dir`` and ``workers``.
        progress: called with (files looked at, files).
        stop: asked after each file, which may raise ``StoppedError``.
    """
    files, found = _looked_at(IMAGE_FILES, images, root, config, progress, stop)
    known = [each.facts.content_sha256 if each.facts is not None else None for each in found]
    seen = [position for position, content in enumerate(known) if content is not None]
    links: Links | None = None
    if config.near_duplicate_bits:
        judge = SamePictures([found[position].thumbnail for position in seen])
        hashes = [found[position].perceptual_hash for position in seen]
        near = near_duplicate_links(hashes, config.near_duplicate_bits, judge)
        links = [(seen[one], seen[other]) for one, other in near]
    return _audit(files, known, "image", links, sum(each.perceptual_hash is None for each in found))


def video_text_split_audit(
    pairs: pl.DataFrame,
    root: Path,
    config: RunConfig,
    *,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
) -> pl.DataFrame:
    """The same of VIDEO_TEXTS; each video is counted once for all of its texts."""
    files, found = _looked_at(VIDEO_FILES, pairs, root, config, progress, stop)
    known = [each.content_sha256 if each.probe is not None else None for each in found]
    hashes, links = [each.perceptual_hash for each in found], None
    if config.near_duplicate_bits:
        links = near_duplicate_links(hashes, config.near_duplicate_bits)
    return _audit(files, known, "video", links, hashes.count(None))


def _looked_at(
    kind: FileKind[T], rows: pl.DataFrame, root: Path, config: RunConfig, progress: Progress | None,
    stop: Callable[[], bool] | None,
) -> tuple[pl.DataFrame, list[T]]:  # fmt: skip
    """``path part group_id content_sha256`` of each file of ``rows``, and what there is of it now."""
    files = rows.select("path", "part", "group_id", "content_sha256").unique().sort("path", "part", "group_id")
    probed, _ = probe_files(
        kind, root, files["path"].to_list(), Path(config.cache_dir) / "index",
        workers=config.workers, progress=progress, stop=stop,
    )  # fmt: skip
    return files, [probed[path] for path in files["path"]]


def _audit(
    files: pl.DataFrame, known: Sequence[str | None], thing: str, links: Links | None, num_without_hash: int
) -> pl.DataFrame:
    """``known`` is the content at present, None of what cannot be read."""
    files = files.with_columns(now=pl.Series(known, dtype=pl.String))
    rows = [
        _in_two(files, "part", "group_id", "groups_in_two_parts", "group"),
        _in_two(files, "part", "path", "files_in_two_parts", "file"),
        _in_two(files, "part", "now", "contents_in_two_parts", "file content"),
        _near_copies(files, thing, links, num_without_hash),
        _as_indexed(files),
    ]
    return check_table(frame_of(rows, LEAKAGE_AUDIT), LEAKAGE_AUDIT, "leakage audit")


def _near_copies(files: pl.DataFrame, thing: str, links: Links | None, without: int) -> Row:
    """Connected by as few links as possible, so 0 across parts is 0 pairs across parts."""
    check = "near_copies_in_two_parts"
    if links is None:
        return check, None, None, "Near-copies were not looked for (near_duplicate_bits is 0).", None
    part, path = files["part"].to_list(), files["path"].to_list()
    across = [(path[one], path[other]) for one, other in links if part[one] != part[other]]
    example = f", e.g. {across[0][0]!r} and {across[0][1]!r}" if across else ""
    unknown = f"; {_counted(without, thing)} too plain to be compared" if without else ""
    finding = (
        f"{len(across):,} of {_counted(len(links), 'link')} between {thing}s that look alike go from one part to "
        f"another{example}{unknown}."
    )
    return check, len(across), None, finding, not across


def _as_indexed(files: pl.DataFrame) -> Row:
    other = files.filter(pl.col("now").ne_missing(pl.col("content_sha256")))["path"].to_list()
    example = f", e.g. {other[0]!r}" if other else ""
    finding = f"{len(other):,} of {_counted(files.height, 'file')} not as the index found it{example}."
    return "files_unlike_the_index", len(other), None, finding, not other
