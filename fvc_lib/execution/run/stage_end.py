"""How a stage ended, from what is known of its kernel: state, exit code, reason and error."""

from __future__ import annotations

import html
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import psutil

from fvc_lib.execution.run.status import StageError, StageStatus
from fvc_lib.services.atomic_files import write_bytes
from fvc_lib.services.config import RunConfig
from fvc_lib.services.memory_advice import MORE_MEMORY, next_settings
from fvc_lib.services.memory_budget import ProcessTree
from fvc_lib.services.redaction import Redactor

# How often the system killed for memory in this process's control group and the groups it lies in.


@dataclass(frozen=True)
class OomKills:
    """Kills for memory: ``own`` in this process's group or below, ``around`` in a group that contains it.

    A kill in ``own`` may have met any process of the group, a sibling too; one in ``around`` alone met another group,
    whose memory counts against the same limit. None: no counter can be read here.
    """

    own: int | None
    around: int | None

    def since(self, earlier: OomKills) -> OomKills:
        """What was added since ``earlier``."""
        return OomKills(_added(self.own, earlier.own), _added(self.around, earlier.around))


def oom_kills(root: Path = Path("/")) -> OomKills:
    """The counters as they are now.

    Args:
        root: the folder in which ``proc/self/cgroup`` and ``sys/fs/cgroup`` lie.
    """
    own = around = None
    for base, group, name in _memory_groups(root):
        folders = [base.joinpath(*group[:depth]) for depth in range(len(group), -1, -1)]
        counts = [count for folder in folders if (count := _count(folder / name)) is not None]
        if counts and _count(folders[0] / name) is not None:
            own = counts.pop(0)
        # Version 2 counts in every group above as well, version 1 in the victim's alone: the largest is the outermost.
        around = max(counts, default=around)
    return OomKills(own, around)


def _memory_groups(root: Path) -> Iterator[tuple[Path, tuple[str, ...], str]]:
    """The mount, the group's path below it and the counter's file, of version 2 and of version 1's memory groups."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    base = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, group = line.split(":", 2)
        parts = tuple(part for part in group.split("/") if part not in ("", ".."))
        if not controllers and (base / "cgroup.controllers").exists():
            yield base, parts, "memory.events"
        elif "memory" in controllers.split(","):
            yield base / "memory", parts, "memory.oom_control"


def _count(path: Path) -> int | None:
    try:
        match = re.search(r"^oom_kill (\d+)", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None


def _added(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else max(0, now - before)


@dataclass(frozen=True)
class CellError:
    """The exception that ended a notebook: its type's name, message and the number in the cell's ``In [n]``."""

    name: str
    message: str
    cell: int


@dataclass(frozen=True)
class KernelOutcome:
    """How an execution ended: ``error`` when a cell raised, ``died`` when the kernel went away by itself.

    Attributes:
        return_code: of the kernel's process when it died; negative for a signal.
        never_started: why there was no kernel to run a cell; None where there was one.
    """

    error: CellError | None
    died: bool
    return_code: int | None
    never_started: str | None = None

    @property
    def ok(self) -> bool:
        """Every cell ran and none raised."""
        return self.error is None and not self.died


@dataclass
class KernelRequest:
    """What the runner has the papermill engine do beside running the cells.

    Attributes:
        record: the executed copy, never more than a fraction of a second behind.
        root: the folder from which files are named in texts, the run's.
        folder: the kernel's working directory.
        environment: the kernel's whole environment.
        log: gets what the kernel process and native libraries write past the notebook; appended to, bounded.
        on_start: called with the kernel's process id.
        overflow: folder for outputs that the record cannot hold; None: beside the log.
        redactor: hides secrets in all that is written; None: those of ``environment``.
        outcome: set by the engine.
    """

    record: Path
    root: Path
    folder: Path
    environment: Mapping[str, str]
    log: Path
    on_start: Callable[[int], None]
    overflow: Path | None = None
    redactor: Redactor | None = None
    outcome: KernelOutcome | None = None


STOPPED = 75
# The names of our own errors as a notebook's record shows them, and what each makes a command leave with.
EXIT_OF_ERROR = {
    "UsageError": 2,
    "CheckpointMismatchError": 2,
    "DataError": 3,
    "LeakageError": 3,
    "StoppedError": STOPPED,
}
NEVER_STARTED = "KernelNeverStarted"


def judge(
    stage: StageStatus,
    outcome: KernelOutcome,
    kills: OomKills,
    peak_bytes: int,
    outputs: Sequence[Path],
    signals: Sequence[int],
) -> None:
    """Write into ``stage`` how its kernel ended. An error of its own counts before a signal that came as well.

    Args:
        stage: written into.
        outcome: of the execution.
        kills: for memory, while it ran.
        peak_bytes: the most memory it was seen to hold.
        outputs: files that a success leaves.
        signals: what it was sent.
    """
    error = outcome.error
    stage.oom_kills = kills.own
    if outcome.died and (outcome.return_code or 0) < 0:
        stage.killed_by = signal_name(-(outcome.return_code or 0))
    if outcome.ok:
        missing = [str(path) for path in outputs if not path.is_file()]
        stage.state, stage.exit_code, stage.reason = "done", 0, None
        if missing:
            stage.state, stage.exit_code = "failed", 1
            stage.error = StageError(name="MissingOutput", message=f"the notebook ended without {', '.join(missing)}")
    elif error is not None and not (signals and error.name in {"StoppedError", "KeyboardInterrupt"}):
        stage.exit_code = EXIT_OF_ERROR.get(error.name, 1)
        stage.state = "interrupted" if stage.exit_code == STOPPED else "failed"
        stage.reason = "a cell failed"
        stage.error = StageError(**vars(error))
    elif signals:
        stage.state, stage.exit_code = "interrupted", exit_code_of_signals(signals)
        stage.reason = f"stopped by {signal_name(signals[0])}"
    elif outcome.never_started is not None and outcome.return_code == -signal.SIGKILL:
        why = _why_killed(kills)
        stage.state, stage.exit_code, stage.reason = "failed", 137, f"killed by SIGKILL while it started: {why}"
    elif outcome.never_started is not None:
        stage.state, stage.exit_code, stage.reason = "failed", 138, "the kernel never started"
        stage.error = StageError(name=NEVER_STARTED, message=outcome.never_started)
    else:
        stage.state = "failed"
        stage.exit_code, stage.reason = _death(outcome.return_code, kills, peak_bytes)


def exit_code_of_signals(numbers: Sequence[int]) -> int:
    """What a command leaves with after these signals: 130 after Ctrl-C, 75 after one TERM or USR1, 143 after two."""
    if signal.SIGINT in numbers:
        return 130
    return STOPPED if len(numbers) == 1 else 143


def signal_name(number: int) -> str:
    """``SIGKILL`` and the like; a real-time signal has no name of its own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _death(return_code: int | None, kills: OomKills, peak_bytes: int) -> tuple[int, str]:
    """FVC's exit code for a kernel that died, and the reason in words no surer than what is known."""
    at = f"at {peak_bytes / 1e9:.2f} GB"
    if return_code == -signal.SIGKILL:
        return 137, f"killed by SIGKILL {at}: {_why_killed(kills)}"
    also = ""
    if kills.own:
        also = (
            f"; the system killed {_times(kills.own)} for memory in its control group meanwhile, perhaps a child of it"
        )
    if return_code is not None and return_code < 0:
        return 138, f"kernel killed by {signal_name(-return_code)} {at}{also}"
    return 138, f"kernel went away (exit status {'unknown' if return_code is None else return_code}){also}"


def _why_killed(kills: OomKills) -> str:
    if kills.own:
        return f"for memory, it seems: the system killed {_times(kills.own)} for memory in its control group meanwhile"
    if kills.around:
        return (
            f"perhaps for memory: the system killed {_times(kills.around)} for memory meanwhile, though in another "
            "control group below the same limit"
        )
    if kills.own is None:
        return "most likely for memory, or by hand; the system's count of kills for memory cannot be read here"
    return "by hand, by the end of a job, or for memory outside its control group, which counted no kill"


def _times(count: int | None) -> str:
    return "once" if count == 1 else f"{count} times"


# Watching a kernel from outside: its memory while it lives, and what the system killed for memory meanwhile.

SAMPLE_INTERVAL_SECONDS = 0.2


class KernelWatch:
    """Samples the resident memory of a process and its children in a thread until ``stop``.

    ``peak_rss_bytes`` is the largest of the sampled sum over the tree and the kernel's own high-water mark (VmHWM). A
    stage resets that mark when its phase changes, after its own sampler has read it: a peak of the last moment before
    is in the stage's memory log, and here perhaps not.
    """

    def __init__(self) -> None:
        self.pid: int | None = None
        self.rss_bytes = 0  # now
        self.peak_rss_bytes = 0
        self._stop = threading.Event()
        self._oom_kills = oom_kills()
        self._thread = threading.Thread(target=self._watch, name="fvc-kernel-watch", daemon=True)

    def start(self, pid: int) -> None:
        """Begin watching process ``pid``."""
        self.pid, self._tree = pid, ProcessTree(pid)
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling; harmless when never started."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def signal_kernel(self, number: signal.Signals) -> None:
        """Forward a signal to the kernel alone; one that is gone is let be."""
        if self.pid is not None:
            try:
                psutil.Process(self.pid).send_signal(number)
            except psutil.NoSuchProcess:
                return

    def oom_kills(self) -> OomKills:
        """What the system has killed for memory since this watch was made."""
        return oom_kills().since(self._oom_kills)

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_INTERVAL_SECONDS):
            held = self._tree.measure()
            self.rss_bytes = held.tree_bytes
            self.peak_rss_bytes = max(self.peak_rss_bytes, held.tree_bytes, held.high_water_bytes)


# What to try next when a task has died, as options of the command line.

# What batch_size 0 is taken for where the stage's memory events do not tell: the networks' own defaults are 1 to 8.
_USUAL_BATCH = 4
_LOOK_BYTES = 256_000
_MEANINGS = {
    "batch_size": "fewer clips in memory at once; the result stays the same",
    "gradient_checkpointing": "activations are computed again instead of kept; the result stays the same",
    "num_workers": "no loader processes and no shared memory; the result stays the same",
    "probe_workers": "one file after the other",
    "--mem": "every setting is the smallest already: give the job or machine more memory, or take fewer or smaller "
    "frames in a new run",
}


def after_memory_ended(config: RunConfig, reads: Collection[str], events: Path, limit_bytes: int) -> str:
    """The first of the settings that take less memory and keep the result, else more memory.

    Args:
        config: what the task ran with.
        reads: the parameters its notebook reads; others would change nothing.
        events: the stage's memory events, which tell how many clips were taken at once in the end.
        limit_bytes: what it may use now.

    Returns:
        Options for ``run_notebooks.py --resume``, or ``--mem=6G`` for ``sbatch``.
    """
    settings = next_settings(
        "batch" if "batch_size" in reads else "preparation",
        batch_size=batch_in_use(config, events),
        recomputes=config.gradient_checkpointing,
        num_workers=config.num_workers,
        probe_workers=config.probe_workers,
        reads=reads,
    )
    return more_memory(limit_bytes) if settings[0] == MORE_MEMORY else settings[0]


def more_memory(limit_bytes: int) -> str:
    """Half as much again as ``limit_bytes``, as ``sbatch`` takes it, in GiB."""
    return f"--mem={-(-limit_bytes * 3 // (2 * 2**30))}G"


def after_another_death(config: RunConfig, reads: Collection[str]) -> str | None:
    """Where a kernel crashed: without loader processes and their shared memory; None where there were none."""
    return "-p num_workers 0" if "num_workers" in reads and config.num_workers > 0 else None


def meaning(options: str) -> str:
    """Why ``options`` are worth trying, in a clause."""
    for name, clause in _MEANINGS.items():
        if name in options:
            return clause
    return ""


def batch_in_use(config: RunConfig, events: Path) -> int:
    """How many clips were in memory at once: by the last of the stage's events that has it, else as configured."""
    configured = config.batch_size or _USUAL_BATCH
    for row in rows_from_the_end(events):
        details = row.get("details")
        batch = details.get("micro_batch") if isinstance(details, dict) else None
        if isinstance(batch, int) and batch > 0:
            return min(batch, configured)
    return configured


def rows_from_the_end(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file, the last first: whole lines among its last 256 kB; none where it is missing."""
    try:
        with path.open("rb") as stream:
            start = max(0, stream.seek(0, os.SEEK_END) - _LOOK_BYTES)
            stream.seek(start)
            data = stream.read()
    except OSError:
        return
    whole = data[: data.rfind(b"\n") + 1].splitlines()
    for line in reversed(whole[1:] if start else whole):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


# The end as the record shows it: a banner at its top, and at the cell that ran what ended it.

ERROR_MARKER_TAG = "papermill-error-cell-tag"  # papermill's: a repetition removes cells with it
_STYLE = "border-left: 6px solid {color}; padding: 0.5em 1em; background: {ground}; color: #222"
_COLORS = {"failed": ("#b71c1c", "#fdecea"), "interrupted": ("#b26a00", "#fff4e0")}
KERNEL_DIED = "KernelDied"


def tell_end(record: Path, stage: StageStatus, lines: Sequence[str], log_tail: str = "") -> None:
    """Write into ``record`` how its execution ended.

    A cell that ran when the kernel died gets an error output that says so. One that was asked to stop is ``stopped``
    and no failure. The banner carries papermill's tag, so that a repetition removes it.

    Args:
        record: the notebook, as the engine left it.
        stage: how it ended.
        lines: what happened, where it was and what to do next.
        log_tail: the end of the kernel's log, where that is all there is to read.
    """
    notebook = json.loads(record.read_text(encoding="utf-8", errors="replace"))
    states = [cell["metadata"].get("papermill", {}).get("status") for cell in notebook["cells"]]
    where = ""
    if "failed" in states:
        place = states.index("failed")
        where = f"cell {place + 1} of {len(states)}"
        _tell_in_cell(notebook["cells"][place], stage, lines)
    if stage.state == "interrupted":
        notebook["metadata"]["papermill"]["exception"] = None
    notebook["cells"].insert(0, _banner(stage, lines, where, log_tail, with_id=notebook.get("nbformat_minor", 0) >= 5))
    write_bytes(record, (json.dumps(notebook, ensure_ascii=False) + "\n").encode("utf-8", "replace"))


def _tell_in_cell(cell: dict[str, Any], stage: StageStatus, lines: Sequence[str]) -> None:
    if stage.state == "interrupted":
        cell["metadata"]["papermill"].update(status="stopped", exception=False)
    if stage.error is not None or any(output["output_type"] == "error" for output in cell["outputs"]):
        return
    name = "Stopped" if stage.state == "interrupted" else KERNEL_DIED
    traceback = [f"{name}: {lines[0]}", *lines[1:]]
    cell["outputs"].append(dict(nbformat.v4.new_output("error", ename=name, evalue=lines[0], traceback=traceback)))


def _banner(stage: StageStatus, lines: Sequence[str], where: str, log_tail: str, *, with_id: bool) -> dict[str, Any]:
    color, ground = _COLORS.get(stage.state, _COLORS["failed"])
    title = "Stopped" if stage.state == "interrupted" else "Failed"
    parts = [f"<b>{title}{', at ' + where if where else ''}</b>", *map(html.escape, lines)]
    body = "<br>\n".join(parts)
    if log_tail:
        body += f"<pre>{html.escape(log_tail)}</pre>"
    # No blank line within, which would end the HTML block in Markdown.
    body = "\n".join(line or "&nbsp;" for line in body.splitlines())
    source = f'<div style="{_STYLE.format(color=color, ground=ground)}">\n{body}\n</div>'
    cell = dict(nbformat.v4.new_markdown_cell(source, metadata={"tags": [ERROR_MARKER_TAG]}))
    if not with_id:
        del cell["id"]
    return cell
