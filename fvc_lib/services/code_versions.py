"""Find the library modules that a source text depends on, and compare versions of their code function by function.

A source text depends on every module that it names, and on the modules that those modules name, recursively. A name in
a string counts, because child processes are started as ``"fvc_lib.video.clips.making:make_original"``. A package
followed by ``.*``, also in a comment, stands for all its modules. Code that uses every item of a registry names the
registry's folder this way. Imports in this project are absolute.

Every training records the versions of the code that trained it, with digests of their functions, in ``code.json`` of
its checkpoint folder. Digests of functions leave out docstrings and comments. A finished training does not run again
when only library code has changed. It runs again when the user's network file or a notebook cell has changed.
"""

import ast
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from fvc_lib import CHECKOUT
from fvc_lib.services.atomic_files import content_hash, sha256_of_json
from fvc_lib.services.records.digests import read_document, write_document

# Modules that a notebook run by the runner does not execute, because the runner finds and locks the run before.
NOT_RUN_HEADLESS = frozenset({"fvc_lib.execution.run.which_run"})
_MOST_NAMED = 4


def code_behind(sources: Iterable[str], *, package: Path | None = None) -> dict[str, str]:
    """Return the SHA-256 of the file of every module that ``sources`` depend on, sorted by dotted module name.

    Args:
        sources: source texts, for example a notebook's cells.
        package: path of the folder ``fvc_lib``; None: that of this checkout.
    """
    package = package or CHECKOUT / "fvc_lib"
    files = _files(package)
    return {name: content_hash(files[name]) for name in sorted(_closure(sources, files))}


@cache
def code_hash(module: str, within: str | tuple[str, ...] = "fvc_lib") -> str:
    """Return one SHA-256 of ``module`` and the modules that it depends on, as a key for caches.

    Args:
        module: dotted name of the module.
        within: dotted names of packages or modules; dependencies outside them are left out.

    Raises:
        OSError: a module cannot be read.
        ValueError: ``module`` is not in ``within``.
    """
    within = (within,) if isinstance(within, str) else within
    files = {
        name: file
        for name, file in _files(CHECKOUT / "fvc_lib").items()
        if any(f"{name}.".startswith(f"{part}.") for part in within)
    }
    if module not in files:
        raise ValueError(f"code_hash: got module {module!r}, wanted one that lies in {', '.join(within)}")
    return sha256_of_json({name: tree_hash(name) for name in sorted(_closure([module], files))})


def tree_hash(module: str) -> str:
    """Return a digest of the code of ``module`` without docstrings and comments; empty if the module does not exist."""
    functions = functions_of_module(module)
    return sha256_of_json(functions)[:16] if functions else ""


_PARSING = threading.Lock()  # in Python 3.11 threads that parse at once may raise SystemError (CPython issue 106905)


def functions_of_module(module: str) -> dict[str, str]:
    """Return a digest of each function, method and class of ``module``, by name (``functions_in``).

    ``module`` is a dotted name in ``fvc_lib``. The dict is empty if the module does not exist.
    """
    parts = CHECKOUT.joinpath(*module.split("."))
    path = next((path for path in (parts.with_suffix(".py"), parts / "__init__.py") if path.is_file()), None)
    return _functions_at(path, content_hash(path)) if path else {}


@cache
def _functions_at(path: Path, _digest: str) -> dict[str, str]:
    """Return a digest of each function and method in the file at ``path``, as ``functions_in`` does.

    ``_digest`` is the digest of the file's content. The function does not use it, but results are cached by both
    arguments, so a changed file is read again.
    """
    return functions_in(path.read_text(encoding="utf-8"))


def functions_in(source: str) -> dict[str, str]:
    """Return a digest of each top-level function and each method in ``source``, without docstrings and comments.

    Keys are ``function`` and ``Class.method``. The code of a class outside its methods has the key ``Class``. The code
    outside functions and classes has the key ``module``. Text that Python cannot parse, such as a cell with magic
    commands, has one digest of the text, under ``module``.
    """
    try:
        with _PARSING:
            tree = ast.parse(source)
    except SyntaxError:
        return {"module": sha256_of_json(source)[:12]}
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            values = [getattr(part, "value", None) if isinstance(part, ast.Expr) else None for part in node.body]
            is_text = [isinstance(value, ast.Constant) and isinstance(value.value, str) for value in values]
            node.body = [part for part, leave_out in zip(node.body, is_text, strict=True) if not leave_out]
    found: dict[str, list[str]] = {"module": []}
    for node in tree.body:
        name = node.name if isinstance(node, ast.ClassDef | ast.FunctionDef) else "module"
        if isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            node.body = [part for part in node.body if part not in methods]
            for method in methods:
                found.setdefault(f"{name}.{method.name}", []).append(ast.dump(method))
        found.setdefault(name, []).append(ast.dump(node))
    return {name: sha256_of_json(dumps)[:12] for name, dumps in found.items()}


def in_words(names: Iterable[str]) -> str:
    """Return a text with the first four of ``names``, sorted and joined by commas; further names as ``and N more``.

    The prefix ``fvc_lib.`` of a name is left out.
    """
    short = [name.removeprefix("fvc_lib.") for name in sorted(names)]
    more = [f"and {len(short) - _MOST_NAMED} more"] if len(short) > _MOST_NAMED else []
    return ", ".join(short[:_MOST_NAMED] + more)


_NAME = r"(?<![\w.])fvc_lib(?!\w)(?:\.\w+)*(?:\.\*)?"
# The imported names: a parenthesis over several lines, with comments, or the rest of the (continued) line.
_IMPORTED = r"(?P<names>\((?:[^()#]|#[^\n]*)*\)|(?:[^\n\\]|\\\n)*)"
_IMPORT = re.compile(rf"\bfrom[\s\\]+(?P<module>{_NAME})[\s\\]+import\b[ \t\\\n]*{_IMPORTED}")


def names_in(source: str) -> frozenset[str]:
    """Return every dotted name in the text ``source`` that begins with ``fvc_lib``.

    The statement ``from MODULE import NAME`` gives two names: ``MODULE`` and ``MODULE.NAME``. Regular expressions find
    the names ten times as fast as a parser.
    """
    names = set(re.findall(_NAME, source))
    for match in _IMPORT.finditer(source):
        names.update(f"{match['module']}.{word}" for word in re.findall(r"\w+", match["names"]))
    return frozenset(names)


def _closure(sources: Iterable[str], files: Mapping[str, Path]) -> set[str]:
    found: set[str] = set()
    todo = [name for source in sources for name in names_in(source)]
    while todo:
        name = todo.pop()
        if name.endswith(".*"):
            modules = [module for module in files if f"{module}.".startswith(name[:-1])]
        else:  # importing a.b.c runs the packages a and a.b as well
            parts = name.split(".")
            modules = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        for module in modules:
            if module in files and module not in found and module not in NOT_RUN_HEADLESS:
                found.add(module)
                todo += _names_at(files[module], content_hash(files[module]))
    return found


def _files(package: Path) -> dict[str, Path]:
    """Return the path of every module in the folder ``package``, by dotted name.

    Folders that cannot be imported, such as ``.ipynb_checkpoints``, are left out.
    """
    files: dict[str, Path] = {}
    for path in package.rglob("*.py"):
        in_package = path.relative_to(package).with_suffix("").parts
        parts = (package.name, *in_package)
        if all(part.isidentifier() for part in parts[1:-1]):
            module = parts[:-1] if parts[-1] == "__init__" else parts
            files[".".join(module)] = path
    return files


@cache
def _names_at(path: Path, _digest: str) -> frozenset[str]:
    """Return the dotted names in the file at ``path`` that begin with ``fvc_lib``, as ``names_in`` does.

    ``_digest`` is the digest of the file's content. The function does not use it, but results are cached by both
    arguments, so a changed file is read again.
    """
    return names_in(path.read_text(encoding="utf-8", errors="replace"))


NOTE = "code.json"
FIELDS = "fvc_lib.services.config.RunConfig"  # a field changed there changes no run: params.yaml holds every value


def note_code(folder: Path, sources: Sequence[str], inputs: Mapping[str, Any]) -> None:
    """Record the current version of the library code that ``sources`` depend on, in ``code.json`` of ``folder``.

    Earlier versions in the file stay, because a resumed training may have used several.

    Args:
        folder: the training's checkpoint folder.
        sources: source texts that name the modules that train.
        inputs: the contents of the user's files and the notebook's cells, as JSON values by name.
    """
    version = {
        name: {"file": digest, "functions": functions_of_module(name)} for name, digest in code_behind(sources).items()
    }
    versions = [known for known in _versions(folder) if known != version]
    write_document(folder / NOTE, {"inputs": inputs, "versions": [*versions, version]})


def has_inputs(folder: Path, inputs: Mapping[str, Any]) -> bool:
    """Return whether ``inputs`` equal the inputs that ``note_code`` recorded for the training in ``folder``."""
    return bool(read_document(folder / NOTE).get("inputs") == inputs)


def changed_functions(folder: Path) -> set[str]:
    """Return the dotted names of the functions that have changed since the training in ``folder`` used them.

    The versions in ``code.json`` are compared with the library's current files. Modules that were added since are left
    out, because the recorded code calls none of them.
    """
    files = _files(CHECKOUT / "fvc_lib")
    changed = set[str]()
    for version in _versions(folder):
        for name, module in version.items():
            if name not in files or module["file"] != content_hash(files[name]):
                changed.update(_differing(name, module["functions"], functions_of_module(name)))
    return changed


def mixed_code(folders: Sequence[Path]) -> str:
    """Return a text with names of functions whose code differs between the trainings in ``folders``.

    At most four functions are named, and further ones counted. The text is empty if all trainings used the same code.
    """
    versions = [version for folder in folders for version in _versions(folder)]
    changed = set[str]()
    for first, second in combinations(versions, 2):
        for name in first.keys() & second.keys():
            changed.update(_differing(name, first[name]["functions"], second[name]["functions"]))
    return in_words(changed)


def _differing(module: str, first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    changed = [f"{module}.{name}" for name in {*first, *second} if first.get(name) != second.get(name)]
    return [name for name in changed if name != FIELDS]


def _versions(folder: Path) -> list[dict[str, Any]]:
    versions: list[dict[str, Any]] = read_document(folder / NOTE).get("versions", [])
    return versions
