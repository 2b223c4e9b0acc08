from dataclasses import replace

import pytest

from fvc_lib.services.memory.policy import MPS_HIGH, MPS_LOW, MemoryPolicy, resolve_memory_policy


def test_cuda_computes_in_bfloat16_with_tf32_and_clears_only_when_it_must():
    assert resolve_memory_policy("cuda", environ={}) == MemoryPolicy(
        device="cuda",
        amp_dtype="bfloat16",
        tf32=True,
        pin_memory=True,
        allocator={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    )


def test_a_cuda_device_without_bfloat16_gets_float16():
    assert resolve_memory_policy("cuda", bf16_supported=False).amp_dtype == "float16"


def test_mps_computes_in_float32_and_clears_at_intervals():
    assert resolve_memory_policy("mps", environ={}) == MemoryPolicy(
        device="mps",
        clear_cache_training_batches=5,
        clear_cache_validation_batches=3,
        allocator={MPS_HIGH: "1.0", MPS_LOW: "0.9"},
    )


@pytest.mark.parametrize("device", ["cuda", "mps", "cpu"])
@pytest.mark.parametrize("asked", [0, 7])
def test_a_number_overrides_the_devices_own_interval_and_none_does_not(device, asked):
    default = resolve_memory_policy(device)
    given = resolve_memory_policy(device, clear_cache_batches=asked)
    assert given == replace(default, clear_cache_training_batches=asked, clear_cache_validation_batches=asked)


def test_each_policy_reads_as_lines():
    assert resolve_memory_policy("cpu", environ={}).describe() == [
        "memory policy: cpu",
        "precision: float32",
        "allocator: as it comes",
    ]
    assert resolve_memory_policy("cuda", environ={"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}).describe() == [
        "memory policy: cuda",
        "precision: mixed, bfloat16 and float32; TF32 on",
        "allocator: PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64",
        "cached memory is given back: after an out-of-memory, between stages",
        "batches in page-locked memory: yes",
    ]
    assert (
        resolve_memory_policy("mps", environ={})
        .describe()[3]
        .endswith("between stages, every 5 training batches, every 3 validation batches")
    )
