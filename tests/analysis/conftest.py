"""A run folder with everything a real one has, written through the services that write real ones."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import nbformat
import numpy as np
import polars as pl
import pytest

from fvc_lib.metrics.classification import average_precision, brier_score, roc_auc
from fvc_lib.metrics.cross_validation import within_folds
from fvc_lib.metrics.intervals import group_interval, one_vote_per_group
from fvc_lib.services import tables
from fvc_lib.services.atomic_files import write_json, write_text
from fvc_lib.services.config import RunConfig
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.stage_logs import MetricLog
from fvc_lib.services.tables import read_table, write_table
from tests.analysis.memory_story import StoryWriter
from tests.analysis.task_runs import framed

CODECS = ("h264", "hevc", "vp9", "mpeg4")
SIZES = ((1280, 720), (640, 480), (1920, 1080), (320, 240))


@pytest.fixture(scope="session")
def written_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, float], RunPaths]:
    """A run by seed and skill, written once for all tests."""

    @functools.cache
    def write(seed: int, skill: float) -> RunPaths:
        return write_run(tmp_path_factory.mktemp("written"), "demo", "run_0", seed=seed, skill=skill)

    return write


@pytest.fixture
def make_run(tmp_path: Path, written_run: Callable[[int, float], RunPaths]) -> Callable[..., RunPaths]:
    """A run folder of this test's own; copied, since a copied run folder is a run like any other."""

    def make(
        experiment: str = "demo", name: str = "run_20250304_101500_abcdef01", seed: int = 0, skill: float = 1.6
    ) -> RunPaths:
        root = tmp_path / "runs" / experiment / name
        shutil.copytree(written_run(seed, skill).root, root)
        return RunPaths(root)

    return make


@pytest.fixture
def run(make_run: Callable[..., RunPaths]) -> RunPaths:
    return make_run()


def write_run(runs_dir: Path, experiment: str, name: str, *, seed: int = 0, skill: float = 1.6) -> RunPaths:
    run = RunPaths(runs_dir / experiment / name)
    run.root.mkdir(parents=True)
    write_json(run.run_json, {"run_id": run.run_id})
    write_text(run.params_yaml, RunConfig(experiment=experiment, model="frame_cnn").to_yaml())
    index = write_index(run, seed)
    folds = index.select("video_id", "group_id", "label").with_columns(
        (pl.col("group_id").str.slice(6).cast(pl.Int64) // 2 % 5).alias("fold")
    )
    write_table(folds, tables.FOLDS, run.folds)
    copies = [
        {
            "clip_id": f"{video['video_id']}_{number}", "video_id": video["video_id"], "group_id": video["group_id"],
            "label": video["label"], "augmentation_index": number, "settings_hash": "00",
            "operations": json.dumps([{"name": "flip"}, {"name": ("blur", "noise")[number % 2]}] if number else []),
            "clip_path": f"{video['video_id']}/{number}.npy",
        }
        for video in index.iter_rows(named=True) for number in range(3)
    ]  # fmt: skip
    write_table(framed(copies, tables.AUGMENTED), tables.AUGMENTED, run.augmented_metadata)
    predictions = write_predictions(run, folds, seed, skill)
    write_table(results_of(predictions, seed), tables.RESULTS, run.results)
    known = predictions.join(index.select("video_id", "codec", "platform"), on="video_id")
    known = known.with_columns(platform=pl.col("platform").fill_null("not known"))
    slices = []
    for by in ("codec", "platform"):
        for (value,), part in sorted(known.group_by(by)):
            labels = (part["label"] == "fake").cast(pl.Int64).to_numpy()
            interval = group_interval(labels, part["score"], part["group_id"].to_list(), roc_auc, replicates=100)
            number, low, high = (
                float(end) if np.isfinite(end) else None for end in (interval.value, interval.low, interval.high)
            )
            slices.append(
                {
                    "slice_by": by, "value": value, "metric": "roc_auc", "number": number, "low": low, "high": high,
                    "num_videos": part.height, "num_real": int((labels == 0).sum()), "num_fake": int(labels.sum()),
                    "num_groups": part["group_id"].n_unique(), "is_small": part["group_id"].n_unique() < 16,
                }
            )  # fmt: skip
    write_table(framed(slices, tables.SLICES), tables.SLICES, run.slices)
    shared = predictions.group_by("group_id").agg(pl.col("fold").n_unique()).filter(pl.col("fold") > 1).height
    checks = [
        {"check": "groups_in_two_folds", "count": shared, "number": None, "finding": "No group is in two folds.",
         "passed": shared == 0},
        {"check": "videos", "count": predictions.height, "number": None, "finding": "So many were judged.",
         "passed": None},
    ]  # fmt: skip
    write_table(framed(checks, tables.LEAKAGE_AUDIT), tables.LEAKAGE_AUDIT, run.leakage_audit)
    for fold in range(5):
        generator = np.random.default_rng([seed, 3, fold])
        with MetricLog(run.metrics("04_fold_training", fold), run_id=run.run_id, fold=fold) as log:
            for step in range(1, 61):
                loss = 0.3 + 0.42 * np.exp(-step / 20) + generator.normal(0, 0.03)
                log.log(step=step, epoch=step // 6, phase="train", metrics={"loss": loss, "learning_rate": 1e-3})
                if step % 6 == 0:
                    epoch = {"loss": 0.42 + 0.27 * np.exp(-step / 15) + generator.normal(0, 0.02), "roc_auc": 0.8}
                    log.log(step=step, epoch=step // 6, phase="validation", metrics=epoch)
        memory = StoryWriter(run, fold=fold)
        for second in range(40):
            used = 420 + 14 * fold + 300 * (1 - np.exp(-second / 6)) + 20 * np.sin(second)
            memory.sample(used, "train" if second > 4 else "setup", epoch=second // 8, step=second, children_mb=30)
    keys = [
        "01_data_index",
        "02_folds",
        "03_augmentation",
        *(f"04_fold_training_fold_{k}" for k in range(5)),
        "05_kfold_results",
    ]
    stages = {
        key: {
            "state": "done", "attempts": 1, "reason": None, "duration_seconds": 4.0 + 3 * number, "exit_code": 0,
            "started_utc": f"2025-03-04T10:{15 + number}:00Z",
            "finished_utc": f"2025-03-04T10:{15 + number}:{number + 30}Z",
            "peak_rss_bytes": 500_000_000 + number * 40_000_000, "last_step": "60" if "fold_" in key else None,
            "error": None,
        }
        for number, key in enumerate(keys)
    }  # fmt: skip
    write_json(
        run.status_json,
        {
            "run_id": run.run_id, "state": "done", "attempt": 1, "started_utc": "2025-03-04T10:15:00Z",
            "finished_utc": "2025-03-04T10:18:05Z", "stages": stages, "peak_rss_bytes": 812_000_000,
            "duration_seconds": 185.0, "exit_code": 0,
        },
    )  # fmt: skip
    return run


def write_index(run: RunPaths, seed: int) -> pl.DataFrame:
    generator = np.random.default_rng(seed)
    rows = []
    for number in range(96):
        width, height = SIZES[generator.integers(4)]
        rows.append(
            {
                "video_id": f"{number:016x}", "path": f"clips/clip {number} <b>&'\".mp4",
                "label": tables.LABELS[number // 4 % 2], "group_id": f"group_{number // 4:03d}",
                "source_id": f"s{number}", "label_source": "folder", "corpus": "clips",
                "stated_group": None, "manipulation": None, "platform": "camera" if number % 3 else None,
                "generator": None, "real_source": None, "official_split": None, "attributes": None,
                "codec": CODECS[generator.integers(4)], "container": "mp4", "pixel_format": "yuv420p",
                "width": width, "height": height, "frames_per_second": 25.0, "num_frames": 50, "duration_seconds": 2.0,
                "rotation_degrees": 0, "has_audio": False, "size_bytes": 50_000 + number, "bits_per_second": 2e5,
                "content_sha256": f"{number:064x}", "perceptual_hash": None,
            }
        )  # fmt: skip
    index = framed(rows, tables.INDEX)
    write_table(index, tables.INDEX, run.index)
    return index


def write_predictions(run: RunPaths, folds: pl.DataFrame, seed: int, skill: float) -> pl.DataFrame:
    generator = np.random.default_rng([seed, 1])
    fake = (folds["label"] == "fake").to_numpy()
    codes = folds["group_id"].str.slice(6).cast(pl.Int64).to_numpy()
    logits = (
        skill * (fake - 0.5) + generator.normal(0, 0.7, codes.max() + 1)[codes] + generator.normal(0, 0.6, fake.size)
    )
    predictions = folds.with_columns(
        pl.Series("score", 1 / (1 + np.exp(-logits))),
        pl.Series("threshold", 0.45 + 0.02 * folds["fold"].to_numpy()),
        pl.Series("logit", 1.25 * logits),
        pl.lit(1.25).alias("temperature"),
        pl.Series("control_score", generator.uniform(0.2, 0.8, fake.size)),
        pl.Series("control_label", generator.permutation(folds["label"].to_numpy())),
        pl.lit(None, pl.Float64).alias("source_score"),
        pl.lit(None, pl.Int64).alias("source_label"),
    )
    for fold in range(5):
        write_table(predictions.filter(pl.col("fold") == fold), tables.PREDICTIONS, run.predictions(fold))
    return predictions


def results_of(predictions: pl.DataFrame, seed: int) -> pl.DataFrame:
    labels = (predictions["label"] == "fake").cast(pl.Int64).to_numpy()
    groups, folds = predictions["group_id"].to_list(), predictions["fold"].to_numpy()
    shuffled = (predictions["control_label"] == "fake").cast(pl.Int64).to_numpy()
    generator = np.random.default_rng([seed, 2])
    metadata = generator.uniform(0, 1, labels.size)
    lookup = np.where(generator.uniform(size=labels.size) < 0.98, labels, 0.5)
    sources = {
        "model": (labels, predictions["score"].to_numpy()),
        "constant": (labels, np.full(labels.size, 0.5)),
        "metadata_only": (labels, metadata),
        "length_only": (labels, generator.permutation(metadata)),
        "group_lookup_by_row": (labels, lookup),
        "group_lookup_by_group": (labels, np.full(labels.size, 0.5)),
        "shuffled_labels": (shuffled, predictions["control_score"].to_numpy()),
    }
    rows = []
    for source, (truth, scores) in sources.items():
        for metric in (roc_auc, average_precision, brier_score):
            compared = within_folds(metric, folds)
            interval = group_interval(truth, scores, groups, compared, replicates=100)
            per_fold = [metric(truth[folds == fold], scores[folds == fold]) for fold in range(5)]
            common = {"source": source, "metric": metric.__name__}
            rows.append(
                {
                    **common, "scope": "all", "value": interval.value, "low": interval.low, "high": interval.high,
                    "fold_mean": float(np.mean(per_fold)), "fold_std": float(np.std(per_fold)),
                    "num_videos": interval.num_rows, "num_groups": interval.num_groups,
                }
            )  # fmt: skip
            sizes = {"num_videos": interval.num_rows, "num_groups": interval.num_groups}
            by_group = metric(truth, scores, one_vote_per_group(groups))
            rows.append({**common, "scope": "all_by_group", "value": float(by_group), **sizes})
            for fold, value in enumerate(per_fold):
                inside = predictions.filter(pl.col("fold") == fold)
                counts = {"num_videos": inside.height, "num_groups": inside["group_id"].n_unique()}
                rows.append({**common, "scope": f"fold_{fold}", "value": float(value), **counts})
    return framed(rows, tables.RESULTS)


def notebook(path: Path, *cells: object) -> Path:
    write_text(path, nbformat.writes(nbformat.v4.new_notebook(cells=list(cells))))
    return path


def predictions_of(run: RunPaths) -> pl.DataFrame:
    return pl.concat([read_table(run.predictions(fold), tables.PREDICTIONS) for fold in range(5)]).sort("video_id")


def change_predictions(run: RunPaths, changed: Callable[[pl.DataFrame], pl.DataFrame]) -> None:
    """Write what notebook 04 would have written with other predictions; the folds follow them."""
    predictions = changed(predictions_of(run))
    for fold in range(5):
        write_table(predictions.filter(fold=fold), tables.PREDICTIONS, run.predictions(fold))
    write_table(predictions.select("video_id", "group_id", "label", "fold"), tables.FOLDS, run.folds)


def detector_runs(folder: Path, written_run: Callable[[int, float], RunPaths], most: int = 4) -> list[RunPaths]:
    """The first ``most`` runs of a weak detector of two seeds and a strong one of two."""
    strong = {"model": "r2plus1d_small"}
    asked: list[tuple[str, float, dict[str, object]]] = [
        ("run_a0", 0.4, {}),
        ("run_a1", 0.6, {"seed": 1, "folds_seed": 0}),
        ("run_b0", 4.0, strong),
        ("run_b1", 3.0, {**strong, "seed": 1, "folds_seed": 0}),
    ]
    return [
        set_parameters(RunPaths(shutil.copytree(written_run(drawn, skill).root, folder / "demo" / name)), **parameters)
        for drawn, (name, skill, parameters) in enumerate(asked[:most], 1)
    ]


def set_parameters(run: RunPaths, **parameters: object) -> RunPaths:
    write_text(run.params_yaml, resolve_config({"model": "frame_cnn", **parameters}, environ={}).to_yaml())
    return run
