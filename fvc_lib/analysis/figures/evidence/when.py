"""A video's score beside known ones, and its curve over time, as SVG.

Not plotly: a page is handed on by itself, for 50 videos at a time, and plotly's script alone weighs 4.8 MB.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.figures.gallery import thumbnail

Floats = npt.NDArray[np.floating]
Pixels = npt.NDArray[np.uint8]

_MOST_TICKS = 300  # of known videos of one label; of more their quantiles
_UNDER_CURVE = 8  # frames below the curve
_EXTREMES = 3  # of the most and of the least suspicious stretches
_SIDE, _UNDER_SIDE = 160, 112  # pixels of a picture's longer side


@dataclass(frozen=True)
class Known:
    """Out-of-fold scores of the run's reals and fakes, and where the rule says which; a bound is None where it cannot.

    Attributes:
        reals, fakes: of the run.
        real_to: up to this score all networks alone would say real.
        fake_from: from this score on fake.
    """

    reals: Floats
    fakes: Floats
    real_to: float | None = None
    fake_from: float | None = None


def ticks_svg(scores: Floats, label: str) -> Markup:
    """A tick for each known score; of many their quantiles."""
    shown = scores if len(scores) <= _MOST_TICKS else np.quantile(scores, np.linspace(0, 1, _MOST_TICKS))
    color = theme.LABEL_COLORS[label]
    lines = "".join(f'<line x1="{x:.2%}" x2="{x:.2%}" y1="3" y2="17"/>' for x in np.sort(shown))
    told = f"{len(scores)} known {label}s between 0 and 1"
    return Markup(f'<svg role="img" aria-label="{told}" stroke="{color}" stroke-opacity=".55">{lines}</svg>')


def score_svg(score: float, low: float | None, high: float | None, verdict: str) -> Markup:
    """The score as a dot on its range over the networks."""
    color = theme.LABEL_COLORS.get(verdict, theme.MODEL)
    low, high = score if low is None else low, score if high is None else high
    style = f'stroke="{color}" stroke-width="4" stroke-opacity=".4"'
    line = f'<line x1="{low:.2%}" x2="{high:.2%}" y1="12" y2="12" {style}/>'
    dot = f'<circle cx="{score:.2%}" cy="12" r="7" fill="{color}" stroke="#fff" stroke-width="1.5"/>'
    axis = '<line x1="0" x2="100%" y1="12" y2="12" stroke="#c9cdd2"/>'
    told = f"score {score:.3f}, networks from {low:.3f} to {high:.3f}"
    return Markup(f'<svg role="img" aria-label="{told}" overflow="visible">{axis}{line}{dot}</svg>')


def curve_svg(
    begins: Floats, ends: Floats, scores: Floats, seconds: float, known: Known, cuts: Sequence[float] = ()
) -> Markup:
    """Scores (W, K) over seconds: mean, range over networks, the bounds of the rule, and cuts; 1 is at the top.

    Each window is an element that a link can lead to, ``#window-3`` to the fourth.
    """
    x = 1000 * np.concatenate([[0.0], (begins + ends) / 2, [seconds]]) / seconds
    mean, low, high = (np.pad(100 * (1 - each), 1, "edge") for each in (scores.mean(1), scores.min(1), scores.max(1)))

    def points(ys: Floats, xs: Floats = x) -> str:
        return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(xs, ys, strict=True))

    marks = "".join(
        f'<rect id="window-{number}" x="{1000 * begin / seconds:.1f}" width="{1000 * (end - begin) / seconds:.1f}" '
        'y="0" height="100"/>'
        for number, (begin, end) in enumerate(zip(begins, ends, strict=True))
    )
    grid = "".join(f'<line class="grid" x1="0" x2="1000" y1="{y}" y2="{y}"/>' for y in (0, 50, 100))
    bounds = "".join(
        f'<line class="bound" stroke="{theme.LABEL_COLORS[label]}" x1="0" x2="1000" y1="{100 * (1 - at):.1f}" '
        f'y2="{100 * (1 - at):.1f}"/>'
        for label, at in (("fake", known.fake_from), ("real", known.real_to))
        if at is not None
    )
    shots = "".join(
        f'<line class="cut" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="100"/>' for x in (1000 * cut / seconds for cut in cuts)
    )
    band = (
        f'<polygon points="{points(np.append(low, high[::-1]), np.append(x, x[::-1]))}"/>'
        if scores.shape[1] > 1
        else ""
    )
    told = f"scores over {seconds:.1f} seconds, from {scores.mean(1).min():.2f} to {scores.mean(1).max():.2f}"
    return Markup(
        f'<svg class="curve" role="img" aria-label="{told}" viewBox="0 0 1000 100" preserveAspectRatio="none">'
        f'{grid}{band}{shots}{bounds}<polyline points="{points(mean)}"/>{marks}</svg>'
    )


@dataclass(frozen=True)
class Stretch:
    """One window on the page: its number, seconds, score with its range, and its middle frame as a data URI."""

    number: int
    begin: float
    end: float
    score: float
    low: float
    high: float
    picture: str


def under_curve(begins: Floats, ends: Floats, middles: Pixels, seconds: float) -> list[str]:
    """Frames of as many moments, evenly over the video, as data URIs; moments without one repeat their neighbour's."""
    moments = (np.arange(_UNDER_CURVE) + 0.5) / _UNDER_CURVE * seconds
    nearest = np.abs((begins + ends)[:, None] / 2 - moments).argmin(0)
    return [data_uri(middles[number], _UNDER_SIDE) for number in nearest]


def extremes(begins: Floats, ends: Floats, scores: Floats, middles: Pixels) -> tuple[list[Stretch], list[Stretch]]:
    """The most and the least suspicious stretches that do not overlap, most and least first."""
    mean = scores.mean(1)

    # Only what lies on its side of the curve's middle: two halves of an even curve are not told apart.
    middle = (mean.min() + mean.max()) / 2

    def chosen(among: npt.NDArray[np.bool_], order: Floats, taken: Sequence[int]) -> list[int]:
        found: list[int] = []
        for number in np.argsort(order, kind="stable").tolist():
            others = (*found, *taken)
            if among[number] and all(ends[number] <= begins[o] or ends[o] <= begins[number] for o in others):
                found.append(number)
        return found[:_EXTREMES]

    most = chosen(mean >= middle, -mean, [])
    least = chosen(mean < middle, mean, most)

    def stretch(n: int) -> Stretch:
        picture = data_uri(middles[n], _SIDE)
        return Stretch(
            n, float(begins[n]), float(ends[n]), float(mean[n]), float(scores[n].min()), float(scores[n].max()), picture
        )

    return [stretch(n) for n in most], [stretch(n) for n in least]


def data_uri(frame: Pixels, side: int) -> str:
    """A frame, uint8 (3, H, W), as a small JPEG within the page."""
    return f"data:image/jpeg;base64,{base64.b64encode(thumbnail(frame.transpose(1, 2, 0), side)).decode()}"
