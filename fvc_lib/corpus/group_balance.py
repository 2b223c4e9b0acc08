"""Assign whole groups to parts so that every part gets its share of every class.

Minimises the squared class-normalised deviation from the shares, with a part that lacks a class counted as far worse
than any deviation: groups of one *type* (equal class counts) are first spread evenly, what is left over is placed
greedily, largest first, and then single moves and pairwise swaps are made until none helps. scikit-learn's
``StratifiedGroupKFold`` is the greedy step alone; it may leave a part without a class. Working on types instead of
groups keeps this fast for 100,000 groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_LACKS_A_CLASS = 1e4  # more than all squared deviations together
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
    placed = _spread(np.bincount(type_of, minlength=len(types)), shares)
    _place_rest(types, np.bincount(type_of, minlength=len(types)), placed, objective, order)
    _improve(types, placed, objective)
    return _deal(placed, type_of, generator)


def _spread(sizes: IntArray, shares: FloatArray) -> IntArray:
    """The whole number of groups of each type that each part is due at least: (T, P)."""
    return np.floor(np.outer(sizes, shares) + _TINY).astype(np.int64)


def _place_rest(types: IntArray, sizes: IntArray, placed: IntArray, objective: _Objective, order: IntArray) -> None:
    """Place what ``_spread`` left over where it costs least, groups that weigh most first; changes ``placed``."""
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
    place = int(np.argmin(change))
    return float(change.flat[place]), place // change.shape[1], place % change.shape[1]


def _deal(placed: IntArray, type_of: IntArray, generator: np.random.Generator) -> IntArray:
    """Hand out the places of each type to its groups in random order: (G,)."""
    parts = np.empty(len(type_of), dtype=np.int64)
    for kind, row in enumerate(placed):
        groups = np.flatnonzero(type_of == kind)
        parts[generator.permutation(groups)] = np.repeat(np.arange(placed.shape[1]), row)
    return parts
