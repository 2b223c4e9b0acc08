"""What a stage that has finished or was stopped left in a run: whether it is still true, and how it makes room.

A finished stage is true while everything it depended on is what it was then. What a stage wrote before it runs anew is
moved, never deleted, and never shown as current.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fvc_lib.execution.plan.stages import STAGE_PARAMETERS, Notebook, Task
from fvc_lib.services.atomic_files import path_to_text, sha256_of_json, write_json
from fvc_lib.services.code.code_version import code_behind, helpers_hash, notebook_sources
from fvc_lib.services.config import DECLARED, RunConfig
from fvc_lib.services.errors import UsageError
from fvc_lib.services.parameters import values_unsaid
from fvc_lib.services.records.digests import content_hash, is_log, listed, read_document, write_document
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tar_patterns import fixed_folder, is_pattern, tars_of
from fvc_lib.services.tasks import STAGES, TASKS


@dataclass(frozen=True)
class Fingerprint:
    """Hashes of everything a stage's result depends on."""

    parameters: dict[str, object]  # what the notebook reads of the configuration
    inputs: dict[str, str]  # content of each file it reads of the run, by path in the run folder
    notebook: str  # its code cells
    helpers: dict[str, str]  # content of each module of ours behind it, by dotted name
    corpus: str  # what the corpus lists, where the notebook reads it


@dataclass(frozen=True)
class StageRecord:
    """Written when a stage has finished: its fingerprint, and size and digest of each file that it wrote."""

    fingerprint: Fingerprint | None  # None: of a straight pass, which tracks nothing
    files: dict[str, dict[str, Any]]  # by path in the run folder, ``num_bytes`` and ``sha256``


def fingerprint_of(task: Task, notebook: Notebook, run: RunPaths, config: RunConfig) -> Fingerprint:
    """What ``task`` would depend on if it ran now. Missing inputs hash as empty text.

    Of the parameters these are the notebook's own, and where it trains all that the weights depend on, whether or not
    its parameters cell offers them.
    """
    own = set(notebook.parameters) - set(STAGE_PARAMETERS)
    names = {name for name in own if not DECLARED[name].resume and not DECLARED[name].path}
    if task.stage.trains:
        names |= config.training_values().keys()
    return Fingerprint(
        parameters={name: config.identity(name) for name in sorted(names)},
        inputs=_hashes(_inputs(task, run, config), run),
        notebook=notebook.source_hash,
        helpers=code_behind([*notebook_sources(notebook.path), *config.code_chosen(notebook.parameters)]),
        corpus=_corpora_hash(config) if "corpus" in notebook.parameters else "",
    )


def _inputs(task: Task, run: RunPaths, config: RunConfig) -> list[Path]:
    """What the task reads, and of stages that it needs for this configuration alone what they write."""
    further = task.stage.reads(config) - set(task.stage.needs)
    written = [path for stage in STAGES if stage.name in further for path in stage.outputs(run, None)]
    return [*task.stage.inputs(run, task.fold), *written]


def record_finished(task: Task, fingerprint: Fingerprint | None, run: RunPaths) -> None:
    """Write the record that ``task`` is finished, with all that it wrote and a later command reads.

    Checkpoints have digests of their own.
    """
    folder = run.training_checkpoints(task.stage.name, task.fold)
    of_training = sorted(folder.rglob("*.json")) if task.stage.trains else []
    files = listed([*task.stage.outputs(run, task.fold), *of_training, *_logs(run, task)], run.root)
    write_document(run.stage_checkpoint(task.stage.name, task.fold), asdict(StageRecord(fingerprint, files)))


def read_record(path: Path) -> StageRecord | None:
    """The record at ``path``; None where there is none, or it is damaged, of a straight pass or of another version."""
    try:
        document = read_document(path)
        return StageRecord(Fingerprint(**document["fingerprint"]), document["files"])
    except (KeyError, TypeError):
        return None


def reason_to_run(task: Task, now: Fingerprint, run: RunPaths) -> str | None:
    """Why ``task`` has to run, in words; None when it is finished and nothing it depended on has changed."""
    record = read_record(run.stage_checkpoint(task.stage.name, task.fold))
    if record is None or record.fingerprint is None:
        return "not finished yet"
    then = record.fingerprint
    unsaid = values_unsaid(task.stage.tasks[0])  # of parameters that one of the two records is too old, or new, for
    before, asked = ({name: unsaid.get(name) for name in {*then.parameters, *now.parameters}} | one
                     for one in (then.parameters, now.parameters))  # fmt: skip
    if changed := _differing(before, asked):
        values = ", ".join(f"{name} {before[name]!r} -> {asked[name]!r}" for name in changed)
        return f"parameters changed: {values}"
    if then.corpus != now.corpus:
        return "the corpus changed"
    if inputs := _differing(then.inputs, now.inputs):
        return f"input changed: {', '.join(inputs)}"
    if then.notebook != now.notebook:
        return "the notebook's code changed"
    if then.helpers != now.helpers:
        return f"code changed: {_some(_differing(then.helpers, now.helpers))}"
    known = {name: each["sha256"] for name, each in record.files.items() if not is_log(name)}
    outputs = _hashes(task.stage.outputs(run, task.fold), run)
    there = outputs | {name: digest for name in known if (digest := content_hash(run.root / name))}
    stale = sorted(name for name, digest in there.items() if known.get(name) != digest)
    return f"output missing or changed: {', '.join(stale)}" if stale else None


def _differing(then: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    return sorted(name for name in {*then, *now} if then.get(name) != now.get(name))


def _some(names: Sequence[str], most: int = 3) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _corpora_hash(config: RunConfig) -> str:
    """That of the one corpus; of several over theirs, in any order."""
    hashes = [corpus_hash(each) for each in (config.corpus, *config.more_corpora)]
    return sha256_of_json(sorted(hashes)) if config.more_corpora else hashes[0]


def corpus_hash(corpus: str) -> str:
    """Over what a corpus lists: a manifest's content, or names, sizes and times of a folder's or a pattern's files.

    Moving a corpus as it is does not change it. The sample corpus (an empty name) is ``fvc_lib``'s own.
    """
    path = Path(corpus)
    if not corpus:
        return ""
    if is_pattern(path):
        files = iter(_tars_there(path))
        path = fixed_folder(path)
    elif path.is_dir():
        files = (Path(folder) / name for folder, _, names in os.walk(path) for name in names)
    else:
        return content_hash(path) or "missing"
    found = {}
    for file in files:
        status = file.lstat()
        found[os.fsencode(file.relative_to(path)).hex()] = [status.st_size, status.st_mtime_ns]
    return sha256_of_json(found)


def _tars_there(pattern: Path) -> list[Path]:
    """None where one is missing: who reads the corpus says which."""
    try:
        return tars_of(pattern)
    except UsageError:
        return []


_LABELS = (".csv", ".tsv", ".parquet", ".json", ".jsonl", ".txt")  # files from which some layout reads labels or parts


def corpus_record(config: RunConfig) -> dict[str, str]:
    """``name`` and ``listing_sha256`` of a run's corpora in any order, as far as they are known before a video is read.

    The name is that of its folder, and of its manifest. The hash is over a manifest's bytes, or over the paths and
    sizes of a folder's files or a pattern's tars, and the bytes of those that may hold labels: equal on any machine,
    wherever it lies.
    """
    records = [_record_of(each, TASKS[config.task].sample) for each in (config.corpus, *config.more_corpora)]
    if len(records) == 1:
        return records[0]
    records.sort(key=lambda record: (record["name"], record["listing_sha256"]))
    return {
        "name": " + ".join(record["name"] for record in records),
        "listing_sha256": sha256_of_json([record["listing_sha256"] for record in records]),
    }


def _record_of(corpus: str, sample: str) -> dict[str, str]:
    if not corpus:
        return {"name": sample, "listing_sha256": ""}
    path = Path(os.path.abspath(corpus))  # noqa: PTH100 - a link keeps the name it was given by
    if is_pattern(path):
        top = fixed_folder(path)
        sizes = {path_to_text(tar.relative_to(top)): [tar.stat().st_size, ""] for tar in _tars_there(path)}
        return {"name": path_to_text(top.name), "listing_sha256": sha256_of_json(sizes)}
    if not path.is_dir():
        return {"name": path_to_text(Path(path.parent.name, path.name)), "listing_sha256": content_hash(path)}
    found: dict[str, object] = {}
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for file in (Path(folder, name) for name in names if not name.startswith(".")):
            has_labels = file.suffix.lower() in _LABELS
            size = file.stat().st_size if file.exists() else None
            found[path_to_text(file.relative_to(path))] = [size, content_hash(file) if has_labels else ""]
    return {"name": path_to_text(path.name), "listing_sha256": sha256_of_json(found)}


def _hashes(paths: Iterable[Path], run: RunPaths) -> dict[str, str]:
    return {str(path.relative_to(run.root)): content_hash(path) for path in paths}


_CODE_NOTE = "code.json"


def note_forced(run: RunPaths, names: Iterable[str]) -> None:
    """Note stages that shall be repeated although they are finished, until ``set_aside`` has moved what they wrote."""
    if forced := sorted({*names, *forced_before(run)}):
        write_json(run.forced, forced)


def forced_before(run: RunPaths) -> set[str]:
    """The stages that a command which died was to force, and whose files have not made room since."""
    try:
        return {name for name in json.loads(run.forced.read_text()) if isinstance(name, str)}
    except (OSError, ValueError, TypeError):
        return set()


def set_aside(run: RunPaths, tasks: Iterable[Task]) -> list[tuple[Path, Path]]:
    """Move everything the ``tasks`` wrote to ``superseded/<number>/``, each file under its old name.

    Returns where each was and where it is, for ``put_back``.
    """
    paths = [path for task in tasks for path in written_by(run, task) if path.exists()]
    if not paths:
        return []
    folder, moved = _next_folder(run.superseded), []
    for path in paths:
        target = folder / path.relative_to(run.root)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
        moved.append((path, target))
    return moved


def put_back(moved: Iterable[tuple[Path, Path]]) -> None:
    """Undo ``set_aside``; the last first, so that a record that a stage is finished comes after what it is about."""
    for path, target in reversed(list(moved)):
        target.rename(path)


def begin_training_state(run: RunPaths, task: Task, config: RunConfig) -> None:
    """Before a stage trains: what is left of a training under other code is set aside, and this code is noted.

    That is the training's own and the files of what the configuration chooses by name: going on with other code would
    make a network of two halves.
    """
    if not task.stage.trains:
        return
    folder = run.training_checkpoints(task.stage.name, task.fold)
    code = [f"import {task.stage.training_module}", *config.code_chosen(config.relevant())]
    if folder.exists() and not trained_by_this_code(folder, task):
        set_aside(run, [task])
    write_json(folder / _CODE_NOTE, {"sha256": helpers_hash(code), "of": code, "files": content_chosen(config)})


def content_chosen(config: RunConfig) -> dict[str, Any]:
    """By parameter, what the user's files that it names count as: their content."""
    return {name: found for name, value in config.relevant().items() if (found := config.identity(name)) != value}


def trained_by_this_code(folder: Path, task: Task, config: RunConfig | None = None) -> bool:
    """Whether the state in ``folder`` of a training of ``task`` was left by the code as it is now; with ``config`` also
    with the user's files as they are now, such as a network's.
    """
    try:
        note = json.loads((folder / _CODE_NOTE).read_text())
        noted, code = note["sha256"], note["of"]
        if config is not None and note.get("files", found := content_chosen(config)) != found:
            return False
        return bool(code[0] == f"import {task.stage.training_module}" and noted == helpers_hash(code))
    except (OSError, ValueError, LookupError, TypeError):
        return False


def written_by(run: RunPaths, task: Task) -> list[Path]:
    """Every file and folder that ``task`` may have written in ``run``; few tasks write all of them."""
    name, fold = task.stage.name, task.fold
    return [
        # The record first: killed half-way, the stage must not look finished.
        run.stage_checkpoint(name, fold),
        *task.stage.outputs(run, fold),
        *_logs(run, task),
        run.oom_contexts(name, fold),
        run.partial_notebook(name, fold),
        *([run.training_checkpoints(name, fold)] if task.stage.trains else []),
    ]


def _logs(run: RunPaths, task: Task) -> list[Path]:
    """What a finished ``task`` leaves beside its outputs for people to read."""
    of = (task.stage.name, task.fold)
    logs = [run.metrics(*of), run.memory(*of), run.memory_events(*of), run.executed_notebook(*of)]
    return [*logs, *task.stage.beside(run, task.fold)]


def _next_folder(parent: Path) -> Path:
    """A new, empty folder; made at once, so that two tasks that begin at the same moment never share one."""
    parent.mkdir(exist_ok=True)
    number = 1
    while True:
        folder = parent / str(number)
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder
