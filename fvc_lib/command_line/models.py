"""Open a model that judges files, and export a run's model as a bundle.

A model is a finished run, an ensemble of runs, or a bundle. A bundle is a folder with networks and a model card
(README) that can be used without the run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from fvc_lib.services.errors import DataError, UsageError, command_text
from fvc_lib.services.home import SCRIPT
from fvc_lib.services.parameters import resolve_config, run_config
from fvc_lib.services.records.ensembles import read_ensemble
from fvc_lib.services.run_paths import RunPaths, find_run_or_ensemble
from fvc_lib.services.tasks import DEFAULT_TASK, PROTOCOLS, TASKS

if TYPE_CHECKING:
    from fvc_lib.tasks.predicting import Predictor, Standing, Trained
    from fvc_lib.tasks.video.predicting import VideoDetector


def find_model(runs_dir: str | Path, name: str) -> Path:
    """Return the folder of a bundle, run or ensemble.

    Args:
        runs_dir: the folder of all runs.
        name: path of a bundle; name or path of a run or ensemble; or ``models:/NAME@ALIAS``, which is downloaded from
            MLflow's model registry into the cache.

    Raises:
        UsageError: there is no such bundle, run, ensemble or registered model.
        FvcError: MLflow refused the download, or the content differs from what was registered.
    """
    if name.startswith("models:/"):
        from fvc_lib.analysis.mlflow import default_tracking_uri, fetched_bundle  # duckdb takes time to load

        store = default_tracking_uri(Path(runs_dir))
        return fetched_bundle(name, tracking_uri=store, cache_dir=Path(resolve_config().cache_dir))
    from fvc_lib.tasks.bundle import is_bundle  # torch takes a second to load

    if is_bundle(name):
        return Path(name).expanduser().absolute()
    return find_run_or_ensemble(runs_dir, name).root


def load_detector(path: str | Path, *, allow_code: bool = False, final: bool = False) -> "Predictor":
    """Return the predictor of a bundle, a finished run or an ensemble, of any task.

    The predictor applies the networks to files with its method ``findings``. (``fvc_lib.public.load_detector`` returns
    a simpler object, whose method ``predict`` returns a table.)

    Args:
        path: path of the bundle, run or ensemble, or ``models:/NAME@ALIAS`` of MLflow's registry.
        allow_code: whether Python code in a bundle may run: a network or a crop that the bundle's author wrote. A run
            does not need it, because the run's code is already on this machine.
        final: True: use the network that the run trained on all groups (``train_final``). False: use the networks of
            the folds; a bundle uses the networks that it has.

    Raises:
        UsageError: the path is neither a bundle nor a run, the bundle is damaged or unsafe, the run is unfinished, or
            ``final`` is true and there is no network trained on all groups.
        FvcError: a file of the run is damaged.
    """
    from fvc_lib.tasks.bundle import RECORD, is_bundle, open_bundle
    from fvc_lib.tasks.predicting import predictor_of

    is_registered = str(path).startswith("models:/")
    folder = find_model(resolve_config().runs_dir, str(path)) if is_registered else Path(path).expanduser().absolute()
    if is_bundle(folder):
        predictor = open_bundle(folder, allow_code=allow_code)
        if final and "final" not in predictor.trained:
            raise UsageError(f"bundle {str(folder)!r}: has no network of all groups. Leave --final out.")
        return predictor
    run = RunPaths(folder)
    if not run.params_yaml.is_file():
        raise UsageError(
            f"{str(folder)!r} is neither a bundle ({RECORD}) nor a run folder. To make a bundle of a run: "
            f"{command_text('export', 'RUN')}"
        )
    return predictor_of(run, standing_of_run(run), final=final)


def verdict_detector(path: str | Path, *, allow_code: bool = False, final: bool = False) -> "VideoDetector":
    """Return the video detector of a bundle, finished run or ensemble; other models give no verdicts and are refused.

    ``path``, ``allow_code`` (whether Python code in a bundle may run) and ``final`` (whether to use the network that
    was trained on all groups) are those of ``load_detector``.

    Raises:
        UsageError: the model cannot be loaded (``load_detector``), or it is not a video detector.
    """
    from fvc_lib.tasks.video.predicting import VideoDetector

    found = load_detector(path, allow_code=allow_code, final=final)
    if not isinstance(found, VideoDetector):
        raise UsageError(f"{str(path)!r} is of task {found.config.task}, which gives no verdicts. To ask it: predict")
    return found


def standing_of_run(run: RunPaths) -> "Standing":
    """Return how a run's or ensemble's model compares with its controls (models that can use only shortcuts).

    The result has the first sentences of the report, and the scores of the model and of its controls, with intervals.
    """
    from fvc_lib.analysis.read.headline import DISHONEST_CONTROLS, HEADLINE_METRIC, run_headline, worth_of
    from fvc_lib.analysis.read.runs import read_tables
    from fvc_lib.services.tables import TASK_RESULTS
    from fvc_lib.tasks.predicting import ScoreRecord, Standing

    headline, task = run_headline(run, with_memory=False), run_config(run.params_yaml).task
    if task == DEFAULT_TASK:
        sentences = headline.sentences
        rows = [
            (score.source, HEADLINE_METRIC, score.value, score.low, score.high)
            for score in headline.scores
            if score.source not in DISHONEST_CONTROLS
        ]
    else:
        results = read_tables([(run.run_id, run.task_results)], TASK_RESULTS).frame
        sentences = worth_of(run, headline, results, task)
        results = results.filter(~pl.col("subject").str.starts_with("class:"))
        metric = pl.concat_str("subject", "metric", separator="/")
        rows = results.select("source", metric, "value", "low", "high").rows()
    scores = [ScoreRecord(source=s, metric=m, value=v, low=low, high=high) for s, m, v, low, high in rows]
    return Standing(standing=headline.verdict.standing, sentences=list(sentences), scores=scores)


# Exporting a bundle

_PIPELINES = {"video": "video-classification", "image": "image-classification", "video_text": "video-text-to-text"}
_USES = {
    "video": (
        "For a first look at a video by somebody who then looks further, and for research. Not for deciding about a "
        "person or a publication by the score alone, nor for footage that is staged or out of context. The score is "
        "the probability of fake where fakes are as frequent as among the run's videos."
    ),
    "image": "For pictures like those it was trained on. Not for deciding about a person.",
    "video_text": "For videos like those it was trained on. Not for deciding about a person.",
}
_LIMITS = {
    "video": (
        "Videos of the run are recognised by their bytes and get the score of the network that had not seen them; "
        "near-duplicates of them get none. New generators, platforms and compressions lower the numbers, often by much."
    ),
    "image": "Every picture gets a class or a number, also one that shows nothing of the kind.",
    "video_text": "Every video gets an answer, also one that shows nothing of the kind.",
}


def write_run_bundle(run: RunPaths, target: Path, *, final: bool = False) -> tuple[int, str]:
    """Write the bundle of a run or ensemble into the new folder ``target``.

    Args:
        run: the run or ensemble.
        target: path of the bundle.
        final: whether the bundle gets the network trained on all groups instead of the folds' networks.

    Returns:
        The number of networks, and a sentence that says whether the model is better than its controls (models that can
        use only shortcuts).

    Raises:
        UsageError, FvcError, OSError: the model cannot be loaded (``predictor_of``) or written (``write_bundle``).
        DataError: the results are missing or damaged.
    """
    from fvc_lib.analysis.read.headline import run_headline  # torch and polars take a second to load
    from fvc_lib.tasks.bundle import write_bundle
    from fvc_lib.tasks.predicting import predictor_of

    if notes := run_headline(run).notes:
        raise DataError(f"{run.run_id} is not exported: {' '.join(notes)}")
    # Commands in the sentences name the run instead of folders of this machine.
    standing, script = standing_of_run(run), str(SCRIPT)
    sentences = [
        text.replace(script, "run_notebooks.py").replace(str(run.root), run.run_id) for text in standing.sentences
    ]
    standing = standing.model_copy(update={"sentences": sentences})
    predictor = predictor_of(run, standing, final=final)
    write_bundle(predictor, target, model_card(run, predictor, final=final))
    number = sum(1 for _ in target.rglob("model/*.safetensors"))
    return number, standing.sentences[0]


def model_card(run: RunPaths, predictor: "Predictor", *, final: bool = False) -> str:
    """Return the README of a bundle in the format of the Hugging Face hub: YAML between dashes, then Markdown.

    Args:
        run: the run or ensemble.
        predictor: its model.
        final: whether the bundle has the network trained on all groups. The card then says that its numbers were
            measured with the folds' networks.
    """
    from fvc_lib.analysis.pages.page import render
    from fvc_lib.analysis.read.headline import run_headline
    from fvc_lib.tasks.video.verdicts.rule import TAKEN_OVER, WORTH

    config = run_config(run.params_yaml)
    headline = run_headline(run)
    standing = predictor.standing
    split = "One split: the epoch was chosen on the validation part, and the test part was looked at once."
    if config.task == DEFAULT_TASK:
        circumstances = headline.measure.circumstances(headline.num_samples, headline.num_groups)
        chosen = "No epoch, temperature or threshold was chosen on the videos that were judged."
        split = f"Protocol {config.protocol}: {PROTOCOLS[config.protocol].meaning}. {chosen} {circumstances}"
    not_here = f"The numbers are of {config.num_trainings} networks, which are not here."
    return render(
        "model_card.md",
        pipeline=_PIPELINES[config.task],
        model=(headline.model or config.model).rpartition("/")[2],  # a user's file without its folders
        sentences=standing.sentences,
        final=f"{WORTH} {TAKEN_OVER} {not_here}" if final else "",
        use=_USES[config.task],
        corpus=headline.corpus or "not recorded",
        split=split,
        training=_training(run, predictor.trained),
        confidence=f"{100 * config.confidence:g}",
        scores=standing.scores,
        limits=_LIMITS[config.task],
    )


def _training(run: RunPaths, trained: Mapping[str, "Trained"]) -> list[str]:
    """Return the model card's lines on the training.

    An ensemble has a line per member: model, seed and weight. A run has lines on the network: number of parameters,
    notes, licences and paper.

    Args:
        run: the run or ensemble.
        trained: the run's networks; empty for an ensemble.
    """
    from fvc_lib.services.registry import BACKBONES, DETECTORS

    if not trained:
        record = read_ensemble(run.root)
        return [
            f"`members/{place}`: {member.model}, seed {member.seed}, weight {record.weight_of_member(place):.3f}"
            for place, member in enumerate(record.members)
        ]
    first = next(iter(trained.values()))
    name = getattr(first.config, TASKS[first.config.task].network)
    network = first.network
    spec = None if BACKBONES.is_own(name) else DETECTORS.get(name)
    licence = spec.licence if spec else "not stated" if ":" in name else "this project's"
    weights = network.weights_licence or (spec.weights_licence if spec and spec.brings_weights else "")
    lines = [
        f"{network.num_parameters:,} parameters were trained, {network.num_frozen:,} were not.",
        *network.notes,
        f"Licence of the network's code: {licence}.",
        f"Licence of the weights that it began with: {weights}." if weights else "",
        f"Paper: {spec.paper}." if spec and spec.paper else "",
        f"Run: {run.run_id}.",
    ]
    return [line for line in lines if line]
