"""The report: the targets beside what was measured, and the figures behind them, as Markdown tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from benchmarks.decode.peers import FLOOR, OURS
from benchmarks.decode.results import Case, Results, Throughput
from benchmarks.decode.targets import MEBIBYTE, Verdict, verdicts

_MET = {True: "met", False: "**missed**", None: "not measured"}


def targets_table(results: Results) -> str:
    """One line per target."""
    rows = [_verdict_cells(verdict) for verdict in verdicts(results)]
    return table(("decode_clip against", "target", "worst case", "median of cases", ""), rows)


def cpu_table(results: Results) -> str:
    """Median and least CPU time of each contestant on each case, ours over theirs, and whether frames were the same."""
    ours = {cost.case: cost for cost in results.cpu if cost.peer == OURS}
    packets = {count.case: f"{count.necessary} of {count.there}" for count in results.floor}
    rows = [
        (
            *_case_cells(cost.case),
            cost.peer + (f" ({packets[cost.case]} packets)" if cost.peer == FLOOR else ""),
            f"{cost.median_seconds:.3f}",
            f"{cost.least_seconds:.3f}",
            f"{ours[cost.case].ratio_to(cost):.2f}",
            f"{ours[cost.case].least_seconds / cost.least_seconds:.2f}",
            f"{cost.difference:.2f}",
            "" if cost.gave_the_same else f"other frames: {cost.wrong_frames} of {cost.case.num_frames}",
        )
        for cost in results.cpu
    ]
    return table(
        (
            "video",
            "frames",
            "px",
            "by",
            "CPU s, median",
            "least",
            "ours : theirs, median",
            "of the least",
            "differs",
            "",
        ),
        rows,
    )


def memory_table(results: Results) -> str:
    """Peak memory over the imports of each contestant on each case."""
    rows = [(*_case_cells(peak.case), peak.peer, f"{peak.peak_bytes / MEBIBYTE:.1f}") for peak in results.memory]
    return table(("video", "frames", "px", "by", "peak MiB"), rows)


def throughput_table(passes: Sequence[Throughput]) -> str:
    """Clips per second of whole corpora."""
    rows = [
        (
            each.peer,
            f"{each.workers} {each.how}",
            str(each.num_clips),
            f"{each.clips_per_second:.2f}",
            f"{each.num_clips / statistics.median(each.cpu_seconds):.2f}",
            f"{each.busy_elsewhere:.1f}",
            str(each.wrong_clips) if each.wrong_clips else "",
        )
        for each in passes
    ]
    return table(("by", "workers", "clips", "clips/s", "clips/CPU s", "cores busy elsewhere", "wrong clips"), rows)


def notes(results: Results) -> str:
    """Versions, and who is missing and why."""
    lines = [f"- {name} {version}" for name, version in results.versions.items()]
    lines += [f"- absent: {name} ({why})" for name, why in results.absent.items()]
    lines += [f"- could not: {what} ({why})" for what, why in results.failures.items()]
    return "\n".join(lines)


def whole_report(results: Results) -> str:
    """Everything that was measured."""
    parts = [notes(results), targets_table(results)]
    if results.cpu:
        parts.append(cpu_table(results))
    if results.memory:
        parts.append(memory_table(results))
    parts += [throughput_table(passes) for passes in (results.throughput, results.scaling) if passes]
    return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table with aligned columns."""
    cells = [list(head), *[list(row) for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _verdict_cells(verdict: Verdict) -> tuple[str, ...]:
    target = f"{verdict.relation} {verdict.target:g} {verdict.unit}".rstrip()
    if verdict.measured is None:
        return verdict.what, target, "", "", _MET[None]
    worst = f"{verdict.measured:.3g}" + (f" ({verdict.where})" if verdict.where else "")
    typical = "" if verdict.typical is None else f"{verdict.typical:.3g}"
    return verdict.what, target, worst, typical, _MET[verdict.met]


def _case_cells(case: Case) -> tuple[str, str, str]:
    return case.video, str(case.num_frames), str(case.size)
