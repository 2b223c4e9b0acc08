"""Exports into MLflow's own SQLite store: real stores, real runs."""

import importlib.util
import itertools
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

import numpy as np
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
from fvc_lib.services.metric_log import MetricLog
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import read_table, write_table
from tests.analysis.mlflow_store import Killed, copied, failing, shorten, stored, stored_run, tiny_network

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
    return Exported(run, report, stored(uri)["runs"])


def test_a_run_becomes_one_run_with_a_nested_one_for_each_fold(exported):
    report, runs = exported.report, exported.runs
    assert report.num_runs == report.new_runs == 6
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


def test_code_and_machine_are_tags(short_run, uri):
    run = short_run
    attempt = {"code": {"commit": "c0ffee", "branch": "main"}, "hardware": {"processor": "Z80", "cores": 2, "gpus": []}}
    run.run_json.write_text(json.dumps({"run_id": run.run_id, "attempts": [attempt]}))
    export_run(run, tracking_uri=uri)
    tags = whole(uri)["tags"]
    assert (tags["mlflow.source.git.commit"], tags["fvc.hardware.processor"]) == ("c0ffee", "Z80")


def killed_everywhere(run, template, folder, monkeypatch, calls):
    undisturbed = copied(template, folder / "undisturbed")
    with failing(monkeypatch, 0) as clients:
        export_run(run, tracking_uri=undisturbed, load_model=tiny_network)
    wanted = stored(undisturbed)
    assert len(wanted["versions"]) == 1
    assert not export_run(run, tracking_uri=undisturbed, load_model=tiny_network).changed
    assert stored(undisturbed) == wanted
    total = clients[0].calls
    for number, after in calls(total):
        place = folder / f"{number}_{after}"
        uri = copied(template, place)
        with failing(monkeypatch, number, after=after), pytest.raises(Killed):
            export_run(run, tracking_uri=uri, load_model=tiny_network)
        export_run(run, tracking_uri=uri, load_model=tiny_network)
        assert stored(uri) == wanted, f"killed {'after' if after else 'before'} call {number} of {total}"
        shutil.rmtree(place)


def test_exporting_again_adds_nothing_and_completes_what_was_killed(short_run, template, tmp_path, monkeypatch):
    # The first calls create, the last ones register.
    def some(total):
        return (4, True), (total - 2, True)

    killed_everywhere(shorten(short_run, 1), template, tmp_path, monkeypatch, some)


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="needs MLflow: make setup-mlflow")
def test_an_export_killed_at_any_call_is_completed_by_the_next(short_run, template, tmp_path, monkeypatch):
    def every(total):
        return itertools.product(range(1, total + 1), (False, True))

    killed_everywhere(short_run, template, tmp_path, monkeypatch, every)


def test_a_run_that_has_grown_is_completed(short_run, template, tmp_path):
    run = short_run
    log, results = run.metrics(TRAINING, 1), run.results
    all_lines, table = log.read_bytes(), results.read_bytes()
    status = run.status_json.read_bytes()
    undisturbed = copied(template, tmp_path / "undisturbed")
    export_run(run, tracking_uri=undisturbed)

    uri = copied(template, tmp_path / "grown")
    log.write_bytes(b"\n".join(all_lines.splitlines()[:40]) + b"\n")
    results.unlink()
    run.status_json.write_text(json.dumps({**json.loads(status), "state": "failed", "finished_utc": None}))
    partial = export_run(run, tracking_uri=uri)
    assert whole(uri)["status"] == "FAILED"
    assert partial.model is None

    log.write_bytes(all_lines)
    results.write_bytes(table)
    run.status_json.write_bytes(status)
    grown = export_run(run, tracking_uri=uri)
    assert (grown.new_runs, grown.changed) == (0, True)
    assert stored(uri) == stored(undisturbed)


def test_a_step_done_again_after_a_kill_is_no_second_point_and_another_value_is_named(short_run, uri):
    export_run(short_run, tracking_uri=uri)
    before = len(fold(uri, 0)["points"])
    first = json.loads(short_run.metrics(TRAINING, 0).read_text().splitlines()[0])
    with MetricLog(short_run.metrics(TRAINING, 0), run_id="x", fold=0, attempt=2) as log:
        log.log(step=1, epoch=0, phase="train", metrics={"loss": first["value"], "learning_rate": 0.5})
    report = export_run(short_run, tracking_uri=uri)
    assert report.new_points == 1
    assert "1 value had been exported before another took its place" in notes(report)
    rates = [p for p in fold(uri, 0)["points"] if p[:2] == ("train/learning_rate", 1)]
    assert len(fold(uri, 0)["points"]) == before + 1
    assert max(rates, key=lambda point: point[2])[3] == "0.5"
    assert not export_run(short_run, tracking_uri=uri).changed


def test_what_is_not_finite_is_a_gap_with_its_steps_named(short_run, uri):
    with MetricLog(short_run.metrics(TRAINING, 0), run_id="x", fold=0) as log:
        for step, value in ((70, math.nan), (71, math.inf), (72, -math.inf)):
            log.log(step=step, epoch=9, phase="train", metrics={"loss": value})
    export_run(short_run, tracking_uri=uri)
    told = fold(uri, 0)
    assert [p[3] for p in told["points"] if p[0] == "train/loss" and p[1] >= 70] == ["nan"] * 3
    assert told["tags"]["fvc.not_finite"] == (
        "train/loss: -inf at step 72; train/loss: inf at step 71; train/loss: nan at step 70"
    )
    assert not export_run(short_run, tracking_uri=uri).changed


def test_what_mlflow_refuses_is_named_and_never_cut(short_run, uri):
    params = {"corpus": "c" * 6001, "n" * 300: 1, "model": "frame_cnn"}
    short_run.params_yaml.write_text(yaml.safe_dump(params))
    with MetricLog(short_run.metrics(TRAINING, 0), run_id="x", fold=0) as log:
        log.log(step=1, epoch=0, phase="train", metrics={"m" * 260: 1.0})
    report = export_run(short_run, tracking_uri=uri)
    assert "parameter 'corpus' was left out: it has 6,001 characters, and MLflow takes 6,000" in notes(report)
    assert f"metric 'train/{'m' * 74}'... is called" in notes(report)
    assert f"parameter '{'n' * 80}'... is called" in notes(report)
    assert "corpus" not in whole(uri)["params"]
    assert sum(key.startswith("train/mmm") for key, *_ in fold(uri, 0)["points"]) == 1


def test_what_a_stricter_server_refuses_is_named_each_time_and_the_rest_is_there(short_run, uri, monkeypatch):
    monkeypatch.setattr("mlflow.utils.validation.MAX_PARAM_VAL_LENGTH", 8)
    for _ in range(2):
        report = export_run(short_run, tracking_uri=uri)
        assert "MLflow refuses the param 'model': 'Param value' exceeds the maximum length of 8" in notes(report)
    params = whole(uri)["params"]
    assert params["num_folds"] == "5"
    assert "model" not in params


def test_a_run_deleted_there_is_exported_anew_with_its_folds_below_it(short_run, uri):
    first = export_run(short_run, tracking_uri=uri)
    with mlflow_connection.connected(uri) as client:
        client.delete_run(first.mlflow_run_id)
    again = export_run(short_run, tracking_uri=uri)
    assert again.new_runs == 1
    assert fold(uri, 1)["parent"] == "run_0"


def test_a_parameter_that_changed_keeps_its_first_value_and_is_named(short_run, uri):
    export_run(short_run, tracking_uri=uri)
    short_run.params_yaml.write_text(short_run.params_yaml.read_text().replace("batch_size: 0", "batch_size: 4", 1))
    report = export_run(short_run, tracking_uri=uri)
    assert "parameter batch_size: MLflow keeps '0'" in notes(report)
    told = whole(uri)
    assert (told["params"]["batch_size"], told["tags"]["fvc.changed.batch_size"]) == ("0", "4")
    assert not export_run(short_run, tracking_uri=uri).changed


def test_hostile_names_are_text(make_run, uri):
    name = "run_'; DROP TABLE runs; -- <b>%\"[x]"
    run = shorten(make_run(experiment="<script>alert('1')</script>:a"[:12] + "'%\"", name=name), 1)
    run.run_json.write_text(json.dumps({"run_id": name}))
    with MetricLog(run.metrics(TRAINING, 0), run_id=name, fold=0) as log:
        log.log(step=1, epoch=0, phase="train", metrics={"<img src=x>\n'": 1.0, "../../x": 2.0})
    for _ in range(2):
        report = export_run(run, tracking_uri=uri, load_model=tiny_network)
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
    report = export_run(run, tracking_uri=uri, load_model=tiny_network)
    assert report.num_runs == 2
    assert "1 line of 2 could not be read" in notes(report)
    assert "No model was registered" in notes(report)
    assert [point[1:] for point in fold(uri, 0)["points"]] == [(1, 0, "1.5")]


def test_secrets_are_neither_exported_nor_said(short_run, uri, monkeypatch):
    monkeypatch.setenv("MY_API_TOKEN", "hunter2hunter2")
    short_run.params_yaml.write_text("corpus: s3://hunter2hunter2/x\n")
    report = export_run(short_run, tracking_uri=uri)
    assert "hunter2" not in json.dumps(stored(uri))
    assert "hunter2" not in "\n".join(report.lines())


def test_a_server_that_is_away_is_said_without_its_password(short_run, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    address = "http://me:pass1@127.0.0.1:9"
    with pytest.raises(TrackingError, match="the same command goes on from there") as caught:
        export_run(short_run, tracking_uri=address)
    assert "pass1" not in str(caught.value)
    assert shown_uri(address) == "http://[secret]@127.0.0.1:9"
    assert shown_uri("postgresql://db/x?password=abc") == "postgresql://db/x?[secret]"


def test_a_folder_is_refused_as_a_store(short_run, tmp_path):
    with pytest.raises(TrackingError):
        export_run(short_run, tracking_uri=(tmp_path / "mlruns").as_uri())


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


def test_the_environment_is_as_before_afterwards(short_run, uri):
    before = dict(os.environ)
    export_run(short_run, tracking_uri=uri)
    assert dict(os.environ) == before


def test_the_fold_with_the_lowest_inner_loss_is_registered_and_says_what_its_number_is_not(run, uri):
    for number in range(5):
        loss = 0.1 if number == 3 else 0.2
        history = [{"epoch": 1, "validation": {"loss": 0.01}}, {"epoch": 2, "validation": {"loss": loss}}]
        run.fold_outcome(number).parent.mkdir(parents=True, exist_ok=True)
        run.fold_outcome(number).write_text(json.dumps({"training": {"best_epoch": 2, "history": history}}))
    report = export_run(run, tracking_uri=uri, load_model=tiny_network)
    assert report.model is not None
    assert (report.model.fold, report.model.name) == (3, "demo")
    ((_, _, tags, description, source),) = stored(uri)["versions"]
    assert (tags["fvc.fold"], tags["fvc.run_id"], source) == ("3", "run_0", "run_0")
    assert "no outer fold took part in the choice" in description
    assert "belongs to no single network" in description


@pytest.fixture
def trained_run(short_run: RunPaths) -> RunPaths:
    """With real weights of the small network for small clips."""
    import torch

    from fvc_lib.detectors.own.video import build_model
    from fvc_lib.services.checkpoints import BEST, write_weights_with_digest
    from fvc_lib.tasks.video.selection import RecordedSelection, Selection, record_selection

    config = RunConfig(experiment="demo", num_frames=2, fixed_size=32, tracker="mlflow")
    short_run.params_yaml.write_text(config.to_yaml())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for number in range(2):
            folder = short_run.fold_checkpoints(number)
            folder.mkdir(parents=True)
            write_weights_with_digest(folder / BEST, build_model("frame_cnn").state_dict(), {})
            chosen = Selection(
                num_epochs=1, best_epoch=1, validation_loss=0.5, prior_logit=1.5, temperature=1.25, log_loss=0.5,
                log_loss_uncalibrated=0.5, threshold=0.5, balanced_accuracy=0.8, num_videos=8, num_groups=4, num_real=4,
                num_fake=4,
            )  # fmt: skip
            record_selection(folder, RecordedSelection(chosen, clips="c", weights="w"))
    return short_run


def run_command(*arguments: str):
    group = Commands("fvc", commands={"export-mlflow": export_mlflow})
    return CliRunner().invoke(group, ["export-mlflow", *arguments])


def test_the_command_exports_and_the_registered_model_gives_the_scores_of_the_network(trained_run, template):
    import torch

    from fvc_lib.command_line.commands import load_fold_network

    runs = trained_run.root.parent.parent
    uri = copied(template, runs)
    done = run_command(str(trained_run.root))
    assert done.exit_code == 0, done.output
    assert "model demo version 1" in done.output
    clip = np.random.default_rng(0).integers(0, 256, (1, 2, 3, 32, 32)).astype(np.uint8)
    with mlflow_connection.connected(uri) as client:
        import mlflow

        version = client.get_model_version("demo", "1")
        model = mlflow.pyfunc.load_model(version.source)
        given = model.predict(clip)
        assert model.metadata.signature.inputs.inputs[0].shape == clip.shape
    network = load_fold_network(trained_run, int(version.tags["fvc.fold"]))
    with torch.inference_mode():
        logit = network.module.network(torch.from_numpy(clip)) + 1.5
    wanted = torch.sigmoid(logit / float(version.tags["fvc.temperature"]))
    np.testing.assert_allclose(given, wanted.numpy(), rtol=1e-6)


def test_a_failing_export_at_a_runs_end_is_a_warning_with_the_command_that_repeats_it(short_run, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://me:pass1@host")
    export_when_asked(short_run, RunConfig(tracker="none"))
    assert capsys.readouterr() == ("", "")
    export_when_asked(short_run, RunConfig(tracker="mlflow"))
    told = capsys.readouterr().err
    assert told.startswith("warning: not exported to MLflow")
    assert f"export-mlflow {short_run.root}" in told
    assert "pass1" not in told


def test_damaged_weights_register_no_model_and_say_so(trained_run, uri):
    from fvc_lib.command_line.commands import load_fold_network
    from fvc_lib.services.checkpoints import BEST

    for number in range(2):
        path = trained_run.fold_checkpoints(number) / BEST
        path.write_bytes(path.read_bytes()[:-3] + b"???")
    report = export_run(trained_run, tracking_uri=uri, load_model=load_fold_network)
    assert report.model is None
    assert "No model was registered" in notes(report)


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


def test_results_that_were_made_again_count_by_their_later_time(short_run, uri):
    export_run(short_run, tracking_uri=uri)
    table = read_table(short_run.results, tables.RESULTS)
    write_table(table.with_columns(pl.col("value") - 0.125), tables.RESULTS, short_run.results)
    export_run(short_run, tracking_uri=uri)
    with mlflow_connection.connected(uri) as client:
        (found,) = client.search_runs(["1"], "attributes.run_name = 'run_0'")
    model = table.filter((pl.col("source") == "model") & (pl.col("scope") == "all") & (pl.col("metric") == "roc_auc"))
    assert found.data.metrics["all/model/roc_auc"] == model["value"][0] - 0.125
