"""The choice of temperature and threshold on inner validation videos, and the record of it."""

import json
import logging
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from fvc_lib.execution.plan import set_aside
from fvc_lib.execution.stages import Task, stage_named
from fvc_lib.metrics.calibration import fit_temperature, probabilities
from fvc_lib.metrics.classification import balanced_accuracy, best_threshold
from fvc_lib.metrics.operating_points import operating_point
from fvc_lib.services.errors import UsageError
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.tasks.video.calibration import SELECTION, RecordedSelection, record_selection, select
from fvc_lib.tasks.video.data import ClipRow, FoldClips, SealedFold
from fvc_lib.tasks.video.results import chosen_table, earlier_openings, operating_sentence
from fvc_lib.tasks.video.verdicts.rule import at_prior

LABELS = np.repeat([0, 1], 30)
LOGITS = 6 * (LABELS - 0.4) + np.random.default_rng(4).normal(0, 4, LABELS.size)  # far too sure of itself
TESTED = pl.DataFrame({"label": "real", "fold": np.repeat([0, 1, 2], [20, 20, 10]), "group_id": "g", "score": 0.3})
TESTED = TESTED.with_columns(temperature=pl.lit(2.0), threshold=pl.lit(0.5))


def chosen(logits=LOGITS, fewest_groups=6, **options):
    given = {"fewest_groups": fewest_groups, "validation_loss": 0.3, "num_epochs": 3, "best_epoch": 2}
    return select(LABELS, logits, 12, **given, **options)


def recorded(weights="w", **changes):
    return RecordedSelection(replace(chosen(), **changes), clips="c", weights=weights)


def test_temperature_and_threshold_are_those_of_the_metrics_room_on_calibrated_scores():
    found = chosen()
    assert found.temperature == fit_temperature(LABELS, LOGITS) != 1
    scores = probabilities(LOGITS, found.temperature)
    assert found.threshold == best_threshold(LABELS, scores) != best_threshold(LABELS, probabilities(LOGITS, 1.0))
    assert found.balanced_accuracy == balanced_accuracy(LABELS, (scores >= found.threshold).astype(int))
    assert found.log_loss < found.log_loss_uncalibrated
    assert (found.num_videos, found.num_groups, found.num_real, found.num_fake) == (60, 12, 30, 30)
    one_class = select([1, 1], [0.5, 2.0], 1, fewest_groups=6, validation_loss=0.3)
    assert (one_class.temperature, one_class.threshold, one_class.balanced_accuracy) == (1.0, 0.5, None)


def test_with_fewer_than_five_groups_of_a_label_nothing_is_called_calibrated():
    few, enough = chosen(fewest_groups=4), chosen(fewest_groups=5)
    assert (few.temperature, few.threshold, few.base_rate) == (1.0, 0.5, None)
    assert (enough.temperature, enough.base_rate) == (fit_temperature(LABELS, LOGITS), 0.5)
    texts = [
        [
            *each.table()["by"][1:],
            recorded(**vars(each)).sentence(),
            operating_sentence(TESTED, [recorded(**vars(each))]),
        ]
        for each in (few, enough)
    ]
    assert [sum("calibrated" in text for text in some) for some in texts] == [4, 0]
    assert at_prior(np.zeros(2), [few.base_rate, enough.base_rate], 0.5) is None


def test_groups_of_a_label_are_counted_over_training_and_validation_videos_and_not_over_tested_ones():
    rows = [ClipRow(f"{label}{number}", 0, label, f"{label}{number // 2}") for label in (0, 1) for number in range(9)]
    clips = FoldClips(0, tuple(rows[:-2]), tuple(rows[-2:]), SealedFold("outer fold", rows, ""), (), "")
    assert clips.fewest_groups == 5
    assert replace(clips, validation=()).fewest_groups == 4


def test_an_operating_point_moves_the_threshold_and_reals_that_do_not_suffice_are_named():
    lenient, strict = (chosen(point=point) for point in ("fpr=0.1", "fpr=0.01"))
    scores = probabilities(LOGITS, lenient.temperature)
    assert [(scores[LABELS == 0] >= each.threshold).sum() for each in (lenient, strict)] == [3, 0]
    assert chosen(point="cost=5:1").threshold > chosen().threshold
    assert "is not recorded" in operating_sentence(TESTED, [None])
    of_strict = operating_sentence(TESTED, [recorded(operating_point="fpr=0.01")])
    assert "In 1 of 1 folds" in of_strict
    assert "The 50 reals that were tested" in of_strict


def test_the_table_of_choices_says_where_no_epoch_was_chosen_or_nothing_recorded():
    table = chosen_table(TESTED, [None, recorded(best_epoch=0), recorded()])
    known = table.select("num_test_videos", "epoch", "num_inner_groups").rows()
    assert known == [(20, None, None), (20, None, 12), (10, 2, 12)]


@pytest.mark.parametrize("text", ["fpr=1", "fpr=0", "cost=0:1", "fpr", "0.5", "5:1"])
def test_other_operating_points_are_refused_with_what_is_wanted(text):
    with pytest.raises(ValueError, match="operating point: got"):
        operating_point(text)
    with pytest.raises(UsageError, match=r"wanted best, fpr=SHARE"):
        resolve_config({"operating_point": text}, environ={})


def test_the_next_attempt_takes_over_a_record_of_the_same_weights_and_point_alone(tmp_path, caplog):
    first = record_selection(tmp_path, recorded())
    assert first == recorded()
    again = record_selection(tmp_path, recorded(threshold=0.123))  # the same weights, rounded otherwise
    assert again.selection == first.selection
    assert (again.openings, again.earlier) == (2, 0)
    assert json.loads((tmp_path / SELECTION).read_text())["openings"] == 2
    with caplog.at_level(logging.WARNING):
        other = record_selection(tmp_path, recorded("other", threshold=0.123))
    assert (other.selection.threshold, other.openings, other.earlier) == (0.123, 3, 1)
    assert SELECTION in caplog.text
    moved = record_selection(tmp_path, recorded("other", operating_point="fpr=0.1", threshold=0.9))
    assert (moved.selection.threshold, moved.earlier) == (0.9, 2)


@pytest.mark.parametrize("content", ["{", "", "[]", '{"selection": {}, "clips": "c"}'])
def test_a_damaged_record_is_made_again_and_counts_as_an_earlier_opening_from_then_on(tmp_path, caplog, content):
    (tmp_path / SELECTION).write_text(content)
    with caplog.at_level(logging.WARNING):
        made = [record_selection(tmp_path, recorded()) for _ in range(2)]
    assert [(each.openings, each.earlier) for each in made] == [(2, 1), (3, 1)]
    assert SELECTION in caplog.text


def test_a_replaced_training_stays_known_to_have_opened_its_outer_fold(tmp_path):
    """Repeating a training moves its record away with its weights."""
    run = RunPaths(tmp_path / "demo" / "run_a")

    def replaced_by(weights):
        set_aside(run, [Task(stage_named("04_fold_training"), 1)])
        run.fold_checkpoints(1).mkdir(parents=True)
        assert record_selection(run.fold_checkpoints(1), recorded(weights)).openings == 1

    def openings(num_folds):
        return earlier_openings(run.run_json, run.superseded, [run.fold_checkpoints(k) for k in range(num_folds)])

    for weights in ("first", "second", "second"):
        replaced_by(weights)
    assert openings(2) == (1, "")
    run.run_json.write_text(json.dumps({"forked_from": "run_<b>"}))
    assert openings(1) == (0, "run_<b>")
    (run.fold_checkpoints(1) / SELECTION).write_text("{")
    replaced_by("second")
    assert openings(2) == (2, "run_<b>")
