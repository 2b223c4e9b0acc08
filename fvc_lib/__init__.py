"""FVC: learn to tell real videos from fake ones, and say honestly how well it can.

``import fvc_lib as fvc`` gives the public functions, such as ``decode_clip`` and ``train``. ``dir(fvc)`` lists their
names. The functions are loaded at the first use. The stub file next to this one has their types.
"""

from importlib import import_module
from pathlib import Path

__version__ = "0.1.0"

CHECKOUT = Path(__file__).resolve().parents[1]  # what holds this package, the notebooks and run_notebooks.py

_PUBLIC = (
    "DataError", "Detector", "FvcError", "LeakageError", "Run", "UsageError", "decode_clip", "evaluate", "index",
    "list_runs", "load_detector", "make_folds", "open_run", "train",
)  # fmt: skip


def __dir__() -> list[str]:
    return sorted((*_PUBLIC, "__version__"))


def __getattr__(name: str) -> object:
    """Return the public function or class ``name``, which is imported at its first use.

    Three further names are attributes of FVC's engine for papermill. When papermill is imported, it loads the modules
    of all its engines and looks for these names later. This module is registered as the engine's module, so that
    ``import papermill`` loads no other module of FVC.
    """
    if name in _PUBLIC:
        return getattr(import_module(f"{__name__}.public"), name)
    if name not in {"execute_notebook", "nb_kernel_name", "nb_language"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Put together, because a whole name in a text counts as an import: every notebook would depend on the engine.
    return getattr(import_module(f"{__name__}.execution.papermill_entry").FvcEngine, name)
