"""Memory logs with a known story, written as the sampler writes them, for tests and for looking at figures."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fvc_lib.analysis.memory import MemoryFindings, run_memory
from fvc_lib.analysis.read.queries import memory_events, memory_samples
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.stage_logs import JsonLines


def memory_of(run: RunPaths) -> MemoryFindings:
    return run_memory(memory_samples([run]), memory_events([run]))


@dataclass
class StoryWriter:
    """One stage's samples and events; ``wall`` minus ``clock`` is when the sampler was opened."""

    run: RunPaths
    stage: str = "04_fold_training"
    fold: int | None = 0
    budget_mb: float = 2000.0
    wall: float = 1_741_083_300.0
    clock: float = 0.0

    def sample(
        self,
        used_mb: float,
        phase: str = "train",
        *,
        epoch: int | None = None,
        step: int | None = None,
        seconds: float = 1.0,
        children_mb: float = 0.0,
        device: str = "cpu",
        highest_mb: float | None = None,
        reserved_mb: float | None = None,
        rss_mb: float | None = None,
    ) -> Self:
        """``seconds`` after the last line, ``used_mb`` are in use."""
        self.pass_time(seconds)
        line = {
            **self._stamp(phase, epoch, step),
            "allocated_mb": used_mb,
            "reserved_mb": used_mb if reserved_mb is None else reserved_mb,
            "max_allocated_mb": used_mb if highest_mb is None else highest_mb,
            "total_memory_mb": self.budget_mb,
            "usage_percent": round(100 * used_mb / self.budget_mb, 2),
            "free_mb": self.budget_mb - used_mb,
            "device": device,
            "rank": 0,
            "rss_mb": used_mb - children_mb if rss_mb is None else rss_mb,
        }
        self._append(self.run.memory(self.stage, self.fold), line)
        return self

    def event(
        self,
        kind: str,
        message: str = "it happened",
        *,
        phase: str = "train",
        epoch: int | None = None,
        step: int | None = None,
        seconds: float = 0.0,
        **details: object,
    ) -> Self:
        self.pass_time(seconds)
        line = {**self._stamp(phase, epoch, step), "kind": kind, "message": message, "details": details}
        self._append(self.run.memory_events(self.stage, self.fold), line)
        return self

    def epochs(self, levels_mb: list[float], phase: str = "train", samples: int = 5) -> Self:
        """One epoch at each level, its samples close around it."""
        for epoch, level in enumerate(levels_mb, start=1):
            for number in range(samples):
                self.sample(level + (number % 3 - 1) * 0.5, phase, epoch=epoch, step=10 * epoch + number)
        return self

    def resume(self, pause: float = 3600.0) -> Self:
        """The stage was killed and is started again after ``pause`` seconds: the sampler's clock begins anew."""
        self.wall, self.clock = self.wall + pause, 0.0
        return self

    def pass_time(self, seconds: float) -> None:
        self.wall, self.clock = self.wall + seconds, self.clock + seconds

    def _stamp(self, phase: str, epoch: int | None, step: int | None) -> dict[str, object]:
        position = {"phase": phase, "epoch": epoch, "batch_idx": step, "global_step": step}
        return {"timestamp": round(self.wall, 3), "elapsed_seconds": round(self.clock, 3), **position}

    @staticmethod
    def _append(path: Path, line: dict[str, object]) -> None:
        with JsonLines(path) as lines:
            lines.append(line)


def troubled_run(root: Path) -> RunPaths:
    """A run near its limit: a leak in fold 0, out-of-memory in fold 1, a resume in between, all planned too low."""
    run = RunPaths(root)
    index = StoryWriter(run, "01_data_index", None)
    for second in range(12):
        index.sample(280 + 150 * (3 < second < 9), "setup", children_mb=130 if 3 < second < 9 else 0)
    StoryWriter(run, "02_folds", None).sample(285, "setup")
    leaking = StoryWriter(run, fold=0)
    leaking.sample(500, "setup").event(
        "preflight", "predicted 1,150 MB", phase="setup", predicted_peak_mb=1150.0, budget_mb=2000.0, micro_batch=8,
        micro_batch_planned=8, measured_step_mb=600.0, baseline_mb=500.0, reused=False,
    )  # fmt: skip
    for epoch in range(1, 11):
        for number in range(6):
            leaking.sample(900 + 92 * epoch + 8 * (number % 3), epoch=epoch, step=10 * epoch + number, children_mb=180)
        leaking.sample(960 + 92 * epoch, "validation", epoch=epoch, step=10 * epoch + 9, children_mb=180)
        if epoch == 10:
            leaking.event("near_limit", "memory of cpu is at 94%", epoch=10, step=109, usage_percent=94.0,
                          used_mb=1880.0, budget_mb=2000.0, device="cpu")  # fmt: skip
    short = StoryWriter(run, fold=1)
    short.sample(500, "setup").event(
        "preflight", "predicted 1,500 MB", phase="setup", predicted_peak_mb=1500.0, budget_mb=2000.0, micro_batch=8,
        micro_batch_planned=16, measured_step_mb=900.0, baseline_mb=500.0, reused=False,
    )  # fmt: skip
    short.sample(1450, epoch=1, step=1).sample(1930, epoch=1, step=2)
    short.event("out_of_memory", "memory ended in backward with 8 samples at once; next 4", epoch=1, step=2,
                where="backward", micro_batch=8, micro_batch_next=4)  # fmt: skip
    short.event("micro_batch", "micro-batch 8 -> 4: out of memory", epoch=1, step=2, micro_batch_before=8,
                micro_batch=4, reason="out of memory")  # fmt: skip
    short.sample(1300, epoch=1, step=3).resume().sample(500, "setup")
    for epoch in range(1, 7):
        for number in range(5):
            short.sample(1290 + 6 * (number % 2), epoch=epoch, step=10 * epoch + number)
        short.sample(1240, "validation", epoch=epoch, step=10 * epoch + 9)
    for epoch in range(1, 7):
        short.sample(1210, "control_train", epoch=epoch).sample(1190, "control_validation", epoch=epoch)
    return run
