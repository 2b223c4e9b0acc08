"""Choose the device, precision and CUDA kernels of a training, turn on gradient checkpointing, and read GPU memory."""

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fvc_lib.services.errors import UsageError
from fvc_lib.services.memory import DeviceMemory, give_back_freed


@dataclass(frozen=True)
class ComputeDevice:
    """The device of a training, with its precision.

    ``amp_dtype`` is the lower precision of mixed-precision training; None: everything is computed in float32. ``name``
    describes the hardware for people, such as the GPU's name.
    """

    device: torch.device
    amp_dtype: torch.dtype | None
    name: str

    def describe(self) -> str:
        """Return a text for notebooks, such as ``cpu (2 threads), float32``."""
        precision = "float32" if self.amp_dtype is None else f"mixed {str(self.amp_dtype).removeprefix('torch.')}"
        return f"{self.device.type} ({self.name}), {precision}"


def resolve_device(request: str = "auto", amp: str = "auto") -> ComputeDevice:
    """Return the device named ``request``; ``auto`` chooses cuda, else mps, else cpu.

    With ``amp="auto"`` a CUDA device gets mixed precision: bfloat16, or float16 if the GPU lacks bfloat16. With any
    other ``amp``, or on another device, the precision is float32.

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
    """Allow or forbid TF32 kernels on a CUDA device within the block, and restore the settings at its end.

    TF32 is allowed if ``compute`` has mixed precision, and forbidden for float32. On other devices nothing changes.
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
    """Return a function that measures the memory of the CUDA device ``device``; None for other devices.

    The function takes no argument. It can be given to ``MemoryObserver.watch_device`` as ``probe``.
    """
    return (lambda: _cuda_memory(device)) if device.type == "cuda" else None


@contextmanager
def deterministic_algorithms(device: torch.device) -> Iterator[None]:
    """Make torch raise an error for non-deterministic operations within the block, if ``device`` is the CPU.

    Such operations give slightly different results from run to run. On other devices they stay allowed, because some
    have no deterministic version there.
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
    """Create all tensors in the block on torch's meta device, so that networks have shapes but use no memory.

    Torch's warning that loading weights into such a network has no effect is silenced.
    """
    with torch.device("meta"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")
        yield


def clips_in_a_pass(device: torch.device, batch_size: int) -> int:
    """Return the batch size for forward passes whose results are stored: 1 on a CPU, else ``batch_size``.

    A clip's stored result must not depend on the other clips of its batch. But rounding depends on the shape of a
    batch, so ``filled_up`` gives all batches this size. On a CPU, larger batches are hardly faster per clip.
    """
    return 1 if device.type == "cpu" else batch_size


def filled_up(clips: Tensor, number: int) -> Tensor:
    """Return ``clips``, a tensor (B, ...), padded to (number, ...) by repeating its last clip.

    If B is at least ``number``, ``clips`` is returned unchanged.
    """
    missing = number - len(clips)
    if missing <= 0:
        return clips
    repeated = clips[-1:].expand(missing, *clips.shape[1:])
    return torch.cat([clips, repeated])


def release_cached_memory(device: torch.device) -> None:
    """Release the unused memory that torch's allocator caches on a GPU; do nothing on the CPU.

    This is slow, so do not call it for every batch.
    """
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def give_back_unused() -> None:
    """Collect garbage, and return unused main memory from the C library to the operating system (``malloc_trim``).

    After a training, this frees hundreds of MB.
    """
    gc.collect()
    give_back_freed()


def peak_device_bytes(device: torch.device) -> int | None:
    """Return the peak memory in bytes that torch's tensors have used on a CUDA device; None for other devices."""
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


def recompute_activations(model: nn.Module) -> None:
    """Turn on gradient checkpointing in ``model``, in place.

    Only the inputs of its recomputable blocks are stored; their activations are computed again in the backward pass.
    A second call changes nothing. Parameter and buffer names stay, and the model can still be pickled and copied.
    Torch's random state is restored for the second forward pass, so dropout uses the same masks. A batch norm with
    running statistics is refused, because it would update them twice per step.

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
    """Return the names of the batch norm layers of ``model`` that are in training mode."""
    batch_norm = nn.modules.batchnorm._BatchNorm
    return [name for name, part in model.named_modules() if isinstance(part, batch_norm) and part.training]


# ----------------------------------------------------------------------------------------------------
# Mixed precision.


class Precision:
    """Mixed precision on a device: autocast, and loss scaling for float16. Both do nothing in float32."""

    def __init__(self, compute: ComputeDevice) -> None:
        self._device_type = compute.device.type
        self._amp_dtype = compute.amp_dtype
        self.scaler = self._new_scaler()

    def restore_scaler(self, state: dict[str, Any]) -> None:
        """Replace the loss scaler by a new one with ``state``, its ``state_dict``.

        The old scaler is not reused, because an error within a step may have left it unusable.
        """
        self.scaler = self._new_scaler()
        self.scaler.load_state_dict(state)

    def autocast(self, *, enabled: bool = True) -> AbstractContextManager[None]:
        """Return a context manager for forward passes and losses; in mixed precision it is ``torch.autocast``.

        With ``enabled=False`` the context manager turns autocast off again. Use this for a backward pass that is
        computed within an autocast block.
        """
        if self._amp_dtype is None:  # entering a disabled one costs 50 microseconds
            return nullcontext()
        return torch.autocast(self._device_type, dtype=self._amp_dtype, enabled=enabled)

    @property
    def scales_losses(self) -> bool:
        """Return whether losses are scaled, which is the case in float16 only.

        The loss scaler then skips optimizer steps with infinite gradients.
        """
        return bool(self.scaler.is_enabled())

    @property
    def overflow_is_normal(self) -> bool:
        """Return whether an infinite gradient may simply come from a large loss scale.

        It is False if losses are not scaled, or if the scale is already below 1.
        """
        return self.scales_losses and float(self.scaler.get_scale()) >= 1

    def _new_scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self._device_type, enabled=self._amp_dtype is torch.float16)
