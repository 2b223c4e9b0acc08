"""Rows 16, 17, 18 and 20 for real: the kernel gives the training process no more memory."""

import ctypes
import json
import resource
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fvc_lib.services.checkpoint_files import BEST, load_weights
from fvc_lib.services.errors import FvcError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import FOLDS, read_table
from fvc_lib.tasks.shared_training import read_outcome
from fvc_lib.tasks.video.summary import TrainingSummary
from tests.faults.conftest import elsewhere, train
from tests.faults.forked import run
from tests.kits.engine_kit import weight_distance
from tests.kits.training import TinyTraining, draw_clip, tiny_training_in

_M_ARENA_MAX = -8  # of glibc's malloc.h


def train_in_little_memory(tiny: TinyTraining, paths: RunPaths, attempt: int, spare_bytes: int | None) -> None:
    """Train fold 0; from the first forward pass on, allow ``spare_bytes`` beyond the address space in use then.

    Write the address space that the training took beyond that, in bytes, to ``taken.json``.
    """
    # Otherwise every thread reserves 64 MiB of addresses for later, and does without where there are none.
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    begun: list[int] = []

    def limit(module: nn.Module, *_: object) -> None:
        if not begun and module.training:
            begun.append(_status_bytes("VmSize"))
            if spare_bytes is not None:
                most = resource.getrlimit(resource.RLIMIT_AS)[1]
                resource.setrlimit(resource.RLIMIT_AS, (begun[0] + spare_bytes, most))

    torch.nn.modules.module.register_module_forward_pre_hook(limit)
    try:
        train(tiny, paths, attempt)
    except FvcError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    # Nothing was trained if the attempt before came to the end of training and died after it.
    (paths.root / "taken.json").write_text(json.dumps(_status_bytes("VmPeak") - begun[0] if begun else 0))


def _status_bytes(name: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


@pytest.fixture(scope="module")
def large_clips(drawn_tiny_training: Path, tmp_path_factory: pytest.TempPathFactory) -> TinyTraining:
    """Return a run on clips of 8 x 168 x 168: a micro-batch takes far more than everything else."""
    folder = shutil.copytree(drawn_tiny_training, tmp_path_factory.mktemp("large") / "clips")
    tiny = tiny_training_in(folder).with_config(
        fixed_size=168, num_frames=8, augmentations_per_video=0, batch_size=8, effective_batch_size=8,
        epochs=1, learning_rate=1e-4, shuffled_label_control=False, checkpoint_minutes=0,
    )  # fmt: skip
    for video_id, label in read_table(tiny.paths.folds, FOLDS).select("video_id", "label").iter_rows():
        clip = draw_clip(video_id, 0, label == "fake").repeat(2, axis=0)
        tiny.store.write(video_id, 0, np.kron(clip, np.ones((1, 1, 7, 7), np.uint8)))
    tiny.note_clips()
    return tiny


@pytest.mark.long
@pytest.mark.fault(16, 17, 18, 20)
def test_whatever_memory_there_is_nothing_but_time_is_lost(large_clips, tmp_path, tally):
    """From next to nothing to all that it takes; what cannot even train one clip ends, and goes on when it can."""

    def trained(paths, attempt, spare_bytes):
        code, said = run(train_in_little_memory, large_clips, paths, attempt, spare_bytes)
        assert spare_bytes is not None or code == 0, said
        return code, code or read_outcome(paths.fold_outcome(0), TrainingSummary).training

    def weights(paths):
        return load_weights(paths.fold_checkpoints(0) / BEST)

    whole, ends = elsewhere(large_clips, tmp_path / "whole" / "run_0"), Counter[str]()
    _, training = trained(whole, 1, None)
    taken = json.loads((whole.root / "taken.json").read_text())
    for part in range(1, 25):
        paths = elsewhere(large_clips, tmp_path / f"part_{part}" / "run_0")
        code, found = trained(paths, 1, taken * part // 24)
        ends[f"exit code {code}" if code else f"micro-batch {found.micro_batch}"] += 1
        if code:
            _, found = trained(paths, 2, None)
        assert weight_distance(weights(paths), weights(whole)) < 1e-5
        assert found.steps == training.steps
        tally.add(survived=1)
    assert len([end for end in ends if end.startswith("micro-batch")]) > 1, ends
