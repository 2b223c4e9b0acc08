"""Exports to MLflow's own SQLite store, and bundles in its model registry."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from fvc_lib import CHECKOUT
from fvc_lib.analysis.mlflow import (
    RunExport,
    TrackingError,
    connected,
    default_tracking_uri,
    fetched_bundle,
    key_of,
    model_and_alias,
    register_bundle,
    run_tags,
    shown_uri,
)
from fvc_lib.command_line import commands
from fvc_lib.command_line.commands import export_when_asked
from fvc_lib.command_line.main import main
from fvc_lib.command_line.models import find_model, load_detector
from fvc_lib.public import Detector
from fvc_lib.services import tables
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import FvcError, UsageError
from fvc_lib.services.records.digests import write_document
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import read_table
from fvc_lib.tasks.bundle import write_bundle
from fvc_lib.tasks.predicting import Standing, predictor_of
from tests.analysis.task_runs import write_image_run, write_video_text_run
from tests.kits.scored_run import trained_run, write_video
from tests.kits.training import draw_clip

TRAINING = "04_fold_training"
needs_mlflow = pytest.mark.mlflow


# --- What is exported, without MLflow


def read(run: RunPaths) -> RunExport:
    export = RunExport(run, "")
    export.read()
    return export


def test_every_metric_line_and_result_is_a_point(run):
    points = {(key, step): (time, value) for key, step, time, value in read(run).points}
    for line in map(json.loads, run.metrics(TRAINING, 3).read_text().splitlines()):
        key = (f"fold_3/{line['phase']}/{line['metric']}", line["step"])
        assert points[key] == (round(line["ts"] * 1000), line["value"])
    for row in read_table(run.results, tables.RESULTS).filter(scope="all").iter_rows(named=True):
        key = f"all/{row['source']}/{row['metric']}"
        values = [points[name, 0][1] for name in (key, f"{key}/low", f"{key}/high")]
        assert values == [row["value"], row["low"], row["high"]]
    assert ("fold_0/model/roc_auc", 0) in points


@pytest.mark.parametrize(
    ("write", "model", "control"),
    [
        (write_image_run, "test/model/all/top1", "test/majority_class/all/top1"),
        (write_video_text_run, "test/model/text_to_video/recall_x40_1", "test/chance/text_to_video/recall_x40_1"),
    ],
)
def test_results_of_a_task_without_folds_stand_beside_their_controls(tmp_path, write, model, control):
    content = read(write(tmp_path))
    points = {key: value for key, _, _, value in content.points}
    assert points[f"{model}/low"] <= points[model] <= points[f"{model}/high"]
    assert points[control] < points[model]
    assert "model" in content.tables["task_results"].frame["source"]


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "a/b", "..", "", "' OR 1=1 --", "line\nbreak", "Ü 你"])
def test_a_hostile_name_becomes_one_part_of_a_key(name):
    part = key_of(name)
    assert key_of("train", name) == f"train/{part}"
    assert re.fullmatch(r"[\w.\- ]+", part)
    assert part != ".."


def test_where_the_store_is_and_that_no_password_is_shown(tmp_path):
    assert default_tracking_uri(tmp_path, {}) == f"sqlite:///{tmp_path}/mlflow.db"
    assert shown_uri("http://me:pw@host:5000/x") == "http://[secret]@host:5000/x"
    assert shown_uri("http://shorttoken@host") == "http://[secret]@host"


def test_without_mlflow_a_runs_end_has_a_warning(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    export_when_asked(run, RunConfig(tracker="none"))
    assert capsys.readouterr() == ("", "")
    (tmp_path / "mlflow.py").write_text("raise ModuleNotFoundError(name='mlflow')")
    monkeypatch.syspath_prepend(tmp_path)
    export_when_asked(run, RunConfig(tracker="mlflow"))
    shown = capsys.readouterr().err
    assert f"make -C {CHECKOUT} setup-mlflow" in shown
    assert f"export {run.root} --format mlflow" in shown


def test_an_export_without_the_runs_model_says_why(run, capsys):
    commands._export(SimpleNamespace(run=run, finish=lambda bundle: [f"exported with {bundle}"]))
    first, why = capsys.readouterr().out.splitlines()
    assert first == "exported with None"
    assert why.startswith("  without its model: ")
    assert run.run_id in why


def test_a_command_that_cannot_be_meant_is_a_usage_error(tmp_path):
    assert model_and_alias("news@champion") == ("news", "champion")
    assert model_and_alias("news") == ("news", "")
    for arguments in (["no_such_run"], ["a", "b", "--register", "news"], ["latest", "--register", "a/b@c"]):
        done = CliRunner().invoke(main, ["export", "--format", "mlflow", *arguments, "--runs-dir", str(tmp_path)])
        assert done.exit_code == 2
    with pytest.raises(UsageError, match="there is no MLflow store"):
        fetched_bundle("models:/news@x", tracking_uri=default_tracking_uri(tmp_path, {}), cache_dir=tmp_path / "cache")
    assert not list(tmp_path.iterdir())


# --- A real store


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty store: creating one takes two seconds."""
    database = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    with connected(f"sqlite:///{database}") as client:
        client.search_experiments()
    return database


@pytest.fixture
def uri(template: Path, tmp_path: Path) -> str:
    (tmp_path / "store").mkdir()
    shutil.copy(template, tmp_path / "store" / "mlflow.db")
    return f"sqlite:///{tmp_path / 'store' / 'mlflow.db'}"


def stored(uri: str) -> list[dict[str, Any]]:
    """All runs outside the trash: names, states, parameters, tags, points, and paths of artifacts."""
    found = []
    with connected(uri) as client:
        for experiment in client.search_experiments():
            for run in client.search_runs([experiment.experiment_id]):
                points = sum(len(client.get_metric_history(run.info.run_id, key)) for key in run.data.metrics)
                artifacts = {entry.path for entry in client.list_artifacts(run.info.run_id)}
                found.append(
                    {"experiment": experiment.name, "name": run.info.run_name, "status": run.info.status,
                     "params": run.data.params, "tags": run.data.tags, "metrics": run.data.metrics, "points": points,
                     "artifacts": artifacts}
                )  # fmt: skip
    return found


@needs_mlflow
def test_a_run_is_logged_while_it_works_and_gets_its_model_at_the_end(scored, tmp_path, monkeypatch, capsys):
    shutil.copytree(scored.root, root := tmp_path / "runs" / "news" / scored.run_id)
    run = RunPaths(root)
    lines = (log := run.metrics(TRAINING, 0)).read_text().splitlines(keepends=True)
    log.write_text("".join(lines[: len(lines) // 2]))
    monkeypatch.setattr(commands, "refuse_damaged", lambda _: None)  # the log below is not the one of the run's record
    store = default_tracking_uri(tmp_path / "runs", {})
    looks = []

    def look(*_: object) -> list[list[Any]]:
        if looks:  # the state after the first update
            looks.extend(stored(store))
            log.write_text("".join(lines))
        looks.append({})
        return [looks[2:]]

    monkeypatch.setattr(commands, "select", SimpleNamespace(select=look))
    commands.follow_until_closed(str(run.root))
    half = looks[1]
    (whole,) = stored(store)
    assert half["status"] == "RUNNING"
    assert 0 < half["points"] < whole["points"]
    assert whole["points"] == len(read(run).points)
    assert {"model", "tables"} <= whole["artifacts"]
    assert "in place of" not in capsys.readouterr().out


@needs_mlflow
def test_the_store_holds_the_whole_content_once_however_often_it_is_exported(run, uri):
    content = read(run)
    assert "in place of" not in RunExport(run, uri).finish()[0]
    (first,) = stored(uri)
    assert (first["experiment"], first["name"], first["status"]) == ("demo", content.run_id, "FINISHED")
    assert first["params"] == dict(content.tables["parameters"].frame.select("parameter", "value").iter_rows())
    assert run_tags(content.headline, content.record).items() <= first["tags"].items()
    assert first["points"] == len(content.points)
    assert {"params.yaml", "run.json", "tables"} <= first["artifacts"]
    run.params_yaml.write_text(run.params_yaml.read_text().replace("batch_size: 0", "batch_size: 4", 1))
    assert "in place of 1 earlier export" in RunExport(run, uri).finish()[0]
    (second,) = stored(uri)
    assert second["params"]["batch_size"] == "4"


@needs_mlflow
def test_a_store_that_cannot_be_reached_is_an_error_without_its_password(run, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(TrackingError) as refused:
        RunExport(run, "http://me:secret-word@127.0.0.1:9").finish()
    assert "secret-word" not in str(refused.value)
    with pytest.raises(TrackingError):
        RunExport(run, "sqlite:////proc/nowhere/mlflow.db").finish()


# --- The model registry

STANDING = Standing(standing="not shown", sentences=["Nothing is shown of the model."], scores=[])


@pytest.fixture(scope="module")
def scored(tmp_path_factory) -> RunPaths:
    made = trained_run(tmp_path_factory.mktemp("registry"))
    write_document(made.run_json, {})
    return made


@pytest.fixture(scope="module")
def bundles(scored, tmp_path_factory) -> list[Path]:
    """Two of other content."""
    folder = tmp_path_factory.mktemp("bundles")
    for name in ("first", "second"):
        write_bundle(predictor_of(scored, STANDING), folder / name, f"{name}\n")
    return [folder / "first", folder / "second"]


@pytest.fixture(scope="module")
def store(scored, bundles) -> str:
    """Both bundles as versions of one model."""
    uri = default_tracking_uri(scored.root.parent.parent, {})
    made = [
        register_bundle(bundle, "news", alias, experiment="default", run_id=scored.run_id, tracking_uri=uri)
        for bundle, alias in ((bundles[0], "champion"), (bundles[1], "challenger"))
    ]
    assert made == ["1", "2"]
    return uri


@pytest.fixture
def here(scored, store, tmp_path, monkeypatch) -> Path:
    """The runs folder as a command finds it; a cache of its own."""
    monkeypatch.setenv("FVC_RUNS_DIR", str(scored.root.parent.parent))
    monkeypatch.setenv("FVC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return scored.root.parent.parent


@needs_mlflow
def test_a_registered_model_scores_as_its_run_also_as_a_pyfunc_model(scored, here, store, tmp_path):
    write_video(tmp_path / "new.mp4", draw_clip("unknown", 0, fake=True))
    asked = [tmp_path / "new.mp4", tmp_path / "missing.mp4"]
    by_run, by_alias, by_version = (
        Detector(load_detector(model)).predict(asked).select("path", "score", "failure")
        for model in (scored.root, "models:/news@champion", "models:/news/2")
    )
    assert by_run.equals(by_alias)
    assert by_run.equals(by_version)
    assert by_alias["score"][0] is not None
    assert (find_model(here, "models:/news@champion") / "README.md").read_text() == "first\n"
    assert (find_model(here, "models:/news@challenger") / "README.md").read_text() == "second\n"
    with connected(store) as client:
        source = client.get_model_version("news", "1").source
        (row,) = sys.modules["mlflow"].pyfunc.load_model(source).predict([str(asked[0])])
    assert row["score"] == by_run["score"][0]


@needs_mlflow
def test_a_fetched_bundle_is_whole_or_refused(here, store, tmp_path):
    folder = find_model(here, "models:/news@champion")
    assert folder.is_relative_to(tmp_path / "cache")
    weights = folder / "model" / "fold_0.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UsageError, match=r"fold_0.safetensors' is missing, damaged or foreign"):
        load_detector("models:/news@champion")
    shutil.rmtree(folder)
    with connected(store) as client:
        source = Path(client.get_model_version("news", "1").source.removeprefix("file://"))
    (digests,) = source.glob("data/*/digests.json")
    kept = digests.read_text()
    digests.write_text(json.dumps({"files": {}}))
    try:
        with pytest.raises(UsageError, match=r"bundle .*registered_models"):
            load_detector("models:/news@champion")
    finally:
        digests.write_text(kept)


@needs_mlflow
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("models:/news", "wanted models:/NAME@ALIAS"),
        ("models:/../x@y", "wanted models:/NAME@ALIAS"),
        ("models:/news@nobody", "nobody"),
        ("models:/news/9", "news"),
        ("models:/foreign/1", "is no bundle that export registered"),
    ],
)
def test_a_model_that_the_registry_lacks_is_an_error(here, store, name, why):
    if "foreign" in name:
        with connected(store) as client:
            client.create_registered_model("foreign")
            client.create_model_version("foreign", f"{client.get_model_version('news', '1').source}/data")
    with pytest.raises(FvcError, match=why):
        load_detector(name)


# --- A server


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Its address; backed by SQLite, files through the server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [
        sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{tmp_path / 'server.db'}",
        "--artifacts-destination", str(tmp_path / "server_artifacts"),
    ]  # fmt: skip
    # Without its job runners: seven processes more, for what is not asked here.
    environ = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    process = subprocess.Popen(command, cwd=tmp_path, env=environ, start_new_session=True)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "8")  # until it listens
    yield address
    os.killpg(process.pid, signal.SIGKILL)  # its workers too; it is the leader of a group of its own
    process.wait()


@pytest.mark.mlflow
@pytest.mark.slow
def test_a_server_receives_what_a_database_does_and_nothing_twice(server, make_run, tmp_path):
    run = make_run(experiment="it's <b>100%<")
    database = f"sqlite:///{tmp_path / 'local' / 'mlflow.db'}"
    (tmp_path / "local").mkdir()
    for uri in (server, server, database):
        RunExport(run, uri).finish()
    (on_server,) = stored(server)
    assert any((tmp_path / "server_artifacts").rglob("results.csv"))
    assert stored(database) == [on_server]
