"""Notebooks that belong to no run: executed by the engine that runs use, the executed copy being the record."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from fvc_lib import CHECKOUT
from fvc_lib.command_line.run_command import NOTEBOOKS
from fvc_lib.execution.run.exit_codes import EXIT_OF_ERROR
from fvc_lib.execution.run.task import KernelRequest, execute_with_papermill, kernel_environment


def execute_record(
    name: str,
    folder: Path,
    parameters: Mapping[str, Any],
    *,
    page: Path,
    title: str,
    runs_dir: str,
    what: str,
    answer: Path | None = None,
) -> int:
    """Execute the notebook ``name`` into ``folder`` and write its offline ``page``; returns the exit code.

    What went wrong is told, ``what`` being the thing that was not made. ``answer`` is a file that the notebook writes,
    a sentence a line; the page begins with the first.

    Raises:
        OSError: the folder cannot be written.
    """
    from fvc_lib.analysis.pages.report import write_report  # plotly takes a second to load

    record = folder / f"{name}.ipynb"
    path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
    request = KernelRequest(
        record=record,
        root=folder,
        folder=NOTEBOOKS,
        environment={**kernel_environment(os.environ), "PYTHONPATH": path, "FVC_RUNS_DIR": runs_dir},
        log=folder / f"{name}.log",
        on_start=lambda _: None,
    )
    execute_with_papermill(NOTEBOOKS / record.name, dict(parameters), request)
    lines = answer.read_text(encoding="utf-8", errors="replace").splitlines() if answer and answer.is_file() else []
    write_report([record], page, title=title, answer=lines[:1])
    outcome = request.outcome
    if outcome is None or not outcome.ok:
        why = f"{outcome.error.name}: {outcome.error.message}" if outcome and outcome.error else "its kernel died"
        click.echo(f"error: {what} was not made: {why}\n  its record: {record}", err=True)
        return EXIT_OF_ERROR.get(outcome.error.name, 1) if outcome and outcome.error else 1
    return 0
