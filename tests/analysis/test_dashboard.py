import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import plotly.graph_objects as go
import polars as pl
import pytest
import yaml
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from fvc_lib.analysis.dashboard.dashboard import Controls, Dashboard, LiveRefresh, dashboard
from fvc_lib.analysis.dashboard.panels import (
    MOST_METRICS,
    Panel,
    Selection,
    dashboard_notes,
    default_selection,
    is_nothing,
    panels,
)
from fvc_lib.analysis.figures.theme import with_fold_highlighted
from fvc_lib.analysis.pages.display import PLOTLY
from fvc_lib.analysis.pages.notebook_html import WIDGET
from fvc_lib.services.atomic_files import write_json
from fvc_lib.services.errors import UsageError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import LEAKAGE_AUDIT, read_table, write_table

HOSTILE = '<img src=x onerror=alert(1)>\'; DROP TABLE "runs" [*]\n--'


@pytest.fixture
def runs(make_run: Callable[..., RunPaths]) -> list[RunPaths]:
    return [
        make_run(),
        make_run(name="run_20250305_000000_abcdef02", seed=4, skill=0.3),
        make_run(experiment="other", name="run_20250301_000000_abcdef03"),
    ]


def runs_dir(runs: list[RunPaths]) -> Path:
    return runs[0].root.parent.parent


def shown(name: str, selection: Selection) -> go.Figure:
    return next(panel for panel in panels() if panel.name == name).draw(selection)


def test_the_newest_run_is_chosen_beside_those_of_its_experiment(runs: list[RunPaths]) -> None:
    selection = default_selection(runs_dir(runs))
    assert [run.run_id for run in selection.runs] == [runs[1].run_id, runs[0].run_id]
    assert default_selection(runs_dir(runs), "abcdef03").runs[0].experiment == "other"
    with pytest.raises(UsageError, match="no run called 'zzz'"):
        dashboard(runs_dir(runs), "zzz")


def test_the_dashboard_finds_the_panels_of_every_figure_file_by_itself() -> None:
    code = "from fvc_lib.analysis.dashboard.panels import PANELS, panels; print(len(panels()), PANELS.broken)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    folder = Path(__file__).parents[2] / "fvc_lib" / "analysis"
    declared = sum(path.read_text().count("@PANELS.register_panel(") for path in folder.glob("*/*.py"))
    # Learning curves are declared once for each of three metrics.
    assert done.stdout.split() == [str(declared + MOST_METRICS - 1), "{}"]


def test_the_figures_follow_the_selection(runs: list[RunPaths]) -> None:
    board = dashboard(runs_dir(runs))
    assert len(shown("learning curves 1", board.selection).layout.annotations) == 5  # one panel per fold
    second = next(panel for panel in panels() if panel.name == "learning curves 2")
    assert is_nothing(second.bundle(board.selection))
    chosen = board.choose(folds=(1, 2), metrics=("roc_auc", "loss"), smoothing=0.5)
    curves = shown("learning curves 1", chosen)
    assert [note.text for note in curves.layout.annotations] == ["fold 1", "fold 2"]
    assert "ROC AUC" in curves.layout.title.text
    assert shown("learning curves 2", chosen).layout.title.text.startswith("Loss")
    assert shown("folds", chosen).frame["fold"].to_list() == [1, 2]
    assert "n = " in shown("calibration", chosen).layout.title.subtitle.text
    other = board.choose(detail=runs[0])
    assert other.folds == ()
    assert other.detailed == runs[0]
    assert board.choose(runs=(runs[2],)).detailed == runs[2]


def test_recorded_intervals_are_shown_as_what_they_are_and_a_leak_spoils_the_standing(runs: list[RunPaths]) -> None:
    run = runs[0]
    selection = Selection((run,))
    assert "bars: 95%" in shown("controls", selection).layout.title.subtitle.text
    run.params_yaml.write_text(yaml.safe_dump({**yaml.safe_load(run.params_yaml.read_text()), "confidence": 0.8}))
    for name in ("controls", "slices"):
        assert "bars: 80%" in shown(name, selection).layout.title.subtitle.text.replace("<br>", " ")
    assert "is above its best control" in shown("controls", selection).layout.title.text.replace("<br>", " ")
    audit = read_table(run.leakage_audit, LEAKAGE_AUDIT)
    write_table(audit.with_columns(passed=pl.lit(value=False)), LEAKAGE_AUDIT, run.leakage_audit)
    assert "leakage audit did not pass" in shown("controls", selection).layout.title.text.replace("<br>", " ")


def test_a_panel_is_drawn_again_only_when_something_it_shows_has_changed(runs: list[RunPaths]) -> None:
    selection = default_selection(runs_dir(runs))
    smoother = Selection(selection.runs, smoothing=0.5)

    def changed(before: dict[str, object]) -> set[str]:
        return {panel.name for panel in panels() if panel.key(selection) != before[panel.name]}

    keys = {panel.name: panel.key(selection) for panel in panels()}
    assert {p.name for p in panels() if p.key(smoother) != keys[p.name]} == {f"learning curves {n}" for n in (1, 2, 3)}
    assert changed(keys) == set()
    with selection.detailed.metrics("04_fold_training", 2).open("ab") as stream:
        stream.write(b'{"run_id":"x","st')
    assert changed(keys) == {"learning curves 1", "learning curves 2", "learning curves 3", "notes"}
    shutil.rmtree(selection.runs[1].tables)
    assert "comparison" in changed(keys)
    assert "roc" not in changed(keys)


def test_two_runs_of_one_id_have_columns_of_their_own_names(make_run: Callable[..., RunPaths]) -> None:
    first, second = make_run(experiment="one"), make_run(experiment="two")
    second.params_yaml.write_text("epochs: 77\n")
    (panel,) = [each for each in panels() if each.name == "parameters"]
    shown = str(panel.bundle(Selection((first, second)))["text/html"])
    assert f"one/{first.run_id}" in shown
    assert f"two/{second.run_id}" in shown


def test_a_highlighted_fold_stands_out_wherever_folds_are_shown(runs: list[RunPaths]) -> None:
    selection = default_selection(runs_dir(runs))
    for name in ("roc", "pr", "learning curves 1", "memory"):
        figure = with_fold_highlighted(shown(name, selection), 2)
        opacity = {trace.meta["fold"]: trace.opacity for trace in figure.data if trace.meta}
        assert opacity[2] == 1
        assert all(value < 0.5 for fold, value in opacity.items() if fold != 2), name


def test_skipped_lines_are_told(runs: list[RunPaths]) -> None:
    assert dashboard_notes(default_selection(runs_dir(runs))) == ()
    with runs[1].metrics("04_fold_training", 2).open("ab") as stream:
        stream.write(b'{"run_id":"x","st')
    notes = dashboard_notes(default_selection(runs_dir(runs)))
    assert len(notes) == 1
    assert "04_fold_training_fold_2" in notes[0]


def test_refreshing_goes_on_until_nothing_is_at_work_and_then_says_so() -> None:
    looks, told = iter([True, True, False]), []

    async def look() -> bool:
        return next(looks)

    async def live() -> None:
        refresh = LiveRefresh(look, told.append)
        refresh.start(0.0)
        assert refresh.is_on
        while refresh.is_on:
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(live())
    assert told == ["No chosen run is at work any more: refreshing stopped."]
    assert not list(looks)


def test_refreshing_that_fails_says_why_and_one_that_is_stopped_says_nothing() -> None:
    told: list[str] = []

    async def broken() -> bool:
        raise OSError("the disk\nis gone")

    async def endless() -> bool:
        return True

    async def live() -> None:
        failing, stopped = LiveRefresh(broken, told.append), LiveRefresh(endless, told.append)
        failing.start(0.0)
        stopped.start(0.0)
        await asyncio.sleep(0.01)
        stopped.stop()
        await asyncio.sleep(0.01)

    asyncio.run(live())
    assert told == ["Refreshing stopped: OSError: the disk is gone"]


@pytest.mark.fault(39)
def test_hostile_names_are_text_in_every_panel_and_on_every_list(
    make_run: Callable[..., RunPaths], tmp_path: Path
) -> None:
    made = make_run()
    experiment = made.root.parent.parent / HOSTILE.replace("/", "_")
    experiment.mkdir()
    run = RunPaths(made.root.rename(experiment / f"run_{HOSTILE}"))
    write_json(run.run_json, {"run_id": run.run_id})
    status = json.loads(run.status_json.read_text())
    status["stages"][HOSTILE] = status["stages"].pop("02_folds")
    write_json(run.status_json, status)
    with run.metrics("04_fold_training", 0).open("a") as stream:
        line = {"run_id": HOSTILE, "ts": 1, "step": 1, "epoch": 0, "phase": HOSTILE, "metric": HOSTILE, "value": 0.5}
        stream.write(json.dumps(line) + "\n")
    board = dashboard(experiment.parent, None)
    board.choose(metrics=(HOSTILE, "loss"))
    for panel in panels():
        assert_is_text(panel, board.selection)
    labels = [label for label, _ in controls_of(board).widgets["runs"].options]
    assert len(labels) == 1
    assert "\n" not in labels[0]
    for widget in controls_of(board).widgets.values():
        assert not getattr(widget, "description_allow_html", False)


def assert_is_text(panel: Panel, selection: Selection) -> None:
    """Plotly obeys tags in texts and a browser those in HTML, so neither may hold one as it was given."""
    bundle = panel.bundle(selection)
    for kind in (PLOTLY, "text/html"):
        assert "<img" not in json.dumps(bundle.get(kind, "")), panel.name


def controls_of(board: Dashboard) -> Controls:
    return Controls(board.runs_dir, board.selection, board.choose, board.refresh, board.follow)


def test_the_highlighted_fold_is_chosen_by_its_button_until_another_run_is_shown(runs: list[RunPaths]) -> None:
    board = dashboard(runs_dir(runs))
    board.controls = controls_of(board)
    buttons = board.controls.widgets["highlight"]
    assert buttons.label == "none"
    for label, fold in (("2", 2), ("none", None), ("3", 3)):
        buttons.label = label
        assert board.selection.highlight == fold
    board.refresh()
    assert (board.selection.highlight, buttons.label) == (3, "3")
    board.controls.widgets["detail"].value = runs[0]
    assert (board.selection.highlight, buttons.label) == (None, "none")


@pytest.mark.long
def test_headless_and_live_show_the_same_figures_and_controls_redraw_them(runs: list[RunPaths]) -> None:
    folder = str(runs_dir(runs))
    copied = runs_dir(runs) / "copied" / "run_20250306_000000_abcdef04"
    sources = [
        (
            "from fvc_lib.analysis.dashboard.dashboard import dashboard\n"
            f"board = dashboard({folder!r})\ndashboard({folder!r})"
        ),
        "board",
        "board.controls.widgets['metrics'].value = ('roc_auc',)\nboard.controls.widgets['folds'].value = (3,)",
        f"import shutil\nshutil.copytree({str(runs[0].root)!r}, {str(copied)!r})\nboard.refresh()",
        "print([label for label, run in board.controls.widgets['runs'].options][0])",
        "import asyncio\nboard.controls.widgets['live'].value = True",
        "while board.controls.widgets['live'].value: await asyncio.sleep(0.05)",
        "print(board.controls.widgets['told'].value)",
    ]
    titles = [figure_title(panel.bundle(default_selection(runs_dir(runs)))) for panel in panels()]
    document = new_notebook(cells=[new_code_cell(source) for source in sources])
    NotebookClient(document, timeout=300, kernel_name="python3").execute()
    untouched, moved, found, live = (document.cells[number] for number in (0, 1, 4, 7))
    outputs = untouched.outputs
    assert WIDGET in outputs[0].data
    assert outputs[0].data["text/plain"].startswith("Dashboard of run_20250305_000000_abcdef02 beside 1 other run")
    assert [figure_title(output.data) for output in outputs[1:]] == titles
    redrawn = [figure_title(output.data) for output in moved.outputs[1:]]
    assert len(redrawn) == len(titles)
    assert any(title.startswith("ROC AUC") for title in redrawn)
    assert redrawn[0] == titles[0]
    assert found.outputs[0].text == "frame_cnn · copied / run_20250306_000000_abcdef04\n"
    assert "No chosen run is at work any more" in live.outputs[-1].text


def figure_title(data: dict[str, dict[str, dict[str, dict[str, str]]]]) -> str:
    return data[PLOTLY]["layout"]["title"]["text"] if PLOTLY in data else ""
