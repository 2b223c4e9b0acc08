import json
from collections.abc import Callable
from pathlib import Path

import plotly.graph_objects as go
import pytest

from fvc_lib.analysis.figures.memory import growth_figure, phase_peaks_figure, stage_timeline_figure
from fvc_lib.analysis.memory import MemoryFindings, predictions_table, run_memory
from fvc_lib.analysis.read.queries import memory_peaks
from fvc_lib.services.run_paths import RunPaths
from tests.analysis.memory_story import StoryWriter, troubled_run

FIGURES = [phase_peaks_figure, stage_timeline_figure, growth_figure]
Draw = Callable[[MemoryFindings], go.Figure]


def title(figure: go.Figure) -> str:
    return str(figure.layout.title.text).replace("<br>", " ")


def named(figure: go.Figure, name: str) -> go.Scatter:
    return next(trace for trace in figure.data if trace.name == name)


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "e" / "run_x")


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> MemoryFindings:
    return run_memory(troubled_run(tmp_path_factory.mktemp("troubled") / "e" / "run_x"))


@pytest.mark.parametrize("draw", FIGURES)
def test_every_figure_has_a_finding_and_counts(draw: Draw, troubled: MemoryFindings) -> None:
    figure = draw(troubled)
    assert len(title(figure)) > 30
    assert any(char.isdigit() for char in figure.layout.title.subtitle.text)
    json.loads(figure.to_json())


@pytest.mark.parametrize("draw", FIGURES)
def test_nothing_recorded_is_said(draw: Draw, run: RunPaths) -> None:
    figure = draw(run_memory(run))
    assert "nothing to show" in title(figure)
    assert not figure.data


@pytest.mark.parametrize("draw", FIGURES)
def test_names_are_text(draw: Draw, run: RunPaths) -> None:
    hostile = "<a href='http:x'>b</a>".replace("/", "|")
    writer = StoryWriter(run, stage=hostile)
    writer.sample(500, hostile).event("preflight", hostile, predicted_peak_mb=1.0).event(hostile, hostile)
    for epoch in range(6):
        writer.sample(500, epoch=epoch, device=hostile, rss_mb=100)
    assert "<a " not in draw(run_memory(run)).to_json().replace("\\u003c", "<")


def test_bars_show_the_highest_of_all_folds_and_marks_each_fold(troubled: MemoryFindings) -> None:
    bars, marks = phase_peaks_figure(troubled).data
    height = dict(zip(bars.y, bars.x, strict=True))
    assert height["04_fold_training:<br>train"] == 1930
    assert height["01_data_index:<br>whole stage"] == 430
    both = [x for x, y in zip(marks.x, marks.y, strict=True) if y == "04_fold_training:<br>train"]
    assert sorted(both) == [1836, 1930]


def test_a_title_never_calls_a_peak_what_a_bar_or_line_is_above(run: RunPaths) -> None:
    StoryWriter(run).sample(300, "setup").sample(669, "preflight").sample(542, epoch=1)
    found = run_memory(run)
    assert max(phase_peaks_figure(found).data[0].x) == 669
    for draw in (phase_peaks_figure, stage_timeline_figure):
        assert title(draw(found)).startswith("Memory peaks at 669 MB of 2.00 GB allowed")
    assert memory_peaks([run]).frame["peak_rss_bytes"].to_list() == [669_000_000]  # the report's and the dashboard's

    StoryWriter(run, "01_data_index", None, budget_mb=20_000).sample(900, "setup")  # a job of its own, with more
    told = title(phase_peaks_figure(run_memory(run)))
    assert told.startswith("Memory is nearest to its budget at 669 MB of 2.00 GB allowed")
    assert title(stage_timeline_figure(run_memory(run))) == told


def test_a_line_reaches_the_peak_between_two_samples_that_its_title_names(run: RunPaths) -> None:
    StoryWriter(run).sample(500, "setup").sample(600).sample(610, highest_mb=800).sample(600, highest_mb=800)
    figure = stage_timeline_figure(run_memory(run))
    assert title(figure).startswith("Memory peaks at 800 MB")
    assert max(figure.data[0].y) == 800


def test_the_budget_is_drawn_where_it_is_in_sight_and_told_where_it_is_not(
    troubled: MemoryFindings, run: RunPaths
) -> None:
    for draw in (phase_peaks_figure, stage_timeline_figure):
        assert {"budget", "90%"} <= {note.text for note in draw(troubled).layout.annotations}
    StoryWriter(run, budget_mb=25_000).sample(600)
    for draw in (phase_peaks_figure, stage_timeline_figure):
        figure = draw(run_memory(run))
        assert "budget" not in {note.text for note in figure.layout.annotations}
        assert "budget 25.00 GB, out of sight" in figure.layout.title.subtitle.text


def test_stages_lie_end_to_end_and_events_at_their_moment(run: RunPaths) -> None:
    index = StoryWriter(run, "01_data_index", None)
    for _ in range(10):
        index.sample(300, "setup")
    StoryWriter(run).sample(500, "setup").sample(900).event("out_of_memory", "it <b>ended</b>", seconds=0.5).sample(800)
    figure = stage_timeline_figure(run_memory(run))
    first, second = (trace for trace in figure.data if trace.name == "process with children")
    assert list(first.x) == list(range(1, 11))
    assert list(second.x) == [11, 12, 13.5]
    event = named(figure, "out of memory")
    assert (event.x[0], event.customdata[0]) == (12.5, "it &lt;b&gt;ended&lt;/b&gt;")


def test_a_line_breaks_where_a_killed_stage_began_again(run: RunPaths) -> None:
    StoryWriter(run).sample(500).sample(600).resume().sample(100).sample(200)
    lines = [trace for trace in stage_timeline_figure(run_memory(run)).data if trace.name == "process with children"]
    assert [list(line.y) for line in lines] == [[500, 600], [100, 200]]
    assert [line.showlegend for line in lines] == [True, False]


def test_a_long_log_is_thinned_and_keeps_its_peak(run: RunPaths) -> None:
    path = run.memory("04_fold_training", 0)
    path.parent.mkdir(parents=True)
    path.write_text(
        "".join(
            f'{{"timestamp":{second},"elapsed_seconds":{second},"phase":"train","rss_mb":{500 + second % 7}}}\n'
            for second in range(20_000)
        )
        + '{"timestamp":20000,"elapsed_seconds":20000,"phase":"train","rss_mb":900}\n'
    )
    line = stage_timeline_figure(run_memory(run)).data[0]
    assert len(line.x) <= 3000
    assert max(line.y) == 900
    assert min(line.y) == 506  # of neighbours the highest


def test_the_fitted_line_of_a_leak_goes_through_its_points(troubled: MemoryFindings) -> None:
    points, line = growth_figure(troubled).data[:2]
    assert points.name == "fold 0, attempt 1, train"
    assert line.x == (2, 10)
    assert line.y[1] - line.y[0] == pytest.approx(8 * 92)
    assert line.y[0] == pytest.approx(points.y[1], abs=10)
    assert title(growth_figure(troubled)).startswith("Memory leaks: 92.0 MB more with every epoch")


def test_prediction_and_measurement_stand_in_one_row(troubled: MemoryFindings) -> None:
    shown = predictions_table(troubled).select("predicted", "measured", "off_by")
    assert shown.rows() == [("1.15 GB", "1.88 GB", "-39%"), ("1.50 GB", "1.93 GB", "-22%")]


def test_an_accelerator_has_a_line_and_bars_of_its_own(run: RunPaths) -> None:
    writer = StoryWriter(run)
    for used in (2000, 6000, 4000):
        writer.sample(700).sample(used, seconds=0, device="cuda:0", rss_mb=600)
    found = run_memory(run)
    assert list(named(stage_timeline_figure(found), "cuda:0").y) == [2000, 6000, 4000]
    assert "04_fold_training:<br>train, cuda:0" in phase_peaks_figure(found).data[0].y
    assert title(phase_peaks_figure(found)).startswith("Memory of cuda:0 peaks at 6.00 GB")
