"""Small trained runs of tasks image and video_text, with what they were trained on."""

import hashlib
from contextlib import nullcontext

import polars as pl
import pytest

from fvc_lib.corpus.samples.drawings import make_clip, plan_clips
from fvc_lib.engine.training_state import NoMetrics
from fvc_lib.services import memory as memory_policy
from fvc_lib.services.config import RunConfig
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.records.digests import write_document
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import VIDEO_TEXTS, write_table
from fvc_lib.tasks.image.training import train_images
from fvc_lib.tasks.video_text.training import train_video_text
from tests.kits.image_kit import image_results_of, image_tables, write_image_tables
from tests.kits.video_text_kit import video_text_results_of
from tests.kits.warm_workers import forked_workers

SMALL = {
    "epochs": 1, "memory_preflight": False, "bootstrap_replicates": 100, "device": "cpu", "early_stopping_epochs": 0,
}  # fmt: skip


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
    with pytest.MonkeyPatch.context() as patch, forked_workers():
        patch.setattr(memory_policy, "frozen_garbage", nullcontext)
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
