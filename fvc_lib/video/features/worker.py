"""What is done with one untrusted video, in a worker process: its features are measured, and its pixels forgotten.

Imported by every worker, so it imports only what that needs: no polars, no torch.
"""

import importlib.metadata
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fvc_lib.services.atomic_files import AnyPath, sha256_of_file, sha256_of_json
from fvc_lib.services.code.code_version import code_hash
from fvc_lib.services.registry import FEATURES
from fvc_lib.video.clips.worker import as_indexed
from fvc_lib.video.decode.source import VideoError
from fvc_lib.video.features.family import FeatureFamily
from fvc_lib.video.features.sampling import Sample, sample_video
from fvc_lib.video.reencode import reencoded

_HERE = "fvc_lib.video.features"
_PACKAGES = ("numpy", "scipy", "scikit-image", "pywavelets")  # that families compute with


class FamilyError(Exception):
    """What measures a family fails; the message names it."""


def measured(sample: Sample, family: FeatureFamily) -> dict[str, float]:
    """The columns of one family for one video; NaN where a value cannot be told.

    Raises:
        FamilyError: its function fails, or gives other features than it declares.
    """
    try:
        if family.of == "tiles":
            seen = [family.measure(run.luma[0], run.rgb) for run in sample.runs if run.luma.shape[1]]
        elif family.of == "pairs":
            seen = [family.measure(run) for run in sample.runs if len(run.luma) > 1]
        else:
            seen = [family.measure(sample.stream)]
        return family.pooled(seen)
    except Exception as error:
        raise FamilyError(f"feature family {family.name!r} fails: {type(error).__name__}: {error}") from error


def measure_video(path: AnyPath, families: Sequence[FeatureFamily]) -> dict[str, dict[str, float]]:
    """Columns and values by family of the video at ``path``.

    Raises:
        VideoError: the file is unreadable, has no video, is truncated, corrupt or refused.
        FamilyError: a family fails.
    """
    sample = sample_video(path)
    return {family.name: measured(sample, family) for family in families}


def measure_item(item: dict[str, Any]) -> dict[str, Any]:
    """Measure the families ``families`` of the video at ``source``.

    Args:
        item: ``source`` (a path), ``content_sha256`` (of the video as it was indexed; empty: not compared),
            ``families`` (by name the code under which values are kept, as ``code_of`` has it), ``encoded`` (the recipe
            by which the run re-encodes every video, and the cache that keeps those; empty: as they are).

    Returns:
        ``code_changed`` when this process has loaded other code; ``video_error``: what is wrong with the video or with
        what measures it; else ``values``, by family in the order of its columns, none where a value cannot be told.
    """
    families = [FEATURES.load(name) for name in item["families"]]
    if any(code_of(family) != item["families"][family.name] for family in families):
        return {"code_changed": True}
    try:
        path: Path = as_indexed(item)
        found = measure_video(reencoded(path, *item["encoded"]) if item["encoded"] else path, families)
    except VideoError as error:
        return {"video_error": str(error)}
    except FamilyError as error:
        return {"video_error": f"{item['source']!r}: {error}. Mend it, or leave it out: -p feature_families"}
    return {
        "values": {
            name: [value if math.isfinite(value) else None for value in values.values()]
            for name, values in found.items()
        }
    }


def code_of(family: FeatureFamily) -> str:
    """Hex SHA-256 of what decides a family's values besides the sample: its version, its code and its packages."""
    module = family.measure.__module__
    if f"{module}.".startswith(f"{_HERE}."):
        code = code_hash(module, _HERE)
    else:
        code = sha256_of_file(getattr(sys.modules[module], "__file__", None) or __file__)
    return sha256_of_json([family.name, family.version, code, list(family.columns()), _versions(_PACKAGES)])


def code_of_samples() -> str:
    """Hex SHA-256 of what decides a sample besides the video: the code that decodes and cuts, and PyAV's build."""
    return sha256_of_json([code_hash(f"{_HERE}.sampling", "fvc_lib.video"), _versions(("av",))])


def _versions(packages: Sequence[str]) -> list[str]:
    return [f"{package} {importlib.metadata.version(package)}" for package in packages]
