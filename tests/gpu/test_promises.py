"""The promises of ``make test-gpu`` on the CPU; they need torch and numpy alone."""

import importlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

from fvc_lib.detectors.own.frame_cnn import FrameCnn
from fvc_lib.engine.device import accelerated, resolve_device
from fvc_lib.engine.step import build_optimizer
from fvc_lib.services.errors import StoppedError
from tests.gpu import promises
from tests.gpu.promises import try_promises
from tests.gpu.trainings import Lab, weight_distance

GPU = Path(__file__).parent
# Beyond torch's own needs, all that the project asks for.
OTHERS = ("av", "click", "duckdb", "polars", "psutil", "pyarrow", "pydantic", "scipy", "sklearn",
          "tqdm", "yaml")  # fmt: skip


@pytest.mark.parametrize("words", ["in forward", "in backward", "in optimizer", "in validation", "stopped"])
def test_the_cpu_keeps_its_promises(words):
    (outcome,) = try_promises("cpu", words)
    assert outcome.verdict == "pass", outcome.line()


@pytest.mark.long
@pytest.mark.parametrize("words", ["mixed precision", "predicted peak", "killed", "two ranks", "train faster"])
def test_the_cpu_keeps_those_that_take_longer(words):
    (outcome,) = try_promises("cpu", words)
    assert outcome.verdict == "pass", outcome.line()


def test_a_result_that_is_not_equal_is_a_broken_promise(monkeypatch):
    monkeypatch.setattr(promises, "SAME_WEIGHTS", 0.0)
    (outcome,) = try_promises("cpu", "in forward")
    assert outcome.verdict == "fail"
    assert "weights differ by" in outcome.line()


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
    # What stands in for safetensors reads and writes its format.
    found = safetensors.torch.load_file(tmp_path / "ours")
    assert all(found[name].equal(tensor) and found[name].dtype == tensor.dtype for name, tensor in weights.items())
    with safetensors.safe_open(tmp_path / "ours", "pt") as opened:
        assert opened.metadata() == {"epoch": "3"}


@pytest.mark.skipif(torch.cuda.is_available() or torch.backends.mps.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_skipped_with_the_reason_unless_one_was_asked_for(monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.syspath_prepend(GPU)
    run = importlib.import_module("run")
    assert run.main([]) == 0
    assert capsys.readouterr().out.startswith("skipped: torch")
    assert run.main(["--device", "cuda"]) == 2
    assert "does not find" in capsys.readouterr().err


def test_accelerations_change_nothing_but_rounding_and_are_named_in_the_record(tmp_path):
    plain = Lab(resolve_device("cpu"), tmp_path)
    fast = replace(plain.compute, accelerations=("channels_last", "fused_adamw", "cudnn_benchmark"))
    engine = plain.engine("fast", compute=fast)
    expected, found = plain.train("plain"), engine.fit()
    assert weight_distance(found, expected) < 1e-4
    assert fast.describe().endswith("float32, channels_last, fused_adamw, cudnn_benchmark")
    assert not torch.backends.cudnn.benchmark
    # A checkpoint does not say how its steps were computed: another choice goes on from it, and says so.
    asked = iter(range(100))
    with pytest.raises(StoppedError):
        plain.engine("changed", compute=fast, stop=lambda: next(asked) >= 3).fit()
    resumed = plain.train("changed")
    assert weight_distance(resumed, expected) < 1e-4
    assert "precision torch.float32 channels_last" in resumed.inexact_because[-1]


def test_accelerations_reach_weights_and_optimizer():
    compute = replace(resolve_device("cpu"), accelerations=("channels_last",))
    model = accelerated(FrameCnn(), compute)
    assert model.first.convolution.weight.is_contiguous(memory_format=torch.channels_last_3d)
    assert build_optimizer(model, 0.1, 0.0, fused=True).param_groups[0]["fused"]
