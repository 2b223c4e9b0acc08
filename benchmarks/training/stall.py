"""How long a checkpoint of a large state holds up the training, beside torch.save and fsync of the same state."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.clips import NoLog
from benchmarks.training.figures import Figure
from fvc_lib.engine.device import resolve_device
from fvc_lib.engine.loop import Engine, EngineSettings
from fvc_lib.engine.task import Batch, LossSum, Outputs, Sample
from fvc_lib.services.checkpoint_files import CheckpointBinding, CheckpointFolder

_WIDTH, _DEPTH = 1646, 4  # the weights and two moments of these layers are 130 MB in float32
_BATCH = 32
_TRIES = 8


class WideTask:
    """Regression by a stack of wide layers: many weights, little work for each."""

    def __init__(self, width: int, steps: int) -> None:
        self._width = width
        self.training_data = Vectors(width, steps * _BATCH)
        self.validation_data = Vectors(width, _BATCH)

    def build_model(self) -> nn.Module:
        """Linear layers and ReLU between them."""
        layers = [nn.Linear(self._width, self._width, bias=False) for _ in range(_DEPTH)]
        return nn.Sequential(*[module for layer in layers for module in (layer, nn.ReLU())])

    def forward(self, model: nn.Module, batch: Batch) -> Outputs:
        """``values`` (B, width)."""
        return {"values": model(batch.tensors["values"])}

    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        """Squared error."""
        values = batch.tensors["values"]
        return LossSum(F.mse_loss(outputs["values"], values, reduction="sum"), torch.tensor(float(len(values))))

    def new_accumulator(self) -> WideTask:
        """Nothing is gathered."""
        return self

    def update(self, outputs: Outputs, batch: Batch) -> None:
        """Nothing."""

    def compute(self) -> dict[str, float]:
        """Nothing."""
        return {}


@dataclass(frozen=True)
class Vectors:
    """``count`` samples of noise."""

    width: int
    count: int
    classes: Sequence[int] | None = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        generator = torch.Generator().manual_seed(index)
        return Sample(str(index), {"values": torch.rand(self.width, generator=generator)})


@dataclass
class Watched:
    """Given to an engine as ``stop``: notes how long each step took, and whether it saved.

    Attributes:
        quiet: seconds of steps without a save.
        saving: seconds of steps with one.
    """

    folder: WatchedFolder
    quiet: list[float] = field(default_factory=list)
    saving: list[float] = field(default_factory=list)
    _started: float | None = None
    _saves: int = 0

    def __call__(self) -> bool:
        """Note the step that has ended; never stop the engine."""
        now = time.perf_counter()
        saves = len(self.folder.blocked)
        if self._started is not None:
            (self.saving if saves > self._saves else self.quiet).append(now - self._started)
        self._started, self._saves = time.perf_counter(), saves
        return False


class WatchedFolder(CheckpointFolder):
    """Notes how long each save kept its caller, on the wall and in CPU time."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, CheckpointBinding({}, "benchmark"))
        self.blocked: list[float] = []
        self.blocked_cpu: list[float] = []
        self.num_bytes = 0

    def save(self, state: dict[str, object], **options: object) -> None:  # type: ignore[override]
        """Save and note."""
        wall, cpu = time.perf_counter(), time.thread_time()
        super().save(state, **options)  # type: ignore[arg-type]
        self.blocked.append(time.perf_counter() - wall)
        self.blocked_cpu.append(time.thread_time() - cpu)
        self.num_bytes = tensor_bytes(state)


def measure_stall(folder: Path, *, steps: int, between_seconds: float, width: int = _WIDTH) -> list[Figure]:
    """Train an epoch of ``steps`` steps with a checkpoint every ``between_seconds``.

    A disk that takes longer than that for every checkpoint leaves no step to compare with: then again, twice as long
    and with twice the time between checkpoints.
    """
    for doubled in range(_TRIES):
        watched, plain = _watched_epoch(folder, steps << doubled, between_seconds * 2**doubled, width)
        if watched.saving and watched.quiet:
            break
    return stall_figures(watched, plain)


def _watched_epoch(folder: Path, steps: int, between_seconds: float, width: int) -> tuple[Watched, list[float]]:
    settings = EngineSettings(
        epochs=1, effective_batch_size=_BATCH, micro_batch=_BATCH, learning_rate=1e-4, weight_decay=0.01,
        warmup_share=0.1, max_gradient_norm=1.0, early_stopping_epochs=0, seed=0, checkpoint_seconds=between_seconds,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(dir=folder) as name:
        checkpoints = WatchedFolder(Path(name) / "checkpoints")
        watched = Watched(checkpoints)
        engine = Engine(
            WideTask(width, steps), settings, resolve_device("cpu", "off"), checkpoints, NoLog(), stop=watched
        )
        engine.fit()
        return watched, _plain_saves(engine.state.best_model, Path(name))


def stall_figures(watched: Watched, plain: list[float]) -> list[Figure]:
    """In milliseconds by save; the saves before the first step and at the epoch's end are left out.

    Raises:
        RuntimeError: nothing was saved between two steps.
    """
    if not watched.saving or not watched.quiet:
        raise RuntimeError(
            f"{len(watched.saving)} saves within {len(watched.quiet)} quiet steps, wanted some of both: more steps."
        )
    usual = statistics.median(watched.quiet)
    group = f"state of {watched.folder.num_bytes / 1e6:.0f} MB"

    def milliseconds(what: str, values: list[float]) -> Figure:
        return Figure(group, what, "ms", tuple(1e3 * value for value in values))

    return [
        milliseconds("a save blocks the training", watched.folder.blocked[1:-1]),
        milliseconds("CPU time of that", watched.folder.blocked_cpu[1:-1]),
        milliseconds("a step with a save, over the usual", [seconds - usual for seconds in watched.saving]),
        milliseconds("usual step", watched.quiet),
        milliseconds("torch.save and fsync of as large a state", plain),
    ]  # fmt: skip


def tensor_bytes(value: object) -> int:
    """Of all tensors in nested dicts and lists."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(tensor_bytes(item) for item in value.values())
    return sum(tensor_bytes(item) for item in value) if isinstance(value, (list, tuple)) else 0


def _plain_saves(weights: dict[str, torch.Tensor], folder: Path) -> list[float]:
    """What most training loops do, with a state as large: three times the weights."""
    state = {number: weights if number == 0 else {k: t.clone() for k, t in weights.items()} for number in range(3)}
    seconds = []
    for number in range(3):
        started = time.perf_counter()
        with (folder / f"plain_{number}.pt").open("wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())
        seconds.append(time.perf_counter() - started)
    return seconds
