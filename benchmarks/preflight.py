#!/usr/bin/env python3
"""What the memory preflight predicts beside what a training then takes, case by case.

Each case is a process of its own that does what a notebook does: predict first, then train one fold on clips of
noise. ``measured`` is the training's peak, the larger of VmHWM (reset after the preflight) and of what the process held
with its children, looked at every 20 ms. ``off`` is how far the prediction lies above it. The exit code is 1 when any
case is off by more than 25 %.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import polars as pl
import psutil

from fvc_lib.engine.device import resolve_device
from fvc_lib.engine.preflight import StepRequest, preflight
from fvc_lib.services.config import RunConfig
from fvc_lib.services.memory import ProcessTree, memory_budget, peak_rss_bytes
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import AUGMENTED, FOLDS, write_table
from fvc_lib.tasks.video.data import ClipDataset, clip_rows
from fvc_lib.tasks.video.training import VideoTask, train_fold
from fvc_lib.video.clips.store import ClipStore

ALLOWED = 0.25


@dataclass(frozen=True)
class Case:
    """One training."""

    model: str
    num_frames: int
    fixed_size: int
    micro_batch: int
    num_workers: int = 0
    gradient_checkpointing: bool = False
    effective_batch_size: int = 16
    num_videos: int = 96


@dataclass(frozen=True)
class Result:
    """In bytes, and the preflight's seconds."""

    baseline: int
    predicted: int
    measured: int
    seconds: float


CASES = (
    *(Case("frame_cnn", 6, 112, micro_batch) for micro_batch in (1, 4, 8, 16)),
    Case("frame_cnn", 16, 224, 2),
    Case("frame_cnn", 16, 224, 16),
    Case("frame_cnn", 6, 112, 8, num_workers=2),
    *(Case("r2plus1d_small", 6, 112, micro_batch) for micro_batch in (1, 4, 8, 16)),
    Case("r2plus1d_small", 16, 224, 2),
    Case("r2plus1d_small", 16, 224, 8),
    Case("r2plus1d_small", 16, 224, 2, num_workers=2),
    Case("r2plus1d_small", 16, 224, 8, gradient_checkpointing=True),
)


class _NoMetrics:
    def log(self, *, step: int, epoch: int, phase: str, metrics: Mapping[str, float]) -> None:
        """Ignore."""


def run_case(case: Case, folder: Path) -> Result:
    """Predict, then train, in this process."""
    config = RunConfig(
        cache_dir=str(folder / "cache"), runs_dir=str(folder), model=case.model, num_frames=case.num_frames,
        fixed_size=case.fixed_size, batch_size=case.micro_batch, effective_batch_size=case.effective_batch_size,
        num_workers=case.num_workers, gradient_checkpointing=case.gradient_checkpointing, num_folds=2,
        augmentations_per_video=0, epochs=2, device="cpu", shuffled_label_control=False, memory_preflight=False,
    )  # fmt: skip
    paths = RunPaths(folder / "run")
    folds = _tables(config, paths, case.num_videos)
    rows = clip_rows(folds)
    task = VideoTask(
        ClipDataset(ClipStore.of(config), rows),
        ClipDataset(ClipStore.of(config), rows),
        config=config,
        weights=(1.0, 1.0),
    )
    request = StepRequest(
        task, case.micro_batch, case.effective_batch_size, resolve_device("cpu"), num_workers=case.num_workers,
        gradient_checkpointing=case.gradient_checkpointing,
    )  # fmt: skip
    baseline, started = psutil.Process().memory_info().rss, time.monotonic()
    report = preflight(request, budget=memory_budget())
    if report.problem or report.peak_bytes is None:
        raise SystemExit(report.message())
    seconds = time.monotonic() - started
    with _peak() as peaks:
        train_fold(paths, config, 0, metric_log=_NoMetrics())
    return Result(baseline, report.peak_bytes, max(peaks), seconds)


@contextmanager
def _peak() -> Iterator[list[int]]:
    """The peak of this process and of it with its children, from here to the end."""
    peaks = [0]
    stop = threading.Event()
    tree = ProcessTree()

    def look() -> None:
        while not stop.wait(0.02):
            peaks[0] = max(peaks[0], tree.measure().tree_bytes)

    Path("/proc/self/clear_refs").write_text("5")
    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peaks
    finally:
        stop.set()
        thread.join()
        peaks.append(peak_rss_bytes())


def _tables(config: RunConfig, paths: RunPaths, num_videos: int) -> pl.DataFrame:
    """Folds of one video a group, their clips of noise, and the list of clips."""
    numbers = range(num_videos)
    folds = pl.DataFrame(
        {
            "video_id": [f"video{number:03d}" for number in numbers],
            "group_id": [f"group{number:03d}" for number in numbers],
            "label": [("real", "fake")[number % 2] for number in numbers],
            "fold": [number // 2 % 2 for number in numbers],
        }
    )
    store, generator = ClipStore.of(config), np.random.default_rng(0)
    for video_id in folds["video_id"]:
        store.write(video_id, 0, generator.integers(0, 256, store.shape, np.uint8))
    made = [
        (f"{video}_0", video, group, label, 0, "[]", store.settings_hash, "-")
        for video, group, label, _ in folds.iter_rows()
    ]
    write_table(folds, FOLDS, paths.folds)
    write_table(pl.DataFrame(made, schema=list(AUGMENTED.columns), orient="row"), AUGMENTED, paths.augmented_metadata)
    return folds


def _in_a_process(case: Case) -> Result:
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return Result(**json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    """Run every case and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args().case
    if given:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(asdict(run_case(Case(**json.loads(given)), Path(folder)))))
        return 0
    print("model      frames size micro workers recompute  baseline predicted measured    off  seconds")
    worst = 0.0
    for case in CASES:
        result = _in_a_process(case)
        off = result.predicted / result.measured - 1
        worst = max(worst, abs(off))
        print(
            f"{case.model:10s} {case.num_frames:6d} {case.fixed_size:4d} {case.micro_batch:5d} {case.num_workers:7d} "
            f"{'yes' if case.gradient_checkpointing else 'no':>9s} {result.baseline / 1e6:6.0f} MB "
            f"{result.predicted / 1e6:6.0f} MB {result.measured / 1e6:5.0f} MB {off:+7.1%} {result.seconds:7.1f}",
            flush=True,
        )
    print(f"worst: {worst:.1%} (allowed: {ALLOWED:.0%})")
    return int(worst > ALLOWED)


if __name__ == "__main__":
    raise SystemExit(main())
