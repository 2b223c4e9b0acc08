"""The dashboard: widgets to choose runs, metrics, folds and smoothing, and panels that show what was chosen.

Panels are ordinary notebook displays that are redrawn in place. A notebook that is executed without a browser therefore
contains the same figures, drawn for the default choice. The modules ``fvc_lib.analysis.figures.*`` register the panels.
"""

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fvc_lib.analysis.dashboard import panels
from fvc_lib.analysis.dashboard.panels import MOST_METRICS, Panel
from fvc_lib.analysis.pages.display import PLOTLY, show_bundle
from fvc_lib.analysis.read.queries import Selection, default_metrics, default_selection, learning_curves
from fvc_lib.analysis.read.runs import run_labels
from fvc_lib.analysis.wording import clean_text, count_text
from fvc_lib.services.atomic_files import path_to_text
from fvc_lib.services.run_paths import ATTEMPT_VARIABLE, list_runs

NO_RESULT = "The chosen run has no result yet: figures appear here as soon as it trains."
_SEVERAL = ("runs", "metrics", "folds")


class Dashboard:
    """The dashboard of a notebook: widgets to choose runs, metrics and folds, and panels that show what was chosen.

    Attributes:
        runs_dir: folder of all runs.
        selection: the runs, metrics and folds that the user has chosen.
        widgets: maps a name to an ipywidget. Empty before ``make_widgets``.
    """

    def __init__(self, runs_dir: Path, selection: Selection) -> None:
        self.runs_dir = runs_dir
        self.selection = selection
        self.widgets: dict[str, Any] = {}
        self._panels = panels.panels()
        self._handles: list[Any] = []
        self._is_offering = False

    def __repr__(self) -> str:
        others = len(self.selection.runs) - 1
        more = f" and {count_text(others, 'other run')}" if others else ""
        return f"Dashboard of {clean_text(path_to_text(self.selection.detailed.run_id))}{more}"

    def _ipython_display_(self) -> None:
        if importlib.util.find_spec("ipywidgets"):  # of the extra ``workbench``; without, the panels alone
            view = self.make_widgets()
            show_bundle({**view._repr_mimebundle_(), "text/plain": repr(self)})
        # In JupyterLab some figures of one cell would be shown as their still pictures, which answer to no control.
        is_headless = ATTEMPT_VARIABLE in os.environ
        bundles = [panel.bundle(self.selection, with_still=is_headless) for panel in self._panels]
        names = {panel.name for panel, bundle in zip(self._panels, bundles, strict=True) if PLOTLY in bundle}
        if names <= {"memory"}:
            show_bundle({"text/plain": NO_RESULT})  # the empty displays after it fill when there is one
        for bundle in bundles:
            self._handles.append(show_bundle(bundle))

    # --- Widgets

    def make_widgets(self) -> Any:
        """Create the widgets, fill their lists, connect their events, and return the box that holds them."""
        import ipywidgets as ipw  # heavy, and only a dashboard with widgets needs it

        look: dict[str, Any] = {"style": {"description_width": "90px"}}
        chosen = {
            "runs": ipw.SelectMultiple(description="Runs", rows=6, layout={"width": "560px"}, **look),
            "detail": ipw.Dropdown(description="In detail", layout={"width": "560px"}, **look),
            "metrics": ipw.SelectMultiple(description="Metrics", rows=6, **look),
            "folds": ipw.SelectMultiple(description="Folds", rows=5, **look),
            "smoothing": ipw.FloatSlider(max=0.95, step=0.05, description="Smoothing", continuous_update=False, **look),
        }
        note = f"Hold Ctrl to choose several; at most {MOST_METRICS} metrics are drawn; no fold chosen: all."
        below = {
            "refresh": ipw.Button(description="Refresh"),
            "note": ipw.Label(note),
        }
        self.widgets = {**chosen, **below}
        self.offer()
        for name, widget in chosen.items():
            widget.observe(partial(self._on_choice, name), names="value")
        self.widgets["refresh"].on_click(lambda _: self.refresh())
        return ipw.VBox([*chosen.values(), ipw.HBox(list(below.values()))])

    def offer(self) -> None:
        """Fill the lists of the widgets with the runs, metrics and folds on disk, and mark ``selection`` in them.

        Before ``make_widgets`` the method does nothing.
        """
        if not self.widgets:
            return
        runs = list_runs(self.runs_dir)[::-1]
        chosen = self.selection.runs
        curves = learning_curves([self.selection.detailed]).frame
        metrics = sorted({*self.selection.metrics, *curves["metric"]})
        folds = sorted(set(curves["fold"].drop_nulls()))
        options = {
            "runs": zip(run_labels(runs), runs, strict=True),
            "detail": zip(run_labels(chosen), chosen, strict=True),
            "metrics": zip(metrics, metrics, strict=True),
            "folds": ((f"fold {fold}", fold) for fold in folds),
        }
        self._is_offering = True
        for name, pairs in options.items():
            self.widgets[name].options = [(clean_text(label), value) for label, value in pairs]
        for name in _SEVERAL:
            offered = [value for _, value in self.widgets[name].options]
            self.widgets[name].value = [value for value in getattr(self.selection, name) if value in offered]
        self.widgets["detail"].value = self.selection.detailed
        self._is_offering = False

    def _on_choice(self, name: str, change: dict[str, Any]) -> None:
        value = change["new"]
        if self._is_offering or (name == "runs" and not value):  # a click clears a list for a moment
            return
        self.choose(**{name: tuple(value) if name in _SEVERAL else value})
        if name in ("runs", "detail"):
            self.offer()

    # --- Redrawing

    def choose(self, **changes: Any) -> Selection:
        """Change fields of ``selection``, redraw the panels that depend on them, and return the new selection.

        ``changes`` maps fields of ``Selection`` to values. If the change puts another run into the detailed view, all
        folds of this run and the default metrics of its task are selected, and every panel is redrawn.
        """
        before = self.selection.detailed
        self.selection = replace(self.selection, **changes)
        run = self.selection.detailed
        if run != before:
            self.selection = replace(self.selection, folds=(), metrics=default_metrics(run))
        self._redraw([panel for panel in self._panels if run != before or set(panel.follows) & set(changes)])
        return self.selection

    def refresh(self) -> None:
        """Look for new runs, read the chosen runs again, and redraw all panels."""
        self.offer()
        self._redraw(self._panels)

    def _redraw(self, chosen: Sequence[Panel]) -> None:
        """Redraw the panels of ``chosen`` in place. Before the dashboard is displayed the method does nothing."""
        for panel, handle in zip(self._panels, self._handles, strict=False):
            if panel in chosen:
                bundle = panel.bundle(self.selection)
                if PLOTLY in bundle:
                    # plotly's JupyterLab extension draws an output once and ignores later data, unless another mimetype
                    # came in between. An empty output of the same height keeps the page from jumping.
                    height = bundle[PLOTLY]["layout"]["height"]
                    blank = {"text/html": f'<div style="height:{height}px"></div>', "text/plain": ""}
                    handle.update(blank, raw=True)
                handle.update(bundle, raw=True)


def dashboard(runs_dir: Path | str, run: str | None = None) -> Dashboard:
    """Return the dashboard, which displays itself as the last expression of a notebook cell.

    Args:
        runs_dir: folder of all runs.
        run: name of the run to show in detail. None: the newest.

    Raises:
        UsageError: ``run`` fits no run or several.
        DataError: a file of the run is damaged.
    """
    return Dashboard(Path(runs_dir), default_selection(Path(runs_dir), run))
