"""A finished training of a task without verdicts as a bundle (``bundle_folder.py``): its network, what its outputs
mean, and by what the run's files are known again.
"""

from pathlib import Path
from typing import Any

import polars as pl

from fvc_lib.detectors.texts.transformers_encoders import OWN
from fvc_lib.engine.training_state import weights_digest
from fvc_lib.services.atomic_files import sha256_of_json, write_json, write_text
from fvc_lib.services.checkpoint_files import write_weights_with_digest
from fvc_lib.services.config import RunConfig
from fvc_lib.services.registry import BACKBONES, DETECTORS
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import KNOWN_FILES, PARTS, write_table
from fvc_lib.services.tasks import TASKS
from fvc_lib.tasks.bundle_folder import (
    CARD,
    RECORD,
    WEIGHTS,
    Digest,
    NetworkRecord,
    RunId,
    Standing,
    Strict,
    begun_with,
    checked_files,
    config_of,
    copy_weights,
    made_with,
    new_folder,
    parts_of,
    read_bundle_table,
    read_record,
    refused,
    require_weights,
    task_of_bundle,
    write_begun_with,
    write_digests,
    write_params,
)
from fvc_lib.tasks.forms import SUFFIXES, check_packages
from fvc_lib.tasks.predicting import Predictor, Trained, outcome_of, predictor_class, predictor_of
from fvc_lib.tasks.recipe import TrainedClass

FORMAT = 1
_NETWORK, _KNOWN, _TEXT_ENCODER = "network.safetensors", "known_files.parquet", "text_encoder"
_OTHER_DECODER = (
    "Files are decoded by other code, or by another version of a library, than the run's were: answers may differ a "
    "little from the run's."
)
# What a network is built with may be named by these.
_WEIGHT_FIELDS = ("model_weights", "backbone_weights")


class SplitRecord(Strict):
    """On which files: a fingerprint over contents and parts, counts by part, and groups."""

    fingerprint: Digest
    num_files: dict[str, int]
    num_groups: int


class PredictorRecord(Strict):
    """``bundle.json``."""

    format: int
    made_with: dict[str, str]
    run_id: RunId
    run_hash: Digest
    decode_hash: Digest
    params: dict[str, Any]
    weights: Digest
    network: NetworkRecord
    corpus: SplitRecord
    standing: Standing


def write_predictor_bundle(paths: RunPaths, folder: Path, standing: Standing, card: str, *, form: str = "") -> str:
    """Write the run's bundle to ``folder``, which is there whole or not at all, and load it from there.

    Args:
        paths: a finished run of a task without verdicts.
        folder: not there yet.
        standing: where the run's model stands.
        card: the model card, behind which a section on the network's other form is added where there is one.
        form: in which the network is written as well (``forms.SUFFIXES``); empty: none.

    Returns:
        Sentences on the other form.

    Raises:
        UsageError: the run is not finished, ``folder`` is there, or the network cannot be written as ``form``.
        FvcError: a file of the run is damaged, or the code of its network has changed.
        OSError: as the file system gave it.
    """
    if form:
        check_packages(form)
    predictor = predictor_of(paths, standing)
    with new_folder(folder) as building:
        (building / WEIGHTS).mkdir()
        path = (building / WEIGHTS / _NETWORK).with_suffix(SUFFIXES.get(form, ""))
        told = predictor.write_form(paths, form, path) if form else ""
        _fill(building, paths, predictor, f"{card}\n## Without this project\n\n{told}\n" if told else card)
        if open_predictor_bundle(building, allow_code=True).identity != predictor.identity:
            raise refused(building, "what was written is not what the run says; report this")
    return told


def _fill(folder: Path, paths: RunPaths, predictor: Predictor, card: str) -> None:
    config, state = predictor.config, predictor.trained.state
    write_weights_with_digest(folder / WEIGHTS / _NETWORK, state, {"run": paths.run_id})
    predictor.write(folder)
    files = predictor.files_of_run(paths)
    known = files.select("content_sha256", "part").unique("content_sha256", keep="last").sort("content_sha256")
    write_table(known, KNOWN_FILES, folder / _KNOWN)
    params = write_params(folder, config)
    write_begun_with(folder, next((text for name in _WEIGHT_FIELDS if (text := _named(config, name))), ""))
    if _has_text_encoder(params):
        copy_weights(Path(config.text_encoder), folder / _TEXT_ENCODER, beside=("*.json", "*.txt"))
        params["text_encoder"] = _TEXT_ENCODER
    name = getattr(config, TASKS[config.task].network)
    spec = None if BACKBONES.is_own(name) else DETECTORS.get(name)
    trained = outcome_of(paths).network
    weights_licence = trained.weights_licence or (spec.weights_licence if spec else "")
    record = PredictorRecord(
        format=FORMAT,
        made_with=made_with(),
        run_id=paths.run_id,
        run_hash=config.config_hash,
        decode_hash=predictor.decode_hash,
        params=params,
        weights=weights_digest(state),
        network=NetworkRecord(
            name=trained.name,
            code=trained.code,
            functions=dict(trained.functions),
            licence=spec.licence if spec else "not stated" if ":" in name else "this project's",
            weights_licence=weights_licence,
            begun_with_sha256=trained.weights_sha256,
            paper=spec.paper if spec else "",
        ),
        corpus=SplitRecord(
            fingerprint=sha256_of_json([list(row) for row in known.rows()]),
            num_files={part: known.filter(pl.col("part") == part).height for part in PARTS},
            num_groups=files["group_id"].n_unique(),
        ),
        standing=predictor.standing,
    )
    write_json(folder / RECORD, record.model_dump(mode="json"))
    write_text(folder / CARD, card)
    write_digests(folder)


def open_predictor_bundle(folder: Path, *, allow_code: bool = False) -> Predictor:
    """Return the predictor of a bundle of a task without verdicts.

    Args:
        folder: of the bundle.
        allow_code: whether its own network may be run: it is code that whoever made the bundle wrote.

    Raises:
        UsageError: it is damaged, hostile, of another format, or wants code that is not allowed.
        FvcError: a table, tokenizer or file of weights that no export writes.
    """
    folder = folder.absolute()
    task = task_of_bundle(folder)
    answers = predictor_class(task)
    encoder = rf"|{_TEXT_ENCODER}/[\w-][\w.-]*\.(json|txt|safetensors)" if task == "video_text" else ""
    checked_files(folder, (_KNOWN,), parts_of((_KNOWN, *answers.own_files), "network", encoder))
    record = read_record(PredictorRecord, folder, (FORMAT,))
    weights = require_weights(folder, _NETWORK)
    params, places = dict(record.params), dict[str, str]()
    if _has_text_encoder(params):
        if params["text_encoder"] != _TEXT_ENCODER or not (folder / _TEXT_ENCODER).is_dir():
            raise refused(folder, f"text_encoder is {params['text_encoder']!r}, wanted {_TEXT_ENCODER!r} beside it")
        places["text_encoder"] = str(folder / _TEXT_ENCODER)
        params["text_encoder"] = OWN
    config = config_of(folder, params, task, allow_code=allow_code)
    places |= {name: begun_with(folder) for name in _WEIGHT_FIELDS if name in config.relevant()}
    network = record.network
    trained = Trained(
        name=record.run_id,
        config=config.model_copy(update=places),
        weights=weights,
        digest=record.weights,
        network=TrainedClass(network.name, "", network.code, 0, functions=network.functions),
        known=dict(read_bundle_table(folder, _KNOWN, KNOWN_FILES).iter_rows()),
        remedy="Get the bundle again from whoever exported it, or export it anew.",
        standing=record.standing,
    )
    predictor = answers.of_bundle(trained, folder)
    if predictor.decode_hash != record.decode_hash:
        predictor.cautions += (_OTHER_DECODER,)
    return predictor


def _has_text_encoder(params: dict[str, Any]) -> bool:
    return bool(params.get("text_encoder", OWN) != OWN)


def _named(config: RunConfig, name: str) -> str:
    return str(config.relevant().get(name, ""))
