"""The benchmark on a GPU, as far as a CPU can run it: its networks are the published ones', its arithmetic is right."""

import json

import pytest

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.measures import activity, merged
from benchmarks.gpu.networks import NETWORKS
from tests.gpu.trainings import SmallNet

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


def test_kernels_at_the_same_time_count_once_and_annotations_not_at_all():
    found = activity(TRACE)
    assert found.kernel == 80.0 + 20.0
    assert found.device == 100.0 + 1.0 + 20.0
    assert (found.num_kernels, found.span, found.large_gaps) == (3, 1920.0, 1820.0)
    assert found.longest == (("gemm", 70.5), ("copy_kernel", 60.0))
    assert activity([]).kernel == activity([]).span == 0
    assert merged([(5, 6), (0, 2), (1, 3), (2.5, 2.75), (3, 4)]) == [(0, 4), (5, 6)]


@pytest.mark.slow
def test_it_runs_on_a_cpu_where_that_is_asked_for(small, capsys, tmp_path):
    parts = ["--only", "busy", "loading", "engine", "preflight", "stem"]
    assert main([*small, *parts, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "ratio" in shown
    assert "16 at once" in shown
    assert "0 loader processes alone give " in shown
    assert "FAILED" not in shown
    assert "failed" not in shown
    record = json.loads((tmp_path / "bench-gpu.json").read_text())
    assert record["complete"]
    assert main(["--table", str(tmp_path / "bench-gpu.json")]) == 0
    assert capsys.readouterr().out in shown  # what is printed at the end can be printed once more
