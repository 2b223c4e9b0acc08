"""Ranks and the process that starts them end together, with the right reason."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fvc_lib.engine.rank_processes import Launch, run_ranks
from fvc_lib.engine.ranks import RankEndedError, RankLostError
from fvc_lib.engine.training_state import NoMetrics
from fvc_lib.services.checkpoint_files import LATEST, PREVIOUS, load_document
from fvc_lib.services.errors import StoppedError
from fvc_lib.tasks.video.training import train_fold
from tests.faults.conftest import STAGE, elsewhere
from tests.kits.engine_kit import Observer
from tests.kits.rank_kit import rank_processes

ROOT = Path(__file__).parents[2]
PROGRAM = "tests.kits.rank_program"
NUM_STEPS = 30
LAUNCHER = """
import sys
from pathlib import Path
from fvc_lib.tasks.video.training import train_fold
from fvc_lib.engine.training_state import NoMetrics
from fvc_lib.services.config import RunConfig
from fvc_lib.services.run_paths import RunPaths
paths, config = RunPaths(Path(sys.argv[1])), RunConfig.model_validate_json(sys.argv[2])
train_fold(paths, config, 0, metric_log=NoMetrics(), progress=lambda done, *_: print(done, flush=True))
"""


def run(tmp_path, *ranks, **options):
    observer = options.pop("memory", None) or Observer()
    run_ranks(PROGRAM, ranks, len(ranks), Launch("{}", str(tmp_path / "ranks.log")), memory=observer, **options)
    return observer


@pytest.mark.slow
def test_ranks_that_wait_for_a_dead_one_are_ended_with_its_reason(tmp_path):
    with pytest.raises(RankEndedError, match=r"rank 1 was killed .*ranks.log"):
        run(tmp_path, "waits", "is killed")
    assert rank_processes(tmp_path / "ranks.log") == {}


@pytest.mark.slow
@pytest.mark.parametrize("listening", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_wish_to_stop_reaches_the_ranks_also_before_they_listen(tmp_path, listening):
    steps = []
    with pytest.raises(StoppedError, match="stopped after step 3"):
        run(
            tmp_path, "stops when asked", stop=lambda: bool(steps) or not listening,
            progress=lambda *step: steps.append(step),
        )  # fmt: skip
    assert steps == [(3, 10, "", "")]
    assert list(tmp_path.glob("*.stop")) == []


SRUN = """#!/bin/sh
# Acts as srun for two tasks on two nodes.
while [ "$1" != "{python}" ]; do shift; done
export SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_STEP_TASKS_PER_NODE="1(x2)"
exec 3<&0
SLURM_PROCID=0 "$@" <&3 & first=$!
SLURM_PROCID=1 "$@"; second=$?
wait $first && exit $second
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "kind"), [("ends", "is killed", RankEndedError), ("loses the others", "fails", RankLostError)]
)
def test_over_several_nodes_srun_starts_the_ranks_and_a_lost_node_is_no_killed_rank(
    tmp_path, monkeypatch, first, second, kind
):
    srun, observer = tmp_path / "srun", Observer()
    srun.write_text(SRUN.format(python=sys.executable))
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    with pytest.raises(kind) as raised:
        run(tmp_path, first, second, memory=observer)
    assert raised.type is kind
    assert [place[0] for place in observer.places] == ["train"]


@pytest.fixture
def two_ranks(tiny_training):
    """Return the small run on two ranks, with a checkpoint after every step."""
    return tiny_training.with_config(
        num_ranks=2, epochs=6, early_stopping_epochs=0, learning_rate=1e-4, memory_preflight=False,
        checkpoint_minutes=0, shuffled_label_control=False,
    )  # fmt: skip


def steps_logged(paths):
    rows = [json.loads(line) for line in paths.metrics(STAGE, 0).read_text().splitlines()]
    return [row["step"] for row in rows if (row["phase"], row["metric"]) == ("train", "loss")]


def metrics_of(paths):
    """Return the logged metrics; lines that two attempts wrote must agree."""
    found = {}
    for row in map(json.loads, paths.metrics(STAGE, 0).read_text().splitlines()):
        key = (row["step"], row["epoch"], row["phase"], row["metric"])
        assert found.setdefault(key, row["value"]) == row["value"], key
    return found


@pytest.mark.long
@pytest.mark.fault(1)
def test_kill_9_of_the_kernel_ends_the_ranks_and_leaves_no_gap_in_the_metric_log(two_ranks, tmp_path):
    """The launcher is suspended before, while the ranks could take steps that it does not hear of."""
    paths, arguments = two_ranks.paths, [str(two_ranks.paths.root), two_ranks.config.model_dump_json()]
    command = [sys.executable, "-c", LAUNCHER, *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as launcher:
        while int(launcher.stdout.readline()) < 3:
            pass
        ranks = rank_processes(paths.logs / f"{STAGE}_fold_0_ranks.log").values()
        assert len(ranks) == 2
        launcher.send_signal(signal.SIGSTOP)
        time.sleep(2)
        launcher.kill()
    assert psutil.wait_procs(ranks, timeout=600)[1] == []
    logged = steps_logged(paths)
    assert logged == list(range(1, len(logged) + 1))
    newest = next(path for name in (LATEST, PREVIOUS) if (path := paths.fold_checkpoints(0) / name).exists())
    saved = load_document(newest, 1)["step"]
    assert 1 <= saved <= logged[-1] <= NUM_STEPS

    whole = elsewhere(two_ranks, tmp_path / "whole" / "run_1")
    for each in (whole, paths):
        outcome = train_fold(each, two_ranks.config, 0, metric_log=NoMetrics(), attempt=2)
    assert steps_logged(whole) == list(range(1, NUM_STEPS + 1))
    assert metrics_of(paths) == metrics_of(whole)
    assert outcome.training.inexact_because == ()
