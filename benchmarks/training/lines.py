"""How many lines a second the metric log takes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.training.figures import Figure
from fvc_lib.services.stage_logs import MetricLog

TARGET = 50_000
LINES_PER_BLOCK = 6_000
_METRICS = {"loss": 0.6931471805599453, "learning_rate": 0.0029384736, "gradient_norm": 1.2345678901234567}


def measure_lines(folder: Path, blocks: int) -> list[Figure]:
    """Lines per second of CPU and of wall time through ``MetricLog.log``, one metric a call and three, in turns."""
    calls = {"one metric a call": dict(list(_METRICS.items())[:1]), "three metrics a call": _METRICS}
    rates: dict[tuple[str, str], list[float]] = {(what, clock): [] for what in calls for clock in ("CPU", "wall")}
    with tempfile.TemporaryDirectory(dir=folder) as name:
        for block in range(blocks):
            for what, metrics in calls.items():
                with MetricLog(Path(name) / f"{block}.jsonl", run_id="2026-01-01_00-00-00", fold=0) as log:
                    wall, cpu = _timed(lambda: _write(log, metrics))  # noqa: B023 - called at once
                rates[what, "CPU"].append(LINES_PER_BLOCK / cpu)
                rates[what, "wall"].append(LINES_PER_BLOCK / wall)
    return [
        Figure("metric log", f"lines a second of {clock} time, {what}", "", tuple(values), "at least", TARGET)
        for (what, clock), values in rates.items()
    ]


def _write(log: MetricLog, metrics: dict[str, float]) -> None:
    for step in range(LINES_PER_BLOCK // len(metrics)):
        log.log(step=step, epoch=3, phase="train", metrics=metrics)


def _timed(work: Callable[[], None]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.thread_time()
    work()
    return time.perf_counter() - wall, time.thread_time() - cpu
