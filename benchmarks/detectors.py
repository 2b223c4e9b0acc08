"""``python -m benchmarks.detectors``: FVC's engine beside a bare loop, transformers.Trainer and Lightning Fabric.

Five networks in small configurations. In every round each side trains one of them in a process of its own, forked from
this one, which has imported everything. They take turns step by step, one running at a time, in one order and then in
the other, and each is charged with its own CPU time; the first step of each warms up. So neighbours on the machine fall
on all sides. All have the same weights, clips, order, micro-batches, clipping, AdamW, schedule, and one thread; a side
that ends with other weights than the bare loop's stops the benchmark.

CPU time is of whole steps, loading included. Memory is the growth of a process's resident memory from before its
network is built to the peak of its training, an epoch: of the engine with the checkpoints before its first step and
after its last, a metric log and the memory sampler, of the bare loop with the best weights. The peers save nothing and
say nothing.

A value is a ratio within one round. A verdict is "undecided" when the target lies within the interval of the median.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.training.bare import BareLoop
from benchmarks.training.cases import Case, Training
from benchmarks.training.extras import CurrentObserver, Extras
from benchmarks.training.figures import Figure, figures_table, summary
from benchmarks.training.overhead import CHECKPOINT_SECONDS
from fvc_lib.detectors.packages import imported
from fvc_lib.engine.device import resolve_device
from fvc_lib.engine.loading import epoch_order
from fvc_lib.engine.loop import Engine, EngineSettings
from fvc_lib.engine.optimizer import build_optimizer, learning_rate_at
from fvc_lib.engine.random_state import forked_random_state, stable_seed
from fvc_lib.engine.task import Batch
from fvc_lib.services.atomic_files import write_text
from fvc_lib.services.memory import ProcessTree, peak_rss_bytes
from fvc_lib.services.stage_logs import SAMPLE_INTERVAL_SECONDS

MOST_CPU_PERCENT, MOST_MEMORY_PERCENT, MOST_STEP_MS = 3.0, 5.0, 500.0
MOST_DIFFERENT = 1e-3  # of all weights, by norm: where a gradient is all but rounding, a step of Adam is as large
NUM_VALIDATION = 2
CASES = (
    Case("frame_cnn", 6, 112, micro_batch=8, effective_batch_size=16),
    Case("efficientnet_lite0", 4, 96, micro_batch=2, effective_batch_size=4),
    Case("timm:vit_tiny_patch16_224", 4, 96, micro_batch=2, effective_batch_size=4),
    Case("x3d_xs", 4, 96, micro_batch=1, effective_batch_size=2),
    Case("videomae", 8, 64, micro_batch=4, effective_batch_size=8),
)
SMALL_VIDEOMAE = {
    "image_size": 64, "num_frames": 8, "hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3,
    "intermediate_size": 768,
}  # fmt: skip
PACKAGES = {"timm:vit_tiny_patch16_224": "timm", "x3d_xs": "pytorchvideo", "videomae": "transformers"}


@dataclass(frozen=True)
class Round:
    """What every side trains in one round."""

    training: Training
    num_steps: int

    @property
    def settings(self) -> EngineSettings:
        return self.training.settings(1, checkpoint_seconds=CHECKPOINT_SECONDS)

    def task(self) -> Any:
        return self.training.task(self.num_steps, NUM_VALIDATION)

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        return learning_rate_at(step, self.num_steps, self.settings.learning_rate, self.settings.warmup_share)

    def begun(self) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
        """For a peer: the network and its optimizer as the engine begins with them, and the same micro-batches."""
        settings, task = self.settings, self.task()
        with forked_random_state(stable_seed("engine", settings.seed), torch.device("cpu")):
            model = task.build_model()
        optimizer = build_optimizer(model, settings.learning_rate, settings.weight_decay)
        order = epoch_order(len(task.training_data), 0, settings.seed).tolist()
        loader = DataLoader(task.training_data, settings.micro_batch, sampler=order, collate_fn=_as_words)
        return model.train(), optimizer, loader

    @property
    def parts(self) -> int:
        """Micro-batches of a step."""
        return self.settings.effective_batch_size // self.settings.micro_batch


def _as_words(batch: Batch) -> dict[str, Tensor]:
    return {"frames": batch.tensors["frames"], "labels": batch.tensors["label"]}


# The sides: each calls ``pause`` before every step and after the last, and returns the weights that it ends with

Pause = Callable[[], None]
Side = Callable[[Round, Path, Pause], Mapping[str, Tensor]]


def with_engine(own: Round, folder: Path, pause: Pause) -> Mapping[str, Tensor]:
    """With what a run has: metric log, memory sampler, checkpoints."""
    extras = Extras(folder, logged=1, sample_seconds=SAMPLE_INTERVAL_SECONDS, checkpoint_seconds=CHECKPOINT_SECONDS)
    with extras.metrics() as metrics, extras.around():
        engine = Engine(
            own.task(), own.settings, resolve_device("cpu", "off"), extras.checkpoints, metrics,
            memory=CurrentObserver(extras), stop=lambda: pause() is not None,
        )  # fmt: skip
        return engine.fit().best_model


def with_bare_loop(own: Round, folder: Path, pause: Pause) -> Mapping[str, Tensor]:
    bare = BareLoop(own.task(), own.settings, own.training.loss_weights)
    for _ in bare.turns():
        pause()
    return bare.best_model


class _WithLoss(nn.Module):
    """As transformers.Trainer wants a network."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, frames: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.network(frames)
        return {"loss": F.binary_cross_entropy_with_logits(logits, labels), "logits": logits}


def with_trainer(own: Round, folder: Path, pause: Pause) -> Mapping[str, Tensor]:
    transformers = imported("transformers", "the benchmark")
    model, optimizer, loader = own.begun()

    class Paused(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, *_: object, **__: object) -> None:
            pause()

        def on_step_end(self, _: object, state: Any, *__: object, **___: object) -> None:
            if state.global_step == state.max_steps:
                pause()

    class Ordered(transformers.Trainer):  # type: ignore[misc, name-defined]
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(loader)

    options = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=own.settings.micro_batch, num_train_epochs=1,
        gradient_accumulation_steps=own.parts, max_grad_norm=own.settings.max_gradient_norm, logging_strategy="no",
        save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, remove_unused_columns=False,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: own.rate(step) / own.settings.learning_rate)
    trainer = Ordered(
        _WithLoss(model), options, train_dataset=loader.dataset, optimizers=(optimizer, schedule), callbacks=[Paused()]
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return model.state_dict()


def with_fabric(own: Round, folder: Path, pause: Pause) -> Mapping[str, Tensor]:
    import lightning_fabric

    warnings.filterwarnings("ignore", module="lightning_fabric")  # of srun, where there is one
    fabric = lightning_fabric.Fabric(accelerator="cpu", devices=1)
    bare, optimizer, loader = own.begun()
    model, optimizer = fabric.setup(bare, optimizer)
    loader = fabric.setup_dataloaders(loader)
    for number, batch in enumerate(loader):
        step, part = divmod(number, own.parts)
        last = part == own.parts - 1
        if part == 0:
            pause()
            for group in optimizer.param_groups:
                group["lr"] = own.rate(step)
        with fabric.no_backward_sync(model, enabled=not last):
            loss = F.binary_cross_entropy_with_logits(model(batch["frames"]), batch["labels"])
            fabric.backward(loss / own.parts)
        if last:
            fabric.clip_gradients(model, optimizer, max_norm=own.settings.max_gradient_norm)
            optimizer.step()
            optimizer.zero_grad()
    pause()
    return bare.state_dict()


ENGINE, BARE = "engine", "bare loop"
SIDES: dict[str, Side] = {
    ENGINE: with_engine, BARE: with_bare_loop, "transformers.Trainer": with_trainer, "Lightning Fabric": with_fabric,
}  # fmt: skip
PEERS = {"transformers.Trainer": ("transformers", "accelerate"), "Lightning Fabric": ("lightning_fabric",)}


@dataclass(frozen=True)
class Spent:
    """By one side in one round: CPU seconds of every step, and bytes more at the peak than before."""

    seconds: tuple[float, ...]
    peak_bytes: int


def _live(side: Side, own: Round, folder: Path, pipe: Any, others: list[Any]) -> None:
    """One side in its process: its turns, then what it found."""
    for inherited in others:  # while one of them is open here, its side would not hear that the benchmark has ended
        inherited.close()
    stamps: list[float] = []

    def pause() -> None:
        stamps.append(time.process_time())
        pipe.send(None)
        pipe.recv()
        stamps.append(time.process_time())

    before = ProcessTree().measure().rss_bytes
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    weights = side(own, folder, pause)
    seconds = tuple(end - start for start, end in zip(stamps[1::2], stamps[2::2], strict=False))
    torch.save({name: tensor.clone() for name, tensor in weights.items()}, folder / "weights.pt")
    pipe.send(Spent(seconds, peak_rss_bytes() - before))


def take_turns(own: Round, names: list[str], folder: Path) -> dict[str, Spent]:
    """One round of all sides.

    Raises:
        RuntimeError: a side died, or ends with other weights than the bare loop.
    """
    context = multiprocessing.get_context("fork")
    pipes = {}
    for name in names:
        pipes[name], theirs = context.Pipe()
        (folder / name).mkdir()
        arguments = (SIDES[name], own, folder / name, theirs, list(pipes.values()))
        context.Process(target=_live, args=arguments, daemon=True).start()
        theirs.close()
        _answer(name, pipes[name])  # it has come to its first step
    for step in range(own.num_steps):
        for name in names if step % 2 else reversed(names):
            pipes[name].send(None)
            _answer(name, pipes[name])
    found = {}
    for name in names:
        pipes[name].send(None)
        found[name] = _answer(name, pipes[name])
    bare = torch.load(folder / BARE / "weights.pt")
    for name in names:
        weights = torch.load(folder / name / "weights.pt")
        difference = torch.cat([(weights[key] - bare[key]).flatten() for key in bare]).norm()
        if not difference <= MOST_DIFFERENT * torch.cat([tensor.flatten() for tensor in bare.values()]).norm():
            raise RuntimeError(f"{own.training.case} by {name}: weights differ by {difference} from the bare loop's.")
    return found


def _answer(name: str, pipe: Any) -> Any:
    try:
        return pipe.recv()
    except EOFError as error:
        raise RuntimeError(f"the process of {name} ended before it should.") from error


def figures_of(case: str, rounds: list[dict[str, Spent]]) -> list[Figure]:
    """Ratios of CPU time to the bare loop's, and of the engine's peak to the leanest other side's."""
    cpu = {name: [1e3 * sum(spent[name].seconds[1:]) / len(spent[name].seconds[1:]) for spent in rounds]
           for name in rounds[0]}  # fmt: skip
    peaks = {name: [spent[name].peak_bytes / 1e6 for spent in rounds] for name in rounds[0]}

    def over(ours: list[float], theirs: list[float]) -> tuple[float, ...]:
        return tuple(100 * (mine / other - 1) for mine, other in zip(ours, theirs, strict=True))

    leanest = [min(each) for each in zip(*(peaks[name] for name in peaks if name != ENGINE), strict=True)]
    return [
        Figure(case, "CPU time of a step, bare loop", "ms", tuple(cpu[BARE]), target=MOST_STEP_MS),
        Figure(case, "CPU time, engine over bare loop", "%", over(cpu[ENGINE], cpu[BARE]), target=MOST_CPU_PERCENT),
        *(Figure(case, f"CPU time, {name} over bare loop", "%", over(cpu[name], cpu[BARE]))
          for name in cpu if name in PEERS),
        Figure(case, "peak memory, engine over the leanest", "%", over(peaks[ENGINE], leanest),
               target=MOST_MEMORY_PERCENT),
        *(Figure(case, f"peak memory, {name}", "MB", tuple(peaks[name])) for name in peaks),
    ]  # fmt: skip


def versions(names: list[str]) -> str:
    """Of what was measured, as far as it is installed."""
    packages = dict.fromkeys(
        ("torch", "timm", "pytorchvideo", *(part for name in names for part in PEERS.get(name, ())))
    )
    found = [package for package in packages if importlib.util.find_spec(package)]
    return ", ".join(f"{package} {importlib.metadata.version(package)}" for package in found)


def main(words: list[str] | None = None) -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.detectors", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    known = [case.model for case in CASES]
    parser.add_argument("--rounds", type=int, default=9, help="of every network (default: 9)")
    parser.add_argument("--steps", type=int, default=8, help="in a round, of which one warms up (default: 8)")
    parser.add_argument("--models", nargs="+", choices=known, default=known, help="networks (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every value there too")
    asked = parser.parse_args(words)
    if asked.rounds < 1 or asked.steps < 2:
        parser.error(f"--rounds {asked.rounds} --steps {asked.steps}: wanted 1 round and 2 steps or more")
    torch.set_num_threads(1)  # before any side: threads that wait would spin, and count as work
    names = [name for name in SIDES if all(importlib.util.find_spec(part) for part in PEERS.get(name, ()))]
    for name in SIDES.keys() - set(names):
        print(f"{name}: not installed (pip install {' '.join(PEERS[name])})".replace("_", "-"), file=sys.stderr)
    figures: list[Figure] = []
    for case in CASES:
        package = PACKAGES.get(case.model)
        if package and not importlib.util.find_spec(package):
            print(f"{case.model}: {package} is not installed (make setup-detectors)", file=sys.stderr)
        elif case.model in asked.models:
            print(f"measuring: {case.model}", file=sys.stderr, flush=True)
            figures += measured(case, names, asked.rounds, asked.steps)
    print(figures_table(figures))
    print(f"\n{summary(figures)} {versions(names)}; {asked.rounds} rounds of {asked.steps - 1} steps, 1 thread, "
          f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.")  # fmt: skip
    if asked.json:
        write_text(asked.json, json.dumps([figure.document() for figure in figures], indent=1))


def measured(case: Case, names: list[str], num_rounds: int, num_steps: int) -> list[Figure]:
    """All rounds of one network."""
    for name in names:  # before any process is forked, so that nobody is charged with it
        for package in PEERS.get(name, ()):
            imported(package, name)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if case.model == "videomae":
            transformers = imported("transformers", case.model)
            with forked_random_state(0, torch.device("cpu")):
                network = transformers.VideoMAEForVideoClassification(transformers.VideoMAEConfig(**SMALL_VIDEOMAE))
            network.save_pretrained(folder / "weights")
            case = replace(case, weights=str(folder / "weights"))
        own = Round(Training(case, folder, num_stored=16, loss_weights=(1.0, 1.0)), num_steps)
        own.training.store_clips()
        own.task().build_model()  # imports what it needs
        rounds = []
        for number in range(num_rounds):
            (folder / str(number)).mkdir()
            rounds.append(take_turns(own, names, folder / str(number)))
    return figures_of(case.model, rounds)


if __name__ == "__main__":
    main()
