"""Recognise out-of-memory errors, describe them, and record the micro-batch sizes of a training.

A micro-batch is the part of an effective batch (the samples of one optimizer step) that is in memory at once.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

# Messages of a RuntimeError that mean an out-of-memory. Only whole words outside of paths count: "oom" also occurs in
# room, zoom and bloom. Errors of loader processes begin with "Caught" and contain a traceback, so they do not count.
_MESSAGES = re.compile(
    r"^(?!Caught )[\s\S]*(?<![\w/\\.])(?i:out of memory|oom|(?:memory )?allocation failed)(?![\w/\\]|\.\w)"
    r"|^(?:\[enforce fail at alloc_cpu\.cpp:\d+\].*)?DefaultCPUAllocator: (?:can't allocate memory|not enough memory)"
    # oneDNN gives no reason: under a falling RLIMIT_AS one failure in five had this text. A primitive that oneDNN lacks
    # has it too. Then halving does not help, and the last error quotes the text.
    r"|^could not (?:create a primitive|create a memory object|execute a primitive)$"
    # A handle that does not fit into memory cannot be initialised.
    r"|^CUDA error: CUBLAS_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)"
    r"|^CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublas(?:Lt)?Create"
    # The loader's page-locked main memory.
    r"|^Caught AcceleratorError in pin memory thread[\s\S]*CUDA error: out of memory"
    # cuDNN 9 names the memory that ended; earlier versions do not.
    r"|^cuDNN (?:Frontend )?error: [^\n]*CUDNN_STATUS_"
    r"(?:NOT_INITIALIZED|ALLOC_FAILED|INTERNAL_ERROR_(?:HOST|DEVICE)_ALLOCATION_FAILED)"
    # NCCL's buffers: lines with its version and advice come before the reason.
    r"|^NCCL [Ee]rror in: [\s\S]*Failed to CUDA (?:host )?[cm]?alloc"
    # A convolution on CUDA whose workspace does not fit.
    r"|^(?:GET|FIND) was unable to find an engine to execute this computation"
    r"|^Unable to find a valid cuDNN algorithm"
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether ``error``, or an exception in its chain of causes (``__cause__``), is an out-of-memory error.

    The type of an exception is checked first, then its message.
    """
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(error, RuntimeError) and _MESSAGES.match(str(error)):
            return True
        error = error.__cause__
    return False


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if the message is empty."""
    return str(error).partition("\n")[0] or type(error).__name__


Place = Literal["forward", "joint_loss", "backward", "validation", "optimizer_step"]


@dataclass(frozen=True)
class OutOfMemory:
    """The description of an out-of-memory error, and of the micro-batch that is tried next."""

    where: Place  # part of the step
    message: str  # the first line of the error
    micro_batch: int | None  # samples in memory at once; None in the optimizer's step
    micro_batch_next: int | None  # size that is tried next; None: no smaller size is left


@dataclass(frozen=True)
class MicroBatchChange:
    """A change of the micro-batch (number of samples in memory at once) to ``micro_batch``."""

    step: int  # number of effective batches computed before the change
    micro_batch: int


@dataclass
class MicroBatchPlan:
    """The micro-batch (number of samples in memory at once) of a training, now and at every earlier step.

    An out-of-memory error lowers it for the rest of the training. Every change is recorded with its step, because
    rounding depends on how a batch was split.
    """

    planned: int  # the number at the beginning
    changes: list[MicroBatchChange] = field(default_factory=list)  # all changes so far, the plan itself first

    def __post_init__(self) -> None:
        if not self.changes:
            self.changes.append(MicroBatchChange(0, self.planned))

    @property
    def current(self) -> int:
        """Return the micro-batch now: the number of samples in memory at once after the last change."""
        return self.changes[-1].micro_batch

    def done(self, step: int, micro_batch: int) -> None:
        """Record that ``step`` was computed with ``micro_batch``; nothing is recorded if it did not change."""
        if micro_batch != self.current:
            self.changes.append(MicroBatchChange(step, micro_batch))

    def to_document(self) -> dict[str, Any]:
        """Return the plan as a dict for a checkpoint: ``planned``, and ``changes`` as pairs [step, micro-batch]."""
        return {"planned": self.planned, "changes": [[change.step, change.micro_batch] for change in self.changes]}

    def resume(self, document: dict[str, Any], step: int) -> None:
        """Continue at ``step`` from the plan that ``to_document`` wrote to ``document``.

        The training continues with the last micro-batch in ``document``. But if the user has changed the planned
        micro-batch since then, it continues with the new planned one.
        """
        self.changes = [MicroBatchChange(*change) for change in document["changes"]]
        if self.planned != document["planned"]:
            self.done(step, self.planned)
