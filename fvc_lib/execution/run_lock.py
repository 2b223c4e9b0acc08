"""One process at a time works on a run; the operating system drops the lock when the process dies, however it dies."""

from __future__ import annotations

import fcntl
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

from fvc_lib.services.errors import UsageError
from fvc_lib.services.run_paths import RunPaths


@contextmanager
def run_lock(run: RunPaths) -> Iterator[None]:
    """Hold ``run``'s lock.

    Raises:
        UsageError: another process holds it; the message names that process.
    """
    with (run.root / "run.lock").open("a+") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            stream.seek(0)
            raise UsageError(
                f"{run.run_id}: another process is at work on this run ({stream.read().strip() or 'unknown'}). "
                "Wait for it, or stop it, then repeat the command."
            ) from error
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {platform.node()}")
        stream.flush()
        yield


def is_worked_on(run: RunPaths) -> bool:
    """Whether a living process holds ``run``'s lock. Looks without writing."""
    try:
        with (run.root / "run.lock").open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
