"""Results next to controls, refused predictions, targets, slices and decisions."""

import itertools
import json
import re
from typing import Any

import numpy as np
import polars as pl
import pytest

from fvc_lib.analysis.figures.results import metric_table
from fvc_lib.analysis.read.headline import judge, overall_scores, scope_cautions
from fvc_lib.metrics.classification import balanced_accuracy, brier_score, f1, roc_auc
from fvc_lib.metrics.cross_validation import within_folds
from fvc_lib.metrics.intervals import group_interval
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, LeakageError
from fvc_lib.services.tables import PROTOCOL
from fvc_lib.tasks.video import controls
from fvc_lib.tasks.video.results import (
    METRIC_NAMES,
    check_predictions,
    confusion_table,
    kfold_results,
    scores_across_sources,
    sees_bars,
    slice_table,
    undecoded,
)

pytestmark = pytest.mark.usefixtures("few_rounds")
CONFIG = RunConfig(bootstrap_replicates=100)
ALL_CONTROLS = (
    "constant", "metadata_only", "length_only", "group_lookup_by_row", "group_lookup_by_group", "shuffled_labels",
)  # fmt: skip


def good_scores(folds: pl.DataFrame, seed: int = 0, separation: float = 1.5) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(size=folds.height)
    return 1 / (1 + np.exp(-(separation * (2 * controls.fake_labels(folds) - 1) + noise)))


@pytest.fixture(scope="module")
def folds(tables: Any) -> pl.DataFrame:
    return tables.folds()


@pytest.fixture(scope="module")
def predictions(tables: Any, folds: pl.DataFrame) -> pl.DataFrame:
    return tables.predictions(folds, good_scores(folds), threshold_of_fold={0: 0.3, 1: 0.6})


@pytest.fixture(scope="module")
def results(few_rounds: None, tables: Any, folds: pl.DataFrame, predictions: pl.DataFrame) -> pl.DataFrame:
    return kfold_results(tables.index(folds), folds, predictions, CONFIG)


def row(results: pl.DataFrame, source: str, scope: str, metric: str) -> dict:
    return results.filter(source=source, scope=scope, metric=metric).row(0, named=True)


def test_every_source_scope_and_metric_stands_there_once_with_controls_at_chance(results: pl.DataFrame) -> None:
    sources = ("model", *ALL_CONTROLS)
    scopes = ("all", "all_by_group", "fold_0", "fold_1", "fold_2", "fold_3")
    uncalibrated = ("brier_score_uncalibrated", "expected_calibration_error_uncalibrated")
    expected = [*itertools.product(sources, scopes, METRIC_NAMES), *itertools.product(["model"], scopes, uncalibrated)]
    assert sorted(results.select("source", "scope", "metric").rows()) == sorted(expected)
    assert results["num_videos"].sum() == (7 * len(METRIC_NAMES) + 2) * (60 + 60 + 60)
    assert row(results, "group_lookup_by_row", "all", "roc_auc")["value"] > 0.95
    for source in ("constant", "group_lookup_by_group"):
        assert {row(results, source, "all_by_group", "roc_auc")[end] for end in ("value", "low", "high")} == {0.5}
    shuffled = row(results, "shuffled_labels", "all", "roc_auc")
    assert shuffled["low"] < 0.5 < shuffled["high"]


def test_values_are_those_of_the_metrics_within_folds_at_the_folds_thresholds(
    results: pl.DataFrame, predictions: pl.DataFrame
) -> None:
    labels, scores = controls.fake_labels(predictions), predictions["score"].to_numpy()
    decisions = (predictions["score"] >= predictions["threshold"]).cast(pl.Int64).to_numpy()
    expected = {
        "f1": f1(labels, decisions),
        "balanced_accuracy": balanced_accuracy(labels, decisions),
        "brier_score": brier_score(labels, scores),
        "brier_score_uncalibrated": brier_score(labels, 1 / (1 + np.exp(-predictions["logit"].to_numpy()))),
    }
    for metric, value in expected.items():
        assert row(results, "model", "all", metric)["value"] == pytest.approx(value, abs=1e-12), metric
    interval = group_interval(
        labels, scores, predictions["group_id"].to_list(), within_folds(roc_auc, predictions["fold"]), replicates=100
    )
    auc = row(results, "model", "all", "roc_auc")
    assert (auc["value"], auc["low"], auc["high"]) == (interval.value, interval.low, interval.high)
    parts = [predictions.filter(fold=fold) for fold in range(4)]
    of_folds = [roc_auc(controls.fake_labels(part), part["score"]) for part in parts]
    assert [row(results, "model", f"fold_{fold}", "roc_auc")["value"] for fold in range(4)] == of_folds
    assert (auc["fold_mean"], auc["fold_std"]) == pytest.approx((np.mean(of_folds), np.std(of_folds, ddof=1)))


def test_letterboxed_frames_bring_a_control_on_the_shape_of_the_picture(tables: Any, folds: pl.DataFrame) -> None:
    is_fake = controls.fake_labels(folds) == 1
    index = tables.index(folds, width=np.where(is_fake, 640, 360).tolist(), height=np.where(is_fake, 360, 640).tolist())
    predictions = tables.predictions(folds, good_scores(folds))
    turned = index.with_columns(rotation_degrees=pl.Series(np.where(is_fake, 90, 0)))
    for described, expected in ((index, 1.0), (turned, 0.5)):
        scored = controls.all_controls(described, folds, predictions, seed=0, has_bars=True)["shape_only"]
        assert controls.auc_within_folds(scored, CONFIG).value == expected
    assert "shape_only" not in controls.all_controls(index, folds, predictions, seed=0)
    models = {"frame_cnn": True, "probe:efficientnet_lite0": False, "r3d_18": False, "forensic_svm": False}
    assert {name: sees_bars(CONFIG.model_copy(update={"model": name})) for name in models} == models
    assert not sees_bars(CONFIG.model_copy(update={"model": "frame_cnn", "crop": "face"}))


def test_sources_are_scored_within_and_across(tables: Any, folds: pl.DataFrame, predictions: pl.DataFrame) -> None:
    places = [f"place {int(re.sub('[^0-9]', '', group)) // 2 % 2}" for group in folds["group_id"]]
    index, asked = tables.index(folds, corpus=places), []

    def logits_of(table: pl.DataFrame) -> pl.DataFrame:
        asked.append(table)
        return table.with_columns(score=pl.Series(good_scores(table)))

    across = scores_across_sources(index, folds, CONFIG, logits_of)
    (table,) = asked
    places_of = table.join(index.select("video_id", "corpus"), on="video_id").group_by("corpus")
    assert places_of.agg(folds=pl.col("fold").n_unique())["folds"].to_list() == [1, 1]
    assert table.select("video_id", "group_id").equals(folds.sort("video_id").select("video_id", "group_id"))
    found = kfold_results(index, folds, predictions, CONFIG, across=across)
    assert set(found.filter(scope="across_sources")["source"]) == {"model", "metadata_only"}
    within = found.filter(pl.col("scope").str.starts_with("source:"))
    assert set(within["scope"]) == {f"source:place {number}" for number in range(2)}
    assert within["num_videos"].sum() == 2 * folds.height
    one_place = tables.index(folds, corpus=["one"] * folds.height)
    assert scores_across_sources(one_place, folds, CONFIG, logits_of) == {}
    assert (
        kfold_results(one_place, folds, predictions, CONFIG).filter(pl.col("scope").str.contains("source")).is_empty()
    )


def test_fakes_that_pixels_cannot_show_are_scored_apart(tables: Any, folds: pl.DataFrame) -> None:
    is_fake = controls.fake_labels(folds) == 1
    made = np.where(np.cumsum(is_fake) % 3 == 0, "Out-of-Context", "face swap")
    index = tables.index(folds, manipulation=[name if fake else None for name, fake in zip(made, is_fake, strict=True)])
    unseen = is_fake & (made == "Out-of-Context")
    scores = np.where(unseen, 0.0, good_scores(folds, separation=9.0))  # wrong on the unseen ones alone
    found = kfold_results(index, folds, tables.predictions(folds, scores), CONFIG)
    apart = row(found, "model", "within_pixels", "roc_auc")
    assert apart["num_videos"] == folds.height - unseen.sum()
    assert apart["value"] > 0.99
    assert row(found, "model", "all", "roc_auc")["value"] < 0.8
    (sentence,) = scope_cautions(found)
    assert f"{apart['value']:.3f}" in sentence
    assert "metadata only" in sentence
    assert scope_cautions(found.filter(pl.col("scope") != "within_pixels")) == ()


@pytest.mark.parametrize("how", ["mean", "max"])
def test_every_metric_stands_there_by_case_too_and_is_that_of_its_combined_logits(
    tables: Any, folds: pl.DataFrame, predictions: pl.DataFrame, results: pl.DataFrame, how: str
) -> None:
    number = pl.int_range(pl.len()).over("group_id", "label") // 2
    cases = folds.select("video_id", "group_id", "label", case=pl.format("{} {}", "label", number))
    texts = [None if case == "real 0" else json.dumps({"case": case}) for case in cases["case"]]
    index = tables.index(folds, attributes=texts)
    found = kfold_results(index, folds, predictions, CONFIG.model_copy(update={"case_score": how}))
    named = pl.when(pl.col("case") == "real 0").then("video_id").otherwise(pl.format("{} {}", "group_id", "case"))
    known = predictions.join(cases.select("video_id", case=named), on="video_id")
    logit = getattr(pl.col("logit") / pl.col("temperature"), how)()
    combined = known.group_by("case", maintain_order=True).agg(logit=logit, fold=pl.col("fold").first(),
        label=pl.col("label").first(), threshold=pl.col("threshold").first())  # fmt: skip
    assert cases.height > combined.height > combined.filter(pl.col("case").str.starts_with("video")).height > 0
    labels, scores = controls.fake_labels(combined), 1 / (1 + np.exp(-combined["logit"].to_numpy()))
    auc = within_folds(roc_auc, combined["fold"])(labels, scores)
    decided = f1(labels, (scores >= combined["threshold"].to_numpy()).astype(int))
    of_cases = found.filter(scope="by_case")
    for metric, value in (("roc_auc", auc), ("brier_score", brier_score(labels, scores)), ("f1", decided)):
        assert row(of_cases, "model", "by_case", metric)["value"] == pytest.approx(value, abs=1e-12), metric
    assert set(of_cases["num_videos"]) == {combined.height}
    assert set(of_cases["source"]) == {"model", *ALL_CONTROLS}, "no number without its controls"
    assert f"{auc:.3f}" in scope_cautions(found)[-1]
    assert "by_case" in metric_table(found).columns
    assert found.filter(pl.col("scope") != "by_case").equals(results), "the other numbers stay"


def test_a_group_has_one_vote_and_videos_left_out_have_none(tables: Any, folds: pl.DataFrame) -> None:
    kept = folds.filter((pl.int_range(pl.len()) % 3 == 0) | (pl.col("group_id").str.contains("[0-4]>")))
    predictions = tables.predictions(kept, good_scores(kept))[1:]
    table = kfold_results(tables.index(kept), kept, predictions, CONFIG, left_out=["video00000"])
    assert set(table.filter(scope="all")["num_videos"]) == {kept.height - 1}
    squared = predictions.with_columns(error=(pl.col("score") - (pl.col("label") == "fake").cast(pl.Float64)) ** 2)
    groups = squared.group_by("group_id").agg(pl.col("error").mean())
    assert row(table, "model", "all_by_group", "brier_score")["value"] == pytest.approx(groups["error"].mean())
    assert row(table, "model", "all", "brier_score")["value"] == pytest.approx(squared["error"].mean())
    assert groups["error"].mean() != pytest.approx(squared["error"].mean())


def test_a_fold_of_one_class_is_null_and_one_group_of_fakes_gives_no_interval_and_no_claim(tables: Any) -> None:
    fakes = pl.col("video_id").is_in(["video00000", "video00001"])
    folds = tables.folds(num_groups=6, num_folds=2).with_columns(
        label=pl.when(fakes).then(pl.lit("fake")).otherwise(pl.lit("real"))
    )
    sure = tables.predictions(folds, good_scores(folds, separation=9))
    found = kfold_results(tables.index(folds), folds, sure, CONFIG)
    assert [row(found, "model", "fold_1", name)["value"] for name in ("roc_auc", "f1")] == [None, None]
    assert row(found, "model", "fold_1", "brier_score")["value"] is not None
    auc = row(found, "model", "all", "roc_auc")
    assert (auc["value"], auc["low"], auc["fold_mean"], auc["fold_std"]) == (1.0, None, 1.0, None)
    assert judge(overall_scores(found)).standing != "above control"


@pytest.mark.parametrize(
    ("spoil", "kind", "named"),
    [
        (lambda f, p: (f, pl.concat([p, p[:1]])), LeakageError, "more than once.*'video00000'"),
        (lambda f, p: (f, p[1:]), DataError, "no prediction.*'video00000'"),
        (lambda f, p: (f[1:], p), DataError, "not in the folds.*'video00000'"),
        (lambda f, p: (f, p.with_columns(fold=(pl.col("fold") + 1) % 4)), LeakageError, "60 videos.*another fold"),
        (lambda f, p: (f, p.with_columns(group_id=pl.lit("g"))), LeakageError, "another fold or group"),
        (lambda f, p: (f, p.with_columns(label=pl.lit("real"))), DataError, "30 videos.*another label"),
        (lambda f, p: (f.with_columns(group_id=pl.lit("g")), p), LeakageError, "g"),
    ],
)
def test_predictions_that_do_not_fit_the_folds_are_refused(
    folds: pl.DataFrame, predictions: pl.DataFrame, spoil: object, kind: type[DataError], named: str
) -> None:
    check_predictions(folds, predictions[1:], left_out=["video00000"])
    with pytest.raises(DataError, match=named) as caught:
        check_predictions(*spoil(folds, predictions))
    assert type(caught.value) is kind


def test_a_model_of_labels_shuffled_on_purpose_is_not_above_metadata_that_know_these_labels(
    tables: Any, folds: pl.DataFrame
) -> None:
    shuffled = folds.with_columns(label=pl.Series(np.roll(folds["label"].to_numpy(), 3)))
    predictions = tables.predictions(shuffled, good_scores(shuffled))
    index = tables.index(folds, width=[640 if label == "fake" else 320 for label in shuffled["label"]])
    verdict = judge(
        overall_scores(kfold_results(index, folds, predictions, CONFIG.model_copy(update={"shuffle_labels": True})))
    )
    assert (verdict.best_control.source, verdict.best_control.value) == ("metadata_only", 1.0)
    assert verdict.standing == "not above control"


# Targets


def of_two_targets(folds: pl.DataFrame) -> pl.DataFrame:
    parts = [
        folds.with_columns(
            protocol=pl.lit("leave_one_generator_out"),
            target=pl.lit("sora" if fold else "pika"),  # one fold of pika, three of sora
            part=pl.when(pl.col("fold") == fold).then(pl.lit("test")).otherwise(pl.lit("train")),
            reason=pl.lit(None, pl.String),
            fold=pl.lit(fold, pl.Int64),
        )
        for fold in range(4)
    ]
    return pl.concat(parts).select(*PROTOCOL.columns)


def test_with_targets_the_number_is_the_plain_mean_over_them_and_each_stands_by_itself(
    tables: Any, folds: pl.DataFrame, predictions: pl.DataFrame
) -> None:
    config = CONFIG.model_copy(update={"protocol": "leave_one_generator_out", "num_folds": 4})
    found = kfold_results(tables.index(folds), folds, predictions, config, protocol=of_two_targets(folds))
    labels, scores, fold = (controls.fake_labels(predictions), predictions["score"].to_numpy(), predictions["fold"])
    pika, sora = (fold == 0).to_numpy(), (fold != 0).to_numpy()
    each = [roc_auc(labels[pika], scores[pika]), within_folds(roc_auc, fold.filter(sora))(labels[sora], scores[sora])]
    values = [row(found, "model", scope, "roc_auc")["value"] for scope in ("target:pika", "target:sora", "all")]
    assert values == pytest.approx([*each, np.mean(each)], abs=1e-12)
    for source in ALL_CONTROLS:
        assert row(found, source, "target:pika", "roc_auc")["num_videos"] == int(pika.sum())
    decisions = (predictions["score"] >= predictions["threshold"]).to_numpy().astype(float)
    of_both = np.mean([f1(labels[of], decisions[of]) for of in (pika, sora)])
    assert row(found, "model", "all", "f1")["value"] == pytest.approx(of_both, abs=1e-12)
    one_class = pl.when(pl.col("fold") == 0).then(pl.lit("fake")).otherwise("label")
    named = predictions.with_columns(label=one_class, target=pl.when(pl.col("fold") == 0).then(1).otherwise(2))
    assert controls.auc_within_folds(named, config).row()[:3] == (None, None, None)


def test_videos_that_only_train_and_have_no_clip_are_undecoded_too(folds: pl.DataFrame) -> None:
    tested, trains = folds.filter(fold=0), folds.filter(pl.col("fold") > 0)["video_id"].to_list()
    protocol, clips = of_two_targets(folds).filter(fold=0), folds.filter(~pl.col("video_id").is_in(trains[:3]))
    assert (undecoded(tested, clips, protocol), undecoded(tested, clips)) == (sorted(trains[:3]), [])
    unused = pl.when(pl.col("video_id") == trains[0]).then(pl.lit("left_out")).otherwise("part")
    assert undecoded(tested, clips, protocol.with_columns(part=unused)) == sorted(trains[1:3])


# Slices


@pytest.fixture(scope="module")
def many(tables: Any) -> pl.DataFrame:
    """90 reals and 90 fakes in 60 groups."""
    return tables.folds(num_groups=60, per_group=3)


@pytest.fixture
def sliced(tables: Any, many: pl.DataFrame) -> Any:
    """Slices of an index with given columns, by (column, value), and the predictions."""
    predictions = tables.predictions(many, good_scores(many, 2, 1.0))

    def slices(**columns: list[object]) -> tuple[dict[tuple[str, str], dict[str, Any]], pl.DataFrame]:
        table = slice_table(tables.index(many, **columns), predictions, CONFIG)
        assert set(table["metric"]) <= {"roc_auc"}
        return {(each["slice_by"], each["value"]): each for each in table.to_dicts()}, predictions

    return slices


def test_a_slice_s_numbers_are_those_of_its_videos_alone(sliced: Any, many: pl.DataFrame) -> None:
    codecs = ["h264" if number % 3 else "vp9" for number in range(many.height)]
    found, predictions = sliced(codec=codecs)
    part = predictions.filter(pl.Series(codecs) == "vp9")
    auc = controls.auc_within_folds(part, CONFIG)
    got = found["codec", "vp9"]
    assert (got["number"], got["low"], got["high"]) == (auc.value, auc.low, auc.high)
    assert (got["num_videos"], got["num_real"], got["num_fake"], got["num_groups"]) == (60, 30, 30, 60)
    assert not got["is_small"]
    assert {name for name, _ in found} == {"codec"}
    assert sliced()[0] == {}  # everything is the same for all videos, or unknown


def test_kinds_of_fakes_and_sources_of_reals_stand_against_all_of_the_other_class(
    sliced: Any, many: pl.DataFrame
) -> None:
    is_fake = (many["label"] == "fake").to_list()
    manipulation = [f"kind {number % 2}" if fake else None for number, fake in enumerate(is_fake)]
    found, predictions = sliced(manipulation=manipulation, generator=manipulation)
    against = predictions.filter((pl.Series(manipulation) == "kind 1") | (pl.col("label") == "real"))
    expected = within_folds(roc_auc, against["fold"])(controls.fake_labels(against), against["score"])
    got = found["manipulation", "kind 1"]
    assert (got["number"], got["num_real"], got["num_videos"]) == (pytest.approx(expected), 90, against.height)
    assert set(found) == {("manipulation", "kind 0"), ("manipulation", "kind 1")}
    source = [None if fake else f"site {number % 2}" for number, fake in enumerate(is_fake)]
    found, _ = sliced(real_source=source)
    assert found["real_source", "site 0"]["num_fake"] == 90


def test_the_confusion_and_its_shares_are_scikit_learns(tables: Any, folds: pl.DataFrame) -> None:
    from sklearn.metrics import confusion_matrix, precision_score, recall_score

    truth = controls.fake_labels(folds)
    scores = np.clip(truth * 0.3 + np.random.default_rng(1).uniform(0, 0.7, truth.size), 0.01, 0.99)
    predictions = tables.predictions(folds, scores, threshold_of_fold={0: 0.4, 1: 0.6})
    called = (scores >= predictions["threshold"].to_numpy()).astype(int)
    fakes, reals, precision = confusion_table(predictions, CONFIG).rows()
    (tn, fp), (fn, tp) = confusion_matrix(truth, called)
    assert (fakes[1:3], reals[1:3], precision[1:3]) == ((tp, fn), (fp, tn), (tp + fp, tn + fn))
    shares = (recall_score(truth, called), fp / (fp + tn), precision_score(truth, called))
    assert (fakes[3], reals[3], precision[3]) == pytest.approx(shares, abs=1e-12)
    assert all(0 <= low <= share <= high <= 1 for *_, share, low, high, _ in (fakes, reals, precision))
    assert (fakes[-1], reals[-1], precision[-1]) == (10, 10, 20)
