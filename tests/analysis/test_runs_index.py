"""The list of all runs is written from whatever lies there, and true about who is at work."""

import fcntl
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import nbformat

from fvc_lib.analysis.pages.report import write_run_report, write_runs_index
from fvc_lib.services.run_paths import RunPaths

MakeRun = Callable[..., RunPaths]


def row_of(html: str, run: RunPaths) -> str:
    (row,) = [row for row in html.split("<tr>") if run.run_id in row]
    return row


def written(run: RunPaths) -> str:
    return write_runs_index(run.root.parent.parent).read_text(encoding="utf-8")


def empty_run(runs_dir: Path, name: str, state: str) -> RunPaths:
    run = RunPaths(runs_dir / "demo" / name)
    run.root.mkdir(parents=True)
    run.run_json.write_text('{"attempts": [{}]}')
    run.status_json.write_text(json.dumps({"state": state, "stages": {}}))
    return run


def test_states_are_the_true_ones(run: RunPaths) -> None:
    runs_dir = run.root.parent.parent
    names = ("waiting", "failed", "running", "gone")
    states = ("waiting", "failed", "running", "running")
    others = {
        name: empty_run(runs_dir, f"run_2026010{number}_000000_{name}", state)
        for number, (name, state) in enumerate(zip(names, states, strict=True))
    }
    with (others["running"].root / "run.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        html = written(run)
    assert "state-waiting" in row_of(html, others["waiting"])
    assert "state-failed" in row_of(html, others["failed"])
    assert "state-running" in row_of(html, others["running"])
    assert "stopped without a word" in row_of(html, others["gone"])
    assert "stopped without a word" in row_of(written(run), others["running"])  # the lock has been let go of


def damages(run: RunPaths) -> dict[str, Callable[[], object]]:
    """By name what is done to a run; of those in capitals the row says that a record cannot be read."""
    return {
        "TORN RECORD": lambda: run.run_json.write_text('{"att'),
        "NULLS": lambda: run.status_json.write_bytes(b"\x00" * 4096),
        "NESTED": lambda: run.status_json.write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}"),
        "A FOLDER": lambda: (run.status_json.unlink(), run.status_json.mkdir()),
        "types": lambda: run.status_json.write_text('{"state": ["x"], "stages": {"a": {"state": {}}}}'),
        "results": lambda: run.results.write_bytes(b"ARROW1" + bytes(100)),
        "logs": lambda: [path.write_bytes(b"\xff\xfe{[\n") for path in run.memory("").parent.glob("*.jsonl")],
        "parameters": lambda: run.params_yaml.write_text("model: ["),
        "everything": lambda: [shutil.rmtree(path) for path in run.root.iterdir() if path.is_dir()],
        "a link to itself": lambda: (run.results.unlink(), run.results.symlink_to(run.results)),
    }


def test_one_bad_run_is_a_row_and_hides_no_other(make_run: MakeRun) -> None:
    good = make_run()
    for number, name in enumerate(damages(good)):
        bad = make_run(name=f"run_20250401_00000{number}_bad")
        damages(bad)[name]()
        html = written(good)
        assert "above control</span>" in row_of(html, good), name
        assert name != name.upper() or "cannot be read" in row_of(html, bad), name


def test_the_index_and_the_report_name_the_corpus_and_its_fingerprint(run: RunPaths) -> None:
    record = json.loads(run.run_json.read_text())
    assert "corpus not recorded" in row_of(written(run), run)  # a run of an earlier version
    run.run_json.write_text(json.dumps(record | {"corpus": {"name": "celeb <df>", "listing_sha256": "0"}}))
    assert "celeb &lt;df&gt;, not indexed yet" in row_of(written(run), run)
    corpus = {"name": "celeb <df>", "fingerprint": "0123456789abcdef" * 4}
    run.run_json.write_text(json.dumps(record | {"corpus": corpus}))
    assert "celeb &lt;df&gt;, fingerprint 0123456789ab<" in row_of(written(run), run)
    run.notebooks.mkdir(exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(), run.notebooks / "01_data_index.ipynb")
    write_run_report(run)
    head, _, _ = run.report_html.read_text(encoding="utf-8").partition('<details class="section"')
    assert "celeb &lt;df&gt;, fingerprint 0123456789ab<" in head
