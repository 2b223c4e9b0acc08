"""``profile_memory``: every allocation of a training on record, with the line of code that made it.

On CUDA torch's own history of its allocator, elsewhere memray. memray writes as the training goes, so the recording of
a training that is killed can still be read: ``python -m memray flamegraph --no-web <file>``.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from fvc_lib.services.atomic_files import write_text
from fvc_lib.services.errors import UsageError

_logger = logging.getLogger(__name__)
# Of torch's history, the newest: some 100 bytes to 1 kB each in the file.
_MOST_CUDA_ENTRIES = 1_000_000
_REPORT_SECONDS = 600.0
_OWN_MEMORY = "3"  # by the whole, the frames of Jupyter's event loop stand above everything they run
_TABLE_COLUMNS = "200"  # memray's text tables are cut to the terminal's width


@dataclass(frozen=True)
class AllocationRecording:
    """A recording that is being made, or is finished.

    Attributes:
        path: ``memray_<pid>_<n>.bin`` or ``snapshot_<pid>_<n>.pickle``.
    """

    path: Path

    @property
    def flamegraph(self) -> Path:
        """Memray's flame graph at the peak: one HTML file that needs no network."""
        return self.path.with_suffix(".html")

    @property
    def summary(self) -> Path:
        """Memray's table of the functions that held most at the peak, as text."""
        return self.path.with_suffix(".txt")

    def describe(self) -> str:
        """One sentence: where it is and how to look at it."""
        if self.path.suffix == ".pickle":
            return (
                f"allocations on the GPU: {str(self.path)!r}; drop the file on https://pytorch.org/memory_viz, which "
                "draws it in the browser and uploads nothing."
            )
        if self.flamegraph.exists():
            return f"allocations: open {str(self.flamegraph)!r} in a browser, or read {str(self.summary)!r}."
        return f"allocations: {str(self.path)!r}; python -m memray flamegraph --no-web makes a page of it."


@contextmanager
def recorded_allocations(folder: Path, device: torch.device) -> Iterator[AllocationRecording]:
    """Record every allocation from here to the end, of all threads; then write what can be looked at, and say where.

    With memray a step takes 5 to 16 % longer and 0.1 to 0.2 MB of disk (frame_cnn and r2plus1d, 16 clips of
    6 x 112 x 112). Loader processes are not recorded. A report that cannot be made is said in the log; the recording
    itself stays.

    Args:
        folder: created; recordings of earlier attempts in it are left alone.
        device: ``cuda`` is recorded by torch, all others by memray.

    Raises:
        UsageError: memray is not installed, or something else is recording in this process; before any work.
    """
    cuda = device.type == "cuda"
    if not cuda:
        require_memray()
    folder.mkdir(parents=True, exist_ok=True)
    recording = AllocationRecording(_free_path(folder, "snapshot", ".pickle") if cuda else _free_path(folder))
    with _torch_history(recording.path, device) if cuda else _memray_tracker(recording.path):
        yield recording
    _logger.info("%s", recording.describe())


def require_memray() -> None:
    """Check before any work that memray is there.

    Raises:
        UsageError: it is not; the message says how to get it.
    """
    try:
        there = importlib.util.find_spec("memray") is not None
    except ValueError:  # sys.modules holds a None or a stump of that name
        there = False
    if not there:
        raise UsageError(
            "profile_memory: on this device memray records the allocations, and it is not installed. Install it "
            "(pip install 'fvc_lib[profile]', or pip install memray; Linux and macOS only), or turn profile_memory off."
        )


@contextmanager
def _memray_tracker(path: Path) -> Iterator[None]:
    import memray

    tracker = memray.Tracker(path)
    # Memray leaves out as many frames of the thread that started it as that had on its stack, counted from the bottom.
    # That hides memray's own command, but here it would hide the training: so a thread that has nothing to hide.
    with ThreadPoolExecutor(1, thread_name_prefix="fvc-memray") as thread:
        try:
            thread.submit(tracker.__enter__).result()
        except RuntimeError as error:  # one tracker at a time, and %%memray_flamegraph may be another
            raise UsageError(f"profile_memory: memray cannot start: {error}. Turn the other recording off.") from error
        try:
            yield
        finally:
            thread.submit(tracker.__exit__, None, None, None).result()
            _write_reports(AllocationRecording(path))


@contextmanager
def _torch_history(path: Path, device: torch.device) -> Iterator[None]:
    memory = torch.cuda.memory
    memory._record_memory_history(max_entries=_MOST_CUDA_ENTRIES, device=device)
    try:
        yield
    finally:
        try:
            memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        except (OSError, RuntimeError) as error:
            _logger.warning("profile_memory: %s was not written: %s", path, error)
        memory._record_memory_history(enabled=None, device=device)


def _write_reports(recording: AllocationRecording) -> None:
    """In processes of their own: memray's reporters take memory by the number of allocations."""
    source = str(recording.path)
    _run_memray("flamegraph", "--no-web", "--force", "--output", str(recording.flamegraph), source)
    table = _run_memray("summary", "--sort-column", _OWN_MEMORY, source)
    if table is not None:
        try:
            write_text(recording.summary, table)
        except OSError as error:
            _logger.warning("profile_memory: %s was not written: %s", recording.summary, error)


def _run_memray(*arguments: str) -> str | None:
    """What the command printed; None, and a warning, when it failed."""
    command = [sys.executable, "-P", "-m", "memray", *arguments]
    # A Jupyter kernel asks all its children for colours, which in a file are noise.
    colours = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
    kept = {name: value for name, value in os.environ.items() if name not in colours}
    environment = {**kept, "COLUMNS": _TABLE_COLUMNS, "NO_COLOR": "1", "TERM": "dumb"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_REPORT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _logger.warning("profile_memory: no %s was made: %s", arguments[0], error)
        return None
    if done.returncode == 0:
        return done.stdout
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    reason = lines[-1] if lines else f"exit code {done.returncode}"
    _logger.warning("profile_memory: no %s was made: %s", arguments[0], reason)
    return None


def _free_path(folder: Path, stem: str = "memray", suffix: str = ".bin") -> Path:
    """A pid comes back after a reboot, so its recordings are counted."""
    names = (folder / f"{stem}_{os.getpid()}_{number}{suffix}" for number in itertools.count())
    return next(path for path in names if not path.exists())
