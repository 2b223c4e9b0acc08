"""The live dashboard: choose runs, metrics, folds and smoothing, and see the figures change.

The figures are ordinary displays that the controls redraw in place. So a notebook that is run without a front end
holds the same figures for the same defaults, and the controls only add to them.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from fvc_lib.analysis.dashboard_controls import Controls
from fvc_lib.analysis.dashboard_panel import Bundle, is_nothing
from fvc_lib.analysis.dashboard_panels import panels
from fvc_lib.analysis.dashboard_selection import Selection, default_metrics, default_selection
from fvc_lib.analysis.figure_display import show_bundle
from fvc_lib.analysis.figure_html import PLOTLY
from fvc_lib.analysis.live_refresh import LiveRefresh, any_at_work
from fvc_lib.analysis.wording import clean_text, count_text
from fvc_lib.services.path_text import path_to_text


def dashboard(runs_dir: Path | str, run: str | None = None) -> Dashboard:
    """The dashboard over ``runs_dir``; show it by making it a cell's last expression.

    Raises:
        UsageError: ``run`` names none or several, or there is no run at all.
    """
    return Dashboard(Path(runs_dir), default_selection(Path(runs_dir), run))


class Dashboard:
    """Controls and the figures they redraw. ``selection`` says what is shown now."""

    def __init__(self, runs_dir: Path, selection: Selection) -> None:
        self.runs_dir = runs_dir
        self.selection = selection
        self.controls: Controls | None = None
        self._panels = panels()
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
        self._empty = {number for number, (_, bundle) in enumerate(drawn) if is_nothing(bundle)}

    def choose(self, **changes: Any) -> Selection:
        """Change the selection (fields of ``Selection``), redraw what follows from it, and return it.

        Another run in detail begins with all its folds: those of the one before may not be there; and one of another
        task with that task's own metrics.
        """
        before, self.selection = self.selection, replace(self.selection, **changes)
        if self.selection.detailed != before.detailed:
            self.selection = replace(self.selection, folds=(), highlight=None)
            usual = default_metrics(self.selection.detailed)
            if "metrics" not in changes and usual[1:2] != default_metrics(before.detailed)[1:2]:
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
        """Refresh once, reading in a thread of its own; whether a chosen run is still at work."""
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
        """Of each panel that would show something else now: its number, its key and what it would show."""
        found: list[tuple[int, object, Bundle]] = []
        for number, panel in enumerate(self._panels if self._handles else ()):
            key = panel.key(selection)
            if key != self._shown[number]:
                found.append((number, key, panel.bundle(selection)))
        return found

    def _update(self, changed: list[tuple[int, object, Bundle]]) -> None:
        for number, key, bundle in changed:
            self._shown[number] = key
            empty = is_nothing(bundle)
            if empty and number in self._empty:
                continue
            (self._empty.add if empty else self._empty.discard)(number)
            if PLOTLY in bundle:
                self._handles[number].update(_blank(bundle), raw=True)
            self._handles[number].update(bundle, raw=True)


def _blank(bundle: Bundle) -> Bundle:
    """An empty place as high as the figure in ``bundle``, so that the page does not jump.

    plotly's JupyterLab extension draws an output once and ignores what follows; JupyterLab begins anew with a renderer
    of its own where another mime type came in between.
    """
    height = bundle[PLOTLY].get("layout", {}).get("height", 400)
    return {"text/html": f'<div style="height:{int(height)}px"></div>', "text/plain": ""}
