"""The errors a user can act on. Each message says what was got, what was wanted and what to do."""

import difflib
import shlex
from collections.abc import Iterable
from pathlib import Path

from fvc_lib import CHECKOUT


class FvcError(Exception):
    """Base of every error whose message is meant for the user; ``exit_code`` is the command's."""

    exit_code = 1


class UsageError(FvcError):
    """The request itself is wrong: a parameter, a file or an option that cannot be meant. Exit code 2."""

    exit_code = 2


class DataError(FvcError):
    """The data cannot give an honest result: too little, unreadable, of one class. Exit code 3."""

    exit_code = 3


class LeakageError(DataError):
    """Something that belongs to one side of a split was found on both. Exit code 3."""


class StoppedError(BaseException):
    """The work was asked to stop, saved its state at a step boundary and can be resumed. Exit code 75.

    Like ``KeyboardInterrupt`` no ``Exception``: a signal raises it at any line, an import of a user's file or a read of
    a table among them, and whoever deals with those failing must not take it for their fault.
    """

    exit_code = 75


def command_text(*arguments: object) -> str:
    """``python run_notebooks.py ARGUMENTS``, quoted; outside the checkout's own folder with its path."""
    script = CHECKOUT / "run_notebooks.py"
    try:
        here = Path().samefile(CHECKOUT)
    except OSError:  # the current folder was deleted
        here = False
    return shlex.join(["python", script.name if here or not script.is_file() else str(script), *map(str, arguments)])


def did_you_mean(got: str, known: Iterable[str]) -> str:
    """Return a clause like `` Did you mean 'epochs'?`` with up to three near names, or an empty text."""
    close = difflib.get_close_matches(got, list(known), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
