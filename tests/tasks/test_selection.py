import json
import logging
from dataclasses import replace

import numpy as np
import pytest

from fvc_lib.engine.training_state import EpochRecord
from fvc_lib.execution.plan.fingerprint import set_aside
from fvc_lib.execution.plan.stages import Task, stage_named
from fvc_lib.metrics.calibration import fit_temperature, probabilities
from fvc_lib.metrics.classification import balanced_accuracy, best_threshold
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.tasks.video.selection import (
    SELECTION,
    EarlierOpenings,
    RecordedSelection,
    earlier_openings,
    record_selection,
    select,
)

GENERATOR = np.random.default_rng(4)
LABELS = np.repeat([0, 1], 30)
LOGITS = 6 * (LABELS - 0.4) + GENERATOR.normal(0, 4, LABELS.size)  # far too sure of itself
HISTORY = [EpochRecord(epoch, 0.1, 0.2, {"loss": loss}) for epoch, loss in ((1, 0.7), (2, 0.3), (3, 0.4))]


def chosen():
    return select(HISTORY, 2, LABELS, LOGITS, num_groups=12)


def recorded(weights="w", **changes):
    return RecordedSelection(replace(chosen(), **changes), clips="c", weights=weights)


def test_temperature_and_threshold_are_those_of_the_metrics_room_on_calibrated_scores():
    found = chosen()
    assert found.temperature == fit_temperature(LABELS, LOGITS) != 1
    scores = probabilities(LOGITS, found.temperature)
    assert found.threshold == best_threshold(LABELS, scores) != best_threshold(LABELS, probabilities(LOGITS, 1.0))
    assert found.balanced_accuracy == balanced_accuracy(LABELS, (scores >= found.threshold).astype(int))
    assert found.log_loss < found.log_loss_uncalibrated
    assert (found.best_epoch, found.num_epochs, found.validation_loss) == (2, 3, 0.3)
    assert (found.num_videos, found.num_groups, found.num_real, found.num_fake) == (60, 12, 30, 30)


def test_the_choice_does_not_depend_on_the_order_of_the_videos():
    order = GENERATOR.permutation(LABELS.size)
    assert select(HISTORY, 2, LABELS[order], LOGITS[order], num_groups=12).threshold == chosen().threshold
    assert select(HISTORY, 2, LABELS[order], LOGITS[order], num_groups=12).temperature == chosen().temperature


def test_what_was_added_to_the_logits_is_on_record():
    assert chosen().prior_logit == 0
    assert select(HISTORY, 2, LABELS, LOGITS, num_groups=12, prior_logit=1.4).prior_logit == 1.4


def test_one_class_of_validation_videos_chooses_nothing_and_says_so():
    found = select(HISTORY, 1, [1, 1], [0.5, 2.0], num_groups=1)
    assert (found.temperature, found.threshold, found.balanced_accuracy) == (1.0, 0.5, None)
    assert "undefined" in found.table()["reached"][2]


def test_what_an_attempt_recorded_the_next_one_takes_over(tmp_path):
    first = record_selection(tmp_path, recorded())
    assert first == recorded()
    again = record_selection(tmp_path, recorded(threshold=0.123))  # the same weights, rounded otherwise
    assert again.selection == first.selection
    assert (again.openings, again.earlier) == (2, 0)
    assert json.loads((tmp_path / SELECTION).read_text())["openings"] == 2


def test_other_weights_are_chosen_for_anew_and_it_is_said(tmp_path, caplog):
    record_selection(tmp_path, recorded())
    with caplog.at_level(logging.WARNING):
        again = record_selection(tmp_path, recorded("other", threshold=0.123))
    assert again.selection.threshold == 0.123
    assert (again.openings, again.earlier) == (2, 1)
    assert "opened before for a selection of other weights" in caplog.text
    assert "weights were lost" in again.sentence()


@pytest.mark.parametrize("content", ["{", "", "[]", '{"selection": {}, "clips": "c"}'])
def test_a_record_that_is_damaged_is_made_again_and_counts_as_unknown_from_then_on(tmp_path, caplog, content):
    (tmp_path / SELECTION).write_text(content)
    with caplog.at_level(logging.WARNING):
        made = record_selection(tmp_path, recorded())
    assert (made.openings, made.is_complete) == (2, False)
    assert "was damaged, so how often the outer fold was opened before" in caplog.text
    assert "had been opened before, for what is not known" in made.sentence()
    assert (tmp_path / "selection_damaged.json").read_text() == content
    again = record_selection(tmp_path, recorded())  # by the next attempt
    assert (again.openings, again.is_complete) == (3, False)


def test_a_record_of_before_this_was_counted_is_complete(tmp_path):
    record_selection(tmp_path, recorded())
    stored = json.loads((tmp_path / SELECTION).read_text())
    del stored["is_complete"]
    (tmp_path / SELECTION).write_text(json.dumps(stored))
    assert record_selection(tmp_path, recorded()).is_complete


def test_a_replaced_training_with_a_damaged_record_is_not_taken_for_one_that_opened_nothing(tmp_path, caplog):
    run = RunPaths(tmp_path / "demo" / "run_a")
    run.fold_checkpoints(1).mkdir(parents=True)
    (run.fold_checkpoints(1) / SELECTION).write_text("{")
    set_aside(run, [Task(stage_named("04_fold_training"), 1)])
    run.fold_checkpoints(1).mkdir(parents=True)
    record_selection(run.fold_checkpoints(1), recorded())
    with caplog.at_level(logging.WARNING):
        assert earlier_openings(run, 2) == EarlierOpenings(unknown=1)
    assert "whether this fold was opened by it is not known" in caplog.text


def test_a_training_that_was_replaced_stays_known_to_have_opened_its_outer_fold(tmp_path):
    """Repeating a training, on purpose or for other code, moves its record away with its weights."""
    run = RunPaths(tmp_path / "demo" / "run_a")
    for weights in ("first", "second", "second"):
        set_aside(run, [Task(stage_named("04_fold_training"), 1)])
        run.fold_checkpoints(1).mkdir(parents=True)
        assert record_selection(run.fold_checkpoints(1), recorded(weights)).openings == 1
    assert earlier_openings(run, 2) == EarlierOpenings(replaced=1)
    run.run_json.write_text(json.dumps({"forked_from": "run_<b>"}))
    assert earlier_openings(run, 1) == EarlierOpenings(forked_from="run_<b>")
    for foreign in ("[]", "{", '{"forked_from": 3}'):
        run.run_json.write_text(foreign)
        assert earlier_openings(run, 1) == EarlierOpenings()


def test_the_table_and_the_sentence_name_what_was_chosen_on_what():
    table = recorded().selection.table()
    assert table["chosen"].to_list() == ["epoch", "temperature", "threshold"]
    assert table["value"].to_list()[0] == "2"
    sentence = recorded().sentence()
    assert sentence.startswith("Chosen on 60 inner validation videos of 12 groups (30 real, 30 fake)")
    assert "opened once, after this was on the disk" in sentence
    assert "opened 2 times, each after" in replace(recorded(), openings=2).sentence()
