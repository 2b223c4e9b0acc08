"""Load published weights from files and folders; names and shapes are checked before the weights are used.

A file was written by ``torch.save`` or by safetensors. It holds tensors by name; in a file of ``torch.save`` they may
be inside an entry ``state_dict``, ``model`` or ``model_state``. A folder was written by ``save_pretrained`` of
transformers. No code from a file or folder is run.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from fvc_lib.services import checkpoint_files
from fvc_lib.services.atomic_files import content_digest
from fvc_lib.services.errors import UsageError
from fvc_lib.video.decode.source import impostor

# Names of class layers in published files of weights. This project trains a head in place of the class layer.
CLASS_LAYERS = (
    "fc.", "_fc.", "classifier.", "head.", "heads.", "head_dist.", "last_linear.", "AuxLogits.", "blocks.5.proj.",
    "blocks.6.proj.",
)  # fmt: skip
BEGUN_WITH = "begun_with"  # name in a bundle (an exported detector) of the weights with which its networks begin
_INSIDE = ("state_dict", "model", "model_state", "model_state_dict")
_FILES = ("model.safetensors", "pytorch_model.bin")
_NAMED_AT_MOST = 5
_COUNTER = "num_batches_tracked"  # of a batch norm; networks here do not use it
# Errors that loading raises for damaged files, for web pages saved as files, and for files with code in them.
_UNREADABLE = (
    RuntimeError, pickle.UnpicklingError, EOFError, safetensors.SafetensorError, ValueError, LookupError, TypeError,
    AttributeError,
)  # fmt: skip


@dataclass(frozen=True)
class LoadedWeights:
    """The origin of a network's weights: the file, folder or package they came from, its digest and their licence."""

    source: str  # the file or folder, or the package that brings them
    sha256: str  # hexadecimal digest of the file, or of the names and contents of a folder's files
    licence: str  # of the weights, as far as known


def load_weights(
    network: nn.Module,
    path: Path | None,
    *,
    licence: str,
    field: str = "model_weights",
    adapt: Callable[[dict[str, Tensor]], Mapping[str, Tensor]] = lambda found: found,
) -> LoadedWeights | None:
    """Load the weights of a file or folder into ``network``, and return their origin; None if ``path`` is None.

    Weights of the publisher's class layer, which the network does not have, are ignored.

    Args:
        network: the network.
        path: the file, or a folder with such a file; None: nothing is loaded.
        licence: licence of the weights, for the record.
        field: name of the run's parameter whose value is ``path``, for error messages.
        adapt: function that brings the tensors of the file, by name, into the form of the network's ``state_dict``.

    Raises:
        UsageError: the file cannot be read, lacks weights, or has weights of another shape or unknown name.
    """
    if path is None:
        return None
    found = adapt(dict(read_weights(path, field)))
    fits = f"{field} {str(path)!r} does not fit the network ({type(network).__name__})"
    remedy = "Give the weights of the network that is named."
    try:
        missing, unknown = network.load_state_dict(found, strict=False)
    except RuntimeError as error:  # a line for every weight of another shape
        first_of_them = str(error).splitlines()[1:4]
        reasons = "; ".join(map(str.strip, first_of_them))
        raise UsageError(f"{fits}: {reasons} {remedy}") from error
    strange = [name for name in unknown if not name.startswith(CLASS_LAYERS) and not name.endswith(_COUNTER)]
    absent = [name for name in missing if not name.endswith(_COUNTER)]
    if problems := problems_of({"not in it": absent, "unknown": strange}):
        raise UsageError(f"{fits}: {problems}. {remedy}")
    return LoadedWeights(str(path), content_digest(path), licence)


def problems_of(names: Mapping[str, Sequence[str]]) -> str:
    """Return a text that lists up to five names of weights per kind of problem; empty if there are no names.

    ``names`` maps kinds, such as ``unknown``, to names of weights.
    """
    problems = []
    for kind, some in names.items():
        if some:
            named = ", ".join(some[:_NAMED_AT_MOST])
            more = " ..." if len(some) > _NAMED_AT_MOST else ""
            problems.append(f"{kind}: {named}{more}")
    return "; ".join(problems)


def read_weights(path: Path, field: str = "model_weights") -> Mapping[str, Tensor]:
    """Return tensors by name from a file of safetensors or ``torch.save``, or from a folder with such a file.

    No code in the file is run.

    Raises:
        UsageError: the file does not exist, is damaged, does not consist of tensors by name, or holds NaN. Its message
            begins with ``field``, the name of the run's parameter whose value is ``path``.
    """
    if path.is_dir():  # as ``save_pretrained`` writes it
        path = next((path / name for name in _FILES if (path / name).is_file()), path)
    head = b""
    try:
        with path.open("rb") as stream:
            head = stream.read(512)
            stream.seek(0)
            if head[8:9] == b"{":  # safetensors: behind the length of its header, which is JSON
                document: Any = safetensors.torch.load_file(path)
            else:  # not the path: torch would choose the format by its ending
                document = torch.load(stream, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UsageError(f"{field} {str(path)!r}: {error.strerror or error}. Give a readable file.") from error
    except _UNREADABLE as error:
        reason, remedy = checkpoint_files.why_not_loaded(error), "Fetch the file again."
        if "code" in reason:
            remedy = "In a program that you trust with it, save tensors alone: torch.save(network.state_dict(), PATH)."
        elif not head.startswith(b"PK") and (known := impostor(head)):  # torch.save's own files are archives
            reason, remedy = f"it is {known[0]}", known[1]
        raise UsageError(
            f"{field} {str(path)!r}: neither weights of torch.save nor safetensors: {reason}. {remedy}"
        ) from error
    for name in _INSIDE:
        if isinstance(document, dict) and isinstance(document.get(name), dict):
            document = document[name]
    if not isinstance(document, dict) or not document or not all(isinstance(v, Tensor) for v in document.values()):
        raise UsageError(f"{field} {str(path)!r}: wanted tensors by name, as network.state_dict() gives them.")
    refuse_nan(document, field, path)
    return {str(name).removeprefix("module."): tensor for name, tensor in document.items()}


def refuse_nan(weights: Mapping[str, Tensor], field: str, path: Path) -> None:
    """Raise ``UsageError`` if a tensor holds NaN.

    Args:
        weights: tensors by name.
        field: name of the run's parameter whose value is ``path``, for the message.
        path: the file or folder that ``weights`` were read from.
    """
    if bad := checkpoint_files.tensors_with_nan(weights):
        raise UsageError(f"{field} {str(path)!r}: NaN in {bad}. Download the file again, or give other weights.")
