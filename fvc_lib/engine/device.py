"""Where the training runs, what precision that place is good at, and how much memory was used there."""

import gc
import importlib
import importlib.util
import os
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fvc_lib.services.errors import UsageError
from fvc_lib.services.memory.budget import give_back_freed
from fvc_lib.services.memory.policy import Acceleration, DeviceKind, DeviceMemory, MemoryPolicy, resolve_memory_policy

if TYPE_CHECKING:
    from fvc_lib.services.config import RunConfig  # whose packages a GPU's machine need not have

STEM_CLIPS = 8  # of stem_pieces


@dataclass(frozen=True)
class ComputeDevice:
    """A resolved device. ``amp_dtype`` is None where training runs in float32."""

    device: torch.device
    amp_dtype: torch.dtype | None
    name: str
    accelerations: tuple[Acceleration, ...] = ()

    def describe(self) -> str:
        """One line for a notebook, like ``cpu (x86_64, 2 threads), float32``."""
        precision = "float32" if self.amp_dtype is None else f"mixed {str(self.amp_dtype).removeprefix('torch.')}"
        return ", ".join([f"{self.device.type} ({self.name})", precision, *self.accelerations])


@runtime_checkable
class TakesPieces(Protocol):
    """A module that computes so many clips of a batch at once."""

    clips_at_once: int


def accelerated(model: nn.Module, compute: ComputeDevice) -> nn.Module:
    """Move ``model`` to the device and apply ``compute.accelerations``; names and values of parameters stay.

    Raises:
        UsageError: one of them finds nothing in this model that it could make faster.
    """
    model = model.to(compute.device)
    if "channels_last" in compute.accelerations:
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        kernels = [parameter for parameter in model.parameters() if parameter.ndim in formats]
        if not kernels:
            raise _useless("channels_last", model, "has no convolution")
        for kernel in kernels:
            kernel.data = kernel.data.contiguous(memory_format=formats[kernel.ndim])
    if "stem_pieces" in compute.accelerations:
        stems = [module for module in model.modules() if isinstance(module, TakesPieces)]
        if not stems:
            raise _useless("stem_pieces", model, "has no stem that takes clips one by one")
        for stem in stems:
            stem.clips_at_once = STEM_CLIPS
    if "compile" in compute.accelerations and not is_compiled(model):
        # On the instance, where nn.Module.__call__ finds it first: torch's own wrapper would rename the parameters,
        # and take the hooks of ``SampleDropout`` into what is compiled.
        model.__dict__["forward"] = _CompiledForward(model)
    return model


def _useless(name: str, model: nn.Module, why: str) -> UsageError:
    return UsageError(f"accelerations: {name} does nothing for {type(model).__name__}, which {why}. Leave it out.")


def is_compiled(model: nn.Module) -> bool:
    """Return whether torch's compiler makes the kernels of ``model``'s forward pass."""
    return isinstance(model.__dict__.get("forward"), _CompiledForward)


def was_of_no_use(model: nn.Module) -> bool:
    """Return whether the compiled forward pass of ``model`` was never called.

    A training on stored features goes through the head alone.
    """
    forward = model.__dict__.get("forward")
    return isinstance(forward, _CompiledForward) and forward.compiled is None


class _CompiledForward:
    """Stands in for a model's ``forward``; what was compiled stays behind when the model is copied or pickled.

    Kernels are made for each size of batch, and for training and evaluation, when it first comes. So which kernels a
    batch gets follows from its size alone: a training that goes on from a checkpoint gets those of one that was never
    stopped. What torch does by itself, kernels for any size from the second size on, depends on what came before.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.compiled: Callable[..., Any] | None = None  # from the first call on

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if self.compiled is None:
            dynamo: Any = importlib.import_module("torch._dynamo.config")
            inductor: Any = importlib.import_module("torch._inductor.config")
            dynamo.recompile_limit = max(dynamo.recompile_limit, _COMPILED_SIZES)
            for message in _OF_THE_COMPILER:
                warnings.filterwarnings("ignore", message)
            if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
                inductor.compile_threads = 1  # otherwise a process per core, which no memory plan knows of
            forward = types.MethodType(type(self._model).forward, self._model)
            self.compiled = torch.compile(forward, dynamic=False)
        return self.compiled(*inputs, **named)

    def __reduce__(self) -> tuple[Any, ...]:
        return _CompiledForward, (self._model,)


# What torch's compiler itself does and torch warns of.
_OF_THE_COMPILER = ("`torch.jit.script_method` is deprecated", r"The \.grad attribute of a Tensor that is not a leaf")
_COMPILED_SIZES = 64  # a batch and its halves, the last of an epoch, and each in training and evaluation


@contextmanager
def cudnn_search(compute: ComputeDevice) -> Iterator[None]:
    """Let cuDNN try its algorithms if ``compute`` asks for it; put torch's setting back at the end."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before or "cudnn_benchmark" in compute.accelerations
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def resolve_device(
    request: str = "auto", amp: str = "auto", accelerations: tuple[Acceleration, ...] = ()
) -> ComputeDevice:
    """Return the device: ``auto`` is cuda, else mps, else cpu.

    ``amp="auto"`` is bfloat16 or float16 on cuda, float32 elsewhere.

    Raises:
        UsageError: the requested device is not there, or has not what one of ``accelerations`` needs.
    """
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    kind = next(name for name, there in present.items() if there) if request == "auto" else request
    if not present.get(kind, False):
        have = ", ".join(name for name, there in present.items() if there)
        raise UsageError(
            f"device: got {request!r}, which torch {torch.__version__} does not find; it has: {have}, auto."
        )
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    policy = resolve_memory_policy(
        _kind(device), amp="auto" if amp == "auto" else "off", bf16_supported=_bf16_supported(device)
    )
    for name in accelerations:
        if trouble := _lacks(device, name):
            raise UsageError(f"accelerations: {name} is not possible on {device.type}: {trouble}. Leave it out.")
    amp_dtype = getattr(torch, policy.amp_dtype) if policy.amp_dtype else None
    return ComputeDevice(device, amp_dtype, _device_name(device), accelerations)


def training_device(config: "RunConfig") -> ComputeDevice:
    """Return ``resolve_device`` of a run's parameters."""
    return resolve_device(config.device, config.amp, config.accelerations)


def _lacks(device: torch.device, acceleration: Acceleration) -> str:
    """Return what ``acceleration`` needs and ``device`` lacks; empty if nothing is missing."""
    if acceleration == "cudnn_benchmark" and device.type != "cuda":
        return "cuDNN is CUDA's"
    if acceleration == "send_ahead" and device.type != "cuda":
        return "batches are sent beside the computing on CUDA alone"
    if acceleration == "fused_adamw" and device.type == "mps" and not torch.backends.mps.is_macos_or_newer(14, 0):
        return "Metal has no such kernel before macOS 14"
    if acceleration == "compile" and device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "torch's compiler makes its kernels with triton, which is not installed"
    if acceleration == "compile" and device.type == "cpu":
        try:
            importlib.import_module("torch._inductor.cpp_builder").get_cpp_compiler()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            return f"torch's compiler needs one of C++, and finds none: {reason}"
    return ""


def resolve_policy(compute: ComputeDevice, *, amp: Literal["auto", "off"] = "auto") -> MemoryPolicy:
    """Return the memory policy of a training on ``compute``; ``amp`` as in ``resolve_memory_policy``."""
    return resolve_memory_policy(_kind(compute.device), amp=amp, bf16_supported=_bf16_supported(compute.device))


@contextmanager
def apply_policy(policy: MemoryPolicy) -> Iterator[None]:
    """Compute float32 products in TF32 or not, as the policy says; put torch's settings back at the end.

    Only CUDA has the settings.
    """
    if policy.device != "cuda":
        yield
        return
    before = _tf32()
    _set_tf32((policy.tf32, policy.tf32))
    try:
        yield
    finally:
        _set_tf32(before)


def device_memory_probe(device: torch.device) -> Callable[[], DeviceMemory] | None:
    """Return a function that reads an accelerator's memory, for ``MemoryObserver.watch_device``; None for the CPU."""
    if device.type == "cuda":
        return lambda: _cuda_memory(device)
    return _MpsMemory() if device.type == "mps" else None


@contextmanager
def deterministic_algorithms(device: torch.device) -> Iterator[None]:
    """Refuse operations that give different sums from run to run; on the CPU only, elsewhere some have no other.

    Not with ``torch.use_deterministic_algorithms``, which imports torch's compiler to tell it as well.
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
    """Build networks on torch's meta device: names and shapes, no values.

    Torch's warning that weights read into such a network go nowhere is silenced.
    """
    with torch.device("meta"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")
        yield


def clips_in_a_pass(device: torch.device, batch_size: int) -> int:
    """Return the number of clips of every forward pass whose results are stored.

    Rounding depends on the shape of a batch, so all batches have the same shape. A CPU takes one clip at a time, which
    is about as fast; other devices take ``batch_size`` (``filled_up``).
    """
    return 1 if device.type == "cpu" else batch_size


def filled_up(clips: Tensor, number: int) -> Tensor:
    """Repeat the last of ``clips`` (B, ...) until there are ``number``."""
    missing = number - len(clips)
    return torch.cat([clips, clips[-1:].expand(missing, *clips.shape[1:])]) if missing > 0 else clips


def release_cached_memory(device: torch.device) -> None:
    """Give torch's cached blocks back to the device: after an out-of-memory and between stages, never per batch."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def give_back_unused() -> None:
    """Collect garbage and return the C library's free memory to the system: a training leaves hundreds of MB of it."""
    gc.collect()
    give_back_freed()


def finished_at(device: torch.device) -> float:
    """Seconds of a monotonic clock, once the device has done what was begun."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def peak_device_bytes(device: torch.device) -> int | None:
    """Return torch's peak of allocated bytes on an accelerator; None on the CPU, where resident memory counts."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def verify_allocator(policy: MemoryPolicy) -> str:
    """Say whether torch started with the allocator settings of a CUDA policy; torch keeps the text that it read."""
    wanted = next(iter(policy.allocator.values()), "")
    if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):  # 2.11 has it not
        return f"allocator: {wanted or 'as it comes'}: whether it is active torch {torch.__version__} does not say"
    found = torch._C._accelerator_getAllocatorSettings()
    if found == wanted:
        return f"allocator: {found or 'as it comes'}: active"
    return (
        f"allocator: {wanted!r} is not active, torch started with {found!r}: it was not set in time. "
        "Run headlessly, or set it before Jupyter starts."
    )


def _cuda_memory(device: torch.device) -> DeviceMemory:
    stats = torch.cuda.memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    reserved = stats.get("reserved_bytes.all.current", 0)
    return DeviceMemory(
        allocated_bytes=stats.get("allocated_bytes.all.current", 0),
        reserved_bytes=reserved,
        max_allocated_bytes=stats.get("allocated_bytes.all.peak", 0),
        total_bytes=min(total, reserved + free),  # what other processes hold is not this one's to use
        free_bytes=free,
    )


class _MpsMemory:
    """Metal keeps no peak, so the largest seen stands for it."""

    def __init__(self) -> None:
        self._most = 0

    def __call__(self) -> DeviceMemory:
        allocated, reserved = torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()
        total = torch.mps.recommended_max_memory()
        self._most = max(self._most, allocated)
        return DeviceMemory(allocated, reserved, self._most, total, max(0, total - reserved))


def _tf32() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def _set_tf32(allowed: tuple[bool, bool]) -> None:
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = allowed


def _kind(device: torch.device) -> DeviceKind:
    return cast(DeviceKind, device.type)  # resolve_device lets no other pass


def _bf16_supported(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} threads" if device.type == "cpu" else "Apple GPU"


class CacheClearing:
    """Counts batches of one kind and clears torch's caches after every ``every``-th; 0: never.

    On CUDA, where clearing costs a synchronisation and the next allocations, the policies say 0: an out-of-memory and
    the end of a stage clear by themselves. On MPS the cache otherwise grows into memory that other programs need.
    """

    def __init__(self, device: torch.device, every: int) -> None:
        self._device = device
        self._every = every
        self._batches = 0

    def after_batch(self) -> None:
        """Count a batch."""
        self._batches += 1
        if self._every and self._batches % self._every == 0:
            release_cached_memory(self._device)


# ----------------------------------------------------------------------------------------------------
# Gradient checkpointing: computing again in place of keeping.


@runtime_checkable
class Recomputable(Protocol):
    """A model that can compute activations again in the backward pass instead of keeping them (gradient checkpointing,
    Chen et al., "Training deep nets with sublinear memory cost", 2016).
    """

    def recomputable_blocks(self) -> Sequence[nn.Module]:
        """Modules, none inside another, whose forward depends on inputs, weights and torch's random state only."""
        ...


def recompute_activations(model: nn.Module) -> None:
    """From now on keep only the inputs of ``model``'s blocks for the backward pass. Done twice it is done once.

    Parameter and buffer names stay, and the model can still be pickled and copied. Torch's random state is restored
    for the second forward pass, so dropout drops the same. A block in training mode that changes a buffer of its own
    (batch norm's running statistics) would change it twice and is refused.

    Raises:
        UsageError: the model names no blocks, or a block holds a batch norm.
    """
    name = type(model).__name__
    if not isinstance(model, Recomputable):
        raise UsageError(
            f"gradient_checkpointing: model {name!r} names no blocks to compute again (a method recomputable_blocks). "
            "Turn gradient_checkpointing off or take another model."
        )
    blocks = model.recomputable_blocks()
    for block in blocks:
        _refuse_batch_norm(name, model, block)
    for block in blocks:
        if not isinstance(block.__dict__.get("forward"), _RecomputedForward):
            # On the instance, where nn.Module.__call__ finds it first: wrapping the block would rename its parameters.
            block.__dict__["forward"] = _RecomputedForward(block)


class _RecomputedForward:
    """Stands in for a block's ``forward``; a class rather than a closure so that the model can be pickled."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        forward = type(self._block).forward
        if not torch.is_grad_enabled():
            return forward(self._block, *inputs, **named)
        return checkpoint(forward, self._block, *inputs, use_reentrant=False, preserve_rng_state=True, **named)


def training_batch_norms(model: nn.Module) -> list[str]:
    """Names of the batch norms that take their statistics from what is in memory, as ``model`` stands now."""
    batch_norm = nn.modules.batchnorm._BatchNorm
    return [name for name, part in model.named_modules() if isinstance(part, batch_norm) and part.training]


def _refuse_batch_norm(name: str, model: nn.Module, block: nn.Module) -> None:
    mode = model.training
    model.train()  # a published network's own keep their statistics in training as well
    updated = [block.get_submodule(each) for each in training_batch_norms(block)]
    model.train(mode)
    for module in updated:
        if module.track_running_stats:
            raise UsageError(
                f"gradient_checkpointing: a block of {name!r} holds a {type(module).__name__}, whose running "
                "statistics would be updated twice a step. Use group norm or turn gradient_checkpointing off."
            )


# ----------------------------------------------------------------------------------------------------
# Mixed precision.


class Precision:
    """Autocast and loss scaling as the device wants them; both do nothing in float32."""

    def __init__(self, compute: ComputeDevice) -> None:
        self._device_type = compute.device.type
        self._amp_dtype = compute.amp_dtype
        self.scaler = self._new_scaler()

    def restore_scaler(self, state: dict[str, Any]) -> None:
        """Replace the scaler by one in ``state``; the old one may have been left in the middle of a step."""
        self.scaler = self._new_scaler()
        self.scaler.load_state_dict(state)

    def autocast(self) -> AbstractContextManager[None]:
        """Cast forward passes and losses where precision is mixed."""
        if self._amp_dtype is None:  # entering a disabled one costs 50 microseconds
            return nullcontext()
        return torch.autocast(self._device_type, dtype=self._amp_dtype)

    @property
    def scales_losses(self) -> bool:
        """Whether infinite gradients are the scaler's business (it skips the step and lowers its scale)."""
        return bool(self.scaler.is_enabled())

    @property
    def overflow_is_normal(self) -> bool:
        """Whether an infinite gradient may be the scale's fault: at a scale below 1 it is the model's or the data's."""
        return self.scales_losses and float(self.scaler.get_scale()) >= 1

    def _new_scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self._device_type, enabled=self._amp_dtype is torch.float16)
