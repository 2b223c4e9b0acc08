"""What is done with one untrusted file, in a worker process: probe, a few frames for the hash, content hash.

Imported by every worker, so it imports only what that needs.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import av.logging
import numpy as np

from fvc_lib.corpus.perceptual_hash import perceptual_hash
from fvc_lib.services.atomic_files import sha256_of_file
from fvc_lib.video.decode import decode_clip
from fvc_lib.video.errors import RefusedVideo, VideoError
from fvc_lib.video.probe import probe_video
from fvc_lib.video.source import check_size

HASH_FRAMES = 6
HASH_SIZE = 160  # side in pixels of the square the frames are decoded to

# Above 268 million pixels ffmpeg itself declines, with the same error as for damage; its log tells the difference.
_IMPOSSIBLE_SIZE = re.compile(r"Picture size (\d+)x(\d+) is invalid")


def probe_file(path_text: str) -> dict[str, Any]:
    """``probe``, ``content_sha256`` and ``perceptual_hash`` of a file, or ``reason`` and ``detail`` why not.

    The frames are those that a clip of six frames is made of, so a file whose frames are missing or damaged is found
    now and not in the middle of a run.
    """
    path = Path(path_text)
    try:
        probe = probe_video(path)
        clip = decode_clip(path, HASH_FRAMES, HASH_SIZE)
        content_sha256 = sha256_of_file(path)
    except VideoError as error:
        shown = error if isinstance(error, RefusedVideo) else _claimed_too_much(path) or error
        return {"reason": shown.reason, "detail": f"{shown.detail}. {shown.remedy}"}
    except MemoryError:
        shown = RefusedVideo(path, "its frames need more memory than a worker is given")
        return {"reason": shown.reason, "detail": f"{shown.detail}. {shown.remedy}"}
    except OSError as error:
        return {"reason": "unreadable", "detail": f"{error.strerror}. Check that the file exists and may be read."}
    box = clip.content
    picture = clip.frames[:, :, box.top : box.top + box.height, box.left : box.left + box.width]
    return {
        "probe": asdict(probe),
        "content_sha256": content_sha256,
        "perceptual_hash": perceptual_hash(np.ascontiguousarray(picture)),
    }


def _claimed_too_much(path: Path) -> RefusedVideo | None:
    """The refusal, when what fails in ``path`` are frames of an impossible size.

    The log is one for the whole process and Python handlers would print it: it is on only here, in a worker of one
    thread.
    """
    av.logging.set_level(av.logging.ERROR)
    try:
        with av.logging.Capture() as messages, contextlib.suppress(VideoError):
            probe_video(path)
    finally:
        av.logging.set_level(None)
    for _, _, message in messages:
        claimed = _IMPOSSIBLE_SIZE.search(message)
        if claimed is not None:
            try:
                check_size(path, int(claimed[1]), int(claimed[2]))
            except RefusedVideo as refusal:
                return refusal
    return None
