"""Define the paths of a run's files, create and find the folders of runs and ensembles, and find the tars of a corpus.

A corpus may be a pattern of tar files, such as ``shards/{000..099}.tar``.

A run trains and tests the networks of one task, stage by stage (a stage is the work of one notebook). An ensemble
combines the scores of several finished runs.
"""

from __future__ import annotations

import glob
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from filelock import FileLock, Timeout

from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.services.errors import UsageError, command_text
from fvc_lib.services.home import HOME, IS_CHECKOUT, PARAMS

SHARDS = "shards"  # folder of the records of shards, in a run folder and in a folder of predictions
ATTEMPT_VARIABLE = "FVC_STAGE_ATTEMPT"  # set by the runner for its kernels: a notebook that has it is headless


def beside_the_code(name: str) -> str:
    """Return the path of the folder ``name`` in the project's checkout (its source folder), as text.

    If the library is installed without a checkout, the path is in the current working folder.
    """
    return str((HOME if IS_CHECKOUT else Path.cwd()) / name)


def is_held(lock: Path, patience: float = 0.0) -> bool:
    """Return whether any process holds the lock file ``lock`` for longer than ``patience`` seconds.

    To test this, the function itself takes the lock for an instant. With a patience of 0, two processes that test at
    the same moment may see each other, and get True. The result is also True if the file cannot be opened. It is False
    if there is no such file.
    """
    if not lock.exists():
        return False
    try:
        with FileLock(lock, timeout=patience):
            return False
    except (Timeout, OSError):
        return True


class _Path:
    """A descriptor for attributes of ``RunPaths``: it returns the path ``name`` in the run folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunPaths, owner: type[RunPaths]) -> Path:
        return run.root / self._name


ENSEMBLE_RECORD = "ensemble.json"  # written last: a folder with it is a finished ensemble


class _PathOf:
    """A descriptor that gives ``RunPaths`` a method, which returns the path of one stage's or one fold's file.

    The method takes ``(key, fold=None)``. ``key`` is the stage's name, or the number of the fold for a file that
    belongs to a fold alone. ``fold`` is the fold's number for a stage that runs once per fold. The method puts both
    into ``pattern`` in place of ``{}``. For example, ``metrics/{}.jsonl`` becomes
    ``metrics/04_fold_training_fold_2.jsonl``.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern

    def __get__(self, run: RunPaths, owner: type[RunPaths]) -> Callable[..., Path]:
        return lambda key, fold=None: run.root / self._pattern.format(stage_key(str(key), fold))


@dataclass(frozen=True)
class RunPaths:
    """The paths of all files of the run in the folder ``root``.

    A run folder is self-contained and may be copied to another machine.
    """

    root: Path

    @property
    def run_id(self) -> str:
        """Return the name of the run folder, ``run_YYYYmmdd_HHMMSS_<hash8>``."""
        return self.root.name

    @property
    def experiment(self) -> str:
        """Return the name of the experiment: the folder that contains this run and related runs."""
        return self.root.parent.name

    def next_superseded(self) -> Path:
        """Return the path of a new folder ``superseded/<number>`` for the earlier files of repeated stages.

        The number is the next free one. The folder is not created.
        """
        numbers = (int(path.name) for path in self.superseded.glob("*") if path.name.isdecimal())
        return self.superseded / str(1 + max(numbers, default=0))

    # The run as a whole
    run_json = _Path("run.json")  # parameters, code, versions and hardware
    status_json = _Path("status.json")  # the state of the run and of every stage
    params_yaml = _Path("params.yaml")  # the resolved parameters
    networks = _Path("networks")  # a copy of the user's file with the network
    code_patch = _Path("code.patch")  # changes of the checkout since its commit when the run began
    report_html = _Path("report.html")  # the offline page of the whole run
    notebooks = _Path("notebooks")  # executed notebooks
    logs = _Path("logs")  # output of stages, as plain text
    slurm = _Path("slurm")  # the batch scripts of the run, and SLURM's accounting
    shards = _Path(SHARDS)  # <stage>/<number>_of_<number>.json: progress of a shard (one job of a stage's many)
    superseded = _Path("superseded")  # earlier files of repeated stages: <number>/ and their paths in the run

    # Tables that stages exchange; ``services.tables`` has their schemas
    tables = _Path("tables")
    index = _Path("tables/index.parquet")  # usable videos
    original_index = _Path("tables/original_index.parquet")  # index of the original files, if the run re-encodes them
    rejected = _Path("tables/rejected.parquet")  # listed videos that cannot be used, with reasons
    group_links = _Path("tables/group_links.parquet")  # links that joined groups of the label source
    annotations = _Path("tables/annotations.parquet")  # every row of the corpus's label tables, also without a video
    folds = _Path("tables/folds.parquet")  # the outer fold that tests each video
    protocol = _Path("tables/protocol.parquet")  # the part of each video in each training
    augmented_metadata = _Path("tables/augmented_metadata.csv")  # one row per augmented clip of the shared store
    seen_clips = _Path("tables/seen_clips.csv")  # frames and picture part of each clip, if the view chooses them
    features = _Path("tables/features.parquet")  # forensic features of every video
    final_validation = _Path(
        "tables/final_validation.parquet"
    )  # logits of the network trained on all groups, on its validation part
    final_features = _Path("tables/final_features.safetensors")  # features of that part by this network
    test_features = _Path("tables/test_features.safetensors")  # features of tested videos, to compare new files with
    results = _Path("kfold_results.feather")  # metrics, intervals and controls over all folds
    slices = _Path("tables/slices.parquet")  # the results by platform, codec, length and other attributes
    robustness = _Path("tables/robustness.parquet")  # scores of the disturbed test videos, on request
    robustness_results = _Path("tables/robustness_results.csv")  # metrics of these scores
    leakage_audit = _Path("tables/leakage_audit.parquet")  # the checks for leaks
    scores = _Path("tables/scores.csv")  # every tested video, mistakes first
    video_frames = _Path("tables/video_frames.parquet")  # a strip of frames of the first videos in ``scores``
    results_csv = _Path("tables/kfold_results.csv")  # the same table as kfold_results.feather
    images = _Path("tables/images.parquet")  # usable images, with their part of the split
    image_targets = _Path("tables/image_targets.parquet")  # the images' known numbers, such as calories, one per row
    image_predictions = _Path("tables/image_predictions.parquet")  # classes predicted for the test images
    target_predictions = _Path("tables/target_predictions.parquet")  # numbers predicted for the test images
    video_texts = _Path("tables/video_texts.parquet")  # usable pairs of video and text, with their part of the split
    retrieval_ranks = _Path("tables/retrieval_ranks.parquet")  # the rank of each test query's match
    captions = _Path("tables/captions.parquet")  # captions written for the test videos
    embeddings = _Path("tables/test_embeddings.safetensors")  # embeddings of the test videos and texts
    task_results = _Path("task_results.feather")  # metrics, intervals and controls of tasks without folds

    # Files of one stage, or of one fold of it; every file has one writer
    task_lock = _PathOf("locks/{}.lock")  # held by the job that works on the stage, so that no other job does
    metrics = _PathOf("metrics/{}.jsonl")  # metric log
    memory = _PathOf("memory/{}.jsonl")  # memory samples
    memory_events = _PathOf("memory/events/{}.jsonl")  # events of the memory, such as an out-of-memory
    stage_log = _PathOf("logs/{}.log")  # output of the kernel and of native libraries outside the notebook
    executed_notebook = _PathOf("notebooks/{}.ipynb")  # the record of a finished stage
    partial_notebook = _PathOf("notebooks/{}.partial.ipynb")  # the record of a running or failed stage
    stage_checkpoint = _PathOf(
        "checkpoints/stage_{}.json"
    )  # digests of the stage's files, and its fingerprint; exists if the stage has finished

    # Files of one fold, or of one disturbance
    predictions = _PathOf("tables/predictions_fold_{}.parquet")  # predictions for the fold's test videos
    validation_predictions = _PathOf("tables/validation_predictions_fold_{}.parquet")  # for inner validation videos
    fold_checkpoints = _PathOf("checkpoints/fold_{}")  # checkpoint folder of the fold
    fold_outcome = _PathOf("checkpoints/fold_{}/outcome.json")  # written last: it exists if the fold has finished
    robustness_scores = _Path("robustness")  # LEVEL/: a journal of scores of disturbed videos

    def training_checkpoints(self, stage: str, fold: int | None = None) -> Path:
        """Return the folder with the checkpoints of a training.

        It belongs to the fold ``fold``, or to the stage ``stage`` if ``fold`` is None.
        """
        return self.root / "checkpoints" / stage if fold is None else self.fold_checkpoints(fold)

    def stage_outcome(self, stage: str) -> Path:
        """Return the path of ``outcome.json``, the result of the training of a stage without folds.

        The file exists if the training has finished.
        """
        return self.training_checkpoints(stage) / "outcome.json"


def stage_key(stage: str, fold: int | None = None) -> str:
    """Return the part of file names for a stage or for one of its folds, such as ``04_fold_training_fold_2``."""
    return stage if fold is None else f"{stage}_fold_{fold}"


def refuse_runs_folder(runs_dir: AnyPath, experiment: str) -> Path:
    """Check that ``new_run`` can create runs in ``runs_dir/experiment``; nothing is created.

    Returns:
        The deepest folder of this path that exists; the missing folders would be created in it.

    Raises:
        UsageError: ``experiment`` is not a single folder name, or a part of the path is a file or a broken link.
    """
    if not experiment or experiment != Path(experiment).name or experiment.startswith("."):
        raise UsageError(f"experiment: got {experiment!r}, wanted one folder name without '/' or a leading dot.")
    folder = (Path(runs_dir) / experiment).absolute()
    there = next(path for path in (folder, *folder.parents) if path.is_symlink() or path.exists())
    if not there.is_dir():
        raise UsageError(f"{str(there)!r} is no folder for runs. Name one: FVC_RUNS_DIR or -p runs_dir.")
    return there


def new_run(runs_dir: AnyPath, experiment: str, config_hash: str) -> RunPaths:
    """Create a run folder in ``runs_dir/experiment``, and return the paths of its files.

    The name of the folder has the local time and the first 8 characters of ``config_hash``. At most one run is created
    per second: the function waits while a run with the current second in its name exists.

    Raises:
        UsageError: ``experiment`` is not a single folder name, or a part of the path is a file or a broken link.
    """
    runs_dir = Path(runs_dir)
    folder = runs_dir / experiment
    refuse_runs_folder(runs_dir, experiment)
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        second = time.strftime("%Y%m%d_%H%M%S")
        # At most one run per second is created, so that the newest run is the one whose name sorts last.
        if not any(runs_dir.glob(f"*/run_{second}_*")):
            with suppress(FileExistsError):
                (root := folder / f"run_{second}_{config_hash[:8]}").mkdir()
                return RunPaths(root.absolute())
        time.sleep(0.1)


def list_runs(runs_dir: AnyPath, experiment: str | None = None) -> list[RunPaths]:
    """Return the runs in the folder ``runs_dir``, oldest first.

    ``experiment`` is the name of the experiment whose runs are returned; None: the runs of all experiments.
    """
    runs_dir = Path(runs_dir)
    pattern = f"{experiment or '*'}/run_*/run.json"
    runs = [RunPaths(record.parent.absolute()) for record in runs_dir.glob(pattern)]
    return sorted(runs, key=lambda run: (run.run_id, str(run.root)))


def find_run(runs_dir: AnyPath, name: str, experiment: str | None = None) -> RunPaths:
    """Return the run called ``name``.

    Args:
        runs_dir: folder that contains the experiments.
        name: ``latest`` (the newest run), a run id, a part that occurs in a single run id, or the path of a run folder.
        experiment: name of the experiment that is searched; None: all.

    Raises:
        UsageError: no run fits, or several do; the message lists the runs.
    """
    as_path = Path(name)
    if (as_path / "run.json").is_file():
        return RunPaths(as_path.absolute())
    runs = list_runs(runs_dir, experiment)
    fitting = runs[-1:] if name == "latest" else [run for run in runs if name in run.run_id]
    if len(fitting) == 1:
        return fitting[0]
    newest = ", ".join(run.run_id for run in runs[-10:]) or "none"
    begin = command_text("--params", PARAMS / "demo.yaml")
    raise UsageError(
        f"{len(fitting) or 'no'} run called {name!r} under {str(runs_dir)!r}; the newest there: {newest}. "
        f"Name one of them, its path, or 'latest'; or begin one: {begin}"
    )


def is_ensemble(path: str | Path) -> bool:
    """Return whether the folder ``path`` has the record of a finished ensemble."""
    return (Path(path).expanduser() / ENSEMBLE_RECORD).is_file()


def list_ensembles(runs_dir: AnyPath, experiment: str = "*") -> list[RunPaths]:
    """Return all finished ensembles under ``runs_dir``, sorted by name.

    ``experiment`` is the name of an experiment, or a pattern with ``*``.
    """
    folders = [record.parent.absolute() for record in Path(runs_dir).glob(f"{experiment}/*/{ENSEMBLE_RECORD}")]
    return [RunPaths(folder) for folder in sorted(folders, key=lambda folder: folder.name)]


def find_run_or_ensemble(runs_dir: AnyPath, name: str) -> RunPaths:
    """Return the ensemble or run called ``name`` under ``runs_dir``.

    For an ensemble, ``name`` is the path of its folder or a part of the folder's name. The part must contain the word
    ``ensemble``, and must not occur in the name of another ensemble. Any other ``name`` is passed to ``find_run``.

    Raises:
        UsageError: no ensemble or run fits, or several do.
    """
    if is_ensemble(name):
        return RunPaths(Path(name).expanduser().absolute())
    known = list_ensembles(runs_dir) if "ensemble" in name else []
    if not known:
        return find_run(runs_dir, name)
    fitting = [ensemble for ensemble in known if name in ensemble.run_id]
    if len(fitting) != 1:
        names = ", ".join(ensemble.run_id for ensemble in known)
        raise UsageError(f"{len(fitting)} ensembles are called {name!r}, of {names}. Name one, or its path.")
    return fitting[0]


# Patterns that name many tars at once: ``shards/train-{000..099}.tar``, ``{real,fake}/*.tar``, ``repo/**/*.tar``.
# Every tar that braces name must exist. ``*``, ``?`` and ``[...]`` match existing files, and ``**`` matches any number
# of folders. An existing path is never read as a pattern.

TAR_SUFFIX = ".tar"
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)", re.ASCII)


def is_pattern(corpus: AnyPath) -> bool:
    """Return whether ``corpus`` is a pattern for several files, such as ``shards/{000..099}.tar``.

    A pattern has braces or wildcards, and is not the path of an existing file or folder.
    """
    text = os.fspath(corpus)
    return any(mark in text for mark in "{*?[") and not os.path.lexists(text)


def fixed_folder(corpus: AnyPath) -> Path:
    """Return the folder in the path ``corpus`` before the first component with braces or wildcards.

    For example, it is ``data/sets`` for ``data/sets/{real,fake}/*.tar``. The last component (the file's name) is never
    a part of it. In tables, the paths of tar files are relative to this folder.
    """
    fixed = takewhile(lambda part: not set(part) & set("{}*?["), Path(corpus).parent.parts)
    return Path(*fixed)


def tars_of(corpus: AnyPath) -> list[Path]:
    """Return the paths of the tar files that the pattern ``corpus`` matches, sorted.

    Raises:
        UsageError: a tar that the pattern names is missing, wildcards match nothing, or a file has no suffix ``.tar``.
    """
    pattern = os.fspath(corpus)
    found: set[str] = set()
    for name in _expanded(pattern):
        matches = [name] if os.path.exists(name) else glob.glob(name, recursive=True)  # noqa: PTH110, PTH207 - text
        others = [path for path in matches if not path.lower().endswith(TAR_SUFFIX)]
        if others or not matches:
            problem = f"{others[0]!r} is no uncompressed tar" if others else f"there is no {name!r}"
            raise UsageError(
                f"corpus {pattern!r}: {problem}. Name tars alone, such as shards/{{000..099}}.tar or '{{a,b}}/*.tar'."
            )
        found.update(matches)
    if not found:
        raise UsageError(f"corpus {pattern!r}: a range in braces is empty. Count upwards, such as {{000..099}}.")
    return [Path(path) for path in sorted(found)]


def _expanded(pattern: str) -> Iterator[str]:
    """Yield the texts that result from expanding all braces of ``pattern``, as a shell does, in order.

    Braces hold choices separated by commas, or a range of numbers such as ``000..099``. A range that counts downwards
    gives no text. Braces without a partner are not expanded.
    """
    braces = _BRACES.search(pattern)
    if braces is None:
        yield pattern
        return
    choices: Iterable[str] = braces[1].split(",")
    numbers = _RANGE.fullmatch(braces[1])
    if numbers is not None:
        first, last = numbers.groups()
        choices = (f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1))
    for choice in choices:
        yield from _expanded(pattern[: braces.start()] + choice + pattern[braces.end() :])
