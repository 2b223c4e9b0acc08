"""Small corpora and runs of tasks image and video_text. A picture shows a pattern; its brightness is the number."""

import hashlib

import numpy as np
import polars as pl
from PIL import Image

from fvc_lib.corpus.samples.drawings import make_clip, plan_clips
from fvc_lib.engine.training_state import NoMetrics
from fvc_lib.services.config import RunConfig
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.records.digests import write_document
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import (
    CAPTIONS,
    IMAGE_PREDICTIONS,
    IMAGE_TARGETS,
    IMAGES,
    RETRIEVAL_RANKS,
    TARGET_PREDICTIONS,
    TASK_RESULTS,
    VIDEO_TEXTS,
    read_table,
    write_table,
)
from fvc_lib.tasks.image.training import ImageDataset, ImageTask, image_parts, train_images
from fvc_lib.tasks.mixing import MixSettings
from fvc_lib.tasks.split_results import image_results, video_text_results
from fvc_lib.tasks.video_text.training import train_video_text
from tests.kits.warm_workers import forked_workers

CLASSES = ("dots", "stripes", "waves")
SIDE = 24


SMALL = {
    "epochs": 1, "memory_preflight": False, "bootstrap_replicates": 100, "device": "cpu", "early_stopping_epochs": 0,
}  # fmt: skip


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


def picture_run(folder, per_part=(18, 12, 12)):
    """A run of task image in ``folder``/runs, and the folder of its pictures."""
    root = folder / "pictures"
    images, targets = image_tables(root, per_part)
    contents = [hashlib.sha256((root / path).read_bytes()).hexdigest() for path in images["path"]]
    paths = RunPaths(folder / "runs" / "images" / "run_0")
    settings = {"task": "image", "image_size": 16, "effective_batch_size": 12, "batch_size": 12, "epochs": 2}
    places = {"runs_dir": str(folder / "runs"), "cache_dir": str(folder / "cache")}
    config = RunConfig(**(SMALL | settings | places), corpus=str(root))
    write_image_tables(paths, images.with_columns(content_sha256=pl.Series(contents)), targets)
    paths.params_yaml.write_text(config.to_yaml())
    write_document(paths.run_json, {})
    train_images(paths, config, metric_log=NoMetrics())
    image_results_of(paths, config)
    return paths, root


def video_text_results_of(paths, config):
    """As 20_video_text writes them."""
    pairs = read_table(paths.video_texts, VIDEO_TEXTS)
    ranks, captions = read_table(paths.retrieval_ranks, RETRIEVAL_RANKS), read_table(paths.captions, CAPTIONS)
    results = video_text_results(pairs, ranks, captions, paths.embeddings, config)
    write_table(results, TASK_RESULTS, paths.task_results)
    return results


def caption_run(folder, counts=None, **settings):
    """A run of task video_text in ``folder``/runs, and the folder of its clips."""
    root = folder / "clips"
    pairs = some_captions(root, counts or {"train": 3, "validation": 1, "test": 4})
    small = {
        "task": "video_text", "corpus": str(root / "manifest.csv"), "num_frames": 2, "fixed_size": 16,
        "embedding_size": 8, "max_text_tokens": 16, "effective_batch_size": 16,
        "batch_size": 16, "workers": 1,
        "cache_dir": str(folder / "cache"), "runs_dir": str(folder / "runs"),
    }  # fmt: skip
    config = resolve_config(SMALL | small | settings, environ={})
    paths = RunPaths(folder / "runs" / "captions" / "run_0")
    write_table(pairs, VIDEO_TEXTS, paths.video_texts)
    paths.params_yaml.write_text(config.to_yaml())
    write_document(paths.run_json, {})
    with forked_workers():
        train_video_text(paths, config, metric_log=NoMetrics())
    video_text_results_of(paths, config)
    return paths, root


def some_captions(folder, counts):
    """VIDEO_TEXTS of so many of the sample captions' clips of each part, which are written into ``folder``."""
    planned, rows = plan_clips(), []
    for part, count in counts.items():
        for clip in [each for each in planned if each.part == part][:count]:
            content, text = make_clip(clip), clip.caption
            (folder / clip.path).parent.mkdir(parents=True, exist_ok=True)
            (folder / clip.path).write_bytes(content)
            digest, text_id = (hashlib.sha256(each).hexdigest() for each in (content, text.encode()))
            rows.append(
                {
                    "pair_id": f"pair{len(rows):04d}", "video_id": digest[:16], "path": clip.path, "text_id": text_id,
                    "text": text, "group_id": clip.path, "part": part, "split_source": "official", "num_frames": 12,
                    "duration_seconds": None, "content_sha256": digest,
                }
            )  # fmt: skip
    (folder / "manifest.csv").touch()
    return pl.DataFrame(rows, schema={name: column.dtype for name, column in VIDEO_TEXTS.columns.items()})
