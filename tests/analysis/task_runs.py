"""Runs of the tasks image and video_text as their notebooks leave them, with made-up and partly hostile content."""

from pathlib import Path

import numpy as np
import polars as pl

from fvc_lib.services import tables
from fvc_lib.services.atomic_files import write_json, write_text
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.stage_logs import MetricLog
from fvc_lib.services.tables import TableSchema, write_table
from tests.analysis.memory_story import StoryWriter

HOSTILE = '<img src=x onerror=alert(1)> & "it\'s"\n; DROP TABLE runs; --'
CLASSES = ("apple pie", "bibimbap", "caesar salad", HOSTILE)
TARGETS = {"calories": "kcal", "mass": "g"}
NUM_IMAGES = 120


def framed(rows: list[dict[str, object]], schema: TableSchema) -> pl.DataFrame:
    """``rows`` in the columns and types of ``schema``."""
    types = {name: column.dtype for name, column in schema.columns.items()}
    return pl.DataFrame(rows, schema=types, orient="row")


def images_of(num_images: int = NUM_IMAGES, classes: tuple[str, ...] = CLASSES) -> pl.DataFrame:
    """Two images of each dish; classes in turn, the last three of twelve dishes tested."""
    rows = [
        {
            "image_id": f"{number:016x}", "path": f"{number % 7}/picture {number} <b>.jpg",
            "class_label": classes[number // 2 % len(classes)], "group_id": f"dish_{number // 2:04d}",
            "part": ("train",) * 7 + ("validation",) * 2 + ("test",) * 3, "split_source": "made", "source": "folder",
            "width": 96, "height": 64, "size_bytes": 2000 + number, "content_sha256": f"{number:064x}",
        }
        for number in range(num_images)
    ]  # fmt: skip
    rows = [{**row, "part": row["part"][number // 2 % 12]} for number, row in enumerate(rows)]
    return framed(rows, tables.IMAGES)


def targets_of(images: pl.DataFrame) -> pl.DataFrame:
    """Numbers of every image but each fifth."""
    rows = [
        {
            "image_id": image["image_id"], "group_id": image["group_id"], "target": target, "unit": unit,
            "value": 100.0 + 3 * (int(image["image_id"], 16) // 2) + 10 * len(target),
        }
        for number, image in enumerate(images.iter_rows(named=True)) if number % 5
        for target, unit in TARGETS.items()
    ]  # fmt: skip
    return framed(rows, tables.IMAGE_TARGETS)


def image_predictions_of(images: pl.DataFrame, seed: int = 0) -> pl.DataFrame:
    """Three of four test images right."""
    draw = np.random.default_rng(seed)
    test = images.filter(pl.col("part") == "test")
    classes = images["class_label"].unique(maintain_order=True).to_list()
    rows = []
    for number, image in enumerate(test.iter_rows(named=True)):
        right = number % 4 != 3
        place = classes.index(image["class_label"])
        rows.append(
            {
                "image_id": image["image_id"], "group_id": image["group_id"], "path": image["path"],
                "class_label": image["class_label"],
                "predicted_label": image["class_label"] if right else classes[(place + 1) % len(classes)],
                "probability": float(draw.uniform(0.3, 1)), "rank_of_class": 1 if right else 2,
            }
        )  # fmt: skip
    return framed(rows, tables.IMAGE_PREDICTIONS)


def target_predictions_of(images: pl.DataFrame, targets: pl.DataFrame) -> pl.DataFrame:
    """Off by about 20."""
    known = targets.join(images.filter(part="test").select("image_id", "path"), on="image_id")
    noise = pl.Series(np.random.default_rng(0).normal(0, 20, known.height))
    predicted = known.with_columns(predicted=pl.col("value") + noise)
    return predicted.select("image_id", "group_id", "path", "target", "unit", "value", "predicted")


def result(
    source: str, subject: str, metric: str, value: float | None, width: float | None = None, unit: str = "",
    samples: tuple[int, int] = (30, 15),
) -> dict[str, object]:  # fmt: skip
    """One row of ``TASK_RESULTS``."""
    low, high = (None, None) if width is None or value is None else (value - width, value + width)
    return {
        "source": source, "subject": subject, "metric": metric, "unit": unit, "value": value, "low": low, "high": high,
        "num_samples": samples[0], "num_groups": samples[1],
    }  # fmt: skip


def image_results_of(top1: float = 0.75) -> pl.DataFrame:
    rows = [
        result("model", "all", "top1", top1, 0.08), result("majority_class", "all", "top1", 0.25, 0.06),
        result("model", "all", "top5", 1.0, 0.0), result("majority_class", "all", "top5", 1.0, 0.0),
        result("model", "all", "macro_f1", top1 - 0.01, 0.09), result("majority_class", "all", "macro_f1", 0.1, 0.02),
        *(result("model", f"class:{name}", m, v, samples=(8, 4)) for name in CLASSES
          for m, v in (("precision", 0.8), ("recall", 0.7), ("f1", 0.75))),
        *(row for target, unit in TARGETS.items() for row in (
            result("model", f"target:{target}", "mae", 16.0, 2.0, unit),
            result("mean_predictor", f"target:{target}", "mae", 50.0, 5.0, unit),
            result("model", f"target:{target}", "r2", 0.9, 0.03),
            result("mean_predictor", f"target:{target}", "r2", -0.02, 0.01),
        )),
    ]  # fmt: skip
    return framed(rows, tables.TASK_RESULTS)


def write_image_run(runs_dir: Path, name: str = "run_20250305_101500_abcdef02", experiment: str = "dishes") -> RunPaths:
    """A finished run of task image, without its records."""
    run = RunPaths(runs_dir / experiment / name)
    images = images_of()
    targets = targets_of(images)
    write_table(images, tables.IMAGES, run.images)
    write_table(targets, tables.IMAGE_TARGETS, run.image_targets)
    write_table(rejected(), tables.REJECTED, run.rejected)
    write_table(image_predictions_of(images), tables.IMAGE_PREDICTIONS, run.image_predictions)
    write_table(target_predictions_of(images, targets), tables.TARGET_PREDICTIONS, run.target_predictions)
    write_table(image_results_of(), tables.TASK_RESULTS, run.task_results)
    write_rest(run, "image", "10_image_recognition")
    return run


def rejected() -> pl.DataFrame:
    rows = [
        {"path": f"bad {number} {HOSTILE}", "source_id": None, "row": None, "label": None, "reason": "unreadable",
         "detail": "truncated"}
        for number in range(3)
    ]  # fmt: skip
    return framed([*rows, {**rows[0], "reason": "unknown_class", "detail": "not in classes.txt"}], tables.REJECTED)


def pairs_of(num_videos: int = 60) -> pl.DataFrame:
    """Every third text stands beside two videos."""
    rows = []
    for number in range(num_videos):
        text = number - 1 if number % 3 == 1 else number
        rows.append(
            {
                "pair_id": f"pair_{number:04d}", "video_id": f"{number:016x}", "path": f"clips/clip {number} <i>.mp4",
                "text_id": f"text_{text:04d}",
                "text": f"a red circle moves {text} times over {HOSTILE if text == 45 else 'a field'}",
                "group_id": f"group_{number:04d}", "part": ("train", "train", "validation", "test")[number // 3 % 4],
                "split_source": "made", "num_frames": 20, "duration_seconds": 1.0, "content_sha256": f"{number:064x}",
            }
        )  # fmt: skip
    return framed(rows, tables.VIDEO_TEXTS)


def ranks_of(pairs: pl.DataFrame) -> pl.DataFrame:
    """Three of four queries find theirs at once."""
    test = pairs.filter(pl.col("part") == "test")
    texts = test.unique("text_id", maintain_order=True)
    rows = [
        {
            "direction": "video_to_text", "query_id": row["pair_id"], "group_id": row["group_id"],
            "rank": 1 if number % 4 else 3, "num_candidates": texts.height, "num_positives": 1,
        }
        for number, row in enumerate(test.iter_rows(named=True))
    ] + [
        {
            "direction": "text_to_video", "query_id": row["text_id"], "group_id": row["group_id"],
            "rank": 1 if number % 4 else 5, "num_candidates": test.height,
            "num_positives": test.filter(pl.col("text_id") == row["text_id"]).height,
        }
        for number, row in enumerate(texts.iter_rows(named=True))
    ]  # fmt: skip
    return framed(rows, tables.RETRIEVAL_RANKS)


def video_text_results_of() -> pl.DataFrame:
    rows = [
        row
        for direction in ("video_to_text", "text_to_video")
        for row in (
            *(result("model", direction, f"recall@{k}", 0.7 + k / 50, 0.1) for k in (1, 5, 10)),
            *(result("chance", direction, f"recall@{k}", k / 15) for k in (1, 5, 10)),
            result("model", direction, "median_rank", 1.0), result("chance", direction, "median_rank", 8.0),
            result("model", direction, "mrr", 0.8, 0.05), result("chance", direction, "mrr", 0.2),
        )
    ] + [
        result("model", "captions", "exact_match", 0.5, 0.1),
        result("most_frequent_caption", "captions", "exact_match", 0.05, 0.04),
    ]  # fmt: skip
    return framed(rows, tables.TASK_RESULTS)


def write_video_text_run(
    runs_dir: Path, name: str = "run_20250306_101500_abcdef03", experiment: str = "texts"
) -> RunPaths:
    """A finished run of task video_text, without its records."""
    run = RunPaths(runs_dir / experiment / name)
    pairs = pairs_of()
    write_table(pairs, tables.VIDEO_TEXTS, run.video_texts)
    write_table(rejected(), tables.REJECTED, run.rejected)
    write_table(ranks_of(pairs), tables.RETRIEVAL_RANKS, run.retrieval_ranks)
    test = pairs.filter(pl.col("part") == "test").with_columns(pl.col("text").str.replace_all("\n", " "))
    captions = [
        {
            "video_id": row["video_id"], "group_id": row["group_id"], "path": row["path"],
            "caption": row["text"] if number % 2 else "", "references": row["text"],
        }
        for number, row in enumerate(test.iter_rows(named=True))
    ]  # fmt: skip
    write_table(framed(captions, tables.CAPTIONS), tables.CAPTIONS, run.captions)
    write_table(video_text_results_of(), tables.TASK_RESULTS, run.task_results)
    write_rest(run, "video_text", "20_video_text")
    return run


def write_rest(run: RunPaths, task: str, stage: str) -> None:
    """What every run has."""
    config = resolve_config({"task": task, "experiment": run.experiment}, environ={})
    write_json(run.run_json, {"run_id": run.run_id, "attempts": [{}]})
    write_text(run.params_yaml, config.to_yaml())
    with MetricLog(run.metrics(stage), run_id=run.run_id, fold=None) as log:
        for step in range(1, 31):
            log.log(step=step, epoch=step // 10, phase="train", metrics={"loss": 2 / step})
            if step % 10 == 0:
                log.log(
                    step=step, epoch=step // 10, phase="validation", metrics={"loss": 2.2 / step, "top1": step / 40}
                )
    writer = StoryWriter(run, stage, None)
    for second in range(5):
        writer.sample(400 + second, epoch=0, step=1)
    done = {"state": "done", "attempts": 1, "duration_seconds": 60.0, "peak_rss_bytes": 405_000_000, "exit_code": 0}
    write_json(
        run.status_json,
        {
            "run_id": run.run_id, "state": "done", "started_utc": "2025-03-05T10:15:00Z", "duration_seconds": 61.0,
            "peak_rss_bytes": 405_000_000, "exit_code": 0, "stages": {stage: done},
        },
    )  # fmt: skip
