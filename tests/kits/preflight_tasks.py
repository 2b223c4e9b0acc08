"""Tasks that go wrong in a child process, where the preflight must survive them; importable, so they can be sent."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from fvc_lib.engine.task import LossSum, Sample


class Numbers:
    """Forty samples of eight numbers."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Sample:
        return Sample(f"sample{index}", {"x": torch.full((8,), float(index))})


@dataclass(frozen=True)
class TroubledTask:
    """Linear regression that does ``trouble`` in the forward pass once a micro-batch has ``from_size`` samples."""

    trouble: str
    from_size: int

    training_data = validation_data = Numbers()

    def build_model(self):
        return nn.Linear(8, 1)

    def forward(self, model, batch):
        if len(batch) >= self.from_size:
            _TROUBLES[self.trouble]()
        return {"y": model(batch.tensors["x"]).squeeze(1)}

    def loss(self, outputs, batch):
        return LossSum(outputs["y"].square().sum(), torch.tensor(float(len(batch))))

    def new_accumulator(self):
        raise NotImplementedError


def _raise():
    score = Path("/proc/self/oom_score_adj")
    raise ValueError(f"broken in a process with oom_score_adj {score.read_text().strip() if score.exists() else 1000}")


class ComparingTask(TroubledTask):
    """Also compares its samples; ``trouble`` comes once ``from_size`` of them are compared."""

    joint_outputs, joint_tensors = ("y",), ()

    def forward(self, model, batch):
        return {"y": model(batch.tensors["x"]).squeeze(1)}

    def joint_loss(self, model, outputs, tensors):
        y = outputs["y"]
        if len(y) >= self.from_size:
            _TROUBLES[self.trouble]()
        return (y[:, None] - y).square().mean(1).sum()


_TROUBLES = {
    "raise": _raise,
    "hang": lambda: time.sleep(3600),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "be_killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "take_64_gib": lambda: torch.zeros(1 << 36, dtype=torch.uint8),
}
