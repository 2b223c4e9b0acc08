import itertools
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from fvc_lib.analysis.read.headline import Verdict, judge, overall_scores
from fvc_lib.corpus.protocols.protocol import folds_tested, make_protocol
from fvc_lib.metrics.classification import balanced_accuracy, brier_score, f1, roc_auc, weighted_metric
from fvc_lib.metrics.cross_validation import measure_over_folds, within_folds
from fvc_lib.metrics.intervals import group_interval, replicate_values
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, LeakageError
from fvc_lib.services.tables import GROUP_LINKS, PROTOCOL, frame_of
from fvc_lib.tasks.leakage_audit import leakage_audit
from fvc_lib.tasks.video import controls
from fvc_lib.tasks.video.results import METRIC_NAMES, check_predictions, kfold_results, undecoded

CONFIG = RunConfig(bootstrap_replicates=200)
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
def results(tables: Any, folds: pl.DataFrame, predictions: pl.DataFrame) -> pl.DataFrame:
    return kfold_results(tables.index(folds), folds, predictions, CONFIG)


def verdict(results: pl.DataFrame) -> Verdict:
    return judge(overall_scores(results))


def row(results: pl.DataFrame, source: str, scope: str, metric: str) -> dict:
    found = results.filter((pl.col("source") == source) & (pl.col("scope") == scope) & (pl.col("metric") == metric))
    return found.row(0, named=True)


def test_every_source_scope_and_metric_stands_there_once(results: pl.DataFrame) -> None:
    sources = ("model", *ALL_CONTROLS)
    scopes = ("all", "all_by_group", "fold_0", "fold_1", "fold_2", "fold_3")
    uncalibrated = ("brier_score_uncalibrated", "expected_calibration_error_uncalibrated")
    expected = [*itertools.product(sources, scopes, METRIC_NAMES), *itertools.product(["model"], scopes, uncalibrated)]
    assert sorted(results.select("source", "scope", "metric").rows()) == sorted(expected)
    assert results["num_videos"].sum() == (7 * len(METRIC_NAMES) + 2) * (60 + 60 + 60)


def test_rank_metrics_stay_within_folds_and_decisions_are_counted_together(
    results: pl.DataFrame, predictions: pl.DataFrame
) -> None:
    labels = controls.fake_labels(predictions)
    decisions = (predictions["score"] >= predictions["threshold"]).cast(pl.Int64).to_numpy()
    fixed = (predictions["score"] >= 0.5).cast(pl.Int64).to_numpy()
    expected = {
        "roc_auc": within_folds(roc_auc, predictions["fold"])(labels, predictions["score"]),
        "f1": f1(labels, decisions),
        "balanced_accuracy": balanced_accuracy(labels, decisions),
        "brier_score": brier_score(labels, predictions["score"]),
    }
    for metric, value in expected.items():
        assert row(results, "model", "all", metric)["value"] == pytest.approx(value, abs=1e-12), metric
    assert f1(labels, fixed) != pytest.approx(expected["f1"])  # or the thresholds would not have been tested


def test_the_interval_is_that_of_the_same_value(results: pl.DataFrame, predictions: pl.DataFrame) -> None:
    interval = group_interval(
        controls.fake_labels(predictions),
        predictions["score"],
        predictions["group_id"].to_list(),
        within_folds(roc_auc, predictions["fold"]),
        replicates=200,
    )
    got = row(results, "model", "all", "roc_auc")
    assert (got["value"], got["low"], got["high"]) == (interval.value, interval.low, interval.high)
    overall = results.filter(pl.col("scope") == "all").drop_nulls("low")
    assert (overall["low"] <= overall["high"]).all()
    ranked = overall.filter(pl.col("metric") != "expected_calibration_error")  # biased upwards in every replicate
    assert ((ranked["low"] <= ranked["value"] + 1e-12) & (ranked["value"] <= ranked["high"] + 1e-12)).all()
    of_folds = results.filter(pl.col("scope").str.starts_with("fold_")).select("low", "high", "fold_mean", "fold_std")
    assert of_folds.null_count().row(0) == (of_folds.height,) * 4
    by_group = results.filter(pl.col("scope") == "all_by_group")
    assert by_group["fold_mean"].null_count() == by_group.height
    assert by_group.filter(pl.col("value").is_not_null())["low"].null_count() == 0


def test_a_group_has_one_vote_however_many_videos_it_has(tables: Any, folds: pl.DataFrame) -> None:
    kept = folds.filter((pl.int_range(pl.len()) % 3 == 0) | (pl.col("group_id").str.contains("[0-4]>")))
    predictions = tables.predictions(kept, good_scores(kept))
    table = kfold_results(tables.index(kept), kept, predictions, CONFIG)
    squared = predictions.with_columns(
        error=(pl.col("score") - (pl.col("label") == "fake").cast(pl.Float64)) ** 2,
        is_right=(pl.col("score") >= pl.col("threshold")) == (pl.col("label") == "fake"),
    )
    groups = squared.group_by("group_id", "label").agg(pl.col("error", "is_right").mean())
    by_label = groups.group_by("label").agg(pl.col("is_right").mean())
    assert row(table, "model", "all_by_group", "brier_score")["value"] == pytest.approx(groups["error"].mean())
    assert row(table, "model", "all_by_group", "balanced_accuracy")["value"] == pytest.approx(
        by_label["is_right"].mean()
    )
    assert row(table, "model", "all", "brier_score")["value"] == pytest.approx(squared["error"].mean())
    assert groups["error"].mean() != pytest.approx(squared["error"].mean())


def test_what_the_temperature_did_is_shown(results: pl.DataFrame, predictions: pl.DataFrame) -> None:
    labels = controls.fake_labels(predictions)
    uncalibrated = 1 / (1 + np.exp(-predictions["logit"].to_numpy()))
    got = row(results, "model", "all", "brier_score_uncalibrated")
    assert got["value"] == pytest.approx(brier_score(labels, uncalibrated))
    assert got["value"] != pytest.approx(row(results, "model", "all", "brier_score")["value"])


def test_folds_are_described_by_mean_and_deviation(results: pl.DataFrame, predictions: pl.DataFrame) -> None:
    values = []
    for fold in range(4):
        part = predictions.filter(pl.col("fold") == fold)
        values.append(roc_auc(controls.fake_labels(part), part["score"]))
        assert row(results, "model", f"fold_{fold}", "roc_auc")["value"] == values[-1]
        assert row(results, "model", f"fold_{fold}", "roc_auc")["num_groups"] == part["group_id"].n_unique()
    got = row(results, "model", "all", "roc_auc")
    assert got["fold_mean"] == pytest.approx(np.mean(values))
    assert got["fold_std"] == pytest.approx(np.std(values, ddof=1))


def test_controls_are_where_they_belong(results: pl.DataFrame) -> None:
    assert row(results, "constant", "all", "roc_auc")["value"] == 0.5
    assert row(results, "group_lookup_by_group", "all", "roc_auc")["value"] == 0.5
    assert row(results, "group_lookup_by_row", "all", "roc_auc")["value"] > 0.95
    shuffled = row(results, "shuffled_labels", "all", "roc_auc")
    assert shuffled["low"] < 0.5 < shuffled["high"]
    constant = row(results, "constant", "all_by_group", "roc_auc")
    assert (constant["low"], constant["high"]) == (0.5, 0.5)  # nothing about it is uncertain


def test_a_fold_of_one_class_is_null_and_does_not_stop_the_rest(tables: Any, folds: pl.DataFrame) -> None:
    one_class = folds.with_columns(label=pl.when(pl.col("fold") == 2).then(pl.lit("real")).otherwise("label"))
    predictions = tables.predictions(one_class, good_scores(one_class))
    results = kfold_results(tables.index(one_class), one_class, predictions, CONFIG)
    assert row(results, "model", "fold_2", "roc_auc")["value"] is None
    assert row(results, "model", "fold_2", "f1")["value"] is None
    assert row(results, "model", "fold_2", "brier_score")["value"] is not None
    overall = row(results, "model", "all", "roc_auc")
    assert overall["low"] < overall["value"] <= overall["high"]
    assert overall["fold_std"] is not None


def test_one_group_of_fakes_gives_no_interval_and_so_no_claim(tables: Any) -> None:
    folds = tables.folds(num_groups=6, num_folds=2).with_columns(
        label=pl.when(pl.col("video_id").is_in(["video00000", "video00001"]))
        .then(pl.lit("fake"))
        .otherwise(pl.lit("real"))
    )
    results = kfold_results(
        tables.index(folds), folds, tables.predictions(folds, good_scores(folds, separation=9)), CONFIG
    )
    auc = row(results, "model", "all", "roc_auc")
    assert auc["value"] == 1.0
    assert auc["low"] is None
    assert verdict(results).standing != "above control"


def test_a_model_that_only_knows_what_metadata_knows_is_not_above_control(tables: Any, folds: pl.DataFrame) -> None:
    leaky = tables.index(folds, width=[640 if label == "fake" else 320 for label in folds["label"]])
    told = verdict(kfold_results(leaky, folds, tables.predictions(folds, good_scores(folds)), CONFIG))
    assert told.best_control is not None
    assert (told.best_control.source, told.best_control.value) == ("metadata_only", 1.0)
    assert told.standing == "not above control"


def test_good_predictions_pass(folds: pl.DataFrame, predictions: pl.DataFrame) -> None:
    check_predictions(folds, predictions)


@pytest.mark.parametrize(
    ("spoil", "kind", "named"),
    [
        (lambda f, p: (f, pl.concat([p, p[:1]])), LeakageError, "more than once: 'video00000'"),
        (lambda f, p: (f, p[1:]), DataError, "no prediction: 'video00000'"),
        (lambda f, p: (f[1:], p), DataError, "not in the folds.*'video00000'"),
        (lambda f, p: (f, p.with_columns(fold=(pl.col("fold") + 1) % 4)), LeakageError, "another fold.*and 55 more"),
        (lambda f, p: (f, p.with_columns(group_id=pl.lit("g"))), LeakageError, "another fold or group"),
        (lambda f, p: (f, p.with_columns(label=pl.lit("real"))), DataError, "another label"),
        (lambda f, p: (f, p.with_columns(threshold="score")), DataError, "more than one threshold: 0, 1, 2, 3"),
        (lambda f, p: (f, p.with_columns(temperature=1 + pl.col("score"))), DataError, "more than one temperature"),
        (lambda f, p: (f, p.with_columns(temperature=pl.lit(1.9))), DataError, "scores are not sigmoid"),
        (lambda f, p: (f.with_columns(group_id=pl.lit("g")), p), LeakageError, "g"),
    ],
)
def test_predictions_that_do_not_fit_the_folds_are_refused(
    folds: pl.DataFrame, predictions: pl.DataFrame, spoil: object, kind: type[DataError], named: str
) -> None:
    spoilt_folds, spoilt = spoil(folds, predictions)
    with pytest.raises(DataError, match=named) as caught:
        check_predictions(spoilt_folds, spoilt)
    assert type(caught.value) is kind


def test_videos_left_out_may_be_missing_and_must_not_be_predicted(
    tables: Any, folds: pl.DataFrame, predictions: pl.DataFrame
) -> None:
    check_predictions(folds, predictions[1:], left_out=["video00000"])
    with pytest.raises(DataError, match="left out"):
        check_predictions(folds, predictions, left_out=["video00000"])
    results = kfold_results(tables.index(folds), folds, predictions[1:], CONFIG, left_out=["video00000"])
    assert set(results.filter(pl.col("scope") == "all")["num_videos"]) == {59}


def test_labels_shuffled_on_purpose_are_those_the_controls_are_judged_by(tables: Any, folds: pl.DataFrame) -> None:
    shuffled = folds.with_columns(label=pl.Series(np.roll(folds["label"].to_numpy(), 3)))
    predictions = tables.predictions(shuffled, good_scores(shuffled))
    index = tables.index(folds, width=[640 if label == "fake" else 320 for label in shuffled["label"]])
    with pytest.raises(DataError, match="another label"):
        kfold_results(index, folds, predictions, CONFIG)
    results = kfold_results(index, folds, predictions, RunConfig(bootstrap_replicates=200, shuffle_labels=True))
    assert row(results, "metadata_only", "all", "roc_auc")["value"] == 1.0


OF_TARGETS = CONFIG.model_copy(update={"protocol": "leave_one_generator_out", "num_folds": 4})


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
    config, protocol = OF_TARGETS, of_two_targets(folds)
    found = kfold_results(tables.index(folds), folds, predictions, config, protocol=protocol)
    labels, scores = controls.fake_labels(predictions), predictions["score"].to_numpy()
    fold = predictions["fold"].to_numpy()
    pika, sora = fold == 0, fold != 0
    each = [roc_auc(labels[pika], scores[pika]), within_folds(roc_auc, fold[sora])(labels[sora], scores[sora])]
    values = {scope: row(found, "model", scope, "roc_auc")["value"] for scope in ("all", "target:pika", "target:sora")}
    assert values["target:pika"] == pytest.approx(each[0], abs=1e-12)
    assert values["target:sora"] == pytest.approx(each[1], abs=1e-12)
    assert values["all"] == pytest.approx(np.mean(each), abs=1e-12)
    assert values["all"] != pytest.approx(row(kfold_results(
        tables.index(folds), folds, predictions, CONFIG), "model", "all", "roc_auc")["value"], abs=1e-6)  # fmt: skip
    for source in ALL_CONTROLS:  # every target has every control, and learned from the same folds here
        assert row(found, source, "target:pika", "roc_auc")["num_videos"] == int(pika.sum())
    decisions = (predictions["score"] >= predictions["threshold"]).to_numpy().astype(float)
    f1_each = [f1(labels[of], decisions[of]) for of in (pika, sora)]
    assert row(found, "model", "all", "f1")["value"] == pytest.approx(np.mean(f1_each), abs=1e-12)


def test_whatever_stands_beside_the_mean_over_targets_is_one_too(tables: Any, tmp_path: Path) -> None:
    folds = tables.folds(num_groups=160, per_group=1)
    is_fake, good = controls.fake_labels(folds), (folds["fold"] == 0).to_numpy()
    from_web = np.arange(folds.height) // 8 % 2 == 0
    sources = [None if fake else "web" if web else "studio" for fake, web in zip(is_fake, from_web, strict=True)]
    noise = np.random.default_rng(4).normal(size=folds.height)
    logits = noise + np.where(good, 3 * is_fake + 2 * from_web, 0.2 * is_fake + from_web)  # every fold leans one way
    predictions = tables.predictions(folds, 1 / (1 + np.exp(-logits)))
    protocol, index = of_two_targets(folds), tables.index(folds, real_source=sources)
    found = kfold_results(index, folds, predictions, OF_TARGETS, protocol=protocol)
    headline = row(found, "model", "all", "roc_auc")
    audit = leakage_audit(index, folds, predictions, frame_of([], GROUP_LINKS), OF_TARGETS, protocol=protocol)
    numbers = dict(audit.select("check", "number").iter_rows())
    assert numbers["auc_by_group"] == headline["value"]
    reals = ~is_fake.astype(bool)
    each = [
        within_folds(roc_auc, folds["fold"].to_numpy()[of])(from_web[of].astype(int), logits[of])
        for of in (reals & good, reals & ~good)
    ]
    assert row(found, "real_source_floor", "all", "roc_auc")["value"] == pytest.approx(np.mean(each), abs=1e-9)


def test_a_target_without_a_value_leaves_the_mean_over_targets_without_one(
    tables: Any, folds: pl.DataFrame, predictions: pl.DataFrame
) -> None:
    one_class = folds.with_columns(label=pl.when(pl.col("fold") == 0).then(pl.lit("fake")).otherwise("label"))
    judged = predictions.drop("label").join(one_class.select("video_id", "label"), on="video_id")
    judged = judged.select(predictions.columns)
    index, protocol = tables.index(one_class), of_two_targets(one_class)
    found = kfold_results(index, one_class, judged, OF_TARGETS, protocol=protocol)
    assert row(found, "model", "target:sora", "roc_auc")["value"] is not None
    for scope in ("target:pika", "all", "all_by_group"):
        assert [row(found, "model", scope, "roc_auc")[end] for end in ("value", "low", "high")] == [None] * 3


def test_what_only_trains_and_has_no_clip_is_left_out_of_the_controls_as_well(tables: Any, folds: pl.DataFrame) -> None:
    trains_only = folds.filter(pl.col("fold") > 0)["video_id"].to_list()
    protocol = of_two_targets(folds).filter(pl.col("fold") == 0)
    tested = folds.filter(pl.col("fold") == 0)
    clips = folds.filter(~pl.col("video_id").is_in(trains_only[:3]))
    assert undecoded(tested, clips, protocol) == sorted(trains_only[:3])
    assert undecoded(tested, clips) == []
    unused = protocol.with_columns(
        part=pl.when(pl.col("video_id") == trains_only[0]).then(pl.lit("left_out")).otherwise("part")
    )
    assert undecoded(tested, clips, unused) == sorted(trains_only[1:3])
    index = tables.index(folds, width=[640 if label == "fake" else 320 for label in folds["label"]])
    config = CONFIG.model_copy(update={"protocol": "cross_corpus"})
    predictions, links = tables.predictions(tested, good_scores(tested)), frame_of([], GROUP_LINKS)
    fakes = folds.filter((pl.col("label") == "fake") & pl.col("video_id").is_in(trains_only))["video_id"].to_list()
    for left_out, carried in (([], 1), (fakes, 0)):  # without a fake to learn from metadata tells nothing
        audit = leakage_audit(index, tested, predictions, links, config, protocol=protocol, left_out=left_out)
        assert (audit["check"] == "metadata_carriers").sum() == carried


@pytest.mark.parametrize("name", METRIC_NAMES)
def test_the_mean_over_targets_is_read_from_curves_and_sums_as_by_its_definition(
    predictions: pl.DataFrame, name: str
) -> None:
    targets = np.where(predictions["fold"].to_numpy() < 2, "a", "b")
    scores, thresholds, fold = (predictions[each].to_numpy() for each in ("score", "threshold", "fold"))
    metric, values = measure_over_folds(name, scores, thresholds, fold, targets)

    def by_definition(labels: np.ndarray, of: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return np.asarray(metric(labels, of, weights))

    labels, groups = controls.fake_labels(predictions), predictions["group_id"].to_list()
    drawn = [
        replicate_values(labels, [(each, values)], groups, replicates=20, seed=1).replicates
        for each in (metric, weighted_metric(by_definition))
    ]
    np.testing.assert_allclose(*drawn, atol=1e-12)


def test_a_split_of_rows_would_have_recognised_the_groups_of_the_generator_held_out(tables: Any) -> None:
    """By how much rows without groups inflate leave-one-generator-out: the oracle that only knows groups."""
    index = tables.index(tables.folds()).with_columns(
        manipulation=pl.when(pl.col("label") == "fake").then(
            pl.col("group_id").map_elements(lambda group: f"m{sum(map(ord, group)) % 2}", return_dtype=pl.String)
        )
    )  # fmt: skip
    config = CONFIG.model_copy(update={"protocol": "leave_one_generator_out", "num_folds": 2})
    protocol = make_protocol(index, config, controls.tells_labels(config))
    folds = folds_tested(protocol)
    predictions = tables.predictions(folds, good_scores(folds), threshold_of_fold={0: 0.5, 1: 0.5})
    found = kfold_results(index, folds, predictions, config, protocol=protocol)
    honest, by_row = (row(found, f"group_lookup_by_{how}", "all", "roc_auc")["value"] for how in ("group", "row"))
    assert honest == 0.5
    assert by_row > 0.9
