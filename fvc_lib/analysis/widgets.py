"""The live dashboard: choose runs, metric, folds and smoothing, and see the figures change.

The figures are ordinary displays that the controls redraw in place. So a notebook that is run without a front end
holds the same figures for the same defaults, and the controls only add to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis.notebook_html import PLOTLY
from fvc_lib.analysis.queries import compare_runs, learning_curves, memory_samples, predictions, results
from fvc_lib.analysis.result_figures import controls_figure, roc_figure, run_comparison_figure
from fvc_lib.analysis.training_figures import learning_curves_figure, memory_timeline_figure
from fvc_lib.analysis.wording import count_text
from fvc_lib.services.path_text import path_to_text
from fvc_lib.services.run_paths import RunPaths, find_run, list_runs

_MOST_RUNS = 8  # chosen by default; more are chosen by hand
_ROC_REPLICATES = 500  # a redraw must feel immediate; the report's own figure has more


@dataclass(frozen=True)
class Selection:
    """What the dashboard shows.

    Attributes:
        runs: the chosen runs; the first is the one shown in detail.
        metric: the metric of the learning curves.
        folds: the folds shown; empty means all.
        smoothing: of the learning curves, in [0, 1).
    """

    runs: tuple[RunPaths, ...]
    metric: str = "loss"
    folds: tuple[int, ...] = ()
    smoothing: float = 0.0


def default_selection(runs_dir: Path, run: str | None = None) -> Selection:
    """The named run (or the newest) in detail, beside the newest others of its experiment.

    Raises:
        UsageError: ``run`` names none or several, or there is no run at all.
    """
    chosen = find_run(runs_dir, run or "latest")
    others = [
        other for other in reversed(list_runs(runs_dir)) if other.experiment == chosen.experiment and other != chosen
    ]
    return Selection((chosen, *others[: _MOST_RUNS - 1]))


def dashboard_figures(selection: Selection) -> list[go.Figure]:
    """The figures for ``selection``, always the same five: controls, ROC, learning curves, memory, comparison."""
    detailed = selection.runs[:1]
    curves = learning_curves(detailed, metrics=[selection.metric], folds=selection.folds).frame
    scored = predictions(detailed).frame
    if selection.folds:
        scored = scored.filter(pl.col("fold").is_in(selection.folds))
    return [
        controls_figure(results(detailed).frame),
        roc_figure(scored, replicates=_ROC_REPLICATES),
        learning_curves_figure(curves, selection.metric, smoothing=selection.smoothing),
        memory_timeline_figure(memory_samples(detailed).frame),
        run_comparison_figure(compare_runs(selection.runs).frame),
    ]


def dashboard_notes(selection: Selection) -> tuple[str, ...]:
    """In words, what of the chosen runs could not be read."""
    answers = (results(selection.runs), learning_curves(selection.runs), memory_samples(selection.runs))
    return tuple(dict.fromkeys(note for answer in answers for note in answer.notes))


def dashboard(runs_dir: Path | str, run: str | None = None) -> Dashboard:
    """The dashboard over ``runs_dir``; show it by making it a cell's last expression.

    Raises:
        UsageError: as ``default_selection``.
    """
    return Dashboard(Path(runs_dir), default_selection(Path(runs_dir), run))


class Dashboard:
    """Controls and the figures they redraw. ``selection`` says what is shown now."""

    def __init__(self, runs_dir: Path, selection: Selection) -> None:
        self.runs_dir = runs_dir
        self.selection = selection
        self._displays: list[Any] = []
        self._controls: dict[str, Any] = {}

    def __repr__(self) -> str:
        others = len(self.selection.runs) - 1
        beside = f" beside {count_text(others, 'other run')}" if others else ""
        return f"Dashboard of {path_to_text(self.selection.runs[0].run_id)}{beside}"

    def _ipython_display_(self) -> None:
        _display({**self._make_controls()._repr_mimebundle_(), "text/plain": repr(self)})
        self._displays = [_display(bundle) for bundle in self._bundles()]

    def choose(self, **changes: Any) -> None:
        """Change the selection (fields of ``Selection``) and redraw what is displayed."""
        self.selection = replace(self.selection, **changes)
        self.redraw()

    def redraw(self) -> None:
        """Read the runs again and redraw: what the refresh button does while a run is training."""
        if self._displays:
            for handle, bundle in zip(self._displays, self._bundles(), strict=True):
                handle.update(bundle, raw=True)

    def _bundles(self) -> list[dict[str, Any]]:
        notes = "\n".join(dashboard_notes(self.selection)) or "All lines of the chosen runs could be read."
        return [*map(figure_bundle, dashboard_figures(self.selection)), {"text/plain": notes}]

    def _make_controls(self) -> Any:
        import ipywidgets  # heavy, and nothing but the live dashboard needs it

        runs = {
            f"{path_to_text(r.experiment)} / {path_to_text(r.run_id)}": r for r in reversed(list_runs(self.runs_dir))
        }
        curves = learning_curves(self.selection.runs[:1]).frame
        metrics = sorted({self.selection.metric, *curves["metric"].unique()})
        folds = [int(fold) for fold in curves["fold"].drop_nulls().unique().sort()]
        wide = {"description_width": "90px"}
        self._controls = {
            "runs": ipywidgets.SelectMultiple(
                options=list(runs.items()), value=self.selection.runs, description="Runs", style=wide,
                rows=min(6, max(2, len(runs))), layout={"width": "520px"},
            ),
            "metric": ipywidgets.Dropdown(
                options=metrics, value=self.selection.metric, description="Metric", style=wide
            ),
            "folds": ipywidgets.SelectMultiple(
                options=folds, value=self.selection.folds, description="Folds", style=wide,
                rows=min(6, max(2, len(folds))),
            ),
            "smoothing": ipywidgets.FloatSlider(
                min=0.0, max=0.95, step=0.05, value=0.0, description="Smoothing", continuous_update=False, style=wide
            ),
        }  # fmt: skip
        for name, control in self._controls.items():
            control.observe(lambda change, name=name: self._changed(name, change["new"]), names="value")
        refresh = ipywidgets.Button(description="Refresh", tooltip="Read the runs again")
        refresh.on_click(lambda _: self.redraw())
        left = ipywidgets.VBox([self._controls["runs"], refresh])
        right = ipywidgets.VBox([self._controls[name] for name in ("metric", "folds", "smoothing")])
        return ipywidgets.HBox([left, right])

    def _changed(self, name: str, value: Any) -> None:
        if name == "runs" and not value:
            return  # a list cleared for a moment while another entry is clicked
        self.choose(**{name: tuple(value) if name in {"runs", "folds"} else value})


def figure_bundle(figure: go.Figure) -> dict[str, Any]:
    """What a notebook stores of a figure: plotly's small mimetype and the title as plain text, nothing else."""
    spec = {key: value for key, value in figure.to_plotly_json().items() if key in {"data", "layout"}}
    title = figure.layout.title.text or "figure"
    return {PLOTLY: {**spec, "config": {"displaylogo": False}}, "text/plain": title.replace("<br>", " ")}


def show_figures(figures: Sequence[go.Figure]) -> None:
    """Display ``figures`` in a notebook, each as its plotly mimetype, whatever plotly's default renderer is."""
    for figure in figures:
        _display(figure_bundle(figure))


def _display(bundle: dict[str, Any]) -> Any:
    """Send ``bundle`` to the front end, if any, and into the record; the handle returned can update it."""
    from IPython.display import display  # only a notebook has it at hand, and only a notebook comes here

    return display(bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call]  # IPython is half typed
