"""Check whether this machine can run FVC, and name a remedy for each problem."""

import platform
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import psutil
from filelock import FileLock, SoftFileLock

from fvc_lib.execution.run.record import gpus
from fvc_lib.execution.slurm.queue import SlurmError, has_command, output_of
from fvc_lib.services.config import RunConfig
from fvc_lib.services.isolated_workers import available_cores, run_isolated
from fvc_lib.services.memory.budget import memory_budget

CHILD_SECONDS = 60.0
_INSTALL = "python -m pip install --requirement requirements.lock (with make: make setup)"
_TRAINING_BYTES = 900_000_000  # one training of the smallest network
_LITTLE_DISK_BYTES, _NO_DISK_BYTES = 5_000_000_000, 500_000_000
_DECODERS = {
    "h264": ("h264",), "hevc": ("hevc",), "vp9": ("vp9", "libvpx-vp9"), "av1": ("libdav1d", "libaom-av1", "av1"),
    "mpeg4": ("mpeg4",),
}  # fmt: skip
_SAMPLE_ENCODERS = ("libx264", "mpeg4", "libvpx-vp9")


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    With a warning a run works, but worse than it could; with a problem it fails. Only ok needs no ``remedy``.
    """

    name: str
    state: Literal["ok", "warning", "problem"]
    found: str
    remedy: str = ""


def diagnose(config: RunConfig) -> list[Finding]:
    """Return what a run with ``config`` finds on this machine. Takes a few seconds and changes nothing."""
    checks: dict[str, Callable[[RunConfig], Iterator[Finding]]] = {
        "packages": packages, "torch": torch, "codecs": codecs, "disk": disks, "memory": memory, "SLURM": slurm,
    }  # fmt: skip
    findings = [Finding("Python", "ok", f"{platform.python_version()}, {available_cores()} cores")]
    for name, check in checks.items():
        try:
            findings += check(config)
        except Exception as error:  # noqa: BLE001 - the other checks still count
            findings.append(Finding(name, "warning", f"check failed: {type(error).__name__}: {error}", "report this"))
    return findings


def lines(findings: Sequence[Finding]) -> list[str]:
    """Return the terminal's lines: one per finding, its remedy below it, and the sum."""
    width = max(len(finding.name) for finding in findings)
    shown = []
    for finding in findings:
        sign = finding.state.upper() if finding.state == "problem" else finding.state
        shown.append(f"{sign:<7}  {finding.name:<{width}}  {finding.found}")
        if finding.remedy:
            shown.append(f"{'':<{width + 11}}-> {finding.remedy}")
    counts = Counter(finding.state for finding in findings)
    verdict = "A run would fail; solve the problems first." if counts["problem"] else "A run will work."
    return [*shown, "", f"Problems: {counts['problem']}, warnings: {counts['warning']}. {verdict}"]


def exit_code(findings: Sequence[Finding]) -> Literal[0, 1]:
    """Return 1 if there is a problem; warnings do not count."""
    return 1 if any(finding.state == "problem" for finding in findings) else 0


def packages(config: RunConfig) -> Iterator[Finding]:
    """Check that the packages that FVC requires are installed."""
    required = [re.split(r"[^\w.-]", text)[0] for text in metadata.requires("fvc_lib") or () if "extra ==" not in text]
    if missing := [name for name in required if not any(metadata.distributions(name=name))]:
        yield Finding("packages", "problem", f"not installed: {', '.join(missing)}", _INSTALL)
    else:
        yield Finding("packages", "ok", f"all {len(required)} are installed")


def torch(config: RunConfig) -> Iterator[Finding]:
    """Import torch and compute on each device, in a child process: a broken driver may crash or hang it."""
    (answer,) = run_isolated(
        f"{__name__}:probe_torch", [config.device], workers=1, timeout_seconds=CHILD_SECONDS, memory_bytes=None
    )
    if answer.failure:
        remedy = f"install torch again: {_INSTALL}; if only a GPU fails: -p device cpu"
        yield Finding("torch", "problem", f"import or a device failed: {answer.detail}", remedy)
        return
    facts = answer.value
    yield Finding("torch", "ok", f"{facts['version']}, built for {facts['build']}")
    remedy = "install a torch build or a driver for this device, or avoid it: -p device cpu"
    for name, error in facts["devices"].items():
        state: Literal["ok", "problem"] = "problem" if error else "ok"
        yield Finding(f"device {name}", state, error or "computes correctly", remedy if error else "")
    shown = sorted(set(gpus()))
    if config.device != "cpu" and shown and not any(name.startswith("cuda") for name in facts["devices"]):
        reason = facts["error"] or f"torch is built for {facts['build']}"
        yield Finding("GPU", "warning", f"{', '.join(shown)} is not used: {reason}", remedy)
    if config.device != "auto" and not any(name.startswith(config.device) for name in facts["devices"]):
        yield Finding("device", "problem", f"{config.device} is not available", "-p device auto uses what is here")


def probe_torch(device: str) -> dict[str, Any]:
    """Return torch's version and build, why it finds no GPU, and the error of each device; empty if it computes."""
    import torch

    names, error = ["cpu"], ""
    if device != "cpu" and (torch.version.cuda or torch.version.hip):
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            names += [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        except (RuntimeError, AssertionError) as caught:
            error = str(caught).partition("\n")[0]
    if device != "cpu" and torch.backends.mps.is_available():
        names.append("mps")
    errors = {}
    for name in names:
        try:
            values = torch.ones(64, 64, device=name, requires_grad=True)
            (values @ values).sum().backward()  # type: ignore[no-untyped-call]
            right = values.grad is not None and bool((values.grad == 128).all().item())
            errors[name] = "" if right else "computes a wrong product"
        except RuntimeError as caught:
            errors[name] = str(caught).partition("\n")[0]
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    is_cpu = not (torch.version.cuda or torch.version.hip)
    return {"version": torch.__version__, "build": "CPU" if is_cpu else build, "error": error, "devices": errors}


def codecs(config: RunConfig) -> Iterator[Finding]:
    """Check PyAV's decoders, and the encoders of the sample corpus."""
    import av

    remedy = "install PyAV's own wheel: python -m pip install --force-reinstall av"
    missing = [codec for codec, names in _DECODERS.items() if not av.codec.codecs_available.intersection(names)]
    if missing:
        yield Finding("codecs", "warning", f"videos in {', '.join(missing)} would be rejected", remedy)
    elif not config.corpus and not av.codec.codecs_available.issuperset(_SAMPLE_ENCODERS):
        yield Finding("codecs", "problem", f"the sample corpus needs {', '.join(_SAMPLE_ENCODERS)}", remedy)
    else:
        yield Finding("codecs", "ok", f"PyAV {av.__version__}: {', '.join(_DECODERS)}")


def disks(config: RunConfig) -> Iterator[Finding]:
    """Check that each folder of a run can be written and locked, and how much space it has."""
    folders = {"runs": config.runs_dir, "clips": config.cache_dir, "sample corpus": config.data_dir}
    other = "choose another folder: FVC_RUNS_DIR, FVC_CACHE_DIR, FVC_DATA_DIR"
    for what, text in folders.items():
        name, folder = f"disk for {what}", Path(text).absolute()
        there = next(each for each in (folder, *folder.parents) if each.exists())
        try:
            with tempfile.TemporaryDirectory(dir=there, prefix=".fvc-doctor-") as trial:
                lock = FileLock(Path(trial, "lock"))
                with lock:
                    locks = not isinstance(lock, SoftFileLock)
        except OSError as error:
            yield Finding(name, "problem", f"{folder}: cannot be written: {error.strerror}", other)
            continue
        free = shutil.disk_usage(there).free
        found = f"{folder}: {free / 1e9:.1f} GB free"
        if free < _NO_DISK_BYTES:
            yield Finding(name, "problem", found, f"make room, or {other}")
        elif free < _LITTLE_DISK_BYTES:
            yield Finding(name, "warning", found, f"make room for checkpoints and clips, or {other}")
        elif not locks:
            yield Finding(name, "warning", f"{found}, no file locks", "after a crash of the host delete run.lock")
        else:
            yield Finding(name, "ok", found)


def memory(config: RunConfig) -> Iterator[Finding]:
    """Compare the memory that may be used with that of the smallest training, and /dev/shm with a loader's batches."""
    budget, free = memory_budget(config.mem_gb), psutil.virtual_memory().available
    found = f"{budget.total_bytes / 1e9:.2f} GB may be used ({budget.origin}), {free / 1e9:.2f} GB are free"
    more = "ask for more memory (mem_gb, SLURM's --mem, the container's limit), or end other programs"
    if budget.total_bytes < _TRAINING_BYTES:
        yield Finding("memory", "problem", f"{found}; the smallest training takes {_TRAINING_BYTES / 1e9:.1f} GB", more)
    elif min(free, budget.total_bytes / 2) < _TRAINING_BYTES:
        yield Finding("memory", "warning", found, more)
    else:
        yield Finding("memory", "ok", found)
    if config.num_workers and Path("/dev/shm").is_dir():
        clip_bytes = 3 * config.clips.num_frames * config.clips.side**2
        needed = (2 * config.num_workers + 1) * config.effective_batch_size * clip_bytes
        if (free := shutil.disk_usage("/dev/shm").free) < needed:
            found = f"{free / 1e6:,.0f} MB free, {needed / 1e6:,.0f} MB needed by {config.num_workers} loaders"
            yield Finding("shared memory", "problem", found, "-p num_workers 0, or a larger /dev/shm (--shm-size)")


def slurm(config: RunConfig) -> Iterator[Finding]:
    """Show the partitions of the cluster, if there is one."""
    if not has_command("sbatch"):
        yield Finding("SLURM", "ok", "not on this machine; --executor slurm needs a cluster's login node")
        return
    try:
        answer = output_of(["sinfo", "--noheader", "--format=%P %a, %l, %D nodes of %c cores and %m MB, %G"])
        yield Finding("SLURM", "ok", "; ".join(answer.replace(", (null)", "").splitlines()[:8]) or "no partition")
    except SlurmError as error:
        yield Finding("SLURM", "warning", str(error).splitlines()[0], "runs here work; ask the site about SLURM")
