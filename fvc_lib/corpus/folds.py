"""Divide the videos of a corpus: into folds, into training and validation, or once into train, validation and test.

No split depends on the order of the rows. A leakage group (videos that show the same footage or come from the same
source) is never divided. Every part gets its share of every label.

Folds are balanced as well as whole groups allow. If no group has both labels, the numbers of real videos in two folds
differ by at most the size of the largest real group; likewise for fakes. If groups have both labels, no move or swap of
groups lowers the squared deviation from equal shares. ``balance_table`` shows the result.
"""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import numpy.typing as npt
import polars as pl

from fvc_lib.corpus.corpus_files import counts_text, some_of
from fvc_lib.corpus.index import refuse_empty_index
from fvc_lib.services.errors import DataError, LeakageError
from fvc_lib.services.tables import FOLDS, LABELS, PARTS, check_table

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_LACKS_A_CLASS = 1e4  # cost of a part without a class; more than all squared deviations together
_TINY = 1e-9  # a smaller improvement is rounding noise
_MOST_LISTED = 20
_SHARES = {"test": 0.2, "validation": 0.15}  # share of the groups without a part yet that this part gets
_COUNTS = [(pl.col("label") == label).sum().cast(pl.Int64).alias(label) for label in LABELS]  # numbers of videos
# Purposes of random generators. The purpose is part of the seed, so that no two purposes share random draws.
_OUTER, _INNER, _SHUFFLED, GENERATORS_DEALT, MATCHES_DRAWN = range(5)


# --- Assign whole groups to parts. Groups of one type (equal class counts) are handled together, which is fast for
# 100,000 groups.


def balance_groups(counts: IntArray, shares: FloatArray, generator: np.random.Generator) -> IntArray:
    """Choose a part (such as a fold) for every group, so that every part gets its share of every class.

    The sum of squared deviations from the shares, relative to the class totals, is made small. Groups are placed
    greedily, largest first. Then single groups are moved or swapped until no move or swap lowers the sum.

    Args:
        counts: number of videos (or rows) of C classes in G groups, int64 (G, C). Each class occurs in at least as many
            groups as there are parts.
        shares: wanted share of every class in each of P parts, (P,), positive, summing to 1.
        generator: decides only between groups with equal counts and between equally good parts.

    Returns:
        Number of the part of each group, 0 to P - 1, int64 (G,). Every part holds every class.
    """
    num_parts = len(shares)
    types, type_of = np.unique(counts, axis=0, return_inverse=True)
    # Type 0 is the empty group, of which every part has plenty: to move a group is to swap it with an empty one.
    types = np.vstack([np.zeros_like(types[:1]), types])
    type_of = type_of.reshape(-1) + 1
    totals = counts.sum(axis=0).astype(np.float64)
    targets = np.outer(shares, totals)

    def cost(load: FloatArray, part: int) -> FloatArray:
        deviation = (load - targets[part]) / totals
        num_lacking = (load < 0.5).sum(axis=-1)
        return np.asarray((deviation**2).sum(axis=-1) + _LACKS_A_CLASS * num_lacking)

    order = generator.permutation(num_parts)  # else the first of equally good parts would get every group
    sizes = np.bincount(type_of, minlength=len(types))
    placed = np.floor(np.outer(sizes, shares) + _TINY).astype(np.int64)  # (T, P): groups of each type in each part
    load = (placed.T @ types).astype(np.float64)
    for kind in np.argsort(-(types / totals).max(axis=1), kind="stable"):
        for _ in range(int(sizes[kind] - placed[kind].sum())):
            cost_without = [float(cost(load[part], part)) for part in order]
            cost_with = [float(cost(load[part] + types[kind], part)) for part in order]
            growth = np.subtract(cost_with, cost_without)
            part = order[int(np.argmin(np.round(growth, 12)))]
            placed[kind, part] += 1
            load[part] += types[kind]

    placed[0] = 1 << 40
    gain = (types[None, :, :] - types[:, None, :]).astype(np.float64)  # [t, u]: counts gained by giving t and taking u

    def best_swap(a: int, b: int) -> tuple[float, int, int, int, int]:
        change_of_a = cost(load[a] + gain, a) - cost(load[a], a)
        changed_b = cost(load[b] - gain, b)
        change = change_of_a + changed_b - cost(load[b], b)
        a_has = placed[:, a] > 0
        b_has = placed[:, b] > 0
        is_possible = a_has[:, None] & b_has
        change = np.where(is_possible, np.round(change, 10), np.inf)
        give, take = divmod(int(np.argmin(change)), len(types))
        return float(change[give, take]), give, take, a, b

    while True:
        load = (placed.T @ types).astype(np.float64)
        swaps = (best_swap(*pair) for pair in combinations(range(num_parts), 2))
        saving, give, take, a, b = min(swaps)
        if saving > -_TINY:
            break
        placed[give, [a, b]] += [-1, 1]
        placed[take, [a, b]] += [1, -1]
    parts = np.empty(len(type_of), dtype=np.int64)
    for kind in range(1, len(types)):
        groups = generator.permutation(np.flatnonzero(type_of == kind))
        parts[groups] = np.repeat(np.arange(num_parts), placed[kind])
    return parts


def _spread(count: int, size: int, generator: np.random.Generator) -> IntArray:
    """Return ``count`` evenly spaced indices in ``range(size)`` with a random offset, ascending, int64 (count,).

    This is systematic sampling (W. G. Cochran, "Sampling Techniques", 1977).
    """
    positions = (np.arange(count) + generator.random()) * size / max(count, 1)
    return np.floor(positions).astype(np.int64)


# --- Make folds, and the training, validation and test parts of one training.


@dataclass(frozen=True)
class FoldSplit:
    """The videos that one model is trained, validated and tested on, as three FOLDS tables.

    A FOLDS table has a row per video with its group, label and outer fold. The test part is one outer fold. The other
    folds are divided into training and validation. ``leaking`` names the groups that the corpus's own split divides.
    Only these groups may be in several parts.

    Raises:
        LeakageError: two parts share a video, or a group that is not ``leaking``.
    """

    train: pl.DataFrame
    validation: pl.DataFrame
    test: pl.DataFrame
    leaking: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        parts = zip(PARTS, (self.train, self.validation, self.test), strict=True)
        with_part = (rows.with_columns(part=pl.lit(part)) for part, rows in parts)
        _refuse_leaks(pl.concat(with_part), "part", self.leaking)


def make_folds(index: pl.DataFrame, num_folds: int, seed: int) -> pl.DataFrame:
    """Assign every video of the index to one outer fold.

    Args:
        index: table with the columns ``video_id``, ``group_id`` and ``label``; the order of rows does not matter.
        num_folds: number of folds, at least 2.
        seed: chooses between equally good assignments.

    Returns:
        FOLDS table sorted by ``video_id``; folds are 0 to ``num_folds - 1`` and each holds both labels.

    Raises:
        DataError: there are no videos, or a label occurs in fewer groups than there are folds.
    """
    videos = index.select("video_id", "group_id", "label").sort("video_id")
    refuse_empty_index(videos)
    refuse_few_groups(videos, num_folds)
    equal_shares = [1 / num_folds] * num_folds
    fold_of = _balanced(videos, equal_shares, np.random.default_rng([seed, _OUTER]))
    fold = pl.col("group_id").replace_strict(fold_of, return_dtype=pl.Int64)
    folds = videos.with_columns(fold=fold).select(*FOLDS.columns)
    check_folds(folds)
    return check_table(folds, FOLDS, "folds")


def _balanced(videos: pl.DataFrame, shares: Sequence[float], generator: np.random.Generator) -> dict[str, int]:
    """Choose a part for every group of ``videos``; return a mapping from group id to the number of the part.

    Parts are numbered from 0 to ``len(shares) - 1``. Every part gets about its share of the real and of the fake videos
    (``balance_groups``). ``generator`` chooses between equally good divisions.
    """
    groups = videos.group_by("group_id").agg(_COUNTS).sort("group_id")
    parts = balance_groups(groups.select(LABELS).to_numpy(), np.array(shares), generator)
    return dict(zip(groups["group_id"], parts.tolist(), strict=True))


def most_folds(index: pl.DataFrame) -> int:
    """Return the largest number of folds such that every fold can have both labels.

    It is the number of groups with a real video or the number of groups with a fake video, whichever is smaller. If it
    is below 2, ``make_folds`` cannot make folds of this index.
    """
    return min(index.filter(label=label)["group_id"].n_unique() for label in LABELS)


def refuse_few_groups(videos: pl.DataFrame, num_folds: int, groups: str = "groups") -> None:
    """Raise ``DataError`` if ``videos`` (columns group_id, label) have too few groups for ``num_folds`` folds.

    ``groups`` is the word for groups in the message.

    Raises:
        DataError: a label occurs in fewer groups than there are folds.
    """
    most = most_folds(videos)
    if most < num_folds:
        real, fake = (videos.filter(label=label)["group_id"].n_unique() for label in LABELS)
        raise DataError(
            f"num_folds: got {num_folds}, but the corpus has {videos['group_id'].n_unique()} {groups}: {real} with "
            f"real videos and {fake} with fake videos; every fold needs one of each. Set num_folds to at most {most} "
            "(2 is the least), or add videos of other events or sources."
        )


def check_folds(folds: pl.DataFrame, leaking: Collection[str] = ()) -> None:
    """Check that no group is in several folds, no video is listed twice and every video has a group.

    Args:
        folds: FOLDS table.
        leaking: groups that may be in several folds.

    Raises:
        LeakageError: a check fails; the message lists the ids.
    """
    has_no_group = pl.col("group_id").is_null() | (pl.col("group_id") == "")
    lonely = folds.filter(has_no_group)["video_id"]
    if len(lonely):
        raise LeakageError(f"{len(lonely)} videos have no group: {some_of(lonely.to_list())}. Build the index again.")
    _refuse_leaks(folds, "fold", leaking)


def _refuse_divided(rows: pl.DataFrame, column: str, leaking: Collection[str] = ()) -> None:
    """Raise ``LeakageError`` if rows of the same group (column ``group_id``) have different values in ``column``.

    ``column`` is the fold or the part. ``leaking`` names groups that are not checked.
    """
    may_leak = pl.col("group_id").is_in(sorted(leaking))
    groups = rows.filter(~may_leak).group_by("group_id")
    ends = groups.agg(first=pl.col(column).min(), last=pl.col(column).max())
    divided = ends.filter(pl.col("first") != pl.col("last")).sort("group_id")
    if divided.height:
        named = [f"{group!r} in {column}s {first}, {last}" for group, first, last in divided.iter_rows()]
        raise LeakageError(
            f"leakage: {divided.height} groups are in more than one {column}: {'; '.join(named[:_MOST_LISTED])}. Make "
            f"the folds again from the index; if the corpus states these {column}s, put each group into one of them."
        )


def _refuse_leaks(rows: pl.DataFrame, column: str, leaking: Collection[str]) -> None:
    _refuse_divided(rows, column, leaking)
    twice = rows.filter(pl.col("video_id").is_duplicated())["video_id"].unique().sort().to_list()
    if twice:
        raise LeakageError(f"leakage: {len(twice)} videos are listed twice: {some_of(twice)}. Make the folds again.")


def balance_table(folds: pl.DataFrame) -> pl.DataFrame:
    """Return the counts of each fold: a table ``fold videos groups real fake fake_share``, sorted by fold.

    ``real`` and ``fake`` are numbers of videos; ``fake_share`` is the share of fakes, 0 to 1.
    """
    num_videos = pl.len().cast(pl.Int64)
    num_groups = pl.col("group_id").n_unique().cast(pl.Int64)
    counts = folds.group_by("fold").agg(_COUNTS, videos=num_videos, groups=num_groups).sort("fold")
    return counts.select("fold", "videos", "groups", *LABELS, fake_share=pl.col("fake") / pl.col("videos"))


@dataclass(frozen=True)
class TrainingRows:
    """The videos of a training, before they are split into training, validation and test.

    Attributes:
        folds: FOLDS table of these videos; ``split`` makes one fold the test part.
        validation: ids of the videos in the corpus's own validation part. If it is empty, ``split`` takes some groups
            out of the training part and makes them the validation part.
        leaking: groups that the corpus's own split divides between parts.
    """

    folds: pl.DataFrame
    validation: frozenset[str] = frozenset()
    leaking: frozenset[str] = frozenset()

    def shuffled(self, seed: int) -> "TrainingRows":
        """Return a copy with labels permuted at random among the groups of each fold (``shuffle_labels_by_group``).

        A model that is trained on the copy must score at chance, unless the pipeline leaks.
        """
        return replace(self, folds=shuffle_labels_by_group(self.folds, seed))

    def split(
        self, fold: int | None, *, inner_validation_share: float, seed: int, without: Collection[str] = ()
    ) -> FoldSplit:
        """Use one outer fold as the test part, and split the other folds into training and inner validation.

        If the corpus has a validation part (``self.validation``), that part is used. Otherwise some of the remaining
        groups become the validation part. No group is divided, and both parts get their share of each label.

        Args:
            fold: the outer fold that becomes the test part; None: the test part is empty.
            inner_validation_share: share of each label's videos wanted in validation, in [0, 1); 0: validation is
                empty.
            seed: together with ``fold`` chooses between equally good splits.
            without: ids of videos that are left out of all parts.

        Raises:
            DataError: there is no such fold, a label occurs in fewer than two of the remaining groups, or a label is
                missing in the training or validation part of the official split.
            LeakageError: a group that is not in ``leaking`` is in several folds.
        """
        is_left_out = pl.col("video_id").is_in(sorted(without))
        rows = self.folds.filter(~is_left_out).sort("video_id")
        check_folds(rows, self.leaking)
        is_test = pl.lit(False) if fold is None else pl.col("fold") == fold
        test = rows.filter(is_test)
        rest = rows.filter(~is_test)
        if fold is None:
            fold = max(rows["fold"].to_list()) + 1
        elif not test.height:
            raise DataError(f"fold {fold}: no such fold; there are {sorted(rows['fold'].unique())}.")
        in_validation = pl.col("video_id").is_in(sorted(self.validation))
        if not rest.filter(in_validation).is_empty():
            for part, of_part in (("training", ~in_validation), ("validation", in_validation)):
                if lacking := sorted(set(LABELS) - set(rest.filter(of_part)["label"])):
                    raise DataError(
                        f"the corpus's own {part} part has no {some_of(lacking)} video. Train on folds instead: -p "
                        "protocol kfold."
                    )
        elif (fewest := most_folds(rest)) < 2:
            raise DataError(
                f"fold {fold}: a label is in {fewest} of the groups of the other folds; wanted at least 2 with each "
                "label, one to train on and one for inner validation. Raise num_folds, or add videos of other events."
            )
        elif inner_validation_share:
            shares = [1 - inner_validation_share, inner_validation_share]
            part_of = _balanced(rest, shares, np.random.default_rng([seed, _INNER, fold]))
            chosen = [group for group, part in part_of.items() if part == 1]
            in_validation = pl.col("group_id").is_in(chosen)
        return FoldSplit(rest.filter(~in_validation), rest.filter(in_validation), test, self.leaking)


# --- Divide rows once into train, validation and test, instead of folds.


@dataclass(frozen=True)
class PartSplit:
    """The result of dividing the rows of a table into the parts train, validation and test."""

    parts: tuple[str, ...]  # part of each row, train, validation or test, in the order of the rows
    sources: tuple[str, ...]  # ``official`` if the corpus itself states the part of the row, else ``made``
    notes: tuple[str, ...]  # sentences for the user, with the numbers of groups in official and in made parts

    def refuse_empty_parts(self) -> None:
        """Raise ``DataError`` if a part has no row: there are too few groups, or the official split leaves it empty."""
        if empty := [part for part in PARTS if part not in self.parts]:
            raise DataError(
                f"split: nothing is left for {' and '.join(empty)} ({counts_text(self.parts)}). Add files of other "
                "groups, or change the corpus's own split."
            )


def split_parts(
    groups: Sequence[str], strata: Sequence[str | None], official: Sequence[str | None], *, seed: int
) -> PartSplit:
    """Divide N rows into train, validation and test, so that no group is divided.

    Validation and test parts that the corpus states are not changed. All other groups begin in train. If the corpus
    states no test part, 20% of the groups in train become the test part. If it states no validation part, 15% of the
    groups that are left in train become the validation part.

    A stratum is a kind of rows, such as a class, that every part should hold. So the groups are drawn from each stratum
    separately: at least one group per part, evenly from the smallest to the largest groups. Groups that alone have more
    rows than the whole part should get are drawn only if there are not enough others. A stratum stays in train if its
    groups are too few for train and all missing parts. The result depends only on the rows, the group names and
    ``seed``.

    Args:
        groups: (N,), the group of each row.
        strata: (N,), the stratum of each row; None counts as a stratum. A group belongs to the stratum that most of its
            rows have.
        official: (N,), the part that the corpus states for each row, or None. A part that is stated for any row of a
            group holds for the whole group.
        seed: chooses between equally good splits.

    Raises:
        LeakageError: a group is in two parts of the official split; the groups are listed.
    """
    table = pl.DataFrame({"group_id": groups}).with_columns(
        # The prefix "=" makes sure that no stratum has the empty name, which stands for None.
        stratum=("=" + pl.Series(strata, dtype=pl.String)).fill_null(""),
        part=pl.Series(official, dtype=pl.String),
    )
    _refuse_divided(table.drop_nulls("part"), "part")
    own_part = pl.col("part").drop_nulls().first()
    table = table.group_by("group_id").agg(pl.len().alias("rows"), pl.col("stratum").mode().min(), own_part)
    table = table.sort("group_id")
    stated = table["part"].drop_nulls().to_list()
    table = table.with_columns(pl.col("part").fill_null("train"))
    part_of, rows_of = (dict(table.select("group_id", name).iter_rows()) for name in ("part", "rows"))
    missing = [part for part in _SHARES if part not in stated]
    free = table.filter(part="train")
    for (stratum,), of_stratum in free.group_by("stratum", maintain_order=True):
        left = sorted(of_stratum["group_id"], key=lambda group: (rows_of[group], _hash(seed, "order", group)))
        if len(left) <= len(missing):
            continue
        for number, part in enumerate(missing):
            share = _SHARES[part]
            # A group is still needed for train and for each part after this one.
            count = min(max(1, round(share * len(left))), len(left) - len(missing) + number)
            most_rows = max(share * sum(rows_of[group] for group in left), rows_of[left[0]])
            num_small = sum(rows_of[group] <= most_rows for group in left)  # these come first
            pool = left[: max(num_small, count)]
            places = _spread(count, len(pool), np.random.default_rng(_hash(seed, part, str(stratum))))
            part_of |= dict.fromkeys((pool[place] for place in places), part)
            left = [group for group in left if part_of[group] == "train"]
    notes = [f"The corpus's own split is kept: {counts_text(stated)} groups."] if stated else []
    if missing:
        notes.append(f"Divided by seed: {counts_text(part_of[group] for group in free['group_id'])} groups.")
    made = tuple(part_of[group] for group in groups)
    sources = tuple("official" if part == own else "made" for part, own in zip(made, official, strict=True))
    return PartSplit(made, sources, tuple(notes))


def _hash(seed: int, *parts: str) -> int:
    text = "\x1f".join((str(seed), *parts))
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()[:8], "big")


# --- Labels shuffled by group.


def shuffle_labels_by_group(folds: pl.DataFrame, seed: int) -> pl.DataFrame:
    """Return ``folds`` with labels permuted among the groups of each fold.

    A model that is trained on the result must score at chance, unless the pipeline leaks.

    All videos of a group get the same label. The number of fake groups in a fold stays the same. A group with both
    labels counts in part: as 0.25 fake groups if a quarter of its videos are fake. If the sum over a fold is not whole,
    it is rounded up or down at random.

    Labels are permuted within folds for two reasons. Every fold of at least two groups keeps both labels. And every
    fold keeps its share of fakes. A test fold with many fakes would leave few fakes for training, and so get low
    scores. Such folds would push pooled scores below chance.

    About the same share of the true reals and of the true fakes in a fold becomes fake (a balanced permutation,
    Southworth, Kim and Owen 2009). A plain permutation agrees with the true labels by chance in some folds. A network
    that recognises the true labels would then score above or below chance without any leak.

    Args:
        folds: FOLDS table.
        seed: seed of the permutation.

    Returns:
        FOLDS table sorted by ``video_id`` with the same groups and folds.
    """
    # A group that an official split divides between two parts gets the same label in both.
    home = folds.with_columns(pl.col("fold").min().over("group_id"))
    fake_share = (pl.col("label") == "fake").mean()
    groups = home.group_by("group_id", "fold").agg(fake_share=fake_share)
    generator = np.random.default_rng([seed, _SHUFFLED])
    drawn = []
    for members in groups.sort("fold", "group_id").partition_by("fold", maintain_order=True):
        shares = members["fake_share"].to_numpy()
        # Rounded up or down at random: else folds that consist of one group with both labels would all get one label.
        expected_fake = round(float(shares.sum()), 9)
        num_fake = int(np.floor(expected_fake + generator.random()))
        if len(shares) >= 2:
            num_fake = min(max(num_fake, 1), len(shares) - 1)
        # Fakes are spread evenly over the groups, which are sorted by true label and, within a label, at random.
        order = np.lexsort((generator.permutation(len(shares)), shares))
        is_fake = np.zeros(len(shares), np.bool_)
        is_fake[order[_spread(num_fake, len(shares), generator)]] = True
        label = pl.when(pl.Series(is_fake)).then(pl.lit("fake")).otherwise(pl.lit("real")).alias("label")
        drawn.append(members.select("group_id", label))
    shuffled = folds.sort("video_id").drop("label")
    shuffled = shuffled.join(pl.concat(drawn), on="group_id", how="left", maintain_order="left")
    return check_table(shuffled.select(*FOLDS.columns), FOLDS, "shuffled folds")
