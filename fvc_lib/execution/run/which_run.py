"""Find the run that a command or notebook works on: resumed, forked, or begun from a notebook.

A run is never changed into another experiment. A fork is a new run with changed parameters: it copies the finished
stages that the change does not touch, and a training goes on from its checkpoint only if all that it depends on is the
same. An interactive notebook works on the newest run with that run's parameters.
"""

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fvc_lib import CHECKOUT
from fvc_lib.execution.plan.fingerprint import (
    begin_training_state,
    begun_with_these_inputs,
    copied_with,
    fingerprint_of,
    read_record,
    record_finished,
)
from fvc_lib.execution.plan.plan import PlannedTask
from fvc_lib.execution.plan.stages import (
    STAGE_PARAMETERS,
    Notebook,
    Task,
    cells_hash,
    parse_parameters,
    read_notebook,
    stage_named,
)
from fvc_lib.execution.run.gpus import ranks_chosen_here
from fvc_lib.execution.run.lock import is_worked_on
from fvc_lib.execution.run.record import begin_run, record_corpus
from fvc_lib.execution.run.status import RunState, StageStatus, read_status, write_part
from fvc_lib.services import config as configuration, parameters
from fvc_lib.services.atomic_files import utc_now
from fvc_lib.services.code.training_code import files_of_note
from fvc_lib.services.config import DECLARED, MAY_CHANGE_ON_RESUME, OF_THE_FOLDER, RunConfig
from fvc_lib.services.config_fields import AUTO_RANKS, is_hub_id, local_weights, read_yaml
from fvc_lib.services.errors import FvcError, UsageError, command_text
from fvc_lib.services.parameters import resolve_config, run_config
from fvc_lib.services.run_paths import RunPaths, find_run, list_runs
from fvc_lib.services.tasks import CONTROL_TRAININGS, DEFAULT_TASK, STAGES, TASK_OF_STAGE, TASKS

# As in services.checkpoint_files, which may not be imported here: this room must not load torch.
LATEST = "latest_checkpoint.pt"
_CHECKPOINTS = (LATEST, "previous_checkpoint.pt")

Change = tuple[object, object]


@dataclass(frozen=True)
class Inheritance:
    """The tasks of a fork by what becomes of them."""

    kept: tuple[Task, ...]  # finished and still valid: copied with all they wrote
    carried: tuple[Task, ...]  # trainings that go on from their checkpoint
    repeated: tuple[tuple[Task, str], ...]  # the others, each with the reason

    def lines(self) -> list[str]:
        """Return the terminal's lines."""
        kept = ", ".join(task.key for task in self.kept) or "nothing"
        carried = [f"  {task.key:<28} goes on from its checkpoint" for task in self.carried]
        repeated = [f"  {task.key:<28} starts from the beginning: {why}" for task, why in self.repeated]
        return [f"  kept: {kept}", *carried, *repeated]


def inheritance(
    ancestor: RunPaths,
    notebooks: Mapping[str, Notebook],
    plan: Sequence[PlannedTask],
    changed: Mapping[str, Change],
) -> Inheritance:
    """Return what a fork of ``ancestor`` would take over; nothing is written.

    Args:
        ancestor: the run to fork.
        notebooks: the notebooks by stage name.
        plan: made for ``ancestor`` with the new configuration, without any stage asked for by name.
        changed: the parameters that differ.
    """
    stale, config = {planned.task.stage.name for planned in plan if planned.run}, parameters.run_config(ancestor)
    # A finished training whose inputs may come out the same is copied; the fork's own plan decides.
    kept = tuple(p.task for p in plan if not p.run or (p.only_if_changed and p.task.stage.trains))
    carried, repeated = [], []
    for planned in plan:
        task = planned.task
        if task in kept:
            continue
        notebook = notebooks[task.stage.name]
        obstacle = _obstacle(ancestor, task, notebook, stale, changed, config) if task.stage.trains else ""
        if task.stage.trains and not obstacle:
            carried.append(task)
        else:
            repeated.append((task, "; ".join(filter(None, (planned.reason, obstacle)))))
    return Inheritance(kept, tuple(carried), tuple(repeated))


def take_over(ancestor: RunPaths, fork: RunPaths, taken: Inheritance) -> None:
    """Copy into the new folder ``fork`` what it takes over from ``ancestor``, which is only read."""
    before, status = read_status(ancestor), read_status(fork)
    paths = [path for task in taken.kept for path in copied_with(ancestor, task)]
    for task in taken.kept:
        if task.key in before.stages:
            status.stages[task.key] = before.stages[task.key]
    for task in taken.carried:
        folder = ancestor.training_checkpoints(task.stage.name, task.fold)
        controls = [folder / name for name in CONTROL_TRAININGS] if task.fold is not None else []
        checkpoints = [path for each in (folder, *controls) for path in _checkpoints(each)]
        paths += [*files_of_note(folder), ancestor.metrics(task.stage.name, task.fold), *checkpoints]
        # Attempts go on counting: of two lines of one step in the metric log the later attempt's counts.
        status.stage(task.key).attempts = before.stage(task.key).attempts
    for path in paths:
        target = fork.root / path.relative_to(ancestor.root)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.tmp"))
        elif path.is_file():
            shutil.copyfile(path, target)
    status.write(fork)


def _obstacle(
    run: RunPaths,
    task: Task,
    notebook: Notebook,
    stale: set[str],
    changed: Mapping[str, Change],
    config: RunConfig,
) -> str:
    """Return why a training cannot go on from its checkpoint; empty if it can."""
    folder = run.training_checkpoints(task.stage.name, task.fold)
    if not _checkpoints(folder):
        return "it had no checkpoint yet"
    if stale.intersection(task.stage.reads(config)):
        return "its weights come from other data"
    if hindering := sorted(configuration.STARTS_ANEW.intersection(changed)):
        return f"it trained with another {' and '.join(hindering)}"
    if not begun_with_these_inputs(run, task, notebook, config):
        return "its notebook or a file of the user's has changed"
    return ""


def _checkpoints(folder: Path) -> list[Path]:
    return [folder / name for name in _CHECKPOINTS if (folder / name).is_file()]


@dataclass(frozen=True)
class Asked:
    """The parameters that a command was given."""

    names: frozenset[str]  # set anywhere, the environment included
    written: frozenset[str]  # on the command line or in a params file: meant for this command
    config: RunConfig
    chosen: str = ""  # why num_ranks has its value, if it was given as auto


def ask(
    params_files: Sequence[Path],
    yaml_texts: Sequence[str],
    values: Sequence[tuple[str, str]],
    options: Mapping[str, Any],
) -> Asked:
    """Return the parameters that a command's params files, YAML texts, names with values and options give.

    Raises:
        UsageError: an unknown name, a value that is not of its type, or a file that cannot be read.
    """
    from_files: dict[str, Any] = {}
    for path in params_files:
        from_files.update(parameters.read_params_file(path, typed=False))
    typed: dict[str, Any] = {}
    for text in yaml_texts:
        typed.update(read_yaml(text, f"-y {text!r}"))
    typed.update({name: parameters.parse_text_value(name, value) for name, value in values})
    typed.update(options)
    task = typed.get("task", from_files.get("task"))
    from_files, typed = (parameters.by_own_names(each, task) for each in (from_files, typed))
    config = resolve_config(from_files, command_line=typed)
    from_environment = parameters.environment_values()
    return Asked(
        names=frozenset({*from_files, *typed, *from_environment}),
        written=frozenset({*typed, *(from_files.keys() - from_environment.keys())}),
        config=with_absolute_paths(config),
    )


def values_of_another_corpus(params_files: Sequence[Path], config: RunConfig) -> str:
    """Return a warning if the values do not suit the corpus; else an empty text.

    So do a demo's params file on another corpus, and the pretrained default network on the built-in corpus.
    """
    task = TASKS[config.task]
    path = CHECKOUT / "params" / f"{task.params}.yaml"
    if task.name == DEFAULT_TASK and not config.corpus and config.model == RunConfig.model_fields["model"].default:
        return (
            f"{config.model} does not see the traces that fakes of the {task.sample} have (it scored chance on them): "
            f"--params params/{path.name} has a network that does. On a corpus of your own this one is the default."
        )
    if not config.corpus or path.resolve() not in [each.resolve() for each in params_files]:
        return ""
    values = parameters.read_params_file(path)
    count = [n for n, value in values.items() if n not in ("task", "experiment") and getattr(config, n) == value]
    instead = "" if task.name == DEFAULT_TASK else f" and give -p task {task.name}"
    return (
        f"params/{path.name} is for the {task.sample}, and this corpus is another one. What counts of it: "
        f"{', '.join(f'{name} {values[name]}' for name in count) or 'nothing'}. Leave --params out{instead} to have "
        "what suits a corpus of your own."
    )


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return ``config`` with absolute paths, because a kernel works in the notebooks' folder.

    Weights of the hub are fetched now.

    Raises:
        UsageError: weights of the hub may not or cannot be fetched.
    """
    for name in ("model_weights", "backbone_weights"):
        if is_hub_id(named := getattr(config, name)):
            fetched = local_weights(named, allow_download=config.allow_download)
            config = config.model_copy(update={name: str(fetched)})
    paths = {name: getattr(config, name) for name, declared in DECLARED.items() if declared.path}
    absolute = {
        name: _absolute(path) if isinstance(path, str) else tuple(map(_absolute, path))
        for name, path in paths.items()
        if path
    }
    return config.model_copy(update=absolute)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def config_to_resume(run: RunPaths, asked: Asked, arguments: Sequence[str]) -> RunConfig:
    """Return the run's configuration, with those changes that are allowed between attempts.

    ``num_ranks auto`` keeps the number that it had when the run was made.

    Raises:
        UsageError: a parameter was given that differs from the run's own and could change its numbers; the message
            offers the command that makes a fork, made of ``arguments`` (those that were typed).
    """
    own = run_config(run)
    wanted = _with_written(own, asked)
    if wanted.num_ranks == AUTO_RANKS:
        wanted = wanted.model_copy(update={"num_ranks": own.num_ranks})
    parameters.refuse_contradictions(wanted, asked.written)
    if changed := {name: change for name, change in changes(own, wanted).items() if name not in MAY_CHANGE_ON_RESUME}:
        given = [] if any(text.startswith("--resume") for text in arguments) else ["--resume", str(run.root)]
        command = command_text(*arguments, *given, "--fork")
        raise UsageError(
            f"{run.run_id} was made with other values: {in_words(changed)}. Leave them out to resume it, leave "
            f"--resume out to start a new run, or start one with what stays true of this one: {command}"
        )
    return wanted


def config_of_fork(run: RunPaths, asked: Asked) -> RunConfig:
    """Return the run's configuration with all changes, for a new run.

    Raises:
        UsageError: nothing differs, or the run is being worked on.
    """
    own = run_config(run)
    if is_worked_on(run):
        raise UsageError(f"{run.run_id} is being worked on. Wait for it, or stop it, then repeat the command.")
    wanted = _with_written(own, asked).model_copy(
        update={"runs_dir": str(run.root.parents[1]), "experiment": run.experiment}
    )
    parameters.refuse_contradictions(wanted, asked.written)
    if not changes(own, wanted):
        raise UsageError(
            f"{run.run_id} has these very values. Leave --fork out to resume it, or say what shall differ: "
            "-p NAME VALUE."
        )
    return wanted


def _with_written(own: RunConfig, asked: Asked) -> RunConfig:
    """Return ``own`` with this command's values, and with the environment's where machines may differ."""
    names = (asked.written | (asked.names & MAY_CHANGE_ON_RESUME)) - OF_THE_FOLDER
    return own.model_copy(update={name: getattr(asked.config, name) for name in names})


def changes(own: RunConfig, wanted: RunConfig) -> dict[str, Change]:
    """Return (old, new) JSON values by name, except of the folder."""
    before, after = own.model_dump(mode="json"), wanted.model_dump(mode="json")
    names = [name for name in before if name not in OF_THE_FOLDER]
    changed = [name for name in names if before[name] != after[name] and own.identity(name) != wanted.identity(name)]
    return {name: (before[name], after[name]) for name in changed}


def in_words(changed: Mapping[str, Change]) -> str:
    """Return such as ``epochs 3 -> 5; model 'frame_cnn' -> 'r2plus1d'``."""
    return "; ".join(f"{name} {old!r} -> {new!r}" for name, (old, new) in changed.items())


def find_or_begin(stage: str, run_dir: str, given: dict[str, Any], only_looks: bool) -> tuple[RunPaths, RunConfig]:
    """Return the run that an interactive notebook works on, and its configuration.

    Args:
        stage: the notebook's name.
        run_dir: of the parameters cell; empty: the newest run of its task, else a new one; ``new``: a new one.
        given: the cell's other values, and the task.
        only_looks: begin no run, and accept one that is worked on.

    Raises:
        UsageError: no such run; it is being worked on; a value was edited that differs from the run's own; or the
            notebook works on other stages' tables, which a new run does not have.
    """
    fresh = resolve_config(given)
    runs_dir = Path(fresh.runs_dir)
    own = [run for run in list_runs(runs_dir) if not only_looks and not run_dir and _task_of(run) == fresh.task]
    to_begin = run_dir == "new" or (not run_dir and not (own or (only_looks and list_runs(runs_dir))))
    if only_looks and to_begin:
        raise UsageError(
            f"this notebook only looks at runs and begins none; there is none to look at under {str(runs_dir)!r}, or "
            f"run_dir is 'new'. Begin one: make demo, or {command_text('-p', 'corpus', 'PATH')}"
        )
    if to_begin:
        _refuse_to_begin_with(stage)
        if not run_dir:
            fresh, note = values_to_begin_with(given)
            print(note, end="\n" if note else "")
        return _begin(fresh, given, "interactive, from a notebook", state="interactive")
    paths = own[-1] if own else find_run(runs_dir, run_dir or "latest")
    config = run_config(paths)
    if only_looks:
        return paths, config
    if config.task != fresh.task:
        raise UsageError(
            f"{paths.run_id} is a run of task {config.task}, and this notebook is of task {fresh.task}. Name another "
            'one in run_dir, or "new".'
        )
    _refuse_edited(stage, paths, config, given)
    if is_worked_on(paths):
        raise UsageError(
            f"{paths.run_id} is being worked on by run_notebooks.py, and two writers would spoil it. Wait until it is "
            f"done ({command_text('status', paths.root)}), or name another run in run_dir."
        )
    return paths, config


def _begin(
    config: RunConfig, given: Iterable[str], command: str, state: RunState = "running"
) -> tuple[RunPaths, RunConfig]:
    """Begin the run of a notebook, which trains one fold at a time; ``given`` are the names of its values."""
    parameters.refuse_contradictions(config, given)
    config, chosen = ranks_chosen_here(with_absolute_paths(config), jobs=1)
    print(chosen, end="\n" if chosen else "")
    return begin_run(config, command=command, state=state, chosen=chosen), config


def _reads_of(name: str) -> tuple[str, ...]:
    return next((stage.needs for stage in STAGES if stage.name == name), ())


def _refuse_to_begin_with(name: str) -> None:
    if needs := _reads_of(name):
        task = TASKS[TASK_OF_STAGE.get(name, DEFAULT_TASK)]
        run_all = command_text("--params", CHECKOUT / "params" / f"{task.params}.yaml")
        raise UsageError(
            f"{name} works on what {', '.join(needs)} wrote, which a new run does not have. Open "
            f"{task.stages[0].name}.ipynb first, which begins one, or name a run in run_dir, or run all: {run_all}"
        )


def _refuse_edited(stage: str, paths: RunPaths, config: RunConfig, given: Mapping[str, Any]) -> None:
    asked, defaults = resolve_config(given, environ={}), resolve_config({"task": config.task}, environ={})
    edited = {
        name: getattr(asked, name)
        for name in given
        if getattr(asked, name) not in (getattr(defaults, name), getattr(config, name))
        and not (name == "num_ranks" and asked.num_ranks == AUTO_RANKS)  # which the run has an answer to
    }
    if edited:  # a path counts by where it leads
        there, own = with_absolute_paths(asked), with_absolute_paths(config)
        edited = {name: value for name, value in edited.items() if getattr(there, name) != getattr(own, name)}
    if edited:
        changes = ", ".join(f"{name} {getattr(config, name)!r} -> {value!r}" for name, value in edited.items())
        options = [text for name, value in edited.items() for text in ("-p", name, _as_text(value))]
        fork = command_text("--resume", paths.root, "--fork", *options)
        raise UsageError(
            f"{paths.run_id} was made with other values ({changes}), and a run is never changed into another one. "
            f"Start a new one with what stays true of it: {fork}"
            + ("" if _reads_of(stage) else '; or with what this cell says: run_dir = "new"')
            + ". Or put the values back."
        )


def run_to_work_on(notebook: Notebook, parameters: Mapping[str, Any], command: str) -> tuple[RunPaths, RunConfig, bool]:
    """Return the run that ``papermill --engine fvc`` works on, its configuration, and whether it is new.

    Args:
        notebook: the stage's notebook.
        parameters: the checked values that papermill was given; ``run_dir`` as in ``find_or_begin``.
        command: the command that was typed, for the run's record.

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
        _refuse_to_begin_with(notebook.name)
        config, note = asked.config, ""
        if not run_dir:
            cell = {name: value for name, value in notebook.parameters.items() if name not in STAGE_PARAMETERS}
            config, note = values_to_begin_with({**cell, **given} | ({"task": task} if task else {}))
            print(note, end="\n" if note else "")
        return *_begin(config, given, command), True
    run = find_run(runs_dir, run_dir) if run_dir else runs[-1]
    return run, config_to_resume(run, asked, arguments), False


def _task_of(paths: RunPaths) -> str | None:
    """Return the task of a run; None if its parameters cannot be read."""
    try:
        return run_config(paths).task
    except FvcError:
        return None


def _as_text(value: object) -> str:
    return ", ".join(str(part) for part in value) if isinstance(value, list | tuple) else str(value)


def values_to_begin_with(given: Mapping[str, Any]) -> tuple[RunConfig, str]:
    """Return the configuration of a run that a notebook begins, and a sentence if it is not the cell's.

    An unedited cell without a corpus gets the values of the task's demo, for the built-in corpus.
    """
    asked = resolve_config(given)
    defaults = resolve_config({"task": asked.task}, environ={})
    in_cell = resolve_config(given, environ={})
    path = CHECKOUT / "params" / f"{TASKS[asked.task].params}.yaml"
    edited = [name for name in given if getattr(in_cell, name) != getattr(defaults, name)]
    if edited or asked.corpus or not path.is_file():
        return asked, ""
    values = parameters.read_params_file(path)
    begun = resolve_config({**given, **values})
    differs = ", ".join(f"{name} {getattr(begun, name)}" for name in values if name not in ("task", "experiment"))
    return begun, (
        f"There is no run yet and nothing in the cell above was edited: a run on the built-in corpus begins, with the "
        f'values of params/{path.name} ({differs}). For a run with the cell\'s own values: run_dir = "new".'
    )


def note_interactive_training(run: RunPaths, stage: str, fold: int | None, config: RunConfig) -> None:
    """Record the code of an interactive training before it begins, so that the runner can go on with it.

    A training that has begun is left alone.

    Raises:
        OSError: the run folder cannot be written.
    """
    task = Task(stage_named(stage), fold)
    if task.stage.trains and not run.training_checkpoints(stage, fold).exists():
        begin_training_state(run, task, read_notebook(CHECKOUT / "notebooks" / f"{stage}.ipynb"), config)


_INJECTED = "# Parameters"  # papermill puts a cell with this comment after the parameters cell


def refuse_unknown_parameters(stage: str, inputs: Sequence[str]) -> None:
    """Refuse unknown names in papermill's cell among ``inputs``, the cells that have run.

    Raises:
        UsageError: a name that no field and no stage has; the message has the nearest field.
    """
    for cell in inputs:
        for name in parse_parameters(cell, Path(f"{stage}.ipynb")) if cell.startswith(_INJECTED) else ():
            if name not in STAGE_PARAMETERS:
                configuration.require_known(name)


def end_of_notebook(
    run: RunPaths, stage: str, fold: int | None, config: RunConfig, inputs: Sequence[str]
) -> Callable[[], None]:
    """Return the function to call at the end of an interactive notebook: it records the finished stage.

    Then ``--resume`` goes on after it. There is no record if cells (``inputs``) were edited, left out or run twice, or
    if code or inputs changed meanwhile.
    """
    task = Task(stage_named(stage), fold)
    notebook = (
        read_notebook(CHECKOUT / "notebooks" / f"{stage}.ipynb") if inputs and config.use_mlops_pipeline else None
    )
    before = notebook and fingerprint_of(task, notebook, run, config)

    def record() -> None:
        record_corpus(run)
        cells = [cell for cell in inputs if cell and not cell.startswith(_INJECTED)]
        if notebook is None or before is None or cells_hash(cells[1:]) != notebook.source_hash:
            return
        if read_record(run.stage_checkpoint(stage, fold)) or fingerprint_of(task, notebook, run, config) != before:
            return
        task.stage.check_outputs(run, fold)
        record_finished(task, before, run)
        attempts = max(1, read_status(run).stage(task.key).attempts)
        write_part(run, task.key, StageStatus(state="done", attempts=attempts, finished_utc=utc_now(), exit_code=0))

    return record
