"""Decide whether a finished stage is up to date, and move its files away before it runs again.

A stage is up to date when its parameters, its inputs and its code are the same, and its outputs are as it wrote them.
Code of the library repeats no training. Files of earlier attempts are moved, never deleted.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fvc_lib.execution.plan.stages import Notebook, Task
from fvc_lib.services.atomic_files import path_to_text, sha256_of_json, write_json
from fvc_lib.services.code.code_version import code_behind, in_words, tree_hash
from fvc_lib.services.code.training_code import changed_functions, files_of_note, has_inputs, note_code
from fvc_lib.services.config import NEUTRAL, RunConfig
from fvc_lib.services.errors import UsageError, command_text
from fvc_lib.services.records.digests import content_hash, is_log, listed, read_document, write_document
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tar_patterns import fixed_folder, is_pattern, tars_of
from fvc_lib.services.tasks import STAGES, TASKS


@dataclass(frozen=True)
class Fingerprint:
    """What the result of a stage depends on."""

    parameters: dict[str, object]  # the fields of the configuration that the stage reads
    inputs: dict[str, str]  # SHA-256 of each file of the run that it reads, by path in the run folder
    notebook: str  # digest of the notebook's cells
    code: dict[str, str]  # SHA-256 of each module that the notebook depends on; empty for a training
    corpus: str  # digest of the corpus's listing if the stage reads the corpus


@dataclass(frozen=True)
class StageRecord:
    """The record of a finished stage."""

    fingerprint: Fingerprint | None  # None after a straight pass, which tracks nothing
    files: dict[str, dict[str, Any]]  # ``num_bytes`` and ``sha256`` of each written file, by path in the run folder
    trees: dict[str, str] = field(default_factory=dict)  # ``tree_hash`` of each module of the code


def fingerprint_of(task: Task, notebook: Notebook, run: RunPaths, config: RunConfig) -> Fingerprint:
    """Return what ``task`` would depend on if it ran now; the digest of a missing input is empty."""
    parameters = config.values_read_by(task.stage, notebook.parameters)
    sources = [*notebook.cells, *config.code_chosen(parameters)]
    return Fingerprint(
        parameters=parameters,
        inputs={str(path.relative_to(run.root)): content_hash(path) for path in _inputs(task, run, config)},
        notebook=notebook.source_hash,
        code={} if task.stage.trains else code_behind(sources),
        corpus="" if task.stage.needs else _corpora_hash(config),
    )


def _inputs(task: Task, run: RunPaths, config: RunConfig) -> list[Path]:
    """Return the files that the task reads, with the outputs of stages that it needs for this configuration alone."""
    further = task.stage.reads(config) - set(task.stage.needs)
    written = [path for stage in STAGES if stage.name in further for path in stage.outputs(run, None)]
    return [*task.stage.inputs(run, task.fold), *written]


def record_finished(task: Task, fingerprint: Fingerprint | None, run: RunPaths) -> None:
    """Record that ``task`` is finished, with every file that it wrote and a later command reads.

    Checkpoints have digests of their own.
    """
    folder = run.training_checkpoints(task.stage.name, task.fold)
    of_training = sorted(folder.rglob("*.json")) if task.stage.trains else []
    files = listed([*task.stage.outputs(run, task.fold), *of_training, *_logs(run, task)], run.root)
    trees = {name: tree_hash(name) for name in fingerprint.code} if fingerprint else {}
    write_document(run.stage_checkpoint(task.stage.name, task.fold), asdict(StageRecord(fingerprint, files, trees)))


def read_record(path: Path) -> StageRecord | None:
    """Return the record at ``path``; None if it is missing, damaged, of a straight pass or of another version."""
    try:
        document = read_document(path)
        return StageRecord(Fingerprint(**document["fingerprint"]), document["files"], document["trees"])
    except (KeyError, TypeError):
        return None


def reason_to_run(task: Task, now: Fingerprint, run: RunPaths, *, inputs_are_final: bool = True) -> str | None:
    """Return why ``task`` has to run, in words; None if it is up to date.

    Args:
        task: the task.
        now: what it depends on now.
        run: the run.
        inputs_are_final: whether its inputs count, because no stage is about to write them.
    """
    record = read_record(run.stage_checkpoint(task.stage.name, task.fold))
    if record is None or record.fingerprint is None:
        return "not finished yet"
    then = record.fingerprint
    if changed := _differing(then.parameters, now.parameters):  # neutral values stand in neither
        before, asked = ({**NEUTRAL, **one} for one in (then.parameters, now.parameters))
        values = ", ".join(f"{name} {before.get(name)!r} -> {asked.get(name)!r}" for name in changed)
        return f"parameters changed: {values}"
    if then.corpus != now.corpus:
        return "the corpus changed"
    if inputs_are_final and (inputs := _differing(then.inputs, now.inputs)):
        return f"input changed: {', '.join(inputs)}"
    if then.notebook != now.notebook:
        return "the notebook's code changed"
    if code := [name for name in _differing(then.code, now.code) if record.trees.get(name) != tree_hash(name)]:
        return f"code changed: {in_words(code)}"
    known = {name: file["sha256"] for name, file in record.files.items() if not is_log(name)}
    outputs = {str(path.relative_to(run.root)) for path in task.stage.outputs(run, task.fold)}
    present = {name: digest for name in {*known, *outputs} if (digest := content_hash(run.root / name))}
    stale = sorted((outputs - present.keys()) | {name for name in present if present[name] != known.get(name)})
    return f"output missing or changed: {', '.join(stale)}" if stale else None


def _differing(then: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    return sorted(name for name in {*then, *now} if then.get(name) != now.get(name))


# --- Corpora


def _corpora_hash(config: RunConfig) -> str:
    """Return the digest of what the corpora list, in any order: names, sizes and times of files, or a manifest."""
    hashes = [_listing_hash(corpus, times=True) for corpus in (config.corpus, *config.more_corpora)]
    return sha256_of_json(sorted(hashes)) if config.more_corpora else hashes[0]


def corpus_record(config: RunConfig) -> dict[str, str]:
    """Return ``name`` and ``listing_sha256`` of a run's corpora in any order, without reading a video.

    Both are the same on any machine, wherever the corpus lies.
    """
    sample = TASKS[config.task].sample
    records = sorted(
        (_corpus_name(corpus) or sample, _listing_hash(corpus)) for corpus in (config.corpus, *config.more_corpora)
    )
    names, hashes = zip(*records, strict=True)
    return {"name": " + ".join(names), "listing_sha256": hashes[0] if len(hashes) == 1 else sha256_of_json(hashes)}


def _corpus_name(corpus: str) -> str:
    """Return the name of a corpus's folder, with that of its manifest; empty for the sample corpus."""
    if not corpus:
        return ""
    path = Path(os.path.abspath(corpus))  # noqa: PTH100 - a link keeps its own name
    if is_pattern(path):
        return path_to_text(fixed_folder(path).name)
    return path_to_text(Path(path.parent.name, path.name) if path.is_file() else path.name)


_LABELS = (".csv", ".tsv", ".parquet", ".json", ".jsonl", ".txt")  # files from which a layout reads labels or parts


def _listing_hash(corpus: str, *, times: bool = False) -> str:
    """Return a digest of a manifest's bytes, or of the paths and sizes of a folder's files or a pattern's tars.

    Args:
        corpus: the corpus; the digest of the sample corpus, an empty name, is empty.
        times: count the files' times, which tell an edit; else the bytes of files that may hold labels.
    """
    path = Path(corpus)
    if not corpus or not (path.is_dir() or is_pattern(path)):
        return corpus and content_hash(path)
    listing: dict[str, object] = {}
    folder = path if path.is_dir() else fixed_folder(path)
    for file in _files_in(path):
        status = file.stat() if file.exists() else file.lstat()
        has_labels = file.suffix.lower() in _LABELS and not times
        listing[path_to_text(file.relative_to(folder))] = [
            status.st_size, status.st_mtime_ns if times else content_hash(file) if has_labels else "",
        ]  # fmt: skip
    return sha256_of_json(listing)


def _files_in(path: Path) -> Iterator[Path]:
    """Yield the files of a folder that are not hidden, or the tars of a pattern; nothing if a tar is missing."""
    if not path.is_dir():
        try:
            yield from tars_of(path)
        except UsageError:  # the stage that reads the corpus names the missing tar
            return
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


# --- Trainings


def content_chosen(config: RunConfig) -> dict[str, Any]:
    """Return the content digests of the user's files that parameters name, by parameter."""
    return {name: digest for name, value in config.relevant().items() if (digest := config.identity(name)) != value}


def _inputs_of_training(config: RunConfig, notebook: Notebook) -> dict[str, Any]:
    return {"files": content_chosen(config), "cells": notebook.source_hash}


def begin_training_state(run: RunPaths, task: Task, notebook: Notebook, config: RunConfig) -> None:
    """Note the code of a training before it begins, and set aside one that other user's code began."""
    if not task.stage.trains:
        return
    folder, inputs = run.training_checkpoints(task.stage.name, task.fold), _inputs_of_training(config, notebook)
    if folder.exists() and not has_inputs(folder, inputs):
        set_aside(run, [task])
    sources = [f"import {task.stage.training_module}", *config.code_chosen(config.relevant())]
    note_code(folder, sources, inputs)


def begun_with_these_inputs(run: RunPaths, task: Task, notebook: Notebook, config: RunConfig) -> bool:
    """Return whether the user's files and the notebook's cells are those that the training began with."""
    return has_inputs(run.training_checkpoints(task.stage.name, task.fold), _inputs_of_training(config, notebook))


def line_of_other_code(run: RunPaths, finished: Iterable[Task]) -> str:
    """Return a line about ``finished`` trainings whose library code has changed since; empty if there are none.

    The line names the functions and the command that repeats the trainings.
    """
    changed = [
        (task, functions)
        for task in finished
        if task.stage.trains and (functions := changed_functions(run.training_checkpoints(task.stage.name, task.fold)))
    ]
    if not changed:
        return ""
    stages = sorted({task.stage.name.partition("_")[0] for task, _ in changed})
    options = [text for stage in stages for text in ("--force", stage)]
    return (
        f"kept, though other code trained it: {', '.join(task.key for task, _ in changed)}. Changed since: "
        f"{in_words(set().union(*(functions for _, functions in changed)))}. "
        f"Train again: {command_text('--resume', run.root, *options)}"
    )


# --- Files of a task


def note_forced(run: RunPaths, names: Iterable[str]) -> None:
    """Note stages to repeat although they are finished, until ``set_aside`` has moved their files."""
    if forced := sorted({*names, *forced_before(run)}):
        write_json(run.forced, forced)


def forced_before(run: RunPaths) -> set[str]:
    """Return the stages that an earlier command was to force, and whose files are still in place."""
    try:
        return {name for name in json.loads(run.forced.read_text()) if isinstance(name, str)}
    except (OSError, ValueError, TypeError):
        return set()


def set_aside(run: RunPaths, tasks: Iterable[Task]) -> list[tuple[Path, Path]]:
    """Move every file of ``tasks`` to ``superseded/<number>/``; return the old and new paths, for ``put_back``."""
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
    """Undo ``set_aside``; the last first, so that the record of a stage follows its files."""
    for path, target in reversed(list(moved)):
        target.rename(path)


def written_by(run: RunPaths, task: Task) -> list[Path]:
    """Return every path that ``task`` may have written in ``run``."""
    name, fold = task.stage.name, task.fold
    return [
        # The record first: a stage that was half moved must not look finished.
        run.stage_checkpoint(name, fold),
        *task.stage.outputs(run, fold),
        *_logs(run, task),
        run.oom_contexts(name, fold),
        run.partial_notebook(name, fold),
        *([run.training_checkpoints(name, fold)] if task.stage.trains else []),
    ]


def copied_with(run: RunPaths, task: Task) -> list[Path]:
    """Return the paths that a fork copies with the finished ``task``."""
    note = files_of_note(run.training_checkpoints(task.stage.name, task.fold)) if task.stage.trains else []
    return [*written_by(run, task), *note]


def _logs(run: RunPaths, task: Task) -> list[Path]:
    of = (task.stage.name, task.fold)
    logs = [run.metrics(*of), run.memory(*of), run.memory_events(*of), run.executed_notebook(*of)]
    return [*logs, *task.stage.beside(run, task.fold)]


def _next_folder(parent: Path) -> Path:
    """Make a new, empty folder; two tasks that begin at the same moment never share one."""
    parent.mkdir(exist_ok=True)
    number = 1
    while True:
        try:
            (parent / str(number)).mkdir()
        except FileExistsError:
            number += 1
        else:
            return parent / str(number)
