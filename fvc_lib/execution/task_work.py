"""All that one task does in its thread: from what it depends on, by way of its notebook, to the record of its end."""

from __future__ import annotations

from collections.abc import Callable

from fvc_lib.execution.end_lines import what_happened, what_next, where_it_was
from fvc_lib.execution.fingerprint import fingerprint_of, record_finished
from fvc_lib.execution.stages import Task
from fvc_lib.execution.status import StageError, StageStatus, utc_now
from fvc_lib.execution.superseding import begin_training_state
from fvc_lib.execution.task_run import TaskRun
from fvc_lib.execution.told_record import tell_end
from fvc_lib.services.errors import DataError
from fvc_lib.services.run_paths import RunPaths


def run_task(
    at_work: TaskRun, stage: StageStatus, say: Callable[[str], None], taken_over: Callable[[], bool]
) -> StageStatus:
    """Run the notebook, check what it wrote and record that it is finished; returns ``stage`` as it ended.

    Args:
        at_work: the task.
        stage: its status, written into.
        say: gets each line that is for the terminal.
        taken_over: whether another process has the run by now: then nothing is recorded.

    Raises:
        OSError: the run folder cannot be read or written.
    """
    task, run, config = at_work.task, at_work.run, at_work.config
    begin_training_state(run, task)
    # A straight pass tracks nothing: neither what a stage depended on nor that it was finished.
    before = fingerprint_of(task, at_work.notebook, run, config) if config.use_mlops_pipeline else None
    at_work.execute(stage)
    if stage.exit_code == 0:
        _check_outputs(run, task, stage)
    stage.finished_utc = utc_now()
    if stage.exit_code == 0 and before is not None and not taken_over():
        if fingerprint_of(task, at_work.notebook, run, config) == before:
            record_finished(task, before, run)
        else:
            say(f"  {task.key}: its code or inputs changed while it ran; --resume repeats it")
    return stage


def _check_outputs(run: RunPaths, task: Task, stage: StageStatus) -> None:
    """A stage whose tables do not fit has failed, and its record is not that of a success."""
    try:
        task.stage.check_outputs(run, task.fold)
    except DataError as error:
        stage.state, stage.exit_code = "failed", error.exit_code
        stage.reason = "what it wrote does not fit"
        stage.error = StageError(name=type(error).__name__, message=str(error))
        name, fold = task.stage.name, task.fold
        run.executed_notebook(name, fold).replace(run.partial_notebook(name, fold))
        told = [what_happened(stage), where_it_was(stage), what_next(run, stage)]
        tell_end(run.partial_notebook(name, fold), stage, told)
