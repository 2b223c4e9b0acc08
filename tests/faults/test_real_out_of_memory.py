"""Rows 16, 17 and 18 without a pretence: the kernel gives the training process no more memory."""

from __future__ import annotations

import ctypes
import json
import resource
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fvc_lib.services.checkpoint_files import BEST, load_weights
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import FvcError, StoppedError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.stage_logs import MetricLog
from fvc_lib.services.tables import FOLDS, read_table
from fvc_lib.tasks.shared_training import TrainingOutcome, read_outcome
from fvc_lib.tasks.video.summary import TrainingSummary
from fvc_lib.tasks.video.training import train_fold
from tests.faults.conftest import STAGE, elsewhere
from tests.faults.forked import run
from tests.kits.training import TinyTraining, draw_clip, tiny_training_in

_M_ARENA_MAX = -8  # of glibc's malloc.h


def train_in_little_memory(root: Path, config: str, attempt: int, spare_bytes: int | None, report: Path) -> None:
    """Train fold 0; from the first forward pass on with no more than ``spare_bytes`` beyond what is in use then.

    ``report`` gets the address space that the training took beyond that, in bytes, once it is done.
    """
    # Else every thread reserves 64 MiB of addresses for allocations to come, and does without where there are none.
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    begun: list[int] = []

    def limit(module: nn.Module, *_: object) -> None:
        if not begun and module.training:
            begun.append(_status_bytes("VmSize"))
            if spare_bytes is not None:
                most = resource.getrlimit(resource.RLIMIT_AS)[1]
                resource.setrlimit(resource.RLIMIT_AS, (begun[0] + spare_bytes, most))

    torch.nn.modules.module.register_module_forward_pre_hook(limit)
    _train_fold(root, config, attempt)
    # Nothing was trained where the life before had come to the end of training and died after it.
    report.write_text(json.dumps(_status_bytes("VmPeak") - begun[0] if begun else 0))


def _train_fold(root: Path, config: str, attempt: int) -> None:
    """Train fold 0, with SIGTERM handled as a notebook's kernel handles it."""
    paths, signals = RunPaths(root), list[int]()
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    try:
        with MetricLog(paths.metrics(STAGE, 0), run_id=paths.run_id, fold=0, attempt=attempt) as log:
            fields = RunConfig.model_validate_json(config)
            train_fold(paths, fields, 0, metric_log=log, attempt=attempt, stop=lambda: bool(signals))
    except (FvcError, StoppedError) as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def _status_bytes(name: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


PLANNED = 8


@pytest.fixture(scope="module")
def large_clips(drawn_tiny_training: Path, tmp_path_factory: pytest.TempPathFactory) -> TinyTraining:
    """Clips of 8 x 168 x 168: a micro-batch takes far more than everything else."""
    folder = tmp_path_factory.mktemp("large") / "clips"
    shutil.copytree(drawn_tiny_training, folder)
    tiny = tiny_training_in(folder).with_config(
        fixed_size=168, num_frames=8, augmentations_per_video=0, batch_size=PLANNED, effective_batch_size=PLANNED,
        epochs=1, learning_rate=1e-4, shuffled_label_control=False, checkpoint_minutes=0,
    )  # fmt: skip
    for video_id, label in read_table(tiny.paths.folds, FOLDS).select("video_id", "label").iter_rows():
        clip = draw_clip(video_id, 0, label == "fake").repeat(2, axis=0)
        tiny.store.write(video_id, 0, np.kron(clip, np.ones((1, 1, 7, 7), np.uint8)))
    tiny.note_clips()
    return tiny


@dataclass(frozen=True)
class Life:
    """One attempt at fold 0 under a limit, how it ended and what it said."""

    paths: RunPaths
    code: int
    said: str

    @property
    def outcome(self) -> TrainingOutcome[TrainingSummary]:
        outcome = read_outcome(self.paths.fold_outcome(0), TrainingSummary)
        assert outcome is not None, self.said
        return outcome

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return load_weights(self.paths.fold_checkpoints(0) / BEST)

    @property
    def taken_bytes(self) -> int:
        return int(json.loads((self.paths.root / "taken.json").read_text()))


def train(tiny: TinyTraining, root: Path, attempt: int, spare_bytes: int | None) -> Life:
    paths = RunPaths(root) if root.exists() else elsewhere(tiny, root)
    config = tiny.config.model_dump_json()
    return Life(paths, *run(train_in_little_memory, root, config, attempt, spare_bytes, root / "taken.json"))


def distance(weights: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> float:
    """The largest relative difference."""
    return max(((weights[name] - other).norm() / other.norm()).item() for name, other in others.items())


@pytest.mark.long
@pytest.mark.fault(16, 17, 18, 20)
def test_whatever_memory_there_is_nothing_but_time_is_lost(large_clips, tmp_path, tally):
    """From next to nothing to all that it takes; what cannot even train one clip ends, and goes on when it can."""
    whole, ends = train(large_clips, tmp_path / "whole" / "run_0", 1, None), Counter[str]()
    for part in range(1, 25):
        root = tmp_path / f"part_{part}" / "run_0"
        life = train(large_clips, root, 1, whole.taken_bytes * part // 24)
        if life.code:
            ends[f"exit code {life.code}"] += 1
            life = train(large_clips, root, 2, None)
            assert life.code == 0, life.said
        else:
            ends[f"micro-batch {life.outcome.training.micro_batch}"] += 1
        assert distance(life.weights, whole.weights) < 1e-5
        assert life.outcome.training.steps == whole.outcome.training.steps
        tally.add(survived=1)
    assert len([end for end in ends if end.startswith("micro-batch")]) > 1, ends
