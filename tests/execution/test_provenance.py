"""What a run says of the machine and the versions it worked with, and how it is repeated."""

import os
import shlex
import sys
from importlib import metadata
from pathlib import Path

import torch

from fvc_lib.execution.run.record import CodeState, gpus, hardware, repeat_commands, slurm_job, versions


def test_versions_are_those_that_are_imported():
    found = versions()
    assert found["torch"] == metadata.version("torch")
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    build = str(found["torch_build"])
    assert f"git_version {torch.version.git_version[:12]}" in build
    assert (f"cuda {torch.version.cuda}" in build) == (torch.version.cuda is not None)


def test_hardware_is_this_machines():
    found = hardware({"OMP_NUM_THREADS": "3"})
    assert found["omp_num_threads"] == "3"
    assert 1 <= int(str(found["cores"])) <= int(str(found["cores_of_machine"]))
    assert 0 < int(str(found["memory_limit_bytes"])) <= int(str(found["memory_bytes"]))
    limited = hardware({"SLURM_MEM_PER_NODE": "1"})
    assert (limited["memory_limit_bytes"], limited["memory_limit_from"]) == (1 << 20, "SLURM_MEM_PER_NODE")
    assert not set(os.environ.get("USER", "nobody-").split()) & set(map(str, found.values()))


def test_slurms_job_is_told_and_outside_of_one_there_is_none():
    environ = {"SLURM_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": ""}
    assert slurm_job(environ) == {"job_id": "12", "array_task_id": "3", "nodes": "n[1-2]"}
    assert slurm_job({"SLURM_CLUSTER_NAME": "site"}) is None


def test_accelerators_are_named_by_the_drivers_files_or_by_nvidia_smi(tmp_path, monkeypatch):
    for number in (1, 2):
        file = tmp_path / f"proc/driver/nvidia/gpus/0000:0{number}:00.0/information"
        file.parent.mkdir(parents=True)
        file.write_text("Model: \t\t NVIDIA H200\nIRQ:   17\n")
    assert gpus(tmp_path) == ["NVIDIA H200", "NVIDIA H200"]
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-0123)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert gpus(tmp_path / "elsewhere") == ["NVIDIA A100-SXM4-40GB"]
    program.write_text("#!/bin/sh\nexit 9\n")
    assert gpus(tmp_path / "elsewhere") == []


def test_the_commands_that_repeat_a_run_survive_a_shell():
    params, patch = Path("/runs/my run's/params.yaml"), Path("/runs/my run's/code.patch")
    code = CodeState("abc", "main", True, b"diff")
    commands = repeat_commands(code, params, patch, environ={"OMP_NUM_THREADS": "2"})
    assert [shlex.split(command) for command in commands] == [
        ["git", "checkout", "abc"],
        ["git", "apply", "--whitespace=nowarn", str(patch)],
        ["OMP_NUM_THREADS=2", "python", "run_notebooks.py", "--params", str(params)],
    ]
    assert repeat_commands(CodeState(), params, patch, command="python run.py --fork", environ={}) == [
        "python run.py --fork"
    ]
