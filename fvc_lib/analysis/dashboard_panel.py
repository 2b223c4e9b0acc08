"""One place of the dashboard: what it draws, for which tasks, and what it depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from fvc_lib.analysis.dashboard_selection import Selection
from fvc_lib.analysis.figure_display import figure_bundle
from fvc_lib.analysis.figure_parts import with_fold_highlighted
from fvc_lib.analysis.headline import run_parameters, run_task
from fvc_lib.services.config import RunConfig
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.task_fields import TASKS

Bundle = dict[str, Any]
Shown = Any  # a figure, a table or a text; plotly has no types

METRICS, MEMORY = ("metrics",), ("memory",)
TABLES = ("tables", "kfold_results.feather", "task_results.feather", "params.yaml")
NOTHING = "\N{ZERO WIDTH SPACE}"  # an empty output would be a gap in the numbering of displays
_NO_PLACE = {"text/html": '<div style="display:none"></div>'}  # text alone would take a line


@dataclass(frozen=True)
class Panel:
    """One place of the dashboard.

    Attributes:
        name: what it shows.
        draw: makes it.
        follows: the fields of ``Selection`` that it depends on.
        reads: files and folders in a run's folder that it depends on.
        tasks: of the runs in detail of which it has something to show.
    """

    name: str
    draw: Callable[[Selection], Shown]
    follows: tuple[str, ...]
    reads: tuple[str, ...]
    tasks: tuple[str, ...] = TASKS

    def bundle(self, selection: Selection) -> Bundle:
        """What is displayed in its place; for a run of another task nothing."""
        shown = self.draw(selection) if task_of(selection.detailed) in self.tasks else NOTHING
        if isinstance(shown, go.Figure):
            return figure_bundle(with_fold_highlighted(shown, selection.highlight))
        if isinstance(shown, str):
            return {"text/plain": shown, **(_NO_PLACE if shown == NOTHING else {})}
        return dict(shown._repr_mimebundle_())

    def key(self, selection: Selection) -> tuple[object, ...]:
        """Two equal keys mean that there is nothing to draw again."""
        runs = selection.runs if "runs" in self.follows else (selection.detailed,)
        chosen = tuple(getattr(selection, name) for name in self.follows)
        return (selection.detailed, chosen, *(stamp for run in runs for stamp in stamps(run, self.reads)))


def task_of(run: RunPaths) -> str:
    """What ``run`` is about."""
    return run_task(run_parameters(run))


def runs_alike(selection: Selection) -> tuple[RunPaths, ...]:
    """The chosen runs that are about the same as the one in detail."""
    task = task_of(selection.detailed)
    return tuple(run for run in selection.runs if task_of(run) == task)


def is_nothing(bundle: Bundle) -> bool:
    """Whether a panel has nothing to show for now."""
    return bundle.get("text/plain") == NOTHING


def confidence_of(run: RunPaths) -> float:
    """What the intervals in the run's tables were made with."""
    asked = run_parameters(run).get("confidence")
    return asked if isinstance(asked, float) else RunConfig().confidence


def stamps(run: RunPaths, reads: Iterable[str]) -> Iterable[tuple[str, int, int]]:
    """Name, time and size of each file that ``reads`` names in ``run``, or that lies in a folder it names."""
    for name in reads:
        place = run.root / name
        files = sorted(place.rglob("*")) if place.is_dir() else [place]
        for file in files:
            try:
                known = file.stat()
            except OSError:
                continue
            yield str(file), known.st_mtime_ns, known.st_size
