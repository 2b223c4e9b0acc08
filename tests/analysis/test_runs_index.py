"""The list of all runs: written from whatever lies there, true about who is at work, quick the second time."""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest

from fvc_lib.analysis.pages import runs_index
from fvc_lib.analysis.pages.report import write_run_report
from fvc_lib.analysis.pages.runs_index import write_runs_index
from fvc_lib.analysis.read.headline import run_headline
from fvc_lib.analysis.wording import bytes_text
from fvc_lib.services.atomic_files import size_of
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


def break_nothing(run: RunPaths) -> None:
    pass


def tear_record(run: RunPaths) -> None:
    run.run_json.write_text('{"att')


def tear_status(run: RunPaths) -> None:
    run.status_json.write_bytes(b"\x00" * 4096)


def nest_status(run: RunPaths) -> None:
    run.status_json.write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")


def make_status_a_folder(run: RunPaths) -> None:
    run.status_json.unlink()
    run.status_json.mkdir()


def mistype_status(run: RunPaths) -> None:
    run.status_json.write_text('{"state": ["x"], "stages": {"a": {"state": {}}}, "duration_seconds": "long"}')


def damage_results(run: RunPaths) -> None:
    run.results.write_bytes(b"ARROW1" + bytes(100))


def damage_logs(run: RunPaths) -> None:
    for path in run.memory("").parent.glob("*.jsonl"):
        path.write_bytes(b"\xff\xfe{[\n" * 10)


def break_params(run: RunPaths) -> None:
    run.params_yaml.write_text("model: [")


def lose_everything(run: RunPaths) -> None:
    for path in run.root.iterdir():
        if path != run.run_json:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def loop_links(run: RunPaths) -> None:
    run.results.unlink()
    run.results.symlink_to(run.results)
    shutil.rmtree(run.notebooks, ignore_errors=True)
    run.notebooks.symlink_to(run.notebooks)


@pytest.mark.parametrize(
    "damage",
    [tear_record, tear_status, nest_status, make_status_a_folder, mistype_status, damage_results, damage_logs,
     break_params, lose_everything, loop_links],
)  # fmt: skip
def test_one_bad_run_is_a_row_and_hides_no_other(make_run: MakeRun, damage: Callable[[RunPaths], None]) -> None:
    good, bad = make_run(), make_run(name="run_20250401_000000_bad")
    damage(bad)
    html = written(good)
    assert "above control</span>" in row_of(html, good)
    row = row_of(html, bad)
    if damage in (tear_record, tear_status, nest_status, make_status_a_folder):
        assert "cannot be read" in row


def test_what_another_user_does_not_let_be_looked_at_hides_no_other_run(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = make_run(), make_run(name="run_20250401_000000_bad")
    plain = Path.stat

    def stat(path: Path, **options: bool) -> os.stat_result:
        if path.is_relative_to(bad.leakage_audit.parent):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return plain(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    html = written(good)
    assert "above control</span>" in row_of(html, good)
    assert row_of(html, bad)


def test_a_finished_run_is_read_once_and_again_when_it_has_changed(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    headline = runs_index.headlines.run_headline
    monkeypatch.setattr(runs_index.headlines, "run_headline", lambda run: (read.append(run.run_id), headline(run))[1])
    done, other = make_run(), make_run(name="run_20250401_000000_other")
    first = written(done)
    assert len(read) == 2
    assert written(done) == first
    assert len(read) == 2
    other.status_json.write_text('{"state": "failed"}')
    assert "state-failed" in row_of(written(done), other)
    written(done)
    assert read[2:] == [other.run_id] * 2  # what is not finished is looked at each time
    shutil.rmtree(other.root)
    assert other.run_id not in written(done)
    assert other.root.name not in (done.root.parent.parent / ".index_rows.json").read_text()


def test_the_size_is_that_of_now_whatever_was_taken_from_a_finished_run(run: RunPaths) -> None:
    below = run.root / "features" / "fold_0"
    below.mkdir(parents=True)
    (below / "features.npz").write_bytes(bytes(50_000_000))
    before = written(run)
    assert f"<td>{bytes_text(size_of(run.root))}</td>" in row_of(before, run)
    (below / "features.npz").unlink()
    assert f"<td>{bytes_text(size_of(run.root))}</td>" in row_of(written(run), run)


def test_runs_that_are_read_together_show_what_each_shows_alone(make_run: MakeRun) -> None:
    first, twin = make_run(), make_run(experiment="copies")  # the same id in another experiment
    other = make_run(name="run_20250401_000000_other")
    log = sorted(other.memory("").parent.glob("*.jsonl"))[0]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    log.write_text("\n".join(json.dumps({**line, "rss_mb": 4321.0}) for line in lines) + "\n")
    together = written(first)
    shown = [bytes_text(run_headline(run).peak_rss_bytes) for run in (first, twin, other)]
    assert shown[2] == "4.32 GB" != shown[0] == shown[1]
    rows = together.split("<tr>")
    for run, text in zip((first, twin, other), shown, strict=True):
        (row,) = [row for row in rows if f"{run.experiment} · " in row and run.run_id in row]
        assert f"<td>{text}</td>" in row


@pytest.mark.parametrize("content", ["", "[]", "{", '{"demo/x": 3}', "\x00"])
def test_a_damaged_store_of_rows_costs_nothing_but_time(run: RunPaths, content: str) -> None:
    first = written(run)
    store = run.root.parent.parent / ".index_rows.json"
    store.write_text(content)
    assert written(run) == first
    assert run.run_id in store.read_text()


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
