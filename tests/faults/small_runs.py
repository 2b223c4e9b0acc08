"""Small whole runs of every task: some of the generated samples, few pixels, two epochs, real kernels."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

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
# A shorter run with a checkpoint after each step, for tests in which only the moment of a fault matters.
QUICK = {**SMALL, "memory_preflight": False, "checkpoint_minutes": 0}

# Random moments, places and amounts: another seed tries others, a larger count more of them.
SEED = int(os.environ.get("FVC_FAULT_SEED", "2026"))
NUM_FAULTS = int(os.environ.get("FVC_FAULT_COUNT", "10"))


@dataclass(frozen=True)
class Whole:
    """An undisturbed run, its corpus, its parameters and its duration."""

    run: RunPaths
    corpus: Path
    values: Mapping[str, object]
    seconds: float


@dataclass(frozen=True)
class Place:
    """A machine as a run sees it.

    Attributes:
        folder: Working folder; holds the folders of runs, cache and data.
        corpus: The corpus of its runs.
        values: The parameters of its runs.
    """

    folder: Path
    corpus: Path
    values: Mapping[str, object] = field(default_factory=lambda: SMALL)

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def environment(self) -> dict[str, str]:
        """Return the variables of a run; it uses as many threads as a user's run."""
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        places = {f"FVC_{name.upper()}_DIR": str(self.folder / name) for name in ("runs", "cache", "data")}
        return {**inherited, **places}

    def start(
        self, *arguments: str, variables: Mapping[str, str] | None = None, **values: object
    ) -> subprocess.Popen[str]:
        """Start ``run_notebooks.py``; a new run gets the corpus and parameters, a resumed one neither.

        Args:
            arguments: Options of the command.
            variables: Environment variables to add.
            values: Parameters to add.
        """
        given = {} if "--resume" in arguments else {"corpus": self.corpus, **self.values, **values}
        parameters = [word for name, value in given.items() for word in ("-p", name, str(value))]
        self.folder.mkdir(exist_ok=True)
        return subprocess.Popen(
            [sys.executable, str(ROOT / "run_notebooks.py"), *parameters, *arguments],
            cwd=self.folder, env={**self.environment(), **(variables or {})}, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip

    def go_on(self) -> subprocess.Popen[str]:
        """Resume the newest run, or start the first."""
        return self.start(*(["--resume", "latest"] if list_runs(self.runs) else []))

    def run(self, *arguments: str, **values: object) -> tuple[RunPaths, str]:
        """Run to the end; return the run and the terminal's text."""
        process = self.start(*arguments, **values)
        shown, _ = process.communicate(timeout=600)
        assert process.returncode == 0, shown
        return list_runs(self.runs)[-1], shown


def small_corpus(task: str, folder: Path) -> Path:
    """Draw a part of the task's sample corpus into ``folder`` and return the corpus."""
    with pytest.MonkeyPatch.context() as patch:
        if task == "image":
            dishes = drawings.plan_dishes()
            foods = [[dish for dish in dishes if dish.food == food][:10] for food in ("cookies", "sausages", "toast")]
            patch.setattr(drawings, "plan_dishes", lambda: tuple(itertools.chain(*foods)))
            return drawings.generate_sample_dishes(folder)
        if task == "video_text":
            clips, numbers = drawings.plan_clips(), {"train": 24, "validation": 6, "test": 8}
            parts = [[clip for clip in clips if clip.part == part][:number] for part, number in numbers.items()]
            patch.setattr(drawings, "plan_clips", lambda: tuple(itertools.chain(*parts)))
            return drawings.generate_sample_captions(folder)
        events = sample.plan_events()
        labels = [[event for event in events if event.label == label][:6] for label in ("real", "fake")]
        patch.setattr(sample, "plan_events", lambda: tuple(itertools.chain(*labels)))
        return sample.generate_sample_corpus(folder)


def results_of(run: RunPaths) -> dict[str, bytes]:
    """Return the bytes of every table, every result and every best model, by path in the run folder."""
    files = [*run.tables.rglob("*"), run.results, run.task_results, *(run.root / "checkpoints").rglob(BEST)]
    return {str(path.relative_to(run.root)): path.read_bytes() for path in files if path.is_file()}


def metrics_of(run: RunPaths) -> dict[tuple[object, ...], tuple[object, object]]:
    """Return (value, flag) by log name, step, epoch, phase and metric; lines of several attempts must agree."""
    found: dict[tuple[object, ...], tuple[object, object]] = {}
    for log in sorted(run.root.glob("metrics/*.jsonl")):
        for line in log.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # a kill tore the line; its step was logged again
                row = json.loads(line)
                key = (log.name, *(row[name] for name in ("step", "epoch", "phase", "metric")))
                value = (row["value"], row["flag"])
                assert found.setdefault(key, value) == value, key
    return found


def untruths(run: RunPaths) -> Iterator[str]:
    """Yield what the status says and the files contradict; a stage's end is written after its files."""
    status = read_status(run)
    tasks = [Task(stage, fold) for stage in STAGES for fold in (range(5) if stage.per_fold else (None,))]
    done = [task for task in tasks if task.key in status.stages and status.stages[task.key].state == "done"]
    for task in done:
        if not run.executed_notebook(task.stage.name, task.fold).is_file():
            yield f"{task.key} is done without a notebook"
        for name, listed in json.loads(run.stage_checkpoint(task.stage.name, task.fold).read_text())["files"].items():
            if not is_log(name) and sha256_of_file(run.root / name) != listed["sha256"]:
                yield f"{task.key} is done, but {name} has changed"
    if status.state == "done" and len(done) < len(status.stages):
        yield f"the run is done with {len(done)} of {len(status.stages)} stages"


def assert_nothing_is_redone(run: RunPaths, finished: dict[str, int]) -> None:
    """Check that no finished stage began again; add the stages that are done now, with their attempts."""
    stages = read_status(run).stages
    assert {key: stages[key].attempts for key in finished} == finished
    finished.update({key: stage.attempts for key, stage in stages.items() if stage.state == "done"})


def assert_same_end(run: RunPaths, whole: RunPaths) -> None:
    """Check that all is done and the tables, results, best models and metrics equal the whole run's bit by bit."""
    assert read_status(run).state == "done"
    found, wanted = results_of(run), results_of(whole)
    assert found.keys() == wanted.keys()
    assert [name for name, content in wanted.items() if found[name] != content] == []
    assert metrics_of(run) == metrics_of(whole)


def wait_for_no_orphans(seconds: float = 60) -> None:
    """Wait until the kernels of killed runners have left.

    Raises:
        AssertionError: One is still there.
    """
    end = time.monotonic() + seconds
    while orphans := [p for p in psutil.process_iter(["cmdline", "ppid"]) if _is_orphaned_kernel(p)]:
        assert time.monotonic() < end, f"kernels outlived their runners: {orphans}"
        time.sleep(0.2)


def _is_orphaned_kernel(process: psutil.Process) -> bool:
    command = " ".join(process.info["cmdline"] or ())
    is_kernel = "fvc_lib.execution.kernel_server" in command or ("ipykernel_launcher" in command and "fvc-" in command)
    return is_kernel and process.info["ppid"] == 1
