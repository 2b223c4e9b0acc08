"""Registries: what can be chosen by name, filled by the files of a folder and by other packages' entry points.

A file registers what it defines when it is imported, and a registry imports the files of its folder when somebody first
needs an item of it, so adding an item means adding one file. The registries of this module stand empty until then:
services import no other room.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
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
            name: the name, or an item that carries its own.
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
        """The item called ``name``.

        Raises:
            UsageError: no such item; the message has the nearest name, all known ones and what could not be imported.
        """
        if self._aliases.get(name, name) not in self._items:
            self._fill()
        canonical = self._aliases.get(name, name)
        if canonical in self._items:
            return self._items[canonical]
        failed = "".join(f" Not loaded: {each} ({reason})." for each, reason in self.broken.items())
        near = did_you_mean(name, [*self._items, *self._aliases])
        raise UsageError(f"{self.kind} {name!r}: unknown.{near} Known: {', '.join(self._items) or 'none'}.{failed}")

    def check(self, name: str) -> str:
        """``name`` itself, where some file of the folder or entry point has it; nothing is imported to see that.

        Raises:
            UsageError: as ``get``.
        """
        declared = f'"{name}"'
        if name not in self._sources and name not in {point.name for point in self._entry_points()}:
            texts = (path.read_text(encoding="utf-8") for path in self._files())
            if not any(declared in text for text in texts):
                self.get(name)
        return name

    def names(self) -> list[str]:
        """Names of all items, without aliases."""
        self._fill()
        return list(self._items)

    def items(self) -> list[tuple[str, T]]:
        """Names and items."""
        self._fill()
        return list(self._items.items())

    def _fill(self) -> None:
        """Import whatever registers items; what fails is logged, kept in ``broken``, and stops nothing else."""
        if self._filled:
            return
        self._filled = True
        for module in self._modules():
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
        if point.name not in self._sources and not isinstance(loaded, type(sys)):
            self._put(point.name, loaded, (), (point.value, 0))

    def _entry_points(self) -> Sequence[importlib.metadata.EntryPoint]:
        return tuple(importlib.metadata.entry_points(group=self._group)) if self._group else ()

    def _modules(self) -> Iterator[str]:
        """Dotted names of the folder's files, sorted; a broken sub-package is reported like a broken file."""
        if not self._folder:
            return
        package = importlib.import_module(self._folder)
        folders = [str(folder) for folder in getattr(package, "__path__", ())]
        found = pkgutil.walk_packages(folders, f"{self._folder}.", onerror=lambda name: None)
        yield from sorted(each.name for each in found if not each.ispkg)

    def _files(self) -> Iterator[Path]:
        """The folder's files, found without importing them."""
        spec = importlib.util.find_spec(self._folder) if self._folder else None
        if spec is None:
            return
        if spec.submodule_search_locations is None:
            yield Path(spec.origin or "")
        for folder in spec.submodule_search_locations or ():
            yield from sorted(Path(folder).rglob("*.py"))
