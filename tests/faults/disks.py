"""Disks that take nothing more, for real: a small tmpfs, a limit on file sizes, a read-only mount."""

import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class SmallDisk:
    """A folder, a function that fills its disk up to a few pages, and one that makes room again."""

    folder: Path
    fill: Callable[[], None]
    make_room: Callable[[], None]


@contextmanager
def small_tmpfs(folder: Path, size: str = "64k") -> Iterator[SmallDisk]:
    """Mount a tmpfs on ``folder``; skip the test where this process may not mount."""
    folder.mkdir(parents=True)
    ballast = folder / "ballast"

    def fill() -> None:
        with ballast.open("ab", buffering=0) as stream, suppress(OSError):
            while True:
                stream.write(bytes(4096))
        assert os.statvfs(folder).f_bavail == 0

    with _mounted("-t", "tmpfs", "-o", f"size={size}", "none", str(folder)):
        yield SmallDisk(folder, fill, ballast.unlink)


@contextmanager
def limited_files(folder: Path, size: int = 4096) -> Iterator[SmallDisk]:
    """Let no file of this process grow beyond ``size`` bytes after ``fill``; works for every user."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(num_bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, most))

    try:
        yield SmallDisk(folder, lambda: limit(size), lambda: limit(before))
    finally:
        limit(before)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Mount ``folder`` read-only, because permissions do not bind root; skip the test as ``small_tmpfs`` does."""
    with _mounted("--bind", str(folder), str(folder)):
        _mount("-o", "remount,ro,bind", str(folder))
        yield


@contextmanager
def _mounted(*arguments: str) -> Iterator[None]:
    """Mount until the end of the block or of this process; the last argument is the folder.

    A mount that a killed session left would fail the clean-up of the sessions after it.
    """
    _mount(*arguments)
    # Its input ends with this process, however that ends.
    ends = ["sh", "-c", 'trap "" INT TERM; read _; umount --lazy "$0"', arguments[-1]]
    with subprocess.Popen(ends, stdin=subprocess.PIPE, start_new_session=True) as guard:
        try:
            yield
        finally:
            guard.stdin.close()
            assert guard.wait() == 0


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"may not mount: {done.stderr.strip()}")
