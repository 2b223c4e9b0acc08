"""The figures that decoding has to reach, beside what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.decode.cases import LENGTHS
from benchmarks.decode.peers import DECORD, DEMUXING, FLOOR, OURS, TORCHCODEC
from benchmarks.decode.results import Case, Results, Throughput

MEBIBYTE = 2**20
# "Scales to the cores" and "no growth" in figures; ffmpeg's own index grows by 40 bytes for each packet.
SCALING_TARGET = 0.9
LENGTH_TOLERANCE_MIB = 1


@dataclass(frozen=True)
class Verdict:
    """One target.

    Attributes:
        what: is measured.
        relation: of the measured value to the target.
        measured: the worst over all cases the target is for, or none where nothing was measured.
        where: the case of the worst value.
        typical: the median over the cases.
    """

    what: str
    relation: Literal["at most", "at least", "less than"]
    target: float
    unit: str
    measured: float | None = None
    where: str = ""
    typical: float | None = None

    @property
    def met(self) -> bool | None:
        """None where nothing was measured."""
        if self.measured is None:
            return None
        if self.relation == "at least":
            return self.measured >= self.target
        return self.measured < self.target or (self.relation == "at most" and self.measured == self.target)


IsFor = Callable[[Case], bool]


def _with_b_frames(case: Case) -> bool:
    return "h264" in case.video and "no B" not in case.video


def _floor_binds(case: Case) -> bool:
    return any(kind in case.video for kind in ("no B", "vp9", "av1"))


def cpu_ratios(results: Results, peer: str, is_for: IsFor) -> dict[Case, float]:
    """CPU time of ours over that of ``peer``, the median round; without cases where either gave other frames."""
    costs = {(cost.case, cost.peer): cost for cost in results.cpu if cost.gave_the_same}
    return {
        case: cost.ratio_to(costs[case, peer])
        for (case, name), cost in costs.items()
        if name == OURS and is_for(case) and (case, peer) in costs
    }


def memory_ratios(results: Results, peer: str) -> dict[Case, float]:
    """Peak memory of ours over that of ``peer``."""
    peaks = {(peak.case, peak.peer): peak.peak_bytes for peak in results.memory}
    return {
        case: own / max(1, peaks[case, peer])
        for (case, name), own in peaks.items()
        if name == OURS and (case, peer) in peaks
    }


def verdicts(results: Results) -> list[Verdict]:
    """All targets, in the order in which they are set."""
    return [*_cpu_verdicts(results), *_memory_verdicts(results), *_rate_verdicts(results), *_other_verdicts(results)]


def _cpu_verdicts(results: Results) -> Iterable[Verdict]:
    ours = f"CPU time of {TORCHCODEC} (exact mode)"
    for num_frames, target in ((6, 0.65), (16, 0.70)):
        ratios = cpu_ratios(results, TORCHCODEC, _with_b_frames)
        own = {case: ratio for case, ratio in ratios.items() if case.num_frames == num_frames}
        yield _worst(Verdict(f"{ours}, h264 with B-frames, {num_frames} frames", "at most", target, "times"), own)
    ratios = cpu_ratios(results, TORCHCODEC, lambda c: "hevc" in c.video)
    yield _worst(Verdict(f"{ours}, hevc", "at most", 0.58, "times"), ratios)
    ratios = cpu_ratios(results, TORCHCODEC, _floor_binds)
    yield _worst(Verdict(f"{ours}, where the floor binds: no B-frames, vp9, av1", "at most", 0.97, "times"), ratios)
    ratios = cpu_ratios(results, DECORD, _with_b_frames)
    yield _worst(Verdict(f"CPU time of {DECORD}, h264 with B-frames", "at most", 0.62, "times"), ratios)
    ratios = cpu_ratios(results, FLOOR, lambda c: "1080p" in c.video)
    yield _worst(Verdict("CPU time of decoding only the necessary packets, 1080p", "at most", 1.06, "times"), ratios)


def _memory_verdicts(results: Results) -> Iterable[Verdict]:
    own = [peak for peak in results.memory if peak.peer == OURS]
    for kind, what, target in (
        ("1080p h264", "1080p h264, any number of frames", 33),
        ("1080p hevc", "1080p hevc", 40),
        ("720p", "720p", 20),
        ("360p h264 3 min", "360p", 12),
    ):
        verdict = Verdict(f"peak memory over the imports, {what}", "at most", target, "MiB")
        yield _worst(verdict, {peak.case: peak.peak_bytes / MEBIBYTE for peak in own if kind in peak.case.video})
    verdict = Verdict(f"peak memory over the imports of {TORCHCODEC}", "at most", 0.5, "times")
    yield _worst(verdict, memory_ratios(results, TORCHCODEC))


def _rate_verdicts(results: Results) -> Iterable[Verdict]:
    rates = {(each.peer, each.how, each.workers): each for each in results.throughput}
    for number, target in ((1, 1.55), (2, 1.9)):
        what = f"clips per second of {TORCHCODEC}, mixed corpus, each on {number} thread(s)"
        verdict = Verdict(what, "at least", target, "times")
        ours, theirs = rates.get((OURS, "threads", number)), rates.get((TORCHCODEC, "threads", number))
        if ours and theirs:
            verdict = replace(verdict, measured=ours.clips_per_second / theirs.clips_per_second, where=_elsewhere(ours))
        yield verdict
    for how in ("threads", "processes"):
        found = [each for each in results.scaling if each.how == how and each.workers > 1]
        verdict = Verdict(f"clips per second of one thread per core, {how}", "at least", SCALING_TARGET, "times")
        one = next((each for each in results.scaling if each.workers == 1), None)
        if found and one:
            efficiency = found[0].clips_per_second / one.clips_per_second / found[0].workers
            verdict = replace(verdict, measured=efficiency, where=_elsewhere(found[0]))
        yield verdict


def _elsewhere(passes: Throughput) -> str:
    return f"other programs kept {passes.busy_elsewhere:.1f} cores busy meanwhile"


def _other_verdicts(results: Results) -> Iterable[Verdict]:
    peaks = {(peak.case.video, peak.peer): peak.peak_bytes / MEBIBYTE for peak in results.memory}
    growth = [
        peaks[LENGTHS[-1].name, peer] - peaks[LENGTHS[0].name, peer]
        for peer in (OURS, DEMUXING)
        if (LENGTHS[-1].name, peer) in peaks
    ]
    what = "growth of the peak from 10 s to 1 h of video, over that of ffmpeg's own index"
    verdict = Verdict(what, "at most", LENGTH_TOLERANCE_MIB, "MiB")
    yield replace(verdict, measured=growth[0] - growth[1], where=f"of {growth[0]:.1f} in all") if growth else verdict
    there = results.footprint
    verdict = Verdict("peak of a whole process that decodes one 1080p clip", "less than", 80, "MiB")
    yield replace(verdict, measured=there.worker_peak_bytes / MEBIBYTE) if there else verdict
    verdict = Verdict("imports of torch by a process that decodes", "at most", 0, "")
    yield replace(verdict, measured=float(there.worker_has_torch)) if there else verdict
    verdict = Verdict("growth of one process over 200 decodes", "less than", 20, "MB")
    yield replace(verdict, measured=there.growth_bytes / 1e6) if there else verdict


def _worst(verdict: Verdict, values: dict[Case, float]) -> Verdict:
    if not values:
        return verdict
    choose = min if verdict.relation == "at least" else max
    case = choose(values, key=lambda case: values[case])
    return Verdict(
        verdict.what, verdict.relation, verdict.target, verdict.unit, values[case],
        f"{case.video}, {case.num_frames} frames, {case.size} px", statistics.median(values.values()),
    )  # fmt: skip
