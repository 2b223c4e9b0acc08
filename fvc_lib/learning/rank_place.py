"""Which of how many ranks this process is: as torchrun says, or srun, or alone."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from fvc_lib.services.errors import UsageError

# Below the ports that Linux gives to outgoing connections (32768 on), above those of services.
_FIRST_PORT, _NUM_PORTS = 20_000, 12_000


@dataclass(frozen=True)
class RankPlace:
    """One process among the ranks of a training.

    Attributes:
        rank: from 0.
        size: how many there are.
        local_rank: from 0 on this machine; which GPU it takes.
        local_size: how many share this machine's memory.
        address: where rank 0 is; empty when there is one rank.
        port: where it listens.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str = ""
    port: int = 0


def rank_place(environ: Mapping[str, str] | None = None) -> RankPlace:
    """The place that torchrun's variables give, else srun's; without either, one rank.

    srun's count where this process is a task of one (``SLURM_STEP_ID`` is set); in a job's batch script it is not.

    Raises:
        UsageError: the variables contradict each other or are incomplete.
    """
    environ = os.environ if environ is None else environ
    try:
        if "RANK" in environ:
            return _checked(_of_torchrun(environ))
        if environ.get("SLURM_STEP_ID", "").isdecimal() and "SLURM_PROCID" in environ:
            return _checked(_of_srun(environ))
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"ranks: the environment is incomplete ({error!r}). Start with torchrun or srun, which set all of RANK, "
            "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, or of SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, "
            "SLURM_STEP_NODELIST; or alone, with none of them."
        ) from error
    return RankPlace(0, 1, 0, 1)


def loopback() -> dict[str, str]:
    """What gloo must be told to meet on this machine's own device, where nobody else can reach it."""
    name = next((name for name in psutil.net_if_addrs() if name in ("lo", "lo0")), "")
    return {"GLOO_SOCKET_IFNAME": name} if name else {}


def first_host(nodes: str) -> str:
    """The first machine of a SLURM node list: ``gpu03`` of ``gpu[03-05,09],cpu1``, ``a-1-x`` of ``a-[1-2]-x``.

    Raises:
        ValueError: it names none.
    """
    text = re.split(r",(?![^\[]*\])", nodes.strip(), maxsplit=1)[0]
    host = re.sub(r"\[(\d+)[^\]]*\]", r"\1", text)
    if not re.fullmatch(r"[\w.-]+", host):
        raise ValueError(f"no host in the node list {nodes!r}")
    return host


def _of_torchrun(environ: Mapping[str, str]) -> RankPlace:
    size = int(environ["WORLD_SIZE"])
    return RankPlace(
        int(environ["RANK"]),
        size,
        int(environ.get("LOCAL_RANK", environ["RANK"])),
        int(environ.get("LOCAL_WORLD_SIZE", size)),
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
    )


def _of_srun(environ: Mapping[str, str]) -> RankPlace:
    size = int(environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"])
    job, step = int(environ["SLURM_JOB_ID"]), int(environ["SLURM_STEP_ID"])
    # One that no other step has, as far as may be: jobs that share a node mostly have neighbouring numbers.
    port = _FIRST_PORT + (job * 17 + step) % _NUM_PORTS
    nodes = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_NODELIST"]
    node = int(environ.get("SLURM_NODEID", "0"))
    local_size = _tasks_of_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""), node) or size
    # A node's name need not resolve on the node itself, and need not where there is no other.
    address = "127.0.0.1" if local_size == size else first_host(nodes)
    return RankPlace(
        int(environ["SLURM_PROCID"]),
        size,
        int(environ["SLURM_LOCALID"]),
        local_size,
        address,
        port,
    )


def _tasks_of_node(text: str, node: int) -> int:
    """Of ``2(x3),1``, which counts tasks node by node; 0 where it does not say."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        count, _, times = part.rstrip(")").partition("(x")
        counts.extend([int(count)] * int(times or 1))
    return counts[node] if node < len(counts) else 0


def _checked(place: RankPlace) -> RankPlace:
    if not (0 <= place.rank < place.size and 0 <= place.local_rank < place.local_size <= place.size):
        raise UsageError(f"ranks: {place} cannot be: ranks count from 0 to the size, on every machine as well.")
    return place
