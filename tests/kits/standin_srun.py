"""Stands in for srun where there is no SLURM: starts the tasks as slurmstepd does, in a daemon of another session.

As with the real ones, output and input pass through both; the input's end is passed on; SIGTERM of srun kills the
tasks; but of an srun that is killed the daemon only learns that it hears no more from it: the tasks go on, with their
input open and their output drained.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

_END, _KILL = b"\0end\n", b"\0kill\n"


def install(folder: Path) -> None:
    """A program ``srun`` in ``folder``."""
    program = folder / "srun"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" "$@"\n')
    program.chmod(0o755)


def main(arguments: list[str]) -> int:
    """As srun: its options, then the command."""
    size = next(int(argument.partition("=")[2]) for argument in arguments if argument.startswith("--ntasks="))
    command = arguments[next(i for i, argument in enumerate(arguments) if not argument.startswith("-")) :]
    (orders, to_daemon), (outputs, from_daemon), (errors, daemon_errors) = os.pipe(), os.pipe(), os.pipe()
    daemon = os.fork()
    if daemon == 0:
        os.setsid()
        for descriptor in (0, 1, 2, to_daemon, outputs, errors):
            os.close(descriptor)
        os._exit(keep(command, size, orders, from_daemon, daemon_errors))
    for descriptor in (orders, from_daemon, daemon_errors):
        os.close(descriptor)
    signal.signal(signal.SIGTERM, lambda number, frame: os.write(to_daemon, _KILL))
    threads = [threading.Thread(target=pump, args=pair) for pair in ((outputs, 1), (errors, 2))]
    threading.Thread(target=lambda: (pump(0, to_daemon), os.write(to_daemon, _END)), daemon=True).start()
    for thread in threads:
        thread.start()
    _, status = os.waitpid(daemon, 0)
    for thread in threads:
        thread.join()
    os._exit(os.waitstatus_to_exitcode(status))


def keep(command: list[str], size: int, orders: int, output: int, errors: int) -> int:
    """As slurmstepd: the tasks' highest exit code, once all have ended."""
    pipe = subprocess.PIPE
    common = {
        **os.environ, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(size), "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": str(size), "SLURM_STEP_NODELIST": "here",
    }  # fmt: skip
    tasks = [
        subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe,
            env={**common, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(size)
    ]  # fmt: skip
    threads = [
        threading.Thread(target=pump, args=(source.fileno(), target))
        for task in tasks
        for source, target in ((task.stdout, output), (task.stderr, errors))
    ]
    for thread in (*threads, threading.Thread(target=obey, args=(orders, tasks), daemon=True)):
        thread.start()
    codes = [task.wait() for task in tasks]
    for thread in threads:
        thread.join()
    return max(128 - code if code < 0 else code for code in codes)


def obey(orders: int, tasks: list[subprocess.Popen[bytes]]) -> None:
    """Pass on lines to every task until srun says that there are no more; its silence says nothing."""
    with os.fdopen(orders, "rb") as stream:
        for line in stream:
            for task in tasks:
                if line == _KILL:
                    task.kill()
                elif line == _END:
                    task.stdin.close()
                else:
                    task.stdin.write(line)
                    task.stdin.flush()


def pump(source: int, target: int) -> None:
    """Copy until the source ends; what nobody takes is dropped."""
    while block := os.read(source, 1 << 16):
        try:
            os.write(target, block)
        except BrokenPipeError:
            continue


if __name__ == "__main__":
    main(sys.argv[1:])
