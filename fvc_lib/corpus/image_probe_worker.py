"""What is done with one untrusted image, in a worker process.

Imported by every worker, so it imports only what that needs.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fvc_lib.corpus.image_likeness import thumbnail_text
from fvc_lib.corpus.perceptual_hash import GRID_SIDE, hash_of_grids, luma_grids, without_bars
from fvc_lib.video.still_image import StillImageError, examine_image


def probe_image(path_text: str) -> dict[str, Any]:
    """``facts``, ``perceptual_hash`` and ``thumbnail`` of an image that decodes whole, or ``reason`` and ``detail``."""
    try:
        facts, picture = examine_image(Path(path_text), shortest_side=GRID_SIDE)
    except StillImageError as error:
        return {"reason": error.reason, "detail": f"{error.detail}. {error.remedy}"}
    frames = without_bars(np.ascontiguousarray(np.moveaxis(picture, -1, 0))[None])
    grids = luma_grids(frames)
    thumbnail = thumbnail_text(grids[0], frames[0])
    return {"facts": asdict(facts), "perceptual_hash": hash_of_grids(grids), "thumbnail": thumbnail}
