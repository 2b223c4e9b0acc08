"""``leave_one_generator_out``: every generator's fakes are tested by networks that have seen none of that generator.

Each group is dealt to one fold, once, and each fold has one generator as its target. Of the groups dealt to it a fold
tests the reals and its target's fakes; it trains on the other groups, without its target's fakes. So every video is
tested at most once, reals included, and what holds for folds holds here: results of two folds share no tested group.
(Testing the same held-out reals against each generator would make those results depend on one another, and test a fifth
of the reals instead of all.) Videos that a fold may neither train on nor test are left out of it, with the reason.

Names are one where they differ in case or in what is no letter or digit. A name joined of several by ``+`` is of a fake
that several made, one after the other (``faceswap+wav2lip``): what shares one of them with the target trains nothing.

Where there are more folds than generators, those with most groups are tested in several. Where there are fewer folds,
the generators with most groups are tested; the rest train, and are named.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
import polars as pl

from fvc_lib.corpus.corpus_files import some_of
from fvc_lib.corpus.folds import GENERATORS_DEALT
from fvc_lib.services.errors import DataError
from fvc_lib.services.tables import LEFT_OUT

UNKNOWN = "what made it is not known, so it may be what is held out"
HELD_OUT = "made by the generator held out, and its group is not tested here"
SHARES = "made by the generator held out together with another, or by a part of what is held out"
OTHER = "its group is tested here, and it is not made by the generator held out"
FEWEST_GROUPS = 2
_SHORTEST_ALIKE = 3  # letters; shorter names lie in others by chance


def generator_of(index: pl.DataFrame) -> pl.DataFrame:
    """Return ``video_id group_id label generator parts``, by video; the manipulation replaces a missing generator.

    It is called by its most frequent spelling; ``parts`` are the plain names of all that made the fake.
    """
    videos = _as_named(index)
    found = (
        videos.drop_nulls("generator")["generator"]
        .value_counts()
        .sort(["count", "generator"], descending=[True, False])
    )
    called: dict[tuple[str, ...], str] = {}
    for name in found["generator"]:
        called.setdefault(_parts(name), name)
    names = found["generator"].to_list()
    return videos.with_columns(
        generator=pl.col("generator").replace_strict({each: called[_parts(each)] for each in names}, default=None),
        parts=pl.col("generator").replace_strict(
            {each: list(_parts(each)) for each in names}, default=None, return_dtype=pl.List(pl.String)
        ),
    )


def _as_named(index: pl.DataFrame) -> pl.DataFrame:
    made = pl.coalesce("generator", "manipulation") if "generator" in index.columns else pl.col("manipulation")
    return index.select(
        "video_id", "group_id", "label", generator=pl.when(pl.col("label") == "fake").then(made)
    ).sort("video_id")  # fmt: skip


def _parts(name: str) -> tuple[str, ...]:
    """Return the plain names joined in ``name``, sorted: letters and digits in one case."""
    plain = ("".join(filter(str.isalnum, part.casefold())) for part in name.split("+"))
    return tuple(sorted({each for each in plain if each})) or (name,)


def alike_names(index: pl.DataFrame) -> list[str]:
    """Return notes on spellings taken for one generator, and on generators of which one name contains the other."""
    spelled = defaultdict(list)
    for name in _as_named(index)["generator"].drop_nulls().unique().sort():
        spelled[_parts(name)].append(name)
    notes = [f"Taken for one generator: {', '.join(map(repr, names))}." for names in spelled.values() if len(names) > 1]
    plain = {parts[0]: names[0] for parts, names in spelled.items() if len(parts) == 1}
    near = [
        f"{plain[one]!r} and {plain[other]!r}"
        for one, other in combinations(sorted(plain, key=len), 2)
        if len(one) >= _SHORTEST_ALIKE and one in other
    ]
    if near:
        notes.append(
            f"Names alike that count as different generators: {'; '.join(near)}. If they are one, or one builds on the "
            "other, give them one name in a manifest's column generator."
        )
    return notes


def held_out(index: pl.DataFrame, num_folds: int) -> list[str]:
    """Return the target of each fold: the most frequent generators first, some several times if folds are left.

    Raises:
        DataError: fewer than two generators, or too few groups for the number of folds.
    """
    fakes = generator_of(index).drop_nulls("generator")
    counts = dict(fakes.group_by("generator").agg(pl.col("group_id").n_unique()).sort("generator").iter_rows())
    usable = {name: count for name, count in counts.items() if count >= FEWEST_GROUPS}
    if len(counts) < 2 or not usable:
        raise DataError(
            f"protocol leave_one_generator_out: got {len(counts)} generators ({some_of(sorted(counts)) or 'none'}), "
            f"{len(usable)} of them with {FEWEST_GROUPS} groups or more; wanted at least two, one of them with so "
            "many. Name what made each fake in a manifest's column generator, or use -p protocol kfold."
        )
    most = sorted(usable, key=lambda name: (-usable[name], name))[:num_folds]
    folds = dict.fromkeys(most, 1)
    while sum(folds.values()) < num_folds:
        free = [name for name in most if folds[name] < usable[name]]
        if not free:
            raise DataError(
                f"num_folds: got {num_folds}, but the generators have {sum(usable.values())} groups of fakes to test. "
                f"Set it to {len(most)}, one fold for each of them: {', '.join(most)}."
            )
        name = max(free, key=lambda each: (usable[each] / folds[each], -most.index(each)))
        folds[name] += 1
    return [name for name in most for _ in range(folds[name])]


def leave_one_generator_out(index: pl.DataFrame, num_folds: int, seed: int) -> pl.DataFrame:
    """Return ``video_id group_id label fold target part reason``, one row per video and fold.

    Raises:
        DataError: as ``held_out``, or fewer groups with real videos than folds.
    """
    targets = held_out(index, num_folds)
    videos = generator_of(index)
    fold_of_group = _deal(videos, targets, seed)
    home = videos["group_id"].replace_strict(fold_of_group, return_dtype=pl.Int64)
    is_real, unknown = pl.col("label") == "real", (pl.col("label") == "fake") & pl.col("generator").is_null()
    parts = []
    for fold, target in enumerate(targets):
        is_target, here = (pl.col("generator") == target).fill_null(value=False), pl.col("home") == fold
        shares = pl.col("parts").list.set_intersection(list(_parts(target))).list.len().fill_null(0) > 0
        reason = (
            pl.when(unknown).then(pl.lit(UNKNOWN))
            .when(here & ~is_real & ~is_target).then(pl.lit(OTHER))
            .when(~here & is_target).then(pl.lit(HELD_OUT))
            .when(~here & shares).then(pl.lit(SHARES))
        )  # fmt: skip
        part = pl.when(here).then(pl.lit("test")).otherwise(pl.lit("train"))
        rows = videos.with_columns(home=home).with_columns(reason=reason, fold=pl.lit(fold, pl.Int64))
        parts.append(
            rows.with_columns(
                part=pl.when(pl.col("reason").is_null()).then(part).otherwise(pl.lit(LEFT_OUT)), target=pl.lit(target)
            ).select("video_id", "group_id", "label", "fold", "target", "part", "reason")
        )
    return pl.concat(parts)


def _deal(videos: pl.DataFrame, targets: Sequence[str], seed: int) -> Mapping[str, int]:
    """Deal groups to folds: a group goes to a fold of one of its generators, and reals are spread evenly.

    Groups with most videos first; each goes to the fold that has least of what the group has.
    """
    groups = videos.group_by("group_id").agg(
        reals=(pl.col("label") == "real").sum(), made=pl.col("generator").drop_nulls().unique(), size=pl.len()
    )
    with_reals = groups.filter(pl.col("reals") > 0).height
    if with_reals < len(targets):
        raise DataError(
            f"num_folds: got {len(targets)}, but the index has {with_reals} groups with real videos; wanted one for "
            "each fold. Set num_folds lower, or add real videos of other events: each brings a group."
        )
    generator = np.random.default_rng([seed, GENERATORS_DEALT])
    drawn = dict(zip(groups["group_id"].sort(), generator.permutation(groups.height).tolist(), strict=True))
    allowed = defaultdict(list)
    for fold, target in enumerate(targets):
        allowed[target].append(fold)
    every = range(len(targets))
    reals, fakes = np.zeros(len(targets)), np.zeros(len(targets))
    found: dict[str, int] = {}
    rows = [
        (group, count, [fold for name in sorted(made) for fold in allowed[name]], size)
        for group, count, made, size in groups.iter_rows()
    ]
    # What must go to few folds comes first; what may go to any comes last and evens out the reals.
    for group, count, own, _ in sorted(rows, key=lambda row: (len(row[2]) or len(targets) + 1, -row[3], drawn[row[0]])):
        chosen = min(own or every, key=lambda fold: (reals[fold] if count else fakes[fold], fakes[fold], fold))
        found[group] = chosen
        reals[chosen] += count > 0
        fakes[chosen] += bool(own)
    counts = {group: count for group, count, _, _ in rows if count}
    for fold in np.flatnonzero(reals == 0).tolist():  # all reals share groups with fakes of other generators
        fullest = int(np.argmax(reals))
        moved = min((group for group in counts if found[group] == fullest), key=lambda group: (counts[group], group))
        found[moved], reals[fullest], reals[fold] = fold, reals[fullest] - 1, 1
    return found
