"""Which code makes pixels: what mended code makes must not be taken for what the code before it made."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from fvc_lib.services.atomic_files import sha256_of_file, sha256_of_json

_PACKAGE = "fvc_lib.video"


def modules_behind(name: str, folder: Path | None = None) -> tuple[str, ...]:
    """Module ``name`` of this room and all of the room that it imports, directly or not, sorted.

    Found by parsing, so that a module which is split off counts without being listed anywhere.

    Args:
        name: a module's name without package and suffix, for example ``decode``.
        folder: where the room's sources are; none: here.
    """
    folder = folder or Path(__file__).parent
    found: set[str] = set()
    todo = [name]
    while todo:
        module = todo.pop()
        if module not in found:
            found.add(module)
            todo += _imports((folder / f"{module}.py").read_text(encoding="utf-8"), folder)
    return tuple(sorted(found))


@cache
def code_hash(name: str) -> str:
    """Hex SHA-256 over the sources of ``modules_behind(name)``."""
    folder = Path(__file__).parent
    return sha256_of_json({module: sha256_of_file(folder / f"{module}.py") for module in modules_behind(name)})


def _imports(source: str, folder: Path) -> set[str]:
    """Modules of this room that ``source`` imports, at any depth of the file."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    inside = {name.removeprefix(f"{_PACKAGE}.").split(".")[0] for name in names if name.startswith(f"{_PACKAGE}.")}
    return {name for name in inside if (folder / f"{name}.py").is_file()}
