"""``sweep``: make one ordinary run for every combination of values, on the same folds, and compare the runs.

A run is recognised by the hash of its configuration. So the same command, repeated after a kill, skips finished runs.
"""

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from fvc_lib.command_line.records import execute_record
from fvc_lib.command_line.run_command import NOTEBOOKS, Executor, Jobs, RunCommand, RunOptions
from fvc_lib.execution.plan.fingerprint import corpus_record
from fvc_lib.execution.run.lock import is_worked_on
from fvc_lib.execution.run.record import run_hash
from fvc_lib.execution.run.status import status_now
from fvc_lib.execution.run.which_run import GivenValues, given_values
from fvc_lib.execution.slurm import SlurmError, job_states
from fvc_lib.services.atomic_files import read_json_object, sha256_of_json
from fvc_lib.services.config import DECLARED, NOT_HASHED
from fvc_lib.services.errors import FvcError, StoppedError, UsageError, command_text
from fvc_lib.services.parameters import parse_text_value
from fvc_lib.services.run_paths import RunPaths, list_runs
from fvc_lib.services.tasks import DEFAULT_TASK, DETECTOR_COMPARISON

# Other values test other videos or other folds, so a difference would say nothing about the detectors.
_DECIDE_THE_FOLDS = frozenset(
    {"protocol", "target_corpora", "num_folds", "folds_seed"} | {n for n in DECLARED if DECLARED[n].changes == "data"}
)
_STOPPED = (75, 130, 143)


@dataclass
class Combination:
    """One combination of values, and its run if there is one."""

    name: str  # such as ``model frame_cnn, seed 0``
    given: GivenValues
    run_hash: str
    run: RunPaths | None = None
    state: str = "new"  # new, finished, at work, queued or unfinished
    exit_code: int = 0  # of its command in this sweep

    def look(self) -> None:
        """Set ``run`` to the newest finished run with this hash, else to the newest one, and ``state`` to its state."""
        runs = list_runs(self.given.config.runs_dir, self.given.config.experiment)
        own = [run for run in runs if read_json_object(run.run_json).get("config_hash") == self.run_hash]
        states = {run: _state(run, self.given) for run in reversed(own)}
        finished = [run for run, state in states.items() if state == "finished"]
        self.run = next(iter([*finished, *states]), None)
        self.state = states[self.run] if self.run else "new"

    def command(self, jobs: int | None, executor: Executor) -> RunCommand:
        """Return the command that begins the run, or resumes it."""
        resume = str(self.run.root) if self.run else None
        return RunCommand(NOTEBOOKS, RunOptions(resume=resume, jobs=jobs, executor=executor), self.given)


def values_to_sweep(over: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """Return ``{field: values}`` of the pairs ``over``; if a field is named once, its values are separated by commas.

    Raises:
        UsageError: a field or value is unknown, or compared runs may not differ in the field.
    """
    texts: dict[str, list[str]] = {}
    for name, text in over:
        texts.setdefault(name, []).append(text)
    values = {}
    for name, repeated in texts.items():
        listed = [part.strip() for part in repeated[0].split(",")] if len(repeated) == 1 else repeated
        for text in listed:
            parse_text_value(name, text)
        if name in _DECIDE_THE_FOLDS:
            raise UsageError(
                f"--over {name}: runs that differ in it are tested on other videos or folds and cannot be compared. "
                f"Start a sweep for each value: -p {name} VALUE."
            )
        if name in NOT_HASHED:
            raise UsageError(f"--over {name}: it changes no number, so all runs would be one. Give -p {name}.")
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
    """Return every combination of the values in ``over``, with its run if there is one; writes nothing.

    Raises:
        UsageError: a name or value is unknown or not allowed, a combination is repeated, or there is only one.
    """
    swept = values_to_sweep(over)
    if twice := sorted(swept.keys() & {name for name, _ in values}):
        raise UsageError(f"{', '.join(twice)}: given with -p and with --over. Leave one of them out.")
    base = given_values(params_files, yaml_texts, values, {"experiment": experiment}).config
    if base.task != DEFAULT_TASK:
        raise UsageError(f"sweep compares detectors of videos (task {DEFAULT_TASK}), and the task is {base.task}.")
    first_seed = int(swept["seed"][0]) if "seed" in swept else base.seed
    seed_of_folds = first_seed if base.folds_seed is None else base.folds_seed
    corpus = corpus_record(base)
    members: dict[str, Combination] = {}
    for texts in itertools.product(*swept.values()):
        chosen = dict(zip(swept, texts, strict=True))
        shared: dict[str, Any] = {"experiment": experiment}
        if int(chosen.get("seed", base.seed)) != seed_of_folds:
            shared["folds_seed"] = seed_of_folds
        given = given_values(params_files, yaml_texts, [*values, *chosen.items()], shared)
        name = ", ".join(f"{field} {text}" for field, text in chosen.items())
        digest = run_hash(given.config, corpus)
        if digest in members:
            raise UsageError(f"{name} and {members[digest].name} are the same run. Leave one of them out.")
        members[digest] = Combination(name, given, digest)
        members[digest].look()
    if len(members) < 2:
        raise UsageError("--over: this is one run, and a comparison needs two. Give more values.")
    return list(members.values())


def _state(run: RunPaths, given: GivenValues) -> str:
    try:
        status = status_now(run)
        if is_worked_on(run):
            return "at work"
        if status.state == "done":
            plan = RunCommand(NOTEBOOKS, RunOptions(resume=str(run.root)), given).plan()
            return "unfinished" if any(planned.run for planned in plan) else "finished"
        if status.shared and any(not job.ended for job in job_states(run, must_answer=True)):
            return "queued"
    except SlurmError:  # a silent queue may hold its jobs: do not submit them twice
        return "queued"
    except FvcError:  # the command that resumes the run names the problem
        pass
    return "unfinished"


def compare(members: Sequence[Combination]) -> int:
    """Execute the comparison notebook on the runs of ``members``; return 1 if it fails, else 0."""
    from fvc_lib.analysis.pages.report import write_runs_index  # plotly takes a second to load
    from fvc_lib.analysis.read.comparison_tables import TABLE_FILES

    config = members[0].given.config
    digest = sha256_of_json(sorted(member.run_hash for member in members))[:8]
    folder = Path(config.runs_dir) / config.experiment / f"comparison_{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    for table in TABLE_FILES:  # a failed comparison must not show earlier tables as its own
        (folder / table).unlink(missing_ok=True)
    parameters = {
        "compared_runs": [str(member.run.root) for member in members if member.run],
        "without_run": [[m.name, f"{m.name}: no run; exit code {m.exit_code}"] for m in members if not m.run],
        "output_folder": str(folder),
        "bootstrap_replicates": config.bootstrap_replicates,
        "confidence": config.confidence,
    }
    page = folder / "comparison.html"
    code = execute_record(
        DETECTOR_COMPARISON, folder, parameters, page=page, title=f"FVC comparison {config.experiment}",
        runs_dir=config.runs_dir, what="the comparison",
    )  # fmt: skip
    write_runs_index(Path(config.runs_dir))
    if not code:
        click.echo(f"  comparison    {page}\n  tables        {folder}")
    return 1 if code else 0


def show(members: Sequence[Combination]) -> None:
    """Print the name, state and run id of every combination."""
    width, config = max(len(member.name) for member in members), members[0].given.config
    done = sum(member.state == "finished" for member in members)
    folder = Path(config.runs_dir) / config.experiment
    click.echo(f"{len(members)} runs on the same folds, {done} of them finished, in {folder}")
    for number, member in enumerate(members, start=1):
        run = member.run.run_id if member.run else ""
        code = f"  exit code {member.exit_code}" if member.exit_code else ""
        click.echo(f"  {number:>3}  {member.name:<{width}}  {member.state:<10}  {run}{code}".rstrip())


def execute(members: Sequence[Combination], jobs: int | None, executor: Executor) -> int:
    """Make the missing runs one after the other, then compare the finished runs; return the exit code.

    The first combination with a finished run is the reference. After a run that fails the others are still made.
    """
    again = command_text(*sys.argv[1:])
    for number, member in enumerate(members, start=1):
        if member.state in ("new", "unfinished"):
            click.echo(f"\nrun {number} of {len(members)}: {member.name}")
            try:
                member.exit_code = member.command(jobs, executor).execute()
            except (FvcError, StoppedError) as error:
                click.echo(f"error: {error}", err=True)
                member.exit_code = error.exit_code
            except OSError as error:
                click.echo(f"error: {error.filename or 'a file'}: {error.strerror}", err=True)
                member.exit_code = 1
            member.look()
            if member.exit_code in _STOPPED:
                click.echo(f"stopped; to go on: {again}")
                return member.exit_code
    click.echo("")
    show(members)
    failure = next((member.exit_code for member in members if member.exit_code), 0)
    states = [member.state for member in members]
    if {"queued", "at work"} & set(states):
        click.echo(f"to compare once the jobs have ended: {again}")
        return failure
    if states.count("finished") < 2:
        click.echo("error: fewer than two runs are finished; there is nothing to compare.", err=True)
        return failure or 1
    return compare(members) or failure


@click.command(short_help="One run per combination of values, on the same folds; then compare them.")
@click.option(
    "--over", nargs=2, multiple=True, required=True, metavar="NAME VALUES",
    help="A parameter and its values between commas; repeatable for all combinations. For values that contain a comma, "
    "repeat the parameter: --over augmentations flip,noise --over augmentations flip",
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
@click.option("--dry-run", is_flag=True, help="Show the runs and their states, and stop; writes nothing.")
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

    Every combination is an ordinary run; runs share clips and features of frozen networks, and are made in turn.
    After a kill, or with more values, the same command goes on and skips finished runs. A run that fails stops no
    other.

    With --over seed the folds stay those of the first seed (folds_seed). The first finished combination is the
    reference. Notebook 08_detector_comparison shows numbers with intervals, corrected paired differences, controls and
    costs; its page, tables (CSV, LaTeX) and BibTeX lie in runs/EXPERIMENT/comparison_HASH/.

    Exit codes: 0 all done or submitted, 2 usage, 75/130/143 stopped, else that of the first run that failed.
    """  # noqa: D301 - click wants the backspace character itself before lines it shall not re-wrap
    members = combinations(over, params_files, yaml_texts, values, experiment=experiment)
    show(members)
    built = set[str]()
    for member in members:
        if member.state in ("new", "unfinished"):
            network = member.given.config.model_copy(update={"seed": 0, "folds_seed": None}).config_hash
            member.command(jobs, executor).refuse(imports=network not in built)  # building a network takes seconds
            built.add(network)
    if not dry_run:
        context.exit(execute(members, jobs, executor))
