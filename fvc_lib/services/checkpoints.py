"""Training checkpoints: complete or absent, verified when read, bound to what they were made from.

A folder holds ``latest_checkpoint.pt`` (the truth), ``checkpoint_epoch_NNN.pt`` (the last few epochs, the fallback)
and ``best_model.safetensors`` (derived from the latest, for use elsewhere). Beside each lies ``<name>.sha256``,
because torch and safetensors load a file with flipped bits without a word.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from fvc_lib.services.atomic_files import sha256_of_json, sweep_temporaries, write_bytes, write_text
from fvc_lib.services.errors import FvcError, UsageError

LATEST = "latest_checkpoint.pt"
BEST = "best_model.safetensors"
_FORMAT = 1
_EPOCH_FILE = re.compile(r"^checkpoint_epoch_(\d{3,})\.pt$")
_logger = logging.getLogger(__name__)


class CheckpointWriteError(FvcError):
    """A checkpoint could not be written; the previous one is untouched."""


class CheckpointMismatchError(UsageError):
    """A checkpoint was made by another configuration or from other data. Exit code 2."""


class DamagedCheckpointError(FvcError):
    """A checkpoint file that must not be used: wrong digest, no digest, or nothing that torch can load safely."""


@dataclass(frozen=True)
class CheckpointBinding:
    """What a checkpoint belongs to. ``config`` holds JSON values, whole, so that a refusal can show what changed."""

    config: Mapping[str, Any]
    data_fingerprint: str

    @property
    def config_hash(self) -> str:
        """Hex SHA-256 of ``config``, whatever the order of its keys."""
        return sha256_of_json(dict(self.config))

    def differences(self, other: CheckpointBinding) -> list[str]:
        """One readable clause per value in which ``other`` (the new one) differs from this."""
        names = sorted({*self.config, *other.config})
        changed = [
            f"{name}: {self.config.get(name)!r} -> {other.config.get(name)!r}"
            for name in names
            if self.config.get(name) != other.config.get(name)
        ]
        if self.data_fingerprint != other.data_fingerprint:
            changed.append(f"training data: {self.data_fingerprint[:12]} -> {other.data_fingerprint[:12]}")
        return changed


@dataclass(frozen=True)
class Checkpoint:
    """What was read back: where from, and the state as it was saved (tensors on the CPU)."""

    path: Path
    epoch: int
    step: int
    state: dict[str, Any]
    best_epoch: int
    best_model: dict[str, Tensor]


class CheckpointFolder:
    """Reads and writes one training's checkpoints. One writer per folder.

    Args:
        folder: created when missing; temporaries of dead writers are swept.
        binding: every file is stamped with it, and a file with another one is refused.
        keep_last: how many ``checkpoint_epoch_NNN.pt`` stay.
        report: told in one sentence about every damaged file.
    """

    def __init__(
        self,
        folder: Path,
        binding: CheckpointBinding,
        *,
        keep_last: int = 2,
        report: Callable[[str], None] = _logger.warning,
    ) -> None:
        self.folder = folder
        self._binding = binding
        self._keep_last = keep_last
        self._report = report
        self._best_epoch_on_disk: int | None = None
        if folder.is_dir():
            sweep_temporaries(folder)

    def save(
        self,
        state: Mapping[str, Any],
        *,
        epoch: int,
        step: int,
        best_epoch: int,
        best_model: Mapping[str, Tensor],
        epoch_ended: bool,
    ) -> None:
        """Write the latest checkpoint; at an epoch's end also its own copy, and the best model when it changed.

        Args:
            state: nested dicts and lists of tensors, numbers, text and None.
            epoch: epochs completed.
            step: optimizer steps completed.
            best_epoch: the epoch ``best_model`` comes from; 0 when there is none yet.
            best_model: weights by name; may be empty.
            epoch_ended: whether this is the end of ``epoch`` rather than the middle of the next.

        Raises:
            CheckpointWriteError: the disk is full, read-only or gone. The files from before still load.
        """
        content = self._serialised(state, epoch, step, best_epoch, best_model)
        try:
            if epoch_ended and epoch > 0:
                _write_with_digest(self.folder / f"checkpoint_epoch_{epoch:03d}.pt", content)
            _write_with_digest(self.folder / LATEST, content)
            if best_epoch != self._best_epoch_on_disk:
                self._write_best(best_epoch, best_model)
            self._drop_old_epochs()
        except OSError as error:
            raise CheckpointWriteError(
                f"checkpoint in {str(self.folder)!r}: {error.strerror or error}; {_free_space(self.folder)}. The "
                "previous checkpoint is intact: make room or make the folder writable, then resume."
            ) from error

    def load(self) -> Checkpoint | None:
        """The newest checkpoint that is whole, or None when there is none. The best model is made consistent with it.

        Raises:
            CheckpointMismatchError: it was made by another configuration or from other data; the message lists what.
            CheckpointWriteError: the best model had to be written again and could not be.
        """
        for path in self._newest_first():
            try:
                checkpoint = self._read(path)
            except DamagedCheckpointError as error:
                self._report(f"{error} Trying the one before it.")
                continue
            self._repair_best(checkpoint)
            return checkpoint
        return None

    def _serialised(
        self,
        state: Mapping[str, Any],
        epoch: int,
        step: int,
        best_epoch: int,
        best_model: Mapping[str, Tensor],
    ) -> bytes:
        buffer = io.BytesIO()
        document = {
            "format": _FORMAT,
            "config": dict(self._binding.config),
            "data_fingerprint": self._binding.data_fingerprint,
            "epoch": epoch,
            "step": step,
            "best_epoch": best_epoch,
            "best_model": dict(best_model),
            "state": dict(state),
        }
        torch.save(document, buffer)
        return buffer.getvalue()

    def _newest_first(self) -> Iterator[Path]:
        latest = self.folder / LATEST
        if latest.exists():
            yield latest
        for _, path in sorted(self._epoch_files(), reverse=True):
            yield path

    def _epoch_files(self) -> list[tuple[int, Path]]:
        if not self.folder.is_dir():
            return []
        matches = ((_EPOCH_FILE.match(path.name), path) for path in self.folder.iterdir())
        return [(int(match[1]), path) for match, path in matches if match]

    def _read(self, path: Path) -> Checkpoint:
        document = _load_safely(path, read_verified(path))
        try:
            stamped = CheckpointBinding(document["config"], document["data_fingerprint"])
            checkpoint = Checkpoint(
                path,
                document["epoch"],
                document["step"],
                document["state"],
                document["best_epoch"],
                document["best_model"],
            )
        except (KeyError, TypeError) as error:
            raise DamagedCheckpointError(f"{str(path)!r} is no training checkpoint of ours: {error!r}.") from error
        if changed := stamped.differences(self._binding):
            raise CheckpointMismatchError(
                f"{str(path)!r} was made by another configuration: {'; '.join(changed)}. Resume with the values it was "
                "made with, or start a new run."
            )
        return checkpoint

    def _repair_best(self, checkpoint: Checkpoint) -> None:
        """After a kill between the two files, or a fallback to an older checkpoint, the best model may be another's."""
        wanted = self._best_bytes(checkpoint.best_epoch, checkpoint.best_model)
        try:
            intact = read_verified(self.folder / BEST) == wanted
        except DamagedCheckpointError:
            intact = False
        if intact or not checkpoint.best_model:
            self._best_epoch_on_disk = checkpoint.best_epoch if intact else None
            return
        try:
            self._write_best(checkpoint.best_epoch, checkpoint.best_model)
        except OSError as error:
            raise CheckpointWriteError(f"{str(self.folder / BEST)!r}: {error.strerror or error}.") from error

    def _best_bytes(self, best_epoch: int, best_model: Mapping[str, Tensor]) -> bytes:
        described = {
            "best_epoch": best_epoch,
            "config_hash": self._binding.config_hash,
            "data_fingerprint": self._binding.data_fingerprint,
        }
        # One entry, because safetensors writes several in random order: equal models are equal files.
        metadata = {"fvc": json.dumps(described, sort_keys=True)}
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in best_model.items()}
        return safetensors.torch.save(tensors, metadata=metadata)

    def _write_best(self, best_epoch: int, best_model: Mapping[str, Tensor]) -> None:
        if best_model:
            _write_with_digest(self.folder / BEST, self._best_bytes(best_epoch, best_model))
        self._best_epoch_on_disk = best_epoch

    def _drop_old_epochs(self) -> None:
        for _, path in sorted(self._epoch_files(), reverse=True)[self._keep_last :]:
            path.unlink(missing_ok=True)
            _digest_path(path).unlink(missing_ok=True)


def read_verified(path: Path) -> bytes:
    """The content of ``path`` when it is what its ``.sha256`` says.

    Raises:
        DamagedCheckpointError: either file is missing or unreadable, or the content is not what was written.
    """
    try:
        content = path.read_bytes()
        accepted = _digest_path(path).read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise DamagedCheckpointError(f"{str(path)!r} cannot be verified: {error}.") from error
    digest = hashlib.sha256(content).hexdigest()
    if digest not in {line.split(" ")[0] for line in accepted.splitlines()}:
        raise DamagedCheckpointError(f"{str(path)!r} is damaged: its SHA-256 {digest[:12]}... is not the recorded one.")
    return content


def load_best_model(folder: Path) -> dict[str, Tensor]:
    """Weights by name from ``best_model.safetensors`` in ``folder``, on the CPU.

    Raises:
        DamagedCheckpointError: missing or damaged; loading the folder's checkpoint writes it again.
    """
    return safetensors.torch.load(read_verified(folder / BEST))


def _write_with_digest(path: Path, content: bytes) -> None:
    """Replace ``path`` so that at every moment its digests accept it, and accept nothing that was never written.

    The new digest goes first, beside the old: whichever file a kill leaves is accepted. Then the old one goes.
    """
    sidecar = _digest_path(path)
    line = f"{hashlib.sha256(content).hexdigest()}  {path.name}\n"
    before = sidecar.read_text(encoding="ascii", errors="replace") if sidecar.exists() else ""
    write_text(sidecar, line + before)
    write_bytes(path, content)
    write_text(sidecar, line)


def _digest_path(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _load_safely(path: Path, content: bytes) -> dict[str, Any]:
    """Weights-only: a pickle that would run code is refused, whatever its digest says."""
    if not zipfile.is_zipfile(io.BytesIO(content)):
        raise DamagedCheckpointError(f"{str(path)!r} cannot be loaded safely: it is not in torch's zip format.")
    try:
        document = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        first_line = str(error).partition("\n")[0]
        raise DamagedCheckpointError(f"{str(path)!r} cannot be loaded safely: {first_line}.") from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise DamagedCheckpointError(f"{str(path)!r} is no training checkpoint of format {_FORMAT}.")
    return document


def _free_space(folder: Path) -> str:
    while not folder.exists():
        folder = folder.parent
    return f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB free on the disk of {str(folder)!r}"
