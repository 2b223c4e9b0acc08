"""Out of memory: which errors mean it, what memory held, what is recorded of it, and the smaller micro-batch after it.

An error is judged by its type first, then by its message, then by its cause.
"""

import gc
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fvc_lib.engine.device import device_memory_probe
from fvc_lib.engine.task import Batch
from fvc_lib.services.atomic_files import write_json
from fvc_lib.services.memory.budget import resident_bytes

# What a RuntimeError says that means it. Whole words, outside of a path: "oom" also stands in room, zoom and bloom.
# What torch raises again for a worker begins with "Caught", and holds a traceback: names of files and lines of code.
_MESSAGES = re.compile(
    r"^(?!Caught )[\s\S]*(?<![\w/\\.])(?i:out of memory|oom|(?:memory )?allocation failed)(?![\w/\\]|\.\w)"
    r"|^(?:\[enforce fail at alloc_cpu\.cpp:\d+\].*)?DefaultCPUAllocator: (?:can't allocate memory|not enough memory)"
    # oneDNN does not say why: under a falling RLIMIT_AS one failure in five came with this text. It also stands for a
    # primitive that oneDNN does not have: then no halving helps, and the last error quotes the text.
    r"|^could not (?:create a primitive|create a memory object|execute a primitive)$"
    # A handle that does not fit into memory is one that could not be initialised.
    r"|^CUDA error: CUBLAS_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)"
    r"|^CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublas(?:Lt)?Create"
    # Main memory, locked for transfers.
    r"|^Caught AcceleratorError in pin memory thread[\s\S]*CUDA error: out of memory"
    # cuDNN 9 says whose memory ended; what came before it did not.
    r"|^cuDNN (?:Frontend )?error: [^\n]*CUDNN_STATUS_"
    r"(?:NOT_INITIALIZED|ALLOC_FAILED|INTERNAL_ERROR_(?:HOST|DEVICE)_ALLOCATION_FAILED)"
    # NCCL's own buffers: its version and advice stand before the reason, on lines of their own.
    r"|^NCCL [Ee]rror in: [\s\S]*Failed to CUDA (?:host )?[cm]?alloc"
    # What a convolution says on CUDA when its workspace does not fit.
    r"|^(?:GET|FIND) was unable to find an engine to execute this computation"
    r"|^Unable to find a valid cuDNN algorithm"
)
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB|KB|MB|GB)?")
_UNITS = {"": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_NUM_LISTED = 20


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether ``error`` or one of its causes is an out-of-memory."""
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
    """What memory held when it ran out."""

    message: str  # the error's first line
    asked_bytes: int | None  # what was asked for; None where the message does not say
    rss_bytes: int  # resident memory of this process
    device: dict[str, int]  # of an accelerator, by ``DeviceMemory``'s names; empty on the CPU
    # ``{shape, dtype, device, count, total_bytes}`` per kind that Python can see, largest first (what only the
    # autograd graph holds is not among them).
    largest_tensors: list[dict[str, Any]]


def memory_state(error: BaseException, device: torch.device, known: Iterable[Tensor] = ()) -> MemoryState:
    """Describe memory while ``error`` is being handled and its traceback still holds the tensors.

    Args:
        error: the out-of-memory.
        device: where it happened.
        known: tensors to count besides those the garbage collector knows (frozen ones it does not list).
    """
    message = str(error).partition("\n")[0] or type(error).__name__
    probe = device_memory_probe(device)
    try:
        tensors = _largest_tensors(known)
    except MemoryError:  # not even the list fits
        tensors = []
    on_device = vars(probe()) if probe is not None else {}
    return MemoryState(message, asked_bytes(message), resident_bytes(), on_device, tensors)


def asked_bytes(message: str) -> int | None:
    """Return the requested bytes that an allocator's message names, as in ``Tried to allocate 2.00 GiB``."""
    match = _ASKED.search(message)
    return int(float(match[1].rstrip(".")) * _UNITS[match[2] or ""]) if match else None


def _largest_tensors(known: Iterable[Tensor]) -> list[dict[str, Any]]:
    counts: Counter[tuple[tuple[int, ...], str, str, int]] = Counter()
    shown: dict[tuple[str, int], tuple[int, Tensor]] = {}  # of each storage the tensor that shows most of it
    for tensor in (*known, *(item for item in gc.get_objects() if issubclass(type(item), Tensor))):
        try:
            storage = tensor.untyped_storage()
            if storage.device.type == "meta":  # what torch's compiler reckons with: no memory
                continue
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


Place = Literal["forward", "joint_loss", "backward", "validation", "optimizer_step"]


@dataclass(frozen=True)
class OutOfMemory:
    """One out-of-memory and what is done about it."""

    where: Place  # in which part of a step
    state: MemoryState  # what memory held
    micro_batch: int | None  # samples in memory at once; None in the optimizer's step
    micro_batch_next: int | None  # what is tried next; None when there is nothing smaller
    # Shape and dtype of one sample's tensors, by name; empty in the optimizer's step, where none is at hand.
    batch: dict[str, str]
    num_samples: int  # of the effective (or validation) batch; 0 there


def sample_shapes(batch: Batch) -> dict[str, str]:
    """Shape and dtype of one sample's tensors, for messages."""
    return {name: f"{tuple(t.shape[1:])} {str(t.dtype).removeprefix('torch.')}" for name, t in batch.tensors.items()}


def write_context(folder: Path, event: OutOfMemory, *, phase: str, epoch: int, step: int) -> Path:
    """Write ``step_000123_forward_1.json`` into ``folder``, a repeated step with the next free number; its path.

    Raises:
        OSError: the folder cannot be written.
    """
    number = 1
    while (path := folder / f"step_{step:06d}_{phase}_{event.where}_{number}.json").exists():
        number += 1
    write_json(path, {"phase": phase, "epoch": epoch, "global_step": step, **asdict(event)})
    return path


@dataclass(frozen=True)
class MicroBatchChange:
    """From here on ``micro_batch`` samples at once."""

    step: int  # effective batches consumed before it
    micro_batch: int
    # None in training; in the validation pass after ``step``, from this sample (0-based) to the end of that pass.
    validation_sample: int | None = None


RECOVERY_STEPS = 10  # a try that fails costs one attempt at a step, and every failure doubles the wait


@dataclass
class MicroBatchPlan:
    """How many samples are in memory at once: as planned, halved by an out-of-memory, and doubled again later.

    A lowered micro-batch is doubled after ``wait_steps`` steps that went well, up to the plan. Where memory runs out
    before the larger one has lasted as long, the wait for the next try is twice as long. All is counted in steps, and
    every change is recorded with its step, because rounding depends on how a batch was split.
    """

    planned: int  # what a training without out-of-memory uses throughout
    current: int = 0  # of the last step
    changes: list[MicroBatchChange] = field(default_factory=list)  # all changes so far, the plan itself first
    quiet_steps: int = 0  # since the last change or try
    wait_steps: int = RECOVERY_STEPS  # quiet steps before the next try
    climbed: bool = False  # whether the last change was a doubling that has yet to last

    def __post_init__(self) -> None:
        if not self.changes:
            self._change(0, self.planned)

    @property
    def to_try(self) -> int:
        """Return the micro-batch that the next step begins with."""
        return min(2 * self.current, self.planned) if self.quiet_steps >= self.wait_steps else self.current

    def done(self, step: int, micro_batch: int) -> None:
        """Step ``step``, begun with ``to_try``, was done with ``micro_batch``."""
        tried = self.to_try
        if micro_batch == tried == self.current:
            self.quiet_steps += 1
            if self.climbed and self.quiet_steps >= self.wait_steps:
                self.climbed, self.wait_steps = False, RECOVERY_STEPS
            return
        if micro_batch < tried and (self.climbed or tried > self.current):
            self.wait_steps *= 2
        self.climbed, self.quiet_steps = micro_batch > self.current, 0
        if micro_batch != self.current:
            self._change(step, micro_batch)

    def in_validation(self, step: int, sample: int) -> int:
        """Return the micro-batch of the validation pass after ``step`` from ``sample`` on."""
        here = [change for change in self.changes if change.step == step and change.validation_sample is not None]
        due = [change for change in here if (change.validation_sample or 0) <= sample]
        return due[-1].micro_batch if due else self.current

    def fitted_in_validation(self, step: int, sample: int, micro_batch: int) -> None:
        """Record that only ``micro_batch`` fitted from ``sample`` on, in the validation pass after ``step``."""
        self.changes.append(MicroBatchChange(step, micro_batch, sample))

    def to_document(self) -> dict[str, Any]:
        """Numbers and lists, for a checkpoint."""
        return {**vars(self), "changes": [[c.step, c.micro_batch, c.validation_sample] for c in self.changes]}

    def resumed(self, document: dict[str, Any], step: int) -> str | None:
        """Go on from ``to_document`` at ``step``; returns what was planned otherwise then, if it was.

        A lower plan than then is a remedy for an out-of-memory and takes effect at once; a higher one is climbed to.
        """
        self.current = document["current"]
        self.changes = [MicroBatchChange(*change) for change in document["changes"]]
        self.wait_steps = document["wait_steps"]
        self.quiet_steps, self.climbed = document["quiet_steps"], document["climbed"]
        then = document["planned"]
        if then == self.planned:
            return None
        self.quiet_steps, self.climbed = 0, False
        if self.current > self.planned:
            self._change(step, self.planned)
        return f"micro-batch {then} -> {self.planned} planned"

    def _change(self, step: int, micro_batch: int) -> None:
        self.current = micro_batch
        self.changes.append(MicroBatchChange(step, micro_batch))
