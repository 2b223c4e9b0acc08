"""What the tests of the engine share: tasks and steps that interfere, an observer, and when two trainings are equal."""

import torch

from fvc_lib.engine.optimizer import EagerAdamW
from fvc_lib.services.checkpoint_files import LATEST
from tests.kits.task_kit import changed, when_backward, with_noise

SETTINGS = {
    "epochs": 3, "effective_batch_size": 8, "micro_batch": 4, "learning_rate": 0.01, "weight_decay": 0.01,
    "warmup_share": 0.1, "max_gradient_norm": 1.0, "early_stopping_epochs": 0, "seed": 0,
}  # fmt: skip


# Relative differences that a split of an effective batch may make to its gradients in float32; in float64 1e-12. One
# sample alone is computed by other kernels of torch, whose sums round otherwise.
SPLIT_TOLERANCE, LONE_SAMPLE_TOLERANCE = 1e-6, 1e-5


def split_tolerance(num_samples, micro_batch):
    """What is promised of ``num_samples`` in parts of ``micro_batch``, in float32."""
    alone = min(num_samples, micro_batch) == 1 or num_samples % micro_batch == 1
    return LONE_SAMPLE_TOLERANCE if alone and num_samples > 1 else SPLIT_TOLERANCE


class _Draining:
    """Draws a random number per training pass and interferes before each."""

    def forward(self, model, batch):
        self.before(model, batch)
        outputs = super().forward(model, batch)
        return with_noise(outputs, 0.1 * torch.randn(1)) if model.training else outputs


def draining(task, before=lambda model, batch: None):
    """``task``, with a training that draws random numbers, and ``before(model, batch)`` before every forward pass."""
    return changed(task, _Draining, before=before)


class Observer:
    """A memory observer that keeps what it is told."""

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


def weight_distance(weights, others):
    """The largest relative difference between two models' tensors."""
    pairs = [(tensor, others[name]) for name, tensor in weights.items() if not tensor.equal(others[name])]
    return max((((tensor - other).norm() / other.norm()).item() for tensor, other in pairs), default=0.0)


def latest_weights(tmp_path, folder):
    return torch.load(tmp_path / folder / LATEST, weights_only=True)["state"]["model"]


class EndsOnce:
    """Memory ends at the n-th call (from 1) of one kind, and then not.

    The kinds are ``forward``, ``joint_loss``, ``backward`` and, of what is only looked at, ``validation``.
    """

    def __init__(self, kind, number):
        self.kind, self.number, self.calls = kind, number, 0

    def __call__(self, kind):
        if kind == self.kind:
            self.calls += 1
            if self.calls == self.number:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")


class _Tight:
    """Memory ends as ``ends`` says. Where it ``draws``, then one random number per sample."""

    def forward(self, model, batch):
        self.ends("forward" if model.training else "validation")
        outputs = super().forward(model, batch)
        if model.training and self.draws:
            outputs = with_noise(outputs, 0.1 * torch.randn(len(batch)))
        if model.training:
            when_backward(outputs, lambda gradient: self.ends("backward"))
        return outputs

    def joint_loss(self, model, outputs, tensors):
        self.ends("joint_loss" if model.training else "validation")
        return super().joint_loss(model, outputs, tensors)


def tight(task, ends=lambda kind: None, *, draws=True):
    """``task``, in which memory ends where ``ends(kind)`` raises; see ``EndsOnce`` for the kinds."""
    return changed(task, _Tight, ends=ends, draws=draws)


class StepsEnd:
    """AdamW's ``step`` runs out of memory after changing a weight, at the given calls."""

    def __init__(self, monkeypatch, calls):
        self.count = 0
        inner = EagerAdamW.step

        def step(optimizer, *arguments, **options):
            self.count += 1
            if self.count in calls:
                with torch.no_grad():
                    optimizer.param_groups[0]["params"][0].mul_(7)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")
            return inner(optimizer, *arguments, **options)

        monkeypatch.setattr(EagerAdamW, "step", step)
