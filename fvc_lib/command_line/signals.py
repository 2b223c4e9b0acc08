"""Exit with a documented exit code if a signal comes while the run's own signal handlers are not set.

They are not set while libraries load, and after the runner (the code that executes a run) has ended.
"""

import signal
import sys

EXIT_CODES = {int(signal.SIGINT): 130, int(signal.SIGTERM): 75, int(signal.SIGUSR1): 75}  # as the runner's
stopped: list[int] = []  # the signals that came, outside the runner


def leave(number: int, frame: object) -> None:
    """Exit with the exit code of the first signal that came; a signal handler for use before the run sets its own.

    ``number`` is the number of the signal; ``frame`` is not used.
    """
    stopped.append(number)
    sys.exit(EXIT_CODES[stopped[0]])


def ignore_signals() -> None:
    """Make the process ignore the signals of ``EXIT_CODES`` from now on; called while Python exits.

    Python removes signal handlers at exit, so a signal would otherwise kill the process.
    """
    for number in EXIT_CODES:
        signal.signal(number, signal.SIG_IGN)


def message_of_import(error: Exception) -> int | str:
    """Return the argument with which ``sys.exit`` is called after an import has failed with ``error``.

    The argument is an exit code if a signal ended the import, or a message if a package is missing.

    Raises:
        Exception: ``error``, if it has another cause.
    """
    if stopped:  # a library whose import was ended made an error of its own of it
        return EXIT_CODES[stopped[0]]
    if not isinstance(error, ModuleNotFoundError):
        raise error
    remedy = "`make setup`, then .venv/bin/python; or pip install fvc_lib again"
    return f"error: {error.name} is not installed for {sys.executable}; {remedy}"
