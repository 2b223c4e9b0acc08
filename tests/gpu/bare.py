"""Finds the project, and small stand-ins for the packages that a machine with torch and numpy alone lacks.

``python tests/gpu/bare.py MODULE ARGUMENTS`` runs a module then, as ``python -m`` does.
"""

import importlib.util
import os
import runpy
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
_STAND_INS = Path(__file__).parent / "stand_ins"


def find_packages() -> list[str]:
    """Call it before anything of ``fvc_lib`` is imported; gives which packages are stood in for. Processes that this
    one starts find them too.
    """
    missing = [name for name in ("safetensors", "threadpoolctl") if importlib.util.find_spec(name) is None]
    stand_ins = [str(_STAND_INS)] if missing else []
    sys.path = [str(CHECKOUT), *sys.path, *stand_ins]
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH", "")]), *stand_ins]
    )
    return missing


def prepare() -> list[str]:
    """``find_packages``, and what torch reads when it starts as a run has it. For a program, not for a test."""
    missing = find_packages()

    from fvc_lib.services.memory import allocator_environment

    os.environ |= allocator_environment()
    return missing


if __name__ == "__main__":
    stood_in = prepare()
    if stood_in:
        print(f"without {' and '.join(stood_in)}, which are stood in for", flush=True)
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
