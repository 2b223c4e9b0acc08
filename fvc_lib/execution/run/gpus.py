"""The GPUs that trainings may use: how many trainings run at once, with how many ranks, and which GPUs each gets.

``num_ranks auto`` becomes a number here, once, when a run is made: T trainings at once and G GPUs give one GPU to each
where T is not less than G, else G // T ranks to each, every rank with a GPU of its own.
"""

import os
import sys
from collections.abc import Sequence
from itertools import takewhile

from fvc_lib.execution.run.record import gpus
from fvc_lib.services.config import RunConfig
from fvc_lib.services.config_fields import AUTO_RANKS
from fvc_lib.services.isolated_workers import available_cores
from fvc_lib.services.memory.budget import memory_budget
from fvc_lib.services.tasks import TASKS

# A fold of the built-in networks takes 0.6 to 1 GB. Where a measured step takes more, fewer train at once.
FOLD_BYTES = 2_000_000_000


def folds_at_once(config: RunConfig) -> int:
    """Return the default number of folds to train at once: one per core while each has ``FOLD_BYTES``.

    On GPUs as many as get one each, or one for each of their ranks.
    """
    if not config.use_mlops_pipeline:
        return 1
    if on_gpu(config):
        at_most = most_of_ranks_at_once(config) or len(visible_gpus()) // config.num_ranks
        return max(1, min(at_most, config.num_trainings))
    affordable = memory_budget(config.mem_gb).total_bytes // FOLD_BYTES
    return max(1, min(available_cores() // config.num_ranks, config.num_trainings, affordable))


def on_gpu(config: RunConfig) -> bool:
    """Return whether trainings of these parameters use a GPU, as far as that is known without torch."""
    return config.device != "cpu" and (config.device != "auto" or sys.platform == "darwin" or bool(visible_gpus()))


def training_gpus(config: RunConfig) -> list[str]:
    """Return the GPUs that trainings of these parameters share; none if they train elsewhere."""
    return visible_gpus() if on_gpu(config) and not config.of_features else []


def visible_gpus() -> list[str]:
    """Return the GPUs that trainings may use, as CUDA_VISIBLE_DEVICES names them; without it the numbers of all.

    As for CUDA, nothing counts after a name that means none; SLURM writes NoDevFiles for a job without GPUs.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(number) for number in range(len(gpus()))]
    return list(takewhile(lambda name: name not in {"", "-1", "NoDevFiles"}, map(str.strip, named.split(","))))


def most_of_ranks_at_once(config: RunConfig) -> int | None:
    """Return how many trainings of several ranks may run at once without sharing a GPU; None: any number.

    In a SLURM job of several nodes the ranks of each training are spread over all of these: one goes at a time.
    """
    here = training_gpus(config)
    if config.num_ranks < 2 or not here:
        return None
    return 1 if job_nodes() > 1 else max(1, len(here) // config.num_ranks)


def gpu_groups(of: Sequence[str], num_ranks: int) -> list[tuple[str, ...]]:
    """Return ``of`` in groups of ``num_ranks`` neighbours, one for each training; no GPU is in two of them."""
    return [tuple(of[start : start + num_ranks]) for start in range(0, len(of) - num_ranks + 1, num_ranks)]


def job_nodes() -> int:
    """Return the number of nodes of this process's SLURM job; 1 outside one."""
    return int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))


def trainings_at_once(config: RunConfig, jobs: int | None = None) -> int:
    """Return how many trainings run at the same time if there are GPUs enough; ``jobs`` as in ``--jobs``."""
    fans_out = config.use_mlops_pipeline and TASKS[config.task].training_stage.per_fold
    most = config.num_trainings if fans_out else 1
    return min(jobs or most, most)


def ranks_chosen_here(config: RunConfig, jobs: int | None = None) -> tuple[RunConfig, str]:
    """Replace ``num_ranks auto`` by a number for this machine or job; return the reason as a sentence.

    A given number stays, without a sentence.
    """
    if config.num_ranks != AUTO_RANKS:
        return config, ""
    here, at_once, nodes = training_gpus(config), trainings_at_once(config, jobs), job_nodes()
    named = f"{len(here)} GPU{'s' * (len(here) > 1)} here ({','.join(here)})"
    if not here:
        return _chosen(config, 1, "no GPU is here, by CUDA_VISIBLE_DEVICES or nvidia-smi")
    if nodes > 1 and at_once < len(here):
        return _chosen(config, nodes * len(here), f"one training at a time over {nodes} nodes, each with {named}")
    return _chosen(config, len(here) // at_once, f"trainings at once: {at_once}, {named}")


def ranks_chosen_for_job(
    config: RunConfig, *, gpus_of_rank: int, ranks_per_node: int | None, jobs: int, site: str
) -> tuple[RunConfig, str]:
    """Choose as ``ranks_chosen_here`` for a SLURM job to be submitted, which has one node for its trainings.

    At most ``jobs`` of them run at the same time in one job; the others are settings of the file called ``site``.
    """
    if config.num_ranks != AUTO_RANKS:
        return config, ""
    if not gpus_of_rank:
        return _chosen(config, 1, f"jobs have no GPU: GPUS of {site} is 0")
    if ranks_per_node is None:
        return _chosen(config, 1, f"RANKS_PER_NODE of {site}, how many ranks a node has GPUs for, is not given")
    at_once, named = trainings_at_once(config, jobs), f"RANKS_PER_NODE of {site} is {ranks_per_node}"
    return _chosen(config, ranks_per_node // at_once, f"trainings at once: {at_once}, {named}")


def _chosen(config: RunConfig, ranks: int, why: str) -> tuple[RunConfig, str]:
    if config.of_features:
        ranks, why = 1, f"{config.model} trains in one process"
    elif config.device in ("cpu", "mps"):
        ranks, why = 1, f"device {config.device}: there are no GPUs to share out"
    elif ranks > config.effective_batch_size:
        ranks = config.effective_batch_size
        why += f", and an optimizer step has {ranks} samples (effective_batch_size)"
    ranks = max(1, ranks)
    return config.model_copy(update={"num_ranks": ranks}), f"num_ranks auto: {ranks} ({why})"
