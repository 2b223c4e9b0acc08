#!/usr/bin/env python3
"""Run FVC's notebooks as one experiment: from a folder of videos to an honest report.

The options are papermill's where papermill has them. Everything a run writes goes into one run folder. What the
options mean is told by ``fvc_lib.command_line.main``, and by ``--help``.
"""

import signal
import sys

EXIT_CODES = {int(signal.SIGINT): 130, int(signal.SIGTERM): 75, int(signal.SIGUSR1): 75}  # as the runner's


def leave(number: int, frame: object) -> None:
    """Before the runner has its own handlers, and after it: leave with the documented code."""
    sys.exit(EXIT_CODES[number])


if __name__ == "__main__":
    if sys.version_info < (3, 11):  # noqa: UP036 - said in a sentence, where an import would fail with a traceback
        sys.exit(f"error: Python {sys.version_info[0]}.{sys.version_info[1]} is too old, FVC needs 3.11: `make setup`")
    for known in EXIT_CODES:  # before the libraries, which take seconds to load
        signal.signal(known, leave)

try:
    from fvc_lib.command_line.main import main
except ModuleNotFoundError as error:
    sys.exit(f"error: {error.name} is not installed for {sys.executable}; `make setup`, then .venv/bin/python")

if __name__ == "__main__":
    main()
