"""Options that several commands share, such as ``-p``, and the printing of a command's result as JSON (``--json``).

The command line imports this module before it knows the command, so nothing heavy is imported here.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from fvc_lib.services.errors import UsageError
from fvc_lib.services.home import HOME

_NAME_AND_VALUE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VALUE_OPTIONS = ("-p", "--parameters", "-r", "--parameters_raw")
_QUIET = f"{__name__}.quiet"


def with_pairs(args: Sequence[str]) -> list[str]:
    """Return the command-line arguments ``args`` with every ``-p NAME=VALUE`` changed to ``-p NAME VALUE``.

    The options ``-r``, ``--parameters`` and ``--parameters_raw`` are treated in the same way.
    """
    found = list[str]()
    for place, text in enumerate(args):
        is_value = place and args[place - 1] in _VALUE_OPTIONS
        pair = _NAME_AND_VALUE.fullmatch(text) if is_value else None
        found += pair.groups() if pair else [text]
    return found


class ParametersCommand(click.Command):
    """A click command with options for parameters of a run, which also accepts ``-p NAME=VALUE``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, after every ``-p NAME=VALUE`` in them was changed to ``-p NAME VALUE``."""
        return super().parse_args(ctx, with_pairs(args))


class Jobs(click.ParamType[int | None]):
    """The click type of the option ``--jobs``: a number of folds to train at once, or ``auto``, which becomes None."""

    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """Return the number of folds to train at once; None for ``auto``."""
        return None if value == "auto" else click.IntRange(min=1).convert(value, param, ctx)


def _params_path(path: Path) -> Path:
    """Return ``path`` if it exists, else the file of this relative path that comes with FVC, such as params/demo.yaml.

    If there is no such file either, ``path`` is returned.
    """
    shipped = HOME / path
    return shipped if not path.exists() and shipped.is_file() else path


def _runs_dir() -> str:
    from fvc_lib.services.parameters import resolve_config  # pydantic takes a moment to load

    return resolve_config().runs_dir


def is_quiet() -> bool:
    """Return whether the running command was given ``-q``; it then shows no progress."""
    context = click.get_current_context(silent=True)
    return bool(context and context.meta.get(_QUIET))


PARAMS_FILES = click.option(
    "--params", "-f", "--parameters_file", "params_files", multiple=True,
    type=click.Path(path_type=Path), callback=lambda _context, _option, paths: tuple(map(_params_path, paths)),
    help="YAML file of parameters, for example params/demo.yaml. Repeatable; later files win.",
)  # fmt: skip
PARAMS_TEXTS = click.option(
    "-y", "--parameters_yaml", "yaml_texts", multiple=True,
    help="Parameters as YAML text: -y '{epochs: 5}'.",
)  # fmt: skip
# A declared type decides how a value is read, so that papermill's raw values need nothing else.
PARAMS_VALUES = click.option(
    "-p", "--parameters", "-r", "--parameters_raw", "values", nargs=2, multiple=True, metavar="NAME VALUE",
    help="One parameter, typed as the notebooks declare it: -p corpus ~/videos -p epochs=30. Wins over all else.",
)  # fmt: skip
RUNS_DIR = click.option(
    "--runs-dir", type=click.Path(path_type=Path), default=_runs_dir,
    callback=lambda _context, _option, path: path.absolute(),  # kernels run in another folder
    help="Runs folder, where it is not the default.",
)  # fmt: skip
JOBS = click.option(
    "-j", "--jobs", type=Jobs(), default="auto", show_default=True,
    help="Number of folds to train at once, or auto: one per core as far as memory goes, on GPUs as many as "
    "get one each, or num_ranks each. They share the memory budget; each computes with its part of the cores "
    "(OMP_NUM_THREADS says otherwise), so that the numbers stay the same.",
)  # fmt: skip
EXECUTOR = click.option(
    "--executor", type=click.Choice(["local", "slurm"]), default="local", show_default=True,
    help="slurm: submit the run as dependent jobs, one array task per fold, with the settings of slurm/site.conf.",
)  # fmt: skip
ERROR_RATE = click.option(
    "--error-rate", default=0.1, show_default=True, metavar="SHARE",
    help="Share of the reals that may be called fake, and of the fakes that may be called real.",
)  # fmt: skip
ALLOW_CODE = click.option(
    "--allow-code", is_flag=True, help="Run the code of a bundle's own network or crop: read it first."
)
FINAL = click.option(
    "--final", is_flag=True, help="Take the run's one network of all groups (train_final), not the folds'."
)
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print the answer as one JSON value, for scripts.")
QUIET = click.option(
    "-q", "--quiet", is_flag=True, expose_value=False, help="Show no progress, only the answer.",
    callback=lambda context, _option, value: context.meta.update({_QUIET: value}),
)  # fmt: skip


def refuse_where(refusals: Mapping[str, object]) -> None:
    """Raise an error if options of a command exclude each other, or if one option needs another.

    Args:
        refusals: ``{error message: condition}``. If a condition is true, the options are wrong.

    Raises:
        UsageError: a condition is true. The error has the message of the first such condition.
    """
    for message, is_wrong in refusals.items():
        if is_wrong:
            raise UsageError(message)


def print_json(value: object) -> None:
    """Print ``value`` as JSON in ASCII: dataclasses become objects, paths become texts, NaN becomes null."""
    from pydantic_core import to_json

    click.echo(json.dumps(json.loads(to_json(value, fallback=str, inf_nan_mode="null")), indent=1))


def print_answer(value: object, lines: Iterable[object], *, as_json: bool) -> None:
    """Print the result of a command: ``value`` as JSON if ``as_json`` is True, else ``lines`` as text."""
    if as_json:
        print_json(value)
    else:
        click.echo("\n".join(map(str, lines)))
