"""Either the old content or the new, whatever operation fails; leftovers of the dead are swept."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fvc_lib.services import atomic_files
from fvc_lib.services.atomic_files import sweep_temporaries, write_bytes


class FailingDisk:
    """Makes the n-th file operation of a write fail with ENOSPC, as SQLite's tests do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail_at: int) -> None:
        self.calls = 0
        self.fail_at = fail_at
        for name in ("open", "fsync"):
            monkeypatch.setattr(atomic_files.os, name, self._counted(getattr(os, name)))
        monkeypatch.setattr(Path, "replace", self._counted(Path.replace))
        monkeypatch.setattr(Path, "write_bytes", self._counted(Path.write_bytes))

    def _counted(self, real):
        def operation(*args, **kwargs):
            self.calls += 1
            if self.calls == self.fail_at:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args, **kwargs)

        return operation


def test_the_old_content_stands_whichever_operation_fails(tmp_path, monkeypatch):
    path = tmp_path / "state.json"
    for fail_at in range(1, 100):
        path.write_bytes(b"old")
        with monkeypatch.context() as patch:
            disk = FailingDisk(patch, fail_at)
            try:
                write_bytes(path, b"new")
            except OSError:
                failed = True
            else:
                failed = False
        replaced = path.read_bytes() == b"new"
        # After the rename the new content is there; what may still fail is making the rename survive a power cut.
        assert path.read_bytes() in (b"old", b"new")
        assert [p.name for p in tmp_path.iterdir()] == ["state.json"]
        if not failed:
            assert replaced
            assert disk.calls < fail_at
            return
    pytest.fail("no write ever passed")


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
    """A process in the middle of writing ``shared.bin`` as a machine called ``host``, and its temporary's name."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, host, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return writer, writer.stdout.readline().strip()


def kill(writer: subprocess.Popen[str]) -> None:
    writer.kill()
    writer.communicate()


def test_machines_that_share_a_folder_never_sweep_each_others_live_temporaries(tmp_path):
    """Two nodes and this one in mid-write; those of dead writers go at once here, after a day from elsewhere."""
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
