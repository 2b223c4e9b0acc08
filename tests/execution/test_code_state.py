"""A run's code can be had again: the commit, and a patch that makes it what it was."""

import os
import subprocess
from pathlib import Path

import pytest

from fvc_lib.execution.run import record
from fvc_lib.execution.run.record import CodeState, code_state

NAMES = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}


def git(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, **NAMES, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    command = ["git", "-C", str(folder), "-c", "init.defaultBranch=main", *arguments]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


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


def test_a_clean_checkout_has_a_commit_and_no_patch(checkout):
    state = code_state(checkout)
    assert state == CodeState(git(checkout, "rev-parse", "HEAD").strip(), "main", False)
    assert state.patch_sha256 is None


def test_the_patch_makes_the_commit_into_the_code_that_ran(checkout, tmp_path):
    change(checkout)
    state = code_state(checkout)
    assert state.changed_since_commit
    again = tmp_path / "again"
    git(tmp_path, "clone", "-q", str(checkout), str(again))
    (tmp_path / "code.patch").write_bytes(state.patch)
    git(again, "apply", str(tmp_path / "code.patch"))
    here = {p.name: p.read_bytes() for p in checkout.rglob("*") if p.is_file() and ".git/" not in str(p)}
    there = {p.name: p.read_bytes() for p in again.rglob("*") if p.is_file() and ".git/" not in str(p)}
    assert there == {name: content for name, content in here.items() if name not in {"ignored.py", "video.mp4"}}
    assert state.left_out == ()


def test_looking_leaves_the_checkout_as_it_is(checkout):
    change(checkout)
    status = git(checkout, "status", "--porcelain")
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in sorted(checkout.rglob("*")) if p.is_file()}
    code_state(checkout)
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in sorted(checkout.rglob("*")) if p.is_file()} == before
    assert git(checkout, "status", "--porcelain") == status


def test_what_is_large_is_left_out_by_name(checkout, monkeypatch):
    (checkout / "lib" / "engine.py").write_text("rate = 2\n")
    (checkout / "table.py").write_text("x = 1\n" * 300_000)
    state = code_state(checkout)
    assert state.left_out == ("table.py (1.8 MB)",)
    assert b"rate = 2" in state.patch
    assert b"table.py" not in state.patch
    git(checkout, "add", ".")
    git(checkout, "commit", "-q", "-m", "a large file")
    (checkout / "table.py").write_text("y = 1\n" * 300_000)
    (checkout / "lib" / "engine.py").write_text("rate = 3\n")
    state = code_state(checkout)
    assert state.left_out == ("table.py (1.8 MB)",)
    assert b"rate = 3" in state.patch
    assert b"table.py" not in state.patch
    monkeypatch.setattr(record, "_LARGEST_PATCH_BYTES", 50)
    bounded = code_state(checkout)
    assert bounded.patch == b""
    assert bounded.left_out[-1].startswith("the patch itself: ")


def test_where_git_cannot_tell_nothing_is_claimed(tmp_path, checkout, monkeypatch):
    assert code_state(tmp_path / "missing").commit is None
    inside = code_state(checkout / "lib")  # installed somewhere within another project's checkout
    assert inside == CodeState(problem="not a git checkout of its own")
    monkeypatch.setenv("PATH", str(tmp_path))
    without = code_state(checkout)
    assert without.changed_since_commit is None
    assert "git could not be asked" in str(without.problem)


def test_variables_of_a_git_command_around_do_not_lead_elsewhere(checkout, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    commit = git(checkout, "rev-parse", "HEAD").strip()
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    assert code_state(checkout).commit == commit


def test_a_worktree_and_a_detached_head_are_read_as_well(checkout, tmp_path):
    tree = tmp_path / "tree"
    git(checkout, "worktree", "add", "-q", "--detach", str(tree))
    (tree / "lib" / "engine.py").write_text("rate = 3\n")
    (tree / "more.py").write_text("z = 1\n")
    state = code_state(tree)
    assert state.branch is None
    assert b"rate = 3" in state.patch
    assert b"more.py" in state.patch
