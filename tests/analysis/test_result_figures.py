"""What the figures and tables of the results notebook show is what the predictions say."""

from collections.abc import Callable

import numpy as np
import plotly.graph_objects as go
import polars as pl
import pytest
from hypothesis import given, settings, strategies as st
from sklearn.metrics import average_precision_score

from fvc_lib.analysis.figures.gallery import CLIP_GONE, mistakes_gallery, worst_mistakes
from fvc_lib.analysis.figures.results import (
    audit_figure,
    audit_table,
    chosen_table,
    control_table,
    failed_checks,
    metric_table,
    score_distribution_figure,
    slices_figure,
)
from fvc_lib.analysis.figures.roc_and_calibration import (
    binned_shares,
    calibration_figure,
    pr_band,
    risk_coverage_figure,
    share_of_fakes,
)
from fvc_lib.analysis.pages.display import HtmlTable
from fvc_lib.analysis.read import queries
from fvc_lib.analysis.read.cautions import audit_facts
from fvc_lib.metrics.calibration import equal_width_edges, expected_calibration_error
from fvc_lib.metrics.cross_validation import within_folds
from fvc_lib.metrics.intervals import GroupCounts, draw_half_samples, group_codes, interval_ends
from fvc_lib.services import tables
from fvc_lib.services.errors import DataError
from fvc_lib.services.run_paths import RunPaths
from tests.analysis.test_roc_bands import sample

HOSTILE = "<script>alert('x')</script>\n\"; DROP TABLE runs; --"


def title(figure: go.Figure) -> str:
    return str(figure.layout.title.text).replace("<br>", " ")


@pytest.fixture
def predictions(run: RunPaths) -> pl.DataFrame:
    return queries.predictions([run]).frame.drop("run_id")


@given(st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_the_area_under_each_folds_precision_curve_is_its_average_precision(seed: int) -> None:
    labels, scores, groups, folds = sample(seed)
    band = pr_band(labels, scores, groups, folds, replicates=2)
    own, weights, shares = [], [], []
    for fold in range(3):
        inside = folds == fold
        own.append(average_precision_score(labels[inside], scores[inside]))
        weights.append(labels[inside].sum() * (1 - labels[inside]).sum())
        shares.append(labels[inside].mean())
        # The grid has 200 steps and a curve jumps at most once per fake, by at most 1.
        assert band.fold_heights[fold].mean() == pytest.approx(own[-1], abs=(labels[inside].sum() + 1) / 200)
        assert band.fold_heights[fold][-1] == pytest.approx(
            labels[inside][scores[inside] >= scores[inside][labels[inside] == 1].min()].mean()
        )
    assert band.area == pytest.approx(np.average(own, weights=weights))
    assert within_folds(share_of_fakes, folds)(labels, scores) == pytest.approx(np.average(shares, weights=weights))


def test_bins_hold_the_shares_and_one_group_gives_no_interval() -> None:
    labels = np.array([0, 0, 1, 1, 1, 0], np.int64)
    scores = np.array([0.11, 0.12, 0.15, 0.91, 0.95, 0.99])
    shares = binned_shares(labels, scores, ["a", "b", "c", "d", "d", "d"], replicates=200)
    np.testing.assert_allclose(shares.fake_shares, [1 / 3, 2 / 3])
    np.testing.assert_allclose(shares.mean_scores, [0.38 / 3, 2.85 / 3])
    assert shares.counts.tolist() == [3, 3]
    assert shares.num_groups.tolist() == [3, 1]
    assert shares.low[0] <= 1 / 3 <= shares.high[0]
    assert np.isnan([shares.low[1], shares.high[1]]).all()


def test_bins_of_groups_are_those_of_rows_to_the_bit() -> None:
    labels, scores, groups, _ = sample(3)
    found = binned_shares(labels, scores, groups, replicates=50, seed=1)
    group_of_row, num_groups = group_codes(groups, labels.size)
    weights = next(draw_half_samples(labels, group_of_row, num_groups, replicates=50, seed=1))[:, group_of_row]
    bins = np.digitize(scores, equal_width_edges(10)[1:-1])
    inside = bins[:, None] == np.unique(bins)
    with np.errstate(invalid="ignore"):
        shares = (weights @ (inside * labels[:, None])) / (weights @ inside.astype(float))
    sizes = [GroupCounts((number,), number) for number in found.num_groups.tolist()]
    ends = np.array(
        [
            interval_ends(found.fake_shares[[place]], shares[:, place][None], (0, 1), of_bin, 0.95)
            for place, of_bin in enumerate(sizes)
        ]
    )[..., 0]
    known = np.isfinite(found.low)
    assert known.any()
    assert np.array_equal(ends[known], np.stack([found.low, found.high], axis=1)[known])


def test_figures_of_many_videos_are_small_and_say_what_they_leave_out() -> None:
    count = 20_000
    rng = np.random.default_rng(0)
    predictions = pl.DataFrame(
        {
            "video_id": map(str, range(count)), "group_id": [f"g{n // 9}" for n in range(count)], "fold": 0,
            "label": rng.choice(["real", "fake"], count), "score": rng.random(count), "threshold": 0.5,
        }
    )  # fmt: skip
    curve, bars = risk_coverage_figure(predictions, replicates=2), score_distribution_figure(predictions)
    assert "2,000 of the curve's 20,000 points" in curve.to_json()
    model = next(trace for trace in curve.data if trace.name == "Model")
    assert (len(model.x), model.x[-1]) == (2_000, 1.0)
    assert max(len(figure.to_json()) for figure in (curve, bars)) < 100_000
    assert sum(sum(trace.y) for trace in bars.data) == count
    assert "points" not in risk_coverage_figure(predictions.head(2_000), replicates=2).to_json()


def test_calibration_is_shown_before_and_after_the_temperature(predictions: pl.DataFrame) -> None:
    labels = (predictions["label"] == "fake").cast(pl.Int64).to_numpy()
    before = 1 / (1 + np.exp(-predictions["logit"].to_numpy()))
    then, now = (expected_calibration_error(labels, values) for values in (before, predictions["score"].to_numpy()))
    figure = calibration_figure(predictions, replicates=20)
    assert title(figure) == (
        f"A score is off the share of fakes by {now:.2f} on average; before its temperature by {then:.2f}"
    )
    assert {"Before temperature", "Score"} <= {trace.name for trace in figure.data}


def test_slices_of_one_class_or_none_at_all_are_said_in_words(run: RunPaths) -> None:
    slices = tables.read_table(run.slices, tables.SLICES)
    nothing = pl.lit(None, pl.Float64)
    figure = slices_figure(slices.with_columns(number=nothing, low=nothing, high=nothing))
    assert title(figure).startswith("Every slice is too small")
    assert {"one class only"} == {note.text for note in figure.layout.annotations}
    assert "nothing to show" in title(slices_figure(slices.clear()))


def test_every_metric_is_told_by_video_and_by_group(run: RunPaths) -> None:
    results = tables.read_table(run.results, tables.RESULTS)
    table = metric_table(results)
    assert table.columns == ["metric", "better", "by_video", "by_group", "fold_mean", "fold_std"]
    assert table.filter(pl.col("metric") == "Brier score")["better"].item() == "lower"
    assert table["by_group"].null_count() == 0
    controls = control_table(results)
    assert controls["metric"].to_list() == table["metric"].to_list()
    assert controls.width == 2 + results["source"].n_unique()


def test_what_was_chosen_is_told_fold_by_fold(predictions: pl.DataFrame) -> None:
    table = chosen_table(predictions, {2: (7, 18, 5)})
    assert table["epoch"].to_list() == [None, None, 7, None, None]
    assert table["fold"].to_list() == list(range(5))
    assert table["temperature"].to_list() == [1.25] * 5
    assert table["num_test_videos"].sum() == predictions.height


def test_the_audit_says_what_a_split_by_row_would_have_claimed(run: RunPaths) -> None:
    results = tables.read_table(run.results, tables.RESULTS)
    assert "would have claimed an AUC of 1.000; split by group it gets 0.500" in title(audit_figure(results))
    audit = tables.read_table(run.leakage_audit, tables.LEAKAGE_AUDIT)
    assert audit_table(audit)["verdict"].to_list() == ["passed", "for information"]
    assert audit_facts(run) == (("Leakage audit", "1 of 1 check passed"),)
    assert failed_checks(audit) == []
    assert failed_checks(audit.with_columns(passed=pl.lit(value=False))) == audit["finding"].to_list()


def test_the_worst_mistakes_are_those_furthest_over_the_threshold_with_their_frames(
    run: RunPaths, predictions: pl.DataFrame
) -> None:
    index = tables.read_table(run.index, tables.INDEX)
    worst = worst_mistakes(predictions, index, 3)
    assert worst["distance"].is_sorted(descending=True)
    assert ((worst["score"] >= worst["threshold"]) != (worst["label"] == "fake")).all()
    gone = worst["video_id"][1]

    def read_clip(video_id: str, number: int) -> np.ndarray:
        assert number == 0
        if video_id == gone:
            raise DataError("no such clip")
        return np.full((6, 3, 200, 200), 90, np.uint8)

    gallery = mistakes_gallery(predictions, index, read_clip, 3)
    html = gallery._repr_html_()
    assert html.count("data:image/jpeg;base64,") == 2
    assert html.count(CLIP_GONE) == 1
    assert CLIP_GONE in repr(gallery)
    assert "<b>&'" not in html  # as the files of this corpus are called
    assert [card.picture is None for card in gallery.cards] == [False, True, False]
    assert len(html) < 20_000
    assert "No video is decided wrongly" in mistakes_gallery(predictions.clear(), index, read_clip)._repr_html_()


@pytest.mark.fault(38, 39)
def test_hostile_names_are_text_in_figures_and_tables_of_results(make_run: Callable[..., RunPaths]) -> None:
    run = make_run()
    index = tables.read_table(run.index, tables.INDEX)
    predictions = queries.predictions([run]).frame.drop("run_id")
    named = index.with_columns(path=pl.format("{} {}", pl.lit(HOSTILE), "video_id"), manipulation=pl.lit(HOSTILE))
    slices = tables.read_table(run.slices, tables.SLICES).with_columns(value=pl.lit(HOSTILE), slice_by=pl.lit(HOSTILE))
    audit = tables.read_table(run.leakage_audit, tables.LEAKAGE_AUDIT).with_columns(finding=pl.lit(HOSTILE))
    gallery = mistakes_gallery(predictions, named, lambda *_: np.zeros((1, 3, 20, 20), np.uint8))
    shown = [
        gallery._repr_html_(),
        HtmlTable(audit_table(audit))._repr_html_(),
        # As plotly would obey them: tags in its texts, however JSON spells them.
        str(slices_figure(slices).to_plotly_json()),
    ]
    for text in shown:
        assert "<script" not in text
        assert "script" in text
