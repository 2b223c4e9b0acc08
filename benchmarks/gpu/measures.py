"""What is measured on a GPU, part by part: every figure as a line for people and numbers for programs."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.networks import NETWORKS
from benchmarks.gpu.trainings import Case, Rate, Task, finished_at, train, train_bare
from fvc_lib.detectors.own.stems import FORENSIC
from fvc_lib.engine import device as devices
from fvc_lib.engine.loading import effective_batches, epoch_order, load_batches
from fvc_lib.engine.preflight import StepRequest, preflight
from fvc_lib.services import memory as memory_budget
from fvc_lib.services.memory import MemoryBudget
from tests.gpu.trainings import NoisyClips

_MEASURING_SECONDS = 60.0  # of a preflight: a process of its own, and some steps of each size
_PEAK_STEPS = 3
_LARGE_GAP = 1000.0  # microseconds
_TRACED = 0.95  # of the time a trace must reach over: kernels can be lost at its begin, and when its room is full


@dataclass(frozen=True)
class Figure:
    """One finding."""

    what: str
    line: str
    values: dict[str, Any] = field(default_factory=dict)


# --- From a profiler's trace to the share of time with a kernel active.


@dataclass(frozen=True)
class Activity:
    """What a trace shows of the device, in microseconds."""

    kernel: float  # with a kernel active, those at the same time counted once
    device: float  # with a kernel or a copy
    span: float  # from the first kernel's begin to the last one's end
    num_kernels: int
    large_gaps: float  # without a kernel, all those of over a millisecond together
    longest: tuple[tuple[str, float], ...]  # kernels by name that took most, and how long


def activity(events: Iterable[Mapping[str, Any]]) -> Activity:
    """Of the ``traceEvents`` of a chrome trace of torch's profiler: whole ones (``ph`` X) of the categories ``kernel``,
    ``gpu_memcpy`` and ``gpu_memset``. Annotations of the device's time (``gpu_user_annotation``) span gaps: no work.
    """
    kernels: list[tuple[float, float]] = []
    copies: list[tuple[float, float]] = []
    took: dict[str, float] = {}
    for event in events:
        if event.get("ph") != "X":
            continue
        start, duration = float(event.get("ts", 0)), float(event.get("dur", 0))
        if event.get("cat") == "kernel":
            kernels.append((start, start + duration))
            took[event["name"]] = took.get(event["name"], 0.0) + duration
        elif event.get("cat") in ("gpu_memcpy", "gpu_memset"):
            copies.append((start, start + duration))
    longest = sorted(took.items(), key=lambda item: -item[1])[:5]
    spans = merged(kernels)
    gaps = [after[0] - before[1] for before, after in pairwise(spans)]
    return Activity(
        kernel=sum(end - start for start, end in spans),
        device=sum(end - start for start, end in merged([*kernels, *copies])),
        span=spans[-1][1] - spans[0][0] if spans else 0.0,
        num_kernels=len(kernels),
        large_gaps=sum(gap for gap in gaps if gap > _LARGE_GAP),
        longest=tuple(longest),
    )


def merged(ranges: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of half-open ranges as ranges in order that do not touch."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def measure_busy(case: Case, network: str) -> Iterator[Figure]:
    """From a trace of the device alone, which costs the training little."""
    if case.compute.device.type != "cuda":
        yield Figure("skipped", "skipped: torch's profiler sees no kernels of this device")
        return
    device, activities = case.compute.device, torch.profiler.ProfilerActivity
    # The first takes seconds, and may miss what comes early.
    with torch.profiler.profile(activities=[activities.CUDA]):
        torch.ones(1, device=device).add_(1)
        finished_at(device)
    # With what the processor does beside it, which costs more, only where the first way has found too little.
    for kinds in ([activities.CUDA], [activities.CPU, activities.CUDA]):
        figure = traced(case, network, kinds)
        yield figure
        if figure.values["trace_share"] >= _TRACED:
            return


def traced(case: Case, network: str, kinds: Sequence[torch.profiler.ProfilerActivity]) -> Figure:
    """A training with a profiler for ``kinds``, and what its trace says."""
    profiler = torch.profiler.profile(activities=kinds)
    rate = train(case, network, case.asked.steps, around=profiler)
    with tempfile.TemporaryDirectory(dir=case.folder) as name:
        path = Path(name) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)
    seconds = rate.steps * case.asked.batch / rate.clips_per_second
    return busy_figure(activity(trace["traceEvents"]), seconds, rate)


def busy_figure(found: Activity, seconds: float, rate: Rate) -> Figure:
    """Of a trace of so many seconds; one that does not reach to the end is no measurement, and is said to be none."""
    share, spanned = found.kernel / 1e6 / seconds, found.span / 1e6 / seconds
    values = {
        "kernel_share": share, "device_share": found.device / 1e6 / seconds, "trace_share": spanned,
        "large_gap_share": found.large_gaps / 1e6 / seconds, "kernels": found.num_kernels, "seconds": seconds,
        "steps": rate.steps, "clips_per_second": rate.clips_per_second, "longest_kernels": found.longest,
    }  # fmt: skip
    verdict = "reached" if share >= 0.85 else "MISSED"
    if spanned < _TRACED:
        verdict = f"NOT MEASURED: the trace holds {100 * spanned:.0f} % of the time only"
    top = "; ".join(f"{name[:60]} {took / 1e4 / seconds:.1f} %" for name, took in found.longest[:3])
    line = (
        f"a kernel active {100 * share:.1f} % of {seconds:.1f} s ({rate.steps} steps, {found.num_kernels} kernels, "
        f"{rate.clips_per_second:.1f} clips/s; with copies {100 * values['device_share']:.1f} %; gaps of over a "
        f"millisecond {100 * values['large_gap_share']:.1f} %); target 85 % {verdict}. Most: {top}"
    )
    return Figure("busy", line, values)


# --- What the loaders alone can give.


def measure_loading(case: Case, network: str) -> Iterator[Figure]:
    """Batches as a training gets them, page-locked where the device takes such, and nothing done with them."""
    asked = case.asked
    data, steps = case.clips(asked.steps), asked.steps
    batches = effective_batches(epoch_order(len(data), 0, 0), asked.batch)
    started, pinned = 0.0, case.compute.device.type == "cuda"
    for number, _ in enumerate(load_batches(data, batches, num_workers=asked.workers, pin_memory=pinned)):
        if number == asked.warmup:
            started = time.perf_counter()
        if number == asked.warmup + steps:
            break
    rate = steps * asked.batch / (time.perf_counter() - started)
    size = rate * 3 * asked.frames * asked.side**2
    line = f"{asked.workers} loader processes alone give {rate:.0f} clips/s ({size / 1e9:.2f} GB/s)"
    yield Figure("loading", line, {"clips_per_second": rate, "bytes_per_second": size})


# --- The engine beside a bare loop.


def measure_engine(case: Case, network: str) -> Iterator[Figure]:
    """In the order ours, theirs, theirs, ours, as many rounds as there is time for."""
    steps, pairs = case.asked.short_steps, list[tuple[float, float]]()
    for turn in range(case.asked.rounds):
        if pairs and case.clock.left < 2 * case.clock.needs(network, case.asked.warmup + steps):
            break
        sides: list[Callable[..., Rate]] = [train, train_bare]
        rates = {side: sides[side](case, network, steps) for side in ((0, 1) if turn % 2 == 0 else (1, 0))}
        pairs.append((rates[0].clips_per_second, rates[1].clips_per_second))
    ratios = sorted(ours / theirs for ours, theirs in pairs)
    ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    middle = statistics.median(ratios)
    verdict = "reached" if middle >= 0.95 else "MISSED"
    line = (
        f"engine {ours:.1f} clips/s, bare loop {theirs:.1f}, ratio {middle:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f} "
        f"in {len(ratios)} rounds of {steps} steps); target 0.95 {verdict}"
    )
    yield Figure("engine", line, {"engine": ours, "bare": theirs, "ratio": middle, "ratios": ratios})


# --- The predicted peak beside the measured one.


def measure_preflight(case: Case, network: str) -> Iterator[Figure]:
    """Of torch's tensors, which a device runs out of; the driver's own memory is in no allocator's statistics."""
    device, batch = case.compute.device, case.asked.batch
    if device.type != "cuda":
        yield Figure("skipped", "skipped: make bench-preflight measures it on this device")
        return
    task = Task(network, case.clips(_PEAK_STEPS))
    probe = devices.device_memory_probe(device)
    budget = MemoryBudget(probe().total_bytes, "the device") if probe else memory_budget.memory_budget()
    report = preflight(
        StepRequest(task, batch, batch, case.compute),
        budget=budget,
    )
    if report.peak_bytes is None:
        yield Figure("preflight", f"NOT MEASURED: {report.message()}")
        return
    torch.cuda.reset_peak_memory_stats(device)
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    train(case, network, _PEAK_STEPS, micro_batch=report.micro_batch)
    context = max(0, free - torch.cuda.mem_get_info(device)[0] - torch.cuda.memory_reserved(device))
    measured = torch.cuda.max_memory_allocated(device) + context
    predicted = report.peak_bytes
    off = predicted / measured - 1
    verdict = "reached" if abs(off) <= 0.25 else "MISSED"
    line = (
        f"predicted peak {predicted / 1e9:.2f} GB, measured {measured / 1e9:.2f} GB, {off:+.1%}, with micro-batch "
        f"{report.micro_batch}; target 25 % {verdict} {report.problem}"
    )
    values = {"predicted": predicted, "measured": measured, "off": off, "micro_batch": report.micro_batch}
    yield Figure("preflight", line.rstrip(), values)


def measure_stem(case: Case, network: str) -> Iterator[Figure]:
    """Of a batch of 16 clips at most."""
    device, asked = case.compute.device, case.asked
    frames = torch.stack([NoisyClips(0, 2, asked.frames, asked.side)[i % 2].tensors["frames"] for i in range(16)])
    frames = frames.to(device)
    one_by_one = FORENSIC.clip_by_clip(frames)
    for clips in (1, 2, 4, 8, 16):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds = []
        for _ in range(max(3, min(20, asked.short_steps))):
            started = finished_at(device)
            found = replace(FORENSIC, clips_at_once=clips).clip_by_clip(frames)
            seconds.append(finished_at(device) - started)
        held = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        apart, middle = float((found - one_by_one).abs().max()), statistics.median(seconds)
        peak = "" if held is None else f", peak {held / 1e6:.0f} MB"
        line = f"{clips} at once: {1e3 * middle:.2f} ms{peak}, apart {apart:.1e}"
        yield Figure(str(clips), line, {"seconds": middle, "peak_bytes": held, "apart": apart})


@dataclass(frozen=True)
class Measure:
    """A part, in the order in which parts are measured: first what is asked for most."""

    measure: Callable[[Case, str], Iterator[Figure]]
    networks: bool = True  # of each
    trainings: int = 1  # that it takes at least
    more_seconds: float = 0.0  # that it takes beside them

    def seconds(self, case: Case, network: str) -> float:
        """The least that it will take, as far as that is known."""
        steps = case.asked.warmup + case.asked.short_steps
        return self.trainings * case.clock.needs(network, steps) + self.more_seconds


MEASURES = {
    "busy": Measure(measure_busy),
    "loading": Measure(measure_loading, networks=False),
    "engine": Measure(measure_engine, trainings=2),
    "preflight": Measure(measure_preflight, more_seconds=_MEASURING_SECONDS),
    "stem": Measure(measure_stem, networks=False),
}


def order(parts: Sequence[str], networks: Sequence[str]) -> list[tuple[str, str]]:
    """Part and network, in the order in which they are measured."""
    known = [name for name in NETWORKS if name in networks]
    return [(p, n) for p, m in MEASURES.items() if p in parts for n in (known if m.networks else ("",))]
