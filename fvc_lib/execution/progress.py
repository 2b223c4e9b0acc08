"""Progress that crosses from a kernel to whoever waits for it: one small file per task, replaced as work goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fvc_lib.services.atomic_files import temporary_of
from fvc_lib.services.run_paths import RunPaths, stage_key

WRITE_INTERVAL_SECONDS = 0.5

Report = Callable[[int, int], None]


@dataclass(frozen=True)
class Progress:
    """What a task is doing: ``done`` of ``total`` units of ``what``."""

    what: str
    done: int
    total: int


def progress_path(run: RunPaths, stage: str, fold: int | None) -> Path:
    """Where a task leaves its progress."""
    return run.logs / f"{stage_key(stage, fold)}.progress.json"


def read_progress(path: Path) -> Progress | None:
    """The latest progress; None before there is any."""
    try:
        return Progress(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def file_reporter(path: Path, what: str) -> Report:
    """A callback ``(done, total)`` that replaces ``path`` at most twice a second and at the end.

    Not fsynced: losing it in a power cut loses nothing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    last = -WRITE_INTERVAL_SECONDS

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done < total and now - last < WRITE_INTERVAL_SECONDS:
            return
        last = now
        temporary = temporary_of(path)
        temporary.write_text(json.dumps(asdict(Progress(what, done, total))))
        temporary.replace(path)

    return report


def bar_reporter(what: str) -> Report:
    """A callback ``(done, total)`` that draws a bar in a live notebook or terminal."""
    from tqdm.auto import tqdm

    bar: Any = None

    def report(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            bar = tqdm(total=total, desc=what)
        bar.total = total
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    return report
