"""The stages of a run and what each one reads and writes: one declaration, used by plan, runner and status."""

from __future__ import annotations

import graphlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pandera.polars import DataFrameSchema

from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError, did_you_mean
from fvc_lib.services.run_paths import RunPaths, stage_key
from fvc_lib.services.tables import (
    ANNOTATIONS,
    AUGMENTED,
    CAPTIONS,
    FOLDS,
    GROUP_LINKS,
    IMAGE_PREDICTIONS,
    IMAGE_TARGETS,
    IMAGES,
    INDEX,
    LEAKAGE_AUDIT,
    MEASURED_FITS,
    PREDICTIONS,
    REJECTED,
    RESULTS,
    RETRIEVAL_RANKS,
    SLICES,
    TARGET_PREDICTIONS,
    TASK_RESULTS,
    VIDEO_TEXTS,
    read_table,
)

Files = Callable[[RunPaths, int | None], Sequence[Path]]


@dataclass(frozen=True)
class Stage:
    """One notebook's place in the run.

    ``inputs`` and ``outputs`` give the files by which stages talk; a stage is finished when its outputs exist and fit
    their ``schemas`` (one per output, in order; a stage without any writes files of other kinds) and its inputs,
    parameters and code are still what they were. Only runs of ``tasks`` have it; of ``needs`` count those that such a
    run has. ``training_module`` is where a stage that trains has its function for it.
    """

    name: str
    needs: tuple[str, ...]
    inputs: Files
    outputs: Files
    per_fold: bool = False
    training_module: str = ""
    tasks: tuple[str, ...] = ("video",)
    schemas: tuple[DataFrameSchema, ...] = ()

    @property
    def trains(self) -> bool:
        """Whether it shares its work between ranks, uses GPUs and keeps checkpoints."""
        return bool(self.training_module)

    def check_outputs(self, run: RunPaths, fold: int | None) -> None:
        """Read every output that has a schema.

        Raises:
            DataError: one is missing, unreadable or does not fit; the message names file, column and values.
        """
        for path, schema in zip(self.outputs(run, fold), self.schemas, strict=bool(self.schemas)):
            read_table(path, schema)


@dataclass(frozen=True)
class Task:
    """One execution of one notebook: a stage, or one fold of it."""

    stage: Stage
    fold: int | None

    @property
    def key(self) -> str:
        """The name of everything this task writes, for example ``04_fold_training_fold_2``."""
        return stage_key(self.stage.name, self.fold)


STAGES = (
    Stage(
        "01_data_index",
        (),
        lambda run, _: (),
        lambda run, _: (run.index, run.rejected, run.group_links, run.annotations),
        schemas=(INDEX, REJECTED, GROUP_LINKS, ANNOTATIONS),
    ),
    Stage(
        "02_folds",
        ("01_data_index",),
        lambda run, _: (run.index,),
        lambda run, _: (run.folds,),
        schemas=(FOLDS,),
    ),
    Stage(
        "03_augmentation",
        ("01_data_index",),
        lambda run, _: (run.index,),
        lambda run, _: (run.augmented_metadata,),
        schemas=(AUGMENTED,),
    ),
    Stage(
        "04_fold_training",
        ("02_folds", "03_augmentation"),
        lambda run, _: (run.index, run.folds, run.augmented_metadata),
        lambda run, fold: (run.predictions(0 if fold is None else fold),),
        per_fold=True,
        training_module="fvc_lib.tasks.video.training",
        schemas=(PREDICTIONS,),
    ),
    Stage(
        "05_kfold_results",
        ("04_fold_training",),
        lambda run, _: (run.index, run.group_links, run.folds, *sorted(run.tables.glob("predictions_fold_*.parquet"))),
        lambda run, _: (run.results, run.slices, run.leakage_audit),
        schemas=(RESULTS, SLICES, LEAKAGE_AUDIT),
    ),
    Stage("06_analysis_dashboard", ("05_kfold_results",), lambda run, _: (run.results,), lambda run, _: ()),
    # It reads every memory log, but those grow with each look at the run: it repeats when what was measured was new.
    Stage(
        "07_memory_report",
        ("06_analysis_dashboard", "10_image_recognition", "20_video_text"),
        lambda run, _: (run.results, run.task_results),
        lambda run, _: (),
        tasks=("video", "image", "video_text"),
    ),
    Stage(
        "10_image_recognition",
        (),
        lambda run, _: (),
        lambda run, _: (
            run.images, run.rejected, run.image_targets, run.leakage_audit, run.image_predictions,
            run.target_predictions, run.measured_fits, run.task_results,
        ),
        training_module="fvc_lib.tasks.image.training",
        tasks=("image",),
        schemas=(
            IMAGES, REJECTED, IMAGE_TARGETS, LEAKAGE_AUDIT, IMAGE_PREDICTIONS, TARGET_PREDICTIONS, MEASURED_FITS,
            TASK_RESULTS,
        ),
    ),
    Stage(
        "20_video_text",
        (),
        lambda run, _: (),
        lambda run, _: (
            run.video_texts, run.rejected, run.leakage_audit, run.retrieval_ranks, run.captions, run.task_results,
        ),
        training_module="fvc_lib.tasks.video_text.training",
        tasks=("video_text",),
        schemas=(VIDEO_TEXTS, REJECTED, LEAKAGE_AUDIT, RETRIEVAL_RANKS, CAPTIONS, TASK_RESULTS),
    ),
)  # fmt: skip


def stages_of(config: RunConfig, stages: Sequence[Stage] = STAGES) -> list[Stage]:
    """Those that a run of ``config.task`` has."""
    return [stage for stage in stages if config.task in stage.tasks]


def refuse_stage_of_another_task(config: RunConfig, *named: Stage | None) -> None:
    """Check that a run of ``config.task`` has the stages that were named.

    Raises:
        UsageError: it has not.
    """
    for stage in named:
        if stage is not None and config.task not in stage.tasks:
            raise UsageError(
                f"{stage.name} is a stage of task {' and '.join(stage.tasks)}, and this run's task is {config.task}. "
                f"Begin one of that task with -p task {stage.tasks[0]}, or name such a run with --resume."
            )


def tasks_in_order(config: RunConfig, stages: Sequence[Stage] = STAGES) -> list[Task]:
    """Every task of a run of ``config.task``, each after what it needs, stages of equal rank by name.

    Of a run with ``annotations_only`` these are the stages that need no other: there are no videos to go on with.
    """
    stages = stages_of(config, stages)
    if config.annotations_only:
        stages = [stage for stage in stages if not stage.needs]
    by_name = {stage.name: stage for stage in stages}
    sorter = graphlib.TopologicalSorter({stage.name: by_name.keys() & stage.needs for stage in stages})
    sorter.prepare()
    names: list[str] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        names.extend(ready)
        sorter.done(*ready)
    return [
        Task(by_name[name], fold)
        for name in names
        for fold in (range(config.num_folds) if by_name[name].per_fold else (None,))
    ]


def needed_tasks(tasks: Sequence[Task], *, straight: bool = False) -> dict[str, set[str]]:
    """The keys that each task needs finished, by its key; a stage of folds is finished when all of them are.

    Args:
        tasks: in the order of the plan.
        straight: each needs the one before it and nothing else: one after the other, in the order given.
    """
    if straight:
        return {task.key: {tasks[place - 1].key} if place else set() for place, task in enumerate(tasks)}
    return {task.key: {other.key for other in tasks if other.stage.name in task.stage.needs} for task in tasks}


def stage_named(text: str, stages: Sequence[Stage] = STAGES) -> Stage:
    """The one stage whose name is or contains ``text`` (``05``, ``results``, ``05_kfold_results``).

    Raises:
        UsageError: none or several fit; the message lists the names.
    """
    names = [stage.name for stage in stages]
    exact = [stage for stage in stages if stage.name == text]
    fitting = exact or [stage for stage in stages if text and text in stage.name]
    if len(fitting) == 1:
        return fitting[0]
    raise UsageError(f"no single stage called {text!r}.{did_you_mean(text, names)} Stages: {', '.join(names)}.")


def task_keys(texts: Sequence[str], config: RunConfig, stages: Sequence[Stage] = STAGES) -> frozenset[str]:
    """The tasks that ``texts`` name: each a task's key, or a stage (also a part of its name) for all its tasks.

    Raises:
        UsageError: a text names no task, a stage of another task, or a part of a name fits several stages.
    """
    every = {task.key: task for task in tasks_in_order(config, stages)}
    found: set[str] = set()
    for text in texts:
        if text in every:
            found.add(text)
            continue
        stage = stage_named(text, stages)
        refuse_stage_of_another_task(config, stage)
        found.update(key for key, task in every.items() if task.stage is stage)
    return frozenset(found)
