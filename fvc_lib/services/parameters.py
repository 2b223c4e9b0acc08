"""How defaults, a params file, the environment and the command line become one configuration, and a run's is read.

Precedence: defaults < params file < environment < command line. What is wrong is told with its field and the remedy.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.services.config import DECLARED, DEFAULTS, EARLIER_DEFAULTS, ENVIRONMENT, RunConfig, require_known
from fvc_lib.services.config_fields import RETIRED, read_yaml
from fvc_lib.services.errors import UsageError
from fvc_lib.services.records.digests import undamaged_content
from fvc_lib.services.registry import DETECTORS
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tasks import CROSS_CORPUS, DEFAULT_TASK, TASKS


def values_unsaid(task: str) -> dict[str, Any]:
    """By name, as JSON values, what a run of ``task`` was made with whose record does not say it."""
    known = {name: retired.default for name, retired in RETIRED.items()}
    known |= {**DEFAULTS, **_task_defaults(task), **EARLIER_DEFAULTS}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in known.items()}


def run_config(run: RunPaths) -> RunConfig:
    """The configuration a run was started with, from its ``params.yaml``; ``UsageError`` where that is invalid."""
    recorded = read_params_file(run.params_yaml)
    DETECTORS.refuse_of_cell(recorded.get("model"))
    read = recorded.get("task", DEFAULT_TASK)
    earlier = {name: value for name, value in EARLIER_DEFAULTS.items() if read in DECLARED[name].tasks}
    return resolve_config({**earlier, **recorded}, environ={})


def read_params_file(path: AnyPath, *, typed: bool = True) -> dict[str, Any]:
    """Return the mapping of names to values in a YAML file of ours, or of a user (``typed`` false: ``read_yaml``).

    Raises:
        UsageError: it cannot be read, holds no mapping, or (a user's) a name or value that no field takes.
        DataError: it is a run's, and damaged.
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
    """The documented variables that are set and not empty, by field name."""
    environ = os.environ if environ is None else environ
    return {name: environ[variable] for variable, name in ENVIRONMENT.items() if environ.get(variable)}


def parse_text_value(name: str, text: str) -> Any:
    """A text of the command line or environment, typed as the field ``name`` says; else ``UsageError``."""
    require_known(name)
    if text.strip().lower() in {"none", "null"} and RunConfig.model_fields[name].default is None:
        return None
    return getattr(_validated({name: text}, name), name)


def resolve_config(
    params: Mapping[str, Any] | None = None,
    *,
    command_line: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> RunConfig:
    """Merge the sources by precedence (defaults < params file < environment < command line) and validate.

    Raises:
        UsageError: an unknown name or a value out of range; the message names the field and what is allowed.
    """
    params, typed = dict(params or {}), dict(command_line or {})
    task = typed.get("task", params.get("task"))
    merged: dict[str, Any] = by_own_names(params, task)
    _validated(merged, "params file")  # so that a bad file is named even where the environment would hide it
    merged.update({k: parse_text_value(k, v) for k, v in environment_values(environ).items()})
    merged.update(by_own_names(typed, task))
    return _validated({**_task_defaults(merged.get("task")), **merged}, "parameters")


def by_own_names(values: Mapping[str, Any], task: object) -> dict[str, Any]:
    """``values`` with ``model`` and ``backbone``, and their weights, under the name that ``task`` knows them by.

    Where no task is given, or the values have its own name as well, they stay as they are.
    """
    own = TASKS[task].network if isinstance(task, str) and task in TASKS else ""
    other = {"model": "backbone", "backbone": "model"}.get(own, "")
    renamed = {other: own, f"{other}_weights": f"{own}_weights"} if other else {}
    free = {name: new for name, new in renamed.items() if new not in values}
    return {free.get(name, name): value for name, value in values.items()}


def refuse_fields_of_another_task(config: RunConfig, given: Iterable[str]) -> None:
    """Check that ``config.task`` reads the fields named in ``given``, or that they say nothing but the default.

    Raises:
        UsageError: target_corpora without the protocol that has them, or the other way round; a stream without a
            shuffle_buffer, or the other way round; more ranks than a step has samples; or one would be set and change
            nothing; the message says whose it is and what to give instead.
    """
    _refuse_odd_targets(config)
    _refuse_half_a_stream(config)
    _refuse_idle_ranks(config)
    foreign = [name for name in sorted(given) if config.task not in DECLARED[name].tasks and _is_set(config, name)]
    if not foreign:
        return
    owners = dict.fromkeys(DECLARED[name].tasks for name in foreign)
    sentences = [
        f"{', '.join(name for name in foreign if DECLARED[name].tasks == tasks)}: read by task "
        f"{' and '.join(tasks)} alone, and this run's task is {config.task}."
        for tasks in owners
    ]
    sentences += dict.fromkeys(text for name in foreign if (text := DECLARED[name].instead))
    others = dict.fromkeys(task for tasks in owners for task in tasks)
    choice = " or ".join(f"-p task {task}" for task in others)
    raise UsageError(
        f"{' '.join(sentences)} Leave {'them' if len(foreign) > 1 else 'it'} out, or begin a run with {choice}."
    )


def _refuse_odd_targets(config: RunConfig) -> None:
    if config.protocol == CROSS_CORPUS and not config.target_corpora:
        raise UsageError(
            "target_corpora: got none, and protocol cross_corpus needs the names of the corpora to test on: "
            "-p target_corpora NAME."
        )
    if config.target_corpora and config.protocol != CROSS_CORPUS:
        raise UsageError(
            f"target_corpora: protocol {config.protocol} has none. Leave them out, or say -p protocol {CROSS_CORPUS}."
        )


def _refuse_half_a_stream(config: RunConfig) -> None:
    read = all(config.task in DECLARED[name].tasks for name in ("clip_source", "shuffle_buffer"))
    if read and (config.clip_source == "stream") != (config.shuffle_buffer > 0):
        raise UsageError(
            f"clip_source {config.clip_source} with shuffle_buffer {config.shuffle_buffer}: wanted both or neither, "
            "because a stream mixes only what lies near: -p clip_source stream -p shuffle_buffer 1000, or "
            "-p clip_source shards, which reads clips in any order."
        )


def _refuse_idle_ranks(config: RunConfig) -> None:
    if config.num_ranks > config.effective_batch_size:
        raise UsageError(
            f"num_ranks {config.num_ranks}: an optimizer step has {config.effective_batch_size} samples "
            "(effective_batch_size), and ranks without any would only wait. Give at most as many ranks, or auto."
        )


def _is_set(config: RunConfig, name: str) -> bool:
    default = RunConfig.model_fields[name].default
    return bool(getattr(config, name) != _task_defaults(config.task).get(name, default))


def _task_defaults(task: Any) -> Mapping[str, Any]:
    """What differs from the fields' own defaults for ``task``; nothing for one that is not known."""
    return TASKS[task].defaults if isinstance(task, str) and task in TASKS else {}


# By pydantic's name of what is wrong: its own words are of parsers.
_WANTED = {
    "int_parsing": "a whole number", "int_type": "a whole number", "int_from_float": "a whole number",
    "float_parsing": "a number", "float_type": "a number",
    "string_type": "a text, '' for none",
    "bool_parsing": "true or false", "bool_type": "true or false",
}  # fmt: skip


def _told(problem: Mapping[str, Any]) -> str:
    """What was wanted; a check's own words as they are, else pydantic's."""
    own = problem.get("ctx", {}).get("error")
    if isinstance(own, ValueError):
        return str(own)
    wanted = _WANTED.get(str(problem["type"]))
    return f"wanted {wanted}" if wanted else problem["msg"].lower()


def _validated(values: Mapping[str, Any], origin: str) -> RunConfig:
    try:
        return RunConfig(**{str(k): v for k, v in values.items()})
    except UsageError as error:  # a name that no field has
        raise UsageError(f"{origin}: {error}") from error
    except ValidationError as error:
        problems = [
            (".".join(str(part) for part in item["loc"]), f"got {item['input']!r}, {_told(item)}")
            for item in error.errors()
        ]
        told = "; ".join(text if name == origin else f"{name}: {text}" for name, text in problems)
        raise UsageError(f"{origin}: {told}.") from error
