"""Registries: what can be chosen by name, filled by the files of a folder and by other packages' entry points.

A file registers what it defines when it is imported, and a registry imports the files of its folder when somebody first
needs an item of it, so adding an item means adding one file. The registries of this module stand empty until then:
services import no other room.
"""

import hashlib
import importlib
import importlib.util
import linecache
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from fvc_lib.services.atomic_files import write_text
from fvc_lib.services.clip_settings import ClipSettings, View
from fvc_lib.services.code.user_files import UserCode, code_of_file, digest_of_file, know_beside
from fvc_lib.services.errors import UsageError, did_you_mean
from fvc_lib.services.run_paths import beside_the_code

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")
_logger = logging.getLogger(__name__)


class Registry(Generic[T]):
    """Items by name, in the order in which they were registered (files by their dotted names, then other packages).

    Args:
        kind: what an item is called in messages, such as ``detector``.
        folder: dotted name of the package (its files at any depth) or module that registers our own items.
        entry_points: group in which other packages name a module that registers items, or an item itself.
    """

    def __init__(self, kind: str, folder: str = "", entry_points: str = "") -> None:
        self.kind = kind
        self.broken: dict[str, str] = {}  # what could not be imported, with the reason
        self._folder, self._group = folder, entry_points
        self._items: dict[str, T] = {}
        self._aliases: dict[str, str] = {}
        self._sources: dict[str, tuple[str, int, str]] = {}  # file, line and module
        self._filled = False

    @overload
    def register(self, name: str) -> Callable[[T], T]: ...
    @overload
    def register(self, name: str, item: T) -> T: ...
    @overload
    def register(self, name: T) -> T: ...
    def register(self, name: Any, item: Any = None) -> Any:
        """Register ``item`` under ``name``; without an item a decorator; or an item with ``name`` (and ``aliases``).

        Args:
            name: the name, or an item that carries its own; ``timm:NAME`` stands for every name behind ``timm:``.
            item: what is registered; its ``aliases``, where it brings its name, are further names for ``get``.

        Raises:
            UsageError: the name is taken by another place in the code; the message names both.
        """
        frame = sys._getframe(1)
        source = (frame.f_code.co_filename, frame.f_lineno, str(frame.f_globals.get("__name__")))
        if not isinstance(name, str):
            return self._put(name.name, name, getattr(name, "aliases", ()), source)
        if item is not None:
            return self._put(name, item, (), source)
        return lambda decorated: self._put(name, decorated, (), source)

    def _put(self, name: str, item: T, aliases: Sequence[str], source: tuple[str, int, str]) -> T:
        if _is_cell(source[0]):
            self._refuse_taken((name, *aliases))
        if self._is_of_cell(name, item, source[0]):
            return item
        for each in (name, *aliases):
            # The same line again is a reloaded module, another module of the same file a user's file that was edited; a
            # cell of a notebook is run as often as one likes.
            taken = self._sources.get(each, source)
            edited = taken[0] == source[0] and taken[2] != source[2]
            if taken != source and not edited and not _is_cell(source[0]):
                raise UsageError(
                    f"{self.kind} {each!r} is registered twice: in {taken[0]}, line {taken[1]}, and in {source[0]}, "
                    f"line {source[1]}. Rename one of them."
                )
        for each in (name, *aliases):
            self._sources[each] = source
        self._items[name] = item
        self._aliases.update(dict.fromkeys(aliases, name))
        return item

    def _refuse_taken(self, names: Sequence[str]) -> None:
        """``UsageError`` where a cell wants a name that is not a cell's: runs on record have what it stood for."""
        if self._entry_points():  # a package's module may register any name
            self._fill()
        for name in names:
            file = self._sources.get(name, ("", 0, ""))[0]
            if (file and not _is_cell(file)) or (not file and self.declared_in(name)):
                where = file or self.declared_in(name)[0]
                raise UsageError(
                    f"{self.kind} {name!r} is registered already, in {where}, and a cell cannot take its place: runs "
                    "on record with that name would be another one's. Choose another name."
                )

    def _is_of_cell(self, name: str, item: T, file: str) -> bool:
        """Whether ``file`` holds what a cell registered, and is known by its path: nothing is registered then."""
        return False

    def get(self, name: str) -> T:
        """The item called ``name``; of ``timm:resnet50`` the family ``timm:NAME``.

        Raises:
            UsageError: no such item; the message has the nearest name, all known ones and what could not be imported.
        """
        if self._canonical(name) not in self._items:
            self._fill()
        canonical = self._canonical(name)
        if canonical in self._items:
            return self._items[canonical]
        for module in self.declared_in(name):
            if module in self.broken:
                raise self._cannot_import(name, module, self.broken[module])
        failed = "".join(f" Not loaded: {each} ({reason})." for each, reason in self.broken.items())
        near = did_you_mean(name, [*self._items, *self._aliases])
        raise UsageError(f"{self.kind} {name!r}: unknown.{near} Known: {', '.join(self._items) or 'none'}.{failed}")

    def load(self, name: str) -> T:
        """As ``get``; only the files that register ``name`` are imported.

        Raises:
            UsageError: no such item, or its file cannot be imported; the message has the file and the error.
        """
        for module in () if self._canonical(name) in self._items else self.declared_in(name):
            try:
                importlib.import_module(module)
            except Exception as error:
                raise self._cannot_import(name, module, f"{type(error).__name__}: {error}") from error
        return self.get(name)

    def _cannot_import(self, name: str, module: str, reason: str) -> UsageError:
        path = getattr(importlib.util.find_spec(module), "origin", None) or module
        return UsageError(
            f"{self.kind} {name!r}: its file {path} cannot be imported: {reason}. Mend it, or choose another."
        )

    def check(self, name: str) -> str:
        """``name`` itself, where some file of the folder or entry point has it; nothing is imported to see that.

        Raises:
            UsageError: as ``get``.
        """
        here = self._canonical(name) in self._items or any(name == point.name for point in self._entry_points())
        if not here and not self.declared_in(name):
            self.get(name)
        return name

    def identity(self, name: str) -> str:
        """What the name counts as in a run's identity: itself."""
        return name

    def declared_in(self, name: str) -> list[str]:
        """Dotted names of the folder's files that register ``name`` as a literal; found without importing them."""
        before = (
            r"\.register\(\s*",
            r"\b(declaration|_register)\(\s*",
            r"\bname\b[^\n=(]*=\s*",
            r"\baliases=\([^)]*",
            r"\n +(?=\S+:)",
        )
        declared = re.compile(f'({"|".join(before)})"{re.escape(_family(name))}"')
        return [module for module, text in self._files() if declared.search(text)]

    def names(self) -> list[str]:
        """Names of all items, without aliases."""
        self._fill()
        return list(self._items)

    def items(self) -> list[tuple[str, T]]:
        """Names and items."""
        self._fill()
        return list(self._items.items())

    def _canonical(self, name: str) -> str:
        return self._aliases.get(name, _family(name))

    def _fill(self) -> None:
        """Import whatever registers items; what fails is logged, kept in ``broken``, and stops nothing else."""
        if self._filled:
            return
        self._filled = True
        try:
            for module, text in self._files():
                if ".register" in text:
                    self._attempt(module, lambda module=module: importlib.import_module(module))  # type: ignore[misc]
            for point in self._entry_points():
                self._attempt(point.name, lambda point=point: self._load(point))  # type: ignore[misc]
        except BaseException:  # stopped or interrupted: a kernel may go on, and asks again
            self._filled = False
            raise

    def _attempt(self, name: str, load: Callable[[], object]) -> None:
        try:
            load()
        except Exception as error:  # noqa: BLE001 - one broken plug-in must not stop the others, whatever it raises
            self.broken[name] = f"{type(error).__name__}: {error}"
            _logger.warning("%s %s is left out: %s", self.kind, name, self.broken[name])

    def _load(self, point: "EntryPoint") -> None:
        loaded = point.load()
        if point.name not in self._sources and not isinstance(loaded, ModuleType):
            self._put(point.name, loaded, (), (point.value, 0, ""))

    def _entry_points(self) -> Sequence["EntryPoint"]:
        if not self._group:
            return ()
        from importlib.metadata import entry_points  # 3 MB, of workers too, which ask for none

        return tuple(entry_points(group=self._group))

    def _files(self) -> Iterator[tuple[str, str]]:
        """Dotted name and text of the folder's files, sorted, which are not imported for that."""
        spec = importlib.util.find_spec(self._folder) if self._folder else None
        if spec is None:
            return
        if spec.submodule_search_locations is None:
            yield self._folder, Path(spec.origin or "").read_text(encoding="utf-8")
        for folder in spec.submodule_search_locations or ():
            for path in sorted(Path(folder).rglob("[!_]*.py")):
                dotted = (self._folder, *path.relative_to(folder).with_suffix("").parts)
                yield ".".join(dotted), path.read_text(encoding="utf-8")


def _family(name: str) -> str:
    family, colon, _ = name.partition(":")
    return f"{family}:NAME" if colon else name


@dataclass(frozen=True)
class TrunkOptions:
    """What a ``build_trunk`` is told."""

    name: str  # the whole name that was asked for, such as ``timm:resnet50``
    num_frames: int  # of the clips
    side: int  # theirs, in pixels
    weights: Path | None = None  # on this machine; None: those that come with the package, else from scratch
    licence: str = "unknown"  # of the weights, as far as the declaration knows
    pretrained: bool = True  # whether weights that come with the package are taken


@dataclass(frozen=True)
class DetectorSpec:
    """A network on clips, as its file declares it: complete (``build``), or a trunk to which a head is added.

    ``build`` gives a complete network, initialised from torch's current random state. It takes frames uint8
    (B, T, 3, H, W), gives logits (B,), positive for fake, and names in ``recomputable_blocks()`` the parts whose
    activations gradient checkpointing may compute again. ``build_trunk`` gives a network from such frames to features
    (B, T, F), or (B, 1, F) of whole clips, with ``frame_feature_size`` F. Task video_text takes these, or where there
    is a method ``frame_features`` what that gives.
    """

    name: str  # what the parameter ``model`` calls it; "timm:NAME" stands for a family
    family: str  # where it comes from: own, or a package
    paper: str  # where it is described
    licence: str  # of its code
    num_frames: int  # of the clips it was made for
    side: int  # theirs, in pixels
    normalisation: str  # of the pixels, in words; the network does it, from uint8
    micro_batch: int  # clips in memory at once where ``batch_size`` is 0: 1 to 8, safe on a small machine
    frame_sampling: str = "uniform"  # how its clips' frames are sampled, as ``View`` says
    frame_fit: str = "letterbox"  # and how they are brought to its side
    build: Callable[[], Any] | None = None
    build_trunk: Callable[[TrunkOptions], Any] | None = None
    aliases: tuple[str, ...] = ()  # further names
    bibtex: str = ""  # the entry or entries of its paper
    weights: str = ""  # where its published weights are: a hub id, or a package and what it calls them
    weights_licence: str = ""  # theirs
    brings_weights: bool = False  # whether they come with the installation, and are taken where none are named
    packages: tuple[str, ...] = ()  # that it needs beside the default installation
    head: str = "mean"  # over the trunk's features, one of ``detectors/heads``
    tune: str = "all"  # what is trained: head, norms, last:N, effort or all
    l2_normalise: bool = False  # whether each feature vector is brought to length 1
    of_name: Callable[[str], "DetectorSpec"] | None = None  # of a family: what one of its names declares
    # What a model sees in place of clips: ``forensic`` (the table of stage 03b) or ``embedding`` (what a frozen trunk
    # gives of the clips); then ``build`` gives a ``detectors.classical.ClassicalModel``. Empty: it is a network.
    of_features: str = ""
    trunk: str = ""  # of ``embedding``: the network whose trunk that is

    def clips(self, num_frames: int, side: int, sampling: str = "", fit: str = "", **view: Any) -> ClipSettings:
        """Of a run that asks for these, where 0 and empty are the network's own; ``view`` as ``View`` has it."""
        seen = View(sampling or self.frame_sampling, fit or self.frame_fit, **view)
        return ClipSettings(num_frames or self.num_frames, side or self.side, seen)


class FileRegistry(Registry[T]):
    """Beside registered names also what a user's own file holds (``my_net.py:MyNet``)."""

    holds = "class"

    def load(self, name: str) -> T:
        """As ``get``; only the files that register ``name`` are imported."""
        return self.get(name) if _IN_A_FILE.fullmatch(name) else super().load(name)

    def check(self, name: str) -> str:
        """``name``, with the whole path of a user's file, which may have moved since; ``UsageError`` as ever."""
        if name.endswith(".py"):
            raise UsageError(
                f"{self.kind} {name!r}: a file, and no {self.holds} of it. Add :{self.holds.upper()}, such as "
                f"{name}:{'MyNet' if self.holds == 'class' else 'find'}."
            )
        match = _IN_A_FILE.fullmatch(name)
        if match is None:
            return super().check(name)
        return f"{Path(match['path']).expanduser().absolute()}:{match['item']}"

    def identity(self, name: str) -> str:
        """A user's file counts by its name and by its code and that of the modules beside it that it imports, not by
        where it lies.
        """
        match = _IN_A_FILE.fullmatch(name)
        if match is None:
            return name
        path = Path(match["path"])
        return f"{path.name}:{match['item']}@{digest_of_file(path)}"

    def file_of(self, name: str) -> Path | None:
        """The user's file that ``name`` names, whether or not it is there; None for any other."""
        match = _IN_A_FILE.fullmatch(name)
        return Path(match["path"]) if match else None

    def code_files(self, name: str) -> dict[str, Path]:
        """A user's file that ``name`` names and what it imports from its folder, by relative path; else nothing."""
        path = self.file_of(name)
        return {} if path is None else {relative: path.parent / relative for relative in code_of_file(path)}

    def declared_in(self, name: str) -> list[str]:
        """Of a user's file nothing: its content is part of its identity."""
        return [] if _IN_A_FILE.fullmatch(name) else super().declared_in(name)

    def _of_file(self, name: str) -> Any:
        """What a user's file calls so; None where ``name`` names no file.

        The module is imported once per content, so that an edited file is another item, and under a name by which its
        objects can be pickled. So are those of its folder that it imports, for itself alone: another file's may have
        their names.

        Raises:
            UsageError: the file is missing, cannot be imported, or has nothing of that name that can be called.
        """
        match = _IN_A_FILE.fullmatch(name)
        if match is None:
            return None
        path, item = Path(match["path"]), match["item"]
        digest = digest_of_file(path)
        module_name = f"fvc_user_{path.stem}_{digest[:16]}"
        if module_name not in sys.modules:
            spec = importlib.util.spec_from_file_location(module_name, path, loader=UserCode(module_name, str(path)))
            if not digest or spec is None or spec.loader is None:
                wanted = f"path/to/FILE.py:{self.holds.upper()}"
                raise UsageError(f"{self.kind} {name!r}: no file {str(path)!r}. Give {wanted}.")
            module = importlib.util.module_from_spec(spec)
            sys.modules[module_name] = module
            know_beside(module_name, path)
            sys.path.insert(0, str(path.parent))  # for what it imports by names that are not in its code
            try:
                spec.loader.exec_module(module)
            except Exception as error:
                del sys.modules[module_name]
                of_cell = path.parent == cells_folder()
                remedy = "A cell with a network must have all that it uses, its imports too" if of_cell else "Mend it"
                raise UsageError(
                    f"{self.kind} {name!r}: {str(path)!r} cannot be imported: {type(error).__name__}: {error}. "
                    f"{remedy}."
                ) from error
            finally:
                sys.path.remove(str(path.parent))
        found = self._registered_by(path, item, module_name) or getattr(sys.modules[module_name], item, None)
        if not callable(found) and not isinstance(found, DetectorSpec):
            names = [each for each, value in vars(sys.modules[module_name]).items() if callable(value)]
            raise UsageError(
                f"{self.kind} {name!r}: {path.name} has no {self.holds} {item}.{did_you_mean(item, names)}"
            )
        return found

    def _registered_by(self, path: Path, item: str, module: str) -> Any:
        """What the file at ``path``, imported as ``module``, has registered as ``item``; None where it has not."""
        return self._items[item] if self._sources.get(item, ("", 0, ""))[2] == module else None


class DetectorRegistry(FileRegistry[DetectorSpec]):
    """Beside registered names also those of a family (``timm:resnet50``) and of a user's file (``my_net.py:MyNet``).

    A class with the attribute ``num_features`` is an encoder, to which a head is added: from frames uint8
    (B, T, 3, H, W) to features (B, F) or (B, T, F). Any other gives logits (B,). ``num_frames``, ``side``,
    ``frame_sampling``, ``frame_fit``, ``micro_batch``, ``paper``, ``bibtex`` and ``licence`` may be attributes of the
    class as well.

    What a notebook's cell registers is a user's file as well, with the cell's code: ranks, the preflight's process and
    other commands cannot see into a notebook. The cell must import what it uses.
    """

    def __init__(self, kind: str, folder: str = "", entry_points: str = "") -> None:
        super().__init__(kind, folder, entry_points)
        self._of_cells: dict[str, str] = {}  # by name: the file with the code of the cell that registered it last
        self._sees: dict[str, str] = {}  # by name: what ``of_features`` has found
        self._in_files: dict[tuple[str, str], Any] = {}  # by such a file's name, which has its digest, and name

    def _is_of_cell(self, name: str, item: DetectorSpec, file: str) -> bool:
        if Path(file).parent == cells_folder():
            self._in_files[Path(file).name, name] = item
            return True
        if _is_cell(file) and (code := "".join(linecache.getlines(file))):
            self.know_cell(name, code)
        return False

    def know_cell(self, name: str, code: str) -> None:
        """Write the ``code`` of a notebook's cell, which registers ``name``, into a file by which the name is known."""
        if not name.isidentifier():
            raise UsageError(f"{self.kind} {name!r}: in a cell a name is of letters, digits and underscores alone.")
        path = cells_folder() / f"{name}_{hashlib.sha256(code.encode()).hexdigest()[:12]}.py"
        write_text(path, code)
        self._of_cells[name] = str(path)

    def find_cell(self, name: str, cells: Sequence[str]) -> bool:
        """Whether one of the code ``cells`` of a notebook that has not run registers ``name``, which is then known."""
        quoted = re.compile(rf"""["']{re.escape(name)}["']""")
        codes = [code for code in cells if "DETECTORS.register" in code and quoted.search(code)]
        if codes:
            self._refuse_taken((name,))
            self.know_cell(name, codes[-1].rstrip("\n") + "\n")
        return bool(codes)

    def _registered_by(self, path: Path, item: str, module: str) -> Any:
        return self._in_files.get((path.name, item)) or super()._registered_by(path, item, module)

    def get(self, name: str) -> DetectorSpec:
        """The declaration; ``UsageError`` as ever, or where a user's file cannot be imported or has no such class."""
        if (found := self._of_file(name)) is not None:
            return found if isinstance(found, DetectorSpec) else declared_by_class(found, name)
        spec = super().get(name)
        if isinstance(spec, type):  # a class that was registered by itself
            return declared_by_class(spec, name)
        return spec if spec.of_name is None else spec.of_name(name)

    def declared_in(self, name: str) -> list[str]:
        """As ``Registry``; of a model on a trunk's features also the files of the trunk."""
        ours = super().declared_in(name)
        trunk = name.partition(":")[2]
        is_model = trunk and f"{self._folder}.classical" in ours
        return [*ours, *super().declared_in(trunk)] if is_model else ours

    def of_features(self, name: str) -> str:
        """``DetectorSpec.of_features`` of ``name``. No network's file is imported, and no user's."""
        if name not in self._sees:
            ours = self.declared_in(name)
            is_model = f"{self._folder}.classical" in ours
            is_others = not ours and any(name == point.name for point in self._entry_points())
            self._sees[name] = self.load(name).of_features if is_model or is_others else ""
        return self._sees[name]

    def refuse_of_cell(self, name: object) -> None:
        """``UsageError`` where a recorded ``name`` is known from a cell alone: a record has the cell's file instead."""
        if name in self._of_cells:
            raise UsageError(
                f"{self.kind} {name!r}: what the record means by it is not installed here, and a cell of this notebook "
                "has the name. Install the package that it came from, and rename the cell's network."
            )

    def check(self, name: str) -> str:
        """As ``FileRegistry``; of what a cell registered, the cell's file."""
        if name in self._of_cells:
            return f"{self._of_cells[name]}:{name}"
        try:
            return super().check(name)
        except UsageError as error:
            written = sorted(cells_folder().glob(f"{name}_*.py"), key=os.path.getmtime) if name.isidentifier() else []
            if not written:
                raise
            raise UsageError(
                f"{error} A cell of a notebook once had this name, and its network lies in a file: give {written[-1]}:"
                f"{name}"
            ) from error


def cells_folder() -> Path:
    """Where the code of cells that register networks lies, in the cache."""
    return Path(os.environ.get("FVC_CACHE_DIR") or beside_the_code("cache")).absolute() / "cells"


def _is_cell(file: str) -> bool:
    return "ipykernel" in file or file.startswith("<ipython-input")


_IN_A_FILE = re.compile(r"(?P<path>.+\.py):(?P<item>[A-Za-z_]\w*)")


def declared_by_class(kind: Callable[[], Any], name: str) -> DetectorSpec:
    """The declaration of a user's class, from its attributes."""
    encoder = hasattr(kind, "num_features")
    return DetectorSpec(
        name=name,
        family="user",
        paper=getattr(kind, "paper", "not stated"),
        bibtex=getattr(kind, "bibtex", ""),
        licence=getattr(kind, "licence", "not stated"),
        num_frames=getattr(kind, "num_frames", 6),
        side=getattr(kind, "side", 112),
        normalisation="the network's own",
        micro_batch=getattr(kind, "micro_batch", 2),
        frame_sampling=getattr(kind, "frame_sampling", "uniform"),
        frame_fit=getattr(kind, "frame_fit", "letterbox"),
        build=None if encoder else kind,
        build_trunk=(lambda _: kind()) if encoder else None,
    )


@dataclass(frozen=True)
class Crop:
    """Finds the part of a clip that a network shall see.

    ``find`` takes frames uint8 (T, H, W, 3), RGB, and gives left, top, width and height in pixels, of the whole clip or
    (T, 4) of each frame; or None where there is nothing to be found.
    """

    name: str
    find: Callable[[Any], Any]
    packages: tuple[str, ...] = ()  # that it needs beside the default installation; their versions count
    code: str = ""  # dotted name of its module
    remedy: str = ""  # how to get the packages


class CropRegistry(FileRegistry[Crop]):
    """Beside registered crops also a function of a user's file (``my_crop.py:function``)."""

    holds = "function"

    def get(self, name: str) -> Crop:
        """The crop; ``UsageError`` as ever, or where a user's file has no such function."""
        found = self._of_file(name)
        return super().get(name) if found is None else Crop(name, found)

    def load(self, name: str) -> Crop:
        """As ``get``; ``UsageError`` also where a package that it needs is not installed."""
        crop = super().load(name)
        missing = [package for package in crop.packages if importlib.util.find_spec(package) is None]
        if missing:
            raise UsageError(f"{self.kind} {name!r} needs {', '.join(missing)}, not installed. {crop.remedy}")
        return crop


DETECTORS = DetectorRegistry("model", "fvc_lib.detectors", "fvc.detectors")
CROPS = CropRegistry("crop", "fvc_lib.detectors")
# Layouts of corpora of videos and of images (``fvc_lib/corpus/listing.py``: ``CorpusLoader``).
CORPORA: Registry[Any] = Registry("corpus", "fvc_lib.corpus.sources", "fvc.corpora")
IMAGE_LAYOUTS: Registry[Any] = Registry("image_layout", "fvc_lib.corpus.sources.images")
# Classes of operations on clips, in the order in which a clip receives them.
AUGMENTATIONS: Registry[Any] = Registry("augmentation", "fvc_lib.video.augmentations")
# Families of forensic features (``fvc_lib/video/features/family.py``: ``FeatureFamily``).
FEATURES: Registry[Any] = Registry("feature family", "fvc_lib.video.features", "fvc.features")


class BackboneRegistry(Registry[Callable[[str], Any]]):
    """Networks on pictures alone; a backbone may also be any of the detectors that is a network on frames."""

    def is_own(self, name: str) -> bool:
        """Whether it is on pictures alone."""
        return self._canonical(name) in self._items or bool(self._own_files(name))

    def _own_files(self, name: str) -> list[str]:
        return [module for module, text in self._files() if f'BACKBONES.register("{_family(name)}"' in text]

    def load(self, name: str) -> Any:
        """As ``get``; of a detector its declaration."""
        return super().load(name) if self.is_own(name) else DETECTORS.load(name)

    def check(self, name: str) -> str:
        """``name`` itself, or as ``DETECTORS`` has it; ``UsageError`` where neither knows it."""
        if self.is_own(name):
            return name
        try:
            return DETECTORS.check(name)
        except UsageError as error:
            near = did_you_mean(name, self.names())
            known = f"Of pictures alone: {', '.join(self.names())}; or a network on frames: {error}"
            raise UsageError(f"{self.kind} {name!r}: unknown.{near} {known}") from error

    def identity(self, name: str) -> str:
        """What the name counts as."""
        return name if self.is_own(name) else DETECTORS.identity(name)

    def declared_in(self, name: str) -> list[str]:
        """Dotted names of the files that register it."""
        return self._own_files(name) or DETECTORS.declared_in(name)


# Each builds a backbone from what stands behind the colon of "torchvision:resnet50", or nothing.
BACKBONES = BackboneRegistry("backbone", "fvc_lib.detectors")
