"""Pages that a process shares with its children count once."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("alone")
MEGABYTE = 1 << 20
linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


FORK_FOUR = """
import os, time, psutil
from fvc_lib.services.memory import ProcessTree
block = bytearray(os.urandom(1 << 20)) * 100
here, there = os.pipe()
pids = []
for _ in range(4):
    pid = os.fork()
    if not pid:
        os.write(there, b"x")
        time.sleep(600)
    pids.append(pid)
for _ in pids: os.read(here, 1)
now = ProcessTree().measure()
simple = now.rss_bytes + sum(c.memory_info().rss for c in psutil.Process().children(recursive=True))
print(now.rss_bytes, now.tree_bytes, simple, flush=True)
for pid in pids: os.kill(pid, 9)
"""


@linux_only
def test_what_forked_children_share_with_their_parent_counts_once():
    done = subprocess.run([sys.executable, "-c", FORK_FOUR], capture_output=True, text=True, check=True)
    rss, tree, simple = map(int, done.stdout.split())
    assert simple - rss > 4 * 100 * MEGABYTE
    assert tree - rss < 4 * 15 * MEGABYTE


@linux_only
def test_a_high_water_mark_begins_again_and_what_it_was_is_remembered():
    program = """
from fvc_lib.services.memory import ProcessTree, peak_rss_bytes, reset_high_water
block = bytearray(b"1") * (150 << 20)
del block
before = peak_rss_bytes()
reset_high_water()
now = ProcessTree().measure()
print(before, now.high_water_bytes - now.rss_bytes, peak_rss_bytes())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    before, above_now, remembered = (int(part) for part in done.stdout.split())
    assert remembered == before
    assert above_now < 20 * MEGABYTE
