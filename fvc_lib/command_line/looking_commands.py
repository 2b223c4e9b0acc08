"""Commands that look at runs and change nothing of them."""

from __future__ import annotations

from pathlib import Path

import click

from fvc_lib.execution.run_lock import is_worked_on
from fvc_lib.execution.status import read_status
from fvc_lib.services.config import resolve_config
from fvc_lib.services.run_paths import find_run


@click.command()
@click.argument("run", default="latest")
@click.option("--runs-dir", type=click.Path(path_type=Path), help="Runs folder, where it is not the default.")
def status(run: str, runs_dir: Path | None) -> None:
    """Show how far RUN is ('latest', a run id, a part of one, or a run folder)."""
    paths = find_run(runs_dir or Path(resolve_config().runs_dir), run)
    state = read_status(paths)
    died = state.state == "running" and not is_worked_on(paths)
    click.echo(f"{paths.root}: {'interrupted: its runner is gone; --resume goes on' if died else state.state}")
    for key, stage in state.stages.items():
        seconds = "" if stage.duration_seconds is None else f"{stage.duration_seconds:8.1f} s"
        click.echo(f"  {key:<28} {stage.state:<12} {seconds}  {stage.reason or ''}")
