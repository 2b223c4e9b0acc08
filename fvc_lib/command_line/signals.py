"""Leave with a documented exit code when a signal comes while libraries load, or after the runner has ended."""

import signal
import sys

EXIT_CODES = {int(signal.SIGINT): 130, int(signal.SIGTERM): 75, int(signal.SIGUSR1): 75}  # as the runner's
stopped: list[int] = []  # the signals that came, outside the runner


def leave(number: int, frame: object) -> None:
    """Handle a signal while the runner has not set its own handlers: exit with the code of the first signal."""
    stopped.append(number)
    sys.exit(EXIT_CODES[stopped[0]])


def ignore_signals() -> None:
    """Ignore signals while Python exits: it removes its handlers first, so a signal would kill the process."""
    for number in EXIT_CODES:
        signal.signal(number, signal.SIG_IGN)


def message_of_import(error: Exception) -> int | str:
    """Return the argument of ``sys.exit`` for the error of an import.

    It is an exit code if a signal ended the import, or a message if a package is missing.

    Raises:
        Exception: ``error``, if it has another cause.
    """
    if stopped:  # a library whose import was ended made an error of its own of it
        return EXIT_CODES[stopped[0]]
    if not isinstance(error, ModuleNotFoundError):
        raise error
    remedy = "`make setup`, then .venv/bin/python; or pip install fvc_lib again"
    return f"error: {error.name} is not installed for {sys.executable}; {remedy}"
