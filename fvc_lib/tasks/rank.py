"""Run one rank (one of several processes that share a training).

The command is ``python -m fvc_lib.tasks.rank RUN_DIR --fold K`` or ``--stage NAME``.
"""

import logging
import os
import signal
import sys
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

import click
import torch

from fvc_lib.engine.rank_processes import Launch, RankFile, RankPlace, rank_place
from fvc_lib.engine.ranks import ProcessRanks, RankLostError
from fvc_lib.engine.training_state import MetricSink, NoMetrics
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import FvcError, StoppedError
from fvc_lib.services.memory import SHARERS_VARIABLE, MemoryObserver, NoObserver, memory_sharers
from fvc_lib.services.parameters import run_config
from fvc_lib.services.run_paths import ATTEMPT_VARIABLE, RunPaths
from fvc_lib.services.stage_logs import MemorySampler, MetricLog
from fvc_lib.services.tasks import FOLD_TRAINING, TASKS, TRAINING_STAGES

_logger = logging.getLogger(__name__)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--fold", type=click.IntRange(0), help="The outer fold to train, from 0; only for 04_fold_training.")
@click.option(
    "--stage", type=click.Choice(TRAINING_STAGES), default=FOLD_TRAINING, show_default=True, help="What to train."
)
def main(run_dir: Path, fold: int | None, stage: str) -> None:
    r"""Train one fold or stage of the run in RUN_DIR on several processes, ranks, that share every effective batch.

    The run must have the training's input: folds and clips (stages 01 to 03) for a fold of task video, the index for
    another task. Rank 0 writes the same files as the notebook: checkpoints, predictions, the metric log and the memory
    log. The trained weights equal those of a single process up to rounding (1e-6). With the same weights, the scores
    are equal to the bit. SIGTERM or SIGUSR1 to any rank saves the training, and all ranks exit with 75. The same
    command continues it, also with another number of ranks.

    \b
    Two ranks on this machine:
      torchrun --standalone --nproc-per-node 2 -m fvc_lib.tasks.rank RUN_DIR --fold 0
    As a step of a SLURM job, one rank per task, one GPU each:
      export MASTER_ADDR=$(scontrol show hostnames | head -1) MASTER_PORT=29500
      srun --ntasks 8 --gpus-per-task 1 --kill-on-bad-exit=1 \
          python -m fvc_lib.tasks.rank RUN_DIR --fold 0
    The same by torchrun, one per node:
      srun --ntasks-per-node 1 torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-id $SLURM_JOB_ID \
          --rdzv-endpoint $MASTER_ADDR:29500 -m fvc_lib.tasks.rank RUN_DIR --fold 0

    A whole run needs none of this: with `run_notebooks.py -p num_ranks 2` notebook 04 starts its own ranks, over the
    nodes of its SLURM job if that has several.

    \b
    Read: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE (set by torchrun), else SLURM_PROCID, SLURM_NTASKS,
    SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE (set by srun); MASTER_ADDR, MASTER_PORT; OMP_NUM_THREADS, which torchrun
    sets to 1 where it is not set. Gradients travel by nccl between GPUs and by gloo between CPUs; gloo needs
    GLOO_SOCKET_IFNAME on nodes whose own name does not resolve to their network address.

    Exit codes: 0 done, 1 an error, 2 usage, 3 data, 75 stopped and saved.
    """
    if (fold is None) == (stage == FOLD_TRAINING):
        raise click.UsageError(f"--fold: {FOLD_TRAINING} needs one, and no other stage has any.")
    code = _run(run_dir.absolute(), stage, fold)
    logging.shutdown()
    sys.stderr.flush()
    # Skip torch's regular end after a failure: a group that has lost a rank may wait for it there.
    os._exit(code) if code else sys.exit()


def _run(run_dir: Path, stage: str, fold: int | None) -> int:
    signals: list[int] = []
    file: RankFile | None = None
    launch = Launch.of_environment()
    try:
        place = rank_place()
        logging.basicConfig(level=logging.INFO, format=f"[rank {place.rank}] %(levelname)s: %(message)s")
        if launch is not None:
            file = RankFile(launch.log, place.rank)
        paths = RunPaths(run_dir)
        config = RunConfig.model_validate_json(launch.config) if launch else run_config(paths.params_yaml)
        attempt = launch.attempt if launch else int(os.environ.get(ATTEMPT_VARIABLE, "1"))
        # The memory budget is that of all ranks on this machine and of the process that started them.
        sharers = place.local_size + (launch is not None)
        os.environ[SHARERS_VARIABLE] = str(sharers * memory_sharers())
        metrics: MetricSink = NoMetrics()
        memory: MemoryObserver = file or NoObserver()
        ranks = _joined(place, config)
        with ExitStack() as opened:
            opened.enter_context(ranks.sharing_errors())
            if not place.rank:  # only rank 0 writes metrics
                log = MetricLog(paths.metrics(stage, fold), run_id=paths.run_id, fold=fold, attempt=attempt)
                metrics = opened.enter_context(log)
            if not (place.rank or launch):  # else the process that started the ranks watches the memory of all of them
                events = paths.memory_events(stage, fold)
                memory = opened.enter_context(
                    MemorySampler(paths.memory(stage, fold), events=events, mem_gb=config.mem_gb)
                )
            # Before this a signal ends the process: there is nothing to save, and a rank might wait for another.
            for number in (signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, lambda number, frame: signals.append(number))
            task = next(task for task in TASKS.values() if stage in {part.name for part in task.stages if part.trains})
            getattr(import_module(task.training_stage.training_module), task.trainer)(
                paths, config, fold, metric_log=metrics, memory=memory, ranks=ranks,
                stop=lambda: bool(signals) or (launch is not None and launch.stop.exists()),
                progress=file.progress if file and not place.rank else None,
                begun_with=launch.network if launch else None,
            )  # fmt: skip
        ranks.close()
        if file is not None:
            file.ended(None)
    except BaseException as error:
        known = isinstance(error, FvcError | StoppedError)
        _logger.error("%s", error, exc_info=None if known else error)
        if file is not None:
            file.ended(error)
        # A lost rank is a consequence; the code of the rank that failed first decides.
        return getattr(error, "exit_code", 1) if known and not isinstance(error, RankLostError) else 1
    return 0


def _joined(place: RankPlace, config: RunConfig) -> ProcessRanks:
    """Join the other ranks (processes that share the training) and return the group.

    On CUDA every rank of a machine uses a different GPU, as far as there are enough.

    Args:
        place: number of this rank, and the number of ranks in all and on this machine.
        config: names the device.

    Raises:
        RankLostError: the other ranks did not join in time.
    """
    on_cuda = config.device in ("auto", "cuda") and torch.cuda.is_available()
    if on_cuda:
        # SLURM may have bound this task to one GPU, which then is number 0.
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    if place.local_size == place.size:  # the machine's own name need not resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    os.environ.setdefault("MASTER_ADDR", os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1"))
    return ProcessRanks(place.rank, place.size, cuda=on_cuda)


if __name__ == "__main__":
    main()
