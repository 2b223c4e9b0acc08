"""Pictures in a record are small, have their text escaped, and are marked where their file is gone."""

import base64
import io
import re
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from PIL import Image

from fvc_lib.analysis.figures import gallery as galleries
from fvc_lib.analysis.figures.gallery import GONE
from fvc_lib.analysis.pages.report import clean_html
from fvc_lib.analysis.read import queries
from fvc_lib.services.errors import DataError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import INDEX, read_table
from tests.analysis.task_runs import HOSTILE, image_predictions_of, images_of

ROOT = Path("/corpus")


def read_picture(path: Path) -> np.ndarray:
    """A grey level of its own for each picture; the third is gone."""
    number = int(str(path).split("picture ")[1].split(" ")[0])
    if number == 2:
        raise OSError("gone")
    return np.full((60, 90, 3), number % 256, np.uint8)


def pictures(html: str) -> list[Image.Image]:
    encoded = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', html)
    return [Image.open(io.BytesIO(base64.b64decode(text))) for text in encoded]


def test_a_picture_that_is_gone_is_marked_and_names_stay_text_in_the_report() -> None:
    rows = image_predictions_of(images_of()).head(5)
    paths = ["a/picture 1 .jpg", "a/picture 2 .jpg", f"a/picture 3 {HOSTILE}.jpg", "a/picture 4 .jpg", "right"]
    called, sure = pl.Series([*[HOSTILE] * 4, rows["class_label"][4]]), pl.Series([0.7, 0.9, 0.8, 0.6, 1.0])
    rows = rows.with_columns(path=pl.Series(paths), predicted_label=called, probability=sure)
    gallery = galleries.mistaken_images(rows, ROOT, read_picture, count=3)
    assert [card.shows for card in gallery.cards] == [paths[1], paths[2], paths[0]]
    assert gallery.caption == "4 of n = 5 test images are recognised wrongly; 3 are shown"
    html = gallery._repr_html_()
    assert len(pictures(html)) == 2
    assert html.count(GONE) == 1
    assert "onerror=alert(1)&gt;" in html
    cleaned = clean_html(html)
    assert len(pictures(cleaned)) == 2  # and what cleans the report lets them through
    assert cleaned.count(' alt="a/picture ') == 2
    assert "width" in cleaned
    assert "<img src=x" not in html + cleaned


@pytest.mark.fault(38, 39)
def test_the_worst_mistakes_are_those_furthest_over_the_threshold_with_their_frames(run: RunPaths) -> None:
    index = read_table(run.index, INDEX)
    predictions = queries.predictions([run]).frame.drop("run_id")
    wrong = predictions.filter((pl.col("score") >= pl.col("threshold")) != (pl.col("label") == "fake"))
    worst = wrong.sort((pl.col("score") - pl.col("threshold")).abs(), descending=True).join(
        index, on="video_id", maintain_order="left"
    )
    gone = worst["video_id"][1]

    def read(video_id: str, number: int) -> np.ndarray:
        assert number == 0
        if video_id == gone:
            raise DataError("no such clip")
        return np.full((6, 3, 200, 200), 90, np.uint8)

    gallery = galleries.mistakes_gallery(predictions, index, read, 3)
    html = gallery._repr_html_()
    assert [card.title for card in gallery.cards] == worst["path"].head(3).to_list()
    assert [card.picture is None for card in gallery.cards] == [False, True, False]
    assert html.count("data:image/jpeg;base64,") == 2
    assert "<b>&'" not in html  # as the files of this corpus are called
    assert [card.picture for card in galleries.mistakes_gallery(predictions, index, None, 3).cards] == [None] * 3
    assert galleries.mistakes_gallery(predictions.clear(), index, read).cards == ()
    strips = galleries.frame_strips(predictions, read)
    assert strips.height == predictions.height - 1
    assert galleries.frame_strips(predictions, None).is_empty()
