"""The processes of one training, and how they are ended."""

from __future__ import annotations

import os
import signal
import sys

import psutil
import pytest

from fvc_lib.engine.distributed import launch as rank_processes
from fvc_lib.engine.distributed.launch import RankProcesses
from tests.kits import standin_srun

TASK = [sys.executable, "-c", "import os, time; os.write(1, b'%d\\n' % os.getpid()); time.sleep(600)"]


def test_srun_is_ended_so_that_it_ends_its_tasks(tmp_path):
    """Tasks that would outlive an srun that is killed."""
    standin_srun.install(tmp_path)
    ranks = RankProcesses([([str(tmp_path / "srun"), "--ntasks=2", *TASK], os.environ)], tmp_path / "log", srun=True)
    tasks = []
    while len(tasks) < 2:
        tasks += [psutil.Process(int(line)) for line in ranks.heard()]
    ranks.close()
    assert psutil.wait_procs(tasks, timeout=600)[1] == []
    assert ranks.codes() == [128 + signal.SIGKILL]  # its own end: it has seen its tasks'
    assert ranks.ended_by_signal() == []


def test_an_srun_that_does_not_end_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_processes, "_SRUN_SECONDS", 0.2)
    deaf = ["sh", "-c", "trap '' TERM; echo ready; while true; do sleep 0.1; done"]
    ranks = RankProcesses([(deaf, os.environ)], tmp_path / "log", srun=True)
    assert "ready\n" in iter(lambda: next(ranks.heard(), ""), None)
    ranks.close()
    assert ranks.ended_by_signal() == ["srun was ended by SIGKILL"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_s_signal_is_named_and_the_others_end_after_a_time_of_grace(tmp_path, monkeypatch, number):
    monkeypatch.setattr(rank_processes, "_GRACE_SECONDS", 0.2)
    ranks = RankProcesses([(TASK, os.environ), (TASK, os.environ)], tmp_path / "log")
    os.kill(ranks.pids[1], number)
    while ranks.any_lives():
        ranks.end_stragglers()
    assert ranks.ended_by_signal() == ["rank 0 was ended by SIGKILL", f"rank 1 was ended by {number.name}"]
    ranks.close()


def test_what_a_rank_prints_as_an_error_is_kept_with_its_number(tmp_path):
    command = [sys.executable, "-c", "import sys; print(input(), file=sys.stderr)"]
    ranks = RankProcesses([(command, os.environ), (command, os.environ)], tmp_path / "logs" / "ranks.log")
    ranks.tell("to all\n")
    while ranks.any_lives():
        pass
    ranks.close()
    assert sorted((tmp_path / "logs" / "ranks.log").read_text().splitlines()) == ["[rank 0] to all", "[rank 1] to all"]
    ranks = RankProcesses([(command, os.environ)], tmp_path / "alone.log")
    ranks.answer(7)
    assert ranks.codes() == [0]
    ranks.close()
    assert (tmp_path / "alone.log").read_text() == "7\n"
