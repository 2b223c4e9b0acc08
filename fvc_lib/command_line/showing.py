"""What commands print: notebooks with their parameters, a plan with its reasons, what a fork takes over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from fvc_lib.execution.asked_values import changes, in_words
from fvc_lib.execution.forking import Inheritance
from fvc_lib.execution.notebook_files import Notebook
from fvc_lib.execution.plan import PlannedTask
from fvc_lib.execution.predicted_memory import PredictedPeak
from fvc_lib.execution.session import run_config
from fvc_lib.execution.stages import STAGES
from fvc_lib.services.config import RunConfig
from fvc_lib.services.run_paths import RunPaths


def print_notebooks(notebooks: Mapping[str, Notebook]) -> None:
    """Each stage's notebook, its parameters with their defaults, and what they mean."""
    for stage in STAGES:
        notebook = notebooks[stage.name]
        notes = ["one run per fold"] if stage.per_fold else []
        notes += [f"-p task {stage.tasks[0]}"] if "video" not in stage.tasks else []
        in_brackets = f" ({', '.join(notes)})" if notes else ""
        click.echo(f"{stage.name}: {notebook.title}{in_brackets}")
        for name, value in notebook.parameters.items():
            field = RunConfig.model_fields.get(name)
            meaning = field.description if field else "set by the runner; empty: the newest run"
            click.echo(f"    {name} = {value!r}  {meaning}")


def print_plan(
    plan: Sequence[PlannedTask], config: RunConfig, run: RunPaths | None, predicted: Mapping[str, PredictedPeak]
) -> None:
    """What would run and why, and the memory each task is expected to take."""
    click.echo(f"task: {config.task}")
    click.echo(f"corpus: {config.corpus or 'the generated sample corpus'}")
    click.echo(f"run: {run.root if run else 'a new folder under ' + str(Path(config.runs_dir) / config.experiment)}")
    for planned in plan:
        peak = predicted.get(planned.task.stage.name)
        memory = f"{peak.peak_bytes / 1e9:5.2f} GB" if peak and planned.run else " " * 8
        click.echo(f"  {'run ' if planned.run else 'skip'}  {planned.task.key:<28} {memory}  {planned.reason}")
    needed = dict.fromkeys(planned.task.stage.name for planned in plan if planned.run)
    for origin in dict.fromkeys(predicted[name].origin for name in needed if name in predicted):
        names = [name for name in needed if name in predicted and predicted[name].origin == origin]
        click.echo(f"predicted peak of {', '.join(names)}: {origin}")


def print_fork(ancestor: RunPaths, config: RunConfig, taken: Inheritance) -> None:
    """What differs from the ancestor, and what stays true of it."""
    click.echo(f"fork of {ancestor.run_id}: {in_words(changes(run_config(ancestor), config))}")
    for line in taken.lines():
        click.echo(line)
