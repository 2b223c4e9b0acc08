"""One object owns every name inside a run folder; nothing else spells them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from fvc_lib.services.errors import UsageError


@dataclass(frozen=True)
class RunPaths:
    """The files of one run. A run folder is self-contained and may be copied to another machine."""

    root: Path

    @property
    def run_id(self) -> str:
        """The folder's own name, ``run_YYYYmmdd_HHMMSS_<hash8>``."""
        return self.root.name

    @property
    def experiment(self) -> str:
        """The name of the folder that groups this run with others."""
        return self.root.parent.name

    @property
    def run_json(self) -> Path:
        """What was asked, with which code, versions and hardware."""
        return self.root / "run.json"

    @property
    def status_json(self) -> Path:
        """The truth about every stage; written by the runner alone."""
        return self.root / "status.json"

    @property
    def params_yaml(self) -> Path:
        """The resolved parameters."""
        return self.root / "params.yaml"

    @property
    def notebooks(self) -> Path:
        """Folder of executed notebooks."""
        return self.root / "notebooks"

    @property
    def reports(self) -> Path:
        """Folder of the executed notebooks' offline HTML."""
        return self.notebooks / "reports"

    @property
    def report_html(self) -> Path:
        """The one offline page that tells the whole run."""
        return self.root / "report.html"

    @property
    def tables(self) -> Path:
        """Folder of the schema-checked tables stages talk through."""
        return self.root / "tables"

    @property
    def index(self) -> Path:
        """The index of usable videos."""
        return self.tables / "index.parquet"

    @property
    def rejected(self) -> Path:
        """What was listed but cannot be used, with reasons."""
        return self.tables / "rejected.parquet"

    @property
    def group_links(self) -> Path:
        """What joined videos into one group that the label source kept apart."""
        return self.tables / "group_links.parquet"

    @property
    def annotations(self) -> Path:
        """Every row of the corpus's label tables, videos or not."""
        return self.tables / "annotations.parquet"

    @property
    def folds(self) -> Path:
        """The outer folds."""
        return self.tables / "folds.parquet"

    @property
    def augmented_metadata(self) -> Path:
        """One row per augmented clip of the shared store."""
        return self.tables / "augmented_metadata.csv"

    def predictions(self, fold: int) -> Path:
        """Outer-fold predictions of one fold."""
        return self.tables / f"predictions_fold_{fold}.parquet"

    @property
    def results(self) -> Path:
        """Metrics, intervals and controls over all folds."""
        return self.root / "kfold_results.feather"

    @property
    def slices(self) -> Path:
        """The results by platform, codec, length and the like."""
        return self.tables / "slices.parquet"

    @property
    def leakage_audit(self) -> Path:
        """What was looked at to say that nothing leaked, and what was found."""
        return self.tables / "leakage_audit.parquet"

    @property
    def images(self) -> Path:
        """The usable images of task image, with their part of the split."""
        return self.tables / "images.parquet"

    @property
    def image_targets(self) -> Path:
        """The numbers that are known of the images, one per row."""
        return self.tables / "image_targets.parquet"

    @property
    def image_predictions(self) -> Path:
        """The classes predicted for the test images."""
        return self.tables / "image_predictions.parquet"

    @property
    def target_predictions(self) -> Path:
        """The numbers predicted for the test images."""
        return self.tables / "target_predictions.parquet"

    @property
    def measured_fits(self) -> Path:
        """Which batch sizes and resolutions were tried out on the machine, and what they took."""
        return self.tables / "measured_fits.parquet"

    @property
    def video_texts(self) -> Path:
        """The usable pairs of task video_text, with their part of the split."""
        return self.tables / "video_texts.parquet"

    @property
    def retrieval_ranks(self) -> Path:
        """At which place each test query found what it should."""
        return self.tables / "retrieval_ranks.parquet"

    @property
    def captions(self) -> Path:
        """The captions written for the test videos."""
        return self.tables / "captions.parquet"

    @property
    def embeddings(self) -> Path:
        """Embeddings of the test videos and texts, safetensors."""
        return self.tables / "test_embeddings.safetensors"

    @property
    def task_results(self) -> Path:
        """Metrics, intervals and controls of the tasks image and video_text."""
        return self.root / "task_results.feather"

    @property
    def logs(self) -> Path:
        """Folder of plain-text logs."""
        return self.root / "logs"

    def stage_log(self, stage: str, fold: int | None = None) -> Path:
        """What a stage's kernel and its native libraries wrote past the notebook."""
        return self.logs / f"{stage_key(stage, fold)}.log"

    def output_overflow(self, stage: str, fold: int | None = None) -> Path:
        """Folder of what a stage printed or showed beyond what its record holds."""
        return self.logs / "outputs" / stage_key(stage, fold)

    def task_status(self, stage: str, fold: int | None = None) -> Path:
        """The truth about one stage (and fold), written by whoever runs it; one writer each."""
        return self.root / "status" / f"{stage_key(stage, fold)}.json"

    def task_lock(self, stage: str, fold: int | None = None) -> Path:
        """Held by a job that works on this stage (and fold) alone."""
        return self.root / "locks" / f"{stage_key(stage, fold)}.lock"

    @property
    def code_patch(self) -> Path:
        """What the checkout had changed since its commit when the run began."""
        return self.root / "code.patch"

    @property
    def slurm(self) -> Path:
        """Folder of the batch scripts a run was submitted with, and what SLURM's accounting said."""
        return self.root / "slurm"

    def record_html(self, stage: str, fold: int | None = None) -> Path:
        """The offline page of a stage's record."""
        return self.reports / f"{stage_key(stage, fold)}.html"

    def metrics(self, stage: str, fold: int | None = None) -> Path:
        """The metric log of one stage (and fold); one writer each."""
        return self.root / "metrics" / f"{stage_key(stage, fold)}.jsonl"

    def memory(self, stage: str, fold: int | None = None) -> Path:
        """The memory samples of one stage (and fold); one writer each."""
        return self.root / "memory" / f"{stage_key(stage, fold)}.jsonl"

    def memory_events(self, stage: str, fold: int | None = None) -> Path:
        """What happened to one stage's memory: plan, shortages and what was done; one writer each."""
        return self.root / "memory" / "events" / f"{stage_key(stage, fold)}.jsonl"

    def oom_contexts(self, stage: str, fold: int | None = None) -> Path:
        """Folder of one JSON file per out-of-memory of a stage."""
        return self.root / "memory" / "oom" / stage_key(stage, fold)

    def memory_profiles(self, stage: str, fold: int | None = None) -> Path:
        """Folder of a stage's allocation recordings (``profile_memory``)."""
        return self.root / "memory" / "profiles" / stage_key(stage, fold)

    @property
    def preflight(self) -> Path:
        """What one training step was measured to take, before the first fold trained."""
        return self.root / "memory" / "preflight.json"

    @property
    def measured_steps(self) -> Path:
        """What each row of ``measured_fits`` was found to take, kept while they are measured."""
        return self.root / "memory" / "measured_steps.json"

    def stage_checkpoint(self, stage: str, fold: int | None = None) -> Path:
        """The record that a stage was finished, with the fingerprint of what it depended on."""
        return self.root / "checkpoints" / f"stage_{stage_key(stage, fold)}.json"

    @property
    def superseded(self) -> Path:
        """Where stages that ran anew had their earlier files moved: ``<number>/`` and the names they have in a run."""
        return self.root / "superseded"

    def fold_checkpoints(self, fold: int) -> Path:
        """Folder of one fold's ``best_model.safetensors``, ``latest_checkpoint.pt`` and epoch checkpoints."""
        return self.root / "checkpoints" / f"fold_{fold}"

    def control_checkpoints(self, fold: int) -> Path:
        """Folder of the same fold's shuffled-label control, laid out alike."""
        return self.fold_checkpoints(fold) / "control"

    def stage_training(self, stage: str) -> Path:
        """Folder of the checkpoints of a stage that trains without folds, and of what belongs to its model."""
        return self.root / "checkpoints" / stage

    def training_checkpoints(self, stage: str, fold: int | None = None) -> Path:
        """Folder of the checkpoints of a stage that trains, with or without folds."""
        return self.stage_training(stage) if fold is None else self.fold_checkpoints(fold)

    def stage_outcome(self, stage: str) -> Path:
        """What its finished training found; written last, so its presence means finished."""
        return self.stage_training(stage) / "outcome.json"

    def fold_outcome(self, fold: int) -> Path:
        """What one finished fold's training found; written last, so its presence means finished."""
        return self.fold_checkpoints(fold) / "outcome.json"

    def executed_notebook(self, stage: str, fold: int | None = None) -> Path:
        """The record of a finished stage."""
        return self.notebooks / f"{stage_key(stage, fold)}.ipynb"

    def partial_notebook(self, stage: str, fold: int | None = None) -> Path:
        """The record of a stage that is running or died."""
        return self.notebooks / f"{stage_key(stage, fold)}.partial.ipynb"


def stage_key(stage: str, fold: int | None = None) -> str:
    """``04_fold_training`` or ``04_fold_training_fold_2``: the one spelling of a stage's artifacts."""
    return stage if fold is None else f"{stage}_fold_{fold}"


def new_run(runs_dir: Path, experiment: str, config_hash: str) -> RunPaths:
    """Create a run folder named by local time and the configuration's hash; a taken second waits for the next.

    Raises:
        UsageError: ``experiment`` is not one plain folder name.
    """
    if not experiment or experiment != Path(experiment).name or experiment.startswith("."):
        raise UsageError(f"experiment: got {experiment!r}, wanted one folder name without '/' or a leading dot.")
    folder = runs_dir / experiment
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(
            f"{str(folder)!r} cannot be a folder of runs: it, or a folder above it, is a file or a link to nowhere. "
            "Name another one: FVC_RUNS_DIR or -p runs_dir."
        ) from error
    while True:
        second = time.strftime("%Y%m%d_%H%M%S")
        root = folder / f"run_{second}_{config_hash[:8]}"
        # One run a second, whatever its hash: the newest run is the one whose name sorts last.
        if not any(runs_dir.glob(f"*/run_{second}_*")):
            try:
                root.mkdir()
            except FileExistsError:
                continue
            return RunPaths(root.absolute())
        time.sleep(0.1)


def list_runs(runs_dir: Path, experiment: str | None = None) -> list[RunPaths]:
    """All run folders, oldest first; ``experiment`` narrows them."""
    pattern = f"{experiment or '*'}/run_*/run.json"
    return sorted(
        (RunPaths(p.parent.absolute()) for p in runs_dir.glob(pattern)), key=lambda r: (r.run_id, str(r.root))
    )


def find_run(runs_dir: Path, name: str, experiment: str | None = None) -> RunPaths:
    """The run called ``name``: ``latest``, a run id, a unique part of one, or a path to a run folder.

    Raises:
        UsageError: none or several fit; the message lists what there is.
    """
    as_path = Path(name)
    if (as_path / "run.json").is_file():
        return RunPaths(as_path.absolute())
    runs = list_runs(runs_dir, experiment)
    fitting = runs[-1:] if name == "latest" else [run for run in runs if name in run.run_id]
    if len(fitting) == 1:
        return fitting[0]
    have = ", ".join(run.run_id for run in runs[-10:]) or "none yet"
    problem = "no run" if not fitting else f"{len(fitting)} runs"
    raise UsageError(f"{problem} called {name!r} under {str(runs_dir)!r}; the newest there: {have}.")
