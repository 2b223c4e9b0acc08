"""Files whose content is verified: written with a digest beside them, and trusted only as far as that digest fits.

torch and safetensors load a file with flipped bits without a word; ``<name>.sha256`` (as ``sha256sum`` writes it)
tells. At every moment of a replacement the digests accept the file that is there, and nothing that was never written.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fvc_lib.services.atomic_files import atomic_output, sha256_of_file, write_text
from fvc_lib.services.errors import FvcError


class DamagedCheckpointError(FvcError):
    """A checkpoint file that must not be used: wrong digest, no digest, or nothing that torch can load safely."""


class CheckpointReadError(FvcError):
    """A checkpoint file could not be read, for want of memory or because of the disk: it need not be damaged."""


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
        return sha256_of_file(temporary)

    return _replace_with_digest(path, write)


def write_copy_with_digest(path: Path, source: Path, digest: str) -> None:
    """Replace ``path`` with a copy of ``source``, whose SHA-256 is ``digest``.

    A copy and no link: damage to the one leaves the other. Raises as ``write_document_with_digest``, and
    DamagedCheckpointError where the copy is not what was written a moment ago.
    """

    def write(temporary: Path) -> str:
        shutil.copyfile(source, temporary)
        if sha256_of_file(temporary) != digest:
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
        digest = sha256_of_file(path)
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


def load_document(path: Path, wanted_format: int) -> dict[str, Any]:
    """The document in a verified ``path``, read weights-only: a pickle that would run code is refused, whatever its
    digest.

    Raises:
        DamagedCheckpointError: not torch's format, not loadable without running code, or not ``wanted_format``.
        CheckpointReadError: memory ended, or the disk refused; nothing is known to be damaged.
    """
    verify(path)
    if not zipfile.is_zipfile(path):
        raise DamagedCheckpointError(f"{str(path)!r} cannot be loaded safely: it is not in torch's zip format.")
    try:
        document = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, OSError, MemoryError) as error:
        first_line = str(error).partition("\n")[0] or type(error).__name__
        if _is_archives_fault(error):
            raise DamagedCheckpointError(f"{str(path)!r} cannot be loaded safely: {first_line}.") from error
        raise CheckpointReadError(
            f"{str(path)!r} is what was written and still cannot be read: {first_line}. Is there enough memory? Give "
            "more, or end other programs, then resume."
        ) from error
    if not isinstance(document, dict) or document.get("format") != wanted_format:
        raise DamagedCheckpointError(f"{str(path)!r} is no training checkpoint of format {wanted_format}.")
    return document


def load_weights(path: Path) -> dict[str, Tensor]:
    """Weights by name, as ``write_weights_with_digest`` wrote them; raises as ``verify``."""
    verify(path)
    try:
        return safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        raise DamagedCheckpointError(f"{str(path)!r} holds no weights: {error}.") from error
    except (OSError, RuntimeError, MemoryError) as error:
        raise CheckpointReadError(
            f"{str(path)!r} is what was written and still cannot be read: {error}. Is there enough memory? Give more, "
            "then resume."
        ) from error


def are_weights_in(path: Path, weights: Mapping[str, Tensor], description: Mapping[str, Any]) -> bool:
    """Whether a whole ``path`` holds just these weights and this description."""
    try:
        found = load_weights(path)
        with safetensors.safe_open(path, "pt") as opened:
            described = opened.metadata() == _metadata(description)
    except DamagedCheckpointError:
        return False
    equal = all(name in found and found[name].equal(tensor.cpu()) for name, tensor in weights.items())
    return described and equal and found.keys() == weights.keys()


def remove_with_digest(path: Path) -> None:
    """Remove ``path`` and, before it, what vouches for it: a kill between them leaves a file that nobody trusts."""
    _digest_path(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def set_aside(path: Path) -> None:
    """Rename ``path`` to ``<name>.unusable``, and drop what vouched for it: out of the way, and not lost."""
    _digest_path(path).unlink(missing_ok=True)
    path.replace(path.with_name(path.name + ".unusable"))


def copied_to_cpu(value: Any, into: Any = None) -> Any:
    """``value`` with every tensor in it, at any depth of dicts, lists and tuples, copied: what training may go on
    changing is not what is being written.

    Args:
        value: what to copy.
        into: an earlier copy whose tensors may be written over where they have the same place, shape and dtype. Fresh
            memory costs more than the copy: 130 MB took 56 ms of page by page, and 9 ms into memory that was there.
    """
    if isinstance(value, Tensor):
        tensor = value.detach()
        if isinstance(into, Tensor) and (into.shape, into.dtype) == (tensor.shape, tensor.dtype):
            return into.copy_(tensor)
        return tensor.to("cpu", copy=True)
    if isinstance(value, Mapping):
        earlier = into if isinstance(into, Mapping) else {}
        return {key: copied_to_cpu(item, earlier.get(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        parts = into if isinstance(into, (list, tuple)) and len(into) == len(value) else [None] * len(value)
        return type(value)(copied_to_cpu(item, part) for item, part in zip(value, parts, strict=True))
    return value


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
    """The new digest goes first, beside the old: whichever file a kill leaves is accepted. Then the old one goes."""
    sidecar = _digest_path(path)
    with atomic_output(path) as temporary:
        digest = write(temporary)
        line = f"{digest}  {path.name}\n"
        before = sidecar.read_text(encoding="ascii", errors="replace") if sidecar.exists() else ""
        write_text(sidecar, line + before)
    write_text(sidecar, line)
    return digest


def _disks_own_error(error: Exception) -> Exception:
    """What the disk said, where safetensors wraps it into text: ``... (os error 28)``."""
    number = re.search(r"os error (\d+)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else error


def _is_archives_fault(error: BaseException) -> bool:
    """Whether what cannot be loaded is the archive's own doing, and neither memory's nor the disk's."""
    if isinstance(error, RuntimeError):
        return str(error).startswith("PytorchStreamReader")
    return not isinstance(error, (OSError, MemoryError))


def _digest_path(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")
