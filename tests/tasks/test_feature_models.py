"""Models on features: inner groups choose, the outer fold stays sealed, controls train alike, results name families."""

from dataclasses import replace
from functools import partial

import numpy as np
import polars as pl
import polars.selectors as cs
import pytest

from fvc_lib.corpus.folds import TrainingRows
from fvc_lib.detectors import classical as estimators
from fvc_lib.engine.random_state import stable_seed
from fvc_lib.metrics.classification import roc_auc
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, StoppedError, UsageError
from fvc_lib.services.tables import (
    FEATURES,
    FOLDS,
    INDEX,
    PREDICTIONS,
    VALIDATION_PREDICTIONS,
    read_table,
    write_table,
)
from fvc_lib.services.tasks import REAL_SOURCES, SHUFFLED_LABELS
from fvc_lib.tasks.leakage_audit import leakage_audit
from fvc_lib.tasks.shared_training import read_outcome
from fvc_lib.tasks.video import classical, data
from fvc_lib.tasks.video.controls import auc_within_folds, fake_labels
from fvc_lib.tasks.video.results import check_predictions
from fvc_lib.tasks.video.summary import TrainingSummary, score_outer_fold
from fvc_lib.tasks.video.training import read_fold, train_fold
from fvc_lib.video.clips.store import FIRST_BLEND
from tests.kits.feature_kit import feature_run
from tests.kits.training import ListLog, ScoredTables, draw_clip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of logistic regression with all folds trained, and its log and outcomes."""
    tiny, log = feature_run(tmp_path_factory.mktemp("features")), ListLog()
    outcomes = [train_fold(tiny.paths, tiny.config, fold, metric_log=log) for fold in range(3)]
    return tiny, log, outcomes


def trained(tiny) -> pl.DataFrame:
    """Train all folds; return PREDICTIONS."""
    for fold in range(3):
        train_fold(tiny.paths, tiny.config, fold, metric_log=ListLog())
    return pl.concat([read_table(tiny.paths.predictions(fold), PREDICTIONS) for fold in range(3)])


def auc_of(predictions: pl.DataFrame) -> float:
    return roc_auc(fake_labels(predictions), predictions["score"].to_numpy())


def test_folds_are_learned_and_shuffled_labels_are_not(finished, monkeypatch):
    tiny, log, outcomes = finished
    monkeypatch.setattr(classical, "fit", lambda *_: pytest.fail("fitted again"))  # a finished fold is not
    predictions = trained(tiny)
    assert auc_of(predictions) > 0.9
    assert 0.2 < auc_of(predictions.with_columns(label="control_label", score="control_score")) < 0.8
    check_predictions(pl.read_parquet(tiny.paths.folds), predictions)
    outcome = outcomes[0]
    assert (outcome.control is None, outcome.sources, outcome.device) == (False, None, "cpu")
    assert read_outcome(tiny.paths.fold_outcome(0), TrainingSummary) == outcome
    training = outcome.training
    assert (training.history, training.steps, training.best_epoch) == ((), 0, 0)
    assert min(training.candidates, key=lambda each: each.inner_loss).settings == training.selection.settings
    assert training.best_sentence().startswith("chosen of 5 settings: penalty ")
    assert training.selection.num_candidates == 5
    assert training.selection.table()["chosen"].to_list() == ["settings", "temperature", "threshold"]
    assert len(log.values("candidates", "inner_loss")) == len(log.values("control", "candidates_inner_loss")) == 15
    files = [path for path in tiny.paths.fold_checkpoints(0).rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".safetensors", ".sha256", ".json"}  # no file is unpickled
    columns = set(read_table(tiny.paths.features, FEATURES).columns)
    assert set(training.seen) == columns - {"video_id", "group_id", "label"}


def test_other_models_learn_too(tmp_path, monkeypatch):
    chosen = classical.model_of(RunConfig(model="forensic_svm"))
    monkeypatch.setattr(classical, "model_of", lambda config: replace(chosen, candidates=chosen.candidates[:1]))
    tiny = feature_run(tmp_path, model="forensic_svm", shift=3.0, shuffled_label_control=False)
    assert train_fold(tiny.paths, tiny.config, 0, metric_log=ListLog()).control is None
    assert auc_of(read_table(tiny.paths.predictions(0), PREDICTIONS)) > 0.85


def test_scaling_settings_and_held_out_logits_see_neither_the_test_part_nor_the_held_out_groups(tmp_path, monkeypatch):
    tiny, seen, judged = feature_run(tmp_path, shuffled_label_control=False), [], []
    source, parts = read_fold(tiny.paths, tiny.config, 0)
    clips = parts[""]
    group_of = {source.of([row])[0].tobytes(): row.group_id for row in clips.train}

    def groups(values):
        """Return the groups of videos with these features; fail for a video outside the training part."""
        return {group_of[row.tobytes()] for row in values}

    def watching(values, labels, weights, settings):
        seen.append(groups(values))
        return estimators.LOGISTIC.fit(values, labels, weights, settings)

    def judging(arrays, values):
        if len(judged) < classical.INNER_FOLDS:  # later calls judge the test part
            judged.append(groups(values))
        return estimators.LOGISTIC.logits(arrays, values)

    model = replace(estimators.LOGISTIC, candidates=({"penalty": 30.0},), fit=watching, logits=judging)
    monkeypatch.setattr(classical, "model_of", lambda config: model)
    outcome = train_fold(tiny.paths, tiny.config, 0, metric_log=ListLog())
    *inner, whole = seen
    assert len(inner) == classical.INNER_FOLDS
    assert whole == set(group_of.values())
    assert [fitted.isdisjoint(held_out) for fitted, held_out in zip(inner, judged, strict=True)] == [True] * len(inner)
    assert [fitted | held_out for fitted, held_out in zip(inner, judged, strict=True)] == [whole] * len(inner)
    assert outcome.training.selection.num_videos == len(clips.train)
    calibrated = read_table(tiny.paths.validation_predictions(0), VALIDATION_PREDICTIONS)
    assert set(calibrated["video_id"]) == {row.video_id for row in clips.train}


def test_other_clips_features_and_labels_in_the_outer_fold_change_no_bit_of_a_probe_or_its_calibration(tmp_path):
    """Standardisation, penalty and regression of both views, their weights, the temperature and the threshold."""
    trainings, probe = [], {"model": "probe:efficientnet_lite0", "views": "frames,pixels", "fixed_size": 24}
    for factor in (1, 100):
        tiny = feature_run(tmp_path / f"{factor}", **probe, augmentations_per_video=0, shuffled_label_control=False)
        folds, measured = read_table(tiny.paths.folds, FOLDS), read_table(tiny.paths.features, FEATURES)
        is_tested = pl.col("video_id").is_in(folds.filter(fold=0)["video_id"].to_list())
        times = pl.when(is_tested).then(factor).otherwise(1).cast(pl.Float32)
        write_table(measured.with_columns(cs.float() * times), FEATURES, tiny.paths.features)
        other = pl.when(pl.col("label") == "real").then(pl.lit("fake")).otherwise(pl.lit("real"))
        folds = folds.with_columns(label=pl.when(is_tested & (factor > 1)).then(other).otherwise("label"))
        write_table(folds, FOLDS, tiny.paths.folds)
        for video_id, label in folds.select("video_id", "label").iter_rows():
            tiny.store.write(video_id, 0, draw_clip(video_id, 0, label == "fake"))
        tiny.note_clips()
        trainings.append(train_fold(tiny.paths, tiny.config, 0, metric_log=ListLog()).training)
    first, second = trainings
    assert second.recorded.clips != first.recorded.clips
    assert (second.best_weights, second.selection) == (first.best_weights, first.selection)
    assert first.selection.settings == {"penalty": 100.0}  # the only one


def test_a_stopped_fold_starts_over_and_gives_the_same_bits(tmp_path, finished):
    tiny, answers = feature_run(tmp_path), iter([False, False, True])
    with pytest.raises(StoppedError):
        train_fold(tiny.paths, tiny.config, 0, metric_log=ListLog(), stop=lambda: next(answers))
    outcome = train_fold(tiny.paths, tiny.config, 0, metric_log=ListLog())
    same = finished[2][0].training
    assert (outcome.training.best_weights, outcome.training.candidates) == (same.best_weights, same.candidates)
    assert tiny.paths.predictions(0).read_bytes() == finished[0].paths.predictions(0).read_bytes()


def test_videos_without_features_are_named_and_so_are_families_that_were_not_measured(tmp_path):
    tiny = feature_run(tmp_path)
    table = read_table(tiny.paths.features, FEATURES)
    lost, names = table["video_id"][5], table.columns[3:]
    some = table.with_columns(pl.when(pl.col("video_id") != lost).then(pl.col(name)).alias(name) for name in names)
    write_table(some, FEATURES, tiny.paths.features)
    assert train_fold(tiny.paths, tiny.config, 0, metric_log=ListLog()).missing == (lost,)
    write_table(table.drop(name for name in names if name.startswith("spectrum_")), FEATURES, tiny.paths.features)
    with pytest.raises(DataError, match="no features of: spectrum"):
        train_fold(tiny.paths, tiny.config, 0, metric_log=ListLog())


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_ranks": 2}, "num_ranks"),
        ({"device": "cuda"}, "device"),
        ({"crop": "face"}, "crop"),
        ({"self_blended": 1}, "self_blended"),
        ({"feature_families": "shapness"}, "sharpness"),
    ],
)
def test_settings_of_a_network_alone_are_refused(finished, changes, field):
    tiny, _, _ = finished
    with pytest.raises(UsageError, match=field):
        train_fold(tiny.paths, tiny.config.model_copy(update=changes), 0, metric_log=ListLog())


def test_shuffled_labels_score_chance_by_group_and_the_audit_shows_what_rows_would_claim(tmp_path, monkeypatch):
    """The honest negative: boosting recognises copies where a careless split lets it."""
    boosting = replace(estimators.BOOSTING, candidates=({"rounds": 20.0, "leaves": 8.0},))
    monkeypatch.setattr(classical, "model_of", lambda config: boosting)
    tiny = feature_run(
        tmp_path / "by_group", model="forensic_boosting", shift=0.0, num_groups=20, per_group=4, shuffle_labels=True,
        shuffled_label_control=False, real_source_control=False,
    )  # fmt: skip
    by_group = trained(tiny)
    folds = read_table(tiny.paths.folds, FOLDS)
    audit = leakage_audit(read_table(tiny.paths.index, INDEX), folds, by_group, tiny.config)
    claims = dict(audit.select("check", "number").iter_rows())
    assert 0.3 < auc_within_folds(by_group, tiny.config).value < 0.7
    assert claims["auc_claimed_by_row"] > 0.85


class BlendedFeatures:
    """Features of originals and pseudo-fakes, all different; the first two videos show no face."""

    columns, settings_hash = [classical.Column("", "made", name) for name in "abcd"], "made"

    def __init__(self, folds: pl.DataFrame) -> None:
        self.faces = set(folds["video_id"].sort()[2:])
        self.row_of: dict[bytes, data.ClipRow] = {}

    def has(self, video_id: str, number: int) -> bool:
        return number < 3 or (FIRST_BLEND <= number < FIRST_BLEND + 5 and video_id in self.faces)

    def of(self, rows) -> np.ndarray:
        values = [np.random.default_rng(stable_seed(row.clip_id)).normal(row.label, size=4) for row in rows]
        self.row_of |= {value.tobytes(): row for value, row in zip(values, rows, strict=True)}
        return np.stack(values)


def groups_of(rows) -> set[str]:
    return {row.group_id for row in rows}


def videos_of_pseudo_fakes(rows) -> list[str]:
    assert all(row.label == 1 for row in rows if row.is_pseudo_fake)
    return [row.video_id for row in rows if row.is_pseudo_fake]


def test_pseudo_fakes_train_where_their_real_does_and_are_nowhere_judged(tmp_path, monkeypatch):
    folds = ScoredTables.folds(num_groups=30, per_group=2, num_folds=3)
    source, fits, judged = BlendedFeatures(folds), [], []

    def fit(values, labels, weights, settings):
        fits.append([source.row_of[value.tobytes()] for value in values])
        assert [row.label for row in fits[-1]] == labels.tolist()
        return estimators.LOGISTIC.fit(values, labels, weights, settings)

    def logits(arrays, values):
        judged.append([source.row_of[value.tobytes()] for value in values])
        return estimators.LOGISTIC.logits(arrays, values)

    model = replace(estimators.LOGISTIC, candidates=({"penalty": 30.0},), fit=fit, logits=logits)
    monkeypatch.setattr(classical, "model_of", lambda config: model)
    config, rows = RunConfig(num_folds=3, self_blended=2, views="frames"), TrainingRows(folds)
    clips = data.fold_clips(rows, source, config, 0)
    of_test = set(folds.filter(fold=0)["group_id"])
    found, summary = classical.fit(config, source, clips, tmp_path, ListLog(), lambda: False)
    *inner, whole = fits
    for trained_on, held_out in zip(inner, judged, strict=True):
        assert videos_of_pseudo_fakes(trained_on)
        assert groups_of(trained_on).isdisjoint(groups_of(held_out) | of_test)
    reals = sorted(row.video_id for row in clips.validation if row.label == 0 and row.video_id in source.faces)
    assert videos_of_pseudo_fakes(whole) == [video_id for video_id in reals for _ in range(2)]
    assert groups_of(whole).isdisjoint(of_test)
    # Pseudo-fakes neither calibrate nor count as fakes of the corpus, and none is tested.
    chosen = summary.recorded.selection
    assert chosen.num_videos == len(found.held_out) == len(clips.validation) == 40
    assert chosen.prior_logit == pytest.approx(0)
    judge = partial(classical.logits_of_rows, config, source, found.arrays)
    scored = score_outer_fold(summary, clips, judge, partial(ListLog().log, step=0, epoch=1))
    assert {row.augmentation_index for row in scored.rows} == {0}
    fits.clear()
    classical.out_of_fold_logits(config, source, folds)
    for fold, trained_on in enumerate(fits[5::6]):
        assert videos_of_pseudo_fakes(trained_on)
        assert groups_of(trained_on).isdisjoint(folds.filter(fold=fold)["group_id"])
    changes = {"model": "frame_cnn", "inner_validation_share": 0.25}
    network = data.fold_clips(rows, source, config.model_copy(update=changes), 0)
    assert videos_of_pseudo_fakes(network.train)
    assert not videos_of_pseudo_fakes(network.validation)
    assert groups_of(network.train).isdisjoint(groups_of(network.validation) | of_test)
    for part in data.inner_parts(network, config.seed):
        assert videos_of_pseudo_fakes(part.train)
        assert groups_of(part.train).isdisjoint(groups_of(part.validation) | of_test)
        assert not videos_of_pseudo_fakes(part.validation)
    # With shuffled labels they come from videos that are called real; a control on two sources of reals has none.
    monkeypatch.setattr(data, "of_two_sources", lambda *_: rows)
    controls = data.control_clips(rows, lambda: folds, source, config, clips)
    called_real = {row.video_id for row in controls[SHUFFLED_LABELS].validation if row.label == 0}
    assert set(videos_of_pseudo_fakes(controls[SHUFFLED_LABELS].train)) == called_real & source.faces
    assert not videos_of_pseudo_fakes(controls[REAL_SOURCES].train)
