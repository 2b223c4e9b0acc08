"""Ranks and whoever launched them: they end together, with the right reason, and what is saved has been logged."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from multiprocessing.connection import Client
from pathlib import Path

import psutil
import pytest

from fvc_lib.engine.distributed import reports as reports_module
from fvc_lib.engine.distributed.launch import _BEGIN, _reason, _run_step, run_ranks
from fvc_lib.engine.distributed.ranks import RankEndedError, RankFailedError, RankLostError
from fvc_lib.engine.distributed.reports import Launch, RankReports, ReportReader
from fvc_lib.engine.training_state import NoMetrics
from fvc_lib.services.checkpoint_files import LATEST, load_document
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, StoppedError, UsageError
from fvc_lib.services.memory.policy import DeviceMemory
from fvc_lib.services.stage_logs import MetricLog
from fvc_lib.tasks.video.training import train_fold
from tests.faults.conftest import STAGE, elsewhere
from tests.faults.forked import run as run_child
from tests.kits.engine_kit import Observer

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
train_fold(paths, config, 0, metric_log=NoMetrics(), progress=lambda done, planned: print(done, flush=True))
"""


def run(tmp_path, *ranks, **options):
    observer = options.pop("memory", None) or Observer()
    run_ranks(PROGRAM, ranks, RunConfig(num_ranks=len(ranks)), tmp_path / "ranks.log", memory=observer, **options)
    return observer


def ranks_below(pid, module="fvc_lib.tasks.rank"):
    return [child for child in psutil.Process(pid).children(recursive=True) if module in child.cmdline()]


def test_the_ranks_end_together_with_the_reason_of_the_one_that_was_killed(tmp_path):
    with pytest.raises(RankLostError, match=r"rank 1 was ended by SIGKILL .*ranks.log"):
        run(tmp_path, "waits", "is killed")
    assert ranks_below(os.getpid(), PROGRAM) == []


@pytest.mark.long
def test_a_wish_to_stop_is_passed_on_once_all_ranks_listen(tmp_path):
    listening = []

    def stop():
        listening[:] = ranks_below(os.getpid(), PROGRAM)
        return len(listening) == 2 and all(_handles(rank.pid, signal.SIGUSR1) for rank in listening)

    with pytest.raises(StoppedError, match=r"stopped after step 3|before the ranks had met"):
        run(tmp_path, "stops when asked", "stops when asked", stop=stop)


def _handles(pid, number):
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.long
def test_an_error_in_the_launching_process_ends_the_ranks_and_comes_out(tmp_path):
    class Full(Observer):
        def at(self, phase, **place):
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        run(tmp_path, "waits", "waits", memory=Full())
    assert ranks_below(os.getpid(), PROGRAM) == []


@pytest.mark.parametrize(
    ("reasons", "codes", "kind"),
    [
        ({0: ("RankLostError", "gone"), 1: ("DataError", "broken")}, {0: 1, 1: 3}, DataError),
        ({0: ("StoppedError", "stopped"), 1: ("DataError", "broken")}, {0: 75, 1: 3}, DataError),
        ({0: ("StoppedError", "stopped"), 1: ("StoppedError", "stopped")}, {0: 75, 1: 75}, StoppedError),
        ({1: ("ZeroDivisionError", "division by zero")}, {1: 1, 0: -15}, RankFailedError),
        ({0: ("MemoryExhaustedError", "one sample alone does not fit")}, {0: 1, 1: -15}, None),
        ({0: ("RankLostError", "gone")}, {1: -9, 0: 1}, RankEndedError),
        ({0: ("RankLostError", "gone"), 1: ("RankLostError", "gone")}, {1: 1, 0: 1}, RankLostError),
        ({}, {1: 1, 0: -15}, RankEndedError),
        ({}, {1: -15, 0: -15}, StoppedError),
        ({}, {0: -40}, RankEndedError),  # a signal without a name
    ],
)
def test_the_reason_is_that_of_the_rank_that_knows_it(reasons, codes, kind):
    error = _reason(reasons, codes, Path("ranks.log"))
    assert type(error).__name__ == (kind.__name__ if kind else "MemoryExhaustedError")


def test_a_rank_that_nccl_s_watchdog_aborted_has_lost_the_others(tmp_path):
    log = tmp_path / "ranks.log"
    log.write_text("[W] ProcessGroupNCCL.cpp:4715] using GPU 0 as the device\nterminate called: 'std::bad_alloc'\n")
    assert type(_reason({}, {1: -6, 0: -15}, log)) is RankEndedError
    log.write_text("[E] ProcessGroupNCCL.cpp:2057] [Rank 1] Process group watchdog thread terminated with exception\n")
    assert type(_reason({}, {1: -6, 0: -15}, log)) is RankLostError
    assert type(_reason({}, {1: -6, 0: -15}, log, said_before=log.stat().st_size)) is RankEndedError


@pytest.mark.parametrize(("code", "told"), [(253, "SIGKILL"), (137, "SIGKILL"), (168, "{0: 168}"), (255, "{0: 255}")])
def test_what_srun_leaves_with_names_the_signal_where_there_was_one(tmp_path, monkeypatch, code, told):
    srun = tmp_path / "srun"
    srun.write_text(f"#!/bin/sh\nexit {code}\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    error = _reason({}, _run_step(2, 2, tmp_path / "ranks.log", []), tmp_path / "ranks.log")
    assert type(error) is RankEndedError
    assert told in str(error)


@pytest.mark.parametrize(
    "said", [b"[" * 60_000, b'[0, "hello", ["another\'s", "elsewhere"]]', b'[[], "hello", [1, 2]]']
)
def test_what_a_stranger_says_is_neither_used_nor_an_error(said):
    with socket.create_server(("127.0.0.1", 0)) as listening, Client(listening.getsockname()) as stranger:
        reader = ReportReader(listening, "a token", 1, Observer(), None)
        stranger.send_bytes(said)
        reader.take(5)
        reader.take(5)
        assert (reader.nodes, reader.gone, reader.ended()) == ({}, {}, [])
        with pytest.raises((EOFError, OSError)):
            stranger.recv_bytes()


def test_rank_0_reports_all_and_another_rank_what_happened_to_it_alone(tmp_path):
    class WithDevice(Observer):
        def watch_device(self, device, probe):
            self.events.append((device, probe()))

    observer = WithDevice()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        launch = Launch("", listening.getsockname()[1], "a token", "", 1, 0)
        reader = ReportReader(listening, launch.token, 2, observer, None)
        RankReports(0, replace(launch, token="another's")).event("policy", "of nobody's asking")
        for rank in (0, 1):
            reports = RankReports(rank, launch)
            reports.watch_device("cuda:0", lambda: DeviceMemory(1, 2, 3, 4, 5))
            reports.at("train", epoch=1)
            reports.event("policy", "as planned")
            reports.event("out_of_memory", "é" * 9_999, micro_batch=4, samples="é" * 9_999)
            reports.failed(DataError("x" * 100_000))
            while reader.take(0.1):
                pass
            if rank == 0:
                reports.close()
    assert [place[0] for place in observer.places] == ["train"]
    assert [kind for kind, _ in observer.events] == ["cuda:0", "policy", "out_of_memory", "out_of_memory"]
    assert observer.events[0][1] == DeviceMemory(1, 2, 3, 4, 5)
    assert [len(reader.reasons[rank][1]) for rank in (0, 1)] == [4096, 4096]
    reader.close()
    reports.event("out_of_memory", "again")  # nobody listens any more, which is no error of the rank
    reports.close()


def test_a_rank_on_another_node_is_silent_or_has_ended_or_never_came():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        launch = Launch("", listening.getsockname()[1], "a token", "", 1, 0)
        reader = ReportReader(listening, launch.token, 5, Observer(), None)
        silent, killed, failed, done = (RankReports(rank, launch) for rank in range(4))
        failed.failed(DataError("no clips"))
        done.close()
        del failed, done
        while len(reader.nodes) < 4 or reader.take(0):
            reader.take(0.01)
        assert (reader.silent(), reader.ended()) == ([], [])
        del killed
        reader.take(5)
        assert (reader.silent(), reader.ended()) == ([], [])
        reader._now += reports_module._SILENT_SECONDS + 1
        assert (reader.silent(), reader.ended()) == ([], [1])  # it may still import torch
        silent.ready()
        reader.take(5)
        reader._now += reports_module._SILENT_SECONDS + 1
        assert (reader.silent(), reader.ended()) == ([0], [1, 4])
        silent.at("train")
        reader.take(5)
        assert (reader.silent(), reader.ended()) == ([], [1, 4])
        reader.close()


@pytest.mark.parametrize("start_seconds", [5.0, 40.0, 900.0])
def test_a_rank_is_waited_for_as_long_as_the_site_says_until_it_is_ready(start_seconds):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        launch = Launch("", listening.getsockname()[1], "a token", "", 1, 0)
        reader = ReportReader(listening, launch.token, 2, Observer(), None, start_seconds)
        importing = RankReports(0, launch)
        while not reader.nodes:
            reader.take(0.01)
        before = reader._now
        reader._now = before + start_seconds
        assert (reader.silent(), reader.ended()) == ([], [])
        reader._now = before + max(start_seconds, reports_module._SILENT_SECONDS) + 1
        assert (reader.silent(), reader.ended()) == ([0], [1])
        importing.close()
        reader.close()


SRUN = """#!/bin/sh
# As srun for two tasks on two nodes, of which the second begins late: {late}
while [ "$1" != "{python}" ]; do shift; done
SLURM_PROCID=0 "$@" & first=$!
{late}
SLURM_PROCID=1 "$@"; second=$?
wait $first && exit $second
"""


def late_second_rank(tmp_path, monkeypatch, late, seconds):
    """Two ranks over two nodes, simulated: only who starts them is not SLURM's."""
    srun = tmp_path / "srun"
    srun.write_text(SRUN.format(python=sys.executable, late=late))
    srun.chmod(0o755)
    given = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "2",
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_LOCALID": "0",
        "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "FVC_RANK_START_SECONDS": seconds,
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(name, value)


def test_a_rank_that_does_not_start_in_time_ends_the_step_with_the_setting_that_gives_it_more(tmp_path, monkeypatch):
    late_second_rank(tmp_path, monkeypatch, "sleep 600", "1")
    monkeypatch.setattr("fvc_lib.engine.distributed.launch._END_SECONDS", 0.5)
    wanted = r"rank 1 on another node: gone without a word before it was ready.* 1 s .*RANK_START_SECONDS of site\.conf"
    with pytest.raises(RankLostError, match=wanted) as caught:
        run(tmp_path, "waits", "waits")
    assert type(caught.value) is RankLostError


def test_a_rank_that_starts_late_is_waited_for(tmp_path, monkeypatch):
    late_second_rank(tmp_path, monkeypatch, "sleep 2", "600")
    observer = run(tmp_path, "ends", "ends")
    assert [place[0] for place in observer.places] == ["train"]


@pytest.mark.parametrize("text", ["soon", "0", "-3"])
def test_a_limit_of_the_start_that_is_no_number_of_seconds_is_refused(tmp_path, monkeypatch, text):
    monkeypatch.setenv("FVC_RANK_START_SECONDS", text)
    with pytest.raises(UsageError, match=r"RANK_START_SECONDS of site\.conf\): got .*, wanted seconds, at least 1"):
        run(tmp_path, "ends", "ends")


def obey(launch):
    """As a rank beside which others compute, on a node that the launching process is not on."""
    reports_module._BEAT_SECONDS, reports_module._SILENT_SECONDS = 0.1, 0.5
    os.environ["SLURM_LAUNCH_NODE_IPADDR"] = "127.0.0.1"
    RankReports(1, launch).obey()
    time.sleep(300)
    print("nobody ended this rank", file=sys.stderr)


def test_a_rank_that_still_imports_is_known_and_its_end_noticed(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        launch = Launch("", listening.getsockname()[1], "a token", "", 1, 0)
        reader = ReportReader(listening, launch.token, 2, Observer(), None)
        (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(300)\n")
        given = {"SLURM_PROCID": "1", "FVC_RANK_LAUNCH": json.dumps(asdict(launch)), "PYTHONPATH": f"{ROOT}:{tmp_path}"}
        child = subprocess.Popen([sys.executable, "-c", _BEGIN, "slow_to_import"], env={**os.environ, **given})
        while not reader.nodes:
            reader.take(1)
        child.kill()
        while not reader.gone:
            reader.take(1)
        assert list(reader.gone) == [1]
        child.wait()
        reader.close()


def test_a_rank_ends_when_the_launching_process_on_another_node_falls_silent():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert run_child(obey, Launch("", listening.getsockname()[1], "", "", 1, 0, several_nodes=True)) == (1, "")


@pytest.fixture
def two_ranks(tiny_training):
    """The small run on two ranks, which saves whenever it may."""
    return tiny_training.with_config(
        num_ranks=2, epochs=6, early_stopping_epochs=0, learning_rate=1e-4, memory_preflight=False,
        checkpoint_minutes=0, shuffled_label_control=False,
    )  # fmt: skip


def steps_logged(paths):
    rows = [json.loads(line) for line in paths.metrics(STAGE, 0).read_text().splitlines()]
    return [row["step"] for row in rows if (row["phase"], row["metric"]) == ("train", "loss")]


def metrics_of(paths):
    """Lines that two attempts wrote must agree, and count once."""
    found = {}
    for row in map(json.loads, paths.metrics(STAGE, 0).read_text().splitlines()):
        key = (row["step"], row["epoch"], row["phase"], row["metric"])
        assert found.setdefault(key, row["value"]) == row["value"], key
    return found


@pytest.mark.long
@pytest.mark.fault(1)
def test_kill_9_of_the_kernel_ends_the_ranks_and_leaves_no_gap_in_the_metric_log(two_ranks, tmp_path):
    """It hears nothing for a while before, in which the ranks could take steps that nobody would be told of."""
    paths, arguments = two_ranks.paths, [str(two_ranks.paths.root), two_ranks.config.model_dump_json()]
    command = [sys.executable, "-c", LAUNCHER, *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as launcher:
        while int(launcher.stdout.readline()) < 3:
            pass
        ranks = ranks_below(launcher.pid)
        assert len(ranks) == 2
        launcher.send_signal(signal.SIGSTOP)
        time.sleep(2)
        launcher.kill()
    assert psutil.wait_procs(ranks, timeout=600)[1] == []
    logged = steps_logged(paths)
    assert logged == list(range(1, len(logged) + 1))
    saved = load_document(paths.fold_checkpoints(0) / LATEST, 1)["step"]
    assert 1 <= saved <= logged[-1] <= NUM_STEPS

    whole = elsewhere(two_ranks, tmp_path / "whole" / "run_1")
    for each in (whole, paths):
        outcome = train_fold(each, two_ranks.config, 0, metric_log=NoMetrics(), attempt=2)
    assert steps_logged(whole) == list(range(1, NUM_STEPS + 1))
    assert metrics_of(paths) == metrics_of(whole)
    assert outcome.training.inexact_because == ()


@pytest.mark.long
def test_ranks_that_are_told_to_stop_before_they_listen_were_stopped(two_ranks):
    """As by scancel, which reaches the ranks before their launcher asks them: there is nothing to save yet."""

    def stop():
        for rank in ranks_below(os.getpid()):
            rank.terminate()
        return False

    with pytest.raises(StoppedError, match="stopped as asked"):
        train_fold(two_ranks.paths, two_ranks.config, 0, metric_log=NoMetrics(), stop=stop)


@pytest.mark.slow
def test_reports_of_the_ranks_arrive_and_one_of_them_writes_the_metric_log(two_ranks):
    """The notebook's log of the same file is open meanwhile, and stays without a line of its own."""
    paths, observer, steps = two_ranks.paths, Observer(), []
    with MetricLog(paths.metrics(STAGE, 0), run_id=paths.run_id, fold=0, attempt=9) as log:
        train_fold(
            paths, two_ranks.with_config(epochs=1).config, 0, metric_log=log, attempt=4, memory=observer,
            progress=lambda done, planned: steps.append((done, planned)),
        )  # fmt: skip
    assert steps == sorted(steps)
    assert steps[-1][0] == steps[-1][1]
    assert [kind for kind, _ in observer.events] == ["policy"]
    assert {place[0] for place in observer.places} >= {"train", "validation", "test"}
    assert "FVC_RANK_LAUNCH" not in os.environ
    attempts = {json.loads(line)["attempt"] for line in paths.metrics(STAGE, 0).read_text().splitlines()}
    assert attempts == {4}
