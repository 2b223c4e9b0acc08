"""Stands in for a file that crashes its worker process."""

import os
import signal


def crash(item):
    os.kill(os.getpid(), signal.SIGSEGV)
