"""The doctor finds what is really broken, says what to do, and outlives everything it looks at."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fvc_lib import CHECKOUT
from fvc_lib.execution import doctor
from fvc_lib.execution.doctor import Finding, diagnose, exit_code, lines, ok, problem, warning
from fvc_lib.services.config import RunConfig


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    folders = {name: str(tmp_path / name) for name in ("runs_dir", "cache_dir", "data_dir")}
    return RunConfig(**folders)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.slow
def test_a_sound_machine_has_no_problem_and_every_trouble_a_remedy(config, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "CHILD_SECONDS", 600.0)  # a machine full of tests is slow, but sound
    findings = diagnose(config, patience_seconds=600.0)
    assert exit_code(findings) == 0, "\n".join(lines(findings))
    names = [finding.name for finding in findings]
    for name in (
        "Python", "locked versions", "torch", "device cpu", "decoders", "disk for runs", "memory", "processors",
        "shared memory", "SLURM", "code",
    ):  # fmt: skip
        assert name in names
    assert all(finding.remedy for finding in findings if finding.state != "ok")
    assert list(tmp_path.iterdir()) == []  # it looked and left nothing


def test_looking_loads_neither_torch_nor_av_into_the_command():
    heavy = "{'torch', 'av', 'torchvision'}"
    code = f"import sys, fvc_lib.execution.doctor; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_lines_and_exit_code_tell_problems_from_warnings():
    fine, bad, worse = ok("a", "fine"), warning("bb", "slow", "wait"), problem("c", "gone", "find it")
    assert lines([fine])[-1] == "Nothing stands in the way of a run."
    assert lines([fine, bad])[-1] == "1 warning. A run will work."
    shown = lines([fine, bad, worse])
    assert shown[-1] == "1 problem, 1 warning. A run would fail or lie; mend this first."
    assert "PROBLEM  c   gone" in shown
    assert any(line.endswith("-> find it") for line in shown)
    assert [exit_code(found) for found in ([fine], [fine, bad], [fine, bad, worse])] == [0, 0, 1]


@pytest.mark.parametrize(
    ("lock", "state", "said"),
    [
        ("click==0.0.1\nnumpy==99.0\n", "warning", "numpy"),
        ("no-such-package-of-ours==1.0\n", "warning", "no-such-package-of-ours is not installed"),
        ("# only a comment\n", "ok", "all 0"),
        (None, "warning", "No such file"),
    ],
)
def test_drift_from_the_lock_is_named_with_the_command_that_mends_it(tmp_path, lock, state, said):
    if lock is not None:
        write(tmp_path / "requirements.lock", lock)
    finding = doctor.packages(tmp_path)[1]
    assert finding.state == state
    assert said in finding.found
    assert state == "ok" or "requirements.lock" in finding.remedy


def test_a_required_package_that_is_missing_is_a_problem(tmp_path):
    listed = '"Click>=8.1", "pandera[polars]>=0.23", "no-such-package-of-ours==1.0"'
    write(tmp_path / "pyproject.toml", f"[project]\ndependencies = [{listed}]\n")
    finding = doctor.packages(tmp_path)[0]
    assert (finding.state, finding.found) == ("problem", "not installed: no-such-package-of-ours==1.0")
    assert doctor.packages(tmp_path / "elsewhere")[0].state == "warning"
    assert doctor.packages(CHECKOUT)[0].state == "ok"


def fake_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str) -> None:
    """A package of this name in front of all others, as a user's PYTHONPATH may have one."""
    write(tmp_path / "path" / name / "__init__.py", source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))


def test_a_torch_that_cannot_be_imported_is_a_problem(config, tmp_path, monkeypatch):
    fake_module(tmp_path, monkeypatch, "torch", "raise ImportError('libcudart.so.13: cannot open shared object file')")
    (finding,) = doctor.torch(config)
    assert finding.state == "problem"
    assert "libcudart.so.13" in finding.found


FAKE_TORCH = """
import os
__version__ = "9.9"
class version: cuda = "13.0"; hip = None
class backends:
    class mps: is_available = staticmethod(lambda: False)
def get_num_threads(): return 1
class cuda:
    def init(): {init}
    def device_count(): return 1
    def get_arch_list(): return ["sm_90"]
    def get_device_properties(name):
        class found: name = "NVIDIA GeForce 1"; total_memory = 2 * 10**9; major = 3; minor = 5
        return found
def ones(*_, device, **__):
    {ones}
"""


@pytest.mark.parametrize(
    ("init", "ones", "name", "said"),
    [
        ("pass", "raise RuntimeError('no kernel image is available') if device != 'cpu' else RuntimeError('c')",
         "device cuda:0", "no kernel image is available"),
        ("pass", "os.kill(os.getpid(), 11) if device != 'cpu' else None; raise RuntimeError('x')",
         "device cuda:0", "took the process down: SIGSEGV"),
        ("raise RuntimeError('The NVIDIA driver on your system is too old')", "raise RuntimeError('x')",
         "GPU", "too old"),
    ],
)  # fmt: skip
def test_a_device_that_does_not_work_is_told_with_its_own_words(config, tmp_path, monkeypatch, init, ones, name, said):
    """No such GPU is at hand, so a torch stands in that behaves as the real one does beside it."""
    fake_module(tmp_path, monkeypatch, "torch", FAKE_TORCH.format(init=init, ones=ones))
    findings = {finding.name: finding for finding in doctor.torch(config)}
    assert said in findings[name].found


def test_a_driver_that_crashes_is_not_taken_for_a_torch_to_install_anew(config, tmp_path, monkeypatch):
    crash = FAKE_TORCH.format(init="os.kill(os.getpid(), 11)", ones="raise RuntimeError('x')")
    fake_module(tmp_path, monkeypatch, "torch", crash)
    findings = {finding.name: finding for finding in doctor.torch(config)}
    assert list(findings) == ["torch", "devices", "device cpu"]
    assert findings["torch"].state == "ok"
    assert findings["devices"].state == "problem"
    unused = {each.name: each.state for each in doctor.torch(config.model_copy(update={"device": "cpu"}))}
    assert unused["devices"] == "warning", "no training of this run comes near the driver"
    assert "SIGSEGV" in findings["devices"].found
    assert "driver" in findings["devices"].remedy
    assert "-p device cpu" in findings["devices"].remedy
    assert "install" not in findings["devices"].remedy


def test_a_device_that_is_asked_for_and_not_here_is_a_problem(config, tmp_path, monkeypatch):
    fake_module(tmp_path, monkeypatch, "torch", FAKE_TORCH.format(init="pass", ones="raise RuntimeError('x')"))
    findings = doctor.torch(config.model_copy(update={"device": "mps"}))
    assert [f.remedy for f in findings if f.name == "device" and f.state == "problem"] == [
        "-p device auto: auto takes what is there"
    ]


def test_a_codec_library_that_crashes_or_lacks_codecs_is_told(config, tmp_path, monkeypatch):
    bare = "__version__ = '1'\nclass codec:\n    def Codec(name, mode): raise ValueError(name)\n"
    fake_module(tmp_path, monkeypatch, "av", bare)
    findings = {finding.name: finding for finding in doctor.codecs(config)}
    assert findings["decoders"].state == "warning"
    assert "av1 is missing" in findings["decoders"].found
    assert findings["sample corpus"].state == "problem"
    own = config.model_copy(update={"corpus": "/videos"})
    assert "sample corpus" not in {finding.name for finding in doctor.codecs(own)}
    fake_module(tmp_path, monkeypatch, "av", "import os; os.kill(os.getpid(), 11)")
    assert "SIGSEGV" in doctor.codecs(config)[0].found


def test_a_child_that_hangs_is_given_up(tmp_path, monkeypatch):
    fake_module(tmp_path, monkeypatch, "av", "import time; time.sleep(600)")
    (answer,) = doctor.tried("pyav_build", [None], seconds=1.0)
    assert (answer.failure, answer.detail) == ("timeout", "no answer within 1 s")


@pytest.fixture
def readonly(tmp_path: Path) -> Iterator[Path]:
    """A folder that cannot be written, not even by root: a mount that is read-only."""
    if os.geteuid() != 0:
        folder = tmp_path / "readonly"
        folder.mkdir(mode=0o555)
        yield folder
        return
    with mounted(tmp_path / "readonly", "ro,size=1m") as folder:
        yield folder


class mounted:  # noqa: N801 - reads like a function
    """A small tmpfs; skipped where mounting is not allowed."""

    def __init__(self, folder: Path, options: str) -> None:
        self._folder, self._options = folder, options

    def __enter__(self) -> Path:
        self._folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", self._options, "tmpfs", str(self._folder)]
        if shutil.which("mount") is None or subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("mounting is not allowed here")
        return self._folder

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", str(self._folder)], check=True)


def test_a_folder_that_cannot_be_written_is_a_problem(config, readonly):
    runs = config.model_copy(update={"runs_dir": str(readonly / "runs")})
    finding = doctor.disks(runs)[0]
    assert finding.state == "problem"
    assert "cannot be written" in finding.found
    assert "FVC_RUNS_DIR" in finding.remedy


def test_a_full_disk_and_a_file_in_the_way_are_problems(config, tmp_path):
    (tmp_path / "file").write_text("")
    blocked = doctor.disks(config.model_copy(update={"cache_dir": str(tmp_path / "file" / "cache")}))[1]
    assert (blocked.state, "is no folder" in blocked.found) == ("problem", True)
    with mounted(tmp_path / "small", "size=1m") as small:
        finding = doctor.disks(config.model_copy(update={"runs_dir": str(small)}))[0]
    assert finding.state == "problem"
    assert "0.0 GB free" in finding.found


def test_memory_that_no_training_fits_into_is_a_problem(config):
    finding = doctor.memory(config.model_copy(update={"mem_gb": 0.5}))
    assert finding.state == "problem"
    assert "0.50 GB may be used (mem_gb / FVC_MEM_GB)" in finding.found
    assert doctor.memory(config.model_copy(update={"mem_gb": 1.0})).state == "warning"


def test_more_threads_than_cores_are_a_warning(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "6400")
    assert doctor.processors().state == "warning"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert doctor.processors().state == "ok"


def test_shared_memory_counts_only_where_loaders_use_it(config, tmp_path):
    with mounted(tmp_path / "shm", "size=1m") as shm:
        assert doctor.shared_memory(config, shm).state == "ok"
        loaders = config.model_copy(update={"num_workers": 4})
        finding = doctor.shared_memory(loaders, shm)
    assert finding.state == "problem"
    assert "-p num_workers 0" in finding.remedy
    assert doctor.shared_memory(loaders, tmp_path / "none").state == "warning"


def program(folder: Path, name: str, script: str) -> None:
    write(folder / name, f"#!/bin/sh\n{script}\n").chmod(0o755)


def test_slurm_is_told_as_its_own_commands_tell_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if shutil.which("sbatch") is None else str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert [finding.state for finding in doctor.slurm()] == ["ok"]
    program(tmp_path, "sbatch", ":")
    program(tmp_path, "sinfo", "echo 'main* up, 1:00:00, 2 nodes of 4 cores and 8000 MB, (null)'")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    found = {finding.name: finding for finding in doctor.slurm()}
    assert found["SLURM job"].found == "job id 7"
    assert found["SLURM"].found == "main* up, 1:00:00, 2 nodes of 4 cores and 8000 MB"
    program(tmp_path, "sinfo", "echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1")
    finding = doctor.slurm()[-1]
    assert finding.state == "warning"
    assert "Unable to contact" in finding.found


def test_a_check_that_fails_or_hangs_is_a_finding_and_the_others_stand(config, monkeypatch):
    def fails() -> Finding:
        raise ZeroDivisionError("oh")

    hanging = threading.Event()
    monkeypatch.setattr(doctor, "processors", fails)
    monkeypatch.setattr(doctor, "slurm", hanging.wait)
    for slow in ("torch", "codecs", "packages"):  # real ones are looked at above
        monkeypatch.setattr(doctor, slow, lambda *_, name=slow: [ok(name, "fine")])
    findings = {finding.name: finding for finding in diagnose(config, patience_seconds=3.0)}
    hanging.set()
    assert "ZeroDivisionError: oh" in findings["processors"].found
    assert findings["SLURM"].found == "no answer in time"
    assert findings["torch"].state == "ok"
    assert doctor.exit_code(list(findings.values())) == 0
