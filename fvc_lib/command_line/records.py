"""The commands ``audit``, ``ensemble`` and ``robustness``, each of which executes a notebook that is no stage of a run.

The executed notebook is the record of the command.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import click
import polars as pl

from fvc_lib.command_line import commands
from fvc_lib.command_line.shards import stop_on_signals
from fvc_lib.command_line.shared_options import AS_JSON, QUIET, RUNS_DIR, is_quiet, print_json
from fvc_lib.execution.run.runner import Terminal
from fvc_lib.execution.run.session import progress_path, read_progress
from fvc_lib.execution.run.status import run_lock
from fvc_lib.execution.run.task import kernel_environment
from fvc_lib.services.atomic_files import sha256_of_json
from fvc_lib.services.config_fields import split_names, split_pairs
from fvc_lib.services.errors import UsageError
from fvc_lib.services.home import NOTEBOOKS
from fvc_lib.services.parameters import resolve_config, run_config
from fvc_lib.services.records.digests import listed, write_document
from fvc_lib.services.run_paths import ATTEMPT_VARIABLE, ENSEMBLE_RECORD, find_run, is_pattern
from fvc_lib.services.tables import ROBUSTNESS_RESULTS, read_table
from fvc_lib.services.tasks import DEFAULT_TASK, ENSEMBLE, ROBUSTNESS, SCORE_AUDIT

_ANSWER = "answer.txt"  # a notebook's results, one sentence per line


def execute_notebook(
    record: Path,
    parameters: Mapping[str, Any],
    name: str,
    *,
    log: Path,
    runs_dir: str | Path,
    product: str,
    variables: Mapping[str, str] | None = None,
) -> int:
    """Execute a notebook, and print an error if it fails.

    Args:
        record: path to which the executed notebook is written.
        parameters: ``{parameter: value}`` for the notebook.
        name: the notebook's file name without suffix.
        log: the file for text that the kernel prints outside the notebook.
        runs_dir: the runs folder that the notebook uses.
        product: word for what the notebook makes, for example ``audit``.
        variables: further environment variables of the kernel.

    Returns:
        The exit code; 0 if the notebook succeeded.

    Raises:
        OSError: a file cannot be written.
    """
    from fvc_lib.execution.papermill_engine import KernelRequest, execute  # papermill takes a second to load

    environment = {**kernel_environment(os.environ), "FVC_RUNS_DIR": str(runs_dir), **(variables or {})}
    outcome = execute(NOTEBOOKS / f"{name}.ipynb", parameters, KernelRequest(record, NOTEBOOKS, environment, log))
    if outcome.exit_code:
        why = f"{outcome.error.name}: {outcome.error.message}" if outcome.error else "its kernel died"
        click.echo(f"error: no {product}: {why}\n  its record: {record}", err=True)
    return outcome.exit_code


def execute_record(
    name: str,
    folder: Path,
    parameters: Mapping[str, Any],
    *,
    runs_dir: str | Path,
    product: str,
    title: str,
    files: Sequence[str],
) -> int:
    """Execute a notebook in a folder, write a web page of it that opens offline, and print its answer or its error.

    Args:
        name: the notebook's file name without suffix.
        folder: the folder for everything that is written; the notebook's parameter ``output_folder``.
        parameters: ``{parameter: value}`` for the notebook's other parameters.
        runs_dir: the runs folder that the notebook uses.
        product: word for what the notebook makes, for example ``audit``; the page is ``folder/audit.html``.
        title: the page's title.
        files: names of the files that the notebook writes. Those of an earlier call are deleted first. The sentences in
            ``answer.txt`` are printed, and the page begins with the first one.

    Returns:
        The exit code; 0 if the notebook succeeded.

    Raises:
        UsageError: the folder has files, but no executed notebook ``name``.
        OSError: the folder cannot be written.
    """
    from fvc_lib.analysis.pages.report import write_report, write_runs_index  # plotly takes a second to load

    record = folder / f"{name}.ipynb"
    page = folder / f"{product}.html"
    answer = folder / _ANSWER
    if folder.exists() and not record.is_file() and any(folder.iterdir()):
        raise UsageError(f"folder {str(folder)!r}: has files that this command did not write. Name a new folder.")
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        (folder / file).unlink(missing_ok=True)
    given = {**parameters, "output_folder": str(folder)}
    code = execute_notebook(record, given, name, log=folder / f"{name}.log", runs_dir=runs_dir, product=product)
    sentences = [] if code else answer.read_text(encoding="utf-8").splitlines()
    write_report([record], page, title=title, answer=sentences[:1])
    if not code:
        click.echo("\n".join([*sentences, f"  {product:<13} {page}", f"  tables        {folder}"]))
    if Path(runs_dir) in folder.parents:  # the list of runs links comparisons and ensembles
        write_runs_index(Path(runs_dir))
    return code


@contextmanager
def _shown(path: Path) -> Iterator[None]:
    """Show progress on the terminal during the block; another process writes it into the file ``path``.

    The file is deleted at the beginning and at the end.
    """
    path.unlink(missing_ok=True)
    terminal = Terminal(sys.stderr, quiet=is_quiet())
    ended = threading.Event()

    def show() -> None:
        while not ended.wait(1.0):
            if (progress := read_progress(path)) is not None:
                terminal.show([f"{progress.what} {progress.done:,} of {progress.total:,}"])

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        terminal.show([])
        path.unlink(missing_ok=True)


@click.command()
@click.argument("table", type=click.Path(path_type=Path))
@click.option(
    "--corpus", type=click.Path(path_type=Path),
    help="The videos, as -p corpus of a run: gives groups, near-duplicates, and the metadata and clip length controls.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder for all of it; else runs/audits/NAME_TIME_PROCESS."
)
@click.option(
    "--label-map", default="", metavar="PAIRS", help="What labels other than real and fake mean: 1=fake,0=real."
)
@click.option("--columns", type=split_pairs, default="", metavar="PAIRS",
              help="Columns with other headers: video=clip,label=target,group=subject.")  # fmt: skip
@click.option("--where", multiple=True, metavar="COLUMN=VALUE", help="Only rows with this value. Repeatable.")
@click.option("--allow-outside", is_flag=True, help="Take files that the corpus lists outside its folder, as runs do.")
@click.option("--detectors", type=split_names, default="", metavar="NAMES",
              help="Only these, with commas between them; else all in the table.")  # fmt: skip
@click.option("--higher-is-real", is_flag=True, help="The scores are higher for reals; their sign is changed.")
@click.option(
    "--operating-point", "decide_at", default="best", show_default=True,
    metavar="best|fpr=0.01|cost=5:1|threshold=0.5",
    help="Where decisions are made: the highest balanced accuracy, a share of false alarms, what a false alarm and a "
    "miss cost (these three are chosen on one half of the groups for the other), or a threshold that comes with the "
    "scores.",
)  # fmt: skip
@click.option(
    "--confidence", type=click.FloatRange(0.5, 1, min_open=True, max_open=True), default=0.95, show_default=True,
    help="Coverage of every interval.",
)  # fmt: skip
@AS_JSON
@QUIET
@RUNS_DIR
@click.pass_context
def audit(
    context: click.Context,
    table: Path,
    corpus: Path | None,
    out: Path | None,
    label_map: str,
    columns: dict[str, str],
    where: tuple[str, ...],
    allow_outside: bool,
    detectors: tuple[str, ...],
    higher_is_real: bool,
    decide_at: str,
    confidence: float,
    as_json: bool,
    runs_dir: Path,
) -> None:
    """Audit TABLE, which has the scores of any detectors: CSV, TSV or Parquet with a row per video.

    \b
    video,label,group,generator,score              one detector
    video,label,group,generator,score_a,score_b    a column per detector; a cell may be empty
    video,label,detector,score                     a row per video and detector

    Scores are columns named prob... or score... (or ..._prob, ..._score), else columns of numbers in [0, 1]. Other
    columns are listed and not read; name them in --detectors to read them.

    'video' is an id or a path. Labels are real and fake. Videos with the same 'group' belong together, for example
    because they show the same scene. The columns group, generator, real_source and corpus may be missing; the audit
    then names the results that need them. Higher scores mean fake.

    \b
    fvc audit scores.csv
    fvc audit scores.csv --corpus ~/videos --operating-point fpr=0.01
    fvc audit vendor.tsv --label-map 1=fake,0=real --out audit_of_vendor
    fvc audit matrix.csv.gz --where modality=video --columns video=clip,label=truth

    The command writes audit.html (opens offline), tables as CSV, and the executed notebook 40_score_audit.
    """
    from fvc_lib.analysis.audit.findings import FILES
    from fvc_lib.analysis.audit.numbers import Settings
    from fvc_lib.corpus.score_table import read_score_table

    Settings(decide_at)
    selected: dict[str, Any] = {
        "label_map": dict(resolve_config(command_line={"label_map": label_map}).label_map),
        "columns": columns,
        "where": dict(text.partition("=")[::2] for text in where),
        "higher_is_real": higher_is_real,
    }
    read = read_score_table(table, detectors=detectors, **selected)  # the notebook would refuse the table later
    num_fakes = int((read.videos["label"] == "fake").sum())
    click.echo(
        f"{table.name}: {read.videos.height:,} videos ({read.videos.height - num_fakes:,} real, {num_fakes:,} fake), "
        f"detectors: {', '.join(read.scores.columns)}",
        err=as_json,
    )
    if corpus is not None and not corpus.exists() and not is_pattern(corpus):
        raise UsageError(f"--corpus {str(corpus)!r}: no such file or folder.")
    parameters: dict[str, Any] = {
        "score_table": str(table.absolute()),
        "corpus": "" if corpus is None else str(corpus.expanduser().absolute()),
        "which_detectors": list(detectors),
        **selected,
        "allow_outside": allow_outside,
        "decide_at": decide_at,
        "bootstrap_replicates": 1000,
        "confidence": confidence,
    }
    named = runs_dir / "audits" / f"{table.stem}_{time.strftime('%Y%m%d_%H%M%S')}_{os.getpid()}"
    folder = (out or named).expanduser().absolute()
    if table.absolute().parent == folder:
        raise UsageError(f"--out {str(folder)!r}: the table lies there and could be written over. Give a new folder.")
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        code = execute_record(
            SCORE_AUDIT, folder, parameters, title=f"Audit of {table.name}", runs_dir=runs_dir, product="audit",
            files=FILES,
        )  # fmt: skip
    if as_json and not code:
        tables = [folder / name for name in FILES if name.endswith(".csv") and (folder / name).is_file()]
        rows = {path.stem: pl.read_csv(path, infer_schema_length=None).to_dicts() for path in tables}
        print_json({"folder": folder, "answer": (folder / _ANSWER).read_text().splitlines(), "tables": rows})
    context.exit(code)


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN RUN...")
@click.option("--to", type=click.Path(path_type=Path), help="Folder for all of it; else next to the first run.")
@QUIET
@RUNS_DIR
@click.pass_context
def ensemble(
    context: click.Context,
    runs: tuple[str, ...],
    to: Path | None,
    runs_dir: Path,
) -> None:
    """Combine finished RUNs that were tested on the same videos and folds into one detector.

    A RUN is 'latest', a run id, a part of a run id, or a run folder. Runs that differ only in their seed are averaged
    first. Then the detectors are combined by the mean of their calibrated scores.

    \b
    fvc ensemble run_20261123_05 run_20261123_06
    fvc ensemble runs/sweep/run_*
    fvc predict ensemble_mean_1a2b3c4d suspicious.mp4

    Runs are refused if their videos, labels, groups, folds or protocols differ. So are unfinished runs, and runs whose
    audit found a leak. Notebook 11_ensemble shows the members, the result with interval and controls (models that can
    use only shortcuts), and the paired difference from the best member. All files are in
    runs/EXPERIMENT/ensemble_mean_HASH/. The same command makes them again. No network is trained, and the members are
    not changed.

    Exit codes: 0 ok, 1 the notebook failed, 2 usage, 3 the runs cannot be combined.
    """
    from fvc_lib.analysis.read.comparison import read_members

    found = read_members([find_run(runs_dir, name) for name in runs])
    members = [member.run for member in found.runs]
    digest = sha256_of_json(["mean", [[member.run.run_id, member.config.config_hash] for member in found.runs]])
    folder = (to or members[0].root.parent / f"ensemble_mean_{digest[:8]}").expanduser().absolute()
    click.echo(f"mean of {len(members)} runs, {len(found.names)} detectors: {' + '.join(found.names)}")
    first = found.runs[0].config
    parameters: dict[str, Any] = {
        "member_runs": [str(run.root) for run in members],
        "bootstrap_replicates": first.bootstrap_replicates,
        "confidence": first.confidence,
    }
    code = execute_record(
        ENSEMBLE, folder, parameters, title=f"FVC {folder.name}", runs_dir=runs_dir, product="ensemble",
        files=[ENSEMBLE_RECORD, _ANSWER],
    )  # fmt: skip
    context.exit(code)


@click.command()
@click.argument("run", default="latest")
@click.option(
    "--levels", type=split_names, default="", metavar="NAMES",
    help="Levels or kinds with commas between them: --levels h264,jpeg_50. Without: all of them.",
)  # fmt: skip
@click.option(
    "-j", "--jobs", type=click.IntRange(min=1), help="Videos decoded and encoded at once. Without: one per core."
)
@QUIET
@RUNS_DIR
@click.pass_context
def robustness(context: click.Context, run: str, levels: tuple[str, ...], jobs: int | None, runs_dir: Path) -> None:
    """Score the test videos of RUN again after disturbances such as compression, and show what the result loses.

    RUN is 'latest', a run id, a part of a run id, or a run folder. All folds of the run must be trained. Every video is
    decoded as in the run, and judged by the network that was not trained on the video's group. First all videos are
    scored without a disturbance, which must give the stored scores.

    \b
    fvc robustness latest                      every level
    fvc robustness latest --levels h264,size   two kinds
    fvc robustness latest --levels jpeg_50     one level

    Kinds and their levels: lossless (a control: the video is written again with the same pixels); h264 (h264_crf23, 28,
    35, 40); h265 (h265_crf28); size (size_half, size_quarter); jpeg (jpeg_90, 70, 50); blur (blur_1, 2, 4 px); noise
    (noise_4, 8, 16 of 255); rate (rate_half); trim (trim_front, trim_back: 25 %).

    Every score is stored at once. If the command is killed, the same command goes on. Other levels can be added later.
    The command writes tables/robustness.parquet, tables/robustness_results.csv, and the executed notebook 09_robustness
    with its page.

    Exit codes: 0 ok, 1 the notebook failed, 2 usage, 3 the scores without a disturbance differ from the stored ones.
    """
    from fvc_lib.analysis.read.headline import run_cautions  # tables take a second to load
    from fvc_lib.analysis.read.robustness import findings
    from fvc_lib.tasks.video.robustness import levels_named  # torch takes a second to load

    found = find_run(runs_dir, run)
    config = run_config(found.params_yaml)
    if config.task != DEFAULT_TASK:
        raise UsageError(f"{found.run_id} is of task {config.task}; robustness is of runs of task {DEFAULT_TASK}.")
    click.echo(f"run {found.root}\nlevels: {', '.join(levels_named(levels))}")
    parameters: dict[str, Any] = {
        "run_dir": str(found.root),
        "levels": list(levels),
        "decode_workers": jobs or 0,
        "bootstrap_replicates": config.bootstrap_replicates,
        "confidence": config.confidence,
    }
    partial = found.partial_notebook(ROBUSTNESS)
    log = found.logs / f"{ROBUSTNESS}.log"
    with run_lock(found.root), stop_on_signals(), _shown(progress_path(found, ROBUSTNESS, None)):
        code = execute_notebook(
            partial, parameters, ROBUSTNESS, log=log, runs_dir=config.runs_dir, product="table of levels",
            variables={ATTEMPT_VARIABLE: "1"},  # its progress goes into a file
        )  # fmt: skip
        if not code:
            record = partial.replace(found.executed_notebook(ROBUSTNESS))
            written = [found.robustness, found.robustness_results, record]
            write_document(found.stage_checkpoint(ROBUSTNESS), {"files": listed(written, found.root)})
    reported = commands.report_run(found)
    if code:
        context.exit(code)
    results = read_table(found.robustness_results, ROBUSTNESS_RESULTS)
    for line in findings(results, config.confidence, run_cautions(found)):
        click.echo(f"  {line}")
    click.echo(f"  robustness    {found.report_html}\n  table         {found.robustness_results}")
    context.exit(reported)
