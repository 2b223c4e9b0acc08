"""What the dashboard shows: the choices of a reader, and the panels that follow them.

A panel is declared in the file of ``analysis/figures`` that draws it, with ``@PANELS.register_panel``: its name, its
place on the page, the choices it follows, the files it reads, and the tasks it is for. So a new figure is one file;
nothing here names it. Headless, all panels are shown one after the other. Live, a panel is drawn again only when a
choice that it follows or a file that it reads has changed, so a slider answers at once however many runs are chosen.
"""

import fnmatch
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis.figures.theme import with_fold_highlighted
from fvc_lib.analysis.pages.display import figure_bundle
from fvc_lib.analysis.read.naming import run_labels, run_parameters, run_task
from fvc_lib.analysis.read.queries import SQL_TABLES, learning_curves, memory_samples, results, task_results
from fvc_lib.services.config import RunConfig
from fvc_lib.services.records.digests import refuse_damaged
from fvc_lib.services.registry import Registry
from fvc_lib.services.run_paths import RunPaths, find_run, list_runs
from fvc_lib.services.tasks import TASKS

MOST_RUNS = 8  # chosen by default; more are chosen by hand
MOST_METRICS = 3  # of which learning curves are drawn at once


@dataclass(frozen=True)
class Selection:
    """What the dashboard shows: the chosen runs, of which ``detail`` (None: the first) is shown in detail.

    Learning curves are of at most three ``metrics``; without ``folds`` all are shown; ``smoothing`` is in [0, 1); the
    fold to ``highlight`` stands out in every figure that shows folds.
    """

    runs: tuple[RunPaths, ...]
    detail: RunPaths | None = None
    metrics: tuple[str, ...] = ("loss",)
    folds: tuple[int, ...] = ()
    smoothing: float = 0.0
    highlight: int | None = None

    @property
    def detailed(self) -> RunPaths:
        """The run that is shown in detail."""
        return self.detail if self.detail in self.runs and self.detail is not None else self.runs[0]


def default_selection(runs_dir: Path, run: str | None = None) -> Selection:
    """Return the named run (or the newest) in detail, beside the newest others.

    Raises:
        UsageError: no such run.
        DataError: a file of it is damaged.
    """
    chosen = find_run(runs_dir, run or "latest")
    refuse_damaged(chosen.root)
    others = [
        other for other in reversed(list_runs(runs_dir)) if other.experiment == chosen.experiment and other != chosen
    ]
    return Selection((chosen, *others[: MOST_RUNS - 1]), metrics=default_metrics(chosen))


def default_metrics(run: RunPaths) -> tuple[str, ...]:
    """Return the metrics of the most telling learning curves of the run's task (``TaskSpec.curves``)."""
    parameters = run_parameters(run)
    curves = TASKS[run_task(parameters)].curves
    logged: list[str] = []
    if any("*" in name for name in curves):
        logged = sorted(learning_curves([run], phases=["validation"]).frame["metric"].unique())
    defaults = RunConfig().model_dump()
    found = (
        fnmatch.filter(logged, name)[:1] if "*" in name else [_filled_in(name, {**defaults, **parameters}, defaults)]
        for name in curves
    )
    return tuple(itertools.chain.from_iterable(found))


def _filled_in(name: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    try:
        return name.format_map(given)
    except (LookupError, TypeError, ValueError, AttributeError):  # of an edited params.yaml
        return name.format_map(defaults)


def run_options(runs_dir: Path) -> list[tuple[str, RunPaths]]:
    """Return label and run of every run under ``runs_dir``, newest first."""
    runs = list_runs(runs_dir)[::-1]
    return list(zip(run_labels(runs), runs, strict=True))


def metric_options(run: RunPaths) -> tuple[list[str], list[int]]:
    """Return the metrics and folds that ``run`` has logged so far, with the default metrics."""
    curves = learning_curves([run]).frame
    folds = [int(fold) for fold in curves["fold"].drop_nulls().unique().sort()]
    return sorted({*default_metrics(run), *curves["metric"].unique()}), folds


# --- Panels

Bundle = dict[str, Any]
Shown = Any  # a figure, a table or a text; plotly has no types
Draw = Callable[[Selection], Shown]

METRICS, MEMORY = ("metrics",), ("memory",)
TABLES = ("tables", "kfold_results.feather", "task_results.feather", "params.yaml")
_LOGS = ("metrics", "memory", "memory_events", "training", "parameters")  # of ``SQL_TABLES``, what are no tables
NOTHING = "\N{ZERO WIDTH SPACE}"  # an empty output would be a gap in the numbering of displays
QUICK_REPLICATES = 500  # of bands: a redraw must feel immediate; the results notebook's own have more
_NO_PLACE = {"text/html": '<div style="display:none"></div>'}  # text alone would take a line


@dataclass(frozen=True)
class Panel:
    """One figure, table or text of the dashboard; panels stand in ascending order of ``at``.

    ``follows`` are the fields of ``Selection`` and ``reads`` the files and folders in a run's folder that it depends
    on; ``tasks`` are those of the run in detail with something to show (empty: all).
    """

    name: str
    at: float
    draw: Draw
    follows: tuple[str, ...] = ()
    reads: tuple[str, ...] = TABLES
    tasks: tuple[str, ...] = ()

    def bundle(self, selection: Selection) -> Bundle:
        """Return the panel's content; nothing for a run of another task."""
        is_meant = not self.tasks or task_of(selection.detailed) in self.tasks
        shown = self.draw(selection) if is_meant else NOTHING
        if isinstance(shown, go.Figure):
            return figure_bundle(with_fold_highlighted(shown, selection.highlight))
        if isinstance(shown, str):
            return {"text/plain": shown, **(_NO_PLACE if shown == NOTHING else {})}
        return dict(shown._repr_mimebundle_())

    def key(self, selection: Selection) -> tuple[object, ...]:
        """Return a key that is equal as long as nothing needs to be redrawn."""
        runs = selection.runs if "runs" in self.follows else (selection.detailed,)
        chosen = tuple(getattr(selection, name) for name in self.follows)
        return (selection.detailed, chosen, *(stamp for run in runs for stamp in stamps(run, self.reads)))


class PanelRegistry(Registry[Panel]):
    """The panels, registered by the functions that draw them."""

    def register_panel(self, name: str, *, at: float, **more: tuple[str, ...]) -> Callable[[Draw], Draw]:
        """Register the function below as a panel; ``more`` are ``follows``, ``reads`` and ``tasks`` of ``Panel``."""

        def registered(draw: Draw) -> Draw:
            self.register(Panel(name, at, draw, **more))
            return draw

        return registered


PANELS = PanelRegistry("panel", "fvc_lib.analysis.figures")


def panels() -> tuple[Panel, ...]:
    """All panels in their order."""
    return tuple(sorted((each for _, each in PANELS.items()), key=lambda each: each.at))


def is_nothing(bundle: Bundle) -> bool:
    """Whether a panel has nothing to show for now."""
    return bundle.get("text/plain") == NOTHING


def task_of(run: RunPaths) -> str:
    """Return the task of ``run``."""
    return run_task(run_parameters(run))


def runs_alike(selection: Selection) -> tuple[RunPaths, ...]:
    """Return the chosen runs of the same task as the one in detail."""
    task = task_of(selection.detailed)
    return tuple(run for run in selection.runs if task_of(run) == task)


def confidence_of(selection: Selection) -> float:
    """Return the coverage of the intervals in the tables of the run in detail."""
    confidence = run_parameters(selection.detailed).get("confidence")
    return confidence if isinstance(confidence, float) else RunConfig().confidence


def table_of(selection: Selection, name: str) -> pl.DataFrame:
    """Return a table (``queries.SQL_TABLES``) of the run in detail; empty where it is missing or unreadable."""
    return SQL_TABLES[name]([selection.detailed]).frame


def of_folds(selection: Selection, frame: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of ``frame`` of the chosen folds."""
    return frame.filter(pl.col("fold").is_in(selection.folds)) if selection.folds else frame


def stamps(run: RunPaths, reads: Iterable[str]) -> Iterable[tuple[str, int, int]]:
    """Yield path, time and size of each file of ``run`` that ``reads`` names, also within named folders."""
    for name in reads:
        place = run.root / name
        files = sorted(place.rglob("*")) if place.is_dir() else [place]
        for file in files:
            try:
                known = file.stat()
            except OSError:
                continue
            yield str(file), known.st_mtime_ns, known.st_size


def dashboard_notes(selection: Selection) -> tuple[str, ...]:
    """Return sentences about lines that could not be read and panels that could not be loaded."""
    runs = selection.runs
    of_detailed = (read([selection.detailed]) for name, read in SQL_TABLES.items() if name not in _LOGS)
    answers = (results(runs), task_results(runs), *of_detailed, learning_curves(runs), memory_samples(runs))
    broken = (f"Panels of {module} are missing: {reason}" for module, reason in PANELS.broken.items())
    return tuple(dict.fromkeys((*broken, *(note for answer in answers for note in answer.notes))))


@PANELS.register_panel("notes", at=90, follows=("runs",), reads=(*METRICS, *MEMORY, *TABLES))
def _notes(selection: Selection) -> Shown:
    return "\n".join(dashboard_notes(selection)) or "All lines of the chosen runs could be read."
