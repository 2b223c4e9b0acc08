"""Decode many images once in worker processes, and remember every result, so that a killed index continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL

from fvc_lib.corpus.copies.likeness import thumbnail_text
from fvc_lib.corpus.copies.perceptual_hash import GRID_SIDE, hash_of_grids, luma_grids, without_bars
from fvc_lib.corpus.probing import FileKind, probe_all
from fvc_lib.services.atomic_files import sha256_of_json
from fvc_lib.services.code_version import code_hash
from fvc_lib.video.decode.still_image import ImageFacts, StillImageError, examine_image

DEFAULT_TIMEOUT_SECONDS = 60.0
_PROBING_CODE = (
    "fvc_lib.video.decode.still_image",
    "fvc_lib.corpus.copies.perceptual_hash",
    "fvc_lib.corpus.copies.likeness",
    "fvc_lib.corpus.image_probing",
)


@dataclass(frozen=True, slots=True)
class ProbedImage:
    """What became of one file: ``facts`` and what it looks like, or ``reason`` and ``detail`` why there are none."""

    path: str
    facts: ImageFacts | None = None
    perceptual_hash: str | None = None
    thumbnail: str = ""
    reason: str = ""
    detail: str = ""


def probe_images(
    root: Path,
    paths: Sequence[str],
    work_dir: Path,
    *,
    workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
    stop: Callable[[], bool] | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> dict[str, ProbedImage]:
    """Decode every image; arguments and errors as of ``probing.probe_all``."""
    kind = FileKind(
        "images", "fvc_lib.corpus.image_probing:probe_image", _code_version(),
        frozenset({"no_image", "truncated", "corrupt", "refused"}), "Save it anew, or leave it out.", _read_result,
    )  # fmt: skip
    results, _ = probe_all(
        kind, root, paths, work_dir, workers=workers, progress=progress, stop=stop, timeout_seconds=timeout_seconds
    )
    return results


def _read_result(path: str, said: Mapping[str, Any]) -> ProbedImage:
    if said.get("reason"):
        return ProbedImage(path, reason=said["reason"], detail=said["detail"])
    return ProbedImage(path, ImageFacts(**said["facts"]), said["perceptual_hash"], said["thumbnail"])


def _code_version() -> str:
    return sha256_of_json([PIL.__version__, code_hash("fvc_lib.corpus.image_probing", _PROBING_CODE)])[:16]


# --- What is done with one untrusted image, in a worker process.
# Imported by every worker, so it imports only what that needs.


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
