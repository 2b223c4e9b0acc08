"""The command line of ``fvc``: its sub-commands, and the options that begin a run without a sub-command.

Every error of a command becomes a message and an exit code.
"""

import errno
import re
import sys
import tempfile
import traceback
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO, cast

import click
from click.core import ParameterSource

from fvc_lib import __version__
from fvc_lib.command_line import signals
from fvc_lib.command_line.shared_options import (
    EXECUTOR,
    JOBS,
    PARAMS_FILES,
    PARAMS_TEXTS,
    PARAMS_VALUES,
    QUIET,
    with_pairs,
)
from fvc_lib.services.errors import FvcError, StoppedError, UsageError, command_text, did_you_mean

# Every command with its module in this package, which is imported when the command is called, and its line in --help.
_COMMANDS = {
    "predict": ("verdicts.predict", "Ask a model whether videos are fake."),
    "status": ("commands", "Show how far a run is, its jobs included."),
    "report": ("commands", "Write a run's pages again."),
    "compare": ("commands", "Compare runs pair by pair, with intervals."),
    "audit": ("records", "Audit a table of anyone's scores."),
    "robustness": ("records", "Score test videos again after compression, blur, cuts."),
    "ensemble": ("records", "Judge by several runs together, next to the best of them."),
    "sweep": ("sweep", "Run every combination of values, and compare them."),
    "export": ("commands", "Write a run's detector to hand on, or runs to MLflow."),
    "app": ("verdicts.app", "Serve a page that judges videos dropped on it."),
    "corpora": ("commands", "List readable corpora, or say what a folder is."),
    "detectors": ("commands", "List the detectors for -p model, or show one in full."),
    "features": ("commands", "List the forensic features that a run can measure."),
    "doctor": ("run_command", "Check this machine and say what to do."),
    "clean": ("commands", "Show what may go of runs and caches; delete it with --yes."),
    "shard": ("shards", "Do one share of a stage, as a SLURM job does."),
}
EXIT_CODES = (
    "Exit codes: 0 ok, 1 a cell failed, 2 usage, 3 data or leakage gate, 75 stopped and resumable, "
    "130/143 interrupted, 137 killed for memory, 138 the kernel died otherwise."
)


def _unforeseen(error: Exception) -> int:
    """Print an error that FVC does not expect, and write its traceback into a temporary file that the message names.

    Returns:
        The exit code: 137 if memory ran out, else 1.
    """
    from fvc_lib.services.memory import memory_advice

    is_memory = isinstance(error, MemoryError)
    memory = f"Memory ran out in this process. {memory_advice('elsewhere')}"
    advice = memory if is_memory else "This is a defect of FVC, please report it;"
    with tempfile.NamedTemporaryFile("w", prefix="fvc_error_", suffix=".txt", delete=False) as details:
        traceback.print_exception(error, file=details)
    click.echo(
        f"error: {type(error).__name__}: {error}\nThe whole traceback: {details.name}\n"
        f"{advice} --resume latest goes on with the run.",
        err=True,
    )
    return 137 if is_memory else 1


# Control characters that stand before the text of a progress line, so that the line is drawn again in place.
_CURSOR = re.compile(r"(\r|\x1b\[(\d*[AJK]|\?25[hl]))*")


class _Terminal:
    """A wrapper of a text stream that writes control characters as readable escape sequences.

    So a file's name cannot control the terminal. Sequences that redraw a progress line (``_CURSOR``) are not changed.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        cursor = cast("re.Match[str]", _CURSOR.match(text))[0]
        shown = (
            char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode()
            for char in text.removeprefix(cursor)
        )  # fmt: skip
        return self._stream.write(cursor + "".join(shown))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Commands(click.Group):
    """A group of commands that turns every error into a message and an exit code; ``_COMMANDS`` names the commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, the most used first."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command ``cmd_name``; None if there is no such command."""
        if cmd_name not in _COMMANDS:
            return None
        module = import_module(f"fvc_lib.command_line.{_COMMANDS[cmd_name][0]}")
        return cast("click.Command", getattr(module, cmd_name.replace("-", "_")))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands for ``--help``, without importing their modules."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in _COMMANDS.items()])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command-line options, also ``-p NAME=VALUE`` in place of ``-p NAME VALUE``.

        Raises:
            click.NoSuchOption: an option is unknown. If it is the name of a parameter, the message shows how to give
                the parameter: ``-p NAME VALUE``.
        """
        try:
            return super().parse_args(ctx, with_pairs(args))
        except click.NoSuchOption as error:
            from fvc_lib.services.config import RunConfig

            name = error.option_name.lstrip("-").replace("-", "_")
            hint = f" A parameter is given as: -p {name} VALUE" * (name in RunConfig.model_fields)
            raise click.NoSuchOption(error.option_name, f"{error.message}{hint}", error.possibilities, ctx) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the name of the command that ``args`` begins with, the command, and the remaining arguments.

        Raises:
            UsageError: there is no such command. The message also shows how to give a corpus, because the word may be
                the path of a corpus.
        """
        if args[0] not in _COMMANDS:
            corpus, near = command_text("-p", "corpus", args[0]), did_you_mean(args[0], _COMMANDS)
            raise UsageError(
                f"{args[0]!r} is no command.{near} Commands: {', '.join(_COMMANDS)}; "
                f"a run needs none. If it is a corpus: {corpus} (several tars: 'a/{{0..9}}.tar')"
            )
        return super().resolve_command(ctx, args)

    def invoke(self, context: click.Context) -> Any:
        """Run the command. An error becomes a message on standard error and an exit code."""
        with (
            redirect_stdout(cast("TextIO", _Terminal(sys.stdout))),
            redirect_stderr(cast("TextIO", _Terminal(sys.stderr))),
        ):
            try:
                return super().invoke(context)
            except (FvcError, StoppedError) as error:
                click.echo(f"error: {error}".replace("\n", "\\n"), err=True)  # one line, whatever a name holds
                context.exit(error.exit_code)
            except KeyboardInterrupt:
                click.echo("interrupted", err=True)
                context.exit(130)
            except (BrokenPipeError, click.ClickException, click.exceptions.Exit, click.Abort):  # click handles them
                raise
            except OSError as error:
                remedy = _FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else _WRITABLE
                click.echo(f"error: {error.filename or 'a file'}: {error.strerror}. {remedy}", err=True)
                context.exit(1)
            except Exception as error:  # noqa: BLE001 - a sentence in place of a traceback
                if signals.stopped or isinstance(error, ModuleNotFoundError):  # a command loads its libraries late
                    sys.exit(signals.message_of_import(error))
                context.exit(_unforeseen(error))


_WRITABLE = "May it be written? Else choose another folder: --out or --to, FVC_RUNS_DIR, FVC_CACHE_DIR, FVC_DATA_DIR"
_FULL = "Make room (fvc clean shows what may go), or choose another folder: FVC_RUNS_DIR, FVC_CACHE_DIR"


@click.group(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog=EXIT_CODES,
)
@PARAMS_FILES
@PARAMS_TEXTS
@PARAMS_VALUES
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
@JOBS
@EXECUTOR
@click.option(
    "--tasks", metavar="KEYS",
    help="With --resume RUN: only these tasks or stages, comma-separated, while other jobs work on others.",
)  # fmt: skip
@click.option("--list", "list_only", is_flag=True, help="List the notebooks and all parameters, and stop.")
@click.option("--dry-run", is_flag=True, help="Print the plan with reasons, and stop; writes nothing.")
@QUIET
@click.version_option(__version__, "--version", prog_name="fvc")
@click.pass_context
def main(
    context: click.Context,
    /,
    params_files: tuple[Path, ...],
    yaml_texts: tuple[str, ...],
    values: tuple[tuple[str, str], ...],
    tasks: str | None,
    list_only: bool,
    dry_run: bool,
    **options: Any,
) -> None:
    """Learn to tell real videos from fake ones, and say honestly how well it can.

    \b
    fvc --params params/demo.yaml             try it: the built-in sample corpus, a report in two minutes
    fvc corpora ~/videos                      what a folder is recognised as: real/ and fake/ are enough
    fvc -p corpus ~/videos                    train and test on it; -p corpus list.csv: path,label[,group]
    fvc predict latest suspicious.mp4         fake, real or undecided, with the reasons
    fvc audit scores.csv                      what a table of anyone's scores shows, and what not

    \b
    fvc --resume latest                       go on where a run stopped
    fvc --resume latest --fork -p epochs 30   the same in a new run, with other values
    fvc -p corpus ~/videos --executor slurm   as jobs of a cluster; first: --dry-run
    fvc -p corpus 'shards/{000..099}.tar'     tars of videos and labels (WebDataset)

    Without a command, fvc runs the notebooks as one experiment. In a checkout, python run_notebooks.py is the same.
    """
    if context.invoked_subcommand is not None:
        if any(context.get_parameter_source(name) is ParameterSource.COMMANDLINE for name in context.params):
            raise UsageError(
                f"options before {context.invoked_subcommand!r} would count for nothing; give them after it."
            )
        return
    from fvc_lib.command_line import commands
    from fvc_lib.command_line.run_command import RunCommand, RunOptions
    from fvc_lib.execution.plan import read_notebooks
    from fvc_lib.execution.run.which_run import given_values, values_of_another_corpus
    from fvc_lib.services.home import NOTEBOOKS

    if list_only:
        commands.print_notebooks(read_notebooks(NOTEBOOKS))
        return
    typed = {"experiment": options["experiment"]} if options["experiment"] is not None else {}
    given = given_values(params_files, yaml_texts, values, typed)
    if not options["resume"] and (note := values_of_another_corpus(params_files, given.config)):
        click.echo(f"warning: {note}", err=True)
    keys = None if tasks is None else tuple(filter(None, tasks.split(",")))
    command = RunCommand(NOTEBOOKS, RunOptions(**options, tasks=keys), given)
    if dry_run:
        command.show()
        return
    context.exit(command.execute())
