"""Import the packages of published networks on first use, with error messages that name a remedy."""

import importlib
import sys
from typing import Any

import torch

from fvc_lib.engine.oom_detection import first_line
from fvc_lib.services.errors import UsageError

_DECLARATIONS: list[Any] = []  # torch removes a declaration when its object is deleted
REMEDY = "Install what published networks need: make setup-detectors, or pip install 'fvc_lib[detectors]'"


def imported(module: str, whose: str, remedy: str = REMEDY) -> Any:
    """Import and return a module that a network needs.

    Args:
        module: dotted name of the module.
        whose: name of the network, for the error message.
        remedy: last sentence of the error message, without its full stop.

    Raises:
        UsageError: the module's package is not installed, or does not work with the installed torch.
    """
    package = module.partition(".")[0]
    try:
        mend_torchvision()
        imported_module = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(f"network {whose!r} needs {package}, which is not installed ({error}). {remedy}.") from error
    except (ImportError, RuntimeError, OSError) as error:
        raise UsageError(
            f"network {whose!r} needs {package}, which does not start: {first_line(error)}. Mostly it was built for "
            f"another torch than {torch.__version__}: install both from one index. {remedy}."
        ) from error
    if module == "transformers":  # its progress bars and warnings about weights, which are checked here
        imported_module.utils.logging.disable_progress_bar()
        imported_module.utils.logging.set_verbosity_error()
    return imported_module


def mend_torchvision() -> None:
    """Declare the operators ``nms`` and ``qnms`` if the compiled part of torchvision cannot be loaded.

    The compiled part of the wheel on PyPI needs CUDA's libraries, which the CPU build of torch lacks. Then torchvision,
    timm and transformers cannot be imported, because the operator ``nms`` is missing. A declaration without code is
    enough, since no network here calls the operators.
    """
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        pass  # there is nothing to mend
    except (ImportError, RuntimeError, OSError):
        library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        _DECLARATIONS.append(library)
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]  # modules that the failed import left
