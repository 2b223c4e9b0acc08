"""Commands that show runs, corpora or this machine, export runs, and make room on the disk."""

import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fvc_lib.analysis.wording import clean_text, count_text
from fvc_lib.command_line.models import write_run_bundle
from fvc_lib.command_line.shared_options import (
    AS_JSON,
    FINAL,
    PARAMS_FILES,
    PARAMS_VALUES,
    RUNS_DIR,
    ParametersCommand,
    print_answer,
    refuse_where,
)
from fvc_lib.execution.run.session import read_progress
from fvc_lib.execution.run.shards import shards_line
from fvc_lib.execution.run.status import is_worked_on, run_lock, status_now
from fvc_lib.execution.run.task import what_happened, what_next
from fvc_lib.execution.run.which_run import given_values
from fvc_lib.execution.slurm import JobState, job_states, submitted_jobs
from fvc_lib.execution.stages import Notebook
from fvc_lib.services.atomic_files import size_of
from fvc_lib.services.config import DEFAULTS, RunConfig, meaning
from fvc_lib.services.errors import DataError, FvcError, UsageError, command_text
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.records.digests import refuse_damaged
from fvc_lib.services.registry import CORPORA
from fvc_lib.services.run_paths import RunPaths, find_run, find_run_or_ensemble, list_runs
from fvc_lib.services.tasks import DEFAULT_TASK, STAGES

if TYPE_CHECKING:
    from fvc_lib.analysis.mlflow import RunExport


@click.command()
@click.argument("run", default="latest")
@AS_JSON
@RUNS_DIR
def status(run: str, as_json: bool, runs_dir: Path) -> None:
    """Show the state of RUN, of its tasks, and of its SLURM jobs.

    RUN is 'latest', a run id, a part of a run id, a run folder, or the --out folder of a predict command submitted to
    SLURM.

    \b
    fvc status
    fvc status run_20261123 --json
    """
    from fvc_lib.analysis.read.runs import run_labels  # polars takes a second to load

    folder = Path(run).expanduser().absolute()
    if not (folder / "run.json").is_file() and submitted_jobs(folder):
        jobs = job_states(folder)
        is_done = any((folder / last).is_file() for last in ("answer.txt", "predictions.html"))
        record: dict[str, Any] = {"folder": folder, "state": "done" if is_done else "waiting", "jobs": jobs}
        line = f"{folder}: {'done' if is_done else 'not done; the same predict command goes on with it'}"
        print_answer(record, [line, *_job_lines(folder, jobs)], as_json=as_json)
        return
    paths = find_run(runs_dir, run)
    state = status_now(paths)
    jobs = job_states(paths.root)
    doing = {key: read_progress(paths.logs / f"{key}.progress.json") for key in state.stages}
    record = {
        "run": paths.run_id,
        "folder": paths.root,
        **state.model_dump(mode="json"),
        "progress": doing,
        "jobs": jobs,
    }
    is_stopped = state.state in {"interrupted", "requeue", "failed"}
    go_on = f"; to go on: {command_text('--resume', paths.root)}" if is_stopped else ""
    word = "stopped" if state.state == "requeue" else state.state
    lines = [f"{paths.root}: {word}, {size_of(paths.root) / 1e6:,.1f} MB{go_on}", f"  {run_labels([paths])[0]}"]
    for key, stage in state.stages.items():
        details = stage.reason or ""
        progress = doing[key]
        if stage.state == "running":
            details = f"{progress.what} {progress.done}/{progress.total}" if progress else ""
        elif stage.state == "failed":
            details = f"{what_happened(stage)[:300]}\n    {what_next(paths, stage)}"
        lines.append(f"  {key:<28} {stage.state:<12} {stage.duration_seconds or 0:8.1f} s  {details}".rstrip())
    if state.state == "waiting" and all(job.ended for job in jobs):
        lines.append("  no job of it is in the queue here; submit the rest: --resume RUN --executor slurm")
    print_answer(record, [*lines, *_job_lines(paths.root, jobs)], as_json=as_json)


def _job_lines(folder: Path, jobs: Sequence[JobState]) -> list[str]:
    """Return lines on submitted shards (shares of a stage's files) and on the states of jobs in SLURM's queue.

    Args:
        folder: the run folder, or the output folder of ``predict``.
        jobs: the states of its jobs.
    """
    shards = {job.stages[0]: job.shards for job in submitted_jobs(folder) if job.shards}
    texts = [*(shards_line(folder, name, number) for name, number in shards.items()), *jobs]
    return [f"  {text}" for text in texts]


@click.command()
@click.argument("runs", nargs=-1, required=True)
@click.option("--metric", default="roc_auc", show_default=True, help="The metric that is compared.")
@AS_JSON
@RUNS_DIR
def compare(runs: tuple[str, ...], metric: str, as_json: bool, runs_dir: Path) -> None:
    """Compare two or more RUNS on the same videos: run ids, parts of run ids, run folders, or 'latest'.

    For each pair of runs the command shows the difference of the metric with an interval. The groups of videos are
    resampled, and both runs are judged on the same draws. The p-values are corrected for the number of pairs (Holm
    1979). Runs whose videos, labels, groups or folds differ are not compared; the output names the difference.

    \b
    fvc compare run_20261123_05 run_20261123_06
    fvc compare runs/sweep/run_* --metric average_precision

    Exit codes: 0 at least one pair was compared, 2 usage, 3 no pair could be compared.
    """
    from fvc_lib.analysis.read import comparison  # sklearn and polars take a second to load
    from fvc_lib.analysis.read.runs import run_labels

    config = resolve_config()
    found = [find_run(runs_dir, name) for name in runs]
    if len({run.root for run in found}) < 2:
        raise UsageError("compare: got one run, wanted two or more different ones.")
    refuse_damaged(*(run.root for run in found), logs=False)
    compared = comparison.compare(
        found, metric=metric, replicates=config.bootstrap_replicates, seed=config.seed, confidence=config.confidence
    )
    print_answer(compared, (*run_labels(found), "", *comparison.lines(compared)), as_json=as_json)
    if not compared.pairs:
        raise DataError("no two of these runs can be compared; the lines above say why.")


def report_run(run: RunPaths) -> int:
    """Write the run's report and the list of all runs as web pages, and print the run's results in a few lines.

    Returns:
        The exit code: 1 if a page could not be written, 3 if a file that the pages show is damaged, else 0.
    """
    from fvc_lib.analysis.pages.report import summary_lines, write_run_report, write_runs_index
    from fvc_lib.analysis.read.headline import run_headline

    exit_code = 0
    try:
        write_run_report(run)
        write_runs_index(run.root.parent.parent)
    except (FvcError, OSError) as error:
        exit_code = 1
        click.echo(
            f"error: the report was not written, one from before stays as it was: {error}\n"
            f"  to write it: {command_text('report', run.root)}",
            err=True,
        )
    for line in summary_lines(run):
        click.echo(line)
    if not exit_code and run.report_html.is_file():
        click.echo(f"  report        {run.report_html}")
    return exit_code or (DataError.exit_code if run_headline(run).notes else 0)


@click.command()
@click.argument("run", default="latest")
@RUNS_DIR
@click.pass_context
def report(context: click.Context, run: str, runs_dir: Path) -> None:
    """Write RUN's report, a page for each of its executed notebooks, and the list of all runs.

    RUN is 'latest', a run id, a part of a run id, or a run folder. No notebook is executed. The command also works
    while the run is at work, or after it was killed.

    \b
    fvc report
    fvc report run_20261123

    Exit codes: 0 ok, 1 not written, 3 written, but a file that the report reads is damaged; the output names the file.
    """
    context.exit(report_run(find_run(runs_dir, run)))


@click.command()
@click.argument("name", required=False)
@AS_JSON
def detectors(name: str | None, as_json: bool) -> None:
    """List the networks that can be chosen with -p model.

    A row shows the number of parameters, the operations for a clip (GFLOPs), the input clip, whether weights come with
    the installation or are to be fetched, their licence, and the packages that are missing. With NAME, such as r3d_18
    or timm:resnet50, the command shows everything about one network: paper, licences, packages to install and weights
    to fetch. A network of your own is -p model path/to/my_net.py:MyNet.

    \b
    fvc detectors
    fvc detectors clip_vit_l14
    """
    from fvc_lib.detectors import facts  # torch takes a second to load

    found = [facts.facts_of(name)] if name else facts.facts_of_all()
    header = _DETECTOR_ROW.format("name", "parameters", "GFLOPs", "clip", "weights", "licence of them", "runs here")
    last = f"One of them in full: {command_text('detectors', 'NAME')}. Your own: -p model path/to/my_net.py:MyNet."
    lines = [found[0].text()] if name else [header, *(_DETECTOR_ROW.format(*each.row()) for each in found), last]
    print_answer([each.record() for each in found], lines, as_json=as_json)


_DETECTOR_ROW = "{:<23.23}  {:<10}  {:<8}  {:<10}  {:<13.13}  {:<34.34}  {}"


@click.command()
@click.argument("family", required=False)
def features(family: str | None) -> None:
    """List the families of forensic features and their features; with FAMILY only this family.

    The list has the column, unit and meaning of every feature, and the paper of every family. Values of tiles (parts of
    a frame) and frames are pooled over a video, for example to their mean. The column's name then ends with the kind
    of pooling, such as _mean. Features of the coded stream (packets) are one value per video, and are not pooled. With
    -p feature_families A,B a run measures only these families.

    \b
    fvc features
    fvc features noise_residual
    """
    from fvc_lib.video.features.family import POOLS, families_named

    for measured in families_named(family or "all"):
        click.echo(f"{measured.name}, of {_MEASURED_ON[measured.of]}: {measured.paper}")
        for one in measured.features:
            follows = " Follows size or codec." if one.size_proxy else ""
            click.echo(f"  {f'{measured.name}_{one.name}':<36} {one.unit:<22} {one.meaning}{follows}")
    pools = ", ".join(f"_{pool} {meaning}" for pool, meaning in POOLS.items())
    click.echo(f"Pools over a video, except for features of packets: {pools}.")


_MEASURED_ON = {"tiles": "tiles of single frames", "pairs": "neighbouring frames", "stream": "packets and decoder"}


_CORPUS = "{name:<16} {title}\n    layout: {accepted}\n    paper: {paper}\n    terms: {licence}\n    from: {fetch}"
_COUNTED = ("corpus", "label", "generator", "manipulation", "real_source", "official_split")


@click.command(cls=ParametersCommand)
@click.argument("path", required=False, type=click.Path(path_type=Path))
@PARAMS_FILES
@PARAMS_VALUES
@AS_JSON
def corpora(
    path: Path | None, params_files: tuple[Path, ...], values: tuple[tuple[str, str], ...], as_json: bool
) -> None:
    """List the public corpora that -p corpus reads without conversion, with their terms and where to get them.

    PATH is a folder, a manifest (a table of videos) or a pattern of tars. With PATH the command shows which layout of
    files it recognises. It counts the groups, and the videos by corpus, label, generator, manipulation, source of the
    real videos, and part of the corpus's official split. No video is opened.

    \b
    fvc corpora
    fvc corpora ~/videos
    fvc corpora list.csv -p label_map 1=fake,0=real

    Exit codes: 0 ok, 2 PATH is no corpus, 3 no detector can be trained on it.
    """
    from fvc_lib.corpus import listing
    from fvc_lib.corpus.corpus_files import counted
    from fvc_lib.corpus.listing import read_corpora, reading_options
    from fvc_lib.corpus.protocols import refuse_untrainable

    if path is None:
        names = ("name", "title", "accepted", "paper", "licence", "fetch")
        records = [{name: getattr(loader, name) for name in names} for loader in listing.by_rank(CORPORA)]
        lines = [(_CORPUS if of["title"] else "{name:<16} {accepted}").format(**of) for of in records]
        lines.append(f"What a folder of yours is: {command_text('corpora', 'PATH')}")
        print_answer(records, lines, as_json=as_json)
        return
    config = given_values(params_files, values=values, options={"corpus": str(path)}).config
    if config.task != DEFAULT_TASK:
        raise UsageError(f"task: got {config.task}; corpora reads corpora of task {DEFAULT_TASK}. Leave it out.")
    found = read_corpora([config.corpus, *config.more_corpora], None, **reading_options(config))
    num_groups = found.annotations["stated_group"].drop_nulls().n_unique()
    values_of = {name: [value for one in found.entries if (value := getattr(one, name))] for name in _COUNTED}
    counts_of = {name: counted(of) for name, of in values_of.items()}
    record = {
        "read_as": found.kind, "num_videos": len(found.entries), "num_groups": num_groups, "counts": counts_of,
        "rejected": found.rejected.to_dicts(), "notes": found.notes,
    }  # fmt: skip
    lines = [f"{str(path)!r} is read as {found.kind}: {len(found.entries):,} videos, {num_groups:,} stated groups"]
    for column, counts in counts_of.items():
        shown = ", ".join(f"{name} {count:,}" for name, count in list(counts.items())[:12])
        lines.append(f"  {column}: {shown or 'none stated'}{' ...' if len(counts) > 12 else ''}")
    for reason, count in counted(found.rejected["reason"]).items():
        first = found.rejected.filter(reason=reason).row(0, named=True)
        lines.append(f"  not used: {count:,} x {reason}; the first: {first['path']}: {first['detail']}")
    print_answer(record, [*lines, *(f"  note: {note}" for note in found.notes)], as_json=as_json)
    refuse_untrainable(found, config)


def print_notebooks(notebooks: Mapping[str, Notebook]) -> None:
    """Print each stage's notebook, then all parameters with their defaults and meanings.

    ``notebooks`` is ``{stage name: notebook}`` for all stages.
    """
    for stage in STAGES:
        click.echo(f"{stage.name}: {notebooks[stage.name].title} (task {', '.join(stage.tasks)})")
    click.echo("parameters, for -p:")
    for name, value in DEFAULTS.items():
        click.echo(f"    {name} = {value!r}  {meaning(name)}")


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--format", "kind", type=click.Choice(("bundle", "mlflow")), default="bundle", show_default=True,
              help="A folder to hand on, or runs of MLflow.")  # fmt: skip
@click.option(
    "--to", type=click.Path(path_type=Path), help="The bundle's folder, not there yet. Without: ./bundle_RUN."
)
@FINAL
@click.option(
    "--tracking-uri", metavar="URI",
    help="An MLflow server or database, when it is not MLFLOW_TRACKING_URI, else mlflow.db in the runs folder.",
)  # fmt: skip
@click.option("--register", metavar="NAME[@ALIAS]", help="Make the run's bundle a version of this MLflow model, too.")
@RUNS_DIR
def export(
    runs: tuple[str, ...],
    kind: str,
    to: Path | None,
    final: bool,
    tracking_uri: str | None,
    register: str | None,
    runs_dir: Path,
) -> None:
    """Write the detector of a RUN as a folder to hand on (bundle), or export each RUN to MLflow.

    RUN is 'latest' (the default), a run id, a part of a run id, a run folder, or, for a bundle, an ensemble.

    \b
    fvc export latest
    fvc export latest --to ~/detectors/mine
    python -c "from fvc_lib import load_detector; print(load_detector('bundle_RUN').predict(['video.mp4']))"
    fvc export latest --format mlflow                                    into mlflow.db next to the runs
    fvc export runs/*/run_* --format mlflow --tracking-uri URI           all runs, to a server
    fvc export latest --format mlflow --register news@champion           and into the model registry
    fvc predict models:/news@champion video.mp4                          which predict reads

    A bundle needs neither the run nor its corpus. All folds of the run must be trained, and its results must exist. It
    has the folds' networks (safetensors), the settings for decoding videos and calibrating scores, and the out-of-fold
    scores. It has properties of the training videos, and hashes by which the videos are recognised. It has a model card
    (README.md), and a SHA-256 of every file, which is checked before loading. It has no video, and no path or name of a
    video. A network of your own is copied as code. A user who loads the bundle must allow this code. The bundle of an
    ensemble has a bundle of each of its runs in members/. The bundle of a run of task image or video_text has its one
    network, the meaning of the network's outputs, and the run's texts with their embeddings. A run that is not above
    its controls (models that can use only shortcuts) is exported as well. The card then begins with this fact, and all
    verdicts of the bundle are "undecided".

    MLflow needs: make setup-mlflow. A run, finished or not, becomes one MLflow run with the parameters, the metrics by
    step, the report with its figures, and the results with intervals. Next to the results are the controls, and whether
    the run is above them. A finished run has its model, too (pyfunc). The run folder is only read. A second export of a
    run replaces the first. --register makes the bundle of one finished run a new version of the model NAME. ALIAS then
    points at this version. Set user and password of a server in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.
    Do not put them into --tracking-uri: other users of this machine could read them in the list of processes. With
    FVC_TRACKER=mlflow every run is logged while it works, and its model when it is done.

    Exit codes: 0 ok, 1 a file is damaged or MLflow refused, 2 usage, 3 the results are missing or damaged.
    """
    from fvc_lib.analysis.mlflow import RunExport, default_tracking_uri, model_and_alias

    of_mlflow = kind == "mlflow"
    names = runs or ("latest",)
    refuse_where({
        "--to and --final: are for --format bundle.": of_mlflow and (to or final),
        "--tracking-uri and --register: are for --format mlflow.": not of_mlflow and (tracking_uri or register),
        "--format bundle: is for one run.": not of_mlflow and len(names) > 1,
        "--register: is for one run.": register and len(names) > 1,
    })  # fmt: skip
    if of_mlflow:
        named = model_and_alias(register) if register is not None else None
        for run in [find_run(runs_dir, name) for name in names]:
            _export(RunExport(run, tracking_uri or default_tracking_uri(run.root.parent.parent)), named)
        return
    found = find_run_or_ensemble(runs_dir, names[0])
    target = (to or Path(f"bundle_{found.run_id}")).expanduser().absolute()
    num_networks, sentence = write_run_bundle(found, target, final=final)
    click.echo(f"bundle {target}: {count_text(num_networks, 'network')}, {size_of(target) / 1e6:.1f} MB\n  {sentence}")


def _export(export: "RunExport", named: tuple[str, str] | None = None) -> None:
    """Finish the export of a run to MLflow, and print what was exported. A finished run is exported with its model.

    Args:
        export: the export, which may have logged the run while it worked.
        named: ``(model, alias)`` to register the run's bundle under; None: it is not registered.

    Raises:
        FvcError: a file of the run is damaged, MLflow refused, or the run has no model to register.
    """
    from fvc_lib.analysis.mlflow import SCHEME, register_bundle

    run = export.run
    refuse_damaged(run.root)
    with tempfile.TemporaryDirectory(prefix="fvc_bundle_") as folder:
        bundle, sentence, lines = Path(folder) / "bundle", "", list[str]()
        try:
            _, sentence = write_run_bundle(run, bundle)
        except FvcError as error:  # mostly because the run is not finished
            if named is not None:
                raise
            lines = [f"  without its model: {clean_text(error)}"]
        lines = [*export.finish(bundle if sentence else None), *lines]
        click.echo("\n".join(lines))
        if named is not None:
            model, alias = named
            version = register_bundle(
                bundle, model, alias, experiment=run.root.parent.name, run_id=run.run_id,
                tracking_uri=export.tracking_uri,
            )  # fmt: skip
            uri = f"{SCHEME}{model}@{alias}" if alias else f"{SCHEME}{model}/{version}"
            click.echo(f"model {model}, version {version}\n  {sentence}")
            click.echo(f"  to ask it: {command_text('predict', uri, 'FILE')}")


FOLLOW_SECONDS = 10.0  # between two looks at a run that is followed


def follow_until_closed(root: str) -> None:
    """Log the run in the folder ``root`` to MLflow until standard input is closed.

    Then the results are exported and, if the run is finished, its model. A failure of MLflow before that is ignored,
    because the next update logs the missing values.
    """
    from fvc_lib.analysis.mlflow import RunExport, TrackingError, default_tracking_uri

    run = RunPaths(Path(root))
    export = RunExport(run, default_tracking_uri(run.root.parent.parent))
    while not select.select([sys.stdin], [], [], FOLLOW_SECONDS)[0]:
        with suppress(TrackingError):
            export.update()
    try:
        _export(export)
    except Exception as error:  # noqa: BLE001 - the process that waits for this one shows why
        sys.exit(str(error))


def follower_of(run: RunPaths) -> "subprocess.Popen[str]":
    """Start a process that logs ``run`` to MLflow until its standard input is closed, and return the process."""
    program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import follow_until_closed as f; f(sys.argv[1])"
    return subprocess.Popen(
        [sys.executable, "-c", program, str(run.root)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,  # Ctrl-C ends the run, and this process exports how it ended
    )  # fmt: skip


def export_when_asked(run: RunPaths, config: RunConfig, follower: "subprocess.Popen[str] | None" = None) -> None:
    """Export ``run`` to MLflow if the parameter ``tracker`` in ``config`` is ``mlflow``.

    If the export fails, only a warning is printed, with the command that repeats the export.

    Args:
        run: the run, which has ended.
        config: the run's configuration.
        follower: the process that has logged the run so far (``follower_of``); None: a new process is started.
    """
    if config.tracker != "mlflow":
        return
    exporting = follower or follower_of(run)
    shown, _ = exporting.communicate()  # closes its input
    if exporting.returncode:
        command = command_text("export", run.root, "--format", "mlflow")
        shown = f"warning: not exported to MLflow: {shown.rstrip()}\n  to repeat it: {command}"
    click.echo(shown.rstrip(), err=bool(exporting.returncode))


_WEIGHTS = (".safetensors", ".pt")
# Ends of names of superseded files that stay. Records show which test folds were opened; training a model takes hours.
_STAY_SUPERSEDED = ("best_model.safetensors", ".json")


@click.command()
@click.option("--yes", is_flag=True, help="Delete what the preview shows.")
@click.option(
    "--days", type=click.FloatRange(min=0), default=30.0, show_default=True, metavar="DAYS",
    help="Only what was last used or finished at least this many days ago.",
)  # fmt: skip
@click.option("--models", is_flag=True, help="Also delete the trained weights of finished runs: a clean start.")
@click.option(
    "--runs-dir", type=click.Path(exists=True, file_okay=False, path_type=Path),  # else no run would use the cache
    help="Runs folder, where it is not the default.",
)  # fmt: skip
def clean(yes: bool, days: float, models: bool, runs_dir: Path | None) -> None:
    """Show how many MB each run and cache can free; with --yes delete these files.

    From caches, clips, re-encoded videos, features and measurements are deleted. While any run is at work or waits,
    nothing is deleted from caches. From finished runs, files of attempts that a later attempt replaced are deleted,
    except their best models and records. With --models all trained weights of finished runs are deleted, too. Tables,
    metrics, reports and all files of unfinished runs stay. No link is followed.

    \b
    fvc clean                        what would go
    fvc clean --yes                  delete it
    fvc clean --models --days 0      weights of all finished runs as well
    """
    config = resolve_config()
    before = time.time() - days * 86400
    found = list_runs(runs_dir or config.runs_dir)
    runs = {run: _state(run) for run in found if not (run.root.is_symlink() or run.root.parent.is_symlink())}
    finished = [run for run, state in runs.items() if state == "done" and run.status_json.stat().st_mtime <= before]
    parts = {run.root: _files_of_run(run, models=models) for run in finished}
    if "busy" not in runs.values():  # a run at work needs the cache
        cached = {folder: _files(folder) for folder in _folders_of_cache(Path(config.cache_dir))}
        unused = (folder for folder, files in cached.items() if all(path.lstat().st_mtime <= before for path in files))
        parts |= {folder: cached[folder] for folder in unused}
    sizes = {root: sum(path.lstat().st_size for path in files) for root, files in parts.items() if files}
    for root, size in sizes.items():
        click.echo(f"{size / 1e6:10,.1f} MB  {root}: {count_text(len(parts[root]), 'file')}")
        if yes:
            with run_lock(root) if RunPaths(root) in runs else nullcontext():
                for path in parts[root]:
                    path.unlink(missing_ok=True)
    if not sizes:
        click.echo(f"Nothing was last used {days:g} days ago or earlier; --days states another age.")
    click.echo(f"{sum(sizes.values()) / 1e6:,.1f} MB {'freed' if yes else 'would be freed; repeat it with --yes'}")


def _state(run: RunPaths) -> str:
    """Return the state of a run for the command ``clean``, such as ``done``, ``failed`` or ``busy``.

    The state is ``busy`` if a process works on the run, if the run waits for jobs or a resumption, or if its status
    cannot be read.
    """
    with suppress(FvcError, OSError):
        state = status_now(run).state
        return "busy" if state in ("waiting", "requeue") or is_worked_on(run.root) else state
    return "busy"


def _files_of_run(run: RunPaths, *, models: bool) -> list[Path]:
    """Return the files of a finished run that can be deleted.

    They are files of attempts that a later attempt replaced (superseded), and trained weights if ``models`` is True.

    Args:
        run: the run.
        models: whether all trained weights of the run can be deleted, too.
    """
    superseded = _files(run.superseded)
    trained = _files(run.root / "checkpoints")
    weights = [path for path in (*superseded, *trained) if models and path.suffix in _WEIGHTS]
    return sorted({*weights, *(path for path in superseded if not path.name.endswith(_STAY_SUPERSEDED))})


def _folders_of_cache(cache: Path) -> list[Path]:
    """Return the folders of the cache that can be deleted as a whole: clips, re-encoded videos, and measurements."""
    from fvc_lib.video.clips.store import CLIPS_FOLDER  # PyAV takes a moment to load
    from fvc_lib.video.features.measuring import FEATURES_FOLDER
    from fvc_lib.video.reencode import REENCODED_FOLDER

    patterns = (f"{CLIPS_FOLDER}/decode_*/*", f"{REENCODED_FOLDER}/*", f"{FEATURES_FOLDER}/*")
    found = [folder for pattern in patterns for folder in sorted(cache.glob(pattern))]
    return [folder for folder in found if folder.is_dir() and not (folder.is_symlink() or folder.parent.is_symlink())]


def _files(folder: Path) -> list[Path]:
    """Return the files in ``folder`` and its subfolders, without following links."""
    return [] if folder.is_symlink() else [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]
