"""Types of the names that ``__init__.py`` loads at their first use."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # mypy then checks the library before this file
    from fvc_lib.public import (
        DataError as DataError,
        Detector as Detector,
        FvcError as FvcError,
        LeakageError as LeakageError,
        Run as Run,
        UsageError as UsageError,
        decode_clip as decode_clip,
        evaluate as evaluate,
        index as index,
        list_runs as list_runs,
        load_detector as load_detector,
        make_folds as make_folds,
        open_run as open_run,
        train as train,
    )

__version__: str
CHECKOUT: Path
