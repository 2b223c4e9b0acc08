import csv
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fvc_lib.corpus.samples import dishes as sample_dishes
from fvc_lib.corpus.samples.dishes import (
    SHAPES,
    Dish,
    generate_sample_dishes,
    photograph,
    plan_dishes,
)


def decoded(content: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(content))).astype(np.float64)


@pytest.fixture
def few_dishes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_dishes, "DISHES_PER_FOOD", 1)


def test_neither_mean_colour_nor_file_size_tells_the_food() -> None:
    foods, features = [], []
    for number, food in enumerate(sorted(SHAPES) * 12):
        content = photograph(Dish(f"cue {number}", food, 1 + number // 6 % 4, number % 6), 0)
        foods.append(food)
        features.append([*decoded(content).mean(axis=(0, 1)), len(content)])
    table = np.array(features)
    table = (table - table.mean(axis=0)) / table.std(axis=0)
    distances = ((table[:, None] - table[None]) ** 2).sum(axis=2)
    np.fill_diagonal(distances, np.inf)
    nearest = [foods[place] for place in distances.argmin(axis=1)]
    accuracy = np.mean([guess == food for guess, food in zip(nearest, foods, strict=True)])
    assert accuracy < 0.36  # chance is 0.17; 0.36 is four standard errors above it


@pytest.mark.usefixtures("few_dishes")
def test_the_corpus_is_written_once_and_mended_where_it_was_damaged(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    manifest = generate_sample_dishes(tmp_path, progress=lambda done, total: seen.append((done, total)))
    planned = [len(dish.paths) for dish in plan_dishes()]
    assert seen == [(sum(planned[:number]), sum(planned)) for number in range(1, 7)]
    files = sorted((tmp_path / "images").iterdir())
    assert [f"images/{path.name}" for path in files] == sorted(
        row["path"] for row in csv.DictReader(manifest.read_text().splitlines())
    )
    contents, times = [path.read_bytes() for path in files], [path.stat().st_mtime_ns for path in files]
    files[0].write_bytes(b"damaged")
    files[1].unlink()
    (tmp_path / "images" / "mine.txt").write_text("kept")
    generate_sample_dishes(tmp_path)
    assert [path.read_bytes() for path in files] == contents
    assert [path.stat().st_mtime_ns for path in files][2:] == times[2:]
    assert (tmp_path / "images" / "mine.txt").exists()
    assert "synthetic" in (tmp_path / "NOTICE.txt").read_text()
