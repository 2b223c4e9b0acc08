"""Write tensors to a file, and read them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch

from safetensors import safe_open

_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


def save_file(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    blobs, place = [], 0
    for name, tensor in tensors.items():
        blobs.append(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        offsets = [place, place := place + tensor.nbytes]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def load_file(path: Path) -> dict[str, torch.Tensor]:
    opened = safe_open(path, "pt")
    found = {}
    for name, about in opened.header.items():
        if name != "__metadata__":
            start, stop = about["data_offsets"]
            values = torch.frombuffer(bytearray(opened.data[start:stop]), dtype=_TYPES[about["dtype"]])
            found[name] = values.reshape(about["shape"])
    return found
