"""The promises of ``make test-gpu`` hold on the CPU, with only torch and numpy."""

import subprocess
import sys
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

from tests.gpu.promises import try_promises

GPU = Path(__file__).parent
# All packages that the project needs besides those of torch.
OTHERS = ("av", "click", "duckdb", "polars", "psutil", "pyarrow", "pydantic", "scipy", "sklearn",
          "tqdm", "yaml")  # fmt: skip


@pytest.mark.parametrize("words", ["in forward", "in backward", "in optimizer", "in validation", "stopped"])
def test_the_cpu_keeps_its_promises(words):
    (outcome,) = try_promises("cpu", words)
    assert outcome.verdict == "pass", outcome.line()


@pytest.mark.long
@pytest.mark.parametrize("words", ["mixed precision learns", "predicted peak", "two ranks"])
def test_the_cpu_keeps_those_that_take_longer(words):
    (outcome,) = try_promises("cpu", words)
    assert outcome.verdict == "pass", outcome.line()


def test_torch_and_numpy_are_enough(tmp_path):
    weights = {"a": torch.randn(3, 4), "b": torch.arange(5), "c": torch.randn(2).bfloat16()}
    safetensors.torch.save_file(weights, tmp_path / "theirs", metadata={"epoch": "3"})
    program = f"""
import sys
sys.modules.update(dict.fromkeys({OTHERS!r}))
sys.path[:0] = [{str(GPU / "stand_ins")!r}, {str(GPU)!r}]
import run
status = run.main(["--device", "cpu", "--only", "stopped"])
import safetensors, safetensors.torch
weights = safetensors.torch.load_file("theirs")
with safetensors.safe_open("theirs", "pt") as opened:
    safetensors.torch.save_file(weights, "ours", metadata=opened.metadata())
sys.exit(status)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pass  a training that is stopped goes on to the same bits" in done.stdout
    # The stand-in for safetensors reads and writes its format.
    found = safetensors.torch.load_file(tmp_path / "ours")
    assert all(found[name].equal(tensor) and found[name].dtype == tensor.dtype for name, tensor in weights.items())
    with safetensors.safe_open(tmp_path / "ours", "pt") as opened:
        assert opened.metadata() == {"epoch": "3"}
