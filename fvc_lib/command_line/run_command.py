"""Begin, resume or fork a run, here or as jobs."""

import errno
import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from fvc_lib import CHECKOUT
from fvc_lib.command_line import commands
from fvc_lib.execution.plan.fingerprint import line_of_other_code, note_forced, put_back
from fvc_lib.execution.plan.plan import PlannedTask, make_plan, read_notebooks
from fvc_lib.execution.plan.stages import Notebook, refuse_stage_of_another_task, stage_named, task_keys
from fvc_lib.execution.run import which_run
from fvc_lib.execution.run.gpus import ranks_chosen_for_job, ranks_chosen_here, shares_of_ranks
from fvc_lib.execution.run.lock import is_task_worked_on, is_worked_on, run_lock
from fvc_lib.execution.run.record import begin_run, last_attempt, record_resumption
from fvc_lib.execution.run.runner import Runner, make_room
from fvc_lib.execution.run.status import RunState, leave_to_jobs, read_status, status_now
from fvc_lib.execution.slurm.job_scripts import Site, SlurmJob, plan_jobs, plan_one_job, read_site
from fvc_lib.execution.slurm.queue import describe, refuse_silent_cluster, submission_text, submit
from fvc_lib.services.config import RunConfig
from fvc_lib.services.config_fields import AUTO_RANKS
from fvc_lib.services.errors import FvcError, UsageError, command_text
from fvc_lib.services.isolated_workers import run_isolated
from fvc_lib.services.parameters import refuse_contradictions, run_config
from fvc_lib.services.registry import DETECTORS, IMAGE_LAYOUTS
from fvc_lib.services.run_paths import RunPaths, find_run, refuse_runs_folder
from fvc_lib.services.tasks import CROSS_CORPUS, DEFAULT_TASK

NOTEBOOKS = CHECKOUT / "notebooks"
Executor = Literal["local", "slurm"]


class Jobs(click.ParamType[int | None]):
    """A number of folds to train at once, or ``auto``, which is None."""

    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """Return the number; None for ``auto``."""
        if value == "auto":
            return None
        try:
            return click.IntRange(min=1).convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{value!r} is neither a number from 1 on nor auto", param, ctx)


@dataclass(frozen=True)
class Wanted:
    """The options of the command line, by their names there (``start`` is ``--from``)."""

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
        """Whether the command is about an existing run."""
        return any(given is not None for given in (self.resume, self.only, self.start)) or bool(self.force)

    def check(self) -> None:
        """Refuse options that exclude or need each other.

        Raises:
            UsageError: such options, or an empty value.
        """
        chosen = [name for name, given in (("--only", self.only), ("--from", self.start)) if given]
        chosen += ["--force"] * bool(self.force and self.only)
        tasks_alone = bool(self.resume) and not (self.fork or chosen or self.force or self.executor == "slurm")
        # An empty value is an unset variable of a script, which must not begin a new run.
        refusals = [
            ("--resume: got nothing, wanted a run.", self.resume == ""),
            ("--only and --from: got nothing, wanted a stage.", "" in (self.only, self.start)),
            ("--tasks: got nothing, wanted keys or stages, for example 04_fold_training_fold_2.", self.tasks == ()),
            (f"{' and '.join(chosen)} exclude each other.", len(chosen) > 1),
            ("--fork starts a new run from another one. Name that run: --resume RUN --fork.",
             self.fork and not self.resume),
            ("--tasks works on a part of one run, as a job does: --resume RUN --tasks KEY[,KEY].",
             bool(self.tasks) and not tasks_alone),
            ("--one-job is about submitting: give --executor slurm as well.",
             self.one_job and self.executor != "slurm"),
        ]  # fmt: skip
        for message, is_wrong in refusals:
            if is_wrong:
                raise UsageError(message)


_NO_MLFLOW = (
    f"tracker is mlflow, which is not installed ({shlex.join(['make', '-C', str(CHECKOUT), 'setup-mlflow'])}). Install "
    "it before this run ends, or run export-mlflow later"
)


class RunCommand:
    """A command that begins, resumes or forks a run.

    Args:
        notebooks: the folder of the notebooks.
        wanted: the options.
        asked: the parameters.

    Raises:
        UsageError: options that exclude each other, no such run, or parameters that differ from the run's.
    """

    def __init__(self, notebooks: Path, wanted: Wanted, asked: which_run.Asked) -> None:
        wanted.check()
        self.wanted, self.config, self.run = wanted, asked.config, None
        self.notebooks: dict[str, Notebook] = read_notebooks(notebooks)
        self._submits = wanted.executor == "slurm"
        self._only = stage_named(wanted.only) if wanted.only else None
        self._start = stage_named(wanted.start) if wanted.start else None
        self._force = [stage_named(text) for text in wanted.force]
        self._command = shlex.join(["python", "run_notebooks.py", *sys.argv[1:]])
        if not wanted.of_a_run or wanted.fork:
            _refuse_wrong_corpus(asked.config)
        if not wanted.of_a_run:
            refuse_contradictions(asked.config, asked.written)
        if self._submits and not asked.config.use_mlops_pipeline:
            raise UsageError(
                "USE_MLOPS_PIPELINE=false runs every notebook straight through and records nothing that jobs could go "
                "on from: submit with the pipeline, or run it straight within a job of your own."
            )
        if wanted.of_a_run:
            self.run = find_run(Path(asked.config.runs_dir), wanted.resume or "latest", wanted.experiment)
            self.config = (
                which_run.config_of_fork(self.run, asked)
                if wanted.fork
                else which_run.config_to_resume(self.run, asked, sys.argv[1:])
            )
        if not wanted.of_a_run or wanted.fork:
            _refuse_unknown_targets(self.config)
        refuse_stage_of_another_task(self.config, self._only, self._start, *self._force)
        self._tasks = task_keys(wanted.tasks, self.config) if wanted.tasks else None
        self.config, chosen = with_ranks(self.config, wanted)
        self._chosen = chosen or asked.chosen

    def plan(self) -> list[PlannedTask]:
        """Return the tasks, with a reason for each that runs."""
        return make_plan(
            self.notebooks, self.config, self.run, only=self._only, start=self._start, force=self._force,
            tasks=self._tasks,
        )  # fmt: skip

    def refuse(self, *, imports: bool = True) -> None:
        """Refuse what ``execute`` would refuse; nothing is written.

        Args:
            imports: also build what the parameters choose, in another process.

        Raises:
            UsageError: another process works on the run, a new one cannot be created, or a choice cannot be built.
            DataError: the run's status or record cannot be read.
            OSError: the folder cannot be written.
        """
        run = None if self.wanted.fork else self.run
        folder = run.root if run is not None else refuse_runs_folder(self.config.runs_dir, self.config.experiment)
        if not os.access(folder, os.W_OK | os.X_OK):
            why = errno.EROFS if os.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES
            raise OSError(why, os.strerror(why), str(folder))
        if run is not None:
            busy = [key for key in self._tasks or () if is_task_worked_on(run, key)]
            if busy or (self._tasks is None and is_worked_on(run)):
                raise UsageError(f"{run.run_id} is being worked on. Wait for it, or stop it, then repeat the command.")
            read_status(run)
            last_attempt(run)
        if imports:
            _refuse_broken_choice(self.plan(), self.config, elsewhere=self._submits)

    def show(self) -> None:
        """Print the plan; write nothing, and refuse what ``execute`` refuses."""
        self.refuse()
        run = None if self.wanted.fork else self.run
        plan = self.plan()
        self._describe(plan)
        commands.print_plan(plan, self.config, run)
        if self.wanted.fork and self.run is not None:
            commands.print_fork(self.run, self.config, self._taken(self.run))
        if self._submits:
            run, site = run or RunPaths(Path(self.config.runs_dir) / self.config.experiment / "run_TO_BE"), read_site()
            click.echo(describe(self._slurm_jobs(plan, site), run, site))

    def execute(self) -> int:
        """Run the plan here, or submit it as jobs; return the exit code."""
        if self._submits:
            refuse_silent_cluster()  # before a run begins that would wait for jobs
        self.refuse()
        plan = self.plan()
        self._describe(plan)
        if self.run is None:
            state: RunState = "waiting" if self._submits else "running"
            self.run = begin_run(
                self.config, command=self._command, state=state, chosen=self._chosen, submits=self._submits
            )
            run, make = self.run, (lambda: plan)
        elif self.wanted.fork:
            self.run = run = self._begin_fork(self.run)
            make = self.plan
        else:
            run, make = self.run, self._plan_of_resumed
        return self._hand_to_slurm(run, make) if self._submits else self._run(run, make)

    def _describe(self, plan: Sequence[PlannedTask]) -> None:
        """Print which trainings stay although code has changed, and how ranks share a training."""
        finished = [planned.task for planned in plan if planned.only_if_changed or not planned.run]
        other_code = line_of_other_code(self.run, finished) if self.run is not None else ""
        for line in filter(None, (other_code, self._chosen, shares_of_ranks(self.config))):
            click.echo(line)

    def _hand_to_slurm(self, run: RunPaths, make_plan: Callable[[], Sequence[PlannedTask]]) -> int:
        """Submit what is left of ``run``; return 0.

        Raises:
            UsageError: another process works on the run, or the site's settings are wrong.
            SlurmError: SLURM is missing, or refused.
        """
        site = read_site()
        with run_lock(run):
            plan = make_plan()
            jobs = self._slurm_jobs(plan, site)
            # A job goes on with unfinished tasks, so tasks to be repeated must not look finished.
            moved = make_room(run, plan)
            leave_to_jobs(run, [planned.task for planned in plan if planned.run])
        click.echo(f"run {run.root}")
        try:
            submitted = submit(jobs, run, site)
        except FvcError as error:
            put_back(moved)
            note_forced(run, [stage.name for stage in self._force])
            go_on = command_text("--resume", run.root, "--executor", "slurm")
            raise type(error)(f"{error} The run waits; to go on: {go_on}") from error
        for job, handed_in in zip(jobs, submitted, strict=True):
            click.echo(f"  {submission_text(job, handed_in)}")
        watch = f"watch it: {command_text('status', run.root)}"
        click.echo(watch if jobs else "nothing to submit: every task is finished")
        return 0

    def _slurm_jobs(self, plan: Sequence[PlannedTask], site: Site) -> list[SlurmJob]:
        tasks = [planned.task for planned in plan if planned.run]
        if self.wanted.one_job:
            return plan_one_job(tasks, self.config, site, at_once=self.wanted.jobs or 1)
        return plan_jobs(tasks, self.config, site)

    def _taken(self, ancestor: RunPaths) -> which_run.Inheritance:
        changed = which_run.changes(run_config(ancestor), self.config)
        whole = make_plan(self.notebooks, self.config, ancestor)
        return which_run.inheritance(ancestor, self.notebooks, whole, changed)

    def _begin_fork(self, ancestor: RunPaths) -> RunPaths:
        """Begin a new run with what is still true of ``ancestor``, and print what that is."""
        taken, changed = self._taken(ancestor), which_run.changes(run_config(ancestor), self.config)

        def prepare(fork: RunPaths) -> dict[str, object]:
            which_run.take_over(ancestor, fork, taken)
            return {"forked_from": ancestor.run_id, "changed": {name: list(change) for name, change in changed.items()}}

        fork = begin_run(
            self.config, command=self._command, prepare=prepare, chosen=self._chosen, submits=self._submits
        )
        commands.print_fork(ancestor, self.config, taken)
        return fork

    def _plan_of_resumed(self) -> list[PlannedTask]:
        """Record the attempt, then return the plan; called while the run is locked."""
        assert self.run is not None
        note_forced(self.run, [stage.name for stage in self._force])
        if differs := record_resumption(self.run, self.config, command=self._command, submits=self._submits):
            click.echo(
                f"warning: this attempt differs from the one before: {'; '.join(differs)}. The run goes on, but is no "
                "longer bit for bit what an undisturbed one would be; run.json records it.",
                err=True,
            )
        return self.plan()

    def _run(self, run: RunPaths, plan: Callable[[], Sequence[PlannedTask]]) -> int:
        """Run, then report; a failed report changes the exit code of a run that ended well."""
        click.echo(f"run {run.root}")
        if self.config.tracker == "mlflow" and importlib.util.find_spec("mlflow") is None:
            click.echo(f"warning: {_NO_MLFLOW}", err=True)  # at once, not after a night of training
        runner = Runner(run, self.config, self.notebooks, jobs=self.wanted.jobs, only_tasks=self._tasks)
        try:
            exit_code = runner.execute(plan)
        except OSError as error:
            error.filename = error.filename or str(run.root)  # write() does not name its file
            error.add_note(f"to go on: {command_text('--resume', run.root)}")
            raise
        # Of several jobs the one that ends the run reports, and one that failed.
        if exit_code or self._tasks is None or status_now(run).state not in {"waiting", "running"}:
            try:
                reported = commands.report_run(run)
                exit_code = exit_code or reported
                commands.export_when_asked(run, self.config)
            except (KeyboardInterrupt, SystemExit):  # a signal: the run's own exit code counts more
                if not exit_code:
                    raise
        return exit_code


def with_ranks(config: RunConfig, wanted: Wanted) -> tuple[RunConfig, str]:
    """Return ``config`` with the number that ``num_ranks auto`` means where it trains, and the reason in a sentence.

    The sentence is empty, and the configuration unchanged, where a number was given.
    """
    if wanted.executor != "slurm" or config.num_ranks != AUTO_RANKS:
        return ranks_chosen_here(config, wanted.jobs)
    site, jobs = read_site(), (wanted.jobs or 1) if wanted.one_job else 1
    return ranks_chosen_for_job(
        config, gpus_of_rank=site.gpus, ranks_per_node=site.ranks_per_node, jobs=jobs, site=site.path.name
    )


def _refuse_broken_choice(plan: Sequence[PlannedTask], config: RunConfig, *, elsewhere: bool) -> None:
    """Build what the parameters choose, in another process: the training would fail, perhaps hours later.

    Args:
        plan: the tasks.
        config: the parameters.
        elsewhere: whether another machine trains, which may accelerate what this one cannot.

    Raises:
        UsageError: it cannot be built; the message has the reason.
    """
    if not any(planned.run and planned.task.stage.trains for planned in plan):
        return
    values = config.model_dump(mode="json") | ({"accelerations": []} if elsewhere else {})
    try:
        (answer,) = run_isolated(f"{__name__}:trouble_of_choice", [values], workers=1, memory_bytes=None)
    except FvcError:  # no process can be started: nor will the stage, which names the reason
        return
    if answer.failure and not answer.detail.startswith("SIGKILL"):  # killed for memory: the stage names what it needs
        raise UsageError(f"what the parameters choose cannot be built: {answer.detail}. Mend it, or choose another.")
    if answer.value:
        raise UsageError(answer.value)


def trouble_of_choice(values: dict[str, Any]) -> str:
    """Return why what a configuration chooses cannot be imported or built; empty if it can.

    Weights are compared by name and shape; the network itself is built without memory.
    """
    config = RunConfig(**values)
    try:
        config.load_chosen()
        if config.accelerations:
            from fvc_lib.engine.device import training_device  # torch takes a second to load

            training_device(config)
        if config.of_features:
            _try_model_on_features(config)
        elif config.task == DEFAULT_TASK:
            _try_detector(config)
        elif sees := DETECTORS.of_features(config.model):
            raise UsageError(
                f"model {config.model!r} reads {sees} features of videos, and task {config.task} needs a network: "
                "run_notebooks.py detectors lists them."
            )
    except UsageError as error:
        return str(error)
    return ""


def _try_model_on_features(config: RunConfig) -> None:
    from fvc_lib.detectors.classical import refuse_random_trunk, refuse_settings, trunk_config

    refuse_settings(config)
    missing = [each for each in DETECTORS.get(config.model).packages if importlib.util.find_spec(each) is None]
    if missing and config.of_features == "forensic":
        raise UsageError(
            f"model {config.model!r} needs {', '.join(missing)}, not installed: pip install 'fvc_lib[boosters]'."
        )
    if config.of_features == "embedding":
        _try_detector(trunk_config(config))
        refuse_random_trunk(config)


def _try_detector(config: RunConfig) -> None:
    from fvc_lib.detectors.network import build_detector  # torch takes a second to load
    from fvc_lib.engine.device import without_memory
    from fvc_lib.tasks.video.features import frozen_trunk

    try:
        try:
            with without_memory():
                network = build_detector(config)
        except UsageError:
            raise
        except Exception:  # noqa: BLE001 - a user's class may need real numbers
            network = build_detector(config)
    except (UsageError, MemoryError):
        raise
    except Exception as error:  # whatever a user's class raises
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"model {config.model!r} cannot be built: {reason}. Mend it, or choose another.") from error
    frozen_trunk(network, config)
    if DETECTORS.file_of(config.model) is not None:
        _try_two_clips(config)


def _try_two_clips(config: RunConfig) -> None:
    """Run two clips through a user's own network on the CPU, unless it needs another device or more memory.

    Raises:
        UsageError: it fails on them, or gives another shape than logits (2,).
    """
    import torch

    from fvc_lib.detectors.network import build_detector
    from fvc_lib.engine.oom_detection import is_out_of_memory
    from fvc_lib.engine.step import refuse_split_batch_norm

    clips, model = config.clips, f"model {config.model!r}"
    frames = torch.randint(0, 256, (2, clips.num_frames, 3, clips.side, clips.side), dtype=torch.uint8)
    try:
        with torch.no_grad():
            network = build_detector(config).train()
            if (at_once := config.batch_size or DETECTORS.get(config.model).micro_batch) < config.effective_batch_size:
                refuse_split_batch_norm(network, at_once, config.effective_batch_size)
            logits = network.eval()(frames)
    except FvcError as error:
        raise UsageError(f"{model}: {error}") from error
    except Exception as error:  # whatever a user's class raises
        if is_out_of_memory(error) or re.search("cuda|gpu|nvidia|triton|device", str(error), re.IGNORECASE):
            return  # the machine that trains may be another one
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"{model} fails on uint8 clips {tuple(frames.shape)}: {reason}. Mend it.") from error
    shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
    if shape != (2,):
        raise UsageError(
            f"{model}: gives {shape} for 2 clips, wanted logits (2,), one per clip. For features set num_features in "
            "the class's body: they get a head."
        )


_FILES_LOOKED_AT = 20_000  # in each corpus, in less than a second


def _refuse_wrong_corpus(config: RunConfig) -> None:
    """Refuse a corpus that nothing can be trained on, by its folders, lists and names of files.

    The index stage would refuse it after the run has begun; very large corpora are left to that stage.
    """
    corpora = [each for each in (config.corpus, *config.more_corpora) if each]
    if not corpora:
        return
    from fvc_lib.corpus.corpus_files import LongCorpusError
    from fvc_lib.corpus.listing import (
        read_corpora,
        recognised,  # with polars, for this alone
    )
    from fvc_lib.corpus.protocols.protocol import refuse_untrainable
    from fvc_lib.corpus.video_texts import video_text_root

    if config.task == "video_text":
        video_text_root(config)
    if config.task == "image" and (config.image_layout == "auto" or not Path(config.corpus).exists()):
        recognised(IMAGE_LAYOUTS, Path(config.corpus))
    if config.task != DEFAULT_TASK:
        return
    with suppress(LongCorpusError):
        listing = read_corpora(
            corpora, None,
            allow_outside=config.allow_outside, label_map=config.label_map, most_files=_FILES_LOOKED_AT,
        )  # fmt: skip
        if config.corpus:  # without one the sample corpus brings both labels
            refuse_untrainable(listing, config)


def _refuse_unknown_targets(config: RunConfig) -> None:
    """Refuse target corpora that the stage of protocols would refuse once every video has been indexed."""
    if config.protocol == CROSS_CORPUS:
        from fvc_lib.corpus.protocols.protocol import refused_targets  # polars, for this alone
        from fvc_lib.corpus.samples.videos import names_of_corpora

        if why := refused_targets(config.target_corpora, names_of_corpora(config)):
            raise UsageError(why)
