"""Pictures in a record: small JPEG files with their captions, escaped whatever a file or a class is called."""

import base64
import contextlib
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
from PIL import Image

from fvc_lib.analysis.wording import clean_text, count_text, number_text
from fvc_lib.services.atomic_files import path_from_text
from fvc_lib.services.errors import FvcError
from fvc_lib.services.tables import VIDEO_FRAMES, frame_of

Pixels = npt.NDArray[np.uint8]
ReadPicture = Callable[[Path], Pixels]  # of a file: uint8 (H, W, 3)
ReadClip = Callable[[str, int], Pixels]  # of a video id and the number of its copy (0: itself): uint8 (T, 3, H, W)
Row = Mapping[str, Any]

GONE = "cannot be shown any more"
MOST_STRIPS = 300  # about 1.5 MB in a page
_SIDE, _FRAME_SIDE = 132, 84  # pixels of the longer side: of a picture, of each frame in a strip
_FRAMES, _GAP = 5, 3
_MOST_CARDS = 48  # about 250 kB of pictures


@dataclass(frozen=True)
class Card:
    """One picture with its text.

    Attributes:
        picture: JPEG bytes; None: the picture is gone.
        shows: its alternative text.
        title: plain text.
        lines: further plain text.
    """

    picture: bytes | None
    shows: str
    title: str
    lines: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """Width in pixels of the picture, or what the text needs."""
        return _SIDE if self.picture is None else max(_SIDE, Image.open(io.BytesIO(self.picture)).width)


@dataclass(frozen=True)
class Gallery:
    """Cards in rows; ``caption`` is a sentence above them."""

    cards: tuple[Card, ...]
    caption: str

    def _repr_html_(self) -> str:
        cards = "\n".join(map(card_html, self.cards[:_MOST_CARDS]))
        more = len(self.cards) - _MOST_CARDS
        remark = f'<p class="fvc-remark">and {more} more</p>' if more > 0 else ""
        caption = f'<p class="fvc-remark">{escape(clean_text(self.caption))}</p>'
        return f'{caption}<div class="fvc-cards">{cards}</div>{remark}'

    def __repr__(self) -> str:
        lines = [self.caption]
        for card in self.cards[:_MOST_CARDS]:
            gone = f" ({GONE})" if card.picture is None else ""
            lines.append(f"{card.shows}: {'; '.join((card.title, *card.lines))}{gone}")
        return "\n".join(map(clean_text, lines))

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return {"text/html": self._repr_html_(), "text/plain": repr(self)}


def card_html(card: Card) -> str:
    """Return one card as HTML; its texts are escaped, a clean line each."""
    title, *lines = (escape(clean_text(text)) for text in (card.title, *card.lines))
    text = "<br>".join([f"<b>{title}</b>", *lines])
    shows = escape(clean_text(card.shows))
    # A width of its own, so that a long text wraps below its picture.
    style = f"display:inline-block;vertical-align:top;text-align:left;width:{card.width}px"
    if card.picture is None:
        return f'<div class="fvc-card gone" style="{style}"><i>{shows} {GONE}</i><br>{text}</div>'
    encoded = base64.b64encode(card.picture).decode()
    image = f'<img alt="{shows}" title="{shows}" src="data:image/jpeg;base64,{encoded}">'
    return f'<div class="fvc-card" style="{style}">{image}{text}</div>'


def thumbnail(image: Pixels, side: int = _SIDE) -> bytes:
    """Return ``image``, uint8 (H, W, 3), as a JPEG file no larger than ``side`` pixels either way."""
    picture = Image.fromarray(np.ascontiguousarray(image))
    picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=82)
    return stream.getvalue()


def strip(clip: Pixels, side: int = _FRAME_SIDE) -> bytes:
    """Return a few frames of ``clip``, uint8 (T, 3, H, W), in a row as a JPEG file."""
    chosen = np.unique(np.linspace(0, len(clip) - 1, min(_FRAMES, len(clip))).round().astype(int))
    height, width = clip.shape[2:]
    scale = min(1.0, side / max(height, width))
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    sheet = Image.new("RGB", ((size[0] + _GAP) * len(chosen) - _GAP, size[1]), "white")
    for place, number in enumerate(chosen):
        frame = Image.fromarray(np.ascontiguousarray(clip[number].transpose(1, 2, 0)))
        sheet.paste(frame.resize(size, Image.Resampling.LANCZOS), (place * (size[0] + _GAP), 0))
    return thumbnail(np.asarray(sheet), max(sheet.size))


def cards_of(
    rows: Iterable[Row], picture: Callable[[Row], bytes], describe: Callable[[Row], Sequence[str]]
) -> tuple[Card, ...]:
    """Return a card for each of ``rows``, which have a ``path``.

    Args:
        rows: of a table.
        picture: returns the JPEG bytes; an unreadable file is marked as gone.
        describe: returns the title and further lines.
    """
    cards = []
    for row in rows:
        title, *lines = describe(row)
        shown = None
        with contextlib.suppress(FvcError, OSError, ValueError):
            shown = picture(row)
        cards.append(Card(shown, str(row["path"]), title, tuple(lines)))
    return tuple(cards)


def _pictures(
    rows: Iterable[Row], root: Path, read: ReadPicture, describe: Callable[[Row], Sequence[str]]
) -> tuple[Card, ...]:
    return cards_of(rows, lambda row: thumbnail(read(root / path_from_text(row["path"]))), describe)


def _clips(rows: Iterable[Row], read: ReadClip, describe: Callable[[Row], Sequence[str]]) -> tuple[Card, ...]:
    return cards_of(rows, lambda row: strip(read(row["video_id"], 0)), describe)


def batch_gallery(samples: Pixels, names: Sequence[str]) -> Gallery:
    """Return the samples of a batch: uint8 pictures (B, 3, H, W) or clips (B, T, 3, H, W)."""
    clips = samples if samples.ndim == 5 else samples[:, None]
    cards = [Card(strip(clip, _SIDE), f"sample {name}", name) for name, clip in zip(names, clips, strict=True)]
    what = "clips, a few frames of each" if samples.ndim == 5 else "pictures"
    return Gallery(tuple(cards), f"One batch as the network gets it: {len(cards)} {what}.")


# --- Images


def example_images(
    images: pl.DataFrame, targets: pl.DataFrame, root: Path, read: ReadPicture, *, count: int = 18
) -> Gallery:
    """Return ``count`` training images, each class in turn, one of a group, with their numbers."""
    known: dict[str, list[str]] = {}
    for row in targets.iter_rows(named=True):
        known.setdefault(row["image_id"], []).append(f"{row['target']} {row['value']:,.4g} {row['unit']}".strip())
    training = images.filter(part="train")
    # By id, which comes from the content: an arbitrary choice that is the same everywhere.
    one_per_group = training.sort("image_id").unique("group_id", keep="first", maintain_order=True)
    in_turn = one_per_group.with_columns(turn=pl.int_range(pl.len()).over("class_label"))
    shown = in_turn.sort("turn", "class_label", nulls_last=True).head(count).sort("class_label", nulls_last=True)

    def describe(row: Row) -> tuple[str, ...]:
        return str(row["class_label"] or "no class"), *known.get(row["image_id"], ())

    groups = count_text(training["group_id"].n_unique(), "group")
    caption = f"{shown.height} of {count_text(training.height, 'training image')} in {groups}, by class"
    return Gallery(_pictures(shown.iter_rows(named=True), root, read, describe), caption)


def mistaken_images(mistakes: pl.DataFrame, num_images: int, num_wrong: int, root: Path, read: ReadPicture) -> Gallery:
    """Return wrongly recognised images (``tables.IMAGE_PREDICTIONS``) in the order given."""

    def describe(row: Row) -> tuple[str, ...]:
        called = f"called {row['predicted_label']}, with probability {number_text(row['probability'], 2)}"
        return row["class_label"], called, f"its own class comes at place {row['rank_of_class']}"

    caption = f"{num_wrong:,} of n = {num_images:,} test images are recognised wrongly; {mistakes.height} are shown"
    return Gallery(_pictures(mistakes.iter_rows(named=True), root, read, describe), caption)


# --- Videos


def example_clips(pairs: pl.DataFrame, read_clip: ReadClip, *, count: int = 9) -> Gallery:
    """Return training videos of ``tables.VIDEO_TEXTS`` with their texts, as strips of frames."""
    texts = pl.col("text").unique(maintain_order=True).head(4)
    training = pairs.filter(part="train").sort("video_id").group_by("video_id", maintain_order=True)
    videos = training.agg(pl.col("path", "group_id").first(), texts)
    shown = videos.unique("group_id", keep="first", maintain_order=True).head(count)
    cards = _clips(shown.iter_rows(named=True), read_clip, lambda row: row["text"])
    return Gallery(cards, f"{shown.height} of {count_text(videos.height, 'training video')}, each with its text")


def caption_gallery(captions: pl.DataFrame, read_clip: ReadClip, *, count: int = 9) -> Gallery:
    """Return captions of test videos (``tables.CAPTIONS``) by the model, with the references.

    Half of them repeat no reference, where there are enough; the ids decide which.
    """
    repeats = pl.col("references").str.split("\n").list.contains(pl.col("caption"))
    same, other = (captions.filter(keep).sort("video_id") for keep in (repeats, ~repeats))
    num_other = min(other.height, max(count // 2, count - same.height))
    shown = pl.concat([same.head(count - num_other), other.head(num_other)])

    def describe(row: Row) -> tuple[str, ...]:
        references = [f"reference: {text}" for text in row["references"].split("\n")[:3]]
        return row["caption"] or "(nothing was written)", *references

    caption = f"{same.height:,} of n = {captions.height:,} test videos got word for word one of their references"
    return Gallery(_clips(shown.iter_rows(named=True), read_clip, describe), caption)


def worst_mistakes(predictions: pl.DataFrame, index: pl.DataFrame, count: int = 8) -> pl.DataFrame:
    """Return the videos furthest on the wrong side of their fold's threshold, with their ``distance`` to it."""
    wrong = predictions.filter((pl.col("score") >= pl.col("threshold")) != (pl.col("label") == "fake"))
    worst = wrong.with_columns(distance=(pl.col("score") - pl.col("threshold")).abs())
    worst = worst.sort(["distance", "video_id"], descending=[True, False]).head(count)
    joined = worst.join(
        index.select("video_id", "path", "manipulation"), on="video_id", how="left", maintain_order="left"
    )
    return joined.select("video_id", "path", "label", "manipulation", "fold", "score", "threshold", "distance")


def mistakes_gallery(
    predictions: pl.DataFrame, index: pl.DataFrame, read_clip: ReadClip | None, count: int = 8
) -> Gallery:
    """Return the worst mistakes of a run with a few frames of each.

    Args:
        predictions: of all folds.
        index: with the videos' paths.
        read_clip: None where the model sees no frames.
        count: at most so many.
    """
    mistakes = worst_mistakes(predictions, index, len(predictions))

    def picture(row: Row) -> bytes:
        if read_clip is None:
            raise ValueError
        return strip(read_clip(row["video_id"], 0))

    def describe(row: Row) -> tuple[str, ...]:
        how = f" ({row['manipulation']})" if row["manipulation"] else ""
        score, threshold = number_text(row["score"]), number_text(row["threshold"])
        return row["path"], f"{row['label']}{how}, scored {score}", f"threshold {threshold}; fold {row['fold']}"

    cards = cards_of(mistakes.head(count).iter_rows(named=True), picture, describe)
    note = "" if read_clip else " The model sees numbers measured in the coded frames, and no clips."
    decided = f"{mistakes.height:,} of n = {predictions.height:,} videos are decided wrongly"
    return Gallery(cards, f"{decided}; the worst {len(cards)} are shown.{note}")


def frame_strips(scores: pl.DataFrame, read_clip: ReadClip | None) -> pl.DataFrame:
    """Return ``video_id group_id jpeg_base64``: frames of the first videos of ``scores`` whose clip can be read.

    Nothing where ``read_clip`` is None.
    """
    rows = []
    for video_id, group_id in scores.select("video_id", "group_id").head(MOST_STRIPS).iter_rows():
        with contextlib.suppress(FvcError):
            if read_clip is not None:
                rows.append((video_id, group_id, base64.b64encode(strip(read_clip(video_id, 0))).decode()))
    return frame_of(rows, VIDEO_FRAMES)
