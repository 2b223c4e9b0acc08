#!/usr/bin/env python3
"""Run FVC's notebooks as one experiment: from a folder of videos to an honest report.

The options are papermill's where papermill has them. Everything a run writes goes into one run folder.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click
import yaml

from fvc_lib.execution.plan import PlannedTask, make_plan, read_notebooks
from fvc_lib.execution.run_record import begin_run
from fvc_lib.execution.runner import Runner
from fvc_lib.execution.session import run_config
from fvc_lib.execution.stages import STAGES, stage_named
from fvc_lib.execution.status import read_status
from fvc_lib.services.config import NOT_HASHED, RunConfig, parse_text_value, read_params_file, resolve_config
from fvc_lib.services.errors import FvcError, UsageError
from fvc_lib.services.run_paths import RunPaths, find_run

NOTEBOOKS = Path(__file__).resolve().parent / "notebooks"


class Commands(click.Group):
    """A group whose own failures are one clear line and the exit code that README's table explains."""

    def invoke(self, context: click.Context) -> Any:
        """Run, turning FVC's errors into a message and their exit code."""
        try:
            return super().invoke(context)
        except FvcError as error:
            click.echo(f"error: {error}", err=True)
            context.exit(error.exit_code)


@click.group(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Exit codes: 0 ok, 1 a cell failed, 2 usage, 3 data or leakage gate, 75 stopped and resumable, "
    "130/143 interrupted, 137 killed for memory, 138 the kernel died otherwise.",
)
@click.option(
    "--params", "-f", "--parameters-file", "params_files", multiple=True, type=click.Path(path_type=Path),
    help="YAML file of parameters, for example params/demo.yaml. Repeatable; later files win.",
)  # fmt: skip
@click.option("-y", "--parameters-yaml", "yaml_texts", multiple=True, help="Parameters as YAML text: -y '{epochs: 5}'.")
@click.option(
    "-p", "--parameters", "values", nargs=2, multiple=True, metavar="NAME VALUE",
    help="One parameter, typed as the notebooks declare it: -p corpus ~/videos -p epochs 30. Wins over all else.",
)  # fmt: skip
@click.option("--experiment", help="Folder under the runs folder that groups this run with others.")
@click.option("--resume", metavar="RUN", help="Continue a run: 'latest', a run id, a part of one, or a run folder.")
@click.option("--only", metavar="STAGE", help="Run this stage alone (for example 05), in --resume's run or the latest.")
@click.option(
    "--from", "start", metavar="STAGE", help="Run this stage and all after it, in --resume's run or the latest."
)
@click.option("--list", "list_only", is_flag=True, help="List the notebooks with their parameters and stop.")
@click.option("--dry-run", is_flag=True, help="Print the plan with reasons and stop; writes nothing.")
@click.pass_context
def main(
    context: click.Context,
    params_files: tuple[Path, ...],
    yaml_texts: tuple[str, ...],
    values: tuple[tuple[str, str], ...],
    experiment: str | None,
    resume: str | None,
    only: str | None,
    start: str | None,
    list_only: bool,
    dry_run: bool,
) -> None:
    r"""Run FVC's notebooks as one experiment: from a folder of videos to an honest report.

    \b
    python run_notebooks.py --params params/demo.yaml                        the built-in sample corpus
    python run_notebooks.py --params params/demo.yaml -p corpus ~/videos     real/ and fake/ in one folder
    python run_notebooks.py --params params/demo.yaml -p corpus list.csv     a manifest: path,label[,group]
    python run_notebooks.py --resume latest                                  go on where a run stopped
    """
    if context.invoked_subcommand is not None:
        return
    notebooks = read_notebooks(NOTEBOOKS)
    if list_only:
        _print_notebooks(notebooks)
        return
    config = resolve_config(_files(params_files), command_line=_command_line(yaml_texts, values, experiment))
    if only and start:
        raise UsageError("--only and --from exclude each other. Give one of them.")
    only_stage, start_stage = stage_named(only) if only else None, stage_named(start) if start else None
    run, config = _run_to_continue(
        config, resume or ("latest" if only or start else None), params_files, yaml_texts, values
    )
    plan = make_plan(notebooks, config, run, only=only_stage, start=start_stage)
    if dry_run:
        _print_plan(plan, config, run)
        return
    if run is None:
        run = begin_run(config, command=shlex.join(["python", "run_notebooks.py", *sys.argv[1:]]))
    click.echo(f"run {run.root}")
    exit_code = Runner(run, config, notebooks).execute(plan)
    from fvc_lib.analysis.run_summary import summary_lines, write_run_report

    write_run_report(run)
    for line in summary_lines(run):
        click.echo(line)
    context.exit(exit_code)


@main.command()
@click.argument("run", default="latest")
@click.option("--runs-dir", type=click.Path(path_type=Path), help="Runs folder, where it is not the default.")
def status(run: str, runs_dir: Path | None) -> None:
    """Show how far RUN is ('latest', a run id, a part of one, or a run folder)."""
    paths = find_run(runs_dir or Path(resolve_config().runs_dir), run)
    state = read_status(paths)
    click.echo(f"{paths.root}: {state.state}")
    for key, stage in state.stages.items():
        seconds = "" if stage.duration_seconds is None else f"{stage.duration_seconds:8.1f} s"
        click.echo(f"  {key:<28} {stage.state:<12} {seconds}  {stage.reason or ''}")


def _files(paths: tuple[Path, ...]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for path in paths:
        merged.update(read_params_file(path))
    return merged


def _command_line(
    yaml_texts: tuple[str, ...], values: tuple[tuple[str, str], ...], experiment: str | None
) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for text in yaml_texts:
        try:
            document = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UsageError(f"-y {text!r} is not valid YAML: {error}") from error
        if not isinstance(document, dict):
            raise UsageError(f"-y {text!r}: got a {type(document).__name__}, wanted a mapping like '{{epochs: 5}}'.")
        merged.update(document)
    merged.update({name: parse_text_value(name, value) for name, value in values})
    if experiment is not None:
        merged["experiment"] = experiment
    if merged.get("corpus"):
        merged["corpus"] = str(Path(merged["corpus"]).expanduser().absolute())
    return merged


def _run_to_continue(
    config: RunConfig,
    name: str | None,
    params_files: tuple[Path, ...],
    yaml_texts: tuple[str, ...],
    values: tuple[tuple[str, str], ...],
) -> tuple[RunPaths | None, RunConfig]:
    """The run to continue with its own configuration, or None for a new run with ``config``.

    Raises:
        UsageError: a parameter was given that differs from the run's own and could change its numbers.
    """
    if name is None:
        return None, config
    run = find_run(Path(config.runs_dir), name)
    own = run_config(run)
    if not (params_files or yaml_texts or values):
        return run, own
    asked = {**_files(params_files), **_command_line(yaml_texts, values, None)}
    hashed = {key for key in asked if key not in NOT_HASHED or key == "corpus"}
    changed = [f"{key} {getattr(own, key)!r} -> {getattr(config, key)!r}" for key in sorted(hashed)
               if getattr(own, key) != getattr(config, key)]  # fmt: skip
    if changed:
        raise UsageError(
            f"{run.run_id} was made with other values: {'; '.join(changed)}. "
            "Leave them out to resume it, or leave --resume out to start a new run with them."
        )
    return run, own.model_copy(update={key: getattr(config, key) for key in asked if key in NOT_HASHED})


def _print_notebooks(notebooks: dict[str, Any]) -> None:
    for stage in STAGES:
        notebook = notebooks[stage.name]
        click.echo(f"{stage.name}: {notebook.title}{' (one run per fold)' if stage.per_fold else ''}")
        for name, value in notebook.parameters.items():
            field = RunConfig.model_fields.get(name)
            meaning = field.description if field else "set by the runner; empty: the newest run"
            click.echo(f"    {name} = {value!r}  {meaning}")


def _print_plan(plan: list[PlannedTask], config: RunConfig, run: RunPaths | None) -> None:
    click.echo(f"corpus: {config.corpus or 'the generated sample corpus'}")
    click.echo(f"run: {run.root if run else 'a new folder under ' + str(Path(config.runs_dir) / config.experiment)}")
    for planned in plan:
        click.echo(f"  {'run ' if planned.run else 'skip'}  {planned.task.key:<28} {planned.reason}")


if __name__ == "__main__":
    main()
