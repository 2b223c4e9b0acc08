"""What is asked of one damaged file in a worker process: everything a run does with files nobody vouches for."""

import ctypes
import gc
import os
import resource
import time
from pathlib import Path
from typing import Any

from fvc_lib.corpus.probing import probe_file
from fvc_lib.video.decode.clip import decode_clip
from fvc_lib.video.decode.source import VideoError

NUM_FRAMES, SIZE = 5, 64


def examine(path_text: str) -> dict[str, Any]:
    """Outcomes of probing and of decoding, and what they left behind in this process.

    Anything but frames or a ``VideoError`` ends the process, which the parent sees as a crash.
    """
    path, began = Path(path_text), time.monotonic()
    found = probe_file(path_text)
    answer = {"probe": found.get("reason", "frames"), "detail": found.get("detail", ""), "decode": _decoded(path)}
    return answer | what_is_left() | {"seconds": time.monotonic() - began}


def what_is_left() -> dict[str, int]:
    """Resident memory after freeing what can be freed, open files, and bytes written to standard error."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "pid": os.getpid(),
        "rss_bytes": pages * resource.getpagesize(),
        "peak_rss_bytes": _status_bytes("VmHWM"),  # ru_maxrss would include the parent's, it survives exec
        "open_files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - iterdir keeps one open itself
        "stderr_bytes": os.fstat(2).st_size,  # a file of the parent's
    }


def address_space_bytes(_item: object) -> int:
    """What a worker has mapped before it meets a file; the limit of its memory counts that in."""
    return _status_bytes("VmSize")


def _status_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition(f"{field}:")[2].split()[0])


def _decoded(path: Path) -> str:
    """``frames``, or the reason of the error; a clip of another shape than asked counts as a crash."""
    try:
        clip = decode_clip(path, NUM_FRAMES, SIZE)
    except VideoError as error:
        return error.reason
    if clip.frames.shape != (NUM_FRAMES, 3, SIZE, SIZE) or not clip.num_source_frames > 0:
        raise ValueError(f"got frames {clip.frames.shape} of {clip.num_source_frames}")
    return "frames"
