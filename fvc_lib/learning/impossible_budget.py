"""A memory budget that no training can keep, because the process holds more before it trains: said before it does.

A budget that is only somewhat too small is no reason to stop: the prediction may be off by a quarter, and a training
that goes over its own budget harms nobody (the limits that kill are the system's). So that is a warning. Here nothing
is predicted: what is there already is over the budget, and whoever asked for it meant something else.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

from fvc_lib.learning.preflight import footprint_of, preflight
from fvc_lib.learning.preflight_plan import KERNEL_BYTES
from fvc_lib.learning.preflight_probe import StepRequest
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError
from fvc_lib.services.memory_budget import SHARE_VARIABLE, MemoryBudget, MemoryShare, memory_budget


def refuse_impossible_budget(
    request: StepRequest, config: RunConfig, budget: MemoryBudget, resident_bytes: int, store: Path
) -> None:
    """Raise where ``mem_gb`` was asked for and this process holds more, on the CPU before its first step.

    What could work is measured, which takes some seconds, as far as the machine's own limits let it.

    Args:
        request: of the training as planned.
        config: ``mem_gb``, and ``num_ranks``: each rank has its share.
        budget: of this process.
        resident_bytes: of this process now.
        store: the preflight's file.

    Raises:
        UsageError: names what is held, and the least that can work.
    """
    if not _asked_for(config, budget):
        return
    held = footprint_of(request, resident_bytes).resident_bytes
    if held < budget.total_bytes:
        return
    who = f"each of {config.num_ranks} ranks" if config.num_ranks > 1 else "this process"
    limit = memory_budget(environ={name: text for name, text in os.environ.items() if name != SHARE_VARIABLE})
    share = f", {_gigabytes(budget.total_bytes)} for each rank" if config.num_ranks > 1 else ""
    raise UsageError(
        f"mem_gb {config.mem_gb:g}{share}: {who} holds {_gigabytes(held)} before it trains, so no training can keep "
        f"to that. {_least(request, config, limit, resident_bytes, store)} Or leave mem_gb out: then the limit is "
        f"{_gigabytes(limit.total_bytes)} ({limit.origin})."
    )


def _asked_for(config: RunConfig, budget: MemoryBudget) -> bool:
    """Whether ``budget`` is what ``mem_gb`` says, or one rank's share of it.

    Of kernels that run beside each other the runner shares the budget out; there it is the number of them to change.
    """
    if config.mem_gb is None:
        return False
    asked, share = int(config.mem_gb * 1e9), MemoryShare.of(os.environ)
    if share is not None and share.share_bytes == budget.total_bytes:
        return config.num_ranks > 1 and share.whole.total_bytes == asked
    return budget.total_bytes == asked


def _least(request: StepRequest, config: RunConfig, limit: MemoryBudget, resident_bytes: int, store: Path) -> str:
    """With one sample at a time."""
    each = MemoryBudget(limit.total_bytes // config.num_ranks, limit.origin)
    report = preflight(replace(request, micro_batch=1), budget=each, baseline_bytes=resident_bytes, store=store)
    if report.predicted_peak_bytes is None:
        return f"The least that can work could not be measured ({report.problem})."
    least = report.predicted_peak_bytes + report.reserved_bytes
    if config.num_ranks > 1:
        least = KERNEL_BYTES + config.num_ranks * least
    mem_gb = f"mem_gb {math.ceil(least / 1e8) / 10:g}"
    # Results do not depend on it, so it is no reason for a new run.
    return f"The least that can work is about {mem_gb}, with one sample at a time; --resume RUN -p {mem_gb} goes on."


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
