#!/usr/bin/env python3
"""Run FVC's notebooks as one experiment: from a folder of videos to an honest report.

The options are papermill's where papermill has them. Everything a run writes goes into one run folder.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from fvc_lib.corpus.sources import ACCEPTED
from fvc_lib.execution.asked_values import ask, changes, config_of_fork, config_to_resume, in_words
from fvc_lib.execution.forking import Inheritance, inheritance, take_over
from fvc_lib.execution.notebook_files import Notebook
from fvc_lib.execution.plan import PlannedTask, make_plan, read_notebooks
from fvc_lib.execution.run_lock import is_worked_on
from fvc_lib.execution.run_record import begin_run, record_resumption
from fvc_lib.execution.runner import Runner
from fvc_lib.execution.session import run_config
from fvc_lib.execution.stages import STAGES, stage_named
from fvc_lib.execution.status import read_status
from fvc_lib.services.allocator_settings import check_allocator_environment
from fvc_lib.services.config import RunConfig, resolve_config
from fvc_lib.services.errors import FvcError, UsageError
from fvc_lib.services.run_paths import RunPaths, find_run, list_runs

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
        except OSError as error:
            where = error.filename or "a file"
            click.echo(f"error: {where}: {error.strerror}. Is there space, and may it be written?", err=True)
            context.exit(1)


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
@click.option(
    "--fork", is_flag=True,
    help="With --resume RUN and other parameters: a new run with what is still true of RUN, which stays as it is.",
)  # fmt: skip
@click.option("--only", metavar="STAGE", help="Run this stage alone (for example 05), in --resume's run or the latest.")
@click.option(
    "--from", "start", metavar="STAGE", help="Run this stage and all after it, in --resume's run or the latest."
)
@click.option(
    "--profile-memory", is_flag=True,
    help="Record every allocation of the trainings; the same as -p profile_memory true. Slows them down.",
)  # fmt: skip
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
    fork: bool,
    only: str | None,
    start: str | None,
    profile_memory: bool,
    list_only: bool,
    dry_run: bool,
) -> None:
    """Run FVC's notebooks as one experiment: from a folder of videos to an honest report.

    \b
    python run_notebooks.py --params params/demo.yaml                        the built-in sample corpus
    python run_notebooks.py --params params/demo.yaml -p corpus ~/videos     real/ and fake/ in one folder
    python run_notebooks.py --params params/demo.yaml -p corpus list.csv     a manifest: path,label[,group]
    python run_notebooks.py --resume latest                                  go on where a run stopped
    python run_notebooks.py --resume latest --fork -p epochs 30              the same in a new run, with other values
    """  # noqa: D301 - click wants the backspace character itself before lines it shall not re-wrap
    if context.invoked_subcommand is not None:
        return
    notebooks = read_notebooks(NOTEBOOKS)
    if list_only:
        _print_notebooks(notebooks)
        return
    if only and start:
        raise UsageError("--only and --from exclude each other. Give one of them.")
    if fork and not resume:
        raise UsageError("--fork starts a new run from another one. Name that run: --resume RUN --fork.")
    only_stage, start_stage = stage_named(only) if only else None, stage_named(start) if start else None
    typed = {"experiment": experiment} if experiment is not None else {}
    asked = ask(params_files, yaml_texts, values, {**typed, **({"profile_memory": True} if profile_memory else {})})
    config = asked.config
    run = None
    if not (resume or only or start) or fork:
        _refuse_missing_corpus(config)
    if config.replay_run:
        find_run(Path(config.runs_dir), config.replay_run)  # said now, and not after an hour of other stages
    command = shlex.join(["python", "run_notebooks.py", *sys.argv[1:]])
    if resume or only or start:
        run = find_run(Path(config.runs_dir), resume or "latest", experiment)
        config = config_of_fork(run, asked) if fork else config_to_resume(run, asked, sys.argv[1:])

    def plan() -> list[PlannedTask]:
        return make_plan(notebooks, config, run, only=only_stage, start=start_stage)

    if dry_run:
        _print_plan(plan(), config, None if fork else run)
        if fork and run is not None:
            _print_fork(
                run, config, inheritance(run, make_plan(notebooks, config, run), changes(run_config(run), config))
            )
        return
    if run is None:
        planned = plan()
        run = begin_run(config, command=command)
        exit_code = _execute(run, config, notebooks, lambda: planned)
    elif fork:
        run = _begin_fork(run, config, notebooks, command)
        exit_code = _execute(run, config, notebooks, plan)
    else:
        exit_code = _execute(run, config, notebooks, plan, command=command)
    context.exit(exit_code)


def _refuse_missing_corpus(config: RunConfig) -> None:
    """The index stage would find out as well, after a kernel has started and a run has begun."""
    if config.corpus and not Path(config.corpus).exists():
        raise UsageError(f"corpus {config.corpus!r}: no such file or folder. {ACCEPTED}")


def _begin_fork(ancestor: RunPaths, config: RunConfig, notebooks: dict[str, Notebook], command: str) -> RunPaths:
    """Begin a new run with what is still true of ``ancestor`` under ``config``, and say what that is."""
    own = run_config(ancestor)
    changed = changes(own, config)
    taken = inheritance(ancestor, make_plan(notebooks, config, ancestor), changed)

    def binding_config(fold: int) -> dict[str, Any]:
        from fvc_lib.learning.fold_settings import training_parameters  # torch takes seconds to load

        return training_parameters(own, fold)

    def prepare(fork: RunPaths) -> dict[str, object]:
        take_over(ancestor, fork, taken, binding_config)
        return {"forked_from": ancestor.run_id, "changed": {name: list(change) for name, change in changed.items()}}

    fork = begin_run(config, command=command, prepare=prepare)
    _print_fork(ancestor, config, taken)
    return fork


def _execute(
    run: RunPaths,
    config: RunConfig,
    notebooks: dict[str, Notebook],
    plan: Callable[[], Sequence[PlannedTask]],
    command: str | None = None,
) -> int:
    """Run, then report whatever there is to report; trouble with the report does not change how the run ended."""
    click.echo(f"run {run.root}")
    for warning in check_allocator_environment():
        click.echo(f"warning: {warning}", err=True)

    def plan_and_record() -> Sequence[PlannedTask]:
        if command is not None and (differs := record_resumption(run, config, command=command)):
            click.echo(
                f"warning: this attempt differs from the one before: {'; '.join(differs)}. The run goes on, but is no "
                "longer bit for bit what an undisturbed one would be; run.json says so.",
                err=True,
            )
        return plan()

    exit_code = Runner(run, config, notebooks).execute(plan_and_record)
    from fvc_lib.analysis.run_summary import summary_lines, write_run_report  # plotly takes a second to load

    try:
        write_run_report(run)
    except (FvcError, OSError) as error:
        click.echo(f"warning: the report could not be written: {error}", err=True)
    for line in summary_lines(run):
        click.echo(line)
    return exit_code


@main.command()
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


@main.command()
@click.option(
    "--prune", is_flag=True, help="Delete what the preview lists as 'delete'. Without this nothing is changed."
)
@click.option(
    "--unused-days", type=click.FloatRange(min=0), default=30.0, show_default=True, metavar="DAYS",
    help="What no run has used for so many days is marked; 0: all that no living run works with.",
)  # fmt: skip
@click.option("--cache-dir", type=click.Path(path_type=Path), help="Cache folder, where it is not the default.")
@click.option("--runs-dir", type=click.Path(path_type=Path), help="Runs folder, where it is not the default.")
def clips(prune: bool, unused_days: float, cache_dir: Path | None, runs_dir: Path | None) -> None:
    """Show what the shared clip store holds; delete clips unused for long with --prune.

    Clips are made once for all runs with the same settings and stay until they are deleted here; a run that needs
    them again makes them again. Each set is shown with its size and last use. Clips of a run in --runs-dir that is
    being worked on are kept; of runs elsewhere that share the cache only the last use is known. Nothing outside the
    cache's clips folder is touched, no link is followed, and files that are not ours stand.

    \b
    python run_notebooks.py clips                              what is there, and what would go
    python run_notebooks.py clips --prune                      delete what was unused for 30 days
    python run_notebooks.py clips --prune --unused-days 0      delete all that no living run works with
    """  # noqa: D301 - click wants the backspace character itself before lines it shall not re-wrap
    from fvc_lib.video.clip_pruning import prune_set, stored_sets

    config = resolve_config()
    sets = stored_sets(cache_dir or Path(config.cache_dir))
    in_use = _clips_in_use(runs_dir or Path(config.runs_dir))
    chosen = []
    for clip_set in sets:
        days = max(0.0, time.time() - clip_set.last_used) / 86400
        used = clip_set.folder.parent.resolve() in in_use
        if not used and days >= unused_days:
            chosen.append(clip_set)
        what = "in use" if used else "delete" if clip_set in chosen else "keep"
        size = f"{clip_set.size_bytes / 1e6:10,.1f} MB {clip_set.num_files:8,} files"
        settings = json.dumps(clip_set.settings)
        click.echo(f"{what:<7} {size}, used {days:6.1f} days ago: {clip_set.name} {settings}")
    size = f"{len(chosen)} of {len(sets)} sets of clips, {sum(each.size_bytes for each in chosen) / 1e6:,.1f} MB"
    if not prune:
        click.echo(f"would delete {size}; repeat with --prune to do so" if chosen else f"nothing to delete ({size})")
        return
    pruned = [prune_set(clip_set) for clip_set in chosen]
    click.echo(f"deleted {size}, {sum(each.num_files for each in pruned):,} files")
    for path in (path for each in pruned for path in each.left):
        click.echo(f"left, because it is no clip: {str(path)!r}")


def _clips_in_use(runs_dir: Path) -> set[Path]:
    """The clip folders that living runs work with, by their settings now and by what they have written."""
    from fvc_lib.video.clip_store import ClipStore

    folders = set()
    for run in list_runs(runs_dir):
        if is_worked_on(run):
            config = run_config(run)
            folders.add(ClipStore.of(config).decode_folder.resolve())
            if run.augmented_metadata.is_file():  # made by another version of the code, perhaps
                with run.augmented_metadata.open("rb") as stream:
                    names = re.findall(rb"clips/decode_[0-9a-f]+", stream.read(1 << 16))
                folders |= {(Path(config.cache_dir) / os.fsdecode(name)).resolve() for name in names}
    return folders


def _print_notebooks(notebooks: dict[str, Notebook]) -> None:
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


def _print_fork(ancestor: RunPaths, config: RunConfig, taken: Inheritance) -> None:
    click.echo(f"fork of {ancestor.run_id}: {in_words(changes(run_config(ancestor), config))}")
    for line in taken.lines():
        click.echo(line)


if __name__ == "__main__":
    main()
