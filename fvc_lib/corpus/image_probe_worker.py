"""What is done with one untrusted image, in a worker process.

Imported by every worker, so it imports only what that needs.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from fvc_lib.video.still_image import StillImageError, examine_image


def probe_image(path_text: str) -> dict[str, Any]:
    """Sides, size and content hash of an image that decodes whole, or ``reason`` and ``detail`` why there are none."""
    try:
        return asdict(examine_image(Path(path_text)))
    except StillImageError as error:
        return {"reason": error.reason, "detail": f"{error.detail}. {error.remedy}"}
