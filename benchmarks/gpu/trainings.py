"""Trainings that are timed: by the engine, and by a bare loop of torch's own calls."""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu.networks import NETWORKS
from fvc_lib.engine import device as devices
from fvc_lib.engine.device import ComputeDevice
from fvc_lib.engine.loading import effective_batches, epoch_order, load_batches
from fvc_lib.engine.loop import Engine, EngineSettings
from fvc_lib.engine.task import Batch
from fvc_lib.engine.training_state import NoMetrics
from fvc_lib.services.checkpoint_files import CheckpointBinding, CheckpointFolder
from fvc_lib.services.errors import StoppedError
from fvc_lib.services.memory import PREFETCHED_BATCHES
from fvc_lib.video.clips.store import load_clip_file, write_clip_file
from tests.gpu.trainings import ClipTask, NoisyClips

NUM_STORED = 64  # they stay in the system's cache of files, as a store on a local disk does
LAST_SECONDS = 20.0  # in which a training that was timed ends, and what was found is looked at


@dataclass(frozen=True)
class StoredClips(NoisyClips):
    """Files as the clip store has them, ``NUM_STORED`` of them again and again, read straight into their batch."""

    folder: str = ""

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        shape = (self.frames, 3, self.side, self.side)
        frames = np.empty((len(indices), *shape), np.uint8)
        for index, place in zip(indices, frames, strict=True):
            load_clip_file(self.path(index), place, shape)
        labels = torch.tensor([float(index % 2) for index in indices])
        return Batch(tuple(f"clip{each}" for each in indices), {"frames": torch.from_numpy(frames), "label": labels})

    def path(self, index: int) -> Path:
        """The file of a clip."""
        return Path(self.folder) / f"{index % NUM_STORED:02}" / f"{index % NUM_STORED}.npy"

    def store(self) -> None:
        """Write the files."""
        made = NoisyClips(0, NUM_STORED, self.frames, self.side)
        for index in range(NUM_STORED):
            write_clip_file(self.path(index), made[index].tensors["frames"].numpy())


class Task(ClipTask):
    """``ClipTask`` with stored clips and one of the networks."""

    def __init__(self, network: str, clips: StoredClips) -> None:
        super().__init__(2, 1, 8)
        self.network = NETWORKS[network]
        self.training_data = clips

    def build_model(self) -> nn.Module:
        return self.network()


@dataclass(frozen=True)
class Rate:
    """Of one training."""

    clips_per_second: float
    steps: int  # that were timed
    weights: dict[str, Tensor]  # at its end, on the CPU; empty of a bare loop


@dataclass
class Clock:
    """What is left of the time, and what a training of a network will take of it."""

    ends: float  # by ``time.monotonic``
    before: dict[str, float] = field(default_factory=dict)  # seconds beside the steps, by network
    step: dict[str, float] = field(default_factory=dict)  # seconds, by network

    @property
    def left(self) -> float:
        """Seconds."""
        return self.ends - time.monotonic()

    def saw(self, network: str, seconds: float, steps: int, step: float) -> None:
        """A training of so many steps, the warm-up among them, took so long."""
        self.step[network] = max(step, self.step.get(network, 0.0))
        self.before[network] = max(seconds - steps * step, self.before.get(network, 0.0))

    def needs(self, network: str, steps: int) -> float:
        """Seconds of a training with so many steps; 0 where none was seen."""
        return self.before.get(network, 0.0) + steps * self.step.get(network, 0.0)


@dataclass(frozen=True)
class Case:
    """What is measured with."""

    compute: ComputeDevice
    asked: Namespace
    folder: Path
    clock: Clock

    def settings(self, micro_batch: int = 0) -> EngineSettings:
        """Of a training that never ends by itself."""
        batch = self.asked.batch
        return EngineSettings(
            epochs=1, effective_batch_size=batch, micro_batch=micro_batch or batch, learning_rate=1e-5,
            weight_decay=0.05, warmup_share=0.0, max_gradient_norm=1.0, early_stopping_epochs=0, seed=0,
            num_workers=self.asked.workers, checkpoint_seconds=1e9,
        )  # fmt: skip

    def clips(self, steps: int) -> StoredClips:
        """Enough for the warm-up and so many steps, and for the loaders to be busy up to the last of them."""
        asked = self.asked
        ahead = PREFETCHED_BATCHES * asked.workers + 1
        number = asked.batch * (asked.warmup + steps + ahead)
        return StoredClips(0, number, asked.frames, asked.side, str(self.folder / "clips"))


def finished_at(device: torch.device) -> float:
    """Seconds of ``time.perf_counter()`` when ``device`` has done what was asked of it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def train(
    case: Case,
    network: str,
    steps: int,
    compute: ComputeDevice | None = None,
    *,
    micro_batch: int = 0,
    around: AbstractContextManager[object] | None = None,
) -> Rate:
    """By the engine: so many steps after the warm-up, within ``around``; fewer where the time is over."""
    compute, around, warmup = compute or case.compute, around or nullcontext(), case.asked.warmup
    begun, boundaries = time.monotonic(), iter(range(1 << 30))
    times: list[tuple[int, float]] = []

    def stop() -> bool:
        number = next(boundaries)
        if number == warmup:
            within.enter_context(around)
            times.append((number, finished_at(compute.device)))
        if number < warmup + steps and (number <= warmup or case.clock.left > LAST_SECONDS):
            return False
        times.append((number, finished_at(compute.device)))
        within.close()
        return True

    weights: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory(dir=case.folder) as name, ExitStack() as within:
        checkpoints = CheckpointFolder(Path(name), CheckpointBinding({}, ""))
        task, settings = Task(network, case.clips(steps)), case.settings(micro_batch)
        engine = Engine(task, settings, compute, checkpoints, NoMetrics(), stop=stop)
        with devices.cuda_kernels(compute):
            try:
                engine.fit()
            except StoppedError:
                loaded = checkpoints.load()
                weights = loaded.state["model"] if loaded else {}
    devices.release_cached_memory(compute.device)
    (first, started), (last, ended) = times
    seconds_per_step = (ended - started) / (last - first)
    case.clock.saw(network, time.monotonic() - begun, last, seconds_per_step)
    return Rate(case.asked.batch / seconds_per_step, last - first, weights)


def train_bare(case: Case, network: str, steps: int) -> Rate:
    """By torch's own calls: the same loader, autocast, loss, clipping and AdamW."""
    asked, compute, settings = case.asked, case.compute, case.settings()
    task = Task(network, case.clips(steps))
    scaler = torch.amp.GradScaler(compute.device.type, enabled=compute.amp_dtype is torch.float16)
    model = task.build_model().to(compute.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)
    order = effective_batches(epoch_order(len(task.training_data), 0, 0), asked.batch)
    started = 0.0
    with devices.cuda_kernels(compute):
        batches = load_batches(
            task.training_data, order, num_workers=asked.workers, pin_memory=compute.device.type == "cuda"
        )
        for number, loaded in enumerate(batches):
            if number == asked.warmup:
                started = finished_at(compute.device)
            if number == asked.warmup + steps:
                break
            batch = loaded.to(compute.device)
            optimizer.zero_grad(set_to_none=True)
            mixed = torch.autocast(compute.device.type, compute.amp_dtype) if compute.amp_dtype else nullcontext()
            with mixed:
                logits = model(batch.tensors["frames"])
                loss = F.binary_cross_entropy_with_logits(logits.float(), batch.tensors["label"])
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), settings.max_gradient_norm)
            scaler.step(optimizer)
            scaler.update()
        seconds = finished_at(compute.device) - started
    devices.release_cached_memory(compute.device)
    return Rate(steps * asked.batch / seconds, steps, {})
