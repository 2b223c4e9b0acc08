"""The report of a run and the page of each record: whole, offline, and true about what is missing."""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_output

from fvc_lib.analysis.figures.logs import learning_curves_figure
from fvc_lib.analysis.figures.results import controls_figure
from fvc_lib.analysis.figures.roc_and_calibration import roc_figure
from fvc_lib.analysis.pages.display import figure_bundle
from fvc_lib.analysis.pages.report import END_TAG, write_report, write_run_report, write_runs_index
from fvc_lib.analysis.read import queries
from fvc_lib.analysis.read.headline import run_headline
from fvc_lib.analysis.read.runs import failure, run_status
from fvc_lib.services.atomic_files import write_json
from fvc_lib.services.run_paths import RunPaths
from tests.analysis.conftest import notebook


def loads_of(path: Path) -> list[str]:
    """Whatever makes a browser fetch something beyond the page itself."""
    html = path.read_text(encoding="utf-8")
    found = re.findall(r'<[^>]*\b(?:src|srcset|poster|action)="([^"]*)"', html)
    found += re.findall(r'<(?:link|base|image|use)[^>]*href="([^"]*)"', html)
    found += re.findall(
        r"@import[^;]*|url\((?!data:)[^)]*", "".join(re.findall(r"<style>.*?</style>", html, re.DOTALL))
    )
    return [each for each in found if not each.startswith("data:")]


def open_sections(path: Path) -> list[bool]:
    sections = re.findall(r'<details class="section"[^>]*>', path.read_text(encoding="utf-8"))
    return ["open" in each for each in sections]


def cell(source: str, *outputs: object, status: str = "completed") -> object:
    return new_code_cell(source, outputs=list(outputs), metadata={"papermill": {"status": status}})


def shown(*bundles: dict) -> object:
    return cell("show()", *(new_output("display_data", data=bundle) for bundle in bundles))


@pytest.fixture
def notebooks(run: RunPaths) -> list[Path]:
    predictions = queries.predictions([run]).frame
    results = [controls_figure(queries.results([run]).frame), roc_figure(predictions, replicates=20)]
    curves = figure_bundle(learning_curves_figure(queries.learning_curves([run]).frame))
    results_cells = (new_markdown_cell("# Results <b>\n\n$a<b$"), shown(*map(figure_bundle, results)))
    return [
        notebook(run.executed_notebook("05_kfold_results"), *results_cells),
        notebook(run.executed_notebook("06_analysis_dashboard"), new_markdown_cell("# C"), shown(curves)),
        notebook(run.executed_notebook("02_folds"), new_markdown_cell("# Folds\n\n[a link](https://example.org/x)")),
    ]


def test_the_report_holds_everything_but_plotly_and_loads_nothing_else(run: RunPaths, notebooks: list[Path]) -> None:
    write_run_report(run)
    html = run.report_html.read_text(encoding="utf-8")
    assert loads_of(run.report_html) == ["../../plotly.min.js"]  # one for all runs
    assert len(html) < 300_000
    assert html.count('<div class="figure"') == 2  # the figure of the answer is the table at the head
    assert open_sections(run.report_html) == [True, False, False, False, False]
    headline = run_headline(run)
    score = headline.model_score
    for text in (f"{score.value:.3f}", f"{score.low:.3f}, {score.high:.3f}", "795 MB", "3 min 05 s"):
        assert text in html, text
    assert html.count(headline.verdict.sentence) == 1
    runs_dir = run.root.parent.parent
    assert [path.relative_to(runs_dir) for path in runs_dir.rglob("plotly*")] == [Path("plotly.min.js")]
    write_report(notebooks[2:], run.root / "x.html", title="T <script>alert(1)</script>", answer=["a <b>"])
    alone = (run.root / "x.html").read_text(encoding="utf-8")
    assert loads_of(run.root / "x.html") == []
    assert "<script>alert" not in alone
    assert "a &lt;b&gt;" in alone
    assert len(alone) < 60_000


def test_a_failed_run_says_so_first_and_opens_the_failed_section(run: RunPaths, notebooks: list[Path]) -> None:
    error = new_output("error", ename="ValueError", evalue="<no> codec", traceback=["\x1b[31mValueError\x1b[0m"])
    end = new_markdown_cell("Failed. To go on: mend it", metadata={"tags": [END_TAG]})
    notebook(run.partial_notebook("03_augmentation"), new_markdown_cell("# A"), end, cell("x", error))
    stages = {"03_augmentation": {"state": "failed", "error": {"name": "ValueError", "message": "<no> codec"}}}
    write_json(run.status_json, {"state": "failed", "stages": stages})
    run.partial_notebook("01_data_index").write_text('{"cells": [')  # named, and hides no other
    write_run_report(run)
    html = run.report_html.read_text(encoding="utf-8")
    assert "01_data_index.partial.ipynb" in html
    assert "state: failed" in html
    assert (
        html.count("ValueError: &lt;no&gt; codec") == 2
    )  # the alarm and the output; the section's alarm leaves it to the cell on the end
    assert open_sections(run.report_html)[0]
    assert 'id="section-03_augmentation"' in html


@pytest.fixture
def died(run: RunPaths) -> Path:
    """The partial record of a stage whose kernel was killed in its second cell, with a link to a log."""
    log = run.logs / "outputs" / "03_augmentation" / "cell_01_stdout.txt"
    log.parent.mkdir(parents=True)
    log.write_text("flood")
    link = new_output("display_data", {"text/html": f'<a href="{os.path.relpath(log, run.notebooks)}">more</a>'})
    error = new_output("error", ename="KernelDied", evalue="killed by SIGKILL", traceback=["KernelDied: SIGKILL"])
    stages = {"03_augmentation": {"state": "failed", "advice": "Next, try -p batch_size 2.", "job_id": "12_0"}}
    run.status_json.write_text(json.dumps({"state": "failed", "stages": stages}))
    cells = (
        cell("a", link),
        cell("b", error, status="failed"),
        cell("c", status="pending"),
        cell("d", status="pending"),
    )
    return notebook(run.partial_notebook("03_augmentation"), new_markdown_cell("# Augmentation"), *cells)


def test_a_record_whose_kernel_died_says_so_and_what_never_ran_and_links_work(run: RunPaths, died: Path) -> None:
    write_run_report(run)
    html = run.report_html.read_text(encoding="utf-8")
    section = html[html.index('id="section-03_augmentation"') :]
    alarm = section[section.index('<p class="alarm">') :].partition("</p>")[0]
    for fact in ("KernelDied: killed by SIGKILL", "2 code cells of 4 never ran", "-p batch_size 2"):
        assert fact in alarm
    assert "job id 12_0" in html
    index = write_runs_index(run.root.parent.parent)
    for path in (index, run.report_html):
        links = re.findall(r'<a [^>]*href="([^"]*)"', path.read_text(encoding="utf-8"))
        local = [path.parent / unquote(link.partition("#")[0]) for link in links if not link.startswith(("#", "http"))]
        assert [link for link in local if not link.exists()] == []
    assert [link.read_text() for link in local if "logs" in link.parts] == ["flood"]


def test_the_index_lists_every_run_and_links_what_is_there(make_run: Callable[..., RunPaths]) -> None:
    runs = [
        make_run(),
        make_run(experiment="a b#<i>'%", name="run_20250401_000000_?x", seed=4, skill=0.1),
        make_run(name="run_20250402_000000_new"),
    ]
    for path in (runs[2].results, runs[2].status_json):
        path.unlink()
    for run in runs[:2]:
        run.report_html.write_text("<p>here</p>")
    index = write_runs_index(runs[0].root.parent.parent)
    html = index.read_text(encoding="utf-8")
    assert loads_of(index) == []
    links = re.findall(r'<a href="([^"]+)"', html)
    assert links == ["a%20b%23%3Ci%3E%27%25/run_20250401_000000_%3Fx/report.html", f"demo/{runs[0].run_id}/report.html"]
    assert html.index("_new") < html.index("_?x") < html.index(runs[0].run_id)
    assert "a b#&lt;i&gt;&#39;%" in html
    assert html.count("not above control</span>") == 1
    assert "<script" not in html


# --- Provenance


# --- The list of all runs


def row_of(html: str, run: RunPaths) -> str:
    (row,) = [row for row in html.split("<tr>") if run.run_id in row]
    return row


def written(run: RunPaths) -> str:
    return write_runs_index(run.root.parent.parent).read_text(encoding="utf-8")


def test_states_are_the_true_ones(run: RunPaths) -> None:
    others = {}
    for number, name in enumerate(("waiting", "failed", "running", "gone")):
        others[name] = RunPaths(run.root.parent / f"run_2026010{number}_000000_{name}")
        others[name].root.mkdir()
        others[name].run_json.write_text('{"attempts": [{}]}')
        state = name.replace("gone", "running")
        stage = {"state": state, "reason": "new run"}
        write_json(others[name].status_json, {"state": state, "stages": {"02_folds": stage}})
    with (others["running"].root / "run.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        html = written(run)
    for name in ("waiting", "failed", "running"):
        assert f"state-{name}" in row_of(html, others[name])
    assert "stopped without a word" in row_of(html, others["gone"])
    assert "process was killed" in failure(run_status(others["gone"]))  # and not why it had begun: "new run"


def damages(run: RunPaths) -> dict[str, Callable[[], object]]:
    """By name what is done to a run; of those in capitals the row says that a record cannot be read."""
    return {
        "TORN RECORD": lambda: run.run_json.write_text('{"att'),
        "NULLS": lambda: run.status_json.write_bytes(b"\x00" * 4096),
        "types": lambda: run.status_json.write_text('{"state": ["x"], "stages": {"a": {"state": {}}}}'),
        "results": lambda: run.results.write_bytes(b"ARROW1" + bytes(100)),
        "parameters": lambda: run.params_yaml.write_text("model: ["),
        "everything": lambda: [shutil.rmtree(path) for path in run.root.iterdir() if path.is_dir()],
    }


def test_one_bad_run_is_a_row_and_hides_no_other(make_run: Callable[..., RunPaths]) -> None:
    good = make_run()
    bad = {}
    for number, name in enumerate(damages(good)):
        bad[name] = make_run(name=f"run_20250401_{number:06}_bad")
        damages(bad[name])[name]()
    html = written(good)
    assert "above control</span>" in row_of(html, good)
    for name, run in bad.items():
        assert name != name.upper() or "cannot be read" in row_of(html, run), name
