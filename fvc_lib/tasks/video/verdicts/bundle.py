"""A trained detector as one folder that needs neither its run nor its corpus.

What lies in a bundle says ``docs/bundle.md``. Nothing in one is trusted for where it came from: files are found by
walking the folder and never by a name that stands in it, each must have the SHA-256 that ``digests.json`` says, weights
are safetensors alone, and code of the user's own is imported only where the caller allows it.
"""

import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import av
import polars as pl
import safetensors.numpy
import safetensors.torch
import torch
from pandera.polars import DataFrameSchema
from pyarrow import ArrowException
from pyarrow.parquet import read_metadata
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError

from fvc_lib import __version__
from fvc_lib.detectors.weights import BEGUN_WITH, first_weights, read_weights
from fvc_lib.services.atomic_files import read_json_object, sha256_of_file, sha256_of_json, write_json, write_text
from fvc_lib.services.checkpoint_files import load_weights, write_weights_with_digest
from fvc_lib.services.config import DECLARED, RunConfig
from fvc_lib.services.errors import UsageError
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.records.digests import document_damage, write_document
from fvc_lib.services.registry import CROPS, DETECTORS, FileRegistry
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import (
    CALIBRATION,
    FINAL_VALIDATION,
    FOLDS,
    INDEX,
    LOOKS,
    PREDICTIONS,
    SEEN,
    read_table,
    write_table,
)
from fvc_lib.services.tasks import DEFAULT_TASK
from fvc_lib.tasks.video.classical.judging import described_in
from fvc_lib.tasks.video.own_weights import SEEN_BEFORE, SEEN_FILE, seen_by_networks
from fvc_lib.tasks.video.traces import KnownTraces, RealQuantiles
from fvc_lib.tasks.video.verdicts.feature_distance import FeatureDistance, distance_of
from fvc_lib.tasks.video.verdicts.forms import INPUT, OUTPUT, SUFFIXES, check_packages, clips_to_compare, write_form
from fvc_lib.tasks.video.verdicts.rule import KnownVideos
from fvc_lib.tasks.video.verdicts.scoring import FINAL, FoldNetwork, Networks, RunNetworks, name_of
from fvc_lib.tasks.video.verdicts.unfamiliar import TrainingRanges, index_of_files, training_ranges

_logger = logging.getLogger(__name__)

FORMAT = 4
# Format 1 lacks which score is whose, base rates, and how many videos are unfamiliar; format 2 the videos' features and
# a network of all groups; format 3 how forensic features are spread over the reals.
_READ = (1, 2, 3, 4)
RECORD, DIGESTS, CARD = "bundle.json", "digests.json", "README.md"
_CALIBRATION, _LOOKS, _RANGES = "calibration.parquet", "looks.parquet", "training_ranges.json"
_FEATURES, _QUANTILES = "features.safetensors", "forensic_quantiles.safetensors"
_ALWAYS = (RECORD, CARD, _CALIBRATION, _LOOKS, _RANGES)
_WEIGHTS = "model"
# Parameters that may name a user's file, and the folder that it then lies in.
_OWN_CODE: Mapping[str, tuple[str, FileRegistry[Any]]] = {"model": ("network", DETECTORS), "crop": ("crop", CROPS)}
_PARTS = re.compile(
    rf"({'|'.join(map(re.escape, (*_ALWAYS, SEEN_FILE, _FEATURES, _QUANTILES)))}"
    rf"|{_WEIGHTS}/(fold_\d{{1,4}}|final)\.(safetensors(\.sha256)?|onnx(\.data)?|pt2)"
    rf"|{BEGUN_WITH}/[\w-][\w.-]*|(network|crop)/(\w+/)*\w+\.py)",
    re.ASCII,
)
_FILE_AND_ITEM = re.compile(r"\w+\.py:[A-Za-z_]\w*", re.ASCII)
# Of the machine, or of the corpus, that the run was made with.
_LEFT_OUT = frozenset({"more_corpora", "target_corpora", "label_map", "model_weights"})
_KEPT = frozenset({"amp", "batch_size", "device"})
# Ten times what a corpus of a million videos needs.
_MOST_ROWS, _MOST_BYTES, MOST_JSON_BYTES = 10_000_000, 4 << 30, 16 << 20
_Document = TypeVar("_Document", bound=BaseModel)
_Part = TypeVar("_Part")
_Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_Number = Annotated[float, Field(allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FoldRecord(_Strict):
    """One fold: the digest of its weights (``weights_digest``), and how its logits become scores and decisions."""

    weights: _Digest
    prior_logit: _Number
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    threshold: Annotated[float, Field(ge=0, le=1)]
    base_rate: Annotated[float, Field(gt=0, lt=1)] | None = None


class NetworkRecord(_Strict):
    """What was trained; licences as far as they are known, of the code and of the weights that it began with."""

    name: str
    code: str
    licence: str
    weights_licence: str
    begun_with_sha256: str
    paper: str


class CorpusRecord(_Strict):
    """On which videos: names, a fingerprint over contents and labels, counts, and how they were split."""

    names: list[str]
    fingerprint: _Digest
    num_real: int
    num_fake: int
    num_groups: int
    protocol: str


class ScoreRecord(_Strict):
    """One number of the run, of its model or of a control, over all folds."""

    source: str
    metric: str
    value: float | None
    low: float | None
    high: float | None


class Standing(_Strict):
    """Where the model stands beside its controls, in a word and in sentences; and the numbers."""

    standing: str
    sentences: list[str]
    scores: list[ScoreRecord]


NOT_STATED = Standing(standing="not stated", sentences=["Where it stands, the run's report says."], scores=[])


class BundleRecord(_Strict):
    """``bundle.json``."""

    format: int
    made_with: dict[str, str]
    run_id: Annotated[str, Field(pattern=r"^[^/\\\x00-\x1f\x7f]{1,200}$")]  # becomes a folder's name
    run_hash: _Digest
    decode_hash: _Digest
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
    folder = folder.expanduser().absolute()
    if folder.exists() or folder.is_symlink():
        raise UsageError(f"{str(folder)!r} is there already. Name another folder with --to.")
    if run := next((each for each in folder.parents if (each / "run.json").is_file()), None):
        raise UsageError(f"{str(folder)!r} is inside of the run {str(run)!r}. Name another folder with --to.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        (building / _WEIGHTS).mkdir()
        told = _write_forms(building, networks, form) if form else ""
        record = _fill(building, networks, standing, f"{card}\n## Without this project\n\n{told}\n" if told else card)
        BundleNetworks(building, allow_code=True).check()
        building.chmod(0o755)
        building.rename(folder)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
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
        _weights_path(folder, fold).chmod(0o644)
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
    params = config.values_of(lambda _: True)
    params = {name: value for name, value in params.items() if name in _recorded()}
    clips = config.clips  # what the network declares itself, too: another version may declare something else
    params |= {"num_frames": clips.num_frames, "fixed_size": clips.side}
    params |= {"frame_sampling": clips.view.sampling, "frame_fit": clips.view.fit}
    for name, (place, registry) in _OWN_CODE.items():
        for relative, file in registry.code_files(params[name]).items():
            (folder / place / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / place / relative)
        if (own := registry.file_of(params[name])) is not None:
            params[name] = f"{own.name}:{params[name].rpartition(':')[2]}"
    _copy_begun_with(first_weights(config), folder / BEGUN_WITH)
    spec, trained = DETECTORS.get(config.model), networks.outcomes[min(networks.outcomes)].network
    contents = sorted(index.select("content_sha256", "label").rows())
    record = BundleRecord(
        format=FORMAT,
        made_with={"fvc": __version__, "torch": str(torch.__version__), "av": av.__version__},
        run_id=paths.run_id,
        run_hash=config.config_hash,
        decode_hash=networks.store.decode_hash,
        operating_point=config.operating_point,
        params=params,
        network=NetworkRecord(
            name=trained.name if trained else "",
            code=trained.code if trained else "",
            licence=spec.licence,
            weights_licence=(trained.weights_licence if trained else "") or spec.weights_licence,
            begun_with_sha256=trained.weights_sha256 if trained else "",
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
    if (quantiles := KnownTraces(networks, known).quantiles) is not None and quantiles.percentiles:
        safetensors.numpy.save_file(quantiles.arrays(), folder / _QUANTILES)
    for name in (_FEATURES, _QUANTILES):  # safetensors writes for its owner alone
        if (folder / name).is_file():
            (folder / name).chmod(0o644)
    write_document(folder / DIGESTS, {"files": {name: sha256_of_file(folder / name) for name in files_in(folder)}})
    return record


def _recorded() -> frozenset[str]:
    """The fields that decide decoding, sampling, network and training, none of which names a place on a machine."""
    own = {name for name, declared in DECLARED.items() if DEFAULT_TASK in declared.tasks and declared.hashed}
    places = {name for name, declared in DECLARED.items() if declared.changes == "folder" or name.endswith("_dir")}
    return frozenset(own | _KEPT) - _LEFT_OUT - places - {"corpus"}


def _weights_path(folder: Path, fold: int) -> Path:
    return folder / _WEIGHTS / f"{'final' if fold == FINAL else f'fold_{fold}'}.safetensors"


def _copy_begun_with(text: str, target: Path) -> None:
    """The published weights that the network is built with, without pickles; nothing where there are none."""
    if not text:
        return
    source = Path(text)
    target.mkdir()
    if source.is_dir():
        for file in sorted(source.glob("*.json")):
            shutil.copyfile(file, target / file.name)
    files = sorted(source.glob("*.safetensors")) if source.is_dir() else []
    for file in files:
        shutil.copyfile(file, target / file.name)
    if not files:
        weights = {name: tensor.clone().contiguous() for name, tensor in read_weights(source).items()}
        safetensors.torch.save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


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
    if (seen := seen_by_networks(paths)) is not None:
        write_table(seen, SEEN, folder / SEEN_FILE)


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


def files_in(folder: Path) -> list[str]:
    """Relative names of the files of a bundle, sorted; what begins with a dot at the top is a version system's.

    Raises:
        UsageError: a link, or something that is no file.
    """
    found = []
    for above, folders, files in os.walk(folder):
        here = Path(above)
        if here == folder:
            folders[:] = [name for name in folders if not name.startswith(".")]
            files = [name for name in files if not name.startswith(".") and name != DIGESTS]
        for name in (*folders, *files):
            path = here / name
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise refused(folder, f"{str(path.relative_to(folder))!r} is a link or no file")
        found += [(here / name).relative_to(folder).as_posix() for name in files]
    return sorted(found)


def refused(folder: Path, why: str) -> UsageError:
    """The error of a bundle that is not loaded."""
    return UsageError(f"bundle {str(folder)!r}: {why}. Get it again from whoever exported it, or export it anew.")


def _checked_files(folder: Path) -> str:
    """Check that the files are those of ``digests.json``; returns the SHA-256 by which the bundle is known."""
    path = folder / DIGESTS
    if path.is_file() and path.stat().st_size > MOST_JSON_BYTES:
        raise refused(folder, f"{DIGESTS} is larger than {MOST_JSON_BYTES:,} bytes")
    document = read_json_object(path)
    files = document.get("files")
    if not isinstance(files, dict) or not all(isinstance(each, str) for each in files.values()):
        raise refused(folder, f"{DIGESTS} is missing or damaged")
    if document_damage(path, document) or "document_sha256" not in document:
        raise refused(folder, f"{DIGESTS} is not what was written: damaged, or changed")
    there = set(files_in(folder))
    for name in sorted(there):
        if name.endswith(".json") and (folder / name).stat().st_size > MOST_JSON_BYTES:
            raise refused(folder, f"{name!r} is larger than {MOST_JSON_BYTES:,} bytes")
    if missing := sorted({*files, *_ALWAYS} - there):
        raise refused(folder, f"{missing[0]!r} is missing")
    if other := sorted(name for name in there if name not in files or not _PARTS.fullmatch(name)):
        raise refused(folder, f"{other[0]!r} does not belong there")
    for name in sorted(there):
        if sha256_of_file(folder / name) != files[name]:
            raise refused(folder, f"{name!r} is damaged: its SHA-256 is not that of {DIGESTS}")
    return sha256_of_file(path)


def _record(folder: Path) -> BundleRecord:
    document = read_json_object(folder / RECORD)
    if document.get("format") not in _READ:
        reads = ", ".join(map(str, _READ))
        raise refused(
            folder, f"got format {document.get('format')!r}, and this version of FVC ({__version__}) reads {reads}"
        )
    return _parsed(BundleRecord, folder, RECORD)


def _parsed(model: type[_Document], folder: Path, name: str) -> _Document:
    try:
        return model.model_validate_json((folder / name).read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise refused(folder, f"{name}, {where or 'as a whole'}: {first['msg']}") from error


def _config(folder: Path, record: BundleRecord, *, allow_code: bool) -> RunConfig:
    """The run's, as far as it is recorded; caches are this machine's.

    Raises:
        UsageError: a parameter that a bundle does not have, or code that is not allowed.
    """
    params = dict(record.params)
    if foreign := sorted(set(params) - _recorded()):
        raise refused(folder, f"{RECORD} has the parameter {foreign[0]!r}, which no bundle has")
    for name, (place, registry) in _OWN_CODE.items():
        value = params.get(name, "")
        if not isinstance(value, str) or registry.file_of(value) is None:
            continue
        if not _FILE_AND_ITEM.fullmatch(value):
            raise refused(folder, f"{name} names {value!r}, a file outside of it")
        own = folder / place / value.partition(":")[0]
        if not own.is_file():
            raise refused(folder, f"{name} is {value!r}, and {place}/{own.name} is missing")
        if not allow_code:
            raise UsageError(
                f"bundle {str(folder)!r}: its {name} is code, {place}/{own.name}, which loading it would run on this "
                f"machine. Read that file; where you trust it: load_detector({str(folder)!r}, allow_code=True)."
            )
        params[name] = f"{folder}/{place}/{value}"
    return resolve_config({**params, "cache_dir": resolve_config().cache_dir}, environ={})


class BundleNetworks(Networks):
    """Those of a bundle: whole, of this version's format, and of code that was allowed."""

    def __init__(self, folder: Path, *, allow_code: bool = False, held: int | None = 1) -> None:
        self.folder = folder.absolute()
        if (self.folder / DIGESTS).is_symlink():
            raise refused(folder, f"{DIGESTS} is a link")
        self.digest = _checked_files(self.folder)
        self.record = _record(self.folder)
        begun_with, files = self.folder / BEGUN_WITH, set(files_in(self.folder))
        final = self.record.final
        records = dict(enumerate(self.record.folds)) if final is None else {FINAL: final}
        for fold in records:
            path = _weights_path(self.folder, fold)
            for name in (path.name, f"{path.name}.sha256"):
                if f"{_WEIGHTS}/{name}" not in files:
                    raise refused(folder, f"'{_WEIGHTS}/{name}' is missing")
        network = self.record.network
        super().__init__(
            self.record.run_id,
            _config(self.folder, self.record, allow_code=allow_code),
            {
                fold: FoldNetwork(
                    path=_weights_path(self.folder, fold),
                    weights=each.weights,
                    prior_logit=each.prior_logit,
                    temperature=each.temperature,
                    threshold=each.threshold,
                    base_rate=each.base_rate,
                    name=network.name,
                    code=network.code,
                )
                for fold, each in records.items()
            },
            built_with=str(begun_with) if begun_with.is_dir() else "",
            damaged=lambda _: "Get the bundle again, or export it anew.",
            held=held,
        )
        for caution in self.cautions():
            _logger.warning("%s: %s", self.folder, caution)

    def cautions(self) -> tuple[str, ...]:
        """A sentence where files are decoded by other code, or another library, than the run's videos were."""
        if self.store.decode_hash == self.record.decode_hash:
            return ()
        before = self.record.made_with.get("av", "not stated")
        told = f"Videos are decoded by other code, or another PyAV ({av.__version__}), than the run's were ({before})"
        return (f"{told}: scores may differ a little from the run's.",)

    def known_videos(self) -> KnownVideos:
        """The run's videos by their hashes, with their out-of-fold scores.

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
        """LOOKS of the run's videos."""
        return read_bundle_table(self.folder, _LOOKS, LOOKS)

    def ranges(self) -> TrainingRanges:
        """What the run's videos are like.

        Raises:
            UsageError: a file that no export writes.
        """
        return _parsed(TrainingRanges, self.folder, _RANGES)

    def seen(self) -> pl.DataFrame | None:
        """``content_sha256 perceptual_hash`` of what its networks have seen; None where the bundle has no list of it.

        Raises:
            FvcError: a table that no export writes.
        """
        if not (self.folder / SEEN_FILE).is_file():
            return None
        return read_bundle_table(self.folder, SEEN_FILE, SEEN).select(SEEN_BEFORE.names())

    def features(self) -> FeatureDistance | None:
        """How far features are from those of the run's videos; None where the bundle has none of theirs.

        Raises:
            UsageError: a file that no export writes.
        """
        return self._of_arrays(_FEATURES, lambda arrays: FeatureDistance.of_arrays(arrays, self.judges))

    def quantiles(self) -> RealQuantiles | None:
        """How forensic features are spread over the run's reals; None where the bundle does not say.

        Raises:
            UsageError: a file that no export writes.
        """
        return self._of_arrays(_QUANTILES, RealQuantiles.of_arrays)

    def _of_arrays(self, name: str, read: Callable[[dict[str, Any]], _Part]) -> _Part | None:
        path = self.folder / name
        if not path.is_file():
            return None
        if path.stat().st_size > _MOST_BYTES:
            raise refused(self.folder, f"{name} is larger than {_MOST_BYTES:,} bytes")
        try:
            return read(safetensors.numpy.load_file(path))
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise refused(self.folder, f"{name}: {error}") from error


def read_bundle_table(folder: Path, name: str, schema: DataFrameSchema) -> pl.DataFrame:
    """Not read where it would fill the memory: a few bytes of Parquet can stand for any number of rows.

    Raises:
        FvcError: a table that no export writes.
    """
    path = folder / name
    try:
        stated = read_metadata(path)
    except (OSError, ArrowException):
        return read_table(path, schema)  # which says what is wrong
    groups = [stated.row_group(number) for number in range(stated.num_row_groups)]
    num_bytes = max(sum(group.total_byte_size for group in groups), 0)
    if stated.num_rows > _MOST_ROWS or num_bytes > _MOST_BYTES:
        raise refused(
            folder, f"{name} says that it has {stated.num_rows:,} rows of {num_bytes:,} bytes, at most "
            f"{_MOST_ROWS:,} and {_MOST_BYTES:,} are read"
        )  # fmt: skip
    return read_table(path, schema)
