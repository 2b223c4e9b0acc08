"""One training on one split: what it leaves, that it goes on, and that ranks give what one process gives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fvc_lib.engine.task import LossSum, Sample
from fvc_lib.services.checkpoints import CheckpointMismatchError
from fvc_lib.services.config import RunConfig, resolve_config
from fvc_lib.services.errors import StoppedError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.tasks.training import SplitTraining, read_stage_outcome, split_settings, trained_split
from tests.kits.rank_kit import run_ranks
from tests.kits.training import ListLog

STAGE = "10_image_recognition"


class Line:
    """Points of a line, ``y = 3 x``."""

    classes = None

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        x = torch.tensor([index / self.count])
        return Sample(f"point{index}", {"x": x, "y": 3 * x})


class Points:
    """Predictions, in order."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def update(self, outputs, batch):
        self.found.extend(outputs["y"].flatten().tolist())

    def compute(self):
        return {"num_points": float(len(self.found))}

    def to_document(self):
        return {"found": self.found}

    def add_document(self, document):
        self.found.extend(document["found"])


@dataclass(frozen=True)
class LineTask:
    """Linear regression."""

    training_data = Line(12)
    validation_data = Line(5)

    def build_model(self):
        return nn.Linear(1, 1)

    def forward(self, model, batch):
        return {"y": model(batch.tensors["x"])}

    def loss(self, outputs, batch):
        return LossSum((outputs["y"] - batch.tensors["y"]).square().sum(), torch.tensor(float(len(batch))))

    def new_accumulator(self):
        return Points()


def config_of(folder: Path, **values: Any) -> RunConfig:
    asked = {"task": "image", "epochs": 3, "effective_batch_size": 4, "learning_rate": 0.1, "memory_preflight": False}
    return resolve_config({**asked, "runs_dir": str(folder), "device": "cpu", **values}, environ={})


def training_of(config: RunConfig) -> SplitTraining:
    settings = split_settings(config, STAGE, 2)
    return SplitTraining(STAGE, LineTask(), settings, config.training_values(), "the line", "linear")


def train(root: Path, config: RunConfig, **arguments: Any):
    """The outcome, the predictions of every call of ``write``, and the metric log."""
    paths, log, written = RunPaths(root), ListLog(), []
    with trained_split(paths, config, training_of(config), metric_log=log, **arguments) as trained:
        points = Points()
        trained.predict(Line(7), points)
        outcome = trained.finish(
            num_train=12, num_validation=5, num_test=7, write=lambda: written.append(list(points.found))
        )
    return outcome, points.found, written


def train_on_rank(ranks, root: Path, config: RunConfig, found: Path) -> None:
    outcome, points, written = train(root, config, ranks=ranks)
    torch.save([outcome.training.best_epoch, points, len(written)], found / str(ranks.rank))


def test_it_leaves_an_outcome_after_what_the_caller_wrote(tmp_path):
    outcome, points, written = train(tmp_path / "run", config_of(tmp_path))
    assert written == [points]
    assert len(points) == 7
    assert read_stage_outcome(RunPaths(tmp_path / "run").stage_outcome(STAGE)) == outcome
    assert (outcome.model, outcome.num_parameters, outcome.num_test) == ("linear", 2, 7)
    assert outcome.training.steps == 9
    assert outcome.training.claim().startswith("the same command gives the same bits again")


def test_stopped_anywhere_it_goes_on_to_the_same_bits(tmp_path):
    config = config_of(tmp_path)
    _, straight, _ = train(tmp_path / "straight", config)
    for step in (1, 4):
        asked = iter(range(1000))
        with pytest.raises(StoppedError):
            train(tmp_path / str(step), config, stop=lambda asked=asked, step=step: next(asked) >= step)
        _, resumed, _ = train(tmp_path / str(step), config)
        assert resumed == straight
    again, scored, _ = train(tmp_path / "straight", config)
    assert (again.training.steps, scored) == (9, straight)  # nothing is trained twice


def test_a_full_run_refuses_what_dev_mode_trained(tmp_path):
    train(tmp_path / "run", config_of(tmp_path, dev_samples_per_class=2))
    with pytest.raises(CheckpointMismatchError, match="dev_samples_per_class"):
        train(tmp_path / "run", config_of(tmp_path))


def test_every_rank_has_all_predictions_and_one_writes(tmp_path):
    config = config_of(tmp_path)
    _, alone, _ = train(tmp_path / "alone", config)
    ends = run_ranks(2, train_on_rank, tmp_path / "run", config, tmp_path)
    assert [code for code, _ in ends] == [0, 0], ends
    leader, other = (torch.load(tmp_path / str(rank), weights_only=True) for rank in (0, 1))
    assert (leader[2], other[2]) == (1, 0)
    assert leader[:2] == other[:2]
    assert leader[1] == pytest.approx(alone, abs=1e-6)
    assert replace(read_stage_outcome(RunPaths(tmp_path / "run").stage_outcome(STAGE)), num_ranks=1).num_train == 12
