"""Controls: what groups, metadata, length and shuffled labels score, for a run's folds and for anyone's scores."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings, strategies as st

from fvc_lib.analysis.audit.numbers import group_ids
from fvc_lib.metrics.classification import roc_auc
from fvc_lib.metrics.cross_validation import within_folds
from fvc_lib.services.config import RunConfig
from fvc_lib.tasks.video import controls

pytestmark = pytest.mark.usefixtures("few_rounds")
FVC2018 = Path(__file__).resolve().parents[3] / "shared" / "fvc2018"


def auc(scored: pl.DataFrame) -> float:
    return within_folds(roc_auc, scored["fold"])(controls.fake_labels(scored), scored["score"])


@st.composite
def random_folds(draw: st.DrawFn) -> pl.DataFrame:
    """Any labels, groups within folds or not; at least two folds."""
    row = st.tuples(st.sampled_from(["real", "fake"]), st.integers(0, 5), st.integers(0, 2))
    rows = draw(st.lists(row, min_size=4, max_size=30).filter(lambda rows: len({fold for _, _, fold in rows}) > 1))
    frame = pl.DataFrame(rows, schema={"label": pl.String, "group": pl.Int64, "fold": pl.Int64}, orient="row")
    return frame.select(
        pl.format("video{}", pl.int_range(100, pl.len() + 100)).alias("video_id"),
        pl.format("g{}", "group").alias("group_id"), "label", "fold",
    )  # fmt: skip


@settings(max_examples=30)
@given(random_folds())
def test_constant_and_group_lookup_are_training_shares_of_fakes(folds: pl.DataFrame) -> None:
    rows, priors, lookups = folds.to_dicts(), [], []
    for row in rows:
        training = [other for other in rows if other["fold"] != row["fold"]]
        known = [other["label"] == "fake" for other in training if other["group_id"] == row["group_id"]]
        priors.append(np.mean([other["label"] == "fake" for other in training]))
        lookups.append(np.mean(known) if known else priors[-1])
    constant = controls.constant(folds)
    assert constant.select(folds.columns).equals(folds)
    np.testing.assert_allclose(constant.select("score", "threshold").to_numpy(), np.stack([priors, priors], 1))
    np.testing.assert_allclose(controls.group_lookup(folds)["score"], lookups, atol=1e-12)


@settings(max_examples=30)
@given(random_folds(), st.integers(0, 5), st.randoms(use_true_random=False))
def test_the_row_wise_split_deals_each_label_out_evenly_in_any_row_order(
    folds: pl.DataFrame, seed: int, random: object
) -> None:
    split = controls.split_by_row(folds, seed=seed)
    assert split.drop("fold").equals(folds.drop("fold"))
    num_folds = folds["fold"].n_unique()
    counts = split.group_by("label", "fold").len()
    for label in split["label"].unique():
        of_label = counts.filter(label=label)["len"].to_list()
        of_label += [0] * (num_folds - len(of_label))
        assert max(of_label) - min(of_label) <= 1
    order = list(range(folds.height))
    random.shuffle(order)
    assert controls.split_by_row(folds[order], seed=seed).sort("video_id").equals(split)


@pytest.mark.skipif(not FVC2018.is_dir(), reason="the FVC-2018 annotation tables are not beside this checkout")
def test_fvc2018_leaks_by_row_and_not_by_group() -> None:
    tables = [pl.read_csv(FVC2018 / name) for name in ("FVC.csv", "FVC_dup.csv")]
    labelled = pl.concat(tables).filter(pl.col("label").is_in(["real", "fake"]))
    videos = labelled.with_row_index("row").select(
        video_id=pl.col("row").cast(pl.String), group_id=pl.col("cascade_id"), label=pl.col("label")
    )
    recognised = controls.group_recognition(videos, RunConfig(bootstrap_replicates=200))
    found = {row["split"]: row for row in recognised.to_dicts()}
    assert found["by row"]["value"] == pytest.approx(0.996, abs=0.002)
    assert found["by row"]["low"] > 0.98
    assert [found["by group"][name] for name in ("value", "low", "high")] == [0.5, 0.5, 0.5]
    assert (found["by row"]["num_rows"], found["by row"]["num_groups"]) == (5084, 380)


def test_metadata_finds_any_column_that_gives_the_label_away_and_sees_no_other(tables: Any) -> None:
    folds = tables.folds()

    def scored(column: str, real: Any, fake: Any, names: Any = controls.METADATA) -> float:
        index = tables.index(folds, **{column: [fake if label == "fake" else real for label in folds["label"]]})
        return auc(controls.metadata_only(index, folds, names, rounds=10))

    for column, real, fake in (
        ("key_distance_mean", 25, 30), ("platform", None, "web"), ("has_audio", False, True),
        ("bits_per_second", None, 1),
    ):  # fmt: skip
        assert scored(column, real, fake) == 1.0, column
    assert scored("num_frames", 30, 60, controls.LENGTH) == 1.0
    assert scored("width", 30, 60, controls.LENGTH) == 0.5
    names_the_label = {"path", "manipulation", "label_source", "stated_group", "source_id", "real_source", "generator"}
    assert not names_the_label & set(controls.METADATA)


def test_the_labels_of_a_fold_do_not_reach_its_own_scores(tables: Any) -> None:
    folds = tables.folds()
    index = tables.index(folds, size_bytes=np.random.default_rng(0).integers(1, 9999, folds.height).tolist())
    in_fold = pl.col("fold") == 1
    flipped = folds.with_columns(label=pl.when(in_fold).then(pl.lit("fake")).otherwise("label"))
    for control in (controls.constant, controls.group_lookup, lambda frame: controls.metadata_only(index, frame)):
        before, after = control(folds), control(flipped)
        for name in ("score", "threshold"):
            assert after.filter(in_fold)[name].equals(before.filter(in_fold)[name])
            assert not after.filter(~in_fold)[name].equals(before.filter(~in_fold)[name])


def test_all_controls_do_not_depend_on_the_row_order_and_shuffled_labels_are_judged_by_themselves(tables: Any) -> None:
    folds, generator = tables.folds(), np.random.default_rng(5)
    index = tables.index(folds, size_bytes=generator.integers(1, 9999, folds.height).tolist())
    predictions = tables.predictions(folds, generator.uniform(size=folds.height))
    first = controls.all_controls(index, folds, predictions, seed=3)
    order = generator.permutation(folds.height)
    again = controls.all_controls(index[order[::-1]], folds[order], predictions[order], seed=3)
    assert list(first) == list(again)
    for name, scored in first.items():
        assert scored.equals(again[name].sort("video_id")), name
    shuffled = first["shuffled_labels"].select(control_label="label", control_score="score")
    assert shuffled.equals(predictions.select("control_label", "control_score"))
    absent = predictions.with_columns(control_score=pl.lit(None, pl.Float64))
    assert controls.shuffled_labels(absent) is None


def test_under_a_protocol_each_control_learns_what_its_own_training_had(tables: Any) -> None:
    """Every training part says of length and group the opposite of what the tested videos would say of one another."""
    every = tables.folds(num_groups=48, per_group=2, num_folds=4)
    tested = every.filter(pl.col("fold") < 2)
    parts = [every.filter(fold=number).with_columns(fold=pl.lit(0, pl.Int64)) for number in (2, 3)]
    # Of the first every second fake is left out, of the other every second real: shares of fakes of 1/3 and 2/3.
    parts = [
        part.filter((pl.col("label") == kept) | (pl.int_range(pl.len()) % 2 == 1))
        for part, kept in zip(parts, ("real", "fake"), strict=True)
    ]
    # Its first row is of a tested group, with the other label: a lookup by group meets it again.
    met = [tested.filter(fold=number, label="fake")["group_id"][0] for number in (0, 1)]
    first = pl.int_range(pl.len()) == 0
    parts = [
        part.with_columns(group_id=pl.when(first).then(pl.lit(group)).otherwise("group_id"))
        for part, group in zip(parts, met, strict=True)
    ]
    trainings = [
        pl.concat([tested.filter(fold=number), part.with_columns(fold=pl.lit(number + 1, pl.Int64))])
        for number, part in enumerate(parts)
    ]
    is_tested = pl.col("video_id").is_in(tested["video_id"].to_list())
    frames = every.select(pl.when((pl.col("label") == "fake") == is_tested).then(60).otherwise(30)).to_series()
    predictions = tables.predictions(tested, np.full(tested.height, 0.5))
    index = tables.index(every, num_frames=frames.to_list())
    found = controls.all_controls(index, tested, predictions, seed=0, trainings=trainings)
    assert [auc(found[name]) for name in (controls.METADATA_ONLY, controls.LENGTH_ONLY)] == [0.0, 0.0]
    for number, part in enumerate(parts):
        share = (part["label"] == "fake").mean()
        of_fold = {name: scored.filter(fold=number) for name, scored in found.items()}
        assert set(of_fold[controls.CONSTANT]["score"]) == set(of_fold[controls.METADATA_ONLY]["threshold"]) == {share}
        lookup = dict(of_fold[controls.GROUP_LOOKUP_BY_GROUP].select("group_id", "score").unique().iter_rows())
        assert lookup.pop(met[number]) == float(part["label"][0] == "fake")
        assert set(lookup.values()) == {share}
    by_row = found[controls.GROUP_LOOKUP_BY_ROW]
    assert (by_row.height, by_row["fold"].n_unique()) == (tested.height, 5)
    assert (by_row.filter(pl.col("group_id").is_in(met))["score"] < 1).any()


# A table of anyone's scores


def test_controls_of_scores_are_in_the_order_of_the_table_and_missing_ones_are_named(tables):
    folds = tables.folds()
    videos, index = folds.select("video_id", "label", "group_id"), tables.index(folds)
    groups = group_ids(videos).tolist()
    found, missing = controls.controls_of_scores(videos, groups)
    assert set(found) == {"constant", "group_lookup_by_group", "group_lookup_by_row"}
    assert all(control["video_id"].to_list() == videos["video_id"].to_list() for control in found.values())
    assert ["--corpus" in line for line in missing] == [True]
    alone = videos.with_columns(group_id=pl.lit(None, pl.String))
    found, _ = controls.controls_of_scores(alone, group_ids(alone).tolist())
    assert found["group_lookup_by_group"].equals(found["constant"])
    found, missing = controls.controls_of_scores(videos, groups, index)
    assert ({"metadata_only", "length_only"} <= set(found), missing) == (True, [])
    found, missing = controls.controls_of_scores(videos, groups, index[1:])
    assert found["metadata_only"]["score"].null_count() == 1
    assert "1 of 60" in missing[-1]
