"""What an engine does besides computing gradients and stepping, made countable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from benchmarks.clips import NoLog
from fvc_lib.engine.training_state import MetricSink
from fvc_lib.services.checkpoint_files import CheckpointBinding, CheckpointFolder
from fvc_lib.services.memory import DeviceMemory, EventDetail, MemoryObserver, NoObserver
from fvc_lib.services.stage_logs import MemorySampler, MetricLog

NEVER = 1e9


@dataclass
class Extras:
    """One training's metric log, memory sampler and checkpoints; by default all are off.

    Attributes:
        folder: an empty one, where they write.
        logged: times each step's metrics are written; 0: not at all.
        sample_seconds: between two memory samples; 0: none is taken.
        checkpoint_seconds: between two checkpoints within an epoch.
        observer: what the engine's position goes to just now.
        num_samples: memory samples taken so far.
    """

    folder: Path
    logged: int = 0
    sample_seconds: float = 0.0
    checkpoint_seconds: float = NEVER
    checkpoints: CountingFolder = field(init=False)
    observer: MemoryObserver = field(default_factory=NoObserver)
    num_samples: int = 0

    def __post_init__(self) -> None:
        self.checkpoints = CountingFolder(self.folder / "checkpoints", CheckpointBinding({}, "benchmark"))

    @contextmanager
    def metrics(self) -> Iterator[MetricSink]:
        """Where metrics go."""
        if not self.logged:
            yield NoLog()
            return
        with MetricLog(self.folder / "metrics.jsonl", run_id="benchmark", fold=0) as log:
            yield Repeated(log, self.logged)

    def around(self) -> AbstractContextManager[object]:
        """What runs beside blocks of the engine only."""
        return self._sampled() if self.sample_seconds else nullcontext()

    @contextmanager
    def _sampled(self) -> Iterator[None]:
        path = self.folder / "memory.jsonl"
        with MemorySampler(path, events=self.folder / "events.jsonl", interval_seconds=self.sample_seconds) as sampler:
            self.observer = sampler
            yield
        self.observer = NoObserver()
        self.num_samples += len(path.read_text().splitlines())
        path.unlink()


class CountingFolder(CheckpointFolder):
    """Counts what it was given to save."""

    num_saved = 0

    def save(self, *args: object, **options: object) -> None:
        """Count and save."""
        self.num_saved += 1
        super().save(*args, **options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Repeated:
    """A metric log that is told everything several times."""

    log_once: MetricSink
    times: int

    def log(self, *, step: int, epoch: int, phase: str, metrics: Mapping[str, float]) -> None:
        """So many times."""
        for _ in range(self.times):
            self.log_once.log(step=step, epoch=epoch, phase=phase, metrics=metrics)


@dataclass(frozen=True)
class CurrentObserver:
    """Passes on to the sampler that is open just now."""

    extras: Extras
    prefix: ClassVar[str] = ""

    def at(self, phase: str, **position: int | None) -> None:
        """Pass on."""
        self.extras.observer.at(phase, **position)

    def event(self, kind: str, message: str, **details: EventDetail) -> None:
        """Pass on."""
        self.extras.observer.event(kind, message, **details)

    def watch_device(self, device: str, probe: Callable[[], DeviceMemory]) -> None:
        """Pass on."""
        self.extras.observer.watch_device(device, probe)
