"""Several ranks of one training, started by torch's elastic launcher or over nodes by srun, and how they end.

Rank 0 writes the run's metric log itself, so no checkpoint counts a step that was not logged. Everything else that the
launching process wants to know the ranks report (``reports.py``).
"""

import json
import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait as wait_for
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch

from fvc_lib import CHECKOUT
from fvc_lib.engine.distributed.ranks import RankEndedError, RankLostError, error_named
from fvc_lib.engine.distributed.reports import (
    LAUNCH_VARIABLE,
    START_SECONDS,
    STOP,
    WATCH_SECONDS,
    Launch,
    Progress,
    ReportReader,
)
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import FvcError, StoppedError, UsageError
from fvc_lib.services.memory.policy import MemoryObserver

START_VARIABLE = "FVC_RANK_START_SECONDS"  # RANK_START_SECONDS of site.conf, in its jobs
_END_SECONDS = 15.0  # for srun, which has seen the end of every rank whose node lives
# For srun as well: a rank that ends before the others have met it leaves them waiting, while one that stopped first may
# have to wait for rank 0's checkpoint.
_ALONE_SECONDS = 300
_MOST_BYTES = 1 << 16  # of the log's end that is looked at
# What a task of srun runs: hello first, then the program that its arguments name.
_BEGIN = "from fvc_lib.engine.distributed.reports import begin_rank; begin_rank()"
# A signal that asks for a stop ends a rank that has nothing to save yet, and has no handler for it.
_STOPPED = frozenset([StoppedError.exit_code, -signal.SIGTERM, -signal.SIGUSR1])
_SIGNALS = frozenset(signal.Signals)  # those that have names
_OUT_OF_MEMORY = 253  # srun's code where SLURM killed a rank for memory: SIG_OOM in slurm.h
# Of torch's ProcessGroupNCCL, before it aborts; its name alone stands in harmless warnings too.
_WATCHDOG = re.compile(rb"[Ww]atchdog (thread terminated with exception|caught collective operation timeout)")


def run_ranks(
    module: str,
    arguments: Sequence[str],
    config: RunConfig,
    log: Path,
    *,
    attempt: int = 1,
    network: Mapping[str, str] | None = None,
    memory: MemoryObserver,
    stop: Callable[[], bool] | None = None,
    progress: Progress | None = None,
) -> None:
    """Run ``python -m module arguments`` as ``config.num_ranks`` ranks, and wait for their end.

    They are on this machine or, in a SLURM job that has several nodes, spread over these as a step of the job. Each
    computes with as many threads as leave each core one, unless OMP_NUM_THREADS says otherwise. When this process goes
    away, however that happens, the ranks end within a second, and within a minute where its machine went away.

    Args:
        module: dotted name of the ranks' program.
        arguments: its arguments.
        config: the run's parameters, handed to the ranks.
        log: what the ranks print is appended there.
        attempt: which try this is.
        network: name, file and digest of the code of what this process would train; handed to the ranks.
        memory: hears what the ranks report.
        stop: called again and again; True makes the ranks save and end.
        progress: called with (steps done, steps planned).

    Raises:
        StoppedError: ``stop`` said so, or a rank was asked; everything is saved.
        RankLostError: the node of a rank was lost, or ranks lost each other.
        RankEndedError: a rank was killed, or ended without a reason.
        FvcError: what a rank gives as its reason, of the same class.
    """
    size, stopping, begun = config.num_ranks, False, False
    start_seconds = _start_seconds()
    nodes = min(size, int(os.environ.get("SLURM_JOB_NUM_NODES", "1")))
    lost: list[int] = []  # ranks whose node is
    ended: list[int] = []  # without a word, or never begun
    log.parent.mkdir(parents=True, exist_ok=True)
    said_before = log.stat().st_size if log.is_file() else 0  # by earlier attempts
    with (
        TemporaryDirectory(prefix="fvc-ranks-") as folder,
        socket.create_server(("" if nodes > 1 else "127.0.0.1", 0), backlog=size) as server,
        ThreadPoolExecutor(2, "fvc-ranks") as pool,
    ):
        launch = Launch(
            config=config.model_dump_json(),
            port=server.getsockname()[1],
            token=secrets.token_hex(),
            log="" if nodes > 1 else str(log),
            attempt=attempt,
            pid=os.getpid(),
            network=network,
            several_nodes=nodes > 1,
            # As a batch script is, and salloc's shell is not.
            at_first_node=nodes == 1 or "SLURMD_NODENAME" in os.environ,
        )
        begin = partial(_run_step, nodes, size, log) if nodes > 1 else partial(_run_agent, size, folder)
        reader = ReportReader(server, launch.token, size, memory, progress, start_seconds)
        with _environment(_for_ranks(launch, -(-size // nodes))):
            agent, over = pool.submit(begin, [module, *arguments]), threading.Event()
            try:
                if nodes > 1:
                    pool.submit(reader.beat, over)
                while not agent.done():
                    if not stopping and stop is not None and stop():
                        stopping, begun = True, len(reader.ready) == size
                        if not begun:  # they have nothing to save, and may be waiting for one that does not come
                            _kill_ranks(module, agent)
                        reader.send(STOP)
                    reader.take(WATCH_SECONDS)
                    if nodes > 1 and (ended := reader.ended()) + (silent := reader.silent()):
                        reader.close()  # by which all ranks end that live
                        if silent or not wait_for([agent], timeout=_END_SECONDS).done:
                            lost = silent + ended
                            _forget_step(module)
                        break
            finally:
                over.set()
                _kill_ranks(module, agent)
            while reader.take(0):
                pass
            reader.close()
    if lost:
        raise RankLostError(
            f"{_how_lost(lost, reader, start_seconds)} The other ranks were ended. The last checkpoint stands: resume, "
            f"as a job does by itself. See {log}."
        )
    if stopping and not begun:
        raise StoppedError("stopped as asked before the ranks had met; resume the run to go on.")
    codes = agent.result()
    if codes and nodes > 1 and (first := [*reader.gone, *ended]):
        codes = {first[0]: codes[0]}
    if codes:
        raise _reason(reader.reasons, codes, log, said_before)


def _start_seconds() -> float:
    """How long a rank on another node may take to start: ``FVC_RANK_START_SECONDS``, else ``START_SECONDS``.

    Raises:
        UsageError: that is no number of seconds.
    """
    text = os.environ.get(START_VARIABLE) or str(START_SECONDS)
    if not re.fullmatch(r"\d+(\.\d+)?", text) or float(text) < 1:
        raise UsageError(
            f"{START_VARIABLE} (RANK_START_SECONDS of site.conf): got {text!r}, wanted seconds, at least 1."
        )
    return float(text)


def _how_lost(ranks: Sequence[int], reader: ReportReader, start_seconds: float) -> str:
    where = ", ".join(f"rank {rank} on {reader.nodes.get(rank, 'another node')}" for rank in ranks)
    if any(rank in reader.ready for rank in ranks):
        return f"{where}: gone without a word, and SLURM does not say how; the node is lost, it seems."
    return (
        f"{where}: gone without a word before it was ready. Either the node is lost, or starting Python or importing "
        f"torch takes more than {start_seconds:g} s there, as from a slow file system: then give it more by "
        f"RANK_START_SECONDS of site.conf ({START_VARIABLE})."
    )


def _run_step(nodes: int, size: int, log: Path, command: list[str]) -> dict[int, int]:
    """As ``_run_agent`` for ranks on several nodes of this job; which rank it was, srun's exit code does not say."""
    step = [
        "srun", f"--nodes={nodes}", f"--ntasks={size}", f"--ntasks-per-node={-(-size // nodes)}",
        "--distribution=block", "--overlap", "--kill-on-bad-exit=0", f"--wait={_ALONE_SECONDS}", "--input=none",
        "--mpi=none",
    ]  # fmt: skip
    with log.open("ab") as stream:
        try:
            whole = [*step, sys.executable, "-c", _BEGIN, *command]
            done = subprocess.run(whole, stdout=stream, stderr=stream, check=False)
        except FileNotFoundError as error:
            raise UsageError(f"ranks on {nodes} nodes are started by srun, which is not found here.") from error
    code = done.returncode
    if code == _OUT_OF_MEMORY:
        return {0: -signal.SIGKILL}
    return {0: 128 - code if code - 128 in _SIGNALS else code} if code else {}


def _run_agent(size: int, folder: str, command: list[str]) -> dict[int, int]:
    """Exit codes by rank where any rank failed, those that failed first before the others; empty where none did."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs  # a quarter of a second to import
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # What it logs of failures and signals stands in the reason, in plain words.
    its_logger = logging.getLogger("torch.distributed.elastic")
    its_logger.addHandler(logging.NullHandler())
    its_logger.propagate = False
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=folder),
    )
    try:
        elastic_launch(config, sys.executable)("-m", *command)
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    return {}


def _for_ranks(launch: Launch, beside: int) -> dict[str, str]:
    """Environment variables of the ranks: this very package on the path, and their share of a machine's threads."""
    path = os.pathsep.join(part for part in (str(CHECKOUT), os.environ.get("PYTHONPATH", "")) if part)
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, torch.get_num_threads() // beside))
    return {LAUNCH_VARIABLE: json.dumps(asdict(launch)), "PYTHONPATH": path, "OMP_NUM_THREADS": threads}


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _kill_ranks(module: str, agent: Future[Any]) -> None:
    """Kill what still runs of the ranks, until their agent has seen all of them end."""
    while not agent.done():
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if module in child.cmdline():
                    child.kill()
        wait_for([agent], timeout=WATCH_SECONDS)


def _forget_step(module: str) -> None:
    """Kill srun with its watcher, which would have SLURM kill the step on the lost node as well.

    SLURM says that again and again until the node is back: to the restarted job's step, whose number is the same.
    """
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if module in child.cmdline():
                for each in [*child.children(recursive=True), child]:
                    each.kill()


def _reason(
    reasons: Mapping[int, tuple[str, str]], codes: Mapping[int, int], log: Path, said_before: int = 0
) -> FvcError | StoppedError:
    """The first reason that is one: a rank that only lost the others knows less than they.

    The first ``said_before`` bytes of ``log`` are not these ranks'.
    """
    known = [reason for _, reason in sorted(reasons.items()) if reason[0] != RankLostError.__name__]
    if known:
        return error_named(*min(known, key=lambda reason: reason[0] == StoppedError.__name__))
    if next(iter(codes.values())) in _STOPPED:
        return StoppedError("stopped as asked; resume the run to go on.")
    # With SIGTERM torch's agent ends the others.
    ended = {rank: -code for rank, code in codes.items() if -code in _SIGNALS - {signal.SIGTERM}}
    said = log.read_bytes()[said_before:][-_MOST_BYTES:] if signal.SIGABRT in ended.values() and log.is_file() else b""
    if _WATCHDOG.search(said):
        return RankLostError(f"nccl gave up an exchange between GPUs. The last checkpoint stands: resume. See {log}.")
    killed = [f"rank {rank} was ended by {signal.Signals(number).name}" for rank, number in ended.items()]
    if killed:
        return RankEndedError(
            f"{', '.join(killed)} (SIGKILL is most often the system's, for want of memory); the other ranks end with "
            f"it. The last checkpoint stands: give the job more memory or fewer ranks, then resume. See {log}."
        )
    if reasons:  # nobody ended, and they have lost each other
        return RankLostError(next(iter(reasons.values()))[1])
    return RankEndedError(f"the ranks ended with exit codes {dict(codes)} and gave no reason; {log} says why.")
