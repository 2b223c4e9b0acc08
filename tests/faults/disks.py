"""Disks that take nothing more, for real: a small tmpfs, a limit on file sizes, a read-only mount."""

from __future__ import annotations

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
    """A folder, how to make its disk take no more than a few pages, and how to make room again."""

    folder: Path
    fill: Callable[[], None]
    make_room: Callable[[], None]


@contextmanager
def small_tmpfs(folder: Path, size: str = "64k") -> Iterator[SmallDisk]:
    """A tmpfs mounted on ``folder``; the test is skipped where this process may not mount."""
    folder.mkdir(parents=True)
    ballast = folder / "ballast"
    with _mounted("-t", "tmpfs", "-o", f"size={size}", "none", str(folder)):
        yield SmallDisk(folder, lambda: _fill(ballast), ballast.unlink)


@contextmanager
def limited_files(folder: Path) -> Iterator[SmallDisk]:
    """Files of this process that may not grow beyond a page once ``fill`` was called; works for every user."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    try:
        yield SmallDisk(folder, lambda: _limit_file_size(4096), lambda: _limit_file_size(before))
    finally:
        _limit_file_size(before)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nothing in ``folder`` can be written: a read-only mount for root, whom permissions do not bind, else those."""
    if os.geteuid() == 0:
        with _mounted("--bind", str(folder), str(folder)):
            _mount("-o", "remount,ro,bind", str(folder))
            yield
        return
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    modes = {path: path.stat().st_mode for path in folders}
    for path in folders:
        path.chmod(0o555)
    try:
        yield
    finally:
        for path, mode in modes.items():
            path.chmod(mode)


@contextmanager
def _mounted(*arguments: str) -> Iterator[None]:
    """``mount ARGUMENTS``, whose last is the folder, until the end of the block or of this process.

    A mount that a killed session left would fail the clean-up of the sessions after it.
    """
    _mount(*arguments)
    # Its input ends with this process, however that ends.
    ends = ["sh", "-c", 'trap "" INT TERM; read _; umount --lazy "$0"', arguments[-1]]
    with subprocess.Popen(ends, stdin=subprocess.PIPE, start_new_session=True) as guard:
        try:
            yield
        finally:
            assert guard.stdin is not None
            guard.stdin.close()
            assert guard.wait() == 0


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"may not mount: {done.stderr.strip()}")


def _fill(ballast: Path) -> None:
    with ballast.open("ab", buffering=0) as stream, suppress(OSError):
        while True:
            stream.write(bytes(4096))
    assert os.statvfs(ballast).f_bavail == 0


def _limit_file_size(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
