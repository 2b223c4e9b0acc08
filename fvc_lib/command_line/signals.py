"""Leave with a documented exit code when a signal comes while libraries load, or after the runner has ended."""

import signal
import sys

EXIT_CODES = {int(signal.SIGINT): 130, int(signal.SIGTERM): 75, int(signal.SIGUSR1): 75}  # as the runner's
stopped: list[int] = []  # the signals that came, outside the runner


def leave(number: int, frame: object) -> None:
    """Leave with the exit code of the first signal, while the runner has no handlers of its own."""
    stopped.append(number)
    sys.exit(EXIT_CODES[stopped[0]])


def ignore_signals() -> None:
    """Ignore signals at the very end: Python removes its handlers before it exits, and a signal would kill it."""
    for number in EXIT_CODES:
        signal.signal(number, signal.SIG_IGN)


def message_of_import(error: Exception) -> int | str:
    """Return what ``sys.exit`` gets for an error of an import: a missing package, or an import that a signal ended.

    Raises:
        Exception: ``error``, if it is neither.
    """
    if stopped:  # a library whose import was ended made an error of its own of it
        return EXIT_CODES[stopped[0]]
    if not isinstance(error, ModuleNotFoundError):
        raise error
    remedy = "`make setup`, then .venv/bin/python; or pip install fvc_lib again"
    return f"error: {error.name} is not installed for {sys.executable}; {remedy}"
