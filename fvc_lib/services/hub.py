"""Weights from the hub of huggingface, fetched only where that was allowed."""

import importlib
import re
from pathlib import Path

from fvc_lib.services.errors import UsageError

# ``organisation/name``, and behind an @ a branch, tag or commit.
_HUB_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
_WANTED = ["*.json", "*.safetensors"]
_ELSE = ["*.json", "*.bin", "*.pth", "*.pyth"]


def is_hub_id(text: str) -> bool:
    """Whether ``model_weights`` names a hub's repository: it looks like one, and nothing here has that name."""
    return bool(_HUB_ID.fullmatch(text)) and not Path(text).exists()


def local_weights(hub_id: str, *, allow_download: bool) -> Path:
    """The folder of this machine with the weights of ``hub_id``, fetched into the hub's cache where they are not there.

    The folder's name is that of the commit.

    Raises:
        UsageError: it is not allowed, or not possible; the message says what to fetch and where to put it.
    """
    match = _HUB_ID.fullmatch(hub_id)
    name, revision = (match["name"], match["revision"]) if match else ("NAME", None)
    by_hand = (
        f"On a machine with a network: 'hf download {name}{f' --revision {revision}' if revision else ''} --local-dir "
        "FOLDER'; copy the folder here, and give -p model_weights FOLDER"
    )
    if not allow_download:
        raise UsageError(
            f"model_weights {hub_id!r}: no such file or folder on this machine. If it is a hub's name, "
            f"-p allow_download true fetches it. {by_hand}."
        )
    try:
        hub = importlib.import_module("huggingface_hub")  # takes a second to load
    except ImportError as error:
        raise UsageError(
            f"model_weights {hub_id!r}: fetching needs the package huggingface_hub, which transformers brings (pip "
            f"install 'fvc_lib[detectors]'). {by_hand}."
        ) from error
    reason = "it holds no weights"
    for patterns in (_WANTED, _ELSE):
        try:
            folder = Path(hub.snapshot_download(name, revision=revision, allow_patterns=patterns))
        except Exception as error:  # noqa: BLE001 - a network can fail in ways that are another library's at each layer
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            break
        if any(each.suffix != ".json" for each in folder.iterdir()):
            return folder
    raise UsageError(f"model_weights {hub_id!r}: cannot be fetched from here: {reason}. {by_hand}.")
