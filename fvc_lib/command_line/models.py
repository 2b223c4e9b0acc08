"""The model that is asked about files, a finished run or an exported bundle, with its standing beside controls."""

from pathlib import Path
from typing import TYPE_CHECKING

from fvc_lib.services.errors import UsageError
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.records.ensembles import find_run_or_ensemble, is_ensemble
from fvc_lib.services.run_paths import RunPaths

if TYPE_CHECKING:
    from fvc_lib.analysis.read.headline import ReportHeadline
    from fvc_lib.tasks.bundle_folder import Standing
    from fvc_lib.tasks.video.verdicts.detector import TrainedDetector


def find_model(runs_dir: str | Path, name: str) -> Path:
    """The folder of the bundle, run or ensemble called ``name``; ``models:/NAME@ALIAS`` is fetched from the registry.

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
) -> "TrainedDetector":
    """The detector that an exported bundle or the folder of a finished run holds.

    ``load_detector("bundle_run_...").predict(["one.mp4", "two.mp4"])`` gives a row per file.

    Args:
        path: of the bundle or run, or ``models:/NAME@ALIAS`` of MLflow's registry.
        allow_code: whether a bundle's own network or crop may be run: it is code that whoever made the bundle wrote.
            A run is on this machine already, with all its code.
        held: so many folds' networks are in memory at most; none: all.
        final: whether a run's network of all groups (``train_final``) judges in place of the folds'. A bundle of it
            needs no such word.

    Raises:
        UsageError: neither a bundle nor a run, a damaged or hostile bundle, or an unfinished run.
    """
    from fvc_lib.analysis.read.headline import run_headline
    from fvc_lib.tasks.video.verdicts.detector import detector_of, is_run

    is_registered = str(path).startswith("models:/")
    folder = find_model(resolve_config().runs_dir, str(path)) if is_registered else Path(path).expanduser()
    standing = standing_of(run_headline(RunPaths(folder.absolute()))) if is_run(folder) else None
    if is_ensemble(folder):
        from fvc_lib.tasks.video.ensembles.bundle import is_ensemble_bundle, open_ensemble_bundle
        from fvc_lib.tasks.video.ensembles.detector import ensemble_of

        if final:
            raise UsageError("--final: an ensemble is of the folds' networks and has none of all groups. Leave it out.")
        if is_ensemble_bundle(folder):
            return open_ensemble_bundle(folder.absolute(), allow_code=allow_code, held=held)
        return ensemble_of(folder.absolute(), held=held, standing=standing)
    return detector_of(folder, allow_code=allow_code, held=held, standing=standing, final=final)


def standing_of(headline: "ReportHeadline") -> "Standing":
    """What a run's report begins with."""
    from fvc_lib.analysis.read.headline import DISHONEST_CONTROLS, HEADLINE_METRIC
    from fvc_lib.tasks.bundle_folder import ScoreRecord, Standing

    scores = [
        ScoreRecord(source=each.source, metric=HEADLINE_METRIC, value=each.value, low=each.low, high=each.high)
        for each in headline.scores
        if each.source not in DISHONEST_CONTROLS
    ]
    return Standing(standing=headline.verdict.standing, sentences=list(headline.sentences), scores=scores)
