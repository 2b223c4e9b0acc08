"""The dashboard: panels follow the widgets, and names stay text."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import plotly.graph_objects as go
import pytest

from fvc_lib.analysis.dashboard import dashboard as dashboards
from fvc_lib.analysis.dashboard.dashboard import Dashboard, dashboard
from fvc_lib.analysis.dashboard.panels import (
    MOST_METRICS,
    NOTHING,
    PANELS,
    Panel,
    panels,
)
from fvc_lib.analysis.figures import roc_and_calibration
from fvc_lib.analysis.pages.display import PLOTLY
from fvc_lib.analysis.read.queries import Selection
from fvc_lib.services.atomic_files import write_json
from fvc_lib.services.run_paths import RunPaths

SHOWN = ("controls", "learning curves 1", "folds", "notes")
HOSTILE = '<img src=x onerror=alert(1)>\'; DROP TABLE "runs" [*]\n--'


@pytest.fixture
def runs(make_run: Callable[..., RunPaths]) -> list[RunPaths]:
    return [
        make_run(),
        make_run(name="run_20250305_000000_abcdef02"),
        make_run(experiment="other", name="run_20250301_000000_abcdef03"),
    ]


def shown(name: str, selection: Selection) -> go.Figure:
    return next(panel for panel in panels() if panel.name == name).draw(selection)


class Handle:
    """A display that keeps what it is given."""

    def __init__(self) -> None:
        self.bundles: list[dict[str, object]] = []

    def update(self, bundle: dict[str, object], raw: bool) -> None:
        assert raw
        self.bundles.append(bundle)


@pytest.fixture
def board(runs: list[RunPaths], monkeypatch: pytest.MonkeyPatch) -> Dashboard:
    """A shown dashboard of four panels, whose displays are ``Handle``."""
    some = [panel for panel in panels() if panel.name in SHOWN]
    monkeypatch.setattr(dashboards.panels, "panels", lambda: some)
    monkeypatch.setattr(dashboards, "show_bundle", lambda _: Handle())
    shown_board = dashboard(runs[0].root.parents[1])
    shown_board._ipython_display_()
    for handle in shown_board._handles:
        handle.bundles.clear()
    return shown_board


def redrawn(board: Dashboard) -> set[str]:
    """The panels that were redrawn since the last call."""
    names = {panel.name for panel, handle in zip(board._panels, board._handles, strict=True) if handle.bundles}
    for handle in board._handles:
        handle.bundles.clear()
    return names


def test_the_dashboard_finds_the_panels_of_every_figure_file_by_itself() -> None:
    folder = Path(__file__).parents[2] / "fvc_lib" / "analysis"
    declared = sum(path.read_text().count("PANELS.register_panel(") for path in folder.glob("*/*.py"))
    # Learning curves are declared once for three metrics, ROC and calibration once for two panels.
    assert (len(panels()), PANELS.broken) == (declared + MOST_METRICS, {})


def test_the_figures_follow_the_selection(runs: list[RunPaths]) -> None:
    board = dashboard(runs[0].root.parents[1])
    assert len(shown("learning curves 1", board.selection).layout.annotations) == 5  # one panel per fold
    assert shown("learning curves 2", board.selection) == NOTHING
    chosen = board.choose(folds=(1, 2), metrics=("roc_auc", "loss"), smoothing=0.5)
    curves = shown("learning curves 1", chosen)
    assert len(curves.layout.annotations) == 2
    assert "ROC AUC" in curves.layout.title.text
    assert shown("learning curves 2", chosen).layout.title.text.startswith("Loss")
    assert shown("folds", chosen).frame["fold"].to_list() == [1, 2]
    other = board.choose(detail=runs[0])
    assert (other.folds, other.detailed, other.metrics) == ((), runs[0], ("loss",))
    assert board.choose(runs=(runs[2],)).detailed == runs[2]


@pytest.mark.slow
def test_widgets_redraw_the_panels_that_follow_them_and_no_other(board: Dashboard, runs: list[RunPaths]) -> None:
    widgets = board.widgets
    widgets["smoothing"].value = 0.5
    assert redrawn(board) == {"learning curves 1"}
    widgets["folds"].value = (1, 3)
    assert board.selection.folds == (1, 3)
    assert redrawn(board) == {"learning curves 1", "folds"}
    widgets["metrics"].value = ("roc_auc",)
    assert redrawn(board) == {"learning curves 1"}
    with board.selection.detailed.metrics("04_fold_training", 2).open("ab") as stream:
        stream.write(b'{"run_id":"x","st')
    widgets["refresh"].click()
    assert redrawn(board) == set(SHOWN)
    widgets["runs"].value = ()  # as for a moment while another entry is clicked
    assert redrawn(board) == set()
    widgets["detail"].value = runs[0]
    assert (board.selection.detailed, board.selection.folds, widgets["folds"].value) == (runs[0], (), ())
    assert "folds" in redrawn(board)


def test_a_run_without_a_result_shows_one_sentence(
    make_run: Callable[..., RunPaths], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, displays = make_run(), []
    for folder in (run.tables, run.root / "metrics"):
        shutil.rmtree(folder)
    run.results.unlink()
    monkeypatch.setattr(dashboards, "show_bundle", displays.append)
    dashboard(run.root.parents[1])._ipython_display_()
    texts = [shown["text/plain"] for shown in displays if PLOTLY not in shown]
    assert [text for text in texts if text != NOTHING][1:2] == [dashboards.NO_RESULT]
    assert not [text for text in texts if "each outer fold" in text]


@pytest.mark.fault(41)
def test_a_panel_that_fails_says_so_in_its_place(make_run: Callable[..., RunPaths]) -> None:
    bundle = Panel("ROC", 1, lambda _: 1 / 0).bundle(dashboard(make_run().root.parent.parent).selection)
    assert bundle == {"text/plain": "ROC cannot be shown: ZeroDivisionError: division by zero"}


@pytest.mark.slow
@pytest.mark.fault(39)
def test_hostile_names_are_text_in_every_panel_and_on_every_list(
    make_run: Callable[..., RunPaths], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roc_and_calibration, "QUICK_REPLICATES", 5)
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
        bundle = panel.bundle(board.selection)
        for kind in (PLOTLY, "text/html"):
            assert "<img" not in json.dumps(bundle.get(kind, ""), default=str), panel.name
    board.make_widgets()
    (label,) = [label for label, _ in board.widgets["runs"].options]
    assert "\n" not in label
    for widget in board.widgets.values():
        assert not getattr(widget, "description_allow_html", False)
