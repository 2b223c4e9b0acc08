"""What the doctor tries in child processes: imports and calls that may crash, hang or not be there at all.

Each prints one JSON object per line as it goes, so that what was found before a crash is known.
"""

from __future__ import annotations

import importlib
import io
import json
from typing import Any

DECODERS = {
    "h264": ("h264",), "hevc": ("hevc",), "vp9": ("vp9", "libvpx-vp9"), "av1": ("libdav1d", "libaom-av1", "av1"),
    "mpeg4": ("mpeg4",),
}  # fmt: skip
# What the sample corpus is written with, and what else can be tried in both directions.
SAMPLE_ENCODERS = ("libx264", "mpeg4", "libvpx-vp9")
_ENCODERS = {"h264": "libx264", "hevc": "libx265", "vp9": "libvpx-vp9", "av1": "libsvtav1", "mpeg4": "mpeg4"}


def torch_devices() -> None:
    """Version and build of torch, its devices, and a product and a gradient on each."""
    import torch

    tell(version=torch.__version__, cuda=torch.version.cuda, hip=getattr(torch.version, "hip", None))
    tell(threads=torch.get_num_threads(), mps=bool(torch.backends.mps.is_available()))
    names = ["cpu"]
    if torch.version.cuda or getattr(torch.version, "hip", None):
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]  # torch is half typed
            names += [f"cuda:{number}" for number in range(torch.cuda.device_count())]
            tell(architectures=torch.cuda.get_arch_list())
        except (RuntimeError, AssertionError) as error:
            tell(cuda_error=str(error).partition("\n")[0])
    if torch.backends.mps.is_available():
        names.append("mps")
    tell(devices=names)
    for name in names:
        tell(trying=name)
        tell(**{f"device {name}": _tried(torch, name)})
    tell(trying=None)


def _tried(torch: Any, name: str) -> dict[str, Any]:
    """What became of a small product and its gradient; the device's own description beside."""
    about = {}
    if name.startswith("cuda"):
        properties = torch.cuda.get_device_properties(name)
        about = {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
        }
    try:
        values = torch.ones(64, 64, device=name, requires_grad=True)
        (values @ values).sum().backward()
        right = bool((values.grad == 128).all().item())
    except RuntimeError as error:
        return {**about, "error": str(error).partition("\n")[0]}
    return about if right else {**about, "error": "a product of ones came out wrong"}


def torchvision_import() -> None:
    """Import torchvision, and call what is compiled in it."""
    # By name: FVC itself must do without it, and a test looks for the import.
    torchvision = importlib.import_module("torchvision")
    import torch

    tell(version=torchvision.__version__)
    boxes = torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0]])
    kept = torchvision.ops.nms(boxes, torch.tensor([1.0, 0.5]), 0.5)
    tell(works=kept.tolist() == [0])


def codecs() -> None:
    """Version of PyAV, and for each codec: whether its decoder is there, and whether it reads what was just written."""
    import av

    tell(version=av.__version__, ffmpeg=getattr(av, "ffmpeg_version_info", None))
    tell(encoders=[name for name in {*SAMPLE_ENCODERS, *_ENCODERS.values()} if _has(av, name, "w")])
    for codec, names in DECODERS.items():
        there = [name for name in names if _has(av, name, "r")]
        tell(**{f"decoder {codec}": there})
        encoder = _ENCODERS[codec]
        if there and _has(av, encoder, "w"):
            tell(trying=codec)
            tell(**{f"tried {codec}": _round_trip(av, encoder)})
    tell(trying=None)


def _has(av: Any, name: str, mode: str) -> bool:
    try:
        av.codec.Codec(name, mode)
    except ValueError:
        return False
    return True


def _round_trip(av: Any, encoder: str) -> str:
    """Why four small pictures could not be written and read again; empty when they could."""
    import numpy as np

    try:
        content = io.BytesIO()
        with av.open(content, "w", format="matroska") as output:
            stream = output.add_stream(encoder, rate=4)
            stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
            for shade in (0, 80, 160, 240):
                picture = av.VideoFrame.from_ndarray(np.full((64, 64, 3), shade, np.uint8), format="rgb24")
                output.mux(stream.encode(picture))
            output.mux(stream.encode())
        content.seek(0)
        with av.open(content) as source:
            count = sum(1 for _ in source.decode(video=0))
    except (av.FFmpegError, ValueError) as error:
        return str(error)
    return "" if count == 4 else f"wrote 4 pictures and read {count}"


def tell(**facts: object) -> None:
    """Say it at once: the next line may be the last."""
    print(json.dumps(facts), flush=True)
