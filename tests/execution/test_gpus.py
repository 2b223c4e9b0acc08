"""How many trainings go at once, with how many ranks, and which GPUs each gets: simulated by CUDA_VISIBLE_DEVICES."""

import pytest

from fvc_lib.execution.run import gpus
from fvc_lib.services.memory import MemoryBudget
from fvc_lib.services.parameters import resolve_config


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)


@pytest.mark.parametrize(
    ("asked", "cores", "gb", "expected"),
    [
        ({"device": "cpu"}, 2, 20, 2),
        ({"device": "cpu"}, 64, 200, 5),
        ({"device": "cpu"}, 8, 5, 2),
        ({"device": "cpu"}, 8, 0.5, 1),
        ({"device": "cpu", "num_ranks": 4}, 8, 200, 2),
        ({"device": "cuda"}, 8, 100, 3),
        ({"device": "cuda", "num_ranks": 2}, 8, 100, 1),
        ({"device": "cuda", "num_ranks": 4}, 8, 100, 1),
        ({"device": "cuda", "num_folds": 2}, 8, 100, 2),
    ],
)
def test_folds_at_once_is_one_per_core_while_memory_lasts(monkeypatch, asked, cores, gb, expected):
    monkeypatch.setattr(gpus, "available_cores", lambda: cores)
    monkeypatch.setattr(gpus, "memory_budget", lambda mem_gb: MemoryBudget(int(gb * 1e9), "a test"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,GPU-1f3a,5")
    assert gpus.folds_at_once(resolve_config({"model": "frame_cnn", "num_folds": 5, **asked}, environ={})) == expected


@pytest.mark.parametrize(
    ("named", "wanted"),
    [("0, 2", ["0", "2"]), ("", []), ("-1", []), ("1,-1,0", ["1"]), ("NoDevFiles", []), ("MIG-a/1", ["MIG-a/1"])],
)
def test_gpus_are_those_that_cuda_would_see_by_the_variable(monkeypatch, named, wanted):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert gpus.visible_gpus() == wanted


def test_over_the_nodes_of_a_job_one_training_goes_at_a_time(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    for num_folds, num_ranks, most, at_once in ((2, 8, 1, 1), (5, 1, None, 4)):
        values = {"model": "frame_cnn", "num_folds": num_folds, "num_ranks": num_ranks}
        config = resolve_config(values, environ={})
        assert (gpus.most_of_ranks_at_once(config), gpus.folds_at_once(config)) == (most, at_once)


@pytest.mark.slow
def test_groups_of_gpus_of_trainings_at_once_never_overlap(make_project, monkeypatch):
    """Five GPUs are two groups of two; each fold waits until as many as may be at work are, and sees whose GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7,9,11")
    say = """
import contextlib, os, time
at_work = folder / "at_work"
at_work.mkdir(exist_ok=True)
own = os.environ["CUDA_VISIBLE_DEVICES"]
(at_work / str(fold)).write_text(own)

def dealt():
    for path in at_work.iterdir():
        with contextlib.suppress(FileNotFoundError):  # that one has just ended
            yield path.read_text()

end = time.monotonic() + 60
while time.monotonic() < end and not (folder / "met").exists():
    if len(list(filter(None, dealt()))) > 1:
        (folder / "met").write_text("")
    time.sleep(0.01)
time.sleep(0.3)
output(f"folds_{fold}", own + " | " + " ".join(dealt()))
(at_work / str(fold)).unlink()
"""
    project = make_project(per_fold=("folds",), folds=[say])
    project = project.with_config(model="frame_cnn", device="cuda", num_folds=3, num_ranks=2)
    run = project.begin()
    assert project.execute(run, jobs=3)[0] == 0
    said = [path.read_text().partition(" | ") for path in sorted(run.tables.glob("folds_*.txt"))]
    assert {own for own, _, _ in said} == {"3,5", "7,9"}
    for _, _, beside in said:
        dealt = [gpu for group in beside.split() for gpu in group.split(",")]
        assert len(dealt) == len(set(dealt))
    assert max(len(beside.split()) for _, _, beside in said) == 2
