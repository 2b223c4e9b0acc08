"""A bundle: one folder with a trained model of any task, or an ensemble, that needs neither its runs nor their corpus.

Every bundle has ``bundle.json``, a model card, and weights as safetensors in ``model/``. ``digests.json`` holds the
SHA-256 of every other file. A task, such as ``video`` or ``image``, adds a section to ``bundle.json`` and further
files. An ensemble has a bundle of each member in ``members/``.

A bundle is read as if a stranger had made it: every file must match its digest, and nothing is unpickled. Code in the
bundle runs only where the caller allows it.
"""

import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import av
import safetensors.numpy
import safetensors.torch
import torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError

from fvc_lib import __version__
from fvc_lib.detectors.texts.transformers_encoders import OWN
from fvc_lib.detectors.weights import BEGUN_WITH, read_weights
from fvc_lib.services.atomic_files import as_mapping, read_json_object, sha256_of_file, write_json, write_text
from fvc_lib.services.checkpoint_files import write_weights_with_digest
from fvc_lib.services.config import DECLARED, RunConfig
from fvc_lib.services.errors import UsageError
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.records.digests import read_document, write_document
from fvc_lib.services.registry import CROPS, DETECTORS, FileRegistry
from fvc_lib.services.tasks import TASKS
from fvc_lib.tasks.predicting import Predictor, Standing, Strict, Trained, predictor_class
from fvc_lib.tasks.shared_training import TrainedClass
from fvc_lib.tasks.video.classical import described_in

RECORD = "bundle.json"
DIGESTS = "digests.json"
CARD = "README.md"
WEIGHTS = "model"
MEMBERS = "members"
_TEXT_ENCODER = "text_encoder"
REMEDY = "Get the bundle again, or export it again."
# Parameters that may name a user's file, and the folder of the bundle for it.
_OWN_CODE: Mapping[str, tuple[str, FileRegistry[Any]]] = {
    "model": ("network", DETECTORS), "backbone": ("network", DETECTORS), "crop": ("crop", CROPS),
}  # fmt: skip
_FILE_AND_ITEM = re.compile(r"\w+\.py:[A-Za-z_]\w*", re.ASCII)
_WEIGHT_FIELDS = ("model_weights", "backbone_weights")
# Parameters that describe this machine or the run's corpus, so a bundle does not record them.
_LEFT_OUT = {"corpus", "more_corpora", "target_corpora", "label_map", "columns", *_WEIGHT_FIELDS}
_FILES = re.compile(r"[\w./-]+\.(json|parquet|safetensors|md|txt)|(members/\d+/)?(network|crop)/[\w/]+\.py", re.ASCII)
_DESCRIBED = ("settings", "features", "families")  # entries that a bundle keeps; others name paths
_Part = TypeVar("_Part")
_Model = TypeVar("_Model", bound=Strict)
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Name = Annotated[str, Field(pattern=r"^[^/\\\x00-\x1f\x7f]{1,200}$")]  # becomes a folder's name


class NetworkRecord(Strict):
    """The class of the trained network, and digests of its code (``TrainedClass``).

    Attributes:
        name: module and name of the class.
        code: hex SHA-256 of the network's functions in the user's own code; empty if FVC and torch define them all.
        functions: digest of each function of the network, by the function's name.
    """

    name: str
    code: str
    functions: dict[str, str]


class BundleRecord(Strict):
    """The content of ``bundle.json``.

    Attributes:
        format: version of the bundle format.
        made_with: versions of FVC, torch and PyAV.
        name: name of the run or ensemble.
        decode_hash: digest of the code and the library that decode files.
        params: parameters of the run by name.
        weights: digest of the weights by the stem of their file in ``model/``; empty for an ensemble.
        network: the class of the network; None for an ensemble.
        standing: how the model compares with its controls (simple predictors that it must beat).
        section: entries that the task adds.
    """

    format: Literal[9]
    made_with: dict[str, str]
    name: Name
    decode_hash: Digest
    params: dict[str, Any]
    weights: dict[str, Digest]
    network: NetworkRecord | None
    standing: Standing
    section: dict[str, Any]


def is_bundle(path: str | Path) -> bool:
    """Return whether a folder is an exported bundle: it has ``bundle.json`` or ``digests.json``.

    A bundle that has lost one of the two files counts as a bundle.
    """
    folder = Path(path).expanduser()
    return (folder / RECORD).is_file() or (folder / DIGESTS).is_file()


def refused(folder: Path, why: str) -> UsageError:
    """Return a ``UsageError`` which says that the bundle in ``folder`` is not used, why, and what to do."""
    return UsageError(f"bundle {str(folder)!r}: {why}. {REMEDY}")


# --- Writing


def write_bundle(predictor: Predictor, folder: Path, card: str) -> None:
    """Write ``predictor`` as a bundle to ``folder``, and load the bundle once as a check.

    After an error, ``folder`` does not exist.

    Args:
        predictor: the predictor of a run or an ensemble.
        folder: must not exist.
        card: text of the model card.

    Raises:
        UsageError: ``folder`` exists, or the written bundle would not make the same predictions as the run.
        FvcError: a file of the run is damaged, or the code of its network has changed.
        OSError: a file cannot be written.
    """
    folder = folder.expanduser().absolute()
    if folder.exists():
        raise UsageError(f"{str(folder)!r} is there already. Name another folder with --to.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        building = Path(temporary, "bundle")
        (building / WEIGHTS).mkdir(parents=True)
        _fill(predictor, building, card)
        written = open_bundle(building, allow_code=True)
        written.check()
        if written.identity != predictor.identity:
            raise refused(building, "it does not answer as the run does; report this")
        building.rename(folder)


def _fill(predictor: Predictor, folder: Path, card: str) -> None:
    config = predictor.config
    network = None
    params = dict[str, Any]()
    for stem, trained in predictor.trained.items():
        description = {k: v for k, v in described_in(trained.weights).items() if k in _DESCRIBED}
        write_weights_with_digest(folder / WEIGHTS / f"{stem}.safetensors", trained.state(), description)
        kind = trained.network
        network = NetworkRecord(name=kind.name, code=kind.code, functions=dict(kind.functions))
    section = predictor.write(folder)
    if network:
        params = _write_params(folder, config)
    record = BundleRecord(
        format=9,
        made_with={"fvc": __version__, "torch": str(torch.__version__), "av": av.__version__},
        name=predictor.name,
        decode_hash=predictor.decode_hash,
        params=params | {"task": config.task},
        weights={stem: trained.digest for stem, trained in predictor.trained.items()},
        network=network,
        standing=predictor.standing,
        section=section,
    )
    write_json(folder / RECORD, record.model_dump(mode="json"))
    write_text(folder / CARD, card)
    files = _files_in(folder)
    for name in files:
        (folder / name).chmod(0o644)
    write_document(folder / DIGESTS, {"files": {name: sha256_of_file(folder / name) for name in files}})


def _write_params(folder: Path, config: RunConfig) -> dict[str, Any]:
    """Copy the files that the network is built from into ``folder``, and return the parameters for ``bundle.json``.

    The files are the pretrained weights with which the training began, and the user's own code. The result maps
    names of parameters to values.
    """
    relevant, recorded = config.relevant(), _recorded(config.task)
    params = {name: value for name, value in relevant.items() if name in recorded}
    if "num_frames" in params:  # even if the network declares them: another version may declare other values
        clips = config.clips
        params |= {"num_frames": clips.num_frames, "fixed_size": clips.side, "frame_sampling": clips.view.sampling}
    for name in _OWN_CODE.keys() & params.keys():
        place, registry = _OWN_CODE[name]
        for relative, file in registry.code_files(params[name]).items():
            (folder / place / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / place / relative)
        if (own := registry.file_of(params[name])) is not None:
            params[name] = f"{own.name}:{params[name].rpartition(':')[2]}"
    for name in _WEIGHT_FIELDS:
        if relevant.get(name):
            _copy_weights(Path(relevant[name]), folder / BEGUN_WITH)
    if params.get("text_encoder", OWN) != OWN:
        _copy_weights(Path(config.text_encoder), folder / _TEXT_ENCODER)
        params["text_encoder"] = _TEXT_ENCODER
    return params


def _recorded(task: str) -> set[str]:
    """Return the names of the parameters that a bundle of ``task`` records.

    Parameters that hold a path on this machine or describe the run's corpus are not recorded.
    """
    own = {name for name, declared in DECLARED.items() if task in declared.tasks and declared.hashed}
    places = {name for name, declared in DECLARED.items() if declared.changes == "folder" or name.endswith("_dir")}
    return (own | {"amp", "batch_size", "device", "task"}) - _LEFT_OUT - places


def _copy_weights(source: Path, target: Path) -> None:
    """Copy a file or folder of weights to the folder ``target`` as safetensors.

    JSON and text files in the source folder are copied too.

    Raises:
        UsageError: the weights cannot be read.
        OSError: a file cannot be written.
    """
    target.mkdir(exist_ok=True)
    files = [file for end in ("safetensors", "json", "txt") for file in source.glob(f"*.{end}")]
    for file in files:
        shutil.copyfile(file, target / file.name)
    if not any(file.suffix == ".safetensors" for file in files):
        tensors = {name: tensor.clone().contiguous() for name, tensor in read_weights(source).items()}
        safetensors.torch.save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


# --- Reading


@dataclass(frozen=True)
class Bundle:
    """A bundle (an exported folder with a trained model, which needs no run) whose files have been checked.

    Attributes:
        folder: the absolute path of the bundle.
        record: the content of ``bundle.json``.
        config: the recorded parameters of the run, with paths of this machine.
        allow_code: whether code in the bundle may run.
    """

    folder: Path
    record: BundleRecord
    config: RunConfig
    allow_code: bool = False

    @classmethod
    def open(cls, folder: Path, *, allow_code: bool = False) -> "Bundle":
        """Check the files of the bundle in ``folder`` and return it, with its record and configuration.

        ``allow_code`` says whether code in the bundle may run. Errors are those of ``open_bundle``.
        """
        folder = folder.expanduser().absolute()
        _check_files(folder)
        record = _parsed(BundleRecord, folder, read_json_object(folder / RECORD))
        return cls(folder, record, _config_of(folder, record.params, allow_code=allow_code), allow_code)

    def trained(self, stem: str, *, fold: str = "", **more: Any) -> Trained:
        """Return the description of the trained network whose weights are in ``model/STEM.safetensors``.

        Args:
            stem: name of the file without its ending.
            fold: text about the fold, for messages; may be empty.
            more: further fields of ``Trained``, such as ``known``.

        Raises:
            UsageError: the bundle has no such weights.
        """
        record = self.record
        weights = self.folder / WEIGHTS / f"{stem}.safetensors"
        if record.network is None or stem not in record.weights or not weights.is_file():
            raise refused(self.folder, f"{WEIGHTS}/{stem}.safetensors is missing")
        return Trained(
            name=f"{record.name}, {fold}" if fold else record.name,
            config=self.config,
            weights=weights,
            digest=record.weights[stem],
            network=TrainedClass(**record.network.model_dump()),
            remedy=REMEDY,
            **more,
        )

    def section(self, model: type[_Model]) -> _Model:
        """Return the section that the task added to ``bundle.json``.

        Args:
            model: class of the section, which checks its content.

        Raises:
            UsageError: the content is invalid.
        """
        return _parsed(model, self.folder, self.record.section)

    def arrays(self, name: str, read: Callable[[dict[str, Any]], _Part]) -> _Part | None:
        """Read arrays from a safetensors file of the bundle and convert them.

        Args:
            name: name of the file.
            read: function of a dict of arrays by name, which checks and converts them.

        Returns:
            The result of ``read``; None if the file is missing.

        Raises:
            UsageError: the file cannot be loaded, or ``read`` raised ``ValueError`` or ``KeyError``.
        """
        if not (self.folder / name).is_file():
            return None
        try:
            return read(safetensors.numpy.load_file(self.folder / name))
        except (SafetensorError, ValueError, KeyError) as error:
            raise refused(self.folder, f"{name}: {error}") from error


def open_bundle(folder: Path, *, allow_code: bool = False) -> Predictor:
    """Check a bundle and return its predictor, which makes predictions for new files.

    Args:
        folder: the folder of the bundle.
        allow_code: whether a network or crop function in the bundle may run; the bundle's author wrote that code.

    Raises:
        UsageError: the bundle is damaged, hostile, of another format version, or needs code that is not allowed.
        FvcError: a table or a file of weights has content that no export writes.
    """
    bundle = Bundle.open(folder, allow_code=allow_code)
    predictor: Predictor = predictor_class(bundle.config.task).of_bundle(bundle)
    if predictor.decode_hash != bundle.record.decode_hash:
        caution = (
            f"Files are decoded by other code or libraries than the run's were (here PyAV {av.__version__}, there "
            f"{bundle.record.made_with}): answers may differ a little from the run's."
        )
        predictor.cautions += (caution,)
    return predictor


def _files_in(folder: Path) -> list[str]:
    """Return the sorted names of the bundle's files, relative to ``folder``, without ``digests.json``.

    Entries at the top level whose names begin with a dot are skipped, since version control writes such entries.

    Raises:
        UsageError: an entry is a link, or neither file nor folder.
    """
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
    for name, path in paths.items():
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise refused(folder, f"{name!r} is a link or no file")
    return [name for name, path in paths.items() if path.is_file() and name != DIGESTS and name[0] != "."]


def _check_files(folder: Path) -> None:
    """Check that ``folder`` has exactly the files that ``digests.json`` lists, with the digests that it lists.

    Raises:
        UsageError: a file is missing, damaged or not listed.
    """
    there = _files_in(folder)
    files = as_mapping(read_document(folder / DIGESTS).get("files"))
    for name in sorted({*files, *there, RECORD, CARD}):
        is_whole = name in there and sha256_of_file(folder / name) == files.get(name)
        if not is_whole or not _FILES.fullmatch(name):
            raise refused(folder, f"{name!r} is missing, damaged or foreign, or {DIGESTS} is")


def _parsed(model: type[_Model], folder: Path, document: Mapping[str, Any]) -> _Model:
    """Return the JSON object ``document`` as an object of the class ``model``.

    Raises:
        UsageError: invalid content; the message names the bundle in ``folder``.
    """
    try:
        return model.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise refused(folder, f"{RECORD}, {where}: {first['msg']}") from error


def _config_of(folder: Path, params: Mapping[str, Any], *, allow_code: bool) -> RunConfig:
    """Return the recorded configuration, with paths to this machine's cache folder and to files in the bundle.

    Args:
        folder: the folder of the bundle.
        params: the recorded parameters by name.
        allow_code: whether code in the bundle may run.

    Raises:
        UsageError: the record has an unexpected parameter, names a missing file, or needs code that is not allowed.
    """
    values = {**params, "cache_dir": resolve_config().cache_dir}
    if params.get("task") not in TASKS:
        raise refused(folder, f"{RECORD} names no task")
    if foreign := sorted(set(params) - _recorded(params["task"])):
        raise refused(folder, f"{RECORD} has the parameter {foreign[0]!r}, which no bundle has")
    for name, (place, registry) in _OWN_CODE.items():
        value = str(params.get(name, ""))
        if registry.file_of(value) is None:
            continue
        own = folder / place / value.partition(":")[0]
        if not _FILE_AND_ITEM.fullmatch(value) or not own.is_file():
            raise refused(folder, f"{name} names {value!r}, a file that is not in {place}/")
        if not allow_code:
            raise UsageError(
                f"bundle {str(folder)!r}: its {name} is code, {place}/{own.name}, which loading it would run on this "
                f"machine. Read that file; where you trust it: load_detector({str(folder)!r}, allow_code=True)."
            )
        values[name] = f"{folder}/{place}/{value}"
    places = dict[str, str]()
    if params.get("text_encoder", OWN) != OWN:
        if params["text_encoder"] != _TEXT_ENCODER or not (folder / _TEXT_ENCODER).is_dir():
            raise refused(folder, f"text_encoder is {params['text_encoder']!r}, wanted {_TEXT_ENCODER!r}")
        values["text_encoder"], places["text_encoder"] = OWN, str(folder / _TEXT_ENCODER)
    config = resolve_config(values, environ={})
    if (folder / BEGUN_WITH).is_dir():
        places |= {name: str(folder / BEGUN_WITH) for name in _WEIGHT_FIELDS if name in config.relevant()}
    return config.model_copy(update=places)
