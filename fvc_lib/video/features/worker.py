"""Measure the forensic features of one untrusted video in a worker process.

Every worker process imports this module, so it imports neither polars nor torch.
"""

import importlib.metadata
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fvc_lib.services.atomic_files import AnyPath, sha256_of_json
from fvc_lib.services.code_versions import code_hash
from fvc_lib.services.registry import FEATURES
from fvc_lib.video.clips.worker import as_indexed
from fvc_lib.video.decode.source import VideoError
from fvc_lib.video.features.family import FeatureFamily, Sample, sample_video
from fvc_lib.video.reencode import reencoded

_HERE = "fvc_lib.video.features"
_PACKAGES = ("numpy", "scipy", "pywavelets")  # packages on which values depend


class FamilyError(Exception):
    """The error for a feature family whose function fails or does not return all features; the message names it."""


def measured(sample: Sample, family: FeatureFamily) -> dict[str, float]:
    """Measure one feature family in a sampled video, and return a mapping from its columns to values.

    A value that cannot be measured is NaN.

    Args:
        sample: decoded parts of the video.
        family: the features, which one function measures together.

    Raises:
        FamilyError: the family's function fails, or does not return a feature that the family declares.
    """
    try:
        if family.of == "tiles":
            results = [family.measure(run.luma[0]) for run in sample.runs if run.luma.shape[1]]
        elif family.of == "pairs":
            results = [family.measure(run) for run in sample.runs if len(run.luma) > 1]
        else:
            results = [family.measure(sample.stream)]
        return family.pooled(results)
    except Exception as error:
        raise FamilyError(f"feature family {family.name!r} fails: {type(error).__name__}: {error}") from error


def measure_video(
    path: AnyPath, families: Sequence[FeatureFamily], sample: Sample | None = None
) -> dict[str, dict[str, float]]:
    """Measure the features of the video at ``path``, and return the values as ``{family name: {column: value}}``.

    A value is NaN where it cannot be measured. The video is not decoded if its ``sample`` is given.

    Raises:
        VideoError: the file is unreadable, has no video, is truncated, corrupt or refused.
        FamilyError: a family fails.
    """
    sample = sample or sample_video(path)
    return {family.name: measured(sample, family) for family in families}


def measure_item(item: dict[str, Any]) -> dict[str, Any]:
    """Measure the forensic features of one video, in a worker process, and return them in a form that JSON can hold.

    Args:
        item: a mapping with

            * ``source``: path of the video.
            * ``families``: names of the families to measure.
            * ``content_sha256``: SHA-256 of the indexed video; empty: it is not checked.
            * ``encoded``: a list of the recipe by which the video is re-encoded first, and the cache folder for the
              result; empty: the video is not re-encoded.

    Returns:
        On success, ``{"measured": {family: [hash, values]}}``. The hash is the result of ``code_of``; the values are in
        the order of its columns, None where a value cannot be measured. On failure, ``{"video_error": reason}``.
    """
    families = [FEATURES.get(name) for name in item["families"]]
    try:
        path: Path = as_indexed(item)
        found = measure_video(reencoded(path, *item["encoded"]) if item["encoded"] else path, families)
    except VideoError as error:
        return {"video_error": str(error)}
    except FamilyError as error:
        return {"video_error": f"{item['source']!r}: {error}. Mend it, or leave it out: -p feature_families"}
    return {
        "measured": {
            family.name: [
                code_of(family),
                [value if math.isfinite(value) else None for value in found[family.name].values()],
            ]
            for family in families
        }
    }


def code_of(family: FeatureFamily) -> str:
    """Return a hexadecimal SHA-256 of a feature family's code, its columns and the versions of the packages it uses.

    Cached values are stored with this hash. If it has changed, they are measured again.
    """
    code = code_hash(family.measure.__module__, _HERE)
    return sha256_of_json([family.name, code, list(family.columns()), _versions(_PACKAGES)])


def code_of_samples() -> str:
    """Return a hexadecimal SHA-256 of PyAV's version and the code that decodes and samples videos for all families.

    If it has changed, all cached values are measured again.
    """
    return sha256_of_json([code_hash(f"{_HERE}.family", "fvc_lib.video"), _versions(("av",))])


def _versions(packages: Sequence[str]) -> list[str]:
    return [f"{package} {importlib.metadata.version(package)}" for package in packages]
