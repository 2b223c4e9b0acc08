"""Finds the project, and small stand-ins for the packages that a machine with torch and numpy alone lacks."""

import importlib.util
import os
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
_STAND_INS = Path(__file__).parent / "stand_ins"


def find_packages() -> list[str]:
    """Call it before anything of ``fvc_lib`` is imported; which packages are stood in for. Processes that this one
    starts find them too.
    """
    missing = [name for name in ("safetensors", "threadpoolctl") if importlib.util.find_spec(name) is None]
    folders = [str(CHECKOUT), *([str(_STAND_INS)] if missing else [])]
    sys.path += [folder for folder in folders if folder not in sys.path]
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH", "")]), *folders])
    return missing
