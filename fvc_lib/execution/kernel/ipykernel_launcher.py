"""What the kernel's process runs: ipykernel, with what a headless record needs and without what it does not.

Run as a file, so that nothing of ours is imported into a notebook that does not ask for it.
"""

import atexit
import gc
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import zmq
from ipykernel.iostream import OutStream
from ipykernel.kernelapp import IPKernelApp

if __name__ == "__main__":
    # What is made until the first cell stays until the end: collecting among it while it is made, and at every
    # collection later, takes a third of a trivial notebook's time and finds nothing.
    gc.disable()
    # A script's own folder comes first on the path, and ours has modules of common names.
    if not sys.flags.safe_path:
        del sys.path[0]
    # When memory ends, the system takes this process or one that it starts before the runner, which lives to tell.
    with suppress(OSError):  # Linux only
        score = Path("/proc/self/oom_score_adj")
        score.write_text(str(max(500, int(score.read_text()))))


PIECE_CHARACTERS = 1 << 18
CONTROL_SECONDS = 5.0


class PiecewiseStream(OutStream):
    """Hands a long text over in pieces, so that nobody needs room for all of it at once."""

    _unsent = 0

    def write(self, string: str) -> int:
        """Write ``string``; of one longer than a piece each piece is sent before the next."""
        if not isinstance(string, str) or len(string) <= PIECE_CHARACTERS:
            written = super().write(string)
            self._unsent += len(string)
            if self._unsent > PIECE_CHARACTERS:  # many short texts within one interval between two sendings
                self._unsent = 0
                self.flush()  # type: ignore[no-untyped-call]
            return written or 0
        for start in range(0, len(string), PIECE_CHARACTERS):
            super().write(string[start : start + PIECE_CHARACTERS])
            self.flush()  # type: ignore[no-untyped-call]
        return len(string)


class ParentWatch(threading.Thread):
    """Ends this process when its parent is gone.

    ipykernel's own looks once whether it is an orphan already, and then waits for process 1 to adopt it: where another
    process adopts orphans (slurmstepd, systemd --user, tini -s), a runner killed while its kernel starts left it there
    for ever.
    """

    def __init__(self, parent: int) -> None:
        super().__init__(daemon=True, name="fvc-parent-watch")
        self._parent = parent

    def run(self) -> None:
        """Look every second."""
        while os.getppid() == self._parent:
            time.sleep(1.0)
        os._exit(1)


class HeadlessKernel(IPKernelApp):
    """ipykernel on sockets that lose nothing: a cell that prints faster than it is read waits."""

    def initialize(self, argv: list[str] | None = None) -> None:
        """Initialize; from then on garbage is collected among what the cells make."""
        super().initialize(argv)  # type: ignore[no-untyped-call]
        atexit.register(self._end_control)  # exit handlers run in reverse: before all of ipykernel's
        gc.freeze()
        gc.enable()

    def init_poller(self) -> None:
        """Watch the process that started this one."""
        if self.parent_handle:
            self.poller = ParentWatch(int(self.parent_handle))

    def _end_control(self) -> None:
        """Let the thread that was told to shut down say so before that is closed which it says it through.

        ipykernel closes it meanwhile, and one kernel in twenty then waited for ten seconds, or for ever.
        """
        if self.control_thread and self.control_thread.is_alive():
            self.control_thread.stop()
            self.control_thread.join(CONTROL_SECONDS)

    def _bind_socket(self, s: zmq.Socket[bytes], port: int) -> int:
        if s.socket_type == zmq.XPUB:
            s.setsockopt(zmq.XPUB_NODROP, 1)
            s.sndhwm = 32
        return super()._bind_socket(s, port)  # type: ignore[no-any-return, no-untyped-call]


if __name__ == "__main__":
    options = [
        "--HistoryManager.enabled=False",  # several kernels would wait for one sqlite file
        "--IPKernelApp.outstream_class=__main__.PiecewiseStream",
    ]
    HeadlessKernel.launch_instance([*sys.argv[1:], *options])
