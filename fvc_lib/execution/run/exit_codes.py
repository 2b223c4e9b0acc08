"""How a stage ended: state, exit code, reason and error, the words for it, and what to try next."""

import errno
import html
import json
import os
import signal
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

from fvc_lib.execution.plan.stages import Task
from fvc_lib.execution.run.status import StageError, StageStatus
from fvc_lib.services.atomic_files import write_bytes
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import command_text
from fvc_lib.services.isolated_workers import available_cores
from fvc_lib.services.memory.budget import MemoryShare, memory_budget
from fvc_lib.services.memory.policy import MORE_MEMORY, PREFLIGHT, RanOut, next_settings, ran_out_in
from fvc_lib.services.memory.workers import EVENT as POOL_EVENT
from fvc_lib.services.records.redaction import Redactor
from fvc_lib.services.run_paths import RunPaths


@dataclass(frozen=True)
class CellError:
    """The exception that ended a notebook: its type's name, message and the number in the cell's ``In [n]``."""

    name: str
    message: str
    cell: int


@dataclass(frozen=True)
class KernelOutcome:
    """How an execution ended: ``error`` when a cell raised, ``died`` when the kernel went away by itself."""

    error: CellError | None
    died: bool
    return_code: int | None  # of the kernel's process when it died; negative for a signal
    never_started: str | None = None  # why there was no kernel to run a cell; None where there was one

    @property
    def ok(self) -> bool:
        """Every cell ran and none raised."""
        return self.error is None and not self.died


STOPPED = 75
# The names of our own errors as a notebook's record shows them, and what each makes a command leave with.
EXIT_OF_ERROR = {
    "UsageError": 2,
    "CheckpointMismatchError": 2,
    "DataError": 3,
    "LeakageError": 3,
    "StoppedError": STOPPED,
    "RankLostError": STOPPED,  # a node is gone: the last checkpoint stands, and the job is to be requeued
}
# Those that leave with 1. RankEndedError and RankFailedError are left out: a rank that a signal ended makes them too.
_ERRORS_WITH_1 = frozenset(
    {
        "BatchNormSplitError", "CheckpointReadError", "CheckpointWriteError", "CorruptImage", "CorruptVideo",
        "CropError", "DamagedCheckpointError", "DropoutSplitError", "FvcError", "LoaderDiedError",
        "MemoryExhaustedError",
        "NoVideoStream", "NotAnImage", "RefusedImage", "RefusedVideo", "SlurmError", "StillImageError",
        "TrackingError", "TrainingDivergedError", "TruncatedImage", "TruncatedVideo", "UnreadableImage",
        "UnreadableVideo", "UnsupportedVideo", "VideoError",
    }
)  # fmt: skip
NEVER_STARTED = "KernelNeverStarted"


def judge(
    stage: StageStatus,
    outcome: KernelOutcome,
    kills: int | None,
    peak_bytes: int,
    outputs: Sequence[Path],
    signals: Sequence[int],
) -> None:
    """Write into ``stage`` how its kernel ended.

    Of a signal and an error in a cell that came as well, the error counts where it is one of ours or about memory.
    Any other may be what a library made of being interrupted: the signal counts, the reason names the error.

    ``kills``: how often the system killed for memory in its control group, None where nothing counts it; ``outputs``:
    files that a success leaves; ``signals``: what it was sent.
    """
    error = outcome.error
    stage.oom_kills = kills
    if outcome.died and (outcome.return_code or 0) < 0:
        stage.killed_by = signal_name(-(outcome.return_code or 0))
    if outcome.ok:
        missing = [str(path) for path in outputs if not path.is_file()]
        stage.state, stage.exit_code, stage.reason = "done", 0, None
        if missing:
            stage.state, stage.exit_code = "failed", 1
            stage.error = StageError(name="MissingOutput", message=f"the notebook ended without {', '.join(missing)}")
    elif error is not None and not (signals and _may_be_of_a_signal(error)):
        stage.exit_code = EXIT_OF_ERROR.get(error.name, 1)
        stage.state = "interrupted" if stage.exit_code == STOPPED else "failed"
        stage.reason = "a cell failed"
        stage.error = StageError(**vars(error))
    elif signals:
        stage.state, stage.exit_code = "interrupted", exit_code_of_signals(signals)
        stage.reason = f"stopped by {signal_name(signals[0])}"
        if error is not None and error.name not in {"StoppedError", "KeyboardInterrupt"}:
            stage.reason += f", then {error.name}: {error.message} (cell In [{error.cell}])"
    elif outcome.never_started is not None and outcome.return_code != -signal.SIGKILL:
        stage.state, stage.exit_code, stage.reason = "failed", 138, "the kernel never started"
        stage.error = StageError(name=NEVER_STARTED, message=outcome.never_started)
    else:
        at = "while it started" if outcome.never_started else f"at {peak_bytes / 1e9:.2f} GB"
        stage.state = "failed"
        stage.exit_code, stage.reason = _death(outcome.return_code, kills, at)


def _may_be_of_a_signal(error: CellError) -> bool:
    if error.name in _ERRORS_WITH_1 or "Memory" in error.name:
        return False
    return EXIT_OF_ERROR.get(error.name, STOPPED) == STOPPED


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


def _death(return_code: int | None, kills: int | None, at: str) -> tuple[int, str]:
    """FVC's exit code for a kernel that died, and the reason in words no surer than what is known."""
    times = "once" if kills == 1 else f"{kills} times"
    counted = f"the system killed {times} for memory in its control group meanwhile"
    if return_code == -signal.SIGKILL:
        if kills:
            why = f"out of memory, it seems: {counted}"
        elif kills is None:
            why = "most likely out of memory, or killed by a person; the system's count of such kills cannot be read"
        else:
            why = "by a person, by the end of a job, or for memory outside its control group, which counted no kill"
        return 137, f"killed by SIGKILL {at}: {why}"
    how = f"kernel went away (exit status {'unknown' if return_code is None else return_code})"
    if return_code is not None and return_code < 0:
        how = f"kernel killed by {signal_name(-return_code)} {at}"
    return 138, f"{how}; {counted}, perhaps a child of it" if kills else how


# What to try next when a task has died, as options of the command line.

# What batch_size 0 is taken for where the stage's memory events do not say: the networks' own defaults are 1 to 8.
_USUAL_BATCH = 4
_LOOK_BYTES = 256_000
_SMALL_SHARE = 0.1  # a step that takes less of what the process held before it: halving the batch would save no more
# Their messages end with what to try next, and know better what ran out.
_SAY_WHAT_HELPS = frozenset({"MemoryExhaustedError", "LoaderDiedError"})
_MEANINGS = {
    "-p batch_size ": "fewer clips in memory at once; the result stays the same",
    "gradient_checkpointing": "activations are computed again instead of kept; the result stays the same",
    "num_workers": "no loader processes and no shared memory; the result stays the same",
    "memory_preflight": "no step is measured before the training; the result stays the same",
    "batch_size_sweep": "no batch sizes are measured before the training; the result stays the same",
    "-p workers": "fewer files at once; the result stays the same",
    "--mem": "the memory of the job or machine ran out, and no setting is left that takes less in this stage and keeps "
    "the result: give it more, or take fewer or smaller frames in a new run",
    "--jobs": "one fold at a time, with all the memory; the result stays the same",
}


def next_setting(
    stage: StageStatus,
    config: RunConfig,
    reads: Collection[str],
    events: Path,
    environ: Mapping[str, str] | None = None,
) -> str | None:
    """What to change before the stage is tried again; None where the error's own message says it better.

    After an out-of-memory the first of the settings that take less memory and keep the result, else more memory; after
    a crash no loader processes and their shared memory.

    ``reads`` are the parameters of its notebook (others would change nothing), ``events`` its memory events, which say
    how many clips were taken at once in the end, and ``environ`` its kernel's, with its share of the memory.

    Returns:
        Options for ``run_notebooks.py --resume``, or ``--mem=6G`` for ``sbatch``.
    """
    memory_error = stage.error is not None and "Memory" in stage.error.name
    if stage.state == "interrupted":
        return None
    if stage.exit_code != 137 and not memory_error and not stage.oom_kills:
        crashed = stage.exit_code == 138 and "num_workers" in reads and config.num_workers > 0
        return "-p num_workers 0" if crashed else None
    environ = os.environ if environ is None else environ
    limit = memory_budget(config.mem_gb, environ=environ).total_bytes
    if not stage.oom_kills and not memory_error and (stage.peak_rss_bytes or 0) < limit / 2:
        return None  # killed far below the limit, and no kill for memory was counted: rather by a person
    if stage.error is not None and stage.error.name in _SAY_WHAT_HELPS:
        return "--jobs 1" if MemoryShare.of(environ) else None
    setting = next_settings(
        _ran_out(stage, events) if "batch_size" in reads else "preparation",
        batch_size=_batch_in_use(config, events),
        recomputes=config.gradient_checkpointing,
        num_workers=config.num_workers,
        workers=_workers_in_use(config, events),
        reads=reads,
    )[0]
    if MemoryShare.of(environ):  # other folds had the rest
        return "--jobs 1" if setting == MORE_MEMORY else f"{setting} --jobs 1"
    # Half as much again in GiB, as sbatch takes it.
    return f"--mem={-(-limit * 3 // (2 * 2**30))}G" if setting == MORE_MEMORY else setting


def _ran_out(stage: StageStatus, events: Path) -> RanOut:
    """Return what ran out of memory in a stage that trains: by its last sample's phase and the measured step."""
    if not ((stage.last_step or "").startswith("steps") or stage.last_metric):
        return "before_training"  # the logs may be of an earlier attempt
    samples = rows_from_the_end(events.parents[1] / events.name)
    ran_out = ran_out_in(next((str(row.get("phase")) for row in samples), "train"))
    measured = next((row.get("details") for row in rows_from_the_end(events) if row.get("kind") == PREFLIGHT), None)
    found = measured if isinstance(measured, dict) else {}
    step, held = found.get("measured_step_mb"), found.get("baseline_mb")
    is_small = isinstance(step, float) and isinstance(held, float) and step < _SMALL_SHARE * held
    return "elsewhere" if ran_out == "preparation" or (ran_out == "batch" and is_small) else ran_out


def _batch_in_use(config: RunConfig, events: Path) -> int:
    """How many clips were in memory at once: by the last of the stage's events that has it, else as configured."""
    configured = config.batch_size or _USUAL_BATCH
    for row in rows_from_the_end(events):
        details = row.get("details")
        batch = details.get("micro_batch") if isinstance(details, dict) else None
        if isinstance(batch, int) and batch > 0:
            return min(batch, configured)
    return configured


def _workers_in_use(config: RunConfig, events: Path) -> int:
    """How many worker processes there were at once by the stage's events; else as many as there can have been."""
    told = (row.get("details") for row in rows_from_the_end(events) if row.get("kind") == POOL_EVENT)
    counts = (each.get("workers") for each in told if isinstance(each, dict))
    return next((each for each in counts if isinstance(each, int)), config.workers or available_cores())


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


# What the terminal says of a task's end: one line of a success, three of anything else.

_LONGEST_MESSAGE = 2_000
_DISK_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))


def end_lines(run: RunPaths, task: Task, stage: StageStatus) -> list[str]:
    """How ``task`` ended; of anything but a success also where it was and the command that goes on."""
    first = f"{task.key:<28} {stage.state:<12} {stage.duration_seconds or 0.0:7.1f} s"
    if stage.state == "done":
        return [f"{first}  peak {_peak(stage)}"]
    record, log = run.partial_notebook(task.stage.name, task.fold), run.stage_log(task.stage.name, task.fold)
    return [
        f"{first}  what happened: {what_happened(stage)}",
        f"  where: {where_it_was(stage)}; record: {record}; log: {log}",
        f"  {what_next(run, stage)}",
    ]


def what_happened(stage: StageStatus) -> str:
    """One line: the error and its cell, or what ended the kernel."""
    what = stage.reason or "it ended"
    if stage.error is not None:
        place = f" (cell In [{stage.error.cell}])" if stage.error.cell else ""
        what = f"{stage.error.name}: {stage.error.message}{place}"
        if stage.oom_kills:
            what += f"; meanwhile the system killed for memory in its control group (count rose by {stage.oom_kills})"
    line = " | ".join(part.strip() for part in what.splitlines() if part.strip())
    # An error's text may hold what a terminal obeys, or what turns the text around.
    line = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in line)
    return line if len(line) <= _LONGEST_MESSAGE else f"{line[:_LONGEST_MESSAGE]} [...]"


def where_it_was(stage: StageStatus) -> str:
    """One line: the last step and metric, and how much memory it held at most."""
    return "; ".join([*filter(None, (stage.last_step, stage.last_metric)), f"peak memory {_peak(stage)}"])


def what_next(run: RunPaths, stage: StageStatus) -> str:
    """One line with the exact command; after an error of usage or data also the one that changes a parameter."""
    setting = stage.next_setting
    submitted = stage.job_id and run.slurm.is_dir() and "--jobs" not in (setting or "")
    command = command_text("--resume", run.root, *(["--executor", "slurm"] if submitted else []))
    if setting is not None and stage.state != "interrupted":
        why = "; ".join(clause for name, clause in _MEANINGS.items() if name in setting)
        if setting.startswith("--mem"):
            where = f"MEMORY={int(setting[6:-1]) << 10} in slurm/site.conf" if submitted else f"SLURM: {setting}"
            return f"to go on: {command}  # {why} ({where})"
        return f"to go on: {command} {setting}  # {why}"
    if stage.state == "interrupted" or stage.exit_code == 138:
        return f"to go on: {command}"
    if any(full in what_happened(stage) for full in _DISK_FULL):
        return f"to go on, once there is room on the disk ({command_text('clean')} shows what may go): {command}"
    # A run's own values never change; a corpus that could not be read may be mended where it is.
    other = {2: "; with another budget, device or number of workers: add -p NAME VALUE"}.get(stage.exit_code or 0, "")
    if stage.exit_code in (2, 3):  # the data may lack what a parameter asks of them
        other += f"; with another value of what the results depend on, in a new run: {command} --fork -p NAME VALUE"
    return f"once mended, go on: {command}{other}"


def _peak(stage: StageStatus) -> str:
    return f"{(stage.peak_rss_bytes or 0) / 1e9:.2f} GB"


# The end as the record shows it: a banner at its top, and at the cell that ran what ended it.

ERROR_MARKER_TAG = "papermill-error-cell-tag"  # papermill's: a repetition removes cells with it
_STYLE = "border-left: 6px solid {color}; padding: 0.5em 1em; background: {ground}; color: #222"
_COLORS = {"failed": ("#b71c1c", "#fdecea"), "interrupted": ("#b26a00", "#fff4e0")}
_TAIL_CHARACTERS = 4_000


def tell_end(run: RunPaths, task: Task, stage: StageStatus, redactor: Redactor) -> None:
    """Write into the task's record how its execution ended.

    A cell that ran when the kernel died gets an error output that says so. One that was asked to stop is ``stopped``
    and no failure. The banner carries papermill's tag, so that a repetition removes it. Of a kernel that never started
    the end of its log is all there is to read, and stands in the banner.
    """
    log_tail = ""
    if stage.error is not None and stage.error.name == NEVER_STARTED:
        log = run.stage_log(task.stage.name, task.fold)
        text = log.read_text(encoding="utf-8", errors="replace")[-_TAIL_CHARACTERS:] if log.is_file() else ""
        log_tail = "\n".join(text.splitlines()[-20:])
        said = [line.strip() for line in log_tail.splitlines() if line.strip()]
        stage.error.message += (
            f"; it said {f'last: {said[-1]}' if said else 'nothing'}. Try '{sys.executable} -m ipykernel --version'; "
            "where that fails too, set the environment up again."
        )
    lines = [redactor.text(line) for line in (what_happened(stage), where_it_was(stage), what_next(run, stage))]
    record = run.partial_notebook(task.stage.name, task.fold)
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
    name = "Stopped" if stage.state == "interrupted" else "KernelDied"
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
