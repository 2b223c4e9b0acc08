"""``run_notebooks.py sweep``: one ordinary run for every combination of some values, and their comparison.

All runs are tested on the same folds: no value that decides which videos there are, or how they are dealt, may be
swept over, and where the seed is, the folds keep that of the first. A combination is known by its run's hash, so the
same command again, after whatever end, skips what is finished and goes on with the rest.

Where there are more GPUs than the trainings of one run take, several runs work side by side, each in a process of its
own with GPUs and a part of the memory of its own.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from fvc_lib import CHECKOUT
from fvc_lib.command_line.records import execute_record
from fvc_lib.command_line.run_command import NOTEBOOKS, Executor, Jobs, RunCommand, Wanted, with_ranks
from fvc_lib.execution.plan.fingerprint import corpus_record
from fvc_lib.execution.run import which_run
from fvc_lib.execution.run.gpus import job_nodes, training_gpus
from fvc_lib.execution.run.lock import is_worked_on
from fvc_lib.execution.run.record import run_hash
from fvc_lib.execution.run.status import read_status, status_now
from fvc_lib.execution.slurm.queue import SlurmError, clips_job, job_states
from fvc_lib.services.atomic_files import read_json_object, sha256_of_json
from fvc_lib.services.config import DECLARED, NOT_HASHED, RunConfig
from fvc_lib.services.config_fields import AUTO_RANKS
from fvc_lib.services.errors import DataError, FvcError, StoppedError, UsageError, command_text
from fvc_lib.services.memory.budget import memory_budget
from fvc_lib.services.parameters import parse_text_value, run_config
from fvc_lib.services.records.digests import undamaged_content
from fvc_lib.services.run_paths import RunPaths, list_runs
from fvc_lib.services.tasks import DEFAULT_TASK, DETECTOR_COMPARISON, TRAINING_STAGES

# With other values other videos are tested, or in other folds, and a difference would say nothing of the detectors.
_DECIDE_THE_FOLDS = frozenset(
    {"protocol", "target_corpora", "num_folds", "folds_seed"} | {n for n in DECLARED if DECLARED[n].changes == "data"}
)
_STOPPED = (75, 130, 143)
_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Combination:
    """One run of a sweep, made or to be made."""

    chosen: tuple[tuple[str, str], ...]  # the value of each field that is swept over, as typed
    asked: which_run.Asked
    run_hash: str  # what its run is known by
    run: RunPaths | None = None  # the run that is there already; None: there is none
    state: str = "new"  # new, finished, at work, queued or unfinished

    @property
    def name(self) -> str:
        """``model frame_cnn, seed 0``."""
        return ", ".join(f"{name} {text}" for name, text in self.chosen)


def values_to_sweep(over: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """The values of each field: of one that is named once the text's parts at commas, else each text as a whole.

    Raises:
        UsageError: an unknown field or value, or a field that runs to be compared may not differ in.
    """
    texts: dict[str, list[str]] = {}
    for name, text in over:
        texts.setdefault(name, []).append(text)
    values = {}
    for name, given in texts.items():
        parse_text_value(name, given[0].split(",")[0].strip() if len(given) == 1 else given[0])  # its name, first
        if name in _DECIDE_THE_FOLDS:
            raise UsageError(
                f"--over {name}: runs that differ in it are tested on other videos or folds, and are not to be "
                f"compared. Give each a sweep of its own: -p {name} VALUE."
            )
        if name in NOT_HASHED:
            raise UsageError(f"--over {name}: it changes no number, so all these runs would be one. Give -p {name}.")
        listed = [part.strip() for part in given[0].split(",")] if len(given) == 1 else given
        if "" in listed and len(given) == 1:
            raise UsageError(f"--over {name}: got {given[0]!r}, wanted values with single commas between them.")
        for text in listed:
            parse_text_value(name, text)
        values[name] = list(dict.fromkeys(listed))
    return values


def combinations(
    over: Sequence[tuple[str, str]],
    params_files: Sequence[Path] = (),
    yaml_texts: Sequence[str] = (),
    values: Sequence[tuple[str, str]] = (),
    *,
    experiment: str = "sweep",
) -> list[Combination]:
    """Every combination of the values in ``over`` with the run it has already; nothing is written.

    Raises:
        UsageError: unknown or excluded names and values, two combinations that are the same run, or one that cannot be.
    """
    swept = values_to_sweep(over)
    if twice := sorted(swept.keys() & {name for name, _ in values}):
        raise UsageError(f"{', '.join(twice)}: given with -p and with --over. Leave one of them out.")
    base = which_run.ask(params_files, yaml_texts, values, {"experiment": experiment}).config
    if base.task != DEFAULT_TASK:
        raise UsageError(f"sweep compares detectors of videos (task {DEFAULT_TASK}), and the task is {base.task}.")
    first_seed = int(swept["seed"][0]) if "seed" in swept else base.seed
    seed_of_folds = first_seed if base.folds_seed is None else base.folds_seed
    corpus = corpus_record(base)
    found: dict[str, Combination] = {}
    for texts in itertools.product(*swept.values()):
        chosen = tuple(zip(swept, texts, strict=True))
        shared: dict[str, Any] = {"experiment": experiment}
        if int(dict(chosen).get("seed", base.seed)) != seed_of_folds:
            shared["folds_seed"] = seed_of_folds
        asked = which_run.ask(params_files, yaml_texts, [*values, *chosen], shared)
        one = Combination(chosen, asked, run_hash(asked.config, corpus))
        if one.run_hash in found:
            raise UsageError(f"{one.name} and {found[one.run_hash].name} are the same run. Leave one of them out.")
        found[one.run_hash] = _as_it_is(one)
    return list(found.values())


def _as_it_is(one: Combination) -> Combination:
    """``one`` with its newest run, a finished one first, and where that stands."""
    runs = list_runs(one.asked.config.runs_dir, one.asked.config.experiment)
    runs = [run for run in runs if read_json_object(run.run_json).get("config_hash") == one.run_hash]
    known = [replace(one, run=run, state=_state(run, one)) for run in reversed(runs)]
    return next((each for each in known if each.state == "finished"), known[0] if known else one)


def _state(run: RunPaths, one: Combination) -> str:
    try:
        if is_worked_on(run):
            return "at work"
        if status_now(run).state == "done":
            plan = RunCommand(NOTEBOOKS, Wanted(resume=str(run.root)), one.asked).plan()
            return "unfinished" if any(planned.run for planned in plan) else "finished"
        if read_status(run).shared and any(not job.ended for job in job_states(run, must_answer=True)):
            return "queued"
    except SlurmError:  # a queue that does not answer may have its jobs: they are not submitted twice
        return "queued"
    except FvcError:  # the command that goes on with it says what is wrong
        pass
    return "unfinished"


def runs_at_once(num_runs: int, num_gpus: int, config: RunConfig, jobs: int | None = None) -> int:
    """How many of the runs work side by side: the fewest with which the GPUs have the least rounds of trainings.

    ``jobs``: at most so many trainings at once in each run; None: as many as its GPUs take.
    """

    def rounds(at_once: int) -> int:
        trainings = min(num_gpus // at_once // ranks, jobs or config.num_trainings)
        return -(-num_runs // at_once) * -(-config.num_trainings // trainings)

    ranks = max(1, config.num_ranks)  # auto is one GPU each, and what is left over then
    if config.num_ranks != 1 and job_nodes() > 1:  # each training's ranks are spread over all nodes
        return 1
    return min(range(1, min(num_runs, num_gpus // ranks) + 1), key=rounds, default=1)


def make_run(asked: which_run.Asked, its_hash: str, wanted: Wanted) -> int:
    """Begin the run that has this hash, or go on with it; the exit code.

    Raises:
        DataError: the corpus is no longer the one that the hash is of.
    """
    if run_hash(asked.config) != its_hash:
        raise DataError("the corpus has changed since the sweep began: its folds would be others.")
    return RunCommand(NOTEBOOKS, wanted, asked).execute()


def make_run_beside_others() -> None:
    """``make_run`` in a process of its own (``_RunBeside``), to which a line of its standard input says what to do.

    Where that input ends the sweep was killed: the run saves and leaves, as after a SIGTERM.
    """
    given = json.loads(sys.stdin.readline())
    threading.Thread(target=_leave_with_the_sweep, daemon=True).start()
    sys.argv = given["argv"]  # what the run's record calls its command
    config = RunConfig(**given["config"])
    asked = which_run.Asked(frozenset(given["names"]), frozenset(given["written"]), config, given["chosen"])
    wanted = Wanted(resume=given["resume"], jobs=given["jobs"])
    sys.exit(_told(partial(make_run, asked, given["run_hash"], wanted)))


def _leave_with_the_sweep() -> None:
    os.read(0, 1)  # not by ``sys.stdin``, whose lock a thread that waits would hold when Python ends
    os.kill(os.getpid(), signal.SIGTERM)


def _told(work: Callable[[], int]) -> int:
    """The exit code of ``work``; errors are told and become one."""
    try:
        return work()
    except (FvcError, StoppedError) as error:
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    except OSError as error:
        click.echo(f"error: {error.filename or 'a file'}: {error.strerror}", err=True)
        return 1


class _RunBeside:
    """One run of several that work side by side. What it prints goes to ``log``.

    A session of its own: a Ctrl-C in the terminal reaches it once, by ``send``, and not twice, which would kill it.
    """

    def __init__(self, one: Combination, gpus: list[str], mem_gb: float, jobs: int | None, log: Path) -> None:
        self.one, self.gpus, self.log = one, gpus, log
        asked = one.asked
        given = {
            "config": asked.config.model_copy(update={"mem_gb": mem_gb}).model_dump(mode="json"),
            "names": sorted({*asked.names, "mem_gb"}),
            "written": sorted({*asked.written, "mem_gb"}),
            "chosen": asked.chosen,
            "run_hash": one.run_hash,
            "resume": None if one.run is None else str(one.run.root),
            "jobs": jobs,
            "argv": sys.argv,
        }
        path = os.pathsep.join(part for part in (str(CHECKOUT), os.environ.get("PYTHONPATH", "")) if part)
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from {__name__} import {make_run_beside_others.__name__} as f; f()"],
                stdin=subprocess.PIPE, stdout=stream, stderr=stream, start_new_session=True,
                env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ",".join(gpus)},
            )  # fmt: skip
        assert self._process.stdin is not None  # a pipe was asked for
        self._pipe = self._process.stdin  # open as long as the sweep lives
        with contextlib.suppress(BrokenPipeError):
            self._pipe.write(json.dumps(given).encode() + b"\n")
            self._pipe.flush()

    @property
    def trains(self) -> bool:
        """Whether it has come to its trainings: before that it makes what others need too, with all cores."""
        run = _as_it_is(self.one).run
        stages = {} if run is None else read_status(run).stages
        return any(key.startswith(TRAINING_STAGES) and stage.attempts for key, stage in stages.items())

    def send(self, number: int) -> None:
        """A signal that came for the sweep."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def ended(self) -> int | None:
        """The exit code; None while it works."""
        code = self._process.poll()
        if code is not None:
            self._pipe.close()
        return 128 - code if code is not None and code < 0 else code


@contextlib.contextmanager
def _signals_noted() -> Iterator[list[int]]:
    noted: list[int] = []
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # the terminal is gone, and nohup was not asked for
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, _: noted.append(number)) for number in numbers}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Sweep:
    """The runs of a sweep, one after the other or side by side; one that fails stops no other.

    ``members`` are at least two, the first the reference; ``jobs`` are trainings at once within a run.
    """

    def __init__(self, members: Sequence[Combination], *, jobs: int | None, executor: Executor) -> None:
        self.members, self._jobs, self._executor = list(members), jobs, executor
        self._choose_ranks()
        self._config: RunConfig = self.members[0].asked.config
        self._failed: dict[str, int] = {}  # exit codes by the hash of the run

    def _choose_ranks(self) -> None:
        """Give every run that asks for ``num_ranks auto`` its number: by its part of the GPUs, or what it has."""
        todo = [number for number, one in enumerate(self.members) if one.state in ("new", "unfinished")]
        at_once = self._at_once(todo)
        for number, one in enumerate(self.members):
            asked, config = one.asked, one.asked.config
            if config.num_ranks != AUTO_RANKS:
                continue
            if one.run is not None:
                config, why = config.model_copy(update={"num_ranks": run_config(one.run).num_ranks}), ""
            else:
                gpus = training_gpus(config)
                wanted = Wanted(jobs=self._jobs, executor=self._executor)
                config, why = with_ranks(config, wanted, gpus[: len(gpus) // at_once])
            self.members[number] = replace(one, asked=replace(asked, config=config, chosen=why))

    def check(self) -> None:
        """Refuse, before anything runs, what a run of it would be refused for.

        Raises:
            UsageError: a model that cannot be imported, a corpus that is not there, or a folder that cannot be written.
        """
        choices = set()
        for one in self.members:
            if one.state in ("new", "unfinished"):
                command = RunCommand(NOTEBOOKS, self._wanted(one), one.asked)
                choice = one.asked.config.model_copy(update={"seed": 0, "folds_seed": None}).config_hash
                command.refuse(imports=choice not in choices)  # which takes a process
                choices.add(choice)

    def lines(self) -> list[str]:
        """All runs with what differs and where each stands."""
        width = max(len(one.name) for one in self.members)
        done = sum(one.state == "finished" for one in self.members)
        head = f"{len(self.members)} runs on the same folds, {done} of them finished, in {self._folder()}"
        rows = [head]
        for number, one in enumerate(self.members, start=1):
            failed = f"  failed with exit code {code}" if (code := self._failed.get(one.run_hash)) else ""
            run = one.run.run_id if one.run else ""
            rows.append(f"  {number:>3}  {one.name:<{width}}  {one.state:<10}  {run}{failed}".rstrip())
        return [*rows, *dict.fromkeys(f"each run: {one.asked.chosen}" for one in self.members if one.asked.chosen)]

    def execute(self) -> int:
        """Make what is missing, then compare what is finished; returns the exit code."""
        todo = [number for number, one in enumerate(self.members) if one.state in ("new", "unfinished")]
        if code := (self._make_side_by_side if self._at_once(todo) > 1 else self._make_in_turn)(todo):
            click.echo("the sweep stops here; the same command goes on")
            return code
        click.echo("\n" + "\n".join(self.lines()))
        failure = next(iter(self._failed.values()), 0)
        if waiting := sum(one.state in ("queued", "at work") for one in self.members):
            click.echo(f"{waiting} at work or waiting for jobs; when they have ended, the same command compares")
            return failure
        if sum(one.state == "finished" for one in self.members) < 2:
            click.echo("error: fewer than two runs are finished; there is nothing to compare.", err=True)
            return failure or 1
        compared = self.compare()
        return failure or compared

    def _make_in_turn(self, todo: Sequence[int]) -> int:
        """The members with these numbers; the exit code of one that was stopped, else 0."""
        for number in todo:
            one = self.members[number]
            click.echo(f"\nrun {number + 1} of {len(self.members)}: {one.name}")
            code = _told(partial(make_run, one.asked, one.run_hash, self._wanted(one)))
            if self._after(number, code) in _STOPPED:
                return code
        return 0

    def _at_once(self, todo: Sequence[int]) -> int:
        if self._executor == "slurm":
            return 1
        configs = [self.members[number].asked.config for number in todo]
        fitting = (runs_at_once(len(todo), len(training_gpus(config)), config, self._jobs) for config in configs)
        return min(fitting, default=1)

    def _make_side_by_side(self, todo: Sequence[int]) -> int:
        """As ``_make_in_turn``. A run begins when those at work have come to their trainings."""
        at_once, gpus = self._at_once(todo), training_gpus(self._config)
        free = [gpus[len(gpus) * place // at_once : len(gpus) * (place + 1) // at_once] for place in range(at_once)]
        mem_gb = round(memory_budget(self._config.mem_gb).total_bytes / at_once / 1e9, 3)
        self._folder().mkdir(parents=True, exist_ok=True)
        click.echo(f"\n{at_once} runs at once: {' | '.join(','.join(each) for each in free)} of {len(gpus)} GPUs, "
                   f"{mem_gb:g} GB of memory each")  # fmt: skip
        waiting, working, stopped = list(todo), dict[int, _RunBeside](), 0
        with _signals_noted() as signals:
            while working or (waiting and not stopped):
                for number in signals:
                    stopped = stopped or 128 + number
                    for each in working.values():
                        each.send(number)
                signals.clear()
                for number, each in list(working.items()):
                    if (code := each.ended()) is None:
                        continue
                    free.append(working.pop(number).gpus)
                    click.echo(f"run {number + 1} of {len(self.members)}: {each.one.name}: ended with {code}")
                    if self._after(number, code) in _STOPPED:
                        stopped = stopped or code
                if waiting and free and not stopped and all(each.trains for each in working.values()):
                    number = waiting.pop(0)
                    one, own = self.members[number], free.pop(0)
                    log = self._folder() / f"sweep_{one.run_hash[:8]}.log"
                    working[number] = _RunBeside(one, own, mem_gb, self._jobs, log)
                    click.echo(f"run {number + 1} of {len(self.members)}: {one.name}: GPU {','.join(own)}, see {log}")
                time.sleep(_LOOK_SECONDS)
        return stopped

    def _after(self, number: int, code: int) -> int:
        """Note how the run of a member ended; a finished one with other folds than the first has failed."""
        made = _as_it_is(replace(self.members[number], run=None, state="new"))
        first = next((each for each in self.members if each.state == "finished"), None)
        if made.state == "finished" and made.run and first and first.run and not _same_folds(first.run, made.run):
            click.echo(f"error: {made.run.run_id} has other folds than {first.run.run_id}, and is left out.", err=True)
            code = DataError.exit_code
        if code and code not in _STOPPED:
            self._failed[made.run_hash] = code
        self.members[number] = made
        return code

    def _wanted(self, one: Combination) -> Wanted:
        resume = None if one.run is None else str(one.run.root)
        return Wanted(resume=resume, jobs=self._jobs, executor=self._executor, after_clips=self._clips_jobs(one))

    def _clips_jobs(self, one: Combination) -> tuple[str, ...]:
        """The first job in the queue that makes the clips that ``one`` needs: together they would make them twice."""
        for other in self.members:
            if other.state != "queued" or other.run is None or other.asked.config.clips != one.asked.config.clips:
                continue
            with contextlib.suppress(FvcError):  # then they are made twice, which harms nothing
                if job := clips_job(other.run):
                    return (job,)
        return ()

    def _folder(self) -> Path:
        return Path(self._config.runs_dir) / self._config.experiment

    def compare(self) -> int:
        """Run the comparison's notebook over the finished runs; returns the exit code."""
        from fvc_lib.analysis.pages.runs_index import write_runs_index  # plotly takes a second to load
        from fvc_lib.analysis.read.comparison_tables import TABLE_FILES

        name = sha256_of_json(sorted(one.run_hash for one in self.members))[:8]
        folder = self._folder() / f"comparison_{name}"
        folder.mkdir(parents=True, exist_ok=True)
        for table in TABLE_FILES:  # an earlier comparison's are not those of one that fails
            (folder / table).unlink(missing_ok=True)
        finished = [one for one in self.members if one.state == "finished"]
        click.echo(f"\ncomparing {len(finished)} runs")
        if finished and finished[0] is not self.members[0]:
            click.echo(f"{self.members[0].name} is not finished: the reference is {finished[0].name}")
        parameters = {
            "compared_runs": [str(one.run.root) for one in self.members if one.run],
            "without_run": [[one.name, self._why_no_run(one)] for one in self.members if not one.run],
            "output_folder": str(folder),
            "bootstrap_replicates": self._config.bootstrap_replicates,
            "confidence": self._config.confidence,
        }
        page = folder / "comparison.html"
        code = execute_record(
            DETECTOR_COMPARISON, folder, parameters, page=page, title=f"FVC comparison {self._config.experiment}",
            runs_dir=self._config.runs_dir, what="the comparison",
        )  # fmt: skip
        write_runs_index(Path(self._config.runs_dir))
        if code:
            return 1
        click.echo(f"  comparison    {page}\n  tables        {folder}")
        return 0

    def _why_no_run(self, one: Combination) -> str:
        code = self._failed.get(one.run_hash)
        why = "it has no run." if code is None else f"it has no run: its command failed with exit code {code}."
        return f"{one.name}: {why}" + (" It was to be the reference." if one is self.members[0] else "")


def _same_folds(one: RunPaths, other: RunPaths) -> bool:
    import polars as pl

    tables = [pl.read_parquet(undamaged_content(run.folds)).sort("video_id") for run in (one, other)]
    return tables[0].equals(tables[1])


@click.command(short_help="One run per combination of values, on the same folds; then compare them.")
@click.option(
    "--over", nargs=2, multiple=True, required=True, metavar="NAME VALUES",
    help="A parameter and its values with commas between them; repeatable, and all combinations are made. Of a value "
    "that has a comma in itself name the parameter once for each: --over augmentations flip,noise --over augmentations "
    "flip",
)  # fmt: skip
@click.option(
    "--params", "-f", "params_files", multiple=True, type=click.Path(path_type=Path),
    help="YAML file of parameters that all runs share. Repeatable; later files win.",
)  # fmt: skip
@click.option("-y", "--parameters-yaml", "yaml_texts", multiple=True, help="Likewise, as YAML text.")
@click.option("-p", "--parameters", "values", nargs=2, multiple=True, metavar="NAME VALUE", help="Likewise, one.")
@click.option("--experiment", default="sweep", show_default=True, help="Folder under the runs folder for all of them.")
@click.option("-j", "--jobs", type=Jobs(), default="auto", show_default=True,
    help="Folds trained at once in each run, as for a run alone.",
)  # fmt: skip
@click.option(
    "--executor", type=click.Choice(["local", "slurm"]), default="local", show_default=True,
    help="slurm: submit every run's jobs at once. When they have ended, the same command compares.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Show the runs and where each stands, and stop; writes nothing.")
@click.pass_context
def sweep(
    context: click.Context,
    over: tuple[tuple[str, str], ...],
    params_files: tuple[Path, ...],
    yaml_texts: tuple[str, ...],
    values: tuple[tuple[str, str], ...],
    experiment: str,
    jobs: int | None,
    executor: Executor,
    dry_run: bool,
) -> None:
    """Make one run for every combination of values on the same folds, then compare their detectors.

    \b
    python run_notebooks.py sweep --params params/demo.yaml --over model frame_cnn,r2plus1d_small --over seed 0,1
    python run_notebooks.py sweep -p corpus ~/videos --over model efficientnet_lite0,frame_cnn --dry-run
    python run_notebooks.py sweep -p corpus ~/videos --over learning_rate 1e-3,3e-3 --executor slurm

    Each is an ordinary run; clips and the features of frozen networks are made once for all of them. Runs are made one
    after the other, in the order shown. After a kill, or with more values, the same command goes on: finished runs are
    known by their parameters and corpus, and skipped. A run that fails stops no other. Where there are more GPUs than
    the trainings of one run take, several runs work side by side on GPUs of their own.

    With --over seed the folds stay those of the first seed (folds_seed), so that what differs is the training. The
    first combination that is finished is the reference that the others are compared with. In the end notebook
    08_detector_comparison shows numbers with intervals, paired differences corrected for their number, controls, and
    costs; its page, tables (CSV, LaTeX) and BibTeX lie in runs/EXPERIMENT/comparison_HASH/.

    Exit codes: 0 all is done (or submitted), 2 usage, 75/130/143 stopped, else that of the first run that failed.
    """  # noqa: D301 - click wants the backspace character itself before lines it shall not re-wrap
    members = combinations(over, params_files, yaml_texts, values, experiment=experiment)
    if len(members) < 2:
        raise UsageError(f"--over: {members[0].name} is one run, and a comparison needs two. Give more values.")
    found = Sweep(members, jobs=jobs, executor=executor)
    click.echo("\n".join(found.lines()))
    found.check()
    if dry_run:
        return
    code = found.execute()
    if any(one.state != "finished" for one in found.members):
        click.echo(f"to go on: {command_text(*sys.argv[1:])}")
    context.exit(code)
