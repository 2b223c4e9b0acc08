"""Whole runs of every task that are small: a part of the generated samples, few pixels, two epochs, real kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from fvc_lib.corpus.samples import drawings, videos as sample
from fvc_lib.execution.run.status import read_status
from fvc_lib.execution.stages import Task
from fvc_lib.services.atomic_files import sha256_of_file
from fvc_lib.services.checkpoint_files import BEST
from fvc_lib.services.records.digests import is_log
from fvc_lib.services.run_paths import RunPaths, list_runs
from fvc_lib.services.tasks import STAGES

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
        **SMALL_TASK, "task": "video_text", "fixed_size": 32, "num_frames": 2,
        "embedding_size": 16, "max_text_tokens": 16, "vocabulary_size": 300,
        "effective_batch_size": 8, "batch_size": 8,
    },
}  # fmt: skip
# Less to wait for, and a checkpoint after each step, where only the moment of a fault matters.
QUICK = {**SMALL, "memory_preflight": False, "checkpoint_minutes": 0}

# Random moments, places and amounts: another seed tries others, and a larger number more of them.
SEED = int(os.environ.get("FVC_FAULT_SEED", "2026"))
NUM_FAULTS = int(os.environ.get("FVC_FAULT_COUNT", "10"))


@dataclass(frozen=True)
class Whole:
    """A run that was never disturbed, what it read and was given, and how long it took."""

    run: RunPaths
    corpus: Path
    values: Mapping[str, object]
    seconds: float


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
        self,
        *arguments: str,
        variables: Mapping[str, str] | None = None,
        limit: Callable[[], None] | None = None,
        **values: object,
    ) -> subprocess.Popen[str]:
        """Start ``run_notebooks.py``; a new run gets the corpus and ``values`` beside its own.

        Args:
            arguments: options; with ``--resume`` no parameters are given.
            variables: of the environment, beside the place's own.
            limit: called in the new process before it begins.
            values: parameters.
        """
        given = [] if "--resume" in arguments else ["-p", "corpus", str(self.corpus)]
        for name, value in ({} if "--resume" in arguments else {**self.values, **values}).items():
            given += ["-p", name, str(value)]
        self.folder.mkdir(exist_ok=True)
        return subprocess.Popen(
            [sys.executable, str(ROOT / "run_notebooks.py"), *given, *arguments],
            cwd=self.folder, env={**self.environment(), **(variables or {})}, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, preexec_fn=limit,
        )  # fmt: skip

    def go_on(self, **options: Any) -> subprocess.Popen[str]:
        """``start``, with ``--resume latest`` where there is a run already."""
        return self.start(*(["--resume", "latest"] if list_runs(self.runs) else []), **options)

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
            dishes = drawings.plan_dishes()
            some = [dish for food in ("cookies", "sausages", "toast") for dish in _of_food(dishes, food)[:10]]
            patch.setattr(drawings, "plan_dishes", lambda: tuple(some))
            return drawings.generate_sample_dishes(folder)
        if task == "video_text":
            clips, numbers = drawings.plan_clips(), {"train": 24, "validation": 6, "test": 8}
            few = [clip for part, n in numbers.items() for clip in [c for c in clips if c.part == part][:n]]
            patch.setattr(drawings, "plan_clips", lambda: tuple(few))
            return drawings.generate_sample_captions(folder)
        events = sample.plan_events()
        both = [event for label in ("real", "fake") for event in [e for e in events if e.label == label][:6]]
        patch.setattr(sample, "plan_events", lambda: tuple(both))
        return sample.generate_sample_corpus(folder)


def _of_food(dishes: tuple[Any, ...], food: str) -> list[Any]:
    return [dish for dish in dishes if dish.food == food]


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


def untruths(run: RunPaths) -> Iterator[tuple[str, str]]:
    """What the status says and is not so. A stage's end is written after what it wrote, so nothing may lag behind."""
    status = read_status(run)
    tasks = [Task(stage, fold) for stage in STAGES for fold in (range(5) if stage.per_fold else (None,))]
    for task in tasks:
        if task.key not in status.stages or status.stages[task.key].state != "done":
            continue
        record = run.stage_checkpoint(task.stage.name, task.fold)
        if not record.is_file():
            yield task.key, "is called done, and has no record that it finished"
            continue
        if not run.executed_notebook(task.stage.name, task.fold).is_file():
            yield task.key, "is called done, and its notebook is not there"
        for name, listed in json.loads(record.read_text())["files"].items():
            if not is_log(name) and sha256_of_file(run.root / name) != listed["sha256"]:
                yield task.key, f"is called done, and {name} is not what it wrote"
    unfinished = [key for key, stage in status.stages.items() if stage.state != "done"]
    if status.state == "done" and unfinished:
        yield "run", f"is called done without {unfinished}"


def assert_nothing_is_redone(run: RunPaths, finished: dict[str, int]) -> None:
    """A stage that was done was begun no more since; what is done now is noted in ``finished``, with its attempts."""
    stages = read_status(run).stages
    assert {key: stages[key].attempts for key in finished} == finished
    finished.update({key: stage.attempts for key, stage in stages.items() if stage.state == "done"})


def assert_same_end(run: RunPaths, whole: RunPaths) -> None:
    """All done, and every table, result, best model and metric is what it is in the undisturbed run, to the bit."""
    assert read_status(run).state == "done"
    found, wanted = results_of(run), results_of(whole)
    assert found.keys() == wanted.keys()
    assert [name for name, content in wanted.items() if found[name] != content] == []
    assert metrics_of(run) == metrics_of(whole)


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
