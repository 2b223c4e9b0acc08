"""What a shortage of memory leaves behind: an event in the log and a file with what memory held."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from fvc_lib.learning.out_of_memory import MemoryState
from fvc_lib.learning.task import Batch
from fvc_lib.services.atomic_files import write_json

Place = Literal["forward", "joint_loss", "backward", "validation", "optimizer_step"]


@dataclass(frozen=True)
class Shortage:
    """Memory ended once.

    Attributes:
        where: in which part of a step.
        state: what memory held.
        micro_batch: samples in memory at once when it ended; None in the optimizer's step.
        micro_batch_next: what is tried next; None when there is nothing smaller.
        batch: shape and dtype of one sample's tensors, by name.
        num_samples: of the effective (or validation) batch.
    """

    where: Place
    state: MemoryState
    micro_batch: int | None
    micro_batch_next: int | None
    batch: dict[str, str]
    num_samples: int

    @classmethod
    def of_step(cls, state: MemoryState) -> Shortage:
        """In the optimizer's step, where no batch is at hand."""
        return cls("optimizer_step", state, None, None, {}, 0)


def sample_shapes(batch: Batch) -> dict[str, str]:
    """Shape and dtype of one sample's tensors, for messages."""
    return {name: f"{tuple(t.shape[1:])} {str(t.dtype).removeprefix('torch.')}" for name, t in batch.tensors.items()}


class ShortageFolder:
    """Writes one JSON file per shortage: ``step_000123_forward_1.json``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, shortage: Shortage, *, phase: str, epoch: int, step: int) -> Path:
        """The file's path. A repeated step gets the next free number.

        Raises:
            OSError: the folder cannot be written.
        """
        number = 1
        while (path := self.folder / f"step_{step:06d}_{phase}_{shortage.where}_{number}.json").exists():
            number += 1
        write_json(path, {"phase": phase, "epoch": epoch, "global_step": step, **asdict(shortage)})
        return path
