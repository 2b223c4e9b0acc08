"""Begin, resume or fork a run, on this machine or as jobs of SLURM.

A fork is a new run with other parameters that copies the finished stages which do not depend on them.
"""

import importlib.util
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from fvc_lib.command_line import commands
from fvc_lib.command_line.shared_options import (
    AS_JSON,
    PARAMS_FILES,
    PARAMS_VALUES,
    ParametersCommand,
    is_quiet,
    print_answer,
    refuse_where,
)
from fvc_lib.execution.plan import PlannedTask, line_of_other_code, make_plan, read_notebooks, set_aside
from fvc_lib.execution.run import which_run
from fvc_lib.execution.run.record import begin_run, read_run_record, record_resumption
from fvc_lib.execution.run.runner import Runner, Terminal
from fvc_lib.execution.run.status import is_worked_on, leave_to_jobs, read_status, run_lock, status_now
from fvc_lib.execution.slurm import (
    describe,
    output_of,
    plan_jobs,
    read_site,
    submission_text,
    submit,
)
from fvc_lib.execution.stages import Notebook, Task, refuse_stage_of_another_task, stage_named, task_keys
from fvc_lib.services.config import DECLARED, RunConfig
from fvc_lib.services.errors import FvcError, UsageError, command_text
from fvc_lib.services.home import NOTEBOOKS, program
from fvc_lib.services.isolated_workers import run_isolated
from fvc_lib.services.parameters import refuse_contradictions, run_config
from fvc_lib.services.registry import CROPS, DETECTORS, IMAGE_LAYOUTS
from fvc_lib.services.run_paths import RunPaths, find_run, refuse_runs_folder
from fvc_lib.services.tasks import CROSS_CORPUS, DEFAULT_TASK

Executor = Literal["local", "slurm"]


@dataclass(frozen=True)
class RunOptions:
    """The options of a command that runs notebooks, such as ``--resume`` and ``--jobs``.

    A field has the name of its option; only ``start`` is the option ``--from``.
    """

    experiment: str | None = None
    resume: str | None = None
    fork: bool = False
    only: str | None = None
    start: str | None = None
    force: tuple[str, ...] = ()
    tasks: tuple[str, ...] | None = None
    jobs: int | None = None
    executor: Executor = "local"

    def check(self) -> None:
        """Check that the options fit together.

        Raises:
            UsageError: two options exclude each other, one needs another, or a value is empty.
        """
        alone = not (self.fork or self.only or self.start or self.force or self.executor == "slurm")
        refuse_where({
            "--resume, --only, --from, --tasks: got nothing, wanted a run, stage or task.":
                "" in (self.resume, self.only, self.start) or self.tasks == (),
            "--only, --from and --force: --only excludes the others.": self.only and (self.start or self.force),
            "--fork starts a new run from another one. Name that run: --resume RUN --fork.":
                self.fork and not self.resume,
            "--tasks works on a part of one run, as a job does: --resume RUN --tasks KEY[,KEY].":
                self.tasks and not (self.resume and alone),
        })  # fmt: skip


class RunCommand:
    """A command that begins, resumes or forks a run.

    Args:
        notebooks: the folder of the notebooks.
        options: the options.
        given: the parameters that the command was given.

    Attributes:
        options: the options.
        config: the configuration with which the run is begun or resumed.
        run: the run to resume; None for a new run, until ``execute`` has created it.
        ancestor: the run to fork; None: no fork.
        notebooks: ``{stage name: notebook}``.

    Raises:
        UsageError: options exclude each other, there is no such run, or a parameter differs from the run's value and
            could change its results.
    """

    def __init__(self, notebooks: Path, options: RunOptions, given: which_run.GivenValues) -> None:
        options.check()
        self.options, self.config = options, given.config
        self.run: RunPaths | None = None  # the run to resume
        self.ancestor: RunPaths | None = None  # the run to fork
        self.notebooks: dict[str, Notebook] = read_notebooks(notebooks)
        self._submits = options.executor == "slurm"
        self._only = stage_named(options.only) if options.only else None
        self._start = stage_named(options.start) if options.start else None
        self._force = [stage_named(text) for text in options.force]
        self._command = shlex.join([*program(), *sys.argv[1:]])
        if self._submits and not given.config.use_mlops_pipeline:
            raise UsageError(
                "--executor slurm needs the pipeline, because jobs go on from its records. Set USE_MLOPS_PIPELINE=true."
            )
        of_a_run = any(given is not None for given in (options.resume, options.only, options.start))
        if not (of_a_run or options.force):
            refuse_contradictions(given.config, given.written)
        else:
            found = find_run(Path(given.config.runs_dir), options.resume or "latest", options.experiment)
            if options.fork:
                self.ancestor, self.config = found, which_run.config_of_fork(found, given)
            else:
                self.run, self.config = found, which_run.config_to_resume(found, given, sys.argv[1:])
        if self.run is None:
            _refuse_wrong_corpus(self.config)
        refuse_stage_of_another_task(self.config, self._only, self._start, *self._force)
        self._tasks = task_keys(options.tasks, self.config) if options.tasks else None

    def plan(self) -> list[PlannedTask]:
        """Return all tasks of the run, each with the decision whether it runs, and the reason.

        A task is a notebook, or one fold of a notebook that is executed once per fold.
        """
        return make_plan(
            self.notebooks, self.config, self.run or self.ancestor, only=self._only, start=self._start,
            force=self._force, tasks=self._tasks,
        )  # fmt: skip

    def refuse(self) -> None:
        """Check whether the command can begin its work, and write nothing. ``execute`` makes the same checks first.

        Raises:
            UsageError: another process works on the run, a new run cannot be created, or a network or class that the
                parameters choose cannot be built.
            DataError: the run's status or record cannot be read.
        """
        if self.run is None:
            refuse_runs_folder(self.config.runs_dir, self.config.experiment)
        else:
            if self._tasks is None and is_worked_on(self.run.root):
                raise UsageError(f"{self.run.run_id} is being worked on. Wait for it, or stop it, then try again.")
            read_status(self.run)
            read_run_record(self.run)
        if any(planned.run and planned.task.stage.trains for planned in self.plan()):
            _refuse_broken_choice(self.config)

    def show(self) -> None:
        """Print the plan (and the batch scripts for SLURM), and write nothing.

        Raises:
            UsageError, DataError: the command cannot begin its work (``refuse``).
        """
        self.refuse()
        plan, folder = self.plan(), Path(self.config.runs_dir) / self.config.experiment
        self._describe(plan)
        click.echo(f"run: {self.run.root if self.run else f'a new folder under {folder}'}")
        for planned in plan:
            decision, only_if = "run" if planned.run else "skip", ""
            if planned.only_if_changed:
                decision, only_if = "maybe", ", but only if its input files change"
            click.echo(f"  {decision:<5}  {planned.task.key:<28} {planned.reason}{only_if}")
        if self.ancestor is not None:
            self._print_fork(self.ancestor)
        if self._submits:
            site, planned_folder = read_site(), self.run.root if self.run else folder / "run_TO_BE"
            jobs = plan_jobs([planned.task for planned in plan if planned.run], self.config, site)
            click.echo(describe(jobs, planned_folder, site))

    def execute(self) -> int:
        """Run the plan on this machine, or submit it as jobs of SLURM, and return the exit code.

        Raises:
            UsageError, DataError: the command cannot begin its work (``refuse``).
            SlurmError: SLURM is missing, does not answer, or refused a job.
        """
        if self._submits:  # if SLURM does not answer, fail before a run begins that would wait for its jobs
            output_of(["squeue", "--noheader", "--me", "--format=%i"])
        self.refuse()
        plan = self.plan()
        self._describe(plan)
        make: Callable[[], list[PlannedTask]] = self._plan_of_resumed
        if self.run is None:
            self.run = self._begin()
            make = self.plan if self.ancestor else lambda: plan
        return self._hand_to_slurm(self.run, make) if self._submits else self._run(self.run, make)

    def _begin(self) -> RunPaths:
        """Create the folder of a new run, and return the run.

        If the run is a fork, the files of finished tasks that are still valid are copied into it.
        """
        prepare, ancestor = None, self.ancestor
        if ancestor is not None:
            copied, changed = self._print_fork(ancestor)

            def prepare(fork: RunPaths) -> Mapping[str, object]:
                which_run.take_over(ancestor, fork, copied)
                return {
                    "forked_from": ancestor.run_id,
                    "changed": {name: list(change) for name, change in changed.items()},
                }

        state: Literal["waiting", "running"] = "waiting" if self._submits else "running"
        return begin_run(self.config, command=self._command, prepare=prepare, state=state, submits=self._submits)

    def _describe(self, plan: Sequence[PlannedTask]) -> None:
        """Print a line that names the finished trainings which do not run again although their code has changed.

        If there is no such training in ``plan``, nothing is printed.
        """
        finished = [planned.task for planned in plan if planned.only_if_changed or not planned.run]
        of = self.run or self.ancestor
        if of and (line := line_of_other_code(of, finished)):
            click.echo(line)

    def _print_fork(self, ancestor: RunPaths) -> tuple[list[Task], dict[str, which_run.Change]]:
        """Print the changed parameters of a fork, and the finished tasks that it copies from the run ``ancestor``.

        Returns:
            The copied tasks, and the changed parameters as ``{parameter: (old, new)}``.
        """
        changed = which_run.changes(run_config(ancestor.params_yaml), self.config)
        copied = which_run.tasks_of_fork(make_plan(self.notebooks, self.config, ancestor))
        click.echo(f"fork of {ancestor.run_id}: {which_run.in_words(changed)}")
        click.echo(f"  copied from it: {', '.join(task.key for task in copied) or 'nothing'}")
        return copied, changed

    def _hand_to_slurm(self, run: RunPaths, make_plan: Callable[[], list[PlannedTask]]) -> int:
        """Submit the unfinished tasks of ``run`` as jobs of SLURM, and return the exit code 0.

        Args:
            run: the run.
            make_plan: returns every task with the decision whether it runs; called after the run is locked.

        Raises:
            UsageError: another process works on the run, or the site's settings are wrong.
            SlurmError: SLURM is missing or refused a job.
        """
        site = read_site()
        with run_lock(run.root):
            plan = make_plan()
            jobs = plan_jobs([planned.task for planned in plan if planned.run], self.config, site)
            # A job goes on with unfinished tasks, so tasks to be repeated must not look finished.
            set_aside(run, [planned.task for planned in plan if planned.redo])
            leave_to_jobs(run, [planned.task for planned in plan if planned.run])
        click.echo(f"run {run.root}")
        for job in submit(jobs, run.root, site):
            click.echo(f"  {submission_text(job)}")
        click.echo(f"watch it: {command_text('status', run.root)}" if jobs else "nothing to submit: all is finished")
        return 0

    def _plan_of_resumed(self) -> list[PlannedTask]:
        """Record in ``run.json`` that a command resumes the run, then return the plan.

        A warning is printed if conditions differ from the attempt before. The run must be locked.
        """
        assert self.run is not None
        if differs := record_resumption(self.run, self.config, command=self._command, submits=self._submits):
            click.echo(
                f"warning: this attempt differs from the one before: {'; '.join(differs)}. The run goes on, but is no "
                "longer bit for bit what an undisturbed one would be; run.json records it.",
                err=True,
            )
        return self.plan()

    def _run(self, run: RunPaths, plan: Callable[[], list[PlannedTask]]) -> int:
        """Run the tasks of ``run`` on this machine, then write the report.

        If a task fails, no report is written. If several jobs share the run, only the last job writes the report.

        Args:
            run: the run.
            plan: returns every task with the decision whether it runs; called after the run is locked.

        Returns:
            The exit code of the tasks if it is not 0, else of the report.
        """
        click.echo(f"run {run.root}")
        terminal = Terminal(quiet=is_quiet())
        runner = Runner(run, self.config, self.notebooks, terminal, jobs=self.options.jobs, only_tasks=self._tasks)
        is_followed = self.config.tracker == "mlflow" and self._tasks is None
        follower = commands.follower_of(run) if is_followed else None
        exit_code = runner.execute(plan)
        # If several jobs share the run, only the last one writes the report. It also exports, as does one that failed.
        if exit_code or self._tasks is None or status_now(run).state not in {"waiting", "running"}:
            exit_code = exit_code or commands.report_run(run)
            commands.export_when_asked(run, self.config, follower)
        return exit_code


# Fields that change trained weights, without those that no network is built of.
_OF_SPLITS = {
    "seed",
    "protocol",
    "target_corpora",
    "source_column",
    "num_folds",
    "folds_seed",
    "inner_validation_share",
}
_OF_THE_NETWORK = [
    name
    for name, declared in DECLARED.items()
    if declared.changes == "weights" and name not in {*_OF_SPLITS, "epochs", "shuffle_labels"}
]
_DEFAULT_VALUES = RunConfig().model_dump(mode="json")


def _refuse_broken_choice(config: RunConfig) -> None:
    """Check that the network and the classes that the parameters choose can be built, before a run begins.

    They are built in another process, because a user's own code may crash the process.

    Raises:
        UsageError: the network or a class cannot be built; the message has the reason.
    """
    values = config.model_dump(mode="json")
    if config.task == DEFAULT_TASK and all(values[name] == _DEFAULT_VALUES[name] for name in _OF_THE_NETWORK):
        return  # the default network; a test builds it
    (answer,) = run_isolated(f"{__name__}:trouble_of_choice", [values], workers=1, memory_bytes=None)
    if answer.failure and not answer.detail.startswith("SIGKILL"):  # killed for memory: the stage names what it needs
        raise UsageError(f"what the parameters choose cannot be built: {answer.detail}. Mend it, or choose another.")
    if answer.value:
        raise UsageError(answer.value)


def trouble_of_choice(values: dict[str, Any]) -> str:
    """Return the reason why the network or a class that the parameters choose cannot be built; empty: all can be built.

    ``values`` are the fields of the run's configuration, as JSON values.
    """
    from fvc_lib.detectors.classical import refuse_settings
    from fvc_lib.detectors.probe import refuse_random_trunk
    from fvc_lib.tasks.video.classical import forensic_families

    config = RunConfig(**values)
    kind = DETECTORS.of_features(config.model)
    every = RunConfig.model_fields["views"].default
    if kind != "both" and config.views != every:
        return f"views {config.views!r}: only probes have views, unlike model {config.model!r}. Give -p views {every}"
    try:
        config.load_chosen()
        if config.self_blended:
            CROPS.get("face")  # it finds the faces
        if config.of_features:
            refuse_settings(config)
            forensic_families(config)
            packages = DETECTORS.get(config.model).packages
            if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
                raise UsageError(f"model {config.model!r} needs {', '.join(missing)}, which is not installed.")
            if config.of_features != "forensic":
                refuse_random_trunk(config)
                _try_network(config)
        elif config.task == DEFAULT_TASK:
            _try_network(config)
        elif config.task in DECLARED["model"].tasks and kind:
            raise UsageError(
                f"model {config.model!r} is fitted to features of videos, and task {config.task} needs a network: "
                f"{command_text('detectors')} lists them."
            )
    except FvcError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - whatever a user's class raises
        reason = f"{type(error).__name__}: {error}"
        return (
            f"model {config.model!r} cannot be built, or fails on uint8 clips (2, frames, 3, side, side): {reason}. "
            "Mend it, or choose another."
        )
    return ""


def _try_network(config: RunConfig) -> None:
    """Build the network of a configuration, to see whether it can be built.

    A registered network is built without memory for its weights. A network from a user's file is built and run on the
    CPU, on zeros of shape (2, frames, 3, side, side).

    Raises:
        UsageError: a user's network does not return logits of shape (2,), one per clip.
        Exception: any other error in building or running the network. Errors of too little memory or a missing GPU are
            ignored when a user's network is run, because another machine may do the training.
    """
    import torch

    from fvc_lib.detectors.network import build_detector
    from fvc_lib.engine.device import without_memory
    from fvc_lib.engine.oom_detection import is_out_of_memory
    from fvc_lib.tasks.video.features import frozen_trunk

    is_own = DETECTORS.file_of(config.model) is not None
    clips = config.clips
    with nullcontext() if is_own else without_memory():
        network = build_detector(config)
    frozen_trunk(network, config)
    if not is_own:
        return
    try:
        with torch.no_grad():
            logits = network.eval()(torch.zeros(2, clips.num_frames, 3, clips.side, clips.side, dtype=torch.uint8))
    except Exception as error:
        if is_out_of_memory(error) or re.search("cuda|gpu|nvidia|triton|device", str(error), re.IGNORECASE):
            return  # the machine that trains may be another one
        raise
    if tuple(logits.shape) != (2,):
        raise UsageError(
            f"model {config.model!r}: gives {tuple(logits.shape)} for 2 clips, wanted logits (2,), one per clip. For "
            "features set num_features in the class's body: they get a head."
        )


def _refuse_wrong_corpus(config: RunConfig) -> None:
    """Check that a detector can be trained on the corpora of a new run, and that the target corpora exist.

    Target corpora are the corpora on which the protocol ``cross_corpus`` tests the detector. Only folders, lists and
    names are read, no videos. Without this check a stage would fail after the run has begun.

    Raises:
        UsageError, DataError: a target corpus is unknown, or a corpus cannot be read or used for training.
    """
    if config.protocol == CROSS_CORPUS:
        from fvc_lib.corpus.protocols import refused_targets  # loads polars, which other commands do not need
        from fvc_lib.corpus.samples.videos import names_of_corpora

        if why := refused_targets(config.target_corpora, names_of_corpora(config)):
            raise UsageError(why)
    corpora = [corpus for corpus in (config.corpus, *config.more_corpora) if corpus]
    if not corpora:
        return
    from fvc_lib.corpus.listing import (
        read_corpora,
        reading_options,
        recognised,  # loads polars, which other commands do not need
    )
    from fvc_lib.corpus.protocols import refuse_untrainable
    from fvc_lib.corpus.video_texts import video_text_root

    if config.task == "video_text":
        video_text_root(config)
    elif config.task == "image":
        recognised(IMAGE_LAYOUTS, Path(config.corpus))
    else:
        listing = read_corpora(corpora, None, **reading_options(config))
        if config.corpus:  # else the sample corpus is used, which has both labels
            refuse_untrainable(listing, config)


@click.command(cls=ParametersCommand)
@PARAMS_FILES
@PARAMS_VALUES
@AS_JSON
@click.pass_context
def doctor(
    context: click.Context, params_files: tuple[Path, ...], values: tuple[tuple[str, str], ...], as_json: bool
) -> None:
    """Check packages, torch and its devices, disks, memory and parameters.

    The checks take a few seconds and change nothing. Each problem comes with a remedy. Parameters are checked as a run
    checks them before it begins: the corpus, the network, and whether they fit together.

    \b
    fvc doctor
    fvc doctor -p device cuda --json
    fvc doctor -p model path/to/my_net.py:MyNet

    Exit codes: 0 a run will work, 1 a run would fail.
    """
    from fvc_lib.execution.doctor import Finding, diagnose

    given = which_run.given_values(params_files, values=values)
    findings = diagnose(given.config)
    try:
        RunCommand(NOTEBOOKS, RunOptions(), given).refuse()
        findings.append(Finding("parameters", "ok", "a run takes them"))
    except FvcError as error:
        findings.append(Finding("parameters", "problem", str(error)))
    fails = any(finding.state == "problem" for finding in findings)
    last = "A run would fail; solve the problems first." if fails else "A run will work."
    print_answer({"works": not fails, "findings": findings}, [*findings, last], as_json=as_json)
    context.exit(int(fails))
