import contextlib

import pytest
import torch

from fvc_lib.engine.device import ComputeDevice, cuda_kernels, resolve_device
from fvc_lib.services.errors import UsageError


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuda is there")
def test_a_device_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(UsageError, match=r"device: got 'cuda'.*it has: .*cpu, auto"):
        resolve_device("cuda")


def tf32_settings() -> list[object]:
    """Return the TF32 settings by torch's older and newer names, which must agree."""
    backends = torch.backends
    newer = [setting.fp32_precision for setting in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)]
    return [backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32, [name == "tf32" for name in newer]]


@pytest.mark.parametrize(("dtype", "tf32"), [(torch.bfloat16, True), (None, False)])
def test_tf32_follows_the_precision_on_cuda_and_everything_is_put_back(dtype, tf32):
    before = tf32_settings()
    compute = ComputeDevice(torch.device("cuda", 0), dtype, "a card")
    with contextlib.suppress(KeyError), cuda_kernels(compute):
        assert tf32_settings() == [tf32, tf32, [tf32] * 3]
        raise KeyError
    assert tf32_settings() == before
    assert torch.get_float32_matmul_precision() == "highest"
