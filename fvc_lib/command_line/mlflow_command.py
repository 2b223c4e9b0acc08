"""``run_notebooks.py export-mlflow``: finished or partial runs into MLflow, now or at the end of a run."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fvc_lib.services.config import RunConfig, resolve_config
from fvc_lib.services.errors import DataError
from fvc_lib.services.run_paths import RunPaths, find_run

if TYPE_CHECKING:
    from fvc_lib.analysis.mlflow_model import FoldNetwork


@click.command("export-mlflow", short_help="Export runs to MLflow.")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option(
    "--tracking-uri", metavar="URI",
    help="An MLflow server or database, when it is not MLFLOW_TRACKING_URI, else mlflow.db in the runs folder.",
)  # fmt: skip
@click.option("--no-model", is_flag=True, help="Register no model.")
@click.option("--runs-dir", type=click.Path(path_type=Path), help="Runs folder, where it is not the default.")
def export_mlflow(runs: tuple[str, ...], tracking_uri: str | None, no_model: bool, runs_dir: Path | None) -> None:
    """Export each RUN to MLflow ('latest', a run id, a part of one, or a run folder), finished or not.

    A run becomes one MLflow run with a nested one for each fold: parameters, metrics by step, results with intervals
    beside their controls, whether it is above them, the report with its figures, and (task video) the network of one
    fold in the model registry. The run folder stays the truth and is only read. Exporting again adds what is new and
    nothing twice; what MLflow takes otherwise or not at all is named. It needs: pip install 'fvc_lib[mlflow]'

    \b
    python run_notebooks.py export-mlflow latest                                     into mlflow.db beside the runs
    mlflow ui --backend-store-uri sqlite:///runs/mlflow.db                           to look at it
    python run_notebooks.py export-mlflow runs/*/run_*                               all runs
    python run_notebooks.py export-mlflow latest --tracking-uri http://host:5000     to a server

    A server's password belongs into MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, not into URI, which the
    list of processes shows. FVC_TRACKER=mlflow exports each run when it ends.
    """  # noqa: D301 - click wants the backspace character itself before lines it shall not re-wrap
    folder = runs_dir or Path(resolve_config().runs_dir)
    for run in [find_run(folder, name) for name in runs]:
        _export(run, tracking_uri, with_model=not no_model)


def export_when_asked(run: RunPaths, config: RunConfig) -> None:
    """Export ``run`` where ``tracker`` says so; what goes wrong is a warning with the command that repeats it."""
    if config.tracker != "mlflow":
        return
    command = f"python run_notebooks.py export-mlflow {shlex.quote(str(run.root))}"
    try:
        _export(run, None, with_model=True)
    except KeyboardInterrupt:
        click.echo(f"warning: the run has ended, but its export was interrupted\n  to go on: {command}", err=True)
        raise
    except Exception as error:  # noqa: BLE001 - whatever MLflow does, the run has ended as it has ended
        click.echo(f"warning: not exported to MLflow: {error}\n  to repeat it: {command}", err=True)


def load_fold_network(run: RunPaths, fold: int) -> FoldNetwork | None:
    """The best network of ``fold`` with the shape of its clips; None where it has left none.

    Raises:
        FvcError: its weights are damaged or of another network, or the run's parameters are unreadable.
    """
    import torch  # takes a second to load

    from fvc_lib.analysis.mlflow_model import FoldNetwork
    from fvc_lib.execution.session import run_config
    from fvc_lib.learning.models import ShiftedLogits, build_model
    from fvc_lib.learning.selection import read_selection
    from fvc_lib.services.atomic_files import sha256_of_file
    from fvc_lib.services.checkpoints import BEST, load_best_model

    folder = run.fold_checkpoints(fold)
    if not (folder / BEST).is_file():
        return None
    recorded = read_selection(folder)
    if recorded is None:
        raise DataError(
            f"{folder}: the record of what was chosen for this network is missing or unreadable, and its score depends "
            "on it. Export with --no-model."
        )
    config, weights = run_config(run), load_best_model(folder)
    with torch.random.fork_rng(devices=[]):
        module = build_model(config.model)
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        raise DataError(
            f"{folder / BEST}: these are no weights of this version's {config.model}. "
            "Export with the version that trained it, or with --no-model."
        ) from error
    shape = (1, config.num_frames, 3, config.fixed_size, config.fixed_size)
    scoring = ShiftedLogits(module, recorded.selection.prior_logit).eval()
    return FoldNetwork(scoring, shape, sha256_of_file(folder / BEST))


def _export(run: RunPaths, tracking_uri: str | None, *, with_model: bool) -> None:
    from fvc_lib.analysis.mlflow_connection import default_tracking_uri
    from fvc_lib.analysis.mlflow_export import export_run

    # Beside the folder of runs that this one is in, also when it was named by its path.
    uri = tracking_uri or default_tracking_uri(run.root.parent.parent)
    report = export_run(
        run,
        tracking_uri=uri,
        load_model=load_fold_network if with_model else None,
        progress=_tell if sys.stderr.isatty() else None,
    )
    for line in report.lines():
        click.echo(line)


def _tell(what: str) -> None:
    click.echo(f"  {what}", err=True)
