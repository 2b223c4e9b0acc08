"""What a notebook that was opened by hand leaves for the runner, which may go on with its work."""

from __future__ import annotations

from fvc_lib.execution.stages import Task, stage_named
from fvc_lib.execution.superseding import begin_training_state
from fvc_lib.services.run_paths import RunPaths


def note_training_by_hand(run: RunPaths, stage: str, fold: int | None) -> None:
    """Before a training begins by hand: note its code, without which the runner would begin it anew.

    A training that has begun stays as it is, whatever code it was begun with: nothing is set aside by hand.

    Raises:
        OSError: the run folder cannot be written.
    """
    task = Task(stage_named(stage), fold)
    if task.stage.trains and not run.training_checkpoints(stage, fold).exists():
        begin_training_state(run, task)
