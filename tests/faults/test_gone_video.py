"""Row 10: a video that was there for the index and is gone when its clip is to be made: named, and never trained on."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from fvc_lib.corpus.folds import make_folds
from fvc_lib.corpus.index import build_index
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.stage_logs import MetricLog
from fvc_lib.services.tables import FOLDS, INDEX, PREDICTIONS, read_table, write_table
from fvc_lib.tasks.video.training import train_fold
from fvc_lib.video.clips.making import make_clips
from fvc_lib.video.clips.store import ClipStore
from tests.faults.conftest import STAGE


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig(
        cache_dir=str(tmp_path / "cache"), num_folds=2, num_frames=4, fixed_size=24, augmentations_per_video=0,
        model="frame_cnn", epochs=1, batch_size=4, effective_batch_size=8, device="cpu", shuffled_label_control=False,
        near_duplicate_bits=0, workers=1,
        memory_preflight=False, inner_validation_share=0.34,
    )  # fmt: skip


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "runs" / "e" / "run_20260101_000000_aaaaaaaa")


@pytest.mark.fault(10)
def test_it_is_named_before_training_and_takes_no_part_in_it(tmp_path, paths, config, make_video, caplog):
    corpus, lost = tmp_path / "corpus", ["real/0.mp4", "fake/100.mp4"]
    for label, first in (("real", 0), ("fake", 100)):
        for seed in range(first, first + 6):
            make_video(corpus / label / f"{seed}.mp4", seed)
    build_index(corpus, config, paths.index.parent)
    index = read_table(paths.index, INDEX)
    write_table(make_folds(index, config.num_folds, config.seed), FOLDS, paths.folds)
    ids = dict(index.select("path", "video_id").iter_rows())
    for path in lost:
        (corpus / path).unlink()
    report = make_clips(ClipStore.of(config), index, corpus, 0, paths.augmented_metadata, workers=1)
    lost = sorted(ids[path] for path in lost)
    assert sorted(video_id for video_id, _ in report.failed) == lost
    assert all("no such file" in reason for _, reason in report.failed)

    strict = config.model_copy(update={"max_rejected_share": 0.1})
    with (
        MetricLog(paths.metrics(STAGE, 0), run_id=paths.run_id, fold=0) as log,
        pytest.raises(DataError, match=r"2 of 12 videos have no clip.*the first: .*03_augmentation") as caught,
    ):
        train_fold(paths, strict, 0, metric_log=log)
    assert lost[0] in str(caught.value)
    assert paths.metrics(STAGE, 0).read_bytes() == b""

    said: list[list[str]] = []
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda *_: said.append([record.getMessage() for record in caplog.records if record.levelno == logging.WARNING])
    )
    try:
        with MetricLog(paths.metrics(STAGE, 0), run_id=paths.run_id, fold=0) as log:
            outcome = train_fold(paths, config, 0, metric_log=log)
    finally:
        handle.remove()
    (before_the_first_step,) = [message for message in said[0] if "have no clip" in message]
    assert all(video_id in before_the_first_step for video_id in lost)
    assert sorted(outcome.missing) == lost
    assert not set(lost) & set(read_table(paths.predictions(0), PREDICTIONS)["video_id"])
