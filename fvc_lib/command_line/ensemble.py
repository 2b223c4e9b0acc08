"""``run_notebooks.py ensemble``: several finished runs as one detector."""

from pathlib import Path
from typing import Any

import click

from fvc_lib.command_line.records import execute_record
from fvc_lib.services.atomic_files import sha256_of_json
from fvc_lib.services.errors import UsageError
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.records.ensembles import RECORD, Method
from fvc_lib.services.run_paths import RunPaths, find_run
from fvc_lib.services.tasks import ENSEMBLE

ANSWER, PAGE = "answer.txt", "ensemble.html"


@click.command(short_help="Several runs on the same folds as one detector, next to the best of them.")
@click.argument("runs", nargs=-1, required=True, metavar="RUN RUN...")
@click.option("--to", type=click.Path(path_type=Path), help="Folder for all of it; else next to the first run.")
@click.option("--method", type=click.Choice(("mean", "stacking")), default="mean", show_default=True,
              help="The mean of calibrated scores, or their log odds weighted by a regression.")  # fmt: skip
@click.option(
    "--replicates", type=click.IntRange(min=100), help="Half-samples of the groups. Without: as the first run has it."
)
@click.option("--confidence", type=click.FloatRange(0.5, 1, min_open=True, max_open=True),
              help="Coverage of every interval. Without: as the first run has it.")  # fmt: skip
@click.option("--runs-dir", type=click.Path(path_type=Path), help="Runs folder, where it is not the default.")
@click.pass_context
def ensemble(
    context: click.Context,
    runs: tuple[str, ...],
    to: Path | None,
    method: Method,
    replicates: int | None,
    confidence: float | None,
    runs_dir: Path | None,
) -> None:
    """Combine finished RUNs that were tested on the same videos and folds into one detector.

    A RUN is 'latest', a run id, a part of one, or a run folder. Runs that differ only in their seed are averaged first.
    Then the detectors are combined: by the mean of calibrated scores, or with --method stacking by weighted log odds.
    An outer fold's weights are fitted on the inner validation videos that no network of that fold was trained on.

    \b
    python run_notebooks.py ensemble run_20261123_05 run_20261123_06
    python run_notebooks.py ensemble runs/sweep/run_* --method stacking
    python run_notebooks.py predict ensemble_mean_1a2b3c4d suspicious.mp4

    Runs on other videos, labels, groups, folds or protocols are refused, and so are unfinished ones and ones whose
    audit found a leak. Notebook 11_ensemble shows the members and their weights, the result with interval and controls,
    and the paired difference from the best member. All files are in runs/EXPERIMENT/ensemble_METHOD_HASH/; the same
    command makes them again. Nothing is trained, and the members stay as they are.

    Exit codes: 0 ok, 1 the notebook failed, 2 usage, 3 the runs do not go together.
    """  # noqa: D301 - click wants the backspace character itself before lines it shall not re-wrap
    from fvc_lib.analysis.pages.report import write_runs_index  # torch and plotly take seconds to load
    from fvc_lib.analysis.read.comparison import read_members

    above = runs_dir or Path(resolve_config().runs_dir)
    found = read_members([find_run(above, name) for name in runs])
    members = [member.run for member in found.runs]
    digest = sha256_of_json([method, [[member.run.run_id, member.config.config_hash] for member in found.runs]])
    folder = (to or members[0].root.parent / f"ensemble_{method}_{digest[:8]}").expanduser().absolute()
    if any(RunPaths(parent).run_json.is_file() for parent in (folder, *folder.parents)):
        raise UsageError(f"--to {str(folder)!r}: is inside of a run. Name another folder.")
    is_empty = folder.is_dir() and not any(folder.iterdir())
    if folder.exists() and not is_empty and not (folder / f"{ENSEMBLE}.ipynb").is_file():
        raise UsageError(f"--to {str(folder)!r}: has files that no ensemble wrote. Name a new folder.")
    folder.mkdir(parents=True, exist_ok=True)
    click.echo(f"{method} of {len(members)} runs, {len(found.names)} detectors: {' + '.join(found.names)}")
    for name in (RECORD, ANSWER):  # a failed ensemble must not show earlier files as its own
        (folder / name).unlink(missing_ok=True)
    first = found.runs[0].config
    parameters: dict[str, Any] = {
        "member_runs": [str(run.root) for run in members],
        "method": method,
        "output_folder": str(folder),
        "bootstrap_replicates": replicates or first.bootstrap_replicates,
        "confidence": confidence or first.confidence,
    }
    code = execute_record(
        ENSEMBLE, folder, parameters, page=folder / PAGE, title=f"FVC {folder.name}", runs_dir=str(above),
        what="the ensemble", answer=folder / ANSWER,
    )  # fmt: skip
    if code:
        context.exit(code)
    for sentence in (folder / ANSWER).read_text(encoding="utf-8").splitlines():
        click.echo(f"  {sentence}")
    if above.absolute() in folder.parents:
        write_runs_index(above)
    click.echo(f"  ensemble      {folder / PAGE}\n  tables        {folder}")
