"""``run_notebooks.py doctor``: whether this machine can run what is asked, and what to do where it cannot."""

from __future__ import annotations

from pathlib import Path

import click

from fvc_lib.execution.asked_values import ask


@click.command(short_help="Check this machine and say what to do.")
@click.option(
    "--params", "-f", "params_files", multiple=True, type=click.Path(path_type=Path),
    help="Check for these parameters: folders, device, memory.",
)  # fmt: skip
@click.option("-p", "--parameters", "values", nargs=2, multiple=True, metavar="NAME VALUE", help="Likewise, one.")
@click.pass_context
def doctor(context: click.Context, params_files: tuple[Path, ...], values: tuple[tuple[str, str], ...]) -> None:
    """Check Python, torch and its devices, codecs, disks, memory, limits, SLURM and installed versions.

    Takes a few seconds, changes nothing, and says below each trouble what to do. Exit code 1 when something would keep
    a run from working; warnings alone are 0.
    """
    from fvc_lib.execution.doctor.diagnosis import diagnose, exit_code, lines

    findings = diagnose(ask(params_files, (), values, {}).config)
    for line in lines(findings):
        click.echo(line)
    context.exit(exit_code(findings))
