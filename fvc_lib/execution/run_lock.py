"""One process at a time works on a run, wherever it runs; a dead one's claim ends by itself.

The operating system's lock on ``run.lock`` is dropped when its holder dies, however it dies, but not every file system
carries it from one machine to another. So the holder also writes who it is and, every few seconds, one beat more.
Whoever finds the file unlocked and its holder out of sight watches the beat by its own monotonic clock: hosts do not
agree on the time of day.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

from fvc_lib.execution.status import utc_now
from fvc_lib.services.errors import UsageError
from fvc_lib.services.process_identity import process_lives, this_host
from fvc_lib.services.run_paths import RunPaths

BEAT_SECONDS = 5.0
_MISSED_BEATS = 3  # so many must be missing before a holder out of sight is taken for dead
_FRESH_SECONDS = 30.0
_LONGEST_INTERVAL = 60.0  # what a file may say; nobody waits for hours because a file was damaged
_BYTES = 512  # always as many, so that a beat replaces the one before in a single write
# What `flock` says where there is no such lock at all; EAGAIN and EACCES mean that another process has it.
_NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL})
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Holder:
    """Who works on a run: a process of a host, and how often it has said so.

    ``started_utc`` tells one process from a later one with the same number.
    """

    pid: int
    host: str
    started_utc: str
    interval_seconds: float
    beat: int = 0

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.started_utc}"

    def is_same_process(self, other: Holder) -> bool:
        """Whether both are claims of one process, however many beats lie between them."""
        return replace(self, beat=0) == replace(other, beat=0)

    @property
    def is_gone(self) -> bool:
        """Whether this host itself can tell that the process has ended."""
        return self.host == this_host() and not process_lives(self.pid)


@contextmanager
def run_lock(
    run: RunPaths,
    *,
    interval_seconds: float = BEAT_SECONDS,
    say: Callable[[str], None] = print,
    on_lost: Callable[[str], None] = _logger.error,
) -> Iterator[None]:
    """Hold ``run``'s lock.

    A holder on another host that has not cleared its claim is watched for three of its intervals (15 s) first.

    Args:
        run: the run.
        interval_seconds: between two beats.
        say: told in one line when a dead holder's claim is passed over.
        on_lost: told when another process has taken the run over, after this one stood still for too long. Called
            from a thread.

    Raises:
        UsageError: another process holds it; the message names that process.
        OSError: the run folder cannot be written.
    """
    path = run.root / "run.lock"
    with path.open("a+b") as stream:
        _take_system_lock(stream, path, run)
        _refuse_living_holder(path, run, say)
        holder = Holder(os.getpid(), this_host(), utc_now(), interval_seconds)
        _write_holder(path, holder)
        ended = threading.Event()
        beats = threading.Thread(target=_keep_beating, args=(path, holder, ended, on_lost), daemon=True)
        beats.start()
        try:
            yield
        finally:
            ended.set()
            beats.join()
            _clear(path, holder)


def is_worked_on(run: RunPaths) -> bool:
    """Whether a living process holds ``run``'s lock. Looks without writing and without waiting for a beat.

    Of a holder on another host it believes a beat of the last 30 seconds. A lock that may not be looked at counts as
    held: nothing is done to a run that another user may be at work on.
    """
    path = run.root / "run.lock"
    try:
        with path.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            locks_work = True
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            return True
        locks_work = False
    holder, age_seconds = _read_holder_and_age(path)
    if holder is None or holder.is_gone or (locks_work and holder.host == this_host()):
        return False
    if abs(age_seconds) <= _FRESH_SECONDS:
        return True
    time.sleep(0.1)  # a host whose clock is off can still be seen beating
    again, _ = _read_holder_and_age(path)
    return again is not None and again != holder


def _take_system_lock(stream: IO[bytes], path: Path, run: RunPaths) -> None:
    """Lock ``stream`` until it is closed; a look by ``is_worked_on`` holds it for an instant, hence the patience."""
    for patience in (0.05, 0.1, 0.2, 0.0):
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return  # the beat alone decides
            if not patience:
                raise _refusal(run, _read_holder_and_age(path)[0]) from error
        time.sleep(patience)


def _refuse_living_holder(path: Path, run: RunPaths, say: Callable[[str], None]) -> None:
    """Pass over the claim of a process that has ended; watch one that this host cannot tell about."""
    holder, _ = _read_holder_and_age(path)
    if holder is None:
        return
    if not holder.is_gone:
        seconds = _MISSED_BEATS * holder.interval_seconds
        say(f"{run.run_id}: was worked on by {holder}; watching for {seconds:.0f} s whether it lives")
        if (now := _seen_alive(path, holder, seconds)) is not None:
            raise _refusal(run, now)
    say(f"{run.run_id}: {holder} is gone without a word; its lock has expired")


def _seen_alive(path: Path, holder: Holder, seconds: float) -> Holder | None:
    """Who gave a sign of life within ``seconds``; None when nobody did. A claim that is cleared gives none."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(min(0.5, seconds / 20))
        now, _ = _read_holder_and_age(path)
        if now is not None and now != holder:
            return now
    return None


def _refusal(run: RunPaths, holder: Holder | None) -> UsageError:
    return UsageError(
        f"{run.run_id}: another process is at work on this run ({holder or 'unknown'}). "
        "Wait for it, or stop it, then repeat the command."
    )


def _keep_beating(path: Path, holder: Holder, ended: threading.Event, on_lost: Callable[[str], None]) -> None:
    """Say every interval that the holder lives, unless another has taken the run over meanwhile."""
    beat = 0
    while not ended.wait(holder.interval_seconds):
        now, _ = _read_holder_and_age(path)
        if now is not None and not now.is_same_process(holder):
            on_lost(f"{path.parent.name}: taken over by {now}: this process stood still for too long. Stop it.")
            return
        beat += 1
        try:
            _write_holder(path, replace(holder, beat=beat))
        except OSError as error:  # the run folder's disk is ailing; the work finds out where it matters
            _logger.debug("%s: no beat: %s", path, error)


def _write_holder(path: Path, holder: Holder) -> None:
    """Opened and closed each time: a network file system shows other hosts what was written when it is closed."""
    text = json.dumps(asdict(holder)).encode()
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(descriptor, text.ljust(_BYTES - 1) + b"\n", 0)
        os.ftruncate(descriptor, _BYTES)
    finally:
        os.close(descriptor)


def _clear(path: Path, holder: Holder) -> None:
    """Leave no claim behind, unless it is another's by now."""
    now, _ = _read_holder_and_age(path)
    if now is not None and now.is_same_process(holder):
        try:
            os.truncate(path, 0)
        except OSError as error:
            _logger.warning("%s: the claim of this process stays and will be watched: %s", path, error)


def _read_holder_and_age(path: Path) -> tuple[Holder | None, float]:
    """The claim in ``path`` (None: there is none, or nothing of ours) and the seconds since it was written."""
    try:
        with path.open("rb") as stream:
            age_seconds = time.time() - os.fstat(stream.fileno()).st_mtime
            values = json.loads(stream.read(2 * _BYTES))
        pid = int(values["pid"])
        if not 0 < pid < 2**31:
            return None, 0.0
        holder = Holder(
            pid,
            str(values["host"]),
            str(values["started_utc"]),
            min(max(float(values["interval_seconds"]), 0.01), _LONGEST_INTERVAL),
            int(values["beat"]),
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None, 0.0
    return holder, age_seconds
