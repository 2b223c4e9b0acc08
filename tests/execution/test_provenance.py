"""What a run records of its code, versions and machine, and how it is repeated."""

import os
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from fvc_lib.execution.run import record
from fvc_lib.execution.run.record import CodeState, code_state, hardware, repeat_commands, slurm_job, versions

NAMES = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}


def git(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, **NAMES, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    command = ["git", "-C", str(folder), "-c", "init.defaultBranch=main", *arguments]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file() and ".git/" not in str(p)}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "engine.py").write_text("rate = 1\n" * 20)
    (folder / "gone.py").write_text("x = 1\n")
    (folder / "staged.py").write_text("y = 1\n")
    (folder / "weights.bin").write_bytes(bytes(range(256)))
    (folder / ".gitignore").write_text("ignored.py\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


def change(checkout: Path) -> None:
    """A change of each kind."""
    (checkout / "lib" / "engine.py").write_text("rate = 2\n" * 20)
    (checkout / "gone.py").unlink()
    (checkout / "staged.py").write_text("y = 2\n")
    git(checkout, "add", "staged.py")
    (checkout / "weights.bin").write_bytes(bytes(range(255, -1, -1)))
    (checkout / "new [1] ü\n.py").write_text("new = True\n")
    (checkout / "ignored.py").write_text("not = here\n")
    (checkout / "video.mp4").write_bytes(b"0" * 1000)


def test_the_patch_makes_the_commit_into_the_code_that_ran_and_leaves_the_checkout_as_it_is(checkout, tmp_path):
    assert code_state(checkout) == CodeState(git(checkout, "rev-parse", "HEAD").strip(), False)
    change(checkout)
    here, status = files_of(checkout), git(checkout, "status", "--porcelain")
    state = code_state(checkout)
    assert (files_of(checkout), git(checkout, "status", "--porcelain")) == (here, status)
    again = tmp_path / "again"
    git(tmp_path, "clone", "-q", str(checkout), str(again))
    (tmp_path / "code.patch").write_bytes(state.patch)
    git(again, "apply", str(tmp_path / "code.patch"))
    assert files_of(again) == {
        name: content for name, content in here.items() if name not in {"ignored.py", "video.mp4"}
    }


def test_where_git_cannot_tell_nothing_is_claimed(tmp_path, checkout, monkeypatch):
    change(checkout)
    monkeypatch.setattr(record, "_LARGEST_PATCH_BYTES", 50)
    large = code_state(checkout)
    assert (large.changed_since_commit, large.patch) == (True, b"")
    assert code_state(tmp_path / "missing") == CodeState()
    assert code_state(checkout / "lib") == CodeState()
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    assert code_state(checkout).commit is not None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert code_state(checkout) == CodeState()


def test_versions_and_hardware_are_this_machines(monkeypatch):
    assert versions()["torch"] == metadata.version("torch")
    assert versions()["python"] == ".".join(map(str, sys.version_info[:3]))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "1")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    found = hardware()
    assert (found["omp_num_threads"], found["memory_limit_bytes"], slurm_job()) == ("3", 1 << 20, None)
    assert 1 <= int(str(found["cores"])) <= (os.cpu_count() or 1)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert slurm_job() == {"job_id": "12"}


def test_the_commands_that_repeat_a_run_survive_a_shell(monkeypatch):
    params, patch = Path("/runs/my run's/params.yaml"), Path("/runs/my run's/code.patch")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    commands = repeat_commands(CodeState("abc", True, b"diff"), params, patch)
    assert [shlex.split(command) for command in commands] == [
        ["git", "checkout", "abc"],
        ["git", "apply", "--whitespace=nowarn", str(patch)],
        ["OMP_NUM_THREADS=2", "python", "run_notebooks.py", "--params", str(params)],
    ]
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert repeat_commands(CodeState(), params, patch, command="python run.py --fork") == ["python run.py --fork"]
