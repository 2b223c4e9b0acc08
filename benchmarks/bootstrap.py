#!/usr/bin/env python3
"""What bootstrap intervals cost, beside the same intervals from scikit-learn in a loop and from scipy.

5,000 videos in 380 groups (as FVC-2018 has) and in 5,000 (each its own), 2,000 replicates of whole groups. The loop
makes the rows of each replicate, from the very draws ours uses, and hands them to scikit-learn; its ends must be ours,
or the benchmark stops. ``scipy.stats.bootstrap`` draws groups as well, but knows no strata: its ends are its own. All
run in this process in turns; processor time counts all threads. Ratios are of the loop of as many metrics to each: of
the least readings and, in brackets, the median of the rounds' ratios. Peak memory over what the imports take is
measured in a process of its own for each.

    python -m benchmarks.bootstrap [--quick] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.stats
import sklearn.metrics

from fvc_lib.metrics.calibration import reliability_bins
from fvc_lib.metrics.classification import roc_auc
from fvc_lib.metrics.cross_validation import measure_over_folds
from fvc_lib.metrics.intervals import (
    cluster_bootstrap,
    cluster_bootstrap_many,
    draw_group_counts,
    group_codes,
    one_vote_per_group,
)

Ends = tuple[float, float]
NUM_FOLDS = 5
OURS, LOOP = "ours, AUC", "scikit-learn in a loop, AUC"
# Those that scikit-learn computes as well; a run's results have some more.
NINE_METRICS = (
    "roc_auc", "average_precision", "equal_error_rate", "true_positive_rate_at_5_percent", "f1", "balanced_accuracy",
    "matthews_correlation", "brier_score", "expected_calibration_error",
)  # fmt: skip
BOTH_VOTES = "ours, nine within folds, both votes"
NINE, NINE_LOOP = "ours, nine metrics", "scikit-learn in a loop, nine metrics"


@dataclass(frozen=True)
class Sample:
    """Labelled scores in groups of near-duplicates, and how often they are drawn."""

    num_rows: int
    num_groups: int
    replicates: int

    @functools.cached_property
    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Labels, scores and groups (N,)."""
        generator = np.random.default_rng(0)
        own = np.arange(self.num_groups)
        groups = np.concatenate([own, generator.integers(0, self.num_groups, self.num_rows - own.size)])
        labels = (generator.permutation(self.num_groups) % 2)[groups]
        logits = labels + generator.normal(0, 1, self.num_groups)[groups] + generator.normal(0, 0.5, groups.size)
        return labels, 1 / (1 + np.exp(-logits)), groups

    @property
    def folds(self) -> np.ndarray:
        return self.columns[2] % NUM_FOLDS

    def resampled_rows(self) -> Iterator[np.ndarray]:
        """The rows of each replicate, from the draws ours uses."""
        labels, _, groups = self.columns
        codes, num_groups = group_codes(groups, labels.size)
        members = np.split(np.argsort(codes, kind="stable"), np.cumsum(np.bincount(codes))[:-1])
        for counts in draw_group_counts(labels, codes, num_groups, replicates=self.replicates, seed=0):
            for times in counts.astype(int):
                yield np.concatenate([members[group] for group in np.repeat(np.arange(num_groups), times)])


def ours(sample: Sample) -> Ends:
    labels, scores, groups = sample.columns
    interval = cluster_bootstrap(labels, scores, groups, roc_auc, replicates=sample.replicates)
    return interval.low, interval.high


def scikit_learn_loop(sample: Sample) -> Ends:
    labels, scores, _ = sample.columns
    return ends([sklearn.metrics.roc_auc_score(labels[rows], scores[rows]) for rows in sample.resampled_rows()])


def scipy_bootstrap(sample: Sample) -> Ends:
    labels, scores, groups = sample.columns
    codes, _ = group_codes(groups, labels.size)
    members = np.split(np.argsort(codes, kind="stable"), np.cumsum(np.bincount(codes))[:-1])

    def statistic(drawn: np.ndarray) -> float:
        rows = np.concatenate([members[group] for group in drawn])
        return float(sklearn.metrics.roc_auc_score(labels[rows], scores[rows]))

    found = scipy.stats.bootstrap(
        (np.arange(len(members)),), statistic, vectorized=False, n_resamples=sample.replicates, method="percentile",
        rng=np.random.default_rng(0),
    )  # fmt: skip
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def ours_nine(sample: Sample, folds: np.ndarray | None = None, *, by_group: bool = False) -> Ends:
    """The ends of the AUC, which comes first."""
    labels, scores, groups = sample.columns
    inside = np.zeros(labels.size, dtype=int) if folds is None else folds
    intervals = cluster_bootstrap_many(
        labels, [measure_over_folds(name, scores, 0.5, inside) for name in NINE_METRICS], groups,
        row_weights=one_vote_per_group(groups) if by_group else None, replicates=sample.replicates,
    )  # fmt: skip
    return intervals[0].low, intervals[0].high


def ours_both_votes(sample: Sample) -> Ends:
    """What the results of one source take: nine metrics within folds, a vote per video and a vote per group."""
    ours_nine(sample, sample.folds, by_group=True)
    return ours_nine(sample, sample.folds)


def scikit_learn_nine(sample: Sample) -> Ends:
    labels, scores, _ = sample.columns
    return ends([nine_by_scikit_learn(labels[rows], scores[rows])[0] for rows in sample.resampled_rows()])


def nine_by_scikit_learn(labels: np.ndarray, scores: np.ndarray) -> list[float]:
    """In the order of ``NINE_METRICS``; what scikit-learn lacks is read from its ROC curve, or from our bins."""
    decisions = (scores >= 0.5).astype(int)
    false_rates, true_rates, _ = sklearn.metrics.roc_curve(labels, scores)
    bins = reliability_bins(labels, scores)
    held = bins.counts > 0
    crossing = np.interp(0.0, false_rates + true_rates - 1, false_rates)
    return [
        sklearn.metrics.roc_auc_score(labels, scores),
        sklearn.metrics.average_precision_score(labels, scores),
        float(crossing),
        float(true_rates[false_rates <= 0.05].max()),
        sklearn.metrics.f1_score(labels, decisions),
        sklearn.metrics.balanced_accuracy_score(labels, decisions),
        sklearn.metrics.matthews_corrcoef(labels, decisions),
        sklearn.metrics.brier_score_loss(labels, scores),
        float((bins.counts * np.abs(bins.mean_scores - bins.fake_shares))[held].sum() / labels.size),
    ]


def ends(values: list[float]) -> Ends:
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


CONTESTANTS: dict[str, Callable[[Sample], Ends]] = {
    OURS: ours,
    LOOP: scikit_learn_loop,
    "scipy.stats.bootstrap, AUC": scipy_bootstrap,
    NINE: ours_nine,
    NINE_LOOP: scikit_learn_nine,
    BOTH_VOTES: ours_both_votes,
}
# What each is compared with, where that is not the AUC by the loop; both votes with a loop of one.
BASIS = {NINE: NINE_LOOP, NINE_LOOP: NINE_LOOP, BOTH_VOTES: NINE_LOOP}
SAME_DRAWS = (OURS, LOOP, NINE, NINE_LOOP)


def take_turns(sample: Sample, rounds: int) -> dict[str, list[float]]:
    """Processor seconds of each contestant in each round.

    Raises:
        SystemExit: two that draw the same groups give different ends.
    """
    seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for _ in range(rounds):
        found = {}
        for name, work in CONTESTANTS.items():
            before = time.process_time()
            found[name] = work(sample)
            seconds[name].append(time.process_time() - before)
        for name in found.keys() & set(SAME_DRAWS):
            if not np.allclose(found[name], found[LOOP], atol=1e-9):
                raise SystemExit(f"{name} gives {found[name]}, {LOOP} gives {found[LOOP]} from the same draws")
    return seconds


def peak_bytes(name: str, sample: Sample) -> int:
    """Peak memory of ``name`` over what imports and the sample take, in a process of its own. Linux only."""
    arguments = [name, str(sample.num_rows), str(sample.num_groups), str(sample.replicates)]
    command = [sys.executable, "-m", "benchmarks.bootstrap", "--measure", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    return int(done.stdout)


def measure_here(name: str, sample: Sample) -> int:
    CONTESTANTS[name](Sample(20, 10, 2))  # what is loaded late is no one's own
    sample.columns  # noqa: B018 - made before memory is looked at
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    CONTESTANTS[name](sample)
    return _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def report(sample: Sample, seconds: dict[str, list[float]], peaks: dict[str, int]) -> list[str]:
    """A line per contestant."""
    title = f"{sample.num_rows:,} rows in {sample.num_groups:,} groups, {sample.replicates:,} replicates"
    lines = [f"{title:<50} {'CPU s':>8} {'loop : this':>18} {'peak MB':>8}"]
    for name, own in seconds.items():
        theirs = seconds[BASIS.get(name, LOOP)]
        middle = statistics.median(other / mine for mine, other in zip(own, theirs, strict=True))
        ratio = f"{min(theirs) / min(own):.1f} ({middle:.1f})"
        lines.append(f"{name:<50} {min(own):>8.2f} {ratio:>18} {peaks[name] / 1e6:>8.1f}")
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of 200 replicates")
    parser.add_argument("--json", type=Path, help="write every reading to this file")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        name, *sizes = options.measure
        print(measure_here(name, Sample(*map(int, sizes))))
        return
    readings = []
    for num_groups in (380, 5000):
        sample = Sample(5000, num_groups, 200 if options.quick else 2000)
        seconds = take_turns(sample, 1 if options.quick else options.rounds)
        peaks = {name: peak_bytes(name, sample) for name in CONTESTANTS}
        print("\n".join(report(sample, seconds, peaks)) + "\n", flush=True)
        readings.append({"num_groups": num_groups, "cpu_seconds": seconds, "peak_bytes": peaks})
    if options.json:
        options.json.write_text(json.dumps(readings, indent=1) + "\n")


if __name__ == "__main__":
    main()
