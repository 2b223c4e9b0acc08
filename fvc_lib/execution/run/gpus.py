"""Share out GPUs: how many trainings run at once, with how many ranks, and which GPUs a training gets.

A rank is one of the processes that share a training. Every rank gets a GPU.
"""

import os
import sys
from itertools import takewhile

from fvc_lib.execution.run.record import gpus
from fvc_lib.services.config import RunConfig
from fvc_lib.services.isolated_workers import available_cores
from fvc_lib.services.memory import memory_budget

# Training a fold of the built-in networks takes 0.6 to 1 GB.
FOLD_BYTES = 2_000_000_000


def folds_at_once(config: RunConfig) -> int:
    """Return how many folds to train at once on this machine by default, at least 1.

    On CPUs every rank (process of a training) needs a core, and every fold needs 2 GB of memory. On GPUs every rank
    needs a GPU. The number is never larger than the run's number of trainings.
    """
    if on_gpu(config):
        at_most = most_of_ranks_at_once(config) or len(visible_gpus()) // config.num_ranks
        return max(1, min(at_most, config.num_trainings))
    affordable = memory_budget(config.mem_gb).total_bytes // FOLD_BYTES
    return max(1, min(available_cores() // config.num_ranks, config.num_trainings, affordable))


def on_gpu(config: RunConfig) -> bool:
    """Return whether trainings with ``config`` use a GPU.

    With ``device auto`` this is a guess from the system's GPUs, because torch is not loaded.
    """
    return config.device != "cpu" and (config.device != "auto" or sys.platform == "darwin" or bool(visible_gpus()))


def training_gpus(config: RunConfig) -> list[str]:
    """Return the names of the GPUs that the trainings of a run with ``config`` share.

    A name is a number such as ``0``, or another name that CUDA_VISIBLE_DEVICES has for a GPU. The list is empty if the
    trainings use no GPU. Models on precomputed features use none.
    """
    return visible_gpus() if on_gpu(config) and not config.of_features else []


def visible_gpus() -> list[str]:
    """Return the names of the GPUs that trainings may use, as in the variable CUDA_VISIBLE_DEVICES.

    If the variable is not set, these are the numbers of all GPUs of the machine. As in CUDA, the list ends before the
    first invalid name. Invalid are an empty name, ``-1`` and ``NoDevFiles``, which SLURM writes for jobs without GPUs.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(number) for number in range(len(gpus()))]
    return list(takewhile(lambda name: name not in {"", "-1", "NoDevFiles"}, map(str.strip, named.split(","))))


def most_of_ranks_at_once(config: RunConfig) -> int | None:
    """Return how many trainings may run at once so that every rank has a GPU of its own; None: no limit.

    A rank is a process of a training. There is no limit if a training has one rank or uses no GPU. The number is at
    least 1. It is 1 in a SLURM job with several nodes, because the ranks of a training are spread over all nodes.
    """
    here = training_gpus(config)
    if config.num_ranks < 2 or not here:
        return None
    return 1 if int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) > 1 else max(1, len(here) // config.num_ranks)
