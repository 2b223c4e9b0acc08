"""Whether this machine can do what is wanted: one finding per thing looked at, and for each trouble what to do.

Nothing here may crash or hang: what could take the process down runs in a child, and a check that fails or takes too
long is itself a finding.
"""

import fcntl
import io
import os
import platform
import re
import shutil
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import psutil

import fvc_lib
from fvc_lib import CHECKOUT
from fvc_lib.execution.run.lock import NO_LOCKS
from fvc_lib.execution.run.record import code_state, gpus, slurm_job
from fvc_lib.execution.slurm.queue import SlurmError, has_command, output_of
from fvc_lib.services.config import RunConfig
from fvc_lib.services.isolated_workers import Answer, available_cores, run_isolated
from fvc_lib.services.memory.budget import memory_budget
from fvc_lib.services.tasks import TASKS

State = Literal["ok", "warning", "problem"]
CHILD_SECONDS = 45.0
PATIENCE_SECONDS = 60.0
_LITTLE_DISK_BYTES, _NO_DISK_BYTES = 5_000_000_000, 500_000_000
_INSTALL = "python -m pip install --requirement requirements.lock (with make: make setup)"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str  # what
    state: State  # ok; a warning, with which a run works but worse; a problem, with which it fails or lies
    found: str  # what is there, in words
    remedy: str = ""  # what to do; empty only where all is well

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


def diagnose(
    config: RunConfig, *, checkout: Path = CHECKOUT, patience_seconds: float = PATIENCE_SECONDS
) -> list[Finding]:
    """Look at everything a run with ``config`` needs; takes a few seconds and changes nothing.

    ``checkout`` is where ``requirements.lock`` lies; ``patience_seconds`` are for all checks together, which run at the
    same time.
    """
    checks: dict[str, Callable[[], list[Finding]]] = {
        "Python": lambda: [ok("Python", f"{platform.python_version()} ({platform.python_implementation()})")],
        "packages": lambda: packages(checkout),
        "code": lambda: [code(checkout)],
        "torch": lambda: torch(config),
        "codecs": lambda: codecs(config),
        "disk": lambda: disks(config),
        "memory": lambda: [memory(config)],
        "processors": lambda: [processors()],
        "shared memory": lambda: [shared_memory(config)],
        "SLURM": lambda: slurm(),
    }
    found: dict[str, list[Finding]] = {}

    def look(name: str) -> None:
        try:
            found[name] = checks[name]()
        except Exception as error:  # noqa: BLE001 - a doctor that dies of one ailment says nothing of the others
            what = f"could not be looked at: {type(error).__name__}: {error}"
            found[name] = [warning(name, what, "report this; the other findings stand")]

    # Daemons: a disk that hangs must not keep the command from ending.
    threads = [threading.Thread(target=look, args=(name,), daemon=True) for name in checks]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + patience_seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    hangs = "a disk or a device does not answer; look at what hangs there, then try again"
    return [each for name in checks for each in found.get(name, [warning(name, "no answer in time", hangs)])]


def lines(findings: Sequence[Finding]) -> list[str]:
    """For the terminal: a line for each finding, below a trouble what to do, and at the end what it comes to."""
    width = max((len(finding.name) for finding in findings), default=0)
    shown = []
    for finding in findings:
        sign = "PROBLEM" if finding.state == "problem" else finding.state
        shown.append(f"{sign:<7}  {finding.name:<{width}}  {finding.found}")
        if finding.remedy:
            shown.append(f"{'':<{width + 11}}-> {finding.remedy}")
    counts = {state: sum(finding.state == state for finding in findings) for state in ("problem", "warning")}
    if not any(counts.values()):
        return [*shown, "", "Nothing stands in the way of a run."]
    how_many = ", ".join(f"{count} {state}{'s' if count > 1 else ''}" for state, count in counts.items() if count)
    end = "A run would fail or lie; mend this first." if counts["problem"] else "A run will work."
    return [*shown, "", f"{how_many}. {end}"]


def exit_code(findings: Sequence[Finding]) -> Literal[0, 1]:
    """1 when there is a problem; warnings are none."""
    return 1 if any(finding.state == "problem" for finding in findings) else 0


# The machine: disks, memory, processors, limits and SLURM.


def disks(config: RunConfig) -> list[Finding]:
    """Each folder that is written: whether it can be, its space, its locks."""
    folders = {"runs": config.runs_dir, "clips": config.cache_dir}
    if not config.corpus:
        folders["sample corpus"] = config.data_dir
    return [_disk(f"disk for {name}", Path(folder).absolute()) for name, folder in folders.items()]


def _disk(name: str, folder: Path) -> Finding:
    other = "choose another folder: FVC_RUNS_DIR, FVC_CACHE_DIR, FVC_DATA_DIR"
    there, where = folder, str(folder)
    try:
        there = next(each for each in (folder, *folder.parents) if each.exists() or each.is_symlink())
        where += "" if there == folder else f" (to be made in {there})"
        if not there.is_dir():
            what = "is no folder" if there.exists() else "is a link to nowhere"
            return problem(name, f"{where}: {there} {what}", other)
        locks = _locks_work(there)
    except OSError as error:
        return problem(
            name, f"{where}: cannot be written: {error.strerror}", f"get the right to write there, or {other}"
        )
    free = shutil.disk_usage(there).free
    found = f"{where}: {free / 1e9:.1f} GB free"
    if free < _NO_DISK_BYTES:
        return problem(name, found, f"make room, or {other}")
    if not locks:
        remedy = "runs are then told apart by a heartbeat alone: never start one twice at the same moment"
        return warning(name, f"{found}, without file locks", remedy)
    if free < _LITTLE_DISK_BYTES:
        return warning(name, found, f"checkpoints and clips take room: make more, or {other}")
    return ok(name, f"{found}, writable, locks work")


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
            if error.errno in NO_LOCKS:
                return False
            raise
    return False


def memory(config: RunConfig) -> Finding:
    """The budget and who sets it, what is free now, and swap."""
    budget, now, swap = memory_budget(config.mem_gb), psutil.virtual_memory(), psutil.swap_memory()
    found = (
        f"{budget.total_bytes / 1e9:.2f} GB may be used ({budget.origin}), {now.available / 1e9:.2f} GB are free now"
    )
    found += f", {swap.used / 1e9:.2f} GB of swap are used" if swap.used else ""
    needed = TASKS[config.task].training_stage.kernel_bytes
    more = "ask for more memory (mem_gb, --mem in SLURM, the container's limit)"
    if budget.total_bytes < needed:
        return problem("memory", f"{found}; the smallest training takes about {needed / 1e9:.1f} GB", more)
    if budget.total_bytes < 2 * needed or now.available < needed:
        return warning("memory", found, f"end what else runs here, or {more}")
    return ok("memory", found)


def processors() -> Finding:
    """Cores, a container's share of their time counted, and the threads that torch will start."""
    cores, threads = available_cores(), os.environ.get("OMP_NUM_THREADS", "")
    found = f"{cores} cores may be used" + (f", OMP_NUM_THREADS={threads}" if threads else "")
    if threads.isdecimal() and int(threads) > cores:
        remedy = f"export OMP_NUM_THREADS={cores}, or ask for more cores"
        return warning("processors", f"{found}: {threads} threads would wait for each other", remedy)
    return ok("processors", found)


def shared_memory(config: RunConfig, folder: Path = Path("/dev/shm")) -> Finding:
    """Room for the batches that loader processes hand over."""
    name = "shared memory"
    if not config.num_workers:
        return ok(name, "not needed without loader processes")
    clip = 3 * config.clips.num_frames * config.clips.side**2
    needed = (2 * config.num_workers + 1) * config.effective_batch_size * clip
    remedy = "-p num_workers 0, or a larger /dev/shm (docker: --shm-size)"
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return warning(name, f"{folder}: {error.strerror}", remedy)
    found = f"{free / 1e6:,.0f} MB free in {folder}, {needed / 1e6:,.0f} MB needed by loader processes"
    return problem(name, found, remedy) if needed > free else ok(name, found)


def slurm() -> list[Finding]:
    """The job this is in, and the partitions."""
    job = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in (slurm_job() or {}).items())
    findings = [ok("SLURM job", job)] if job else []
    if not has_command("sbatch"):
        return [*findings, ok("SLURM", "not on this machine; --executor slurm is for a cluster's login node")]
    try:
        answer = output_of(["sinfo", "--noheader", "--format=%P %a, %l, %D nodes of %c cores and %m MB, %G"])
    except SlurmError as error:
        remedy = "runs here work without it; for --executor slurm ask the site whether its controller is up"
        return [*findings, warning("SLURM", str(error).splitlines()[0], remedy)]  # sinfo's first line is the cause
    return [*findings, ok("SLURM", "; ".join(answer.replace(", (null)", "").splitlines()[:8]) or "no partition")]


# What is installed: packages, the code itself, torch with its devices, and the codecs.


def packages(checkout: Path) -> list[Finding]:
    """Whether what ``fvc_lib`` requires is installed, as ``requirements.lock`` names it, and ``fvc_lib`` is here."""
    return [_requirements(checkout), _lock_drift(checkout), _own_package(checkout)]


def _lock_drift(checkout: Path) -> Finding:
    name, path = "locked versions", checkout / "requirements.lock"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        return warning(name, f"{path}: {error.strerror}", "take requirements.lock from the project's checkout")
    wanted = dict(line.strip().split("==", 1) for line in text.splitlines() if "==" in line and line[0] != "#")
    installed = {package: _installed(package) for package in wanted}
    drift = [
        f"{package} {version} instead of {wanted[package]}" if version else f"{package} is not installed"
        for package, version in installed.items()
        if version is None or version.split("+")[0] != wanted[package].split("+")[0]
    ]
    if not drift:
        return ok(name, f"all {len(wanted)} are installed as locked")
    found = ", ".join(drift[:6]) + (f" and {len(drift) - 6} more" if len(drift) > 6 else "")
    return warning(name, found, f"what was tested is what the lock names: {_INSTALL}")


def _requirements(checkout: Path) -> Finding:
    name, path = "required packages", checkout / "pyproject.toml"
    try:
        wanted = tomllib.loads(path.read_text(encoding="utf-8"))["project"]["dependencies"]
    except (OSError, ValueError, LookupError) as error:
        return warning(name, f"{path}: {error}", "take pyproject.toml from the project's checkout")
    missing = [each for each in wanted if _installed(re.split(r"[^\w.-]", each)[0]) is None]
    if missing:
        return problem(name, f"not installed: {', '.join(missing)}", _INSTALL)
    return ok(name, f"all {len(wanted)} are installed")


def _own_package(checkout: Path) -> Finding:
    name, installed, mend = "fvc_lib", _installed("fvc_lib"), "python -m pip install --no-deps --editable ."
    if checkout.resolve() != CHECKOUT:
        return problem(name, f"imported from {CHECKOUT}, while the checkout is {checkout}", f"in the checkout: {mend}")
    if installed is None:
        return warning(name, "this checkout, not installed: only its own folder can import it", mend)
    if installed != fvc_lib.__version__:
        return warning(name, f"installed as {installed}, the code says {fvc_lib.__version__}", mend)
    return ok(name, f"{installed}, this checkout")


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def code(checkout: Path) -> Finding:
    """Whether a run can record which code it ran."""
    state = code_state(checkout)
    if state.commit is None:
        remedy = "install git and work in a clone, so that a run's record names its code"
        return warning("code", f"no commit can be recorded: {state.problem}", remedy)
    changed = "changed since; runs keep the patch" if state.changed_since_commit else "unchanged"
    lacks = f", which is not whole: {'; '.join(state.left_out)}" if state.left_out else ""
    return ok("code", f"commit {state.commit[:12]}, {changed}{lacks}")


def torch(config: RunConfig) -> list[Finding]:
    """torch, and each of its devices, tried in child processes: a driver may hang or crash where torch is sound."""
    (answer,) = tried("torch_build", [None])
    if answer.failure:
        return [problem("torch", f"cannot be imported: {answer.detail}", f"install it anew: {_INSTALL}")]
    facts = answer.value
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else f"ROCm {facts['hip']}" if facts["hip"] else "CPU"
    findings = [ok("torch", f"{facts['version']}, built for {build}")]
    (answer,) = tried("torch_devices", [None])
    facts |= answer.value if not answer.failure else {"devices": {"cpu": ""}, "cuda_error": None}
    unused = config.device == "cpu"  # no training comes near the other devices
    if answer.failure:
        what = f"torch is sound, but asking the driver for devices failed: {answer.detail}"
        grave = warning if unused else problem
        findings.append(grave("devices", what, "mend the device's driver, or keep away from it: -p device cpu"))
    remedy = "install a torch build or a driver for this device, or keep away from it: -p device cpu"
    for (name, about), each in zip(facts["devices"].items(), tried("try_device", list(facts["devices"])), strict=True):
        grave = warning if unused and name != "cpu" else problem
        if each.failure:
            findings.append(grave(f"device {name}", f"{about}took the process down: {each.detail}", remedy))
        elif each.value:
            findings.append(grave(f"device {name}", f"{about}a small product failed: {each.value}", remedy))
        else:
            findings.append(ok(f"device {name}", f"{about}a small product and its gradient are right"))
    return findings if answer.failure else [*findings, *_missing_devices(config, facts, build)]


def _missing_devices(config: RunConfig, facts: dict[str, Any], build: str) -> Iterator[Finding]:
    devices, shown, error = " ".join(facts["devices"]), gpus(), facts["cuda_error"]
    if shown and "cuda" not in devices:
        remedy = "install torch's CUDA build of the same version from PyTorch's own index"
        if error:
            remedy = "install NVIDIA's driver for that CUDA version, or a torch build for the older one"
        why = error or f"torch is built for {build}"
        yield warning("GPU", f"{', '.join(sorted(set(shown)))} lies idle: {why}", remedy)
    elif facts["cuda"] and "cuda" not in devices:
        yield ok("GPU", f"none is to be seen ({error or 'none'}); training uses the CPU")
    if config.device not in ("auto", "cpu") and config.device not in devices:
        remedy = "-p device auto: auto takes what is there"
        yield problem("device", f"device={config.device} is asked for and is not here", remedy)


def codecs(config: RunConfig) -> list[Finding]:
    """PyAV's decoders, tried, and the encoders that write the sample corpus."""
    (answer,) = tried("pyav_build", [None])
    if answer.failure:
        return [problem("PyAV", f"cannot be imported: {answer.detail}", _INSTALL)]
    facts = answer.value
    findings = [ok("PyAV", f"{facts['version']}" + (f", ffmpeg {facts['ffmpeg']}" if facts["ffmpeg"] else ""))]
    remedy = "videos in these codecs would be rejected; install PyAV's own wheel: pip install --force-reinstall av"
    answers = dict(zip(_CODECS, tried("try_codec", list(_CODECS)), strict=True))
    crashed = [f"{codec} took the process down: {each.detail}" for codec, each in answers.items() if each.failure]
    bad = [f"{codec} {each.value}" for codec, each in answers.items() if each.value and each.value[0] != "("]
    if crashed:
        findings.append(problem("decoders", "; ".join([*crashed, *bad]), remedy))
    elif bad:
        findings.append(warning("decoders", "; ".join(bad), remedy))
    else:
        findings.append(ok("decoders", ", ".join(f"{codec} {each.value}".strip() for codec, each in answers.items())))
    lacking = [name for name in SAMPLE_ENCODERS if name not in facts["encoders"]]
    if lacking and not config.corpus:
        remedy = "install PyAV's own wheel (pip install --force-reinstall av), or give a corpus: -p corpus PATH"
        findings.append(problem("sample corpus", f"cannot be written without {', '.join(lacking)}", remedy))
    return findings


# What is tried in a child process: imports and calls that may crash, hang or not be there at all.

# By codec: its decoders, of which one is enough, and the encoder that writes what they are tried on.
_CODECS = {
    "h264": (("h264",), "libx264"),
    "hevc": (("hevc",), "libx265"),
    "vp9": (("vp9", "libvpx-vp9"), "libvpx-vp9"),
    "av1": (("libdav1d", "libaom-av1", "av1"), "libsvtav1"),
    "mpeg4": (("mpeg4",), "mpeg4"),
}
SAMPLE_ENCODERS = ("libx264", "mpeg4", "libvpx-vp9")  # what the sample corpus is written with


def tried(function: str, items: Sequence[str | None], seconds: float | None = None) -> list[Answer]:
    """What ``function`` of this module answers to each of ``items`` in a child process, or how that ended."""
    seconds = CHILD_SECONDS if seconds is None else seconds
    name = f"{__name__}:{function}"
    return list(run_isolated(name, items, workers=1, timeout_seconds=seconds, memory_bytes=None))


def torch_build(_: None) -> dict[str, Any]:
    """Version and build of torch; no driver is asked."""
    import torch

    return {
        "version": torch.__version__, "cuda": torch.version.cuda, "hip": getattr(torch.version, "hip", None),
    }  # fmt: skip


def torch_devices(_: None) -> dict[str, Any]:
    """The devices that torch finds, each with what is to be said of it, and why it finds no GPU."""
    import torch

    error, devices = None, {"cpu": ""}
    if torch.version.cuda or getattr(torch.version, "hip", None):
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]  # torch is half typed
            for name in (f"cuda:{number}" for number in range(torch.cuda.device_count())):
                found = torch.cuda.get_device_properties(name)
                memory = f"{found.total_memory / 1e9:.1f} GB"
                devices[name] = f"{found.name}, {memory}, capability {found.major}.{found.minor}, "
        except (RuntimeError, AssertionError) as caught:
            error = str(caught).partition("\n")[0]
    if torch.backends.mps.is_available():
        devices["mps"] = ""
    return {"devices": devices, "cuda_error": error}


def try_device(name: str) -> str:
    """Why a product and its gradient fail on a device; empty where they are right."""
    import torch

    try:
        values = torch.ones(64, 64, device=name, requires_grad=True)
        (values @ values).sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    right = values.grad is not None and bool((values.grad == 128).all().item())
    return "" if right else "a product of ones came out wrong"


def pyav_build(_: None) -> dict[str, Any]:
    """Version of PyAV, and which encoders of the sample corpus it has."""
    import av

    encoders = [name for name in SAMPLE_ENCODERS if _has_codec(name, "w")]
    return {"version": av.__version__, "ffmpeg": getattr(av, "ffmpeg_version_info", None), "encoders": encoders}


def try_codec(codec: str) -> str:
    """Whether a codec's decoder is there, and reads what was just written; empty where it does."""
    decoders, encoder = _CODECS[codec]
    if not any(_has_codec(name, "r") for name in decoders):
        return "is missing"
    if not _has_codec(encoder, "w"):
        return "(not tried: no encoder)"
    error = _round_trip(encoder)
    return f"fails: {error}" if error else ""


def _has_codec(name: str, mode: Literal["r", "w"]) -> bool:
    import av

    try:
        av.codec.Codec(name, mode)
    except ValueError:
        return False
    return True


def _round_trip(encoder: str) -> str:
    """Why four small pictures could not be written and read again; empty when they could."""
    import av
    import numpy as np

    try:
        content = io.BytesIO()
        with av.open(content, "w", format="matroska") as output:
            stream: Any = output.add_stream(encoder, rate=4)
            stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
            for shade in (0, 80, 160, 240):
                picture = av.VideoFrame.from_ndarray(np.full((64, 64, 3), shade, np.uint8), format="rgb24")
                output.mux(stream.encode(picture))
            output.mux(stream.encode())
        content.seek(0)
        with av.open(content, "r") as source:
            count = len(list(source.decode(video=0)))
    except (av.FFmpegError, ValueError) as error:
        return str(error)
    return "" if count == 4 else f"wrote 4 pictures and read {count}"
