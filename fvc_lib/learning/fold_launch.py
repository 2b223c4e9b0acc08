"""One fold trained by several ranks, started from here, as one call that behaves like training in this process."""

from __future__ import annotations

import logging
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from fvc_lib.learning.fold_outcome import FoldOutcome, read_outcome
from fvc_lib.learning.rank_place import loopback
from fvc_lib.learning.rank_reports import Progress, ReportReader
from fvc_lib.learning.ranks import RankLostError, error_named
from fvc_lib.learning.watching import MetricSink
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import FvcError, StoppedError
from fvc_lib.services.memory_budget import SHARE_VARIABLE, MemoryShare, memory_budget
from fvc_lib.services.memory_observer import MemoryObserver, NoObserver
from fvc_lib.services.redaction import Redactor
from fvc_lib.services.run_paths import RunPaths, stage_key

_STAGE = "04_fold_training"
_MODULE = "fvc_lib.learning.fold_ranks"
_LOOK_SECONDS = 0.2
# After one rank has ended in error the others are told, or find its connection closed, and end by themselves.
_GRACE_SECONDS = 30.0
_logger = logging.getLogger(__name__)


def train_fold_on_ranks(
    paths: RunPaths,
    config: RunConfig,
    fold: int,
    *,
    metric_log: MetricSink,
    memory: MemoryObserver | None = None,
    stop: Callable[[], bool] | None = None,
    progress: Progress | None = None,
) -> FoldOutcome:
    """Train fold ``fold`` on ``config.num_ranks`` processes and wait for them; arguments as ``train_fold``'s.

    Inside a SLURM job that has as many tasks ``srun`` starts them, on all of its nodes; elsewhere they are children of
    this process. Each is told its part of the memory budget, and how many threads: as many as leave each core one,
    unless OMP_NUM_THREADS says otherwise. What they print goes to ``logs/<stage>_fold_K_ranks.log``. When this process
    goes away, so do they.

    Raises:
        StoppedError: ``stop`` said so, or a rank was asked; everything is saved.
        RankLostError: a rank was killed.
        FvcError: what a rank gives as its reason, of the same class.
    """
    reader = ReportReader(metric_log, memory or NoObserver(), progress)
    asked = begun = False
    with _started(paths, config, fold) as ranks:
        while ranks.any_lives() or not ranks.lines.empty():
            if not asked and stop is not None and stop():
                asked = True
                _logger.info("asking the ranks to stop")
                begun = len(reader.ready) == config.num_ranks
                # Before that they have nothing to save, and may be waiting for one that does not come.
                ranks.ask_to_stop() if begun else ranks.kill()
            ranks.end_stragglers()
            for line in ranks.heard():
                reader.take(line)
    codes = ranks.codes()
    if asked and not begun:
        raise StoppedError("stopped as asked before the ranks had met: resume with run_notebooks.py --resume latest.")
    outcome = read_outcome(paths.fold_outcome(fold)) if not any(codes) else None
    if outcome is None:
        raise _reason(reader, codes, fold)
    return outcome


def local_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Torchrun's variables for rank ``rank`` of ``size`` on this machine; the store at ``port`` is the launcher's."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there already: no rank opens one
        "TORCHELASTIC_RESTART_COUNT": "0",
        **loopback(),
    }


class _Processes:
    """The processes of one training, what they say, and how they end."""

    def __init__(self, processes: list[subprocess.Popen[str]], log: Path) -> None:
        self._processes = processes
        self._failed_at: float | None = None
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._log = log.open("a", encoding="utf-8", buffering=1)
        self._log_lock = threading.Lock()
        self._redactor = Redactor()
        self._threads = [
            thread
            for number, process in enumerate(processes)
            for thread in (
                threading.Thread(target=self._read, args=(process.stdout,), daemon=True),
                threading.Thread(target=self._keep, args=(process.stderr, number), daemon=True),
            )
        ]
        for thread in self._threads:
            thread.start()

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
        """When one has failed and others still run after the time of grace."""
        if self._failed_at is None and any(process.poll() for process in self._processes):
            self._failed_at = time.monotonic()
        if self._failed_at is not None and time.monotonic() - self._failed_at > _GRACE_SECONDS:
            self.kill()

    def kill(self) -> None:
        """All that still run."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()

    def codes(self) -> list[int]:
        """Exit codes, negative for a signal; of srun its one."""
        return [process.wait() for process in self._processes]

    def close(self) -> None:
        """End what runs, and the log."""
        self.kill()
        self.codes()
        for thread in self._threads:
            thread.join()
        for process in self._processes:
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        self._log.close()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self.lines.put(line)

    def _keep(self, stream: IO[str], number: int) -> None:
        label = f"[rank {number}] " if len(self._processes) > 1 else ""
        for line in stream:
            with self._log_lock:
                self._log.write(label + self._redactor.text(line))


@contextmanager
def _started(paths: RunPaths, config: RunConfig, fold: int) -> Iterator[_Processes]:
    size = config.num_ranks
    command = [sys.executable, "-m", _MODULE, str(paths.root), "--fold", str(fold), "--launched"]
    log = paths.logs / f"{stage_key(_STAGE, fold)}_ranks.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    store = None
    if in_slurm_job_with_tasks(size, os.environ):
        processes = [_process(_srun(size) + command, _common_environment())]
    else:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = _common_environment() | _shares(config)
        processes = [_process(command, common | local_environment(rank, size, store.port)) for rank in range(size)]
    ranks = _Processes(processes, log)
    try:
        for process in processes:
            _begin(process, config)
        yield ranks
    finally:
        ranks.close()
        del store


def in_slurm_job_with_tasks(size: int, environ: Mapping[str, str]) -> bool:
    """Whether this process is in a SLURM job that was given ``size`` tasks."""
    tasks = environ.get("SLURM_NTASKS", "")
    return bool(environ.get("SLURM_JOB_ID")) and tasks.isdecimal() and int(tasks) >= size and bool(shutil.which("srun"))


def _srun(size: int) -> list[str]:
    """``--overlap``: this process may itself be a step that holds the job's resources."""
    return ["srun", "--overlap", "--kill-on-bad-exit=1", f"--ntasks={size}", "--input=all", "--unbuffered"]


def _process(command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, text=True, errors="replace")


def _begin(process: subprocess.Popen[str], config: RunConfig) -> None:
    """The parameters are the first line of its input, which then stays open for as long as this process lives."""
    if process.stdin is None:
        raise RuntimeError("a rank was started without an input")
    try:
        process.stdin.write(config.model_dump_json() + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        _logger.debug("a rank ended before it began")  # its exit code is looked at like any other's


def _common_environment() -> dict[str, str]:
    """This process's, with this very package on the path."""
    checkout = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(part for part in (checkout, os.environ.get("PYTHONPATH", "")) if part)
    return {**os.environ, "PYTHONPATH": path}


def _shares(config: RunConfig) -> dict[str, str]:
    """Memory and threads of one rank, of what is left beside this process."""
    size, budget = config.num_ranks, memory_budget(config.mem_gb)
    left = max(0, budget.total_bytes - psutil.Process().memory_info().rss)
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, torch.get_num_threads() // size))
    return {SHARE_VARIABLE: MemoryShare(left // size, size, budget).as_text(), "OMP_NUM_THREADS": threads}


def _reason(reader: ReportReader, codes: list[int], fold: int) -> FvcError:
    """The first reason that is one: a rank that only lost the others knows less than they."""
    log = f"logs/{stage_key(_STAGE, fold)}_ranks.log"
    told = sorted(reader.reasons.items(), key=lambda item: (_is_second_hand(item[1][0]), item[0]))
    signals = {rank: signal.Signals(-code).name for rank, code in enumerate(codes) if code < 0}
    if signals and (not told or _is_second_hand(told[0][1][0])):
        what = ", ".join(f"rank {rank} was ended by {name}" for rank, name in signals.items())
        return RankLostError(
            f"{what} (SIGKILL is most often the system's, for want of memory); the other ranks ended with it. The last "
            f"checkpoint stands: give the job more memory or fewer ranks, then resume. See {log}."
        )
    if told:
        _, (name, message) = told[0]
        return error_named(name, message)
    if StoppedError.exit_code in codes:
        return StoppedError("stopped as asked; resume with run_notebooks.py --resume latest.")
    return RankLostError(f"the ranks ended with exit codes {codes} and left no result; {log} says why.")


def _is_second_hand(name: str) -> bool:
    return name == RankLostError.__name__
