"""What of an export needs no MLflow."""

import re
import sys

import polars as pl
import pytest
from click.testing import CliRunner

from fvc_lib import CHECKOUT
from fvc_lib.analysis.mlflow.export import (
    MAX_KEY,
    default_tracking_uri,
    export_run,
    key_of,
    run_content,
    shown_uri,
)
from fvc_lib.command_line import commands as mlflow_command
from fvc_lib.command_line.commands import export_mlflow, export_when_asked
from fvc_lib.command_line.main import Commands
from fvc_lib.services.atomic_files import write_text
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError
from fvc_lib.services.tables import RESULTS, read_table, write_table
from tests.analysis.task_runs import write_image_run, write_video_text_run

TRAINING = "04_fold_training"


def test_without_mlflow_the_error_names_the_command_that_installs_it(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UsageError, match=r"make -C .* setup-mlflow"):
        export_run(run, tracking_uri="sqlite:///x.db")


def test_the_default_is_the_variable_or_a_database_beside_the_runs(tmp_path):
    assert default_tracking_uri(tmp_path, {}) == f"sqlite:///{tmp_path}/mlflow.db"
    assert default_tracking_uri(tmp_path, {"MLFLOW_TRACKING_URI": "http://x"}) == "http://x"


def test_an_unknown_run_is_a_usage_error(tmp_path):
    done = CliRunner().invoke(
        Commands("fvc", commands={"export-mlflow": export_mlflow}),
        ["export-mlflow", "no_such_run", "--runs-dir", str(tmp_path)],
    )
    assert done.exit_code == 2


def test_at_a_runs_end_without_mlflow_there_is_a_warning_and_where_it_was_not_asked_for_nothing(
    run, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    export_when_asked(run, RunConfig(tracker="none"))
    assert capsys.readouterr() == ("", "")
    export_when_asked(run, RunConfig(tracker="mlflow"))
    told = capsys.readouterr().err
    assert f"make -C {CHECKOUT} setup-mlflow" in told
    assert f"export-mlflow {run.root}" in told


def test_each_target_of_a_protocol_has_keys_of_its_own_and_a_sweep_goes_along(run):
    results = read_table(run.results, RESULTS)
    one = results.filter(scope="all", source="model").with_columns(scope=pl.lit("target:a & b/c"))
    write_table(pl.concat([results, one]), RESULTS, run.results)
    write_text(run.robustness_results, "level\n")
    whole = run_content(run).whole
    assert "target/a _x26_ b_x2F_c/model/roc_auc" in set(whole.points["key"])
    assert whole.artifacts["tables/robustness_results.csv"] == b"level\n"


def test_an_export_that_is_interrupted_says_that_the_run_has_ended_and_how_to_go_on(run, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(mlflow_command, "_export", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export_when_asked(run, RunConfig(tracker="mlflow"))
    told = capsys.readouterr().err
    assert "the run has ended" in told
    assert f"export-mlflow {run.root}" in told


def test_the_same_run_has_the_same_digest_and_a_changed_one_another(make_run):
    run = make_run()
    first = run_content(run)
    assert run_content(run).digest == first.digest
    run.metrics(TRAINING, 2).write_bytes(b"".join(run.metrics(TRAINING, 2).read_bytes().splitlines(True)[:-1]))
    assert run_content(run).digest != first.digest


def test_there_is_one_point_for_a_key_and_step_and_no_control_on_a_fold(run):
    for content in run_content(run).folds:
        assert not content.points.select("key", "step").is_duplicated().any()
        outer = content.points.filter(pl.col("key").str.starts_with("outer_fold/"))
        assert outer["key"].str.starts_with("outer_fold/model/").all()


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", "a/b", "..", ".", "", "' OR 1=1 --", "line\nbreak", "Ü 你"]
)
def test_a_hostile_name_becomes_one_part_of_a_key(name):
    part, key = key_of(name), key_of("train", name)
    assert key == f"train/{part}"
    assert re.fullmatch(r"[\w.\- ]+", part)
    assert part not in (".", "..")


def test_names_that_are_too_long_stay_apart():
    first, second = key_of("a" * 300), key_of("a" * 299 + "b")
    assert len(first) <= MAX_KEY
    assert first != second
    assert key_of("a" * MAX_KEY) == "a" * MAX_KEY


@pytest.mark.parametrize(
    ("write", "model", "control"),
    [
        (write_image_run, "test/model/all/top1", "test/majority_class/all/top1"),
        (write_video_text_run, "test/model/text_to_video/recall_x40_1", "test/chance/text_to_video/recall_x40_1"),
    ],
)
def test_results_of_a_task_without_folds_stand_beside_their_controls(tmp_path, write, model, control):
    run = write(tmp_path)
    content = run_content(run)
    points = dict(content.whole.points.select("key", "value").iter_rows())
    assert points[f"{model}/low"] <= points[model] <= points[f"{model}/high"]
    assert points[control] < points[model]
    assert not content.folds
    assert b"model" in content.whole.artifacts["tables/task_results.csv"]


def test_passwords_of_a_uri_are_not_shown():
    assert shown_uri("http://me:pw@host:5000/x") == "http://[secret]@host:5000/x"
    assert shown_uri("http://shorttoken@host") == "http://[secret]@host"
    assert shown_uri("sqlite:////a/b.db") == "sqlite:////a/b.db"
