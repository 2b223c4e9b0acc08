"""Nobody looks at the outer fold before the selection is on record, and nothing of it reaches the selection."""

from dataclasses import replace

import polars as pl
import pytest

from fvc_lib.services.errors import LeakageError
from fvc_lib.services.tables import FOLDS, PREDICTIONS, read_table, write_table
from fvc_lib.tasks.video import summary, training as fold_training
from fvc_lib.tasks.video.calibration import SELECTION
from fvc_lib.tasks.video.data import ClipRow, SealedFold
from fvc_lib.tasks.video.training import train_fold
from tests.faults.conftest import elsewhere
from tests.kits.training import recorded_selection

ROWS = [ClipRow("video-a", 0, 0), ClipRow("video-b", 0, 1)]


def sealed(clips="of these clips"):
    return SealedFold("outer fold 3", ROWS, clips)


class Clips:
    fingerprint = "of these clips"


@pytest.mark.parametrize(
    "touch",
    [
        lambda fold: fold.rows,
        list,
        lambda fold: fold.open(None),
        lambda fold: fold.open(recorded_selection(Clips).selection),
    ],
)
def test_a_sealed_fold_shows_its_number_of_videos_alone(touch):
    assert len(sealed()) == 2
    assert "video-a" not in repr(sealed())
    with pytest.raises((LeakageError, TypeError, AttributeError)):
        touch(sealed())


def test_the_record_of_this_very_fold_opens_it_once():
    fold = sealed()
    with pytest.raises(LeakageError):
        sealed("of other clips").open(recorded_selection(Clips))
    assert list(fold.open(recorded_selection(Clips))) == ROWS
    with pytest.raises(LeakageError):
        fold.open(recorded_selection(Clips))


@pytest.mark.parametrize("share", [0.25, 0])
def test_other_labels_of_the_outer_fold_change_nothing_that_is_chosen(tiny_training, list_log, tmp_path, share):
    """Weights to the bit, epoch, temperature and threshold, of the model and of its control."""
    tiny = tiny_training.with_config(epochs=1, inner_validation_share=share)
    log, other_log, other = list_log(), list_log(), elsewhere(tiny, tmp_path / "other" / "run_1")
    folds = read_table(other.folds, FOLDS)
    flipped = pl.when(pl.col("label") == "real").then(pl.lit("fake")).otherwise(pl.lit("real"))
    mutated = folds.with_columns(label=pl.when(pl.col("fold") == 0).then(flipped).otherwise("label"))
    write_table(mutated, FOLDS, other.folds)
    outcome = train_fold(tiny.paths, tiny.config, 0, metric_log=log)
    other_outcome = train_fold(other, tiny.config, 0, metric_log=other_log)
    for ours, theirs in ((outcome.training, other_outcome.training), (outcome.control, other_outcome.control)):
        assert (theirs.recorded.weights, theirs.selection) == (ours.recorded.weights, ours.selection)
        assert theirs.recorded.clips != ours.recorded.clips
    chosen_by = [line for line in log.lines if "test" not in line[2] + line[3]]
    assert chosen_by == [line for line in other_log.lines if "test" not in line[2] + line[3]]
    assert log.values("test", "roc_auc")[0] == pytest.approx(1 - other_log.values("test", "roc_auc")[0])
    ours, theirs = (read_table(paths.predictions(0), PREDICTIONS) for paths in (tiny.paths, other))
    chosen = ["video_id", "score", "logit", "temperature", "threshold", "control_score"]
    assert ours.select(chosen).equals(theirs.select(chosen))
    assert (ours["label"] != theirs["label"]).all()
    logged = [line[2:4] for line in log.lines]
    first_test = min(logged.index(("test", "roc_auc")), logged.index(("control", "test_roc_auc")))
    assert logged.index(("selection", "threshold")) < first_test
    assert logged.index(("control", "selection_threshold")) < first_test
    for name, folder in (
        ("training", tiny.paths.fold_checkpoints(0)),
        ("control", tiny.paths.fold_checkpoints(0).joinpath("control")),
    ):
        assert getattr(outcome, name).recorded.openings == 1
        assert '"openings": 1' in (folder / SELECTION).read_text()


def test_a_training_that_looks_before_it_has_chosen_is_stopped_without_a_prediction(
    tiny_training, list_log, monkeypatch
):
    monkeypatch.setattr(fold_training, "choose", lambda clips, *given, **more: clips.test.open(None))
    tiny = tiny_training.with_config(shuffled_label_control=False, epochs=1)
    with pytest.raises(LeakageError, match="outer fold 0"):
        train_fold(tiny.paths, tiny.config, 0, metric_log=list_log())
    assert not tiny.paths.predictions(0).exists()
    assert not (tiny.paths.fold_checkpoints(0) / SELECTION).exists()


@pytest.mark.fault(3)
def test_an_attempt_that_died_after_opening_binds_the_next_one(tiny_training, list_log, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    tiny = tiny_training.with_config(shuffled_label_control=False, epochs=1)
    with monkeypatch.context() as patched:
        patched.setattr(summary, "probabilities", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train_fold(tiny.paths, tiny.config, 0, metric_log=list_log())
    assert not tiny.paths.fold_outcome(0).exists()
    select = summary.select
    monkeypatch.setattr(summary, "select", lambda *given, **more: replace(select(*given, **more), threshold=0.987))
    outcome = train_fold(tiny.paths, tiny.config, 0, metric_log=list_log())
    assert outcome.training.selection.threshold != 0.987
    assert outcome.training.recorded.openings == 2
    thresholds = read_table(tiny.paths.predictions(0), PREDICTIONS)["threshold"]
    assert set(thresholds) == {outcome.training.selection.threshold}
