#!/usr/bin/env python3
"""Run FVC's notebooks as one experiment: the program ``fvc``, from a checkout that need not be installed."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - said in a sentence, where an import would fail with a traceback
    sys.exit(f"error: Python {sys.version_info[0]}.{sys.version_info[1]} is too old, FVC needs 3.11: `make setup`")

from fvc_lib.command_line.program import run

if __name__ == "__main__":
    run()
