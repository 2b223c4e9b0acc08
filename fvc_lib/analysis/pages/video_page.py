"""The page of one judged video: verdict, score next to known ones, reasons, evidence and limits, in one small file.

Drawings are SVG without scripts. Plotly's script alone weighs 4.8 MB, and a page is handed on by itself.
"""

import base64
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.figures.gallery import thumbnail
from fvc_lib.analysis.pages.page import page, render
from fvc_lib.services.atomic_files import write_text

Floats = npt.NDArray[np.floating]
Pixels = npt.NDArray[np.uint8]

_MAX_TICKS = 300  # known videos of one label; of more, quantiles are drawn
_MAX_FRAMES, _FRAME_SIDE = 12, 160
_UNDER_CURVE, _UNDER_SIDE = 8, 112  # frames below the curve, and pixels of their longer side
_EXTREMES = 3  # stretches with the highest and with the lowest scores
_MAX_HEATED, _HEATED_SIDE, _MAX_OPACITY = 4, 168, 0.72


@dataclass(frozen=True)
class Known:
    """Out-of-fold scores of the run's reals and fakes, and the scores at which the rule answers; None: at none.

    Attributes:
        reals, fakes: float64, of the run's videos.
        real_to: up to this score of all networks the rule says real.
        fake_from: from this score of all networks it says fake.
    """

    reals: Floats
    fakes: Floats
    real_to: float | None = None
    fake_from: float | None = None


def write_video_page(path: Path, row: Mapping[str, Any], known: Known, *, stamp: str, **parts: Any) -> None:
    """Write the page of one video, whole or not at all.

    Args:
        path: of the page.
        row: of VERDICTS, with a score.
        known: what the score is set next to.
        stamp: identifies the content, for ``page.stamp_of``.
        parts: of the template ``video.html``: ``frames``, ``over_time``, ``heat_map``, ``provenance`` as the functions
            below give them; ``prior``, ``standing``, ``notes``, ``limits``, ``card`` and ``overview``.

    Raises:
        OSError: it cannot be written.
    """
    name = Path(row["path"]).name
    body = render(
        "video.html", name=name, row=row, known=known, **parts,
        fakes=ticks_svg(known.fakes, "fake"), reals=ticks_svg(known.reals, "real"),
        own=score_svg(row["score"], row["score_low"], row["score_high"], row["verdict"]),
        about={"File": name, "SHA-256": row["sha256"], "Model": row["model_id"]},
    )  # fmt: skip
    write_text(path, page(f"{row['verdict']}: {name}", body, stamp=stamp))


def frame_pictures(clips: Pixels) -> dict[str, Any]:
    """Return some frames of ``clips``, uint8 (N, T, 3, H, W), as pictures, and their number."""
    frames = clips.reshape(-1, *clips.shape[2:])
    chosen = np.unique(np.linspace(0, len(frames) - 1, min(_MAX_FRAMES, len(frames))).round().astype(int))
    return {"pictures": [data_uri(frames[number], _FRAME_SIDE) for number in chosen], "number": len(frames)}


def data_uri(frame: Pixels, side: int) -> str:
    """Return a frame, uint8 (3, H, W), as a JPEG whose longer side has ``side`` pixels."""
    return f"data:image/jpeg;base64,{base64.b64encode(thumbnail(frame.transpose(1, 2, 0), side)).decode()}"


# --- The score next to known ones


def ticks_svg(scores: Floats, label: str) -> Markup:
    """Draw a tick for each known score."""
    shown = scores if len(scores) <= _MAX_TICKS else np.quantile(scores, np.linspace(0, 1, _MAX_TICKS))
    lines = "".join(f'<line x1="{x:.2%}" x2="{x:.2%}" y1="3" y2="17"/>' for x in np.sort(shown))
    return Markup(
        f'<svg role="img" aria-label="{len(scores)} known {label}s between 0 and 1" '
        f'stroke="{theme.LABEL_COLORS[label]}" stroke-opacity=".55">{lines}</svg>'
    )


def score_svg(score: float, low: float | None, high: float | None, verdict: str) -> Markup:
    """Draw the score as a dot on its range over the networks."""
    color = theme.LABEL_COLORS.get(verdict, theme.MODEL)
    low, high = score if low is None else low, score if high is None else high
    style = f'stroke="{color}" stroke-width="4" stroke-opacity=".4"'
    line = f'<line x1="{low:.2%}" x2="{high:.2%}" y1="12" y2="12" {style}/>'
    dot = f'<circle cx="{score:.2%}" cy="12" r="7" fill="{color}" stroke="#fff" stroke-width="1.5"/>'
    axis = '<line x1="0" x2="100%" y1="12" y2="12" stroke="#c9cdd2"/>'
    label = f"score {score:.3f}, networks from {low:.3f} to {high:.3f}"
    return Markup(f'<svg role="img" aria-label="{label}" overflow="visible">{axis}{line}{dot}</svg>')


# --- The score over time


@dataclass(frozen=True)
class Stretch:
    """One window: its number, seconds, score with the range over networks, and its middle frame as a data URI."""

    number: int
    begin: float
    end: float
    score: float
    low: float
    high: float
    picture: str


def over_time(begins: Floats, ends: Floats, scores: Floats, middles: Pixels, seconds: float, known: Known) -> Any:
    """Return the parts of the score over time; None where there is a single window.

    Args:
        begins: (W,), seconds.
        ends: (W,), seconds.
        scores: (W, K), by each network.
        middles: uint8 (W, 3, H, W), the middle frame of each window.
        seconds: length of the video.
        known: whose bounds are drawn.
    """
    if len(begins) < 2:
        return None
    most, least = extremes(begins, ends, scores, middles)
    moments = (np.arange(_UNDER_CURVE) + 0.5) / _UNDER_CURVE * seconds
    nearest = np.abs((begins + ends)[:, None] / 2 - moments).argmin(0)
    return {
        "curve": curve_svg(begins, ends, scores, seconds, known),
        "several": scores.shape[1] > 1,
        "bounded": known.fake_from is not None or known.real_to is not None,
        "under": [data_uri(middles[number], _UNDER_SIDE) for number in nearest],
        "ticks": [_clock(share * seconds, seconds) for share in (0, 0.25, 0.5, 0.75, 1)],
        "most": most,
        "least": least,
    }


def curve_svg(begins: Floats, ends: Floats, scores: Floats, seconds: float, known: Known) -> Markup:
    """Draw scores (W, K) over time: their mean, their range and the bounds of the rule; 1 is at the top.

    A link to ``#window-3`` marks the fourth window.
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
    band = f'<polygon points="{points(np.append(low, high[::-1]), np.append(x, x[::-1]))}"/>'
    label = f"scores over {seconds:.1f} seconds, from {scores.mean(1).min():.2f} to {scores.mean(1).max():.2f}"
    return Markup(
        f'<svg class="curve" role="img" aria-label="{label}" viewBox="0 0 1000 100" preserveAspectRatio="none">'
        f'{grid}{band}{bounds}<polyline points="{points(mean)}"/>{marks}</svg>'
    )


def extremes(begins: Floats, ends: Floats, scores: Floats, middles: Pixels) -> tuple[list[Stretch], list[Stretch]]:
    """Return the windows with the highest scores and those with the lowest, in that order; none overlap."""
    mean = scores.mean(1)
    middle = (mean.min() + mean.max()) / 2  # so that the two halves of an even curve share no window

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
        low, high = float(scores[n].min()), float(scores[n].max())
        return Stretch(
            n, float(begins[n]), float(ends[n]), float(mean[n]), low, high, data_uri(middles[n], _FRAME_SIDE)
        )

    return [stretch(n) for n in most], [stretch(n) for n in least]


def _clock(seconds: float, whole: float) -> str:
    """Return ``1.5 s`` in a short video and ``12:05`` in a long one."""
    return f"{seconds:.1f} s" if whole < 60 else f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


# --- The map


def heat_map(clip: Pixels, values: Floats, top: float) -> dict[str, Any]:
    """Return frames of a clip without and with the map over them.

    Args:
        clip: uint8 (T, 3, H, W).
        values: (T, H, W) in [0, 1].
        top: the drop of the logit that 1 stands for.
    """
    begins = [0, *(np.flatnonzero((values[1:] != values[:-1]).any((1, 2))) + 1), len(values)]
    middles = [(first + end - 1) // 2 for first, end in itertools.pairwise(begins)]
    chosen = np.unique(np.linspace(0, len(middles) - 1, min(_MAX_HEATED, len(middles))).round().astype(int))
    frames = [
        (n + 1, data_uri(clip[n], _HEATED_SIDE), data_uri(heated(clip[n], values[n]), _HEATED_SIDE))
        for n in (int(middles[place]) for place in chosen)
    ]
    most = heated(np.full((3, 1, 1), 136, np.uint8), np.ones((1, 1))).ravel()
    color = "#" + "".join(f"{part:02x}" for part in most)
    return {"frames": frames, "num_frames": len(clip), "top": top, "color": color}


def heated(frame: Pixels, values: Floats) -> Pixels:
    """Return a frame, uint8 (3, H, W), in grey under a colour that is the more opaque, the higher the map (H, W) is."""
    color = np.array([int(theme.FAKE[place : place + 2], 16) for place in (1, 3, 5)])[:, None, None]
    cover = _MAX_OPACITY * values[None]
    grey = frame.mean(0, keepdims=True)
    return np.asarray((grey * (1 - cover) + color * cover).round().clip(0, 255), np.uint8)
