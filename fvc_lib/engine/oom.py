"""Telling an out-of-memory from any other error, by type first, then by anchored message, then by cause; and telling
what memory held when it ended.
"""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from torch import Tensor

from fvc_lib.engine.device import device_memory_probe
from fvc_lib.engine.task import Batch
from fvc_lib.services.atomic_files import write_json

# Anchored at the start: the substring "oom" also matches room, zoom and bloom.
_MESSAGES = re.compile(
    r"^(?:\[enforce fail at alloc_cpu\.cpp:\d+\].*)?DefaultCPUAllocator: (?:can't allocate memory|not enough memory)"
    # oneDNN keeps the reason to itself: under a falling RLIMIT_AS one end in five came with this text. It also
    # stands for a primitive that oneDNN does not have: then no halving helps, and the text is told with the last error.
    r"|^could not (?:create a primitive|create a memory object|execute a primitive)$"
    r"|^MPS backend out of memory"
    r"|^CUDA out of memory"
    r"|^CUDA error: (?:out of memory|CUBLAS_STATUS_ALLOC_FAILED)"
    r"|^cuDNN error: CUDNN_STATUS_ALLOC_FAILED"
    # What a convolution says on CUDA when its workspace does not fit.
    r"|^(?:GET|FIND) was unable to find an engine to execute this computation"
    r"|^Unable to find a valid cuDNN algorithm"
)
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB|KB|MB|GB)?")
_UNITS = {"": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_NUM_LISTED = 20


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether ``error``, or what it was raised from, says that memory ended."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(error, RuntimeError) and _MESSAGES.match(str(error)):
            return True
        error = error.__cause__
    return False


@dataclass(frozen=True)
class MemoryState:
    """What memory held when it ended.

    Attributes:
        message: the error's first line.
        asked_bytes: what was asked for; None where the message does not say.
        rss_bytes: resident memory of this process.
        device: of an accelerator, by ``DeviceMemory``'s names; empty on the CPU.
        largest_tensors: ``{shape, dtype, device, count, total_bytes}`` per kind that Python can see, largest first
            (what only the autograd graph holds is not among them).
    """

    message: str
    asked_bytes: int | None
    rss_bytes: int
    device: dict[str, int]
    largest_tensors: list[dict[str, Any]]


def memory_state(error: BaseException, device: torch.device, known: Iterable[Tensor] = ()) -> MemoryState:
    """Look around while ``error`` is being handled, that is while its traceback still holds the tensors.

    Args:
        error: the out-of-memory.
        device: where it happened.
        known: tensors to count besides those the garbage collector knows (frozen ones it does not list).
    """
    message = str(error).partition("\n")[0] or type(error).__name__
    probe = device_memory_probe(device)
    try:
        tensors = _largest_tensors(known)
    except MemoryError:  # there is not even enough to look
        tensors = []
    on_device = vars(probe()) if probe is not None else {}
    return MemoryState(message, asked_bytes(message), psutil.Process().memory_info().rss, on_device, tensors)


def asked_bytes(message: str) -> int | None:
    """The bytes an allocator's message says were asked for: ``Tried to allocate 2.00 GiB``, ``... 400 bytes``."""
    match = _ASKED.search(message)
    return int(float(match[1].rstrip(".")) * _UNITS[match[2] or ""]) if match else None


def _largest_tensors(known: Iterable[Tensor]) -> list[dict[str, Any]]:
    counts: Counter[tuple[tuple[int, ...], str, str, int]] = Counter()
    shown: dict[tuple[str, int], tuple[int, Tensor]] = {}  # of each storage the tensor that shows most of it
    for tensor in (*known, *(item for item in gc.get_objects() if issubclass(type(item), Tensor))):
        try:
            storage = tensor.untyped_storage()
            place = (str(tensor.device), storage.data_ptr())
        except (RuntimeError, NotImplementedError):  # sparse, fake and other tensors without memory of their own
            continue
        part = tensor.nbytes if tensor.nbytes <= storage.nbytes() else 0  # an expanded view shows it many times over
        if place not in shown or part > shown[place][0]:
            shown[place] = part, tensor
    for (device, _), (_, tensor) in shown.items():
        counts[(tuple(tensor.shape), str(tensor.dtype), device, tensor.untyped_storage().nbytes())] += 1
    largest = sorted(counts.items(), key=lambda item: (-item[0][3] * item[1], item[0]))[:_NUM_LISTED]
    return [
        {"shape": list(shape), "dtype": dtype, "device": where, "count": count, "total_bytes": size * count}
        for (shape, dtype, where, size), count in largest
    ]


# ----------------------------------------------------------------------------------------------------
# What a shortage of memory leaves behind: an event in the log and a file with what memory held.


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


# ----------------------------------------------------------------------------------------------------
# How many samples are in memory at once, step by step: backing off, climbing back, and repeating an earlier training.
#
# Every change is recorded with its step. Rounding depends on how a batch was split, so a training repeats to the bit
# only under the same changes; given them, it does.
#


@dataclass(frozen=True)
class MicroBatchChange:
    """From here on ``micro_batch`` samples at once.

    Attributes:
        step: effective batches consumed before it.
        validation_sample: None in training; in the validation pass after ``step``, from this sample (0-based) to the
            end of that pass.
    """

    step: int
    micro_batch: int
    validation_sample: int | None = None


@dataclass
class MicroBatchPlan:
    """The micro-batch of every step. It begins as planned, is lowered by shortages of memory, and may climb back.

    Attributes:
        planned: what a training without shortage uses throughout.
        recovery_steps: after so many steps without shortage a lowered one is doubled; 0: never. A climb that fails
            doubles the wait, so that trying costs less and less.
        replay: the changes of an earlier training, to be made at the same places.
        current: of the next step.
        changes: all changes so far, the plan itself first.
        quiet_steps: steps since the last change.
        wait_steps: quiet steps before the next climb.
        climbed: whether the last change was a climb.
    """

    planned: int
    recovery_steps: int = 0
    replay: Sequence[MicroBatchChange] = ()
    current: int = 0
    changes: list[MicroBatchChange] = field(default_factory=list)
    quiet_steps: int = 0
    wait_steps: int = 0
    climbed: bool = False

    def __post_init__(self) -> None:
        if not self.changes:
            self.current, self.wait_steps = self.planned, self.recovery_steps
            self.changes = [MicroBatchChange(0, self.planned)]

    def at_step(self, step: int) -> int:
        """What step ``step`` begins with; climbs where that is due."""
        if self.replay:
            due = [change for change in self.replay if change.validation_sample is None and change.step <= step]
            if due and due[-1].micro_batch != self.current:
                self._change(step, due[-1].micro_batch)
        elif self.recovery_steps and self.current < self.planned and self.quiet_steps >= self.wait_steps:
            self._change(step, min(2 * self.current, self.planned))
            self.climbed = True
        return self.current

    def fitted(self, step: int, micro_batch: int) -> bool:
        """Step ``step`` was done with ``micro_batch``; returns whether that was a back-off."""
        if micro_batch >= self.current:
            self.quiet_steps += 1
            if self.climbed and self.quiet_steps >= self.wait_steps:
                self.climbed, self.wait_steps = False, self.recovery_steps
            return False
        if self.climbed:
            self.wait_steps *= 2
        self._change(step, micro_batch)
        return True

    def in_validation(self, step: int, sample: int) -> int:
        """What the validation pass after ``step`` uses from ``sample`` on, at most."""
        changes = self.replay or self.changes
        here = [change for change in changes if change.step == step and change.validation_sample is not None]
        due = [change for change in here if (change.validation_sample or 0) <= sample]
        return due[-1].micro_batch if due else self.current

    def fitted_in_validation(self, step: int, sample: int, micro_batch: int) -> None:
        """In the validation pass after ``step`` memory sufficed only for ``micro_batch`` from ``sample`` on."""
        self.changes.append(MicroBatchChange(step, micro_batch, sample))

    def to_document(self) -> dict[str, Any]:
        """Numbers and lists, for a checkpoint."""
        return {
            "planned": self.planned,
            "recovery_steps": self.recovery_steps,
            "current": self.current,
            "changes": [[c.step, c.micro_batch, c.validation_sample] for c in self.changes],
            "quiet_steps": self.quiet_steps,
            "wait_steps": self.wait_steps,
            "climbed": self.climbed,
        }

    def resumed(self, document: dict[str, Any], step: int) -> str | None:
        """Go on from ``to_document`` at ``step``; returns what was planned otherwise then, if it was.

        A lower plan than then is a remedy for memory that ended, and takes effect; a higher one would undo a back-off.
        """
        self.current = document["current"]
        self.changes = [MicroBatchChange(*change) for change in document["changes"]]
        self.quiet_steps, self.climbed = document["quiet_steps"], document["climbed"]
        same = document["recovery_steps"] == self.recovery_steps
        self.wait_steps = document["wait_steps"] if same else self.recovery_steps
        if self.current > self.planned:
            self._change(step, self.planned)
        then = document["planned"]
        return f"micro-batch {then} -> {self.planned} planned" if then != self.planned else None

    def _change(self, step: int, micro_batch: int) -> None:
        self.current = micro_batch
        self.changes.append(MicroBatchChange(step, micro_batch))
        self.quiet_steps, self.climbed = 0, False
