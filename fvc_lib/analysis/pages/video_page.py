"""A video's own page: verdict, score beside known ones, reasons, evidence and limits; whole in one small file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from fvc_lib.analysis.figures.evidence import what, when, where
from fvc_lib.analysis.figures.evidence.when import Known
from fvc_lib.analysis.pages.report import page, render, stamp_of
from fvc_lib.services.atomic_files import write_text

_MOST_FRAMES = 12
_FRAME_SIDE = 160


@dataclass(frozen=True)
class Section:
    """One kind of evidence: a heading, and HTML whose text from outside is escaped."""

    title: str
    html: Markup


def write_video_page(
    path: Path,
    row: Mapping[str, Any],
    known: Known,
    sections: Sequence[Section],
    *,
    stamp: str,
    prior: str = "",
    standing: str = "",
    failures: Sequence[str] = (),
    limits: Sequence[str] = (),
    card: str = "",
    overview: str = "",
) -> None:
    """Write the page of one video, whole or not at all.

    Args:
        path: of the page.
        row: of VERDICTS, with a score.
        known: what the score is set beside.
        sections: in their order.
        stamp: what the page is of; see ``is_there``.
        prior: share of fakes for which the row's probability is, as it is shown; empty: it has none.
        standing: the sentence of a run that is not shown to be above its controls; empty: it is.
        failures: what could not be found out, a sentence each.
        limits: of the method, likewise.
        card: of the model, Markdown, shown as text.
        overview: where the page of all verdicts is, relative to this one; empty: there is none.

    Raises:
        OSError: it cannot be written.
    """
    name = Path(row["path"]).name
    body = render(
        "video.html", name=name, row=row, known=known, prior=prior, sections=sections, standing=standing,
        failures=failures, limits=limits, overview=overview, card=Markup.escape(card),
        fakes=when.ticks_svg(known.fakes, "fake"), reals=when.ticks_svg(known.reals, "real"),
        own=when.score_svg(row["score"], row["score_low"], row["score_high"], row["verdict"]),
        about={"File": name, "SHA-256": row["sha256"], "Model": row["model_id"]},
    )  # fmt: skip
    write_text(path, page(f"{row['verdict']}: {name}", body, stamp=stamp))


def is_there(path: Path, stamp: str) -> bool:
    """Whether the page is there and of the same."""
    return stamp_of(path) == stamp


def frames_section(clips: npt.NDArray[np.uint8]) -> Section:
    """The frames of ``clips``, uint8 (N, T, 3, H, W), or as many of them as there is room for."""
    frames = clips.reshape(-1, *clips.shape[2:])
    chosen = np.unique(np.linspace(0, len(frames) - 1, min(_MOST_FRAMES, len(frames))).round().astype(int))
    pictures = [when.data_uri(frames[number], _FRAME_SIDE) for number in chosen]
    return Section("Frames", render("video_frames.html", pictures=pictures, num_frames=len(frames)))


def footage_section(sentences: Sequence[str]) -> Section:
    """What the video consists of."""
    return Section("What the video is", render("video_footage.html", sentences=sentences))


def provenance_section(sentences: Sequence[str], claims: Sequence[str], traces: Sequence[tuple[str, str]]) -> Section:
    """What the file says of itself; ``traces`` are names and values, folded where they are many."""
    html = render("video_provenance.html", sentences=sentences, claims=claims, traces=traces, folded=len(traces) > 8)
    return Section("Where it says it comes from", html)


def when_section(
    begins: when.Floats,
    ends: when.Floats,
    scores: when.Floats,
    middles: when.Pixels,
    seconds: float,
    known: Known,
    *,
    notes: Sequence[str],
    limit: str,
    cuts: Sequence[float] = (),
) -> Section:
    """The curve of windows (W,) with scores (W, K), ``cuts`` in seconds; of a single window its notes alone."""
    values: dict[str, Any] = dict.fromkeys(("curve", "under", "ticks", "most", "least"), ())
    if len(begins) > 1:
        most, least = when.extremes(begins, ends, scores, middles)
        values = {
            "curve": when.curve_svg(begins, ends, scores, seconds, known, cuts),
            "under": when.under_curve(begins, ends, middles, seconds),
            "ticks": [_clock(share * seconds, seconds) for share in (0, 0.25, 0.5, 0.75, 1)],
            "most": most,
            "least": least,
        }
    dashed = known.fake_from is not None or known.real_to is not None
    html = render(
        "video_when.html",
        notes=notes,
        limit=limit,
        several=scores.shape[1] > 1,
        cuts=len(cuts),
        dashed=dashed,
        **values,
    )
    return Section("When", html)


class MapLike(Protocol):
    """A map (``tasks/video/verdicts/maps.py``); curves are there wherever it is shown."""

    @property
    def method(self) -> str:
        """Its name."""

    @property
    def meaning(self) -> str:
        """What a high value says."""

    @property
    def values(self) -> npt.NDArray[np.float32]:
        """(T, H, W) in [0, 1]."""

    @property
    def top(self) -> float | None:
        """What 1 stands for, in logits."""

    @property
    def deletion(self) -> where.CurveLike | None:
        """What is marked deleted first."""

    @property
    def insertion(self) -> where.CurveLike | None:
        """What is marked brought back first."""

    @property
    def why_not(self) -> str:
        """Why it is not shown; empty: it is."""

    def check_sentences(self) -> Sequence[str]:
        """What its checks found."""


def where_section(clip: when.Pixels, maps: Sequence[MapLike], *, note: str, limit: str) -> Section:
    """Those of ``maps`` that are shown, over frames of ``clip`` uint8 (T, 3, H, W), and why others are not."""
    shown = []
    for each in maps:
        if not each.why_not and each.deletion is not None and each.insertion is not None:
            curves = [
                (name, where.check_curve(curve, f"{each.method}: {name}"))
                for name, curve in (("deleted", each.deletion), ("brought back", each.insertion))
            ]
            shown.append((each, where.heat_frames(clip, each.values), curves))
    hidden = [each for each in maps if each.why_not]
    html = render(
        "video_where.html", shown=shown, hidden=hidden, num_frames=len(clip), scale=where.scale_svg(), note=note,
        limit=limit,
    )  # fmt: skip
    return Section("Where", html)


_MOST_FEATURES = 12  # that are not folded away


def what_section(
    frames: Sequence[what.FrameLike],
    features: Sequence[what.FeatureLike],
    *,
    num_reals: int,
    notes: Sequence[str],
    limit: str,
) -> Section:
    """Panels of ``frames``, this video's first, and ``features`` among ``num_reals``, the most extreme first."""
    rows = [(each, what.quantile_svg(each.quantile)) for each in features]
    html = render(
        "video_what.html", frames=frames, panels=what.panel_rows([each.panels for each in frames]),
        shown=rows[:_MOST_FEATURES], folded=rows[_MOST_FEATURES:], num_reals=num_reals, notes=notes, limit=limit,
    )  # fmt: skip
    return Section("What it shows", html)


def _clock(seconds: float, whole: float) -> str:
    """``1.5 s`` in a short video, ``12:05`` in a long one."""
    if whole < 60:
        return f"{seconds:.1f} s"
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
