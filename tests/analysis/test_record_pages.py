"""Each record as one offline page: whole or partial, with links that work from where the page is."""

import json
import os
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from fvc_lib.analysis.pages.display import PLOTLY
from fvc_lib.analysis.pages.notebook_html import render_notebook
from fvc_lib.analysis.pages.report import records_of, write_record_pages, write_run_report
from fvc_lib.analysis.pages.runs_index import write_runs_index
from fvc_lib.services.run_paths import RunPaths

FIGURE = {PLOTLY: {"data": [{"y": [1, 2]}], "layout": {}}}


def cell(source: str, *outputs: object, status: str = "completed", number: int | None = 1) -> object:
    return new_code_cell(
        source, outputs=list(outputs), execution_count=number, metadata={"papermill": {"status": status}}
    )


def save(path: Path, *cells: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(nbformat.writes(new_notebook(cells=list(cells))), encoding="utf-8")
    return path


def overflow(run: RunPaths, key: str) -> object:
    """What the runner leaves of an output that is too long: a link from the notebooks' folder."""
    file = run.output_overflow(key) / "cell_01_stdout.txt"
    file.parent.mkdir(parents=True)
    file.write_text("flood")
    target = os.path.relpath(file, run.notebooks)
    return new_output("display_data", {"text/html": f'<p>[more: <a href="{target}">here</a>]</p>', "text/plain": "x"})


@pytest.fixture
def died(run: RunPaths) -> Path:
    """The partial record of a stage whose kernel was killed in its second cell."""
    error = new_output("error", ename="KernelDied", evalue="killed by SIGKILL", traceback=["KernelDied: SIGKILL"])
    stages = {"03_augmentation": {"state": "failed", "next_setting": "-p batch_size 2", "job_id": "12_0"}}
    run.status_json.write_text(json.dumps({"state": "failed", "stages": stages}))
    return save(
        run.partial_notebook("03_augmentation"),
        new_markdown_cell("# Augmentation"),
        cell("first", overflow(run, "03_augmentation")),
        cell("second", error, status="failed"),
        cell("third", status="pending", number=None),
        cell("fourth", status="pending", number=None),
    )


def test_a_record_whose_kernel_died_says_so_and_what_never_ran(run, died):
    assert write_record_pages(run) == {}
    html = run.record_html("03_augmentation").read_text(encoding="utf-8")
    alarm = html[html.index('<p class="alarm">') :].partition("</p>")[0]
    assert "KernelDied: killed by SIGKILL. 2 code cells of 4 never ran. Next setting to try: -p batch_size 2" in alarm
    assert html.count("This cell never ran.") == 2
    assert "slurm job 12_0" in html
    assert "plotly.js" not in html  # no figure in it
    assert len(html) < 60_000


def test_what_a_record_tells_of_its_end_is_not_told_twice(run, died):
    notebook = nbformat.read(died, as_version=4)
    banner = '<div style="border-left: 6px solid red">\n<b>Failed, at cell 2</b><br>\nkilled by the system\n</div>'
    notebook.cells.insert(0, new_markdown_cell(banner, metadata={"tags": ["papermill-error-cell-tag"]}))
    nbformat.write(notebook, died)
    write_record_pages(run)
    html = run.record_html("03_augmentation").read_text(encoding="utf-8")
    first, second = (part.partition("</p>")[0] for part in html.split('class="alarm">')[1:])
    assert first == "<b>This record is not whole.</b> 2 code cells of 4 never ran."
    assert "killed by the system" in second
    assert "<title>Augmentation" in html


def test_a_cell_that_a_killed_runner_left_running_is_said_to_have_run(run, tmp_path):
    rendered = render_notebook(save(tmp_path / "a.ipynb", cell("x", status="running"), cell("", status="pending")), "s")
    assert "This cell was running." in rendered.body
    assert (rendered.num_never_ran, rendered.num_code_cells) == (0, 1)


@pytest.mark.parametrize("page", ["record", "report"])
def test_links_to_what_did_not_fit_work_from_every_page(run, died, page):
    write_run_report(run)
    write_runs_index(run.root.parent.parent)
    path = run.record_html("03_augmentation") if page == "record" else run.report_html
    links = [part.partition('"')[0] for part in path.read_text(encoding="utf-8").split('href="')[1:]]
    logs = [link for link in links if "logs/outputs" in link]
    assert len(logs) == 1
    assert (path.parent / logs[0]).resolve().read_text() == "flood"
    local = [link for link in links if not link.startswith(("#", "http", "data:"))]
    assert len(local) >= 2
    for link in local:
        assert (path.parent / unquote(link)).exists(), link


@pytest.mark.parametrize(
    "href",
    [
        "../logs/../../x",
        "../../logs/x",
        "../tables/x",
        "/etc/passwd",
        "../logs/%2e%2e/x",
        "../logs/..%2Fx",
        "../logs/..\\\\x",
    ],
)
def test_no_link_leads_out_of_the_runs_logs(run, href):
    output = new_output("display_data", {"text/html": f'<a href="{href}">x</a>'})
    path = save(run.executed_notebook("02_folds"), cell("x", output))
    body = render_notebook(path, "s", run_folder="../../").body
    assert "href" not in body


def test_an_unchanged_record_is_not_written_again(run):
    save(run.executed_notebook("02_folds"), cell("x", new_output("display_data", FIGURE)))
    save(run.executed_notebook("05_kfold_results"), cell("x"))
    write_record_pages(run)
    pages = [run.record_html(key) for key in ("02_folds", "05_kfold_results")]
    before = [page.stat().st_ino for page in pages]
    write_record_pages(run)
    assert [page.stat().st_ino for page in pages] == before
    save(run.executed_notebook("05_kfold_results"), cell("other"))
    write_record_pages(run)
    assert [page.stat().st_ino == old for page, old in zip(pages, before, strict=True)] == [True, False]


def test_another_end_of_the_task_writes_the_page_again(run, died):
    write_record_pages(run)
    run.status_json.write_text(json.dumps({"state": "failed", "stages": {"03_augmentation": {"state": "interrupted"}}}))
    write_record_pages(run)
    assert "state-interrupted" in run.record_html("03_augmentation").read_text(encoding="utf-8")


def test_of_two_records_of_a_task_the_newer_counts(run):
    old, new = (save(path("02_folds"), cell("x")) for path in (run.executed_notebook, run.partial_notebook))
    os.utime(old, ns=(1, 1))
    assert records_of(run) == {"02_folds": new}
    os.utime(new, ns=(0, 0))
    assert records_of(run) == {"02_folds": old}


def test_a_record_that_cannot_be_read_is_named_and_does_not_hide_the_others(run):
    save(run.executed_notebook("05_kfold_results"), new_markdown_cell("# Fine"))
    run.partial_notebook("03_augmentation").write_text('{"cells": [')
    write_run_report(run)
    html = run.report_html.read_text(encoding="utf-8")
    assert "A record cannot be shown." in html
    assert "03_augmentation.partial.ipynb" in html
    assert ">Fine<" in html
    assert run.record_html("05_kfold_results").is_file()
