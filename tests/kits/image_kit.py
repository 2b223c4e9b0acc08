"""A corpus of small pictures for the tests of task image: a shape and how often it is there, numbers for some."""

import hashlib

import numpy as np
import polars as pl
from PIL import Image

from fvc_lib.services.config import RunConfig
from fvc_lib.services.tables import (
    IMAGE_PREDICTIONS,
    IMAGE_TARGETS,
    IMAGES,
    TARGET_PREDICTIONS,
    TASK_RESULTS,
    read_table,
    write_table,
)
from fvc_lib.tasks.image.results import image_results
from fvc_lib.tasks.image.task import ImageDataset, ImageTask, image_parts
from fvc_lib.tasks.mixing import MixSettings

CLASSES = ("dots", "stripes", "waves")
SIDE = 24


def draw(kind, strength, generator):
    """uint8 (24, 24, 3): a pattern whose brightness is the number."""
    across = np.arange(SIDE)
    pattern = {"dots": np.outer(across % 6 < 3, across % 6 < 3), "stripes": np.outer(across % 6 < 3, across >= 0),
               "waves": np.outer(across >= 0, across % 6 < 3)}[kind]  # fmt: skip
    picture = 40 + 150 * strength * pattern[..., None] + generator.normal(0, 4, (SIDE, SIDE, 3))
    return picture.round().clip(0, 255).astype(np.uint8)


def image_tables(root, per_part=(24, 12, 12), *, seed=0):
    """IMAGES and IMAGE_TARGETS of pictures written under ``root``; some are without a class or without a number."""
    generator = np.random.default_rng(seed)
    images, targets = [], []
    for part, count in zip(("train", "validation", "test"), per_part, strict=True):
        for number in range(count):
            kind, strength = CLASSES[number % 3], float(generator.uniform(0.2, 1))
            image_id = f"{part}{number:06d}"
            path = f"{part}/{number}.png"
            (root / part).mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw(kind, strength, generator)).save(root / path)
            group = f"{part} {number // 6} {number % 3}"
            images.append(
                {
                    "image_id": image_id, "path": path, "class_label": None if number % 11 == 9 else kind,
                    "group_id": group, "part": part, "split_source": "made", "source": "manifest", "width": SIDE,
                    "height": SIDE, "size_bytes": 100, "content_sha256": hashlib.sha256(path.encode()).hexdigest(),
                }
            )  # fmt: skip
            known = {"calories": ("kcal", 500 * strength), "mass": ("g", 80 + 20 * strength)}
            for name, (unit, value) in known.items():
                if number % (5 if name == "calories" else 2) != 1:
                    targets.append(
                        {"image_id": image_id, "group_id": group, "target": name, "unit": unit, "value": value}
                    )
    return pl.DataFrame(images), pl.DataFrame(targets)


def write_image_tables(paths, images, targets):
    """As 10_image_recognition writes them."""
    write_table(images, IMAGES, paths.images)
    write_table(targets, IMAGE_TARGETS, paths.image_targets)


def image_results_of(paths, config):
    """As 10_image_recognition writes them."""
    tables = {"images": IMAGES, "image_targets": IMAGE_TARGETS, "image_predictions": IMAGE_PREDICTIONS,
              "target_predictions": TARGET_PREDICTIONS}  # fmt: skip
    read = [read_table(getattr(paths, name), schema) for name, schema in tables.items()]
    results = image_results(*read, config)
    write_table(results, TASK_RESULTS, paths.task_results)
    return results


def image_task(root, images, targets, *, mixing=None, size=16, seed=0, **settings):
    """The task on those tables; its training pictures are mixed and changed unless told otherwise."""
    parts = image_parts(images, targets)
    mixing = mixing or MixSettings(0.6, 0.4, 1.0)
    training = ImageDataset(root, parts.train, parts.labels, size, mixing=mixing, seed=seed)
    validation = ImageDataset(root, parts.validation, parts.labels, size)
    return ImageTask(training, validation, RunConfig(task="image", **settings))
