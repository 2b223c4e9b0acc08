"""Write a bundle folder as a whole, and read it as if a stranger had made it.

Nothing in one is trusted for where it came from: files are found by walking the folder and never by a name that stands
in it, each must have the SHA-256 that ``digests.json`` says, weights are safetensors alone, and code of the user's own
is imported only where the caller allows it. What else lies in a bundle says ``docs/bundle.md``.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from fvc_lib.detectors.weights import BEGUN_WITH, read_weights
from fvc_lib.services.atomic_files import read_json_object, sha256_of_file
from fvc_lib.services.config import DECLARED, RunConfig
from fvc_lib.services.errors import UsageError
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.records.digests import read_document, write_document
from fvc_lib.services.registry import CROPS, DETECTORS, FileRegistry
from fvc_lib.services.tables import read_table
from fvc_lib.services.tasks import DEFAULT_TASK, TASKS

RECORD, DIGESTS, CARD = "bundle.json", "digests.json", "README.md"
WEIGHTS = "model"
# Parameters that may name a user's file, and the folder that it then lies in.
_OWN_CODE: Mapping[str, tuple[str, FileRegistry[Any]]] = {
    "model": ("network", DETECTORS), "backbone": ("network", DETECTORS), "crop": ("crop", CROPS),
}  # fmt: skip
_FILE_AND_ITEM = re.compile(r"\w+\.py:[A-Za-z_]\w*", re.ASCII)
# Of the machine, or of the corpus, that the run was made with.
_LEFT_OUT = frozenset({"corpus", "more_corpora", "target_corpora", "label_map", "model_weights", "backbone_weights"})
_KEPT = frozenset({"amp", "batch_size", "device"})
# Ten times what a corpus of a million files needs.
_MOST_ROWS, _MOST_BYTES, MOST_JSON_BYTES = 10_000_000, 4 << 30, 16 << 20
_Document = TypeVar("_Document", bound=BaseModel)
_Part = TypeVar("_Part")
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
RunId = Annotated[str, Field(pattern=r"^[^/\\\x00-\x1f\x7f]{1,200}$")]  # becomes a folder's name


class Strict(BaseModel):
    """A part of ``bundle.json`` that says what it shall and nothing else."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class NetworkRecord(Strict):
    """What was trained; licences as far as they are known, of the code and of the weights that it began with."""

    name: str
    code: str
    functions: dict[str, str]
    licence: str
    weights_licence: str
    begun_with_sha256: str
    paper: str


class ScoreRecord(Strict):
    """One number of the run, of its model or of a control, over all folds or the test part."""

    source: str
    metric: str
    value: float | None
    low: float | None
    high: float | None


class Standing(Strict):
    """Where the model stands beside its controls, in a word and in sentences; and the numbers."""

    standing: str
    sentences: list[str]
    scores: list[ScoreRecord]


NOT_STATED = Standing(standing="not stated", sentences=["Where it stands, the run's report says."], scores=[])


def made_with() -> dict[str, str]:
    """Return the versions that a bundle is written with."""
    return {"fvc": __version__, "torch": str(torch.__version__), "av": av.__version__}


def is_bundle(path: str | Path) -> bool:
    """Return whether a folder is an exported bundle, or was one."""
    folder = Path(path).expanduser()
    return (folder / RECORD).is_file() or (folder / DIGESTS).is_file()


def task_of_bundle(folder: Path) -> str:
    """Return the task that a bundle states; whether the bundle is whole is checked when it is loaded."""
    path = folder / RECORD
    document = read_json_object(path) if path.is_file() and path.stat().st_size <= MOST_JSON_BYTES else {}
    params = document.get("params")
    task = params.get("task") if isinstance(params, dict) else None
    return task if isinstance(task, str) and task in TASKS else DEFAULT_TASK


def refused(folder: Path, why: str) -> UsageError:
    """Return the error for a bundle that is not loaded."""
    return UsageError(f"bundle {str(folder)!r}: {why}. Get it again from whoever exported it, or export it anew.")


# --- Writing


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to fill; at the end it becomes ``folder``, whole or not at all.

    Raises:
        UsageError: ``folder`` is there, or inside of a run.
        OSError: it cannot be made.
    """
    folder = folder.expanduser().absolute()
    if folder.exists() or folder.is_symlink():
        raise UsageError(f"{str(folder)!r} is there already. Name another folder with --to.")
    if run := next((each for each in folder.parents if (each / "run.json").is_file()), None):
        raise UsageError(f"{str(folder)!r} is inside of the run {str(run)!r}. Name another folder with --to.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield building
        building.chmod(0o755)
        building.rename(folder)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def write_digests(folder: Path) -> None:
    """Write the digest of every file, without which nothing is loaded, and make all files readable."""
    for name in files_in(folder):
        (folder / name).chmod(0o644)
    write_document(folder / DIGESTS, {"files": {name: sha256_of_file(folder / name) for name in files_in(folder)}})


def write_params(folder: Path, config: RunConfig) -> dict[str, Any]:
    """Return the parameters for ``bundle.json`` and copy the user's own code next to it; raise ``OSError``."""
    params = {name: value for name, value in config.relevant().items() if name in _recorded(config.task)}
    if "num_frames" in params:  # what the network declares itself, too: another version may declare something else
        clips = config.clips
        params |= {"num_frames": clips.num_frames, "fixed_size": clips.side}
        params |= {"frame_sampling": clips.view.sampling, "frame_fit": clips.view.fit}
    for name in _OWN_CODE.keys() & params.keys():
        place, registry = _OWN_CODE[name]
        for relative, file in registry.code_files(params[name]).items():
            (folder / place / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / place / relative)
        if (own := registry.file_of(params[name])) is not None:
            params[name] = f"{own.name}:{params[name].rpartition(':')[2]}"
    return params


def _recorded(task: str) -> frozenset[str]:
    """Return the fields of decoding, sampling, network and training; none names a place on a machine."""
    own = {name for name, declared in DECLARED.items() if task in declared.tasks and declared.hashed}
    places = {name for name, declared in DECLARED.items() if declared.changes == "folder" or name.endswith("_dir")}
    return frozenset(own | _KEPT) - _LEFT_OUT - places


def write_begun_with(folder: Path, text: str) -> None:
    """Copy the published weights that a network is built with; nothing where ``text`` names none."""
    if text:
        copy_weights(Path(text), folder / BEGUN_WITH)


def copy_weights(source: Path, target: Path, beside: Sequence[str] = ("*.json",)) -> None:
    """Copy a file or folder of weights to the folder ``target``, without pickles.

    Args:
        source: what ``model_weights`` and the like may name.
        target: not there yet.
        beside: which files of a folder go along.

    Raises:
        UsageError: the weights cannot be read.
        OSError: as the file system gave it.
    """
    target.mkdir()
    files = sorted(source.glob("*.safetensors")) if source.is_dir() else []
    for file in (*files, *(each for name in beside if source.is_dir() for each in sorted(source.glob(name)))):
        shutil.copyfile(file, target / file.name)
    if not files:
        weights = {name: tensor.clone().contiguous() for name, tensor in read_weights(source).items()}
        safetensors.torch.save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


# --- Reading


def files_in(folder: Path) -> list[str]:
    """Return the relative names of the files, sorted; top-level names with a dot belong to a version system.

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


def parts_of(names: Collection[str], network: str, more: str = "") -> re.Pattern[str]:
    """Return the pattern of allowed file names.

    Args:
        names: of files at the top.
        network: pattern of the names of weights in ``model/``.
        more: a further pattern, ``|PATTERN``.
    """
    alike = rf"{BEGUN_WITH}/[\w-][\w.-]*\.(json|safetensors)|(network|crop)/(\w+/)*\w+\.py{more}"
    named = "|".join(map(re.escape, (RECORD, CARD, *names)))
    return re.compile(rf"({named}|{WEIGHTS}/{network}\.(safetensors(\.sha256)?|onnx(\.data)?|pt2)|{alike})", re.ASCII)


def checked_files(folder: Path, always: Collection[str], parts: re.Pattern[str]) -> str:
    """Check that the files are those of ``digests.json``; returns the SHA-256 by which the bundle is known.

    Args:
        folder: of the bundle.
        always: files that no bundle of its kind lacks, beside its record and card.
        parts: what its files may be called.

    Raises:
        UsageError: a file is damaged, missing, too many or no file, or ``digests.json`` is.
    """
    path = folder / DIGESTS
    if path.is_symlink():
        raise refused(folder, f"{DIGESTS} is a link")
    if path.is_file() and path.stat().st_size > MOST_JSON_BYTES:
        raise refused(folder, f"{DIGESTS} is larger than {MOST_JSON_BYTES:,} bytes")
    files = read_document(path).get("files")
    if not isinstance(files, dict) or not all(isinstance(each, str) for each in files.values()):
        raise refused(folder, f"{DIGESTS} is missing or damaged: it is not what was written")
    there = set(files_in(folder))
    for name in sorted(there):
        if name.endswith(".json") and (folder / name).stat().st_size > MOST_JSON_BYTES:
            raise refused(folder, f"{name!r} is larger than {MOST_JSON_BYTES:,} bytes")
    for name in sorted(there & files.keys()):  # first, since a damaged record may say another kind of bundle
        if sha256_of_file(folder / name) != files[name]:
            raise refused(folder, f"{name!r} is damaged: its SHA-256 is not that of {DIGESTS}")
    if missing := sorted({*files, RECORD, CARD, *always} - there):
        raise refused(folder, f"{missing[0]!r} is missing")
    if other := sorted(name for name in there if name not in files or not parts.fullmatch(name)):
        raise refused(folder, f"{other[0]!r} does not belong there")
    return sha256_of_file(path)


def read_record(model: type[_Document], folder: Path, formats: Collection[int]) -> _Document:
    """``bundle.json``; ``UsageError`` where it is of none of ``formats``, or says what no export writes."""
    found = read_json_object(folder / RECORD).get("format")
    if found not in formats:
        reads = ", ".join(map(str, formats))
        raise refused(folder, f"got format {found!r}, and this version of FVC ({__version__}) reads {reads}")
    return parsed(model, folder, RECORD)


def parsed(model: type[_Document], folder: Path, name: str) -> _Document:
    """Return the JSON file ``name``, validated; raise ``UsageError`` where no export writes it."""
    try:
        return model.model_validate_json((folder / name).read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise refused(folder, f"{name}, {where or 'as a whole'}: {first['msg']}") from error


def config_of(folder: Path, params: Mapping[str, Any], task: str, *, allow_code: bool) -> RunConfig:
    """Return the run's configuration as far as it is recorded, with this machine's cache folder.

    Raises:
        UsageError: a parameter that a bundle of ``task`` does not have, or code that is not allowed.
    """
    params = dict(params)
    if foreign := sorted(set(params) - _recorded(task)):
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


def begun_with(folder: Path) -> str:
    """Return the published weights that its networks are built with; empty where it has none."""
    return str(folder / BEGUN_WITH) if (folder / BEGUN_WITH).is_dir() else ""


def require_weights(folder: Path, name: str) -> Path:
    """Return the file of weights ``name``; raise ``UsageError`` where it or its digest is missing."""
    for each in (name, f"{name}.sha256"):
        if not (folder / WEIGHTS / each).is_file():
            raise refused(folder, f"'{WEIGHTS}/{each}' is missing")
    return folder / WEIGHTS / name


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


def read_arrays(folder: Path, name: str, read: Callable[[dict[str, Any]], _Part]) -> _Part | None:
    """Return ``read`` of the arrays in the file ``name``; None where there is no such file.

    Raises:
        UsageError: a file that no export writes.
    """
    path = folder / name
    if not path.is_file():
        return None
    if path.stat().st_size > _MOST_BYTES:
        raise refused(folder, f"{name} is larger than {_MOST_BYTES:,} bytes")
    try:
        return read(safetensors.numpy.load_file(path))
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise refused(folder, f"{name}: {error}") from error
