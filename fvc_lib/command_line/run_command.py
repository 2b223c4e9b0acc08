"""Beginning, resuming and forking runs, as the command line asks for it."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import click

from fvc_lib.command_line.commands import export_when_asked, print_fork, print_plan, report_run
from fvc_lib.execution.plan.fingerprint import put_back, set_aside
from fvc_lib.execution.plan.forking import Asked, changes, config_of_fork, config_to_resume, inheritance, take_over
from fvc_lib.execution.plan.plan import PlannedTask, make_plan, read_notebooks
from fvc_lib.execution.plan.stage_memory import PredictedPeak, predicted_peaks
from fvc_lib.execution.plan.stages import Notebook, Task, refuse_stage_of_another_task, stage_named, task_keys
from fvc_lib.execution.run.lock import run_lock
from fvc_lib.execution.run.record import begin_run, record_resumption
from fvc_lib.execution.run.runner import Runner
from fvc_lib.execution.run.status import leave_to_jobs, status_now
from fvc_lib.execution.slurm.jobs import Site, SlurmJob, plan_jobs, plan_one_job, read_site
from fvc_lib.execution.slurm.queue import describe, submit
from fvc_lib.services.config import RunConfig, refuse_fields_of_another_task, run_config
from fvc_lib.services.errors import FvcError, UsageError
from fvc_lib.services.run_paths import RunPaths, find_run

Executor = Literal["local", "slurm"]


@dataclass(frozen=True)
class Wanted:
    """The options of the command line that say what to do, by their names there (``start`` is ``--from``)."""

    experiment: str | None = None
    resume: str | None = None
    fork: bool = False
    only: str | None = None
    start: str | None = None
    force: tuple[str, ...] = ()
    tasks: tuple[str, ...] | None = None
    jobs: int | None = None
    executor: Executor = "local"
    one_job: bool = False

    @property
    def of_a_run(self) -> bool:
        """Whether it is about a run that is there already."""
        return any(given is not None for given in (self.resume, self.only, self.start)) or bool(self.force)

    def check(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            UsageError: options that exclude or need each other.
        """
        for name, given in (("--resume", self.resume), ("--only", self.only), ("--from", self.start)):
            if given == "":  # an empty variable of a script, which must not begin a run of its own
                raise UsageError(f"{name}: got nothing, wanted {'a run' if name == '--resume' else 'a stage'}.")
        if self.tasks is not None and not self.tasks:
            raise UsageError("--tasks: got nothing, wanted keys or stages, for example 04_fold_training_fold_2.")
        chosen = [name for name, given in (("--only", self.only), ("--from", self.start)) if given]
        if len(chosen) > 1 or (self.only and self.force):
            raise UsageError(f"{' and '.join([*chosen, *(['--force'] * bool(self.force))])} exclude each other.")
        if self.fork and not self.resume:
            raise UsageError("--fork starts a new run from another one. Name that run: --resume RUN --fork.")
        if self.tasks and (not self.resume or self.fork or chosen or self.force):
            raise UsageError("--tasks works on a part of one run beside other jobs: --resume RUN --tasks KEY[,KEY].")
        if self.executor == "slurm" and self.tasks:
            raise UsageError("--tasks is what a submitted job itself is started with; leave --executor slurm out.")
        if self.one_job and self.executor != "slurm":
            raise UsageError("--one-job says how to submit: give --executor slurm as well.")


_NO_MLFLOW = (
    "tracker is mlflow, which is not installed (make setup-mlflow, or pip install 'fvc_lib[mlflow]'): unless it is "
    "when this run ends, the run is not exported; run_notebooks.py export-mlflow does it later"
)


class RunCommand:
    """One command at work: the notebooks, the configuration, and the run it is about.

    Args:
        notebooks: the folder of the stages' notebooks.
        wanted: what is asked.
        asked: parameters.

    Raises:
        UsageError: options that exclude each other, no such run, or parameters that it was not made with.
    """

    def __init__(self, notebooks: Path, wanted: Wanted, asked: Asked) -> None:
        wanted.check()
        self.wanted = wanted
        self.notebooks: dict[str, Notebook] = read_notebooks(notebooks)
        self._only = stage_named(wanted.only) if wanted.only else None
        self._start = stage_named(wanted.start) if wanted.start else None
        self._force = [stage_named(text) for text in wanted.force]
        self._command = shlex.join(["python", "run_notebooks.py", *sys.argv[1:]])
        self.config, self.run = asked.config, None
        self._at_once: dict[str, PredictedPeak] | None = None
        if not wanted.of_a_run or wanted.fork:
            _refuse_missing_corpus(asked.config)
        if not wanted.of_a_run:
            refuse_fields_of_another_task(asked.config, asked.written)
        if wanted.executor == "slurm" and not asked.config.use_mlops_pipeline:
            raise UsageError(
                "USE_MLOPS_PIPELINE=false runs every notebook straight through and leaves nothing by which jobs know "
                "what is done: submit with the pipeline, or run it straight within a job of your own."
            )
        if wanted.of_a_run:
            self.run = find_run(Path(asked.config.runs_dir), wanted.resume or "latest", wanted.experiment)
            self.config = (
                config_of_fork(self.run, asked) if wanted.fork else config_to_resume(self.run, asked, sys.argv[1:])
            )

        refuse_stage_of_another_task(self.config, self._only, self._start, *self._force)
        self._tasks = task_keys(wanted.tasks, self.config) if wanted.tasks else None

    def plan(self) -> list[PlannedTask]:
        """What runs and why, as the run stands now."""
        return make_plan(
            self.notebooks,
            self.config,
            self.run,
            only=self._only,
            start=self._start,
            force=self._force,
            tasks=self._tasks,
        )

    def show(self) -> None:
        """Print what would be done; writes nothing."""
        ancestor = self.run if self.wanted.fork else None
        plan, predicted = self.plan(), self._predicted()
        print_plan(plan, self.config, None if ancestor else self.run, predicted)
        if ancestor is not None:
            whole = make_plan(self.notebooks, self.config, ancestor)
            print_fork(ancestor, self.config, inheritance(ancestor, whole, changes(run_config(ancestor), self.config)))
        if self.wanted.executor == "slurm":
            run, site = None if ancestor else self.run, read_site()
            run = run or RunPaths(Path(self.config.runs_dir) / self.config.experiment / "run_TO_BE")  # it is not made
            click.echo(describe(self._slurm_jobs(plan, predicted, site), run, site))

    def execute(self) -> int:
        """Do it, here or as jobs; returns the exit code."""
        if self.wanted.executor == "slurm":
            return self._submit()
        # Before a run begins: it may take ten seconds, and may be interrupted.
        self._at_once = self._predicted() if (self.wanted.jobs or 1) > 1 else None
        if self.run is None:
            planned = self.plan()
            self.run = begin_run(self.config, command=self._command)
            return self._run(self.run, lambda: planned)
        if self.wanted.fork:
            self.run = self._begin_fork(self.run)
            return self._run(self.run, self.plan)
        return self._run(self.run, self._plan_of_resumed)

    def _submit(self) -> int:
        predicted, plan = self._predicted(), self.plan
        if self.run is None:
            self.run = begin_run(self.config, command=self._command, state="waiting")
        elif self.wanted.fork:
            self.run = self._begin_fork(self.run)
        else:
            plan = self._plan_of_resumed  # the jobs read the run's parameters, and these may be new ones
        self._hand_to_slurm(self.run, plan, predicted)
        return 0

    def _hand_to_slurm(
        self, run: RunPaths, make_plan: Callable[[], Sequence[PlannedTask]], predicted: Mapping[str, PredictedPeak]
    ) -> None:
        """Submit what is left of ``run``, and tell what was submitted and how to watch it.

        Raises:
            UsageError: somebody is at work on the run, or the site's settings cannot be meant.
            SlurmError: SLURM is not here, or refused.
        """
        site = read_site()
        with run_lock(run):
            plan = make_plan()
            jobs = self._slurm_jobs(plan, predicted, site)
            # A job goes on with what is unfinished; what is to be repeated must not look finished to it.
            moved = set_aside(run, [planned.task for planned in plan if planned.redo])
            leave_to_jobs(run, [planned.task for planned in plan if planned.run])
        click.echo(f"run {run.root}")
        try:
            submitted = submit(jobs, run, site)
        except FvcError as error:
            put_back(moved)
            go_on = f"python run_notebooks.py --resume {shlex.quote(str(run.root))} --executor slurm"
            raise type(error)(f"{error} The run is there and waits: {go_on}") from error
        for job, handed_in in zip(jobs, submitted, strict=True):
            after = f" after {', '.join(handed_in.after)}" if handed_in.after else ""
            folds = "" if job.folds is None else f", {len(job.folds)} folds"
            click.echo(f"  job {handed_in.job_id}{after}: {job.name}{folds}, {job.memory_mib} MiB ({job.memory_why})")
        watch = f"watch it: python run_notebooks.py status {run.root}"
        click.echo(watch if jobs else "nothing to submit: every task is finished")

    def _slurm_jobs(
        self, plan: Sequence[PlannedTask], predicted: Mapping[str, PredictedPeak], site: Site
    ) -> list[SlurmJob]:
        tasks = [planned.task for planned in plan if planned.run]
        if self.wanted.one_job:
            return plan_one_job(tasks, self.config, site, predicted, at_once=self.wanted.jobs or 1)
        return plan_jobs(tasks, self.config, site, predicted)

    def _predicted(self) -> dict[str, PredictedPeak]:
        """The memory that each stage is expected to take, by what is known, else by trying one step out."""

        def measure(config: RunConfig) -> int | None:
            from fvc_lib.tasks.video.dry_run_memory import measured_training_peak  # torch takes seconds to load

            click.echo("one training step is tried out to predict its memory; about ten seconds", err=True)
            return measured_training_peak(config)

        return predicted_peaks(self.config, None if self.wanted.fork else self.run, measure=measure)

    def _begin_fork(self, ancestor: RunPaths) -> RunPaths:
        """Begin a new run with what is still true of ``ancestor`` under this configuration, and say what that is."""
        own, config = run_config(ancestor), self.config
        changed = changes(own, config)
        taken = inheritance(ancestor, make_plan(self.notebooks, config, ancestor), changed)

        def binding_config(task: Task) -> dict[str, Any]:
            training = import_module(task.stage.training_module)  # torch takes seconds to load
            parameters: dict[str, Any] = training.training_parameters(own, task.fold)
            return parameters

        def prepare(fork: RunPaths) -> dict[str, object]:
            take_over(ancestor, fork, taken, binding_config)
            return {"forked_from": ancestor.run_id, "changed": {name: list(change) for name, change in changed.items()}}

        fork = begin_run(config, command=self._command, prepare=prepare)
        print_fork(ancestor, config, taken)
        return fork

    def _plan_of_resumed(self) -> list[PlannedTask]:
        """Called with the run's lock in hand: note the attempt, then see what is left to do."""
        if self.run is not None and (differs := record_resumption(self.run, self.config, command=self._command)):
            click.echo(
                f"warning: this attempt differs from the one before: {'; '.join(differs)}. The run goes on, but is no "
                "longer bit for bit what an undisturbed one would be; run.json says so.",
                err=True,
            )
        return self.plan()

    def _run(self, run: RunPaths, plan: Callable[[], Sequence[PlannedTask]]) -> int:
        """Run, then report; trouble with the report does not change how the run ended."""
        click.echo(f"run {run.root}")
        for warning in _missing_tracker(self.config):
            click.echo(f"warning: {warning}", err=True)
        runner = Runner(
            run,
            self.config,
            self.notebooks,
            jobs=self.wanted.jobs,
            only_tasks=self._tasks,
            predicted=self._at_once,
        )
        try:
            exit_code = runner.execute(plan)
        except OSError as error:
            if error.filename is None:  # write() does not say which file it was for
                error.filename = str(run.root)
            error.add_note(f"to go on: python run_notebooks.py --resume {shlex.quote(str(run.root))}")
            raise
        # Of several jobs the one that ends the run reports, and one that failed.
        if exit_code or self._tasks is None or status_now(run).state not in {"waiting", "running"}:
            report_run(run)
            export_when_asked(run, self.config)
        return exit_code


def _missing_tracker(config: RunConfig) -> list[str]:
    """Said at once, not after a night of training; the run does not depend on it."""
    if config.tracker == "mlflow" and importlib.util.find_spec("mlflow") is None:
        return [_NO_MLFLOW]
    return []


def _refuse_missing_corpus(config: RunConfig) -> None:
    """The index stage would find out as well, after a kernel has started and a run has begun."""
    if config.corpus and not Path(config.corpus).exists():
        raise UsageError(f"corpus {config.corpus!r}: no such file or folder. Wanted: {config.meaning('corpus')}.")
