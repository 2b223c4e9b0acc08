"""Results of models on features: the gain over metadata, and the importance of each family."""

from __future__ import annotations

import polars as pl
import pytest

from fvc_lib.analysis.figures.features import importance_figures
from fvc_lib.services.errors import DataError
from fvc_lib.services.tables import INDEX, PREDICTIONS, read_table
from fvc_lib.tasks.video.classical.results import feature_results
from fvc_lib.tasks.video.training import train_fold
from tests.kits.feature_kit import feature_run
from tests.kits.training import ListLog


def test_the_informative_family_matters_and_beats_metadata(tmp_path):
    tiny = feature_run(
        tmp_path, num_groups=48, per_group=1, shift=1.5, shuffled_label_control=False, real_source_control=False
    )
    for fold in range(3):
        train_fold(tiny.paths, tiny.config, fold, metric_log=ListLog())
    index = read_table(tiny.paths.index, INDEX)
    predictions = pl.concat([read_table(tiny.paths.predictions(fold), PREDICTIONS) for fold in range(3)])
    found = feature_results(tiny.paths, tiny.config, index, predictions)
    assert found.families["family"].to_list() == ["sharpness", "spectrum"]
    assert found.families["low"][0] > 0.05
    assert found.families["low"][1] <= 0
    assert found.beyond["compared"].to_list() == ["The model", "Metadata with features"]
    assert (found.beyond["low"] > 0).all()
    assert "The model is above metadata alone" in found.sentences()
    assert len(importance_figures(found.families)) == 1
    reversed_scores = predictions.with_columns(score=1 - pl.col("score"))
    with pytest.raises(DataError, match="do not give the stored predictions"):
        feature_results(tiny.paths, tiny.config, index, reversed_scores)
    network = tiny.config.model_copy(update={"model": "frame_cnn"})
    assert feature_results(tiny.paths, network, index, predictions) is None
