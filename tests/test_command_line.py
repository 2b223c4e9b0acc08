"""``run_notebooks.py`` as it is typed: what it lists, plans and refuses, and that refusing writes nothing."""

import json
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from fvc_lib.command_line.main import main
from fvc_lib.command_line.run_command import trouble_of_choice
from fvc_lib.execution.run.record import begin_run
from fvc_lib.services.config import RunConfig
from fvc_lib.services.parameters import resolve_config

ROOT = Path(__file__).parents[1]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_command_teaches_by_an_example():
    listed = CliRunner().invoke(main, ["--help"]).stdout.split("Commands:")[1]
    names = re.findall(r"^  ([a-z-]+)  ", listed, re.MULTILINE)
    assert 10 < len(names) <= 16
    for name in names:
        shown = CliRunner().invoke(main, [name, "--help"])
        assert shown.exit_code == 0
        assert f"    fvc {name}" in shown.stdout or f"  fvc {name}" in shown.stdout, name


def test_answers_are_json_where_scripts_ask_for_it(tmp_path):
    for label in ("real", "fake"):
        (tmp_path / label).mkdir()
        (tmp_path / label / f"{label}.mp4").write_bytes(b"not opened here")
    run = begin_run(RunConfig(runs_dir=str(tmp_path / "runs")), command="test")
    asked = (["status", str(run.root)], ["corpora"], ["detectors", "frame_cnn"])
    found = {}
    for arguments in asked:
        done = CliRunner().invoke(main, [*arguments, "--json"])
        assert done.exit_code == 0, done.stderr
        found[arguments[0]] = json.loads(done.stdout)
    assert found["status"]["run"] == run.run_id
    assert found["status"]["state"] == "interrupted"
    assert {"licence", "fetch"} <= found["corpora"][0].keys()
    assert found["detectors"][0]["num_parameters"] == 11_937
    done = CliRunner().invoke(main, ["corpora", str(tmp_path), "--json"])
    assert json.loads(done.stdout)["counts"]["label"] == {"fake": 1, "real": 1}


@pytest.mark.parametrize("spelled", [["-p", "num_folds", "3"], ["-p", "num_folds=3"], ["-r", "num_folds", "3"],
                                     ["-y", "{num_folds: 3}"], ["--parameters_file", "three.yaml"]])  # fmt: skip
def test_parameters_have_the_spellings_of_papermill(tmp_path, monkeypatch, spelled):
    monkeypatch.chdir(tmp_path)
    Path("three.yaml").write_text("num_folds: 3")
    done = CliRunner().invoke(main, ["--dry-run", "-p", "runs_dir", str(tmp_path), *spelled])
    assert done.exit_code == 0, done.stderr
    assert "fold_2" in done.stdout
    assert "fold_3" not in done.stdout


NAMES = ("\x1b[31mred", "up\x1b[1A\x1b[2K", "a\nerror: b", "\u202eedoc", "c\x9b1A", "d\rerased", "e\u2028f", "g\x07")


@pytest.mark.parametrize("name", NAMES)
def test_control_characters_of_names_do_nothing_on_a_terminal(tmp_path, monkeypatch, name):
    monkeypatch.setenv("FVC_RUNS_DIR", str(tmp_path / f"runs {name.splitlines()[0]}"))
    folder = tmp_path / name
    folder.mkdir()
    (folder / f"{name}.csv").write_text("path;label;path\n")
    asked = (["corpora", str(folder)], ["corpora", str(folder / f"{name}.csv")], ["audit", str(folder / f"{name}.csv")],
             ["status"], ["-p", "corpus", str(folder), "--dry-run"], ["predict", name, name], [name])  # fmt: skip
    for arguments in asked:
        done = CliRunner().invoke(main, arguments, color=True)
        assert done.exit_code in {1, 2, 3}, arguments
        shown = done.stdout + done.stderr
        assert [char for char in shown if not char.isprintable() and char != "\n"] == [], shown
        assert len([line for line in shown.splitlines() if line.startswith("error: ")]) <= 1, shown


@pytest.mark.usefixtures("warm_workers")
def test_a_dry_run_shows_the_plan_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"runs_dir": str(tmp_path / "runs"), "num_folds": 3}
    begin_run(RunConfig(**given), command="test")
    before = contents(tmp_path)
    values = [text for name, value in given.items() for text in ("-p", name, str(value))]
    done = CliRunner().invoke(main, ["--dry-run", *values])
    assert done.exit_code == 0, done.stderr
    assert "04_fold_training_fold_2" in done.stdout
    assert "04_fold_training_fold_3" not in done.stdout
    assert "new run" in done.stdout
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ""),
        ({"model": "frame_cnn"}, ""),
        ({"model_weights": "absent.pth"}, "absent.pth"),
        ({"model": "efficientnet_lite0", "tune": "last:99"}, "last:99"),
        ({"model": "frame_cnn", "head": "gru"}, "frame_cnn"),
        pytest.param({"model": "dinov2_small", "tune": "head"}, "dinov2_small", marks=pytest.mark.slow),
        ({"mixup_alpha": 0.4}, "mix"),
        ({"freeze_backbone_epochs": 2}, "freeze_backbone_epochs"),
        ({"model": f"{__file__}:Broken"}, "TypeError"),
    ],
)
def test_a_choice_that_no_training_could_be_built_of_is_found_before_a_run_begins(given, words):
    found = trouble_of_choice(resolve_config(given, environ={}).model_dump(mode="json"))
    assert words in found
    assert bool(words) == bool(found)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("nn.Linear(3, 1)(frames.float().mean((1, 3, 4))).squeeze(1)", ""),
        ("nn.Linear(3, 1)(frames.float().mean((1, 3, 4)))", "(2, 1)"),
        ("nn.Linear(3, 1)(frames[:, 0, :, 0, 0])", "uint8"),
        ("nn.Linear(4, 1)(frames.float().mean((1, 3, 4)))", "RuntimeError"),
        ("frames.float().cuda('nowhere')", ""),
        ("frames.float().mean((3, 4))\n    num_features = 3", ""),
        ("frames.float().mean((3, 4))\n    num_features = 5", "RuntimeError"),
    ],
)
def test_what_an_own_network_gives_of_two_clips_is_found_out_before_a_run_begins(tmp_path, code, words):
    head = "from torch import nn\n\nclass Net(nn.Module):\n    num_frames, side = 3, 8\n"
    (tmp_path / "net.py").write_text(f"{head}    def forward(self, frames):\n        return {code}\n")
    config = resolve_config({"model": f"{tmp_path / 'net.py'}:Net", "num_frames": 0, "fixed_size": 0}, environ={})
    found = trouble_of_choice(config.model_dump(mode="json"))
    assert words in found
    assert bool(words) == bool(found)


class Broken:
    num_frames = 2

    def __init__(self) -> None:
        raise TypeError("wants a colour")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-p", "epoch", "3"], "epochs"),
        (["--executor", "slurm", "-p", "use_mlops_pipeline", "false"], "USE_MLOPS_PIPELINE"),
        (["-p", "epochs", "three"], "epochs"),
        (["-y", "[1"], "YAML"),
        (["-f", "absent.yaml"], "absent.yaml"),
        (["--only", "99"], "99"),
        (["--only", "01", "--from", "02"], "--from"),
        (["--fork"], "--resume RUN --fork"),
        (["--resume", ""], "got nothing"),
        (["--only", ""], "got nothing"),
        (["--from", ""], "got nothing"),
        (["--resume", "latest", "--tasks", ""], "got nothing"),
        (["--resume", "latest"], "params/demo.yaml"),
        (["-p", "corpus", "absent"], "absent"),
        (["-p", "task", "image", "-p", "corpus", "absent"], "absent"),
        (["--experiment", "../elsewhere"], "experiment: got '../elsewhere'"),
        (["--dry-run", "-p", "runs_dir", __file__], __file__),
        (["my list.csv"], "run_notebooks.py -p corpus 'my list.csv'"),
        (["0.tar", "1.tar"], "several tars: 'a/{0..9}.tar'"),
        (["-p", "corpus", "t-{0..2}.tar"], "t-{0..2}.tar"),
        (["reprot"], "report"),
        (["--corpus", "list.csv"], "-p corpus VALUE"),
        (["--batch-size=3"], "-p batch_size VALUE"),
    ],
)
def test_what_cannot_be_meant_exits_2_before_anything_is_written(tmp_path, monkeypatch, arguments, words):
    """In this process: a new one for each spends seconds on imports."""
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, arguments, env={"FVC_RUNS_DIR": str(tmp_path / "runs")})
    assert done.exit_code == 2, done.stderr
    assert words in done.stderr
    assert isinstance(done.exception, SystemExit)  # anything else would be a traceback
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("programs", "named"), [((), "squeue"), (("sbatch", "squeue"), "squeue")])
def test_no_run_begins_that_would_wait_for_a_cluster_that_does_not_answer(tmp_path, monkeypatch, programs, named):
    work, tools = tmp_path / "work", tmp_path / "tools"
    for folder in (work, tools):
        folder.mkdir()
    for name in programs:
        (tools / name).write_text("#!/bin/sh\nexit 1\n")
        (tools / name).chmod(0o755)
    monkeypatch.chdir(work)
    here = {"FVC_RUNS_DIR": str(work / "runs"), "PATH": f"{tools}:/usr/bin:/bin" if programs else str(tools)}
    done = CliRunner().invoke(main, ["--executor", "slurm"], env=here)
    assert done.exit_code == 2
    assert named in done.stderr
    assert list(work.iterdir()) == []


def test_targets_that_are_no_names_of_the_corpora_are_refused_before_a_run_begins(tmp_path, monkeypatch):
    for name in ("faces", "others"):
        for label in ("real", "fake"):
            (tmp_path / name / label).mkdir(parents=True)
            (tmp_path / name / label / f"{name}.mp4").write_bytes(b"not opened here")
    before = contents(tmp_path)
    asked = ["corpus", "faces", "-p", "more_corpora", "others", "-p", "protocol", "cross_corpus"]
    monkeypatch.chdir(tmp_path)
    here = {"FVC_RUNS_DIR": str(tmp_path / "runs"), "FVC_CACHE_DIR": str(tmp_path / "cache")}
    command = ["--dry-run", "-p", *asked, "-p", "target_corpora", "other"]
    done = CliRunner().invoke(main, command, env=here)
    assert done.exit_code == 2, done.stderr
    assert "target_corpora: 'other' is none of this run's corpora. Did you mean 'others'?" in done.stderr
    assert contents(tmp_path) == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_a_signal_while_libraries_load_gives_the_documented_code(tmp_path, number, code):
    """The first library of ours to be loaded waits for the signal."""
    package = tmp_path / "fvc_lib/command_line"
    package.mkdir(parents=True)
    (package / "main.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(600)\n")
    real = ("__init__.py", "command_line/__init__.py", "command_line/program.py", "command_line/signals.py")
    for name in ("run_notebooks.py", *(f"fvc_lib/{name}" for name in real)):
        (tmp_path / name).write_text((ROOT / name).read_text())
    at_work = subprocess.Popen([sys.executable, tmp_path / "run_notebooks.py"], stdout=subprocess.PIPE, text=True)
    assert at_work.stdout.readline() == "loading\n"
    at_work.send_signal(number)
    assert at_work.communicate()[0] == ""
    assert at_work.returncode == code


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [(MemoryError(), 137, "Memory ran out in this process"), (KeyError("odd"), 1, "This is a defect of FVC")],
)
def test_an_unforeseen_error_is_three_lines_and_a_file(monkeypatch, tmp_path, error, code, words):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr("fvc_lib.command_line.run_command.RunCommand.__init__", fail)
    done = CliRunner().invoke(main, ["--dry-run"])
    assert done.exit_code == code
    lines = done.stderr.partition("error: ")[2].splitlines()  # a warning of the parameters came before
    assert len(lines) == 3
    assert lines[0].startswith(f"{type(error).__name__}: ")
    assert words in lines[2]
    assert "Traceback" in Path(lines[1].removeprefix("The whole traceback: ")).read_text()
