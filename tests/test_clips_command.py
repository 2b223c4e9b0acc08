"""``run_notebooks.py clips``: a preview unless told otherwise, and the clips of a living run are kept."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from fvc_lib.execution.run.lock import run_lock
from fvc_lib.execution.run.record import begin_run
from fvc_lib.services.config import RunConfig
from fvc_lib.video.clips.store import ClipStore
from run_notebooks import main


@pytest.fixture
def config(tmp_path):
    return RunConfig(cache_dir=str(tmp_path / "cache"), runs_dir=str(tmp_path / "runs"), num_frames=1, fixed_size=16)


@pytest.fixture
def stores(config):
    """The clips of ``config``, of an older version of the code's, and of another size; used 40 days ago."""
    own, other = ClipStore.of(config), ClipStore.of(config.model_copy(update={"fixed_size": 17}))
    older = own.cache_dir / "clips" / ("decode_" + "a" * 32) / "original" / "aa" / "aaaa.npy"
    for store in (own, other):
        store.write("aaaa", 0, np.zeros(store.shape, np.uint8))
    older.parent.mkdir(parents=True)
    older.write_bytes(b"clip")
    files = own.clip_path("aaaa", 0), other.clip_path("aaaa", 0), older
    for path in files:
        os.utime(path, (time.time() - 40 * 86400,) * 2)
    return files


def clips(config: RunConfig, *arguments: str) -> str:
    folders = ["--cache-dir", config.cache_dir, "--runs-dir", config.runs_dir]
    result = CliRunner().invoke(main, ["clips", *folders, *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_without_the_flag_nothing_is_deleted(config, stores):
    shown = clips(config)
    assert shown.count("delete ") == 4  # three sets and the sum
    assert "used   40.0 days ago" in shown
    assert "would delete 3 of 3 sets of clips" in shown
    assert all(path.exists() for path in stores)
    assert "nothing to delete" in clips(config, "--unused-days", "41")


def test_what_is_in_use_or_was_used_lately_is_kept(config, stores):
    own, _, older = stores
    run = begin_run(config, command="test")
    run.tables.mkdir(exist_ok=True)
    run.augmented_metadata.write_text(f"clip_path\nclips/{older.parents[2].name}/original/aa/aaaa.npy")
    with run_lock(run):
        assert clips(config, "--prune").count("in use") == 2
        assert [path.exists() for path in stores] == [True, False, True]
    lately = Path(own).with_name("bbbb.npy")
    lately.write_bytes(b"")
    shown = clips(config, "--prune")
    assert [path.exists() for path in stores] == [True, False, False]
    assert "deleted 1 of 2 sets" in shown
    clips(config, "--prune", "--unused-days", "0")
    assert not own.exists()
    assert not any((Path(config.cache_dir) / "clips").iterdir())
