#!/usr/bin/env python3
"""How often nominal 95 % intervals over groups hold the truth, in simulated samples whose truth is known.

Scores are normal, and a group's rows share a part of theirs. Groups hold one class (``apart``) or reals with the fakes
made of them (``pairs``); of one row of each class, or of log-normally many (sigma 1.1, ``uneven``). A row of the first
table is a kind of sample; its cells are the lowest and the highest share over AUCs of 0.5, 0.7, 0.9 and 0.98, and in
brackets the same of Obuchowski's interval on the logit scale (Biometrics 53, 1997). The second table is of other
metrics and of differences between two models on the same videos, over ``pairs`` and ``apart``.

    python -m benchmarks.coverage [--samples 1000] [--groups 10 20 40 100 400]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist

import numpy as np
from scipy.special import expit, stdtrit
from scipy.stats import rankdata

from fvc_lib.metrics.calibration import expected_calibration_error
from fvc_lib.metrics.classification import (
    FloatArray,
    IntArray,
    average_precision,
    balanced_accuracy,
    brier_score,
    decide,
    equal_error_rate,
    f1,
    log_loss,
    matthews_correlation,
    partial_auc,
    roc_auc,
    true_positive_rate_at_5_percent,
)
from fvc_lib.metrics.cross_validation import within_folds
from fvc_lib.metrics.intervals import (
    group_intervals,
    intervals_over_groups,
    mean_measure,
    paired_difference,
    replicate_values,
)
from fvc_lib.metrics.recognition import regression_measures

AUCS = (0.5, 0.7, 0.9, 0.98)
REPLICATES = 200
_MANY = 200_000  # groups whose metrics are taken for the truth
_SCORED = {
    metric.__name__: metric
    for metric in (
        partial_auc, average_precision, equal_error_rate, true_positive_rate_at_5_percent, brier_score, log_loss,
        expected_calibration_error,
    )
}  # fmt: skip
_DECIDED = {metric.__name__: metric for metric in (balanced_accuracy, f1, matthews_correlation)}


@dataclass(frozen=True)
class Design:
    """A kind of sample."""

    pairs: bool  # whether each group has both classes
    correlation: float  # of two rows of one group
    uneven: bool
    auc: float = 0.8
    groups: int = 40
    folds: int = 1

    def __str__(self) -> str:
        sizes = "uneven" if self.uneven else "even"
        folds = f", {self.folds} folds" if self.folds > 1 else ""
        return f"{'pairs' if self.pairs else 'apart'}, {self.correlation:g}, {sizes}{folds}"

    def sample(self, generator: np.random.Generator, num_models: int = 1) -> tuple[IntArray, FloatArray, IntArray]:
        """Labels (N,), scores (models, N) and groups (N,); a second model has an AUC that is larger by 0.05."""
        sizes = np.ones((2, self.groups), dtype=np.int64)
        if self.uneven:
            sizes = np.maximum(1, np.exp(generator.normal(0, 1.1, sizes.shape)).round()).astype(np.int64)
        if not self.pairs:
            sizes[np.arange(self.groups) % 2, np.arange(self.groups)] = 0
        own = np.arange(self.groups)
        groups = np.concatenate([np.repeat(own, of_label) for of_label in sizes])
        labels = np.repeat([0, 1], sizes.sum(1))
        shared = np.sqrt(self.correlation) * generator.normal(size=self.groups)[groups]
        scores = []
        for model in range(num_models):
            apart = NormalDist().inv_cdf(self.auc + 0.05 * model) * math.sqrt(2)
            noise = np.sqrt(1 - self.correlation) * generator.normal(size=labels.size)
            scores.append(shared + noise + apart * (labels - 0.5))
        return labels, np.array(scores), groups


AUC_DESIGNS = [
    Design(pairs=False, correlation=0.0, uneven=False),
    Design(pairs=False, correlation=0.7, uneven=True),
    *(Design(pairs=True, correlation=correlation, uneven=False) for correlation in (0.0, 0.5, 0.9, 0.99)),
    Design(pairs=True, correlation=0.5, uneven=True),
    Design(pairs=True, correlation=0.9, uneven=True),
    Design(pairs=True, correlation=0.5, uneven=False, folds=5),
]
OTHER_DESIGNS = [
    Design(pairs=False, correlation=0.5, uneven=True),
    Design(pairs=True, correlation=0.5, uneven=False),
    Design(pairs=True, correlation=0.9, uneven=True),
]


def obuchowski(labels: IntArray, scores: FloatArray, groups: IntArray) -> tuple[float, float]:
    """The AUC and its standard error from structural components of clustered data."""
    reals, fakes = scores[labels == 0], scores[labels == 1]
    ranks = rankdata(np.concatenate([reals, fakes]))
    below = (ranks[reals.size :] - rankdata(fakes)) / reals.size  # of each fake, the share of reals below it
    above = 1 - (ranks[: reals.size] - rankdata(reals)) / fakes.size
    auc = float(below.mean())
    size = int(groups.max()) + 1
    of_fakes = np.bincount(groups[labels == 1], weights=below - auc, minlength=size) / fakes.size
    of_reals = np.bincount(groups[labels == 0], weights=above - auc, minlength=size) / reals.size
    with_fakes, with_reals = (np.unique(groups[labels == label]).size for label in (1, 0))
    variance = with_fakes / (with_fakes - 1) * (of_fakes**2).sum() + with_reals / (with_reals - 1) * (of_reals**2).sum()
    variance += 2 * size / (size - 1) * (of_fakes * of_reals).sum()
    return auc, math.sqrt(max(0.0, variance))


def obuchowski_interval(labels: IntArray, scores: FloatArray, groups: IntArray) -> tuple[float, float]:
    """Its 95 % interval on the logit scale; the one-sided bound of ``group_interval`` where the AUC is 0 or 1."""
    auc, error = obuchowski(labels, scores, groups)
    unseen = 1 - 0.05 ** (2 / (groups.max() + 1))
    if not 0 < auc < 1:
        return (1 - unseen, 1.0) if auc else (0.0, unseen)
    reach = stdtrit(groups.max(), 0.975) * error / (auc * (1 - auc))
    odds = math.log(auc / (1 - auc))
    return float(expit(odds - reach)), float(expit(odds + reach))


def auc_coverage(design: Design, samples: int) -> tuple[float, float]:
    """How often the interval of the library, and Obuchowski's, holds the AUC; a ``SystemExit`` where one lacks its own
    estimate.
    """
    held = np.zeros(2)
    for number in range(samples):
        labels, (scores,), groups = design.sample(np.random.default_rng([number, design.groups]))
        metric = roc_auc if design.folds == 1 else within_folds(roc_auc, groups // 2 % design.folds)
        (own,) = group_intervals(labels, [(metric, scores)], groups, replicates=REPLICATES, seed=number)
        if not own.low <= own.value <= own.high:
            raise SystemExit(f"{design}, sample {number}: {own}")
        low, high = obuchowski_interval(labels, scores, groups)
        held += own.low <= design.auc <= own.high, low <= design.auc <= high
    shares = held / samples
    return float(shares[0]), float(shares[1])


def _measured(design: Design, seed: int, replicates: int) -> Iterator[tuple[str, float, float, float]]:
    """Value and ends of each other metric in one sample."""
    labels, both, groups = design.sample(np.random.default_rng([seed, design.groups]), num_models=2)
    given = expit(2 * both[0])  # too sure of itself, so that there is a calibration error
    measures = [(metric, given) for metric in _SCORED.values()]
    measures += [(metric, decide(given, 0.5).astype(np.float64)) for metric in _DECIDED.values()]
    found = group_intervals(labels, measures, groups, replicates=replicates, seed=seed)
    yield from (
        (name, each.value, each.low, each.high) for name, each in zip((*_SCORED, *_DECIDED), found, strict=True)
    )
    for name, metric, values in (
        ("difference of roc_auc", roc_auc, both),
        ("difference of f1", f1, [decide(score, 0.0).astype(np.float64) for score in both]),
    ):
        drawn = replicate_values(
            labels, [(metric, value) for value in values], groups, replicates=replicates, seed=seed
        )
        difference = paired_difference(drawn, 0, 1)
        yield name, difference.value, difference.low, difference.high
    rows = {**regression_measures(both[0], both[1]), "recall@1": mean_measure("recall@1", both[0] > 0)}
    ends = intervals_over_groups(list(rows.values()), groups, replicates=replicates, seed=seed)
    yield from ((name, each.value, each.low, each.high) for name, each in zip(rows, ends, strict=True))


@cache
def _truth(design: Design) -> Mapping[str, float]:
    return {name: value for name, value, _, _ in _measured(replace(design, groups=_MANY), 0, 1)}


def other_coverage(design: Design, samples: int) -> dict[str, float]:
    """How often the interval of each other metric holds what it is in a very large sample."""
    truth = _truth(replace(design, groups=_MANY))
    held = dict.fromkeys(truth, 0)
    for number in range(samples):
        for name, value, low, high in _measured(design, number, REPLICATES):
            if not low <= value <= high:
                raise SystemExit(f"{design}, sample {number}: {name} {value} [{low}, {high}]")
            held[name] += low <= truth[name] <= high
    return {name: count / samples for name, count in held.items()}


def _range(shares: Sequence[float]) -> str:
    low, high = (f"{100 * end:.0f}" for end in (min(shares), max(shares)))
    return low if low == high else f"{low} to {high}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1000, help="of each design")
    parser.add_argument("--groups", type=int, nargs="+", default=[10, 20, 40, 100, 400])
    options = parser.parse_args(arguments)
    heading = " | ".join(f"{number} groups" for number in options.groups)
    print(f"| AUC: groups, correlation, sizes | {heading} |\n|---|{'---|' * len(options.groups)}")
    for design in AUC_DESIGNS:
        cells = []
        for number in options.groups:
            of_aucs = [auc_coverage(replace(design, auc=auc, groups=number), options.samples) for auc in AUCS]
            own, theirs = zip(*of_aucs, strict=True)
            cells.append(_range(own) if design.folds > 1 else f"{_range(own)} ({_range(theirs)})")
        print(f"| {design} | {' | '.join(cells)} |", flush=True)
    print(f"\n| Other metrics, lowest to highest of three designs | {heading} |\n|---|{'---|' * len(options.groups)}")
    of_groups = [
        [other_coverage(replace(design, groups=number), options.samples) for design in OTHER_DESIGNS]
        for number in options.groups
    ]
    for name in of_groups[0][0]:
        print(f"| {name} | {' | '.join(_range([each[name] for each in designs]) for designs in of_groups)} |")


if __name__ == "__main__":
    main()
