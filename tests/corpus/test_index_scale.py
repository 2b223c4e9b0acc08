"""Indexes that are killed with SIGKILL, moved, listed in another order, or much larger than a screen."""

import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

MakeVideo = Callable[..., Path]

REPOSITORY = Path(__file__).resolve().parents[2]
WORKERS = 2
PROBE = """
import os
from fvc_lib.corpus.probing import probe_file
def probe(path):
    with open(os.environ["PROBE_LOG"], "a") as log:
        log.write(f"{os.getpid()} {os.path.basename(path)}\\n")
    return probe_file(path)
"""
INDEX = """
import sys
from dataclasses import replace
from pathlib import Path
from fvc_lib.corpus import index
from fvc_lib.services.config import RunConfig
index.VIDEO_FILES = replace(index.VIDEO_FILES, function="logged_probe:probe")
corpus, out, workers = sys.argv[1:]
config = RunConfig(cache_dir=out, near_duplicate_bits=10, max_rejected_share=0.5, workers=int(workers))
index.build_index(corpus, config, out)
"""


class Indexing:
    """Indexes one corpus into a folder; ``probed`` lists the worker and the name of each file that was opened."""

    def __init__(self, corpus: Path, folder: Path) -> None:
        self.corpus, self.folder, self.log = corpus, folder, folder / "probed.log"
        (folder / "modules").mkdir(parents=True)
        (folder / "modules/logged_probe.py").write_text(PROBE)
        self.log.touch()

    def run(self, kill_after: int | None = None) -> None:
        """Index to the end, or kill the process as soon as its store holds ``kill_after`` results."""
        environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{self.folder / 'modules'}", "PROBE_LOG": str(self.log)}
        command = [sys.executable, "-c", INDEX, str(self.corpus), str(self.folder), str(WORKERS)]
        with subprocess.Popen(command, env=environment) as process:
            while kill_after is not None and len(self.written) < kill_after:
                assert process.poll() is None, "it ended before it was killed"
                time.sleep(0.002)
            if kill_after is not None:
                process.kill()
        assert process.returncode == (0 if kill_after is None else -signal.SIGKILL)

    @property
    def written(self) -> set[str]:
        """Names of the files whose result is on the disk; a torn last line is none."""
        lines = [line for store in self.folder.glob("index/probes_*.jsonl") for line in store.read_bytes().split(b"\n")]
        return {Path(json.loads(line)["path"]).name for line in lines[:-1] if line.endswith(b"}")}

    @property
    def probed(self) -> list[tuple[int, str]]:
        return [(int(pid), name) for pid, name in (line.split(" ", 1) for line in self.log.read_text().splitlines())]


@pytest.mark.long
def test_an_index_killed_again_and_again_ends_as_if_it_was_not(tmp_path: Path, make_video: MakeVideo) -> None:
    corpus = tmp_path / "corpus"
    for number in range(40):  # each has a content of its own: a counter in a box that players skip
        path = make_video(corpus / ("real" if number % 2 else "fake") / f"clip{number:02d}.mp4", number % 6)
        path.write_bytes(path.read_bytes() + struct.pack(">I4sQ", 16, b"free", number))
    undisturbed, killed = Indexing(corpus, tmp_path / "undisturbed"), Indexing(corpus, tmp_path / "killed")
    undisturbed.run()
    finished: set[str] = set()
    for moment in (*sorted(random.Random(1).sample(range(1, 36), 2)), None):
        before = len(killed.probed)
        killed.run(moment)
        assert finished.isdisjoint(name for _, name in killed.probed[before:])
        finished = killed.written
        deadline = time.monotonic() + 60
        while any(map(psutil.pid_exists, {pid for pid, _ in killed.probed})) and time.monotonic() < deadline:
            time.sleep(0.01)  # a worker ends with the file in hand, for want of a parent
    # Each worker had one file in hand at each kill; nothing else was opened twice.
    assert len(killed.probed) <= 40 + 2 * WORKERS
    for name in ("index.parquet", "rejected.parquet"):
        assert (killed.folder / name).read_bytes() == (undisturbed.folder / name).read_bytes()
