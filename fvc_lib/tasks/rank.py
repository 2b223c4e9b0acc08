"""One rank of one training: ``python -m fvc_lib.tasks.rank RUN_DIR --fold K`` or ``--stage NAME``."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import torch

from fvc_lib.engine.device import resolve_device
from fvc_lib.engine.distributed.launch import (
    Progress,
    RankPlace,
    RankReports,
    WarningsToReports,
    end_with,
    loopback,
    rank_place,
    read_launch,
    take_over_stdout,
)
from fvc_lib.engine.distributed.processes import ProcessRanks
from fvc_lib.engine.distributed.ranks import OneRank, Ranks
from fvc_lib.engine.watching import MetricSink, NoMetrics
from fvc_lib.services.config import RunConfig, read_params_file, resolve_config
from fvc_lib.services.errors import FvcError, UsageError
from fvc_lib.services.memory_budget import SHARE_VARIABLE, MemoryShare, memory_budget
from fvc_lib.services.memory_policy import MemoryObserver, NoObserver
from fvc_lib.services.memory_sampler import MemorySampler
from fvc_lib.services.metric_log import MetricLog
from fvc_lib.services.run_paths import RunPaths, stage_key
from fvc_lib.services.tasks import FOLD_TRAINING, TASKS, TRAINING_STAGES

_ATTEMPT_VARIABLE = "FVC_STAGE_ATTEMPT"
_PROGRESS_SECONDS = 10.0
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Told:
    """Where a rank's news goes."""

    metrics: MetricSink
    memory: MemoryObserver
    progress: Progress | None


def training_of(stage: str) -> Callable[..., Any]:
    """``train(paths, config, fold, *, metric_log, attempt, memory, stop, progress, ranks)``, as ``train_fold``."""
    task = next(task for task in TASKS.values() if task.training_stage.name == stage)
    train: Callable[..., Any] = getattr(import_module(task.training_stage.training_module), task.trainer)
    return train


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--fold", type=click.IntRange(0), help="The outer fold to train, from 0; of 04_fold_training alone.")
@click.option(
    "--stage", type=click.Choice(TRAINING_STAGES), default=FOLD_TRAINING, show_default=True, help="What to train."
)
@click.option("--launched", is_flag=True, hidden=True)
def main(run_dir: Path, fold: int | None, stage: str, launched: bool) -> None:
    r"""Do one training of the run in RUN_DIR on several processes, ranks, that share every effective batch.

    The run must have what the training reads: for a fold the folds and clips (stages 01 to 03), for the other tasks the
    index that their notebook begins with. What is written is what the notebook's training writes: checkpoints,
    predictions, the metric log and the memory log, all by rank 0. Weights are equal to a single process's up to
    rounding (1e-6), scores of given weights to the bit. Stop it with SIGTERM or SIGUSR1 to any rank: all save and end
    with 75; the same command goes on from there, also with another number of ranks.

    \b
    Two ranks on this machine:
      torchrun --standalone --nproc-per-node 2 -m fvc_lib.tasks.rank RUN_DIR --fold 0
    As a step of a SLURM job, one rank per task, one GPU each:
      srun --ntasks 8 --gpus-per-task 1 --kill-on-bad-exit=1 \
          python -m fvc_lib.tasks.rank RUN_DIR --fold 0
    In one process:
      python -m fvc_lib.tasks.rank RUN_DIR --fold 0

    Within a whole run none of this is needed: `run_notebooks.py -p num_ranks 2` has notebook 04 start its own ranks.

    \b
    Read: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT (torchrun sets them); else
    SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_STEP_NODELIST, SLURM_JOB_ID, SLURM_STEP_ID (srun does).
    Gradients travel by nccl between GPUs and by gloo between CPUs. Threads per rank are OMP_NUM_THREADS, which
    torchrun sets to 1 where it is not set.

    Exit codes: 0 done, 1 an error, 2 usage, 3 data, 75 stopped and saved.
    """
    if (fold is None) == (stage == FOLD_TRAINING):
        raise click.UsageError(f"--fold: {FOLD_TRAINING} needs one, and no other stage has any.")
    code = _run(run_dir.absolute(), stage, fold, launched)
    logging.shutdown()
    sys.stderr.flush()
    # Past what torch does at a regular end: a group that has lost a rank may wait for it there.
    os._exit(code) if code else sys.exit()


def _run(run_dir: Path, stage: str, fold: int | None, launched: bool) -> int:
    """The exit code."""
    asked: list[int] = []
    reports: RankReports | None = None
    try:
        place = rank_place()
        logging.basicConfig(level=logging.INFO, format=f"rank {place.rank}: %(levelname)s: %(message)s")
        paths = RunPaths(run_dir)
        if launched:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever launched this one decides
            reports = RankReports(place.rank, take_over_stdout())
            launch = read_launch()
            config = launch.config
            end_with(launch, reports.hear)
        else:
            config = resolve_config(read_params_file(paths.params_yaml), environ={})
        _take_share(place, config, shared_already=launched and "RANK" in os.environ)
        with _joined(place, config, reports) as ranks, _told(place, paths, (stage, fold), config, reports) as told:
            # Until here a signal ends the process: there was nothing to save, and a rank might wait for another.
            for number in (signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, lambda number, frame: asked.append(number))
            if reports is not None:
                reports.ready()
            training_of(stage)(
                paths, config, fold, metric_log=told.metrics, memory=told.memory, progress=told.progress,
                stop=lambda: bool(asked), ranks=ranks,
            )  # fmt: skip
    except FvcError as error:
        _logger.error("%s", error)
        _report(reports, error)
        return error.exit_code
    except BaseException as error:
        _logger.exception("an error that this program does not know")
        _report(reports, error)
        if isinstance(error, (SystemExit, KeyboardInterrupt)):
            return 1
        raise
    return 0


def _report(reports: RankReports | None, error: BaseException) -> None:
    if reports is not None:
        reports.failed(error)


def _take_share(place: RankPlace, config: RunConfig, *, shared_already: bool) -> None:
    """Of main memory, with the other ranks on this machine."""
    if place.local_size > 1 and not shared_already:
        budget = memory_budget(config.mem_gb)
        share = MemoryShare(budget.total_bytes // place.local_size, place.local_size, budget)
        os.environ[SHARE_VARIABLE] = share.as_text()


@contextmanager
def _joined(place: RankPlace, config: RunConfig, reports: RankReports | None) -> Iterator[Ranks]:
    """The ranks together; each on a GPU of its own where there are any.

    Raises:
        UsageError: two ranks would share a GPU, or the device has no way between ranks.
        RankLostError: the others did not come.
    """
    on_cuda = config.device in ("auto", "cuda") and torch.cuda.is_available()
    if on_cuda:
        # SLURM may have bound this task to one GPU, which then is number 0.
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    if place.size == 1:
        yield OneRank()
        return
    if resolve_device(config.device, config.amp).device.type == "mps":
        raise UsageError("ranks: a Mac has one GPU. Train with num_ranks 1, or with device cpu.")
    os.environ.update(MASTER_ADDR=place.address, MASTER_PORT=str(place.port))
    if place.local_size == place.size:
        os.environ.update(loopback())
    settle = reports.settle if reports is not None else None
    ranks = ProcessRanks(place.rank, place.size, cuda=on_cuda, settle=settle)
    with ranks.telling():
        if on_cuda:
            _refuse_shared_gpu(ranks)
        yield ranks
    ranks.close()


def _refuse_shared_gpu(ranks: Ranks) -> None:
    """Nccl would only say that something is invalid."""
    gpus = ranks.everyone("gpus", str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))
    if len(set(gpus)) < len(gpus):
        raise UsageError(
            f"ranks: {len(gpus)} of them came to {len(set(gpus))} GPUs. Start one rank per GPU "
            "(srun --gpus-per-task 1, torchrun --nproc-per-node with the number of GPUs), or train with device cpu."
        )


@contextmanager
def _told(
    place: RankPlace,
    paths: RunPaths,
    trained: tuple[str, int | None],
    config: RunConfig,
    reports: RankReports | None,
) -> Iterator[_Told]:
    """To the launcher; without one rank 0 writes the run's logs itself."""
    if reports is not None:
        logging.getLogger("fvc_lib").addHandler(WarningsToReports(reports))
        yield _Told(reports, reports, reports.progress)
        return
    if place.rank:
        yield _Told(NoMetrics(), NoObserver(), None)
        return
    with ExitStack() as stack:
        memory = stack.enter_context(
            MemorySampler(paths.memory(*trained), events=paths.memory_events(*trained), mem_gb=config.mem_gb)
        )
        attempt = int(os.environ.get(_ATTEMPT_VARIABLE, "1"))
        log = MetricLog(
            paths.metrics(*trained), run_id=paths.run_id, fold=trained[1], attempt=attempt, on_trouble=memory.disk_full
        )
        yield _Told(stack.enter_context(log), memory, _lines_of_progress(stage_key(*trained)))


def _lines_of_progress(task_key: str) -> Progress:
    last = time.monotonic()

    def tell(done: int, planned: int) -> None:
        nonlocal last
        if done == planned or time.monotonic() - last >= _PROGRESS_SECONDS:
            last = time.monotonic()
            _logger.info("%s: %d of %d steps", task_key, done, planned)

    return tell


if __name__ == "__main__":
    main()
