"""A trained detector of forgeries as a bundle (``tasks/bundle_folder.py``): its folds' networks, and what a verdict
needs beside them.
"""

import logging
from pathlib import Path
from typing import Annotated, Any

import av
import polars as pl
import safetensors.numpy
from pydantic import Field

from fvc_lib.services.atomic_files import sha256_of_json, write_json, write_text
from fvc_lib.services.checkpoint_files import load_weights, write_weights_with_digest
from fvc_lib.services.errors import UsageError
from fvc_lib.services.registry import DETECTORS
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import (
    CALIBRATION,
    FINAL_VALIDATION,
    FOLDS,
    INDEX,
    LOOKS,
    PREDICTIONS,
    read_table,
    write_table,
)
from fvc_lib.services.tasks import DEFAULT_TASK
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
    made_with,
    new_folder,
    parsed,
    parts_of,
    read_arrays,
    read_bundle_table,
    read_record,
    refused,
    require_weights,
    task_of_bundle,
    write_begun_with,
    write_digests,
    write_params,
)
from fvc_lib.tasks.forms import INPUT, OUTPUT, SUFFIXES, check_packages, clips_to_compare, write_form
from fvc_lib.tasks.recipe import TrainedClass
from fvc_lib.tasks.video.classical.judging import described_in
from fvc_lib.tasks.video.verdicts.feature_distance import FeatureDistance, distance_of
from fvc_lib.tasks.video.verdicts.rule import KnownVideos
from fvc_lib.tasks.video.verdicts.scoring import FINAL, FoldNetwork, Networks, RunNetworks, name_of
from fvc_lib.tasks.video.verdicts.unfamiliar import TrainingRanges, index_of_files, training_ranges

_logger = logging.getLogger(__name__)

FORMAT = 6
_CALIBRATION, _LOOKS, _RANGES = "calibration.parquet", "looks.parquet", "training_ranges.json"
_FEATURES = "features.safetensors"
_ALWAYS = (_CALIBRATION, _LOOKS, _RANGES)
_PARTS = parts_of((*_ALWAYS, _FEATURES), r"(fold_\d{1,4}|final)")
_Number = Annotated[float, Field(allow_inf_nan=False)]


class FoldRecord(Strict):
    """One fold: its weights' digest (``weights_digest``), and how its logits become scores and decisions."""

    weights: Digest
    prior_logit: _Number
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    threshold: Annotated[float, Field(ge=0, le=1)]
    base_rate: Annotated[float, Field(gt=0, lt=1)] | None = None


class CorpusRecord(Strict):
    """On which videos: names, a fingerprint over contents and labels, counts, and how they were split."""

    names: list[str]
    fingerprint: Digest
    num_real: int
    num_fake: int
    num_groups: int
    protocol: str


class BundleRecord(Strict):
    """``bundle.json``."""

    format: int
    made_with: dict[str, str]
    run_id: RunId
    run_hash: Digest
    decode_hash: Digest
    operating_point: str
    params: dict[str, Any]
    network: NetworkRecord
    folds: Annotated[list[FoldRecord], Field(min_length=1)]
    final: FoldRecord | None = None  # the network of all groups, which judges alone: then no fold's is there
    corpus: CorpusRecord
    standing: Standing


# --- Writing


def write_bundle(
    paths: RunPaths, folder: Path, standing: Standing, card: str, *, form: str = "", final: bool = False
) -> tuple[BundleRecord, str]:
    """Write the run's bundle to ``folder``, which is there whole or not at all, and load every network from it.

    Args:
        paths: a run of task video whose folds are all trained.
        folder: not there yet.
        standing: where the run's model stands.
        card: the model card, behind which a section on the networks' other form is added where there is one.
        form: in which each network is written as well (``forms.SUFFIXES``); empty: none.
        final: the network of all groups in place of the folds'.

    Returns:
        What ``bundle.json`` says, and a sentence on the other form and what it was compared on.

    Raises:
        UsageError: the run is of another task or unfinished, ``folder`` is there, or a network cannot be written as
            ``form`` or says something else there.
        FvcError: a file of the run is damaged, or the code of its network has changed.
        OSError: as the file system gave it.
    """
    if form:
        check_packages(form)
    networks = RunNetworks(paths, final=final)
    if form and networks.config.of_features:
        raise UsageError(f"--form {form}: {networks.config.model} is no network on clips. Leave --form out.")
    with new_folder(folder) as building:
        (building / WEIGHTS).mkdir()
        told = _write_forms(building, networks, form) if form else ""
        record = _fill(building, networks, standing, f"{card}\n## Without this project\n\n{told}\n" if told else card)
        BundleNetworks(building, allow_code=True).check()
    return record, told


def _write_forms(folder: Path, networks: RunNetworks, form: str) -> str:
    clips, largest = clips_to_compare(networks.paths, networks.store), 0.0
    for fold in networks.judges:
        path, name = _weights_path(folder, fold).with_suffix(SUFFIXES[form]), f"network {networks.config.model!r}"
        difference = write_form(networks.network(fold), form, path, clips, f"{name}, {name_of(fold)}")
        largest = max(largest, difference)
    shape = ", ".join(map(str, clips.pixels.shape[1:]))
    name = _weights_path(folder, FINAL).stem if FINAL in networks.folds else "fold_K"
    return (
        f"`model/{name}{SUFFIXES[form]}` is each network as {form}: `{INPUT}` uint8 (B, {shape}) to `{OUTPUT}` float32 "
        f"(B,). Compared with the network on {clips.described}: no logit differs by more than {largest:.1g}."
    )


def _fill(folder: Path, networks: RunNetworks, standing: Standing, card: str) -> BundleRecord:
    paths, config = networks.paths, networks.config
    index = read_table(paths.index, INDEX)
    for fold in networks.judges:
        weights = load_weights(networks.folds[fold].path)
        told = described_in(networks.folds[fold].path) if config.of_features else {}
        write_weights_with_digest(_weights_path(folder, fold), weights, {**told, "run": paths.run_id, "fold": fold})
    records = {
        fold: FoldRecord(
            weights=network.weights,
            prior_logit=network.prior_logit,
            temperature=network.temperature,
            threshold=network.threshold,
            base_rate=network.base_rate,
        )
        for fold, network in networks.folds.items()
    }
    params = write_params(folder, config)
    write_begun_with(folder, config.model_weights)
    spec, trained = DETECTORS.get(config.model), networks.outcomes[min(networks.outcomes)].network
    contents = sorted(index.select("content_sha256", "label").rows())
    record = BundleRecord(
        format=FORMAT,
        made_with=made_with(),
        run_id=paths.run_id,
        run_hash=config.config_hash,
        decode_hash=networks.store.decode_hash,
        operating_point=config.operating_point,
        params=params,
        network=NetworkRecord(
            name=trained.name,
            code=trained.code,
            functions=dict(trained.functions),
            licence=spec.licence,
            weights_licence=trained.weights_licence or spec.weights_licence,
            begun_with_sha256=trained.weights_sha256,
            paper=spec.paper,
        ),
        folds=[records[fold] for fold in sorted(networks.outcomes)],
        final=records.get(FINAL),
        corpus=CorpusRecord(
            names=sorted(index["corpus"].unique()),
            fingerprint=sha256_of_json([list(row) for row in contents]),
            num_real=index.filter(label="real").height,
            num_fake=index.filter(label="fake").height,
            num_groups=index["group_id"].n_unique(),
            protocol=config.protocol,
        ),
        standing=standing,
    )
    write_json(folder / RECORD, record.model_dump(mode="json"))
    write_text(folder / CARD, card)
    _write_tables(folder, networks, index)
    write_json(folder / _RANGES, training_ranges(index_of_files(paths)).model_dump(mode="json"))
    temperature = networks.folds[FINAL].temperature if FINAL in networks.folds else 0.0
    known = KnownVideos.of(paths, sorted(networks.outcomes), final_temperature=temperature)
    if (distance := distance_of(networks, known)) is not None:
        safetensors.numpy.save_file(distance.arrays(), folder / _FEATURES)
    write_digests(folder)
    return record


def _weights_path(folder: Path, fold: int) -> Path:
    return folder / WEIGHTS / f"{'final' if fold == FINAL else f'fold_{fold}'}.safetensors"


def _write_tables(folder: Path, networks: RunNetworks, index: pl.DataFrame) -> None:
    """Out-of-fold scores and the videos' hashes; groups are numbers that stand for nothing elsewhere."""
    paths, folds = networks.paths, sorted(networks.outcomes)
    predictions = pl.concat([read_table(paths.predictions(fold), PREDICTIONS) for fold in folds])
    by_final = None
    if FINAL in networks.folds:
        by_final = read_table(paths.final_validation, FINAL_VALIDATION)
        temperature = networks.folds[FINAL].temperature
        by_final = by_final.select("video_id", final_logit=pl.col("logit") / temperature)
    write_table(calibration_table(index, predictions, by_final), CALIBRATION, folder / _CALIBRATION)
    tested = read_table(paths.folds, FOLDS).select("video_id", "fold")
    looks = index.join(tested, on="video_id", how="left", maintain_order="left")
    looks = _anonymous(index, looks).sort("content_sha256")
    write_table(looks.select(list(LOOKS.columns)), LOOKS, folder / _LOOKS)


def _anonymous(index: pl.DataFrame, frame: pl.DataFrame) -> pl.DataFrame:
    """``frame`` with numbers for the groups of ``index``."""
    named = index["group_id"].unique().sort()
    numbers = pl.DataFrame({"group_id": named, "number": [f"group_{number}" for number in range(named.len())]})
    joined = frame.join(numbers, on="group_id", how="left", maintain_order="left")
    return joined.with_columns(group_id="number")


def calibration_table(
    index: pl.DataFrame, predictions: pl.DataFrame, by_final: pl.DataFrame | None = None
) -> pl.DataFrame:
    """CALIBRATION of out-of-fold ``predictions`` (PREDICTIONS); groups are numbers that stand for nothing elsewhere.

    ``by_final`` has columns ``video_id final_logit`` where there is a network of all groups.
    """
    if by_final is None:
        by_final = pl.DataFrame(schema={"video_id": pl.String, "final_logit": pl.Float64})
    found = _anonymous(index, predictions.sort("fold", "score"))
    for more in (index.select("video_id", "content_sha256"), by_final):
        found = found.join(more, on="video_id", how="left", maintain_order="left")
    return found.select(list(CALIBRATION.columns))


# --- Reading


class BundleNetworks(Networks):
    """Those of a bundle: whole, of this version's format, and of code that was allowed."""

    def __init__(self, folder: Path, *, allow_code: bool = False, held: int | None = 1) -> None:
        self.folder = folder.absolute()
        if (task := task_of_bundle(self.folder)) != DEFAULT_TASK:
            raise UsageError(f"bundle {str(folder)!r}: is of task {task}, and gives no verdicts.")
        self.digest = checked_files(self.folder, _ALWAYS, _PARTS)
        self.record = read_record(BundleRecord, self.folder, (FORMAT,))
        final = self.record.final
        records = dict(enumerate(self.record.folds)) if final is None else {FINAL: final}
        for fold in records:
            require_weights(self.folder, _weights_path(self.folder, fold).name)
        network = self.record.network
        super().__init__(
            self.record.run_id,
            config_of(self.folder, self.record.params, DEFAULT_TASK, allow_code=allow_code),
            {
                fold: FoldNetwork(
                    path=_weights_path(self.folder, fold),
                    weights=each.weights,
                    prior_logit=each.prior_logit,
                    temperature=each.temperature,
                    threshold=each.threshold,
                    base_rate=each.base_rate,
                    trained=TrainedClass(network.name, "", network.code, 0, functions=network.functions),
                )
                for fold, each in records.items()
            },
            built_with=begun_with(self.folder),
            damaged=lambda _: "Get the bundle again, or export it anew.",
            held=held,
        )
        for caution in self.cautions():
            _logger.warning("%s: %s", self.folder, caution)

    def cautions(self) -> tuple[str, ...]:
        """Return a caution where files are decoded by other code, or another PyAV, than the run's videos were."""
        if self.store.decode_hash == self.record.decode_hash:
            return ()
        before = self.record.made_with.get("av", "not stated")
        told = "Videos are decoded by other code than the run's were"
        if before != av.__version__:
            told = f"Videos are decoded by another PyAV ({av.__version__}) than the run's were ({before})"
        return (f"{told}: scores may differ a little from the run's.",)

    def known_videos(self) -> KnownVideos:
        """Return the run's videos by their hashes, with their out-of-fold scores.

        Raises:
            FvcError: a table that no export writes.
        """
        looks, calibration = self.looks(), read_bundle_table(self.folder, _CALIBRATION, CALIBRATION)
        for name, table in ((_LOOKS, looks), (_CALIBRATION, calibration)):
            if unknown := sorted(set(table["fold"].drop_nulls()) - set(range(len(self.record.folds)))):
                raise refused(self.folder, f"{name} names fold {unknown[0]}, of which there is no network")
        if calibration["label"].n_unique() < 2:
            raise refused(self.folder, f"{_CALIBRATION} has not both reals and fakes")
        rates = [each.base_rate for each in self.record.folds]
        return KnownVideos.of_tables(looks, calibration, rates, self.base_rates)

    def looks(self) -> pl.DataFrame:
        """Return LOOKS of the run's videos."""
        return read_bundle_table(self.folder, _LOOKS, LOOKS)

    def ranges(self) -> TrainingRanges:
        """Return the ranges of the run's videos.

        Raises:
            UsageError: a file that no export writes.
        """
        return parsed(TrainingRanges, self.folder, _RANGES)

    def features(self) -> FeatureDistance | None:
        """Return the features of the run's videos; None where the bundle has none.

        Raises:
            UsageError: a file that no export writes.
        """
        return read_arrays(self.folder, _FEATURES, lambda arrays: FeatureDistance.of_arrays(arrays, self.judges))
