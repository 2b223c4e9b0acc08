"""Judge how a stage ended: state, exit code, reason, and the command that goes on."""

import errno
import html
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat

from fvc_lib.execution.plan.stages import Task
from fvc_lib.execution.run.status import StageError, StageStatus
from fvc_lib.services.atomic_files import write_bytes
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import StoppedError, command_text
from fvc_lib.services.memory.budget import memory_budget, memory_sharers
from fvc_lib.services.memory.policy import memory_advice, ran_out_in
from fvc_lib.services.run_paths import RunPaths

if TYPE_CHECKING:
    from fvc_lib.execution.papermill_engine import CellError, KernelOutcome

STOPPED = StoppedError.exit_code
NEVER_STARTED = "KernelNeverStarted"
_LOOK_BYTES = 256_000
_LONGEST_MESSAGE = 2_000
_TAIL_CHARACTERS = 4_000
_DISK_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
ERROR_MARKER_TAG = "papermill-error-cell-tag"  # papermill's: it removes cells with it before it runs a notebook again


def judge(
    stage: StageStatus,
    outcome: "KernelOutcome",
    kills: int | None,
    peak_bytes: int,
    outputs: Sequence[Path],
    signals: Sequence[int],
) -> None:
    """Write into ``stage`` how its kernel ended.

    Args:
        stage: the status to complete.
        outcome: what the engine returned.
        kills: how often the system killed for memory in the control group meanwhile; None where nothing counts it.
        peak_bytes: the largest memory of the kernel and its children.
        outputs: files that a success leaves.
        signals: the signals that the kernel was sent.
    """
    error = outcome.error
    stage.oom_kills = kills
    if outcome.died and (outcome.return_code or 0) < 0:
        stage.killed_by = signal_name(-(outcome.return_code or 0))
    if error is not None and not (signals and _may_come_from_a_signal(error)):
        stage.exit_code = error.exit_code or 1
        stage.state = "interrupted" if stage.exit_code == STOPPED else "failed"
        stage.reason, stage.error = "a cell failed", StageError(**vars(error))
    elif error is None and not outcome.died:
        missing = [str(path) for path in outputs if not path.is_file()]
        stage.state, stage.exit_code, stage.reason = ("failed", 1, None) if missing else ("done", 0, None)
        if missing:
            stage.error = StageError(name="MissingOutput", message=f"the notebook ended without {', '.join(missing)}")
    elif signals:
        stage.state, stage.exit_code = "interrupted", exit_code_of_signals(signals)
        stage.reason = f"stopped by {signal_name(signals[0])}"
        if error is not None and error.exit_code != STOPPED and error.name != "KeyboardInterrupt":
            stage.reason += f", then {error.name}: {error.message} (cell In [{error.cell}])"
    elif outcome.never_started is not None and outcome.return_code != -signal.SIGKILL:
        stage.state, stage.exit_code, stage.reason = "failed", 138, "the kernel never started"
        stage.error = StageError(name=NEVER_STARTED, message=outcome.never_started)
    else:
        stage.state = "failed"
        stage.exit_code, stage.reason = _death(outcome.return_code, kills, peak_bytes)


def _may_come_from_a_signal(error: "CellError") -> bool:
    """Return whether a library may have raised ``error`` because it was interrupted."""
    return error.exit_code in (None, 1, STOPPED) and "Memory" not in error.name


def exit_code_of_signals(numbers: Sequence[int]) -> int:
    """Return 130 after Ctrl-C, 75 after one SIGTERM or SIGUSR1, 143 after two."""
    if signal.SIGINT in numbers:
        return 130
    return STOPPED if len(numbers) == 1 else 143


def signal_name(number: int) -> str:
    """Return ``SIGKILL`` and the like."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _death(return_code: int | None, kills: int | None, peak_bytes: int) -> tuple[int, str]:
    """Return the exit code and the reason of a kernel that died; no surer than what is known."""
    how = f"exit status {return_code}" if (return_code or 0) >= 0 else signal_name(-(return_code or 0))
    how = f"kernel ended with {how} at {peak_bytes / 1e9:.2f} GB"
    if kills:
        how += f"; the system killed {kills} processes of its control group for memory meanwhile"
    if return_code != -signal.SIGKILL:
        return 138, how
    unknown = "most likely out of memory, or killed by a person" if kills is None else "killed by a person, it seems"
    return 137, how if kills else f"{how}: {unknown}"


def advice_after(
    stage: StageStatus, config: RunConfig, samples: Path, environ: Mapping[str, str] | None = None
) -> str | None:
    """Return one sentence that says what to change before the next try.

    Args:
        stage: how it ended.
        config: the run's.
        samples: its memory log, whose last line has the phase that it died in.
        environ: its kernel's environment; None: this process's.

    Returns:
        None where nothing is to be changed, or the error's own message says it.
    """
    environ = os.environ if environ is None else environ
    memory_error = stage.error is not None and "Memory" in stage.error.name
    if stage.state == "interrupted":
        return None
    if stage.exit_code != 137 and not memory_error and not stage.oom_kills:
        crashed = stage.exit_code == 138 and config.num_workers > 0
        return memory_advice("loaders") if crashed else None
    limit = memory_budget(config.mem_gb, environ=environ).total_bytes
    if not stage.oom_kills and not memory_error and (stage.peak_rss_bytes or 0) < limit / 2:
        return None  # killed by a person, it seems
    if memory_sharers(environ) > 1:
        return "Next, train one fold at a time (--jobs 1)."
    if stage.error is not None and stage.error.exit_code is not None:
        return None
    ran_out = ran_out_in(next((str(row.get("phase")) for row in rows_from_the_end(samples)), ""))
    # A model on features takes no batches.
    return memory_advice("elsewhere" if ran_out == "batch" and config.of_features else ran_out)


def rows_from_the_end(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file, the last first: whole lines of its last 256 kB; none if it is missing."""
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


def end_lines(run: RunPaths, task: Task, stage: StageStatus) -> list[str]:
    """Return the terminal's lines on how ``task`` ended: one for a success, else three with place and command."""
    first = f"{task.key:<28} {stage.state:<12} {stage.duration_seconds or 0.0:7.1f} s"
    if stage.state == "done":
        return [f"{first}  peak {(stage.peak_rss_bytes or 0) / 1e9:.2f} GB"]
    record, log = run.partial_notebook(task.stage.name, task.fold), run.stage_log(task.stage.name, task.fold)
    return [
        f"{first}  what happened: {what_happened(stage)}",
        f"  where: {where_it_was(stage)}; record: {record}; log: {log}",
        f"  {what_next(run, stage)}",
    ]


def what_happened(stage: StageStatus) -> str:
    """Return one line: the error and its cell, or what ended the kernel."""
    what = stage.reason or "it ended"
    if stage.error is not None:
        place = f" (cell In [{stage.error.cell}])" if stage.error.cell else ""
        what = f"{stage.error.name}: {stage.error.message}{place}"
        if stage.oom_kills:
            what += f"; the system killed {stage.oom_kills} processes of its control group for memory meanwhile"
    line = " | ".join(part.strip() for part in what.splitlines() if part.strip())
    # The text of an error may hold control characters.
    line = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in line)
    return line if len(line) <= _LONGEST_MESSAGE else f"{line[:_LONGEST_MESSAGE]} [...]"


def where_it_was(stage: StageStatus) -> str:
    """Return one line: the last step and metric, and the peak memory."""
    peak = f"peak memory {(stage.peak_rss_bytes or 0) / 1e9:.2f} GB"
    return "; ".join([*filter(None, (stage.last_step, stage.last_metric)), peak])


def what_next(run: RunPaths, stage: StageStatus) -> str:
    """Return one line with the command that goes on; after a usage or data error also the one that forks the run."""
    submitted = stage.job_id and run.slurm.is_dir()
    command = command_text("--resume", run.root, *(["--executor", "slurm"] if submitted else []))
    if stage.state == "interrupted" or (stage.exit_code == 138 and not stage.advice):
        return f"to go on: {command}"
    if stage.advice:
        return f"to go on: {command}  # {stage.advice}"
    if any(full in what_happened(stage) for full in _DISK_FULL):
        return f"to go on, once there is room on the disk ({command_text('clean')} shows what may go): {command}"
    fork = f"; with another value of what the results depend on, in a new run: {command} --fork -p NAME VALUE"
    return f"once mended, go on: {command}{fork if stage.exit_code in (2, 3) else ''}"


def tell_end(run: RunPaths, task: Task, stage: StageStatus) -> None:
    """Write into the task's record how it ended: a banner at its top, and an error at the cell that was running.

    A cell that was asked to stop is ``stopped``, not failed. If the kernel never started, the banner has the end of its
    log. The banner carries papermill's tag, so that a repetition removes it.
    """
    tail = ""
    if stage.error is not None and stage.error.name == NEVER_STARTED:
        log = run.stage_log(task.stage.name, task.fold)
        tail = log.read_text(encoding="utf-8", errors="replace")[-_TAIL_CHARACTERS:].strip() if log.is_file() else ""
        stage.error.message += (
            f"; its last line: {tail.splitlines()[-1] if tail else 'none'}. Try '{sys.executable} -m ipykernel "
            "--version'; if that fails too, set the environment up again."
        )
    lines = [what_happened(stage), where_it_was(stage), what_next(run, stage)]
    record = run.partial_notebook(task.stage.name, task.fold)
    notebook = json.loads(record.read_text(encoding="utf-8", errors="replace"))
    title, color = ("Stopped", "#b26a00") if stage.state == "interrupted" else ("Failed", "#b71c1c")
    states = [cell["metadata"].get("papermill", {}).get("status") for cell in notebook["cells"]]
    if "failed" in states:
        place = states.index("failed")
        cell = notebook["cells"][place]
        if not any(output["output_type"] == "error" for output in cell["outputs"]):
            name = "Stopped" if stage.state == "interrupted" else "KernelDied"
            error = nbformat.v4.new_output("error", ename=name, evalue=lines[0], traceback=[f"{name}: {lines[0]}"])
            cell["outputs"].append(dict(error))
        if stage.state == "interrupted":
            cell["metadata"]["papermill"].update(status="stopped", exception=False)
            notebook["metadata"]["papermill"]["exception"] = None
        title += f", at cell {place + 1} of {len(states)}"
    # A blank line would end the HTML block in Markdown.
    pre = html.escape("\n".join(line for line in tail.splitlines() if line.strip()))
    body = "<br>\n".join([f"<b>{title}</b>", *map(html.escape, lines)]) + (f"<pre>{pre}</pre>" if pre else "")
    source = f'<div style="border-left: 6px solid {color}; padding: 0.5em 1em">\n{body}\n</div>'
    banner = dict(nbformat.v4.new_markdown_cell(source, metadata={"tags": [ERROR_MARKER_TAG]}))
    if notebook.get("nbformat_minor", 0) < 5:
        del banner["id"]
    notebook["cells"].insert(0, banner)
    write_bytes(record, (json.dumps(notebook, ensure_ascii=False) + "\n").encode("utf-8", "replace"))
