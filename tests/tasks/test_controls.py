from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, strategies as st

from fvc_lib.metrics.classification import roc_auc
from fvc_lib.metrics.cross_validation import within_folds
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError
from fvc_lib.tasks.video import controls
from fvc_lib.tasks.video.controls import group_recognition

FVC2018 = Path(__file__).resolve().parents[3] / "shared" / "fvc2018"


def without_control(folds: pl.DataFrame) -> pl.DataFrame:
    nothing = {"control_score": pl.lit(None, pl.Float64), "control_label": pl.lit(None, pl.String)}
    return folds.with_columns(**nothing)


def auc(scored: pl.DataFrame) -> float:
    return within_folds(roc_auc, scored["fold"])(controls.fake_labels(scored), scored["score"])


@st.composite
def random_folds(draw: st.DrawFn) -> pl.DataFrame:
    """Any labels, groups within folds or not; at least two folds."""
    rows = draw(
        st.lists(
            st.tuples(st.sampled_from(["real", "fake"]), st.integers(0, 5), st.integers(0, 2)), min_size=4, max_size=30
        ).filter(lambda rows: len({fold for _, _, fold in rows}) > 1)
    )
    return pl.DataFrame(
        {
            "video_id": [f"video{number:04d}" for number in range(len(rows))],
            "group_id": [f"g{group}" for _, group, _ in rows],
            "label": [label for label, _, _ in rows],
            "fold": pl.Series([fold for _, _, fold in rows], dtype=pl.Int64),
        }
    )


def naive_prior(folds: pl.DataFrame, fold: int) -> float:
    return float(np.mean([row["label"] == "fake" for row in folds.to_dicts() if row["fold"] != fold]))


@given(random_folds())
def test_constant_is_the_training_share_of_fakes(folds: pl.DataFrame) -> None:
    scored = controls.constant(folds)
    expected = [naive_prior(folds, fold) for fold in folds["fold"]]
    assert scored.columns == list(controls.SCORED_COLUMNS)
    np.testing.assert_allclose(scored["score"], expected)
    np.testing.assert_allclose(scored["threshold"], expected)
    assert scored.select(folds.columns).equals(folds)


@given(random_folds())
def test_group_lookup_is_the_training_share_of_the_group_or_the_prior(folds: pl.DataFrame) -> None:
    rows = folds.to_dicts()
    expected = []
    for row in rows:
        known = [o["label"] == "fake" for o in rows if o["fold"] != row["fold"] and o["group_id"] == row["group_id"]]
        expected.append(np.mean(known) if known else naive_prior(folds, row["fold"]))
    np.testing.assert_allclose(controls.group_lookup(folds)["score"], expected, atol=1e-12)


@given(random_folds(), st.integers(0, 5), st.randoms(use_true_random=False))
def test_the_row_wise_split_deals_each_label_out_evenly_in_any_row_order(
    folds: pl.DataFrame, seed: int, random: object
) -> None:
    split = controls.split_by_row(folds, seed=seed)
    assert split.drop("fold").equals(folds.drop("fold"))
    num_folds = folds["fold"].n_unique()
    counts = split.group_by("label", "fold").len()
    for label in split["label"].unique():
        of_label = counts.filter(pl.col("label") == label)["len"].to_list()
        of_label += [0] * (num_folds - len(of_label))
        assert max(of_label) - min(of_label) <= 1
    order = list(range(folds.height))
    random.shuffle(order)
    assert controls.split_by_row(folds[order], seed=seed).sort("video_id").equals(split)


def test_group_lookup_knows_everything_by_row_and_nothing_by_group(tables: Any) -> None:
    folds = tables.folds()
    assert auc(controls.group_lookup(controls.split_by_row(folds, seed=0))) > 0.95
    assert controls.group_lookup(folds).equals(controls.constant(folds))
    assert auc(controls.group_lookup(folds)) == 0.5


@pytest.mark.skipif(not FVC2018.is_dir(), reason="the FVC-2018 annotation tables are not beside this checkout")
def test_fvc2018_leaks_by_row_and_not_by_group() -> None:
    tables = [pl.read_csv(FVC2018 / name) for name in ("FVC.csv", "FVC_dup.csv")]
    labelled = pl.concat(tables).filter(pl.col("label").is_in(["real", "fake"]))
    videos = labelled.with_row_index("row").select(
        video_id=pl.col("row").cast(pl.String), group_id=pl.col("cascade_id"), label=pl.col("label")
    )
    assert (videos.height, videos["group_id"].n_unique()) == (5084, 380)
    found = {row["split"]: row for row in group_recognition(videos, RunConfig(bootstrap_replicates=200)).to_dicts()}
    assert found["by row"]["value"] == pytest.approx(0.996, abs=0.002)
    assert found["by row"]["low"] > 0.98
    assert [found["by group"][name] for name in ("value", "low", "high")] == [0.5, 0.5, 0.5]
    assert (found["by row"]["num_rows"], found["by row"]["num_groups"]) == (5084, 380)


@pytest.mark.parametrize(
    "column",
    ["frames_per_second", "size_bytes", "key_distance_mean", "rotation_degrees", "has_audio", "codec", "platform"],
)
def test_metadata_finds_any_column_that_gives_the_label_away(tables: Any, column: str) -> None:
    folds = tables.folds()
    pair = {"rotation_degrees": (0, 90), "has_audio": (False, True), "codec": ("h264", "vp9"), "platform": ("a", "b")}
    real, fake = pair.get(column, (25, 30))
    index = tables.index(folds, **{column: [fake if label == "fake" else real for label in folds["label"]]})
    assert auc(controls.metadata_only(index, folds)) == 1.0


def test_clip_length_alone_is_a_control_of_its_own_that_sees_nothing_else(tables: Any) -> None:
    folds = tables.folds()
    longer = [60 if label == "fake" else 30 for label in folds["label"]]
    everything = controls.all_controls(tables.index(folds, num_frames=longer), folds, without_control(folds), seed=0)
    assert auc(everything["length_only"]) == 1.0
    wider = controls.all_controls(tables.index(folds, width=longer), folds, without_control(folds), seed=0)
    assert (auc(wider["length_only"]), auc(wider["metadata_only"])) == (0.5, 1.0)


def test_an_index_of_an_earlier_version_has_no_packets_and_says_the_rest(tables: Any) -> None:
    folds = tables.folds()
    index = tables.index(folds, width=[60 if label == "fake" else 30 for label in folds["label"]])
    earlier = index.drop("packet_bytes_mean", "key_distance_mean", "bits_per_second_std")
    assert controls.metadata_only(earlier, folds).equals(controls.metadata_only(index, folds))


@pytest.mark.parametrize("column", ["bits_per_second", "platform"])
def test_missingness_alone_gives_the_label_away(tables: Any, column: str) -> None:
    folds = tables.folds()
    present = "web" if column == "platform" else 1000.0
    index = tables.index(folds, **{column: [present if label == "fake" else None for label in folds["label"]]})
    assert auc(controls.metadata_only(index, folds)) == 1.0


def test_what_names_the_label_is_not_used(tables: Any) -> None:
    folds = tables.folds()
    named = folds["label"].to_list()
    index = tables.index(
        folds,
        manipulation=named,
        label_source=named,
        stated_group=named,
        source_id=named,
        path=[f"{label}/{number}.mp4" for number, label in enumerate(named)],
    )
    assert auc(controls.metadata_only(index, folds)) == 0.5


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


def test_all_controls_do_not_depend_on_the_row_order(tables: Any) -> None:
    folds = tables.folds()
    generator = np.random.default_rng(5)
    index = tables.index(folds, size_bytes=generator.integers(1, 9999, folds.height).tolist())
    predictions = tables.predictions(folds, generator.uniform(size=folds.height))
    first = controls.all_controls(index, folds, predictions, seed=3)
    order = generator.permutation(folds.height)
    again = controls.all_controls(index[order[::-1]], folds[order], predictions[order], seed=3)
    assert list(first) == list(again)
    for name, scored in first.items():
        assert scored.equals(again[name].sort("video_id")), name


def test_shuffled_labels_are_judged_by_the_shuffled_labels(tables: Any) -> None:
    folds = tables.folds()
    predictions = tables.predictions(folds, np.full(folds.height, 0.5))
    scored = controls.shuffled_labels(predictions)
    assert scored is not None
    assert scored["label"].equals(predictions["control_label"].alias("label"))
    assert scored["score"].equals(predictions["control_score"].alias("score"))
    absent = predictions.with_columns(control_score=pl.lit(None, pl.Float64))
    assert controls.shuffled_labels(absent) is None


def test_a_video_the_index_does_not_hold_is_named(tables: Any) -> None:
    folds = tables.folds()
    with pytest.raises(DataError, match="video00000"):
        controls.metadata_only(tables.index(folds)[1:], folds)


def test_more_categories_than_the_model_takes(tables: Any) -> None:
    folds = tables.folds(num_groups=600, per_group=1)
    index = tables.index(folds, codec=[f"codec\n{row}" for row in range(folds.height)])
    assert 0.3 < auc(controls.metadata_only(index, folds, rounds=3)) < 0.7


def test_training_on_one_class_gives_the_prior(tables: Any) -> None:
    folds = tables.folds(num_folds=2).with_columns(
        label=pl.when(pl.col("fold") == 0).then(pl.lit("real")).otherwise("label")
    )
    scored = controls.metadata_only(tables.index(folds), folds)
    assert set(scored.filter(pl.col("fold") == 1)["score"]) == {0.0}


def test_under_a_protocol_each_control_learns_what_its_own_training_had(tables: Any) -> None:
    """Every training part says of length and group the opposite of what the tested videos would say of one another."""
    every = tables.folds(num_groups=48, per_group=2, num_folds=4)
    tested = every.filter(pl.col("fold") < 2)
    parts = [every.filter(fold=number).with_columns(fold=pl.lit(0, pl.Int64)) for number in (2, 3)]
    # Of the first every second fake is left out, of the other every second real: shares of fakes of 1/3 and 2/3.
    parts = [part[[row for row in range(part.height) if part["label"][row] == kept or row % 2]]
             for part, kept in zip(parts, ("real", "fake"), strict=True)]  # fmt: skip
    # Its first row is of a tested group, with the other label: a lookup by group meets it again.
    met = [tested.filter(fold=number, label="fake")["group_id"][0] for number in (0, 1)]
    parts = [part.with_columns(group_id=pl.when(pl.int_range(pl.len()) == 0).then(pl.lit(group)).otherwise("group_id"))
             for part, group in zip(parts, met, strict=True)]  # fmt: skip
    trainings = [
        pl.concat([tested.filter(fold=number), part.with_columns(fold=pl.lit(number + 1, pl.Int64))])
        for number, part in enumerate(parts)
    ]
    is_tested = pl.col("video_id").is_in(tested["video_id"].to_list())
    frames = every.select(pl.when((pl.col("label") == "fake") == is_tested).then(60).otherwise(30))
    index = tables.index(every, num_frames=frames.to_series().to_list())

    found = controls.all_controls(index, tested, tables.predictions(tested, np.full(tested.height, 0.5)), seed=0,
                                  trainings=trainings)  # fmt: skip

    for name in (controls.METADATA_ONLY, controls.LENGTH_ONLY):
        assert auc(found[name]) == 0.0, name
    share = [(part["label"] == "fake").mean() for part in parts]
    assert share[0] < 0.5 < share[1]
    for number in (0, 1):
        of_fold = {name: scored.filter(fold=number) for name, scored in found.items()}
        assert set(of_fold[controls.CONSTANT]["score"]) == {share[number]}
        assert all(set(of_fold[name]["threshold"]) == {share[number]} for name in (
            controls.CONSTANT, controls.METADATA_ONLY, controls.LENGTH_ONLY, controls.GROUP_LOOKUP_BY_GROUP,
        ))  # fmt: skip
        looked_up = of_fold[controls.GROUP_LOOKUP_BY_GROUP]
        assert set(looked_up.filter(group_id=met[number])["score"]) == {float(parts[number]["label"][0] == "fake")}
        assert set(looked_up.filter(pl.col("group_id") != met[number])["score"]) == {share[number]}
    by_row = found[controls.GROUP_LOOKUP_BY_ROW]
    assert by_row.height == tested.height
    assert by_row["fold"].n_unique() == 5  # what trains is dealt anew together with what is tested
    recognised = by_row.filter(pl.col("group_id").is_in(met))
    assert (recognised["score"] < 1).any()  # by the real one in their group, which only trains
