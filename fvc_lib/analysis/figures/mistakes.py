"""The worst mistakes of a run with their frames, so that a reader can look for what misled the network."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from html import escape

import av
import numpy as np
import numpy.typing as npt
import polars as pl

from fvc_lib.analysis.pages.html_table import TEXT_STYLE
from fvc_lib.analysis.wording import clean_text, number_text
from fvc_lib.services.errors import DataError

Pixels = npt.NDArray[np.uint8]
ReadClip = Callable[[str, int], Pixels]  # of a video id and the number of its copy: uint8 (T, 3, H, W)

CLIP_GONE = "its clip is no longer in the store"
_FRAMES = 4
_SIDE = 112  # pixels; the page's record must stay small
_GAP = 3


def worst_mistakes(predictions: pl.DataFrame, index: pl.DataFrame, count: int = 8) -> pl.DataFrame:
    """The videos on the wrong side of their fold's threshold, those furthest from it first.

    Args:
        predictions: one run's rows of ``tables.PREDICTIONS``.
        index: its rows of ``tables.INDEX``.
        count: at most so many.

    Returns:
        ``video_id path label manipulation fold score threshold distance``; the distance is to the threshold.
    """
    wrong = (pl.col("score") >= pl.col("threshold")) != (pl.col("label") == "fake")
    known = index.select("video_id", "path", "manipulation")
    return (
        predictions.filter(wrong)
        .with_columns(distance=(pl.col("score") - pl.col("threshold")).abs())
        .sort(["distance", "video_id"], descending=[True, False])
        .head(count)
        .join(known, on="video_id", how="left", maintain_order="left")
        .select("video_id", "path", "label", "manipulation", "fold", "score", "threshold", "distance")
    )


@dataclass(frozen=True)
class MistakesGallery:
    """The worst mistakes, each with a strip of its frames where its clip is still there.

    Attributes:
        mistakes: rows of ``worst_mistakes``.
        strips: JPEG bytes by video id.
        num_videos: videos judged in all.
        num_wrong: videos decided wrongly in all.
    """

    mistakes: pl.DataFrame
    strips: Mapping[str, bytes]
    num_videos: int
    num_wrong: int

    @property
    def caption(self) -> str:
        """What is shown, and of how many, in one sentence."""
        shown = "all of them" if self.mistakes.height == self.num_wrong else f"the worst {self.mistakes.height}"
        told = f"{self.num_wrong:,} of n = {self.num_videos:,} videos are decided wrongly; here are {shown}"
        return f"{told}, with frames as the network got them, compressed for this page"

    def _repr_html_(self) -> str:
        if self.mistakes.is_empty():
            return '<p class="fvc-remark">No video is decided wrongly.</p>'
        rows = "".join(self._row(row) for row in self.mistakes.iter_rows(named=True))
        return (
            f'<table class="fvc-table"><caption{TEXT_STYLE}>{escape(self.caption)}</caption><thead><tr>'
            f"<th{TEXT_STYLE}>Frames</th><th{TEXT_STYLE}>Video</th></tr></thead><tbody>{rows}</tbody></table>"
        )

    def __repr__(self) -> str:
        lines = [self.caption]
        for row in self.mistakes.iter_rows(named=True):
            gone = "" if row["video_id"] in self.strips else f" ({CLIP_GONE})"
            lines.append(f"{clean_text(row['path'])}: {_told(row)}{gone}")
        return "\n".join(lines)

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return {"text/html": self._repr_html_(), "text/plain": repr(self)}

    def _row(self, row: dict[str, object]) -> str:
        strip = self.strips.get(str(row["video_id"]))
        name = escape(clean_text(row["path"]))
        frames = f"<i>{CLIP_GONE}: run 03_augmentation again to see it</i>"
        if strip is not None:
            encoded = base64.b64encode(strip).decode()
            frames = f'<img alt="frames of {name}" src="data:image/jpeg;base64,{encoded}">'
        told = f"<b>{name}</b><br>{escape(_told(row))}"
        return f"<tr><td{TEXT_STYLE}>{frames}</td><td{TEXT_STYLE}>{told}</td></tr>"


def mistakes_gallery(
    predictions: pl.DataFrame, index: pl.DataFrame, read_clip: ReadClip, count: int = 8
) -> MistakesGallery:
    """The worst mistakes with their frames.

    Args:
        predictions: one run's rows of ``tables.PREDICTIONS``.
        index: its rows of ``tables.INDEX``.
        read_clip: gives a video's original clip when asked for number 0, or raises ``DataError`` where it is gone.
        count: at most so many.
    """
    mistakes = worst_mistakes(predictions, index, count)
    strips = {}
    for video_id in mistakes["video_id"]:
        try:
            strips[video_id] = jpeg_bytes(_strip(read_clip(video_id, 0)))
        except (DataError, ValueError):
            continue  # shown as gone
    wrong = (predictions["score"] >= predictions["threshold"]) != (predictions["label"] == "fake")
    return MistakesGallery(mistakes, strips, predictions.height, int(wrong.sum()))


def jpeg_bytes(image: Pixels) -> bytes:
    """``image``, uint8 (H, W, 3) RGB, as a JPEG file."""
    stream = io.BytesIO()
    with av.open(stream, "w", format="image2pipe") as container:
        output = container.add_stream("mjpeg", rate=Fraction(1))
        output.height, output.width = image.shape[:2]
        output.pix_fmt = "yuvj444p"
        output.options = {"qmin": "3", "qmax": "3"}
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
        for packet in (*output.encode(frame), *output.encode()):
            container.mux(packet)
    return stream.getvalue()


def _strip(clip: Pixels) -> Pixels:
    """A few frames of ``clip`` from first to last, side by side, none larger than the page needs: uint8 (H, W, 3)."""
    chosen = np.unique(np.linspace(0, len(clip) - 1, min(_FRAMES, len(clip))).round().astype(int))
    step = max(1, -(-clip.shape[3] // _SIDE))
    frames = [clip[number, :, ::step, ::step].transpose(1, 2, 0) for number in chosen]
    gap = np.full((frames[0].shape[0], _GAP, 3), 255, np.uint8)
    laid = [part for frame in frames for part in (gap, frame)][1:]
    strip = np.concatenate(laid, axis=1)
    height, width = strip.shape[0] // 2 * 2, strip.shape[1] // 2 * 2
    return strip[:height, :width]


def _told(row: Mapping[str, object]) -> str:
    how = f" ({clean_text(row['manipulation'])})" if row["manipulation"] else ""
    score, threshold = (number_text(float(str(row[name]))) for name in ("score", "threshold"))
    return f"{row['label']}{how}, scored {score} at the threshold {threshold}; fold {row['fold']}"
