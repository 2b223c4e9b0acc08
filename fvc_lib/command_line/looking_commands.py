"""Commands that look at runs and change nothing of them."""

from __future__ import annotations

from pathlib import Path

import click

from fvc_lib.execution.progress import read_progress
from fvc_lib.execution.slurm.queue import job_states
from fvc_lib.execution.status import StageStatus
from fvc_lib.execution.status_book import status_now
from fvc_lib.services.config import resolve_config
from fvc_lib.services.run_paths import RunPaths, find_run

# Why a job waits for ever unless somebody does something, by SLURM's word for it.
_REMEDY_OF_REASON = {
    "PartitionTimeLimit": ": TIME in slurm/site.conf is more than the partition allows",
    "PartitionNodeLimit": ": more nodes than the partition has; look at RANKS_PER_NODE in slurm/site.conf",
    "DependencyNeverSatisfied": ": a job before it failed; mend that, then --resume RUN --executor slurm",
    "JobHeldUser": ": scontrol release lets it go",
    "InvalidAccount": ": ACCOUNT in slurm/site.conf",
    "InvalidQOS": ": QOS in slurm/site.conf",
}


@click.command(short_help="Show how far a run is, its jobs included.")
@click.argument("run", default="latest")
@click.option("--runs-dir", type=click.Path(path_type=Path), help="Runs folder, where it is not the default.")
def status(run: str, runs_dir: Path | None) -> None:
    """Show how far RUN is ('latest', a run id, a part of one, or a run folder)."""
    paths = find_run(runs_dir or Path(resolve_config().runs_dir), run)
    state = status_now(paths)
    gone_on = "; go on with --resume" if state.state in {"interrupted", "requeue", "failed"} else ""
    click.echo(f"{paths.root}: {state.state}{gone_on}")
    for key, stage in state.stages.items():
        seconds = "" if stage.duration_seconds is None else f"{stage.duration_seconds:8.1f} s"
        click.echo(f"  {key:<28} {stage.state:<12} {seconds:>10}  {_details(key, stage, paths)}".rstrip())
    jobs = job_states(paths)
    for job in jobs:
        click.echo(f"  {job}{_REMEDY_OF_REASON.get(job.reason, '')}")
    if state.state == "waiting" and all(job.ended for job in jobs):
        click.echo("  no job of it is in the queue here; submit what is left: --resume RUN --executor slurm")


def _details(key: str, stage: StageStatus, run: RunPaths) -> str:
    """What a running task is at, else why it runs or what ended it."""
    if stage.state == "running":
        progress = read_progress(run.logs / f"{key}.progress.json")
        return "" if progress is None else f"{progress.what} {progress.done}/{progress.total}"
    return stage.reason or ""
