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
from pathlib import Path
from fvc_lib.corpus.index import build_index
corpus, out = map(Path, sys.argv[1:3])
build_index(
    corpus, index_path=out / "index.parquet", rejected_path=out / "rejected.parquet", work_dir=out / "work",
    near_duplicate_bits=10, max_rejected_share=0.5, workers=int(sys.argv[3]), probe_function="logged_probe:probe",
)
"""


class Indexing:
    """Indexes one corpus into a folder of its own; ``probed`` logs the worker and the name of each file opened."""

    def __init__(self, corpus: Path, folder: Path) -> None:
        self.corpus, self.folder = corpus, folder
        self.log = folder / "probed.log"
        (folder / "modules").mkdir(parents=True)
        (folder / "modules/logged_probe.py").write_text(PROBE)

    def start(self) -> subprocess.Popen[bytes]:
        environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{self.folder / 'modules'}", "PROBE_LOG": str(self.log)}
        command = [sys.executable, "-c", INDEX, str(self.corpus), str(self.folder), str(WORKERS)]
        return subprocess.Popen(command, env=environment)

    def finish(self) -> None:
        with self.start() as process:
            assert process.wait() == 0

    def kill_after(self, num_written: int) -> None:
        """SIGKILL the process as soon as its store holds so many results."""
        with self.start() as process:
            while len(self.written) < num_written:
                assert process.poll() is None, "it ended before it was killed"
                time.sleep(0.002)
            process.send_signal(signal.SIGKILL)

    @property
    def written(self) -> list[str]:
        """Names of the files whose result is on the disk; a torn last line is none."""
        (store,) = [*(self.folder / "work").glob("probes_*.jsonl")] or [Path(os.devnull)]
        lines = store.read_bytes().split(b"\n")[:-1]
        return [Path(json.loads(line)["path"]).name for line in lines if line.endswith(b"}")]

    @property
    def probed(self) -> list[tuple[int, str]]:
        if not self.log.exists():
            return []
        return [(int(pid), name) for pid, name in (line.split(" ", 1) for line in self.log.read_text().splitlines())]

    @property
    def tables(self) -> tuple[bytes, bytes]:
        return (self.folder / "index.parquet").read_bytes(), (self.folder / "rejected.parquet").read_bytes()


def write_corpus(corpus: Path, make_video: MakeVideo, num_files: int, num_videos: int) -> Path:
    """Real MP4 files, each with a content of its own: a counter in a box that players skip. Some are broken."""
    for number in range(num_files):
        label = "real" if number % num_videos % 2 else "fake"
        path = make_video(corpus / label / f"clip{number:05d}.mp4", number % num_videos)
        with path.open("ab") as stream:
            stream.write(struct.pack(">I4sQ", 16, b"free", number))
    (corpus / "real/page.mp4").write_text("<html>not found</html>")
    return corpus


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.long
def test_an_index_killed_again_and_again_ends_as_if_it_was_not(tmp_path: Path, make_video: MakeVideo) -> None:
    corpus = write_corpus(tmp_path / "corpus", make_video, num_files=60, num_videos=6)
    undisturbed, killed = Indexing(corpus, tmp_path / "undisturbed"), Indexing(corpus, tmp_path / "killed")
    undisturbed.finish()
    total, num_kills = len(undisturbed.probed), 3
    finished: set[str] = set()
    for moment in sorted(random.Random(1).sample(range(1, total - WORKERS), num_kills)):
        opened_before = len(killed.probed)
        killed.kill_after(moment)
        opened = killed.probed[opened_before:]
        assert finished.isdisjoint(name for _, name in opened)
        finished = set(killed.written)
        while any(lives(pid) for pid, _ in opened):  # a worker ends with the file in hand, for want of a parent
            time.sleep(0.01)
        assert not (killed.folder / "index.parquet").exists()
    opened_before = len(killed.probed)
    killed.finish()
    assert finished.isdisjoint(name for _, name in killed.probed[opened_before:])
    # Each worker had one file in hand at each kill; nothing else was opened twice, but what may become readable.
    assert sum(name != "page.mp4" for _, name in killed.probed) <= total - 1 + WORKERS * num_kills
    assert {name for _, name in killed.probed} == {name for _, name in undisturbed.probed}
    assert killed.tables == undisturbed.tables
