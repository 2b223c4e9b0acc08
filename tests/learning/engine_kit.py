"""What the tests of the engine share: tasks and steps that interfere, an observer, and when two trainings are equal."""

import torch

from fvc_lib.learning.device import ComputeDevice
from fvc_lib.services.checkpoints import (
    LATEST,
)

SETTINGS = {
    "epochs": 3, "effective_batch_size": 8, "micro_batch": 4, "learning_rate": 0.01, "weight_decay": 0.01,
    "warmup_share": 0.1, "max_gradient_norm": 1.0, "early_stopping_epochs": 0, "seed": 0,
}  # fmt: skip


class Draining:
    """The video task, with a training that draws random numbers and, where asked, interferes."""

    def __init__(self, task, before=lambda model, batch: None):
        self._task = task
        self.before = before
        self.training_data = task.training_data
        self.validation_data = task.validation_data

    def build_model(self):
        return self._task.build_model()

    def forward(self, model, batch):
        self.before(model, batch)
        outputs = self._task.forward(model, batch)
        if model.training:
            outputs = {"logits": outputs["logits"] + 0.1 * torch.randn(())}
        return outputs

    def loss(self, outputs, batch):
        return self._task.loss(outputs, batch)

    def new_accumulator(self):
        return self._task.new_accumulator()


class Observer:
    """A memory observer that keeps what it is told."""

    prefix = ""

    def __init__(self):
        self.places, self.events = [], []

    def at(self, phase, *, epoch=None, batch_idx=None, global_step=None):
        self.places.append((phase, epoch, batch_idx, global_step))

    def event(self, kind, message, **details):
        self.events.append((kind, details))

    def watch_device(self, device, probe):
        raise AssertionError("there is no accelerator here")

    def of(self, kind):
        return [details for what, details in self.events if what == kind]


def stop_after(steps):
    """A stop flag that is set at the given step boundary."""
    asked = iter(range(1_000_000))
    return lambda: next(asked) >= steps


def same_end(state, other) -> bool:
    return (
        state.history == other.history
        and state.best_epoch == other.best_epoch
        and all(state.best_model[name].equal(tensor) for name, tensor in other.best_model.items())
    )


def latest_weights(tmp_path, folder):
    return torch.load(tmp_path / folder / LATEST, weights_only=True)["state"]["model"]


class EndsOnce:
    """Memory ends at the n-th call (from 1) of one kind, ``forward``, ``backward`` or ``validation``, and then not."""

    def __init__(self, kind, number):
        self.kind, self.number, self.calls = kind, number, 0

    def __call__(self, kind):
        if kind == self.kind:
            self.calls += 1
            if self.calls == self.number:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")


class Tight(Draining):
    """The tiny task, in which memory ends as ``ends`` says. Random numbers are drawn sample by sample."""

    def __init__(self, task, ends):
        super().__init__(task)
        self.ends = ends

    def forward(self, model, batch):
        self.ends("forward" if model.training else "validation")
        logits = self._task.forward(model, batch)["logits"]
        if model.training:
            logits = logits + 0.1 * torch.randn(len(batch))
            logits.register_hook(lambda gradient: self.ends("backward"))
        return {"logits": logits}


class StepsEnd:
    """AdamW's ``step`` runs out of memory after changing a weight, at the given calls."""

    def __init__(self, monkeypatch, calls):
        self.count, self.foreach = 0, []
        inner = torch.optim.AdamW.step

        def step(optimizer, *arguments, **options):
            self.count += 1
            self.foreach.append(optimizer.param_groups[0].get("foreach"))
            if self.count in calls:
                with torch.no_grad():
                    optimizer.param_groups[0]["params"][0].mul_(7)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")
            return inner(optimizer, *arguments, **options)

        monkeypatch.setattr(torch.optim.AdamW, "step", step)


HALF = ComputeDevice(torch.device("cpu"), torch.float16, "half precision, as on an old GPU")
