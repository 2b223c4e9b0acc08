"""What the preflight measured and decided, kept in one JSON file so that it decides the same when asked again."""

from __future__ import annotations

import json
import logging
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fvc_lib.learning.joint_loss import joint_part
from fvc_lib.learning.preflight_plan import StepMeasurement
from fvc_lib.learning.preflight_probe import StepRequest
from fvc_lib.learning.random_state import forked_random_state
from fvc_lib.learning.task import Task
from fvc_lib.services.atomic_files import sha256_of_json, write_json

_logger = logging.getLogger(__name__)
_FORMAT = 1


def circumstances(request: StepRequest) -> dict[str, Any]:
    """Everything that decides what a step takes, as JSON values; equal ones need no second measurement.

    Raises:
        FvcError: the first training sample cannot be read.
    """
    compute = request.compute
    sample = request.task.training_data[0]
    allocator = {name: value for name, value in os.environ.items() if name.startswith(("MALLOC_", "PYTORCH_"))}
    compared = {"ranks": request.num_ranks} if joint_part(request.task) is not None and request.num_ranks > 1 else {}
    return {
        **compared,
        "task": f"{type(request.task).__module__}.{type(request.task).__qualname__}",
        "model": sha256_of_json([[name, list(shape)] for name, shape in _model_shapes(request.task)]),
        "sample": {name: [list(t.shape), str(t.dtype)] for name, t in sample.tensors.items()},
        "effective_batch": request.window_size,
        "device": compute.describe(),
        "gradient_checkpointing": request.gradient_checkpointing,
        "loader_processes": request.num_workers > 0,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "allocator": allocator,
    }


@dataclass(frozen=True)
class Decision:
    """The micro-batch that was chosen, and why something could not be measured (empty when all went well)."""

    micro_batch: int
    problem: str


class PreflightStore:
    """Measurements by the hash of their circumstances, decisions by that and the budget.

    A file that cannot be read or written costs a measurement, never the run; the log names it.

    Args:
        path: written atomically; None keeps nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def measurement(self, key: str) -> StepMeasurement | None:
        """What was found under these circumstances."""
        entry = self._read()["measurements"].get(key)
        try:
            return None if entry is None else StepMeasurement.from_document(entry["found"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            _logger.warning("%s: entry %s is not understood (%r) and measured again", self._path, key[:12], error)
            return None

    def decision(self, key: str) -> Decision | None:
        """What was decided."""
        entry = self._read()["decisions"].get(key)
        try:
            return None if entry is None else Decision(int(entry["micro_batch"]), str(entry["problem"]))
        except (KeyError, TypeError, ValueError) as error:
            _logger.warning("%s: decision %s is not understood (%r) and made again", self._path, key[:12], error)
            return None

    def keep_measurement(self, key: str, circumstances: dict[str, Any], found: StepMeasurement) -> None:
        """Remember ``found``; the circumstances stand beside it for a reader's eyes."""
        self._keep("measurements", key, {"circumstances": circumstances, "found": found.to_document()})

    def keep_decision(self, key: str, decision: Decision) -> None:
        """Remember what was decided."""
        self._keep("decisions", key, asdict(decision))

    def _keep(self, table: str, key: str, entry: dict[str, Any]) -> None:
        if self._path is None:
            return
        document = self._read()  # again: another fold may have written meanwhile
        document[table][key] = entry
        try:
            write_json(self._path, document)
        except OSError as error:
            _logger.warning("%s: not written (%s); the next fold measures again", self._path, error.strerror or error)

    def _read(self) -> dict[str, Any]:
        empty: dict[str, Any] = {"format": _FORMAT, "measurements": {}, "decisions": {}}
        if self._path is None or not self._path.exists():
            return empty
        try:
            document = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            _logger.warning("%s: not readable (%s); measuring again", self._path, error)
            return empty
        tables = ("measurements", "decisions")
        if (
            not isinstance(document, dict)
            or document.get("format") != _FORMAT
            or not all(isinstance(document.get(table), dict) for table in tables)
        ):
            _logger.warning("%s: not a preflight file of format %d; measuring again", self._path, _FORMAT)
            return empty
        return document


def _model_shapes(task: Task) -> list[tuple[str, torch.Size]]:
    """Names and shapes of the model's state, made without memory where the model can be."""
    with forked_random_state(0, torch.device("cpu")):
        try:
            with torch.device("meta"):
                model = task.build_model()
        except (RuntimeError, NotImplementedError):  # its set-up computes with values
            model = task.build_model()
    return [(name, tensor.shape) for name, tensor in model.state_dict().items()]
