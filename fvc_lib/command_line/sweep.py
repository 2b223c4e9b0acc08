"""``sweep``: make one run for every combination of parameter values, on the same folds, and compare the runs.

A run is recognised by the hash of its configuration. So a command that was killed can be repeated, and skips finished
runs.
"""

import itertools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from fvc_lib.command_line.records import execute_record
from fvc_lib.command_line.run_command import Executor, RunCommand, RunOptions
from fvc_lib.command_line.shared_options import (
    EXECUTOR,
    JOBS,
    PARAMS_FILES,
    PARAMS_TEXTS,
    PARAMS_VALUES,
    QUIET,
    ParametersCommand,
)
from fvc_lib.execution.plan import corpus_record
from fvc_lib.execution.run.record import run_hash
from fvc_lib.execution.run.status import is_worked_on
from fvc_lib.execution.run.which_run import GivenValues, given_values
from fvc_lib.execution.slurm import job_states
from fvc_lib.services.atomic_files import read_json_object, sha256_of_json
from fvc_lib.services.config import DECLARED, NOT_HASHED
from fvc_lib.services.errors import UsageError, command_text
from fvc_lib.services.home import NOTEBOOKS
from fvc_lib.services.run_paths import list_runs
from fvc_lib.services.tasks import DEFAULT_TASK, DETECTOR_COMPARISON

# Runs that differ in these parameters test other videos or other folds, so their results cannot be compared.
_DECIDE_THE_FOLDS = frozenset(
    {"protocol", "target_corpora", "num_folds", "folds_seed"} | {n for n in DECLARED if DECLARED[n].changes == "data"}
)


@dataclass
class Combination:
    """One combination of parameter values in a sweep, and its newest run if there is one."""

    name: str  # the values in words, such as ``model frame_cnn, seed 0``
    given: GivenValues  # all parameters of the run
    run_hash: str  # hash by which the run is recognised
    folder: Path | None = None  # the newest run with this hash

    def find(self) -> str:
        """Set ``folder`` to the newest run with this combination's hash, and return the run's state.

        Returns:
            ``new`` (no run), ``finished``, ``at work`` (also while jobs wait in a queue) or ``unfinished``.

        Raises:
            DataError: a record of the run is damaged.
            SlurmError: the run has jobs, and SLURM does not say whether they have ended.
        """
        for run in list_runs(self.given.config.runs_dir, self.given.config.experiment):
            if read_json_object(run.run_json).get("config_hash") == self.run_hash:
                self.folder = run.root
        if self.folder is None:
            return "new"
        if is_worked_on(self.folder):
            return "at work"
        if not any(planned.run for planned in self.command(None, "local").plan()):
            return "finished"
        has_jobs = any(not job.ended for job in job_states(self.folder, must_answer=True))
        return "at work" if has_jobs else "unfinished"

    def command(self, jobs: int | None, executor: Executor) -> RunCommand:
        """Return the command that begins the run of this combination, or resumes it if ``folder`` is set.

        Args:
            jobs: number of folds to train at once; None: ``auto``.
            executor: ``local``, or ``slurm`` to submit the run as jobs.
        """
        resume = str(self.folder) if self.folder else None
        return RunCommand(NOTEBOOKS, RunOptions(resume=resume, jobs=jobs, executor=executor), self.given)


def combinations(
    over: Sequence[tuple[str, str]],
    params_files: Sequence[Path] = (),
    yaml_texts: Sequence[str] = (),
    values: Sequence[tuple[str, str]] = (),
    *,
    experiment: str = "sweep",
) -> list[Combination]:
    """Return every combination of the values in ``over``, without making a run.

    The values of the last parameter vary fastest. Combinations that give the same configuration are returned only once.
    All runs use the folds of the first combination's seed.

    Args:
        over: pairs of a parameter's name and a text. If a name occurs once, its text holds values between commas. If a
            name occurs several times, each text is one value.
        params_files: YAML files of parameters that all runs share.
        yaml_texts: parameters that all runs share, as YAML texts.
        values: parameters that all runs share, as pairs of a name and a text.
        experiment: the folder of the runs, under the runs folder.

    Raises:
        UsageError: a name or value is unknown, compared runs may not differ in a parameter, or there is only one
            combination.
    """
    swept: dict[str, list[str]] = {}
    for name, text in over:
        swept.setdefault(name, []).append(text)
        if name in _DECIDE_THE_FOLDS or name in NOT_HASHED:
            raise UsageError(
                f"--over {name}: it changes the videos, the folds or no number, so runs that differ in it cannot be "
                f"compared. Give one value: -p {name} VALUE."
            )
    listed = [texts if len(texts) > 1 else texts[0].split(",") for texts in swept.values()]

    def given(chosen: Iterable[tuple[str, str]], **folds_seed: int) -> GivenValues:
        return given_values(params_files, yaml_texts, [*values, *chosen], {"experiment": experiment, **folds_seed})

    members: dict[str, Combination] = {}
    for texts in itertools.product(*listed):
        chosen = [(name, text.strip()) for name, text in zip(swept, texts, strict=True)]
        found = given(chosen)
        if not members:
            first = found.config
            corpus = corpus_record(first)
        if first.folds_seed is None and found.config.seed != first.seed:
            found = given(chosen, folds_seed=first.seed)
        digest = run_hash(found.config, corpus)
        members.setdefault(digest, Combination(", ".join(map(" ".join, chosen)), found, digest))
    if first.task != DEFAULT_TASK:
        raise UsageError(f"sweep compares detectors of videos (task {DEFAULT_TASK}), and the task is {first.task}.")
    if len(members) < 2:
        raise UsageError("--over: this is one run, and a comparison needs two. Give more values.")
    return list(members.values())


def compare(members: Sequence[Combination]) -> int:
    """Execute the notebook that compares the runs of ``members`` (combinations of parameter values).

    Returns:
        The exit code: 1 if the notebook fails, else 0.
    """
    from fvc_lib.analysis.read.detector_comparison import TABLE_FILES

    config = members[0].given.config
    digest = sha256_of_json(sorted(member.run_hash for member in members))[:8]
    folder = Path(config.runs_dir) / config.experiment / f"comparison_{digest}"
    parameters = {
        "compared_runs": [str(member.folder) for member in members],
        "bootstrap_replicates": config.bootstrap_replicates,
        "confidence": config.confidence,
    }
    code = execute_record(
        DETECTOR_COMPARISON, folder, parameters, title=f"FVC comparison {config.experiment}", runs_dir=config.runs_dir,
        product="comparison", files=TABLE_FILES,
    )  # fmt: skip
    return min(code, 1)


def show(members: Sequence[Combination]) -> list[str]:
    """Print the name, state and run id of every combination, and return the states.

    A state is ``new``, ``finished``, ``at work`` or ``unfinished`` (``Combination.find``).
    """
    states = [member.find() for member in members]
    config = members[0].given.config
    click.echo(
        f"{len(members)} runs on the same folds, {states.count('finished')} of them finished, in {config.runs_dir}"
    )
    for member, state in zip(members, states, strict=True):
        click.echo(f"  {member.name}: {state} {member.folder.relative_to(config.runs_dir) if member.folder else ''}")
    return states


def execute(members: Sequence[Combination], jobs: int | None, executor: Executor) -> int:
    """Make the missing runs one after the other, then compare the finished runs.

    If a run fails, the other runs are still made. The first combination with a finished run is the reference of the
    comparison. There is no comparison while jobs are at work.

    Args:
        members: the combinations.
        jobs: number of folds to train at once; None: ``auto``.
        executor: ``local``, or ``slurm`` to submit the runs as jobs.

    Returns:
        The exit code of a run that was stopped, else of the first run that failed, else of the comparison.

    Raises:
        FvcError: a run cannot be begun or submitted, or its record is damaged.
    """
    again = command_text(*sys.argv[1:])
    codes = [0]
    for member in members:
        if member.find() in ("new", "unfinished"):
            click.echo(f"\nrun of {member.name}")
            codes.append(member.command(jobs, executor).execute())
            if codes[-1] in (75, 130, 143):  # stopped
                click.echo(f"stopped; to go on: {again}")
                return codes[-1]
    states = show(members)
    failure = next(filter(None, codes), 0)
    if "at work" in states:
        click.echo(f"to compare once the jobs have ended: {again}")
        return failure
    if states.count("finished") < 2:
        click.echo("error: fewer than two runs are finished; there is nothing to compare.", err=True)
        return failure or 1
    return compare(members) or failure


@click.command(cls=ParametersCommand)
@click.option(
    "--over", nargs=2, multiple=True, required=True, metavar="NAME VALUES",
    help="A parameter and its values between commas; repeatable for all combinations. For values that contain a comma, "
    "repeat the parameter: --over augmentations flip,noise --over augmentations flip",
)  # fmt: skip
@PARAMS_FILES
@PARAMS_TEXTS
@PARAMS_VALUES
@click.option("--experiment", default="sweep", show_default=True, help="Folder under the runs folder for all of them.")
@JOBS
@EXECUTOR
@click.option("--dry-run", is_flag=True, help="Show the runs and their states, and stop; writes nothing.")
@QUIET
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
    fvc sweep --params params/demo.yaml --over model frame_cnn,r2plus1d_small --over seed 0,1
    fvc sweep -p corpus ~/videos --over model efficientnet_lite0,frame_cnn --dry-run
    fvc sweep -p corpus ~/videos --over learning_rate 1e-3,3e-3 --executor slurm

    Every combination is an ordinary run. The runs are made one after the other, and share clips and features of frozen
    networks. After a kill, or with more values, the same command goes on and skips finished runs. If a run fails, the
    other runs are still made.

    With --over seed the folds stay those of the first seed (folds_seed). The first finished combination is the
    reference. Notebook 08_detector_comparison shows results with intervals, corrected paired differences, controls
    (models that can use only shortcuts) and costs. Its page, tables (CSV) and BibTeX are in
    runs/EXPERIMENT/comparison_HASH/.

    Exit codes: 0 all done or submitted, 2 usage, 75/130/143 stopped, else the exit code of the first run that failed.
    """
    members = combinations(over, params_files, yaml_texts, values, experiment=experiment)
    for member, state in zip(members, show(members), strict=True):
        if state in ("new", "unfinished"):
            member.command(jobs, executor).refuse()
    if not dry_run:
        context.exit(execute(members, jobs, executor))
