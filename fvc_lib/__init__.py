"""FVC: learn to tell real videos from fake ones, and say honestly how well it can."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

CHECKOUT = Path(__file__).resolve().parents[1]  # what holds this package, the notebooks and run_notebooks.py

if TYPE_CHECKING:
    load_detector: Callable[..., Any]  # of ``command_line/models.py``
else:

    def __getattr__(name: str) -> object:
        """``load_detector``; and what papermill takes from its engine ``fvc``, which the entry point says is this.

        papermill loads every entry point when it is imported. A module that each version of this package has keeps
        ``import papermill`` working beside code of another version than was installed, and loads nothing of ours.
        """
        if name == "load_detector":  # torch takes a second to load
            return import_module(f"{__name__}.command_line.models").load_detector
        if name not in {"execute_notebook", "nb_kernel_name", "nb_language"}:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # Put together, because a whole name in a text counts as an import: every notebook would depend on the engine.
        return getattr(import_module(f"{__name__}.execution.papermill_entry").FvcEngine, name)
