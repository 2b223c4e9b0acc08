"""Panels of the dashboard, and the reader's selection.

A panel is one figure, table or text. The module in ``analysis/figures`` that draws a panel also registers it, with
``@PANELS.register_panel``. To add a panel, no other file must be changed.
"""

import fnmatch
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis.pages.display import figure_bundle
from fvc_lib.analysis.read.queries import SQL_TABLES, learning_curves
from fvc_lib.analysis.read.runs import run_parameters, run_task
from fvc_lib.services.config import RunConfig
from fvc_lib.services.records.digests import refuse_damaged
from fvc_lib.services.registry import Registry
from fvc_lib.services.run_paths import RunPaths, find_run, list_runs
from fvc_lib.services.tasks import TASKS

MOST_METRICS = 3  # the most metrics whose learning curves are drawn
QUICK_REPLICATES = 500  # half-samples behind a band; few, because a redraw must feel immediate
NOTHING = "\N{ZERO WIDTH SPACE}"  # an empty output would be a gap in the numbering of displays
_MOST_RUNS = 8  # the most runs that are chosen by default

Bundle = dict[str, Any]
Shown = Any  # a figure, a table or a text; plotly has no type hints


@dataclass(frozen=True)
class Selection:
    """What the reader has chosen to see.

    Attributes:
        runs: the chosen runs, at least one.
        detail: the run shown in detail. If it is None or not in ``runs``, the first run is shown.
        metrics: metrics with learning curves. The first ``MOST_METRICS`` are drawn.
        folds: outer folds to show. Empty: all.
        smoothing: smoothing of learning curves, in [0, 1). 0 is none.
    """

    runs: tuple[RunPaths, ...]
    detail: RunPaths | None = None
    metrics: tuple[str, ...] = ("loss",)
    folds: tuple[int, ...] = ()
    smoothing: float = 0.0

    @property
    def detailed(self) -> RunPaths:
        """The run that is shown in detail."""
        return self.detail if self.detail is not None and self.detail in self.runs else self.runs[0]


def default_selection(runs_dir: Path, run: str | None = None) -> Selection:
    """Return a selection of at most eight runs: ``run``, shown in detail, and the newest others of its experiment.

    ``run`` is a name or path. None: the newest run in ``runs_dir``.

    Raises:
        UsageError: there is no such run.
        DataError: a file of the run is damaged.
    """
    chosen = find_run(runs_dir, run or "latest")
    refuse_damaged(chosen.root)
    alike = [other for other in list_runs(runs_dir) if other.experiment == chosen.experiment and other != chosen]
    return Selection((chosen, *alike[::-1][: _MOST_RUNS - 1]), metrics=default_metrics(chosen))


def default_metrics(run: RunPaths) -> tuple[str, ...]:
    """Return the metrics whose learning curves are shown by default for the run's task (``TaskSpec.curves``).

    A pattern with ``*`` stands for the first metric by name that matches it and was logged.
    """
    logged = learning_curves([run], phases=["validation"]).frame["metric"].unique().sort()
    names = [fnmatch.filter(logged, name)[:1] if "*" in name else [name] for name in TASKS[task_of(run)].curves]
    return tuple(itertools.chain(*names))


# --- Panels


@dataclass(frozen=True)
class Panel:
    """One figure, table or text of the dashboard.

    Attributes:
        name: unique name.
        at: position. Panels are shown in ascending order.
        draw: returns the content for a selection.
        follows: fields of ``Selection`` whose change redraws the panel. A change of the run in detail always does.
        is_live: whether the panel is drawn from logs, which grow while a run trains.
        tasks: tasks of the run in detail for which the panel is shown. Empty: all.
    """

    name: str
    at: float
    draw: Callable[[Selection], Shown]
    follows: tuple[str, ...] = ()
    is_live: bool = False
    tasks: tuple[str, ...] = ()

    def bundle(self, selection: Selection) -> Bundle:
        """Return a dict from mimetype to the panel's content for ``selection``.

        If the panel is not for the task of the run in detail, the content is invisible.
        """
        is_meant = not self.tasks or task_of(selection.detailed) in self.tasks
        shown = self.draw(selection) if is_meant else NOTHING
        if isinstance(shown, go.Figure):
            return figure_bundle(shown)
        if shown == NOTHING:  # text alone would take a line
            return {"text/plain": shown, "text/html": '<div style="display:none"></div>'}
        return {"text/plain": shown} if isinstance(shown, str) else dict(shown._repr_mimebundle_())


class PanelRegistry(Registry[Panel]):
    """The panels, registered by the functions that draw them."""

    def register_panel(self, name: str, *, at: float, **more: Any) -> Callable[..., Callable[[Selection], Shown]]:
        """Return a decorator that registers a function of a ``Selection`` as a panel.

        ``more`` are further fields of ``Panel``.
        """

        def registered(draw: Callable[[Selection], Shown]) -> Callable[[Selection], Shown]:
            self.register(Panel(name, at, draw, **more))
            return draw

        return registered


PANELS = PanelRegistry("panel", "fvc_lib.analysis.figures")


def panels() -> tuple[Panel, ...]:
    """Return all panels in their order."""
    return tuple(sorted((panel for _, panel in PANELS.items()), key=lambda panel: panel.at))


# --- Data of panels


def task_of(run: RunPaths) -> str:
    """Return the task of ``run``: ``video``, ``image`` or ``video_text``."""
    return run_task(run_parameters(run))


def confidence_of(selection: Selection) -> float:
    """Return the coverage, such as 0.95, of the intervals in the tables of the run in detail."""
    confidence = run_parameters(selection.detailed).get("confidence")
    return confidence if isinstance(confidence, float) else RunConfig().confidence


def table_of(selection: Selection, name: str) -> pl.DataFrame:
    """Return a table of the run in detail. It is empty if the file is missing or unreadable.

    ``name`` is a key of ``queries.SQL_TABLES``, such as ``results``.
    """
    return SQL_TABLES[name]([selection.detailed]).frame


def of_folds(selection: Selection, frame: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of ``frame`` that belong to the chosen folds. If no fold is chosen, return all rows."""
    return frame.filter(pl.col("fold").is_in(selection.folds)) if selection.folds else frame


@PANELS.register_panel("notes", at=90, is_live=True)
def notes(selection: Selection) -> str:
    """Return text that lists panels that failed to load, and unreadable files and log lines of the run in detail."""
    missing = [f"Panels of {module} are missing: {reason}" for module, reason in PANELS.broken.items()]
    unread = [note for read in SQL_TABLES.values() for note in read([selection.detailed]).notes]
    return "\n".join(dict.fromkeys(missing + unread)) or "All lines of the run in detail could be read."
