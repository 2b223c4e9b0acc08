"""What a check found, and how a child process is asked to look at what might take it down."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Any, Literal

from fvc_lib import CHECKOUT

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
