"""What the terminal says when a task has ended: one line of a success, three of anything else."""

from __future__ import annotations

import shlex

from fvc_lib.execution.next_setting import meaning
from fvc_lib.execution.stages import Task
from fvc_lib.execution.status import StageStatus
from fvc_lib.services.run_paths import RunPaths

_LONGEST_MESSAGE = 2_000


def end_lines(run: RunPaths, task: Task, stage: StageStatus) -> list[str]:
    """How ``task`` ended; of anything but a success also where it was and the command that goes on."""
    first = f"{task.key:<28} {stage.state:<12} {stage.duration_seconds or 0.0:7.1f} s"
    if stage.state == "done":
        return [f"{first}  peak {_peak(stage)}"]
    record, log = run.partial_notebook(task.stage.name, task.fold), run.stage_log(task.stage.name, task.fold)
    return [
        f"{first}  what happened: {what_happened(stage)}",
        f"  where: {where_it_was(stage)}; record: {record}; log: {log}",
        f"  {what_next(run, stage)}",
    ]


def what_happened(stage: StageStatus) -> str:
    """One line: the error and its cell, or what ended the kernel."""
    what = stage.reason or "it ended"
    if stage.error is not None:
        place = f" (cell In [{stage.error.cell}])" if stage.error.cell else ""
        what = f"{stage.error.name}: {stage.error.message}{place}"
        if stage.oom_kills:
            what += f"; meanwhile the system killed for memory in its control group (count rose by {stage.oom_kills})"
    line = " | ".join(part.strip() for part in what.splitlines() if part.strip())
    # An error's text may hold what a terminal obeys, or what turns the text around.
    line = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in line)
    return line if len(line) <= _LONGEST_MESSAGE else f"{line[:_LONGEST_MESSAGE]} [...]"


def where_it_was(stage: StageStatus) -> str:
    """One line: the last step and metric, and how much memory it held at most."""
    return "; ".join([*filter(None, (stage.last_step, stage.last_metric)), f"peak memory {_peak(stage)}"])


def what_next(run: RunPaths, stage: StageStatus) -> str:
    """One line with the exact command; after an error of usage also the one that changes a parameter."""
    command = f"python run_notebooks.py --resume {shlex.quote(str(run.root))}"
    if stage.state == "interrupted":
        return f"to go on: {command}"
    if stage.next_setting is None:
        when = "once mended, go on" if stage.exit_code != 138 else "to go on"
        # A run's own values never change; a corpus that could not be read may be mended where it is.
        if stage.exit_code != 2:
            return f"{when}: {command}"
        return (
            f"{when}: {command}; with another budget, device or number of workers: add -p NAME VALUE; with another "
            f"value of what the results depend on, in a new run: {command} --fork -p NAME VALUE"
        )
    if stage.next_setting.startswith("--mem"):
        return f"to go on: {command}  # {meaning(stage.next_setting)} (SLURM: {stage.next_setting})"
    return f"to go on: {command} {stage.next_setting}  # {meaning(stage.next_setting)}"


def _peak(stage: StageStatus) -> str:
    return f"{(stage.peak_rss_bytes or 0) / 1e9:.2f} GB"
