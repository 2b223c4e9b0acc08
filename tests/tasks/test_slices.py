from typing import Any

import numpy as np
import polars as pl
import pytest

from fvc_lib.analysis.figures.results import slices_figure
from fvc_lib.metrics.classification import balanced_accuracy, roc_auc
from fvc_lib.metrics.cross_validation import within_folds
from fvc_lib.metrics.intervals import group_interval
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError
from fvc_lib.tasks.video import controls
from fvc_lib.tasks.video.results import ALL_OTHERS, MOST_VALUES, NOT_KNOWN, SMALL_BELOW_GROUPS, slice_table

CONFIG = RunConfig(bootstrap_replicates=200)


@pytest.fixture(scope="module")
def folds(tables: Any) -> pl.DataFrame:
    return tables.folds(num_groups=60, per_group=3)


@pytest.fixture(scope="module")
def predictions(tables: Any, folds: pl.DataFrame) -> pl.DataFrame:
    noise = np.random.default_rng(2).normal(size=folds.height)
    scores = 1 / (1 + np.exp(-(2 * controls.fake_labels(folds) - 1 + noise)))
    return tables.predictions(folds, scores, threshold_of_fold={1: 0.7})


def kinds(folds: pl.DataFrame) -> list[str | None]:
    """One of two manipulations by group, none for reals."""
    named = [f"kind {int(group.split('<')[1].split('>')[0]) % 4}" for group in folds["group_id"]]
    return [name if label == "fake" else None for name, label in zip(named, folds["label"], strict=True)]


def number(table: pl.DataFrame, slice_by: str, value: str, metric: str) -> dict[str, Any]:
    wanted = (pl.col("slice_by") == slice_by) & (pl.col("value") == value) & (pl.col("metric") == metric)
    return table.filter(wanted).row(0, named=True)


def test_a_slice_s_numbers_are_those_of_its_videos_alone(tables, folds, predictions) -> None:
    codecs = ["h264" if row % 3 else "vp9" for row in range(folds.height)]
    table = slice_table(tables.index(folds, codec=codecs), predictions, CONFIG)
    assert table["slice_by"].unique().to_list() == ["codec"]
    part = predictions.filter(pl.Series(codecs) == "vp9")
    labels, decided = controls.fake_labels(part), (part["score"] >= part["threshold"]).cast(pl.Int64).to_numpy()
    auc = group_interval(
        labels, part["score"], part["group_id"].to_list(), within_folds(roc_auc, part["fold"]), replicates=200
    )
    got = number(table, "codec", "vp9", "roc_auc")
    assert (got["number"], got["low"], got["high"]) == (auc.value, auc.low, auc.high)
    assert (got["num_videos"], got["num_real"], got["num_fake"], got["num_groups"]) == (60, 30, 30, 60)
    assert number(table, "codec", "vp9", "balanced_accuracy")["number"] == balanced_accuracy(labels, decided)
    assert number(table, "codec", "vp9", "true_positive_rate")["number"] == decided[labels == 1].mean()
    assert number(table, "codec", "vp9", "false_positive_rate")["number"] == decided[labels == 0].mean()
    assert not table["is_small"].any()


def test_each_kind_of_fake_stands_against_all_reals(tables, folds, predictions) -> None:
    manipulation = kinds(folds)
    table = slice_table(tables.index(folds, manipulation=manipulation), predictions, CONFIG)
    assert table["value"].unique().sort().to_list() == ["kind 1", "kind 3"]
    assert "false_positive_rate" not in table["metric"].to_list()  # the reals are the same in all of them
    against = predictions.filter((pl.Series(manipulation) == "kind 3") | (pl.col("label") == "real"))
    got = number(table, "manipulation", "kind 3", "roc_auc")
    expected = within_folds(roc_auc, against["fold"])(controls.fake_labels(against), against["score"])
    assert (got["number"], got["num_real"], got["num_fake"]) == (pytest.approx(expected), 90, 45)


def test_each_source_of_reals_stands_against_all_fakes(tables, folds, predictions) -> None:
    source = [
        ("vript" if row % 2 else "youtube") if label == "real" else None for row, label in enumerate(folds["label"])
    ]
    table = slice_table(tables.index(folds, real_source=source), predictions, CONFIG)
    assert table["value"].unique().sort().to_list() == ["vript", "youtube"]
    assert "true_positive_rate" not in table["metric"].to_list()
    assert number(table, "real_source", "vript", "roc_auc")["num_fake"] == 90


def test_a_generator_that_is_not_the_manipulation_makes_slices_against_all_reals(tables, folds, predictions) -> None:
    manipulation = kinds(folds)
    same = tables.index(folds, manipulation=manipulation, generator=manipulation)
    assert slice_table(same, predictions, CONFIG)["slice_by"].unique().to_list() == ["manipulation"]
    generator = [name and f"maker {row % 3}" for row, name in enumerate(manipulation)]
    table = slice_table(tables.index(folds, manipulation=manipulation, generator=generator), predictions, CONFIG)
    assert table["slice_by"].unique(maintain_order=True).to_list() == ["manipulation", "generator"]
    got = number(table, "generator", "maker 1", "roc_auc")
    assert (got["num_real"], got["num_fake"]) == (90, 30)
    assert "false_positive_rate" not in table["metric"].to_list()
    assert "n = 180 videos in 5 slices" in slices_figure(table).layout.title.subtitle.text


def test_bins_are_half_open_and_tell_their_edges(tables, folds, predictions) -> None:
    lengths = [4.999, 5.0, 15.0, 299.9, 300.0, None] * 30
    index = tables.index(folds, duration_seconds=lengths, width=[640, 360] * 90, height=[360, 640] * 90)
    table = slice_table(index, predictions, CONFIG)
    counts = dict(table.filter(pl.col("metric") == "roc_auc").select("value", "num_videos").iter_rows())
    bins = ["under 5 s", "5 s to 15 s", "15 s to 60 s", "60 s to 300 s", "300 s and more", NOT_KNOWN]
    assert counts == dict.fromkeys(bins, 30)  # upright and flat pictures have one number of pixels: no slices
    wide = tables.index(folds, width=[640, 639] * 90, height=[360, 360] * 90)
    assert set(slice_table(wide, predictions, CONFIG)["value"]) == {"640x360 to 1280x720", "320x240 to 640x360"}


def test_a_slice_of_one_class_has_no_auc_and_still_says_what_it_can(tables, folds, predictions) -> None:
    platforms = ["web" if label == "fake" else "tv" for label in folds["label"]]
    table = slice_table(tables.index(folds, platform=platforms), predictions, CONFIG)
    assert number(table, "platform", "web", "roc_auc") | {"number": 0} == {
        "slice_by": "platform", "value": "web", "metric": "roc_auc", "number": 0, "low": None, "high": None,
        "num_videos": 90, "num_real": 0, "num_fake": 90, "num_groups": 30, "is_small": True,
    }  # fmt: skip
    found = number(table, "platform", "web", "true_positive_rate")
    assert found["low"] < found["number"] < found["high"]
    assert not found["is_small"]
    assert number(table, "platform", "web", "false_positive_rate")["number"] is None


def test_few_groups_of_a_class_are_called_small_however_many_videos(tables, folds, predictions) -> None:
    members = folds["group_id"].unique(maintain_order=True)
    few, enough = members[: 2 * SMALL_BELOW_GROUPS - 2], members[2 * SMALL_BELOW_GROUPS - 2 :]
    codecs = ["vp9" if group in set(few) else "h264" for group in folds["group_id"]]
    table = slice_table(tables.index(folds, codec=codecs), predictions, CONFIG)
    small = dict(table.filter(pl.col("metric") == "roc_auc").select("value", "is_small").iter_rows())
    assert small == {"vp9": True, "h264": False}
    assert len(few) < len(enough)


def test_rare_values_are_put_together(tables, folds, predictions) -> None:
    platforms = [f"site {row % 40}" for row in range(folds.height)]
    table = slice_table(tables.index(folds, platform=platforms), predictions, CONFIG)
    assert table["value"].n_unique() == MOST_VALUES
    assert number(table, "platform", ALL_OTHERS, "roc_auc")["num_videos"] == sum(
        sorted(platforms.count(name) for name in set(platforms))[: 40 - (MOST_VALUES - 1)]
    )


def test_what_is_the_same_for_all_or_unknown_of_all_makes_no_slice(tables, folds, predictions) -> None:
    assert slice_table(tables.index(folds), predictions, CONFIG).is_empty()


def test_a_video_that_the_index_does_not_hold_is_named(tables, folds, predictions) -> None:
    with pytest.raises(DataError, match="video00000"):
        slice_table(tables.index(folds)[1:], predictions, CONFIG)
