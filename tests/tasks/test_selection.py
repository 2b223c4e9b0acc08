import json
import logging
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from fvc_lib.engine.training_state import EpochRecord
from fvc_lib.execution.plan.fingerprint import set_aside
from fvc_lib.execution.plan.stages import Task, stage_named
from fvc_lib.metrics.calibration import fit_temperature, probabilities
from fvc_lib.metrics.classification import balanced_accuracy, best_threshold
from fvc_lib.metrics.operating_points import operating_point
from fvc_lib.services.config import RunConfig
from fvc_lib.services.config_fields import known_operating_point
from fvc_lib.services.errors import UsageError
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.tasks.video.results import confusion_table, operating_sentence
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


def test_a_share_of_false_alarms_and_costs_move_the_threshold_and_too_few_reals_are_told():
    lenient, strict = (
        select(HISTORY, 2, LABELS, LOGITS, num_groups=12, point=point) for point in ("fpr=0.1", "fpr=0.01")
    )
    scores = probabilities(LOGITS, lenient.temperature)
    assert (scores[LABELS == 0] >= lenient.threshold).sum() == 3
    assert (scores[LABELS == 0] >= strict.threshold).sum() == 0
    assert (lenient.is_resolved, strict.is_resolved) == (True, False)
    assert strict.table()["by"][2] == "at most 1 % of the reals called fake, which 30 reals cannot resolve: none was"
    assert select(HISTORY, 2, LABELS, LOGITS, num_groups=12, point="cost=5:1").threshold > chosen().threshold
    told = operating_sentence(
        pl.DataFrame({"label": ["real"] * 50}), [recorded(operating_point="fpr=0.01"), recorded()]
    )
    assert told.startswith("What the thresholds were chosen for is not recorded, or differs")
    told = operating_sentence(pl.DataFrame({"label": ["real"] * 50}), [recorded(operating_point="fpr=0.01")])
    assert "In 1 of 1 folds that part has too few reals to resolve it (the least 30)" in told
    assert "Nor can the 50 reals that were tested" in told


def test_scores_of_one_above_which_no_threshold_lies_are_told_where_the_operating_point_is():
    logits = np.where(np.arange(LABELS.size) % 3 == 0, 1e4, LOGITS)  # ten reals and ten fakes, sure of being fake
    found = select(HISTORY, 2, LABELS, logits, num_groups=12, point="fpr=0.1")
    assert (found.threshold, found.num_real_at_one) == (1.0, 10)
    aim = "at most 10 % of the reals called fake, which is not kept: 10 reals with a score of 1 are called fake"
    assert found.table()["by"][2] == aim
    reals = pl.DataFrame({"label": ["real"] * 50})
    told = operating_sentence(reals, [RecordedSelection(found, "c", "w"), recorded(operating_point="fpr=0.1")])
    assert "In 1 of 2 folds the threshold is 1: only a score of 1 itself is called fake, and 10 reals" in told
    fine = operating_sentence(reals, [recorded(operating_point="fpr=0.1", threshold=1.0)])
    assert fine.endswith("the threshold is 1: only a score of 1 itself is called fake.")


def test_a_record_of_another_operating_point_is_not_taken_over(tmp_path):
    record_selection(tmp_path, recorded())
    kept = record_selection(tmp_path, recorded(operating_point="fpr=0.1", threshold=0.9))
    assert (kept.selection.threshold, kept.earlier) == (0.9, 1)


@pytest.mark.parametrize(
    "text",
    ["best", "fpr=.01", "FPR = 0.05", "cost=5:1", "fpr=1", "fpr=0", "cost=0:1", "fpr", "0.5", "5:1", "fpr=1e-05"],
)
def test_configuration_and_metrics_read_the_same_operating_points(text):
    try:
        read = known_operating_point(text)
    except ValueError:
        with pytest.raises(ValueError, match="operating point: got"):
            operating_point(text)
    else:
        assert operating_point(read) == operating_point(text)


def test_the_confusion_and_its_shares_are_scikit_learns(tables):
    from sklearn.metrics import confusion_matrix, precision_score, recall_score

    folds = tables.folds()
    truth = (folds["label"] == "fake").to_numpy().astype(int)
    scores = np.clip(truth * 0.3 + np.random.default_rng(1).uniform(0, 0.7, truth.size), 0.01, 0.99)
    predictions = tables.predictions(folds, scores, threshold_of_fold={0: 0.4, 1: 0.6})
    called = (scores >= predictions["threshold"].to_numpy()).astype(int)
    fakes, reals, precision = confusion_table(predictions, RunConfig(bootstrap_replicates=200)).rows()
    (tn, fp), (fn, tp) = confusion_matrix(truth, called)
    assert (fakes[1:3], reals[1:3], precision[1]) == ((tp, fn), (fp, tn), tp + fp)
    assert fakes[3] == pytest.approx(recall_score(truth, called), abs=1e-12)
    assert reals[3] == pytest.approx(fp / (fp + tn), abs=1e-12)
    assert precision[3] == pytest.approx(precision_score(truth, called), abs=1e-12)
    assert all(low <= share <= high for *_, share, low, high, _ in (fakes, reals, precision))
    assert (fakes[-1], reals[-1], precision[-1]) == (10, 10, 20)


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
    assert SELECTION in caplog.text


@pytest.mark.parametrize("content", ["{", "", "[]", '{"selection": {}, "clips": "c"}'])
def test_a_record_that_is_damaged_is_made_again_and_counts_as_unknown_from_then_on(tmp_path, caplog, content):
    (tmp_path / SELECTION).write_text(content)
    with caplog.at_level(logging.WARNING):
        made = record_selection(tmp_path, recorded())
    assert (made.openings, made.is_complete) == (2, False)
    assert SELECTION in caplog.text
    assert (tmp_path / "selection_damaged.json").read_text() == content
    again = record_selection(tmp_path, recorded())  # by the next attempt
    assert (again.openings, again.is_complete) == (3, False)


def test_a_replaced_training_with_a_damaged_record_is_not_taken_for_one_that_opened_nothing(tmp_path, caplog):
    run = RunPaths(tmp_path / "demo" / "run_a")
    run.fold_checkpoints(1).mkdir(parents=True)
    (run.fold_checkpoints(1) / SELECTION).write_text("{")
    set_aside(run, [Task(stage_named("04_fold_training"), 1)])
    run.fold_checkpoints(1).mkdir(parents=True)
    record_selection(run.fold_checkpoints(1), recorded())
    with caplog.at_level(logging.WARNING):
        assert earlier_openings(run, 2) == EarlierOpenings(unknown=1)
    assert SELECTION in caplog.text


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


def test_an_operating_point_reads_what_it_writes_and_a_wrong_one_is_told_how_to_be_written():
    small = operating_point("fpr=0.00001")
    assert operating_point(str(small)) == small
    assert known_operating_point(str(small)) == str(small)
    with pytest.raises(UsageError, match=r"got 'fpr=1', wanted best, fpr=SHARE inside .* such as cost=5:1\.$"):
        resolve_config({"operating_point": "fpr=1"}, environ={})
