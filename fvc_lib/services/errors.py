"""Errors that a user can act on. A message names the wrong value, the allowed values and the remedy."""

import difflib
import shlex
from collections.abc import Iterable

from fvc_lib.services.home import program


class FvcError(Exception):
    """Base class of errors whose message is for the user; ``exit_code`` is the exit status of the command."""

    exit_code = 1


class UsageError(FvcError):
    """The request is wrong: an invalid parameter, file or option. Exit code 2."""

    exit_code = 2

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows for this error: its type and message, without the traceback."""
        return [f"{type(self).__name__}: {self}"]


class DataError(FvcError):
    """The data cannot give a valid result: it is too small, unreadable, or has a single class. Exit code 3."""

    exit_code = 3


class LeakageError(DataError):
    """The same data, or related data, is in both the training and the test part of a split. Exit code 3."""


class StoppedError(BaseException):
    """The work stopped on request, saved its state at a step boundary and can be resumed. Exit code 75.

    Like ``KeyboardInterrupt``, it is a ``BaseException`` but no ``Exception``. A signal can raise it at any line, for
    example while a user's file is imported. Code that handles a failed import must not catch it.
    """

    exit_code = 75


def command_text(*arguments: object) -> str:
    """Return a shell command that runs this program with ``arguments``, each quoted for the shell.

    It begins with ``fvc`` or ``python run_notebooks.py``, as the running program was started.
    """
    return shlex.join([*program(), *map(str, arguments)])


def did_you_mean(got: str, known: Iterable[str]) -> str:
    """Return a text such as `` Did you mean 'epochs'?``, with up to three names from ``known`` similar to ``got``.

    The text begins with a space. It is empty if no name is similar.
    """
    close = difflib.get_close_matches(got, list(known), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
