"""Maps of where a clip is called fake: heat over its frames, and the curves of their check, as SVG."""

import itertools
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.figures.evidence.when import data_uri

Floats = npt.NDArray[np.floating]
Pixels = npt.NDArray[np.uint8]

_MOST_OPAQUE = 0.72
_MOST_FRAMES = 4
_SIDE = 168  # pixels of a picture's longer side


class CurveLike(Protocol):
    """Logits (P,) over shares (P,) of a clip that are deleted or brought back, and others (R, P) to compare with."""

    @property
    def shares(self) -> Floats:
        """From 0 to 1."""

    @property
    def logits(self) -> Floats:
        """In the order of the map."""

    @property
    def others(self) -> Floats:
        """In the same order elsewhere."""


@dataclass(frozen=True)
class HeatFrame:
    """One frame on the page, counted from 1, as it is and under the map, as data URIs."""

    number: int
    plain: str
    heated: str


def heat_frames(clip: Pixels, values: Floats) -> list[HeatFrame]:
    """The middle frame of each stretch, of at most a few, over which the map (T, S, S) in [0, 1] stays the same.

    ``clip`` is uint8 (T, 3, S, S).
    """
    begins = [0, *(np.flatnonzero((values[1:] != values[:-1]).any((1, 2))) + 1), len(values)]
    middles = [(first + end - 1) // 2 for first, end in itertools.pairwise(begins)]
    chosen = np.unique(np.linspace(0, len(middles) - 1, min(_MOST_FRAMES, len(middles))).round().astype(int))
    return [
        HeatFrame(n + 1, data_uri(clip[n], _SIDE), data_uri(heated(clip[n], values[n]), _SIDE))
        for n in (int(middles[place]) for place in chosen)
    ]


def heated(frame: Pixels, values: Floats) -> Pixels:
    """uint8 (3, S, S): the frame in grey under a colour that covers the more of it, the higher the map (S, S) is."""
    color = np.array([int(theme.FAKE[place : place + 2], 16) for place in (1, 3, 5)])[:, None, None]
    cover = _MOST_OPAQUE * values[None]
    grey = frame.mean(0, keepdims=True)
    return np.asarray((grey * (1 - cover) + color * cover).round().clip(0, 255), np.uint8)


def scale_svg() -> Markup:
    """The colours from 0 to the map's most, over the grey that frames have beneath."""
    stops = f'<stop offset="0" stop-color="#888"/><stop offset="1" stop-color="{_over_grey()}"/>'
    bar = '<rect width="100%" height="10" rx="2" fill="url(#heat)"/>'
    return Markup(
        f'<svg class="heat" role="img" aria-label="from nothing to the most"><linearGradient id="heat">{stops}'
        f"</linearGradient>{bar}</svg>"
    )


def _over_grey() -> str:
    parts = heated(np.full((3, 1, 1), 136, np.uint8), np.ones((1, 1))).ravel()
    return "#" + "".join(f"{part:02x}" for part in parts)


@dataclass(frozen=True)
class CheckCurve:
    """The curve of a map over those of the same shape elsewhere, and the logits at its upper and lower edge."""

    drawing: Markup
    top: float
    bottom: float


def check_curve(curve: CurveLike, told: str) -> CheckCurve:
    """``told`` is what it shows, for those who cannot see it."""
    every = np.vstack([curve.others, curve.logits])
    top, bottom = float(every.max()), float(every.min())

    def line(logits: Floats, looks: str) -> str:
        heights = 100 * (top - logits) / ((top - bottom) or 1.0)
        points = " ".join(f"{200 * x:.1f},{y:.1f}" for x, y in zip(curve.shares, heights, strict=True))
        return f'<polyline class="{looks}" points="{points}"/>'

    others = "".join(line(each, "other") for each in curve.others)
    drawing = Markup(
        f'<svg class="check" role="img" aria-label="{told}" viewBox="0 0 200 100" preserveAspectRatio="none">'
        f"{others}{line(curve.logits, 'own')}</svg>"
    )
    return CheckCurve(drawing, top, bottom)
