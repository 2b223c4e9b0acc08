"""The page of one judged video: verdict, score next to known ones, reasons, evidence and limits, in one small file.

Drawings are SVG without scripts: plotly's script weighs 4.8 MB, and this page is handed on by itself.
"""

import base64
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.figures.gallery import thumbnail
from fvc_lib.analysis.pages.page import render, write_page

Floats = npt.NDArray[np.floating]
Pixels = npt.NDArray[np.uint8]

_MOST_TICKS = 300  # known videos of one label; of more, quantiles are drawn
_FRAMES, _FRAME_SIDE = 12, 160
_UNDER_CURVE, _UNDER_SIDE = 8, 112  # frames below the curve, and pixels of their longer side
_HEATED, _HEATED_SIDE, _MOST_OPACITY = 4, 168, 0.72


@dataclass(frozen=True)
class Known:
    """Out-of-fold scores of the run's videos, and the scores at which the rule decides.

    Attributes:
        reals: float64, of the real videos.
        fakes: float64, of the fake videos.
        real_to: the rule says real up to this score of all networks; None: never.
        fake_from: the rule says fake from this score of all networks; None: never.
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
            below return them; ``prior``, ``standing``, ``notes``, ``limits``, ``card`` and ``overview``.

    Raises:
        OSError: it cannot be written.
    """
    name = Path(row["path"]).name
    drawn = {
        "fakes": ticks_svg(known.fakes, "fake"),
        "reals": ticks_svg(known.reals, "real"),
        "own": score_svg(row["score"], row["score_low"], row["score_high"], row["verdict"]),
    }
    about = {"File": name, "SHA-256": row["sha256"], "Model": row["model_id"]}
    body = render("video.html", name=name, row=row, known=known, about=about, **drawn, **parts)
    write_page(path, f"{row['verdict']}: {name}", body, stamp=stamp)


def data_uri(frame: Pixels, side: int) -> str:
    """Return a frame, uint8 (3, H, W), as a JPEG whose longer side has ``side`` pixels."""
    return f"data:image/jpeg;base64,{base64.b64encode(thumbnail(frame.transpose(1, 2, 0), side)).decode()}"


def frame_pictures(clips: Pixels) -> dict[str, Any]:
    """Return some frames of ``clips``, uint8 (N, T, 3, H, W), as pictures, and their number."""
    frames = clips.reshape(-1, *clips.shape[2:])
    chosen = theme.thinned(len(frames), _FRAMES)
    return {"pictures": [data_uri(frames[number], _FRAME_SIDE) for number in chosen], "number": len(frames)}


# --- The score next to known ones


def ticks_svg(scores: Floats, label: str) -> Markup:
    """Draw a tick for each known score."""
    shown = scores if len(scores) <= _MOST_TICKS else np.quantile(scores, np.linspace(0, 1, _MOST_TICKS))
    lines = [f'<line x1="{x:.2%}" x2="{x:.2%}" y1="3" y2="17"/>' for x in np.sort(shown)]
    text = f"{len(scores)} known {label}s between 0 and 1"
    look = f'stroke="{theme.LABEL_COLORS[label]}" stroke-opacity=".55"'
    return Markup(f'<svg role="img" aria-label="{text}" {look}>{"".join(lines)}</svg>')


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
    moments = (np.arange(_UNDER_CURVE) + 0.5) / _UNDER_CURVE * seconds
    nearest = np.abs((begins + ends)[:, None] / 2 - moments).argmin(0)
    mean = scores.mean(1)
    most = {"begin": begins[mean.argmax()], "end": ends[mean.argmax()], "score": mean.max()}
    return {
        "curve": curve_svg(begins, ends, scores, seconds, known),
        "several": scores.shape[1] > 1,
        "bounded": known.fake_from is not None or known.real_to is not None,
        "under": [data_uri(middles[number], _UNDER_SIDE) for number in nearest],
        "ticks": [_clock(share * seconds, seconds) for share in (0, 0.25, 0.5, 0.75, 1)],
        "most": {name: float(value) for name, value in most.items()},
    }


def curve_svg(begins: Floats, ends: Floats, scores: Floats, seconds: float, known: Known) -> Markup:
    """Draw scores (W, K) over time: their mean, their range and the bounds of the rule; 1 is at the top."""
    x = 1000 * np.concatenate([[0.0], (begins + ends) / 2, [seconds]]) / seconds
    mean, low, high = (np.pad(100 * (1 - y), 1, "edge") for y in (scores.mean(1), scores.min(1), scores.max(1)))
    parts = [f'<line class="grid" x1="0" x2="1000" y1="{y}" y2="{y}"/>' for y in (0, 50, 100)]
    parts.append(f'<polygon points="{_points(np.append(x, x[::-1]), np.append(low, high[::-1]))}"/>')
    for label, bound in (("fake", known.fake_from), ("real", known.real_to)):
        if bound is not None:
            look, y = f'class="bound" stroke="{theme.LABEL_COLORS[label]}"', f"{100 * (1 - bound):.1f}"
            parts.append(f'<line {look} x1="0" x2="1000" y1="{y}" y2="{y}"/>')
    parts.append(f'<polyline points="{_points(x, mean)}"/>')
    label = f"scores over {seconds:.1f} seconds, from {scores.mean(1).min():.2f} to {scores.mean(1).max():.2f}"
    look = 'class="curve" role="img" viewBox="0 0 1000 100" preserveAspectRatio="none"'
    return Markup(f'<svg {look} aria-label="{label}">{"".join(parts)}</svg>')


def _points(xs: Floats, ys: Floats) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))


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
    frames = []
    for place in theme.thinned(len(middles), _HEATED):
        number = int(middles[place])
        plain, marked = clip[number], heated(clip[number], values[number])
        frames.append((number + 1, data_uri(plain, _HEATED_SIDE), data_uri(marked, _HEATED_SIDE)))
    most = heated(np.full((3, 1, 1), 136, np.uint8), np.ones((1, 1))).ravel()
    color = "#" + "".join(f"{part:02x}" for part in most)
    return {"frames": frames, "num_frames": len(clip), "top": top, "color": color}


def heated(frame: Pixels, values: Floats) -> Pixels:
    """Return a frame, uint8 (3, H, W), in grey under a colour that is more opaque where the map (H, W) is higher."""
    color = np.array([int(theme.FAKE[place : place + 2], 16) for place in (1, 3, 5)])[:, None, None]
    cover = _MOST_OPACITY * values[None]
    grey = frame.mean(0, keepdims=True)
    return np.asarray((grey * (1 - cover) + color * cover).round().clip(0, 255), np.uint8)
