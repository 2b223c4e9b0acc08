import contextlib
import os

import pytest
import torch

from fvc_lib.engine.device import (
    apply_policy,
    deterministic_algorithms,
    device_memory_probe,
    resolve_device,
    verify_allocator,
)
from fvc_lib.engine.memory import memory_setup
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError
from fvc_lib.services.memory.policy import ALLOC_CONF_NAMES, resolve_memory_policy
from tests.faults import forked


def test_auto_takes_the_best_that_is_there_and_the_cpu_float32():
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    assert resolve_device("auto").device.type == best
    assert resolve_device("cpu").amp_dtype is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuda is there")
def test_a_device_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(UsageError, match=r"device: got 'cuda'.*it has: .*cpu, auto"):
        resolve_device("cuda")


def test_determinism_is_asked_for_on_the_cpu_and_taken_back():
    with deterministic_algorithms(torch.device("cpu")):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def tf32_settings() -> list[object]:
    """By torch's older names and by its newer ones, which must agree or torch raises."""
    backends = torch.backends
    newer = [setting.fp32_precision for setting in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)]
    return [backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32, [name == "tf32" for name in newer]]


@pytest.mark.parametrize(("amp", "tf32"), [("auto", True), ("off", False)])
def test_a_cuda_policy_sets_tf32_and_everything_is_put_back(amp, tf32):
    before = tf32_settings()
    with contextlib.suppress(KeyError), apply_policy(resolve_memory_policy("cuda", amp=amp)):
        assert tf32_settings() == [tf32, tf32, [tf32] * 3]
        raise KeyError
    assert tf32_settings() == before
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_training_starts_by_telling_its_policy():
    assert memory_setup(RunConfig(device="cpu"))[:2] == ["memory policy: cpu", "precision: float32"]


def write_what_is_told(path, first):
    """In a process whose torch has not been asked for the variable yet."""
    for name in ALLOC_CONF_NAMES:
        os.environ.pop(name, None)
    if first == "asked":
        torch._C._accelerator_getAllocatorSettings()
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    path.write_text(verify_allocator(resolve_memory_policy("cuda")))


@pytest.mark.parametrize(
    ("first", "told"),
    [
        ("set", "allocator: expandable_segments:True: active"),
        ("asked", "allocator: 'expandable_segments:True' is not active, torch started with ''"),
    ],
)
def test_torch_tells_whether_it_started_with_the_allocators_settings(tmp_path, first, told):
    assert forked.run(write_what_is_told, tmp_path / "told", first) == (0, "")
    assert (tmp_path / "told").read_text().startswith(told)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_cuda_tensor_shows_in_the_probe():
    compute = resolve_device("cuda")
    probe = device_memory_probe(compute.device)
    before = probe()
    block = torch.zeros(64 << 20, dtype=torch.uint8, device=compute.device)
    after = probe()
    assert after.allocated_bytes - before.allocated_bytes == block.nbytes
    assert after.allocated_bytes <= after.reserved_bytes <= after.total_bytes
