"""Training checkpoints: complete or absent, verified when read, bound to what they were made from.

A folder holds ``latest_checkpoint.pt`` (the truth), ``checkpoint_epoch_NNN.pt`` (the last few epochs, the fallback)
and ``best_model.safetensors`` (derived from the latest, for use elsewhere), each with its digest beside it
(``checkpoint_files``). Training waits for a copy of the state only; writing and fsync happen in a thread beside it.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from fvc_lib.services.atomic_files import sha256_of_json, sweep_temporaries
from fvc_lib.services.checkpoint_files import (
    DamagedCheckpointError,
    are_weights_in,
    copied_to_cpu,
    load_document,
    load_weights,
    remove_with_digest,
    set_aside,
    write_copy_with_digest,
    write_document_with_digest,
    write_weights_with_digest,
)
from fvc_lib.services.errors import FvcError, UsageError
from fvc_lib.services.one_worker import OneWorker

LATEST = "latest_checkpoint.pt"
BEST = "best_model.safetensors"
FORK_NOTE = "forked_from.json"
_FORMAT = 1
_EPOCH_FILE = re.compile(r"^checkpoint_epoch_(\d{3,})\.pt$")
_logger = logging.getLogger(__name__)


class CheckpointWriteError(FvcError):
    """A checkpoint could not be written; the previous one is untouched."""


class CheckpointMismatchError(UsageError):
    """A checkpoint was made by another configuration or from other data. Exit code 2."""


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
    """What was read back: where from, and the state as it was saved (tensors on the CPU).

    ``ancestor`` is the run it was forked from, while nothing was saved since; else None.
    """

    path: Path
    epoch: int
    step: int
    state: dict[str, Any]
    best_epoch: int
    best_model: dict[str, Tensor]
    ancestor: str | None = None


class CheckpointFolder:
    """Reads and writes one training's checkpoints. One writer per folder.

    Args:
        folder: created when missing; temporaries of dead writers are swept.
        binding: every file is stamped with it, and a file with another one is refused, unless the folder's
            ``forked_from.json`` names that other one as this training's ancestor and the data are the same.
        keep_last: how many ``checkpoint_epoch_NNN.pt`` stay.
        report: told in one sentence about every damaged file, and about an ancestor's.
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
        self._writer = OneWorker("fvc-checkpoint")
        self._copy: Any = None  # of the state saved last: its memory serves for the next
        if folder.is_dir():
            sweep_temporaries(folder)

    @property
    def is_writing(self) -> bool:
        """Whether the checkpoint saved last is still on its way to the disk."""
        return self._writer.is_busy

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
        """Copy the state and write it beside the training: the latest checkpoint; at an epoch's end also its own
        copy, and the best model when it changed. ``finish`` waits for the disk; a second save waits for the first.

        Args:
            state: nested dicts and lists of tensors, numbers, text and None.
            epoch: epochs completed.
            step: optimizer steps completed.
            best_epoch: the epoch ``best_model`` comes from; 0 when there is none yet.
            best_model: weights by name on the CPU, which nobody changes any more; may be empty.
            epoch_ended: whether this is the end of ``epoch`` rather than the middle of the next.

        Raises:
            CheckpointWriteError: the previous save failed; see ``finish``.
        """
        self.finish()
        self._copy = copied_to_cpu(state, self._copy)
        document = {
            "format": _FORMAT,
            "config": dict(self._binding.config),
            "data_fingerprint": self._binding.data_fingerprint,
            "epoch": epoch,
            "step": step,
            "best_epoch": best_epoch,
            "best_model": dict(best_model),
            "state": self._copy,
        }
        self._writer.give(partial(self._write, document, epoch_ended and epoch > 0))

    def finish(self) -> None:
        """Wait until what was saved is on the disk.

        Raises:
            CheckpointWriteError: the disk is full, read-only or gone. The files from before still load.
        """
        try:
            self._writer.finish()
        except (MemoryError, RuntimeError) as error:  # torch says the latter when memory ends
            told = str(error).partition("\n")[0] or "memory ended"
            raise CheckpointWriteError(
                f"checkpoint in {str(self.folder)!r}: could not be written ({told}). The previous checkpoint is "
                "intact: where memory ended, give the job more, then resume."
            ) from error
        except OSError as error:
            raise CheckpointWriteError(
                f"checkpoint in {str(self.folder)!r}: {error.strerror or error}; {_free_space(self.folder)}. The "
                "previous checkpoint is intact: make room or make the folder writable, then resume."
            ) from error

    def wait(self) -> None:
        """The same without an error, on the way out of another one."""
        self._writer.wait()

    def give_memory_back(self) -> None:
        """Wait until what was saved is written, and keep no copy of it: for when memory is short."""
        self.wait()
        self._copy = None

    def load(self) -> Checkpoint | None:
        """The newest checkpoint that is whole, or None when there is none. The best model is made consistent with it.

        Where there are files and none can be used, they are renamed to ``<name>.unusable``: a training that begins anew
        neither overwrites them nor counts them among its own.

        Raises:
            CheckpointReadError: a file could not be read, for want of memory or because of the disk; all is as it was.
            CheckpointMismatchError: it was made by another configuration or from other data; the message lists what.
            CheckpointWriteError: the last save failed, or the best model had to be written again and could not be.
        """
        self.finish()
        self._copy = None  # whoever loads a state needs the room for that
        for path in self._newest_first():
            try:
                checkpoint = self._read(path)
            except DamagedCheckpointError as error:
                self._report(f"{error} Trying the one before it.")
                continue
            if checkpoint is None:
                continue
            self._repair_best(checkpoint)
            return checkpoint
        self._set_unusable_aside()
        return None

    def _set_unusable_aside(self) -> None:
        unusable = [path for path in (*self._newest_first(), self.folder / BEST) if path.exists()]
        for path in unusable:
            set_aside(path)
        if unusable:
            self._report(f"no checkpoint in {str(self.folder)!r} can be used: training begins at step 0.")

    def _write(self, document: dict[str, Any], epoch_ended: bool) -> None:
        """In the writer's thread."""
        latest = self.folder / LATEST
        if epoch_ended:  # the copy first, so that a fallback is never behind what it falls back from
            own = self.folder / f"checkpoint_epoch_{document['epoch']:03d}.pt"
            digest = write_document_with_digest(own, document)
            write_copy_with_digest(latest, own, digest)
        else:
            write_document_with_digest(latest, document)
        if document["best_epoch"] != self._best_epoch_on_disk:
            self._write_best(document["best_epoch"], document["best_model"])
        self._drop_old_epochs()

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

    def _read(self, path: Path) -> Checkpoint | None:
        """The checkpoint in ``path``; None when it is an ancestor's that this training must not go on from."""
        document = load_document(path, _FORMAT)
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
        changed = stamped.differences(self._binding)
        if not changed:
            return checkpoint
        ancestor = self._ancestor()
        if ancestor is None or ancestor[1] != stamped.config:
            raise CheckpointMismatchError(
                f"{str(path)!r} was made by another configuration: {'; '.join(changed)}. Resume with the values it was "
                "made with, or start a new run from it with --fork."
            )
        if stamped.data_fingerprint != self._binding.data_fingerprint:
            # Its weights have seen videos that are tested on now.
            self._report(f"{path.name} of {ancestor[0]} was trained on other videos: this training begins anew.")
            return None
        self._report(f"goes on from step {checkpoint.step} of {ancestor[0]}, with {'; '.join(changed)}.")
        return replace(checkpoint, ancestor=ancestor[0])

    def _ancestor(self) -> tuple[str, dict[str, Any]] | None:
        """Run and configuration that this training was forked from."""
        try:
            note = json.loads((self.folder / FORK_NOTE).read_text(encoding="utf-8"))
            return str(note["run_id"]), dict(note["config"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedCheckpointError(f"{str(self.folder / FORK_NOTE)!r} cannot be read: {error!r}.") from error

    def _repair_best(self, checkpoint: Checkpoint) -> None:
        """After a kill between the two files, or a fallback to an older checkpoint, the best model may be another's."""
        if not checkpoint.best_model:
            return
        if not are_weights_in(self.folder / BEST, checkpoint.best_model, self._description(checkpoint.best_epoch)):
            try:
                self._write_best(checkpoint.best_epoch, checkpoint.best_model)
            except OSError as error:
                raise CheckpointWriteError(f"{str(self.folder / BEST)!r}: {error.strerror or error}.") from error
        self._best_epoch_on_disk = checkpoint.best_epoch

    def _write_best(self, best_epoch: int, best_model: Mapping[str, Tensor]) -> None:
        if best_model:
            write_weights_with_digest(self.folder / BEST, best_model, self._description(best_epoch))
        self._best_epoch_on_disk = best_epoch

    def _description(self, best_epoch: int) -> dict[str, Any]:
        return {
            "best_epoch": best_epoch,
            "config_hash": self._binding.config_hash,
            "data_fingerprint": self._binding.data_fingerprint,
        }

    def _drop_old_epochs(self) -> None:
        for _, path in sorted(self._epoch_files(), reverse=True)[self._keep_last :]:
            remove_with_digest(path)


def load_best_model(folder: Path) -> dict[str, Tensor]:
    """Weights by name from ``best_model.safetensors`` in ``folder``, on the CPU.

    Raises:
        DamagedCheckpointError: missing or damaged; loading the folder's checkpoint writes it again.
    """
    return load_weights(folder / BEST)


def _free_space(folder: Path) -> str:
    while not folder.exists():
        folder = folder.parent
    return f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB free on the disk of {str(folder)!r}"
