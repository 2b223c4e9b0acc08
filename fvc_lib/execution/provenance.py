"""On what an attempt at a run works: versions, hardware, host and SLURM job; and how to repeat it."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from fvc_lib.execution.code_state import CodeState
from fvc_lib.services.memory_budget import memory_budget

RECORDED_PACKAGES = (
    "fvc_lib", "av", "duckdb", "ipykernel", "jupyter_client", "kornia", "nbclient", "nbconvert", "nbformat", "numpy",
    "pandera", "papermill", "plotly", "polars", "psutil", "pyarrow", "pydantic", "safetensors", "scikit-learn", "scipy",
    "torch", "torchvision",
)  # fmt: skip
# Other versions of these, another processor or another number of threads add numbers up in another order.
BITS_DEPEND_ON = ("python", "numpy", "torch")
_TORCH_BUILD = re.compile(r"^(cuda|hip|git_version)\b[^=\n]*= *'([^'\n]+)'", re.MULTILINE)
_SLURM = {
    "job_id": "SLURM_JOB_ID",
    "array_job_id": "SLURM_ARRAY_JOB_ID",
    "array_task_id": "SLURM_ARRAY_TASK_ID",
    "job_name": "SLURM_JOB_NAME",
    "cluster": "SLURM_CLUSTER_NAME",
    "partition": "SLURM_JOB_PARTITION",
    "nodes": "SLURM_JOB_NODELIST",
    "tasks": "SLURM_NTASKS",
    "cpus_per_task": "SLURM_CPUS_PER_TASK",
    "restarts": "SLURM_RESTART_COUNT",
}
_GPU_SECONDS = 10.0


def versions() -> dict[str, str | None]:
    """Of Python and of what the numbers or the record depend on; None for what is not installed."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "python_build": f"{platform.python_implementation()} {' '.join(platform.python_build())}, "
        f"{platform.python_compiler()}",
    }
    for name in RECORDED_PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return {**found, "torch_build": _torch_build()}


def hardware(environ: Mapping[str, str] | None = None) -> dict[str, object]:
    """Processor, cores, memory and who limits it, accelerators; torch is not loaded for it."""
    environ = os.environ if environ is None else environ
    budget = memory_budget(environ=environ)
    return {
        "host": socket.gethostname(),
        "machine": platform.machine(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cores_of_machine": os.cpu_count(),
        "omp_num_threads": environ.get("OMP_NUM_THREADS"),
        "memory_bytes": psutil.virtual_memory().total,
        "memory_limit_bytes": budget.total_bytes,
        "memory_limit_from": budget.origin,
        "gpus": gpus(),
        "gpus_visible": environ.get("CUDA_VISIBLE_DEVICES"),
    }


def slurm_job(environ: Mapping[str, str] | None = None) -> dict[str, str] | None:
    """What SLURM says of the job this process is in; None outside one."""
    environ = os.environ if environ is None else environ
    found = {name: environ[variable] for name, variable in _SLURM.items() if environ.get(variable)}
    return found if "job_id" in found else None


def gpus(root: Path = Path("/")) -> list[str]:
    """The names of NVIDIA's accelerators that this machine shows, of its driver's files or else of ``nvidia-smi``."""
    listed = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    found = [name for path in listed if (name := _field(path, "Model"))]
    return found or _asked_gpus()


def repeat_commands(
    code: CodeState, params: Path, patch: Path, *, command: str = "", environ: Mapping[str, str] | None = None
) -> list[str]:
    """Shell commands that bring a run about again, from any checkout of the project.

    Args:
        code: the code it worked with.
        params: its resolved parameters.
        patch: where the patch of that code lies.
        command: what to run, for a run that needs more than its parameters (a fork); empty: the pipeline.
        environ: for the number of threads, on which the last bits depend; none: this process's.
    """
    threads = (os.environ if environ is None else environ).get("OMP_NUM_THREADS")
    run = command or f"python run_notebooks.py --params {shlex.quote(str(params))}"
    return [
        *([f"git checkout {code.commit}"] if code.commit else []),
        *([f"git apply --whitespace=nowarn {shlex.quote(str(patch))}"] if code.patch else []),
        f"OMP_NUM_THREADS={shlex.quote(threads)} {run}" if threads else run,
    ]


def bits_depend_on(attempt: Mapping[str, Any]) -> dict[str, object]:
    """What a sum of floats depends on besides its numbers, as far as is known before torch has started."""
    recorded, machine = attempt["versions"], attempt["hardware"]
    threads = machine.get("omp_num_threads") or machine["cores"]
    return {
        **{name: recorded.get(name) for name in BITS_DEPEND_ON},
        "threads": str(threads),
        "machine": machine["machine"],
        # Attempts of an earlier version did not note these: that is no difference.
        **({"processor": machine["processor"]} if machine.get("processor") else {}),
        **({"accelerators": ", ".join(sorted(set(machine["gpus"]))) or "none"} if "gpus" in machine else {}),
    }


def _torch_build() -> str | None:
    """CUDA or ROCm version and commit of the installed torch, from its own file; importing it takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return None
    return ", ".join(f"{name} {value[:12]}" for name, value in _TORCH_BUILD.findall(text)) or None


def _processor() -> str | None:
    """The model's name; the same library picks other instructions on another model."""
    return _field(Path("/proc/cpuinfo"), "model name") or platform.processor() or None


def _field(path: Path, name: str) -> str | None:
    """The value in the first line of ``path`` that begins with ``name``."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return None
    values = (line.partition(":")[2].strip() for line in lines if line.startswith(name))
    return next((value for value in values if value), None)


def _asked_gpus() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=_GPU_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return []
    # "GPU 0: NVIDIA H200 (UUID: GPU-...)": the serial number says nothing about a result.
    names = (line.partition(": ")[2].partition(" (UUID")[0].strip() for line in done.stdout.splitlines())
    return [name for name in names if name]
