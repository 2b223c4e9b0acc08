"""Tiny trainings of generated clips, for the promises. They need only torch and numpy."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fvc_lib.engine import device as devices
from fvc_lib.engine.device import ComputeDevice, resolve_device
from fvc_lib.engine.loop import Engine, EngineSettings
from fvc_lib.engine.ranks import ProcessRanks
from fvc_lib.engine.task import Batch, LossSum, Outputs, Sample, SampleColumns
from fvc_lib.engine.training_state import NoMetrics, TrainingState
from fvc_lib.services.checkpoint_files import CheckpointBinding, CheckpointFolder
from fvc_lib.services.isolated_workers import run_isolated

_CHILD_SECONDS = 300.0


@dataclass(frozen=True)
class NoisyClips:
    """``number`` clips, uint8 (frames, 3, side, side). Every second clip is a fake, which has more noise."""

    first: int
    number: int
    frames: int = 4
    side: int = 32

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> Sample:
        generator = torch.Generator().manual_seed(self.first + index)
        noise = torch.randn(self.frames, 3, self.side, self.side, generator=generator) * (30 if index % 2 else 10)
        clip = (noise + 128).round().clamp(0, 255).to(torch.uint8)
        return Sample(f"clip{index}", {"frames": clip, "label": torch.tensor(float(index % 2))})


class SmallNet(nn.Module):
    """Two 3-D convolutions, dropout and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(3, 16, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.second = nn.Conv3d(16, 32, 3, stride=2, padding=1)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(64, 1)

    def forward(self, frames: Tensor) -> Tensor:
        """Return logits (B,) for frames uint8 (B, T, 3, H, W)."""
        pixels = frames.float().div(128).sub(1).transpose(1, 2)
        features = F.relu(self.second(F.relu(self.norm(self.first(pixels)))))
        pooled = torch.cat([features.mean((2, 3, 4)), features.float().std((2, 3, 4))], dim=1)
        logits: Tensor = self.head(self.dropout(pooled))
        return logits.squeeze(1)


class Logits:
    """An accumulator of logits and labels."""

    def __init__(self) -> None:
        self._columns = SampleColumns()

    def update(self, outputs: Outputs, batch: Batch) -> None:
        """Add one batch."""
        self._columns.add(batch.sample_ids, {"logits": outputs["logits"], "label": batch.tensors["label"]})

    def compute(self) -> dict[str, float]:
        """Return the share of correct classes."""
        right = (self._columns.column("logits") > 0) == (self._columns.column("label") > 0.5)
        return {"accuracy": float(right.float().mean())}

    def to_document(self) -> dict[str, Any]:
        """See ``SampleColumns``."""
        return self._columns.to_document()

    def add_document(self, document: Mapping[str, Any], /) -> None:
        """See ``SampleColumns``."""
        self._columns.add_document(document)


class ClipTask:
    """The task to tell real from fake ``NoisyClips``."""

    def __init__(self, number: int = 24, frames: int = 4, side: int = 32) -> None:
        self.training_data = NoisyClips(0, number, frames, side)
        self.validation_data = NoisyClips(10_000, max(8, number // 4), frames, side)

    def build_model(self) -> nn.Module:
        """Return a new network."""
        return SmallNet()

    def forward(self, model: nn.Module, batch: Batch) -> Outputs:
        """Return the logits (B,)."""
        return {"logits": model(batch.tensors["frames"])}

    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        """Return the binary cross-entropy."""
        labels = batch.tensors["label"]
        total = F.binary_cross_entropy_with_logits(outputs["logits"].float(), labels, reduction="sum")
        return LossSum(total, torch.tensor(float(len(labels)), device=labels.device))

    def new_accumulator(self) -> Logits:
        """Return an empty accumulator."""
        return Logits()


class Greedy(ClipTask):
    """A task that once requests more memory than there is: the second time that a training reaches ``place``.

    ``place`` is ``forward``, ``backward``, ``optimizer`` or ``validation``.
    """

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.passes = place, 0

    def forward(self, model: nn.Module, batch: Batch) -> Outputs:
        """Return the outputs, after the request if it is due."""
        training = torch.is_grad_enabled()
        self.at("forward" if training else "" if model.training else "validation", batch.tensors["frames"].device)
        outputs = super().forward(model, batch)
        if training:
            logits = outputs["logits"]
            logits.register_hook(lambda gradient: self.at("backward", logits.device))  # type: ignore[no-untyped-call]
        return outputs

    def at(self, place: str, device: torch.device) -> None:
        """Count that the training has reached ``place``, and fill the memory if it is due."""
        self.passes += place == self.place
        if place == self.place and self.passes == 2:
            fill_memory(device)


def fill_memory(device: torch.device) -> list[Tensor]:
    """Allocate memory until the device raises its error.

    On the CPU request more than any address space holds, because filling the memory would disturb other processes.
    """
    if device.type == "cpu":
        return [torch.empty(1 << 50, dtype=torch.uint8)]
    probe = devices.device_memory_probe(device)
    piece = (probe().total_bytes if probe else 1 << 34) // 16
    held = []
    while True:
        held.append(torch.empty(piece, dtype=torch.uint8, device=device))


@dataclass(frozen=True)
class Lab:
    """The device and the folder for the trials."""

    compute: ComputeDevice
    folder: Path

    @property
    def plain(self) -> ComputeDevice:
        """The device in float32."""
        return replace(self.compute, amp_dtype=None)

    def engine(
        self,
        name: str,
        task: ClipTask | None = None,
        compute: ComputeDevice | None = None,
        *,
        stop: Callable[[], bool] | None = None,
        ranks: ProcessRanks | None = None,
        **changes: Any,
    ) -> Engine:
        """Return the engine of a training whose checkpoints are in the folder ``name``."""
        settings = EngineSettings(
            epochs=2, effective_batch_size=8, micro_batch=8, learning_rate=3e-3, weight_decay=0.01, warmup_share=0.1,
            max_gradient_norm=1.0, early_stopping_epochs=0, seed=0,
        )  # fmt: skip
        compute = compute or self.plain
        return Engine(
            task or ClipTask(), replace(settings, **changes), compute,
            CheckpointFolder(self.folder / name, CheckpointBinding({"name": "promises"}, "")), NoMetrics(),
            stop=stop, ranks=ranks,
        )  # fmt: skip

    def train(self, name: str, task: ClipTask | None = None, compute: ComputeDevice | None = None, **changes: Any) -> (
        TrainingState
    ):  # fmt: skip
        """Train to the end, from the checkpoint in the folder ``name`` if there is one, and return the state."""
        return self.engine(name, task, compute, **changes).fit()

    @property
    def large(self) -> ClipTask:
        """A task most of whose memory is activations."""
        return ClipTask(32, 8, 64) if self.compute.device.type == "cpu" else ClipTask(32, 16, 112)

    def in_child(self, function: Callable[..., Any], *arguments: Any, count: int = 1) -> list[Any]:
        """Call ``function(lab, number, *arguments)`` for every number below ``count``, each in a new process.

        Return the results, or a text for a process that crashed or timed out.
        """
        first = [self.compute.device.type, str(self.folder), function.__module__, function.__name__]
        items = [[*first, number, *arguments] for number in range(count)]
        answers = run_isolated(
            f"{__name__}:child", items, workers=count, timeout_seconds=_CHILD_SECONDS, memory_bytes=None
        )
        return [a.value if a.failure is None else a.detail for a in sorted(answers, key=lambda a: a.position)]


def child(item: list[Any]) -> Any:
    """Call the function of ``item`` in a child process (``Lab.in_child``)."""
    device, folder, module, function, number, *arguments = item
    torch.set_num_threads(1)  # as in ``try_promises``
    with exact_products():
        return getattr(importlib.import_module(module), function)(
            Lab(resolve_device(device), Path(folder)), number, *arguments
        )


def weight_distance(state: TrainingState, other: TrainingState) -> float:
    """Return the largest relative difference between tensors of the best epochs' weights."""
    pairs = [(state.best_model[name], tensor) for name, tensor in other.best_model.items()]
    return max(float((a - b).norm() / b.norm().clamp(min=1e-12)) for a, b in pairs)


@contextmanager
def exact_products() -> Iterator[None]:
    """Within the block, compute float32 products in float32, and convolutions in a fixed order of sums.

    So results on CUDA can be compared to the bit. The engine itself lets cuDNN choose, and does not claim equal bits.
    """
    cudnn, before = torch.backends.cudnn, torch.backends.cudnn.deterministic
    with devices.cuda_kernels(replace(resolve_device(), amp_dtype=None)):
        cudnn.deterministic = True
        try:
            yield
        finally:
            cudnn.deterministic = before
