"""What the dashboard shows: the chosen runs, metrics, folds and smoothing, and what is there to choose from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fvc_lib.analysis.read.headline import run_parameters, run_task
from fvc_lib.analysis.read.queries import learning_curves
from fvc_lib.services.atomic_files import path_to_text
from fvc_lib.services.config import RunConfig
from fvc_lib.services.run_paths import RunPaths, find_run, list_runs

MOST_RUNS = 8  # chosen by default; more are chosen by hand
MOST_METRICS = 3  # of which learning curves are drawn at once
_DEFAULT_METRIC = "loss"


@dataclass(frozen=True)
class Selection:
    """What the dashboard shows.

    Attributes:
        runs: the chosen runs, which are compared.
        detail: the one of them that is shown in detail; None: the first.
        metrics: the metrics whose learning curves are drawn, at most three.
        folds: the folds shown; empty means all.
        smoothing: of the learning curves, in [0, 1).
        highlight: a fold that stands out in every figure that shows folds.
    """

    runs: tuple[RunPaths, ...]
    detail: RunPaths | None = None
    metrics: tuple[str, ...] = (_DEFAULT_METRIC,)
    folds: tuple[int, ...] = ()
    smoothing: float = 0.0
    highlight: int | None = None

    @property
    def detailed(self) -> RunPaths:
        """The run that is shown in detail."""
        return self.detail if self.detail in self.runs and self.detail is not None else self.runs[0]


def default_selection(runs_dir: Path, run: str | None = None) -> Selection:
    """The named run (or the newest) in detail, beside the newest others of its experiment.

    Raises:
        UsageError: ``run`` names none or several, or there is no run at all.
    """
    chosen = find_run(runs_dir, run or "latest")
    others = [
        other for other in reversed(list_runs(runs_dir)) if other.experiment == chosen.experiment and other != chosen
    ]
    return Selection((chosen, *others[: MOST_RUNS - 1]), metrics=default_metrics(chosen))


def default_metrics(run: RunPaths) -> tuple[str, ...]:
    """The curves that tell most of a run of its task: the loss, and what is judged beside it, also before it is there.

    Of image recognition top-1 and the R2 of the first target; of video-text the recall at the first k from text to
    video, and the loss of the captions.
    """
    asked = run_parameters(run)
    task = run_task(asked)
    if task == "image":
        targets = sorted(name for name in _logged(run) if name.startswith("r2_"))
        return (_DEFAULT_METRIC, "top1", *targets[:1])
    if task == "video_text":
        given = asked.get("recall_at")
        first = given[0] if isinstance(given, list) and given else RunConfig().recall_at[0]
        captions = {"caption_loss"} & _logged(run)
        return (_DEFAULT_METRIC, f"text_to_video/recall@{first}", *captions)
    return (_DEFAULT_METRIC,)


def run_options(runs_dir: Path) -> list[tuple[str, RunPaths]]:
    """Every run under ``runs_dir`` by what it is called on a list, newest first; one that was copied in is there."""
    return [(run_label(run), run) for run in reversed(list_runs(runs_dir))]


def run_label(run: RunPaths) -> str:
    """``experiment / run_id`` on one line."""
    return f"{path_to_text(run.experiment)} / {path_to_text(run.run_id)}"


def metric_options(run: RunPaths) -> tuple[list[str], list[int]]:
    """The metrics and the folds that ``run`` has logged so far; the default metrics are always among them."""
    curves = learning_curves([run]).frame
    folds = [int(fold) for fold in curves["fold"].drop_nulls().unique().sort()]
    return sorted({*default_metrics(run), *curves["metric"].unique()}), folds


def _logged(run: RunPaths) -> set[str]:
    return set(learning_curves([run], phases=["validation"]).frame["metric"].unique())
