"""Pictures in a record: small, each with what is known of it, and harmless whatever a file or a class is called."""

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

GONE = "cannot be shown any more"
CLIP_GONE = "its clip is no longer in the store: run 03_augmentation again to see it"
_SIDE = 132  # pixels of a picture's longer side
_FRAME_SIDE = 84  # of each frame in a strip
_FRAMES = 5
_GAP = 3
_QUALITY = 82  # of JPEG
_MOST_CARDS = 48  # about 250 kB of pictures: an output may weigh 1.5 MB


@dataclass(frozen=True)
class Card:
    """One picture (JPEG bytes, ``None`` when it is gone), what it shows for those who cannot see it, and its text."""

    picture: bytes | None
    shows: str
    title: str
    lines: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """Pixels of the picture, and at least what its text needs."""
        return _SIDE if self.picture is None else max(_SIDE, Image.open(io.BytesIO(self.picture)).width)


@dataclass(frozen=True)
class Gallery:
    """Cards beside each other, as many in a row as the page is wide; ``caption`` is a sentence above them."""

    cards: tuple[Card, ...]
    caption: str

    def _repr_html_(self) -> str:
        caption = f'<p class="fvc-remark">{escape(clean_text(self.caption))}</p>'
        cards = "\n".join(map(card_html, self.cards[:_MOST_CARDS]))
        return f'{caption}<div class="fvc-cards">{cards}</div>{self._remark()}'

    def __repr__(self) -> str:
        lines = [clean_text(self.caption)]
        for card in self.cards[:_MOST_CARDS]:
            gone = f" ({GONE})" if card.picture is None else ""
            lines.append(": ".join(map(clean_text, (card.shows, "; ".join((card.title, *card.lines))))) + gone)
        return "\n".join(lines)

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return {"text/html": self._repr_html_(), "text/plain": repr(self)}

    def _remark(self) -> str:
        more = len(self.cards) - _MOST_CARDS
        return f'<p class="fvc-remark">and {count_text(more, "more")}</p>' if more > 0 else ""


def card_html(card: Card) -> str:
    """One card; text from outside is made one clean line each and escaped."""
    text = "<br>".join([f"<b>{escape(clean_text(card.title))}</b>", *(escape(clean_text(line)) for line in card.lines)])
    shows = escape(clean_text(card.shows))
    # A width of its own, so that a long text wraps below its picture; the record's page gives margins and wrapping.
    style = f"display:inline-block;vertical-align:top;text-align:left;width:{card.width}px"
    if card.picture is None:
        return f'<div class="fvc-card gone" style="{style}"><i>{shows} {GONE}</i><br>{text}</div>'
    encoded = base64.b64encode(card.picture).decode()
    image = f'<img alt="{shows}" title="{shows}" src="data:image/jpeg;base64,{encoded}">'
    return f'<div class="fvc-card" style="{style}">{image}{text}</div>'


def thumbnail(image: Pixels, side: int = _SIDE) -> bytes:
    """``image``, uint8 (H, W, 3), as a JPEG file no larger than ``side`` pixels either way."""
    picture = Image.fromarray(np.ascontiguousarray(image))
    picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    return _jpeg(picture)


def strip(clip: Pixels, side: int = _FRAME_SIDE) -> bytes:
    """Return a few frames of ``clip``, uint8 (T, 3, H, W), in a row as a JPEG file."""
    chosen = np.unique(np.linspace(0, len(clip) - 1, min(_FRAMES, len(clip))).round().astype(int))
    height, width = clip.shape[2:]
    scale = min(1.0, side / max(height, width))
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    frames = [np.ascontiguousarray(clip[number].transpose(1, 2, 0)) for number in chosen]
    sheet = Image.new("RGB", ((size[0] + _GAP) * len(frames) - _GAP, size[1]), "white")
    for place, frame in enumerate(frames):
        sheet.paste(Image.fromarray(frame).resize(size, Image.Resampling.LANCZOS), (place * (size[0] + _GAP), 0))
    return _jpeg(sheet)


def _jpeg(picture: Image.Image) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=_QUALITY)
    return stream.getvalue()


Row = Mapping[str, Any]


def image_cards(
    rows: Iterable[Row], root: Path, read: ReadPicture, describe: Callable[[Row], tuple[str, ...]]
) -> tuple[Card, ...]:
    """Return a card for each of ``rows``, whose ``path`` lies below ``root``; ``describe`` gives title and lines."""
    cards = []
    for row in rows:
        title, *lines = describe(row)
        picture = _or_gone(lambda path: thumbnail(read(root / path_from_text(path))), row["path"])
        cards.append(Card(picture, f"picture {row['path']}", title, tuple(lines)))
    return tuple(cards)


def _or_gone(picture: Callable[[str], bytes], of: str) -> bytes | None:
    try:
        return picture(of)
    except (FvcError, OSError, ValueError):
        return None


def example_images(
    images: pl.DataFrame, targets: pl.DataFrame, root: Path, read: ReadPicture, *, count: int = 18
) -> Gallery:
    """At most ``count`` training images of as many classes as there is room for, each class in turn, one of a group."""
    known: dict[str, list[str]] = {}
    for row in targets.iter_rows(named=True):
        known.setdefault(row["image_id"], []).append(quantity_text(row["target"], row["value"], row["unit"]))
    training = images.filter(pl.col("part") == "train")
    # By id, which comes from content: a choice that says nothing and is the same everywhere.
    one_per_group = training.sort("image_id").unique("group_id", keep="first", maintain_order=True)
    in_turn = one_per_group.with_columns(turn=pl.int_range(pl.len()).over("class_label"))
    shown = in_turn.sort("turn", "class_label", nulls_last=True).head(count).sort("class_label", nulls_last=True)
    cards = image_cards(
        shown.iter_rows(named=True), root, read,
        lambda row: (str(row["class_label"] or "no class"), *known.get(str(row["image_id"]), ())),
    )  # fmt: skip
    groups = count_text(training["group_id"].n_unique(), "group")
    finding = f"{len(cards)} of {count_text(training.height, 'training image')} in {groups}, by class"
    return Gallery(cards, f"{finding}; what is known of each is below it")


def batch_gallery(samples: Pixels, names: Sequence[str]) -> Gallery:
    """Return the samples of a batch as the network gets them: uint8 pictures (B, 3, H, W) or clips (B, T, 3, H, W)."""
    is_clip = samples.ndim == 5
    cards = [
        Card(strip(sample) if is_clip else thumbnail(sample.transpose(1, 2, 0)), f"sample {name}", name)
        for name, sample in zip(names, samples, strict=True)
    ]
    what = "clips, a few frames of each" if is_clip else "pictures"
    return Gallery(tuple(cards), f"One batch as the network gets it: {len(cards)} {what}.")


def mistaken_images(mistakes: pl.DataFrame, num_images: int, num_wrong: int, root: Path, read: ReadPicture) -> Gallery:
    """Wrongly recognised images (``tables.IMAGE_PREDICTIONS``) in the order given, of so many judged and wrong."""
    cards = image_cards(mistakes.iter_rows(named=True), root, read, _mistake_text)
    shown = "all of them" if len(cards) == num_wrong else f"the {len(cards)} decided with most certainty"
    finding = f"{num_wrong:,} of n = {num_images:,} test images are recognised wrongly"
    return Gallery(cards, f"{finding}; here are {shown}" if cards else f"{finding}.")


def _mistake_text(row: Row) -> tuple[str, ...]:
    called = f"called {row['predicted_label']}, with probability {number_text(row['probability'], 2)}"
    return row["class_label"], called, f"its own class comes at place {row['rank_of_class']}"


def clip_cards(rows: Iterable[Row], read_clip: ReadClip) -> tuple[Card, ...]:
    """Return a card with a strip of frames for each of ``rows``: ``video_id path title lines``."""
    cards = []
    for row in rows:
        picture = _or_gone(lambda video_id: strip(read_clip(video_id, 0)), row["video_id"])
        lines = tuple(row["lines"]) if picture else (CLIP_GONE, *row["lines"])
        cards.append(Card(picture, f"frames of {row['path']}", row["title"], lines))
    return tuple(cards)


def example_clips(pairs: pl.DataFrame, read_clip: ReadClip, *, count: int = 9) -> Gallery:
    """Training videos of ``tables.VIDEO_TEXTS`` with all texts that stand beside them, as strips of frames."""
    training = pairs.filter(pl.col("part") == "train")
    videos = training.sort("video_id").group_by("video_id", maintain_order=True).agg(
        pl.col("path", "group_id").first(), pl.col("text").unique(maintain_order=True)
    )  # fmt: skip
    shown = videos.unique("group_id", keep="first", maintain_order=True).head(count)
    rows = [{**row, "title": row["text"][0], "lines": row["text"][1:4]} for row in shown.iter_rows(named=True)]
    finding = f"{len(rows)} of {count_text(videos.height, 'training video')}, each with its text"
    return Gallery(clip_cards(rows, read_clip), f"{finding}; frames as the network gets them, compressed for this page")


def caption_gallery(captions: pl.DataFrame, read_clip: ReadClip, *, count: int = 9) -> Gallery:
    """Return captions of test videos (``tables.CAPTIONS``) by the model and by people.

    Half of them (the ids decide which) of those that repeat no reference, if there are any.
    """
    references = pl.col("references").str.split("\n")
    repeats = references.list.contains(pl.col("caption"))
    known = captions.with_columns(lines=references, repeats=repeats).sort("video_id")
    same, other = known.filter("repeats"), known.filter(~pl.col("repeats"))
    num_other = min(other.height, max(count // 2, count - same.height))
    shown = pl.concat([same.head(count - num_other), other.head(num_other)])
    rows = [
        {**row, "title": row["caption"] or "(nothing was written)", "lines": _references(row["lines"])}
        for row in shown.iter_rows(named=True)
    ]
    finding = f"{same.height:,} of n = {captions.height:,} test videos got word for word a text that stands beside them"
    return Gallery(clip_cards(rows, read_clip), f"{finding}; below each strip what was written, then the references")


def _references(texts: Sequence[str]) -> list[str]:
    more = [f"and {count_text(len(texts) - 3, 'more text')}"] if len(texts) > 3 else []
    return [f"reference: {text}" for text in texts[:3]] + more


def quantity_text(target: str, value: float, unit: str) -> str:
    """``calories 320 kcal``."""
    return f"{target} {value:,.4g}{f' {unit}' if unit else ''}"


# --- The worst mistakes of a run, so that a reader can look for what misled the network


def worst_mistakes(predictions: pl.DataFrame, index: pl.DataFrame, count: int = 8) -> pl.DataFrame:
    """Return the videos furthest on the wrong side of their fold's threshold, with their ``distance`` to it."""
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


def mistakes_gallery(
    predictions: pl.DataFrame, index: pl.DataFrame, read_clip: ReadClip | None, count: int = 8
) -> Gallery:
    """Return the worst mistakes of a run with a few frames of each; ``index`` has the videos' paths.

    ``read_clip`` is None where the model sees no frames.
    """
    wrong = int(((predictions["score"] >= predictions["threshold"]) != (predictions["label"] == "fake")).sum())
    if not wrong:
        return Gallery((), "No video is decided wrongly.")
    mistakes = worst_mistakes(predictions, index, count)
    rows = [{**row, "title": row["path"], "lines": _mistake_lines(row)} for row in mistakes.iter_rows(named=True)]
    shown = "all of them" if mistakes.height == wrong else f"the worst {mistakes.height}"
    finding = f"{wrong:,} of n = {predictions.height:,} videos are decided wrongly; here are {shown}"
    if read_clip is None:
        cards = [Card(None, "", row["title"], tuple(row["lines"])) for row in rows]
        return Gallery(tuple(cards), f"{finding}. The model sees numbers measured of the coded frames, and no clips.")
    return Gallery(
        clip_cards(rows, read_clip), f"{finding}, with frames as the network got them, compressed for this page"
    )


MOST_STRIPS = 300  # about 1.5 MB in a page


def frame_strips(scores: pl.DataFrame, read_clip: ReadClip | None) -> pl.DataFrame:
    """``video_id group_id jpeg_base64``: frames of the first videos of ``scores``, those whose clip can be read.

    None where ``read_clip`` is None.
    """
    rows = []
    for video_id, group_id in scores.select("video_id", "group_id").head(MOST_STRIPS).iter_rows():
        if read_clip is None:
            break
        with contextlib.suppress(FvcError):
            rows.append((video_id, group_id, base64.b64encode(strip(read_clip(video_id, 0))).decode()))
    return frame_of(rows, VIDEO_FRAMES)


def _mistake_lines(row: Row) -> tuple[str, ...]:
    how = f" ({row['manipulation']})" if row["manipulation"] else ""
    score, threshold = number_text(row["score"]), number_text(row["threshold"])
    return f"{row['label']}{how}, scored {score}", f"threshold {threshold}; fold {row['fold']}"
