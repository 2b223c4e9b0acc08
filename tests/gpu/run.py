"""``make test-gpu``: try every promise on this machine's GPU, with only torch and numpy installed.

Print the machine and one line per promise. Without a GPU, say so and succeed, unless the user named a device.
"""

from __future__ import annotations

import argparse
import sys

from bare import find_packages, prepare


def main(words: list[str] | None = None) -> int:
    """Return the exit status: 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="make test-gpu", description=__doc__)
    parser.add_argument("--device", default="auto", help="cuda, mps or cpu; auto: a GPU, or nothing is tried")
    parser.add_argument("--only", default="", help="promises with these words")
    asked = parser.parse_args(words)
    missing = find_packages()

    import torch

    from fvc_lib.engine.device import resolve_device
    from fvc_lib.services.errors import UsageError
    from tests.gpu.promises import machine, try_promises

    if asked.device == "auto" and resolve_device().device.type == "cpu":
        print(f"skipped: torch {torch.__version__} finds no GPU on this machine; DEVICE=cpu tries what the CPU can do")
        return 0
    try:
        print(machine(asked.device), flush=True)
        if missing:
            print(f"without {' and '.join(missing)}, which stand-ins replace")
        broken = 0
        for outcome in try_promises(asked.device, asked.only):
            print(outcome.line(), flush=True)
            broken += outcome.verdict == "fail"
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{broken} promises broken" if broken else "every promise that could be tried was kept")
    return int(broken > 0)


if __name__ == "__main__":
    prepare()
    sys.exit(main())
