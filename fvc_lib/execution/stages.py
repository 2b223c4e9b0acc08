"""List the stages and tasks of a run in order, and read the stages' notebooks.

A stage is the part of a run that one Jupyter notebook computes. A ``Task`` is what one kernel executes: a stage, or one
fold of a stage that runs once per outer fold. The parameter ``config.task`` means something else: the kind of problem,
``video``, ``image`` or ``video_text``.
"""

import ast
import graphlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fvc_lib.services.atomic_files import sha256_of_json
from fvc_lib.services.code_versions import functions_in
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError, did_you_mean
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.run_paths import stage_key
from fvc_lib.services.tasks import STAGES, Stage


@dataclass(frozen=True)
class Task:
    """A part of a run: a stage (one notebook), or one fold of a stage that runs once per outer fold."""

    stage: Stage
    fold: int | None  # number of the outer fold, from 0; None for a stage without folds

    @property
    def key(self) -> str:
        """The text that identifies the task, also in file names, for example ``04_fold_training_fold_2``."""
        return stage_key(self.stage.name, self.fold)


def stages_of(config: RunConfig, stages: Sequence[Stage] = STAGES) -> list[Stage]:
    """Return the stages that a run with the parameters ``config`` has. They are a part of ``stages``, in its order.

    Which stages a run has depends on its kind of task (video, image or video_text) and on other parameters.
    """
    return [stage for stage in stages if config.task in stage.tasks and stage.when(config)]


def refuse_stage_of_another_task(config: RunConfig, *named: Stage | None) -> None:
    """Check that a run with ``config`` has every stage in ``named``. Entries that are None are ignored.

    Raises:
        UsageError: the run does not have one of the stages.
    """
    for stage in named:
        if stage is not None and config.task not in stage.tasks:
            raise UsageError(
                f"{stage.name} is a stage of task {' and '.join(stage.tasks)}, and this run's task is {config.task}. "
                f"Begin one of that task with -p task {stage.tasks[0]}, or name such a run with --resume."
            )
        if stage is not None and not stage.when(config):
            raise UsageError(
                f"{stage.name} is no stage of this run, whose model is {config.model!r}. A run has it "
                f"{stage.when_words}."
            )


def tasks_in_order(config: RunConfig, stages: Sequence[Stage] = STAGES) -> list[Task]:
    """Return every task (a stage, or one fold of a stage) of a run. A task follows the tasks that it needs.

    A stage with folds gives one task per fold. With the parameter ``annotations_only`` a run indexes only the label
    tables of a corpus, and opens no video. Later stages would need the videos, so the result then has only the stages
    that need no other stage.
    """
    stages = stages_of(config, stages)
    if config.annotations_only:
        stages = [stage for stage in stages if not stage.needs]
    by_name = {stage.name: stage for stage in sorted(stages, key=lambda stage: stage.name)}
    needs = {name: by_name.keys() & stage.comes_after for name, stage in by_name.items()}
    order = graphlib.TopologicalSorter(needs)
    tasks: list[Task] = []
    for name in order.static_order():
        stage = by_name[name]
        folds = range(config.num_trainings) if stage.per_fold else (None,)
        tasks += [Task(stage, fold) for fold in folds]
    return tasks


def needed_tasks(tasks: Sequence[Task], *, straight: bool = False) -> dict[str, set[str]]:
    """Return, for every task, which tasks must be done before it: ``{key of the task: keys of the other tasks}``.

    Args:
        tasks: all tasks, in the order of ``tasks_in_order``.
        straight: True: the tasks form a chain, in which every task needs only the task before it in ``tasks``. False: a
            task needs all tasks of the stages that its stage comes after.
    """
    if straight:
        return {task.key: {tasks[place - 1].key} if place else set() for place, task in enumerate(tasks)}
    return {task.key: {other.key for other in tasks if other.stage.name in task.stage.comes_after} for task in tasks}


def stage_named(text: str, stages: Sequence[Stage] = STAGES) -> Stage:
    """Return the stage that ``text`` names.

    ``text`` is a stage's name, a stage's number such as ``03b``, or a part that occurs in the name of only one stage.

    Raises:
        UsageError: no stage or several stages fit; the message lists the names of all stages.
    """
    names = [stage.name for stage in stages]
    exact = [stage for stage in stages if text in (stage.name, stage.name.partition("_")[0])]
    fitting = exact or [stage for stage in stages if text and text in stage.name]
    if len(fitting) == 1:
        return fitting[0]
    raise UsageError(f"no single stage called {text!r}.{did_you_mean(text, names)} Stages: {', '.join(names)}.")


def task_keys(texts: Sequence[str], config: RunConfig) -> frozenset[str]:
    """Return the keys of the tasks that a user has named in ``texts``. A key is a task's name.

    A text is the key of one task, or a stage's name, number or part of the name. A stage stands for all its folds.

    Raises:
        UsageError: a text fits no stage or several stages, or the run does not have the stage.
    """
    every = {task.key: task for task in tasks_in_order(config)}
    found: set[str] = set()
    for text in texts:
        if text in every:
            found.add(text)
            continue
        stage = stage_named(text)
        refuse_stage_of_another_task(config, stage)
        found.update(key for key, task in every.items() if task.stage is stage)
    return frozenset(found)


# Meanings of the notebooks' parameters that are no fields of RunConfig.
STAGE_PARAMETERS = {
    "run_dir": "set by the runner; empty: the newest run; new: a new one",
    "fold": "set by the runner: the outer fold, from 0",
    "compared_runs": "the runs to compare; empty: all of the newest run's experiment",
    "member_runs": "the runs that make one detector together",
    "reference_run": "the run whose detector the others are compared with; empty: the first that can be compared",
    "levels": "kinds or levels of disturbance; empty: all",
    "decode_workers": "number of videos decoded and encoded at once; 0: one per core",
    "output_folder": "folder for a comparison's or an audit's files; empty: comparison/ next to the runs, ./audit",
    "score_table": "table of scores: video, label, and score or a column per detector",
    "which_detectors": "names of the detectors to audit; empty: all in the table",
    "higher_is_real": "whether the table's scores are higher for reals",
    "where": "values by column; only rows of the table with these values are read",
    "decide_at": "best, fpr=0.01, cost=5:1 or threshold=0.5",
    "asked_videos": "files, folders, or tables with a column path, to be judged",
    "error_rate": "share of reals that may be called fake, and of fakes real",
    "false_alarm_rate": "share of reals that may be called fake; 0: error_rate",
    "prior": "share of fakes among the videos to be judged; 0: unknown",
    "map_minutes": "time limit for all maps of fake regions together; 0: no maps",
    "video_pages": "number of judged files with a page of their own, with evidence; 0: none, -1: all",
    "allow_code": "whether the code of a bundle's own network may be run",
    "final_network": "whether the network of all groups judges, in place of the folds'",
}


@dataclass(frozen=True)
class Notebook:
    """A stage's notebook, after the checks of ``read_notebook``: its title, parameters and code."""

    path: Path
    title: str  # first Markdown heading; empty if there is none
    parameters: dict[str, Any]  # names and default values in the parameters cell
    cells: tuple[str, ...]  # sources of the other code cells

    @property
    def name(self) -> str:
        """The file name without its suffix: the stage's name."""
        return self.path.stem

    @property
    def source_hash(self) -> str:
        """SHA-256 of the code cells, in hexadecimal. Docstrings, comments and the parameters cell do not change it."""
        return sha256_of_json([functions_in(cell) for cell in self.cells])


def read_notebook(path: Path) -> Notebook:
    """Read and check the notebook file ``path``.

    papermill, which executes the notebooks, makes no such checks: it would run a wrong notebook with wrong values.

    Raises:
        UsageError: the file is missing or unreadable, not exactly one cell is tagged ``parameters``, or the tagged cell
            has other statements than assignments of literals.
    """
    import nbformat  # takes a second to load

    try:
        document = nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)
    except OSError as error:
        raise UsageError(f"notebook {str(path)!r}: {error.strerror}. Is this a complete checkout?") from error
    except (ValueError, nbformat.ValidationError) as error:
        raise UsageError(f"notebook {str(path)!r} is not a readable notebook: {error}") from error
    return notebook_of(document, path)


def notebook_of(document: Any, path: Path) -> Notebook:
    """Check a notebook, and return its title, parameters and code as a ``Notebook``.

    ``document`` is the notebook as nbformat has read it from the file ``path``.

    Raises:
        UsageError: not exactly one cell is tagged ``parameters``, or that cell has other statements than assignments of
            literals.
    """
    cells = [cell for cell in document.cells if "parameters" in cell.metadata.get("tags", [])]
    if len(cells) != 1:
        raise UsageError(
            f"notebook {str(path)!r}: got {len(cells)} cells tagged 'parameters', wanted exactly one. "
            "Tag it in JupyterLab under Property Inspector > Cell tags."
        )
    others = tuple(cell.source for cell in document.cells if cell.cell_type == "code" and cell is not cells[0])
    texts = "\n".join(cell.source for cell in document.cells if cell.cell_type == "markdown")
    title = re.search(r"^# (.*)$", texts, re.MULTILINE)
    return Notebook(path, title[1].strip() if title else "", parse_parameters(cells[0].source, path), others)


def check_parameters(notebook: Notebook, values: Mapping[str, Any]) -> dict[str, Any]:
    """Check parameter values for a notebook, and return each value converted to the type of its parameter.

    ``values`` and the result are ``{parameter: value}``. papermill itself checks neither names nor types.

    Raises:
        UsageError: a name is neither in the parameters cell nor a field of the configuration, or a value cannot be
            converted.
    """
    known = {**notebook.parameters, **RunConfig.model_fields}
    for name, value in values.items():
        if name not in known:
            raise UsageError(
                f"notebook {str(notebook.path)!r}: {name!r} is no parameter of it.{did_you_mean(name, known)} "
                f"Its parameters cell has: {', '.join(notebook.parameters)}."
            )
        if name == "fold" and (type(value) is not int or value < 0):
            raise UsageError(f"fold: got {value!r}, wanted the number of a fold, from 0.")
        if name == "run_dir" and not isinstance(value, str):
            raise UsageError(f"run_dir: got {value!r}, wanted the path or name of a run.")
    fields = {name: value for name, value in values.items() if name not in STAGE_PARAMETERS}
    typed = resolve_config(environ={}, command_line=fields).model_dump(mode="json")
    return {name: typed.get(name, value) for name, value in values.items()}


def parse_parameters(source: str, path: Path) -> dict[str, Any]:
    """Return ``{name: value}`` of the assignments in ``source``, the text of a parameters cell, in order.

    Raises:
        UsageError: the cell has a statement other than ``name = literal`` or ``name: type = literal``. The message
            names the notebook ``path``.
    """
    try:
        statements = ast.parse(source).body
    except SyntaxError as error:
        raise UsageError(f"notebook {str(path)!r}: the parameters cell is not valid Python: {error}") from error
    values: dict[str, Any] = {}
    for statement in statements:
        match statement:
            case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(ast.Name(name), _, ast.expr() as value):
                with suppress(ValueError):
                    values[name] = ast.literal_eval(value)
                    continue
        raise UsageError(
            f"notebook {str(path)!r}: the parameters cell has {ast.unparse(statement)!r}, wanted 'name: type = "
            "literal'. Move the line to the next cell."
        )
    return values
