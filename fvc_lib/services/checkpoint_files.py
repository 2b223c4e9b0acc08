"""Write and read training checkpoints.

A checkpoint file is written atomically, verified when it is read, and valid for one configuration and data set.

The checkpoint folder of a training holds three files. ``latest_checkpoint.pt`` is the newest checkpoint, and
``previous_checkpoint.pt`` the checkpoint before it. ``best_model.safetensors`` is a copy of the best weights in the
latest checkpoint. torch and safetensors do not notice flipped bits, so every file holds a SHA-256 of its content.
After the end of a training, the latest checkpoint holds only the history and the best model.
"""

import hashlib
import json
import logging
import pickle
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
PREVIOUS = "previous_checkpoint.pt"
BEST = "best_model.safetensors"
_FORMAT = 1
_DIGEST_LENGTH = 64  # hexadecimal digits of a SHA-256
_logger = logging.getLogger(__name__)


class DamagedCheckpointError(FvcError):
    """A checkpoint file is unusable: its SHA-256 is wrong, it holds NaN, or torch cannot load it safely.

    Loading is unsafe if the file holds pickled objects that run code.
    """


class CheckpointReadError(FvcError):
    """A checkpoint file could not be read because memory ran out or the disk failed; the file may be undamaged."""


class CheckpointWriteError(FvcError):
    """A checkpoint could not be written; the previous one is untouched."""


class CheckpointMismatchError(UsageError):
    """A checkpoint was made with another configuration, network or data set. The command exits with status 2."""


# --- Documents: files of ``torch.save``, followed by their SHA-256 as 64 hexadecimal digits, which torch ignores


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Write the dict ``document`` to the file ``path`` in torch's format, followed by the SHA-256 of the content.

    The write is not atomic.

    Raises:
        OSError: the file cannot be written.
    """
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # the digest replaces the checksums and takes less time
    try:
        with path.open("wb") as stream:
            torch.save(dict(document), stream)
    except RuntimeError as error:  # torch's archive hides the disk's own error behind a wrong position
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None
    finally:
        torch.serialization.set_crc32_options(before)
    append_digest(path)


def append_digest(path: Path) -> None:
    """Append to the file at ``path`` the SHA-256 of its content, in hexadecimal."""
    digest = atomic_files.sha256_of_file(path)
    with path.open("ab") as stream:
        stream.write(digest.encode())


def load_document(path: Path, wanted_format: int = _FORMAT) -> dict[str, Any]:
    """Verify the SHA-256 of the file at ``path`` and return the dict in it, which ``write_document`` wrote.

    Args:
        path: the file.
        wanted_format: the value that the document must have under the key ``format``.

    Raises:
        DamagedCheckpointError: the digest is wrong, the file holds pickled objects that could run code, or the
            document has another format.
        CheckpointReadError: memory ran out or the disk failed; the file may be undamaged.
    """
    try:
        size = path.stat().st_size - _DIGEST_LENGTH
        with path.open("rb") as stream:
            digest = atomic_files.sha256_of_stream(stream, max(0, size))
            if size < 0 or stream.read().decode("ascii", "replace") != digest:
                raise DamagedCheckpointError(f"{str(path)!r} is damaged: its SHA-256 is not the recorded one.")
        document = torch.load(path, map_location="cpu", weights_only=True)
    except DamagedCheckpointError:
        raise
    except Exception as error:
        raise _refusal(path, error) from error
    if not isinstance(document, dict) or document.get("format") != wanted_format:
        raise DamagedCheckpointError(f"{str(path)!r} is no training checkpoint of format {wanted_format}.")
    return document


def why_not_loaded(error: Exception) -> str:
    """Return a short text that says why ``torch.load`` raised ``error``.

    Torch's own advice, to load the file with ``weights_only=False``, is left out because it is unsafe.
    """
    if named := re.search(r"GLOBAL (\S+)", str(error)):
        return f"it holds objects of {named[1]}, which can run code when they are loaded"
    if isinstance(error, pickle.UnpicklingError):
        return "it is no file of torch.save, or damaged"
    return str(error).partition("\n")[0].rstrip(". ") or type(error).__name__


def _refusal(path: Path, error: Exception) -> FvcError:
    """Return the error to raise after reading ``path`` failed with ``error``.

    It is ``CheckpointReadError`` if memory ran out or the disk failed, else ``DamagedCheckpointError``.
    """
    if isinstance(error, OSError | MemoryError) or "alloc" in str(error).lower():
        return CheckpointReadError(
            f"{str(path)!r} cannot be read now: {why_not_loaded(error)}. It need not be damaged: see to the disk and "
            "to enough memory, then resume."
        )
    return DamagedCheckpointError(f"{str(path)!r} cannot be loaded safely: {why_not_loaded(error)}.")


# --- Weights in safetensors' format, whose digest stands in the header


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the names, shapes, dtypes and bits of ``weights``, in hexadecimal.

    The tensors may be on any device; the device does not change the result.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        if tensor.numel():
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_weights_with_digest(path: Path, weights: Mapping[str, Tensor], description: Mapping[str, Any]) -> None:
    """Replace ``path`` atomically with a safetensors file of ``weights``, ``description`` and digests of both.

    ``description`` must be valid JSON; it is stored in the header. Equal arguments give byte-identical files.

    Raises:
        OSError: the file cannot be written; ``path`` keeps its old content.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    described = {**description, "weights_sha256": weights_digest(tensors)}
    described["sha256"] = atomic_files.sha256_of_json(described)
    with atomic_files.atomic_output(path) as temporary:
        try:  # one entry, because safetensors writes several in random order
            metadata = {"fvc": json.dumps(described, sort_keys=True)}
            safetensors.torch.save_file(tensors, temporary, metadata=metadata)
        except safetensors.SafetensorError as error:  # it wraps the disk's error into text
            raise OSError(str(error)) from error


def load_weights(path: Path) -> dict[str, Tensor]:
    """Return the weights, by name, from a file that ``write_weights_with_digest`` wrote.

    Raises:
        DamagedCheckpointError: the file is missing, has a wrong digest, is not loadable, or holds NaN.
        CheckpointReadError: memory ran out or the disk failed; the file may be undamaged.
    """
    try:
        weights = safetensors.torch.load_file(path)
        with safetensors.safe_open(path, "pt") as opened:
            described = json.loads((opened.metadata() or {})["fvc"])
        digest = described.pop("sha256")
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{str(path)!r} is missing.") from error
    except Exception as error:
        raise _refusal(path, error) from error
    if digest != atomic_files.sha256_of_json(described) or described["weights_sha256"] != weights_digest(weights):
        raise DamagedCheckpointError(f"{str(path)!r} is damaged: its SHA-256 is not the recorded one.")
    if bad := tensors_with_nan(weights):
        raise DamagedCheckpointError(f"{str(path)!r} holds NaN in {bad}: these are no weights of a trained model.")
    return weights


def tensors_with_nan(weights: Mapping[str, Any]) -> str:
    """Return the names of the tensors that contain NaN, at most five, joined by commas; empty if none does.

    Infinity is allowed, because masks use it. Values that are no tensors are ignored.
    """
    tensors = ((name, value) for name, value in weights.items() if isinstance(value, Tensor))
    return ", ".join(islice((name for name, tensor in tensors if tensor.isnan().any()), 5))


# --- One training's folder


@dataclass(frozen=True)
class CheckpointBinding:
    """The configuration, data and network for which a checkpoint is valid.

    Attributes:
        config: the configuration as JSON values by field name. Messages name the fields that changed.
        data_fingerprint: a digest of the training data.
        network: a dict with the trained class's ``name``, its ``file`` and a digest of its ``code``; empty: unknown.
    """

    config: Mapping[str, Any]
    data_fingerprint: str
    network: Mapping[str, str] = field(default_factory=dict)

    def differences(self, other: Self) -> list[str]:
        """Return the differences from this binding to ``other`` as texts, such as ``epochs: 20 -> 30``.

        Only configuration and data are compared, not the network. The list is empty if both are equal.
        """
        mine, others = self.config, other.config
        names = [name for name in sorted({*mine, *others}) if mine.get(name) != others.get(name)]
        changed = [f"{name}: {mine.get(name)!r} -> {others.get(name)!r}" for name in names]
        if self.data_fingerprint != other.data_fingerprint:
            changed.append(f"training data: {self.data_fingerprint[:12]} -> {other.data_fingerprint[:12]}")
        return changed


@dataclass(frozen=True)
class Checkpoint:
    """The content of the checkpoint file ``path``, with all tensors on the CPU.

    ``epoch`` and ``step`` count completed epochs and optimizer steps; ``state`` is the training's state.
    ``best_model`` has the best weights by name, from epoch ``best_epoch`` (0: no best model yet).
    """

    path: Path
    epoch: int
    step: int
    state: dict[str, Any]
    best_epoch: int
    best_model: dict[str, Tensor]


class CheckpointFolder:
    """The folder of one training's checkpoints, with methods that read and write them.

    Only one process may write to a folder at a time.

    Args:
        folder: the checkpoint folder. The first save creates it. Temporary files of processes that have ended are
            removed.
        binding: the configuration, data and network of the training. Checkpoints store it, and ``load`` refuses a
            checkpoint with another binding.
        report: function that is called with a sentence about every damaged file.
        anew: the command, for error messages, that discards the checkpoints so that training starts over.
    """

    def __init__(
        self,
        folder: Path,
        binding: CheckpointBinding,
        *,
        report: Callable[[str], None] = _logger.warning,
        anew: str = "train again",
    ) -> None:
        self.folder = folder
        self._binding = binding
        self._report = report
        self._anew = anew
        self._best_epoch_on_disk: int | None = None
        if folder.is_dir():
            atomic_files.sweep_temporaries(folder)

    def save(
        self, state: Mapping[str, Any], *, epoch: int, step: int, best_epoch: int, best_model: Mapping[str, Tensor]
    ) -> None:
        """Write ``latest_checkpoint.pt``; the file that had this name becomes ``previous_checkpoint.pt``.

        The best model is also written to its own file if ``best_epoch`` has changed. The state is written piece by
        piece, without a second copy in memory.

        Args:
            state: the training's state: nested dicts and lists of tensors, numbers, text and None.
            epoch: completed epochs.
            step: completed optimizer steps.
            best_epoch: the epoch of ``best_model``; 0 if there is none yet.
            best_model: weights by name; may be empty.

        Raises:
            CheckpointWriteError: the disk is full, read-only or gone. Earlier files still load.
            MemoryError: memory ran out; torch may raise RuntimeError instead. Earlier files still load.
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
        latest = self.folder / LATEST
        try:
            with atomic_files.atomic_output(latest) as temporary:
                write_document(temporary, document)
                if latest.exists():
                    latest.replace(self.folder / PREVIOUS)
            if best_epoch != self._best_epoch_on_disk:
                self._write_best(best_epoch, best_model)
        except OSError as error:
            raise self._not_written(error) from error

    def _not_written(self, error: OSError) -> CheckpointWriteError:
        folder = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        free = f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB free on the disk of {str(folder)!r}"
        return CheckpointWriteError(
            f"checkpoint in {str(self.folder)!r}: {error.strerror or error}; {free}. The previous checkpoint is "
            "intact: make room or make the folder writable, then resume."
        )

    def load(self) -> Checkpoint | None:
        """Return the newest undamaged checkpoint; None if there is none.

        If ``best_model.safetensors`` differs from the best model in this checkpoint, it is written again. They differ
        after the process was killed between the two writes. A damaged checkpoint file is renamed to
        ``<name>.unusable``, so that the next save does not replace the good previous checkpoint with it.

        Raises:
            CheckpointReadError: memory ran out or the disk failed; nothing was changed.
            CheckpointMismatchError: the checkpoint belongs to another configuration, network or data set.
            CheckpointWriteError: the best model could not be written.
        """
        paths = [path for path in (self.folder / LATEST, self.folder / PREVIOUS) if path.exists()]
        for path in paths:
            try:
                checkpoint = self._read(path)
            except DamagedCheckpointError as error:
                path.replace(path.with_name(f"{path.name}.unusable"))
                self._report(f"{error} It is kept as {path.name}.unusable. Trying the one before it.")
                continue
            try:
                if not self._has_best(checkpoint.best_model):
                    self._write_best(checkpoint.best_epoch, checkpoint.best_model)
            except OSError as error:
                raise self._not_written(error) from error
            self._best_epoch_on_disk = checkpoint.best_epoch
            return checkpoint
        if paths:
            self._report(f"no checkpoint in {str(self.folder)!r} can be used: training begins at step 0.")
        return None

    def _read(self, path: Path) -> Checkpoint:
        """Return the checkpoint in the file ``path``.

        Raises:
            DamagedCheckpointError: the file is damaged, or holds NaN.
            CheckpointReadError: memory ran out or the disk failed.
            CheckpointMismatchError: the checkpoint belongs to another configuration, network or data set.
        """
        document = load_document(path)
        try:
            stamped = CheckpointBinding(document["config"], document["data_fingerprint"], dict(document["network"]))
            names = ("epoch", "step", "state", "best_epoch", "best_model")
            checkpoint = Checkpoint(path, **{name: document[name] for name in names})
            bad = tensors_with_nan(checkpoint.best_model) or tensors_with_nan(checkpoint.state.get("model", {}))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedCheckpointError(f"{str(path)!r} is no training checkpoint of ours: {error!r}.") from error
        if bad:
            raise DamagedCheckpointError(f"{str(path)!r} holds NaN in {bad}.")
        then, now = stamped.network, self._binding.network
        both_known = bool(then and now)
        if both_known and any(then.get(name) != now.get(name) for name in ("name", "code")):
            raise CheckpointMismatchError(other_network(f"the checkpoint {str(path)!r}", then, now, self._anew))
        if changed := stamped.differences(self._binding):
            raise CheckpointMismatchError(
                f"{str(path)!r} was made by another configuration: {'; '.join(changed)}. Resume with the values it was "
                "made with, or start a new run from it with --fork."
            )
        return checkpoint

    def _has_best(self, best_model: Mapping[str, Tensor]) -> bool:
        try:
            return weights_digest(load_weights(self.folder / BEST)) == weights_digest(best_model)
        except DamagedCheckpointError:
            return not best_model

    def _write_best(self, best_epoch: int, best_model: Mapping[str, Tensor]) -> None:
        if best_model:
            write_weights_with_digest(self.folder / BEST, best_model, {})
        self._best_epoch_on_disk = best_epoch

    def drop_previous(self) -> None:
        """Remove ``previous_checkpoint.pt``, which is not needed after the end of a training."""
        (self.folder / PREVIOUS).unlink(missing_ok=True)


def other_network(what: str, then: Mapping[str, str], now: Mapping[str, str], anew: str) -> str:
    """Return the error message for a stored file that was made with another network.

    Args:
        what: words for the stored file, such as ``the checkpoint 'PATH'``.
        then: ``CheckpointBinding.network`` of the stored file.
        now: ``CheckpointBinding.network`` of the network that is to be trained.
        anew: the command that discards the stored file.
    """
    return (
        f"{what} is of the network {then['name']} in {then['file']!r}, and {now['name']} in {now['file']!r} is to be "
        "trained now, or its code has changed. Put that network back to go on with it; or train this one in a new run "
        f'(run_dir "new"); or discard the stored one: {anew}'
    )
