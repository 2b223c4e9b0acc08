"""Open a model that judges files: a finished run, an ensemble, or an exported bundle (a folder without the run)."""

from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from fvc_lib.services.errors import UsageError, command_text
from fvc_lib.services.parameters import resolve_config, run_config
from fvc_lib.services.records.ensembles import find_run_or_ensemble
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tasks import DEFAULT_TASK

if TYPE_CHECKING:
    from fvc_lib.tasks.predicting import Predictor, Standing
    from fvc_lib.tasks.video.predicting import VideoDetector


def find_model(runs_dir: str | Path, name: str) -> Path:
    """Return the folder of the bundle, run or ensemble ``name``.

    ``models:/NAME@ALIAS`` is downloaded from MLflow's model registry into the cache.

    Raises:
        UsageError: there is no such bundle, run, ensemble or registered model.
        FvcError: MLflow refused the download, or the content differs from what was registered.
    """
    from fvc_lib.analysis.mlflow import SCHEME, default_tracking_uri, fetched_bundle

    if name.startswith(SCHEME):
        store = default_tracking_uri(Path(runs_dir))
        return fetched_bundle(name, tracking_uri=store, cache_dir=Path(resolve_config().cache_dir))
    from fvc_lib.tasks.bundle import is_bundle  # torch takes a second to load

    return Path(name).expanduser().absolute() if is_bundle(name) else find_run_or_ensemble(runs_dir, name).root


def load_detector(
    path: str | Path, *, allow_code: bool = False, held: int | None = None, final: bool = False
) -> "Predictor":
    """Return the predictor of a bundle, a finished run or an ensemble, of any task.

    ``load_detector("bundle_run_...").predict(["one.mp4", "two.mp4"])`` gives a row per file, with ``values`` by column.

    Args:
        path: path of the bundle, run or ensemble, or ``models:/NAME@ALIAS`` of MLflow's registry.
        allow_code: whether a bundle's own network or crop may run. It is code that the author of the bundle wrote. Not
            needed for a run, whose code is already on this machine.
        held: the largest number of networks in memory at once; None: all.
        final: whether a run's network trained on all groups (``train_final``) judges instead of the folds' networks.
            Not needed for a bundle of that network.

    Raises:
        UsageError: the path is neither a bundle nor a run, the bundle is damaged or unsafe, or the run is unfinished.
        FvcError: a file of the run is damaged.
    """
    from fvc_lib.tasks.bundle import RECORD, is_bundle, open_bundle
    from fvc_lib.tasks.predicting import predictor_of

    is_registered = str(path).startswith("models:/")
    folder = find_model(resolve_config().runs_dir, str(path)) if is_registered else Path(path).expanduser().absolute()
    if is_bundle(folder):
        predictor = open_bundle(folder, allow_code=allow_code, held=held)
        if final and "final" not in predictor.trained:
            raise UsageError(f"bundle {str(folder)!r}: has no network of all groups. Leave --final out.")
        return predictor
    run = RunPaths(folder)
    if not run.params_yaml.is_file():
        raise UsageError(
            f"{str(folder)!r} is neither a bundle ({RECORD}) nor a run folder. To make a bundle of a run: "
            f"{command_text('export', 'RUN')}"
        )
    return predictor_of(run, standing_of_run(run), held=held, final=final)


def verdict_detector(
    path: str | Path, *, allow_code: bool = False, held: int | None = None, final: bool = False
) -> "VideoDetector":
    """Return the detector as ``load_detector`` does; raise ``UsageError`` if the model gives no verdicts."""
    from fvc_lib.tasks.video.predicting import VideoDetector

    found = load_detector(path, allow_code=allow_code, held=held, final=final)
    if not isinstance(found, VideoDetector):
        raise UsageError(f"{str(path)!r} is of task {found.config.task}, which gives no verdicts. To ask it: predict")
    return found


def task_of_model(folder: Path) -> str:
    """Return the task (video, image or video_text) of the bundle, run or ensemble in ``folder``."""
    from fvc_lib.tasks.bundle import is_bundle, task_of_bundle  # torch takes a second to load

    return task_of_bundle(folder) if is_bundle(folder) else run_config(RunPaths(folder.absolute())).task


def standing_of_run(run: RunPaths) -> "Standing":
    """Return how good a run or ensemble is: the first sentences of its report, and its scores next to its controls.

    A control is a model that can use only shortcuts, such as the file's metadata.
    """
    from fvc_lib.analysis.pages.answers import worth_of
    from fvc_lib.analysis.read.headline import DISHONEST_CONTROLS, HEADLINE_METRIC, run_headline
    from fvc_lib.analysis.read.records import read_tables
    from fvc_lib.services.tables import TASK_RESULTS
    from fvc_lib.tasks.predicting import ScoreRecord, Standing

    headline = run_headline(run)
    if run_config(run).task == DEFAULT_TASK:
        sentences = headline.sentences
        rows = [
            (score.source, HEADLINE_METRIC, score.value, score.low, score.high)
            for score in headline.scores
            if score.source not in DISHONEST_CONTROLS
        ]
    else:
        sentences = worth_of(run)
        results = read_tables([(run.run_id, run.task_results)], TASK_RESULTS).frame
        results = results.filter(~pl.col("subject").str.starts_with("class:"))
        metric = pl.concat_str("subject", "metric", separator="/")
        rows = results.select("source", metric, "value", "low", "high").rows()
    scores = [ScoreRecord(source=s, metric=m, value=v, low=low, high=high) for s, m, v, low, high in rows]
    return Standing(standing=headline.verdict.standing, sentences=list(sentences), scores=scores)
