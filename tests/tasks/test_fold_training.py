import shutil

import polars as pl
import pytest

from fvc_lib.corpus.folds import TrainingRows
from fvc_lib.metrics.calibration import fit_temperature
from fvc_lib.services.checkpoint_files import BEST, CheckpointMismatchError, load_weights
from fvc_lib.services.errors import DataError, StoppedError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import FOLDS, PREDICTIONS, VALIDATION_PREDICTIONS, read_table
from fvc_lib.tasks import shared_training
from fvc_lib.tasks.shared_training import TrainedNetwork, read_outcome
from fvc_lib.tasks.video.controls import fake_labels
from fvc_lib.tasks.video.data import fold_clips
from fvc_lib.tasks.video.training import TrainingSummary, read_fold, train_fold
from tests.kits.engine_kit import stop_after
from tests.kits.training import ListLog, recorded_selection, tiny_training_in


def run(tiny, log, fold=0, **options):
    return train_fold(tiny.paths, tiny.config, fold, metric_log=log, **options)


def test_a_fold_is_learned_and_its_control_is_not(tiny_training, list_log):
    tiny = tiny_training.with_config(epochs=8)
    log = list_log()
    outcome = run(tiny, log)
    table = read_table(tiny.paths.predictions(0), PREDICTIONS)
    folds = read_table(tiny.paths.folds, FOLDS)
    assert table.select("video_id", "group_id", "label", "fold").equals(folds.filter(pl.col("fold") == 0))
    assert log.values("test", "roc_auc") == [1.0]
    assert table["threshold"].unique().to_list() == [outcome.training.selection.threshold]
    assert (table["control_label"] != table["label"]).any()
    assert log.values("control", "test_roc_auc")[0] < 1
    assert (outcome.num_train_samples, outcome.missing) == (2 * outcome.num_train, ())
    assert outcome.num_train + outcome.num_validation + outcome.num_test == folds.height
    losses = [record.validation["loss"] for record in outcome.training.history]
    assert outcome.training.selection.best_epoch == losses.index(min(losses)) + 1
    assert (
        load_weights(tiny.paths.fold_checkpoints(0) / BEST).keys()
        == load_weights(tiny.paths.fold_checkpoints(0).joinpath("control") / BEST).keys()
    )
    assert read_outcome(tiny.paths.fold_outcome(0), TrainingSummary) == outcome


@pytest.fixture(scope="module")
def finished(drawn_tiny_training, tmp_path_factory):
    """Fold 0, trained once: the run, its outcome, its log and what progress said; only looked at."""
    folder = tmp_path_factory.mktemp("finished") / "here"
    shutil.copytree(drawn_tiny_training, folder)
    tiny, log, seen = tiny_training_in(folder), ListLog(), []
    outcome = run(tiny, log, progress=lambda done, planned: seen.append((done, planned)))
    return tiny, outcome, log, seen


def test_a_finished_fold_is_not_trained_again(finished, list_log, monkeypatch):
    tiny, outcome, *_ = finished
    monkeypatch.setattr(shared_training, "Engine", lambda *_, **__: pytest.fail("it trains"))
    log = list_log()
    assert run(tiny, log) == outcome
    assert log.lines == []
    *_, seen = finished
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == seen[0][1]


def test_a_fold_stopped_in_model_and_control_goes_on_and_changes_nothing(tiny_training, list_log, finished):
    log = list_log()
    for after in (0, 2, 1, 16, 2):  # the first is asked before the first step
        with pytest.raises(StoppedError):
            run(tiny_training, log, stop=stop_after(after))
    assert not tiny_training.paths.predictions(0).exists()
    assert log.values("control", "train_loss")
    run(tiny_training, log)
    whole, _, whole_log, _ = finished
    stopped, wanted = (read_table(each.paths.predictions(0), PREDICTIONS) for each in (tiny_training, whole))
    assert stopped.equals(wanted)
    assert log.lines == whole_log.lines
    for name in (BEST, f"control/{BEST}"):
        ours, theirs = (paths.fold_checkpoints(0) / name for paths in (tiny_training.paths, whole.paths))
        assert ours.read_bytes() == theirs.read_bytes()


def test_without_an_inner_part_all_groups_train_and_held_out_logits_calibrate(tiny_training, list_log, monkeypatch):
    """Nobody scores groups it was trained on; killed and resumed, the cross-fitting ends with the same bits."""
    changes = {"inner_validation_share": 0, "early_stopping_epochs": 1, "shuffled_label_control": False}
    tiny, judged = tiny_training.with_config(**changes), []
    whole = RunPaths(shutil.copytree(tiny.paths.root, tiny.paths.root.with_name("whole")))
    predict = TrainedNetwork.predict

    def judging(trained, data, accumulator):
        learned = {row.group_id for row in trained.network.task.training_data.rows}
        judged.append((trained.network.name, learned, {row.group_id for row in data.rows}))
        predict(trained, data, accumulator)

    with monkeypatch.context() as patched:
        patched.setattr(TrainedNetwork, "predict", judging)
        outcome = train_fold(whole, tiny.config, 0, metric_log=list_log())
    rows = read_table(tiny.paths.folds, FOLDS)
    groups = set(rows.filter(pl.col("fold") != 0)["group_id"])
    assert [name for name, *_ in judged] == ["inner_0", "inner_1", ""]
    for _, learned, tested in judged:
        assert learned.isdisjoint(tested)
    for _, learned, tested in judged[:2]:
        assert learned | tested == groups
    training, chosen = outcome.training, outcome.training.selection
    assert [record.validation for record in training.history] == [{}, {}]
    assert (training.best_epoch, chosen.best_epoch, chosen.num_epochs) == (0, 0, 2)
    calibrated = read_table(whole.validation_predictions(0), VALIDATION_PREDICTIONS)
    assert set(calibrated["group_id"]) == groups
    assert chosen.temperature == fit_temperature(fake_labels(calibrated), calibrated["logit"].to_numpy())
    for after in (3, 8):  # in the model, and in an inner network
        with pytest.raises(StoppedError):
            run(tiny, list_log(), stop=stop_after(after))
    assert run(tiny, list_log()).training.recorded.weights == training.recorded.weights
    for name in ("predictions", "validation_predictions"):
        assert getattr(tiny.paths, name)(0).read_bytes() == getattr(whole, name)(0).read_bytes()


@pytest.mark.fault(28)
def test_other_parameters_are_refused_and_the_machine_s_are_not(finished, list_log):
    tiny = finished[0]
    with pytest.raises(CheckpointMismatchError, match=r"epochs: 2 -> 4"):
        run(tiny.with_config(epochs=4), list_log())
    run(tiny.with_config(batch_size=2, num_workers=2, bootstrap_replicates=100), list_log())


def test_shuffled_labels_are_trained_and_tested_on(tiny_training, list_log):
    tiny = tiny_training.with_config(shuffle_labels=True, shuffled_label_control=False)
    outcome = run(tiny, list_log())
    table = read_table(tiny.paths.predictions(0), PREDICTIONS)
    true = read_table(tiny.paths.folds, FOLDS).filter(pl.col("fold") == 0)["label"]
    assert (table["label"] != true).any()
    assert sorted(table["label"].to_list()) == sorted(true.to_list())
    assert table["control_score"].null_count() == table["control_label"].null_count() == table.height
    assert outcome.control is None
    assert not tiny.paths.fold_checkpoints(0).joinpath("control").exists()


def test_training_sees_copies_and_the_rest_originals_only_of_disjoint_groups(tiny_training):
    config, folds = tiny_training.config, read_table(tiny_training.paths.folds, FOLDS)
    clips = fold_clips(TrainingRows(folds), tiny_training.store, config, 1)
    assert {row.augmentation_index for row in clips.train} == {0, 1}
    outer = clips.test.open(recorded_selection(clips))
    assert {row.augmentation_index for row in (*clips.validation, *outer)} == {0}
    split = TrainingRows(folds).split(1, inner_validation_share=config.inner_validation_share, seed=config.seed)
    for rows, part in ((clips.train, split.train), (clips.validation, split.validation), (outer, split.test)):
        assert {row.video_id for row in rows} == set(part["video_id"])


def test_videos_that_could_not_be_decoded_are_named_and_left_out_up_to_a_share(tiny_training, list_log):
    lost = [f"video{number:05d}" for number in (0, 7, 20)]
    for video_id in lost:
        for number in (0, 1):
            tiny_training.store.clip_path(video_id, number).unlink()
    tiny_training.note_clips()
    assert run(tiny_training, list_log()).missing == tuple(lost)
    assert not set(lost) & set(read_table(tiny_training.paths.predictions(0), PREDICTIONS)["video_id"])
    with pytest.raises(DataError, match=r"3 of 36 videos have no clip .*video00000.*03_augmentation"):
        run(tiny_training.with_config(max_rejected_share=0.0), list_log())


@pytest.mark.fault(10)
@pytest.mark.parametrize(
    ("copy", "error"),
    [(0, r"clips of 1 videos are gone.*{}.*03_augmentation"), (1, "1 clips are not in the clip store.*{}#1")],
)
def test_a_clip_that_is_gone_stops_the_fold_before_training(tiny_training, list_log, monkeypatch, copy, error):
    monkeypatch.setattr(shared_training, "Engine", lambda *_, **__: pytest.fail("it trains"))
    video_id = read_fold(tiny_training.paths, tiny_training.config, 0)[1][""].train[0].video_id
    tiny_training.store.clip_path(video_id, copy).unlink()
    with pytest.raises(DataError, match=error.format(video_id)):
        run(tiny_training, list_log())
    with pytest.raises(DataError, match="fold 3: no such fold"):
        run(tiny_training, list_log(), fold=3)
