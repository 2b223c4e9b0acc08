"""One training on one split: what it leaves, that it goes on, and that ranks give what one process gives."""

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from fvc_lib.engine.random_state import forked_random_state, stable_seed
from fvc_lib.engine.task import LossSum, Sample, SampleColumns
from fvc_lib.engine.training_state import EpochRecord, TrainingRecord
from fvc_lib.services.checkpoint_files import CheckpointMismatchError, weights_digest
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import StoppedError, UsageError, command_text
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.tasks import shared_training
from fvc_lib.tasks.shared_training import (
    Finished,
    Network,
    Training,
    changed_functions,
    functions_of,
    outcome_from_json,
    outcome_to_json,
    own_code,
    read_outcome,
    settings_of,
)
from tests.kits.engine_kit import stop_after
from tests.kits.rank_kit import run_ranks
from tests.kits.training import ListLog

STAGE = "10_image_recognition"


class Line:
    """Points of a line, ``y = 3 x``."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        x = torch.tensor([index / self.count])
        return Sample(f"point{index}", {"x": x, "y": 3 * x})


class Points(SampleColumns):
    """Predictions, in order."""

    def update(self, outputs, batch):
        self.add(batch.sample_ids, {"y": outputs["y"]})

    def compute(self):
        return {"num_points": float(len(self.sample_ids))}

    @property
    def found(self) -> list[float]:
        return self.column("y").flatten().tolist() if "y" in self else []


class Straight(nn.Linear):
    """A line."""

    def forward(self, x):
        return super().forward(x)


class Steep(nn.Linear):
    """A line of twice the slope, with weights of the same names and shapes."""

    def forward(self, x):
        return super().forward(2 * x)


@dataclass(frozen=True)
class LineTask:
    """Linear regression."""

    network: type[nn.Linear] = Straight
    training_data = Line(12)
    validation_data = Line(5)

    def build_model(self):
        return self.network(1, 1)

    def forward(self, model, batch):
        return {"y": model(batch.tensors["x"])}

    def loss(self, outputs, batch):
        return LossSum((outputs["y"] - batch.tensors["y"]).square().sum(), torch.tensor(float(len(batch))))

    def new_accumulator(self):
        return Points()


SIZES = {"num_train": 12, "num_validation": 5, "num_test": 7}


def config_of(folder: Path, **values: Any) -> RunConfig:
    asked = {"task": "image", "epochs": 3, "effective_batch_size": 4, "learning_rate": 0.1, "memory_preflight": False}
    return resolve_config({**asked, "runs_dir": str(folder), "device": "cpu", **values}, environ={})


def train(root: Path, config: RunConfig, **arguments: Any):
    """The outcome, the predictions of every call of ``write``, and the metric log."""
    paths, log, written, points = RunPaths(root), ListLog(), [], Points()

    def finish(trained):
        trained[0].predict(Line(7), points)
        return Finished({"": TrainingRecord(**trained[0].record())}, lambda: written.append(points.found))

    bound = ("epochs", "effective_batch_size")
    task = LineTask(arguments.pop("network", Straight))
    training = Training(
        stage=STAGE, model_name="linear", settings=settings_of(config, 5, 2), networks=[Network(task, "line")],
        parameters={name: getattr(config, name) for name in bound}, sizes=SIZES, finish=finish,
        outputs=arguments.pop("outputs", ()),
    )  # fmt: skip
    outcome = shared_training.train(
        STAGE, None, paths, config, lambda ranks: training, TrainingRecord, metric_log=log, **arguments
    )
    return outcome, points.found, written


def train_on_rank(ranks, root: Path, config: RunConfig, found: Path) -> None:
    outcome, points, written = train(root, config, ranks=ranks)
    torch.save([outcome.training.best_epoch, points, len(written)], found / str(ranks.rank))


def test_it_leaves_an_outcome_after_what_the_caller_wrote_with_the_network_and_its_weights(tmp_path):
    outcome, points, written = train(tmp_path / "run", config_of(tmp_path))
    assert (written, len(points)) == ([points], 7)
    assert read_outcome(RunPaths(tmp_path / "run").stage_outcome(STAGE), TrainingRecord) == outcome
    assert (outcome.model, outcome.num_parameters, outcome.num_test) == ("linear", 2, 7)
    assert outcome.training.steps == 9
    assert outcome.training.claim().startswith("the same command gives the same bits again")
    network = outcome.network
    assert network.name.endswith("test_training_of_all_tasks.Straight")
    assert (Path(network.file), network.num_parameters) == (Path(__file__), 2)
    best = safetensors.torch.load_file(tmp_path / "run" / "checkpoints" / STAGE / "best_model.safetensors")
    assert outcome.training.best_weights == weights_digest(best)
    with forked_random_state(stable_seed("engine", 5), torch.device("cpu")):
        assert outcome.training.initial_weights == weights_digest(Straight(1, 1).state_dict())
    assert "linear (Straight), 2 parameters" in outcome.sentence()
    # An epoch that was not finite can be read back.
    history = (
        EpochRecord(1, 0.1, math.nan, {"loss": math.inf, "roc_auc": math.nan}),
        EpochRecord(2, 0.1, 0.5, {"loss": 0.4}),
    )
    text = outcome_to_json(replace(outcome, training=replace(outcome.training, history=history)))
    assert '"NaN"' in text
    first, second = outcome_from_json(text, TrainingRecord).training.history
    assert all(map(math.isnan, (first.train_loss, first.validation["roc_auc"])))
    assert (first.validation["loss"], second) == (math.inf, history[1])


def test_stopped_anywhere_it_goes_on_to_the_same_bits(tmp_path):
    config = config_of(tmp_path)
    _, straight, _ = train(tmp_path / "straight", config)
    for step in (1, 4):
        with pytest.raises(StoppedError):
            train(tmp_path / str(step), config, stop=stop_after(step))
        _, resumed, _ = train(tmp_path / str(step), config)
        assert resumed == straight
    again, scored, written = train(tmp_path / "straight", config)
    assert (again.training.steps, scored, written) == (9, [], [])  # nothing is trained or scored twice
    assert "nothing was trained now" in again.sentence()
    again, scored, _ = train(tmp_path / "straight", config, outputs=[tmp_path / "a table that is gone"])
    assert (again.training.steps, scored) == (9, straight)


@pytest.mark.parametrize("steps", [1000, 4])
def test_a_training_of_another_network_is_neither_returned_nor_gone_on_with(tmp_path, monkeypatch, steps):
    config = config_of(tmp_path)
    with pytest.raises(StoppedError) if steps < 1000 else nullcontext():
        train(tmp_path / "run", config, stop=stop_after(steps))
    with pytest.raises(CheckpointMismatchError, match=r"is of the network .*Straight in .*Steep in ") as refused:
        train(tmp_path / "run", config, network=Steep)
    assert str(refused.value).endswith(command_text("--force", "10", "--resume", tmp_path / "run"))
    with monkeypatch.context() as patched:
        patched.setattr(Straight, "forward", lambda self, x: nn.Linear.forward(self, 3 * x))
        with pytest.raises(CheckpointMismatchError, match="its code has changed"):
            train(tmp_path / "run", config)
    outcome = train(tmp_path / "run", config)[0]
    assert (outcome.training.steps, bool(outcome.train_anew)) == (9, steps == 1000)


def test_a_docstring_changes_no_code_and_changed_functions_are_named():
    def forward(self, x):
        """Say something else."""
        return super().forward(x)

    class Shown(nn.Linear):
        pass

    digests = []
    for function in (Straight.forward, forward, Steep.forward):
        Shown.forward = function
        digests.append(functions_of(Shown(1, 1)))
    assert digests[0] == digests[1]
    assert own_code(digests[0])
    assert changed_functions(digests[0], digests[2]).endswith("Shown.forward")
    assert changed_functions({}, digests[2]) == ""
    (name,) = digests[0]
    assert own_code({f"fvc_lib.{name}": "1"}) == ""


def test_a_rank_that_would_train_another_network_than_who_started_it_refuses(tmp_path):
    config = config_of(tmp_path)
    own, other = (shared_training.TrainedClass.of(LineTask(each)).identity for each in (Straight, Steep))
    with pytest.raises(UsageError, match=r"would train .*Straight.*Steep.*num_ranks 1"):
        train(tmp_path / "run", config, begun_with=other)
    assert train(tmp_path / "run", config, begun_with=own)[0].training.steps == 9


def test_every_rank_has_all_predictions_and_one_writes(tmp_path):
    config = config_of(tmp_path)
    _, alone, _ = train(tmp_path / "alone", config)
    ends = run_ranks(2, train_on_rank, tmp_path / "run", config, tmp_path)
    assert [code for code, _ in ends] == [0, 0], ends
    leader, other = (torch.load(tmp_path / str(rank), weights_only=True) for rank in (0, 1))
    assert (leader[2], other[2]) == (1, 0)
    assert leader[:2] == other[:2]
    assert leader[1] == pytest.approx(alone, abs=1e-6)
    outcome = read_outcome(RunPaths(tmp_path / "run").stage_outcome(STAGE), TrainingRecord)
    assert (outcome.num_train, outcome.num_ranks) == (12, 2)
