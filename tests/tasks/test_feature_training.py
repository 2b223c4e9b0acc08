"""One outer fold of a model on features: inner groups choose, the outer fold stays sealed, controls train alike."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from fvc_lib.detectors import classical
from fvc_lib.metrics.classification import roc_auc
from fvc_lib.services.checkpoint_files import BEST, load_weights
from fvc_lib.services.errors import DataError, LeakageError, StoppedError, UsageError
from fvc_lib.services.tables import FEATURES, FOLDS, GROUP_LINKS, INDEX, PREDICTIONS, frame_of, read_table, write_table
from fvc_lib.tasks.leakage_audit import leakage_audit
from fvc_lib.tasks.recipe import read_outcome
from fvc_lib.tasks.video.classical import training as feature_training
from fvc_lib.tasks.video.classical.inputs import read_feature_fold
from fvc_lib.tasks.video.controls import auc_within_folds, fake_labels, split_by_row
from fvc_lib.tasks.video.results import check_predictions
from fvc_lib.tasks.video.selection import read_selection
from fvc_lib.tasks.video.summary import TrainingSummary
from fvc_lib.tasks.video.training import train_fold
from tests.kits.feature_kit import feature_run
from tests.kits.training import ListLog

MODELS = ("forensic_logistic", "forensic_svm", "forensic_boosting")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of logistic regression with all folds trained, and its log and outcomes."""
    tiny, log = feature_run(tmp_path_factory.mktemp("features")), ListLog()
    outcomes = [train_fold(tiny.paths, tiny.config, fold, metric_log=log) for fold in range(3)]
    return tiny, log, outcomes


def trained(tiny) -> pl.DataFrame:
    for fold in range(3):
        train_fold(tiny.paths, tiny.config, fold, metric_log=ListLog())
    return predictions_of(tiny)


def predictions_of(tiny) -> pl.DataFrame:
    return pl.concat([read_table(tiny.paths.predictions(fold), PREDICTIONS) for fold in range(3)])


def test_folds_are_learned_and_shuffled_labels_are_not(finished):
    tiny, _, outcomes = finished
    found = predictions_of(tiny)
    assert roc_auc(fake_labels(found), found["score"].to_numpy()) > 0.9
    control = found["control_label"].to_numpy() == "fake"
    assert 0.2 < roc_auc(control.astype(int), found["control_score"].to_numpy()) < 0.8
    folds = pl.read_parquet(tiny.paths.folds)
    check_predictions(folds, found)
    assert all(each.control is not None and each.sources is None for each in outcomes)


def test_the_record_says_what_a_model_without_steps_has_and_nothing_else(finished):
    tiny, log, outcomes = finished
    outcome = outcomes[0]
    assert read_outcome(tiny.paths.fold_outcome(0), TrainingSummary) == outcome
    training = outcome.training
    assert (training.history, training.steps, training.best_epoch, outcome.predicted_peak_bytes) == ((), 0, 0, None)
    assert outcome.device == "cpu"
    assert outcome.network.name.endswith("forensic_logistic")
    assert "features of sharpness, spectrum; fitted by scikit-learn" in outcome.sentence()
    chosen = training.selection
    assert chosen.settings in [each.settings for each in training.candidates]
    assert min(training.candidates, key=lambda each: each.inner_loss).settings == chosen.settings
    assert chosen.table()["chosen"].to_list() == ["settings", "temperature", "threshold"]
    assert training.best_sentence().count("penalty") == 1 + chosen.num_candidates == 6
    assert "scikit-learn" in training.claim()
    assert training.schedule() == "all"
    assert len(log.values("candidates", "inner_loss")) == 15
    assert len(log.values("control", "candidates_inner_loss")) == 15
    assert len(log.values("test", "roc_auc")) == 3
    assert set(training.seen) == set(read_table(tiny.paths.features, FEATURES).columns) - {
        "video_id", "group_id", "label",
    }  # fmt: skip


def test_what_was_fitted_lies_in_a_format_that_runs_no_code(finished):
    tiny, _, outcomes = finished
    for fold, outcome in enumerate(outcomes):
        folder = tiny.paths.fold_checkpoints(fold)
        assert {path.suffix for path in folder.rglob("*") if path.is_file()} <= {".safetensors", ".json"}
        assert load_weights(folder / BEST)["weight"].shape[0] >= len(outcome.training.seen)
        assert read_selection(folder).openings == 1


def test_a_finished_fold_is_told_and_not_fitted_again(finished, monkeypatch):
    tiny, _, outcomes = finished
    monkeypatch.setattr(feature_training._Training, "fit", lambda self, stop: pytest.fail("fitted again"))
    again = train_fold(tiny.paths, tiny.config, 1, metric_log=ListLog())
    assert again == outcomes[1]
    assert "nothing was trained now" in again.sentence()


@pytest.mark.parametrize("model", MODELS[1:])
def test_other_models_are_the_same_notebook_s_work(tmp_path, model):
    tiny = feature_run(tmp_path, model=model, shift=3.0, shuffled_label_control=False)
    outcome = train_fold(tiny.paths, tiny.config, 0, metric_log=ListLog())
    assert outcome.control is None
    found = read_table(tiny.paths.predictions(0), PREDICTIONS)
    assert roc_auc(fake_labels(found), found["score"].to_numpy()) > 0.85


def test_settings_are_chosen_on_inner_folds_of_whole_groups_without_validation_and_test(tmp_path, monkeypatch):
    """Videos of a group have nearly equal features, so the first column tells which groups a fit has seen."""
    tiny, seen, fit = feature_run(tmp_path, shuffled_label_control=False), [], classical.LOGISTIC.fit

    def watching(values, labels, weights, settings):
        seen.append({round(value, 1) for value in values[:, 0] if np.isfinite(value)})
        return fit(values, labels, weights, settings)

    model = replace(classical.LOGISTIC, candidates=({"penalty": 30.0},), fit=watching)
    monkeypatch.setattr(feature_training, "_model_of", lambda config: model)
    read = read_feature_fold(tiny.paths, tiny.config, 0)
    with pytest.raises(LeakageError, match="sealed"):
        list(read.clips.test)
    train_fold(tiny.paths, tiny.config, 0, metric_log=ListLog())
    *inner, whole = seen
    assert len(inner) == feature_training.INNER_FOLDS
    parts = (read.clips.train, read.clips.validation)
    train, validation = ({round(value, 1) for value in read.source.of(part)[:, 0]} for part in parts)
    assert whole <= train
    assert not whole & (validation - train)
    left_out = [whole - part for part in inner]
    assert all(left_out)
    assert set().union(*left_out) <= whole


def test_a_stopped_fold_starts_over_and_gives_the_same_bits(tmp_path, finished):
    tiny, answers = feature_run(tmp_path), iter([False, False, True])
    with pytest.raises(StoppedError):
        train_fold(tiny.paths, tiny.config, 0, metric_log=ListLog(), stop=lambda: next(answers))
    steps = []
    outcome = train_fold(tiny.paths, tiny.config, 0, metric_log=ListLog(), progress=lambda *at: steps.append(at))
    assert steps == [(0, 2), (1, 2), (2, 2)]
    same = finished[2][0].training
    assert (outcome.training.best_weights, outcome.training.candidates) == (same.best_weights, same.candidates)
    assert tiny.paths.predictions(0).read_bytes() == finished[0].paths.predictions(0).read_bytes()


def test_videos_that_could_not_be_measured_take_no_part_and_are_named(tmp_path):
    tiny = feature_run(tmp_path)
    table = read_table(tiny.paths.features, FEATURES)
    lost = table["video_id"][5]
    names = [name for name in table.columns if name not in ("video_id", "group_id", "label")]
    gone = pl.when(pl.col("video_id") == lost).then(None)
    write_table(
        table.with_columns(gone.otherwise(pl.col(name)).alias(name) for name in names), FEATURES, tiny.paths.features
    )
    outcome = train_fold(tiny.paths, tiny.config, 0, metric_log=ListLog())
    assert outcome.missing == (lost,)


@pytest.mark.parametrize(
    ("changes", "error", "told"),
    [
        ({"class_balance": "sampler"}, UsageError, "draws no batches"),
        ({"num_ranks": 2}, UsageError, "in one process"),
        ({"device": "cuda"}, UsageError, "on the CPU"),
        ({"crop": "face"}, UsageError, "neither clips nor a network"),
        ({"feature_families": "shapness"}, UsageError, "sharpness"),
        ({"feature_families": " "}, UsageError, "feature_families"),
    ],
)
def test_what_only_a_network_has_a_use_for_is_refused_in_words(finished, changes, error, told):
    tiny, _, _ = finished
    with pytest.raises(error, match=told):
        train_fold(tiny.paths, tiny.config.model_copy(update=changes), 0, metric_log=ListLog())


def test_a_family_that_was_not_measured_is_named_and_a_left_out_one_is_not_seen(tmp_path):
    tiny = feature_run(tmp_path)
    table = read_table(tiny.paths.features, FEATURES)
    write_table(table.drop([n for n in table.columns if n.startswith("spectrum_")]), FEATURES, tiny.paths.features)
    with pytest.raises(DataError, match="families spectrum"):
        train_fold(tiny.paths, tiny.config, 0, metric_log=ListLog())
    config = tiny.config.model_copy(update={"feature_families": "sharpness"})
    outcome = train_fold(tiny.paths, config, 0, metric_log=ListLog())
    assert {name.partition("_")[0] for name in outcome.training.seen} == {"sharpness"}


def test_shuffled_labels_score_chance_by_group_and_nine_tenths_by_row_of_copies(tmp_path, monkeypatch):
    """The honest negative: boosting recognises copies where a careless split lets it, and the audit shows both."""
    boosting = replace(classical.BOOSTING, candidates=({"rounds": 40.0, "leaves": 8.0},))
    monkeypatch.setattr(feature_training, "_model_of", lambda config: boosting)
    tiny = feature_run(
        tmp_path / "by_group", model="forensic_boosting", shift=0.0, num_groups=20, per_group=6, shuffle_labels=True,
        shuffled_label_control=False, real_source_control=False,
    )  # fmt: skip
    by_group = trained(tiny)
    folds = read_table(tiny.paths.folds, FOLDS)
    audit = leakage_audit(read_table(tiny.paths.index, INDEX), folds, by_group, frame_of([], GROUP_LINKS), tiny.config)
    claims = dict(audit.select("check", "number").iter_rows())
    assert 0.3 < claims["auc_by_group"] < 0.7
    assert claims["auc_claimed_by_row"] > 0.85

    careless = feature_run(tmp_path / "by_row", **tiny.config.model_dump(include={"model", "real_source_control"}))
    relabelled = folds.drop("label").join(by_group.select("video_id", "label"), on="video_id").select(folds.columns)
    by_row = split_by_row(relabelled, seed=0).with_columns(group_id=pl.col("video_id"))
    write_table(by_row, FOLDS, careless.paths.folds)
    for name in ("features", "index"):
        shutil.copy(getattr(tiny.paths, name), getattr(careless.paths, name))
    config = careless.config.model_copy(update={"shuffled_label_control": False})
    measured = trained(replace(careless, config=config))
    auc, _, _ = auc_within_folds(measured, "video_id", config).row()[:3]
    assert abs(auc - claims["auc_claimed_by_row"]) < 0.1
    assert auc > 0.85
