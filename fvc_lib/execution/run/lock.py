"""One process at a time works on a run, or on a task of it, wherever it runs; a dead one's claim ends by itself.

A runner holds ``run.lock``; jobs that share a run hold ``locks/<task>.lock`` of each of their tasks instead. The
operating system's lock on the file is dropped when its holder dies, however it dies, but not every file system
carries it from one machine to another. So the holder also writes who it is and, every few seconds, one beat more.
Whoever finds the file unlocked and its holder out of sight watches the beat by its own monotonic clock: hosts do not
agree on the time of day.
"""

import errno
import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Self

from fvc_lib.services.atomic_files import process_lives, this_host, utc_now
from fvc_lib.services.errors import UsageError
from fvc_lib.services.run_paths import RunPaths

_BYTES = 512  # of a claim, always as many, so that a beat replaces the one before in a single write
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

    def is_same_process(self, other: Self) -> bool:
        """Whether both are claims of one process, however many beats lie between them."""
        return replace(self, beat=0) == replace(other, beat=0)

    @property
    def is_gone(self) -> bool:
        """Whether this host itself can tell that the process has ended."""
        return self.host == this_host() and not process_lives(self.pid)


def write_claim(path: Path, holder: Holder) -> None:
    """Opened and closed each time: a network file system shows other hosts what was written when it is closed."""
    text = json.dumps(asdict(holder)).encode()
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(descriptor, text.ljust(_BYTES - 1) + b"\n", 0)
        os.ftruncate(descriptor, _BYTES)
    finally:
        os.close(descriptor)


def clear_claim(path: Path, holder: Holder) -> None:
    """Leave no claim behind, unless it is another's by now."""
    now, _ = read_claim(path)
    if now is not None and now.is_same_process(holder):
        try:
            os.truncate(path, 0)
        except OSError as error:
            _logger.warning("%s: the claim of this process stays and will be watched: %s", path, error)


def read_claim(path: Path) -> tuple[Holder | None, float]:
    """The claim in ``path`` (None: there is none, or nothing of ours) and the seconds since it was written."""
    try:
        with path.open("rb") as stream:
            age_seconds = time.time() - os.fstat(stream.fileno()).st_mtime
            found = json.loads(stream.read(2 * _BYTES))
        holder = Holder(
            int(found["pid"]), str(found["host"]), str(found["started_utc"]),
            max(0.01, min(60.0, float(found["interval_seconds"]))),  # a damaged claim must not be watched for ever
            int(found["beat"]),
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None, 0.0
    return (holder, age_seconds) if 0 < holder.pid < 2**31 else (None, 0.0)


BEAT_SECONDS = 5.0
_MISSED_BEATS = 3  # so many must be missing before a holder out of sight is taken for dead
_FRESH_SECONDS = 30.0
# What `flock` says where there is no such lock at all; EAGAIN and EACCES mean that another process has it.
NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL})


@contextmanager
def run_lock(
    run: RunPaths,
    keys: Collection[str] | None = None,
    *,
    interval_seconds: float = BEAT_SECONDS,
    say: Callable[[str], None] = print,
    on_lost: Callable[[str], None] = _logger.error,
    to_make_room: bool = False,
) -> Iterator[None]:
    """Hold the whole of ``run``, or its tasks ``keys`` and leave the others to other jobs; all of them, or none.

    A holder on another host that has not cleared its claim is watched for three of its intervals (15 s) first. Whoever
    takes the whole run and whoever takes tasks of it take their own first and look at the other's then: of two at the
    same moment both may be refused, but never both let in.

    ``say`` gets a line when a dead holder's claim is passed over; ``on_lost`` one, from a thread, when another process
    has taken the run over after this one stood still for too long. ``to_make_room``: a full disk is no reason to leave;
    the claim is written once there is room, and until then the system's lock alone holds. Nobody else can write one
    meanwhile.

    Raises:
        UsageError: another process holds what is wanted, or what it is a part of; the message names that process.
        OSError: the run folder cannot be written.
    """
    whole = keys is None
    paths = [_whole(run)] if keys is None else [run.task_lock(key) for key in sorted(keys)]
    with ExitStack() as streams:
        for path in paths:
            path.parent.mkdir(exist_ok=True)
            locks_work = _take_system_lock(streams.enter_context(path.open("a+b")), path)
        _refuse_living_holders(paths, say)
        holder = Holder(os.getpid(), this_host(), utc_now(), interval_seconds)
        ended = threading.Event()
        beats = threading.Thread(target=_keep_beating, args=(paths, holder, ended, on_lost), daemon=True)
        try:
            for path in paths:
                try:
                    write_claim(path, holder)
                except OSError as error:
                    if not (to_make_room and locks_work and error.errno in (errno.ENOSPC, errno.EDQUOT)):
                        raise
            beats.start()
            _refuse_others(_of_tasks(run) if whole else [_whole(run)], say)
            yield
        finally:
            ended.set()
            if beats.ident is not None:
                beats.join()
            for path in paths:
                clear_claim(path, holder)


def is_worked_on(run: RunPaths) -> bool:
    """Whether a living process holds ``run`` or any of its tasks. Looks without writing or waiting for a beat.

    Of a holder on another host it believes a beat of the last 30 seconds. A lock that may not be looked at counts as
    held: nothing is done to a run that another user may be at work on.
    """
    return any(_is_held(path) for path in (_whole(run), *_of_tasks(run)))


def is_task_worked_on(run: RunPaths, key: str) -> bool:
    """Whether a living process holds the task, by itself or with the whole run; looks as ``is_worked_on`` does."""
    return _is_held(run.task_lock(key)) or _is_held(_whole(run))


def _whole(run: RunPaths) -> Path:
    return run.root / "run.lock"


def _of_tasks(run: RunPaths) -> list[Path]:
    return sorted(run.task_lock("").parent.glob("*.lock"))


def _is_held(path: Path) -> bool:
    taken = _system_lock_taken(path)
    if taken:
        return True
    locks_work = taken is False
    holder, age_seconds = read_claim(path)
    if holder is None or holder.is_gone or (locks_work and holder.host == this_host()):
        return False
    if abs(age_seconds) <= _FRESH_SECONDS:
        return True
    time.sleep(0.1)  # a host whose clock is off can still be seen beating
    again, _ = read_claim(path)
    return again is not None and again != holder


def _system_lock_taken(path: Path) -> bool | None:
    """Whether a process holds the system's lock on ``path`` or will not have it looked at; None: there are no locks."""
    try:
        with path.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError as error:
        return None if error.errno in NO_LOCKS else True
    return False


def _take_system_lock(stream: IO[bytes], path: Path) -> bool:
    """Lock ``stream`` until it is closed; whether there are such locks here. A look by ``is_worked_on`` holds it for an
    instant, hence the patience.
    """
    for patience in (0.05, 0.1, 0.2, 0.0):
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in NO_LOCKS:
                break  # the beat alone decides
            if not patience:
                raise _refusal(path, read_claim(path)[0]) from error
        time.sleep(patience)
    return False


def _refuse_living_holders(paths: Sequence[Path], say: Callable[[str], None]) -> None:
    """Pass over the claims of processes that have ended; watch those that this host cannot tell about, all at once.

    Raises:
        UsageError: one of them lives.
    """
    claims = {path: holder for path in paths if (holder := read_claim(path)[0]) is not None}
    unsure = {path: holder for path, holder in claims.items() if not holder.is_gone}
    if unsure:
        seconds = _MISSED_BEATS * max(holder.interval_seconds for holder in unsure.values())
        for path, holder in unsure.items():
            say(f"{_name(path)}: was worked on by {holder}; watching for {seconds:.0f} s whether it lives")
        if (alive := _seen_alive(unsure, seconds)) is not None:
            raise _refusal(*alive)
    for path, holder in claims.items():
        say(f"{_name(path)}: {holder}, was killed or lost its machine; this process goes on in its place")


def _refuse_others(paths: Sequence[Path], say: Callable[[str], None]) -> None:
    """The same for locks that this process does not take: there the system's lock tells of the living as well."""
    for path in paths:
        if _system_lock_taken(path):
            raise _refusal(path, read_claim(path)[0])
    claims = {path: read_claim(path)[0] for path in paths}
    _refuse_living_holders(paths, say)
    for path, holder in claims.items():
        if holder is not None:  # so that nobody has to watch for it again; a living one would write its next beat
            clear_claim(path, holder)


def _seen_alive(claims: Mapping[Path, Holder], seconds: float) -> tuple[Path, Holder] | None:
    """Who gave a sign of life within ``seconds``; None when nobody did. A claim that is cleared gives none."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(min(0.5, seconds / 20))
        for path, holder in claims.items():
            now, _ = read_claim(path)
            if now is not None and now != holder:
                return path, now
    return None


def _refusal(path: Path, holder: Holder | None) -> UsageError:
    what = "this run" if path.name == "run.lock" else f"{path.stem} of this run"
    return UsageError(
        f"{_name(path).split(',')[0]}: another process is at work on {what} ({holder or 'unknown'}). Wait for it, or "
        "stop it, then repeat the command."
    )


def _name(path: Path) -> str:
    """The run's name, or the run's and the task's."""
    return path.parent.name if path.name == "run.lock" else f"{path.parents[1].name}, {path.stem}"


def _keep_beating(
    paths: Sequence[Path], holder: Holder, ended: threading.Event, on_lost: Callable[[str], None]
) -> None:
    """Say every interval that the holder lives, unless another has taken something over meanwhile."""
    beat = 0
    while not ended.wait(holder.interval_seconds):
        beat += 1
        for path in paths:
            now, _ = read_claim(path)
            if now is not None and not now.is_same_process(holder):
                on_lost(f"{path}: taken over by {now}: this process stood still for too long. Stop it.")
                return
            try:
                write_claim(path, replace(holder, beat=beat))
            except OSError as error:  # the run folder's disk is ailing; the work finds out where it matters
                _logger.debug("%s: no beat: %s", path, error)
