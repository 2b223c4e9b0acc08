"""One training by several ranks, started from here, as one call that behaves like training in this process."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import psutil
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from fvc_lib import CHECKOUT
from fvc_lib.engine.distributed.launch import Progress, RankProcesses, ReportReader, launch_from_here, loopback
from fvc_lib.engine.distributed.ranks import RankLostError, error_named
from fvc_lib.engine.watching import MetricSink
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import FvcError, StoppedError
from fvc_lib.services.memory_budget import SHARE_VARIABLE, MemoryShare, memory_budget
from fvc_lib.services.memory_policy import MemoryObserver, NoObserver
from fvc_lib.services.run_paths import RunPaths, stage_key

T = TypeVar("T")
_MODULE = "fvc_lib.tasks.rank"
# A signal that asks for a stop ends a rank that has nothing to save yet, and has no handler for it; srun adds 128.
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_STOPPED = frozenset(
    [StoppedError.exit_code, *(-number for number in _SIGNALS), *(128 + number for number in _SIGNALS)]
)
_logger = logging.getLogger(__name__)


def on_ranks(
    paths: RunPaths,
    config: RunConfig,
    stage: str,
    fold: int | None,
    outcome: Callable[[], T | None],
    *,
    metric_log: MetricSink,
    memory: MemoryObserver | None = None,
    stop: Callable[[], bool] | None = None,
    progress: Progress | None = None,
) -> T:
    """Do the training of ``stage`` on ``config.num_ranks`` processes and wait for them.

    Inside a SLURM job that has as many tasks ``srun`` starts them, on all of its nodes; elsewhere they are children of
    this process. Each is told its part of the memory budget, and how many threads: as many as leave each core one,
    unless OMP_NUM_THREADS says otherwise. What they print goes to ``logs/<stage>[_fold_K]_ranks.log``.

    When this process goes away, however that happens, so do the ranks, within seconds where one of them is on this
    host (``rank_launcher.end_with``). No checkpoint and no outcome of theirs counts a step whose metrics were not
    handed to ``metric_log`` before.

    Args:
        paths: the run.
        config: its resolved parameters.
        stage: one of ``stage_trainings``.
        fold: of the stage, where it has folds.
        outcome: what rank 0 wrote at the end of it; None where there is nothing.
        metric_log: gets every metric that a rank tells.
        memory: told where rank 0 is.
        stop: asked again and again; True asks the ranks to save and end.
        progress: called with (steps done, steps planned).

    Raises:
        StoppedError: ``stop`` said so, or a rank was asked; everything is saved.
        RankLostError: a rank was killed.
        FvcError: what a rank gives as its reason, of the same class.
    """
    asked = begun = False
    with _started(paths, config, stage, fold) as ranks:
        reader = ReportReader(metric_log, memory or NoObserver(), progress, answer=ranks.answer)
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
    if asked and not begun:
        raise StoppedError("stopped as asked before the ranks had met: resume with run_notebooks.py --resume latest.")
    found = outcome() if not any(ranks.codes()) else None
    if found is None:
        raise _reason(reader, ranks, stage_key(stage, fold))
    return found


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


@contextmanager
def _started(paths: RunPaths, config: RunConfig, stage: str, fold: int | None) -> Iterator[RankProcesses]:
    size, store = config.num_ranks, None
    command = [sys.executable, "-m", _MODULE, str(paths.root), "--stage", stage, "--launched"]
    command += [] if fold is None else ["--fold", str(fold)]
    log = paths.logs / f"{stage_key(stage, fold)}_ranks.log"
    under_srun = in_slurm_job_with_tasks(size, os.environ)
    if under_srun:
        ranks = RankProcesses([(_srun(size) + command, _common_environment())], log, srun=True)
    else:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = _common_environment() | _shares(config)
        environments = [common | local_environment(rank, size, store.port) for rank in range(size)]
        ranks = RankProcesses([(command, environment) for environment in environments], log)
    try:
        ranks.tell(launch_from_here(config, ranks.pids if under_srun else ()).to_line())
        yield ranks
    finally:
        ranks.close()
        del store


def in_slurm_job_with_tasks(size: int, environ: Mapping[str, str]) -> bool:
    """Whether this process is in a SLURM job that was given ``size`` tasks."""
    tasks = environ.get("SLURM_NTASKS", "")
    return bool(environ.get("SLURM_JOB_ID")) and tasks.isdecimal() and int(tasks) >= size and bool(shutil.which("srun"))


def _srun(size: int) -> list[str]:
    """``--overlap``: this process may itself be a step that holds the job's resources.

    Without ``--unbuffered``, with which srun tears lines that two ranks say at once (584 of 40,000 measured, and none
    without); a line is passed on at once either way.
    """
    return ["srun", "--overlap", "--kill-on-bad-exit=1", f"--ntasks={size}", "--input=all"]


def _common_environment() -> dict[str, str]:
    """This process's, with this very package on the path."""
    path = os.pathsep.join(part for part in (str(CHECKOUT), os.environ.get("PYTHONPATH", "")) if part)
    return {**os.environ, "PYTHONPATH": path}


def _shares(config: RunConfig) -> dict[str, str]:
    """Memory and threads of one rank, of what is left beside this process."""
    size, budget = config.num_ranks, memory_budget(config.mem_gb)
    left = max(0, budget.total_bytes - psutil.Process().memory_info().rss)
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, torch.get_num_threads() // size))
    return {SHARE_VARIABLE: MemoryShare(left // size, size, budget).as_text(), "OMP_NUM_THREADS": threads}


def _reason(reader: ReportReader, ranks: RankProcesses, task_key: str) -> FvcError:
    """The first reason that is one: a rank that only lost the others knows less than they."""
    log = f"logs/{task_key}_ranks.log"
    told = sorted(reader.reasons.items(), key=lambda item: (_is_second_hand(item[1][0]), item[0]))
    codes, killed = ranks.codes(), ranks.ended_by_signal()
    only_lost = all(_is_second_hand(name) for name, _ in reader.reasons.values())
    if only_lost and any(code in _STOPPED for code in codes):
        return StoppedError("stopped as asked; resume with run_notebooks.py --resume latest.")
    if killed and only_lost:
        return RankLostError(
            f"{', '.join(killed)} (SIGKILL is most often the system's, for want of memory); the other ranks end with "
            f"it. The last checkpoint stands: give the job more memory or fewer ranks, then resume. See {log}."
        )
    if told:
        _, (name, message) = told[0]
        return error_named(name, message)
    return RankLostError(f"the ranks ended with exit codes {codes} and left no result; {log} says why.")


def _is_second_hand(name: str) -> bool:
    return name == RankLostError.__name__
