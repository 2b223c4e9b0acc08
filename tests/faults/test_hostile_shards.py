"""Rows 36 and 37: shards that would write outside their folder, or run code, given to a training as its clips."""

from __future__ import annotations

import io
import json
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fvc_lib.engine.training_state import NoMetrics
from fvc_lib.services.atomic_files import sha256_of_file
from fvc_lib.services.errors import DataError
from fvc_lib.services.tables import AUGMENTED, read_table
from fvc_lib.tasks import recipe
from fvc_lib.tasks.video.training import train_fold
from fvc_lib.video.clips.shards import write_shards
from tests.kits.training import TinyTraining

Change = Callable[[tarfile.TarInfo, bytes, Path], tuple[tarfile.TarInfo, bytes]]


class Payload:
    """Unpickled, it makes a folder."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.trace),)


def renamed(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> Change:
    def change(member: tarfile.TarInfo, content: bytes, trace: Path) -> tuple[tarfile.TarInfo, bytes]:
        member.name, member.type, member.linkname = name.format(trace=trace), kind, link.format(trace=trace)
        return member, content if kind == tarfile.REGTYPE else b""

    return change


def pickled(member: tarfile.TarInfo, content: bytes, trace: Path) -> tuple[tarfile.TarInfo, bytes]:
    return member, pickle.dumps(Payload(trace)).ljust(len(content), b"\0")


def pickled_array(member: tarfile.TarInfo, content: bytes, trace: Path) -> tuple[tarfile.TarInfo, bytes]:
    stream = io.BytesIO()
    np.save(stream, np.array([Payload(trace)], object), allow_pickle=True)
    return member, stream.getvalue().ljust(len(content), b"\0")


def put_into(folder: Path, change: Change, trace: Path) -> bytes:
    """Change the first member of the first shard and sign the result; returns the member's new content."""
    path = folder / "clips-000000.tar"
    with tarfile.open(path) as tar:
        members = [(member, tar.extractfile(member).read()) for member in tar]
    members[0] = change(*members[0], trace)
    with tarfile.open(path, "w") as tar:
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    document = json.loads((folder / "manifest.json").read_text())
    document["shards"][0].update(sha256=sha256_of_file(path), size_bytes=path.stat().st_size)
    (folder / "manifest.json").write_text(json.dumps(document))
    return members[0][1]


def refused_before_training(tiny: TinyTraining, change: Change, trace: Path) -> bytes:
    folder = write_shards(tiny.store, read_table(tiny.paths.augmented_metadata, AUGMENTED))
    content = put_into(folder, change, trace)
    with pytest.raises(DataError, match=r"clips-000000\.tar.*member '") as caught:
        train_fold(tiny.paths, tiny.with_config(clip_source="shards").config, 0, metric_log=NoMetrics())
    assert caught.value.exit_code == 3
    assert not trace.exists()
    return content


@pytest.fixture(autouse=True)
def no_training(monkeypatch):
    monkeypatch.setattr(recipe, "Engine", lambda *_, **__: pytest.fail("it trains"))


@pytest.mark.fault(36)
@pytest.mark.parametrize(
    "change",
    [
        renamed("../../outside.npy"),
        renamed("{trace}"),
        renamed("0.npy", tarfile.SYMTYPE, "{trace}"),
        renamed("0.npy", tarfile.LNKTYPE, "../../outside.npy"),
    ],
    ids=["relative path", "absolute path", "symbolic link", "hard link"],
)
def test_an_archive_that_writes_outside_its_folder_is_refused_and_writes_nothing(tiny, change, tmp_path):
    before = {path for path in tmp_path.rglob("*") if "shards" not in str(path)}
    refused_before_training(tiny, change, tmp_path / "trace")
    assert {path for path in tmp_path.rglob("*") if "shards" not in str(path)} == before


@pytest.mark.fault(37)
@pytest.mark.parametrize("change", [pickled, pickled_array])
def test_a_pickled_member_is_refused_and_never_executed(tiny, change, tmp_path):
    trace = tmp_path / "it ran"
    content = refused_before_training(tiny, change, trace)
    # The payload works: whoever trusts it runs it.
    np.load(io.BytesIO(content), allow_pickle=True) if change is pickled_array else pickle.loads(content)
    assert trace.is_dir()
