"""The whole way from videos to report through real kernels: repeatable, resumable, honest, and open to a visitor.

One small corpus (a part of the generated sample), two folds, one epoch: what is tested is that runs agree to the bit,
not how well they tell fakes. Effective batches that both folds can fill: the second measures no step of its own.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import nbclient
import nbformat
import polars as pl
import pytest

from fvc_lib.analysis.read.headline import NOT_ENDED
from fvc_lib.execution.run.status import read_status
from fvc_lib.execution.stages import stages_of
from fvc_lib.services.parameters import run_config
from fvc_lib.services.records.digests import read_document
from fvc_lib.services.run_paths import RunPaths, list_runs
from fvc_lib.services.tables import PREDICTIONS, RESULTS, read_table
from fvc_lib.services.tasks import ROBUSTNESS
from tests.faults.small_runs import SMALL, VALUES, Place, results_of, small_corpus, wait_for_no_orphans

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow
QUICK = {"epochs": 1, "effective_batch_size": 8}


def scores(run: RunPaths) -> pl.DataFrame:
    tables = [read_table(run.predictions(fold), PREDICTIONS) for fold in range(SMALL["num_folds"])]
    return pl.concat(tables).sort("video_id")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first six events of each label of the sample corpus; only these are drawn and encoded."""
    return small_corpus("video", tmp_path_factory.mktemp("corpus") / "videos & 'more'")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Place:
    return Place(tmp_path_factory.mktemp("here"), corpus)


@pytest.fixture(scope="module")
def finished(place: Place) -> tuple[RunPaths, str]:
    return place.run("--jobs", "1", **QUICK)


def test_one_command_ends_with_a_table_and_an_offline_report(finished):
    run, shown = finished
    for words in ("ROC-AUC with interval", "Metadata only", "Model on shuffled labels", "peak memory", "duration"):
        assert words in shown
    assert str(run.report_html) in shown
    html = run.report_html.read_text()
    assert html.count("Plotly.newPlot") >= 1
    assert "above control" in html
    # 06 is a stage of the run that it shows: what it says of that is read when the run has ended.
    assert NOT_ENDED in html
    assert re.findall(r">running<|attempt \d+: running|This cannot be shown", html) == []
    status = read_status(run)
    assert status.state == "done"
    assert {stage.state for stage in status.stages.values()} == {"done"}
    assert 100e6 < status.peak_rss_bytes < 2e9
    assert (run.root.parent.parent / "index.html").is_file()


def test_the_controls_stand_beside_the_result(finished):
    results = read_table(finished[0].results, RESULTS)
    assert set(results["source"]) == {
        "model", "constant", "metadata_only", "length_only", "group_lookup_by_row", "group_lookup_by_group",
        "shape_only", "shuffled_labels",
    }  # fmt: skip
    lookup = results.filter((pl.col("metric") == "roc_auc") & (pl.col("scope") == "all"))
    value = dict(lookup.select("source", "value").iter_rows())
    assert value["group_lookup_by_row"] > 0.8
    assert value["group_lookup_by_group"] == 0.5


def test_the_memory_report_is_made_again_after_the_record_of_robustness_which_is_no_stage(place, finished):
    record = finished[0].notebooks / f"{ROBUSTNESS}.ipynb"
    record.touch()
    _, shown = place.run("--resume", "latest", "--only", "07")
    record.unlink()
    assert re.search(r"07_memory_report +done", shown)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Place:
    """Another working directory, cache and mount point of the corpus."""
    folder = tmp_path_factory.mktemp("there")
    moved = folder / "mounted elsewhere"
    shutil.copytree(corpus.parent, moved)
    return Place(folder / "work", moved / corpus.name)


def assert_same_results(found: RunPaths, wanted: RunPaths) -> None:
    """To the bit, but for the control, which ``found`` may not have."""
    controls = ["control_score", "control_label"]
    assert scores(found).drop(controls).equals(scores(wanted).drop(controls))
    results = [
        read_table(run.results, RESULTS).filter(pl.col("source") != "shuffled_labels") for run in (found, wanted)
    ]
    assert results[0].equals(results[1])
    for fold in range(SMALL["num_folds"]):
        assert measured(found, fold) == measured(wanted, fold)


@pytest.mark.long
def test_both_folds_at_once_give_the_same_bits(finished, elsewhere):
    run, (other, _) = finished[0], elsewhere.run("--jobs", "2", **QUICK)
    assert_same_results(other, run)
    folds = [read_status(other).stages[f"04_fold_training_fold_{fold}"] for fold in range(SMALL["num_folds"])]
    assert folds[1].started_utc < folds[0].finished_utc  # they did run at once


def measured(run: RunPaths, fold: int) -> list[dict[str, object]]:
    """A fold's metric log without what names the run and the time, and without the control's."""
    lines = [json.loads(line) for line in run.metrics("04_fold_training", fold).read_text().splitlines()]
    lines = [line for line in lines if not line["phase"].startswith("control")]
    assert len(lines) > 10
    return [{name: value for name, value in line.items() if name not in {"run_id", "ts"}} for line in lines]


@pytest.mark.long
def test_the_straight_pass_elsewhere_gives_the_same_bits_and_tracks_nothing(finished, elsewhere, monkeypatch):
    """``USE_MLOPS_PIPELINE=false``, in other folders, with loader and probe processes, clips out of shards, and no step
    measured beforehand.
    """
    monkeypatch.setenv("USE_MLOPS_PIPELINE", "false")
    elsewhere_only = {"num_workers": 1, "workers": 2, "clip_source": "shards", "memory_preflight": False}
    run, shown = elsewhere.run("--jobs", "1", shuffled_label_control=False, **QUICK, **elsewhere_only)
    assert len(list((elsewhere.folder / "cache").rglob("*.tar"))) == 1
    assert_same_results(run, finished[0])
    ends = [line.split()[0] for line in shown.splitlines() if " done " in line]
    assert ends == sorted(read_status(run).stages)
    assert not any(read_document(path).get("fingerprint") for path in (run.root / "checkpoints").glob("stage_*"))
    again = elsewhere.run("--resume", "latest", "--dry-run")[1]
    assert again.count("  run   ") == len(ends)
    assert "  skip  " not in again


@pytest.mark.long
@pytest.mark.parametrize("task", VALUES)
def test_every_notebook_of_a_task_runs_interactively_on_the_newest_run_and_changes_nothing(task, tmp_path, monkeypatch):
    place = Place(tmp_path / "here", small_corpus(task, tmp_path / "files"), VALUES[task])
    run, _ = place.run()
    before = results_of(run)
    for name, value in place.environment().items():
        monkeypatch.setenv(name, value)
    for stage in stages_of(run_config(run.params_yaml)):
        document = nbformat.read(ROOT / "notebooks" / f"{stage.name}.ipynb", as_version=4)
        nbclient.NotebookClient(
            document, timeout=300, resources={"metadata": {"path": str(ROOT / "notebooks")}}
        ).execute()
        record = nbformat.read(run.executed_notebook(stage.name, 0 if stage.per_fold else None), as_version=4)
        assert figures(document) == figures(record), stage.name
    assert results_of(run) == before
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


@pytest.fixture(autouse=True)
def no_orphans() -> Iterator[None]:
    yield
    wait_for_no_orphans()
