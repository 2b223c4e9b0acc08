"""``robustness``: score a finished run's test videos again after disturbances."""

import os
import sys
from pathlib import Path

import click

from fvc_lib.command_line import commands
from fvc_lib.command_line.records import shown
from fvc_lib.command_line.run_command import NOTEBOOKS
from fvc_lib.execution.run.lock import run_lock
from fvc_lib.execution.run.session import progress_path
from fvc_lib.execution.run.task import kernel_environment
from fvc_lib.services.config_fields import split_names
from fvc_lib.services.errors import UsageError, command_text
from fvc_lib.services.parameters import resolve_config, run_config
from fvc_lib.services.records.digests import listed, write_document
from fvc_lib.services.run_paths import ATTEMPT_VARIABLE, RunPaths, find_run
from fvc_lib.services.tasks import DEFAULT_TASK, ROBUSTNESS


@click.command(short_help="Score a run's test videos after compression, blur, cuts and the like.")
@click.argument("run", default="latest")
@click.option(
    "--levels", multiple=True, metavar="NAMES",
    help="Levels or kinds with commas between them: --levels h264,jpeg_50. Without: all of them.",
)  # fmt: skip
@click.option(
    "-j", "--jobs", type=click.IntRange(min=1), help="Videos decoded and encoded at once. Without: one per core."
)
@click.option("--runs-dir", type=click.Path(path_type=Path), help="Runs folder, where it is not the default.")
@click.pass_context
def robustness(
    context: click.Context, run: str, levels: tuple[str, ...], jobs: int | None, runs_dir: Path | None
) -> None:
    """Score the test videos of RUN again after disturbances such as compression, and say what the number loses.

    RUN is 'latest', a run id, a part of one, or a run folder; its folds must all be trained. Every video is judged by
    the network that was not trained on its group, decoded as the run decoded it. First all videos are scored
    undisturbed, which must give the stored scores.

    \b
    python run_notebooks.py robustness latest                      every level
    python run_notebooks.py robustness latest --levels h264,size   two kinds
    python run_notebooks.py robustness latest --levels jpeg_50     one level

    Kinds and their levels: lossless (a control: written again, nothing changed); h264 (h264_crf23, 28, 35, 40); h265
    (h265_crf28); size (size_half, size_quarter); jpeg (jpeg_90, 70, 50); blur (blur_1, 2, 4 px); noise (noise_4, 8, 16
    of 255); rate (rate_half); trim (trim_front, trim_back: 25 %).

    Every score is stored at once: after a kill the same command goes on. Other levels can be added later. Written:
    tables/robustness.parquet, tables/robustness_results.csv, and the executed notebook 09_robustness with its page.

    Exit codes: 0 ok, 1 the notebook failed, 2 usage, 3 the undisturbed scores are not the stored ones.
    """  # noqa: D301 - click wants the backspace character itself before lines it shall not re-wrap
    from fvc_lib.tasks.video.robustness import levels_named  # torch takes a second to load

    found = find_run(runs_dir or Path(resolve_config().runs_dir), run)
    if (task := run_config(found).task) != DEFAULT_TASK:
        raise UsageError(f"{found.run_id} is of task {task}; robustness is measured of runs of task {DEFAULT_TASK}.")
    names = [name for text in levels for name in split_names(text)]
    if levels and not names:
        raise UsageError("--levels: got no name. Give some, or leave the option out for all levels.")
    chosen = levels_named(names)
    click.echo(f"run {found.root}\n{len(chosen)} level{'s' if len(chosen) > 1 else ''}: {', '.join(chosen)}")
    with run_lock(found):
        code = _execute(found, {"run_dir": str(found.root), "levels": names, "decode_workers": jobs or 0})
    reported = commands.report_run(found)
    if not code:
        from fvc_lib.analysis.read.robustness import findings  # tables take a second to load
        from fvc_lib.services.tables import ROBUSTNESS_RESULTS, read_table

        results = read_table(found.robustness_results, ROBUSTNESS_RESULTS)
        lines = findings(results, run_config(found).confidence, found)
        click.echo("\n".join(["", *(f"  {line}" for line in lines), ""]))
        click.echo(f"  robustness    {found.report_html}\n  table         {found.robustness_results}")
    context.exit(code or reported)


def _execute(run: RunPaths, parameters: dict[str, object]) -> int:
    """Execute the robustness notebook, store it as a record of the run, and return the exit code."""
    from fvc_lib.execution.papermill_engine import KernelRequest, execute  # papermill takes a second to load

    config = run_config(run)
    request = KernelRequest(
        record=run.partial_notebook(ROBUSTNESS),
        folder=NOTEBOOKS,
        environment={**kernel_environment(os.environ), ATTEMPT_VARIABLE: "1"},
        log=run.stage_log(ROBUSTNESS),
    )
    settings = {"bootstrap_replicates": config.bootstrap_replicates, "confidence": config.confidence}
    with shown(progress_path(run, ROBUSTNESS, None)):
        outcome = execute(NOTEBOOKS / f"{ROBUSTNESS}.ipynb", {**parameters, **settings}, request)
    if not outcome.exit_code:
        request.record.replace(record := run.executed_notebook(ROBUSTNESS))
        files = listed([run.robustness, run.robustness_results, record], run.root)
        write_document(run.stage_checkpoint(ROBUSTNESS), {"files": files})
        return 0
    why = f"{outcome.error.name}: {outcome.error.message}" if outcome.error else "its kernel died"
    click.echo(f"error: {why}\n  its record: {request.record}\n  to go on: {command_text(*sys.argv[1:])}", err=True)
    return outcome.exit_code
