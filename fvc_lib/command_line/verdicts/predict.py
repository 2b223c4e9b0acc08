"""``run_notebooks.py predict``: ask a model about files, mostly whether videos are fake."""

import json
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from fvc_lib.analysis.wording import clean_text, count_text
from fvc_lib.command_line.models import find_model, load_detector
from fvc_lib.command_line.records import execute_record
from fvc_lib.command_line.shards import stop_on_signals
from fvc_lib.command_line.verdicts.predictions import FILES as PREDICTED, finder, predict_files
from fvc_lib.execution.run.shards import Shard, work_on
from fvc_lib.execution.run.status import run_lock
from fvc_lib.execution.slurm import Site, describe, jobs_of_files, read_site, submission_text, submit
from fvc_lib.services.atomic_files import path_to_text, write_bytes
from fvc_lib.services.errors import DataError, UsageError, command_text
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.stage_logs import Report
from fvc_lib.services.tasks import DEFAULT_TASK, PREDICTIONS, VERDICTS, Stage

_SHOWN = 20
_OF_VERDICTS = ("error_rate", "fpr", "prior", "map_minutes", "pages", "final")
_OF_THIS_CALL = ("model", "paths", "out", "executor", "dry_run", "shard")  # not passed on to the call that goes on
_SHARE = click.FloatRange(0, 1, min_open=True, max_open=True)
ANSWER, ASKED = "answer.txt", "asked.csv"
PROGRESS = "progress.json"
FILES = ("verdicts.csv", "verdicts.jsonl", "verdicts.html", ASKED, ANSWER)


@click.command(
    short_help="Ask a run or a bundle whether videos are fake, or a run of another task what it says of files."
)
@click.argument("model")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the answers; without: runs/verdicts/TIME_RUN.")
@click.option("--error-rate", default=0.1, show_default=True, metavar="SHARE",
              help="Share of the reals that may be called fake, and of the fakes that may be called real.")  # fmt: skip
@click.option(
    "--fpr", type=_SHARE, metavar="SHARE", help="Share of the reals that may be called fake; without: --error-rate."
)
@click.option("--prior", type=_SHARE, metavar="SHARE",
              help="Share of fakes where the videos come from, for a probability there.")  # fmt: skip
@click.option("--map-minutes", type=click.FloatRange(min=0), default=3.0, show_default=True, metavar="MINUTES",
              help="Time limit for all maps of where videos look fake; 0: no maps.")  # fmt: skip
@click.option("-j", "--jobs", type=click.IntRange(min=1), help="Videos decoded at once. Without: one per core.")
@click.option("--pages", type=click.IntRange(min=-1), default=50, show_default=True, metavar="N",
              help="Number of judged videos that get a page with evidence; 0: none, -1: all.")  # fmt: skip
@click.option("--allow-code", is_flag=True, help="Run the code of a bundle's own network or crop: read it first.")
@click.option("--final", is_flag=True, help="Ask the run's one network of all groups (train_final), not the folds'.")
@click.option("--executor", type=click.Choice(["local", "slurm"]), default="local", show_default=True,
              help="slurm: as jobs, with the settings of slurm/site.conf, a share of the files each.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="With --executor slurm: print the jobs' scripts; writes nothing.")
@click.option("--shard", metavar="NUMBER/OF",
              help="Look at one share of the files, such as 0/4; the command without it goes on.")  # fmt: skip
@click.option(
    "--runs-dir", type=click.Path(path_type=Path, resolve_path=True), help="Runs folder, where it is not the default."
)
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
    final: bool,
    executor: str,
    dry_run: bool,
    shard: str | None,
    runs_dir: Path | None,
) -> None:
    """Ask the networks of MODEL whether the videos at PATH... are fake.

    MODEL is 'latest', a run id, a part of a run id, a run folder, an ensemble, or the folder of an exported bundle. It
    may be models:/NAME@ALIAS of MLflow's model registry (export-mlflow --register). All folds of a run must be trained.
    PATH is a file, a folder, a table with a column 'path' (CSV, TSV, Parquet), or '-' for a list on standard input.

    \b
    python run_notebooks.py predict latest suspicious.mp4
    python run_notebooks.py predict latest ~/inbox --error-rate 0.05 --out verdicts
    python run_notebooks.py predict bundle_run_1 list.csv --fpr 0.01 --prior 0.001
    find ~/inbox -name '*.mp4' | python run_notebooks.py predict latest -

    A video is called fake only if, at its score, at most the stated share of the run's reals would be called fake. The
    rule for real is the same with the run's fakes. Otherwise the video is undecided. All videos are undecided if the
    run is not shown to be above its controls (models that can use only shortcuts). A video that is unlike the run's
    videos in codec, size, length or rate is undecided, too. A video of the run gets its stored out-of-fold score. A
    near-duplicate of a video of the run is marked as such and gets no prediction.

    With --final the network that the run trained on all groups judges new videos (-p train_final true trains it). With
    five folds it takes a fifth of the time. The folds' out-of-fold scores still decide when to answer.

    The command writes verdicts.csv, verdicts.jsonl, verdicts.html (opens offline), and the executed notebook
    30_verdicts. In videos/ is a page with evidence for each judged video (--pages); for it the video is decoded again.
    The findings on a file are stored at once in findings.jsonl. With the same --out a call that was stopped or killed
    goes on. With another --error-rate, --fpr or --prior no video is scored again. A file that has changed is judged
    again.

    With --executor slurm every job of an array judges a share of the files. A last job does the rest and writes tables,
    pages and the notebook, equal to the bit to those of a call without SLURM. 'status FOLDER' shows the progress.
    Without SLURM, give --shard 0/4 to 3/4 with the same --out, at the same time and on any machines that share this
    folder. Then repeat the command without --shard.

    A model of task image answers with classes and numbers for pictures. A model of task video_text answers with
    captions, and with the nearest of the run's texts, for videos. Both write predictions.csv, predictions.jsonl and
    predictions.html into --out or runs/predictions/TIME_RUN. A stopped call goes on as above. Files of the training are
    marked. Only --out, --jobs, --executor, --dry-run, --shard, --allow-code and --runs-dir apply to these models.

    Exit codes: 0 at least one file was read, 1 the notebook failed, 2 usage, 3 no file could be read, 75 stopped (the
    same command goes on).
    """  # noqa: D301 - click wants the backspace character itself before lines it shall not re-wrap
    from fvc_lib.tasks import predicting  # torch takes a second to load
    from fvc_lib.tasks.journal import Journal, find_out
    from fvc_lib.tasks.video.predicting import Finding
    from fvc_lib.tasks.video.verdicts.judging import files_of
    from fvc_lib.tasks.video.verdicts.rule import rule_of

    if dry_run and executor != "slurm":
        raise UsageError("--dry-run: shows the jobs of --executor slurm. Give that as well.")
    if shard is not None and (executor == "slurm" or out is None):
        raise UsageError("--shard: is what a job does; leave --executor out, and name the shards' folder with --out.")
    site, part = read_site() if executor == "slurm" else None, None if shard is None else Shard.named(shard)
    runs, given = runs_dir or Path(resolve_config().runs_dir), _given(context)
    more = [text for name in given if name not in _OF_THIS_CALL for text in given[name]]
    found = find_model(runs, model)
    detector = load_detector(found, allow_code=allow_code, final=final)  # refused before anything is written
    files = files_of(paths, detector.kind)
    find: Callable[[list[Path]], Generator[Any]]
    if isinstance(detector, predicting.OneNetwork):
        if wrong := [given[name][0] for name in _OF_VERDICTS if name in given]:
            raise UsageError(
                f"{wrong[0]}: is for verdicts, which models of task {DEFAULT_TASK} give; {found.name} is of task "
                f"{detector.config.task}. Leave it out."
            )
        folder = _folder(out, runs / PREDICTIONS, detector.name)
        work = _Work(PREDICTIONS, detector.file_word, found, files, folder, (*PREDICTED, ASKED), more)
        find = finder(detector, files, jobs or 0)
    else:
        rule_of(error_rate, fpr or 0.0, prior or 0.0)
        folder = _folder(out, runs / "verdicts", detector.name)
        work = _Work(VERDICTS, detector.file_word, found, files, folder, FILES, more)
        find = partial(detector.findings, workers=jobs or 0)
    if part is not None:
        kind = predicting.Finding if isinstance(detector, predicting.OneNetwork) else Finding

        def find_out_mine(mine: list[Path], progress: Report) -> None:
            find_out(Journal(folder, detector.identity, kind, shard=str(part)), mine, find, progress)

        work.do_shard(part, find_out_mine)
        return
    if site is not None:
        work.submit(site, is_dry=dry_run)
        return
    if isinstance(detector, predicting.OneNetwork):
        with work.folder_taken(), stop_on_signals():
            predict_files(detector, files, folder, find)
        return
    parameters: dict[str, Any] = {
        "run_dir": str(found),
        "asked_videos": [str(folder / ASKED)],
        "error_rate": error_rate,
        "false_alarm_rate": fpr or 0.0,
        "prior": prior or 0.0,
        "map_minutes": map_minutes,
        "allow_code": allow_code,
        "final_network": final,
        "decode_workers": jobs or 0,
        "video_pages": pages,
        "output_folder": str(folder),
    }
    with work.folder_taken():
        code = execute_record(
            VERDICTS, folder, parameters, page=folder / "verdicts.html", title=f"Verdicts by {detector.name}",
            runs_dir=str(runs), what="the table of verdicts", answer=folder / ANSWER, progress=folder / PROGRESS,
            goes_on=True,
        )  # fmt: skip
        if code:
            context.exit(code)
        _print_verdicts(folder)


def _given(context: click.Context) -> dict[str, list[str]]:
    """Return the options that were given on the command line.

    Returns:
        ``{name: [option, value as text]}``, without the value for a flag that is set.
    """
    found = dict[str, list[str]]()
    for option in context.command.params:
        name, value = option.name or "", context.params[option.name or ""]
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            found[name] = [option.opts[-1]] if value is True else [option.opts[-1], str(value)]
    return found


def _folder(out: Path | None, parent: Path, name: str) -> Path:
    return (out or parent / f"{time.strftime('%Y%m%d_%H%M%S')}_{name}").expanduser().absolute()


def _print_verdicts(folder: Path) -> None:
    """Print the answer and the first verdicts that the notebook has written into ``folder``.

    Raises:
        DataError: no video could be read.
    """
    for line in (folder / ANSWER).read_text(encoding="utf-8", errors="replace").splitlines():
        click.echo(clean_text(line))
    page, num_read, count = folder / "verdicts.html", 0, 0
    with (folder / "verdicts.jsonl").open(encoding="utf-8") as lines:
        for count, line in enumerate(lines, start=1):  # one row at a time, since there may be a hundred thousand
            row = json.loads(line)
            num_read += row["failure"] is None
            if count <= _SHOWN:
                score = "     " if row["score"] is None else f"{row['score']:.3f}"
                reasons = clean_text(f"{row['path']}: {' '.join(row['reasons'])}")
                click.echo(f"  {row['verdict'] or '-':<9}  {score}  {reasons}")
    if count > _SHOWN:
        click.echo(f"  and {count - _SHOWN:,} more")
    click.echo(f"  page          {page}\n  tables        {folder}")
    if not num_read:
        raise DataError(f"of {count_text(count, 'video')} none could be read; the reasons: {page}")


@dataclass(frozen=True)
class _Work:
    """The files, folder and options of one call of ``predict``, for verdicts and for predictions of other tasks.

    Attributes:
        stage: the name of the work in records and in SLURM's queue.
        kind: a word for one file, for example ``video``.
        model: folder of the run, ensemble or bundle.
        files: absolute paths of the files to judge, without duplicates.
        folder: the folder for everything that is written.
        written: names of the files with answers in ``folder``, without journals and records.
        options: options of the command that continues after a stop.
    """

    stage: str
    kind: str
    model: Path
    files: Sequence[Path]
    folder: Path
    written: Sequence[str]
    options: Sequence[str]

    @property
    def command(self) -> list[str]:
        """The arguments of run_notebooks.py that continue after a stop."""
        return ["predict", str(self.model), str(self.folder / ASKED), "--out", str(self.folder), *self.options]

    def do_shard(self, shard: Shard, find_out: Callable[[list[Path], Report], None]) -> None:
        """Judge only the files of ``shard``, and record the shard's progress.

        ``find_out`` is called with these files and a callback for progress. It stores what it finds in a journal.
        """
        self._refuse_foreign()
        mine = [path for path in self.files if shard.has(path_to_text(path))]
        self.folder.mkdir(parents=True, exist_ok=True)
        with stop_on_signals(), work_on(RunPaths(self.folder), self.stage, shard) as at_work:
            find_out(mine, at_work.report)
        click.echo(f"{self.stage}, shard {shard.number}/{shard.of}: {count_text(len(mine), self.kind)} done")

    def submit(self, site: Site, *, is_dry: bool) -> None:
        """Submit jobs that judge shards, and a last job that writes the answers; if ``is_dry``, only print them."""
        run = RunPaths(self.folder)
        # ``trains`` gives the jobs GPUs, where the site has some, because networks compute in them.
        stage = Stage(self.stage, (), lambda _run, _fold: (), lambda _run, _fold: (), trains=True)
        jobs = jobs_of_files(stage, resolve_config(), site, num_files=len(self.files), command=self.command)
        if is_dry:
            click.echo(describe(jobs, run, site))
            return
        with self.folder_taken():
            pass
        for job in submit(jobs, run, site):
            click.echo(f"  {submission_text(job)}")
        click.echo(f"watch it: {command_text('status', self.folder)}")

    def _refuse_foreign(self) -> None:
        """Check that no other command has written into the folder.

        Raises:
            UsageError: the folder has files with the names of answers, but no journal and no notebook of this command.
        """
        from fvc_lib.tasks.journal import JOURNAL  # torch takes a second to load

        others = [name for name in self.written if os.path.lexists(self.folder / name)]
        if others and not any((self.folder / own).is_file() for own in (f"{VERDICTS}.ipynb", JOURNAL)):
            raise UsageError(
                f"--out {str(self.folder)!r}: has {others[0]!r}, which is not of this command. Give a new folder."
            )

    @contextmanager
    def folder_taken(self) -> Iterator[None]:
        """Lock the folder during the block, and delete the answers of an earlier call.

        The command that continues after a stop is printed first.

        Raises:
            UsageError: the folder has files of another command, or another call has locked the folder.
            OSError: the folder cannot be written.
        """
        from fvc_lib.tasks.journal import JOURNAL  # torch takes a second to load

        self._refuse_foreign()
        self.folder.mkdir(parents=True, exist_ok=True)
        with run_lock(RunPaths(self.folder)):
            (self.folder / JOURNAL).touch()
            # A later call or a job cannot read standard input again.
            quoted = (os.fsencode(path).replace(b'"', b'""') for path in self.files)
            write_bytes(self.folder / ASKED, b"path\n" + b"".join(b'"%b"\n' % text for text in quoted))
            for name in set(self.written) - {ASKED}:  # if this call fails, old answers must not look like new ones
                (self.folder / name).unlink(missing_ok=True)
            click.echo(f"model {self.model}\n{count_text(len(self.files), self.kind)}")
            click.echo(f"to go on after a stop: {command_text(*self.command)}")
            yield
