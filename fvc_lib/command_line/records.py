"""Execute notebooks that belong to no run, such as a comparison or an audit, as the notebooks of a run are executed."""

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import click
from tqdm import tqdm

from fvc_lib.analysis.wording import clean_text
from fvc_lib.command_line.run_command import NOTEBOOKS
from fvc_lib.execution.run.session import WRITE_INTERVAL_SECONDS, read_progress
from fvc_lib.execution.run.task import kernel_environment
from fvc_lib.services.errors import StoppedError
from fvc_lib.services.run_paths import ATTEMPT_VARIABLE


def execute_record(
    name: str,
    folder: Path,
    parameters: Mapping[str, Any],
    *,
    page: Path,
    title: str,
    runs_dir: str,
    what: str,
    answer: Path | None = None,
    progress: Path | None = None,
    goes_on: bool = False,
) -> int:
    """Execute a notebook, write its offline page, and print an error if it fails.

    Args:
        name: the notebook's file name without suffix.
        folder: the folder for the executed notebook and the log.
        parameters: the notebook's parameters.
        page: path of the HTML page to write.
        title: the page's title.
        runs_dir: the runs folder that the notebook uses.
        what: name of the notebook's product for the error message, for example ``the audit``.
        answer: a file that the notebook writes, one sentence per line; the page begins with the first sentence.
        progress: the progress file that the notebook writes; its content is shown while the notebook runs.
        goes_on: whether the same call continues after a stop; then SIGUSR1 and SIGTERM interrupt the kernel.

    Returns:
        The exit code.

    Raises:
        StoppedError: SIGUSR1 or SIGTERM came, and the notebook did not finish.
        OSError: the folder cannot be written.
    """
    from fvc_lib.analysis.pages.report import write_report  # plotly takes a second to load
    from fvc_lib.execution.papermill_engine import KernelRequest, execute  # as does papermill

    record, kernels = folder / f"{name}.ipynb", list[int]()
    request = KernelRequest(
        record=record,
        folder=NOTEBOOKS,
        environment={
            **kernel_environment(os.environ),
            "FVC_RUNS_DIR": runs_dir,
            **({ATTEMPT_VARIABLE: "1"} if progress else {}),
        },
        log=folder / f"{name}.log",
        on_start=kernels.append,
    )
    stopped: list[signal.Signals] = []
    with ExitStack() as stack:
        if goes_on:
            stopped = stack.enter_context(_stoppable(kernels))
        if progress:
            stack.enter_context(shown(progress))
        outcome = execute(NOTEBOOKS / record.name, parameters, request)
    if stopped and outcome.exit_code:
        raise StoppedError(f"{stopped[0].name}: stopped; finished work is kept, and the same command goes on")
    lines = answer.read_text(encoding="utf-8", errors="replace").splitlines() if answer and answer.is_file() else []
    write_report([record], page, title=title, answer=lines[:1])
    if outcome.exit_code:
        why = f"{outcome.error.name}: {outcome.error.message}" if outcome.error else "its kernel died"
        click.echo(f"error: {what} was not made: {why}\n  its record: {record}", err=True)
    return outcome.exit_code


@contextmanager
def _stoppable(kernels: Sequence[int]) -> Iterator[list[signal.Signals]]:
    """Interrupt the last of ``kernels`` (process ids) at SIGUSR1 and SIGTERM; yield a list that gets these signals."""
    came: list[signal.Signals] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        came.append(signal.Signals(number))
        with suppress(ProcessLookupError):
            os.kill(kernels[-1] if kernels else os.getpid(), signal.SIGINT)

    before = {number: signal.signal(number, stop) for number in (signal.SIGUSR1, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_MOST_OF_A_PART = 80  # characters
_LINE_SECONDS = 30.0  # between lines where there is no terminal to draw a bar in


@contextmanager
def shown(path: Path) -> Iterator[None]:
    """Show a progress file until the block ends: as a bar on a terminal, else as a line every 30 s."""
    path.unlink(missing_ok=True)
    ended = threading.Event()
    thread = threading.Thread(target=_show, args=(path, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        path.unlink(missing_ok=True)


def _show(path: Path, ended: threading.Event) -> None:
    bar: tqdm[Any] | None = None
    while True:
        is_last = ended.wait(WRITE_INTERVAL_SECONDS)
        if (progress := read_progress(path)) is not None:
            if bar is None or bar.desc.removesuffix(": ") != progress.what:  # another part of the notebook
                # An earlier call's work does not count for the rate.
                every = 0.1 if sys.stderr.isatty() else _LINE_SECONDS
                bar = tqdm(total=progress.total, desc=progress.what, initial=progress.done, mininterval=every)
            bar.set_postfix_str(clean_text(progress.part)[:_MOST_OF_A_PART], refresh=False)
            bar.update(progress.done - bar.n)
        if is_last:
            break
    if bar is not None:
        bar.close()
