"""Which numbers of a corpus are asked for, and how images without a class are spread over the parts by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fvc_lib.corpus.image_listing import ListedImage
from fvc_lib.services.errors import UsageError, did_you_mean

NO_TARGETS = "none"
_QUARTERS = (0.25, 0.5, 0.75)
_LEAST_GROUPS = 12  # without a class, for each quarter to have one for every part


def asked_targets(asked: Sequence[str], units: Mapping[str, str]) -> dict[str, str]:
    """The targets to predict with their units, in the order asked for.

    Args:
        asked: names, with or without their unit (``calories`` or ``calories_kcal``); empty: all; ``none`` alone: none.
        units: what the corpus has.

    Raises:
        UsageError: a name the corpus does not have, or ``none`` beside others.
    """
    if not asked:
        return dict(units)
    if tuple(asked) == (NO_TARGETS,):
        return {}
    if NO_TARGETS in asked:
        raise UsageError(f"targets: got {', '.join(asked)}; 'none' stands alone. Name the targets, or none of them.")
    spelt = {f"{name}_{unit}": name for name, unit in units.items() if unit} | {name: name for name in units}
    found = {}
    for name in asked:
        if name not in spelt:
            have = f"The corpus has {', '.join(units)}" if units else "The corpus has no column of numbers"
            raise UsageError(f"targets: the corpus has no {name!r}.{did_you_mean(name, spelt)} {have}.")
        found[spelt[name]] = units[spelt[name]]
    return found


def strata_of(images: Sequence[ListedImage], targets: Sequence[str]) -> list[str | None]:
    """What each image is spread evenly by: its class, or the quarter its first known number lies in, else None.

    Few images without a class are not divided further.
    """
    without_class = [image for image in images if image.class_label is None]
    if len({image.stated_group or image.path for image in without_class}) < _LEAST_GROUPS:
        return [image.class_label for image in images]
    unnamed = [dict(image.targets) for image in without_class]
    edges: dict[str, list[float]] = {}
    for name in targets:
        values = [known[name] for known in unnamed if name in known]
        edges[name] = np.quantile(values, _QUARTERS).tolist() if values else []
    return [image.class_label or _quarter(dict(image.targets), edges) for image in images]


def _quarter(values: Mapping[str, float], edges: Mapping[str, list[float]]) -> str | None:
    known = next((name for name in edges if name in values), None)
    if known is None:
        return None
    return f"{known} quarter {1 + int(np.searchsorted(edges[known], values[known], side='left'))}"
