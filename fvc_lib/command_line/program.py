"""Start the program ``fvc``, which is also ``python run_notebooks.py``.

The options are in ``fvc_lib.command_line.main``, whose libraries are loaded after the signals' handlers are set.
"""

import atexit
import resource
import signal
import sys

from fvc_lib.command_line.signals import EXIT_CODES, ignore_signals, leave, message_of_import

# A process with all libraries maps 2.8 to 3.5 GiB of addresses on two cores, and holds a tenth of that in memory. With
# less a library says so with a traceback of its own, or (OpenBLAS) tries again for ever while it is loaded.
LEAST_ADDRESS_BYTES = 4 * 2**30


def run() -> None:
    """Run the command that the command-line arguments of this process name, and exit with its exit code.

    Raises:
        SystemExit: always, with the exit code; it is 2 if the address space of the process is limited too tightly.
    """
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

    except Exception as error:  # noqa: BLE001 - any error that a library makes of a signal
        sys.exit(message_of_import(error))
    main()


if __name__ == "__main__":
    run()
