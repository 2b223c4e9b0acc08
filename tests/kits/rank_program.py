"""A rank's program for tests of ``run_ranks``: does what the argument of its number says."""

import os
import signal
import sys
import time

from fvc_lib.engine.rank_processes import Launch, RankFile, rank_place
from fvc_lib.engine.ranks import RankLostError
from fvc_lib.services.errors import StoppedError


def main() -> None:
    launch, place = Launch.of_environment(), rank_place()
    assert launch is not None
    file, what = RankFile(launch.log, place.rank), sys.argv[1 + place.rank]
    if what == "fails":
        sys.exit("no reason")
    file.at("train", epoch=1, batch_idx=2, global_step=3)
    file.event("policy", "as planned", device="cpu")
    file.event("out_of_memory", "halved", micro_batch=4)
    file.progress(3, 10)
    if what == "stops when asked":
        while not launch.stop.exists():
            time.sleep(0.01)
        file.ended(StoppedError("stopped after step 3"))
        sys.exit(75)
    if what == "loses the others":
        file.ended(RankLostError("the other ranks were lost"))
        sys.exit(1)
    if what == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "waits":
        time.sleep(600)
    file.ended(None)


if __name__ == "__main__":
    main()
