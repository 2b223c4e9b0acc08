"""Registries, which find items such as networks, crops and augmentations by the names that users give in parameters.

A file registers its items when it is imported. A registry imports the files of its folder when an item is first
needed. So a new item needs only a new file, and this package imports no other package.
"""

import ast
import importlib
import importlib.util
import logging
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from fvc_lib.services.atomic_files import content_digest, sha256_of_json
from fvc_lib.services.errors import UsageError, did_you_mean

T = TypeVar("T")
_logger = logging.getLogger(__name__)
# Matches the code directly before the quoted name of an item in a file that registers the item.
_BEFORE_NAME = r"\.register\((\w+, )?\s*|\b(declaration|_register)\(\s*|\bname\b[^\n=(]*=\s*|\n +(?=\S+:)"


class Registry(Generic[T]):
    """A mapping of names to items, which the files of one folder register.

    ``names`` and ``items`` keep the order of registration; files are imported in the alphabetical order of their paths.

    Args:
        kind: the word for an item in messages, such as ``detector``.
        folder: dotted name of the package or module whose files register items.
    """

    def __init__(self, kind: str, folder: str = "") -> None:
        self.kind = kind
        self.broken: dict[str, str] = {}  # modules that could not be imported: error messages by dotted name
        self._folder = folder
        self._items: dict[str, T] = {}
        self._sources: dict[str, str] = {}  # file and line that registered an item, by the item's name
        self._filled = False

    def register(self, item: T, name: str = "") -> T:
        """Register ``item`` and return it, so that this method may decorate a class.

        Args:
            item: the item to register.
            name: its name; empty: the item's attribute ``name``. ``timm:NAME`` registers the item for all names that
                begin with ``timm:``.

        Raises:
            UsageError: another line of code has registered the name, or the calling code is in a notebook's cell.
        """
        frame = sys._getframe(1)
        source = f"{frame.f_code.co_filename}, line {frame.f_lineno}"
        name = name or item.name  # type: ignore[attr-defined]
        if "ipykernel" in source or source.startswith("<ipython"):  # other processes cannot import from a notebook
            raise UsageError(
                f"{self.kind} {name!r}: a notebook's cell cannot register it. Begin the cell with %%writefile FILE.py, "
                "and give the model as FILE.py:CLASS."
            )
        before = self._sources.setdefault(name, source)
        if before != source:  # the same line again is a reloaded module
            raise UsageError(
                f"{self.kind} {name!r} is registered twice: in {before}, and in {source}. Rename one of them."
            )
        self._items[name] = item
        return item

    def get(self, name: str) -> T:
        """Return the item called ``name``; for a name such as ``timm:resnet50``, the item of the family ``timm:NAME``.

        Only files that register ``name`` are imported. If no file does, all files are imported.

        Raises:
            UsageError: there is no such item, or its file cannot be imported; the message has similar names and all
                names.
        """
        label = _family(name)
        if label not in self._items:
            for module in self.declared_in(name):
                self._import(module)
        if label not in self._items:
            self._fill()
        if label in self._items:
            return self._items[label]
        failed = "".join(f" Not loaded: {module} ({reason})." for module, reason in self.broken.items())
        near = did_you_mean(name, self._items)
        raise UsageError(f"{self.kind} {name!r}: unknown.{failed}{near} Known: {', '.join(self._items) or 'none'}.")

    def check(self, name: str) -> str:
        """Return ``name`` unchanged if it is registered. The file that registers it is not imported.

        Raises:
            UsageError: the name is unknown; the message has similar names and all names.
        """
        if not self.declared_in(name):
            self.get(name)
        return name

    def identity(self, name: str) -> str:
        """Return the text that represents the item ``name`` in the hash of a run's parameters.

        This class returns ``name`` unchanged. ``FileRegistry`` adds a digest of the code for a user's file.
        """
        return name

    def declared_in(self, name: str) -> list[str]:
        """Return the dotted names of the modules that register ``name``.

        They are found by searching the source text for the quoted name; no module is imported.
        """
        literal = f'"{_family(name)}"'
        declared = re.compile(f"({_BEFORE_NAME}){re.escape(literal)}")
        return [module for module, text in self._texts.items() if literal in text and declared.search(text)]

    def names(self) -> list[str]:
        """Return the names of all items, in the order of registration. All files of the folder are imported."""
        return [name for name, _ in self.items()]

    def items(self) -> list[tuple[str, T]]:
        """Return (name, item) for all items, in the order of registration. All files of the folder are imported."""
        self._fill()
        return list(self._items.items())

    def _fill(self) -> None:
        """Import all files of the folder that register items. Later calls do nothing."""
        if not self._filled:
            for module, text in self._texts.items():
                if ".register" in text:
                    self._import(module)
        self._filled = True

    def _import(self, module: str) -> None:
        """Import ``module``; if that fails, log the reason and store it in ``broken``."""
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - a broken file must not stop the others, whatever it raises
            self.broken[module] = f"{type(error).__name__}: {error}"
            _logger.warning("%s %s is left out: %s", self.kind, module, self.broken[module])

    @cached_property
    def _texts(self) -> Mapping[str, str]:
        """Return the source texts of the folder's modules, by dotted name, sorted by path; empty without a folder."""
        spec = importlib.util.find_spec(self._folder) if self._folder else None
        if spec is None or spec.origin is None:
            return {}
        place = Path(spec.origin)
        if spec.submodule_search_locations is None:
            return {self._folder: place.read_text(encoding="utf-8")}
        texts = {}
        for path in sorted(place.parent.rglob("[!_]*.py")):
            parts = path.relative_to(place.parent).with_suffix("").parts
            texts[".".join((self._folder, *parts))] = path.read_text(encoding="utf-8")
        return texts


def _family(name: str) -> str:
    family, colon, _ = name.partition(":")
    return f"{family}:NAME" if colon else name


class FileRegistry(Registry[T]):
    """A registry that also finds items in Python files of the user, by names such as ``my_net.py:MyNet``."""

    holds = "class"

    def file_of(self, name: str) -> Path | None:
        """Return the path in a name such as ``my_net.py:MyNet``; None if ``name`` has another form.

        The file need not exist.
        """
        path, _, item = name.rpartition(":")
        return Path(path) if path.endswith(".py") and item.isidentifier() else None

    def check(self, name: str) -> str:
        """Check ``name`` and return it; in a name such as ``my_net.py:MyNet`` the path is made absolute.

        The file is not imported.

        Raises:
            UsageError: ``name`` is a path without ``:ITEM``, or a name that is not registered.
        """
        if name.endswith(".py"):
            raise UsageError(
                f"{self.kind} {name!r}: a file, and no {self.holds} of it. Give {name}:{self.holds.upper()}."
            )
        path = self.file_of(name)
        return super().check(name) if path is None else f"{path.expanduser().absolute()}:{name.rpartition(':')[2]}"

    def identity(self, name: str) -> str:
        """Return the text that represents the item ``name`` in a run's hash.

        For a user's file, it contains a digest of the file and of the modules that the file imports from its folder.
        """
        path = self.file_of(name)
        return name if path is None else f"{path.name}:{name.rpartition(':')[2]}@{_digest_of_file(path)}"

    def code_files(self, name: str) -> dict[str, Path]:
        """Return the paths of the user's file in ``name`` and of the modules that it imports from its folder.

        The keys are the paths relative to the folder of the file. The dict is empty if ``name`` names no user's file.
        """
        path = self.file_of(name)
        return {} if path is None else {str(file.relative_to(path.parent)): file for file in _code_of_file(path)}

    def declared_in(self, name: str) -> list[str]:
        """Return the dotted names of the modules that register ``name``; an empty list for a user's file."""
        return [] if self.file_of(name) else super().declared_in(name)

    def _of_file(self, name: str) -> Any:
        """Import the user's file in ``name`` and return the item; None if ``name`` names no user's file.

        Raises:
            UsageError: the file is missing, cannot be imported, or has no such item.
        """
        path = self.file_of(name)
        item = name.rpartition(":")[2]
        if path is None:
            return None
        try:
            return getattr(_import_file(path), item)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}" if path.is_file() else "there is no such file"
            raise UsageError(
                f"{self.kind} {name!r}: {str(path)!r} gives no {self.holds} {item}: {reason}. "
                f"Mend the file, or give path/to/FILE.py:{self.holds.upper()}."
            ) from error


def _code_of_file(path: Path) -> list[Path]:
    """Return the paths of a user's file and of the modules that it imports from its folder, sorted.

    Imports of those modules are followed too. For an imported package, all its files are returned.
    """
    found = [path]
    for file in found:  # imported files are added to the list meanwhile
        with suppress(OSError, SyntaxError, ValueError):  # importing the file will raise the error
            nodes = list(ast.walk(ast.parse(file.read_bytes())))
            names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
            names |= {
                node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level
            }
            # Changes of the library are tracked elsewhere (``code_versions``).
            for name in {name.partition(".")[0] for name in names} - {"fvc_lib"}:
                module = path.parent / f"{name}.py"
                files = [module] if module.is_file() else (path.parent / name).rglob("*.py")
                found += [file for file in files if file not in found]
    return sorted(found)


def _digest_of_file(path: Path) -> str:
    code = {str(file.relative_to(path.parent)): content_digest(file) for file in _code_of_file(path)}
    return sha256_of_json(code) if len(code) > 1 else code[path.name]


def _import_file(path: Path) -> ModuleType:
    """Import a user's file and return the module. The file is imported again only if its code has changed.

    Modules that the file imports from its folder keep their plain names in ``sys.modules``. They are imported again if
    the code of any of these files has changed.

    Raises:
        ImportError: a module of the folder has the name of a module that this process imported from elsewhere.
    """
    name = f"fvc_user_{path.stem}_{_digest_of_file(path)[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    folder = path.parent.absolute()
    for file in _code_of_file(path):
        local = file.relative_to(path.parent).parts[0].removesuffix(".py")
        if file == path:
            continue
        with_submodules = [key for key in sys.modules if key.partition(".")[0] == local]
        for loaded in with_submodules:
            place = getattr(sys.modules[loaded], "__file__", None)
            if place and not Path(place).is_relative_to(folder):
                raise ImportError(f"another module {loaded!r} is imported already, from {place}. Rename one of them")
            del sys.modules[loaded]
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


# Views: the rules that choose the frames of a clip, and the part of the picture that they show.

_NUMBER = r"[1-9][0-9]{0,3}(\.[0-9]+)?"
SAMPLING = rf"uniform|window:{_NUMBER}|rate:{_NUMBER}"
_FIT = r"letterbox|(crop|squash)(?::(0?\.[1-9][0-9]*))?"


@dataclass(frozen=True)
class View:
    """The rule that cuts clips from a video: the choice of frames, the part of the picture, and the number of clips.

    Attributes:
        sampling: ``uniform`` (frames spread evenly over the video), ``window:STRIDE`` (every STRIDE-th frame of one
            section of the video) or ``rate:R`` (R frames per second of one section of the video).
        fit: ``letterbox`` shows the whole picture with black bars. ``crop`` resizes the shorter side to the clip's
            side, and cuts out the middle square. ``crop:SHARE`` first resizes the shorter side to the clip's side /
            SHARE, so that the square is smaller than the picture; 0.875 is usual. ``squash`` resizes the whole picture
            to a square, whatever its shape; ``squash:SHARE`` first keeps the middle SHARE of the longer side.
        clips: number of clips per video.
        crop: name in ``CROPS`` of the function that finds the part of the picture to show; empty: ``fit`` is used.
        margin: the part that ``crop`` finds is enlarged by this share of its side.

    Raises:
        ValueError: the sampling or fit is unknown.
    """

    sampling: str = "uniform"
    fit: str = "letterbox"
    clips: int = 1
    crop: str = ""
    margin: float = 0.0

    def __post_init__(self) -> None:
        if not re.fullmatch(SAMPLING, self.sampling):
            raise ValueError(f"sampling: got {self.sampling!r}, wanted uniform, window:STRIDE or rate:R, as window:4")
        if not re.fullmatch(_FIT, self.fit):
            raise ValueError(f"fit: got {self.fit!r}, wanted letterbox, crop, squash, or a SHARE such as crop:0.875")

    @property
    def rate(self) -> float:
        """Return the number of frames per second of a clip; 0 if ``sampling`` is not ``rate:R``."""
        kind, _, number = self.sampling.partition(":")
        return float(number) if kind == "rate" else 0.0

    @property
    def stride(self) -> float:
        """Return the distance between consecutive frames of a clip, in frames of the video; 0 for ``uniform``.

        The stride of ``rate:R`` depends on the video (``video.decode.views.at_rate_of``); here it is 0, too.
        """
        kind, _, number = self.sampling.partition(":")
        return float(number) if kind == "window" else 0.0

    @property
    def share(self) -> float:
        """Return the number after the colon in ``fit``, such as 0.875 for ``crop:0.875``; 1 without a colon."""
        return float(self.fit.partition(":")[2] or 1)

    def resized(self, side: int) -> int:
        """Return the length in pixels to which ``fit`` resizes the picture's shorter side.

        For ``crop``, a square with a side of ``side`` pixels is then cut out of the middle.
        """
        return int(side / self.share) if self.fit.startswith("crop") else side


PLAIN_VIEW = View()  # the whole picture, in frames spread over the video


@dataclass(frozen=True)
class ClipSettings:
    """The size of a clip, and the rule ``view`` that cuts the clip from a video.

    A clip has ``num_frames`` square frames with a side of ``side`` pixels.
    """

    num_frames: int
    side: int
    view: View = View()


@dataclass(frozen=True)
class TrunkOptions:
    """Arguments of ``DetectorSpec.build_trunk``, which builds a trunk (feature extractor)."""

    name: str  # the requested name, such as ``timm:resnet50``
    num_frames: int  # frames of a clip
    side: int  # side of a clip in pixels
    weights: Path | None = None  # weights on this machine; None: the package's weights, else from scratch
    licence: str = "unknown"  # licence of the weights
    pretrained: bool = True  # whether to load weights that come with the package


@dataclass(frozen=True)
class DetectorSpec:
    """The declaration of a network that takes clips. Either ``build`` or ``build_trunk`` is set.

    ``build`` returns a complete network, initialised from torch's current random state. It maps B clips of T frames,
    uint8 (B, T, 3, H, W), to logits (B,), positive for fake. Its method ``recomputable_blocks()`` returns the modules
    whose activations gradient checkpointing may recompute.

    ``build_trunk`` returns a trunk (feature extractor), to which a head is added. It maps the same input to F features:
    (B, T, F) per frame, or (B, 1, F) per clip. Its attribute ``frame_feature_size`` is F. Task video_text calls the
    trunk's method ``frame_features`` if it exists.
    """

    name: str  # the value of the parameter ``model``; "timm:NAME" stands for a family
    family: str  # origin of the network: own, user, or the name of a package
    paper: str  # citation
    licence: str  # licence of the network's code
    num_frames: int  # frames of the clips that the network was made for
    side: int  # side of these clips in pixels
    normalisation: str  # how the network normalises uint8 pixels, in words
    micro_batch: int  # clips in memory at once if ``batch_size`` is 0: 1 to 8
    frame_sampling: str = "uniform"  # ``View.sampling`` of its clips
    frame_fit: str = "letterbox"  # ``View.fit`` of its clips
    build: Callable[[], Any] | None = None
    build_trunk: Callable[[TrunkOptions], Any] | None = None
    bibtex: str = ""  # BibTeX entries of the paper
    weights: str = ""  # published weights: a hub id, or a package and the weights' name in it
    weights_licence: str = ""  # licence of the weights
    brings_weights: bool = False  # whether the weights come with the installation and are the default
    packages: tuple[str, ...] = ()  # packages that it needs besides the default installation
    head: str = "mean"  # head over the trunk's features, one of ``detectors.network.HEADS``
    tune: str = "all"  # trained parameters: head, norms, last:N, effort or all
    l2_normalise: bool = False  # whether each feature vector is brought to length 1
    of_name: Callable[[str], "DetectorSpec"] | None = None  # for a family: returns the declaration of one of its names
    # The input in place of clips: ``forensic`` (the table of stage 03b), ``embedding`` (a frozen trunk's features), or
    # ``both``. Empty: it is a network.
    of_features: str = ""
    estimator: Any = None  # for a model on features: its ``detectors.classical.ClassicalModel``

    def clips(self, num_frames: int, side: int, sampling: str = "", **view: Any) -> ClipSettings:
        """Return clip settings for this network; an argument that is 0 or empty is replaced by the network's value.

        ``side`` is in pixels, ``sampling`` is ``View.sampling``, and ``view`` has further attributes of ``View``.
        """
        seen = View(sampling or self.frame_sampling, self.frame_fit, **view)
        return ClipSettings(num_frames or self.num_frames, side or self.side, seen)


# Attributes of a user's class that are copied to its ``DetectorSpec``, and their defaults.
_OF_CLASS: Mapping[str, Any] = {
    "paper": "not stated",
    "bibtex": "",
    "licence": "not stated",
    "num_frames": 6,
    "side": 112,
    "micro_batch": 2,
    "frame_sampling": "uniform",
    "frame_fit": "letterbox",
}


_OF_FEATURES = re.compile(r'of_features="(\w+)"')


class DetectorRegistry(FileRegistry[DetectorSpec]):
    """The registry of networks that take clips.

    It also accepts names of a family (``timm:resnet50``) and names of classes in users' files (``my_net.py:MyNet``).

    A user's class with the attribute ``num_features`` is an encoder, to which a head is added. It maps B clips of T
    frames, uint8 (B, T, 3, H, W), to F features, (B, F) or (B, T, F). A class without this attribute must map them to
    logits (B,). ``_OF_CLASS`` lists further attributes that the class may have.
    """

    def get(self, name: str) -> DetectorSpec:
        """Return the declaration of the network ``name``.

        ``name`` is a registered name, a member of a family (``timm:resnet50``) or a user's class (``my_net.py:MyNet``).

        Raises:
            UsageError: the name is unknown, or its file cannot be imported.
        """
        spec: Any = self._of_file(name) or super().get(name)
        if isinstance(spec, DetectorSpec):
            return spec if spec.of_name is None else spec.of_name(name)
        kind, encoder = spec, hasattr(spec, "num_features")  # a user's class
        return DetectorSpec(
            name=name,
            family="user",
            normalisation="the network's own",
            build=None if encoder else kind,
            build_trunk=(lambda _: kind()) if encoder else None,
            **{attribute: getattr(kind, attribute, default) for attribute, default in _OF_CLASS.items()},
        )

    def declared_in(self, name: str) -> list[str]:
        """Return the dotted names of the modules that register ``name``.

        The name of a model on the features of a frozen network (the trunk) is ``probe:TRUNK``, ``d3:TRUNK`` or similar.
        For such a name the modules that register the trunk are added.
        """
        ours = super().declared_in(name)
        trunk = name.partition(":")[2]
        takes_features = any(_OF_FEATURES.search(self._texts[module]) for module in ours)  # no module is imported
        return [*ours, *super().declared_in(trunk)] if trunk and takes_features else ours

    def of_features(self, name: str) -> str:
        """Return the kind of features that the model ``name`` takes as input (``DetectorSpec.of_features``).

        The text is ``forensic``, ``embedding`` or ``both`` for a classical model, and empty for a network. No file is
        imported, because a file declares either networks or models on one kind of features.
        """
        ours = self.declared_in(name)
        if self.file_of(name) is not None or not ours:
            return "" if self.file_of(name) is not None else self.get(name).of_features
        kinds = (_OF_FEATURES.search(self._texts[module]) for module in ours)
        return next((kind[1] for kind in kinds if kind), "")


@dataclass(frozen=True)
class Crop:
    """A function that finds the part of a clip to show to a network.

    ``find`` takes T frames, uint8 (T, H, W, 3), RGB. It returns (left, top, width, height) in pixels, with the shape
    (4,) for the whole clip or (T, 4) for one rectangle per frame. It returns None if it finds nothing. Only the crop
    ``face`` has ``points``: a function that takes the same frames and returns five points of the face, (T, 5, 2), or
    None.
    """

    name: str
    find: Callable[[Any], Any]
    points: Callable[[Any], Any] | None = None
    packages: tuple[str, ...] = ()  # further packages that ``find`` needs; cached clips are valid for one version
    code: str = ""  # dotted name of the module that defines ``find``
    remedy: str = ""  # a sentence: how to install the packages


class CropRegistry(FileRegistry[Crop]):
    """The registry of crops: functions that find the part of the picture that a network is shown, such as a face.

    Functions in users' files are found too (``my_crop.py:function``).
    """

    holds = "function"

    def get(self, name: str) -> Crop:
        """Return the crop called ``name``.

        Raises:
            UsageError: the crop is unknown, or needs a package that is not installed.
        """
        function = self._of_file(name)
        crop = super().get(name) if function is None else Crop(name, function)
        missing = [package for package in crop.packages if importlib.util.find_spec(package) is None]
        if missing:
            raise UsageError(f"{self.kind} {name!r} needs {', '.join(missing)}, not installed. {crop.remedy}")
        return crop


DETECTORS = DetectorRegistry("model", "fvc_lib.detectors")
CROPS = CropRegistry("crop", "fvc_lib.detectors")
# Layouts of corpora of videos and of images (``fvc_lib/corpus/listing.py``: ``CorpusLoader``).
CORPORA: Registry[Any] = Registry("corpus", "fvc_lib.corpus.sources")
IMAGE_LAYOUTS: Registry[Any] = Registry("image layout", "fvc_lib.corpus.images")
# Classes of operations on clips, in the order in which a clip receives them.
AUGMENTATIONS: Registry[Any] = Registry("augmentation", "fvc_lib.video.augmentations")
# Families of forensic features (``fvc_lib/video/features/family.py``: ``FeatureFamily``).
FEATURES: Registry[Any] = Registry("feature family", "fvc_lib.video.features")


class BackboneRegistry(Registry[Callable[[TrunkOptions], Any]]):
    """The registry of backbones, which are networks that take single images.

    The names of detectors (networks that take clips) are accepted as well.
    """

    def is_own(self, name: str) -> bool:
        """Return whether ``name`` is registered in this registry; False for a detector."""
        return _family(name) in self._items or bool(self._own_files(name))

    def _own_files(self, name: str) -> list[str]:
        own = re.compile(rf'BACKBONES\.register\(\w+, "{re.escape(_family(name))}"\)')
        return [module for module, text in self._texts.items() if own.search(text)]

    def get(self, name: str) -> Any:
        """Return the function that builds the backbone ``name``; for a detector, its ``DetectorSpec``.

        Raises:
            UsageError: the name is unknown.
        """
        return super().get(name) if self.is_own(name) else DETECTORS.get(name)

    def check(self, name: str) -> str:
        """Check that ``name`` is a known backbone or detector, and return it.

        For a detector in a user's file (``my_net.py:MyNet``), the path in the returned name is absolute.

        Raises:
            UsageError: ``name`` is neither a backbone nor a detector.
        """
        try:
            return name if self.is_own(name) else DETECTORS.check(name)
        except UsageError as error:
            own = self.names()
            more = f"A {self.kind} may also be {' or '.join(own)}.{did_you_mean(name, own)}"
            raise UsageError(f"{error} {more}") from error

    def identity(self, name: str) -> str:
        """Return the text that represents the backbone or detector ``name`` in a run's hash."""
        return name if self.is_own(name) else DETECTORS.identity(name)

    def declared_in(self, name: str) -> list[str]:
        """Return the dotted names of the modules that register the backbone or detector ``name``."""
        return self._own_files(name) or DETECTORS.declared_in(name)


# Every item is a function that builds a backbone from ``TrunkOptions``.
BACKBONES = BackboneRegistry("backbone", "fvc_lib.detectors")
