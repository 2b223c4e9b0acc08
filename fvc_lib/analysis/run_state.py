"""Where a run and its tasks stand, from what they left: also when whoever ran them has died without a word.

Reads only, and believes no file that says "running" unless a lock is held, or was renewed a moment ago from elsewhere.
"""

from __future__ import annotations

import fcntl
import json
import time
from pathlib import Path
from typing import Any

from fvc_lib.analysis.records import read_json_object
from fvc_lib.services.process_identity import this_host
from fvc_lib.services.run_paths import RunPaths

GONE = "stopped without a word"
_FRESH_SECONDS = 60.0  # a holder on another host renews its claim every few seconds


def run_status(run: RunPaths) -> dict[str, Any]:
    """``status.json`` with each task's own file over it, and with the states that are true now.

    A run or task that says it is running while nobody holds its lock has the state ``stopped without a word``.
    """
    status = read_json_object(run.status_json)
    stages = status.get("stages")
    status["stages"] = stages = dict(stages) if isinstance(stages, dict) else {}
    folder = run.task_status("").parent
    if folder.is_dir():
        for path in sorted(folder.glob("[!.]*.json")):
            if own := read_json_object(path):
                stages[path.stem] = own
    if not _says_running(status) and not any(map(_says_running, stages.values())):
        return status
    whole = is_held(run.root / "run.lock")
    for key, stage in stages.items():
        if _says_running(stage) and not whole and not is_held(run.task_lock(key)):
            stages[key] = {**stage, "state": GONE}
    if _says_running(status) and not whole and not any(map(_says_running, stages.values())):
        status["state"] = GONE
    return status


def is_held(lock: Path) -> bool:
    """Whether a living process holds ``lock``, as far as this host can tell; nothing is written and nobody kept."""
    try:
        with lock.open("rb") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            except OSError:
                pass  # no locks on this disk: the claim alone tells
            claim = json.loads(stream.read(4096) or b"{}")
            age_seconds = time.time() - lock.stat().st_mtime
    except (OSError, ValueError):
        return False
    elsewhere = isinstance(claim, dict) and claim.get("host") not in (None, this_host())
    return elsewhere and abs(age_seconds) < _FRESH_SECONDS


def _says_running(status: object) -> bool:
    return isinstance(status, dict) and status.get("state") == "running"
