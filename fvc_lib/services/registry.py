"""Registries: what can be chosen by name, filled by the files of a folder and by other packages' entry points.

A file registers what it defines when it is imported, and a registry imports the files of its folder when somebody first
needs an item of it, so adding an item means adding one file. The registries of this module stand empty until then:
services import no other room.
"""

import importlib
import importlib.metadata
import importlib.util
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, overload

from fvc_lib.services.errors import UsageError, did_you_mean

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
        self._sources: dict[str, tuple[str, int]] = {}  # file and line
        self._filled = False

    @overload
    def register(self, name: str, *, aliases: Sequence[str] = ()) -> Callable[[T], T]: ...
    @overload
    def register(self, name: str, item: T, *, aliases: Sequence[str] = ()) -> T: ...
    @overload
    def register(self, name: T) -> T: ...
    def register(self, name: Any, item: Any = None, *, aliases: Sequence[str] = ()) -> Any:
        """Register ``item`` under ``name``; without an item a decorator; or an item with ``name`` (and ``aliases``).

        Args:
            name: the name, or an item that carries its own; ``timm:NAME`` stands for every name behind ``timm:``.
            item: what is registered.
            aliases: further names under which ``get`` finds it.

        Raises:
            UsageError: the name is taken by another place in the code; the message names both.
        """
        frame = sys._getframe(1)
        source = (frame.f_code.co_filename, frame.f_lineno)
        if not isinstance(name, str):
            return self._put(name.name, name, getattr(name, "aliases", ()), source)
        if item is not None:
            return self._put(name, item, aliases, source)
        return lambda decorated: self._put(name, decorated, aliases, source)

    def _put(self, name: str, item: T, aliases: Sequence[str], source: tuple[str, int]) -> T:
        for each in (name, *aliases):
            # The same line again is a reloaded module, a cell of a notebook is run as often as one likes.
            taken = self._sources.get(each, source)
            if taken != source and "ipykernel" not in source[0]:
                raise UsageError(
                    f"{self.kind} {each!r} is registered twice: in {taken[0]}, line {taken[1]}, and in {source[0]}, "
                    f"line {source[1]}. Rename one of them."
                )
        for each in (name, *aliases):
            self._sources[each] = source
        self._items[name] = item
        self._aliases.update(dict.fromkeys(aliases, name))
        return item

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

    def declared_in(self, name: str) -> list[str]:
        """Dotted names of the folder's files that register ``name`` as a literal; found without importing them."""
        declared = re.compile(rf'(\.register\(\s*|\bname\b[^\n=(]*=\s*|\baliases=\([^)]*)"{re.escape(_family(name))}"')
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
        for module, text in self._files():
            if ".register" in text:
                self._attempt(module, lambda module=module: importlib.import_module(module))  # type: ignore[misc]
        for point in self._entry_points():
            self._attempt(point.name, lambda point=point: self._load(point))  # type: ignore[misc]

    def _attempt(self, name: str, load: Callable[[], object]) -> None:
        try:
            load()
        except Exception as error:  # noqa: BLE001 - one broken plug-in must not stop the others, whatever it raises
            self.broken[name] = f"{type(error).__name__}: {error}"
            _logger.warning("%s %s is left out: %s", self.kind, name, self.broken[name])

    def _load(self, point: importlib.metadata.EntryPoint) -> None:
        loaded = point.load()
        if point.name not in self._sources and not isinstance(loaded, ModuleType):
            self._put(point.name, loaded, (), (point.value, 0))

    def _entry_points(self) -> Sequence[importlib.metadata.EntryPoint]:
        return tuple(importlib.metadata.entry_points(group=self._group)) if self._group else ()

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
class DetectorSpec:
    """A network on clips, as its file declares it.

    ``build`` gives the network, initialised from torch's current random state. It takes frames uint8 (B, T, 3, H, W),
    gives logits (B,), positive for fake, and names in ``recomputable_blocks()`` the parts whose activations gradient
    checkpointing may compute again. ``build_trunk`` gives one of its kind for what a clip shows (task video_text), with
    ``frame_features`` from frames to (B, T, ``frame_feature_size``); None: there is none.
    """

    name: str  # what the parameter ``model`` calls it
    family: str  # where it comes from: own, or a package or group of papers
    paper: str  # where it is described
    licence: str  # of its code, and of its weights where it has any
    num_frames: int  # of the clips it was made for
    side: int  # theirs, in pixels
    normalisation: str  # of the pixels, in words; the network does it, from uint8
    micro_batch: int  # clips in memory at once where ``batch_size`` is 0: 1 to 8, safe on a small machine
    build: Callable[[], Any]
    build_trunk: Callable[[], Any] | None = None
    aliases: tuple[str, ...] = ()  # further names

    def num_parameters(self) -> int:
        """How many trainable numbers the network has. Builds it without memory or random draws."""
        import torch  # takes a second to load

        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.build().parameters())


DETECTORS: Registry[DetectorSpec] = Registry("model", "fvc_lib.detectors", "fvc.detectors")
# Layouts of corpora of videos and of images (``fvc_lib/corpus/listing.py``: ``CorpusLoader``).
CORPORA: Registry[Any] = Registry("corpus", "fvc_lib.corpus.sources", "fvc.corpora")
IMAGE_LAYOUTS: Registry[Any] = Registry("image_layout", "fvc_lib.corpus.sources.images")
# Classes of operations on clips, in the order in which a clip receives them.
AUGMENTATIONS: Registry[Any] = Registry("augmentation", "fvc_lib.video.augmentations")
# Networks on pictures; each builds a backbone from what stands behind the colon of "timm:resnet50", or nothing.
BACKBONES: Registry[Callable[[str], Any]] = Registry("backbone", "fvc_lib.detectors")
