"""Let one process at a time work on a run, on one of its tasks, or on one of its records.

The locks come from the package ``filelock``. The operating system frees the lock of a process that has died. On a file
system that has no locks, the existence of a file is the lock; a host that crashes leaves that file behind.
"""

import contextlib
import os
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from fvc_lib.services.errors import DataError, UsageError
from fvc_lib.services.run_paths import RunPaths, is_held

_PATIENCE_SECONDS = 0.5  # is_worked_on holds a lock for an instant
RECORD_SECONDS = 20.0  # for a process that writes a record, which takes milliseconds


@contextmanager
def run_lock(run: RunPaths, keys: Collection[str] | None = None) -> Iterator[None]:
    """Lock all of ``run``; or lock only its tasks ``keys``, so that other jobs can work on the other tasks.

    Raises:
        UsageError: another process has locked the run or one of the tasks; the message names the process.
        OSError: the run folder cannot be written.
    """
    own = [_whole(run)] if keys is None else [run.task_lock(key) for key in sorted(keys)]
    with contextlib.ExitStack() as held:
        for path in own:
            path.parent.mkdir(exist_ok=True)
            try:
                held.enter_context(FileLock(path, timeout=_PATIENCE_SECONDS))
            except Timeout as error:
                raise _refusal(path) from error
            with contextlib.suppress(OSError):  # a full disk does not keep `clean` from making room
                path.write_text(f"{os.getpid()}\n{socket.gethostname()}\n")
        # Look only after taking our own: of two processes that start together, at most one goes on.
        for path in _of_tasks(run) if keys is None else [_whole(run)]:
            if is_held(path):
                raise _refusal(path)
        yield


@contextmanager
def record_held(path: Path) -> Iterator[None]:
    """Lock the record ``path`` while it is read, changed and written.

    Raises:
        DataError: another process has kept the lock for ``RECORD_SECONDS``.
    """
    lock = FileLock(path.with_name(f"{path.name}.lock"), timeout=RECORD_SECONDS, poll_interval=0.02)
    try:
        lock.acquire()
    except Timeout as error:
        raise DataError(
            f"{path}: another process has been writing it for {RECORD_SECONDS:.0f} s. If its host is down, delete "
            f"{error.lock_file}."
        ) from error
    try:
        yield
    finally:
        lock.release()


def is_worked_on(run: RunPaths) -> bool:
    """Return whether a process works on ``run`` or on one of its tasks; True if a lock file cannot be opened."""
    return any(is_held(path) for path in (_whole(run), *_of_tasks(run)))


def is_task_worked_on(run: RunPaths, key: str) -> bool:
    """Return whether a process works on the task ``key`` or on the whole run; see ``is_worked_on``."""
    return is_held(run.task_lock(key)) or is_held(_whole(run))


def _whole(run: RunPaths) -> Path:
    return run.root / "run.lock"


def _of_tasks(run: RunPaths) -> list[Path]:
    return sorted(run.task_lock("").parent.glob("*.lock"))


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
