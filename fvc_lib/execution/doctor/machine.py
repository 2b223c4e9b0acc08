"""The doctor's look at disks, memory, processors, limits and SLURM."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import psutil

from fvc_lib import CHECKOUT
from fvc_lib.execution.run.record import slurm_job
from fvc_lib.services.config import RunConfig
from fvc_lib.services.isolated_workers import available_cores
from fvc_lib.services.memory_budget import memory_budget
from fvc_lib.services.tasks import TASKS

# ----------------------------------------------------------------------------------------------------
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
    """Its type, of the mount that ``folder`` is in; empty words where there is no /proc."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return "a local or network file system"
    resolved, best = folder.resolve(), ("", "unknown file system")
    for line in mounts:
        _, mount, kind, *_ = line.split(" ")
        mount = mount.replace("\\040", " ")
        if resolved.is_relative_to(mount) and len(mount) >= len(best[0]):
            best = (mount, kind)
    return best[1]


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
    findings.append(ok("SLURM", "; ".join(partitions[:8]) or "no partition"))
    _, trouble = _asked("sacct", "--noheader", "--allocations", "--starttime=now")
    told = f"not available ({trouble}); runs use their own figures" if trouble else "sacct answers"
    return [*findings, ok("SLURM accounting", told)]


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
