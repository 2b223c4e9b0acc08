#!/usr/bin/env python3
"""Run FVC's notebooks as one experiment: from a folder of videos to an honest report.

The options are papermill's where papermill has them. Everything a run writes goes into one run folder. ``--help`` and
``fvc_lib.command_line.main`` explain the options.
"""

import atexit
import resource
import signal
import sys

# A process with all libraries maps 2.8 to 3.5 GiB of addresses on two cores, and holds a tenth of that in memory. With
# less a library says so with a traceback of its own, or (OpenBLAS) tries again for ever while it is loaded.
LEAST_ADDRESS_BYTES = 4 * 2**30
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


if __name__ == "__main__":
    if sys.version_info < (3, 11):  # noqa: UP036 - said in a sentence, where an import would fail with a traceback
        sys.exit(f"error: Python {sys.version_info[0]}.{sys.version_info[1]} is too old, FVC needs 3.11: `make setup`")
    addresses = resource.getrlimit(resource.RLIMIT_AS)[0]
    if addresses != resource.RLIM_INFINITY and addresses < LEAST_ADDRESS_BYTES:
        print(
            f"error: a process may have {addresses / 2**30:.2f} GiB of addresses here (ulimit -v), wanted at least "
            f"{LEAST_ADDRESS_BYTES / 2**30:.0f} GiB: libraries reserve far more than they use. Set 'ulimit -v "
            "unlimited'; what limits memory itself is FVC_MEM_GB.",
            file=sys.stderr,
        )
        sys.exit(2)
    for known in EXIT_CODES:  # before the libraries, which take seconds to load
        signal.signal(known, leave)
    atexit.register(ignore_signals)  # the first to be registered runs last

try:
    from fvc_lib.command_line.main import main
except Exception as error:
    if stopped:  # a library whose import was ended made an error of its own of it
        sys.exit(EXIT_CODES[stopped[0]])
    if not isinstance(error, ModuleNotFoundError):
        raise
    sys.exit(f"error: {error.name} is not installed for {sys.executable}; `make setup`, then .venv/bin/python")

if __name__ == "__main__":
    main()
