"""Functions that tests run in worker processes."""

import importlib
import os
from pathlib import Path
from typing import Any

from fvc_lib.corpus.probing import probe_file
from fvc_lib.services.memory import peak_rss_bytes
from fvc_lib.video.decode.clip import decode_clip
from fvc_lib.video.decode.source import VideoError

NUM_FRAMES, SIZE = 5, 64


def examine(path_text: str) -> dict[str, Any]:
    """Return how probing and decoding end, and the process's open files and bytes on standard error.

    Anything but frames or a ``VideoError`` ends the process, which the parent sees as a crash.
    """
    found = probe_file(path_text)
    try:
        clip = decode_clip(Path(path_text), NUM_FRAMES, SIZE)
        assert clip.frames.shape == (NUM_FRAMES, 3, SIZE, SIZE)
        assert clip.num_source_frames > 0
        decoded = "frames"
    except VideoError as error:
        decoded = error.reason
    return {
        "probe": found.get("reason", "frames"),
        "detail": found.get("detail", ""),
        "decode": decoded,
        "open_files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - iterdir keeps one open itself
        "stderr_bytes": os.fstat(2).st_size,  # a file of the parent's
    }


def peak_of(item: list[Any]) -> dict[str, Any]:
    """What ``module:function`` answers to its own item, both in ``item``, and the most that this process ever held."""
    module, _, name = item[0].partition(":")
    answer = getattr(importlib.import_module(module), name)(item[1])
    return {"answer": answer, "peak_bytes": peak_rss_bytes()}
