"""Hash and import a user's own file (``my_net.py``) with the modules of its folder that it imports.

Those modules are loaded for this file alone; other imports are shared as usual.
"""

import ast
import builtins
import importlib.machinery
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from fvc_lib.services.atomic_files import content_digest, sha256_of_json


def code_of_file(path: Path) -> dict[str, str]:
    """Return the SHA-256 of a user's file and of the modules of its folder that it needs, by relative path.

    A package counts as a whole. The digest of a file that cannot be read is empty.
    """
    found: dict[Path, str] = {}
    todo = [path]
    while todo:
        file = todo.pop()
        if file in found:
            continue
        found[file] = content_digest(file)
        for name in _imported_names(file):
            beside = path.parent / name
            todo += [beside.with_suffix(".py")] if beside.with_suffix(".py").is_file() else sorted(beside.rglob("*.py"))
    return {str(file.relative_to(path.parent)): found[file] for file in sorted(found)}


def _imported_names(file: Path) -> set[str]:
    """Return the top-level names that ``file`` imports absolutely."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()
    nodes = list(ast.walk(tree))
    named = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    named += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in named} - {"", "fvc_lib"}  # ours counts stage by stage


def digest_of_file(path: Path) -> str:
    """Return the SHA-256 of a user's file and of the modules that it needs; empty without the file."""
    code = code_of_file(path)
    return sha256_of_json(code) if len(code) > 1 else code[path.name]


# What a user's file imports from its folder as ``helper`` is loaded as ``MODULE_beside.helper``, where the file itself
# is loaded as ``MODULE``.
_BESIDE = "_beside"
_IS_BESIDE = re.compile(rf"fvc_user_\w+_[0-9a-f]{{16}}{_BESIDE}\.")


def module_of(kind: type) -> str:
    """Return the module that defines ``kind``, by the name under which a user's file imports it."""
    return _IS_BESIDE.sub("", kind.__module__)


class UserCode(importlib.machinery.SourceFileLoader):
    """A loader whose modules import from the folder of the user's file first."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module."""
        main = module.__name__.partition(".")[0].removesuffix(_BESIDE)
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": sys.modules[main + _BESIDE].import_of_user}
        super().exec_module(module)


class _BesideFinder:
    """A finder of the modules next to users' files."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if _IS_BESIDE.match(name) else None
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = UserCode(name, spec.loader.path)
        return spec


def know_beside(main: str, path: Path) -> None:
    """Make the package of the modules next to the user's file ``path``, whose module is called ``main``."""
    if _BesideFinder not in sys.meta_path:
        sys.meta_path.insert(0, _BesideFinder)
    package: Any = ModuleType(main + _BESIDE)
    package.__path__ = [str(path.parent)]
    named = {Path(each).parts[0].removesuffix(".py") for each in code_of_file(path)}
    own = {name for name in named if _is_module(path.parent / name)}

    def import_of_user(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        first = name.partition(".")[0]
        if level or first not in own:
            return builtins.__import__(name, globals, locals, fromlist, level)
        found = builtins.__import__(f"{package.__name__}.{name}", globals, locals, fromlist)
        return found if fromlist else sys.modules[f"{package.__name__}.{first}"]

    package.import_of_user = import_of_user
    sys.modules.setdefault(package.__name__, package)


def _is_module(path: Path) -> bool:
    """Return whether ``import`` finds it: a folder without ``__init__.py`` yields to an installed package."""
    if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file():
        return True
    installed = importlib.machinery.PathFinder.find_spec(path.name)
    return installed is None or installed.origin is None
