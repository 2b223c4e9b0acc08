"""Make the configuration of a run (``RunConfig``) from defaults, params files, environment and command line.

The configuration of an existing run is read from its file ``params.yaml``.

Precedence: defaults < params file < environment < command line. Errors name the field and the remedy.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.services.config import DECLARED, DEFAULTS, ENVIRONMENT, NEUTRAL, RunConfig, require_known
from fvc_lib.services.config_fields import read_yaml
from fvc_lib.services.errors import UsageError
from fvc_lib.services.records.digests import undamaged_content
from fvc_lib.services.tasks import CROSS_CORPUS, TASKS


def run_config(params_yaml: Path) -> RunConfig:
    """Return the configuration of a run from its file ``params.yaml``.

    A field that was added to the library after the run began is missing in the file. It gets its neutral value, which
    leaves results unchanged, instead of the default.

    Raises:
        UsageError: the file is invalid.
        DataError: the file is damaged.
    """
    return resolve_config({**NEUTRAL, **read_params_file(params_yaml)}, environ={})


def read_params_file(path: AnyPath, *, typed: bool = True) -> dict[str, Any]:
    """Return the parameters in a YAML file, by name.

    Args:
        path: the file.
        typed: True for the ``params.yaml`` of a run. False for a user's file, whose values are checked and stay text
            (see ``read_yaml``).

    Raises:
        UsageError: the file cannot be read, has no mapping, or a user's file has an invalid name or value.
        DataError: the file belongs to a run and is damaged.
    """
    origin = f"params file {str(path)!r}"
    try:
        values = read_yaml(undamaged_content(Path(path)).decode(), origin, typed=typed)
    except OSError as error:
        raise UsageError(f"{origin}: {error.strerror}. Give an existing YAML file.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{origin} is not valid YAML: {error}") from error
    if not typed:
        _validated(values, origin)
    return values


def environment_values(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the values of configuration fields that environment variables set, as text by field name.

    Empty variables are left out. ``environ`` has the environment variables; None: those of this process.
    """
    environ = os.environ if environ is None else environ
    return {name: environ[variable] for variable, name in ENVIRONMENT.items() if environ.get(variable)}


def parse_text_value(name: str, text: str) -> Any:
    """Convert ``text`` to the type of field ``name``; raise ``UsageError`` if it is invalid."""
    require_known(name)
    if text.strip().lower() in {"none", "null"} and RunConfig.model_fields[name].default is None:
        return None
    return getattr(_validated({name: text}, "parameters"), name)


def resolve_config(
    params: Mapping[str, Any] | None = None,
    *,
    command_line: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> RunConfig:
    """Return the validated configuration from all sources; a later source overrides an earlier one.

    The order is: defaults of the fields, defaults of the task, ``params``, ``environ``, ``command_line``.

    Args:
        params: values of a params file, by field name.
        command_line: values of the command line, by field name.
        environ: environment variables; None: those of this process.

    Raises:
        UsageError: a name is unknown or a value is invalid; the message names the field and the allowed values.
    """
    merged = dict(params or {})
    _validated(merged, "params file")  # a wrong value is an error even if the environment overrides it
    merged.update({k: parse_text_value(k, v) for k, v in environment_values(environ).items()})
    merged.update(command_line or {})
    return _validated({**_task_defaults(merged.get("task")), **merged}, "parameters")


def refuse_contradictions(config: RunConfig, given: Iterable[str]) -> None:
    """Check that the values of ``config`` fit each other.

    Args:
        config: the configuration.
        given: names of the fields that the user has set.

    Raises:
        UsageError: there are three reasons. Protocol cross_corpus has no ``target_corpora``, or another protocol has
            some. There are more ranks (training processes) than samples in an optimizer step. The task does not read a
            field in ``given``, and its value is not the default.
    """
    foreign: list[str] = []
    if (config.protocol == CROSS_CORPUS) != bool(config.target_corpora):
        raise UsageError(
            f"target_corpora: protocol {config.protocol} with {', '.join(config.target_corpora) or 'none'}. Protocol "
            f"{CROSS_CORPUS}, and no other, needs the names of the corpora to test on: -p target_corpora NAME."
        )
    if config.num_ranks > config.effective_batch_size:
        raise UsageError(
            f"num_ranks {config.num_ranks}: an optimizer step has {config.effective_batch_size} samples "
            "(effective_batch_size), and further ranks would only wait. Give at most as many ranks, or auto."
        )
    usual = {**DEFAULTS, **_task_defaults(config.task)}
    for name in sorted(given):
        tasks = DECLARED[name].tasks
        if config.task not in tasks and getattr(config, name) != usual[name]:
            foreign.append(f"{name} (of task {' and '.join(tasks)})")
    if foreign:
        network = TASKS[config.task].network
        raise UsageError(
            f"{', '.join(foreign)}: task {config.task}, whose network is -p {network}, does not "
            "read it. Leave it out, or begin a run with another -p task."
        )


def _task_defaults(task: Any) -> Mapping[str, Any]:
    """Return the defaults, by field, that the task named ``task`` sets in place of the fields' own defaults.

    The mapping is empty if there is no such task.
    """
    return TASKS[task].defaults if isinstance(task, str) and task in TASKS else {}


def _validated(values: Mapping[str, Any], origin: str) -> RunConfig:
    try:
        return RunConfig(**{str(name): value for name, value in values.items()})
    except UsageError as error:  # a name that no field has
        raise UsageError(f"{origin}: {error}") from error
    except ValidationError as error:
        problems = []
        for item in error.errors():
            place = ".".join(map(str, item["loc"]))
            reason = item["msg"].removeprefix("Value error, ")
            problems.append(f"{place}: got {item['input']!r}, {reason}")
        raise UsageError(f"{origin}: {'; '.join(problems)}.") from error
