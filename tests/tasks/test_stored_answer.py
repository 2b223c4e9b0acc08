"""Networks whose code has changed since they were trained: those that say the same go on, others are refused."""

import json
import logging

import numpy as np
import pytest
import torch
from torch import nn

from fvc_lib import load_detector
from fvc_lib.engine.training_state import TrainingRecord
from fvc_lib.services.errors import UsageError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.tasks.recipe import read_outcome
from fvc_lib.tasks.stored_answer import (
    TOLERANCE,
    Question,
    StoredAnswer,
    answer_to,
    drawn_pixels,
    mixed_rows,
    still_says,
)
from fvc_lib.tasks.video.verdicts.bundle import Standing, write_bundle
from fvc_lib.tasks.video.verdicts.scoring import RunNetworks
from tests.kits.scored_run import trained_run

OWN_NETWORK = '''
import torch

class MyNet(torch.nn.Module):
    num_frames, side = 4, 24

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(3, 1)

    def forward(self, frames):
        """Light of each colour."""
        light = frames.float().mean((1, 3, 4)) / 255
        return self.line(light).squeeze(1)
'''
HARMLESS = OWN_NETWORK.replace("Light of each colour.", "The mean of each colour.").replace("light", "colour")
ANOTHER = OWN_NETWORK.replace(".mean((1, 3, 4))", ".amax((1, 3, 4))")
LARGER = OWN_NETWORK.replace("Linear(3, 1)", "Linear(3, 2)").replace("squeeze(1)", "sum(1)")
CHANGED = "the code of .*MyNet is not what it was when fold 0 was trained"


@pytest.fixture
def run(tmp_path) -> RunPaths:
    (tmp_path / "my_net.py").write_text(OWN_NETWORK)
    return trained_run(tmp_path, f"{tmp_path}/my_net.py:MyNet")


def rewritten(run: RunPaths, code: str) -> RunNetworks:
    (run.root.parents[2] / "my_net.py").write_text(code)
    return RunNetworks(run)


def without_answers(run: RunPaths) -> None:
    """As earlier versions wrote it."""
    for fold in range(2):
        path = run.fold_outcome(fold)
        path.write_text(json.dumps({**json.loads(path.read_text()), "answer": None}))


def test_a_change_that_changes_no_output_is_loaded_with_one_warning(run, caplog):
    before = RunNetworks(run)
    clips = drawn_pixels(4, 24).numpy()[:, None]
    wanted = [before.logits(fold, clips).tolist() for fold in range(2)]
    assert before.remarks == []
    after = rewritten(run, HARMLESS)
    with caplog.at_level(logging.WARNING):
        assert [after.logits(fold, clips).tolist() for fold in range(2)] == wanted
    (told,) = after.remarks
    assert "it says what it said then" in told
    assert [each.message for each in caplog.records].count(told) == 1


@pytest.mark.parametrize(
    ("code", "why"), [(ANOTHER, r"it says something else: of a generated sample .* where it said"), (LARGER, "")]
)
def test_a_changed_layer_is_refused_with_both_numbers(run, code, why):
    with pytest.raises(UsageError, match=f"{CHANGED}.*{why}.*Bring that code back, or train anew"):
        rewritten(run, code).check()


def test_a_run_without_a_stored_answer_is_refused_whatever_changed(run):
    without_answers(run)
    RunNetworks(run).check()
    with pytest.raises(UsageError, match=f"{CHANGED}, and it has no stored answer.*Bring that code back"):
        rewritten(run, HARMLESS).check()


def test_a_bundle_keeps_the_answers_and_makes_those_that_an_old_run_lacks(run, tmp_path):
    without_answers(run)
    write_bundle(run, tmp_path / "bundle", Standing(standing="", sentences=[], scores=[]), "card")
    mine = tmp_path / "bundle" / "network" / "my_net.py"
    assert load_detector(tmp_path / "bundle", allow_code=True).networks.folds[1].answer is not None
    from tests.tasks.test_bundle import sealed

    mine.write_text(HARMLESS)
    detector = load_detector(sealed(tmp_path / "bundle"), allow_code=True)
    video = next((tmp_path / "corpus").rglob("*.mp4"))
    assert detector.predict(video, workers=1)[0].score is not None
    detector.networks.check()
    assert len(detector.remarks) == 1
    mine.write_text(ANOTHER)
    with pytest.raises(UsageError, match="says something else"):
        load_detector(sealed(tmp_path / "bundle"), allow_code=True).networks.check()


@pytest.mark.parametrize("model", ["forensic_logistic", "forensic_svm"])
def test_models_on_features_store_an_answer_that_their_loaded_arrays_give_again(tmp_path, model):
    run = trained_run(tmp_path, model, families="noise_residual", scale=4)
    networks = RunNetworks(run)
    for fold in range(2):
        stored = networks.folds[fold].answer
        assert stored == networks.fitted(fold).answer(stored.rows)
        assert len(set(stored.values)) > 2


def test_a_finished_training_stores_what_its_best_weights_say(run):
    outcome = read_outcome(run.fold_outcome(0), TrainingRecord)
    networks = RunNetworks(run)
    network = networks.network(0)
    with torch.inference_mode():
        said = network(drawn_pixels(4, 24))
    assert outcome.answer.values == pytest.approx(said.tolist(), abs=1e-5)


def test_generated_samples_are_the_same_everywhere_and_not_flat():
    pixels = drawn_pixels(6, 32)
    assert pixels.shape == (2, 6, 3, 32, 32)
    assert answer_to({"frames": pixels}, lambda _: torch.zeros(1)).question == (
        "fd99646dfffbc3480ba0ac5434002b8ede494eb733f09c461f41c1c4599b23e8"
    )
    assert float(pixels.float().std()) > 40
    assert not torch.equal(pixels[0, 0], pixels[0, 5])


def test_rows_of_features_lie_between_those_of_the_training_part_and_some_lack_what_some_lack():
    values = np.random.default_rng(0).normal(size=(50, 40)) * 10.0 ** np.arange(-20, 20)
    values[::2, 7], values[:, 9] = np.nan, np.nan
    rows = np.array(mixed_rows(values), np.float64)
    assert rows.shape == (16, 40)
    assert set(np.flatnonzero(np.isnan(rows).any(0))) <= {7, 9}
    assert np.isnan(rows[:, 7]).any()
    known = [column for column in range(40) if column != 9]
    assert (np.nanmin(rows[:, known], 0) >= np.nanmin(values[:, known], 0)).all()
    assert (np.nanmax(rows[:, known], 0) <= np.nanmax(values[:, known], 0)).all()


def test_what_is_within_the_tolerance_agrees_and_what_is_beyond_does_not():
    question = Question({"frames": drawn_pixels(1, 8)}, lambda network, sample: network(sample["frames"]))

    class Says(nn.Module):
        def __init__(self, number: float) -> None:
            super().__init__()
            self.number = number

        def forward(self, frames):
            return torch.full((1, 2), self.number, dtype=torch.float64)

    told = {"code": "Says", "of": "run_1", "remedy": "Train anew."}
    for size in (0.5, 2000.0):
        stored = question.answer(Says(size))
        step = TOLERANCE * max(1, size)
        assert still_says(stored, lambda size=size, step=step: question.answer(Says(size + 0.9 * step)), **told)
        with pytest.raises(UsageError, match="says something else"):
            still_says(stored, lambda size=size, step=step: question.answer(Says(size - 1.1 * step)), **told)
    with pytest.raises(UsageError, match="cannot be asked what it was asked then"):
        still_says(stored, lambda: None, **told)
    fewer = StoredAnswer(question=stored.question, values=stored.values[:2])
    with pytest.raises(UsageError, match="gives 2 numbers where it gave 4"):
        still_says(stored, lambda: fewer, **told)
    assert question.answer(Says(float("nan"))) is None


def test_a_network_that_cannot_be_asked_does_not_fail_its_training(caplog):
    def broken():
        raise RuntimeError("no such device")

    question = Question({"frames": drawn_pixels(1, 8)}, lambda network, sample: network(sample["frames"]))
    assert question.answer_of_trained(broken, {}, "fold 0") is None
    assert "no such device" in caplog.text
