"""Whether this machine can do what is asked: one finding per thing looked at, and for each trouble what to do.

Nothing here may crash or hang: what could take the process down runs in a child, and a check that fails or takes too
long is itself a finding.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fvc_lib import CHECKOUT
from fvc_lib.execution.doctor import machine, software
from fvc_lib.execution.doctor.finding import Finding, ok, warning
from fvc_lib.services.config import RunConfig

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
        "Python": lambda: [software.python()],
        "packages": lambda: software.packages(checkout),
        "code": lambda: [software.code(checkout)],
        "torch": lambda: software.torch(config),
        "torchvision": lambda: [software.torchvision()],
        "codecs": lambda: software.codecs(config),
        "disk": lambda: machine.disks(config),
        "memory": lambda: machine.memory(config),
        "processors": lambda: [machine.processors()],
        "shared memory": lambda: [machine.shared_memory(config)],
        "open files": lambda: [machine.open_files()],
        "allocator settings": lambda: [machine.allocator_settings()],
        "SLURM": lambda: machine.slurm(),
        "browser": lambda: [software.browser()],
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
