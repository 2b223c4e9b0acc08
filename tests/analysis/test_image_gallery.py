"""Pictures in a record: small, each with its text, harmless whatever a file is called, and gone ones said to be so."""

import base64
import io
import re
from pathlib import Path

import numpy as np
import polars as pl
from PIL import Image

from fvc_lib.analysis.figures.gallery import (
    GONE,
    Card,
    Gallery,
    caption_gallery,
    example_images,
    mistaken_images,
    strip,
    thumbnail,
)
from fvc_lib.analysis.pages.notebook_html import clean_html
from fvc_lib.services.errors import DataError
from tests.analysis.task_runs import HOSTILE, captions_of, image_predictions_of, images_of, pairs_of, targets_of

ROOT = Path("/corpus")


def read_picture(path: Path) -> np.ndarray:
    """A grey level of its own for each picture; the third is gone."""
    number = int(str(path).split("picture ")[1].split(" ")[0])
    if number == 2:
        raise OSError("gone")
    return np.full((60, 90, 3), number % 256, np.uint8)


def read_clip(video_id: str, copy: int) -> np.ndarray:
    assert copy == 0
    if int(video_id, 16) == 1:
        raise DataError("no clip")
    return np.full((7, 3, 40, 40), int(video_id, 16), np.uint8)


def pictures(html: str) -> list[Image.Image]:
    encoded = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', html)
    return [Image.open(io.BytesIO(base64.b64decode(text))) for text in encoded]


def test_a_thumbnail_is_small_keeps_its_shape_and_its_colours() -> None:
    image = np.zeros((100, 400, 3), np.uint8)
    image[:, :200] = (250, 10, 10)
    shown = Image.open(io.BytesIO(thumbnail(image, 80)))
    assert shown.size == (80, 20)
    left, right = shown.getpixel((10, 10)), shown.getpixel((70, 10))
    assert np.abs(np.subtract(left, (250, 10, 10))).max() < 12
    assert np.abs(np.subtract(right, (0, 0, 0))).max() < 12
    small = Image.open(io.BytesIO(thumbnail(image[:8, :8], 80)))
    assert small.size == (8, 8)  # not blown up


def test_a_strip_shows_the_first_and_the_last_frame_side_by_side() -> None:
    clip = np.stack([np.full((3, 30, 20), 30 * t, np.uint8) for t in range(8)])
    shown = np.asarray(Image.open(io.BytesIO(strip(clip, 30))).convert("L")).astype(int)
    assert shown.shape == (30, 5 * 20 + 4 * 3)
    assert shown[15, 5] < 10
    assert abs(shown[15, -5] - 210) < 10
    assert strip(clip[:1])  # one frame


def test_examples_take_classes_in_turn_from_the_training_part_and_one_of_a_group() -> None:
    images = images_of()
    gallery = example_images(images, targets_of(images), ROOT, read_picture, count=8)
    assert len(gallery.cards) == 8
    titles = [card.title for card in gallery.cards]
    assert all(titles.count(name) == 2 for name in images["class_label"].unique())
    shown = [card.shows.removeprefix("picture ") for card in gallery.cards]
    rows = images.filter(pl.col("path").is_in(shown))
    assert set(rows["part"]) == {"train"}
    assert rows["group_id"].n_unique() == 8
    assert "8 of 70 training images in 35 groups" in gallery.caption
    assert any("kcal" in line for card in gallery.cards for line in card.lines)


def test_a_picture_that_is_gone_is_said_to_be_and_names_stay_text_in_the_report() -> None:
    rows = image_predictions_of(images_of()).head(3)
    rows = rows.with_columns(
        path=pl.Series(["a/picture 1 .jpg", "a/picture 2 .jpg", f"a/picture 3 {HOSTILE}.jpg"]),
        predicted_label=pl.lit(HOSTILE),
    )
    gallery = mistaken_images(rows, 30, 3, ROOT, read_picture)
    html = gallery._repr_html_()
    assert len(pictures(html)) == 2
    assert html.count(GONE) == 1
    assert "onerror=alert(1)&gt;" in html
    assert "<img src=x" not in html
    cleaned = clean_html(html)
    assert len(pictures(cleaned)) == 2  # and what cleans the report lets them through
    assert cleaned.count(' alt="picture ') == 2
    assert "width" in cleaned
    assert "<img src=x" not in cleaned
    assert GONE in repr(gallery)
    assert "here are all of them" in gallery.caption


def test_an_output_stays_far_below_what_a_record_may_hold() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (300, 300, 3), dtype=np.uint8)
    cards = tuple(Card(thumbnail(noise), "noise", f"picture {n}") for n in range(100))
    gallery = Gallery(cards, "noise, the worst for JPEG")
    html = gallery._repr_html_()
    assert len(html) < 1_000_000
    assert "and 52 more" in html


def test_captions_are_shown_beside_their_references_right_and_wrong_ones() -> None:
    captions = captions_of(pairs_of())
    gallery = caption_gallery(captions, read_clip, count=4)
    assert gallery.caption.startswith(f"{captions.height // 2} of n = {captions.height} test videos")
    written = [card.title for card in gallery.cards]
    assert written.count("(nothing was written)") == 2
    assert len(written) == 4
    assert all(card.lines[0].startswith("reference: a red circle") for card in gallery.cards)
