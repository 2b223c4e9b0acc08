"""Which run a notebook works on that run_notebooks.py did not start, and what it leaves for the runner to go on with.

Opened in JupyterLab it works on the newest run with that run's parameters, so that it shows what the headless run
showed; executed by ``papermill --engine fvc`` it resumes that run. A run is never changed into another experiment. A
module of its own, because a headless stage does not depend on it: mending it repeats no training.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fvc_lib import CHECKOUT
from fvc_lib.execution.plan.fingerprint import begin_training_state
from fvc_lib.execution.plan.forking import ask, config_to_resume, with_absolute_paths
from fvc_lib.execution.plan.stages import STAGE_PARAMETERS, Notebook, Task, stage_named
from fvc_lib.execution.run.lock import is_worked_on
from fvc_lib.execution.run.record import begin_run
from fvc_lib.services.config import RunConfig, read_params_file, resolve_config, run_config
from fvc_lib.services.errors import UsageError
from fvc_lib.services.run_paths import RunPaths, find_run, list_runs
from fvc_lib.services.tasks import TASK_OF_STAGE, TASKS


def find_or_begin(run_dir: str, given: dict[str, Any], only_looks: bool) -> tuple[RunPaths, RunConfig]:
    """The run that an opened notebook works on: the one named, else the newest of its task, else a new one.

    Args:
        run_dir: as in the parameters cell; empty: the newest; ``new``: a new one.
        given: the cell's other values, and the task.
        only_looks: it writes nothing: it begins no run, and may look at one that is worked on.

    Raises:
        UsageError: no such run; it is being worked on; or a value was edited that differs from the run's own.
    """
    fresh = resolve_config(given)
    runs_dir = Path(fresh.runs_dir)
    own = [run for run in list_runs(runs_dir) if not only_looks and not run_dir and _task_of(run) == fresh.task]
    to_begin = run_dir == "new" or (not run_dir and not (own or (only_looks and list_runs(runs_dir))))
    if only_looks and to_begin:
        raise UsageError(
            f"this notebook only looks at runs and begins none; there is none to look at under {str(runs_dir)!r}, or "
            "run_dir is 'new'. Begin one: make demo, or run_notebooks.py -p corpus PATH."
        )
    if to_begin:
        if not run_dir:
            fresh, note = values_to_begin_with(given)
            print(note, end="\n" if note else "")
        return begin_run(fresh, command="interactive, from a notebook", state="interactive"), fresh
    paths = own[-1] if own else find_run(runs_dir, run_dir or "latest")
    config = run_config(paths)
    if only_looks:
        return paths, config
    if config.task != fresh.task:
        raise UsageError(
            f"{paths.run_id} is a run of task {config.task}, and this notebook is of task {fresh.task}. Name another "
            'one in run_dir, or "new".'
        )
    _refuse_edited(paths, config, given)
    if is_worked_on(paths):
        raise UsageError(
            f"{paths.run_id} is being worked on by run_notebooks.py, and two writers would spoil it. Wait until it is "
            "done (run_notebooks.py status), or name another run in run_dir."
        )
    return paths, config


def _refuse_edited(paths: RunPaths, config: RunConfig, given: Mapping[str, Any]) -> None:
    asked, defaults = resolve_config(given, environ={}), resolve_config({"task": config.task}, environ={})
    edited = {
        name: getattr(asked, name)
        for name in given
        if getattr(asked, name) not in (getattr(defaults, name), getattr(config, name))
    }
    if edited:
        changes = ", ".join(f"{name} {getattr(config, name)!r} -> {value!r}" for name, value in edited.items())
        options = [text for name, value in edited.items() for text in ("-p", name, _as_text(value))]
        fork = shlex.join(["python", "run_notebooks.py", "--resume", str(paths.root), "--fork", *options])
        raise UsageError(
            f"{paths.run_id} was made with other values ({changes}), and a run is never changed into another one. "
            f'Start a new one with what stays true of it: {fork}; or with what this cell says: run_dir = "new". Or put '
            "the values back."
        )


def run_to_work_on(notebook: Notebook, parameters: Mapping[str, Any], command: str) -> tuple[RunPaths, RunConfig, bool]:
    """The run that ``papermill --engine fvc`` works on, its configuration, and whether it has just begun.

    Args:
        notebook: a stage's.
        parameters: checked values that papermill was given; ``run_dir`` as in ``find_or_begin``, fields of the
            configuration as ``run_notebooks.py --resume`` takes them.
        command: what was typed, for the run's record.

    Raises:
        UsageError: no such run, or a value was given that differs from the run's own and could change its numbers.
    """
    task = TASK_OF_STAGE.get(notebook.name)
    given = {name: value for name, value in parameters.items() if name not in STAGE_PARAMETERS}
    arguments = [text for name, value in given.items() for text in ("-p", name, _as_text(value))]
    asked = ask((), (), (), given | ({"task": task} if task else {}))
    run_dir, runs_dir = str(parameters.get("run_dir") or notebook.parameters["run_dir"]), Path(asked.config.runs_dir)
    runs = [run for run in list_runs(runs_dir) if task is None or _task_of(run) == task]
    if run_dir == "new" or not (run_dir or runs):
        config, note = asked.config, ""
        if not run_dir:
            cell = {name: value for name, value in notebook.parameters.items() if name not in STAGE_PARAMETERS}
            config, note = values_to_begin_with({**cell, **given} | ({"task": task} if task else {}))
            print(note, end="\n" if note else "")
        config = with_absolute_paths(config)
        return begin_run(config, command=command), config, True
    run = find_run(runs_dir, run_dir) if run_dir else runs[-1]
    return run, config_to_resume(run, asked, arguments), False


def _task_of(paths: RunPaths) -> str | None:
    """What a run is about; None where its parameters cannot be read."""
    try:
        return run_config(paths).task
    except UsageError:
        return None


def _as_text(value: object) -> str:
    return ", ".join(str(part) for part in value) if isinstance(value, list | tuple) else str(value)


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
