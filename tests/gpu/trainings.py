"""Tiny trainings of generated clips, with which it is tried what a device keeps. They need torch and numpy alone."""

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
    """``number`` clips, uint8 (frames, 3, side, side); every other one is a fake, and noisier."""

    first: int
    number: int
    frames: int = 4
    side: int = 32

    @property
    def classes(self) -> tuple[int, ...]:
        """1 for a fake."""
        return tuple(index % 2 for index in range(self.number))

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
        """Logits (B,) from frames uint8 (B, T, 3, H, W)."""
        pixels = frames.float().div(128).sub(1).transpose(1, 2)
        features = F.relu(self.second(F.relu(self.norm(self.first(pixels)))))
        pooled = torch.cat([features.mean((2, 3, 4)), features.float().std((2, 3, 4))], dim=1)
        logits: Tensor = self.head(self.dropout(pooled))
        return logits.squeeze(1)


class Logits:
    """Accumulates logits and labels."""

    def __init__(self) -> None:
        self._columns = SampleColumns()

    def update(self, outputs: Outputs, batch: Batch) -> None:
        """Add one batch."""
        self._columns.add(batch.sample_ids, {"logits": outputs["logits"], "label": batch.tensors["label"]})

    def compute(self) -> dict[str, float]:
        """The share of right answers."""
        right = (self._columns.column("logits") > 0) == (self._columns.column("label") > 0.5)
        return {"accuracy": float(right.float().mean())}

    def to_document(self) -> dict[str, Any]:
        """See ``SampleColumns``."""
        return self._columns.to_document()

    def add_document(self, document: Mapping[str, Any], /) -> None:
        """See ``SampleColumns``."""
        self._columns.add_document(document)


class ClipTask:
    """Real or fake, of ``NoisyClips``."""

    def __init__(self, number: int = 24, frames: int = 4, side: int = 32) -> None:
        self.training_data = NoisyClips(0, number, frames, side)
        self.validation_data = NoisyClips(10_000, max(8, number // 4), frames, side)

    def build_model(self) -> nn.Module:
        """A new one."""
        return SmallNet()

    def forward(self, model: nn.Module, batch: Batch) -> Outputs:
        """Logits (B,)."""
        return {"logits": model(batch.tensors["frames"])}

    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        """Binary cross-entropy."""
        labels = batch.tensors["label"]
        total = F.binary_cross_entropy_with_logits(outputs["logits"].float(), labels, reduction="sum")
        return LossSum(total, torch.tensor(float(len(labels)), device=labels.device))

    def new_accumulator(self) -> Logits:
        """An empty one."""
        return Logits()


class Greedy(ClipTask):
    """Asks once for more memory than there is: the second time at ``forward``, ``backward``, ``optimizer`` or
    ``validation``, because before the first step there is no state to fall back behind.
    """

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.passes = place, 0

    def forward(self, model: nn.Module, batch: Batch) -> Outputs:
        """As it is, but for that."""
        training = torch.is_grad_enabled()
        self.at("forward" if training else "" if model.training else "validation", batch.tensors["frames"].device)
        outputs = super().forward(model, batch)
        if training:
            logits = outputs["logits"]
            logits.register_hook(lambda gradient: self.at("backward", logits.device))  # type: ignore[no-untyped-call]
        return outputs

    def at(self, place: str, device: torch.device) -> None:
        """The training has come to ``place``."""
        self.passes += place == self.place
        if place == self.place and self.passes == 2:
            fill_memory(device)


def fill_memory(device: torch.device) -> list[Tensor]:
    """Take memory until the device refuses; what it raises is what a training would meet.

    On the CPU more than any address space holds is asked for at once, because there filling up would harm others.
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
    """Where promises are tried."""

    compute: ComputeDevice
    folder: Path

    @property
    def plain(self) -> ComputeDevice:
        """In float32."""
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
        """Of one training, with its checkpoints in the folder ``name``."""
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
        """From nothing, or from where the folder ``name`` stands, to the end."""
        return self.engine(name, task, compute, **changes).fit()

    @property
    def large(self) -> ClipTask:
        """One whose activations are most of the memory that it takes."""
        return ClipTask(32, 8, 64) if self.compute.device.type == "cpu" else ClipTask(32, 16, 112)

    def in_child(self, function: Callable[..., Any], *arguments: Any, count: int = 1) -> list[Any]:
        """What ``function(lab, number, *arguments)`` gives, for each number below ``count``, each in a new process; of
        one that ended otherwise, how.
        """
        first = [self.compute.device.type, str(self.folder), function.__module__, function.__name__]
        items = [[*first, number, *arguments] for number in range(count)]
        answers = run_isolated(
            f"{__name__}:child", items, workers=count, timeout_seconds=_CHILD_SECONDS, memory_bytes=None
        )
        return [a.value if a.failure is None else a.detail for a in sorted(answers, key=lambda a: a.position)]


def child(item: list[Any]) -> Any:
    """In a process of its own: see ``Lab.in_child``."""
    device, folder, module, function, number, *arguments = item
    torch.set_num_threads(1)  # as in ``try_promises``
    with exact_products():
        return getattr(importlib.import_module(module), function)(
            Lab(resolve_device(device), Path(folder)), number, *arguments
        )


def weight_distance(state: TrainingState, other: TrainingState) -> float:
    """The largest relative difference of a tensor of the best epochs' weights."""
    pairs = [(state.best_model[name], tensor) for name, tensor in other.best_model.items()]
    return max(float((a - b).norm() / b.norm().clamp(min=1e-12)) for a, b in pairs)


@contextmanager
def exact_products() -> Iterator[None]:
    """On CUDA float32 products in float32, and convolutions whose sums are added in one order: so bits can be compared.

    The engine itself leaves cuDNN its choice, and claims no equality of bits there.
    """
    cudnn, before = torch.backends.cudnn, torch.backends.cudnn.deterministic
    with devices.cuda_kernels(replace(resolve_device(), amp_dtype=None)):
        cudnn.deterministic = True
        try:
            yield
        finally:
            cudnn.deterministic = before
