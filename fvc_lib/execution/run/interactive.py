"""What an interactive notebook begins with, and what it leaves for the runner, which may go on with it.

A module of its own, because a headless stage does not depend on it: mending it repeats no training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fvc_lib import CHECKOUT
from fvc_lib.execution.plan.stages import Task, stage_named
from fvc_lib.execution.plan.superseding import begin_training_state
from fvc_lib.services.config import RunConfig, read_params_file, resolve_config
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tasks import TASKS


def values_to_begin_with(given: Mapping[str, Any]) -> tuple[RunConfig, str]:
    """The configuration of a run that an interactive notebook begins, and a sentence where it is not the cell's.

    A cell that nobody edited, without a corpus, means the built-in one: it gets the values that the task's demo has.

    Args:
        given: the values of the parameters cell, and the task.

    Raises:
        UsageError: a value is not allowed.
    """
    asked = resolve_config(given)
    defaults = resolve_config({"task": asked.task}, environ={})
    told = resolve_config(given, environ={})
    path = CHECKOUT / "params" / f"{TASKS[asked.task].params}.yaml"
    edited = [name for name in given if getattr(told, name) != getattr(defaults, name)]
    if edited or asked.corpus or not path.is_file():
        return asked, ""
    values = read_params_file(path)
    begun = resolve_config({**given, **values})
    differs = ", ".join(f"{name} {getattr(begun, name)}" for name in values if name not in ("task", "experiment"))
    return begun, (
        f"There is no run yet and nothing in the cell above was edited: a run on the built-in corpus begins, with the "
        f'values of params/{path.name} ({differs}). For a run with the cell\'s own values: run_dir = "new".'
    )


def note_interactive_training(run: RunPaths, stage: str, fold: int | None, config: RunConfig) -> None:
    """Before an interactive training begins: note its code, without which the runner would begin it anew.

    A training that has begun stays as it is, whatever code it was begun with: nothing is set aside.

    Raises:
        OSError: the run folder cannot be written.
    """
    task = Task(stage_named(stage), fold)
    if task.stage.trains and not run.training_checkpoints(stage, fold).exists():
        begin_training_state(run, task, config)
