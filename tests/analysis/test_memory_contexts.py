from pathlib import Path

import pytest
import torch

from fvc_lib.analysis.memory.findings import run_memory
from fvc_lib.analysis.memory.report import largest_tensors
from fvc_lib.engine.oom_detection import OutOfMemory, memory_state, write_context
from fvc_lib.services.atomic_files import write_json
from fvc_lib.services.run_paths import RunPaths
from tests.analysis.memory_story import StoryWriter


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "e" / "run_x")


def out_of_memory(run: RunPaths, name: str, content: object, fold: int = 0) -> None:
    StoryWriter(run, fold=fold).event("out_of_memory", context_file=name)
    if "/" not in name:
        write_json(run.oom_contexts("04_fold_training", fold) / name, content)


def tensor(shape: list[int], total: int, count: int = 1) -> dict[str, object]:
    return {"shape": shape, "dtype": "torch.float32", "device": "cpu", "count": count, "total_bytes": total}


def test_of_each_kind_of_tensor_the_time_where_it_held_most_counts(run: RunPaths) -> None:
    out_of_memory(run, "a.json", {"state": {"largest_tensors": [tensor([8, 3], 500), tensor([2], 90)]}})
    out_of_memory(run, "b.json", {"state": {"largest_tensors": [tensor([8, 3], 900, 4)]}})
    out_of_memory(run, "c.json", {"state": {"largest_tensors": [tensor([8, 3], 700)]}}, fold=1)
    table = largest_tensors(run, run_memory(run))
    assert table.select("stage", "shape", "dtype", "num_tensors", "total_bytes").rows() == [
        ("04_fold_training, fold 0", "8 × 3", "float32", 4, 900),
        ("04_fold_training, fold 1", "8 × 3", "float32", 1, 700),
        ("04_fold_training, fold 0", "2", "float32", 1, 90),
    ]


def test_what_an_out_of_memory_leaves_is_what_is_shown(run: RunPaths) -> None:
    held = torch.zeros(1000, 77)
    state = memory_state(MemoryError(), torch.device("cpu"), known=[held])
    folder = run.oom_contexts("04_fold_training", 0)
    path = write_context(folder, OutOfMemory("forward", state, 2, 1, {}, 2), phase="train", epoch=1, step=3)
    StoryWriter(run).event("out_of_memory", context_file=path.name)
    table = largest_tensors(run, run_memory(run))
    assert ("1000 × 77", "float32", 308_000) in table.select("shape", "dtype", "total_bytes").rows()


def test_odd_context_files_add_nothing(run: RunPaths, tmp_path: Path) -> None:
    write_json(tmp_path / "outside.json", {"state": {"largest_tensors": [tensor([1], 1)]}})
    out_of_memory(run, "../../../../../outside.json", None)
    for number, content in enumerate([[], {}, {"state": 1}, {"state": {"largest_tensors": {}}},
                                      {"state": {"largest_tensors": [1, {}, {"total_bytes": "x"}]}}]):  # fmt: skip
        out_of_memory(run, f"{number}.json", content)
    StoryWriter(run).event("out_of_memory", context_file="gone.json").event("out_of_memory")
    (run.oom_contexts("04_fold_training", 0) / "0.json").write_bytes(b"{torn")
    assert largest_tensors(run, run_memory(run)).is_empty()
