from collections.abc import Callable
from pathlib import Path

import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from fvc_lib.analysis.notebook_html import PLOTLY, WIDGET
from fvc_lib.analysis.widgets import dashboard, dashboard_figures, dashboard_notes, default_selection, figure_bundle
from fvc_lib.services.errors import UsageError
from fvc_lib.services.run_paths import RunPaths


@pytest.fixture
def runs(make_run: Callable[..., RunPaths]) -> list[RunPaths]:
    return [
        make_run(),
        make_run(name="run_20250305_000000_abcdef02", seed=4, skill=0.3),
        make_run(experiment="other", name="run_20250301_000000_abcdef03"),
    ]


def runs_dir(runs: list[RunPaths]) -> Path:
    return runs[0].root.parent.parent


def test_the_newest_run_is_chosen_beside_those_of_its_experiment(runs: list[RunPaths]) -> None:
    selection = default_selection(runs_dir(runs))
    assert [run.run_id for run in selection.runs] == [runs[1].run_id, runs[0].run_id]
    assert default_selection(runs_dir(runs), "abcdef03").runs[0].experiment == "other"
    with pytest.raises(UsageError, match="no run called 'zzz'"):
        dashboard(runs_dir(runs), "zzz")


def test_the_figures_follow_the_selection(runs: list[RunPaths]) -> None:
    selection = default_selection(runs_dir(runs))
    figures = dashboard_figures(selection)
    assert len(figures) == 5
    assert len(figures[2].layout.annotations) == 5  # one panel per fold
    board = dashboard(runs_dir(runs))
    board.choose(folds=(1, 2), metric="roc_auc", smoothing=0.5, runs=(runs[0],))
    chosen = dashboard_figures(board.selection)
    assert [note.text for note in chosen[2].layout.annotations] == ["fold 1", "fold 2"]
    assert "ROC AUC" in chosen[2].layout.title.text
    assert len(chosen[4].data) == 1


def test_skipped_lines_are_told(runs: list[RunPaths]) -> None:
    assert dashboard_notes(default_selection(runs_dir(runs))) == ()
    with runs[1].metrics("04_fold_training", 2).open("ab") as stream:
        stream.write(b'{"run_id":"x","st')
    notes = dashboard_notes(default_selection(runs_dir(runs)))
    assert len(notes) == 1
    assert notes[0].startswith("1 line of ")
    assert "04_fold_training_fold_2.jsonl: 1" in notes[0]


def test_a_figure_is_stored_small_and_without_html(runs: list[RunPaths]) -> None:
    bundle = figure_bundle(dashboard_figures(default_selection(runs_dir(runs)))[0])
    assert set(bundle) == {PLOTLY, "text/plain"}
    assert bundle["text/plain"].startswith("The model is")


@pytest.mark.slow
def test_headless_and_live_show_the_same_figures_and_controls_redraw_them(runs: list[RunPaths]) -> None:
    folder = str(runs_dir(runs))
    sources = [
        f"from fvc_lib.analysis.widgets import dashboard\nboard = dashboard({folder!r})\ndashboard({folder!r})",
        "board",
        "board._controls['metric'].value = 'roc_auc'\nboard._controls['folds'].value = (3,)",
    ]
    document = new_notebook(cells=[new_code_cell(source) for source in sources])
    untouched, moved, _ = NotebookClient(document, timeout=300, kernel_name="python3").execute().cells
    outputs = untouched.outputs
    assert WIDGET in outputs[0].data
    assert outputs[0].data["text/plain"].startswith("Dashboard of run_20250305_000000_abcdef02 beside 1 other run")
    figures = [output.data[PLOTLY] for output in outputs if PLOTLY in output.data]
    assert [figure["layout"]["title"]["text"] for figure in figures] == [
        figure.layout.title.text for figure in dashboard_figures(default_selection(runs_dir(runs)))
    ]
    assert outputs[-1].data["text/plain"] == "All lines of the chosen runs could be read."
    redrawn = [output.data[PLOTLY] for output in moved.outputs if PLOTLY in output.data]
    assert len(redrawn) == len(figures) == 5
    assert redrawn[2]["layout"]["title"]["text"].startswith("ROC AUC")
    assert [note["text"] for note in redrawn[2]["layout"]["annotations"]] == ["fold 3"]
