"""How a stage ended, from what is known of its kernel: state, exit code, reason and error."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from fvc_lib.execution.kernel_engine import KernelOutcome
from fvc_lib.execution.status import StageError, StageStatus
from fvc_lib.execution.supervisor import KernelWatch

STOPPED = 75
# The names of our own errors as a notebook's record shows them, and what each makes a command leave with.
EXIT_OF_ERROR = {
    "UsageError": 2,
    "CheckpointMismatchError": 2,
    "DataError": 3,
    "LeakageError": 3,
    "StoppedError": STOPPED,
}


def judge(
    stage: StageStatus, outcome: KernelOutcome, watch: KernelWatch, outputs: Sequence[Path], signals: Sequence[int]
) -> None:
    """Write into ``stage`` how its kernel ended. An error of its own counts before a signal that came as well."""
    error = outcome.error
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
        stage.reason = f"stopped by {signal.Signals(signals[0]).name}"
    else:
        stage.state = "failed"
        stage.exit_code, stage.reason = watch.exit_code_of_death(outcome.return_code)


def exit_code_of_signals(numbers: Sequence[int]) -> int:
    """What a command leaves with after these signals: 130 after Ctrl-C, 75 after one TERM or USR1, 143 after two."""
    if signal.SIGINT in numbers:
        return 130
    return STOPPED if len(numbers) == 1 else 143
