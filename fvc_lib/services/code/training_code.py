"""Record which code trained a network, and name the functions that have changed since.

Each training notes the versions of the code that worked on it in ``code.json`` of its checkpoint folder. The functions
of a version stand in ``code_<version>.json`` next to the checkpoint folders. Library code that changed repeats no
training; a user's network file and the notebook's cells are inputs, and do.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from fvc_lib.services.atomic_files import sha256_of_json
from fvc_lib.services.code.code_version import code_behind, functions_of_module, in_words
from fvc_lib.services.records.digests import read_document, write_document

NOTE = "code.json"
FIELDS = "fvc_lib.services.config.RunConfig"  # a field changed there changes no run: params.yaml holds every value


def note_code(folder: Path, sources: Sequence[str], inputs: Mapping[str, Any]) -> None:
    """Note in ``folder`` that the code behind ``sources`` trains, as it is now.

    Args:
        folder: the training's checkpoint folder.
        sources: code that names the modules that train.
        inputs: what the user's files and the notebook's cells hold, as JSON values.
    """
    modules = {
        name: {"file": digest, "functions": functions_of_module(name)} for name, digest in code_behind(sources).items()
    }
    version = sha256_of_json({name: module["functions"] for name, module in modules.items()})[:16]
    if not (snapshot := _snapshot(folder, version)).exists():
        write_document(snapshot, {"modules": modules})
    versions = [each for each in _versions(folder) if each != version]
    write_document(folder / NOTE, {"inputs": inputs, "sources": list(sources), "versions": [*versions, version]})


def has_inputs(folder: Path, inputs: Mapping[str, Any]) -> bool:
    """Return whether the training in ``folder`` began with these ``inputs``."""
    return bool(read_document(folder / NOTE).get("inputs") == inputs)


def files_of_note(folder: Path) -> list[Path]:
    """Return the note of the training in ``folder`` and the snapshots that it names."""
    return [folder / NOTE, *(_snapshot(folder, version) for version in _versions(folder))]


def changed_functions(folder: Path) -> set[str]:
    """Return the functions that trained ``folder`` and differ now, by dotted name.

    Modules added since do not count: the code that trained calls none of them.
    """
    now = code_behind(read_document(folder / NOTE).get("sources", ()))
    return {
        function
        for version in _versions(folder)
        for name, module in _modules(folder, version).items()
        if module["file"] != now.get(name)
        for function in _differing(name, module["functions"], functions_of_module(name))
    }


def mixed_code(folders: Sequence[Path]) -> str:
    """Return the functions in which the trainings in ``folders`` differ, in words; empty if one code trained all."""
    versions = {version: folder for folder in folders for version in _versions(folder)}
    codes = [_modules(folder, version) for version, folder in versions.items()]
    return in_words(
        {
            function
            for first, second in combinations(codes, 2)
            for name in first.keys() & second.keys()
            for function in _differing(name, first[name]["functions"], second[name]["functions"])
        }
    )


def _differing(module: str, first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    changed = [f"{module}.{name}" for name in {*first, *second} if first.get(name) != second.get(name)]
    return [name for name in changed if name != FIELDS]


def _versions(folder: Path) -> list[str]:
    versions: list[str] = read_document(folder / NOTE).get("versions", [])
    return versions


def _snapshot(folder: Path, version: str) -> Path:
    return folder.parent / f"code_{version}.json"


def _modules(folder: Path, version: str) -> dict[str, Any]:
    modules: dict[str, Any] = read_document(_snapshot(folder, version)).get("modules", {})
    return modules
