"""What is done with one untrusted file, in a worker process: probe, a few frames for the hash, content hash.

Imported by every worker, so it imports only what that needs.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fvc_lib.corpus.near_duplicates import perceptual_hash
from fvc_lib.services.atomic_files import sha256_of_file
from fvc_lib.video.decode import decode_clip
from fvc_lib.video.errors import VideoError
from fvc_lib.video.probe import probe_video

HASH_FRAMES = 6
HASH_SIZE = 160  # side in pixels of the square the frames are decoded to


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
        return {"reason": error.reason, "detail": f"{error.detail}. {error.remedy}"}
    except OSError as error:
        return {"reason": "unreadable", "detail": f"{error.strerror}. Check that the file exists and may be read."}
    box = clip.content
    picture = clip.frames[:, :, box.top : box.top + box.height, box.left : box.left + box.width]
    return {
        "probe": asdict(probe),
        "content_sha256": content_sha256,
        "perceptual_hash": perceptual_hash(np.ascontiguousarray(picture)),
    }
