"""Find the project, and small stand-ins for packages that a machine with only torch and numpy lacks.

``python tests/gpu/bare.py MODULE ARGUMENTS`` then runs a module, as ``python -m`` does.
"""

import importlib.util
import os
import runpy
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
_STAND_INS = Path(__file__).parent / "stand_ins"


def find_packages() -> list[str]:
    """Put the project and stand-ins on Python's path, and return the names of the replaced packages.

    Call this before an import of ``fvc_lib``. Child processes find the stand-ins too.
    """
    missing = [name for name in ("safetensors", "threadpoolctl") if importlib.util.find_spec(name) is None]
    stand_ins = [str(_STAND_INS)] if missing else []
    sys.path = [str(CHECKOUT), *sys.path, *stand_ins]
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH", "")]), *stand_ins]
    )
    return missing


def prepare() -> list[str]:
    """Call ``find_packages``, and set the allocator's environment as a run does. For programs, not for tests."""
    missing = find_packages()

    from fvc_lib.services.memory import allocator_environment

    os.environ |= allocator_environment()
    return missing


if __name__ == "__main__":
    stood_in = prepare()
    if stood_in:
        print(f"without {' and '.join(stood_in)}, which stand-ins replace", flush=True)
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
