"""FVC: learn to tell real videos from fake ones, and say honestly how well it can."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

__version__ = "0.1.0"

CHECKOUT = Path(__file__).resolve().parents[1]  # what holds this package, the notebooks and run_notebooks.py

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """What papermill takes from its engine ``fvc``, which the entry point says is this module.

        papermill loads every entry point when it is imported. A module that each version of this package has keeps
        ``import papermill`` working beside code of another version than was installed, and loads nothing of ours.
        """
        if name not in {"execute_notebook", "nb_kernel_name", "nb_language"}:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # Put together, because a whole name in a text counts as an import: every notebook would depend on the engine.
        return getattr(import_module(f"{__name__}.execution.kernel.engine").FvcEngine, name)
