"""The scripts of ``slurm/`` under plain bash, with a program in the place of run_notebooks.py that behaves as told."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fvc_lib import CHECKOUT
from tests.execution.conftest import wait_for

SCRIPTS = sorted((CHECKOUT / "slurm").glob("*.sh"))
# Says how it was called and what it was sent, and leaves as `ends` says: {last word: exit code}. `slow` words wait for
# a signal, and `long` ones of them save until they are let.
PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path

ends, slow, long = json.loads(Path(__file__).with_name("behaviour.json").read_text())
sent = []
def say(text):
    with Path(__file__).with_name("said").open("a") as stream:
        stream.write(text + "\\n")
def wait(ready):
    end = time.monotonic() + 300
    while not ready() and time.monotonic() < end:
        time.sleep(0.02)
say(" ".join(sys.argv[1:]))
def on_signal(number, frame):
    sent.append(number)
    say(signal.Signals(number).name)
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, on_signal)
say("ready")
if sys.argv[-1] in slow:
    wait(lambda: sent)
    if sys.argv[-1] in long:
        wait(Path(__file__).with_name("save").exists)
    time.sleep(0.5)  # a second signal would be noted
    sys.exit(75)
sys.exit(ends.get(sys.argv[-1], 0))
"""


class Home:
    """A checkout's look-alike with the real batch scripts, in a folder whose name needs quoting."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / 'it\'s a "home" $HOME'
        shutil.copytree(CHECKOUT / "slurm", self.folder / "slurm")
        (self.folder / "run_notebooks.py").write_text(PROGRAM)
        self.behave()

    def behave(self, slow: tuple[str, ...] = (), long: tuple[str, ...] = (), **ends: int) -> None:
        (self.folder / "behaviour.json").write_text(json.dumps([ends, slow, long]))

    def let_save(self) -> None:
        (self.folder / "save").touch()

    def said(self) -> list[str]:
        path = self.folder / "said"
        return path.read_text().splitlines() if path.exists() else []

    def calls(self) -> list[str]:
        return [line for line in self.said() if line.startswith("--")]

    def start(self, script: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "FVC_"))}
        return subprocess.Popen(
            ["bash", self.folder / "slurm" / script, *arguments],
            env={**plain, "FVC_PYTHON": sys.executable, **variables},
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str, *arguments: str, **variables: str) -> tuple[int, str]:
        process = self.start(script, *arguments, **variables)
        said = process.communicate(timeout=300)[1]
        return process.returncode, said


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def send(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Send a signal, and wait until the shell has it: it acts on it before its next command."""
    process.send_signal(number)
    wait_for(lambda: not _waits(process.pid, number), "the signal")


def _waits(pid: int, number: signal.Signals) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_is_bash(script):
    subprocess.run(["bash", "-n", script], check=True)


def test_a_new_run_is_one_job_that_goes_on_with_its_own_run_when_it_is_requeued(home, tmp_path):
    copy, runs = tmp_path / "spool" / "slurm_script", tmp_path / "runs"  # as sbatch runs it
    copy.parent.mkdir()
    shutil.copy(home.folder / "slurm" / "pipeline.sh", copy)
    job = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(home.folder), "FVC_RUNS_DIR": str(runs)}
    assert home.run("../../spool/slurm_script", "-p", "corpus", "/a b", **job)[0] == 0
    (runs / "job_7" / "run_1").mkdir(parents=True)
    (runs / "job_7" / "run_1" / "run.json").touch()
    assert home.run("../../spool/slurm_script", "-p", "corpus", "/a b", SLURM_CPUS_PER_TASK="4", **job)[0] == 0
    assert home.run("pipeline.sh")[0] == 0
    assert home.run("pipeline.sh", "-p", "runs_dir", "/c", **job)[0] == 2
    said = [line for line in home.said() if line != "ready"]
    new = "-p corpus /a b --experiment job_7"
    assert said == [new, f"--resume latest {new}", ""]


def test_a_shard_that_was_killed_begins_again_and_what_failed_otherwise_does_not(home):
    home.behave(**{"1/3": 137, "2/3": 2})
    code, said = home.run("shards.sh", "3", "0 1 2", "shard", "/run", "03_augmentation")
    assert code == 137
    calls = [line for line in home.said() if line.startswith("shard")]
    assert calls == [f"shard /run 03_augmentation {each}" for each in ["0/3", *["1/3"] * 8, "2/3"]]
    assert said.count("was killed (137)") == 8
    arguments = ("shards.sh", "3", "0 1 2", "predict", "/run", "/a list.csv", "--shard")
    assert home.run(*arguments, SLURM_ARRAY_TASK_ID="0")[0] == 0
    assert "predict /run /a list.csv --shard 0/3" in home.said()


def test_one_folds_failure_stops_no_other_and_gives_the_exit_code(home):
    home.behave(train_fold_0=137, train_fold_1=1)
    assert home.run("folds.sh", "/run", "train", "0", "1", "2")[0] == 137
    assert len(home.calls()) == 3


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
def test_a_signal_is_passed_on_once_and_waited_for(home, name):
    home.behave(slow=("train_fold_0",), long=("train_fold_0",))
    process = home.start("folds.sh", "/run", "train", "0", "1")
    wait_for(lambda: "ready" in home.said(), "the program")
    process.send_signal(getattr(signal, name))
    wait_for(lambda: name in home.said(), name)
    send(process, signal.SIGTERM)  # the second comes while the first one's wish is being met
    home.let_save()
    assert process.communicate(timeout=300)[0] is None
    assert process.returncode == 75
    assert home.said() == ["--resume /run --tasks train_fold_0", "ready", name]  # and no second fold was begun
