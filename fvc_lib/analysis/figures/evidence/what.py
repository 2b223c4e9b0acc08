"""Panels of one frame of each of a few videos, on common scales, and a feature's place among known reals, as SVG."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.figures.evidence.when import data_uri

Floats = npt.NDArray[np.floating]

_SIDE = 256  # pixels of a picture's longer side
_EDGES = {7: theme.HIGHLIGHT, 15: theme.FAKE}  # places of steps at the edges of blocks of 8, and of 16


class PanelsLike(Protocol):
    """Of a frame's middle (``video/features/panels.py``)."""

    @property
    def luma(self) -> npt.NDArray[np.uint8]:
        """(h, w)."""

    @property
    def residual(self) -> Floats:
        """(r, q), grey levels."""

    @property
    def power(self) -> Floats:
        """(s, s), decibels, frequency 0 in the middle."""

    @property
    def blocks(self) -> Floats:
        """(8, 8), grey levels, by frequency."""

    @property
    def steps(self) -> Floats:
        """(16,), grey levels, by place; the last is the edge of blocks of 16, the eighth of those of 8."""


class FrameLike(Protocol):
    """One video: what it is to this one, its name, and how far it is."""

    @property
    def title(self) -> str:
        """``this video``, ``nearest real of the run`` ..."""

    @property
    def name(self) -> str:
        """Of the video."""

    @property
    def panels(self) -> PanelsLike:
        """Its own."""

    @property
    def distance(self) -> float | None:
        """1 is what the run's own videos have in the median; None: this video."""


class FeatureLike(Protocol):
    """A forensic feature of this video; ``feature`` has ``unit``, ``meaning`` and ``size_proxy``."""

    @property
    def column(self) -> str:
        """As in the table of features."""

    @property
    def family(self) -> str:
        """Its family."""

    @property
    def feature(self) -> Any:
        """Its declaration."""

    @property
    def value(self) -> float:
        """In its unit."""

    @property
    def quantile(self) -> float:
        """In [0, 1] among known reals."""


@dataclass(frozen=True)
class PanelRow:
    """One kind of panel: what it is called, how it is read, and the drawing of each video."""

    title: str
    told: str
    drawings: tuple[Markup, ...]


def panel_rows(videos: Sequence[PanelsLike]) -> list[PanelRow]:
    """Five rows, each on one scale for all ``videos``."""
    if not videos:
        return []

    def each(draw: Callable[[PanelsLike], Markup]) -> tuple[Markup, ...]:
        return tuple(draw(one) for one in videos)

    sizes = np.concatenate([np.abs(one.residual).ravel() for one in videos])
    white = max(1.0, float(np.quantile(sizes, 0.99)))
    powers = np.concatenate([one.power.ravel() for one in videos])
    least, most = float(np.quantile(powers, 0.01)), float(powers.max())
    span = (most - least) or 1.0
    levels = [np.log2(np.maximum(one.blocks, 1 / 16)) for one in videos]
    low, high = (float(f([f(level.ravel()[1:]) for level in levels])) for f in (np.min, np.max))
    tallest = max(float(one.steps.max()) for one in videos) or 1.0
    return [
        PanelRow("Frame", "The middle of the middle frame, at native resolution: brightness, as coded and not turned.",
                 each(lambda one: _picture(one.luma.astype(float), "frame"))),
        PanelRow("Noise residual", f"What the surroundings of a pixel do not foresee, in the middle of the above: grey "
                 f"is 0, white and black are {white:.1f} grey levels.",
                 each(lambda one: _picture(127.5 * (1 + one.residual / white), "noise residual"))),
        PanelRow("Spectrum", f"Power by frequency, 0 in the middle, half a cycle per pixel at the borders; black to "
                 f"white is {least:z.0f} to {most:z.0f} dB.",
                 each(lambda one: _picture(255 * (one.power - least) / span, "spectrum"))),
        PanelRow("Cosine coefficients of 8 x 8 blocks", f"Mean size, lowest frequency at the top left; white to dark "
                 f"is {2**low:.2g} to {2**high:.2g} grey levels. Compression empties the bottom right.",
                 tuple(_blocks(level, one.blocks, low, high) for level, one in zip(levels, videos, strict=True))),
        PanelRow("Steps between pixels, by place in a block of 16", f"Up to {tallest:.1f} grey levels; orange: edges "
                 "of blocks of 8, red: of 16. One that stands out is a coding grid; one elsewhere an earlier one.",
                 each(lambda one: _steps(one.steps, tallest))),
    ]  # fmt: skip


def _picture(plane: Floats, told: str) -> Markup:
    grey = np.repeat(plane.round().clip(0, 255).astype(np.uint8)[None], 3, axis=0)
    return Markup('<img src="{}" alt="{}">').format(data_uri(grey, _SIDE), told)


def _blocks(levels: Floats, sizes: Floats, low: float, high: float) -> Markup:
    """Eight by eight squares, the darker the larger; the mean in the first one is off the scale."""
    dark = ((levels - low) / ((high - low) or 1.0)).clip(0, 1)
    squares = "".join(
        f'<rect x="{x}" y="{y}" width="1" height="1" fill="{theme.MODEL}" fill-opacity="{dark[y, x]:.2f}">'
        f"<title>{sizes[y, x]:.2f}</title></rect>"
        for y in range(8)
        for x in range(8)
    )
    return Markup(f'<svg role="img" aria-label="cosine coefficients" viewBox="0 0 8 8">{squares}</svg>')


def _steps(steps: Floats, tallest: float) -> Markup:
    bars = "".join(
        f'<rect x="{place + 0.1:.1f}" width=".8" y="{8 * (1 - of / tallest):.2f}" height="{8 * of / tallest:.2f}" '
        f'fill="{_EDGES.get(place, theme.CONTROL)}"><title>{of:.2f}</title></rect>'
        for place, of in enumerate(steps)
    )
    return Markup(f'<svg role="img" aria-label="steps between pixels" viewBox="0 0 16 8">{bars}</svg>')


def quantile_svg(quantile: float) -> Markup:
    """A mark on a bar from the least to the most of the reals; half of them lie in its darker middle."""
    bar = '<rect width="100%" height="8" y="4" rx="2" fill="#e3e6ea"/>'
    bar += '<rect x="25%" width="50%" height="8" y="4" fill="#c3c9d1"/>'
    mark = f'<circle cx="{quantile:.1%}" cy="8" r="5" fill="{theme.MODEL}"/>'
    return Markup(
        f'<svg role="img" aria-label="above {quantile:.0%} of the reals" overflow="visible">{bar}{mark}</svg>'
    )
