"""One rank of one training: ``python -m fvc_lib.tasks.rank RUN_DIR --fold K`` or ``--stage NAME``."""

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import psutil
import torch

from fvc_lib.engine.device import resolve_device
from fvc_lib.engine.distributed.ranks import ProcessRanks, RankLostError, RankPlace, Ranks, loopback, rank_place
from fvc_lib.engine.distributed.reports import Launch, Progress, RankReports, end_with_parent, reports_of
from fvc_lib.engine.training_state import MetricSink, NoMetrics
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import FvcError, StoppedError, UsageError
from fvc_lib.services.memory.budget import SHARERS_VARIABLE, memory_sharers
from fvc_lib.services.memory.policy import MemoryObserver, NoObserver
from fvc_lib.services.parameters import read_params_file, resolve_config
from fvc_lib.services.run_paths import ATTEMPT_VARIABLE, RunPaths, stage_key
from fvc_lib.services.stage_logs import MemorySampler, MetricLog
from fvc_lib.services.tasks import FOLD_TRAINING, TASKS, TRAINING_STAGES

_PROGRESS_SECONDS = 10.0
_logger = logging.getLogger(__name__)


def training_of(stage: str) -> Callable[..., Any]:
    """``train(paths, config, fold, *, metric_log, attempt, memory, stop, progress, ranks)``, as ``train_fold``."""
    task = next(task for task in TASKS.values() if stage in {each.name for each in task.stages if each.trains})
    train: Callable[..., Any] = getattr(import_module(task.training_stage.training_module), task.trainer)
    return train


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--fold", type=click.IntRange(0), help="The outer fold to train, from 0; of 04_fold_training alone.")
@click.option(
    "--stage", type=click.Choice(TRAINING_STAGES), default=FOLD_TRAINING, show_default=True, help="What to train."
)
def main(run_dir: Path, fold: int | None, stage: str) -> None:
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
    The same by torchrun, one per node; HOST is the first one's name:
      srun --ntasks-per-node 1 torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-id $SLURM_JOB_ID \
          --rdzv-endpoint HOST:29500 -m fvc_lib.tasks.rank RUN_DIR --fold 0
    In one process:
      python -m fvc_lib.tasks.rank RUN_DIR --fold 0

    Within a whole run none of this is needed: `run_notebooks.py -p num_ranks 2` has notebook 04 start its own ranks,
    over the nodes of its SLURM job where that has several.

    \b
    Read: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT (torchrun sets them); else
    SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_STEP_NODELIST, SLURM_JOB_ID, SLURM_STEP_ID (srun does).
    Gradients travel by nccl between GPUs and by gloo between CPUs. Threads per rank are OMP_NUM_THREADS, which
    torchrun sets to 1 where it is not set.

    Exit codes: 0 done, 1 an error, 2 usage, 3 data, 75 stopped and saved.
    """
    if (fold is None) == (stage == FOLD_TRAINING):
        raise click.UsageError(f"--fold: {FOLD_TRAINING} needs one, and no other stage has any.")
    code = _run(run_dir.absolute(), stage, fold)
    logging.shutdown()
    sys.stderr.flush()
    # Past what torch does at a regular end: a group that has lost a rank may wait for it there.
    os._exit(code) if code else sys.exit()


def _run(run_dir: Path, stage: str, fold: int | None) -> int:
    signals: list[int] = []
    reports: RankReports | None = None
    launch = Launch.of_environment()
    try:
        place = rank_place()
        if launch and launch.several_nodes and launch.at_first_node:
            place = replace(place, address=launch.address)  # which rank 0 is at; a node's name need not resolve
        reports = _begin(place, launch)
        paths = RunPaths(run_dir)
        params = RunConfig.model_validate_json(launch.config) if launch else None
        config = params or resolve_config(read_params_file(paths.params_yaml), environ={})
        _take_share(place, launch)
        attempt = launch.attempt if launch else int(os.environ.get(ATTEMPT_VARIABLE, "1"))
        with (
            _joined(place, config) as ranks,
            _logs(place, paths, (stage, fold), config, attempt, reports) as (metrics, memory, progress),
        ):
            # Until here a signal ends the process: there was nothing to save, and a rank might wait for another.
            for number in (signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, lambda number, frame: signals.append(number))
            if reports is not None:
                reports.ready()
            training_of(stage)(
                paths, config, fold, metric_log=metrics, memory=memory, progress=progress, stop=lambda: bool(signals),
                ranks=ranks, begun_with=launch.network if launch else None,
            )  # fmt: skip
    except (FvcError, StoppedError) as error:
        _logger.error("%s", error)
        if reports is not None:
            reports.failed(error)
        return 1 if isinstance(error, RankLostError) else error.exit_code
    except BaseException as error:
        _logger.exception("an error that this program does not know")
        if reports is not None:
            reports.failed(error)
        return 1
    return 0


def _begin(place: RankPlace, launch: Launch | None) -> RankReports | None:
    """Set up logging, and what ties this rank to the process that started it."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"[rank {place.rank}] %(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    if launch is None:
        if "TORCHELASTIC_RUN_ID" in os.environ:  # else whoever started this one may go away: a shell, say
            end_with_parent(os.getppid())
        return None
    if launch.log:
        log = os.open(launch.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        for stream in (1, 2):
            os.dup2(log, stream)
    reports = reports_of(place.rank, launch)
    logging.getLogger("fvc_lib").addHandler(reports)
    return reports


def _take_share(place: RankPlace, launch: Launch | None) -> None:
    """Share the memory budget with the other ranks of this machine, and with their starter where it runs here."""
    starter = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
    if launch is not None:
        starter = launch.pid if launch.at_first_node and place.rank == place.local_rank else None
    if place.local_size > 1 or (starter is not None and place.size > 1):
        here = place.local_size + (starter is not None)
        os.environ[SHARERS_VARIABLE] = str(here * memory_sharers())


@contextmanager
def _joined(place: RankPlace, config: RunConfig) -> Iterator[Ranks]:
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
        yield Ranks()
        return
    if resolve_device(config.device, config.amp).device.type == "mps":
        raise UsageError("ranks: a Mac has one GPU. Train with num_ranks 1, or with device cpu.")
    os.environ.update(MASTER_ADDR=place.address, MASTER_PORT=str(place.port))
    if place.local_size == place.size:
        os.environ.update(loopback())
    elif launcher := os.environ.get("SLURM_LAUNCH_NODE_IPADDR"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _device_to(launcher))
    ranks = ProcessRanks(place.rank, place.size, cuda=on_cuda)
    with ranks.telling():
        if on_cuda:
            _refuse_shared_gpu(ranks)
        yield ranks
    ranks.close()


def _device_to(address: str) -> str:
    """The network device that leads to ``address``, where gloo by itself takes what this machine's name resolves to."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        own = probe.getsockname()[0]
    devices = psutil.net_if_addrs().items()
    return next(name for name, addresses in devices if own in {each.address for each in addresses})


def _refuse_shared_gpu(ranks: Ranks) -> None:
    """Nccl would only say that something is invalid."""
    gpus = ranks.everyone("gpus", str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))
    if len(set(gpus)) < len(gpus):
        raise UsageError(
            f"ranks: {len(gpus)} of them came to {len(set(gpus))} GPUs. Start one rank per GPU "
            "(srun --gpus-per-task 1, torchrun --nproc-per-node with the number of GPUs), or train with device cpu."
        )


@contextmanager
def _logs(
    place: RankPlace,
    paths: RunPaths,
    trained: tuple[str, int | None],
    config: RunConfig,
    attempt: int,
    reports: RankReports | None,
) -> Iterator[tuple[MetricSink, MemoryObserver, Progress | None]]:
    """Where metrics, memory and progress go. The memory log is the launching process's, which sees all ranks."""
    if place.rank:
        yield NoMetrics(), reports or NoObserver(), None
        return
    with ExitStack() as stack:
        sampler = reports or stack.enter_context(
            MemorySampler(paths.memory(*trained), events=paths.memory_events(*trained), mem_gb=config.mem_gb)
        )
        log = MetricLog(
            paths.metrics(*trained), run_id=paths.run_id, fold=trained[1], attempt=attempt, on_trouble=sampler.disk_full
        )
        progress = reports.progress if reports else _lines_of_progress(stage_key(*trained))
        yield stack.enter_context(log), sampler, progress


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
