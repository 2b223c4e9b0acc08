"""Whether this machine can do what is asked: one finding per thing looked at, and for each trouble what to do.

Nothing here may crash or hang: what could take the process down runs in a child, and a check that fails or takes too
long is itself a finding.
"""

from __future__ import annotations

import platform
import re
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import fvc_lib
from fvc_lib import CHECKOUT
from fvc_lib.execution.doctor import machine
from fvc_lib.execution.doctor.machine import Finding, Told, ask_child, ok, problem, warning
from fvc_lib.execution.doctor.probes import SAMPLE_ENCODERS
from fvc_lib.execution.run.record import code_state, gpus
from fvc_lib.services.config import RunConfig

# ----------------------------------------------------------------------------------------------------
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


def browser() -> Finding:
    """Only tests look at pages in one."""
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    return ok("browser", f"{program}" if program else "no chromium: the tests that look at pages in one are skipped")


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
        "disk": lambda: machine.disks(config),
        "memory": lambda: machine.memory(config),
        "processors": lambda: [machine.processors()],
        "shared memory": lambda: [machine.shared_memory(config)],
        "open files": lambda: [machine.open_files()],
        "SLURM": lambda: machine.slurm(),
        "browser": lambda: [browser()],
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
