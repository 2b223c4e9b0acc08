"""A fold on several ranks, from the call in a notebook or the command line to the files it leaves."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fvc_lib.engine.loading import effective_batches, share
from fvc_lib.engine.ranks import RankLostError
from fvc_lib.engine.training_state import NoMetrics
from fvc_lib.services.checkpoint_files import BEST
from fvc_lib.services.errors import DataError, StoppedError
from fvc_lib.services.stage_logs import MetricLog
from fvc_lib.services.tables import AUGMENTED, PREDICTIONS, read_table
from fvc_lib.tasks.shared_training import read_outcome
from fvc_lib.tasks.video.training import TrainingSummary, train_fold
from fvc_lib.video.clips.shards import write_shards
from tests.engine.test_rank_launcher import metrics_of
from tests.faults.conftest import STAGE, elsewhere, result_of
from tests.kits.engine_kit import Observer
from tests.kits.rank_kit import rank_processes

ROOT = Path(__file__).parents[2]
ROUNDED = ["score", "control_score", "logit", "temperature", "threshold"]


@pytest.fixture
def two_ranks(tiny_training):
    """The small run on two ranks; small steps, so that rounding stays what it is."""
    return tiny_training.with_config(num_ranks=2, epochs=2, learning_rate=1e-4, memory_preflight=False)


def predictions(paths):
    return read_table(paths.predictions(0), PREDICTIONS)


@pytest.mark.long
def test_a_fold_on_two_ranks_leaves_what_one_process_leaves(two_ranks, tmp_path):
    """Started from here, as the notebook does it; then by torchrun in a copy: the same bits."""
    paths, seen, observer = two_ranks.paths, [], Observer()
    outcome = train_here(paths, two_ranks.config, memory=observer, progress=lambda *steps: seen.append(steps))
    assert outcome == read_outcome(paths.fold_outcome(0), TrainingSummary)
    assert outcome.num_ranks == 2
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    assert {place[0] for place in observer.places} >= {"train", "validation", "control_train", "test", "report"}
    assert [kind for kind, _ in observer.events] == ["device"]

    alone = elsewhere(two_ranks, tmp_path / "alone" / "run_1")
    train_here(alone, two_ranks.with_config(num_ranks=1).config)
    found, wanted = predictions(paths), predictions(alone)
    assert found.drop(*ROUNDED).equals(wanted.drop(*ROUNDED))
    assert all((found[name] - wanted[name]).abs().max() < 1e-5 for name in ROUNDED)
    assert metrics_of(paths).keys() == metrics_of(alone).keys()

    again = elsewhere(two_ranks, tmp_path / "torchrun" / "run_2")
    again.params_yaml.write_text(two_ranks.config.to_yaml())
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "fvc_lib.tasks.rank", str(again.root), "--fold", "0",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert result_of(again) == result_of(paths)
    assert read_outcome(again.fold_outcome(0), TrainingSummary).num_ranks == 2
    samples = [json.loads(line) for line in again.memory(STAGE, 0).read_text().splitlines()]
    assert {sample["phase"] for sample in samples} >= {"train", "control_train", "report"}


def ranks_of(paths):
    """The rank processes of fold 0, by rank."""
    return rank_processes(paths.logs / f"{STAGE}_fold_0_ranks.log")


def train_here(paths, config, attempt=1, **options):
    with MetricLog(paths.metrics(STAGE, 0), run_id=paths.run_id, fold=0, attempt=attempt) as log:
        return train_fold(paths, config, 0, metric_log=log, attempt=attempt, **options)


def train_until(paths, config, attempt, after, what):
    """Train fold 0 here, with ``what(ranks)`` called once, after the given number of steps."""
    done = []

    def progress(steps, planned, *_):
        if steps >= after and not done:
            done.append(what(ranks_of(paths)))

    train_here(paths, config, attempt, progress=progress, stop=lambda: "stop" in done)


@pytest.mark.long
@pytest.mark.fault(3, 5)
def test_a_fold_whose_ranks_are_killed_and_stopped_ends_as_if_they_had_not_been(two_ranks, tmp_path):
    paths, config = two_ranks.paths, two_ranks.with_config(checkpoint_minutes=0).config
    train_here(paths, config)
    disturbed = elsewhere(two_ranks, tmp_path / "disturbed" / "run_1")
    with pytest.raises(RankLostError, match="rank 1 was killed"):
        train_until(disturbed, config, 1, 2, lambda ranks: ranks[1].kill())
    with pytest.raises(StoppedError, match="stopped as asked"):
        train_until(disturbed, config, 2, 4, lambda ranks: ranks[1].send_signal(signal.SIGUSR1))
    with pytest.raises(StoppedError, match="stopped as asked"):
        train_until(disturbed, config, 3, 5, lambda ranks: "stop")
    assert ranks_of(disturbed) == {}
    train_here(disturbed, config, 4)
    assert result_of(disturbed) == result_of(paths)
    assert read_outcome(disturbed.fold_outcome(0), TrainingSummary).training.inexact_because == ()
    log = (disturbed.logs / f"{STAGE}_fold_0_ranks.log").read_text()
    assert "[rank 0] ERROR: the other ranks were lost" in log


SEES = """
import hashlib, os
from fvc_lib.detectors.own.frame_cnn import FrameCnn


class Net(FrameCnn):
    \"\"\"Writes down which clips its process trains on.\"\"\"

    def forward(self, frames):
        if self.training:
            with open(os.environ["SEEN"] + os.environ.get("RANK", "0"), "a") as seen:
                seen.writelines(hashlib.sha256(clip.numpy().tobytes()).hexdigest() + "\\n" for clip in frames)
        return super().forward(frames)
"""


@pytest.mark.long
def test_each_sample_of_shards_comes_once_an_epoch_over_two_ranks_with_two_loaders_each(
    two_ranks, tmp_path, monkeypatch
):
    """The network itself says what it sees. The same bits with and without loaders; those of one process, rounded."""
    (tmp_path / "sees.py").write_text(SEES)
    tiny = two_ranks.with_config(
        clip_source="shards", model=f"{tmp_path / 'sees.py'}:Net", early_stopping_epochs=0, epochs=3,
        shuffled_label_control=False,
    )  # fmt: skip
    write_shards(tiny.store, read_table(tiny.paths.augmented_metadata, AUGMENTED), shard_bytes=60_000)
    weights, tables = {}, {}
    for size, workers in ((2, 2), (2, 0), (1, 2)):
        paths = elsewhere(tiny, tmp_path / f"{size}_{workers}" / "run_1")
        monkeypatch.setenv("SEEN", str(tmp_path / f"seen_{size}_{workers}_"))
        config = tiny.with_config(num_ranks=size, num_workers=workers).config
        outcome = train_fold(paths, config, 0, metric_log=NoMetrics())
        seen = [path.read_text().split() for path in sorted(tmp_path.glob(f"seen_{size}_{workers}_*"))]
        assert len(seen) == size
        num_clips = outcome.num_train * (1 + config.augmentations_per_video)
        steps = [len(batch) for batch in effective_batches(np.arange(num_clips), config.effective_batch_size)]
        for rank, its in enumerate(seen):
            assert len(its) == 3 * sum(len(share(list(range(step)), rank, size)) for step in steps)
        epochs = [
            {clip for its in seen for clip in its[epoch * len(its) // 3 : (epoch + 1) * len(its) // 3]}
            for epoch in range(3)
        ]
        assert [len(came) for came in epochs] == [num_clips] * 3  # and so each clip once an epoch
        assert len(set.union(*epochs)) == num_clips
        weights[size, workers] = (paths.fold_checkpoints(0) / BEST).read_bytes()
        tables[size, workers] = predictions(paths)
    assert weights[2, 2] == weights[2, 0]
    assert tables[2, 2].equals(tables[2, 0])
    for name in set(ROUNDED) - {"control_score"}:
        assert (tables[2, 2][name] - tables[1, 2][name]).abs().max() < 1e-5


@pytest.mark.long
def test_a_rank_s_data_error_comes_out_as_one(two_ranks):
    two_ranks.store.clip_path("video00000", 0).unlink()
    with pytest.raises(DataError, match="are gone, the first: video00000") as caught:
        train_fold(two_ranks.paths, two_ranks.config, 0, metric_log=NoMetrics())
    assert caught.value.exit_code == 3
