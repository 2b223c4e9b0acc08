"""Find the notebooks, parameter files and batch scripts: in a checkout, or in the installed package."""

import sys
from pathlib import Path

from fvc_lib import CHECKOUT

SCRIPT = CHECKOUT / "run_notebooks.py"
IS_CHECKOUT = SCRIPT.is_file()
# A wheel holds the folders of a checkout inside the package; setup.py copies them.
HOME = CHECKOUT if IS_CHECKOUT else CHECKOUT / "fvc_lib" / "installed"
NOTEBOOKS = HOME / "notebooks"
PARAMS = HOME / "params"
SLURM = HOME / "slurm"


def program() -> list[str]:
    """Return the words that start FVC in a shell: ``fvc``, or ``python run_notebooks.py``.

    The result is ``fvc`` if the current process was started by this name, or if there is no checkout. The script has
    its full path if the current folder is not the checkout.
    """
    if not IS_CHECKOUT or Path(sys.argv[0]).name == "fvc":
        return ["fvc"]
    try:
        here = Path().samefile(CHECKOUT)
    except OSError:  # the current folder was deleted
        here = False
    return ["python", SCRIPT.name if here else str(SCRIPT)]
