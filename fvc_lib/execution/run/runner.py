"""Run the planned tasks, several at once if they do not need each other, and write their status.

A task is one notebook of a run, or one fold of it. The notebook runs in a kernel, which is another process, and a
thread of this process waits for the kernel. The main thread begins tasks, forwards signals and draws the terminal.
"""

import io
import os
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

from fvc_lib.execution import plan as fingerprint
from fvc_lib.execution.kernel_server import KernelServer
from fvc_lib.execution.plan import PlannedTask, Schedule
from fvc_lib.execution.run.gpus import folds_at_once, most_of_ranks_at_once, on_gpu, training_gpus
from fvc_lib.execution.run.record import record_corpus
from fvc_lib.execution.run.status import StageStatus, begin_work, end_work, put_stage, read_status, run_lock
from fvc_lib.execution.run.task import STOPPED, TaskRun, end_lines, exit_code_of_signals, kernel_environment
from fvc_lib.execution.stages import Notebook, Task
from fvc_lib.services.atomic_files import utc_now
from fvc_lib.services.config import RunConfig
from fvc_lib.services.isolated_workers import threads_of_a_fold
from fvc_lib.services.memory import LIMIT_VARIABLE, SHARERS_VARIABLE, memory_budget
from fvc_lib.services.run_paths import RunPaths

SHOW_SECONDS = 0.3
PLAIN_INTERVAL_SECONDS = 30.0
MOST_OWN_KERNELS = 3  # with more tasks, kernels are forked from a process that has imported the libraries
# A cluster may send one signal twice: to the batch shell, which forwards it, and to this process.
_SAME_SIGNAL_SECONDS = 1.0
_STOPPED_CODES = (STOPPED, 130, 143)


class Terminal:
    """The output of a run: permanent lines and, below them, one live line per running task. Thread-safe.

    Live lines show progress and are redrawn in place. They are cut to the terminal's width, so that none takes two
    rows. If the output is not a terminal, progress is printed as permanent lines, at most every 30 s.

    Args:
        stream: where to write; None: standard output.
        quiet: whether to write only what needs attention, such as a failure.
    """

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._stream = sys.stdout if stream is None else stream
        self._live = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._lock = threading.Lock()
        self._drawn = 0  # live lines on the screen; the cursor is at the end of the last
        self._last_plain = time.monotonic()

    def line(self, text: str, *, expected: bool = False) -> None:
        """Write ``text`` as a permanent line. The live lines disappear until the next ``show``.

        A quiet terminal leaves the line out if ``expected`` is True, as for the normal end of a stage.
        """
        if self._quiet and expected:
            return
        with self._lock:
            self._write(f"{text}\n", 0)

    def show(self, lines: Sequence[str]) -> None:
        """Show ``lines``, one per running task. A quiet terminal shows nothing.

        On a terminal, ``lines`` replace the live lines. Other outputs get them as permanent lines, at most every 30 s.
        """
        if self._quiet:
            return
        with self._lock:
            if self._live:
                columns, rows = shutil.get_terminal_size()
                # Some terminals wrap after the last column, and lines above the screen could not be erased.
                lines = [line[: max(1, columns - 1)] for line in lines[: max(1, rows - 1)]]
                self._write("\n".join(lines), len(lines))
            elif time.monotonic() - self._last_plain >= PLAIN_INTERVAL_SECONDS:
                self._last_plain = time.monotonic()
                self._write("".join(f"{line}\n" for line in lines), 0)

    def _write(self, text: str, drawn: int) -> None:
        """Erase the live lines on the screen, and write ``text`` in their place.

        The last ``drawn`` lines of ``text`` are live lines, which the next call erases.
        """
        up = f"\x1b[{self._drawn - 1}A" if self._drawn > 1 else ""
        erased, self._drawn = f"\r{up}\x1b[J" if self._drawn else "", drawn
        try:
            self._stream.write(erased + text)
            self._stream.flush()
        except OSError:  # the reader has left (`| head`), or the window was closed: the run goes on
            self._stream, self._live = io.StringIO(), False


class Runner:
    """The executor of a run: it runs all tasks of the run, or some of them, several at once.

    It locks these tasks, so that no other process works on them meanwhile.

    Args:
        run: the run.
        config: the run's parameters.
        notebooks: the notebooks by stage name.
        terminal: where to show progress; None: standard output.
        jobs: the largest number of tasks at once; None: the result of ``folds_at_once``.
        only_tasks: keys of the tasks to run, while other jobs run the other tasks; None: all tasks.
    """

    def __init__(
        self,
        run: RunPaths,
        config: RunConfig,
        notebooks: Mapping[str, Notebook],
        terminal: Terminal | None = None,
        *,
        jobs: int | None = None,
        only_tasks: frozenset[str] | None = None,
    ) -> None:
        self.run, self.config, self.notebooks = run, config, notebooks
        self.terminal = terminal or Terminal()
        wanted = (jobs or folds_at_once(config)) if config.use_mlops_pipeline else 1
        self._jobs = min(wanted, most_of_ranks_at_once(config) or wanted)
        self._only_tasks = only_tasks
        self._gpus = training_gpus(config)
        self._dealt: dict[str, tuple[str, ...]] = {}  # GPUs by running training
        self._running: dict[Future[StageStatus], TaskRun] = {}
        self._server: KernelServer | None = None
        self._signals: list[int] = []
        self._first_signal = 0.0  # on the monotonic clock
        self._forwarded = 0
        self._exit_codes: list[int] = []  # of tasks that failed or were stopped, in the order of their end

    def execute(self, make_plan: Callable[[], Sequence[PlannedTask]]) -> int:
        """Lock the run, run the plan that ``make_plan`` returns, and return the exit code.

        After the first failure no other task begins, and running tasks continue to their end. The first signal asks
        every running task to save its work and end. The second signal kills the tasks.

        Args:
            make_plan: returns every task of the run with the decision whether it runs; called after the run is locked.

        Returns:
            0 if all tasks succeeded; else the exit code of the first task that failed, or of the signal.

        Raises:
            UsageError: another process works on this run.
            OSError: the run folder cannot be written.
        """
        with self._signals_noted(), run_lock(self.run.root, self._only_tasks):
            plan = make_plan()
            self._undecided = {planned.task.key: planned.task for planned in plan if planned.only_if_changed}
            begin_work(self.run, plan, self._only_tasks)
            started = time.monotonic()
            # Before any task runs: if a repeated task fails, the old results must not look like current ones.
            fingerprint.set_aside(self.run, [planned.task for planned in plan if planned.redo])
            exit_code = 1  # stays if an exception ends the block
            try:
                # Elsewhere libraries may not survive a fork, and forked kernels have not been tried on a GPU.
                may_fork = sys.platform == "linux" and not on_gpu(self.config)
                if may_fork and sum(planned.run for planned in plan) > MOST_OWN_KERNELS:
                    self._server = KernelServer(kernel_environment(os.environ))
                exit_code = self._run_tasks(plan)
            finally:
                if exit_code and exit_code not in _STOPPED_CODES:
                    # The old results must not look like current ones. Trainings stay, because they take long.
                    stale = [task for task in self._undecided.values() if not task.stage.trains]
                    fingerprint.set_aside(self.run, stale)
                if self._server is not None:
                    self._server.close()
                end_work(self.run, exit_code, time.monotonic() - started)
            return exit_code

    def _run_tasks(self, plan: Sequence[PlannedTask]) -> int:
        schedule = Schedule(plan, straight=not self.config.use_mlops_pipeline)
        folds = sum(planned.run and planned.task.stage.per_fold for planned in plan)
        self._sharers = max(1, min(self._jobs, folds))
        if self._sharers > 1:
            share = memory_budget(self.config.mem_gb).divided(self._sharers)
            self.terminal.line(f"up to {self._sharers} folds at once: {share} of memory each")
        with ThreadPoolExecutor(self._jobs, thread_name_prefix="fvc-task") as pool:
            try:
                while self._begin_ready(schedule, pool):
                    ended, _ = wait(self._running, SHOW_SECONDS, FIRST_COMPLETED)
                    for future in ended:
                        self._ended(self._running.pop(future).task, future.result(), schedule)
                    self.terminal.show([at_work.line() for at_work in self._running.values()])
            finally:
                for at_work in self._running.values():  # after an exception
                    at_work.signal(signal.SIGTERM)
                self.terminal.show([])
        # A failure counts more than a signal, and a signal only if work is left.
        failures = [code for code in self._exit_codes if code not in _STOPPED_CODES]
        if self._signals and not failures and not schedule.is_finished:
            return exit_code_of_signals(self._signals)
        return (*failures, *self._exit_codes, 0)[0]

    def _begin_ready(self, schedule: Schedule, pool: ThreadPoolExecutor) -> bool:
        """Forward new signals to the running tasks, begin tasks that may begin, and return whether any task runs."""
        for number in self._signals[self._forwarded :]:
            self._forwarded += 1
            for at_work in self._running.values():
                at_work.signal(number)
            if self._forwarded == 1:
                if self._server is not None:
                    self._server.close()  # a task that waits for it would not see the signal
                name = signal.Signals(number).name
                self.terminal.line(f"  {name}: running tasks save and leave; a second signal stops them at once")
        while not self._signals and not self._exit_codes and len(self._running) < self._jobs:
            task = schedule.next()
            if task is None:
                break
            if self._undecided.pop(task.key, None) and self._is_up_to_date(task):
                schedule.done(task)
            else:
                self._begin(task, pool)
        return bool(self._running)

    def _is_up_to_date(self, task: Task) -> bool:
        """Return whether a task that has finished earlier is still up to date, after the stages before it ran again.

        It is up to date if these stages wrote the same files as before. The decision is written into the task's status.
        If the task has to run again, its earlier files are moved away.
        """
        now = fingerprint.fingerprint_of(task, self.notebooks[task.stage.name], self.run, self.config)
        stage = read_status(self.run).stage(task.key)
        stage.reason = fingerprint.reason_to_run(task, now, self.run)
        if stage.reason is None:
            stage.state, stage.exit_code = "done", 0
            self.terminal.line(f"  {task.key}: its inputs came out the same, so it stands")
        else:
            fingerprint.set_aside(self.run, [task])
        put_stage(self.run, task.key, stage)
        return stage.reason is None

    def _environment(self, task: Task) -> dict[str, str]:
        """Return environment variables by which the kernel of ``task`` gets its share of memory, cores and GPUs.

        The number of threads is limited only for a training without a GPU, and only if no other jobs work on the run.
        If there are more GPUs than ranks (processes of a training), the GPUs are divided into groups of one GPU per
        rank. Each training then gets the least used group: the one that the fewest running trainings have.
        """
        shares = {} if self.config.mem_gb is None else {LIMIT_VARIABLE: str(self.config.mem_gb)}
        ranks = self.config.num_ranks
        if task.stage.per_fold and self._sharers > 1:
            shares[SHARERS_VARIABLE] = str(self._sharers)
        if task.stage.per_fold and self._only_tasks is None and not on_gpu(self.config):
            shares["OMP_NUM_THREADS"] = str(threads_of_a_fold(self.config.num_trainings, ranks))
        if task.stage.trains and len(self._gpus) > ranks:
            taken = Counter(self._dealt.values())
            starts = range(0, len(self._gpus) - ranks + 1, ranks)  # each group has ``ranks`` consecutive GPUs
            groups = [tuple(self._gpus[start : start + ranks]) for start in starts]
            self._dealt[task.key] = own = min(groups, key=lambda group: taken[group])
            shares["CUDA_VISIBLE_DEVICES"] = ",".join(own)
        return shares

    def _begin(self, task: Task, pool: ThreadPoolExecutor) -> None:
        before = read_status(self.run).stage(task.key)
        stage = StageStatus(state="running", attempts=before.attempts + 1, reason=before.reason, started_utc=utc_now())
        put_stage(self.run, task.key, stage)
        notebook = self.notebooks[task.stage.name]
        environment = self._environment(task)
        at_work = TaskRun(
            self.run,
            self.config,
            task,
            notebook,
            attempt=stage.attempts,
            extra_environment=environment,
            server=self._server,
        )
        self._running[pool.submit(self._run_task, at_work, stage)] = at_work

    def _run_task(self, at_work: TaskRun, stage: StageStatus) -> StageStatus:
        """Run a task's notebook in the calling thread. After a success, record that the task has finished.

        Returns:
            ``stage``, the task's status, to which the end of the task has been added.
        """
        task = at_work.task
        run = self.run
        config = self.config
        fingerprint.begin_training_state(run, task, at_work.notebook, config)
        # Without use_mlops_pipeline only digests of the files are recorded, not what they depend on.
        before = fingerprint.fingerprint_of(task, at_work.notebook, run, config) if config.use_mlops_pipeline else None
        at_work.execute(stage)
        if stage.exit_code == 0:
            record_corpus(run)
            if before is None or fingerprint.fingerprint_of(task, at_work.notebook, run, config) == before:
                fingerprint.record_finished(task, before, run)
            else:
                stage.reason = "its code or inputs changed while it ran; --resume repeats it"
                self.terminal.line(f"  {task.key}: {stage.reason}")
        return stage

    def _ended(self, task: Task, stage: StageStatus, schedule: Schedule) -> None:
        self._dealt.pop(task.key, None)
        put_stage(self.run, task.key, stage)
        for line in end_lines(self.run, task, stage):
            self.terminal.line(line, expected=not stage.exit_code)
        if not stage.exit_code:
            schedule.done(task)
        else:
            self._exit_codes.append(stage.exit_code)
            if self._running and not self._signals:
                self.terminal.line("  nothing new begins; running tasks go on to their end (Ctrl-C stops them)")

    @contextmanager
    def _signals_noted(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # papermill in a notebook's thread
            yield
            return
        numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # sent when the terminal closes; ignored under nohup
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Record that the signal ``number`` came.

        Within a second after the first signal, further signals are ignored, because a cluster may send a signal twice.
        SIGINT (Ctrl-C) is never ignored.
        """
        now = time.monotonic()
        if not self._signals:
            self._first_signal = now
        elif number != signal.SIGINT and now - self._first_signal < _SAME_SIGNAL_SECONDS:
            return
        self._signals.append(number)
