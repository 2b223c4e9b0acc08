"""Training checkpoints: complete or absent, verified when read, bound to their configuration and data.

A folder holds ``latest_checkpoint.pt``, ``checkpoint_epoch_NNN.pt`` (the last two epochs, as a fallback) and
``best_model.safetensors`` (a copy of the best weights in the latest). torch and safetensors load files with flipped
bits silently, so each file has its SHA-256 next to it (``<name>.sha256``, as ``sha256sum`` writes it). While a file is
replaced, its ``.sha256`` accepts the old and the new one.
"""

import hashlib
import json
import logging
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Any, Self

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fvc_lib.services import atomic_files
from fvc_lib.services.errors import FvcError, UsageError

LATEST = "latest_checkpoint.pt"
BEST = "best_model.safetensors"
_FORMAT = 1
_KEPT_EPOCHS = 2
_EPOCH_FILE = re.compile(r"^checkpoint_epoch_(\d{3,})\.pt$")
_UNLOADABLE = (pickle.UnpicklingError, zipfile.BadZipFile, EOFError, ValueError, KeyError)
_logger = logging.getLogger(__name__)


class DamagedCheckpointError(FvcError):
    """A checkpoint file that must not be used: wrong digest, no digest, or nothing that torch can load safely."""


class CheckpointReadError(FvcError):
    """A checkpoint file could not be read, for want of memory or because of the disk: it need not be damaged."""


class CheckpointWriteError(FvcError):
    """A checkpoint could not be written; the previous one is untouched."""


class CheckpointMismatchError(UsageError):
    """A checkpoint was made by another configuration or from other data. Exit code 2."""


class _HashingStream:
    """What torch writes to: one pass for the disk and the digest, and no second copy of the content in memory."""

    def __init__(self, stream: FileIO) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()
        self.failure: OSError | None = None

    def write(self, content: Any) -> int:
        """Both; torch hands over a few megabytes at a time.

        Torch's archive turns an exception from here into an "unexpected pos" of its own, so a failure is kept and the
        rest let pass: ``failure`` says what the disk said.
        """
        if self.failure is None:
            self._digest.update(content)
            try:
                self._put(memoryview(content))
            except OSError as error:
                self.failure = error
        return len(content)

    def _put(self, content: memoryview) -> None:
        while content:  # a full disk takes a part first
            content = content[self._stream.write(content) :]

    def flush(self) -> None:
        """Torch asks for it; the file is unbuffered."""

    def hexdigest(self) -> str:
        """Of everything written."""
        return self._digest.hexdigest()


def write_document_with_digest(path: Path, document: Mapping[str, Any]) -> str:
    """Replace ``path`` with ``document`` in torch's format; returns the hex SHA-256.

    Raises:
        OSError: as the file system gave it; ``path`` still holds its old content, and its digest accepts that.
    """

    def write(temporary: Path) -> str:
        with temporary.open("wb", buffering=0) as stream:
            hashing = _HashingStream(stream)
            _save(dict(document), hashing)
        return hashing.hexdigest()

    return _replace_with_digest(path, write)


def write_weights_with_digest(path: Path, weights: Mapping[str, Tensor], description: Mapping[str, Any]) -> str:
    """Replace ``path`` with ``weights`` in safetensors' format; equal weights and descriptions are equal files.

    Straight to the file: in memory, safetensors ends the whole process where there is not enough. Raises as
    ``write_document_with_digest``.
    """

    def write(temporary: Path) -> str:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        try:
            safetensors.torch.save_file(tensors, temporary, metadata=_metadata(description))
        except safetensors.SafetensorError as error:
            raise _disks_own_error(error) from error
        return atomic_files.sha256_of_file(temporary)

    return _replace_with_digest(path, write)


def write_copy_with_digest(path: Path, source: Path, digest: str) -> None:
    """Replace ``path`` with a copy of ``source``, whose SHA-256 is ``digest``.

    A copy and no link: damage to the one leaves the other. Raises as ``write_document_with_digest``, and
    DamagedCheckpointError where the copy is not what was written a moment ago.
    """

    def write(temporary: Path) -> str:
        shutil.copyfile(source, temporary)
        if atomic_files.sha256_of_file(temporary) != digest:
            raise DamagedCheckpointError(
                f"{str(source)!r} does not read back as it was written: the disk may be failing."
            )
        return digest

    _replace_with_digest(path, write)


def verify(path: Path) -> None:
    """Check that ``path`` is what its ``.sha256`` says, without keeping its content.

    Raises:
        DamagedCheckpointError: either file is missing, or the content is not what was written.
        CheckpointReadError: the disk refused; nothing is known to be damaged.
    """
    try:
        digest = atomic_files.sha256_of_file(path)
        accepted = _digest_path(path).read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, IsADirectoryError) as error:
        raise DamagedCheckpointError(f"{str(path)!r} cannot be verified: {error}.") from error
    except OSError as error:
        raise CheckpointReadError(
            f"{str(path)!r} cannot be read: {error.strerror or error}. It need not be damaged: see to the disk, then "
            "resume."
        ) from error
    if digest not in {line.split(" ")[0] for line in accepted.splitlines()}:
        raise DamagedCheckpointError(f"{str(path)!r} is damaged: its SHA-256 {digest[:12]}... is not the recorded one.")


def why_not_loaded(error: Exception) -> str:
    """Return why ``torch.load`` refused a file, without its advice to load it in a way that runs code."""
    if named := re.search(r"GLOBAL (\S+)", str(error)):
        return f"it holds objects of {named[1]}, which can run code when they are loaded"
    if "TorchScript" in str(error):
        return "it is a TorchScript program, which is code"
    if isinstance(error, pickle.UnpicklingError):
        return "it is no file of torch.save, or damaged"
    return str(error).partition("\n")[0].rstrip(". ") or type(error).__name__


def load_document(path: Path, wanted_format: int) -> dict[str, Any]:
    """Return the document in ``path`` after verifying it; a pickle that would run code is refused.

    Raises:
        DamagedCheckpointError: not torch's format, not loadable without running code, or not ``wanted_format``.
        CheckpointReadError: out of memory or a disk error; the file need not be damaged.
    """
    verify(path)
    try:
        with zipfile.ZipFile(path) as archive:  # torch's older format is a bare pickle
            if any(name.endswith("/constants.pkl") for name in archive.namelist()):
                raise pickle.UnpicklingError("it is a TorchScript program")
        document = torch.load(path, map_location="cpu", weights_only=True)
    except (*_UNLOADABLE, RuntimeError, OSError, MemoryError) as error:
        reason = why_not_loaded(error)
        if _is_archives_fault(error):
            raise DamagedCheckpointError(f"{str(path)!r} cannot be loaded safely: {reason}.") from error
        raise CheckpointReadError(
            f"{str(path)!r} is what was written and still cannot be read: {reason}. Is there enough memory? Give "
            "more, or end other programs, then resume."
        ) from error
    if not isinstance(document, dict) or document.get("format") != wanted_format:
        raise DamagedCheckpointError(f"{str(path)!r} is no training checkpoint of format {wanted_format}.")
    return document


def load_weights(path: Path) -> dict[str, Tensor]:
    """Weights by name, as ``write_weights_with_digest`` wrote them; raises as ``verify``."""
    verify(path)
    try:
        weights = safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        raise DamagedCheckpointError(f"{str(path)!r} holds no weights: {error}.") from error
    except (OSError, RuntimeError, MemoryError) as error:
        raise CheckpointReadError(
            f"{str(path)!r} is what was written and still cannot be read: {error}. Is there enough memory? Give more, "
            "then resume."
        ) from error
    if bad := tensors_with_nan(weights):
        raise DamagedCheckpointError(f"{str(path)!r} holds NaN in {bad}: these are no weights of a trained model.")
    return weights


def tensors_with_nan(weights: Mapping[str, Any]) -> str:
    """Return the names of up to five tensors that hold NaN; empty where none does. Infinity may be a mask's."""
    tensors = ((name, value) for name, value in weights.items() if isinstance(value, Tensor))
    return ", ".join(islice((name for name, tensor in tensors if tensor.isnan().any()), 5))


def _metadata(description: Mapping[str, Any]) -> dict[str, str]:
    """One entry, because safetensors writes several in random order."""
    return {"fvc": json.dumps(dict(description), sort_keys=True)}


def _save(document: dict[str, Any], stream: _HashingStream) -> None:
    """Without the archive's own checksums, which cost more than the digest that replaces them."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(document, stream)  # type: ignore[arg-type]  # it needs no more than write and flush
    finally:
        torch.serialization.set_crc32_options(before)
    if stream.failure is not None:
        raise stream.failure


def _replace_with_digest(path: Path, write: Callable[[Path], str]) -> str:
    """Replace ``path``; its ``.sha256`` accepts both files until the new one is in place, in case of a kill."""
    sidecar = _digest_path(path)
    with atomic_files.atomic_output(path) as temporary:
        digest = write(temporary)
        line = f"{digest}  {path.name}\n"
        before = sidecar.read_text(encoding="ascii", errors="replace") if sidecar.exists() else ""
        atomic_files.write_text(sidecar, line + before)
    atomic_files.write_text(sidecar, line)
    return digest


def _disks_own_error(error: Exception) -> Exception:
    """Return the disk's error that safetensors wraps into text, such as ``... (os error 28)``."""
    number = re.search(r"os error (\d+)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else error


def _is_archives_fault(error: BaseException) -> bool:
    """Whether what cannot be loaded is the archive's own doing, and neither memory's nor the disk's."""
    if isinstance(error, RuntimeError):
        return str(error).startswith("PytorchStreamReader")
    return isinstance(error, _UNLOADABLE)


def _digest_path(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


@dataclass(frozen=True)
class CheckpointBinding:
    """What a checkpoint belongs to. ``config`` holds JSON values, whole, so that a refusal can show what changed.

    ``network`` is what is trained: ``name`` of its class, ``file`` and a digest of its ``code``; empty where unknown.
    """

    config: Mapping[str, Any]
    data_fingerprint: str
    network: Mapping[str, str] = field(default_factory=dict)

    @property
    def config_hash(self) -> str:
        """Hex SHA-256 of ``config``, whatever the order of its keys."""
        return atomic_files.sha256_of_json(dict(self.config))

    def differences(self, other: Self) -> list[str]:
        """One readable clause per value in which ``other`` (the new one) differs from this."""
        mine, others = self.config, other.config
        names = [name for name in sorted({*mine, *others}) if mine.get(name) != others.get(name)]
        changed = [f"{name}: {mine.get(name)!r} -> {others.get(name)!r}" for name in names]
        if self.data_fingerprint != other.data_fingerprint:
            changed.append(f"training data: {self.data_fingerprint[:12]} -> {other.data_fingerprint[:12]}")
        return changed

    def is_of_another_network(self, other: Self) -> bool:
        """Whether ``other`` trains a class of another name or code; not where one of the two does not know its own."""
        both_known = self.network and other.network
        return bool(both_known) and any(self.network.get(n) != other.network.get(n) for n in ("name", "code"))


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
        report: told in one sentence about every damaged file.
        anew: the command that gives these checkpoints up, for messages.
    """

    def __init__(
        self,
        folder: Path,
        binding: CheckpointBinding,
        *,
        report: Callable[[str], None] = _logger.warning,
        anew: str = "train anew",
    ) -> None:
        self.folder = folder
        self._binding = binding
        self._report = report
        self._anew = anew
        self._best_epoch_on_disk: int | None = None
        if folder.is_dir():
            atomic_files.sweep_temporaries(folder)

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
        """Write the latest checkpoint, at an epoch's end also its own copy, and the best model if it changed.

        The state goes to the file piece by piece; there is no second copy in memory.

        Args:
            state: nested dicts and lists of tensors, numbers, text and None.
            epoch: completed epochs.
            step: completed optimizer steps.
            best_epoch: the epoch of ``best_model``; 0 if there is none yet.
            best_model: weights by name; may be empty.
            epoch_ended: True at the end of ``epoch``, False within the next one.

        Raises:
            CheckpointWriteError: the disk is full, read-only or gone. Earlier files still load.
            MemoryError: as torch raises it, or RuntimeError. Earlier files still load.
        """
        document = {
            "format": _FORMAT,
            "config": dict(self._binding.config),
            "data_fingerprint": self._binding.data_fingerprint,
            "network": dict(self._binding.network),
            "epoch": epoch,
            "step": step,
            "best_epoch": best_epoch,
            "best_model": dict(best_model),
            "state": dict(state),
        }
        try:
            self._write(document, epoch_ended and epoch > 0)
        except OSError as error:
            raise CheckpointWriteError(
                f"checkpoint in {str(self.folder)!r}: {error.strerror or error}; {_free_space(self.folder)}. The "
                "previous checkpoint is intact: make room or make the folder writable, then resume."
            ) from error

    def load(self) -> Checkpoint | None:
        """Return the newest whole checkpoint, or None; make the best model consistent with it.

        If no file can be used, rename them to ``<name>.unusable``, so that a new training does not overwrite them.

        Raises:
            CheckpointReadError: out of memory or a disk error; nothing was changed.
            CheckpointMismatchError: the checkpoint is of another configuration, network or data.
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
        self._set_unusable_aside()
        return None

    def _set_unusable_aside(self) -> None:
        unusable = [path for path in (*self._newest_first(), self.folder / BEST) if path.exists()]
        for path in unusable:
            _digest_path(path).unlink(missing_ok=True)
            path.replace(path.with_name(path.name + ".unusable"))
        if unusable:
            self._report(f"no checkpoint in {str(self.folder)!r} can be used: training begins at step 0.")

    def _write(self, document: dict[str, Any], epoch_ended: bool) -> None:
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

    def _read(self, path: Path) -> Checkpoint:
        """Return the checkpoint in ``path``; errors as of ``load``."""
        document = load_document(path, _FORMAT)
        try:
            stamped = CheckpointBinding(
                document["config"], document["data_fingerprint"], dict(document.get("network", {}))
            )
            names = ("epoch", "step", "state", "best_epoch", "best_model")
            checkpoint = Checkpoint(path, **{name: document[name] for name in names})
        except (KeyError, TypeError) as error:
            raise DamagedCheckpointError(f"{str(path)!r} is no training checkpoint of ours: {error!r}.") from error
        trained = atomic_files.as_mapping(checkpoint.state.get("model"))
        if bad := tensors_with_nan(checkpoint.best_model) or tensors_with_nan(trained):
            raise DamagedCheckpointError(f"{str(path)!r} holds NaN in {bad}.")
        if stamped.is_of_another_network(self._binding):
            raise CheckpointMismatchError(
                other_network(f"the checkpoint {str(path)!r}", stamped.network, self._binding.network, self._anew)
            )
        if changed := stamped.differences(self._binding):
            raise CheckpointMismatchError(
                f"{str(path)!r} was made by another configuration: {'; '.join(changed)}. Resume with the values it was "
                "made with, or start a new run from it with --fork."
            )
        return checkpoint

    def _repair_best(self, checkpoint: Checkpoint) -> None:
        """After a kill between the two files, or a fallback to an older checkpoint, the best model may be another's."""
        if not checkpoint.best_model:
            return
        if not self._is_best_on_disk(checkpoint):
            try:
                self._write_best(checkpoint.best_epoch, checkpoint.best_model)
            except OSError as error:
                raise CheckpointWriteError(f"{str(self.folder / BEST)!r}: {error.strerror or error}.") from error
        self._best_epoch_on_disk = checkpoint.best_epoch

    def _is_best_on_disk(self, checkpoint: Checkpoint) -> bool:
        try:
            found = load_weights(self.folder / BEST)
            with safetensors.safe_open(self.folder / BEST, "pt") as opened:
                described = opened.metadata() == _metadata(self._description(checkpoint.best_epoch))
        except DamagedCheckpointError:
            return False
        best = checkpoint.best_model
        return described and found.keys() == best.keys() and all(found[name].equal(best[name]) for name in found)

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
        for _, path in sorted(self._epoch_files(), reverse=True)[_KEPT_EPOCHS:]:
            _digest_path(path).unlink(missing_ok=True)  # first: a kill between them leaves a file that nobody trusts
            path.unlink(missing_ok=True)


def other_network(what: str, then: Mapping[str, str], now: Mapping[str, str], anew: str) -> str:
    """Return the message that ``what`` is of another network (``CheckpointBinding.network``).

    ``anew`` is the command that discards it.
    """
    changed = f"and {now['name']} in {now['file']!r} is to be trained now"
    if then["name"] == now["name"]:
        changed = f"whose code has changed since: {now['file']!r}"
    return (
        f"{what} is of the network {then['name']} in {then['file']!r}, {changed}. Put that network back to go on with "
        f'it; or train this one in a new run (run_dir "new"); or give the stored one up: {anew}'
    )


def _free_space(folder: Path) -> str:
    while not folder.exists():
        folder = folder.parent
    return f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB free on the disk of {str(folder)!r}"
