"""Make the protocol table of a run: the part of every video in every training, checked before anything trains.

A protocol is a way to divide a corpus into what is trained on, what is tested, and what is left out. A run has one or
several trainings (folds), each with its own test videos.

``official`` uses the split that the corpus comes with, because published numbers were made with it. A leakage group
(videos of one person or source, near-duplicates) that this split divides is a leak. Every row of such a group carries
the reason, and ``check_protocol`` lets only these groups pass. ``official_strict`` removes the leaks: it leaves out
validation videos of tested groups, and training videos of tested or validation groups.

``cross_corpus`` trains on some corpora and tests on the others (the targets). A target is tested on its official test
list, or on all its videos if it has none. A training video whose group is also tested is left out; the test stays
complete.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

import polars as pl

from fvc_lib.corpus.corpus_files import some_of
from fvc_lib.corpus.folds import (
    FoldSplit,
    check_folds,
    make_folds,
    refuse_few_groups,
    shuffle_labels_by_group,
    split_for_fold,
)
from fvc_lib.corpus.index import listed_videos, refuse_empty_index, refuse_unusable
from fvc_lib.corpus.listing import Listing
from fvc_lib.corpus.protocols.generators import leave_one_generator_out
from fvc_lib.corpus.protocols.matched import Tells, matched, parts_of_folds
from fvc_lib.services import tasks as names
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, LeakageError, did_you_mean
from fvc_lib.services.tables import FOLDS, LABELS, LEFT_OUT, PARTS, PROTOCOL, check_table

# A video that stands in several corpora counts once, except where a target or an official list is tested whole.
_CONTENTS_ONCE = (names.KFOLD, names.LEAVE_ONE_GENERATOR_OUT, names.LENGTH_MATCHED, names.METADATA_MATCHED)
_SAME_CONTENT = "the same file content as another corpus's, which takes part"
_NOT_LISTED = "not in its corpus's official test list"
_CROSSES = "its group is also tested"
_NO_PART = "the corpus's own split does not name it"


# --- The corpus's own parts, and whole corpora.


def _official(index: pl.DataFrame, *, strict: bool) -> pl.DataFrame:
    """Return the columns of a protocol table for the official split: one training, fold 0.

    Raises:
        DataError: the corpus has no official split, or one without a training or a test part.
    """
    parts = set(index["official_split"].drop_nulls())
    if missing := [part for part in ("train", "test") if part not in parts]:
        has = f"has {', '.join(sorted(parts))} alone" if parts else "has none"
        raise DataError(
            f"protocol {'official_strict' if strict else 'official'}: wanted a corpus with a split of its own, and "
            f"this one {has}; there is no part {' and no '.join(missing)}. Give a manifest with a column split, the "
            "corpus's lists where they were published, or -p protocol kfold."
        )
    part = pl.col("official_split")
    of_group = part.drop_nulls().unique().sort().over("group_id", mapping_strategy="join")
    rows = index.sort("video_id").with_columns(of_group=of_group)
    leaks = part.is_not_null() & (pl.col("of_group").list.len() > 1)
    if strict:
        tested, chooses = (pl.col("of_group").list.contains(each) for each in ("test", "validation"))
        leaks = ((part == "train") & (tested | chooses)) | ((part == "validation") & tested)
    named = pl.format("its group is in several official parts: {}", pl.col("of_group").list.join(", "))
    rows = rows.with_columns(
        part=pl.when(part.is_null() | (leaks if strict else False)).then(pl.lit(LEFT_OUT)).otherwise(part),
        reason=pl.when(part.is_null()).then(pl.lit(_NO_PART)).when(leaks).then(named),
    )
    target = pl.when(pl.col("part") == "test").then(pl.lit("official test"))
    return rows.with_columns(fold=pl.lit(0, pl.Int64), target=target)


def _known(name: str, corpora: Sequence[str]) -> str:
    """Return the name of the corpus that equals ``name`` apart from case and punctuation; ``name`` if none does."""
    plain = {"".join(filter(str.isalnum, corpus.lower())): corpus for corpus in corpora}
    return name if name in corpora else plain.get("".join(filter(str.isalnum, name.lower())), name)


def refused_targets(targets: Sequence[str], corpora: Sequence[str]) -> str:
    """Return why ``targets`` cannot be tested in a run of these ``corpora``, else the empty text."""
    known = [_known(name, corpora) for name in targets]
    for name in known:
        if name not in corpora:
            plain = _known(PurePath(name).name, corpora)
            by_name = f" {plain!r} is meant by its name, not by its path."
            near = by_name if plain in corpora else did_you_mean(name, corpora)
            listed = f"They are: {', '.join(corpora) or 'one without a name'}."
            return f"target_corpora: {name!r} is none of this run's corpora.{near} {listed}"
    if set(corpora) <= set(known):
        return (
            f"target_corpora: {', '.join(targets)} are all of this run's corpora, and nothing is left to train on. "
            "Leave one out, or give another with -p more_corpora."
        )
    return ""


def _cross_corpus(index: pl.DataFrame, targets: Sequence[str]) -> pl.DataFrame:
    """Return the columns of a protocol table that tests on the corpora ``targets``: one training, fold 0.

    Raises:
        DataError: a target is no corpus of the run or lacks a label, or no corpus is left to train on.
    """
    corpora = sorted(index["corpus"].drop_nulls().unique())
    if why := refused_targets(targets, corpora):
        raise DataError(
            f"{why} In a new run with what is done of this one: --resume RUN --fork -p target_corpora NAME; other "
            "corpora's paths: -p more_corpora."
        )
    targets = [_known(name, corpora) for name in targets]
    is_target = pl.col("corpus").is_in(targets).fill_null(False)
    listed = (pl.col("official_split") == "test").fill_null(False)
    rows = index.sort("video_id").with_columns(is_tested=is_target & (listed | ~listed.any().over("corpus")))
    crosses = ~is_target & pl.col("is_tested").any().over("group_id")
    reason = pl.when(crosses).then(pl.lit(_CROSSES)).when(is_target & ~pl.col("is_tested")).then(pl.lit(_NOT_LISTED))
    part = pl.when("is_tested").then(pl.lit("test")).when(reason.is_not_null()).then(pl.lit(LEFT_OUT))
    rows = rows.with_columns(
        fold=pl.lit(0, pl.Int64),
        target=pl.when("is_tested").then("corpus"),
        part=part.otherwise(pl.lit("train")),
        reason=reason,
    )
    for name in targets:
        if lacking := sorted(set(LABELS) - set(rows.filter(target=name)["label"])):
            raise DataError(
                f"target_corpora: {name!r} has no {some_of(lacking)} videos to test on, so nothing can be told apart "
                "there. Add them (a manifest of both), or leave it out."
            )
    return rows


# --- The table of a run.


def make_protocol(index: pl.DataFrame, config: RunConfig, tells: Tells) -> pl.DataFrame:
    """Return the PROTOCOL table: the part of every video of the index in every training of ``config.protocol``.

    Rows are sorted by training and video; they do not depend on the order of the index.

    Args:
        index: INDEX table.
        config: uses protocol, target_corpora, num_folds, and folds_seed (or seed if that is None).
        tells: measures how well columns of the index predict the label; see ``matched.Tells``.

    Raises:
        DataError: the corpus does not fit the protocol; the message names what is missing.
        LeakageError: a group would be trained on and tested.
    """
    refuse_empty_index(index)
    name, num_folds, whole = config.protocol, config.num_folds, index
    if name in _CONTENTS_ONCE:
        index = whole.sort("video_id").unique("content_sha256", keep="first", maintain_order=True)
    seed = config.seed if config.folds_seed is None else config.folds_seed
    if name in (names.OFFICIAL, names.OFFICIAL_STRICT):
        rows = _official(index, strict=name == names.OFFICIAL_STRICT)
    elif name == names.CROSS_CORPUS:
        rows = _cross_corpus(index, config.target_corpora)
    elif name == names.LEAVE_ONE_GENERATOR_OUT:
        rows = leave_one_generator_out(index, num_folds, seed)
    elif name in (names.LENGTH_MATCHED, names.METADATA_MATCHED):
        rows = matched(index, name, num_folds, seed, tells)
    else:
        rows = parts_of_folds(index, make_folds(index, num_folds, seed), num_folds)
    columns = ("video_id", "group_id", "label", "fold", "target", "part", "reason")
    copies = whole.join(index, on="video_id", how="anti").join(rows.select("fold").unique(), how="cross")
    copies = copies.with_columns(part=pl.lit(LEFT_OUT), reason=pl.lit(_SAME_CONTENT), target=pl.lit(None, pl.String))
    table = pl.concat([rows.select(columns), copies.select(columns)]).with_columns(protocol=pl.lit(name))
    table = table.select(*PROTOCOL.columns).sort("fold", "video_id")
    check_protocol(table, whole, config.num_trainings)
    return check_table(table, PROTOCOL, "protocol")


def refuse_untrainable(listing: Listing, config: RunConfig) -> None:
    """Raise ``DataError`` early, before any video is opened, for corpora that cannot be trained on.

    The index will have no more videos and groups than the listing, so a run would fail later for the same reason.

    Raises:
        DataError: no usable file, files of one label only, too many files lost, or too few groups for the protocol.
    """
    if config.annotations_only:
        return
    videos = listed_videos(listing)
    refuse_unusable(listing, videos, listing.rejected, config.max_rejected_share)
    if config.protocol in (names.OFFICIAL, names.OFFICIAL_STRICT):
        _official(videos, strict=False)
    elif config.protocol not in (names.CROSS_CORPUS, names.LEAVE_ONE_GENERATOR_OUT):
        refuse_few_groups(videos, config.num_folds)


def check_protocol(table: pl.DataFrame, index: pl.DataFrame, num_trainings: int) -> None:
    """Check that no group is in two parts of a training, every training lists all videos, and none is tested twice.

    Under the protocol ``official``, groups that the official split divides may be in two parts.

    Args:
        table: PROTOCOL table.
        index: INDEX table with all videos.
        num_trainings: wanted number of trainings, numbered from 0 in the column ``fold``.

    Raises:
        LeakageError: a group or video is in two parts of a training, or a video is tested by two trainings.
        DataError: a training is missing, does not list all videos, or trains or tests on one label only.
    """
    if sorted(table["fold"].unique()) != list(range(num_trainings)):
        raise DataError(f"protocol: got trainings {sorted(table['fold'].unique())}, wanted {num_trainings} from 0.")
    ids = set(index["video_id"])
    for fold, rows in _by_training(table):
        side = pl.col("part").replace_strict({part: number for number, part in enumerate(PARTS)})
        check_folds(rows.filter(pl.col("part") != LEFT_OUT).with_columns(fold=side), training_rows(table, fold).leaking)
        if rows.height != len(ids) or set(rows["video_id"]) != ids:
            wrong = some_of(sorted(ids ^ set(rows["video_id"])))
            raise DataError(f"protocol: training {fold} has not one row for each video, e.g. {wrong}.")
        for part in ("train", "test"):
            of_part = rows.filter(pl.col("part") == part)
            if lacking := sorted(set(LABELS) - set(of_part["label"])):
                targets = ", ".join(sorted(of_part["target"].drop_nulls().unique())) or "all"
                left = rows.filter(pl.col("part") == LEFT_OUT).height
                raise DataError(
                    f"protocol: training {fold} (target: {targets}) has {of_part.height} videos in its {part} part and "
                    f"none of them is {' or '.join(lacking)}; {left} of {rows.height} are left out. Add such videos, "
                    "set num_folds lower, or use another protocol."
                )
    twice = table.filter(pl.col("part") == "test").filter(pl.col("video_id").is_duplicated())
    if twice.height:
        raise LeakageError(f"protocol: videos are tested by several trainings: {some_of(twice['video_id'].to_list())}.")


def _by_training(table: pl.DataFrame) -> list[tuple[int, pl.DataFrame]]:
    return [(int(rows["fold"][0]), rows) for rows in table.partition_by("fold", maintain_order=True)]


def folds_tested(table: pl.DataFrame) -> pl.DataFrame:
    """Return the FOLDS table of the tested videos, each with the training that tests it, sorted by ``video_id``."""
    return table.filter(pl.col("part") == "test").select(*FOLDS.columns).sort("video_id")


@dataclass(frozen=True)
class TrainingRows:
    """The videos that take part in one training, before they are split into parts.

    Attributes:
        folds: FOLDS table of these videos. Rows whose fold is the number of the training are tested.
        validation: ids of the official validation part; empty: a validation part is made of training groups.
        leaking: groups that the official split divides.
    """

    folds: pl.DataFrame
    validation: frozenset[str] = frozenset()
    leaking: frozenset[str] = frozenset()

    def shuffled(self, seed: int) -> "TrainingRows":
        """Return the same rows with labels shuffled by group."""
        return replace(self, folds=shuffle_labels_by_group(self.folds, seed))

    def split(
        self, fold: int | None, *, inner_validation_share: float, seed: int, without: Collection[str] = ()
    ) -> FoldSplit:
        """Split into train, validation and test, leaving out the video ids in ``without``.

        For the other arguments and the errors see ``folds.split_for_fold``.
        """
        rows = self.folds.filter(~pl.col("video_id").is_in(sorted(without))) if without else self.folds
        return split_for_fold(
            rows,
            fold,
            inner_validation_share=inner_validation_share,
            seed=seed,
            validation=self.validation.intersection(rows["video_id"]) if self.validation else (),
            leaking=self.leaking,
        )


def training_rows(table: pl.DataFrame, fold: int) -> TrainingRows:
    """Return the videos that take part in training ``fold``.

    In ``folds``, tested videos have the number ``fold``, and all others ``fold + 1``.
    """
    rows = table.filter((pl.col("fold") == fold) & (pl.col("part") != LEFT_OUT))
    number = pl.when(pl.col("part") == "test").then(fold).otherwise(fold + 1)
    leaking = rows.filter((pl.col("protocol") == names.OFFICIAL) & pl.col("reason").is_not_null())["group_id"]
    return TrainingRows(
        rows.with_columns(fold=number.cast(pl.Int64)).select(*FOLDS.columns).sort("video_id"),
        frozenset(rows.filter(pl.col("part") == "validation")["video_id"]),
        frozenset(leaking),
    )


def all_rows(table: pl.DataFrame) -> TrainingRows:
    """Return the rows for a training without a test part: all videos that take part in any training of ``table``."""
    rows = table.filter(pl.col("part") != LEFT_OUT).unique("video_id").with_columns(fold=pl.lit(0, pl.Int64))
    return TrainingRows(rows.select(*FOLDS.columns).sort("video_id"))


def sentence(table: pl.DataFrame) -> str:
    """Return a line of text on a PROTOCOL table: its name, its targets, and how many videos it tests and leaves out."""
    name = table["protocol"][0]
    tested = table.filter(pl.col("part") == "test")
    targets = tested.drop_nulls("target").group_by("target").agg(pl.col("fold").n_unique()).sort("target").rows()
    of = ", ".join(f"{target} ({count} folds)" if count > 1 else target for target, count in targets)
    videos = table["video_id"].n_unique()
    used = table.filter(pl.col("part") != LEFT_OUT)["video_id"].n_unique()
    return (
        f"{name}: {names.PROTOCOLS[name].meaning}. {tested.height} of {videos} videos are tested"
        f"{f', as {of}' if of else ''}; {used - tested.height} only train or choose, and {videos - used} take no part "
        "at all."
    )


def parts_table(table: pl.DataFrame, config: RunConfig) -> pl.DataFrame:
    """Return a table ``fold target train validation test left_out`` with one row per training.

    The last four columns are numbers of videos.

    Raises:
        DataError: too few groups for a validation part.
    """
    rows, share = [], config.inner_validation_share
    for fold, part in _by_training(table):
        split = training_rows(table, fold).split(fold, inner_validation_share=share, seed=config.seed)
        targets = ", ".join(part["target"].drop_nulls().unique().sort())
        left_out = int((part["part"] == LEFT_OUT).sum())
        rows.append((fold, targets, split.train.height, split.validation.height, split.test.height, left_out))
    return pl.DataFrame(rows, schema=["fold", "target", *PARTS, LEFT_OUT], orient="row")


def left_out_table(table: pl.DataFrame) -> pl.DataFrame:
    """Return a table ``reason label videos groups`` that counts left-out and leaking videos by reason and label.

    A video that has the same reason in several trainings is counted once.
    """
    return (
        table.drop_nulls("reason")
        .group_by("reason", "label")
        .agg(videos=pl.col("video_id").n_unique(), groups=pl.col("group_id").n_unique())
        .sort("reason", "label")
    )


def official_leaks(index: pl.DataFrame) -> pl.DataFrame:
    """Return a table ``group_id train validation test paths`` of the groups that the official split divides.

    ``train``, ``validation`` and ``test`` are numbers of videos; ``paths`` names up to four of them. The table is
    empty if there is no official split.
    """
    counts = ((pl.col("official_split") == part).sum().cast(pl.Int64).alias(part) for part in PARTS)
    known = index.drop_nulls("official_split").sort("official_split", "path")
    known = known.group_by("group_id").agg(
        *counts, paths=pl.format("{} ({})", "path", "official_split").head(4).str.join(", ")
    )
    return known.filter(pl.sum_horizontal(pl.col(part) > 0 for part in PARTS) > 1).sort("group_id")
