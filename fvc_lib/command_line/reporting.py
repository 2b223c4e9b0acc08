"""Pages and closing lines: at the end of a run, and whenever somebody asks for them."""

from __future__ import annotations

from pathlib import Path

import click

from fvc_lib.execution.slurm.queue import read_accounting
from fvc_lib.services.config import resolve_config
from fvc_lib.services.errors import FvcError
from fvc_lib.services.run_paths import RunPaths, find_run


def report_run(run: RunPaths) -> None:
    """Write the run's pages and show its outcome in a few lines; trouble with a page is a warning."""
    from fvc_lib.analysis.compaction import compact_metrics  # plotly, with what follows, takes a second to load
    from fvc_lib.analysis.run_summary import summary_lines, write_run_report

    try:
        compact_metrics(run)
        read_accounting(run)
        write_run_report(run)
    except (FvcError, OSError) as error:
        click.echo(f"warning: the report could not be written: {error}", err=True)
    for line in summary_lines(run):
        click.echo(line)


@click.command(short_help="Write a run's pages anew.")
@click.argument("run", default="latest")
@click.option("--runs-dir", type=click.Path(path_type=Path), help="Runs folder, where it is not the default.")
def report(run: str, runs_dir: Path | None) -> None:
    """Write RUN's report, a page of each of its records, and the list of all runs; nothing is executed.

    RUN is 'latest', a run id, a part of one, or a run folder. Also while the run is at work, or after it was killed.
    """
    report_run(find_run(runs_dir or Path(resolve_config().runs_dir), run))


@click.command(short_help="Write the list of all runs anew.")
@click.option("--runs-dir", type=click.Path(path_type=Path), help="Runs folder, where it is not the default.")
def index(runs_dir: Path | None) -> None:
    """Write index.html, the list of all runs, anew: after run folders were copied in, moved or deleted."""
    from fvc_lib.analysis.runs_index import write_runs_index  # plotly takes a second to load

    click.echo(write_runs_index(runs_dir or Path(resolve_config().runs_dir)))
