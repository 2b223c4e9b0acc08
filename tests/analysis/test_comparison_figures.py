from collections.abc import Callable

import pytest

from fvc_lib.analysis.figures.results import difference_figure
from fvc_lib.analysis.read.comparison import Comparison, compare
from fvc_lib.services.run_paths import RunPaths

MakeRun = Callable[..., RunPaths]


@pytest.fixture
def comparison(make_run: MakeRun) -> Comparison:
    runs = [make_run(name=f"run_{skill}", skill=skill) for skill in (1.6, 2.6)]
    runs.append(make_run(name="run_<b>", seed=1, skill=1.6))
    return compare(runs, metric="brier_score", replicates=400)


def test_each_pair_is_a_point_with_its_interval_filled_where_a_difference_is_shown(comparison: Comparison) -> None:
    figure = difference_figure(comparison)
    shown = [pair.is_shown for pair in comparison.pairs]
    assert True in shown
    assert False in shown
    for trace, pair in zip(figure.data, comparison.pairs, strict=True):
        difference = pair.difference
        assert trace.x[0] == difference.value
        assert trace.x[0] + trace.error_x.array[0] == pytest.approx(difference.high)
        assert trace.x[0] - trace.error_x.arrayminus[0] == pytest.approx(difference.low)
        assert (trace.marker.color != "white") is pair.is_shown
    assert figure.layout.title.text == f"{sum(shown)} of 3 pairs of runs show a difference in Brier score"


def test_zero_is_drawn_and_in_the_middle_and_the_axis_says_which_side_is_better(comparison: Comparison) -> None:
    figure = difference_figure(comparison)
    low, high = figure.layout.xaxis.range
    assert low == -high
    assert [(line.x0, line.x1) for line in figure.layout.shapes] == [(0, 0)]
    assert figure.layout.yaxis.title.text == "Pair of runs"
    assert figure.layout.xaxis.title.text == "Brier score, second run minus first (below 0: the second is better)"


def test_names_are_text(comparison: Comparison) -> None:
    figure = difference_figure(comparison)
    assert figure.data[1].y == ("run_&lt;b&gt;<br>minus run_1.6",)


def test_one_pair_has_its_finding_as_title(make_run: MakeRun) -> None:
    runs = [make_run(name="run_a", skill=0.8), make_run(name="run_b", skill=2.8)]
    compared = compare(runs, replicates=400)
    figure = difference_figure(compared)
    assert figure.layout.title.text.replace("<br>", " ").startswith("run_b is above run_a by 0.")
    assert "above 0: the second is better" in figure.layout.xaxis.title.text


def test_without_a_pair_the_figure_says_why(make_run: MakeRun) -> None:
    runs = [make_run(name="run_a"), make_run(name="run_b")]
    runs[0].predictions(0).unlink()
    figure = difference_figure(compare(runs))
    assert figure.layout.title.text == "Differences in ROC AUC: nothing to show"
    assert "no predictions of fold 0 of 5" in figure.layout.title.subtitle.text.replace("<br>", " ")
    runs.append(make_run(name="run_c"))
    runs[2].predictions(1).unlink()
    reasons = difference_figure(compare(runs)).layout.title.subtitle.text.replace("<br>", " ")
    assert " | run_c: there are no predictions of fold 1 of 5" in reasons
    assert "Choose two" in difference_figure(compare(runs[:0])).layout.title.subtitle.text
