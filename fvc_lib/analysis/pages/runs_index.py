"""``runs/index.html``: all runs with their headline numbers; opens from a file manager, needs no server.

Nothing but run folders is needed to write it, whoever left them and in whatever condition. What a finished run's row
says is kept in ``.index_rows.json`` beside it, so that the next index need not read every log again.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import duckdb
import polars as pl
from markupsafe import Markup

from fvc_lib.analysis import wording
from fvc_lib.analysis.pages import report
from fvc_lib.analysis.pages.report import PARTIAL, TEMPLATES, page, records_of, render
from fvc_lib.analysis.read import headline as headlines, naming, records
from fvc_lib.analysis.read.headline import ReportHeadline
from fvc_lib.metrics import paired_difference
from fvc_lib.services.atomic_files import (
    path_to_text,
    read_json_object,
    sha256_of_file,
    sha256_of_json,
    size_of,
    write_json,
    write_text,
)
from fvc_lib.services.errors import DataError, FvcError
from fvc_lib.services.records.digests import recorded_files
from fvc_lib.services.run_paths import RunPaths, list_runs

_HEADS = (
    "Run", "Standing", "Score [interval]", "0 · 0.5 · 1", "Best control", "Data", "Duration", "Peak memory", "Size",
    "Records",
)  # fmt: skip
# What reading a damaged or foreign folder can raise; one such run is a row that says so.
_TROUBLE = (
    FvcError, OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError,
    duckdb.Error, pl.exceptions.PolarsError,
)  # fmt: skip


def write_runs_index(runs_dir: Path) -> Path:
    """Write ``index.html`` into ``runs_dir`` over all runs found there, newest first, and return its path.

    Runs of an experiment that has a comparison or an ensemble stand together below links to these, told apart among
    themselves.

    Raises:
        DataError: there is an ``index.html`` that is no list of runs; it stands.
        OSError: the file cannot be written.
    """
    output = runs_dir / "index.html"
    if output.is_file() and b"<title>FVC runs</title>" not in output.read_bytes()[:4096]:
        raise DataError(f"{output}: is no list of runs, and is left as it is. Move it away, or the runs elsewhere.")
    runs = list_runs(runs_dir)[::-1]
    pages = {
        each: sorted(
            (*(runs_dir / each).glob("comparison*/comparison.html"), *(runs_dir / each).glob("*/ensemble.html"))
        )
        for each in {r.experiment for r in runs}
    }
    parts: dict[str, list[RunPaths]] = {}  # in the order of the newest run of each
    for run in runs:
        parts.setdefault(run.experiment if pages[run.experiment] else "", []).append(run)
    rows = iter(_rows([run for part in parts.values() for run in part], list(parts.values()), runs_dir))
    blocks = [
        {
            "experiment": path_to_text(experiment),
            "comparisons": _links(pages.get(experiment, ()), runs_dir),
            "rows": [Markup(next(rows)) for _ in part],
        }
        for experiment, part in parts.items()
    ]
    write_text(output, page("FVC runs", render("index.html", heads=_HEADS, num_runs=len(runs), blocks=blocks)))
    return output


def _rows(runs: Sequence[RunPaths], parts: Sequence[Sequence[RunPaths]], runs_dir: Path) -> list[str]:
    """A row of each run, from the rows kept where the run is as it was; each of ``parts`` has marks of its own."""
    store = runs_dir / ".index_rows.json"
    modules = (report, headlines, naming, records, paired_difference)
    sources = (__file__, *(str(each.__file__) for each in modules), str(TEMPLATES / "index_row.html"))
    look = [sha256_of_file(Path(path)) for path in sources]
    stored = read_json_object(store)
    rows, now = [], {}
    marks = [mark for part in parts for mark in naming.run_marks(part)]
    for run, mark in zip(runs, marks, strict=True):
        name = path_to_text(run.root.relative_to(runs_dir.absolute()))
        size_bytes = size_of(run.root)  # what is taken from deep inside changes no mark below
        stamp = sha256_of_json([look, mark, size_bytes, _index_stamp(run)])
        entry = stored.get(name)
        if isinstance(entry, list) and entry[:1] == [stamp]:
            row, lasting = str(entry[1]), True
        else:
            row, lasting = _row_or_trouble(run, runs_dir, mark, size_bytes)
        rows.append(row)
        if lasting:
            now[name] = [stamp, row]
    if now != stored:
        write_json(store, now)
    return rows


def _index_stamp(run: RunPaths) -> list[list[int]]:
    """When and how large what a finished run's row is made of was; of folders, when something was put in or taken."""
    tables = (run.results, run.task_results, run.leakage_audit)
    files = (run.run_json, run.status_json, run.params_yaml, *tables, run.report_html)
    folders = (run.root, run.task_status("").parent, run.reports, run.memory("").parent)
    return [_mark(path) for path in (*files, *folders, *recorded_files(run.root))]


def _mark(path: Path) -> list[int]:
    try:
        status = path.stat()
    except OSError:  # not there, gone this moment, or another user's
        return [0, 0]
    return [status.st_mtime_ns, status.st_ctime_ns, status.st_size]


def _row_or_trouble(run: RunPaths, runs_dir: Path, mark: Sequence[str], size_bytes: int) -> tuple[str, bool]:
    """The run's row, and whether it stays true as long as nobody touches the run."""
    try:
        headline = headlines.run_headline(run)
        return _row(run, headline, runs_dir, mark, size_bytes), headline.state == "done"
    except _TROUBLE as error:
        why = wording.clean_text(f"{type(error).__name__}: {error}")[:500]
        return render("index_row.html", trouble=why, name=path_to_text(run.run_id), columns=len(_HEADS)), False


def _row(run: RunPaths, headline: ReportHeadline, runs_dir: Path, mark: Sequence[str], size_bytes: int) -> str:
    return render(
        "index_row.html",
        trouble="",
        headline=headline,
        report=_address(run.report_html, runs_dir) if run.report_html.is_file() else "",
        title=" · ".join(filter(None, mark)),
        about=" · ".join(filter(None, (headline.experiment, wording.time_text(headline.started_utc)))),
        damaged=[path.name for path in (run.run_json, run.status_json) if not read_json_object(path)],
        size_bytes=size_bytes,
        records=_records(run, runs_dir),
    )


def _records(run: RunPaths, runs_dir: Path) -> list[tuple[str, str, bool]]:
    """Name, address and whether it is partial of each record's page: ``01 02 03 04·0 04·1``."""
    links = []
    for key, record in records_of(run).items():
        output = run.record_html(key)
        stage, _, fold = key.rpartition("_fold_")
        short = key.partition("_")[0] + (f"·{fold}" if stage and fold.isdecimal() else "")
        if output.is_file():
            links.append((path_to_text(short), _address(output, runs_dir), PARTIAL in record.name))
    return links


def _links(pages: Sequence[Path], runs_dir: Path) -> list[tuple[str, str]]:
    """Address and words of each: of comparisons their number, of an ensemble its name."""
    links: list[tuple[str, str]] = []
    for path in pages:
        is_ensemble, number = path.name == "ensemble.html", len(links) + 1
        words = path_to_text(path.parent.name) if is_ensemble else "comparison of detectors"
        links.append(
            (_address(path.absolute(), runs_dir), f"{words} {number}" if number > 1 and not is_ensemble else words)
        )
    return links


def _address(path: Path, runs_dir: Path) -> str:
    return quote(os.fsencode(path.relative_to(runs_dir.absolute())))
