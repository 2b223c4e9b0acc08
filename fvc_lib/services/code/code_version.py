"""Which code of ours a notebook depends on: the modules it names and all that they name, hashed as they are now.

So that mending the terminal does not repeat a training, and mending the training does. A module counts when its
dotted name stands anywhere in a source, not only after ``import``: children are started by names in strings, such
as ``"fvc_lib.video.clips.making:make_original"``, and a registry's files by the name of their package with ``.*``,
which stands for every module in it. A name in a comment counts too; that repeats a stage once too often, and never
once too seldom. Imports are absolute in this project (a test keeps them so); relative ones are not followed.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fvc_lib import CHECKOUT
from fvc_lib.services.atomic_files import sha256_of_json
from fvc_lib.services.errors import UsageError
from fvc_lib.services.records.digests import content_hash

# What a notebook's first call never runs when the runner started it: the run is found, begun and locked before, by the
# runner itself. A test shows that a headless stage opens without it.
NOT_RUN_HEADLESS = frozenset({"fvc_lib.execution.run.which_run"})


@dataclass(frozen=True)
class _Source:
    """One source file as it was read: its digest and the dotted names in it."""

    digest: str
    names: frozenset[str]


def helpers_hash(sources: Iterable[str], *, package: Path | None = None) -> str:
    """Hex SHA-256 over every module of ours that ``sources`` (code, say of a notebook's cells) depend on, as it is now.

    What a headless notebook does not run does not count; ``package`` is a folder, by default ``fvc_lib``'s.
    """
    return sha256_of_json(code_behind(sources, package=package))


def code_behind(
    sources: Iterable[str], *, package: Path | None = None, leaving_out: Collection[str] = NOT_RUN_HEADLESS
) -> dict[str, str]:
    """The same module by module: hex SHA-256 by dotted name, sorted; so that a change can be named."""
    package = package or CHECKOUT / "fvc_lib"
    files = _files(package)
    named = [module for source in sources for module in _modules(names_in(source, package.name), files)]
    closure = _closure(named, files, package.name, leaving_out)
    return {name: closure[name].digest for name in sorted(closure)}


@cache
def code_hash(module: str, within: str | tuple[str, ...] = "fvc_lib") -> str:
    """Hex SHA-256 over ``module`` and all that it depends on, as far as it lies in the packages ``within``.

    What mended code makes must not be taken for what the code before it made: clips and probes are stored under it.

    Raises:
        OSError: a module cannot be read.
    """
    within = (within,) if isinstance(within, str) else within
    files = _files(CHECKOUT / "fvc_lib")
    inside = {name: file for name, file in files.items() if any(f"{name}.".startswith(f"{part}.") for part in within)}
    if module not in inside:
        raise ValueError(f"code_hash: got module {module!r}, wanted one that lies in {', '.join(within)}")
    return sha256_of_json({name: source.digest for name, source in _closure([module], inside, "fvc_lib").items()})


def notebook_sources(path: Path) -> list[str]:
    """The code cells of a notebook.

    Raises:
        UsageError: the file is missing or is no notebook.
    """
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(f"notebook {str(path)!r} is not a readable notebook: {error}") from error


def names_in(source: str, package: str) -> frozenset[str]:
    """Every dotted name under ``package`` that ``source`` could mean: ``a.b``, and ``a.b.c`` of ``from a.b import c``.

    Found by two patterns and not by parsing, which took 0.4 s for this package's 23,000 lines and 0.03 s so.
    """
    dotted, imports = _patterns(package)
    names = set(dotted.findall(source))
    for match in imports.finditer(source):
        names.update(f"{match['module']}.{word}" for word in re.findall(r"\w+", match["names"]))
    return frozenset(names)


@cache
def _patterns(package: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    name = rf"(?<![\w.]){re.escape(package)}(?!\w)(?:\.\w+)*(?:\.\*)?"
    # What is imported: a parenthesis over several lines, comments in it, or the rest of the (continued) line.
    imported = r"(?P<names>\((?:[^()#]|#[^\n]*)*\)|(?:[^\n\\]|\\\n)*)"
    return re.compile(name), re.compile(rf"\bfrom[\s\\]+(?P<module>{name})[\s\\]+import\b[ \t\\\n]*{imported}")


def _closure(
    modules: Iterable[str], files: Mapping[str, Path], package: str, leaving_out: Collection[str] = ()
) -> dict[str, _Source]:
    found: dict[str, _Source] = {}
    todo = list(modules)
    while todo:
        module = todo.pop()
        if module not in found and module not in leaving_out:
            found[module] = _read(files[module], package)
            todo += _modules(found[module].names, files)
    return found


def _modules(names: Iterable[str], files: Mapping[str, Path]) -> Iterator[str]:
    """The modules that importing ``names`` runs: of ``a.b.c`` the packages ``a`` and ``a.b`` as well.

    ``a.b.*`` stands for all modules below ``a.b``: they register themselves, and whoever writes this may use any.
    """
    for name in names:
        if name.endswith(".*"):
            yield from (module for module in files if f"{module}.".startswith(name[:-1]))
            continue
        parts = name.split(".")
        yield from (module for end in range(1, len(parts) + 1) if (module := ".".join(parts[:end])) in files)


def _files(package: Path) -> dict[str, Path]:
    """Each module's file by dotted name; none of a folder that cannot be imported, as Jupyter's copies of files are."""
    files = {(package.name, *path.relative_to(package).with_suffix("").parts): path for path in package.rglob("*.py")}
    return {
        ".".join(parts[:-1] if parts[-1] == "__init__" else parts): path
        for parts, path in files.items()
        if all(part.isidentifier() for part in parts[1:-1])
    }


def _read(path: Path, package: str) -> _Source:
    digest = content_hash(path)
    return _Source(digest, _names_at(path, digest, package))


@cache
def _names_at(path: Path, digest: str, package: str) -> frozenset[str]:
    """Of the content with this ``digest``."""
    return names_in(path.read_text(encoding="utf-8", errors="replace"), package)
