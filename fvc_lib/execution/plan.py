"""Decide which tasks a command runs and why, and move the files of a stage away before it runs again.

A stage is one notebook of a run; a task is a stage, or one fold of it. A task is up to date if its parameters, inputs,
code and outputs have not changed since it finished. A training is not repeated if only the library's code has changed.
Files of earlier attempts are moved to the folder ``superseded``.
"""

import graphlib
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fvc_lib.execution.stages import Notebook, Task, needed_tasks, read_notebook, tasks_in_order
from fvc_lib.services.atomic_files import content_hash, path_to_text, sha256_of_json
from fvc_lib.services.code_versions import changed_functions, code_behind, has_inputs, in_words, note_code, tree_hash
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError, command_text
from fvc_lib.services.records.digests import is_log, listed, read_document, write_document
from fvc_lib.services.run_paths import RunPaths, fixed_folder, is_pattern, tars_of
from fvc_lib.services.tasks import STAGES, TASKS, Stage


@dataclass(frozen=True)
class Fingerprint:
    """Everything that the result of a task depends on: parameters, input files, notebook, code and corpus.

    A finished task with an equal fingerprint need not run again.
    """

    parameters: dict[str, object]  # values of the configuration's fields that the stage reads
    inputs: dict[str, str]  # SHA-256 of each file that the task reads; the keys are paths in the run folder
    notebook: str  # digest of the notebook's cells
    code: dict[str, str]  # SHA-256 of each module that the notebook depends on; empty for a training
    corpus: str  # digest of the corpora's files; empty if the stage reads other stages' tables instead


def fingerprint_of(task: Task, notebook: Notebook, run: RunPaths, config: RunConfig) -> Fingerprint:
    """Return the fingerprint that ``task`` would have if it ran now, with everything that its result depends on.

    The digest of an input file that is missing is an empty text.
    """
    stage = task.stage
    parameters = config.values_read_by(stage, notebook.parameters)
    # Outputs of further stages, which the stage reads only with some configurations.
    further = stage.reads(config) - set(stage.needs)
    written = [path for other in STAGES if other.name in further for path in other.outputs(run, None)]
    inputs = [*stage.inputs(run, task.fold), *written]
    corpora = (config.corpus, *config.more_corpora)
    input_hashes = {str(path.relative_to(run.root)): content_hash(path) for path in inputs}
    code = {} if stage.trains else code_behind([*notebook.cells, *config.code_chosen(parameters)])
    corpus = ""
    if not stage.needs:
        listings = sorted(_listing_hash(each, times=True) for each in corpora)
        corpus = sha256_of_json(listings)
    return Fingerprint(
        parameters=parameters,
        inputs=input_hashes,
        notebook=notebook.source_hash,
        code=code,
        corpus=corpus,
    )


def record_finished(task: Task, fingerprint: Fingerprint | None, run: RunPaths) -> None:
    """Write the file that records that ``task`` is finished, with the size and SHA-256 of its outputs and logs.

    Args:
        task: the task.
        fingerprint: the task's fingerprint when it began. None: only the sizes and SHA-256 are recorded, so that the
            next command runs the task again. Runs with ``use_mlops_pipeline`` false pass None, as they never skip a
            task.
        run: the run.
    """
    folder = run.training_checkpoints(task.stage.name, task.fold)
    of_training = sorted(folder.rglob("*.json")) if task.stage.trains else []  # checkpoints have their own digests
    written = [*task.stage.outputs(run, task.fold), *of_training, *_logs(run, task)]
    files = listed(written, run.root)
    trees = {name: tree_hash(name) for name in fingerprint.code} if fingerprint else {}
    document = {"fingerprint": asdict(fingerprint) if fingerprint else None, "files": files, "trees": trees}
    write_document(run.stage_checkpoint(task.stage.name, task.fold), document)


def is_finished(task: Task, run: RunPaths) -> bool:
    """Return whether ``task`` has ever finished in ``run``, even if its parameters or code have changed since."""
    return bool(read_document(run.stage_checkpoint(task.stage.name, task.fold)).get("fingerprint"))


def reason_to_run(task: Task, now: Fingerprint, run: RunPaths, *, inputs_are_final: bool = True) -> str | None:
    """Return the reason why ``task`` has to run, for example ``the corpus changed``; None if it is up to date.

    Args:
        task: the task.
        now: the task's present fingerprint, from ``fingerprint_of``.
        run: the run.
        inputs_are_final: whether to compare the task's inputs; False while an earlier stage is about to write them.
    """
    record = read_document(run.stage_checkpoint(task.stage.name, task.fold))
    if not record.get("fingerprint"):
        return "not finished yet"
    then = Fingerprint(**record["fingerprint"])
    if changed := _differing(then.parameters, now.parameters):
        return f"parameters changed: {', '.join(changed)}"
    if then.corpus != now.corpus:
        return "the corpus changed"
    if inputs_are_final and (inputs := _differing(then.inputs, now.inputs)):
        return f"input changed: {', '.join(inputs)}"
    if then.notebook != now.notebook:
        return "the notebook's code changed"
    changed_files = _differing(then.code, now.code)
    code = [name for name in changed_files if record["trees"].get(name) != tree_hash(name)]
    if code:
        return f"code changed: {in_words(code)}"
    known = {name: file["sha256"] for name, file in record["files"].items() if not is_log(name)}
    outputs = {str(path.relative_to(run.root)) for path in task.stage.outputs(run, task.fold)}
    present = {name: digest for name in {*known, *outputs} if (digest := content_hash(run.root / name))}
    different = {name for name in present if present[name] != known.get(name)}
    stale = sorted((outputs - present.keys()) | different)
    return f"output missing or changed: {', '.join(stale)}" if stale else None


def _differing(then: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    return sorted(name for name in {*then, *now} if then.get(name) != now.get(name))


# Corpora


def corpus_record(config: RunConfig) -> dict[str, str]:
    """Return a name and a digest that identify a run's corpora: ``{"name": ..., "listing_sha256": ...}``.

    The name joins the corpora's names by `` + ``, and ``listing_sha256`` is a digest of the list of their files. No
    video is read. Name and digest do not depend on the order of the corpora, or on the machine or folder that has them.
    """
    sample = TASKS[config.task].sample
    corpora = (config.corpus, *config.more_corpora)
    records = sorted((_corpus_name(corpus) or sample, _listing_hash(corpus)) for corpus in corpora)
    names, hashes = zip(*records, strict=True)
    return {"name": " + ".join(names), "listing_sha256": hashes[0] if len(hashes) == 1 else sha256_of_json(hashes)}


def _corpus_name(corpus: str) -> str:
    """Return a name for the corpus with the path ``corpus``, without the folders that contain it.

    It is the name of the corpus's folder, or ``folder/file`` for a manifest (a table of videos). The name of the
    built-in sample corpus is empty.
    """
    path = Path(os.path.abspath(corpus))  # noqa: PTH100 - keeps the name of a symbolic link
    if not corpus:
        return ""
    if is_pattern(path):
        return path_to_text(fixed_folder(path).name)
    return path_to_text(Path(path.parent.name, path.name) if path.is_file() else path.name)


_LABELS = (".csv", ".tsv", ".parquet", ".json", ".jsonl", ".txt")  # files from which a layout reads labels or parts


def _listing_hash(corpus: str, *, times: bool = False) -> str:
    """Return a SHA-256 that changes when a corpus's files change.

    For a manifest (a table of videos) it is the SHA-256 of the table. For a folder, or a pattern of tars such as
    ``{000..099}.tar``, it covers the path and size of every file.

    Args:
        corpus: path of the corpus; empty for the sample corpus, whose digest is empty.
        times: for a folder or pattern. True: also cover the files' modification times. False: instead cover the
            content of files that may hold labels, such as CSV files.
    """
    path = Path(corpus)
    if not corpus or not (path.is_dir() or is_pattern(path)):
        return corpus and content_hash(path)
    listing: dict[str, object] = {}
    folder = path if path.is_dir() else fixed_folder(path)
    for file in _files_in(path):
        status, has_labels = file.stat(), file.suffix.lower() in _LABELS
        detail = status.st_mtime_ns if times else content_hash(file) if has_labels else ""
        listing[path_to_text(file.relative_to(folder))] = [status.st_size, detail]
    return sha256_of_json(listing)


def _files_in(path: Path) -> list[Path]:
    """Return the files of a corpus.

    For a folder, these are all files in it and its subfolders, except hidden ones. For a pattern of tars, these are the
    tars; the list is empty if a named tar is missing.
    """
    if path.is_dir():
        names = (file.relative_to(path) for file in path.rglob("*") if file.is_file())
        return [path / name for name in names if not any(part.startswith(".") for part in name.parts)]
    with suppress(UsageError):  # the stage that reads the corpus names the missing tar
        return [file for file in tars_of(path) if file.is_file()]
    return []


# Trainings


def content_chosen(config: RunConfig) -> dict[str, Any]:
    """Return the digests of the user's files that the parameters name, as ``{parameter: digest}``.

    Such files hold, for example, a model's weights, or the Python code of a model (``net.py:Net``). The digest covers
    the file's content, so it does not change when the file is moved to another folder. Parameters that name no file are
    left out.
    """
    return {name: digest for name, value in config.relevant().items() if (digest := config.identity(name)) != value}


def begin_training_state(run: RunPaths, task: Task, notebook: Notebook, config: RunConfig) -> None:
    """Record the code and the user's files that a training depends on, before it begins.

    If an earlier attempt used other notebook cells or other files of the user, all files of that attempt are moved away
    first. Nothing happens for a task that does not train.
    """
    if not task.stage.trains:
        return
    folder = run.training_checkpoints(task.stage.name, task.fold)
    inputs = {"files": content_chosen(config), "cells": notebook.source_hash}
    if folder.exists() and not has_inputs(folder, inputs):
        set_aside(run, [task])
    note_code(folder, [f"import {task.stage.training_module}", *config.code_chosen(config.relevant())], inputs)


def line_of_other_code(run: RunPaths, finished: Iterable[Task]) -> str:
    """Return a message that names finished trainings which used an older version of the library's code.

    The message also has the names of the changed functions, and the command that repeats these trainings. It is empty
    if no code has changed. Tasks of ``finished`` that train nothing are ignored.
    """
    changed: dict[str, set[str]] = {}
    for task in finished:
        if task.stage.trains:
            folder = run.training_checkpoints(task.stage.name, task.fold)
            functions = changed_functions(folder)
            if functions:
                changed[task.key] = functions
    if not changed:
        return ""
    functions = set[str]().union(*changed.values())
    stages = sorted({key.partition("_")[0] for key in changed})
    options = [text for stage in stages for text in ("--force", stage)]
    return (
        f"not trained again, though FVC's code has changed since: {', '.join(changed)}. Changed: "
        f"{in_words(functions)}. To train again: {command_text('--resume', run.root, *options)}"
    )


# Files of a task


def set_aside(run: RunPaths, tasks: Iterable[Task]) -> None:
    """Move every file of ``tasks`` to ``superseded/<number>/`` in the run folder; every call uses a new number."""
    folder = run.next_superseded()
    for path in (path for task in tasks for path in written_by(run, task) if path.exists()):
        target = folder / path.relative_to(run.root)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)


def written_by(run: RunPaths, task: Task) -> list[Path]:
    """Return every path that ``task`` may have written in ``run``: files, and a folder of checkpoints for a training.

    Some paths may not exist. The first path is the record that says that the task has finished.
    """
    name, fold = task.stage.name, task.fold
    of_training = [run.training_checkpoints(name, fold)] if task.stage.trains else []
    return [
        # The record first: a stage that was half moved must not look finished.
        run.stage_checkpoint(name, fold),
        *task.stage.outputs(run, fold),
        *_logs(run, task),
        run.partial_notebook(name, fold),
        *of_training,
    ]


def _logs(run: RunPaths, task: Task) -> list[Path]:
    of = (task.stage.name, task.fold)
    logs = [run.metrics(*of), run.memory(*of), run.memory_events(*of), run.executed_notebook(*of)]
    return [*logs, *task.stage.beside(run, task.fold)]


# Plans


@dataclass(frozen=True)
class PlannedTask:
    """One task of a run, with the decision whether this command runs it, and the reason for the decision."""

    task: Task
    run: bool  # whether this command runs it
    reason: str  # why it runs, or why not, in words
    finished_before: bool = False  # whether the task has ever finished, even with other parameters or code
    redo: bool = False  # whether the task's earlier files are moved away before any task runs
    only_if_changed: bool = False  # whether the task is skipped if the stages before it write the same files again


def read_notebooks(folder: Path, stages: Sequence[Stage] = STAGES) -> dict[str, Notebook]:
    """Read and check the stages' notebooks, and return ``{stage name: notebook}``.

    Raises:
        UsageError: a notebook is missing or broken.
    """
    return {stage.name: read_notebook(folder / f"{stage.name}.ipynb") for stage in stages}


def make_plan(
    notebooks: Mapping[str, Notebook],
    config: RunConfig,
    run: RunPaths | None,
    *,
    only: Stage | None = None,
    start: Stage | None = None,
    force: Sequence[Stage] = (),
    tasks: frozenset[str] | None = None,
    stages: Sequence[Stage] = STAGES,
) -> list[PlannedTask]:
    """Return every task of the run in order, with the decision whether it runs.

    Args:
        notebooks: the notebooks by stage name.
        config: the parameters.
        run: the run; None: a new run, in which everything runs.
        only: the only stage to run; None: no restriction.
        start: a stage to run even if it is finished, with all stages that depend on it.
        force: stages that run even if they are finished.
        tasks: keys of the tasks that this command may run, while other jobs run the other tasks; None: all tasks.
        stages: all stages that FVC has.

    Raises:
        UsageError: a task of ``tasks`` needs another task that is neither finished nor in ``tasks``.
    """
    ordered = tasks_in_order(config, stages)
    if run is None:
        plan = [PlannedTask(task, True, "new run") for task in ordered]
        return plan if tasks is None else _only_tasks(plan, tasks)
    plan, names = [], [task.stage.name for task in ordered]
    for task in ordered:
        stage = task.stage
        finished = is_finished(task, run)
        reason = ""
        waits = False
        if only is not None:
            runs, reason = stage is only, "asked for by --only" if stage is only else "not asked for"
        elif stage is start or stage in force:
            runs, reason = True, "asked for by --from" if stage is start else "asked for by --force"
        elif not config.use_mlops_pipeline:
            runs = start is None or names.index(stage.name) > names.index(start.name)
            reason = "USE_MLOPS_PIPELINE is false: nothing is skipped" if runs else "before --from"
        else:
            again = sorted({planned.task.stage.name for planned in plan if planned.run} & stage.reads(config))
            now = fingerprint_of(task, notebooks[stage.name], run, config)
            reason = reason_to_run(task, now, run, inputs_are_final=not again) or ""
            if again and not reason:
                reason, waits = f"after {', '.join(again)}", start is None
            runs, reason = bool(reason), reason or "finished, nothing changed"
        forced = stage in (only, start, *force) or not config.use_mlops_pipeline
        redo = runs and (finished or forced) and not waits
        plan.append(PlannedTask(task, runs, reason, finished, redo, waits))
    return plan if tasks is None else _only_tasks(plan, tasks)


def _only_tasks(plan: Sequence[PlannedTask], keys: frozenset[str]) -> list[PlannedTask]:
    """Return a copy of ``plan`` that runs only the tasks in ``keys``. The other tasks are left to other jobs.

    Raises:
        UsageError: a task of ``keys`` needs an unfinished task outside ``keys``.
    """
    needed = needed_tasks([planned.task for planned in plan])
    unfinished = {planned.task.key: planned.reason for planned in plan if planned.run}
    for key in sorted(keys & unfinished.keys()):
        if missing := sorted((needed[key] & unfinished.keys()) - keys):
            why = ", ".join(f"{name} ({unfinished[name]})" for name in missing)
            raise UsageError(
                f"{key} cannot run yet, and nothing was begun: it needs {why}. Run that first, or name it in --tasks, "
                "too. If it was left by jobs under SLURM, submit the rest once `status` shows none at work: --resume "
                "RUN --executor slurm."
            )
    again = {planned.task.key for planned in plan if planned.redo and planned.task.key in keys}
    narrowed = []
    for planned in plan:
        key = planned.task.key
        if planned.run and key not in keys:
            # Results that depend on a repeated task are moved away; a training stays until its job has checked it.
            redo = planned.finished_before and not planned.task.stage.trains and bool(needed[key] & again)
            again |= {key} if redo else set()
            reason = f"left to another job: {planned.reason}"
            planned = replace(planned, run=False, redo=redo, only_if_changed=False, reason=reason)
        narrowed.append(planned)
    return narrowed


def all_needed(needed: Mapping[str, Collection[str]], key: str) -> set[str]:
    """Return the keys of all tasks or stages that ``key`` needs, directly or indirectly.

    ``needed`` is ``{key: keys that it needs directly}``.
    """
    return set(needed[key]).union(*(all_needed(needed, each) for each in needed[key]))


class Schedule:
    """The unfinished tasks of a plan, in an order in which every task follows the tasks that it needs.

    Tasks that the plan does not run count as done.

    Args:
        plan: every task of the run.
        straight: whether to run the tasks one after the other in the plan's order, even if they could overlap.
    """

    def __init__(self, plan: Sequence[PlannedTask], *, straight: bool = False) -> None:
        self._left = {planned.task.key: planned.task for planned in plan if planned.run}
        self._graph = graphlib.TopologicalSorter(needed_tasks([planned.task for planned in plan], straight=straight))
        self._graph.prepare()
        self._ready: list[str] = []

    @property
    def is_finished(self) -> bool:
        """Whether every task that is to run is done."""
        return not self._left

    def next(self) -> Task | None:
        """Return a task that may begin, because all tasks that it needs are done; None if there is none now.

        No task is returned twice.
        """
        self._ready += self._graph.get_ready()
        while self._ready:
            key = self._ready.pop(0)
            if key in self._left:
                return self._left[key]
            self._graph.done(key)
            self._ready += self._graph.get_ready()
        return None

    def done(self, task: Task) -> None:
        """Note that ``task`` has succeeded, so that the tasks that need it may begin."""
        del self._left[task.key]
        self._graph.done(task.key)
