import pytest
import torch
from torch._utils import ExceptionWrapper
from torch.distributed import DistBackendError

from fvc_lib.engine.oom_detection import is_out_of_memory

NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.27.5\n{}: Call to CUDA function failed.\nLast error:\n{}"
)


def real_cpu_error() -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55, dtype=torch.uint8)
    return caught.value


def caused_by(cause: BaseException) -> RuntimeError:
    error = RuntimeError("Caught in a loader process")
    error.__cause__ = cause
    return error


def pinning_failed(text: str) -> RuntimeError:
    """Return the error that a loader raises after its pin-memory thread failed with ``text``."""
    try:
        raise torch.AcceleratorError(text)
    except torch.AcceleratorError:
        caught = ExceptionWrapper(where="in pin memory thread for device 0")
    with pytest.raises(RuntimeError) as raised:
        caught.reraise()
    return raised.value


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("any text"),
        torch.cuda.OutOfMemoryError("any text"),
        MemoryError(),
        real_cpu_error(),
        RuntimeError("MPS backend out of memory (MPS allocated: 17.18 GB, other allocations: 0 bytes)"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        pinning_failed("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
        DistBackendError(NCCL.format("ncclUnhandledCudaError", "Cuda failure 2 'out of memory'")),
        DistBackendError(NCCL.format("ncclUnhandledCudaError", "Failed to CUDA calloc async 608 bytes")),
        RuntimeError("could not create a primitive"),
        RuntimeError("out of memory"),
        RuntimeError("HIP ran Out Of Memory: 2 GiB"),
        RuntimeError("OOM"),
        RuntimeError("backend: oom. Lower the batch"),
        RuntimeError("the kernel failed\nreason: memory allocation failed (4096 bytes)"),
        RuntimeError("buffer: allocation failed"),
        caused_by(torch.OutOfMemoryError("deep")),
        caused_by(caused_by(MemoryError())),
    ],
    ids=repr,
)
def test_memory_that_ended_is_told(error):
    assert is_out_of_memory(error)


@pytest.mark.fault(21)
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("no room left in zoom buffer"),
        RuntimeError("bloom, groom: no such layer"),
        RuntimeError("OOMs are counted in /data/oom/weights.pt, which is no file"),
        RuntimeError("no module oom.layers; allocation failedover"),
        RuntimeError("ran out of memoryless states"),
        RuntimeError("Caught KeyError in DataLoader worker process 0.\n  raise KeyError('oom')  # out of memory"),
        RuntimeError("could not create a primitive descriptor for a matmul of float64"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasSgemm( handle, opa, opb)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_BAD_PARAM"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        pinning_failed("CUDA error: initialization error"),
        DistBackendError(NCCL.format("ncclRemoteError", "socketProgressOpt: Call to recv failed: Connection reset")),
        ValueError("CUDA out of memory"),
        caused_by(RuntimeError("no room left in zoom buffer")),
        None,
    ],
    ids=repr,
)
def test_other_errors_are_not(error):
    assert not is_out_of_memory(error)
