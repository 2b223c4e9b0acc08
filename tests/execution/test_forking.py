"""A new run from another: what still holds is copied, all else runs again, and the first stays as it is.

Real kernels; the folds' notebook writes what a training would leave, so that every byte can be followed.
"""

import shutil
from collections.abc import Iterator

import pytest

from fvc_lib.execution import plan as finished_stages
from fvc_lib.execution.run.record import begin_run
from fvc_lib.execution.run.which_run import take_over, tasks_of_fork
from fvc_lib.services import code_versions
from fvc_lib.services.config import RunConfig
from fvc_lib.services.run_paths import RunPaths
from tests.execution.conftest import PARAMETERS, WRITE, Project, build_project, write_notebook

ONE = "output('one', f'seed {seed}')"
TRAIN = """
import json
def save(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
for part in ("", "control"):
    checkpoints = Path(run_dir) / "checkpoints" / f"fold_{fold}" / part
    latest = checkpoints / "latest_checkpoint.pt"
    weights = (latest.read_text() if latest.exists() else "") + f"epochs {epochs};"
    save(latest, weights)
    save(checkpoints / "previous_checkpoint.pt", weights)
    save(checkpoints / "best_model.safetensors", weights)
    (checkpoints / ".half.1234.tmp").write_text("half")
metrics = Path(run_dir) / "metrics" / f"folds_fold_{fold}.jsonl"
metrics.parent.mkdir(exist_ok=True)
with metrics.open("a") as stream:
    stream.write(json.dumps({"step": epochs}) + "\\n")
(checkpoints.parent / "outcome.json").write_text("{}")
output(f"folds_{fold}", weights)
"""


def contents(run: RunPaths) -> dict[str, tuple[bytes, int]]:
    """Every file of a run with its time."""
    return {
        str(path.relative_to(run.root)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(run.root.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module", autouse=True)
def code_as_it_was_at_the_start() -> Iterator[None]:
    """What a change of code does is tested by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finished_stages, "code_behind", lambda sources: {"fvc_lib": "now"})
        patch.setattr(code_versions, "code_behind", lambda sources: {"fvc_lib.tasks": "now"})
        yield


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    made = build_project(tmp_path_factory.mktemp("project"), per_fold=("folds",), one=[ONE], folds=["pass"])
    parameters = PARAMETERS.replace("seed: int = 0", "epochs: int = 20\nfold: int = 0")
    write_notebook(made.folder / "folds.ipynb", [WRITE, TRAIN], parameters)
    return made.with_config(epochs=3)


@pytest.fixture(scope="module")
def finished(project: Project) -> RunPaths:
    """One run for all tests: a fork only reads it."""
    run = project.begin()
    code, _, shown = project.execute(run)
    assert code == 0, shown
    return run


@pytest.fixture
def ancestor(finished: RunPaths) -> Iterator[RunPaths]:
    before = contents(finished)
    yield finished
    assert contents(finished) == before


def taken(ancestor: RunPaths, project: Project, **changes: object) -> list[str]:
    """Keys of the tasks that a fork with the changed configuration would keep."""
    return [task.key for task in tasks_of_fork(project.with_config(**changes).plan(ancestor))]


def fork(ancestor: RunPaths, project: Project, **changes: object) -> tuple[Project, RunPaths]:
    forked = project.with_config(**changes)
    kept = tasks_of_fork(forked.plan(ancestor))

    def prepare(run: RunPaths) -> dict[str, object]:
        take_over(ancestor, run, kept)
        return {}

    return forked, begin_run(forked.config, command="fork", prepare=prepare)


@pytest.mark.fault(28)
@pytest.mark.fault(47)
@pytest.mark.slow
def test_a_changed_training_parameter_trains_from_the_start(project, ancestor):
    forked, run = fork(ancestor, project, epochs=5)
    assert [(p.run, p.reason) for p in forked.plan(run)] == [
        (False, "finished, nothing changed"), (True, "not finished yet"), (True, "not finished yet"),
    ]  # fmt: skip
    assert not run.fold_checkpoints(1).exists()
    code, status, shown = forked.execute(run)
    assert code == 0, shown
    assert status.state == "done"
    assert (run.tables / "folds_1.txt").read_text() == "epochs 5;"
    assert run.metrics("folds", 1).read_text() == '{"step": 5}\n'
    assert forked.times_run(run, "one") == 0


@pytest.mark.fault(28)
@pytest.mark.parametrize("name", [name for name in RunConfig().training_values() if name not in ("model", "crop")])
def test_no_training_goes_on_under_another_value_of_a_training_parameter(project, ancestor, name):
    value = getattr(project.config, name)
    other = not value if isinstance(value, bool) else (value or 0) + 1 if not isinstance(value, str | tuple) else "x"
    assert set(taken(ancestor, project, **{name: (other,) if isinstance(value, tuple) else other})) <= {"one"}


@pytest.mark.fault(28)
def test_a_training_that_was_stopped_starts_again(project, ancestor, tmp_path):
    stopped = RunPaths(shutil.copytree(ancestor.root, tmp_path / ancestor.run_id))
    stopped.stage_checkpoint("folds", 1).unlink()
    forked, run = fork(stopped, project, bootstrap_replicates=100)
    assert not run.fold_checkpoints(1).exists()
    assert [p.run for p in forked.plan(run)] == [False, False, True]


@pytest.mark.fault(28)
def test_a_finished_fold_that_nothing_concerns_is_kept_whole(project, ancestor):
    forked, run = fork(ancestor, project, bootstrap_replicates=100)
    assert [p.run for p in forked.plan(run)] == [False, False, False]
    for path in (
        ancestor.fold_checkpoints(0) / "outcome.json",
        ancestor.fold_checkpoints(0) / "best_model.safetensors",
    ):
        assert (run.root / path.relative_to(ancestor.root)).read_bytes() == path.read_bytes()
    assert not list(run.root.rglob("*.tmp"))
    assert run.executed_notebook("folds", 1).is_file()
    assert forked.execute(run)[1].state == "done"
