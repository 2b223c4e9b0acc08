"""The whole way from videos to report through real kernels: repeatable, resumable, honest, and open to a visitor.

One small corpus (a part of the generated sample), two folds, one epoch: what is tested is that runs agree to the bit,
not how well they tell fakes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbclient
import nbformat
import polars as pl
import psutil
import pytest

from fvc_lib.corpus import sample
from fvc_lib.corpus.sample_plan import plan_events
from fvc_lib.execution.stages import STAGES
from fvc_lib.execution.status import read_status
from fvc_lib.services.run_paths import RunPaths, list_runs
from fvc_lib.services.tables import PREDICTIONS, RESULTS, read_table

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow
SMALL = {
    "num_folds": 2, "fixed_size": 32, "num_frames": 4, "epochs": 2, "model": "frame_cnn", "augmentations_per_video": 1,
    "bootstrap_replicates": 100, "inner_validation_share": 0.34,
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A machine as a run sees it: its own folders, and where it is started from."""

    folder: Path
    corpus: Path

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        return {
            **inherited,  # but for the threads: as many as a user's run has
            "FVC_RUNS_DIR": str(self.runs),
            "FVC_CACHE_DIR": str(self.folder / "cache"),
            "FVC_DATA_DIR": str(self.folder / "data"),
        }

    def start(self, *arguments: str, **values: object) -> subprocess.Popen[str]:
        given = [] if "--resume" in arguments else ["-p", "corpus", str(self.corpus)]
        for name, value in ({} if "--resume" in arguments else {**SMALL, **values}).items():
            given += ["-p", name, str(value)]
        self.folder.mkdir(exist_ok=True)
        return subprocess.Popen(
            [sys.executable, str(ROOT / "run_notebooks.py"), *given, *arguments],
            cwd=self.folder, env=self.environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, *arguments: str, **values: object) -> tuple[RunPaths, str]:
        """Run to the end; returns the run and what the terminal showed."""
        process = self.start(*arguments, **values)
        shown, _ = process.communicate(timeout=600)
        assert process.returncode == 0, shown
        return list_runs(self.runs)[-1], shown


def scores(run: RunPaths) -> pl.DataFrame:
    tables = [read_table(run.predictions(fold), PREDICTIONS) for fold in range(SMALL["num_folds"])]
    return pl.concat(tables).sort("video_id")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first six events of each label of the sample corpus; only these are drawn and encoded."""
    events = plan_events()
    few = [event for label in ("real", "fake") for event in [e for e in events if e.label == label][:6]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "plan_events", lambda: tuple(few))
        return sample.generate_sample_corpus(tmp_path_factory.mktemp("corpus") / "videos & 'more'")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Place:
    return Place(tmp_path_factory.mktemp("here"), corpus)


@pytest.fixture(scope="module")
def finished(place: Place) -> tuple[RunPaths, str]:
    return place.run()


def test_one_command_ends_with_a_table_and_an_offline_report(finished):
    run, shown = finished
    for words in ("ROC-AUC with interval", "Metadata only", "Model on shuffled labels", "peak memory", "duration"):
        assert words in shown
    assert str(run.report_html) in shown
    html = run.report_html.read_text()
    assert html.count("Plotly.newPlot") >= 1
    assert "above control" in html
    status = read_status(run)
    assert status.state == "done"
    assert {stage.state for stage in status.stages.values()} == {"done"}
    assert 100e6 < status.peak_rss_bytes < 2e9
    assert (run.root.parent.parent / "index.html").is_file()


def test_the_controls_stand_beside_the_result(finished):
    results = read_table(finished[0].results, RESULTS)
    assert set(results["source"]) == {
        "model", "constant", "metadata_only", "group_lookup_by_row", "group_lookup_by_group", "shuffled_labels",
    }  # fmt: skip
    lookup = results.filter((pl.col("metric") == "roc_auc") & (pl.col("scope") == "all"))
    value = dict(lookup.select("source", "value").iter_rows())
    assert value["group_lookup_by_row"] > 0.8
    assert value["group_lookup_by_group"] == 0.5


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Place:
    """Another working directory, cache and mount point of the corpus."""
    folder = tmp_path_factory.mktemp("there")
    moved = folder / "mounted elsewhere"
    shutil.copytree(corpus.parent, moved)
    return Place(folder / "work", moved / corpus.name)


def assert_same_results(found: RunPaths, wanted: RunPaths) -> None:
    """To the bit."""
    assert scores(found).equals(scores(wanted))
    assert read_table(found.results, RESULTS).equals(read_table(wanted.results, RESULTS))
    for fold in range(SMALL["num_folds"]):
        assert measured(found, fold) == measured(wanted, fold)


@pytest.mark.long
def test_both_folds_at_once_give_the_same_bits(finished, elsewhere):
    run, (other, _) = finished[0], elsewhere.run("--jobs", "2")
    assert_same_results(other, run)
    folds = [read_status(other).stages[f"04_fold_training_fold_{fold}"] for fold in range(SMALL["num_folds"])]
    assert folds[1].started_utc < folds[0].finished_utc  # they did run at once


def measured(run: RunPaths, fold: int) -> list[dict[str, object]]:
    """A fold's metric log without what names the run and the time."""
    lines = [json.loads(line) for line in run.metrics("04_fold_training", fold).read_text().splitlines()]
    assert len(lines) > 20
    return [{name: value for name, value in line.items() if name not in {"run_id", "ts"}} for line in lines]


def test_the_straight_pass_elsewhere_gives_the_same_bits_and_tracks_nothing(finished, elsewhere, monkeypatch):
    """``USE_MLOPS_PIPELINE=false``, in other folders, with loader and probe processes, clips out of shards, and no step
    measured beforehand.
    """
    monkeypatch.setenv("USE_MLOPS_PIPELINE", "false")
    run, shown = elsewhere.run(num_workers=2, probe_workers=2, clip_source="shards", memory_preflight=False)
    assert len(list((elsewhere.folder / "cache").rglob("*.tar"))) == 1
    assert_same_results(run, finished[0])
    ends = [line.split()[0] for line in shown.splitlines() if " done " in line]
    assert ends == sorted(read_status(run).stages)
    assert not list((run.root / "checkpoints").glob("stage_*"))
    again = elsewhere.run("--resume", "latest", "--dry-run")[1]
    assert again.count("  run   ") == len(ends)
    assert "  skip  " not in again


@pytest.mark.long
def test_every_notebook_runs_by_hand_on_the_newest_run_and_changes_nothing(finished, place, monkeypatch):
    run, _ = finished
    before = {path: path.read_bytes() for path in sorted(run.tables.iterdir())}
    for name, value in place.environment().items():
        monkeypatch.setenv(name, value)
    for stage in STAGES:
        document = nbformat.read(ROOT / "notebooks" / f"{stage.name}.ipynb", as_version=4)
        nbclient.NotebookClient(
            document, timeout=300, resources={"metadata": {"path": str(ROOT / "notebooks")}}
        ).execute()
        record = nbformat.read(run.executed_notebook(stage.name, 0 if stage.per_fold else None), as_version=4)
        assert figures(document) == figures(record), stage.name
    assert {path: path.read_bytes() for path in sorted(run.tables.iterdir())} == before
    assert list_runs(place.runs) == [run]


def figures(document: nbformat.NotebookNode) -> list[str]:
    """The titles of the figures a notebook shows, in order."""
    shown = []
    for cell in document.cells:
        for output in cell.get("outputs", []):
            figure = output.get("data", {}).get("application/vnd.plotly.v1+json")
            if figure:
                shown.append(figure["layout"]["title"]["text"])
    # What memory and time a figure tells grows with every look at the run.
    return [title for title in shown if not any(words in title for words in ("Memory", " takes ", "The run took"))]


# What of this is quick is in tests/execution and tests/faults; `make kills` kills anywhere.
@pytest.mark.long
@pytest.mark.parametrize("stage", ["01_data_index", "04_fold_training_fold_0", "05_kfold_results"])
@pytest.mark.fault(1)
def test_a_run_killed_in_any_stage_ends_as_if_it_had_not_been(finished, corpus, tmp_path, stage):
    place = Place(tmp_path / "killed", corpus)
    victim = place.start()
    wait_until_running(place, stage, victim)
    time.sleep(1.5)  # somewhere inside the stage; any moment must do
    for process in [*psutil.Process(victim.pid).children(recursive=True), psutil.Process(victim.pid)]:
        process.send_signal(signal.SIGKILL)
    victim.communicate()
    run = list_runs(place.runs)[-1]
    done_before = {key for key, s in read_status(run).stages.items() if s.state == "done"}
    resumed, _ = place.run("--resume", "latest")
    assert resumed == run
    status = read_status(run)
    assert {status.stages[key].attempts for key in done_before} <= {1}
    assert scores(run).equals(scores(finished[0]))


def wait_until_running(place: Place, stage: str, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 300
    while time.monotonic() < end and process.poll() is None:
        runs = list_runs(place.runs)
        if runs and (known := read_status(runs[-1]).stages.get(stage)) and known.state != "pending":
            return
        time.sleep(0.05)
    pytest.fail(f"{stage} never started: {process.communicate()[0]}")


@pytest.fixture(autouse=True)
def no_orphans() -> Iterator[None]:
    """A killed runner's kernel must leave by itself within seconds."""
    yield
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if not [p for p in psutil.process_iter(["cmdline", "ppid"]) if _is_orphaned_kernel(p)]:
            return
        time.sleep(0.2)
    pytest.fail("a kernel outlived its runner")


def _is_orphaned_kernel(process: psutil.Process) -> bool:
    command = " ".join(process.info["cmdline"] or ())
    return "ipykernel_launcher" in command and "fvc-" in command and process.info["ppid"] == 1
