"""Whole runs of every task that are small: a part of the generated samples, few pixels, two epochs, real kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from fvc_lib.corpus.samples import captions as sample_captions, dishes as sample_dishes, videos as sample
from fvc_lib.services.checkpoint_files import BEST
from fvc_lib.services.run_paths import RunPaths, list_runs

ROOT = Path(__file__).parents[2]
SMALL = {
    "num_folds": 2, "fixed_size": 32, "num_frames": 4, "epochs": 2, "model": "frame_cnn", "augmentations_per_video": 1,
    "bootstrap_replicates": 100, "inner_validation_share": 0.34,
}  # fmt: skip
SMALL_TASK = {"epochs": 2, "bootstrap_replicates": 100, "memory_preflight": False, "device": "cpu"}
VALUES: Mapping[str, Mapping[str, object]] = {
    "video": SMALL,
    "image": {**SMALL_TASK, "task": "image", "image_size": 32},
    "video_text": {
        **SMALL_TASK, "task": "video_text", "fixed_size": 32, "num_frames": 2, "text_width": 16, "text_heads": 2,
        "text_layers": 1, "embedding_size": 16, "max_text_tokens": 16, "vocabulary_size": 300, "recall_at": "1,2",
        "effective_batch_size": 8, "batch_size": 8,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A machine as a run sees it: its own folders, and where it is started from.

    Attributes:
        folder: holds the folders of runs, cache and data.
        corpus: what its runs read.
        values: their parameters.
    """

    folder: Path
    corpus: Path
    values: Mapping[str, object] = field(default_factory=lambda: SMALL)

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        return {
            **inherited,  # but for the threads: as many as a user's run has
            "FVC_RUNS_DIR": str(self.runs),
            "FVC_CACHE_DIR": str(self.folder / "cache"),
            "FVC_DATA_DIR": str(self.folder / "data"),
        }

    def start(
        self, *arguments: str, variables: Mapping[str, str] | None = None, **values: object
    ) -> subprocess.Popen[str]:
        """Start ``run_notebooks.py``; a new run gets the corpus and ``values`` beside its own."""
        given = [] if "--resume" in arguments else ["-p", "corpus", str(self.corpus)]
        for name, value in ({} if "--resume" in arguments else {**self.values, **values}).items():
            given += ["-p", name, str(value)]
        self.folder.mkdir(exist_ok=True)
        return subprocess.Popen(
            [sys.executable, str(ROOT / "run_notebooks.py"), *given, *arguments],
            cwd=self.folder, env={**self.environment(), **(variables or {})}, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, *arguments: str, **values: object) -> tuple[RunPaths, str]:
        """Run to the end; returns the run and what the terminal showed."""
        process = self.start(*arguments, **values)
        shown, _ = process.communicate(timeout=600)
        assert process.returncode == 0, shown
        return list_runs(self.runs)[-1], shown


def small_corpus(task: str, folder: Path) -> Path:
    """What a small run of ``task`` reads: some of the sample corpus, drawn into ``folder``."""
    with pytest.MonkeyPatch.context() as patch:
        if task == "image":
            dishes = sample_dishes.plan_dishes()
            some = [dish for food in ("cookies", "sausages", "toast") for dish in _of_food(dishes, food)[:10]]
            patch.setattr(sample_dishes, "plan_dishes", lambda: tuple(some))
            return sample_dishes.generate_sample_dishes(folder)
        if task == "video_text":
            clips, numbers = sample_captions.plan_clips(), {"train": 24, "validation": 6, "test": 8}
            few = [clip for part, n in numbers.items() for clip in [c for c in clips if c.part == part][:n]]
            patch.setattr(sample_captions, "plan_clips", lambda: tuple(few))
            return sample_captions.generate_sample_captions(folder)
        events = sample.plan_events()
        both = [event for label in ("real", "fake") for event in [e for e in events if e.label == label][:6]]
        patch.setattr(sample, "plan_events", lambda: tuple(both))
        return sample.generate_sample_corpus(folder)


def _of_food(dishes: tuple[Any, ...], food: str) -> list[Any]:
    return [dish for dish in dishes if dish.dish.food == food]


def results_of(run: RunPaths) -> dict[str, bytes]:
    """The bytes of every table, every result and every training's best model, by place in the run folder."""
    files = [*run.tables.rglob("*"), run.results, run.task_results, *(run.root / "checkpoints").rglob(BEST)]
    return {str(path.relative_to(run.root)): path.read_bytes() for path in files if path.is_file()}


def metrics_of(run: RunPaths) -> dict[tuple[object, ...], tuple[object, object]]:
    """What was measured, by log, step, epoch, phase and metric; what several attempts wrote must agree."""
    found: dict[tuple[object, ...], tuple[object, object]] = {}
    for log in sorted(run.root.glob("metrics/*.jsonl")):
        for line in log.read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:  # torn by a kill; its step was repeated, and said again
                continue
            key, value = (log.name, row["step"], row["epoch"], row["phase"], row["metric"]), (row["value"], row["flag"])
            assert found.setdefault(key, value) == value, key
    return found


def wait_for_no_orphans(seconds: float = 60) -> None:
    """A killed runner's kernel must leave by itself within seconds.

    Raises:
        AssertionError: one has not.
    """
    end = time.monotonic() + seconds
    while orphans := [p for p in psutil.process_iter(["cmdline", "ppid"]) if _is_orphaned_kernel(p)]:
        assert time.monotonic() < end, f"kernels outlived their runners: {orphans}"
        time.sleep(0.2)


def _is_orphaned_kernel(process: psutil.Process) -> bool:
    command = " ".join(process.info["cmdline"] or ())
    return "ipykernel_launcher" in command and "fvc-" in command and process.info["ppid"] == 1
