"""Whether a finished stage is still true: what it depended on then against what is there now."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import fvc_lib
from fvc_lib.execution.notebook_files import STAGE_PARAMETERS, Notebook
from fvc_lib.execution.stages import Task
from fvc_lib.services.atomic_files import sha256_of_file, sha256_of_json, write_json
from fvc_lib.services.config import MAY_CHANGE_ON_RESUME, RunConfig
from fvc_lib.services.run_paths import RunPaths


@dataclass(frozen=True)
class Fingerprint:
    """Hashes of everything a stage's result depends on."""

    parameters: dict[str, object]
    inputs: dict[str, str]
    notebook: str
    library: str
    corpus: str


@dataclass(frozen=True)
class StageRecord:
    """Written when a stage has finished: its fingerprint and the content of its outputs."""

    fingerprint: Fingerprint
    outputs: dict[str, str]


def fingerprint_of(task: Task, notebook: Notebook, run: RunPaths, config: RunConfig) -> Fingerprint:
    """What ``task`` would depend on if it ran now. Missing inputs hash as empty text."""
    values = config.model_dump(mode="json")
    names = set(notebook.parameters) - set(STAGE_PARAMETERS) - MAY_CHANGE_ON_RESUME - {"corpus"}
    return Fingerprint(
        parameters={name: values[name] for name in sorted(names)},
        inputs=_hashes(task.stage.inputs(run, task.fold), run),
        notebook=notebook.source_hash,
        library=library_hash(),
        corpus=corpus_hash(config.corpus) if "corpus" in notebook.parameters else "",
    )


def record_finished(task: Task, fingerprint: Fingerprint, run: RunPaths) -> None:
    """Write the record that ``task`` is finished."""
    record = StageRecord(fingerprint, _hashes(task.stage.outputs(run, task.fold), run))
    write_json(run.stage_checkpoint(task.stage.name, task.fold), asdict(record))


def read_record(path: Path) -> StageRecord | None:
    """The record at ``path``; None where there is none or it is not one of ours."""
    try:
        document = json.loads(path.read_text())
        return StageRecord(Fingerprint(**document["fingerprint"]), document["outputs"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def reason_to_run(task: Task, now: Fingerprint, run: RunPaths) -> str | None:
    """Why ``task`` has to run, in words; None when it is finished and nothing it depended on has changed."""
    record = read_record(run.stage_checkpoint(task.stage.name, task.fold))
    if record is None:
        return "not finished yet"
    then = record.fingerprint
    changed = sorted(
        name for name in {*then.parameters, *now.parameters} if then.parameters.get(name) != now.parameters.get(name)
    )
    if changed:
        values = ", ".join(f"{n} {then.parameters.get(n)!r} -> {now.parameters.get(n)!r}" for n in changed)
        return f"parameters changed: {values}"
    if then.corpus != now.corpus:
        return "the corpus changed"
    inputs = sorted(name for name in {*then.inputs, *now.inputs} if then.inputs.get(name) != now.inputs.get(name))
    if inputs:
        return f"input changed: {', '.join(inputs)}"
    if then.notebook != now.notebook:
        return "the notebook's code changed"
    if then.library != now.library:
        return "fvc_lib changed"
    outputs = _hashes(task.stage.outputs(run, task.fold), run)
    stale = sorted(name for name, digest in record.outputs.items() if outputs.get(name) != digest)
    return f"output missing or changed: {', '.join(stale)}" if stale else None


def library_hash(rooms: Sequence[str] = ("",)) -> str:
    """Over every source file of ``fvc_lib`` (or some rooms of it), as they are now.

    Coarse, so that no change of code can hide behind a finished stage.
    """
    root = Path(fvc_lib.__file__).parent
    files = [path for room in rooms for path in sorted((root / room).rglob("*.py"))]
    return sha256_of_json({str(path.relative_to(root)): sha256_of_file(path) for path in files})


def corpus_hash(corpus: str) -> str:
    """Over what a corpus lists: a manifest's content, or names, sizes and times of a folder's files.

    Moving a corpus as it is does not change it. The sample corpus (an empty name) is ``fvc_lib``'s own.
    """
    path = Path(corpus)
    if not corpus:
        return ""
    if not path.is_dir():
        return sha256_of_file(path) if path.is_file() else "missing"
    found = {}
    for folder, _, names in os.walk(path):
        for name in names:
            file = Path(folder) / name
            status = file.lstat()
            found[os.fsencode(file.relative_to(path)).hex()] = [status.st_size, status.st_mtime_ns]
    return sha256_of_json(found)


def _hashes(paths: Iterable[Path], run: RunPaths) -> dict[str, str]:
    return {str(path.relative_to(run.root)): sha256_of_file(path) if path.is_file() else "" for path in paths}
