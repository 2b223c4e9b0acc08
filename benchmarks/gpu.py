"""``make bench-gpu``: how busy a GPU is kept, and what the engine costs there over a bare loop with mixed precision.

Needs torch and numpy alone (``make bench-gpu PYTHON=python3``) and generates its clips, which lie in files and are read
by loader processes. The networks have the layers of the published ones, with random weights: speed does not depend on
what they are. Prints what it ran on.

Parts (--only):

  engine         clips a second beside the bare loop's, in turns; the target is 0.95
  busy           share of wall time with a kernel active over --steps steps after the warm-up, from torch's profiler;
                 the target is 85 %
  accelerations  clips a second with each of the parameter accelerations' values beside none, and how far the weights
                 are apart
  stem           milliseconds and memory of the forensic stem, by how many clips it takes at once
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fvc_lib.detectors.own.stems import FORENSIC
from fvc_lib.engine import device as devices
from fvc_lib.engine.device import ComputeDevice, resolve_device
from fvc_lib.engine.loading import effective_batches, epoch_order, load_batches
from fvc_lib.engine.loop import Engine, EngineSettings
from fvc_lib.engine.promises.device_promises import machine
from fvc_lib.engine.promises.trainings import ClipTask, NoisyClips
from fvc_lib.engine.task import Sample
from fvc_lib.engine.training_state import NoMetrics
from fvc_lib.services.checkpoint_files import CheckpointBinding, CheckpointFolder
from fvc_lib.services.errors import StoppedError, UsageError
from fvc_lib.services.memory.policy import Acceleration

PARTS = ("engine", "busy", "accelerations", "stem")
NUM_STORED = 64


def pixels_of(frames: Tensor) -> Tensor:
    """Float (B, 3, T, H, W) around zero, of uint8 (B, T, 3, H, W)."""
    return frames.float().div(127.5).sub(1).transpose(1, 2)


class Block(nn.Module):
    """A transformer's, pre-norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        batch, count, width = tokens.shape
        parts = self.qkv(self.norm1(tokens)).view(batch, count, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(batch, count, width)
        tokens = tokens + self.project(seen)
        return tokens + self.narrow(F.gelu(self.wide(self.norm2(tokens))))


class VideoMaeBase(nn.Module):
    """ViT-B on tubes of 2 x 16 x 16 pixels (Tong et al., "VideoMAE", NeurIPS 2022), mean of tokens, one logit."""

    def __init__(self, width: int = 768, depth: int = 12, heads: int = 12) -> None:
        super().__init__()
        self.embed = nn.Conv3d(3, width, (2, 16, 16), (2, 16, 16))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1)

    def forward(self, frames: Tensor) -> Tensor:
        tokens = self.embed(pixels_of(frames)).flatten(2).transpose(1, 2)
        places = torch.linspace(-1, 1, tokens.shape[1], device=tokens.device)[None, :, None]
        return self.head(self.norm(self.blocks(tokens + places).mean(1))).squeeze(1)


def _pair(inputs: int, outputs: int, middle: int, stride: int) -> nn.Sequential:
    """A 3-D convolution as one in space and one in time."""
    return nn.Sequential(
        nn.Conv3d(inputs, middle, (1, 3, 3), (1, stride, stride), (0, 1, 1), bias=False),
        nn.BatchNorm3d(middle),
        nn.ReLU(inplace=True),
        nn.Conv3d(middle, outputs, (3, 1, 1), (stride, 1, 1), (1, 0, 0), bias=False),
        nn.BatchNorm3d(outputs),
    )


class Residual(nn.Module):
    """Two such pairs beside a way around."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        middle = inputs * outputs * 27 // (inputs * 9 + 3 * outputs)
        self.first, self.second = _pair(inputs, outputs, middle, stride), _pair(outputs, outputs, middle, 1)
        around = nn.Conv3d(inputs, outputs, 1, stride, bias=False)
        self.around = nn.Identity() if inputs == outputs else nn.Sequential(around, nn.BatchNorm3d(outputs))

    def forward(self, features: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(features))) + self.around(features))


class R2Plus1d18(nn.Module):
    """R(2+1)D-18 (Tran et al., CVPR 2018), with batch norms frozen as the project trains it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv3d(3, 45, (1, 7, 7), (1, 2, 2), (0, 3, 3), bias=False), nn.BatchNorm3d(45), nn.ReLU(inplace=True),
            nn.Conv3d(45, 64, (3, 1, 1), 1, (1, 0, 0), bias=False), nn.BatchNorm3d(64), nn.ReLU(inplace=True),
        )  # fmt: skip
        widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
        self.blocks = nn.Sequential(*(Residual(a, b, 1 + (a != b)) for a, b in pairwise(widths)))
        self.head = nn.Linear(512, 1)

    def forward(self, frames: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(pixels_of(frames))).mean((2, 3, 4))).squeeze(1)

    def train(self, mode: bool = True) -> R2Plus1d18:
        super().train(mode)
        for part in self.modules():
            if isinstance(part, nn.BatchNorm3d):
                part.eval()
        return self


NETWORKS: dict[str, Callable[[], nn.Module]] = {"videomae-base": VideoMaeBase, "r2plus1d_18": R2Plus1d18}


@dataclass(frozen=True)
class StoredClips(NoisyClips):
    """Read from ``NUM_STORED`` files again and again."""

    folder: str = ""

    def __getitem__(self, index: int) -> Sample:
        clip = torch.from_numpy(np.load(Path(self.folder) / f"{index % NUM_STORED}.npy"))
        return Sample(f"clip{index}", {"frames": clip, "label": torch.tensor(float(index % 2))})


class Task(ClipTask):
    """``ClipTask`` with stored clips and one of the networks."""

    def __init__(self, network: str, number: int, frames: int, side: int, folder: Path) -> None:
        super().__init__(2, 1, 8)
        self.network = network
        self.training_data = StoredClips(0, number, frames, side, str(folder))

    def build_model(self) -> nn.Module:
        return NETWORKS[self.network]()


@dataclass(frozen=True)
class Case:
    """What is measured with."""

    compute: ComputeDevice
    asked: argparse.Namespace
    folder: Path

    def settings(self) -> EngineSettings:
        batch = self.asked.batch
        return EngineSettings(
            epochs=1, effective_batch_size=batch, micro_batch=batch, learning_rate=1e-5, weight_decay=0.05,
            warmup_share=0.0, max_gradient_norm=1.0, early_stopping_epochs=0, seed=0, num_workers=self.asked.workers,
            checkpoint_seconds=1e9,
        )  # fmt: skip

    def task(self, network: str) -> Task:
        asked = self.asked
        number = asked.batch * (asked.warmup + asked.steps + 1)
        return Task(network, number, asked.frames, asked.side, self.folder / "clips")

    def store(self) -> None:
        """Write the clips."""
        (self.folder / "clips").mkdir(exist_ok=True)
        clips = NoisyClips(0, NUM_STORED, self.asked.frames, self.asked.side)
        for index in range(NUM_STORED):
            np.save(self.folder / "clips" / f"{index}.npy", clips[index].tensors["frames"].numpy())


def engine_rate(
    case: Case, network: str, compute: ComputeDevice, around: Any = None
) -> tuple[float, dict[str, Tensor]]:
    """Clips a second after the warm-up, within ``around``, and the weights at the end."""
    asked, boundary, times = case.asked, iter(range(1 << 30)), []
    around = around or nullcontext()

    def stop() -> bool:
        number = next(boundary)
        if number == asked.warmup:
            around.__enter__()
            times.append(devices.finished_at(compute.device))
        if number == asked.warmup + asked.steps:
            times.append(devices.finished_at(compute.device))
            around.__exit__(None, None, None)
        return number == asked.warmup + asked.steps

    with tempfile.TemporaryDirectory(dir=case.folder) as name:
        checkpoints = CheckpointFolder(Path(name), CheckpointBinding({}, ""))
        policy = devices.resolve_policy(compute)
        engine = Engine(
            case.task(network), case.settings(), compute, checkpoints, NoMetrics(), policy=policy, stop=stop
        )
        weights: dict[str, Tensor] = {}
        with devices.apply_policy(policy):
            try:
                engine.fit()
            except StoppedError:
                loaded = checkpoints.load()
                weights = loaded.state["model"] if loaded else {}
    devices.release_cached_memory(compute.device)
    return asked.steps * asked.batch / (times[1] - times[0]), weights


def bare_rate(case: Case, network: str) -> float:
    """Clips a second of torch's own calls: the same loader, autocast, loss, clipping and AdamW."""
    asked, compute, settings = case.asked, case.compute, case.settings()
    task, policy, precision = case.task(network), devices.resolve_policy(compute), devices.Precision(compute)
    model = task.build_model().to(compute.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)
    order = effective_batches(epoch_order(len(task.training_data), 0, 0), asked.batch)
    started = 0.0
    with devices.apply_policy(policy):
        batches = load_batches(task.training_data, order, num_workers=asked.workers, pin_memory=policy.pin_memory)
        for number, loaded in enumerate(batches):
            if number == asked.warmup:
                started = devices.finished_at(compute.device)
            if number == asked.warmup + asked.steps:
                break
            batch = loaded.to(compute.device)
            optimizer.zero_grad(set_to_none=True)
            with precision.autocast():
                logits = model(batch.tensors["frames"])
                loss = F.binary_cross_entropy_with_logits(logits.float(), batch.tensors["label"])
            precision.scaler.scale(loss).backward()
            precision.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), settings.max_gradient_norm)
            precision.scaler.step(optimizer)
            precision.scaler.update()
        seconds = devices.finished_at(compute.device) - started
    devices.release_cached_memory(compute.device)
    return asked.steps * asked.batch / seconds


def measure_engine(case: Case, network: str) -> Iterator[str]:
    """Beside the bare loop, in the order ours, theirs, theirs, ours."""
    pairs = []
    for turn in range(case.asked.rounds):
        sides = [lambda: engine_rate(case, network, case.compute)[0], lambda: bare_rate(case, network)]
        rates = {side: sides[side]() for side in ((0, 1) if turn % 2 == 0 else (1, 0))}
        pairs.append((rates[0], rates[1]))
    ratios = sorted(ours / theirs for ours, theirs in pairs)
    ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    middle = statistics.median(ratios)
    verdict = "reached" if middle >= 0.95 else "MISSED"
    yield (
        f"engine {ours:.1f} clips/s, bare loop {theirs:.1f}, ratio {middle:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f} "
        f"in {len(ratios)} rounds); target 0.95 {verdict}"
    )


def measure_busy(case: Case, network: str) -> Iterator[str]:
    """From the profiler's kernels on the device, those at the same time counted once."""
    if case.compute.device.type != "cuda":
        yield "skipped: torch's profiler sees no kernels of this device"
        return
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True)
    rate, _ = engine_rate(case, network, case.compute, profiler)
    seconds = case.asked.steps * case.asked.batch / rate
    kernels = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA and "Memcpy" not in event.name
    ]
    share = covered(kernels) / 1e6 / seconds
    verdict = "reached" if share >= 0.85 else "MISSED"
    yield f"a kernel active {100 * share:.1f} % of {seconds:.1f} s ({len(kernels)} kernels); target 85 % {verdict}"


def covered(ranges: list[tuple[float, float]]) -> float:
    """The length of the union of half-open intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(ranges):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def lacks(compute: ComputeDevice, name: Acceleration) -> bool:
    """Whether the device cannot do it."""
    try:
        resolve_device(compute.device.type, accelerations=(name,))
    except UsageError:
        return True
    return False


def measure_accelerations(case: Case, network: str) -> Iterator[str]:
    """Each that this device and these networks can do alone, then all; the stem is a part of its own."""
    alone = ("stem_pieces", "send_ahead")  # parts of their own: no network has a stem here, no batch several parts
    every = tuple(each for each in get_args(Acceleration) if each not in alone and not lacks(case.compute, each))
    plain, weights = engine_rate(case, network, case.compute)
    yield f"none: {plain:.1f} clips/s"
    for chosen in (*((each,) for each in every), every):
        rate, others = engine_rate(case, network, replace(case.compute, accelerations=chosen))
        apart = max(float((a.float() - weights[n].float()).norm() / weights[n].float().norm().clamp(min=1e-9))
                    for n, a in others.items() if a.is_floating_point())  # fmt: skip
        yield f"{', '.join(chosen)}: {rate:.1f} clips/s, {rate / plain:.3f} of none, weights apart {apart:.1e}"


def measure_stem(case: Case, network: str) -> Iterator[str]:
    """Of a batch of 16 clips at most."""
    device, asked = case.compute.device, case.asked
    frames = torch.stack([NoisyClips(0, 2, asked.frames, asked.side)[i % 2].tensors["frames"] for i in range(16)])
    frames = frames.to(device)
    one_by_one = FORENSIC.clip_by_clip(frames)
    for clips in (1, 2, 4, 8, 16):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds = []
        for _ in range(max(3, min(20, asked.steps))):
            started = devices.finished_at(device)
            found = replace(FORENSIC, clips_at_once=clips).clip_by_clip(frames)
            seconds.append(devices.finished_at(device) - started)
        held = torch.cuda.max_memory_allocated(device) / 1e6 if device.type == "cuda" else float("nan")
        different = float((found - one_by_one).abs().max())
        yield f"{clips} at once: {1e3 * statistics.median(seconds):.2f} ms, peak {held:.0f} MB, apart {different:.1e}"


MEASURES = {
    "engine": measure_engine,
    "busy": measure_busy,
    "accelerations": measure_accelerations,
    "stem": measure_stem,
}


def read_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="make bench-gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto", help="cuda, mps or cpu; auto: a GPU, or nothing is measured")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure (default: all)")
    parser.add_argument("--networks", nargs="+", choices=tuple(NETWORKS), default=tuple(NETWORKS))
    parser.add_argument("--steps", type=int, default=200, help="measured (default: 200)")
    parser.add_argument("--warmup", type=int, default=20, help="steps before them (default: 20)")
    parser.add_argument("--rounds", type=int, default=3, help="of both sides (default: 3)")
    parser.add_argument("--batch", type=int, default=16, help="clips (default: 16)")
    parser.add_argument("--frames", type=int, default=16)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--workers", type=int, default=8, help="loader processes (default: 8)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every line there too")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Measure, part by part, and print."""
    asked = read_arguments(words)
    if asked.device == "auto" and resolve_device().device.type == "cpu":
        print(f"skipped: torch {torch.__version__} finds no GPU on this machine")
        return 0
    try:
        compute = resolve_device(asked.device)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    lines = [machine(asked.device)]
    lines.append(
        f"{asked.batch} clips of {asked.frames} x {asked.side} px a step, {asked.steps} steps after {asked.warmup}"
    )
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory(prefix="fvc-bench-gpu-") as name:
        case = Case(compute, asked, Path(name))
        case.store()
        for part, network in [
            (p, n) for p in PARTS if p in asked.only for n in (asked.networks if p != "stem" else ("",))
        ]:
            try:
                for line in MEASURES[part](case, network):
                    lines.append(" ".join(filter(None, [network, f"{part}:", line])))
                    print(lines[-1], flush=True)
            except RuntimeError as error:  # of one part; the others are measured all the same
                lines.append(f"{network} {part}: failed: {str(error).partition(chr(10))[0]}")
                print(lines[-1], flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(lines, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
