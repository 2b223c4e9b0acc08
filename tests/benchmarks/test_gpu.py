"""The benchmark on a GPU, as far as a CPU can run it: its networks are the published ones', its arithmetic is right."""

import json
import logging
import time

import pytest
import torch

from benchmarks.gpu.__main__ import main, read_arguments
from benchmarks.gpu.measures import activity, busy_figure, merged, traced
from benchmarks.gpu.networks import NETWORKS
from benchmarks.gpu.trainings import Case, Clock, Rate, train
from fvc_lib.engine.device import resolve_device
from tests.gpu.trainings import SmallNet

# Without the last layer: VideoMAE-base as a classifier (transformers, tubes of 2 x 16 x 16; its attention has no bias
# for keys) and torchvision's r2plus1d_18.
PARAMETERS = {"videomae-base": 86_236_416, "r2plus1d_18": 31_300_125}
# As torch's profiler exports them: microseconds, two streams, and an annotation that spans everything.
TRACE = [
    {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 90.0, "args": {"name": "python"}},
    {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 7, "tid": 7, "ts": 95.0, "dur": 4.0},
    {"ph": "X", "cat": "gpu_user_annotation", "name": "step", "pid": 0, "tid": 7, "ts": 100.0, "dur": 9000.0},
    {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 100.0, "dur": 50.5},
    {"ph": "X", "cat": "kernel", "name": "copy_kernel", "pid": 0, "tid": 13, "ts": 120.0, "dur": 60.0},
    {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "pid": 0, "tid": 13, "ts": 170.0, "dur": 30.0},
    {"ph": "X", "cat": "gpu_memset", "name": "Memset", "pid": 0, "tid": 7, "ts": 300.0, "dur": 1.0},
    {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 2000.0, "dur": 20.0},
    {"ph": "f", "cat": "ac2g", "name": "ac2g", "pid": 0, "tid": 7, "ts": 2000.0, "id": 3},
]
SMALL = "--device cpu --short-steps 2 --steps 2 --warmup 1 --rounds 1 --batch 2 --frames 2 --side 16 --workers 0"


@pytest.fixture
def small(monkeypatch):
    for name in tuple(NETWORKS):
        monkeypatch.delitem(NETWORKS, name)
    monkeypatch.setitem(NETWORKS, "small", SmallNet)
    return SMALL.split()


def test_the_networks_have_about_as_many_parameters_as_the_published_ones():
    for name, build in NETWORKS.items():
        with torch.device("meta"):
            model = build()
        trunk = sum(each.numel() for part, each in model.named_parameters() if not part.startswith("head"))
        assert abs(trunk / PARAMETERS[name] - 1) < 1e-3, (name, trunk)


def test_kernels_at_the_same_time_count_once_and_annotations_not_at_all():
    found = activity(TRACE)
    assert found.kernel == 80.0 + 20.0
    assert found.device == 100.0 + 1.0 + 20.0
    assert (found.num_kernels, found.span, found.large_gaps) == (3, 1920.0, 1820.0)
    assert found.longest == (("gemm", 70.5), ("copy_kernel", 60.0))
    assert activity([]).kernel == activity([]).span == 0
    assert merged([(5, 6), (0, 2), (1, 3), (2.5, 2.75), (3, 4)]) == [(0, 4), (5, 6)]


def test_a_trace_that_ends_early_is_no_measurement():
    rate = Rate(10.0, 200, {})
    whole = busy_figure(activity(TRACE), 1920e-6, rate)
    assert whole.values["kernel_share"] == pytest.approx(100 / 1920)
    assert "MISSED" in whole.line
    assert "NOT MEASURED: the trace holds 50 %" in busy_figure(activity(TRACE), 3840e-6, rate).line


def test_a_trace_of_this_torch_has_the_fields_that_are_read(tmp_path):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        torch.ones(4, 4) @ torch.ones(4, 4)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    whole = [event for event in events if event.get("ph") == "X" and event["cat"] == "cpu_op"]
    assert {"ts", "dur", "name"} <= whole[0].keys()
    as_kernels = activity([{**event, "cat": "kernel"} for event in whole])
    assert 0 < as_kernels.kernel <= as_kernels.span


def test_a_training_is_traced_and_one_without_kernels_is_no_measurement(small, tmp_path):
    asked = read_arguments(small)
    case = Case(resolve_device("cpu"), asked, tmp_path, Clock(time.monotonic() + 600))
    case.clips(0).store()
    found = traced(case, "small", [torch.profiler.ProfilerActivity.CPU])
    assert (found.values["kernels"], found.values["steps"]) == (0, 2)
    assert "NOT MEASURED: the trace holds 0 %" in found.line


def test_a_training_ends_where_its_time_is_over(small, tmp_path):
    asked = read_arguments([*small, "--short-steps", "1000"])
    case = Case(resolve_device("cpu"), asked, tmp_path, Clock(time.monotonic()))
    case.clips(0).store()
    found = train(case, "small", 1000)
    assert found.steps == 1
    assert found.weights


@pytest.mark.slow
def test_it_runs_on_a_cpu_where_that_is_asked_for(small, capsys, tmp_path):
    parts = ["--only", "busy", "loading", "engine", "preflight", "accelerations", "stem"]
    assert main([*small, *parts, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "ratio" in shown
    assert "small accelerations: fused_adamw: " in shown
    assert "16 at once" in shown
    assert "0 loader processes alone give " in shown
    assert "FAILED" not in shown
    assert "failed" not in shown
    record = json.loads((tmp_path / "bench-gpu.json").read_text())
    assert record["complete"]
    rates = {each["what"]: each["values"] for each in record["figures"] if each["part"] == "accelerations"}
    assert rates["none again"]["weights_apart"] < 1e-6
    assert main(["--table", str(tmp_path / "bench-gpu.json")]) == 0
    assert capsys.readouterr().out in shown  # what is printed at the end can be printed once more


def test_what_there_is_no_time_for_is_named_with_the_command_for_it(small, capsys, tmp_path):
    assert main([*small, "--only", "engine", "compile", "--minutes", "0.5", "--out", str(tmp_path / "a.json")]) == 0
    shown = capsys.readouterr().out
    assert "ratio" in shown
    assert "small compile: not measured" in shown
    assert "make bench-gpu ARGS='--only compile --networks small'" in shown


def test_a_part_that_fails_leaves_the_others(small, capsys, monkeypatch, tmp_path):
    def no_memory():
        raise RuntimeError("CUDA error: out of memory\nmore")

    monkeypatch.setitem(NETWORKS, "small", no_memory)
    assert main([*small, "--only", "engine", "stem", "--out", str(tmp_path / "a.json")]) == 0
    shown = capsys.readouterr().out
    assert "small engine: FAILED: " in shown
    assert "out of memory" in shown
    assert "stem: 16 at once" in shown
    assert logging.root.manager.disable == logging.NOTSET  # what comes after in this process is logged again
