"""What a training's step was measured to take: ``memory/preflight.json``.

By it the preflight decides the same for the next fold, and the plan of a resumed run how many folds it trains at once.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from fvc_lib.services.records.digests import read_document, write_document

_logger = logging.getLogger(__name__)

Decision = tuple[int, str]  # micro-batch, and why something could not be measured


@dataclass
class StepMeasurement:
    """What a child process found, in bytes: on CUDA of the device's memory, elsewhere resident in main memory."""

    first_use_bytes: int = 0  # what the first training of any process loads and keeps (libraries; on CUDA the context)
    batch_bytes: int = 0  # one effective batch as the loader hands it over
    worker_bytes: int = 0  # of one loader process, what it does not share with its parent
    step_bytes: dict[int, int] = field(default_factory=dict)  # by micro-batch, the peak of training steps above that
    seconds_per_sample: dict[int, float] = field(default_factory=dict)  # by micro-batch, of a training step
    failures: dict[int, str] = field(default_factory=dict)  # by micro-batch, why it could not run: out of memory
    room_bytes: int = 0  # of the budget, beside the training process, when it was measured; 0: not known


@dataclass
class MeasuredStep:
    """What was found, and for a reader's eyes under which circumstances."""

    circumstances: dict[str, Any]
    found: StepMeasurement


@dataclass
class StoredSteps:
    """A file of measurements by the hash of their circumstances, and of decisions by that and the budget."""

    measurements: dict[str, MeasuredStep]
    decisions: dict[str, Decision]
    format: Literal[3] = 3


def read_steps(path: Path | None) -> StoredSteps:
    """What ``path`` holds; nothing without one, or where it cannot be read, which the log says."""
    if path is not None and path.exists():
        from pydantic import TypeAdapter  # the engine itself needs torch and numpy alone

        try:
            return TypeAdapter(StoredSteps).validate_python(read_document(path))
        except (OSError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            _logger.warning("%s: not a preflight file (%s); measuring again", path, reason)
    return StoredSteps(measurements={}, decisions={})


def keep_steps(path: Path | None, measurements: Mapping[str, MeasuredStep], decisions: Mapping[str, Decision]) -> None:
    """Add them to the file at ``path``, if any; one that cannot be written costs a measurement, never the run."""
    if path is None:
        return
    stored = read_steps(path)  # again: another fold may have written meanwhile
    stored.measurements.update(measurements)
    stored.decisions.update(decisions)
    try:
        write_document(path, asdict(stored))
    except OSError as error:
        _logger.warning("%s: not written (%s); the next fold measures again", path, error.strerror or error)
