import pytest
import torch

from fvc_lib.learning.device import deterministic_algorithms, peak_rss_bytes, resolve_device
from fvc_lib.services.errors import UsageError


def test_auto_takes_the_best_that_is_there():
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    assert resolve_device("auto").device.type == best


def test_the_cpu_runs_in_float32_and_says_so():
    compute = resolve_device("cpu")
    assert compute.amp_dtype is None
    assert compute.describe().startswith("cpu (")
    assert compute.describe().endswith("threads), float32")


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuda is there")
def test_a_device_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(UsageError, match=r"device: got 'cuda'.*it has: .*cpu, auto"):
        resolve_device("cuda")


def test_peak_memory_is_of_this_process():
    assert 10_000_000 < peak_rss_bytes() < 1 << 45


def test_determinism_is_asked_for_on_the_cpu_and_taken_back():
    with deterministic_algorithms(torch.device("cpu")):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
