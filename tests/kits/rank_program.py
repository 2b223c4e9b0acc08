"""A rank's program for tests of the launcher: does what the argument of its number says."""

from __future__ import annotations

import os
import signal
import sys
import time

if sys.argv[1 + int(os.environ.get("SLURM_PROCID", "0"))] == "imports":  # for long, as from a slow file system
    time.sleep(600)

from fvc_lib.engine.distributed.reports import Launch, reports_of
from fvc_lib.services.errors import StoppedError


def main() -> None:
    launch = Launch.of_environment()
    assert launch is not None
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))  # as rank_place says, which loads torch
    reports = reports_of(rank, launch)
    what = sys.argv[1 + rank]
    if what == "stops when asked":
        asked: list[int] = []
        signal.signal(signal.SIGUSR1, lambda number, frame: asked.append(number))
        reports.ready()
        while not asked:
            time.sleep(0.01)
        reports.failed(StoppedError("stopped after step 3"))
        sys.exit(75)
    reports.ready()
    reports.at("train", epoch=1, batch_idx=2, global_step=3)
    reports.event("policy", "as planned", device="cpu")
    reports.progress(3, 10)
    if what == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "waits":
        time.sleep(600)


if __name__ == "__main__":
    main()
