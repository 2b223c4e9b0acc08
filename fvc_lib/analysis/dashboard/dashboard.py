"""The live dashboard: choose runs, metrics, folds and smoothing, and see the figures change.

The figures are ordinary displays that the controls redraw in place. So a notebook that is run without a front end
holds the same figures for the same defaults, and the controls only add to them. The panels are those that
``fvc_lib.analysis.figures.*`` registers; so a stage that shows the dashboard depends on their code.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from fvc_lib.analysis.dashboard import panels
from fvc_lib.analysis.dashboard.panels import MOST_METRICS, Bundle, Selection
from fvc_lib.analysis.pages.display import PLOTLY, show_bundle
from fvc_lib.analysis.read.naming import run_labels
from fvc_lib.analysis.read.records import run_status
from fvc_lib.analysis.wording import clean_text, count_text
from fvc_lib.services.atomic_files import path_to_text
from fvc_lib.services.run_paths import RunPaths

# --- Looking again and again while a run is at work, without keeping the kernel from anything else

_AT_WORK = frozenset({"running", "waiting"})


class LiveRefresh:
    """A task in the running event loop that calls ``look`` at an interval until it returns False."""

    def __init__(self, look: Callable[[], Awaitable[bool]], say: Callable[[str], None]) -> None:
        self._look = look
        self._say = say
        self._task: asyncio.Task[None] | None = None

    @property
    def is_on(self) -> bool:
        """Whether the task is running."""
        return self._task is not None and not self._task.done()

    def start(self, seconds: float) -> None:
        """Start the task, or restart it with another interval; ``RuntimeError`` without a running event loop."""
        loop = asyncio.get_running_loop()
        self.stop()
        self._task = loop.create_task(self._repeat(seconds))
        self._task.add_done_callback(self._ended)

    def stop(self) -> None:
        """Stop the task, also within a call."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _repeat(self, seconds: float) -> None:
        while await self._look():
            await asyncio.sleep(seconds)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._say(f"Refreshing stopped: {clean_text(f'{type(error).__name__}: {error}')}")
        else:
            self._say("No chosen run is at work any more: refreshing stopped.")


def any_at_work(runs: Iterable[RunPaths]) -> bool:
    """Return whether any of ``runs`` is running or waits to run."""
    return any(run_status(run).get("state") in _AT_WORK for run in runs)


# --- The controls of the live dashboard

_LABEL = {"description_width": "90px"}
_MOST_ROWS = 6
_LIVE_SECONDS = 5.0
NO_FOLD = -1
_NO_HIGHLIGHT = [("none", NO_FOLD)]  # not None, which ipywidgets takes for nothing chosen and marks no button for
AT_WORK = "Reading and drawing: the figures below are still those of the choice before ..."
_HELP = "Hold Ctrl to choose several."


class Controls:
    """The widgets of the dashboard and their callbacks.

    Args:
        runs_dir: folder of the runs to choose from.
        selection: what is chosen at first.
        choose: called with the changed fields of ``Selection``; returns the whole selection.
        refresh: called when the reader presses Refresh.
        follow: called with an interval in seconds for automatic refreshing, or None to end it.
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
        self.widgets["live"].observe(self._live_moved, names="value")
        self.widgets["seconds"].observe(self._live_moved, names="value")
        self.widgets["refresh"].on_click(lambda _: self._refreshed(refresh))
        self.view = _laid_out(self.widgets)

    def offer(self, selection: Selection) -> None:
        """Fill the lists with the present choices and mark the chosen ones; redraws nothing."""
        metrics, folds = panels.metric_options(selection.detailed)
        with self._quietly():
            _set_options(self.widgets["runs"], panels.run_options(self._runs_dir), selection.runs)
            beside = list(zip(run_labels(selection.runs), selection.runs, strict=True))
            _set_options(self.widgets["detail"], beside, selection.detailed)
            _set_options(self.widgets["metrics"], [(clean_text(name), name) for name in metrics], selection.metrics)
            _set_options(self.widgets["folds"], [(f"fold {fold}", fold) for fold in folds], selection.folds)
            _set_options(
                self.widgets["highlight"], [*_NO_HIGHLIGHT, *((str(k), k) for k in folds)], _shown(selection.highlight)
            )
            for name, count in (("runs", len(self.widgets["runs"].options)), ("metrics", len(metrics))):
                self.widgets[name].rows = min(_MOST_ROWS, max(2, count))

    def live_ended(self, why: str) -> None:
        """Untick automatic refreshing and show the reason."""
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
            chosen = None if value == NO_FOLD else value
        with self._work_shown():
            selection = self._choose(**{name: chosen})
        if name in {"runs", "detail"}:
            self.offer(selection)  # the folds and metrics of another run

    def _live_moved(self, change: dict[str, Any]) -> None:
        del change
        if self._quiet:
            return
        is_on = self.widgets["live"].value
        self.widgets["told"].value = "Refreshing while a chosen run is at work." if is_on else ""
        self._follow(float(self.widgets["seconds"].value) if is_on else None)

    def _refreshed(self, refresh: Callable[[], None]) -> None:
        with self._work_shown():
            refresh()

    @contextlib.contextmanager
    def _work_shown(self) -> Iterator[None]:
        """Show a note while the figures still belong to the choice before."""
        before, self.widgets["told"].value = self.widgets["told"].value, AT_WORK
        try:
            yield
        finally:
            self.widgets["told"].value = before

    @contextlib.contextmanager
    def _quietly(self) -> Iterator[None]:
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before


def _shown(highlight: int | None) -> int:
    return NO_FOLD if highlight is None else highlight


def _set_options(widget: Any, options: list[tuple[str, Any]], chosen: Any) -> None:
    """Set the options of ``widget`` and choose those of ``chosen`` that are among them."""
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
    }  # fmt: skip


def _laid_out(widgets: dict[str, Any]) -> Any:
    import ipywidgets

    seconds = ipywidgets.HBox([widgets["live"], widgets["seconds"], ipywidgets.Label("s")])
    live = ipywidgets.HBox([widgets["refresh"], seconds, widgets["told"]])
    left = ipywidgets.VBox([widgets[name] for name in ("runs", "detail", "highlight")])
    right = ipywidgets.VBox([widgets[name] for name in ("metrics", "folds", "smoothing")])
    lists = ipywidgets.HBox([left, right])
    return ipywidgets.VBox([ipywidgets.Label(_HELP), lists, live])


class Dashboard:
    """Controls and the figures they redraw. ``selection`` says what is shown now."""

    def __init__(self, runs_dir: Path, selection: Selection) -> None:
        self.runs_dir = runs_dir
        self.selection = selection
        self.controls: Controls | None = None
        self._panels = panels.panels()
        self._handles: list[Any] = []
        self._shown: list[object] = []  # the key of what each panel shows
        self._empty: set[int] = set()  # panels without anything to show now
        self._live = LiveRefresh(self._look, self._live_ended)

    def __repr__(self) -> str:
        others = len(self.selection.runs) - 1
        beside = f" beside {count_text(others, 'other run')}" if others else ""
        return f"Dashboard of {clean_text(path_to_text(self.selection.detailed.run_id))}{beside}"

    def _ipython_display_(self) -> None:
        self.controls = Controls(self.runs_dir, self.selection, self.choose, self.refresh, self.follow)
        show_bundle({**self.controls.view._repr_mimebundle_(), "text/plain": repr(self)})
        drawn = [(panel.key(self.selection), panel.bundle(self.selection)) for panel in self._panels]
        self._handles = [show_bundle(bundle) for _, bundle in drawn]
        self._shown = [key for key, _ in drawn]
        self._empty = {number for number, (_, bundle) in enumerate(drawn) if panels.is_nothing(bundle)}

    def choose(self, **changes: Any) -> Selection:
        """Change the selection (fields of ``Selection``), redraw what follows from it, and return it.

        Another run in detail begins with all its folds: those of the one before may not be there; and one of another
        task with that task's own metrics.
        """
        before, self.selection = self.selection, replace(self.selection, **changes)
        if self.selection.detailed != before.detailed:
            self.selection = replace(self.selection, folds=(), highlight=None)
            usual = panels.default_metrics(self.selection.detailed)
            if "metrics" not in changes and usual[1:2] != panels.default_metrics(before.detailed)[1:2]:
                self.selection = replace(self.selection, metrics=usual)
        self._update(self._changed(self.selection))
        return self.selection

    def refresh(self) -> None:
        """Look for runs that were copied in, read the chosen ones again, and redraw what has changed."""
        if self.controls is not None:
            self.controls.offer(self.selection)
        self._update(self._changed(self.selection))

    def follow(self, seconds: float | None) -> None:
        """Refresh every so many seconds while a chosen run is at work; None: no longer."""
        if seconds is None:
            self._live.stop()
        else:
            self._live.start(seconds)

    async def _look(self) -> bool:
        """Refresh once, reading in another thread; return whether a chosen run is still running."""
        selection = self.selection
        # Asked first, so that what a run writes last is seen by the look after it has ended.
        at_work = await asyncio.to_thread(any_at_work, selection.runs)
        changed = await asyncio.to_thread(self._changed, selection)
        if selection is self.selection:  # else the reader has chosen something else meanwhile
            self._update(changed)
        if self.controls is not None:
            self.controls.offer(self.selection)
        return at_work or selection is not self.selection

    def _live_ended(self, why: str) -> None:
        if self.controls is not None:
            self.controls.live_ended(why)

    def _changed(self, selection: Selection) -> list[tuple[int, object, Bundle]]:
        """Return number, key and content of each panel whose content has changed."""
        found: list[tuple[int, object, Bundle]] = []
        for number, panel in enumerate(self._panels if self._handles else ()):
            key = panel.key(selection)
            if key != self._shown[number]:
                found.append((number, key, panel.bundle(selection)))
        return found

    def _update(self, changed: list[tuple[int, object, Bundle]]) -> None:
        for number, key, bundle in changed:
            self._shown[number] = key
            empty = panels.is_nothing(bundle)
            if empty and number in self._empty:
                continue
            (self._empty.add if empty else self._empty.discard)(number)
            if PLOTLY in bundle:
                self._handles[number].update(_blank(bundle), raw=True)
            self._handles[number].update(bundle, raw=True)


def dashboard(runs_dir: Path | str, run: str | None = None) -> Dashboard:
    """Return the dashboard over ``runs_dir``, to be shown as a cell's last expression.

    Raises:
        UsageError: ``run`` names no single run.
    """
    return Dashboard(Path(runs_dir), panels.default_selection(Path(runs_dir), run))


def _blank(bundle: Bundle) -> Bundle:
    """Return an empty output as high as the figure in ``bundle``, so that the page does not jump.

    plotly's JupyterLab extension draws an output once and ignores what follows; JupyterLab begins anew with a renderer
    of its own where another mime type came in between.
    """
    height = bundle[PLOTLY].get("layout", {}).get("height", 400)
    return {"text/html": f'<div style="height:{int(height)}px"></div>', "text/plain": ""}
