"""Decode many images once in worker processes, and remember every result, so that a killed index continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import PIL

from fvc_lib.corpus.probing import FileKind, probe_all
from fvc_lib.services.atomic_files import sha256_of_json
from fvc_lib.video.still_image import ImageFacts

DEFAULT_TIMEOUT_SECONDS = 60.0
_PROBING_CODE = (
    "fvc_lib.video.still_image", "fvc_lib.video.jpeg_damage", "fvc_lib.corpus.perceptual_hash",
    "fvc_lib.corpus.image_likeness", "fvc_lib.corpus.image_probe_worker",
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
        "images", "fvc_lib.corpus.image_probe_worker:probe_image", _code_version(),
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
    return sha256_of_json([PIL.__version__, code_hash("fvc_lib.corpus.image_probe_worker", _PROBING_CODE)])[:16]
