import logging
import os
import re
import signal
import subprocess
import sys
import threading

import pytest
import torch

from fvc_lib.engine.memory.training_memory import recorded_allocations
from fvc_lib.services.errors import UsageError
from tests.faults import forked

CPU = torch.device("cpu")


def hold_forty_megabytes():
    return torch.zeros(10_000_000)


def test_without_memray_the_remedy_is_named_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "memray", None)
    begun = []
    remedy = r"pip install memray.*turn profile_memory off"
    with pytest.raises(UsageError, match=remedy), recorded_allocations(tmp_path / "profiles", CPU):
        begun.append(1)
    assert not begun
    assert not (tmp_path / "profiles").exists()


def summary_of(recording):
    command = [sys.executable, "-m", "memray", "summary", "--sort-column", "3", str(recording)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"}, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_recording_names_who_held_the_peak_on_every_thread(tmp_path, caplog):
    pytest.importorskip("memray")
    with caplog.at_level(logging.INFO), recorded_allocations(tmp_path, CPU) as recording:
        held = []
        thread = threading.Thread(target=lambda: held.append(hold_forty_megabytes()))
        thread.start()
        thread.join()
        held.append(hold_forty_megabytes())
    assert recording.name == f"memray_{os.getpid()}_0.bin"
    table = summary_of(recording)
    assert re.search(r"hold_forty_megabytes.*80\.0\d\dMB", table), table
    first_row = next(line for line in table.splitlines() if "MB" in line)
    assert "hold_forty_megabytes" in first_row  # by what a function holds itself, not by what it calls
    assert f"{str(recording)!r}; python -m memray flamegraph" in caplog.text


def test_a_training_that_fails_leaves_its_recording_and_its_error(tmp_path):
    pytest.importorskip("memray")

    def fail():
        held = hold_forty_megabytes()
        raise ZeroDivisionError(held.shape)

    with pytest.raises(ZeroDivisionError), recorded_allocations(tmp_path, CPU) as recording:
        fail()
    assert "hold_forty_megabytes" in summary_of(recording)
    with recorded_allocations(tmp_path, CPU) as second:
        pass
    assert second != recording


def test_only_one_can_record_at_a_time(tmp_path):
    pytest.importorskip("memray")
    with recorded_allocations(tmp_path, CPU):
        second = recorded_allocations(tmp_path, CPU)
        with pytest.raises(UsageError, match="memray cannot start"):
            second.__enter__()


def record_and_die(folder):
    with recorded_allocations(folder, CPU):
        held = [hold_forty_megabytes()]
        for _ in range(50_000):
            held.append(bytes(1000))
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_recording_of_a_killed_training_can_be_read(tmp_path):
    pytest.importorskip("memray")
    assert forked.run(record_and_die, tmp_path) == (-signal.SIGKILL, "")
    (recording,) = tmp_path.glob("memray_*.bin")
    table = summary_of(recording)
    assert re.search(r"hold_forty_megabytes.*40\.0\d\dMB", table), table


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_cuda_torch_s_own_history_is_written(tmp_path, caplog):
    device = torch.device("cuda", 0)
    with caplog.at_level(logging.INFO), recorded_allocations(tmp_path, device) as recording:
        torch.zeros(10_000_000, device=device)
    assert recording.suffix == ".pickle"
    assert recording.stat().st_size > 1000
    assert "memory_viz" in caplog.text
