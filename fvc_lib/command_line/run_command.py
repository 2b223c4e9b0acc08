"""Beginning, resuming and forking a run as a command asks for it, here or as jobs."""

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
from fvc_lib.execution.run.status import leave_to_jobs, read_status, status_now
from fvc_lib.execution.slurm.job_scripts import Site, SlurmJob, plan_jobs, plan_one_job, read_site
from fvc_lib.execution.slurm.queue import describe, refuse_silent_cluster, submission_text, submit
from fvc_lib.services.config import RunConfig
from fvc_lib.services.config_fields import AUTO_RANKS
from fvc_lib.services.errors import FvcError, UsageError, command_text
from fvc_lib.services.isolated_workers import run_isolated
from fvc_lib.services.parameters import refuse_fields_of_another_task, run_config
from fvc_lib.services.registry import DETECTORS, IMAGE_LAYOUTS
from fvc_lib.services.run_paths import RunPaths, find_run, refuse_runs_folder
from fvc_lib.services.tasks import CROSS_CORPUS, DEFAULT_TASK

NOTEBOOKS = CHECKOUT / "notebooks"
Executor = Literal["local", "slurm"]


class Jobs(click.ParamType[int | None]):
    """A number of folds to train at once, or ``auto``, which is None."""

    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """Read what was given."""
        if value == "auto":
            return None
        try:
            return click.IntRange(min=1).convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{value!r} is neither a number from 1 on nor auto", param, ctx)


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
    f"tracker is mlflow, which is not installed ({shlex.join(['make', '-C', str(CHECKOUT), 'setup-mlflow'])}): unless "
    "it is when this run ends, the run is not exported; export-mlflow does it later"
)


class RunCommand:
    """One command at work: the notebooks (in folder ``notebooks``), the configuration, and the run it is about.

    Raises:
        UsageError: options that exclude each other, no such run, or parameters that it was not made with.
    """

    def __init__(self, notebooks: Path, wanted: Wanted, asked: which_run.Asked) -> None:
        wanted.check()
        self.wanted = wanted
        self.notebooks: dict[str, Notebook] = read_notebooks(notebooks)
        self._only = stage_named(wanted.only) if wanted.only else None
        self._start = stage_named(wanted.start) if wanted.start else None
        self._force = [stage_named(text) for text in wanted.force]
        self._command = shlex.join(["python", "run_notebooks.py", *sys.argv[1:]])
        self.config, self.run, self._submits = asked.config, None, wanted.executor == "slurm"
        if not wanted.of_a_run or wanted.fork:
            _refuse_wrong_corpus(asked.config)
        if not wanted.of_a_run:
            refuse_fields_of_another_task(asked.config, asked.written)
        if self._submits and not asked.config.use_mlops_pipeline:
            raise UsageError(
                "USE_MLOPS_PIPELINE=false runs every notebook straight through and leaves nothing by which jobs know "
                "what is done: submit with the pipeline, or run it straight within a job of your own."
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
        self._chosen = asked.chosen
        if self.config.num_ranks == AUTO_RANKS:
            self.config, self._chosen = with_ranks(self.config, wanted)
        elif asked.config.num_ranks == AUTO_RANKS and self.run is not None:
            self._chosen = (
                f"num_ranks auto: {self.config.num_ranks} ({self.run.run_id} was made with it; -p num_ranks NUMBER "
                "changes it)"
            )

    def _say_ranks(self) -> None:
        """How trainings are shared between ranks, and why by so many where that was left to FVC."""
        for line in filter(None, (self._chosen, shares_of_ranks(self.config))):
            click.echo(line)

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

    def _refuse(self) -> None:
        """Refuse what ``execute`` would refuse; nothing is written.

        Raises:
            UsageError: the run is being worked on, or a new one cannot be there.
            DataError: its status or its record cannot be read.
            OSError: it may not be written.
        """
        run = None if self.wanted.fork else self.run
        there = run.root if run is not None else refuse_runs_folder(self.config.runs_dir, self.config.experiment)
        if not os.access(there, os.W_OK | os.X_OK):
            why = errno.EROFS if os.statvfs(there).f_flag & os.ST_RDONLY else errno.EACCES
            raise OSError(why, os.strerror(why), str(there))
        if run is None:
            return
        busy = [key for key in self._tasks or () if is_task_worked_on(run, key)]
        if busy or (self._tasks is None and is_worked_on(run)):
            raise UsageError(f"{run.run_id} is being worked on. Wait for it, or stop it, then repeat the command.")
        read_status(run)
        last_attempt(run)

    def show(self) -> None:
        """Print what would be done; writes nothing, and refuses what ``execute`` refuses."""
        self._refuse()
        ancestor = self.run if self.wanted.fork else None
        plan = self.plan()
        self._name_other_code(plan)
        self._refuse_broken_choice(plan)
        commands.print_plan(plan, self.config, None if ancestor else self.run)
        self._say_ranks()
        if ancestor is not None:
            changed = which_run.changes(run_config(ancestor), self.config)
            whole = make_plan(self.notebooks, self.config, ancestor)
            commands.print_fork(ancestor, self.config, which_run.inheritance(ancestor, self.notebooks, whole, changed))
        if self._submits:
            run, site = None if ancestor else self.run, read_site()
            run = run or RunPaths(Path(self.config.runs_dir) / self.config.experiment / "run_TO_BE")  # it is not made
            click.echo(describe(self._slurm_jobs(plan, site), run, site))

    def _name_other_code(self, plan: Sequence[PlannedTask]) -> None:
        """Print which trainings of the run stand although the library's code has changed."""
        stand = [planned.task for planned in plan if planned.only_if_changed or not planned.run]
        if self.run is not None and (line := line_of_other_code(self.run, stand)):
            click.echo(line)

    def _refuse_broken_choice(self, plan: Sequence[PlannedTask]) -> None:
        """Find out now what would end the training stage, perhaps hours from here; in another process, because what is
        chosen may need torch, which this one need not load.
        """
        if not _trains(plan):
            return
        values = self.config.model_dump(mode="json")
        if self._submits:  # a job's machine may have what this one has not
            values["accelerations"] = []
        try:
            (answer,) = run_isolated(f"{__name__}:trouble_of_choice", [values], workers=1, memory_bytes=None)
        except FvcError:  # it cannot even start: nor will the stage, which says why
            return
        if answer.detail.startswith("SIGKILL"):  # most likely for want of memory: the stage says what it needs
            return
        if answer.failure:
            raise UsageError(
                f"what the parameters choose cannot be built: {answer.detail}. Mend it, or choose another."
            )
        if answer.value:
            raise UsageError(answer.value)

    def refuse(self, *, imports: bool = True) -> None:
        """Refuse what ``execute`` would refuse; ``imports``: also what the parameters choose and cannot be imported."""
        self._refuse()
        if imports:
            self._refuse_broken_choice(self.plan())

    def execute(self) -> int:
        """Do it, here or as jobs; returns the exit code."""
        if self._submits:
            refuse_silent_cluster()  # before a run begins that would wait for jobs
        self._refuse()
        plan = self.plan()
        self._name_other_code(plan)
        self._refuse_broken_choice(plan)
        self._say_ranks()
        if self._submits:
            return self._submit()
        if self.run is None:
            planned = self.plan()
            self.run = begin_run(self.config, command=self._command, chosen=self._chosen)
            return self._run(self.run, lambda: planned)
        if self.wanted.fork:
            self.run = self._begin_fork(self.run)
            return self._run(self.run, self.plan)
        return self._run(self.run, self._plan_of_resumed)

    def _submit(self) -> int:
        plan = self.plan
        if self.run is None:
            self.run = begin_run(self.config, command=self._command, state="waiting", chosen=self._chosen, submits=True)
        elif self.wanted.fork:
            self.run = self._begin_fork(self.run)
        else:
            plan = self._plan_of_resumed  # the jobs read the run's parameters, and these may be new ones
        self._hand_to_slurm(self.run, plan)
        return 0

    def _hand_to_slurm(self, run: RunPaths, make_plan: Callable[[], Sequence[PlannedTask]]) -> None:
        """Submit what is left of ``run``, and tell what was submitted and how to watch it.

        Raises:
            UsageError: somebody is at work on the run, or the site's settings cannot be meant.
            SlurmError: SLURM is not here, or refused.
        """
        site = read_site()
        with run_lock(run):
            plan = make_plan()
            jobs = self._slurm_jobs(plan, site)
            # A job goes on with what is unfinished; what is to be repeated must not look finished to it.
            moved = make_room(run, plan)
            leave_to_jobs(run, [planned.task for planned in plan if planned.run])
        click.echo(f"run {run.root}")
        try:
            submitted = submit(jobs, run, site)
        except FvcError as error:
            put_back(moved)
            note_forced(run, [stage.name for stage in self._force])
            go_on = command_text("--resume", run.root, "--executor", "slurm")
            raise type(error)(f"{error} The run is there and waits: {go_on}") from error
        for job, handed_in in zip(jobs, submitted, strict=True):
            click.echo(f"  {submission_text(job, handed_in)}")
        watch = f"watch it: {command_text('status', run.root)}"
        click.echo(watch if jobs else "nothing to submit: every task is finished")

    def _slurm_jobs(self, plan: Sequence[PlannedTask], site: Site) -> list[SlurmJob]:
        tasks = [planned.task for planned in plan if planned.run]
        if self.wanted.one_job:
            return plan_one_job(tasks, self.config, site, at_once=self.wanted.jobs or 1)
        return plan_jobs(tasks, self.config, site)

    def _begin_fork(self, ancestor: RunPaths) -> RunPaths:
        """Begin a new run with what is still true of ``ancestor`` under this configuration, and say what that is."""
        own, config = run_config(ancestor), self.config
        changed = which_run.changes(own, config)
        taken = which_run.inheritance(ancestor, self.notebooks, make_plan(self.notebooks, config, ancestor), changed)

        def prepare(fork: RunPaths) -> dict[str, object]:
            which_run.take_over(ancestor, fork, taken)
            return {"forked_from": ancestor.run_id, "changed": {name: list(change) for name, change in changed.items()}}

        fork = begin_run(config, command=self._command, prepare=prepare, chosen=self._chosen, submits=self._submits)
        commands.print_fork(ancestor, config, taken)
        return fork

    def _plan_of_resumed(self) -> list[PlannedTask]:
        """Called with the run's lock in hand: note the attempt, then see what is left to do."""
        if self.run is not None and self._force:
            note_forced(self.run, [stage.name for stage in self._force])
        if self.run is not None and (
            differs := record_resumption(self.run, self.config, command=self._command, submits=self._submits)
        ):
            click.echo(
                f"warning: this attempt differs from the one before: {'; '.join(differs)}. The run goes on, but is no "
                "longer bit for bit what an undisturbed one would be; run.json says so.",
                err=True,
            )
        return self.plan()

    def _run(self, run: RunPaths, plan: Callable[[], Sequence[PlannedTask]]) -> int:
        """Run, then report; where the run ended well, trouble with the report is what the command leaves with."""
        click.echo(f"run {run.root}")
        if self.config.tracker == "mlflow" and importlib.util.find_spec("mlflow") is None:
            click.echo(f"warning: {_NO_MLFLOW}", err=True)  # at once, not after a night of training
        runner = Runner(
            run,
            self.config,
            self.notebooks,
            jobs=self.wanted.jobs,
            only_tasks=self._tasks,
        )
        try:
            exit_code = runner.execute(plan)
        except OSError as error:
            if error.filename is None:  # write() does not say which file it was for
                error.filename = str(run.root)
            error.add_note(f"to go on: {command_text('--resume', run.root)}")
            raise
        # Of several jobs the one that ends the run reports, and one that failed.
        if exit_code or self._tasks is None or status_now(run).state not in {"waiting", "running"}:
            try:
                reported = commands.report_run(run)
                exit_code = exit_code or reported
                commands.export_when_asked(run, self.config)
            except (KeyboardInterrupt, SystemExit):  # a signal: what ended the run before it decides
                if not exit_code:
                    raise
        return exit_code


def with_ranks(config: RunConfig, wanted: Wanted, here: Sequence[str] | None = None) -> tuple[RunConfig, str]:
    """``config`` with what ``num_ranks auto`` is where its trainings will be, and why, a sentence; else as it is.

    ``here``: the GPUs that it may use of this machine; None: all.
    """
    if wanted.executor != "slurm":
        return ranks_chosen_here(config, wanted.jobs, here)
    site, jobs = read_site(), (wanted.jobs or 1) if wanted.one_job else 1
    return ranks_chosen_for_job(
        config, gpus_of_rank=site.gpus, ranks_per_node=site.ranks_per_node, jobs=jobs, site=site.path.name
    )


def _trains(plan: Sequence[PlannedTask]) -> bool:
    return any(planned.run and planned.task.stage.trains for planned in plan)


def trouble_of_choice(values: dict[str, Any]) -> str:
    """Why what the configuration of these ``values`` chooses cannot be imported or built; empty where it can.

    Its weights are read and compared by name and shape; the network itself is built without memory.
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
                f"model {config.model!r} sees {sees} features of videos, and task {config.task} needs a network. Take "
                "one: run_notebooks.py detectors lists them."
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
        with without_memory():
            network = build_detector(config)
    except UsageError:
        raise
    except Exception:  # noqa: BLE001 - a user's class may want real numbers
        try:
            network = build_detector(config)
        except (UsageError, MemoryError):
            raise
        except Exception as error:  # whatever a user's class raises
            reason = f"{type(error).__name__}: {error}"
            raise UsageError(
                f"model {config.model!r} cannot be built: {reason}. Mend it, or choose another."
            ) from error
    frozen_trunk(network, config)
    if DETECTORS.file_of(config.model) is not None:
        _try_two_clips(config, lambda: build_detector(config))


def _try_two_clips(config: RunConfig, build: Callable[[], Any]) -> None:
    """Run two clips through a user's own network on the CPU; nothing is said where that needs another device or memory.

    Raises:
        UsageError: it fails on them, or gives other shapes than training takes.
    """
    import torch

    from fvc_lib.detectors.network import Detector
    from fvc_lib.engine.oom_detection import is_out_of_memory
    from fvc_lib.engine.step import refuse_split_batch_norm

    clips, model = config.clips, f"model {config.model!r}"
    frames = torch.randint(0, 256, (2, clips.num_frames, 3, clips.side, clips.side), dtype=torch.uint8)
    try:
        with torch.no_grad():
            network = build().train()
            if (at_once := config.batch_size or DETECTORS.get(config.model).micro_batch) < config.effective_batch_size:
                refuse_split_batch_norm(network, at_once, config.effective_batch_size)
            network.eval()
            if isinstance(network, Detector):
                trunk: Any = network.trunk
                features, size = trunk(frames), getattr(trunk, "frame_feature_size", None) or trunk.num_features
                shape = tuple(features.shape)
                if len(shape) not in (2, 3) or shape[0] != 2:
                    raise UsageError(f"{model}: of 2 clips it gives features {shape}, wanted (2, F) or (2, T, F).")
                if shape[-1] != size:
                    raise UsageError(
                        f"{model}: features of {shape[-1]} numbers, num_features says {size}. Mend either."
                    )
            logits = network(frames)
    except UsageError:
        raise
    except FvcError as error:
        raise UsageError(f"{model}: {error}") from error
    except Exception as error:  # whatever a user's class raises
        if is_out_of_memory(error) or _OF_A_DEVICE.search(str(error)):
            return  # the machine that trains may be another one
        is_uint8 = "Byte" in str(error) or "unsigned char" in str(error)
        remedy = "Frames are uint8: call .float() first" if is_uint8 else "Mend it, or choose another"
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"{model} fails on uint8 clips {tuple(frames.shape)}: {reason}. {remedy}.") from error
    got = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
    if got != (2,):
        remedy = " Or put num_features into the class's body, not __init__: its features get a head."
        raise UsageError(
            f"{model}: of 2 clips it gives {got}, wanted logits (2,), one per clip."
            f"{remedy if hasattr(network, 'num_features') else ''}"
        )


_OF_A_DEVICE = re.compile(r"cuda|gpu|nvidia|triton|device", re.IGNORECASE)


_FILES_LOOKED_AT = 20_000  # in each corpus, in less than a second


def _refuse_wrong_corpus(config: RunConfig) -> None:
    """Refuse a corpus that nothing can be trained on; the index stage would, after a run has begun.

    Its folders, lists and names of files are looked at; a corpus with very many files is left to that stage.
    """
    corpora = [each for each in (config.corpus, *config.more_corpora) if each]
    if not corpora:
        return
    from fvc_lib.corpus.corpus_files import LongCorpusError
    from fvc_lib.corpus.listing import recognised  # with polars, for this alone
    from fvc_lib.corpus.protocols.protocol import refuse_untrainable
    from fvc_lib.corpus.several import read_corpora
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
    """As the stage of protocols would, once every video has been indexed."""
    if config.protocol == CROSS_CORPUS:
        from fvc_lib.corpus.protocols.cross_corpus import refused_targets  # polars, for this alone
        from fvc_lib.corpus.samples.videos import names_of_corpora

        if why := refused_targets(config.target_corpora, names_of_corpora(config)):
            raise UsageError(why)
