"""Protocol ``leave_one_generator_out``: test on fakes of a generator that the network never saw in training.

Every leakage group (videos of one footage or source) is assigned to one fold, and every fold has one generator as its
target. A fold tests the reals and the target's fakes in its groups. It trains on the other folds' groups, except the
target's fakes. So every video is tested at most once, and no two folds test the same group. Videos that a fold may
neither train on nor test are left out of it, with the reason.

Two names mean the same generator if they differ only in case or punctuation. A name with ``+`` means that several
generators made the fake (``faceswap+wav2lip``). Fakes that share a generator with the target are not trained on.

With more folds than generators, the generators with most groups are tested in several folds. With fewer folds, only
the generators with most groups are tested, and the others are trained on.
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
_FEWEST_GROUPS = 2
_SHORTEST_ALIKE = 3  # letters; shorter names lie in others by chance


def _generators(index: pl.DataFrame) -> pl.DataFrame:
    """Return a table ``video_id group_id label spelled generator parts``, sorted by video.

    ``spelled`` is the generator in the index, or the manipulation if there is none; null for reals. ``generator`` is
    the most frequent spelling of that name. ``parts`` lists the generators that made the fake, as names of letters and
    digits in lower case.
    """
    made = pl.coalesce("generator", "manipulation") if "generator" in index.columns else pl.col("manipulation")
    spelled = pl.when(pl.col("label") == "fake").then(made)
    videos = index.select("video_id", "group_id", "label", spelled=spelled).sort("video_id")
    counts = videos.drop_nulls("spelled")["spelled"].value_counts()
    parts_of, first = {}, dict[tuple[str, ...], str]()
    for name in counts.sort(["count", "spelled"], descending=[True, False])["spelled"]:
        plain = ("".join(filter(str.isalnum, part.casefold())) for part in name.split("+"))
        parts_of[name] = sorted(set(filter(None, plain))) or [name]
        first.setdefault(tuple(parts_of[name]), name)
    called = {name: first[tuple(parts)] for name, parts in parts_of.items()}
    return videos.with_columns(
        generator=pl.col("spelled").replace_strict(called, default=None, return_dtype=pl.String),
        parts=pl.col("spelled").replace_strict(parts_of, default=None, return_dtype=pl.List(pl.String)),
    )


def alike_names(index: pl.DataFrame) -> list[str]:
    """Return notes on names of generators that may be mistaken.

    They list spellings that count as one generator, and pairs of generators of which one name contains the other.
    """
    videos = _generators(index).drop_nulls("spelled")
    spelled = videos.group_by("parts").agg(pl.col("spelled").unique().sort()).sort(pl.col("spelled").list.first())
    notes = [
        f"Taken for one generator: {', '.join(map(repr, names))}." for names in spelled["spelled"] if len(names) > 1
    ]
    plain = {parts[0]: names[0] for parts, names in spelled.iter_rows() if len(parts) == 1}
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
    """Return the target generator of each fold, those with most groups first.

    If there are more folds than generators, generators with many groups are the target of several folds.

    Raises:
        DataError: fewer than two generators, or too few groups for the number of folds.
    """
    counts = _generators(index).drop_nulls("generator").group_by("generator").agg(pl.col("group_id").n_unique())
    usable = counts.filter(pl.col("group_id") >= _FEWEST_GROUPS).sort(
        ["group_id", "generator"], descending=[True, False]
    )
    if counts.height < 2 or usable.is_empty():
        names = some_of(counts["generator"].sort().to_list()) or "none"
        raise DataError(
            f"protocol leave_one_generator_out: got {counts.height} generators ({names}), {usable.height} of them with "
            f"{_FEWEST_GROUPS} groups or more; wanted at least two, one of them with so many. Name what made each fake "
            "in a manifest's column generator, or use -p protocol kfold."
        )
    groups_of = dict(usable.head(num_folds).iter_rows())
    folds = dict.fromkeys(groups_of, 1)
    while sum(folds.values()) < num_folds:
        name = max(groups_of, key=lambda name: (folds[name] < groups_of[name], groups_of[name] / folds[name]))
        if folds[name] == groups_of[name]:
            raise DataError(
                f"num_folds: got {num_folds}, but the generators have {sum(groups_of.values())} groups of fakes to "
                f"test. Set it to {len(groups_of)}, one fold for each of them: {', '.join(groups_of)}."
            )
        folds[name] += 1
    return [name for name, count in folds.items() for _ in range(count)]


def leave_one_generator_out(index: pl.DataFrame, num_folds: int, seed: int) -> pl.DataFrame:
    """Return a table ``video_id group_id label fold target part reason`` with one row per video and fold.

    ``part`` is train, test or left_out; ``reason`` says why a video is left out.

    Raises:
        DataError: fewer than two generators, or too few groups of fakes or of reals for the number of folds.
    """
    targets = held_out(index, num_folds)
    videos = _generators(index)
    home = pl.col("group_id").replace_strict(_deal(videos, targets, seed), return_dtype=pl.Int64)
    parts_of = dict(videos.drop_nulls("generator").select("generator", "parts").iter_rows())
    is_fake = pl.col("label") == "fake"
    tables = []
    for fold, target in enumerate(targets):
        is_target, here = (pl.col("generator") == target).fill_null(value=False), home == fold
        shares = pl.col("parts").list.set_intersection(parts_of[target]).list.len().fill_null(0) > 0
        reason = (
            pl.when(is_fake & pl.col("generator").is_null()).then(pl.lit(UNKNOWN))
            .when(here & is_fake & ~is_target).then(pl.lit(OTHER))
            .when(~here & is_target).then(pl.lit(HELD_OUT))
            .when(~here & shares).then(pl.lit(SHARES))
        )  # fmt: skip
        part = pl.when(reason.is_not_null()).then(pl.lit(LEFT_OUT)).when(here).then(pl.lit("test"))
        columns = {"fold": pl.lit(fold, pl.Int64), "target": pl.lit(target), "part": part.otherwise(pl.lit("train"))}
        tables.append(videos.select("video_id", "group_id", "label", reason=reason, **columns))
    return pl.concat(tables)


def _deal(videos: pl.DataFrame, targets: Sequence[str], seed: int) -> Mapping[str, int]:
    """Return the fold of each group: a fold whose target made a fake in the group, or any fold if there is none.

    Groups that fit fewest folds are assigned first, then those with most videos. A group with reals goes to the fold
    that has the fewest groups with reals, any other group to the fold with the fewest groups of tested fakes.

    Raises:
        DataError: fewer groups with real videos than folds.
    """
    groups = videos.group_by("group_id").agg(
        reals=(pl.col("label") == "real").sum(), made=pl.col("generator").drop_nulls().unique().sort(), size=pl.len()
    )
    groups = groups.sort("group_id").with_columns(
        drawn=np.random.default_rng([seed, GENERATORS_DEALT]).permutation(groups.height)
    )
    with_reals = groups.filter(pl.col("reals") > 0)
    if with_reals.height < len(targets):
        raise DataError(
            f"num_folds: got {len(targets)}, but the index has {with_reals.height} groups with real videos; wanted one "
            "for each fold. Set num_folds lower, or add real videos of other events: each brings a group."
        )
    folds_of = defaultdict(list)
    for fold, target in enumerate(targets):
        folds_of[target].append(fold)
    reals, fakes = np.zeros(len(targets)), np.zeros(len(targets))
    fold_of: dict[str, int] = {}
    rows = [(group, count, [fold for name in made for fold in folds_of[name]], -size, drawn)
            for group, count, made, size, drawn in groups.iter_rows()]  # fmt: skip
    for group, count, own, *_ in sorted(rows, key=lambda row: (len(row[2]) or len(targets) + 1, *row[3:])):
        load = reals if count else fakes
        chosen = min(own or range(len(targets)), key=lambda fold: (load[fold], fakes[fold], fold))
        fold_of[group] = chosen
        reals[chosen] += count > 0
        fakes[chosen] += bool(own)
    for fold in np.flatnonzero(reals == 0).tolist():  # all reals share groups with fakes of other generators
        fullest = int(np.argmax(reals))
        there = with_reals.filter(pl.col("group_id").replace_strict(fold_of) == fullest)
        fold_of[there.sort("reals", "group_id")["group_id"][0]] = fold
        reals[[fullest, fold]] += [-1, 1]
    return fold_of
