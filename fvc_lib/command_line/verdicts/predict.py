"""``fvc predict``: apply a trained model to files, mostly to judge whether videos are fake.

Models of the tasks image and video_text give classes, numbers, captions or nearest texts instead.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, redirect_stdout
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import polars as pl
from click.core import ParameterSource

from fvc_lib.analysis.wording import clean_text, count_text, interval_text
from fvc_lib.command_line.models import find_model, load_detector
from fvc_lib.command_line.shards import stop_on_signals
from fvc_lib.command_line.shared_options import (
    ALLOW_CODE,
    AS_JSON,
    ERROR_RATE,
    FINAL,
    QUIET,
    RUNS_DIR,
    is_quiet,
    print_json,
    refuse_where,
)
from fvc_lib.execution.run.shards import Shard, work_on
from fvc_lib.execution.run.status import run_lock
from fvc_lib.execution.slurm import describe, jobs_of_files, read_site, submission_text, submit
from fvc_lib.services.atomic_files import path_to_text, write_bytes, write_text
from fvc_lib.services.errors import DataError, StoppedError, UsageError, command_text
from fvc_lib.services.isolated_workers import start_early
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.stage_logs import Report
from fvc_lib.services.tasks import DEFAULT_TASK, PREDICTIONS, VERDICTS, Stage

if TYPE_CHECKING:
    from fvc_lib.tasks.predicting import Finding, OneNetwork
    from fvc_lib.tasks.video.predicting import VideoDetector
    from fvc_lib.tasks.video.verdicts.rule import Rule

_SHOWN = 20  # number of files whose answers the terminal shows
_OF_VERDICTS = ("error_rate", "fpr", "prior", "map_minutes", "pages", "folder_is_case", "final")
_OF_THIS_CALL = (
    "model",
    "paths",
    "out",
    "folder_is_case",
    "executor",
    "dry_run",
    "shard",
    "as_json",
)  # not passed on to the call that goes on
_LOOK = "fvc_lib.tasks.video.verdicts.untrusted:look"  # by which workers read the files
_MOST_OF_A_PART = 80  # characters of a part's name that a bar shows
_SHARE = click.FloatRange(0, 1, min_open=True, max_open=True)
ANSWER, ASKED = "answer.txt", "asked.csv"
FILES = ("verdicts.csv", "verdicts.jsonl", "cases.csv", "verdicts.html", ANSWER)
CSV, LINES, PAGE = PREDICTED = ("predictions.csv", "predictions.jsonl", "predictions.html")


@click.command()
@click.argument("model")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the answers; without: runs/verdicts/TIME_RUN.")
@ERROR_RATE
@click.option(
    "--fpr", type=_SHARE, metavar="SHARE", help="Share of the reals that may be called fake; without: --error-rate."
)
@click.option("--prior", type=_SHARE, metavar="SHARE",
              help="Share of fakes where the videos come from, for a probability there.")  # fmt: skip
@click.option("--map-minutes", type=click.FloatRange(min=0), default=3.0, show_default=True, metavar="MINUTES",
              help="Time limit for all maps of where videos look fake; 0: no maps.")  # fmt: skip
@click.option("-j", "--jobs", type=click.IntRange(min=1), help="Videos decoded at once. Without: one per core.")
@click.option("--pages", type=click.IntRange(min=-1), default=50, show_default=True, metavar="N",
              help="Number of videos that get a page of evidence; 0: none (as with --json), -1: all.")  # fmt: skip
@ALLOW_CODE
@click.option("--folder-is-case", is_flag=True, help="Videos in one folder are a case: they get a verdict together.")
@FINAL
@click.option("--executor", type=click.Choice(["local", "slurm"]), default="local", show_default=True,
              help="slurm: as jobs, with the settings of slurm/site.conf, a share of the files each.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="With --executor slurm: print the jobs' scripts; writes nothing.")
@click.option("--shard", metavar="NUMBER/OF",
              help="Look at one share of the files, such as 0/4; the command without it goes on.")  # fmt: skip
@AS_JSON
@QUIET
@RUNS_DIR
@click.pass_context
def predict(
    context: click.Context,
    model: str,
    paths: tuple[str, ...],
    out: Path | None,
    error_rate: float,
    fpr: float | None,
    prior: float | None,
    map_minutes: float,
    jobs: int | None,
    pages: int,
    allow_code: bool,
    folder_is_case: bool,
    final: bool,
    executor: str,
    dry_run: bool,
    shard: str | None,
    as_json: bool,
    runs_dir: Path,
) -> None:
    """Ask the networks of MODEL whether the videos at PATH... are fake.

    MODEL is 'latest', a run id, a part of a run id, a run folder, an ensemble, or the folder of an exported bundle. It
    may be models:/NAME@ALIAS of MLflow's model registry (export --register). All folds of a run must be trained.
    PATH is a file, a folder, a table with a column 'path' (CSV, TSV, Parquet), or '-' for a list on standard input.

    \b
    fvc predict latest suspicious.mp4
    fvc predict latest ~/inbox --error-rate 0.05 --out verdicts
    fvc predict bundle_run_1 list.csv --fpr 0.01 --prior 0.001
    find ~/inbox -name '*.mp4' | fvc predict latest -

    A video is called fake if its score is so high that at most a stated share of the run's real videos score as high:
    --fpr, or without it --error-rate. It is called real if its score is so low that at most the share --error-rate of
    the run's fakes score as low. Otherwise the video is undecided. All videos are undecided if the run is not shown to
    be above its controls (models that can use only shortcuts). A video that is unlike the run's videos in codec, size,
    length or rate is undecided, too. A video of the run gets its stored out-of-fold score. A near-duplicate of a video
    of the run is marked as such and gets no prediction.

    Several videos of one event are a case: name it in the table's column 'case', or give --folder-is-case. A case gets
    a verdict from the mean of its videos' logits, or from the largest if the run has case_score max (cases.csv).

    With --final the network that the run trained on all groups judges new videos (-p train_final true trains it). With
    five folds it takes a fifth of the time. The limits for fake and real still come from the folds' out-of-fold scores.

    The command prints the verdicts and writes verdicts.csv and verdicts.jsonl. Then it writes verdicts.html (opens
    offline) and in videos/ a page with evidence for each judged video (--pages); for it the video is decoded again.
    The findings on a file are stored at once in findings.jsonl. With the same --out a call that was stopped or killed
    goes on. With another --error-rate, --fpr or --prior no video is scored again. A file that has changed is judged
    again.

    With --executor slurm every job of an array judges a share of the files. A last job does the rest and writes tables
    and pages, equal to the bit to those of a call without SLURM. 'status FOLDER' shows the progress.
    Without SLURM, give --shard 0/4 to 3/4 with the same --out, at the same time and on any machines that share this
    folder. Then repeat the command without --shard.

    A model of task image answers with classes and numbers for pictures. A model of task video_text answers with
    captions, and with the nearest of the run's texts, for videos. Both write predictions.csv, predictions.jsonl and
    predictions.html into --out or runs/predictions/TIME_RUN. A stopped call goes on as above. Files of the training are
    marked. Only --out, --jobs, --executor, --dry-run, --shard, --allow-code and --runs-dir apply to these models.

    Exit codes: 0 at least one file was read, 1 a file of the model is damaged, 2 usage, 3 no file could be read, or the
    model lacks a file, 75 stopped (the same command goes on).
    """
    if executor == "local":
        context.call_on_close(start_early(_LOOK))
    from fvc_lib.tasks import predicting  # torch takes a second to load
    from fvc_lib.tasks.journal import Journal, find_out
    from fvc_lib.tasks.video.predicting import Finding as VideoFinding, VideoDetector
    from fvc_lib.tasks.video.verdicts.judging import files_of
    from fvc_lib.tasks.video.verdicts.rule import rule_of

    refuse_where({
        "--dry-run: shows the jobs of --executor slurm. Give that as well.": dry_run and executor != "slurm",
        "--shard: is what a job does; leave --executor out, and name the shards' folder with --out.":
            shard is not None and (executor == "slurm" or out is None),
    })  # fmt: skip
    part = None if shard is None else Shard.named(shard)
    given = _given(context)
    pages = 0 if as_json and "pages" not in given else pages  # a script waits for the answer
    options = [text for name in given if name not in _OF_THIS_CALL for text in given[name]]
    found = find_model(runs_dir, model)
    detector = load_detector(found, allow_code=allow_code, final=final)  # refused before anything is written
    cases = files_of(paths, detector.kind, folder_is_case=folder_is_case)
    files = list(cases)
    one_network = detector if isinstance(detector, predicting.OneNetwork) else None
    is_withheld = detector.standing.standing != "above control"
    rule = rule_of(error_rate, fpr or 0.0, prior or 0.0, withheld=is_withheld)
    find: Callable[[list[Path]], Generator[Any]] = partial(detector.findings, workers=jobs or 0)
    if one_network is not None and (wrong := [given[name][0] for name in _OF_VERDICTS if name in given]):
        raise UsageError(
            f"{wrong[0]}: is for verdicts, which models of task {DEFAULT_TASK} give; {found.name} is of task "
            f"{detector.config.task}. Leave it out."
        )
    parent = runs_dir / ("verdicts" if one_network is None else PREDICTIONS)
    folder = (out or parent / f"{time.strftime('%Y%m%d_%H%M%S')}_{detector.name}").expanduser().absolute()
    stage, written = (VERDICTS, FILES) if one_network is None else (PREDICTIONS, PREDICTED)
    command = ["predict", str(found), str(folder / ASKED), "--out", str(folder), *options]
    go_on = f"to go on: {command_text(*command)}"
    if part is not None:
        _refuse_foreign(folder, written)
        mine = [path for path in files if part.has(path_to_text(path))]
        folder.mkdir(parents=True, exist_ok=True)
        with stop_on_signals(), work_on(folder, stage, part) as at_work:
            kind = VideoFinding if one_network is None else predicting.Finding
            find_out(Journal(folder, detector.identity, kind, shard=str(part)), mine, find, at_work.report)
        click.echo(f"{stage}, shard {shard}: {count_text(len(mine), detector.file_word)} done")
    elif executor == "slurm":
        _submit(stage, cases, folder, written, command, go_on, is_dry=dry_run)
    else:
        shown, trouble = redirect_stdout(sys.stderr) if as_json else nullcontext(), ""
        with shown, _folder_taken(folder, cases, written, go_on), stop_on_signals():
            if one_network is not None:
                trouble = _predict_files(one_network, files, folder, find)
            elif isinstance(detector, VideoDetector):
                trouble = _judge_files(detector, cases, rule, folder, jobs or 0, pages, map_minutes)
        if trouble:
            raise DataError(f"{trouble} No file of {len(files):,} could be read: {folder / written[0]}")
        if as_json:
            lines = (folder / written[1]).read_text(encoding="utf-8").splitlines()
            print_json({"folder": folder, "files": list(map(json.loads, lines))})


def _given(context: click.Context) -> dict[str, list[str]]:
    """Return the options that were given on the command line.

    Returns:
        ``{name: [option, value as text]}``, such as ``{"prior": ["--prior", "0.1"]}``. For a flag the list has only the
        option.
    """
    found = dict[str, list[str]]()
    for option in context.command.params:
        name = option.name or ""
        value = context.params.get(option.name or "")
        if value is not None and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            written = option.opts[-1]
            found[name] = [written] if value is True else [written, str(value)]
    return found


@contextmanager
def _progress(label: str, total: int) -> Iterator[Report]:
    """Show the progress of a step as a bar, if standard error is a terminal and ``-q`` was not given.

    Yields a function that draws the bar again. It takes the number of finished units, the number of all units, and a
    text on the unit in progress.
    """
    hidden = is_quiet() or not sys.stderr.isatty()
    with click.progressbar(
        length=total, label=label, hidden=hidden, file=sys.stderr, show_pos=True, item_show_func=lambda item: item
    ) as bar:

        def report(done: int, total: int, part: str = "", what: str = "") -> None:
            del total, what
            bar.update(done - bar.pos, clean_text(part)[:_MOST_OF_A_PART])
            bar.render_progress()

        yield report


def _judge_files(
    detector: "VideoDetector",
    files: Mapping[Path, str],
    rule: "Rule",
    folder: Path,
    workers: int,
    num_pages: int,
    map_minutes: float,
) -> str:
    """Judge ``files`` and print the verdicts, then write the pages.

    Args:
        detector: the video detector.
        files: ``{absolute path of a file: name of its case}``. A case is several videos of one event; empty: none.
        rule: the conditions of a verdict.
        folder: the folder for everything that is written.
        workers: number of processes that decode; 0: one per core.
        num_pages: number of files with a page of their own; -1: all.
        map_minutes: time limit in minutes for the maps of all pages together.

    Returns:
        An empty text. But if no video could be read, the path of the first video and the reason. In this case no
        verdict is printed; the tables and the page are written all the same.

    Raises:
        FvcError: the detector cannot be applied to the files (``VideoDetector.findings``).
        OSError: the folder cannot be written.
    """
    from fvc_lib.tasks.video.verdicts.judging import UNREAD, judge_files

    with _progress("videos", len(files)) as report:
        verdicts = judge_files(detector, files, rule, folder, workers=workers, progress=report)
    lines = [clean_text(verdict_line(row)) for row in islice(verdicts.rows(), _SHOWN)]
    if len(files) > _SHOWN:
        lines.append(f"and {len(files) - _SHOWN:,} more")
    worth = detector.standing.sentences[:1] if rule.withheld else []
    answer = [verdicts.answer(), *worth, *verdicts.limits]
    further = answer[len(files) == 1 :]
    lines += [f"  {sentence}" for sentence in further]
    is_read = verdicts.counts[UNREAD] < len(files)
    click.echo("\n".join(lines * is_read), nl=is_read)
    from fvc_lib.command_line.verdicts.pages import write_overview, write_video_pages

    wanted_pages = len(files) if num_pages < 0 else min(num_pages, len(files))
    with _progress("pages", wanted_pages) as report:
        pages = write_video_pages(verdicts, folder, most=num_pages, map_minutes=map_minutes, progress=report)
    page = folder / "verdicts.html"
    write_overview(page, verdicts, pages)
    shown = folder / next(iter(pages.values())) if len(pages) == 1 else page
    write_text(folder / ANSWER, "\n".join([*answer, ""]))
    if not is_read:
        return clean_text("{path}: {failure}".format(**verdicts.table.row(0, named=True)))
    click.echo(f"  page          {shown}\n  tables        {folder}")
    return ""


def verdict_line(row: Mapping[str, Any]) -> str:
    """Return the verdict on a file as one line of text: path, verdict, probability of fake, and reasons.

    ``row`` is the file's row in the table of verdicts, as ``{column: value}``.
    """
    probability = interval_text(row["score"], row["score_low"], row["score_high"])
    said = f"{row['verdict']}, probability of fake {probability}"
    if row["score"] is None:
        said = "no prediction" if row["failure"] is None else "not read"
    return f"{row['path']}: {said}. {row['reasons']}"


def _submit(
    stage_name: str, files: Mapping[Path, str], folder: Path, written: Sequence[str], command: Sequence[str],
    go_on: str, *, is_dry: bool,
) -> None:  # fmt: skip
    """Submit an array of jobs that judge shards (shares of the files), and a last job that writes the answers.

    Args:
        stage_name: name of the jobs.
        files: ``{absolute path of a file to judge: name of its case, or empty}``.
        folder: the folder for everything that is written.
        written: names of the files with answers in ``folder``. If an earlier call wrote such files, they are deleted.
        command: command-line arguments of run_notebooks.py with which a job begins or continues the work.
        go_on: a line that says how to go on after a stop.
        is_dry: True: only print the jobs' scripts, and write nothing.
    """
    site = read_site()
    # ``trains`` gives the jobs GPUs, where the site has some, because networks compute in them.
    stage = Stage(stage_name, (), lambda _run, _fold: (), lambda _run, _fold: (), trains=True)
    jobs = jobs_of_files(stage, resolve_config(), site, num_files=len(files), command=command)
    if is_dry:
        click.echo(describe(jobs, folder, site))
        return
    with _folder_taken(folder, files, written, go_on):
        click.echo(go_on)
    for job in submit(jobs, folder, site):
        click.echo(f"  {submission_text(job)}")
    click.echo(f"watch it: {command_text('status', folder)}")


def _refuse_foreign(folder: Path, written: Sequence[str]) -> None:
    """Check that the output folder has no answers that another command has written.

    Args:
        folder: the output folder, which may be missing.
        written: names of the files with answers.

    Raises:
        UsageError: the folder has files with the names of answers, but no journal of this command.
    """
    from fvc_lib.tasks.journal import JOURNAL  # torch takes a second to load

    others = [name for name in (*written, ASKED) if os.path.lexists(folder / name)]
    if others and not (folder / JOURNAL).is_file():
        raise UsageError(f"--out {str(folder)!r}: has {others[0]!r}, which is not of this command. Give a new folder.")


@contextmanager
def _folder_taken(folder: Path, files: Mapping[Path, str], written: Sequence[str], go_on: str) -> Iterator[None]:
    """Lock the folder during the block, and delete the answers of an earlier call.

    Args:
        folder: the folder for everything that is written.
        files: ``{absolute path of a file to judge: name of its case, or empty}``. They are written as a table, which a
            later call reads.
        written: names of the files with answers in ``folder``, without journals and records.
        go_on: a line that is printed if the block is stopped; it says how to go on.

    Raises:
        UsageError: the folder has files of another command, or another call has locked the folder.
        OSError: the folder cannot be written.
    """
    from fvc_lib.tasks.journal import JOURNAL  # torch takes a second to load

    _refuse_foreign(folder, written)
    folder.mkdir(parents=True, exist_ok=True)
    with run_lock(folder):
        (folder / JOURNAL).touch()
        # A later call or a job cannot read standard input again.
        rows = [tuple(os.fsencode(cell).replace(b'"', b'""') for cell in row) for row in files.items()]
        lines = [b'"%b","%b"\n' % row for row in rows]
        write_bytes(folder / ASKED, b"path,case\n" + b"".join(lines))
        for name in written:  # if this call fails, old answers must not look like new ones
            (folder / name).unlink(missing_ok=True)
        try:
            yield
        except (StoppedError, KeyboardInterrupt):
            click.echo(go_on, err=True)
            raise


def _predict_files(
    predictor: "OneNetwork",
    files: Sequence[Path],
    folder: Path,
    find: "Callable[[list[Path]], Generator[Finding]]",
) -> str:
    """Apply a model to ``files``, write two tables and a page into ``folder``, and print the first 20 answers.

    A journal in ``folder`` stores the findings on a file at once, so that a later call can continue a killed one. The
    journals of shards (shares of the files that other processes handled) are merged into this journal.

    Args:
        predictor: the model.
        files: absolute paths of the files, without duplicates.
        folder: the folder for everything that is written.
        find: function that yields the findings on a list of files.

    Returns:
        An empty text. But if no file could be read, the path of the first file and the reason; then nothing is printed.

    Raises:
        FvcError: the model cannot be applied to the files (``Predictor.findings``).
        OSError: the folder cannot be written.
    """
    from fvc_lib.analysis.pages.answers import prediction_table, write_predictions_page  # plotly takes a second to load
    from fvc_lib.services.tables import csv_for_people
    from fvc_lib.tasks.journal import Journal, found_in_blocks, take_in
    from fvc_lib.tasks.predicting import Finding

    word = predictor.file_word
    notes = (*predictor.standing.sentences, *predictor.cautions, *predictor.notes)
    rows = list[dict[str, Any]]()
    lines = list[str]()
    take_in(folder, PREDICTIONS)
    with closing(Journal(folder, predictor.identity, Finding)) as journal, _progress(f"{word}s", len(files)) as report:
        for findings, _ in found_in_blocks(journal, files, find, report):
            for finding in findings:
                rows.append(_row(finding, predictor))
                answer = "; ".join((finding.title, *finding.lines)) or "-"
                lines.append(f"{finding.path}: {answer} {rows[-1]['remarks']}")
    texts = dict.fromkeys(("path", "sha256", "part"), pl.String())
    schema = texts | dict(predictor.columns) | dict.fromkeys(("remarks", "failure"), pl.String())
    table = pl.DataFrame(rows, schema=schema, orient="row")
    write_text(folder / CSV, csv_for_people(table))
    write_text(folder / LINES, table.write_ndjson())
    failures = table.drop_nulls("failure")
    num_read = len(files) - len(failures)
    write_predictions_page(
        folder / PAGE, f"Predictions by {predictor.name}", f"{count_text(len(files), word)}, {num_read:,} read.", notes,
        prediction_table(table), is_shown=predictor.standing.standing == "above control",
    )  # fmt: skip
    if not num_read:
        return clean_text("{path}: {failure}".format(**failures.row(0, named=True)))
    more = [f"and {len(files) - _SHOWN:,} more"] if len(files) > _SHOWN else []
    for line in (*lines[:_SHOWN], *more, *notes):
        click.echo(f"  {clean_text(line)}")
    click.echo(f"  page          {folder / PAGE}\n  tables        {folder}")
    return ""


def _row(finding: "Finding", predictor: "OneNetwork") -> dict[str, Any]:
    """Return the table row for a finding (the answer on one file), as ``{column: value}``.

    The columns are ``path``, ``sha256`` and ``part``, then the predictor's columns, then ``remarks`` and ``failure``.
    ``part`` is ``train``, ``validation`` or ``test`` for a file of the run, else None. ``failure`` is the reason why
    the file could not be read, else None.
    """
    from fvc_lib.tasks.predicting import PART_SENTENCES

    part = predictor.known.get(finding.sha256)
    remarks = finding.failure or PART_SENTENCES.get(part or "", "")
    row = {"path": finding.path, "sha256": finding.sha256 or None, "part": part}
    return row | dict(finding.values) | {"remarks": remarks, "failure": finding.failure or None}
