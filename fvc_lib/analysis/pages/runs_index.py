"""``runs/index.html``: all runs with their headline numbers, for a file manager."""

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from fvc_lib.analysis import wording
from fvc_lib.analysis.pages.page import render, write_page
from fvc_lib.analysis.pages.report import PARTIAL, records_of
from fvc_lib.analysis.read import headline as headlines, naming
from fvc_lib.services.atomic_files import path_to_text, read_json_object, size_of
from fvc_lib.services.errors import DataError
from fvc_lib.services.run_paths import RunPaths, list_runs

_HEADS = (
    "Run", "Standing", "Score [interval]", "0 · 0.5 · 1", "Best control", "Data", "Duration", "Peak memory", "Size",
    "Records",
)  # fmt: skip


def write_runs_index(runs_dir: Path) -> Path:
    """Write ``index.html`` into ``runs_dir`` over all runs found there, newest first, and return its path.

    Runs of an experiment that has a comparison or an ensemble stand together, below links to these.

    Raises:
        DataError: an ``index.html`` is there that is no list of runs; it is kept.
        OSError: the file cannot be written.
    """
    output = runs_dir / "index.html"
    if output.is_file() and b"<title>FVC runs</title>" not in output.read_bytes()[:4096]:
        raise DataError(f"{output}: is no list of runs, and is left as it is. Move it away, or the runs elsewhere.")
    runs = list_runs(runs_dir)[::-1]
    links = {experiment: _links(runs_dir, experiment) for experiment in {run.experiment for run in runs}}
    parts: dict[str, list[RunPaths]] = {}  # in the order of the newest run of each
    for run in runs:
        parts.setdefault(run.experiment if links[run.experiment] else "", []).append(run)
    blocks = []
    for experiment, part in parts.items():
        rows = [_row(run, runs_dir, mark) for run, mark in zip(part, naming.run_marks(part), strict=True)]
        blocks.append({"experiment": path_to_text(experiment), "comparisons": links.get(experiment), "rows": rows})
    write_page(output, "FVC runs", render("index.html", heads=_HEADS, num_runs=len(runs), blocks=blocks))
    return output


def _row(run: RunPaths, runs_dir: Path, mark: Sequence[str]) -> Markup:
    try:
        headline = headlines.run_headline(run)
        report = _address(run.report_html, runs_dir) if run.report_html.is_file() else ""
        about = " · ".join(filter(None, (headline.experiment, wording.time_text(headline.started_utc))))
        damaged = [path.name for path in (run.run_json, run.status_json) if not read_json_object(path)]
        return render(
            "index_row.html", trouble="", headline=headline, size_bytes=size_of(run.root), report=report,
            records=_records(run, report), title=" · ".join(filter(None, mark)), about=about, damaged=damaged,
        )  # fmt: skip
    except Exception as error:  # noqa: BLE001  # a damaged or foreign folder must not hide the others
        why = wording.clean_text(f"{type(error).__name__}: {error}")[:500]
        return render("index_row.html", trouble=why, name=path_to_text(run.run_id), columns=len(_HEADS))


def _records(run: RunPaths, report: str) -> list[tuple[str, str, bool]]:
    """Return short name (``04·0``), address and whether it is partial, of each record's section in the report."""
    links = []
    for key, record in records_of(run).items() if report else ():
        stage, _, fold = key.rpartition("_fold_")
        short = key.partition("_")[0] + (f"·{fold}" if stage and fold.isdecimal() else "")
        links.append((path_to_text(short), f"{report}#section-{quote(path_to_text(key))}", PARTIAL in record.name))
    return links


def _links(runs_dir: Path, experiment: str) -> list[tuple[str, str]]:
    """Return address and name of each comparison and ensemble of ``experiment``."""
    folder = runs_dir / experiment
    pages = sorted((*folder.glob("comparison*/comparison.html"), *folder.glob("*/ensemble.html")))
    return [(_address(path.absolute(), runs_dir), path_to_text(path.parent.name)) for path in pages]


def _address(path: Path, runs_dir: Path) -> str:
    return quote(os.fsencode(path.relative_to(runs_dir.absolute())))
