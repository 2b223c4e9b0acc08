"""A run of two folds on twenty small videos, trained for an epoch, whose networks can be asked."""

import shutil
from pathlib import Path

import av
import numpy as np
import yaml

from fvc_lib.corpus.probing import probe_file
from fvc_lib.services.config import RunConfig
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.stage_logs import MetricLog
from fvc_lib.services.tables import FOLDS, INDEX, write_table
from fvc_lib.tasks.video.predicting import write_features
from fvc_lib.tasks.video.training import train_fold
from fvc_lib.video.clips.making import make_clips
from fvc_lib.video.clips.store import ClipStore
from fvc_lib.video.features.measuring import measure_features
from tests.kits.training import ScoredTables, draw_clip
from tests.kits.warm_workers import forked_workers

NUM_VIDEOS = 20  # of 20 groups: five of each label train a fold, the fewest that calibrate


def write_video(path: Path, frames: np.ndarray) -> None:
    with av.open(str(path), "w") as output:
        stream = output.add_stream("libx264", rate=25, options={"qp": "0", "preset": "ultrafast"})
        stream.height, stream.width, stream.pix_fmt = *frames.shape[2:], "yuv420p"
        for frame in np.moveaxis(frames, 1, -1):
            rows = np.ascontiguousarray(frame)
            output.mux(stream.encode(av.VideoFrame.from_ndarray(rows, format="rgb24").reformat(format="yuv420p")))
        output.mux(stream.encode(None))


def enlarged(frames: np.ndarray, scale: int) -> np.ndarray:
    """``frames`` (T, 3, H, W) with each pixel so many times in both directions."""
    return frames.repeat(scale, 2).repeat(scale, 3)


def trained_run(
    home: Path,
    model: str = "frame_cnn",
    model_weights: str = "",
    *,
    families: str = "all",
    scale: int = 1,
    learning_rate: float = 0.01,
) -> RunPaths:
    """The run, in ``home``; of a model on forensic features on these ``families``. Videos are 24 ``scale`` wide."""
    folds = ScoredTables.folds(num_groups=NUM_VIDEOS, per_group=1, num_folds=2)
    for video_id, label in folds.select("video_id", "label").iter_rows():
        folder = home / "corpus" / label
        folder.mkdir(parents=True, exist_ok=True)
        write_video(folder / f"{video_id}.mp4", enlarged(draw_clip(video_id, 0, label == "fake"), scale))
    paths = [f"{label}/{video_id}.mp4" for video_id, label in folds.select("video_id", "label").iter_rows()]
    found = [probe_file(str(home / "corpus" / path)) for path in paths]
    facts = {
        name: [each["probe"][name] for each in found]
        for name in ("width", "height", "frames_per_second", "num_frames", "duration_seconds", "bits_per_second")
    }
    hashes = {name: [each[name] for each in found] for name in ("content_sha256", "perceptual_hash")}
    index = ScoredTables.index(folds, path=paths, **facts, **hashes)
    config = RunConfig(
        corpus=str(home / "corpus"), cache_dir=str(home / "cache"), runs_dir=str(home / "runs"), num_folds=2,
        num_frames=4, fixed_size=24, augmentations_per_video=0, model=model,
        model_weights=model_weights, epochs=1, batch_size=4,
        effective_batch_size=4, learning_rate=learning_rate, device="cpu", memory_preflight=False,
        feature_families=families, shuffled_label_control=False, inner_validation_share=0.25,
    )  # fmt: skip
    made = RunPaths(home / "runs" / "default" / "run_20260101_000000_00000000")
    write_table(index, INDEX, made.index)
    write_table(folds, FOLDS, made.folds)
    made.params_yaml.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    with forked_workers():
        if config.of_features in ("forensic", "both"):
            root, cache = home / "corpus", home / "cache"
            assert not measure_features(index, root, families, cache, made.features, workers=1).failed
        if config.of_features != "forensic":
            store = ClipStore.of(config)
            assert not make_clips(store, index, home / "corpus", 0, made.augmented_metadata, workers=1).failed
    for fold in range(2):
        with MetricLog(made.metrics("04_fold_training", fold), run_id="run", fold=fold, attempt=1) as log:
            train_fold(made, config, fold, metric_log=log)
    write_features(made)
    return made


def copied_run(run: RunPaths, home: Path) -> RunPaths:
    """Copy a run with its corpus and cache into ``home`` and return it."""
    place = run.root.parents[2]
    shutil.copytree(place, home, dirs_exist_ok=True)
    made = RunPaths(home / run.root.relative_to(place))
    made.params_yaml.write_text(made.params_yaml.read_text().replace(str(place), str(home)))
    return made
