"""The controls of the live dashboard. What they offer is text: a run's or metric's name is shown, never obeyed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fvc_lib.analysis.dashboard_selection import MOST_METRICS, Selection, metric_options, run_label, run_options
from fvc_lib.analysis.fold_clicks import NO_FOLD, fold_clicks
from fvc_lib.analysis.wording import clean_text

_LABEL = {"description_width": "90px"}
_MOST_ROWS = 6
_LIVE_SECONDS = 5.0
_NO_HIGHLIGHT = [("none", NO_FOLD)]  # not None, which ipywidgets takes for nothing chosen and marks no button for
_HELP = "Hold Ctrl to choose several. A click on a fold's curve or bar highlights it everywhere."


class Controls:
    """The widgets, and what follows when they are moved.

    Args:
        runs_dir: where runs are looked for.
        selection: what is chosen at first.
        choose: is called with the fields of ``Selection`` that have changed, and returns all of it.
        refresh: is called when the reader asks for it.
        follow: is called with seconds, or None, when the reader wants the figures refreshed by themselves.
    """

    def __init__(
        self,
        runs_dir: Path,
        selection: Selection,
        choose: Callable[..., Selection],
        refresh: Callable[[], None],
        follow: Callable[[float | None], None],
    ) -> None:
        self._runs_dir = runs_dir
        self._choose = choose
        self._follow = follow
        self._quiet = False
        self.widgets: dict[str, Any] = _make_widgets()
        self.offer(selection)
        for name in ("runs", "detail", "metrics", "folds", "smoothing", "highlight"):
            self.widgets[name].observe(lambda change, name=name: self._moved(name, change["new"]), names="value")
        self.widgets["clicks"].observe(self._clicked, names="fold")
        self.widgets["live"].observe(self._live_moved, names="value")
        self.widgets["seconds"].observe(self._live_moved, names="value")
        self.widgets["refresh"].on_click(lambda _: refresh())
        self.view = _laid_out(self.widgets)

    def offer(self, selection: Selection) -> None:
        """Put what there is to choose from now on the lists, and mark what is chosen; nothing is redrawn by it."""
        metrics, folds = metric_options(selection.detailed)
        with self._quietly():
            _set_options(self.widgets["runs"], run_options(self._runs_dir), selection.runs)
            beside = [(clean_text(run_label(run)), run) for run in selection.runs]
            _set_options(self.widgets["detail"], beside, selection.detailed)
            _set_options(self.widgets["metrics"], [(clean_text(name), name) for name in metrics], selection.metrics)
            _set_options(self.widgets["folds"], [(f"fold {fold}", fold) for fold in folds], selection.folds)
            _set_options(
                self.widgets["highlight"], [*_NO_HIGHLIGHT, *((str(k), k) for k in folds)], _shown(selection.highlight)
            )
            self.widgets["clicks"].fold = _shown(selection.highlight)  # a click on the fold that stands out ends it
            for name, count in (("runs", len(self.widgets["runs"].options)), ("metrics", len(metrics))):
                self.widgets[name].rows = min(_MOST_ROWS, max(2, count))

    def live_ended(self, why: str) -> None:
        """Untick the box of refreshing by itself and say why."""
        with self._quietly():
            self.widgets["live"].value = False
        self.widgets["told"].value = why

    def _moved(self, name: str, value: Any) -> None:
        if self._quiet or (name == "runs" and not value):
            return  # a list is cleared for a moment while another entry is clicked
        several = name in {"runs", "metrics", "folds"}
        chosen = tuple(value) if several else value
        if name == "metrics":
            chosen = chosen[:MOST_METRICS]
        if name == "highlight":
            self.widgets["clicks"].fold = value
            chosen = None if value == NO_FOLD else value
        selection = self._choose(**{name: chosen})
        if name in {"runs", "detail"}:
            self.offer(selection)  # the folds and metrics of another run

    def _clicked(self, change: dict[str, Any]) -> None:
        if change["new"] in {value for _, value in self.widgets["highlight"].options}:
            self.widgets["highlight"].value = change["new"]

    def _live_moved(self, change: dict[str, Any]) -> None:
        del change
        if self._quiet:
            return
        is_on = self.widgets["live"].value
        self.widgets["told"].value = "Refreshing while a chosen run is at work." if is_on else ""
        self._follow(float(self.widgets["seconds"].value) if is_on else None)

    @contextlib.contextmanager
    def _quietly(self) -> Iterator[None]:
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before


def _shown(highlight: int | None) -> int:
    """``Selection.highlight`` as the widgets hold it."""
    return NO_FOLD if highlight is None else highlight


def _set_options(widget: Any, options: list[tuple[str, Any]], chosen: Any) -> None:
    """Replace what ``widget`` offers where that differs, and choose of ``chosen`` what is offered."""
    offered = [(clean_text(label), value) for label, value in options]
    if list(widget.options) != offered:
        widget.options = offered
    values = [value for _, value in offered]
    if isinstance(chosen, tuple):
        widget.value = tuple(value for value in chosen if value in values)
    elif chosen in values:
        widget.value = chosen


def _make_widgets() -> dict[str, Any]:
    import ipywidgets  # heavy, and nothing but the live dashboard needs it

    look: dict[str, Any] = {"style": _LABEL}
    return {
        "runs": ipywidgets.SelectMultiple(description="Runs", layout={"width": "560px"}, **look),
        "detail": ipywidgets.Dropdown(description="In detail", layout={"width": "560px"}, **look),
        "metrics": ipywidgets.SelectMultiple(description="Metrics", tooltip=f"at most {MOST_METRICS}", **look),
        "folds": ipywidgets.SelectMultiple(description="Folds", tooltip="none chosen: all", rows=5, **look),
        "smoothing": ipywidgets.FloatSlider(
            min=0.0, max=0.95, step=0.05, value=0.0, description="Smoothing", continuous_update=False, **look
        ),
        "highlight": ipywidgets.ToggleButtons(
            description="Highlight", options=_NO_HIGHLIGHT, style={**_LABEL, "button_width": "56px"}
        ),
        "refresh": ipywidgets.Button(
            description="Refresh", tooltip="Look for new runs and read the chosen ones again", icon="refresh"
        ),
        "live": ipywidgets.Checkbox(description="Refresh while running, every", indent=False, layout={"width": "auto"}),
        "seconds": ipywidgets.BoundedFloatText(
            value=_LIVE_SECONDS, min=1.0, max=3600.0, step=1.0, description="", layout={"width": "70px"}
        ),
        "told": ipywidgets.Label(""),
        "clicks": fold_clicks(),
    }  # fmt: skip


def _laid_out(widgets: dict[str, Any]) -> Any:
    import ipywidgets

    seconds = ipywidgets.HBox([widgets["live"], widgets["seconds"], ipywidgets.Label("s")])
    live = ipywidgets.HBox([widgets["refresh"], seconds, widgets["told"]])
    left = ipywidgets.VBox([widgets[name] for name in ("runs", "detail", "highlight")])
    right = ipywidgets.VBox([widgets[name] for name in ("metrics", "folds", "smoothing")])
    lists = ipywidgets.HBox([left, right])
    # The one that listens for clicks has no look, but must be on the page.
    widgets["clicks"].layout = {"height": "0px", "margin": "0px", "overflow": "hidden"}
    return ipywidgets.VBox([ipywidgets.Label(_HELP), lists, live, widgets["clicks"]])
