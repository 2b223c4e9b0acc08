"""Whether this machine can do what is wanted: one finding per thing looked at, and for each trouble what to do.

Nothing here may crash or hang: what could take the process down runs in a child, and a check that fails or takes too
long is itself a finding.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import psutil

import fvc_lib
from fvc_lib import CHECKOUT
from fvc_lib.execution.doctor.probes import SAMPLE_ENCODERS
from fvc_lib.execution.run.record import code_state, gpus, slurm_job
from fvc_lib.services.config import RunConfig
from fvc_lib.services.isolated_workers import available_cores
from fvc_lib.services.memory_budget import memory_budget
from fvc_lib.services.tasks import TASKS

# What a check found, and how a child process is asked to look at what might take it down.

State = Literal["ok", "warning", "problem"]
CHILD_SECONDS = 45.0


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what.
        state: ok; a warning, with which a run works but worse; a problem, with which it fails or lies.
        found: what is there, in words.
        remedy: what to do; empty only where all is well.
    """

    name: str
    state: State
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.state != "ok" and not self.remedy:
            raise ValueError(f"{self.name}: a {self.state} needs a remedy")


def ok(name: str, found: str) -> Finding:
    """All is well."""
    return Finding(name, "ok", found)


def warning(name: str, found: str, remedy: str) -> Finding:
    """A run works, but worse than it could."""
    return Finding(name, "warning", found, remedy)


def problem(name: str, found: str, remedy: str) -> Finding:
    """A run fails, or says what is not so."""
    return Finding(name, "problem", found, remedy)


@dataclass(frozen=True)
class Told:
    """What a child process told: one JSON object after another, and how it ended where it did not end well."""

    documents: tuple[dict[str, Any], ...]
    trouble: str = ""

    @property
    def all(self) -> dict[str, Any]:
        """The documents as one; later ones win."""
        return {name: value for document in self.documents for name, value in document.items()}


def ask_child(probe: str, seconds: float = CHILD_SECONDS) -> Told:
    """Run function ``probe`` of ``doctor.probes`` in a fresh interpreter; its crash or hang is told, not suffered."""
    given = os.environ.get("PYTHONPATH", "")
    # Ours last: what stands in a user's PYTHONPATH is what a kernel would import, and so what is to be tried.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (given, str(CHECKOUT))))}
    code = f"from fvc_lib.execution.doctor import probes; probes.{probe}()"
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", code], stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            trouble = _ending(child.wait(seconds), errors)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            trouble = f"no answer within {seconds:.0f} s"
        output.seek(0)
        return Told(tuple(_documents(output.read())), trouble)


def _ending(code: int, errors: Any) -> str:
    if code == 0:
        return ""
    errors.seek(0)
    said = [line.strip() for line in errors.read()[-8192:].decode("utf-8", "replace").splitlines() if line.strip()]
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{said[-1]} ({how})" if said else how


def _documents(content: bytes) -> list[dict[str, Any]]:
    found = []
    for line in content.decode("utf-8", "replace").splitlines():
        try:
            document = json.loads(line)
        except ValueError:
            continue  # a library's own words
        if isinstance(document, dict):
            found.append(document)
    return found


_LITTLE_DISK_BYTES, _NO_DISK_BYTES = 5_000_000_000, 500_000_000
_NETWORK = ("nfs", "lustre", "gpfs", "beegfs", "cifs", "smb", "ceph", "afs", "fuse", "9p", "panfs")
_NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL})
_FEW_FILES = 1024
_SLURM_SECONDS = 10.0


def disks(config: RunConfig) -> list[Finding]:
    """Each folder that is written: whether it can be, its space, its locks."""
    folders = {"runs": config.runs_dir, "clips": config.cache_dir, "sample corpus": config.data_dir}
    if config.corpus:
        del folders["sample corpus"]
    return [_disk(f"disk for {name}", Path(folder).absolute()) for name, folder in folders.items()]


def _disk(name: str, folder: Path) -> Finding:
    other = "choose another folder: FVC_RUNS_DIR, FVC_CACHE_DIR, FVC_DATA_DIR"
    try:
        there = next(each for each in (folder, *folder.parents) if each.exists() or each.is_symlink())
        nowhere = not there.exists()
    except OSError as error:
        return problem(name, f"{folder}: {error.strerror}", other)
    if nowhere:
        return problem(name, f"{folder}: {there} is a link to nowhere", other)
    where = f"{folder}" if there == folder else f"{folder} (to be made in {there})"
    if not there.is_dir():
        return problem(name, f"{where}: {there} is no folder", other)
    try:
        locks = _locks_work(there)
    except OSError as error:
        return problem(
            name, f"{where}: cannot be written: {error.strerror}", f"get the right to write there, or {other}"
        )
    space = os.statvfs(there)
    free, kind = space.f_bavail * space.f_frsize, _file_system(there)
    told = f"{where}: {free / 1e9:.1f} GB free, {kind}"
    if free < _NO_DISK_BYTES:
        return problem(name, told, f"make room, or {other}")
    if space.f_files and space.f_favail < 10_000:
        return warning(name, f"{told}, {space.f_favail:,} files left", f"delete files you do not need, or {other}")
    if not locks:
        remedy = "runs are then told apart by a heartbeat alone: never start one twice at the same moment"
        return warning(name, f"{told}, without file locks", remedy)
    if free < _LITTLE_DISK_BYTES:
        return warning(name, told, f"checkpoints and clips take room: make more, or {other}")
    network = any(kind.startswith(each) for each in _NETWORK)
    return ok(name, f"{told}{' (a network file system)' if network else ''}, writable, locks work")


def _locks_work(folder: Path) -> bool:
    """Whether a lock keeps a second one out, tried on a file that is gone afterwards.

    Raises:
        OSError: the folder cannot be written.
    """
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".fvc-doctor-") as first, Path(first.name).open("rb") as second:
        first.write(b"x")
        first.flush()
        os.fsync(first.fileno())
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return False
            raise
    return False


def _file_system(folder: Path) -> str:
    """The type of the file system that ``folder`` is in."""
    resolved = folder.resolve()
    mounts = [each for each in psutil.disk_partitions(all=True) if resolved.is_relative_to(each.mountpoint)]
    return max(reversed(mounts), key=lambda each: len(each.mountpoint)).fstype if mounts else "unknown file system"


def memory(config: RunConfig) -> list[Finding]:
    """The budget and who sets it, what is free now, and swap."""
    budget, now, swap = memory_budget(config.mem_gb), psutil.virtual_memory(), psutil.swap_memory()
    found = (
        f"{budget.total_bytes / 1e9:.2f} GB may be used ({budget.origin}), {now.available / 1e9:.2f} GB are free now"
    )
    needed = TASKS[config.task].training_stage.kernel_bytes
    more = "ask for more memory (mem_gb, --mem in SLURM, the container's limit)"
    if budget.total_bytes < needed:
        told = f"{found}; the smallest training takes about {needed / 1e9:.1f} GB"
        finding = problem("memory", told, more)
    elif budget.total_bytes < 2 * needed or now.available < needed:
        finding = warning("memory", found, f"end what else runs here, or {more}")
    else:
        finding = ok("memory", found)
    swapped = f"{swap.used / 1e9:.2f} of {swap.total / 1e9:.2f} GB used" if swap.total else "none"
    if swap.total and swap.used > swap.total / 2:
        return [finding, warning("swap", swapped, "the machine is short of memory now: end what else runs here")]
    return [finding, ok("swap", swapped)]


def processors(root: Path = Path("/")) -> Finding:
    """Cores, a control group's share of them, and the threads that torch will start."""
    cores, quota = available_cores(), _cpu_quota(root)
    asked = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(asked) if asked.isdecimal() and int(asked) else cores
    found = f"{cores} cores may be used" + (f", {quota:.1f} of their time" if quota else "")
    found += f", OMP_NUM_THREADS={asked}" if asked else ""
    usable = max(1, round(min(quota or cores, cores)))
    if threads > usable:
        remedy = f"export OMP_NUM_THREADS={usable}, or ask for more cores"
        return warning("processors", f"{found}: {threads} threads would wait for each other", remedy)
    return ok("processors", found)


def _cpu_quota(root: Path) -> float | None:
    """The smallest share of this process's control groups, in cores; None without a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    return min((quota for line in lines for quota in _quotas(root / "sys/fs/cgroup", line)), default=None)


def _quotas(base: Path, line: str) -> Iterator[float]:
    _, controllers, group = line.split(":", 2)
    path = PurePosixPath("/", group)
    inside = [path, *path.parents] if ".." not in path.parts else [PurePosixPath("/")]
    for folder in (each.relative_to("/") for each in inside):
        if not controllers:
            values = _words(base / folder / "cpu.max")
        elif "cpu" in controllers.split(","):
            cpu = base / "cpu" / folder
            values = _words(cpu / "cpu.cfs_quota_us") + _words(cpu / "cpu.cfs_period_us")
        else:
            return
        if len(values) == 2 and all(value.isdecimal() for value in values) and int(values[1]):
            yield int(values[0]) / int(values[1])


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def shared_memory(config: RunConfig, folder: Path = Path("/dev/shm")) -> Finding:
    """Room for the batches that loader processes hand over."""
    name, clip = "shared memory", 3 * config.num_frames * config.fixed_size**2
    needed = (2 * config.num_workers + 1) * config.effective_batch_size * clip if config.num_workers else 0
    remedy = "-p num_workers 0, or a larger /dev/shm (docker: --shm-size)"
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        told = f"{folder}: {error.strerror}"
        return warning(name, told, remedy) if needed else ok(name, f"{told}; not needed without loader processes")
    told = f"{free / 1e6:,.0f} MB free in {folder}"
    if needed > free:
        return problem(name, f"{told}, {needed / 1e6:,.0f} MB needed by {config.num_workers} loader processes", remedy)
    return ok(name, f"{told}" + (f", {needed / 1e6:,.0f} MB needed" if needed else ", not needed without loaders"))


def open_files() -> Finding:
    """The limit of one process; loader processes hand tensors over as files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _FEW_FILES:
        return warning("open files", f"{soft} at most", f"ulimit -n {min(hard, 4096) if hard > 0 else 4096}")
    return ok("open files", "no limit" if soft == resource.RLIM_INFINITY else f"{soft:,} at most")


def slurm() -> list[Finding]:
    """Its commands, the job this is in, partitions and accounting."""
    job = slurm_job()
    findings = (
        [ok("SLURM job", ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in job.items()))] if job else []
    )
    if shutil.which("sbatch") is None:
        return [*findings, ok("SLURM", "not on this machine; --executor slurm is for a cluster's login node")]
    partitions, trouble = _asked("sinfo", "--noheader", "--format=%P %a, %l, %D nodes of %c cores and %m MB, %G")
    if trouble:
        remedy = "runs here work without it; for --executor slurm ask the site whether its controller is up"
        return [*findings, warning("SLURM", f"sinfo: {trouble}", remedy)]
    return [*findings, ok("SLURM", "; ".join(partitions[:8]) or "no partition")]


def _asked(*command: str) -> tuple[list[str], str]:
    """The lines that ``command`` says, or why it does not."""
    if shutil.which(command[0]) is None:
        return [], "no such command"
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=_SLURM_SECONDS, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError) as error:
        return [], str(error)
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        return [], said[-1] if said else f"exit code {done.returncode}"
    return done.stdout.decode("utf-8", "replace").strip().splitlines(), ""


# The doctor's look at Python, the installed packages, torch and its devices, and the codecs.

_INSTALL = "python -m pip install --requirement requirements.lock (with make: make setup)"
_SHOWN = 6
_LEAST_PYTHON = (3, 11)


def python() -> Finding:
    """Version and word size."""
    found = f"{platform.python_version()} ({platform.python_implementation()}, {8 * struct.calcsize('P')} bit)"
    if tuple(map(int, platform.python_version_tuple()[:2])) < _LEAST_PYTHON:
        return problem("Python", found, "install Python 3.11 or newer, then: make PYTHON=/path/to/python3.11 setup")
    if struct.calcsize("P") < 8:
        return problem("Python", found, "install a 64-bit Python; torch has no other")
    return ok("Python", found)


def packages(checkout: Path) -> list[Finding]:
    """Whether what is installed is what ``requirements.lock`` names, and whether ``fvc_lib`` is this checkout's."""
    return [_lock_drift(checkout), _own_package(checkout)]


def _lock_drift(checkout: Path) -> Finding:
    name, path = "locked versions", checkout / "requirements.lock"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        return warning(name, f"{path}: {error.strerror}", "take requirements.lock from the project's checkout")
    wanted = dict(line.strip().split("==", 1) for line in text.splitlines() if "==" in line and line[0] != "#")
    there = {package: _installed(package) for package in wanted}
    needed = {_normal(each) for each in _requirements()}
    missing = [package for package in wanted if there[package] is None]
    other = [
        f"{package} {now} instead of {wanted[package]}"
        for package, now in there.items()
        if now is not None and now.split("+")[0] != wanted[package].split("+")[0]
    ]
    lacking = [package for package in missing if _normal(package) in needed]
    if lacking:
        return problem(name, f"not installed: {_some(lacking)}", _INSTALL)
    if other or missing:
        parts = [_some(other)] if other else []
        parts += [f"not installed: {_some(missing)}"] if missing else []
        return warning(name, "; ".join(parts), f"what was tested is what the lock names: {_INSTALL}")
    return ok(name, f"all {len(wanted)} are installed as locked")


def _own_package(checkout: Path) -> Finding:
    name, here = "fvc_lib", CHECKOUT
    installed = _installed("fvc_lib")
    mend = "python -m pip install --no-deps --editable ."
    if here != checkout.resolve():
        return problem(name, f"imported from {here}, while the checkout is {checkout}", f"in the checkout: {mend}")
    if installed is None:
        return warning(name, "this checkout, not installed: only its own folder can import it", mend)
    if installed != fvc_lib.__version__:
        return warning(name, f"installed as {installed}, the code says {fvc_lib.__version__}", mend)
    return ok(name, f"{installed}, this checkout")


def code(checkout: Path) -> Finding:
    """Whether a run can record which code it ran."""
    state = code_state(checkout)
    if state.commit is None:
        remedy = "install git and work in a clone, so that a run's record names its code"
        return warning("code", f"no commit can be recorded: {state.problem}", remedy)
    changed = "changed since; runs keep the patch" if state.changed_since_commit else "unchanged"
    if state.left_out:
        told = f"commit {state.commit[:12]}, changed since, and the patch is not whole: {'; '.join(state.left_out)}"
        return ok("code", told)
    return ok("code", f"commit {state.commit[:12]}, {changed}")


def torch(config: RunConfig) -> list[Finding]:
    """torch, and each of its devices, tried in a child process."""
    told = ask_child("torch_devices")
    facts = told.all
    if "version" not in facts:
        found = told.trouble or "says nothing"
        return [problem("torch", f"cannot be imported: {found}", f"install it anew: {_INSTALL}")]
    build = f"CUDA {facts['cuda']}" if facts.get("cuda") else f"ROCm {facts['hip']}" if facts.get("hip") else "CPU"
    found = f"{facts['version']}, built for {build}"
    devices = [name for name in facts.get("devices", []) if f"device {name}" in facts]
    findings = [ok("torch", found), *(_device(name, facts[f"device {name}"]) for name in devices)]
    if told.trouble:
        at = facts.get("trying") or "start"
        remedy = "mend its driver, or keep away from it: -p device cpu"
        findings.append(problem(f"device {at}", f"took the process down: {told.trouble}", remedy))
    return [*findings, *_missing_devices(config, facts, build)]


def _device(name: str, about: dict[str, object]) -> Finding:
    memory = about.get("memory_bytes")
    described = [str(about[key]) for key in ("name",) if about.get(key)]
    described += [f"{int(memory) / 1e9:.1f} GB"] if isinstance(memory, int) else []
    described += [f"capability {about['capability']}"] if about.get("capability") else []
    if error := about.get("error"):
        remedy = "install a torch build for this device, or keep away from it: -p device cpu"
        return problem(f"device {name}", f"{', '.join([*described, ''])}a small product failed: {error}", remedy)
    return ok(f"device {name}", ", ".join([*described, "a small product and its gradient are right"]))


def _missing_devices(config: RunConfig, facts: dict[str, object], build: str) -> Iterator[Finding]:
    devices, shown = str(facts.get("devices", "")), gpus()
    if shown and "cuda" not in devices:
        why = facts.get("cuda_error") or f"torch is built for {build}"
        remedy = (
            "install NVIDIA's driver for that CUDA version, or a torch build for the older one"
            if facts.get("cuda_error")
            else "install torch's CUDA build of the same version from PyTorch's own index"
        )
        yield warning("GPU", f"{', '.join(sorted(set(shown)))} lies idle: {why}", remedy)
    elif facts.get("cuda") and "cuda" not in devices:
        yield ok("GPU", f"none is to be seen ({facts.get('cuda_error') or 'none'}); training uses the CPU")
    if config.device not in ("auto", "cpu") and config.device not in devices:
        there = "auto takes what is there"
        yield problem("device", f"device={config.device} is asked for and is not here", f"-p device auto: {there}")


def torchvision() -> Finding:
    """FVC does without it; where it is installed and broken, other packages break with it."""
    name, installed = "torchvision", _installed("torchvision")
    told = ask_child("torchvision_import")
    facts = told.all
    if "version" not in facts and installed is None and "No module named 'torchvision'" in told.trouble:
        return ok(name, "not installed, and not needed")
    if facts.get("works") and not told.trouble:
        return ok(name, f"{facts['version']}, fits torch {_installed('torch')}")
    wanted = [each for each in _requires("torchvision") if _normal(re.split(r"[^\w.-]", each)[0]) == "torch"]
    fits = f"; it wants {wanted[0].partition(';')[0].strip()}" if wanted else ""
    remedy = "FVC does not need it: pip uninstall torchvision, or install the one built for this torch"
    found = f"{installed or 'found'}, but it fails beside torch {_installed('torch')}: {told.trouble or 'wrong result'}"
    return warning(name, found + fits, remedy)


def codecs(config: RunConfig) -> list[Finding]:
    """PyAV's decoders, tried, and the encoders that write the sample corpus."""
    told = ask_child("codecs")
    facts = told.all
    if "version" not in facts:
        return [problem("PyAV", f"cannot be imported: {told.trouble or 'says nothing'}", _INSTALL)]
    findings = [ok("PyAV", f"{facts['version']}" + (f", ffmpeg {facts['ffmpeg']}" if facts.get("ffmpeg") else ""))]
    findings.append(_decoders(told))
    lacking = [name for name in SAMPLE_ENCODERS if name not in facts.get("encoders", ())]
    if lacking and not config.corpus:
        remedy = "install PyAV's own wheel (pip install --force-reinstall av), or give a corpus: -p corpus PATH"
        findings.append(problem("sample corpus", f"cannot be written without {', '.join(lacking)}", remedy))
    return findings


def _decoders(told: Told) -> Finding:
    facts = told.all
    decoders = {name.removeprefix("decoder "): there for name, there in facts.items() if name.startswith("decoder ")}
    tried = {name.removeprefix("tried "): why for name, why in facts.items() if name.startswith("tried ")}
    remedy = "videos in these codecs would be rejected; install PyAV's own wheel: pip install --force-reinstall av"
    if told.trouble:
        at = facts.get("trying") or "start"
        return problem("decoders", f"decoding {at} took the process down: {told.trouble}", remedy)
    bad = [f"{codec} is missing" for codec, there in decoders.items() if not there]
    bad += [f"{codec} fails: {why}" for codec, why in tried.items() if why]
    if bad:
        return warning("decoders", "; ".join(bad), remedy)
    said = [codec if codec in tried else f"{codec} (not tried: no encoder)" for codec in decoders]
    return ok("decoders", ", ".join(said))


def _requirements() -> list[str]:
    """Names of what ``fvc_lib`` cannot do without."""
    return [re.split(r"[^\w.-]", each)[0] for each in _requires("fvc_lib") if "extra ==" not in each]


def _requires(package: str) -> Sequence[str]:
    try:
        return metadata.requires(package) or ()
    except metadata.PackageNotFoundError:
        return ()


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


PATIENCE_SECONDS = 60.0
_SIGNS: Mapping[str, str] = {"ok": "ok     ", "warning": "warning", "problem": "PROBLEM"}

Check = Callable[[], Sequence[Finding]]


@dataclass(frozen=True)
class _Running:
    name: str
    thread: threading.Thread
    found: list[Finding]


def diagnose(
    config: RunConfig, *, checkout: Path = CHECKOUT, patience_seconds: float = PATIENCE_SECONDS
) -> list[Finding]:
    """Look at everything a run with ``config`` needs; takes a few seconds and changes nothing.

    Args:
        config: the parameters that are going to be used.
        checkout: where ``requirements.lock`` lies.
        patience_seconds: for all checks together, which run at the same time.
    """
    checks: dict[str, Check] = {
        "Python": lambda: [python()],
        "packages": lambda: packages(checkout),
        "code": lambda: [code(checkout)],
        "torch": lambda: torch(config),
        "torchvision": lambda: [torchvision()],
        "codecs": lambda: codecs(config),
        "disk": lambda: disks(config),
        "memory": lambda: memory(config),
        "processors": lambda: [processors()],
        "shared memory": lambda: [shared_memory(config)],
        "open files": lambda: [open_files()],
        "SLURM": lambda: slurm(),
    }
    running = [_begun(name, check) for name, check in checks.items()]
    deadline = time.monotonic() + patience_seconds
    for each in running:
        each.thread.join(max(0.0, deadline - time.monotonic()))
    return [finding for each in running for finding in _of(each)]


def lines(findings: Sequence[Finding]) -> list[str]:
    """For the terminal: a line for each finding, below a trouble what to do, and at the end what it comes to."""
    width = max((len(finding.name) for finding in findings), default=0)
    shown = []
    for finding in findings:
        shown.append(f"{_SIGNS[finding.state]}  {finding.name:<{width}}  {finding.found}")
        if finding.remedy:
            shown.append(f"{'':<{width + 11}}-> {finding.remedy}")
    counts = {state: sum(finding.state == state for finding in findings) for state in ("problem", "warning")}
    if not any(counts.values()):
        return [*shown, "", "Nothing stands in the way of a run."]
    told = ", ".join(f"{count} {state}{'s' if count > 1 else ''}" for state, count in counts.items() if count)
    end = "A run would fail or lie; mend this first." if counts["problem"] else "A run will work."
    return [*shown, "", f"{told}. {end}"]


def exit_code(findings: Sequence[Finding]) -> Literal[0, 1]:
    """1 when there is a problem; warnings are none."""
    return 1 if any(finding.state == "problem" for finding in findings) else 0


def _begun(name: str, check: Check) -> _Running:
    found: list[Finding] = []

    def look() -> None:
        try:
            found.extend(check() or [ok(name, "nothing to report")])
        except Exception as error:  # noqa: BLE001 - a doctor that dies of one ailment tells nothing of the others
            told = f"could not be looked at: {type(error).__name__}: {error}"
            found.append(warning(name, told, "report this; the other findings stand"))

    # A daemon: a disk that hangs must not keep the command from ending.
    thread = threading.Thread(target=look, name=name, daemon=True)
    thread.start()
    return _Running(name, thread, found)


def _of(running: _Running) -> list[Finding]:
    if running.thread.is_alive():
        remedy = "a disk or a device does not answer; look at what hangs there, then try again"
        return [warning(running.name, "no answer in time", remedy)]
    return running.found
