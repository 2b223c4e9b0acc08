"""Which code a run works with: the commit of this checkout, and as a patch what is changed since.

Git is asked without touching the checkout: no lock is taken, and files that git does not know yet are added to a
temporary copy of its index.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fvc_lib import CHECKOUT
from fvc_lib.services.path_text import path_to_text
from fvc_lib.services.redaction import Redactor

# Of the files that git does not know, those that can change what a run does.
_CODE = ("*.py", "*.pyi", "*.ipynb", "*.yaml", "*.yml", "*.toml", "*.lock", "*.cfg", "*.sh", "*.sbatch", "Makefile")
_LARGEST_FILE_BYTES = 1 << 20
_LARGEST_PATCH_BYTES = 4 << 20
_SECONDS = 20.0
# What a user has set for their own eyes must not hide a change from the record.
_WHATEVER_IS_CONFIGURED = ("--untracked-files=normal", "--ignore-submodules=none")


@dataclass(frozen=True)
class CodeState:
    """The code as it is now.

    Attributes:
        commit: full hash of HEAD; None outside a git checkout.
        branch: its name; None when HEAD is detached.
        changed_since_commit: whether anything differs from the commit; None outside a git checkout.
        patch: what ``git apply`` makes the commit into this code with; empty when nothing is changed.
        left_out: what the patch does not hold, each with the reason.
        problem: why git could not tell, in its own words.
    """

    commit: str | None = None
    branch: str | None = None
    changed_since_commit: bool | None = None
    patch: bytes = b""
    left_out: tuple[str, ...] = ()
    problem: str | None = None

    @property
    def patch_sha256(self) -> str | None:
        """Hex SHA-256 of the patch; None without one."""
        return hashlib.sha256(self.patch).hexdigest() if self.patch else None

    def record(self) -> dict[str, object]:
        """For ``run.json``: all but the patch itself."""
        known = asdict(self)
        del known["patch"]
        return {**known, "left_out": list(self.left_out), "patch_sha256": self.patch_sha256}


class _GitError(Exception):
    """Git is missing, took too long or refused; the text is its own."""


def code_state(
    checkout: Path = CHECKOUT, redactor: Redactor | None = None, *, largest_patch_bytes: int = _LARGEST_PATCH_BYTES
) -> CodeState:
    """The state of ``checkout``; what git cannot tell is None, with the reason.

    Args:
        checkout: the top folder of a git checkout.
        redactor: takes secrets out of the patch; none: those of this process's environment.
        largest_patch_bytes: beyond this there is no patch, only a note.
    """
    try:
        if Path(_text(checkout, "rev-parse", "--show-toplevel")).resolve() != checkout.resolve():
            return CodeState(problem="not a git checkout of its own")
        commit = _text(checkout, "rev-parse", "HEAD")
        changed = bool(_git(checkout, "status", "--porcelain", *_WHATEVER_IS_CONFIGURED))
        branch = _text(checkout, "rev-parse", "--abbrev-ref", "HEAD")
    except _GitError as error:
        return CodeState(problem=str(error))
    state = CodeState(commit, None if branch == "HEAD" else branch, changed)
    if not changed:
        return state
    try:
        patch, left_out = _patch(checkout, largest_patch_bytes)
    except (_GitError, OSError) as error:
        return CodeState(commit, state.branch, changed, problem=f"no patch: {error}")
    shown = (redactor or Redactor()).text(patch.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
    if shown != patch:
        left_out = (*left_out, "secrets were taken out of the patch, so it may not apply")
    return CodeState(commit, state.branch, changed, shown, left_out)


def _patch(checkout: Path, largest_patch_bytes: int) -> tuple[bytes, tuple[str, ...]]:
    """What ``git apply`` needs, and what it lacks."""
    changed = _names(checkout, "diff", "HEAD", "--name-only", "-z", "--no-renames")
    unknown = _names(checkout, "ls-files", "--others", "--exclude-standard", "-z", "--", *_CODE)
    others = len(_names(checkout, "ls-files", "--others", "--exclude-standard", "-z")) - len(unknown)
    sizes = {name: _size(checkout / os.fsdecode(name)) for name in (*changed, *unknown)}
    large = sorted(name for name, size in sizes.items() if size > _LARGEST_FILE_BYTES)
    left_out = [f"{path_to_text(os.fsdecode(name))} ({sizes[name] / 1e6:.1f} MB)" for name in large]
    if others:
        left_out.append(f"{others} files that git does not know and that are no code")
    wanted = [name for name in sizes if name not in large]
    patch = _diff(checkout, wanted, [name for name in unknown if name in wanted]) if wanted else b""
    if len(patch) > largest_patch_bytes:
        left_out.append(f"the patch itself: {len(patch) / 1e6:.1f} MB, more than {largest_patch_bytes / 1e6:.1f} MB")
        patch = b""
    return patch, tuple(left_out)


def _diff(checkout: Path, names: Sequence[bytes], unknown: Sequence[bytes]) -> bytes:
    """The difference of ``names`` from HEAD, staged or not; those in ``unknown`` as new files."""
    with tempfile.TemporaryDirectory() as folder:
        index, objects, listed = Path(folder) / "index", Path(folder) / "objects", Path(folder) / "names"
        objects.mkdir()
        # With its time: by that git knows which files may have changed within the second they were added in.
        shutil.copy2(checkout / _text(checkout, "rev-parse", "--git-path", "index"), index)
        own = (checkout / _text(checkout, "rev-parse", "--git-path", "objects")).resolve()
        elsewhere = {
            "GIT_INDEX_FILE": str(index),
            "GIT_OBJECT_DIRECTORY": str(objects),
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(own),
        }
        if unknown:
            listed.write_bytes(b"\0".join(unknown))
            from_file = (f"--pathspec-from-file={listed}", "--pathspec-file-nul")
            _git(checkout, "--literal-pathspecs", "add", "--intent-to-add", *from_file, environment=elsewhere)
        # `diff` takes no list from a file, so a list that no command line holds is asked for whole.
        few = names if sum(map(len, names)) < 100_000 else ()
        options = (
            "--binary",
            "--unified=3",
            "--no-color",
            "--no-ext-diff",
            "--no-textconv",
            "--no-renames",
            "--src-prefix=a/",
        )
        paths = [os.fsdecode(name) for name in few]
        diff = ("--literal-pathspecs", "diff", "HEAD", *options, "--src-prefix=a/", "--dst-prefix=b/", "--", *paths)
        return _git(checkout, *diff, environment=elsewhere)


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:  # deleted: that is a change as well
        return 0


def _names(checkout: Path, *arguments: str) -> list[bytes]:
    return [name for name in _git(checkout, *arguments).split(b"\0") if name]


def _text(checkout: Path, *arguments: str) -> str:
    return os.fsdecode(_git(checkout, *arguments)).strip()


def _git(checkout: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> bytes:
    # What the caller's own git command has set must not lead to another repository.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "--no-optional-locks", "-C", str(checkout), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=_SECONDS, check=False, env={**environ, **(environment or {})}
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise _GitError(f"git could not be asked: {error}") from error
    if done.returncode:
        raise _GitError((done.stderr.decode("utf-8", "replace").strip().splitlines() or ["git failed"])[0])
    return done.stdout
