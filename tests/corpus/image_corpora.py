"""Tiny corpora of pictures in the layouts that are read."""

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

TOTALS = (100.0, 50.0, 4.0, 12.0, 3.0)  # kcal, then grams of mass, fat, carbohydrate, protein


def picture(seed: int, kind: str = "JPEG") -> bytes:
    """A picture of 12 pixels a side; seeds differ, equal seeds give equal bytes."""
    stream = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (12, 12, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()


def put(path: Path, content: bytes | str | int) -> Path:
    """Write a file and its folders; a number is the seed of a picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, int):
        content = picture(content, "PNG" if path.suffix == ".png" else "JPEG")
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_food101(
    folder: Path,
    train: Sequence[str],
    test: Sequence[str],
    *,
    classes: Iterable[str] | None = None,
    absent: Iterable[str] = (),
    first_seed: int = 0,
) -> Path:
    """Food-101's layout with the images of both lists but for the ``absent``; lines are like ``pie/1``."""
    names = sorted({line.partition("/")[0] for line in [*train, *test]}) if classes is None else classes
    put(folder / "meta" / "classes.txt", "\n".join(names) + "\n")
    put(folder / "meta" / "train.txt", "\n".join(train) + "\n")
    put(folder / "meta" / "test.txt", "\n".join(test) + "\n")
    for seed, line in enumerate(sorted({*train, *test} - set(absent))):
        put(folder / "images" / f"{line}.jpg", first_seed + seed)
    return folder


def dish_row(dish: str, totals: Sequence[object] = TOTALS, num_ingredients: int = 2) -> str:
    """A row of Nutrition5k's tables."""
    ingredients = [f"ingr_{n},rice,{20 + n},30.0,1.0,5.0,0.5" for n in range(num_ingredients)]
    return ",".join([dish, *map(str, totals), *ingredients])


def write_nutrition5k(
    folder: Path,
    cafe1: Sequence[str],
    cafe2: Sequence[str] = (),
    *,
    train: Sequence[str] | None = None,
    test: Sequence[str] | None = None,
    pictures: Mapping[str, int] | None = None,
) -> Path:
    """Nutrition5k's layout; ``pictures`` says of how many pictures which dish has, the first one from above."""
    put(folder / "metadata" / "dish_metadata_cafe1.csv", "\n".join(cafe1) + "\n")
    put(folder / "metadata" / "dish_metadata_cafe2.csv", "\n".join(cafe2) + "\n")
    for part, dishes in (("train", train), ("test", test)):
        if dishes is not None:
            put(folder / "dish_ids" / "splits" / f"rgb_{part}_ids.txt", "\n".join(dishes) + "\n")
            put(folder / "dish_ids" / "splits" / f"depth_{part}_ids.txt", "unused\n")
    seed = 1000
    for dish, count in (pictures or {}).items():
        overhead = folder / "imagery" / "realsense_overhead" / dish
        for number in range(count):
            seed += 1
            frames = folder / "imagery" / "side_angles" / dish / "frames_sampled30"
            put(overhead / "rgb.png" if not number else frames / f"camera_A_frame_{number:03d}.jpeg", seed)
        if count:
            put(overhead / "depth_color.png", seed)
    return folder
