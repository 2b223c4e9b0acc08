"""How a stage ended, from what is known of its kernel: state, exit code, reason and error."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from fvc_lib.execution.kernel_engine import KernelOutcome
from fvc_lib.execution.oom_counter import OomKills
from fvc_lib.execution.status import StageError, StageStatus

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
