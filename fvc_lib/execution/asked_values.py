"""What a command's parameters mean for a run that is there already: resumed with them, refused, or forked."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fvc_lib.execution.forking import Change
from fvc_lib.execution.run_lock import is_worked_on
from fvc_lib.execution.session import run_config
from fvc_lib.services.config import (
    MAY_CHANGE_ON_RESUME,
    RunConfig,
    environment_values,
    parse_text_value,
    read_params_file,
    refuse_fields_of_another_task,
    resolve_config,
)
from fvc_lib.services.errors import UsageError
from fvc_lib.services.run_paths import RunPaths


@dataclass(frozen=True)
class Asked:
    """What the command gave: the names it set anywhere, the environment included, and the configuration they make.

    ``written`` are those whose value comes from the command line or a params file, and so was meant for this command.
    """

    names: frozenset[str]
    written: frozenset[str]
    config: RunConfig


def ask(
    params_files: Sequence[Path],
    yaml_texts: Sequence[str],
    values: Sequence[tuple[str, str]],
    options: Mapping[str, Any],
) -> Asked:
    """What a command's params files, YAML texts, names with values, and options of their own come to.

    Raises:
        UsageError: an unknown name, a value that is not of its type, or a file that cannot be read.
    """
    from_files: dict[str, Any] = {}
    for path in params_files:
        from_files.update(read_params_file(path))
    typed: dict[str, Any] = {}
    for text in yaml_texts:
        typed.update(_yaml_mapping(text))
    typed.update({name: parse_text_value(name, value) for name, value in values})
    typed.update(options)
    config = resolve_config(from_files, command_line=typed)
    # A kernel works in the folder of the notebooks: every path is made absolute here, where the command was given.
    paths = {name: getattr(config, name) for name in ("corpus", "data_dir", "runs_dir", "cache_dir")}
    absolute = {name: str(Path(path).expanduser().absolute()) for name, path in paths.items() if path}
    from_environment = environment_values()
    return Asked(
        names=frozenset({*from_files, *typed, *from_environment}),
        written=frozenset({*typed, *(from_files.keys() - from_environment.keys())}),
        config=config.model_copy(update=absolute),
    )


def config_to_resume(run: RunPaths, asked: Asked, arguments: Sequence[str]) -> RunConfig:
    """The run's own configuration, with what may change from one attempt to the next as it is asked for now.

    Args:
        run: the run to resume.
        asked: what the command gave.
        arguments: the command as it was typed, without the program's name.

    Raises:
        UsageError: a parameter was given that differs from the run's own and could change its numbers; the message
            offers the command that makes a fork.
    """
    own = run_config(run)
    wanted = _with_written(own, asked)
    refuse_fields_of_another_task(wanted, asked.written)
    if changed := {name: change for name, change in changes(own, wanted).items() if name not in MAY_CHANGE_ON_RESUME}:
        given = [] if any(text.startswith("--resume") for text in arguments) else ["--resume", str(run.root)]
        command = shlex.join(["python", "run_notebooks.py", *arguments, *given, "--fork"])
        raise UsageError(
            f"{run.run_id} was made with other values: {in_words(changed)}. Leave them out to resume it, leave "
            f"--resume out to start a new run, or start one with what stays true of this one: {command}"
        )
    return wanted


def config_of_fork(run: RunPaths, asked: Asked) -> RunConfig:
    """The run's own configuration with everything that was asked for, for a new run beside it.

    Raises:
        UsageError: nothing differs, or the run is being worked on.
    """
    own = run_config(run)
    if is_worked_on(run):
        raise UsageError(f"{run.run_id} is being worked on. Wait for it, or stop it, then repeat the command.")
    wanted = _with_written(own, asked).model_copy(
        update={"runs_dir": str(run.root.parents[1]), "experiment": run.experiment}
    )
    refuse_fields_of_another_task(wanted, asked.written)
    if not changes(own, wanted):
        raise UsageError(
            f"{run.run_id} has these very values. Leave --fork out to resume it, or say what shall differ: "
            "-p NAME VALUE."
        )
    return wanted


def _with_written(own: RunConfig, asked: Asked) -> RunConfig:
    """``own`` with the values given for this command, and with the environment's where that may differ by machine."""
    names = (asked.written | (asked.names & MAY_CHANGE_ON_RESUME)) - {"experiment", "runs_dir"}
    return own.model_copy(update={name: getattr(asked.config, name) for name in names})


def changes(own: RunConfig, wanted: RunConfig) -> dict[str, Change]:
    """(old, new) JSON values by name; where a run lies is no change."""
    before, after = own.model_dump(mode="json"), wanted.model_dump(mode="json")
    names = [name for name in before if name not in {"experiment", "runs_dir"}]
    return {name: (before[name], after[name]) for name in names if before[name] != after[name]}


def in_words(changed: Mapping[str, Change]) -> str:
    """``epochs 3 -> 5; model 'frame_cnn' -> 'r2plus1d'``."""
    return "; ".join(f"{name} {old!r} -> {new!r}" for name, (old, new) in changed.items())


def _yaml_mapping(text: str) -> dict[str, Any]:
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"-y {text!r} is not valid YAML: {error}") from error
    if not isinstance(document, dict):
        raise UsageError(f"-y {text!r}: got a {type(document).__name__}, wanted a mapping like '{{epochs: 5}}'.")
    return document
