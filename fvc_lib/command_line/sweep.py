"""``run_notebooks.py sweep``: one ordinary run for every combination of some values, and their comparison.

All runs are tested on the same folds: no value that decides which videos there are, or how they are dealt, may be
swept over, and where the seed is, the folds keep that of the first. A combination is known by its run's hash, so the
same command again, after whatever end, skips what is finished and goes on with the rest.
"""

import contextlib
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from fvc_lib.command_line.records import execute_record
from fvc_lib.command_line.run_command import NOTEBOOKS, Executor, RunCommand, Wanted
from fvc_lib.execution.plan.fingerprint import corpus_record
from fvc_lib.execution.run import which_run
from fvc_lib.execution.run.lock import is_worked_on
from fvc_lib.execution.run.record import run_hash
from fvc_lib.execution.run.status import read_status, status_now
from fvc_lib.execution.slurm.queue import SlurmError, clips_job, job_states
from fvc_lib.services.atomic_files import read_json_object, sha256_of_json
from fvc_lib.services.config import DECLARED, NOT_HASHED, RunConfig
from fvc_lib.services.errors import DataError, FvcError, UsageError, command_text
from fvc_lib.services.parameters import parse_text_value
from fvc_lib.services.records.digests import undamaged_content
from fvc_lib.services.run_paths import RunPaths, list_runs
from fvc_lib.services.tasks import DEFAULT_TASK, DETECTOR_COMPARISON

# With other values other videos are tested, or in other folds, and a difference would say nothing of the detectors.
_DECIDE_THE_FOLDS = frozenset(
    {"protocol", "target_corpora", "num_folds", "folds_seed"} | {n for n in DECLARED if DECLARED[n].changes == "data"}
)
_STOPPED = (75, 130, 143)


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


class Sweep:
    """The runs of a sweep, made one after the other; one that fails stops no other.

    ``members`` are at least two, the first the reference; ``jobs`` are trainings at once within a run.
    """

    def __init__(self, members: Sequence[Combination], *, jobs: int | None, executor: Executor) -> None:
        self.members, self._jobs, self._executor = list(members), jobs, executor
        self._config: RunConfig = members[0].asked.config
        self._failed: dict[str, int] = {}  # exit codes by the hash of the run

    def check(self) -> None:
        """Refuse, before anything runs, what a run of it would be refused for.

        Raises:
            UsageError: a model that cannot be imported, a corpus that is not there, or a folder that cannot be written.
        """
        choices = set()
        for one in self.members:
            if one.state in ("new", "unfinished"):
                command = self._command(one)
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
        return rows

    def execute(self) -> int:
        """Make what is missing, then compare what is finished; returns the exit code."""
        for number, one in enumerate(self.members):
            if one.state not in ("new", "unfinished"):
                continue
            click.echo(f"\nrun {number + 1} of {len(self.members)}: {one.name}")
            code = self._make(one)
            if code in _STOPPED:
                click.echo("the sweep stops here; the same command goes on")
                return code
            if code:
                self._failed[one.run_hash] = code
            self.members[number] = _as_it_is(replace(one, run=None, state="new"))
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

    def _make(self, one: Combination) -> int:
        """Begin the run of ``one`` or go on with it; errors are told and become its exit code."""
        try:
            if run_hash(one.asked.config) != one.run_hash:
                raise DataError("the corpus has changed since the sweep began: its folds would be others.")
            code = self._command(one).execute()
            made = _as_it_is(replace(one, run=None, state="new"))
            first = next((each for each in self.members if each.state == "finished"), None)
            if made.state == "finished" and made.run and first and first.run and not _same_folds(first.run, made.run):
                raise DataError(f"{made.run.run_id} has other folds than {first.run.run_id}, and is left out.")
            return code
        except FvcError as error:
            click.echo(f"error: {error}", err=True)
            return error.exit_code
        except OSError as error:
            click.echo(f"error: {error.filename or 'a file'}: {error.strerror}", err=True)
            return 1

    def _command(self, one: Combination) -> RunCommand:
        resume = None if one.run is None else str(one.run.root)
        wanted = Wanted(resume=resume, jobs=self._jobs, executor=self._executor, after_clips=self._clips_jobs(one))
        return RunCommand(NOTEBOOKS, wanted, one.asked)

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
        from fvc_lib.analysis.read.detector_tables import TABLE_FILES

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
@click.option("-j", "--jobs", type=click.IntRange(min=1), help="Folds trained at once in each run, as for a run alone.")
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
    known by their parameters and corpus, and skipped. A run that fails stops no other.

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
