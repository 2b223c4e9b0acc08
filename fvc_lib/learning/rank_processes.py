"""The processes of one training, seen from the one that launched them."""

from __future__ import annotations

import logging
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from fvc_lib.services.redaction import Redactor

_LOOK_SECONDS = 0.2
# After one rank has ended in error the others are told, or find its connection closed, and end by themselves.
_GRACE_SECONDS = 30.0
_SRUN_SECONDS = 10.0
_logger = logging.getLogger(__name__)


class RankProcesses:
    """The processes of one training, what they say, and how they end.

    Args:
        commands: with the environment of each; the processes are started.
        log: what they print to their error outputs is appended there.
        srun: there is one, srun, which has the ranks started where they run.
    """

    def __init__(
        self, commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], log: Path, *, srun: bool = False
    ) -> None:
        self._srun = srun
        self._failed_at: float | None = None
        self._ended_at: float | None = None
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log.open("a", encoding="utf-8", buffering=1)
        self._log_lock = threading.Lock()
        self._redactor = Redactor()
        self._processes = [_process(command, environment) for command, environment in commands]
        self._threads = [
            thread
            for number, process in enumerate(self._processes)
            for thread in (
                threading.Thread(target=self._read, args=(process.stdout,), daemon=True),
                threading.Thread(target=self._keep, args=(process.stderr, number), daemon=True),
            )
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pids(self) -> list[int]:
        """Of the processes started here: the ranks, or srun."""
        return [process.pid for process in self._processes]

    def tell(self, line: str) -> None:
        """Every rank."""
        for number in range(len(self._processes)):
            self._write(number, line)

    def answer(self, number: int) -> None:
        """Rank 0, which has asked; under srun all hear it."""
        self._write(0, f"{number}\n")

    def any_lives(self) -> bool:
        """Whether one runs, or has words on the way."""
        return any(process.poll() is None for process in self._processes) or any(t.is_alive() for t in self._threads)

    def heard(self) -> Iterator[str]:
        """What was said, waiting a little for the first of it."""
        wait: float | None = _LOOK_SECONDS
        while True:
            try:
                yield self.lines.get(timeout=wait) if wait else self.lines.get_nowait()
            except queue.Empty:
                return
            wait = None

    def ask_to_stop(self) -> None:
        """They save and end with 75. srun passes the signal on to its tasks."""
        for process in self._processes:
            process.send_signal(signal.SIGUSR1)

    def end_stragglers(self) -> None:
        """When one has failed and others still run after the time of grace; and what was to end and has not."""
        if self._failed_at is None and any(process.poll() for process in self._processes):
            self._failed_at = time.monotonic()
        is_over = self._failed_at is not None and time.monotonic() - self._failed_at > _GRACE_SECONDS
        if is_over or self._ended_at is not None:
            self.kill()

    def kill(self) -> None:
        """All that still run. srun gets SIGTERM first, on which it kills its tasks; killed itself it would leave them.

        Repeated calls make sure of it.
        """
        now, first = time.monotonic(), self._ended_at is None
        self._ended_at = now if self._ended_at is None else self._ended_at
        for process in self._processes:
            if process.poll() is not None:
                continue
            if not self._srun or now - self._ended_at > _SRUN_SECONDS:
                process.kill()
            elif first:
                process.terminate()

    def codes(self) -> list[int]:
        """Exit codes, negative for a signal; of srun its one."""
        return [process.wait() for process in self._processes]

    def ended_by_signal(self) -> list[str]:
        """In words, of those that were."""
        ended = [(rank, signal.Signals(-code).name) for rank, code in enumerate(self.codes()) if code < 0]
        return [f"{'srun' if self._srun else f'rank {rank}'} was ended by {name}" for rank, name in ended]

    def close(self) -> None:
        """End what runs, and the log."""
        self.kill()
        while any(process.poll() is None for process in self._processes):
            time.sleep(_LOOK_SECONDS / 10)
            self.kill()
        for thread in self._threads:
            thread.join()
        for process in self._processes:
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    _close(stream)
        self._log.close()

    def _write(self, number: int, line: str) -> None:
        stream = self._processes[number].stdin
        if stream is None:
            raise RuntimeError("a rank was started without an input")
        try:
            stream.write(line)
            stream.flush()
        except BrokenPipeError:
            _logger.debug("a rank ended before it was told")  # its exit code is looked at like any other's

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self.lines.put(line)

    def _keep(self, stream: IO[str], number: int) -> None:
        label = f"[rank {number}] " if len(self._processes) > 1 else ""
        for line in stream:
            with self._log_lock:
                self._log.write(label + self._redactor.text(line))


def _process(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, text=True, errors="replace")


def _close(stream: IO[str]) -> None:
    """Without what could not be written: that reader is gone."""
    try:
        stream.close()
    except BrokenPipeError:
        _logger.debug("a rank had ended before it was told")
