"""Find or create the run that a command or notebook works on: an existing run, a fork, or a new run.

Parameters that decide a run's results never change. A fork is a new run with other values of such parameters. It copies
the finished stages that do not depend on the changed parameters; an unfinished training starts again. A notebook that a
user opens works on the newest run, with the parameters of that run. ``find_run`` of ``services.run_paths`` finds the
run that a name, or ``latest``, means.
"""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fvc_lib.execution.plan import PlannedTask, begin_training_state, written_by
from fvc_lib.execution.run.record import begin_run
from fvc_lib.execution.run.status import RunState, is_worked_on
from fvc_lib.execution.stages import (
    STAGE_PARAMETERS,
    Task,
    parse_parameters,
    read_notebook,
    stage_named,
)
from fvc_lib.services import config as configuration, parameters
from fvc_lib.services.config import DECLARED, MAY_CHANGE_ON_RESUME, OF_THE_FOLDER, RunConfig
from fvc_lib.services.config_fields import read_yaml
from fvc_lib.services.errors import FvcError, UsageError, command_text
from fvc_lib.services.home import NOTEBOOKS, PARAMS
from fvc_lib.services.parameters import resolve_config, run_config
from fvc_lib.services.run_paths import RunPaths, find_run, list_runs
from fvc_lib.services.tasks import TASK_OF_STAGE, TASKS

_INJECTED = "# Parameters"  # papermill puts a cell with this comment after the parameters cell
Change = tuple[object, object]


# Parameters that a command was given


@dataclass(frozen=True)
class GivenValues:
    """The parameters that a command was given: the names that were set, and the resulting values of all parameters."""

    names: frozenset[str]  # all names that were set, in the environment, in a params file or on the command line
    written: frozenset[str]  # names set on the command line, or in a params file and not in the environment
    config: RunConfig  # the values of all parameters


def given_values(
    params_files: Sequence[Path] = (),
    yaml_texts: Sequence[str] = (),
    values: Sequence[tuple[str, str]] = (),
    options: Mapping[str, Any] | None = None,
) -> GivenValues:
    """Merge the parameters that a command was given. A later source wins over an earlier one.

    The order is: defaults, ``params_files``, environment variables, ``yaml_texts``, ``values``, ``options``.

    Args:
        params_files: YAML files of parameters; later files win.
        yaml_texts: parameters as YAML texts, such as ``{epochs: 5}``.
        values: pairs of a parameter's name and its value as text.
        options: ``{parameter: typed value}``.

    Raises:
        UsageError: a name is unknown, a value does not have the parameter's type, or a file cannot be read.
    """
    from_files: dict[str, Any] = {}
    for path in params_files:
        from_files.update(parameters.read_params_file(path, typed=False))
    typed: dict[str, Any] = {}
    for text in yaml_texts:
        typed.update(read_yaml(text, f"-y {text!r}"))
    typed.update({name: parameters.parse_text_value(name, value) for name, value in values})
    typed.update(options or {})
    config = resolve_config(from_files, command_line=typed)
    from_environment = parameters.environment_values()
    from_files_alone = from_files.keys() - from_environment.keys()
    return GivenValues(
        names=frozenset({*from_files, *typed, *from_environment}),
        written=frozenset({*typed, *from_files_alone}),
        config=with_absolute_paths(config),
    )


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return ``config`` with all paths made absolute, and ``~`` expanded.

    Relative paths would break, because the kernels run in the notebooks' folder, not in the user's.
    """
    changed: dict[str, Any] = {}
    for name, declared in DECLARED.items():
        if declared.path and (value := getattr(config, name)):
            texts = [value] if isinstance(value, str) else value
            paths = [str(Path(text).expanduser().absolute()) for text in texts]
            changed[name] = paths[0] if isinstance(value, str) else tuple(paths)
    return config.model_copy(update=changed)


def values_of_another_corpus(params_files: Sequence[Path], config: RunConfig) -> str:
    """Return a warning if the params file for the built-in corpus is used with another corpus; else an empty text.

    Args:
        params_files: the YAML files of parameters that the command was given.
        config: the merged parameters.
    """
    task = TASKS[config.task]
    path = PARAMS / f"{task.params}.yaml"  # for the built-in corpus
    if not config.corpus or path.resolve() not in [file.resolve() for file in params_files]:
        return ""
    own = f"Give --params params/{path.name} with that corpus, and -p task {task.name} with others."
    return f"the values of params/{path.name} are for the {task.sample}. {own}"


# Resume and fork


def config_to_resume(run: RunPaths, given: GivenValues, arguments: Sequence[str], remedy: str = "") -> RunConfig:
    """Return the configuration with which a command resumes (continues) ``run``.

    It has the run's values, updated by the values that the command was given.

    Args:
        run: the run.
        given: the parameters that the command was given.
        arguments: the command's arguments as typed. The error's message shows them with ``--fork`` added.
        remedy: a sentence of advice for the error's message; empty: the advice for the command line.

    Raises:
        UsageError: a given parameter differs from the run's value and could change its results.
    """
    own = run_config(run.params_yaml)
    wanted = _with_written(own, given)
    parameters.refuse_contradictions(wanted, given.written)
    every_change = changes(own, wanted)
    changed = {name: change for name, change in every_change.items() if name not in MAY_CHANGE_ON_RESUME}
    if changed:
        names_run = any(text.startswith("--resume") for text in arguments)
        resume = [] if names_run else ["--resume", str(run.root)]
        remedy = remedy or "Leave them out to resume it, or leave --resume out to start a new run."
        fork = command_text(*arguments, *resume, "--fork")
        raise UsageError(
            f"{run.run_id} was made with other values: {in_words(changed)}. {remedy} To start a new run with what "
            f"stays true of this one: {fork}"
        )
    return wanted


def config_of_fork(run: RunPaths, given: GivenValues) -> RunConfig:
    """Return the configuration of a fork of ``run``: the run's values, updated by the values given to the command.

    The fork is a new run in the same runs folder and experiment, which copies finished stages of ``run``.

    Raises:
        UsageError: no value differs from the run's, or a process works on the run.
    """
    own = run_config(run.params_yaml)
    if is_worked_on(run.root):
        raise UsageError(f"{run.run_id} is being worked on. Wait for it, or stop it, then repeat the command.")
    wanted = _with_written(own, given).model_copy(
        update={"runs_dir": str(run.root.parents[1]), "experiment": run.experiment}
    )
    parameters.refuse_contradictions(wanted, given.written)
    if not changes(own, wanted):
        raise UsageError(
            f"{run.run_id} has these very values. Leave --fork out to resume it, or give another one: -p NAME VALUE."
        )
    return wanted


def _with_written(own: RunConfig, given: GivenValues) -> RunConfig:
    """Return ``own``, a run's configuration, updated by the values that were given to the command.

    Values from the environment count only for parameters that may change when a run is resumed, such as memory.
    """
    names = (given.written | (given.names & MAY_CHANGE_ON_RESUME)) - OF_THE_FOLDER
    return own.model_copy(update={name: getattr(given.config, name) for name in names})


def changes(own: RunConfig, wanted: RunConfig) -> dict[str, Change]:
    """Return ``{name: (old, new)}`` for the parameters in which two configurations differ, with JSON values.

    Parameters that decide only the run's folder, such as ``experiment``, are left out. So is the path of a file whose
    content is the same.

    Args:
        own: the configuration of the run, which has the old values.
        wanted: the configuration with the new values.
    """
    before, after = own.model_dump(mode="json"), wanted.model_dump(mode="json")
    names = [name for name in before if name not in OF_THE_FOLDER]
    changed = [name for name in names if before[name] != after[name] and own.identity(name) != wanted.identity(name)]
    return {name: (before[name], after[name]) for name in changed}


def in_words(changed: Mapping[str, Change]) -> str:
    """Return changed parameters as one line of text, for example ``epochs 3 -> 5; model 'frame_cnn' -> 'mc3'``.

    ``changed`` is ``{parameter: (old value, new value)}``, from ``changes``.
    """
    return "; ".join(f"{name} {old!r} -> {new!r}" for name, (old, new) in changed.items())


def tasks_of_fork(plan: Sequence[PlannedTask]) -> list[Task]:
    """Return the finished tasks whose files a fork copies from the original run.

    A fork is a new run with other parameters. It copies the tasks that it need not repeat. A finished training is also
    copied if only its inputs have to be computed again. If the new inputs equal the old ones, the fork keeps the copied
    training; otherwise it trains again.

    Args:
        plan: the plan (``make_plan``) of the run that is copied from, with the fork's configuration and without
            ``only``, ``start`` and ``force``.
    """
    return [
        planned.task for planned in plan
        if not planned.run or (planned.only_if_changed and planned.task.stage.trains)
    ]  # fmt: skip


def take_over(ancestor: RunPaths, fork: RunPaths, copied: Sequence[Task]) -> None:
    """Copy all files of the tasks ``copied`` from the run ``ancestor`` into the run ``fork``."""
    for task in copied:
        for path in written_by(ancestor, task):
            target = fork.root / path.relative_to(ancestor.root)
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                shutil.copytree(path, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.tmp"))
            elif path.is_file():
                shutil.copyfile(path, target)


# Runs of notebooks


def open_run(
    stage: str, run_dir: str, values: Mapping[str, Any], *, command: str, state: RunState = "running"
) -> tuple[RunPaths, RunConfig, bool]:
    """Find or begin the run that a stage's notebook works on.

    Args:
        stage: the notebook's name.
        run_dir: name or path of the run. Empty: the newest run with the stage's kind of task (video, image or
            video_text), or a new run if there is none. ``new``: a new run.
        values: ``{parameter: value}`` of the parameters that the user has set.
        command: the command that was typed, for the run's record.
        state: the status of a new run.

    Returns:
        The run, its configuration, and whether this call began it.

    Raises:
        UsageError: there is no such run; a value differs from the run's value and could change its results; or the
            stage reads other stages' tables, which a new run does not have.
    """
    task = TASK_OF_STAGE.get(stage)
    of_task = {"task": task} if task else {}
    given = given_values(options={**values, **of_task})
    runs_dir, needs = Path(given.config.runs_dir), stage_named(stage).needs
    runs = [run for run in list_runs(runs_dir) if task is None or _task_of(run) == task]
    if run_dir != "new" and (run_dir or runs):
        run = find_run(runs_dir, run_dir) if run_dir else runs[-1]
        if task is not None and (of_run := run_config(run.params_yaml).task) != task:
            raise UsageError(
                f"{run.run_id} is a run of task {of_run}, and this notebook is of task {task}. Name another one in "
                'run_dir, or "new".'
            )
        typed = [text for name, value in sorted(values.items()) for text in ("-p", name, as_text(value))]
        remedy = "Put the values back." if needs else 'Put the values back, or begin a run with them: run_dir = "new".'
        return run, config_to_resume(run, given, typed, remedy), False
    of_kind = TASKS[given.config.task]
    demo = PARAMS / f"{of_kind.params}.yaml"
    if needs:
        first_stage = of_kind.stages[0].name
        raise UsageError(
            f"{stage} reads tables of {', '.join(needs)}, which a new run does not have. Open the notebooks from "
            f"{first_stage} on, name a run in run_dir, or run all: {command_text('--params', demo)}"
        )
    if not (run_dir or values or given.config.corpus) and demo.is_file():
        given = given_values([demo], options=of_task)
        differs = [f"{name} {getattr(given.config, name)}" for name in parameters.read_params_file(demo)]
        print(
            f"There is no run yet, and the cell above was not edited. A run on the {TASKS[given.config.task].sample} "
            f'begins with params/{demo.name} ({", ".join(differs)}). For the cell\'s own values: run_dir = "new".'
        )
    parameters.refuse_contradictions(given.config, given.written)
    return begin_run(given.config, command=command, state=state), given.config, True


def edited_values(cell: Mapping[str, Any], task: str | None) -> dict[str, Any]:
    """Return ``{parameter: value}`` for the parameters in a notebook's cell that differ from the defaults.

    Args:
        cell: names and values in the cell.
        task: the kind of task whose defaults count (video, image or video_text); None: the default task.
    """
    of_task = {"task": task} if task else {}
    defaults, there = (resolve_config({**values, **of_task}, environ={}) for values in ({}, cell))
    return {name: getattr(there, name) for name in cell if getattr(there, name) != getattr(defaults, name)}


def _task_of(run: RunPaths) -> str | None:
    """Return a run's parameter ``task`` (video, image or video_text); None if its parameters cannot be read."""
    with suppress(FvcError):
        return run_config(run.params_yaml).task
    return None


def as_text(value: object) -> str:
    """Return a value as text for the command line; the items of a list are separated by commas."""
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def refuse_unknown_parameters(stage: str, inputs: Sequence[str]) -> None:
    """Check the parameter names in the cell that papermill has injected into a notebook, and refuse unknown names.

    Args:
        stage: name of the notebook, for the message.
        inputs: source texts of the cells that have run so far; only the cell injected by papermill is checked.

    Raises:
        UsageError: a name is neither a configuration field nor a stage's parameter; the message has a similar name.
    """
    for cell in inputs:
        for name in parse_parameters(cell, Path(f"{stage}.ipynb")) if cell.startswith(_INJECTED) else ():
            if name not in STAGE_PARAMETERS:
                configuration.require_known(name)


def begin_interactive(run: RunPaths, stage: str, fold: int | None, config: RunConfig) -> None:
    """Prepare a notebook that a user runs: check that no other process works on the run.

    If the stage trains and this training has not begun before, the training's code is recorded.

    Args:
        run: the run.
        stage: the notebook's name.
        fold: number of the outer fold, from 0; None for a stage without folds.
        config: the run's parameters.

    Raises:
        UsageError: another process works on the run, or the run has no such fold.
        OSError: the run folder cannot be written.
    """
    if is_worked_on(run.root):
        raise UsageError(
            f"{run.run_id} is being worked on by another command, and two writers would spoil it. Wait until it is "
            f"done ({command_text('status', run.root)}), or name another run in run_dir."
        )
    if fold is not None and not 0 <= fold < config.num_trainings:
        raise UsageError(f"fold: got {fold}, wanted 0 to {config.num_trainings - 1}.")
    task = Task(stage_named(stage), fold)
    if task.stage.trains and not run.training_checkpoints(stage, fold).exists():
        begin_training_state(run, task, read_notebook(NOTEBOOKS / f"{stage}.ipynb"), config)
