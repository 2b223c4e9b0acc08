"""What disturbed videos cost: paired with the same videos undisturbed, worst first, and what is missing is said."""

import numpy as np
import polars as pl
import pytest
from sklearn.metrics import roc_auc_score

from fvc_lib.analysis.figures.comparisons import levels_figure
from fvc_lib.analysis.read.robustness import findings, robustness_results
from fvc_lib.services.tables import ROBUSTNESS, check_table, frame_of

STRENGTHS = {"h264_crf23": "CRF 23", "h264_crf40": "CRF 40", "lossless": "no change"}


@pytest.fixture
def scored():
    """Forty videos in twenty groups, one fold; CRF 40 makes scores noise and loses two videos."""
    generator = np.random.default_rng(1)
    labels = np.repeat([0, 1], 20)
    plain = np.clip(0.5 + 0.25 * (labels - 0.5) + generator.normal(0, 0.1, 40), 0.01, 0.99)
    levels = {
        "undisturbed": plain, "lossless": plain, "h264_crf23": np.clip(plain + generator.normal(0, 0.05, 40), 0, 1),
        "h264_crf40": generator.uniform(size=40),
    }  # fmt: skip
    rows = [
        {
            "video_id": f"video{number:03d}", "group_id": f"group{number // 2}",
            "label": ("real", "fake")[labels[number]], "fold": 0, "threshold": 0.5, "level": level,
            "kind": level.partition("_")[0], "score": None if (lost := level[-2:] == "40" and number < 2) else value,
            "logit": None if lost else 0.0, "failure": "gone" if lost else None,
        }
        for level, values in levels.items()
        for number, value in enumerate(values)
    ]  # fmt: skip
    return check_table(frame_of({name: [row[name] for row in rows] for name in ROBUSTNESS.columns}, ROBUSTNESS),
                       ROBUSTNESS, "test")  # fmt: skip


@pytest.fixture
def results(scored):
    return robustness_results(scored, STRENGTHS, replicates=200)


def test_each_level_is_compared_with_the_same_videos_undisturbed(scored, results):
    main = results.filter(metric="roc_auc")
    assert main["level"].to_list()[:2] == ["undisturbed", "h264_crf40"], "the worst level comes first"
    worst = main.row(1, named=True)
    both = scored.filter(level="h264_crf40").drop_nulls("score").join(
        scored.filter(level="undisturbed"), on="video_id", suffix="_before"
    )  # fmt: skip
    fakes = (both["label"] == "fake").to_numpy()
    now, before = (roc_auc_score(fakes, both[name].to_numpy()) for name in ("score", "score_before"))
    assert worst["value"] == pytest.approx(now)
    assert worst["undisturbed"] == pytest.approx(before)
    assert worst["difference"] == pytest.approx(now - before)
    assert worst["difference_low"] <= worst["difference"] <= worst["difference_high"] < 0
    assert (worst["num_videos"], worst["num_failed"]) == (38, 2)
    assert main.filter(level="lossless")["difference"].to_list() == [0.0]
    for level in ("undisturbed", "lossless"):  # nothing is claimed of these
        assert main.filter(level=level)["holm_p_value"].to_list() == [None]
    assert main.filter(level="undisturbed")["difference"].to_list() == [None]
    assert (main["holm_p_value"] >= main["p_value"]).drop_nulls().all()


def test_the_sentences_name_the_worst_level_the_control_and_what_is_missing(scored, results):
    text = "\n".join(findings(results))
    assert "Worst: h264, CRF 40: ROC AUC" in text
    assert "At 1 of 2 levels a loss of ROC AUC is shown" in text
    assert "since they have no score: 2 disturbed videos." in text
    assert levels_figure(results).layout.yaxis.ticktext[:2] == ("undisturbed", "h264, CRF 40")
    blind = scored.with_columns(score=pl.when(pl.col("score").is_not_null()).then(0.5))
    text = "\n".join(findings(robustness_results(blind, STRENGTHS, replicates=100)))
    assert "has nothing to lose" in text
    assert "At 0 of 2 levels a loss of ROC AUC is shown" in text
    one_class = pl.when((pl.col("level") != "h264_crf40") | (pl.col("label") == "real")).then("score")
    results = robustness_results(scored.with_columns(score=one_class), STRENGTHS, replicates=100)
    assert results.select("level", "value").row(-1) == ("h264_crf40", None)
    assert "Worst: h264, CRF 23" in "\n".join(findings(results))


def test_of_several_targets_the_numbers_are_the_mean_over_them_as_in_the_results(scored):
    number = pl.col("video_id").str.slice(5).cast(pl.Int64) % 2
    # One target is found by its scores' scale: pooled, the ranking would be another.
    shifted = scored.with_columns(
        target=pl.when(number == 0).then(pl.lit("a")).otherwise(pl.lit("b")),
        score=pl.when(number == 0).then(pl.col("score") / 4).otherwise(0.75 + pl.col("score") / 4),
    )
    before = robustness_results(shifted, STRENGTHS, replicates=50).filter(level="undisturbed", metric="roc_auc")
    own = [
        roc_auc_score(rows["label"] == "fake", rows["score"])
        for rows in shifted.filter(level="undisturbed").partition_by("target")
    ]
    assert before["value"].to_list() == pytest.approx([np.mean(own)])
