"""Choose a training's device, precision, kernels and gradient checkpointing, and read the device's memory."""

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fvc_lib.services.errors import UsageError
from fvc_lib.services.memory import DeviceMemory, give_back_freed

if TYPE_CHECKING:
    pass  # whose packages a GPU's machine need not have


@dataclass(frozen=True)
class ComputeDevice:
    """The device of a training, its precision and its name.

    ``amp_dtype`` is the lower precision of mixed-precision training; None: everything is computed in float32.
    """

    device: torch.device
    amp_dtype: torch.dtype | None
    name: str

    def describe(self) -> str:
        """Return one line for a notebook, like ``cpu (x86_64, 2 threads), float32``."""
        precision = "float32" if self.amp_dtype is None else f"mixed {str(self.amp_dtype).removeprefix('torch.')}"
        return f"{self.device.type} ({self.name}), {precision}"


def resolve_device(request: str = "auto", amp: str = "auto") -> ComputeDevice:
    """Return the device named ``request``; ``auto`` chooses cuda, else mps, else cpu.

    With ``amp="auto"`` a cuda device gets mixed precision: bfloat16, or float16 where the GPU lacks bfloat16. In every
    other case the precision is float32.

    Raises:
        UsageError: the requested device is not available.
    """
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    kind = next(name for name, there in present.items() if there) if request == "auto" else request
    if not present.get(kind, False):
        have = ", ".join(name for name, there in present.items() if there)
        raise UsageError(
            f"device: got {request!r}, which torch {torch.__version__} does not find; it has: {have}, auto."
        )
    if kind != "cuda":
        name = f"{torch.get_num_threads()} threads" if kind == "cpu" else "Apple GPU"
        return ComputeDevice(torch.device(kind), None, name)
    device, amp_dtype = torch.device(kind, torch.cuda.current_device()), None
    if amp == "auto":
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        amp_dtype = torch.bfloat16 if has_bfloat16 else torch.float16
    return ComputeDevice(device, amp_dtype, torch.cuda.get_device_name(device))


@contextmanager
def cuda_kernels(compute: ComputeDevice) -> Iterator[None]:
    """Set torch's choice of CUDA kernels for ``compute`` within the block, and restore the settings at its end.

    TF32 is allowed for float32 products if precision is mixed, else forbidden.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    if compute.device.type == "cuda":
        matmul.allow_tf32 = cudnn.allow_tf32 = compute.amp_dtype is not None
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def device_memory_probe(device: torch.device) -> Callable[[], DeviceMemory] | None:
    """Return a function that returns the memory of a CUDA device; None for other devices.

    The function is an argument of ``MemoryObserver.watch_device``.
    """
    return (lambda: _cuda_memory(device)) if device.type == "cuda" else None


@contextmanager
def deterministic_algorithms(device: torch.device) -> Iterator[None]:
    """Within the block, make torch raise at operations whose results vary from run to run. On the CPU only.

    On other devices the block changes nothing, because they lack a deterministic version of some operations.
    ``torch.use_deterministic_algorithms`` is not used, because it imports torch's compiler.
    """
    settings = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.set_deterministic_debug_mode("error" if device.type == "cpu" else before[0])
    settings.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time and changes no sum
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        settings.fill_uninitialized_memory = before[1]  # type: ignore[attr-defined]


@contextmanager
def without_memory() -> Iterator[None]:
    """Within the block, build networks on torch's meta device: tensors have shapes, but no values.

    Torch's warning that loading weights into such a network has no effect is silenced.
    """
    with torch.device("meta"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")
        yield


def clips_in_a_pass(device: torch.device, batch_size: int) -> int:
    """Return how many clips to compute in one forward pass whose results are stored: 1 on a CPU, else ``batch_size``.

    Rounding depends on the shape of a batch, so all batches have the same shape (``filled_up``). On a CPU a pass with a
    single clip is about as fast per clip as one with more.
    """
    return 1 if device.type == "cpu" else batch_size


def filled_up(clips: Tensor, number: int) -> Tensor:
    """Return ``clips``, a tensor (B, ...), with its last clip repeated until there are ``number`` clips.

    With ``number`` clips or more, ``clips`` is returned unchanged.
    """
    missing = number - len(clips)
    return torch.cat([clips, clips[-1:].expand(missing, *clips.shape[1:])]) if missing > 0 else clips


def release_cached_memory(device: torch.device) -> None:
    """Return memory that torch's allocator caches to the device. This is slow, so do not call it for every batch."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def give_back_unused() -> None:
    """Collect garbage, and return unused memory of the C library (hundreds of MB after a training) to the system."""
    gc.collect()
    give_back_freed()


def finished_at(device: torch.device) -> float:
    """Wait until the device has finished its work; return the current time of a monotonic clock in seconds."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def peak_device_bytes(device: torch.device) -> int | None:
    """Return the largest number of bytes that torch has allocated on a CUDA device; None on other devices."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _cuda_memory(device: torch.device) -> DeviceMemory:
    stats = torch.cuda.memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    reserved = stats.get("reserved_bytes.all.current", 0)
    return DeviceMemory(
        allocated_bytes=stats.get("allocated_bytes.all.current", 0),
        reserved_bytes=reserved,
        max_allocated_bytes=stats.get("allocated_bytes.all.peak", 0),
        total_bytes=min(total, reserved + free),  # without the memory that other processes hold
        free_bytes=free,
    )


# ----------------------------------------------------------------------------------------------------
# Gradient checkpointing: activations are recomputed in the backward pass instead of stored.


@runtime_checkable
class Recomputable(Protocol):
    """A model that can recompute activations in the backward pass instead of storing them.

    See Chen et al., "Training deep nets with sublinear memory cost", 2016 (gradient checkpointing).
    """

    def recomputable_blocks(self) -> Sequence[nn.Module]:
        """Return the modules whose activations are recomputed; no module may contain another one.

        Their forward pass must depend only on inputs, weights and torch's random state.
        """
        ...


def recompute_activations(model: nn.Module) -> None:
    """Turn on gradient checkpointing: store only the inputs of ``model``'s recomputable blocks for the backward pass.

    A second call changes nothing. Parameter and buffer names stay, and the model can still be pickled and copied.
    Torch's random state is restored for the second forward pass, so dropout uses the same masks. A block that updates
    a buffer in training mode (running statistics of a batch norm) is refused, because it would do so twice.

    Raises:
        UsageError: the model has no ``recomputable_blocks``, or a block has a batch norm with running statistics.
    """
    name, mode = type(model).__name__, model.training
    if not isinstance(model, Recomputable):
        raise UsageError(
            f"gradient_checkpointing: model {name!r} names no blocks to compute again (a method recomputable_blocks). "
            "Turn gradient_checkpointing off or take another model."
        )
    blocks = model.recomputable_blocks()
    model.train()  # a network may keep its batch norms in evaluation mode here, which is allowed
    norms = [block.get_submodule(norm) for block in blocks for norm in training_batch_norms(block)]
    model.train(mode)
    if any(norm.track_running_stats for norm in norms):
        raise UsageError(
            f"gradient_checkpointing: a block of {name!r} holds a batch norm, whose running statistics would be "
            "updated twice a step. Use group norm or turn gradient_checkpointing off."
        )
    for block in blocks:
        # On the instance, where nn.Module.__call__ finds it first: wrapping the block would rename its parameters.
        block.__dict__["forward"] = partial(_recomputed_forward, block)


def _recomputed_forward(block: nn.Module, *inputs: Any, **named: Any) -> Any:
    forward = partial(type(block).forward, block)
    if not torch.is_grad_enabled():
        return forward(*inputs, **named)
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=True, **named)


def training_batch_norms(model: nn.Module) -> list[str]:
    """Return the names of the batch norms that are in training mode now."""
    batch_norm = nn.modules.batchnorm._BatchNorm
    return [name for name, part in model.named_modules() if isinstance(part, batch_norm) and part.training]


# ----------------------------------------------------------------------------------------------------
# Mixed precision.


class Precision:
    """Autocast and loss scaling for a device; both do nothing in float32."""

    def __init__(self, compute: ComputeDevice) -> None:
        self._device_type = compute.device.type
        self._amp_dtype = compute.amp_dtype
        self.scaler = self._new_scaler()

    def restore_scaler(self, state: dict[str, Any]) -> None:
        """Replace the loss scaler by a new one with ``state``. The old scaler may have failed within a step."""
        self.scaler = self._new_scaler()
        self.scaler.load_state_dict(state)

    def autocast(self) -> AbstractContextManager[None]:
        """Return a context for forward passes and losses. With mixed precision, it casts to the lower precision."""
        if self._amp_dtype is None:  # entering a disabled one costs 50 microseconds
            return nullcontext()
        return torch.autocast(self._device_type, dtype=self._amp_dtype)

    @property
    def scales_losses(self) -> bool:
        """Whether losses are scaled, as for float16. Then the scaler skips steps with infinite gradients."""
        return bool(self.scaler.is_enabled())

    @property
    def overflow_is_normal(self) -> bool:
        """Whether an infinite gradient may come from the loss scale: losses are scaled by a factor of at least 1."""
        return self.scales_losses and float(self.scaler.get_scale()) >= 1

    def _new_scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self._device_type, enabled=self._amp_dtype is torch.float16)
