"""The protocol of a run as a table: the part of every video in every training, checked before anything trains."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

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
from fvc_lib.corpus.protocols.cross_corpus import cross_corpus
from fvc_lib.corpus.protocols.generators import leave_one_generator_out
from fvc_lib.corpus.protocols.matched import Tells, matched, parts_of_folds
from fvc_lib.corpus.protocols.official import official
from fvc_lib.services import tasks as names
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, LeakageError
from fvc_lib.services.tables import FOLDS, LABELS, LEFT_OUT, PARTS, PROTOCOL, check_table

SAME_CONTENT = "the same file content as another corpus's, which takes part"
# Of several corpora a content may stand in each. A target is tested whole, and an official list as it was published;
# elsewhere a video counts once.
_CONTENTS_ONCE = (names.KFOLD, names.LEAVE_ONE_GENERATOR_OUT, names.LENGTH_MATCHED, names.METADATA_MATCHED)


def make_protocol(index: pl.DataFrame, config: RunConfig, tells: Tells) -> pl.DataFrame:
    """Return PROTOCOL: the part of every video of the index in every training of ``config.protocol``.

    The rows are sorted by training and video; the order of the index's does not matter.

    Args:
        index: INDEX schema.
        config: protocol, target_corpora, num_folds, and folds_seed or seed.
        tells: what columns of the index tell of the label; see ``matched.Tells``.

    Raises:
        DataError: the corpus cannot be divided so; the message says what it lacks.
        LeakageError: a group would be trained on and tested.
    """
    refuse_empty_index(index)
    name, num_folds, whole = config.protocol, config.num_folds, index
    if name in _CONTENTS_ONCE:
        index = whole.sort("video_id").unique("content_sha256", keep="first", maintain_order=True)
    seed = config.seed if config.folds_seed is None else config.folds_seed
    if name in (names.OFFICIAL, names.OFFICIAL_STRICT):
        rows = official(index, strict=name == names.OFFICIAL_STRICT)
    elif name == names.CROSS_CORPUS:
        rows = cross_corpus(index, config.target_corpora)
    elif name == names.LEAVE_ONE_GENERATOR_OUT:
        rows = leave_one_generator_out(index, num_folds, seed)
    elif name in (names.LENGTH_MATCHED, names.METADATA_MATCHED):
        rows = matched(index, name, num_folds, seed, tells)
    else:
        rows = parts_of_folds(index, make_folds(index, num_folds, seed), num_folds)
    copies = whole.join(index, on="video_id", how="anti").select("video_id", "group_id", "label")
    of_all = copies.join(rows.select("fold").unique(), how="cross").with_columns(
        part=pl.lit(LEFT_OUT), reason=pl.lit(SAME_CONTENT), target=pl.lit(None, pl.String)
    )
    rows = pl.concat(
        [each.select("video_id", "group_id", "label", "fold", "target", "part", "reason") for each in (rows, of_all)]
    )
    table = rows.with_columns(protocol=pl.lit(name)).select(*PROTOCOL.columns).sort("fold", "video_id")
    check_protocol(table, whole, config.num_trainings)
    return check_table(table, PROTOCOL, "protocol")


def refuse_untrainable(listing: Listing, config: RunConfig) -> None:
    """Raise ``DataError`` for corpora that cannot be trained on, by their listing alone.

    The index has these videos at most, and these groups at most, so it would be refused as well.

    Raises:
        DataError: no file to use, one label alone, too many files lost, or too few groups for the protocol.
    """
    if config.annotations_only:
        return
    videos = listed_videos(listing)
    refuse_unusable(listing, videos, listing.rejected, config.max_rejected_share)
    if config.protocol in (names.OFFICIAL, names.OFFICIAL_STRICT):
        official(videos, strict=False)
    elif config.protocol not in (names.CROSS_CORPUS, names.LEAVE_ONE_GENERATOR_OUT):
        refuse_few_groups(videos, config.num_folds)


def check_protocol(table: pl.DataFrame, index: pl.DataFrame, num_trainings: int) -> None:
    """Check that no group crosses parts, each training has every video, and no video is tested twice: the gate.

    The groups that the corpus's own split has in several parts pass under protocol ``official``, and no other.

    Raises:
        LeakageError: a group or video is on two sides of a training, or is tested twice.
        DataError: a training that is missing, forgets videos, or has a part of one label.
    """
    if sorted(table["fold"].unique()) != list(range(num_trainings)):
        raise DataError(f"protocol: got trainings {sorted(table['fold'].unique())}, wanted {num_trainings} from 0.")
    ids = index["video_id"].sort()
    for fold, rows in _by_training(table).items():
        used = training_rows(table, fold)
        sides = rows.filter(pl.col("part") != LEFT_OUT).select(
            "video_id",
            "group_id",
            "label",
            fold=pl.col("part").replace_strict({part: n for n, part in enumerate(PARTS)}),
        )
        check_folds(sides, used.leaking)
        if not rows["video_id"].sort().equals(ids):
            forgotten = set(ids) ^ set(rows["video_id"])
            raise DataError(
                f"protocol: training {fold} has not one row for each video, e.g. {some_of(sorted(forgotten))}."
            )
        for part in ("train", "test"):
            of_part = rows.filter(pl.col("part") == part)
            if lacking := [label for label in LABELS if label not in set(of_part["label"])]:
                of = ", ".join(sorted(of_part["target"].drop_nulls().unique())) or "all"
                left = rows.filter(pl.col("part") == LEFT_OUT).height
                raise DataError(
                    f"protocol: training {fold} (target: {of}) has {of_part.height} videos in its {part} part and none "
                    f"of them is {' or '.join(lacking)}; {left} of {rows.height} are left out. Add such videos, set "
                    "num_folds lower, or use another protocol."
                )
    twice = table.filter(pl.col("part") == "test").filter(pl.col("video_id").is_duplicated())
    if twice.height:
        raise LeakageError(f"protocol: videos are tested by several trainings: {some_of(twice['video_id'].to_list())}.")


def _by_training(table: pl.DataFrame) -> Mapping[int, pl.DataFrame]:
    return {int(key[0]): rows for key, rows in table.group_by("fold", maintain_order=True)}


def folds_tested(table: pl.DataFrame) -> pl.DataFrame:
    """Return FOLDS of the tested videos, sorted by ``video_id``."""
    return table.filter(pl.col("part") == "test").select(*FOLDS.columns).sort("video_id")


@dataclass(frozen=True)
class TrainingRows:
    """The rows that one training is split from.

    Attributes:
        folds: FOLDS of the videos that take part: those with the training's own number are tested.
        validation: ids of the corpus's own validation part; none: one is made of training groups.
        leaking: groups that the corpus's own split has in several parts.
    """

    folds: pl.DataFrame
    validation: frozenset[str] = field(default_factory=frozenset)
    leaking: frozenset[str] = field(default_factory=frozenset)

    def shuffled(self, seed: int) -> "TrainingRows":
        """Return the same rows with labels shuffled by group."""
        return replace(self, folds=shuffle_labels_by_group(self.folds, seed))

    def split(
        self, fold: int | None, *, inner_validation_share: float, seed: int, without: Collection[str] = ()
    ) -> FoldSplit:
        """Split into parts, ``without`` some videos; arguments and errors as of ``folds.split_for_fold``."""
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
    """Return the rows of training ``fold``; videos that it does not test get the number ``fold + 1``."""
    rows = table.filter((pl.col("fold") == fold) & (pl.col("part") != LEFT_OUT))
    number = pl.when(pl.col("part") == "test").then(fold).otherwise(fold + 1)
    leaking = rows.filter((pl.col("protocol") == names.OFFICIAL) & pl.col("reason").is_not_null())["group_id"]
    return TrainingRows(
        rows.with_columns(fold=number.cast(pl.Int64)).select(*FOLDS.columns).sort("video_id"),
        frozenset(rows.filter(pl.col("part") == "validation")["video_id"]),
        frozenset(leaking),
    )


def all_rows(table: pl.DataFrame) -> TrainingRows:
    """Return the rows of a training without a test: all videos that take part in any training of a PROTOCOL."""
    rows = table.filter(pl.col("part") != LEFT_OUT).unique("video_id").with_columns(fold=pl.lit(0, pl.Int64))
    return TrainingRows(rows.select(*FOLDS.columns).sort("video_id"))


def sentence(table: pl.DataFrame) -> str:
    """Return the protocol, its targets, and the number of videos without any part, in one line."""
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
    """Return numbers of videos per training: ``fold target train validation test left_out``.

    Raises:
        DataError: too few groups for a validation part.
    """
    rows = []
    for fold, part in _by_training(table).items():
        split = training_rows(table, fold).split(
            fold, inner_validation_share=config.inner_validation_share, seed=config.seed
        )
        targets = ", ".join(part["target"].drop_nulls().unique().sort())
        left_out = int((part["part"] == LEFT_OUT).sum())
        rows.append((fold, targets, split.train.height, split.validation.height, split.test.height, left_out))
    return pl.DataFrame(rows, schema=["fold", "target", *PARTS, LEFT_OUT], orient="row")


def left_out_table(table: pl.DataFrame) -> pl.DataFrame:
    """Return ``reason label videos groups`` of videos left out of a training, or leaking in an official split.

    A video is counted once for each reason, in however many trainings.
    """
    return (
        table.drop_nulls("reason")
        .group_by("reason", "label")
        .agg(videos=pl.col("video_id").n_unique(), groups=pl.col("group_id").n_unique())
        .sort("reason", "label")
    )


_A_FEW = pl.format("{} ({})", "path", "official_split").head(4).str.join(", ")


def official_leaks(index: pl.DataFrame) -> pl.DataFrame:
    """Return ``group_id train validation test paths`` of groups in several parts of the official split.

    Numbers of videos, and the paths of a few. Nothing where the corpus has no split of its own.
    """
    counts = ((pl.col("official_split") == part).sum().cast(pl.Int64).alias(part) for part in PARTS)
    known = index.drop_nulls("official_split").sort("official_split", "path")
    known = known.group_by("group_id").agg(*counts, paths=_A_FEW)
    return known.filter(pl.sum_horizontal(pl.col(part) > 0 for part in PARTS) > 1).sort("group_id")
