"""``run_notebooks.py audit``: the example of the docs answers as they say, and what cannot be meant is refused."""

import html
from pathlib import Path

import nbformat
import polars as pl
import pytest
from click.testing import CliRunner

from fvc_lib.command_line import records
from fvc_lib.command_line.main import main
from fvc_lib.command_line.records import execute_record
from fvc_lib.execution.run import runner
from fvc_lib.execution.run.session import file_reporter
from tests.execution.conftest import wait_for

DOCS = Path(__file__).parents[1] / "docs" / "audit.md"


def block(kind: str) -> str:
    return DOCS.read_text().split(f"```{kind}\n")[1].split("```")[0]


@pytest.mark.slow
def test_the_example_of_the_docs_answers_as_they_say_on_a_page_that_loads_nothing(tmp_path):
    (tmp_path / "scores.csv").write_text(block("csv"))
    runs = tmp_path / "runs"
    ended = CliRunner().invoke(main, ["audit", str(tmp_path / "scores.csv"), "--runs-dir", str(runs)])
    assert ended.exit_code == 0, ended.output
    assert block("text") in ended.output
    (folder,) = (runs / "audits").iterdir()
    assert folder.name.startswith("scores_")
    page = html.unescape((folder / "audit.html").read_text())
    assert "default-src 'none'" in page
    assert block("text").splitlines()[0] in page
    record = nbformat.read(folder / "40_score_audit.ipynb", as_version=4)
    assert all(cell.execution_count for cell in record.cells if cell.cell_type == "code")
    numbers = pl.read_csv(folder / "numbers.csv")
    assert set(numbers["detector"]) == {"ours", "theirs"}


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        (["gone.csv"], 2, "No such file"),
        (["scores.csv", "--label-map", "1=maybe"], 2, "label_map.1: got 'maybe'"),
        (["scores.csv", "--detectors", "our"], 2, "Did you mean 'ours'"),
        (["scores.csv", "--operating-point", "fpr=5"], 2, "threshold=NUMBER"),
        (["scores.csv", "--corpus", "nowhere"], 2, "no such file or folder"),
        (["bad.csv"], 3, "the score of 'score' is 'inf'"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_written(tmp_path, monkeypatch, given, code, words):
    monkeypatch.chdir(tmp_path)
    Path("scores.csv").write_text(block("csv"))
    Path("bad.csv").write_text("video,label,score\na,real,inf\nb,fake,1\n")
    ended = CliRunner().invoke(main, ["audit", *given, "--runs-dir", "runs"])
    assert ended.exit_code == code
    assert words in ended.output
    assert not Path("runs").exists()


def test_what_the_user_has_in_the_folder_is_not_written_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("scores.csv").write_text(block("csv"))
    Path("earlier").mkdir()
    Path("earlier/40_score_audit.ipynb").write_text("{}")
    Path("earlier/numbers.csv").write_text(block("csv"))
    Path("mine").mkdir()
    Path("mine/coverage.csv").write_text("mine")
    for given, words in (
        (["scores.csv", "--out", "."], "the table lies there"),
        (["scores.csv", "--out", "mine"], "did not write"),
        (["earlier/numbers.csv", "--out", "earlier"], "the table lies there"),
    ):
        ended = CliRunner().invoke(main, ["audit", *given])
        assert ended.exit_code == 2, ended.output
        assert words in ended.output
    assert Path("scores.csv").read_text() == Path("earlier/numbers.csv").read_text() == block("csv")
    assert Path("mine/coverage.csv").read_text() == "mine"


@pytest.mark.slow
def test_an_audit_that_fails_leaves_with_the_code_of_its_kind(tmp_path):
    parameters = {"score_table": str(tmp_path / "gone.csv"), "output_folder": str(tmp_path)}
    asked = {"title": "Audit", "runs_dir": str(tmp_path), "product": "audit", "files": ["answer.txt"]}
    assert execute_record("40_score_audit", tmp_path, parameters, **asked) == 2


def test_progress_that_a_notebook_writes_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "PLAIN_INTERVAL_SECONDS", 0)
    file, lines = tmp_path / "progress.json", []
    with records._shown(file):
        file_reporter(file, "videos")(3, 8)
        wait_for(lambda: lines.append(capsys.readouterr().err) or lines[-1], "a line of progress")
    assert lines[-1] == "videos 3 of 8\n"
    assert not file.exists()
