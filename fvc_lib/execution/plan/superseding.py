"""Making room for a stage that runs anew: what it wrote before is moved, never deleted, and never shown as current."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from fvc_lib.execution.plan.stages import Task
from fvc_lib.services.atomic_files import write_json
from fvc_lib.services.code_version import helpers_hash
from fvc_lib.services.config import RunConfig
from fvc_lib.services.run_paths import RunPaths

_CODE_NOTE = "code.json"


def set_aside(run: RunPaths, tasks: Iterable[Task]) -> list[tuple[Path, Path]]:
    """Move everything the ``tasks`` wrote to ``superseded/<number>/``, each file under its old name.

    Returns:
        Where each was and where it is, for ``put_back``.
    """
    paths = [path for task in tasks for path in written_by(run, task) if path.exists()]
    if not paths:
        return []
    folder, moved = _next_folder(run.superseded), []
    for path in paths:
        target = folder / path.relative_to(run.root)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
        moved.append((path, target))
    return moved


def put_back(moved: Iterable[tuple[Path, Path]]) -> None:
    """Undo ``set_aside``; the last first, so that a record that a stage is finished comes after what it is about."""
    for path, target in reversed(list(moved)):
        target.rename(path)


def begin_training_state(run: RunPaths, task: Task, config: RunConfig) -> None:
    """Before a stage trains: what is left of a training under other code is set aside, and this code is noted.

    That is the training's own and the files of what the configuration chooses by name: going on with other code would
    make a network of two halves.
    """
    if not task.stage.trains:
        return
    folder = run.training_checkpoints(task.stage.name, task.fold)
    code = [f"import {task.stage.training_module}", *config.code_chosen(config.relevant())]
    if folder.exists() and not trained_by_this_code(folder, task):
        set_aside(run, [task])
    write_json(folder / _CODE_NOTE, {"sha256": helpers_hash(code), "of": code})


def trained_by_this_code(folder: Path, task: Task) -> bool:
    """Whether the state in ``folder`` of a training of ``task`` was left by the code as it is now."""
    try:
        note = json.loads((folder / _CODE_NOTE).read_text())
        noted, code = note["sha256"], note["of"]
        return bool(code[0] == f"import {task.stage.training_module}" and noted == helpers_hash(code))
    except (OSError, ValueError, LookupError, TypeError):
        return False


def written_by(run: RunPaths, task: Task) -> list[Path]:
    """Every file and folder that ``task`` may have written in ``run``; few tasks write all of them."""
    name, fold = task.stage.name, task.fold
    return [
        # The record first: killed half-way, the stage must not look finished.
        run.stage_checkpoint(name, fold),
        *task.stage.outputs(run, fold),
        run.metrics(name, fold),
        run.memory(name, fold),
        run.memory_events(name, fold),
        run.oom_contexts(name, fold),
        run.memory_profiles(name, fold),
        run.executed_notebook(name, fold),
        run.partial_notebook(name, fold),
        *([run.training_checkpoints(name, fold)] if task.stage.trains else []),
    ]


def _next_folder(parent: Path) -> Path:
    """A new, empty folder; made at once, so that two tasks that begin at the same moment never share one."""
    parent.mkdir(exist_ok=True)
    number = 1
    while True:
        folder = parent / str(number)
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder
