"""Making room for a stage that runs anew: what it wrote before is moved, never deleted, and never shown as current."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from fvc_lib.execution.code_version import helpers_hash
from fvc_lib.execution.stages import Task
from fvc_lib.services.atomic_files import write_json
from fvc_lib.services.run_paths import RunPaths

# The code a half-trained fold depends on: going on with other code would make a network of two halves.
_TRAINING = ("import fvc_lib.learning.fold_training",)
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


def begin_fold_state(run: RunPaths, task: Task) -> None:
    """Before a fold trains: what is left of a training under other code is set aside, and this code is noted."""
    if task.fold is None:
        return
    folder = run.fold_checkpoints(task.fold)
    if folder.exists() and not trained_by_this_code(folder):
        set_aside(run, [task])
    write_json(folder / _CODE_NOTE, {"sha256": helpers_hash(_TRAINING), "of": _TRAINING})


def trained_by_this_code(folder: Path) -> bool:
    """Whether the fold's state in ``folder`` was left by the code as it is now."""
    try:
        noted = json.loads((folder / _CODE_NOTE).read_text())["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(noted == helpers_hash(_TRAINING))


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
        *([] if fold is None else [run.fold_checkpoints(fold)]),
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
