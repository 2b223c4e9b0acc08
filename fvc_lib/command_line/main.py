"""The command line's options and what they mean; the work is done by the modules beside this one."""

from __future__ import annotations

import tempfile
import traceback
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from fvc_lib import CHECKOUT
from fvc_lib.command_line.commands import clips, compare, doctor, export_mlflow, index, report, status
from fvc_lib.command_line.run_command import Wanted
from fvc_lib.execution.plan.forking import ask
from fvc_lib.services.errors import FvcError, UsageError
from fvc_lib.services.memory_advice import MORE_MEMORY

EXIT_CODES = (
    "Exit codes: 0 ok, 1 a cell failed, 2 usage, 3 data or leakage gate, 75 stopped and resumable, "
    "130/143 interrupted, 137 killed for memory, 138 the kernel died otherwise."
)


def _unforeseen(error: Exception) -> int:
    """Say in three lines that something happened which nobody has foreseen; returns the exit code."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    click.echo(
        f"error: {type(error).__name__}: {error or 'no message'} ({frame.filename}, line {frame.lineno})", err=True
    )
    try:
        with tempfile.NamedTemporaryFile("w", prefix="fvc_error_", suffix=".txt", delete=False) as details:
            details.write("".join(traceback.format_exception(error)))
        click.echo(f"The whole traceback: {details.name}", err=True)
    except OSError as failure:
        click.echo(f"The whole traceback could not be written: {failure}", err=True)
    if isinstance(error, MemoryError):
        click.echo(
            f"Memory ran out in this process. Try {MORE_MEMORY}; --resume latest goes on with the run.", err=True
        )
        return 137
    click.echo("This is a defect of FVC, please report it; --resume latest goes on with the run.", err=True)
    return 1


class Commands(click.Group):
    """Turns errors into messages: FVC's own, a disk's, and those that nobody has foreseen."""

    def invoke(self, context: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(context)
        except FvcError as error:
            click.echo(f"error: {error}", err=True)
            context.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            context.exit(130)
        except BrokenPipeError:  # who read this has seen enough (`status | head`); click knows what to do
            raise
        except OSError as error:
            where = error.filename or "a file"
            click.echo(f"error: {where}: {error.strerror}. Is there space, and may it be written?", err=True)
            for note in getattr(error, "__notes__", ()):
                click.echo(note, err=True)
            context.exit(1)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:  # noqa: BLE001 - nobody is to read a traceback in place of a sentence
            context.exit(_unforeseen(error))


class Jobs(click.ParamType[int | None]):
    """A number of folds to train at once, or ``auto``, which is None."""

    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """Read what was given."""
        if value == "auto":
            return None
        try:
            return click.IntRange(min=1).convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{value!r} is neither a number from 1 on nor auto", param, ctx)


NOTEBOOKS = CHECKOUT / "notebooks"


@click.group(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog=EXIT_CODES,
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
    "--force", multiple=True, metavar="STAGE",
    help="Count this stage as not done, in --resume's run or the latest: it and what depends on it run. Repeatable.",
)  # fmt: skip
@click.option(
    "-j", "--jobs", type=Jobs(), default="auto", show_default=True,
    help="Train so many folds at once: a number, or auto for one per core (on a GPU: one). They share the memory "
    "budget, and the numbers stay the same.",
)  # fmt: skip
@click.option(
    "--executor", type=click.Choice(["local", "slurm"]), default="local", show_default=True,
    help="slurm: submit the run as dependent jobs, one array task per fold, with the settings of slurm/site.conf.",
)  # fmt: skip
@click.option("--one-job", is_flag=True, help="With --executor slurm: everything in one job, --jobs folds at a time.")
@click.option(
    "--tasks", metavar="KEYS",
    help="With --resume RUN: only these tasks or stages, comma-separated, beside other jobs that work on others.",
)  # fmt: skip
@click.option(
    "--profile-memory", is_flag=True,
    help="Record every allocation of the trainings; the same as -p profile_memory true. Slows them down.",
)  # fmt: skip
@click.option("--list", "list_only", is_flag=True, help="List the notebooks with their parameters and stop.")
@click.option(
    "--dry-run", is_flag=True, help="Print the plan with reasons and predicted memory, and stop; writes nothing."
)
@click.pass_context
def main(
    context: click.Context,
    /,
    params_files: tuple[Path, ...],
    yaml_texts: tuple[str, ...],
    values: tuple[tuple[str, str], ...],
    tasks: str | None,
    profile_memory: bool,
    list_only: bool,
    dry_run: bool,
    **options: Any,
) -> None:
    """Run FVC's notebooks as one experiment: from a folder of videos to an honest report.

    \b
    python run_notebooks.py --params params/demo.yaml                        the built-in sample corpus
    python run_notebooks.py --params params/demo.yaml -p corpus ~/videos     real/ and fake/ in one folder
    python run_notebooks.py --params params/demo.yaml -p corpus list.csv     a manifest: path,label[,group]
    python run_notebooks.py --resume latest                                  go on where a run stopped
    python run_notebooks.py --resume latest --fork -p epochs 30              the same in a new run, with other values
    python run_notebooks.py --params params/demo.yaml --jobs 1               one fold at a time, with all the memory
    python run_notebooks.py --params params/demo.yaml --executor slurm       as jobs of a cluster; first: --dry-run
    """  # noqa: D301 - click wants the backspace character itself before lines it shall not re-wrap
    if context.invoked_subcommand is not None:
        given = [name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if given:
            raise UsageError(
                f"options before {context.invoked_subcommand!r} would count for nothing; give them after it, where it "
                "has such an option (--help says)."
            )
        return
    # What runs notebooks takes a second to load, and looking at a run shall not wait for it.
    from fvc_lib.command_line.commands import print_notebooks
    from fvc_lib.command_line.run_command import RunCommand
    from fvc_lib.execution.plan.plan import read_notebooks

    if list_only:
        print_notebooks(read_notebooks(NOTEBOOKS))
        return
    typed = {"experiment": options["experiment"]} if options["experiment"] is not None else {}
    asked = ask(params_files, yaml_texts, values, {**typed, **({"profile_memory": True} if profile_memory else {})})
    wanted = Wanted(**options, tasks=None if tasks is None else tuple(filter(None, tasks.split(","))))
    command = RunCommand(NOTEBOOKS, wanted, asked)
    if dry_run:
        command.show()
        return
    context.exit(command.execute())


for command in (status, report, index, compare, export_mlflow, doctor, clips):
    main.add_command(command)
