"""Galleries of small JPEG pictures with captions, for notebooks and pages. All text is escaped."""

import base64
import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
from PIL import Image

from fvc_lib.analysis.figures.theme import thinned
from fvc_lib.analysis.pages.display import Displayed
from fvc_lib.analysis.wording import clean_text
from fvc_lib.services.atomic_files import path_from_text
from fvc_lib.services.errors import FvcError
from fvc_lib.services.tables import VIDEO_FRAMES, frame_of

Pixels = npt.NDArray[np.uint8]
ReadPicture = Callable[[Path], Pixels]  # takes the path of a file, returns uint8 (H, W, 3)
# Takes a video id and the number of an augmented copy (0: the video itself), returns uint8 (T, 3, H, W).
ReadClip = Callable[[str, int], Pixels]
Row = Mapping[str, Any]

GONE = "cannot be shown any more"
_SIDE, _FRAME_SIDE = 132, 84  # longer side in pixels: of a single picture, and of a frame in a strip
_FRAMES, _GAP = 5, 3  # frames in a strip, and pixels between them
_MOST_CARDS = 48  # about 250 kB of pictures
_MOST_STRIPS = 300  # about 1.5 MB in a page


@dataclass(frozen=True)
class Card:
    """One picture with its text.

    Attributes:
        picture: JPEG bytes. None: the file could not be read.
        shows: alternative text of the picture.
        title: first line below the picture, plain text.
        lines: further lines, plain text.
    """

    picture: bytes | None
    shows: str
    title: str
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Gallery(Displayed):
    """At most 48 cards (pictures with text), shown in rows. ``caption`` is a sentence above the rows."""

    cards: tuple[Card, ...]
    caption: str

    def _repr_html_(self) -> str:
        cards = "\n".join(map(card_html, self.cards[:_MOST_CARDS]))
        caption = escape(clean_text(self.caption))
        return f'<p class="fvc-remark">{caption}</p><div class="fvc-cards">{cards}</div>'

    def __repr__(self) -> str:
        return "\n".join(clean_text(text) for text in (self.caption, *(card.title for card in self.cards)))


def card_html(card: Card) -> str:
    """Return ``card`` as HTML: the picture, and below it the title and each further text on a new line, escaped."""
    shows, title, *lines = (escape(clean_text(text)) for text in (card.shows, card.title, *card.lines))
    text = "<br>".join([f"<b>{title}</b>", *lines])
    width, picture = _SIDE, f"<i>{shows} {GONE}</i><br>"
    if card.picture is not None:
        # The card is as wide as its picture, so that a long text wraps below the picture.
        width = max(_SIDE, Image.open(io.BytesIO(card.picture)).width)
        source = f"data:image/jpeg;base64,{base64.b64encode(card.picture).decode()}"
        picture = f'<img alt="{shows}" title="{shows}" src="{source}">'
    style = f"display:inline-block;vertical-align:top;text-align:left;width:{width}px"
    return f'<div class="fvc-card" style="{style}">{picture}{text}</div>'


def thumbnail(image: Pixels, side: int = _SIDE) -> bytes:
    """Return ``image``, uint8 (H, W, 3), as the bytes of a JPEG whose width and height are at most ``side`` pixels."""
    picture = Image.fromarray(np.ascontiguousarray(image))
    picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=82)
    return stream.getvalue()


def strip(clip: Pixels, side: int = _FRAME_SIDE) -> bytes:
    """Return at most five frames of ``clip``, uint8 (T, 3, H, W), next to each other in one JPEG file.

    ``side`` is the longer side of a frame in pixels.
    """
    chosen = clip[thinned(len(clip), _FRAMES)]
    pixels = chosen.transpose(0, 2, 3, 1).copy()
    frames = [Image.fromarray(frame) for frame in pixels]
    for frame in frames:
        frame.thumbnail((side, side), Image.Resampling.LANCZOS)
    width, height = frames[0].size
    whole_width = (width + _GAP) * len(frames) - _GAP
    sheet = Image.new("RGB", (whole_width, height), "white")
    for place, frame in enumerate(frames):
        sheet.paste(frame, (place * (width + _GAP), 0))
    return thumbnail(np.asarray(sheet), max(sheet.size))


def cards_of(rows: pl.DataFrame, picture: Callable[[Row], bytes | None]) -> tuple[Card, ...]:
    """Return one card (a picture with its text) per row.

    Args:
        rows: a frame with the columns ``path``, ``title`` and ``lines`` (a list of texts), and those that ``picture``
            reads.
        picture: takes a row as a dict and returns JPEG bytes, or None. If it returns None or raises FvcError, OSError
            or ValueError, the card says that the file cannot be shown.
    """
    cards = []
    for row in rows.iter_rows(named=True):
        shown = None
        with contextlib.suppress(FvcError, OSError, ValueError):
            shown = picture(row)
        cards.append(Card(shown, row["path"], row["title"], tuple(row["lines"] or ())))
    return tuple(cards)


def _strip_of(read_clip: ReadClip | None) -> Callable[[Row], bytes | None]:
    return lambda row: strip(read_clip(row["video_id"], 0)) if read_clip else None


def batch_gallery(samples: Pixels, names: Sequence[str]) -> Gallery:
    """Return a gallery of one batch of B samples, to see what the network gets.

    ``samples`` are pictures, uint8 (B, 3, H, W), or clips, uint8 (B, T, 3, H, W). ``names`` are the B titles.
    """
    clips = samples if samples.ndim == 5 else samples[:, None]
    cards = [Card(strip(clip, _SIDE), f"sample {name}", name) for name, clip in zip(names, clips, strict=True)]
    return Gallery(tuple(cards), f"One batch as the network gets it: {len(cards)} samples, a few frames of a clip.")


# --- Images


def mistaken_images(predictions: pl.DataFrame, root: Path, read: ReadPicture, *, count: int = 12) -> Gallery:
    """Return a gallery of the most confident mistakes: misclassified images, the highest predicted probability first.

    Args:
        predictions: rows of ``tables.IMAGE_PREDICTIONS``, all test images.
        root: folder that the paths of the images are relative to.
        read: returns the pixels of a file.
        count: the largest number of images to show.
    """
    wrong = predictions.filter(pl.col("class_label") != pl.col("predicted_label"))
    rows = wrong.sort("probability", "image_id", descending=[True, False]).head(count)
    called = pl.format("called {}, with probability {}", "predicted_label", pl.col("probability").round(2))
    counted = f"{wrong.height:,} of n = {predictions.height:,} test images"
    caption = f"{counted} are recognised wrongly; {rows.height} are shown"
    rows = rows.with_columns(title="class_label", lines=pl.concat_list(called))
    return Gallery(cards_of(rows, lambda row: thumbnail(read(root / path_from_text(row["path"])))), caption)


# --- Videos


def caption_gallery(captions: pl.DataFrame, read_clip: ReadClip, *, count: int = 9) -> Gallery:
    """Return a gallery of the first ``count`` test videos by id, with the model's captions.

    At most three reference captions are shown below each video. ``captions`` are rows of ``tables.CAPTIONS``.
    """
    references = pl.col("references").str.split("\n")
    title = pl.when(pl.col("caption") == "").then(pl.lit("(nothing was written)")).otherwise("caption")
    lines = references.list.head(3).list.eval(pl.format("reference: {}", pl.element()))
    repeats = references.list.contains(pl.col("caption"))
    rows = captions.sort("video_id").with_columns(repeats=repeats, title=title, lines=lines)
    caption = f"{rows['repeats'].sum():,} of n = {rows.height:,} test videos got word for word one of their references"
    return Gallery(cards_of(rows.head(count), _strip_of(read_clip)), caption)


def mistakes_gallery(
    predictions: pl.DataFrame, index: pl.DataFrame, read_clip: ReadClip | None, count: int = 8
) -> Gallery:
    """Return a gallery of the wrongly decided videos whose scores are farthest from the threshold of their fold.

    Args:
        predictions: rows of PREDICTIONS of all folds.
        index: rows of INDEX. Only the columns ``video_id path`` are used.
        read_clip: returns the frames of a video. None: no pictures are shown, as for a model that sees no frames.
        count: the most videos to show.
    """
    score, threshold = pl.col("score"), pl.col("threshold")
    is_fake = pl.col("label") == "fake"
    wrong = predictions.filter((score >= threshold) != is_fake)
    distance = (score - threshold).abs()
    worst = wrong.sort(distance, "video_id", descending=[True, False]).head(count)
    rows = worst.join(index.select("video_id", "path"), on="video_id", maintain_order="left")
    rounded = (value.round(3).map_elements("{:.3f}".format, pl.String) for value in (score, threshold))
    line = pl.format("{}, scored {}, threshold {}, fold {}", "label", *rounded, "fold")
    rows = rows.with_columns(title="path", lines=pl.concat_list(line))
    caption = f"{wrong.height:,} of n = {predictions.height:,} videos are decided wrongly; the worst {rows.height} are"
    return Gallery(cards_of(rows, _strip_of(read_clip)), f"{caption} shown")


def frame_strips(scores: pl.DataFrame, read_clip: ReadClip | None) -> pl.DataFrame:
    """Return the table ``tables.VIDEO_FRAMES``: a strip of frames for each of the first 300 videos of ``scores``.

    Columns are ``video_id group_id jpeg_base64``. Videos whose clip cannot be read are left out.

    Args:
        scores: rows of ``tables.SCORES``. Only the columns ``video_id group_id`` are used.
        read_clip: returns the frames of a video. None: the table is empty.
    """
    rows: list[tuple[str, str, str]] = []
    videos = scores.select("video_id", "group_id").head(_MOST_STRIPS if read_clip else 0)
    for video_id, group_id in videos.iter_rows():
        with contextlib.suppress(FvcError):
            picture = strip(read_clip(video_id, 0))  # type: ignore[misc]  # no rows without it
            rows.append((video_id, group_id, base64.b64encode(picture).decode()))
    return frame_of(rows, VIDEO_FRAMES)
