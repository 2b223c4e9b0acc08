"""What models on features relied on: the family that tells, what it adds to metadata, and traces of the corpus."""

from __future__ import annotations

import polars as pl
import pytest

from fvc_lib.analysis.figures.features import figures_of
from fvc_lib.services.errors import DataError
from fvc_lib.services.tables import FEATURES, INDEX, PREDICTIONS, read_table, write_table
from fvc_lib.tasks.video.classical.importance import features_told, fitted_by_row
from fvc_lib.tasks.video.controls import auc_within_folds
from fvc_lib.tasks.video.training import train_fold
from tests.kits.feature_kit import feature_run
from tests.kits.training import ListLog


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run whose fakes are told by one family, and so are its two sources of reals."""
    tiny = feature_run(
        tmp_path_factory.mktemp("told"), num_groups=48, per_group=1, shift=1.5, shuffled_label_control=False,
        real_source_control=False,
    )  # fmt: skip
    index = read_table(tiny.paths.index, INDEX)
    reals = index.filter(pl.col("label") == "real")["video_id"].sort().to_list()
    source = pl.when(pl.col("label") == "real").then(
        pl.when(pl.col("video_id").is_in(reals[::2])).then(pl.lit("phones")).otherwise(pl.lit("studio"))
    )
    index = index.with_columns(real_source=source)
    write_table(index, INDEX, tiny.paths.index)
    table = read_table(tiny.paths.features, FEATURES)
    lower = pl.when(pl.col("video_id").is_in(reals[::2])).then(-2.5).otherwise(0.0).cast(pl.Float32)
    traces = [pl.col(name) + lower for name in table.columns if name.startswith("sharpness_")]
    write_table(table.with_columns(traces), FEATURES, tiny.paths.features)
    for fold in range(3):
        train_fold(tiny.paths, tiny.config, fold, metric_log=ListLog())
    predictions = pl.concat([read_table(tiny.paths.predictions(fold), PREDICTIONS) for fold in range(3)])
    return tiny, index, predictions, features_told(tiny.paths, tiny.config, index, predictions)


def test_the_family_that_tells_is_needed_and_the_other_is_not(finished):
    told = finished[3]
    rows = {row["family"]: row for row in told.families.iter_rows(named=True)}
    assert rows["sharpness"]["low"] > 0.05
    assert rows["colour"]["low"] <= 0
    assert told.families["family"].to_list() == ["sharpness", "colour"]


def test_features_are_paired_with_what_metadata_tells(finished):
    told = finished[3]
    assert told.beyond["compared"].to_list() == ["The model", "Metadata with features"]
    assert (told.beyond["low"] > 0).all()
    assert "The model is above metadata alone" in told.sentences()


def test_what_tells_two_sources_of_reals_apart_is_marked_as_a_trace_of_the_corpus(finished):
    told = finished[3]
    assert told.two_sources in {("phones", "studio"), ("studio", "phones")}
    marked = told.strongest.filter(pl.col("note").str.contains("corpus trace"))
    assert set(marked["family"]) == {"sharpness"}
    assert marked.height == told.strongest.filter(family="sharpness").height > 0
    assert "phones and studio" in told.caption() or "studio and phones" in told.caption()


def test_partial_dependence_follows_what_the_model_learned(finished):
    told = finished[3]
    strongest = told.curves["feature"][0]
    mean = told.curves.filter(feature=strongest).group_by("value").agg(pl.col("score").mean()).sort("value")
    assert mean["score"][-1] > mean["score"][0]
    assert set(told.curves["fold"]) == {0, 1, 2}
    assert mean["score"].is_between(0, 1).all()
    assert len(figures_of(told.families, told.curves)) == 2


def test_models_that_do_not_give_the_predictions_are_refused_and_a_network_has_none(finished):
    tiny, index, predictions, _ = finished
    other = predictions.with_columns(score=1 - pl.col("score"))
    with pytest.raises(DataError, match="do not give the stored predictions"):
        features_told(tiny.paths, tiny.config, index, other)
    network = tiny.config.model_copy(update={"model": "frame_cnn"})
    assert features_told(tiny.paths, network, index, predictions) is None


def test_labels_without_meaning_are_told_by_row_alone(tmp_path):
    """Copies of a video have about its features, so a split by row lets a model recognise them."""
    tiny = feature_run(
        tmp_path, num_groups=24, per_group=4, shift=0.0, model="forensic_boosting", shuffled_label_control=False,
        real_source_control=False,
    )  # fmt: skip
    for fold in range(3):
        train_fold(tiny.paths, tiny.config, fold, metric_log=ListLog())
    predictions = pl.concat([read_table(tiny.paths.predictions(fold), PREDICTIONS) for fold in range(3)])
    by_row = fitted_by_row(tiny.paths, tiny.config, predictions)
    assert by_row is not None
    assert auc_within_folds(by_row, "group_id", tiny.config).value > 0.9
    assert auc_within_folds(predictions, "group_id", tiny.config).low < 0.5
