"""An audit finds what was planted in a table of scores, and its numbers are scikit-learn's."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import sklearn.metrics

from fvc_lib.analysis.audit import findings, numbers
from fvc_lib.analysis.figures import comparisons as figures
from fvc_lib.analysis.read.headline import judge
from fvc_lib.services.errors import UsageError
from fvc_lib.tasks.video.controls import controls_of_scores

HOW = numbers.Settings(replicates=100)


def sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values))


def standing(audit: numbers.Audit, detector: str) -> str:
    return judge(audit.scores(detector), measure=numbers.MEASURE).standing


@pytest.fixture(scope="module")
def planted() -> tuple[pl.DataFrame, pl.DataFrame]:
    """Groups of three: ``weak`` and ``same`` are alike, ``strong`` is better, ``source`` reads where reals are from."""
    generator = np.random.default_rng(0)
    groups = np.repeat(np.arange(160), 3)
    labels = groups % 2
    by_group = generator.normal(0, 1, 160)[groups]
    is_web = (groups // 2) % 2 == 0
    is_hard = (labels == 1) & (groups % 4 == 1)
    videos = pl.DataFrame(
        {
            "video_id": [f"v{number:04}" for number in range(480)],
            "label": np.where(labels == 1, "fake", "real").tolist(),
            "group_id": [f"g{group}" for group in groups],
            "generator": [
                None if not fake else "hard" if hard else "easy" for fake, hard in zip(labels, is_hard, strict=True)
            ],
            "real_source": [
                None if fake else "web" if web else "phone" for fake, web in zip(labels, is_web, strict=True)
            ],
            "corpus": ["one"] * 480,
        }
    )
    weak = sigmoid(labels + by_group + generator.normal(0, 0.3, 480) - 1.5 * is_hard)
    scores = pl.DataFrame(
        {
            "weak": weak,
            "same": sigmoid(np.log(weak / (1 - weak)) + generator.normal(0, 0.05, 480)),
            "strong": 5 * labels + by_group + generator.normal(0, 0.3, 480),
            "source": sigmoid(3 * labels - 6 * (is_web & (labels == 0)) + generator.normal(0, 1, 480)),
        }
    )
    answered = np.arange(480) % 10 != 0
    return videos, scores.with_columns(same=pl.when(pl.Series(answered)).then("same"))


@pytest.fixture(scope="module")
def audit(planted) -> numbers.Audit:
    videos, scores = planted
    controls, _ = controls_of_scores(videos, numbers.group_ids(videos).tolist())
    return numbers.audit_scores(videos, scores, HOW, controls=controls)


def test_the_better_detector_is_shown_and_the_equal_ones_are_not(audit):
    shown = {frozenset(row[:2]): row[2] for row in audit.differences.select("first", "second", "is_shown").iter_rows()}
    assert audit.detectors[0] == "strong"
    assert shown[frozenset({"weak", "strong"})]
    assert not shown[frozenset({"weak", "same"})]
    assert len(shown) == 6
    assert audit.num_common == 432
    answer = " ".join(findings.answer(audit))
    assert "strong has the highest of 4 detectors" in answer
    assert "Missing: metadata only, clip length only (to get it: --corpus" in answer


def test_numbers_are_scikit_learns_on_the_videos_that_each_detector_answered(planted, audit):
    videos, scores = planted
    for name in scores.columns:
        rows = scores[name].is_not_null()
        labels = (videos.filter(rows)["label"] == "fake").to_numpy()
        column = scores[name].drop_nulls().to_numpy()
        wanted = {
            "roc_auc": sklearn.metrics.roc_auc_score(labels, column),
            "partial_auc_to_10_percent": sklearn.metrics.roc_auc_score(labels, column, max_fpr=0.1),
            "average_precision": sklearn.metrics.average_precision_score(labels, column),
        }
        if name != "strong":
            wanted["brier_score"] = sklearn.metrics.brier_score_loss(labels, column)
        for metric, value in wanted.items():
            assert audit.interval(name, metric)[0] == pytest.approx(value, abs=1e-12), (name, metric)
    assert audit.interval("strong", "brier_score") == (None, None, None), "its scores are no probabilities"
    assert audit.interval("weak", "true_positive_rate_at_0_1_percent")[0] is None, "240 reals cannot resolve it"


def test_slices_come_worst_first_and_are_scikit_learns(planted, audit):
    videos, scores = planted
    own = audit.slices.filter(detector="weak")
    assert own["auc"].to_list() == sorted(own["auc"].to_list())
    hard = own.filter(value="hard").row(0, named=True)
    rows = (videos["label"] == "real") | (videos["generator"] == "hard")
    labels = (videos.filter(rows)["label"] == "fake").to_numpy()
    assert hard["auc"] == pytest.approx(sklearn.metrics.roc_auc_score(labels, scores.filter(rows)["weak"]), abs=1e-12)
    assert hard["auc"] < own.filter(value="easy")["auc"].item()
    assert hard["num_groups"] == 40
    assert "Its worst" in " ".join(findings.answer(audit))


def test_thresholds_are_judged_on_the_half_that_did_not_choose_them(audit):
    row = audit.thresholds.filter(detector="strong", point="fpr=0.05").row(0, named=True)
    assert 0 <= row["fpr_low"] <= row["fpr"] <= row["fpr_high"] < 0.2
    assert row["tpr"] > 0.8
    assert row["lowest_threshold"] < row["highest_threshold"]
    assert not audit.thresholds.filter(point="fpr=0.001")["is_resolved"].any()
    unresolved = findings.main_table(replace(audit, settings=numbers.Settings("fpr=0.001")))
    assert unresolved["fpr"].null_count() == 4


def test_who_leaves_out_videos_is_not_put_first_and_no_winner(planted, tmp_path):
    videos, scores = planted
    hard = (videos["generator"].fill_null("") == "hard") & (pl.int_range(480, eager=True) % 3 == 0)
    table = scores.select(weak="weak", picky=pl.when(~hard).then(pl.col("weak") - 0.05 * (pl.int_range(480) % 2)))
    found = numbers.audit_scores(videos, table, HOW)
    assert found.interval("picky")[0] > found.interval("weak")[0]
    assert (found.detectors, found.apart) == (("weak", "picky"), ())
    assert found.of_coverage("picky", "auc_if_wrong") < found.interval("weak")[0]
    limits = findings.cautions(found, has_groups=False, notes=["A note."])
    assert any("picky 40 (" in line for line in limits)
    assert f"the {480 - 40} of 480 videos" in findings.answer(found)[0]
    assert any("each video is taken for a group of its own" in line for line in limits)
    findings.write_tables(found, tmp_path, limits)
    lines = (tmp_path / findings.ANSWER).read_text().splitlines()
    assert lines == [*findings.answer(found), "", *findings.table_lines(found), "", *limits]
    noise = pl.Series(np.random.default_rng(3).normal(0, 2.5, 480))
    table = scores.select(bold=pl.col("strong") + noise, shy=pl.when(pl.int_range(480) % 12 > 0).then("strong"))
    found = numbers.audit_scores(videos, table, HOW)
    assert (found.detectors[0], found.differences["is_shown"].item()) == ("shy", True)
    assert "left 40 videos unanswered: call it no winner" in findings.answer(found)[1]


def test_who_answers_few_videos_stands_apart_and_cuts_no_comparison(planted):
    videos, scores = planted
    few = pl.when(pl.int_range(480) % 3 == 0).then("strong")
    one_label = pl.when(pl.Series(videos["label"] == "real")).then("weak")
    table = scores.select("weak", "same", few=few, blind=one_label, stuck=pl.lit(0.5))
    found = numbers.audit_scores(videos, table, HOW)
    assert (found.apart, found.num_common) == (("few", "blind"), 432)
    assert found.detectors[-2:] == found.apart, "a high number on few videos wins nothing"
    labels, both = (videos["label"] == "fake").to_numpy(), scores["same"].is_not_null().to_numpy()
    wanted = sklearn.metrics.roc_auc_score(labels[both], scores["weak"].to_numpy()[both])
    assert found.compared("weak")[0] == pytest.approx(wanted, abs=1e-12)
    assert found.compared("few") == found.interval("few")
    assert set(found.differences["first"]) | set(found.differences["second"]) == {"weak", "same", "stuck"}
    _, _, *rows = findings.table_lines(found)
    assert [row.split()[0] for row in rows] == list(found.detectors)
    assert all(word in rows[-2] for word in (" 33.3 ", f"{found.interval('few')[0]:.3f}"))
    assert "2 detectors answered less than 90%" in " ".join(findings.answer(found))
    assert "few (apart)" in str(figures.detectors_figure(found).to_dict())
    alone = numbers.audit_scores(videos, table.select("weak", "few"), HOW)
    assert (alone.detectors, alone.common.height) == (("weak", "few"), 0)
    assert findings.answer(alone)[0].startswith("weak: ")
    few_all = numbers.audit_scores(videos, scores.select(few=few, other=few + 1), HOW)
    assert (few_all.apart, few_all.num_common) == ((), 160), "if none answers most, all are compared"


def test_a_detector_that_reads_the_source_of_reals_is_caught_by_its_floor(planted, audit):
    floor = audit.floors.filter(detector="source").row(0, named=True)
    assert floor["value"] > 0.95
    assert {floor["higher"], floor["lower"]} == {"phone", "web"}
    assert audit.floors.filter(detector="weak")["low"].item() < 0.5
    videos, scores = planted
    web = pl.col("real_source") == "web"
    one = videos.with_columns(group_id=pl.when(web).then(pl.lit("one")).otherwise("group_id"))
    found = numbers.audit_scores(one, scores.select("source"), HOW)
    assert found.floors.is_empty(), "what parts a single group from others is no recognition of its source"
    assert any("10 groups each" in line for line in findings.cautions(found, has_groups=True))


def test_a_group_lookup_by_row_is_no_control_to_be_above(audit):
    values = dict(audit.controls.select("source", "value").iter_rows())
    assert values["constant"] == pytest.approx(0.5)
    assert values["group_lookup_by_row"] > 0.9
    assert standing(audit, "strong") == "not shown", "nobody asked what needs the videos"
    low, high = audit.shuffled.filter(detector="strong").select("low", "high").row(0)
    assert low < 0.5 < high


def test_a_detector_stands_beside_its_controls_on_the_same_videos(planted):
    """Where only the easy half is answered, a control that is as good there is not beaten for being worse elsewhere."""
    videos, scores = planted
    generator = np.random.default_rng(2)
    labels = (videos["label"] == "fake").to_numpy()
    answered = np.arange(480) < 240
    noise = generator.normal(0, 1, 480)
    control = np.where(answered, 5 * labels + noise, noise)
    fold = pl.Series(np.arange(480) % 2)
    controls = {name: pl.DataFrame({"fold": fold, "score": control}) for name in ("metadata_only", "length_only")}
    half = scores.select(half=pl.when(pl.Series(answered)).then("strong"))
    audit = numbers.audit_scores(videos, half, HOW, controls=controls)
    assert audit.controls["num_videos"].unique().to_list() == [240]
    assert audit.controls["value"].min() > 0.95
    assert standing(audit, "half") == "not above control"
    lead = findings.answer(audit)[0]
    assert "on the 240 of 480 videos that it answered, in 80 groups" in lead
    every = {name: each.with_columns(score=pl.Series(noise)) for name, each in controls.items()}
    assert standing(numbers.audit_scores(videos, half, HOW, controls=every), "half") == "above control"


def test_a_detector_that_ranks_the_other_way_is_told_and_a_threshold_that_was_given_is_used(planted):
    videos, scores = planted
    how = numbers.Settings("threshold=2.5", replicates=100)
    audit = numbers.audit_scores(videos, scores.select(pl.col("strong"), turned=-pl.col("weak")), how)
    told = findings.cautions(audit, has_groups=True)
    assert any("turned ranks reals above fakes" in line and "--higher-is-real" in line for line in told)
    labels, strong = (videos["label"] == "fake").to_numpy(), scores["strong"].to_numpy()
    wanted = sklearn.metrics.balanced_accuracy_score(labels, strong >= 2.5)
    assert audit.interval("strong", "balanced_accuracy")[0] == pytest.approx(wanted, abs=1e-12)
    given = audit.thresholds.filter(detector="strong", point="threshold=2.5").row(0, named=True)
    assert given["fpr"] == pytest.approx((strong[~labels] >= 2.5).mean(), abs=1e-12)
    assert findings.main_table(audit)["fpr"][0] == f"{given['fpr']:.1%}"
    with pytest.raises(UsageError, match="threshold=NUMBER"):
        numbers.Settings("fpr=2")


def test_one_detector_without_anything_known_gives_what_can_be_given():
    facts = {name: pl.lit(None, pl.String) for name in ("group_id", "generator", "real_source", "corpus")}
    videos = pl.DataFrame({"video_id": ["a", "b", "c"], "label": ["real", "fake", "fake"]}).with_columns(**facts)
    scores = pl.DataFrame({"one": [0.1, 0.9, None]})
    controls, missing = controls_of_scores(videos, numbers.group_ids(videos).tolist())
    audit = numbers.audit_scores(videos, scores, HOW, controls=controls)
    assert audit.interval("one") == (1.0, None, None)
    assert "No control" in missing[0]
    assert "Not shown to be above its controls" in " ".join(findings.answer(audit))
    assert "one" in figures.detectors_figure(audit).layout.title.text
