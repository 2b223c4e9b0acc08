"""One memory policy per kind of device, and the advice after an out-of-memory."""

from typing import get_args

import pytest

from fvc_lib.services.memory.policy import (
    MPS_HIGH,
    MPS_LOW,
    MemoryPolicy,
    RanOut,
    memory_advice,
    ran_out_in,
    resolve_memory_policy,
)


@pytest.mark.parametrize(
    ("device", "settings"),
    [
        ("cpu", {}),
        (
            "cuda",
            {"amp_dtype": "bfloat16", "tf32": True, "pin_memory": True,
             "allocator": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}},
        ),
        (
            "mps",
            {"clear_cache_training_batches": 5, "clear_cache_validation_batches": 3,
             "allocator": {MPS_HIGH: "1.0", MPS_LOW: "0.9"}},
        ),
    ],
)  # fmt: skip
def test_each_device_has_its_policy(device, settings):
    policy = resolve_memory_policy(device, environ={})
    assert policy == MemoryPolicy(device=device, **settings)
    assert policy.describe()[0] == f"memory policy: {device}"
    plain = resolve_memory_policy(device, amp="off", environ={})
    assert (plain.amp_dtype, plain.tf32) == (None, False)


def test_a_cuda_device_without_bfloat16_gets_float16():
    assert resolve_memory_policy("cuda", bf16_supported=False).amp_dtype == "float16"


@pytest.mark.parametrize(
    ("ran_out", "named", "not_named"),
    [
        ("batch", "-p batch_size 1", "num_frames"),
        ("sample", "num_frames", "batch_size"),
        ("comparison", "effective_batch_size", "-p batch_size"),
        ("optimizer_step", "a smaller model", "gradient_checkpointing"),
        ("loaders", "-p num_workers 0", "batch_size"),
        ("preflight", "-p memory_preflight false", "batch_size"),
        ("elsewhere", "-p workers 1", "batch_size"),
    ],
)
def test_each_kind_of_death_has_one_sentence_of_advice(ran_out, named, not_named):
    advice = memory_advice(ran_out)
    assert named in advice
    assert not_named not in advice
    assert "mem_gb" in advice
    assert ran_out in get_args(RanOut)


@pytest.mark.parametrize(
    ("phase", "ran_out"),
    [("train", "batch"), ("control_validation", "batch"), ("preflight", "preflight"), ("setup", "elsewhere")],
)
def test_the_phase_says_what_runs_out(phase, ran_out):
    assert ran_out_in(phase) == ran_out
