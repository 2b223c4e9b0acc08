"""A file has its old or its new content, whichever operation fails; temporary files of dead writers are removed."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fvc_lib.services.atomic_files import atomic_output, sweep_temporaries, write_bytes


def test_a_failed_write_keeps_the_old_content_and_leaves_nothing(tmp_path):
    path = tmp_path / "state.json"
    path.write_bytes(b"old")

    def write_half() -> None:
        with atomic_output(path) as temporary:
            temporary.write_bytes(b"ne")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left") as caught:
        write_half()
    assert caught.value.filename == str(path)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"old"]


WRITER = """
import socket, sys
from pathlib import Path
from fvc_lib.services.atomic_files import atomic_output
host, folder = sys.argv[1], Path(sys.argv[2])
if host:
    socket.gethostname = lambda: host
with atomic_output(folder / "shared.bin") as temporary:
    temporary.write_bytes(host.encode() * 1000)
    print(temporary.name, flush=True)
    sys.stdin.readline()
"""


def start_writer(host: str, folder: Path) -> tuple[subprocess.Popen[str], str]:
    """Start a process that writes ``shared.bin`` as machine ``host``; return it and its temporary file's name."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, host, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return writer, writer.stdout.readline().strip()


def kill(writer: subprocess.Popen[str]) -> None:
    writer.kill()
    writer.communicate()


def test_machines_that_share_a_folder_never_sweep_each_others_live_temporaries(tmp_path):
    """Temporary files of dead writers are removed at once on this machine, and after a day from other machines."""
    writers = [start_writer(host, tmp_path) for host in ("", "node-1.cluster.local", "node2", "")]
    assert len({name for _, name in writers}) == 4
    kill(writers[0][0])
    kill(writers[1][0])  # dead as well, but this machine cannot know
    assert [path.name for path in sweep_temporaries(tmp_path)] == [writers[0][1]]
    old = time.time() - 25 * 3600
    os.utime(tmp_path / writers[1][1], (old, old))
    os.utime(tmp_path / writers[3][1], (old, old))  # slow, but alive
    assert [path.name for path in sweep_temporaries(tmp_path)] == [writers[1][1]]
    for writer, _ in (writers[2], writers[3]):
        writer.communicate("go on\n")
        assert writer.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["shared.bin"]


def test_a_name_of_full_length_can_be_written(tmp_path):
    path = tmp_path / ("n" * 255)
    write_bytes(path, b"x")
    assert path.read_bytes() == b"x"
