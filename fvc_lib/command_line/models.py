"""The model that is asked about files, a finished run or an exported bundle, with its standing beside controls."""

from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from fvc_lib.services.errors import UsageError
from fvc_lib.services.parameters import resolve_config, run_config
from fvc_lib.services.records.ensembles import find_run_or_ensemble, is_ensemble
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tasks import DEFAULT_TASK

if TYPE_CHECKING:
    from fvc_lib.tasks.bundle_folder import Standing
    from fvc_lib.tasks.predicting import Predictor
    from fvc_lib.tasks.video.verdicts.detector import TrainedDetector


def find_model(runs_dir: str | Path, name: str) -> Path:
    """Return the folder of the bundle, run or ensemble ``name``; ``models:/NAME@ALIAS`` is fetched from the registry.

    Raises:
        UsageError: neither a bundle's folder nor a run or ensemble, nor in the registry.
        FvcError: MLflow refused, or holds something else than was registered.
    """
    from fvc_lib.analysis.mlflow.export import default_tracking_uri
    from fvc_lib.analysis.mlflow.registry import SCHEME, fetched_bundle

    if name.startswith(SCHEME):
        store = default_tracking_uri(Path(runs_dir))
        return fetched_bundle(name, tracking_uri=store, cache_dir=Path(resolve_config().cache_dir))
    from fvc_lib.tasks.bundle_folder import is_bundle  # torch takes a second to load

    return Path(name).expanduser().absolute() if is_bundle(name) else find_run_or_ensemble(runs_dir, name).root


def load_detector(
    path: str | Path, *, allow_code: bool = False, held: int | None = None, final: bool = False
) -> "TrainedDetector | Predictor":
    """Return the detector of a bundle or a finished run; of other tasks its predictor.

    ``load_detector("bundle_run_...").predict(["one.mp4", "two.mp4"])`` gives a row per file: a score, or of tasks image
    and video_text ``values`` by column.

    Args:
        path: of the bundle or run, or ``models:/NAME@ALIAS`` of MLflow's registry.
        allow_code: whether a bundle's own network or crop may be run: it is code that whoever made the bundle wrote.
            A run is on this machine already, with all its code.
        held: how many folds' networks are in memory at once, at most; None: all.
        final: whether a run's network of all groups (``train_final``) judges in place of the folds'. A bundle of it
            needs no such word.

    Raises:
        UsageError: neither a bundle nor a run, a damaged or hostile bundle, or an unfinished run.
        FvcError: what a run stored is damaged.
    """
    folder = _folder_of(path)
    if task_of_model(folder) == DEFAULT_TASK:
        return verdict_detector(folder, allow_code=allow_code, held=held, final=final)
    from fvc_lib.tasks.bundle_folder import is_bundle
    from fvc_lib.tasks.predicting import predictor_of
    from fvc_lib.tasks.predictor_bundle import open_predictor_bundle

    if final:
        raise UsageError(f"--final: is of runs of task {DEFAULT_TASK}. Leave it out.")
    if is_bundle(folder):
        return open_predictor_bundle(folder, allow_code=allow_code)
    run = RunPaths(folder.absolute())
    return predictor_of(run, standing_of_run(run))


def verdict_detector(
    path: str | Path, *, allow_code: bool = False, held: int | None = None, final: bool = False
) -> "TrainedDetector":
    """As ``load_detector``; ``UsageError`` where the answers are no verdicts."""
    from fvc_lib.tasks.video.verdicts.detector import detector_of, is_run

    folder = _folder_of(path)
    if (task := task_of_model(folder)) != DEFAULT_TASK:
        raise UsageError(f"{str(path)!r} is of task {task}, which gives no verdicts. To ask it: predict")
    standing = standing_of_run(RunPaths(folder.absolute())) if is_run(folder) else None
    if is_ensemble(folder):
        from fvc_lib.tasks.video.ensembles.bundle import is_ensemble_bundle, open_ensemble_bundle
        from fvc_lib.tasks.video.ensembles.detector import ensemble_of

        if final:
            raise UsageError("--final: an ensemble is of the folds' networks and has none of all groups. Leave it out.")
        if is_ensemble_bundle(folder):
            return open_ensemble_bundle(folder.absolute(), allow_code=allow_code, held=held)
        return ensemble_of(folder.absolute(), held=held, standing=standing)
    return detector_of(folder, allow_code=allow_code, held=held, standing=standing, final=final)


def task_of_model(folder: Path) -> str:
    """Return the task of a bundle, run or ensemble; of any other folder that of verdicts."""
    from fvc_lib.tasks.bundle_folder import is_bundle, task_of_bundle  # torch takes a second to load

    if is_bundle(folder):
        return task_of_bundle(folder)
    is_run = (folder / "params.yaml").is_file() and not is_ensemble(folder)
    return run_config(RunPaths(folder.absolute())).task if is_run else DEFAULT_TASK


def _folder_of(path: str | Path) -> Path:
    is_registered = str(path).startswith("models:/")
    return find_model(resolve_config().runs_dir, str(path)) if is_registered else Path(path).expanduser()


def standing_of_run(run: RunPaths) -> "Standing":
    """Return the sentences that the report of a run or ensemble begins with, and its numbers next to controls."""
    from fvc_lib.analysis.pages.predictions_page import worth_of
    from fvc_lib.analysis.read.headline import DISHONEST_CONTROLS, HEADLINE_METRIC, run_headline
    from fvc_lib.analysis.read.records import read_tables
    from fvc_lib.services.tables import TASK_RESULTS
    from fvc_lib.tasks.bundle_folder import ScoreRecord, Standing

    headline = run_headline(run)
    if run_config(run).task == DEFAULT_TASK:
        sentences = headline.sentences
        rows = [
            (each.source, HEADLINE_METRIC, each.value, each.low, each.high)
            for each in headline.scores
            if each.source not in DISHONEST_CONTROLS
        ]
    else:
        sentences = worth_of(run)
        results = read_tables([(run.run_id, run.task_results)], TASK_RESULTS).frame
        results = results.filter(~pl.col("subject").str.starts_with("class:"))
        metric = pl.concat_str("subject", "metric", separator="/")
        rows = results.select("source", metric, "value", "low", "high").rows()
    scores = [ScoreRecord(source=s, metric=m, value=v, low=low, high=high) for s, m, v, low, high in rows]
    return Standing(standing=headline.verdict.standing, sentences=list(sentences), scores=scores)
