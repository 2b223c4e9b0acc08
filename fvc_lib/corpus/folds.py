"""Outer folds, the inner validation split, and one split of a corpus: grouped, stratified.

Nothing here depends on the order of the rows.

Balance: where groups hold one label each, the number of videos of a label differs between any two folds by no more
than the largest group of that label: otherwise moving a group would have helped, and every helpful move was made. A
group is never divided, so nothing better can be promised. Groups that hold both labels tie the two numbers together;
there no move or swap of groups lowers the squared deviation (in 3,600 adversarial corpora a difference was never above
2.2 times the largest group). Usually it is far smaller (1 video on FVC-2018), and ``balance_table`` shows it.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import polars as pl

from fvc_lib.corpus.corpus_files import counts_text, some_of
from fvc_lib.corpus.index import refuse_empty_index
from fvc_lib.services.errors import DataError, LeakageError
from fvc_lib.services.tables import FOLDS, LABELS, PARTS, check_table

# --- Assign whole groups to parts so that every part gets its share of every class.
# Minimises the squared class-normalised deviation from the shares, with a part that lacks a class counted as far worse
# than any deviation: groups of one *type* (equal class counts) are first spread evenly, what is left over is placed
# greedily, largest first, and then single moves and pairwise swaps are made until none helps. scikit-learn's
# ``StratifiedGroupKFold`` is the greedy step alone; it may leave a part without a class. Working on types instead of
# groups keeps this fast for 100,000 groups.

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_LACKS_A_CLASS = 1e4  # more than all squared deviations together
VALIDATION_SHARE, TEST_SHARE = 0.15, 0.2  # of the groups, in a split into train, validation and test
_TINY = 1e-9  # a smaller improvement is rounding noise


@dataclass(frozen=True)
class _Objective:
    targets: FloatArray  # (P, C) class counts wanted in each part
    totals: FloatArray  # (C,)

    def cost(self, load: FloatArray, part: int) -> FloatArray:
        """Cost of ``part`` when it holds ``load`` (..., C): (...)."""
        deviation = (load - self.targets[part]) / self.totals
        return np.asarray((deviation**2).sum(axis=-1) + _LACKS_A_CLASS * (load < 0.5).sum(axis=-1))


def balance_groups(counts: IntArray, shares: FloatArray, generator: np.random.Generator) -> IntArray:
    """Choose a part for every group.

    Args:
        counts: class counts of each group, (G, C). Each class must occur in at least as many groups as there are
            parts; then a single move that covers one more class exists as long as some part lacks one.
        shares: share of every class wanted in each part, (P,), positive, summing to 1.
        generator: decides between groups with equal counts and between equal parts, nothing else.

    Returns:
        Part of each group, (G,). Every part holds every class.

    Raises:
        ValueError: a class occurs in fewer groups than there are parts.
    """
    if (np.count_nonzero(counts, axis=0) < len(shares)).any():
        raise ValueError(f"got classes in {np.count_nonzero(counts, axis=0)} groups, wanted at least {len(shares)}")
    types, type_of = np.unique(counts, axis=0, return_inverse=True)
    type_of = type_of.reshape(-1)
    totals = counts.sum(axis=0).astype(np.float64)
    objective = _Objective(np.outer(shares, totals), totals)
    # Which of two equal parts is served first must not always be the first one.
    order = generator.permutation(len(shares))
    sizes = np.bincount(type_of, minlength=len(types))
    # (T, P): how many groups of each type each part has; first the whole number that it is due at least.
    placed = np.floor(np.outer(sizes, shares) + _TINY).astype(np.int64)
    _place_rest(types, sizes, placed, objective, order)
    _improve(types, placed, objective)
    parts = np.empty(len(type_of), dtype=np.int64)
    for kind, row in enumerate(placed):
        groups = np.flatnonzero(type_of == kind)
        parts[generator.permutation(groups)] = np.repeat(np.arange(len(shares)), row)
    return parts


def _place_rest(types: IntArray, sizes: IntArray, placed: IntArray, objective: _Objective, order: IntArray) -> None:
    """Place what is left over where it costs least, groups that weigh most first; changes ``placed``."""
    load = (placed.T @ types).astype(np.float64)
    weight = (types / objective.totals).max(axis=1)
    for kind in np.lexsort((np.arange(len(types)), -weight)):
        for _ in range(int(sizes[kind] - placed[kind].sum())):
            growth = [
                float(objective.cost(load[part] + types[kind], part) - objective.cost(load[part], part))
                for part in order
            ]
            part = order[int(np.argmin(np.round(growth, 12)))]
            placed[kind, part] += 1
            load[part] += types[kind]


def _improve(types: IntArray, placed: IntArray, objective: _Objective) -> None:
    """Make the best move or swap between two parts until none helps; changes ``placed``.

    A move is a swap with the empty group, which every part has at hand. Each step lowers the cost, so this ends.
    """
    types = np.vstack([np.zeros_like(types[:1]), types])
    num_parts = placed.shape[1]
    # gain[t, u]: what a part's load changes by when it gives a group of type t and gets one of type u
    gain = (types[None, :, :] - types[:, None, :]).astype(np.float64)
    pairs = [(a, b) for a in range(num_parts) for b in range(a + 1, num_parts)]
    best: dict[tuple[int, int], tuple[float, int, int]] = {}
    while True:
        load = (placed.T @ types[1:]).astype(np.float64)
        has = np.vstack([np.ones((1, num_parts), dtype=bool), placed > 0])
        for a, b in pairs:
            if (a, b) not in best:
                best[a, b] = _best_swap(gain, load, has, (a, b), objective)
        pair = min(pairs, key=best.__getitem__)
        saving, give, take = best[pair]
        if saving > -_TINY:
            return
        for part, lost, got in ((pair[0], give, take), (pair[1], take, give)):
            if lost:
                placed[lost - 1, part] -= 1
            if got:
                placed[got - 1, part] += 1
        best = {key: value for key, value in best.items() if not set(key) & set(pair)}


def _best_swap(
    gain: FloatArray, load: FloatArray, has: npt.NDArray[np.bool_], pair: tuple[int, int], objective: _Objective
) -> tuple[float, int, int]:
    """Cost change of the best swap between two parts, the type the first gives and the type it gets."""
    a, b = pair
    change = (
        objective.cost(load[a] + gain, a)
        - objective.cost(load[a], a)
        + objective.cost(load[b] - gain, b)
        - objective.cost(load[b], b)
    )
    change = np.where(has[:, a][:, None] & has[:, b][None, :], np.round(change, 10), np.inf)
    give, take = divmod(int(np.argmin(change)), change.shape[1])
    return float(change[give, take]), give, take


# What a generator is for; part of its seed, so that no two purposes share draws.
_OUTER, _INNER, _SHUFFLED, GENERATORS_DEALT, MATCHES_DRAWN = range(5)

_MOST_LISTED = 20


@dataclass(frozen=True)
class FoldSplit:
    """FOLDS rows of one outer fold: train and validation from the other folds, test from this one.

    ``leaking`` are groups that the corpus's own split has in several parts, counted and named.

    Raises:
        LeakageError: two parts share a video, or another group.
    """

    train: pl.DataFrame
    validation: pl.DataFrame
    test: pl.DataFrame
    leaking: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        parts = pl.concat(
            frame.with_columns(pl.lit(name).alias("part"))
            for name, frame in (("train", self.train), ("validation", self.validation), ("test", self.test))
        )
        _refuse_shared(_without(parts, self.leaking), "group_id", "part")
        _refuse_shared(parts, "video_id", "part")


def _without(rows: pl.DataFrame, groups: Collection[str]) -> pl.DataFrame:
    return rows.filter(~pl.col("group_id").is_in(sorted(groups))) if groups else rows


def make_folds(index: pl.DataFrame, num_folds: int, seed: int) -> pl.DataFrame:
    """Assign every video of the index to one outer fold.

    Args:
        index: table with ``video_id``, ``group_id`` and ``label``, in any order.
        num_folds: at least 2.
        seed: chooses between equally good assignments.

    Returns:
        FOLDS table sorted by ``video_id``; folds are 0 to ``num_folds - 1`` and each holds both labels.

    Raises:
        DataError: no videos, fewer groups than folds, or a label in fewer groups than folds.
    """
    videos = index.select("video_id", "group_id", "label").sort("video_id")
    refuse_empty_index(videos)
    refuse_few_groups(videos, num_folds)
    groups = _group_counts(videos)
    shares = np.full(num_folds, 1 / num_folds)
    matrix = groups.select(*LABELS).to_numpy()
    fold_of_group = balance_groups(matrix, shares, np.random.default_rng([seed, _OUTER]))
    assigned = groups.select("group_id", pl.Series("fold", fold_of_group, dtype=pl.Int64))
    folds = videos.join(assigned, on="group_id", how="left", maintain_order="left").select(*FOLDS.columns)
    check_folds(folds)
    return check_table(folds, FOLDS, "folds")


def most_folds(index: pl.DataFrame) -> int:
    """Return the largest number of folds that ``make_folds`` can make of these rows; below 2 it can make none."""
    groups = _group_counts(index)
    return min(int((groups[label] > 0).sum()) for label in LABELS)


def check_folds(folds: pl.DataFrame, leaking: Collection[str] = ()) -> None:
    """Check that no group and no video is in several folds, except ``leaking`` groups: the leakage gate.

    Raises:
        LeakageError: a group or a video is in more than one fold, or a video has no group; the ids are listed.
    """
    lonely = folds.filter(pl.col("group_id").is_null() | (pl.col("group_id") == ""))
    if lonely.height:
        raise LeakageError(
            f"{lonely.height} videos have no group: {some_of(lonely['video_id'].to_list())}. Build the index again."
        )
    _refuse_shared(_without(folds, leaking), "group_id", "fold")
    _refuse_shared(folds, "video_id", "fold")


def balance_table(folds: pl.DataFrame) -> pl.DataFrame:
    """Return ``fold videos groups real fake fake_share``, sorted by fold."""
    return (
        folds.group_by("fold")
        .agg(
            pl.len().cast(pl.Int64).alias("videos"),
            pl.col("group_id").n_unique().cast(pl.Int64).alias("groups"),
            *((pl.col("label") == label).sum().cast(pl.Int64).alias(label) for label in LABELS),
        )
        .with_columns((pl.col("fake") / pl.col("videos")).alias("fake_share"))
        .sort("fold")
    )


def split_for_fold(
    folds: pl.DataFrame,
    fold: int | None,
    *,
    inner_validation_share: float,
    seed: int,
    validation: Collection[str] = (),
    leaking: Collection[str] = (),
) -> FoldSplit:
    """Split one outer fold's other groups into training and inner validation, grouped and stratified.

    Args:
        folds: FOLDS table.
        fold: the outer fold, which becomes the test part; None: nothing is tested.
        inner_validation_share: share of each label's videos wanted in validation, in (0, 1).
        seed: with ``fold`` chooses between equally good splits.
        validation: the videos of the corpus's own validation part, which is taken as it is; none: one is made.
        leaking: groups that the corpus's own split has in several parts.

    Raises:
        DataError: no such fold, a label in fewer than two of the training groups, or one without which the corpus's own
            validation part is.
        LeakageError: the folds share other groups.
    """
    check_folds(folds, leaking)
    is_test = pl.lit(False) if fold is None else pl.col("fold") == fold
    test, rest = folds.filter(is_test).sort("video_id"), folds.filter(~is_test).sort("video_id")
    number = int(folds["fold"].max()) + 1 if fold is None else fold  # type: ignore[arg-type]
    if fold is not None and not test.height:
        raise DataError(f"fold {fold}: no such fold; there are {sorted(folds['fold'].unique())}.")
    if validation:
        own = pl.col("video_id").is_in(sorted(validation))
        for part, rows in (("training", rest.filter(~own)), ("validation", rest.filter(own))):
            if lacking := sorted(set(LABELS) - set(rows["label"])):
                raise DataError(
                    f"the corpus's own {part} part has no {' and no '.join(lacking)} videos, of {rows.height}. "
                    f"Train on folds instead: -p protocol kfold."
                )
        return FoldSplit(rest.filter(~own), rest.filter(own), test, frozenset(leaking))
    groups = _group_counts(rest)
    matrix = groups.select(*LABELS).to_numpy()
    few = [
        f"{n} with {label} videos" for label, n in zip(LABELS, np.count_nonzero(matrix, axis=0), strict=True) if n < 2
    ]
    if few:
        raise DataError(
            f"fold {number}: the other folds hold {groups_text(len(groups))}, {' and '.join(few)}; wanted at least "
            "2 with each label, one to train on and one for inner validation. Raise num_folds so that more groups stay "
            "for training, or add videos of other events."
        )
    shares = np.array([1 - inner_validation_share, inner_validation_share])
    part_of_group = balance_groups(matrix, shares, np.random.default_rng([seed, _INNER, number]))
    in_validation = pl.col("group_id").is_in(groups["group_id"].filter(pl.Series(part_of_group == 1)).implode())
    return FoldSplit(rest.filter(~in_validation), rest.filter(in_validation), test, frozenset(leaking))


def _group_counts(videos: pl.DataFrame) -> pl.DataFrame:
    """Return ``group_id`` and the number of videos of each label, sorted by ``group_id``."""
    return (
        videos.group_by("group_id")
        .agg(*((pl.col("label") == label).sum().cast(pl.Int64).alias(label) for label in LABELS))
        .sort("group_id")
    )


def groups_text(count: int) -> str:
    """Return ``1 group``, ``2 groups``."""
    return f"{count:,} group{'s' * (count != 1)}"


def refuse_few_groups(videos: pl.DataFrame, num_folds: int) -> None:
    """Raise ``DataError`` if ``make_folds`` cannot give every fold both labels.

    Raises:
        DataError: fewer groups than folds, or a label in fewer groups than folds.
    """
    groups = _group_counts(videos)
    with_label = {label: int((groups[label] > 0).sum()) for label in LABELS}
    most = min(with_label.values())
    if min(groups.height, most) >= num_folds:
        return
    got = " and ".join(f"{count} with {label} videos" for label, count in with_label.items())
    rarer = min(with_label, key=lambda label: with_label[label])
    add = f"add {rarer} videos of other events: each brings a group"
    remedy = (
        f"Set num_folds to at most {most}, or {add}."
        if most >= 2
        else f"Fewer folds do not help, since the least are two; {add}."
    )
    raise DataError(
        f"num_folds: got {num_folds}, but the corpus has {groups_text(groups.height)}, {got}; wanted a group with real "
        f"and one with fake videos for every fold. {remedy}"
    )


def _refuse_shared(frame: pl.DataFrame, column: str, part: str) -> None:
    # Only what is shared is sorted: a million ids take twenty times as long as a hundred thousand.
    rows_of = frame.group_by(column).agg(pl.col(part).n_unique().alias("parts"), pl.len().alias("rows"))
    several = rows_of.filter(pl.col("parts") > 1)
    shared = frame.join(several, on=column, how="semi").group_by(column).agg(pl.col(part).unique().sort()).sort(column)
    if shared.height:
        found = [
            f"{name!r} in {part}s {', '.join(map(str, values))}"
            for name, values in shared.select(column, part).iter_rows()
        ]
        raise LeakageError(
            f"leakage: {shared.height} {column}s are in more than one {part}: {_listed(found)}. "
            "Make the folds again from the index."
        )
    if column == "video_id" and rows_of.height < frame.height:
        twice = rows_of.filter(pl.col("rows") > 1)["video_id"].sort()
        raise LeakageError(
            f"leakage: {len(twice)} videos are listed twice: {some_of(twice.to_list())}. Make the folds again."
        )


def _listed(found: Sequence[str]) -> str:
    more = [f"and {len(found) - _MOST_LISTED} more"] if len(found) > _MOST_LISTED else []
    return "; ".join([*found[:_MOST_LISTED], *more])


# --- One split into train, validation and test instead of folds: even in every stratum, official where given.
# The corpus's own parts stay. A missing part is cut from the groups that are its training part or
# have no part: so an official train and test leave the test alone and give validation a share of the training groups,
# and a corpus without any split is divided in three. Which group goes where is drawn from stable hashes of the groups'
# names, so it depends on no order, path, or number of processes.


@dataclass(frozen=True)
class PartSplit:
    """The part of each row."""

    parts: tuple[str, ...]  # ``train``, ``validation`` or ``test`` of each row, in the order of the rows
    sources: tuple[str, ...]  # ``official`` where a row is in the part that its corpus says, else ``made``
    notes: tuple[str, ...]  # sentences about what was made, with counts

    @property
    def empty_parts(self) -> tuple[str, ...]:
        """Parts that no row is in: there were fewer groups than parts, or the official split names no such row."""
        return tuple(part for part in PARTS if part not in self.parts)


@dataclass
class _Group:
    """The rows of a group, summarised."""

    num_rows: int = 0
    strata: Counter[str] = field(default_factory=Counter)
    official: set[str] = field(default_factory=set)

    @property
    def stratum(self) -> str:
        """Most frequent stratum of its rows; the first by name of equally frequent ones."""
        return min(self.strata, key=lambda name: (-self.strata[name], name))


def split_parts(
    groups: Sequence[str],
    strata: Sequence[str | None],
    official: Sequence[str | None],
    *,
    validation_share: float = VALIDATION_SHARE,
    test_share: float = TEST_SHARE,
    seed: int,
) -> PartSplit:
    """Put N rows into parts so that no group is in two and every stratum is in all of them.

    A stratum gives each part that is made its share of the stratum's groups, rounded, and at least one; they are taken
    evenly over the groups' sizes, but for groups that alone exceed the part's share of the rows, which are trained on.
    A stratum with fewer groups than parts to fill stays in train, unless a part would have no group at all. Systematic
    sampling over a sorted list: W. G. Cochran, "Sampling Techniques" (1977), chapter 8.

    Args:
        groups: (N,), what must stay together.
        strata: (N,), the class or whatever else is to be spread evenly; None is a stratum like others. A group counts
            as the stratum that most of its rows have.
        official: (N,), the part the corpus says, or None. A group with one stated part has it for all rows.
        validation_share: share in (0, 1) of the groups left after the test part.
        test_share: share in (0, 1) of the groups that are to be divided.
        seed: chooses between equally good splits.

    Raises:
        DataError: no rows, or an official part of another name.
        LeakageError: a group is in two parts of the official split; the groups are listed.
        ValueError: arguments of different lengths.
    """
    found = _gather(groups, strata, official)
    _refuse_straddling(found)
    stated = {name: next(iter(group.official)) for name, group in found.items() if group.official}
    missing = [part for part in ("test", "validation") if part not in stated.values()]
    shares = {"test": test_share, "validation": validation_share}
    part_of = {name: stated.get(name, "train") for name in found}
    free = sorted(name for name, part in part_of.items() if part == "train")
    rare = _cut(found, free, part_of, {part: shares[part] for part in missing}, seed)
    _fill_empty(found, free, part_of, missing, seed)
    parts = tuple(part_of[group] for group in groups)
    sources = tuple("official" if part == own else "made" for part, own in zip(parts, official, strict=True))
    return PartSplit(parts, sources, tuple(_notes(part_of, stated, missing, rare)))


def _gather(groups: Sequence[str], strata: Sequence[str | None], official: Sequence[str | None]) -> dict[str, _Group]:
    if not groups:
        raise DataError("a split of no rows: got nothing to divide, wanted at least one group. See what was rejected.")
    unknown = sorted({own for own in official if own is not None} - set(PARTS))
    if unknown:
        raise DataError(f"official split: got the part {unknown[0]!r}, wanted {', '.join(PARTS)} or nothing.")
    found: defaultdict[str, _Group] = defaultdict(_Group)
    for name, stratum, own in zip(groups, strata, official, strict=True):
        group = found[name]
        group.num_rows += 1
        group.strata["" if stratum is None else f"={stratum}"] += 1  # None is no name that a stratum could have
        if own is not None:
            group.official.add(own)
    return dict(found)


def _refuse_straddling(found: dict[str, _Group]) -> None:
    both = sorted(name for name, group in found.items() if len(group.official) > 1)
    if both:
        shown = _listed([f"{name!r} in {' and '.join(sorted(found[name].official))}" for name in both])
        raise LeakageError(
            f"leakage: the official split divides {groups_text(len(both))}: {shown}. Put each of them into one "
            "part, or leave the split away so that one is made."
        )


def _cut(
    found: dict[str, _Group], free: Iterable[str], part_of: dict[str, str], shares: dict[str, float], seed: int
) -> list[str]:
    """Move groups of ``free`` into the parts of ``shares``, stratum by stratum; returns strata too small for that."""
    by_stratum: defaultdict[str, list[str]] = defaultdict(list)
    for name in free:
        by_stratum[found[name].stratum].append(name)
    rare = []
    for stratum in sorted(by_stratum):
        names = by_stratum[stratum]
        if len(names) <= len(shares):
            rare.append(stratum)
            continue
        left = sorted(names, key=lambda name: (found[name].num_rows, _hash(seed, "order", name)))
        for number, (part, share) in enumerate(shares.items()):
            still_needed = len(shares) - number  # a group for train and for each part after this one
            count = min(max(1, round(share * len(left))), len(left) - still_needed)
            chosen = set(_chosen(found, left, share, count, _hash(seed, part, stratum)))
            part_of.update(dict.fromkeys(chosen, part))
            left = [name for name in left if name not in chosen]
    return rare


def _chosen(found: dict[str, _Group], ordered: list[str], share: float, count: int, seed: int) -> list[str]:
    """``count`` groups spread evenly over ``ordered`` (by size), without oversized ones where others suffice."""
    most_rows = max(share * sum(found[name].num_rows for name in ordered), found[ordered[0]].num_rows)
    fitting = [name for name in ordered if found[name].num_rows <= most_rows]
    pool = fitting if len(fitting) >= count else ordered[:count]
    places = np.floor((np.arange(count) + np.random.default_rng(seed).random()) * len(pool) / count).astype(int)
    return [pool[place] for place in places]


def _fill_empty(
    found: dict[str, _Group], free: Iterable[str], part_of: dict[str, str], missing: Iterable[str], seed: int
) -> None:
    """Where every stratum was too small, give an empty part one group of the stratum that has most left in train."""
    for part in missing:
        training = [name for name in free if part_of[name] == "train"]
        if part in part_of.values() or len(training) < 2:
            continue
        left = Counter(found[name].stratum for name in training)
        chosen = min(training, key=lambda name: (-left[found[name].stratum], _hash(seed, part, name)))
        part_of[chosen] = part


def _notes(
    part_of: dict[str, str], stated: dict[str, str], missing: Sequence[str], rare: Sequence[str]
) -> Iterable[str]:
    if stated:
        yield f"The corpus's own split is kept: {counts_text(stated.values())} groups."
    if missing:
        made = {part: groups_text(sum(each == part for each in part_of.values())) for part in missing}
        yield f"Made by seed: {' and '.join(f'{part} ({size})' for part, size in made.items())}."
    elif len(stated) < len(part_of):
        yield f"{len(part_of) - len(stated):,} groups without an official part are trained on."
    if rare:
        names = some_of([name[1:] or "without a class" for name in rare])
        yield f"{len(rare)} strata have too few groups for every part and are trained on: {names}."


def _hash(seed: int, *parts: str) -> int:
    text = "\x1f".join((str(seed), *parts))
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()[:8], "big")


# --- Labels shuffled by group.


def shuffle_labels_by_group(folds: pl.DataFrame, seed: int) -> pl.DataFrame:
    """Permute labels among the groups of each fold, so that an honest pipeline scores at chance.

    All videos of a group get one label. A fold with groups of one label each keeps its number of real and fake
    groups, so it is a permutation; groups with both labels count as the fraction that is fake, and the sum is
    rounded. Permuting within folds keeps both labels in every fold of at least two groups, and keeps a fold's test
    labels from being the complement of its training labels, which would push pooled scores below chance.

    In every fold the new labels are spread evenly over the old ones (a balanced permutation, Southworth, Kim and Owen
    2009). A plain one agrees with the true labels by chance, more in one fold and less in another, and a network that
    can tell the true labels then scores away from chance, either way, without any leak. How much narrower the balanced
    one scatters was not measured: over six of them the AUC still had a standard deviation of 0.09.

    Returns:
        FOLDS table sorted by ``video_id`` with the same groups and folds.
    """
    # A group that an official split has in two parts gets one label for both.
    home = folds.with_columns(pl.col("fold").min().over("group_id"))
    groups = home.group_by("group_id", "fold").agg((pl.col("label") == "fake").mean().alias("fake_share"))
    generator = np.random.default_rng([seed, _SHUFFLED])
    drawn = []
    for members in groups.sort("fold", "group_id").partition_by("fold", maintain_order=True):
        labels = _draw_labels(members["fake_share"].to_numpy(), generator)
        drawn.append(members.select("group_id", pl.Series("label", labels, dtype=pl.String)))
    table = pl.concat(drawn)
    shuffled = folds.sort("video_id").drop("label").join(table, on="group_id", how="left", maintain_order="left")
    return check_table(shuffled.select(*FOLDS.columns), FOLDS, "shuffled folds")


def _draw_labels(fake_shares: FloatArray, generator: np.random.Generator) -> list[str]:
    num_groups = len(fake_shares)
    # Half-way sums go up or down by chance, so that folds of one mixed group are not all of one label.
    num_fake = int(np.floor(round(float(fake_shares.sum()), 9) + generator.random()))
    if num_groups >= 2:
        num_fake = min(max(num_fake, 1), num_groups - 1)
    # Systematic sampling over the groups in the order of their old labels, equal ones in random order.
    order = np.lexsort((generator.permutation(num_groups), fake_shares))
    drawn = np.floor((np.arange(num_fake) + generator.random()) * num_groups / max(num_fake, 1)).astype(int)
    fakes = set(order[drawn].tolist())
    return ["fake" if group in fakes else "real" for group in range(num_groups)]
