"""Let one process at a time work on a run, or on one task of it.

The operating system's file lock decides, so the lock of a dead process is free at once. Where a file system has no
locks, `filelock` marks the lock by the file's existence instead, and a host that died leaves that file behind.
"""

import contextlib
import os
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from fvc_lib.services.errors import UsageError
from fvc_lib.services.run_paths import RunPaths, is_held

_PATIENCE_SECONDS = 0.5  # is_worked_on holds a lock for an instant


@contextmanager
def run_lock(run: RunPaths, keys: Collection[str] | None = None) -> Iterator[None]:
    """Hold all of ``run``, or only its tasks ``keys``, so that other jobs can work on the others.

    Raises:
        UsageError: another process holds part of it; the message names the process.
        OSError: the run folder cannot be written.
    """
    own = [_whole(run)] if keys is None else [run.task_lock(key) for key in sorted(keys)]
    with contextlib.ExitStack() as held:
        for path in own:
            held.enter_context(_held(path))
        # Look only after taking our own: of two processes that start together, at most one goes on.
        for path in _of_tasks(run) if keys is None else [_whole(run)]:
            if is_held(path):
                raise _refusal(path)
        yield


def is_worked_on(run: RunPaths) -> bool:
    """Return whether a process works on ``run`` or any of its tasks, or might: the lock files cannot be opened."""
    return any(is_held(path) for path in (_whole(run), *_of_tasks(run)))


def is_task_worked_on(run: RunPaths, key: str) -> bool:
    """Return whether a process works on the task ``key`` or on the whole run; see ``is_worked_on``."""
    return is_held(run.task_lock(key)) or is_held(_whole(run))


def _whole(run: RunPaths) -> Path:
    return run.root / "run.lock"


def _of_tasks(run: RunPaths) -> list[Path]:
    return sorted(run.task_lock("").parent.glob("*.lock"))


@contextmanager
def _held(path: Path) -> Iterator[None]:
    path.parent.mkdir(exist_ok=True)
    lock: BaseFileLock = FileLock(path, timeout=_PATIENCE_SECONDS)
    try:
        lock.acquire()
    except Timeout as error:
        raise _refusal(path) from error
    try:
        if not isinstance(lock, SoftFileLock):  # which has written the same itself
            with contextlib.suppress(OSError):  # a full disk does not keep `clean` from making room
                path.write_text(f"{os.getpid()}\n{socket.gethostname()}\n")
        yield
    finally:
        lock.release()


def _refusal(path: Path) -> UsageError:
    try:
        pid, host = path.read_text().split()[:2]
    except (OSError, ValueError):
        pid, host = "unknown", "an unknown host"
    what = "this run" if path.name == "run.lock" else f"{path.stem} of this run"
    return UsageError(
        f"another process works on {what}: process {pid} on {host}. Wait for it or stop it, then repeat the command. "
        f"If that host is down, delete {path}."
    )
