"""What the terminal says when a task has ended: one line of a success, and what to do next of anything else."""

from __future__ import annotations

import shlex

from fvc_lib.execution.stages import Task
from fvc_lib.execution.status import StageStatus
from fvc_lib.services.run_paths import RunPaths


def end_lines(run: RunPaths, task: Task, stage: StageStatus) -> list[str]:
    """How ``task`` ended, where its record lies and how to go on."""
    peak = f"{(stage.peak_rss_bytes or 0) / 1e9:.2f} GB"
    first = f"{task.key:<28} {stage.state:<12} {stage.duration_seconds or 0.0:7.1f} s  peak {peak}"
    if stage.state == "done":
        return [first]
    what = stage.reason or ""
    if stage.error is not None:
        where = f" (cell In [{stage.error.cell}])" if stage.error.cell else ""
        what = f"{stage.error.name}: {stage.error.message}{where}"
    when = "to go on" if stage.state == "interrupted" else "once mended, go on"
    return [
        first,
        f"  what happened: {what}",
        f"  record: {run.partial_notebook(task.stage.name, task.fold)}",
        f"  {when}: python run_notebooks.py --resume {shlex.quote(str(run.root))}",
    ]
