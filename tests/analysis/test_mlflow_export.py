"""Exports into MLflow's own SQLite store: real stores, real runs."""

import json
import math
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pytest
import yaml
from click.testing import CliRunner

from fvc_lib.analysis.mlflow import export as mlflow_connection
from fvc_lib.analysis.mlflow.export import (
    ExportReport,
    TrackingError,
    artifact_location,
    default_tracking_uri,
    export_run,
    shown_uri,
)
from fvc_lib.command_line.commands import export_mlflow, export_when_asked
from fvc_lib.command_line.main import Commands
from fvc_lib.services import tables
from fvc_lib.services.config import RunConfig
from fvc_lib.services.records.digests import write_document
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.stage_logs import MetricLog
from fvc_lib.services.tables import read_table
from tests.analysis.mlflow_store import Killed, copied, failing, shorten, stored, stored_run

pytestmark = pytest.mark.mlflow

TRAINING = "04_fold_training"
MakeRun = Callable[..., RunPaths]


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    database = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    with mlflow_connection.connected(f"sqlite:///{database}") as client:
        client.search_experiments()
    return database


@pytest.fixture
def uri(template: Path, tmp_path: Path) -> str:
    return copied(template, tmp_path / "store")


@pytest.fixture
def short_run(make_run: MakeRun) -> RunPaths:
    return shorten(make_run(), 2)


def whole(uri: str) -> dict:
    return stored_run(uri, lambda run: "mlflow.parentRunId" not in run.data.tags)


def fold(uri: str, number: int) -> dict:
    return stored_run(uri, lambda run: run.info.run_name == f"fold {number}")


def notes(report: ExportReport) -> str:
    return "\n".join(report.notes)


@dataclass(frozen=True)
class Exported:
    run: RunPaths
    report: ExportReport
    runs: list[dict]

    @property
    def whole(self) -> dict:
        return next(run for run in self.runs if run["parent"] is None)

    def fold(self, number: int) -> dict:
        return next(run for run in self.runs if run["name"] == f"fold {number}")


@pytest.fixture(scope="module")
def exported(written_run, template, tmp_path_factory) -> Exported:
    """A run with five folds, exported once; not to be written to."""
    run, uri = written_run(0, 1.6), copied(template, tmp_path_factory.mktemp("exported"))
    report = export_run(run, tracking_uri=uri)
    return Exported(run, report, stored(uri))


def test_a_run_becomes_one_run_with_a_nested_one_for_each_fold(exported):
    report, runs = exported.report, exported.runs
    assert report.num_runs == 6
    assert {(each["name"], each["parent"]) for each in runs} == {
        ("run_0", None), *((f"fold {number}", "run_0") for number in range(5)),
    }  # fmt: skip
    assert {each["experiment"] for each in runs} == {"demo"}
    assert {each["status"] for each in runs} == {"FINISHED"}


def test_every_metric_line_is_there_with_step_time_and_value(exported):
    lines = [json.loads(line) for line in exported.run.metrics(TRAINING, 3).read_text().splitlines()]
    wanted = sorted((f"{x['phase']}/{x['metric']}", x["step"], round(x["ts"] * 1000), repr(x["value"])) for x in lines)
    logged = [point for point in exported.fold(3)["points"] if not point[0].startswith(("outer_fold/", "outcome/"))]
    assert logged == wanted


def test_results_with_intervals_and_controls_stand_on_the_whole(exported):
    points = {key: float(value) for key, step, _, value in exported.whole["points"]}
    for row in read_table(exported.run.results, tables.RESULTS).filter(pl.col("scope") == "all").iter_rows(named=True):
        key = f"all/{row['source']}/{row['metric']}"
        assert (points[key], points[f"{key}/low"], points[f"{key}/high"]) == (row["value"], row["low"], row["high"])
    assert "outer_fold/model/roc_auc" in {point[0] for point in exported.fold(0)["points"]}


def test_parameters_tags_and_files_tell_what_the_run_was(exported):
    told = exported.whole
    asked = yaml.safe_load(exported.run.params_yaml.read_text())
    assert told["params"]["learning_rate"] == json.dumps(asked["learning_rate"])
    assert told["params"]["model"] == "frame_cnn"
    assert told["tags"]["fvc.standing"] == "above control"
    assert told["tags"]["fvc.state"] == "done"
    assert told["tags"]["mlflow.note.content"].startswith("**above control**")
    assert {"params.yaml", "run.json", "tables/kfold_results.csv", "tables/predictions.csv"} <= set(told["artifacts"])


def test_exporting_again_writes_nothing(short_run, uri):
    first = export_run(short_run, tracking_uri=uri)
    wanted = stored(uri)
    again = export_run(short_run, tracking_uri=uri)
    assert (again.changed, again.mlflow_run_id) == (False, first.mlflow_run_id)
    assert "nothing new" in again.lines()[0]
    assert stored(uri) == wanted


@pytest.mark.parametrize(("share", "after"), [(0.0, True), (0.5, False), (0.9, False), (1.0, False)])
def test_an_export_that_was_killed_is_repeated_and_nothing_is_there_twice(
    short_run, template, tmp_path, monkeypatch, share, after
):
    run, undisturbed = shorten(short_run, 1), copied(template, tmp_path / "undisturbed")
    with failing(monkeypatch, 0) as clients:
        export_run(run, tracking_uri=undisturbed)
    total = clients[0].calls
    uri = copied(template, tmp_path / "killed")
    with failing(monkeypatch, 3 + round(share * (total - 3)), after=after), pytest.raises(Killed):
        export_run(run, tracking_uri=uri)
    assert export_run(run, tracking_uri=uri).changed
    assert stored(uri) == stored(undisturbed)


def test_a_run_that_has_grown_replaces_what_was_there(short_run, template, tmp_path):
    run = short_run
    log, results = run.metrics(TRAINING, 1), run.results
    all_lines, table = log.read_bytes(), results.read_bytes()
    status = run.status_json.read_bytes()
    undisturbed = copied(template, tmp_path / "undisturbed")
    export_run(run, tracking_uri=undisturbed)

    uri = copied(template, tmp_path / "grown")
    log.write_bytes(b"\n".join(all_lines.splitlines()[:40]) + b"\n")
    results.unlink()
    write_document(run.status_json, {**json.loads(status), "state": "failed", "finished_utc": None})
    export_run(run, tracking_uri=uri)
    assert whole(uri)["status"] == "FAILED"

    log.write_bytes(all_lines)
    results.write_bytes(table)
    run.status_json.write_bytes(status)
    grown = export_run(run, tracking_uri=uri)
    assert grown.num_replaced == grown.num_runs == 3
    assert "in place of 3 earlier runs" in grown.lines()[0]
    assert stored(uri) == stored(undisturbed)


def test_of_a_killed_replacement_the_complete_export_stays_until_the_next_one(short_run, uri, monkeypatch):
    export_run(short_run, tracking_uri=uri)
    short_run.params_yaml.write_text(short_run.params_yaml.read_text().replace("batch_size: 0", "batch_size: 4", 1))
    with failing(monkeypatch, 6), pytest.raises(Killed):
        export_run(short_run, tracking_uri=uri)
    assert sum(run["tags"].get("fvc.exported") is not None for run in stored(uri)) == 1
    export_run(short_run, tracking_uri=uri)
    assert len(stored(uri)) == 3
    assert whole(uri)["params"]["batch_size"] == "4"


def test_a_step_done_again_after_a_kill_counts_once_with_its_last_value(short_run, uri):
    with MetricLog(short_run.metrics(TRAINING, 0), run_id="x", fold=0, attempt=2) as log:
        log.log(step=1, epoch=0, phase="train", metrics={"learning_rate": 0.5})
    export_run(short_run, tracking_uri=uri)
    rates = [p for p in fold(uri, 0)["points"] if p[:2] == ("train/learning_rate", 1)]
    assert [point[3] for point in rates] == ["0.5"]


def test_what_is_not_finite_is_a_gap(short_run, uri):
    with MetricLog(short_run.metrics(TRAINING, 0), run_id="x", fold=0) as log:
        for step, value in ((70, math.nan), (71, math.inf), (72, -math.inf)):
            log.log(step=step, epoch=9, phase="train", metrics={"loss": value})
    export_run(short_run, tracking_uri=uri)
    assert [p[3] for p in fold(uri, 0)["points"] if p[0] == "train/loss" and p[1] >= 70] == ["nan"] * 3
    assert not export_run(short_run, tracking_uri=uri).changed


def test_of_what_mlflow_refuses_a_value_is_named_and_a_name_shortened(short_run, uri):
    params = {"corpus": "c" * 6001, "n" * 300: 1, "model": "frame_cnn"}
    short_run.params_yaml.write_text(yaml.safe_dump(params))
    with MetricLog(short_run.metrics(TRAINING, 0), run_id="x", fold=0) as log:
        log.log(step=1, epoch=0, phase="train", metrics={"m" * 260: 1.0})
    report = export_run(short_run, tracking_uri=uri)
    assert "parameter 'corpus' was left out: it has 6,001 characters, and MLflow takes 6,000" in notes(report)
    assert "corpus" not in whole(uri)["params"]
    assert sum(name.startswith("nnn") for name in whole(uri)["params"]) == 1
    assert sum(key.startswith("train/mmm") for key, *_ in fold(uri, 0)["points"]) == 1


def test_a_run_deleted_there_is_exported_anew_with_its_folds_below_it(short_run, uri):
    first = export_run(short_run, tracking_uri=uri)
    with mlflow_connection.connected(uri) as client:
        client.delete_run(first.mlflow_run_id)
    export_run(short_run, tracking_uri=uri)
    assert fold(uri, 1)["parent"] == "run_0"
    assert len(stored(uri)) == 3


def test_hostile_names_are_text(make_run, uri):
    name = "run_'; DROP TABLE runs; -- <b>%\"[x]"
    run = shorten(make_run(experiment="<script>alert('1')</script>:a"[:12] + "'%\"", name=name), 1)
    run.run_json.write_text(json.dumps({"run_id": name}))
    with MetricLog(run.metrics(TRAINING, 0), run_id=name, fold=0) as log:
        log.log(step=1, epoch=0, phase="train", metrics={"<img src=x>\n'": 1.0, "../../x": 2.0})
    for _ in range(2):
        report = export_run(run, tracking_uri=uri)
    assert not report.changed
    told = whole(uri)
    assert told["name"] == told["tags"]["fvc.run_id"] == name
    keys = {point[0] for point in fold(uri, 0)["points"]}
    assert {"train/_x3C_img src_x3D_x_x3E__xA__x27_", "train/.._x2F_.._x2F_x"} <= keys


def test_a_copied_or_renamed_folder_is_the_same_run(short_run, uri):
    short_run.run_json.write_text(json.dumps({"run_id": "run_a", "experiment": "demo"}))
    export_run(short_run, tracking_uri=uri)
    copy = RunPaths(short_run.root.with_name("run_copied_by_hand"))
    shutil.copytree(short_run.root, copy.root)
    report = export_run(copy, tracking_uri=uri)
    assert not report.changed
    assert "its folder is called run_copied_by_hand" in notes(report)


def test_an_empty_or_torn_run_is_exported_as_far_as_it_is_readable(tmp_path, uri):
    run = RunPaths(tmp_path / "runs" / "demo" / "run_1")
    run.metrics(TRAINING, 0).parent.mkdir(parents=True)
    run.run_json.write_text('{"run_id": ')
    run.params_yaml.write_text("a: [")
    run.metrics(TRAINING, 0).write_bytes(
        b'{"step": 1, "phase": "train", "metric": "loss", "value": 1.5}\n{"step": 2, "ph'
    )
    report = export_run(run, tracking_uri=uri)
    assert report.num_runs == 2
    assert "could not be read, the first: 2" in notes(report)
    assert [point[1:] for point in fold(uri, 0)["points"]] == [(1, 0, "1.5")]


def test_a_server_that_is_away_is_said_without_its_password(short_run, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    address = "http://me:pass1@127.0.0.1:9"
    with pytest.raises(TrackingError, match="The same command repeats the export") as caught:
        export_run(short_run, tracking_uri=address)
    assert "pass1" not in str(caught.value)
    assert shown_uri(address) == "http://[secret]@127.0.0.1:9"
    assert shown_uri("postgresql://db/x?password=abc") == "postgresql://db/x?[secret]"


def test_an_experiment_in_the_trash_is_named(short_run, uri):
    export_run(short_run, tracking_uri=uri)
    with mlflow_connection.connected(uri) as client:
        client.delete_experiment(client.get_experiment_by_name("demo").experiment_id)
    with pytest.raises(TrackingError, match="lies in its trash"):
        export_run(short_run, tracking_uri=uri)


@pytest.mark.parametrize("name", ["a b#'c", "100%25", "why?"])
def test_a_runs_folder_of_any_name_holds_its_own_database(name, template, tmp_path):
    folder = tmp_path / name
    copied(template, folder)
    uri = default_tracking_uri(folder, {})
    with mlflow_connection.connected(uri) as client:
        experiment = client.create_experiment("x", artifact_location=artifact_location(uri, "x"))
        (tmp_path / "file").write_text("text")
        client.log_artifact(client.create_run(experiment).info.run_id, tmp_path / "file")
    assert [path.name for path in (folder / "mlflow_artifacts").rglob("file")] == ["file"]


def test_the_command_exports_beside_the_runs(short_run, template):
    uri = copied(template, short_run.root.parent.parent)
    group = Commands("fvc", commands={"export-mlflow": export_mlflow})
    done = CliRunner().invoke(group, ["export-mlflow", str(short_run.root)])
    assert done.exit_code == 0, done.output
    assert "3 runs" in done.output
    assert len(stored(uri)) == 3


def test_a_failing_export_at_a_runs_end_is_a_warning_with_the_command_that_repeats_it(short_run, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://me:pass1@host")
    export_when_asked(short_run, RunConfig(tracker="none"))
    assert capsys.readouterr() == ("", "")
    export_when_asked(short_run, RunConfig(tracker="mlflow"))
    told = capsys.readouterr().err
    assert told.startswith("warning: not exported to MLflow")
    assert f"export-mlflow {short_run.root}" in told
    assert "pass1" not in told


def test_an_export_asks_nobody_outside_and_leaves_nothing_behind(short_run, template, tmp_path):
    uri = copied(template, tmp_path / "store")
    code = f"""
        import socket, sys, threading, warnings
        from pathlib import Path
        def refuse(self, address):
            if self.family != socket.AF_UNIX:
                print("ASKED", address)
                raise OSError("no network")
        socket.socket.connect = refuse
        from fvc_lib.analysis.mlflow.export import export_run
        from fvc_lib.services.run_paths import RunPaths
        assert "mlflow" not in sys.modules and "torch" not in sys.modules
        export_run(RunPaths(Path({str(short_run.root)!r})), tracking_uri={uri!r})
        from mlflow.telemetry.client import get_telemetry_client
        print("telemetry", get_telemetry_client())
    """
    hidden = ("PYTEST_CURRENT_TEST", "CI", "GITHUB_ACTIONS", "MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK")
    environ = {name: value for name, value in os.environ.items() if name not in hidden}
    empty = tmp_path / "empty"
    empty.mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", textwrap.dedent(code)], cwd=empty, text=True,
        capture_output=True, check=False, env={**environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert (done.stdout, done.stderr, done.returncode) == ("telemetry None\n", "", 0)
    assert list(empty.iterdir()) == []
