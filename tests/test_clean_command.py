"""``run_notebooks.py clean``: a preview unless ``--yes``; what is needed stays."""

import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from fvc_lib.command_line.main import main
from fvc_lib.execution.run.record import begin_run
from fvc_lib.execution.run.status import RunStatus, run_lock
from fvc_lib.services.atomic_files import write_json, write_text
from fvc_lib.services.config import RunConfig
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.video.clips.store import ClipStore
from tests.faults.disks import small_tmpfs

BEST, LATEST = "checkpoints/fold_0/best_model.safetensors", "checkpoints/fold_0/latest_checkpoint.pt"
MEASURED = "features/" + "a" * 32 + "/aa.parquet"


@pytest.fixture
def config(tmp_path):
    return RunConfig(cache_dir=str(tmp_path / "cache"), runs_dir=str(tmp_path / "runs"), num_frames=1, fixed_size=16)


def clean(config: RunConfig, *arguments: str) -> str:
    Path(config.runs_dir).mkdir(parents=True, exist_ok=True)
    result = CliRunner().invoke(
        main, ["clean", "--runs-dir", config.runs_dir, *arguments], env={"FVC_CACHE_DIR": config.cache_dir}
    )
    assert result.exit_code == 0, result.output
    return result.output


def aged(path: Path) -> Path:
    os.utime(path, (time.time() - 40 * 86400,) * 2)
    return path


@pytest.fixture
def caches(config):
    """Clips of ``config`` and of another size, and measurements; all used 40 days ago."""
    stores = [ClipStore.of(config), ClipStore.of(config.model_copy(update={"fixed_size": 17}))]
    for store in stores:
        store.write("aaaa", 0, np.zeros(store.shape, np.uint8))
    write_text(measured := Path(config.cache_dir) / MEASURED, "")
    return [aged(path) for path in (*(store.clip_path("aaaa", 0) for store in stores), measured)]


def made_run(config: RunConfig, number: int, state: str, *files: str) -> RunPaths:
    """A run that ended 40 days ago, with ``files``."""
    run = RunPaths(Path(config.runs_dir) / config.experiment / f"run_20260101_0000{number:02d}_abcdef01")
    write_json(run.run_json, {"params": config.model_dump(mode="json"), "attempts": [{}]})
    write_text(run.params_yaml, config.to_yaml())
    RunStatus(run_id=run.run_id, started_utc="2026-01-01T00:00:00Z", state=state).write(run)
    for name in files:
        write_text(run.root / name, name)
    aged(run.status_json)
    return run


def there(run: RunPaths) -> set[str]:
    own = {"run.json", "params.yaml", "status.json", "run.lock"}
    return {str(path.relative_to(run.root)) for path in run.root.rglob("*") if path.is_file()} - own


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ([], [True, True, True]),
        (["--yes", "--days", "41"], [True, True, True]),
        (["--yes"], [False, False, False]),
    ],
)
def test_caches_go_once_unused_and_asked_for_but_nothing_behind_links(config, caches, tmp_path, arguments, kept):
    write_text(tmp_path / "outside/original/a.npy", "precious")
    (Path(config.cache_dir) / "clips/decode_link").symlink_to(tmp_path / "outside")
    clean(config, *arguments)
    assert [path.exists() for path in caches] == kept
    assert (tmp_path / "outside/original/a.npy").is_file()


def test_caches_stay_while_a_run_lives(config, caches):
    run = begin_run(config, command="test", state="waiting")
    clean(config, "--yes")
    assert all(path.exists() for path in caches)
    shutil.rmtree(run.root)
    clean(config, "--yes")
    assert not any(path.exists() for path in caches)


FILES = (BEST, LATEST, "tables/a.csv", f"superseded/1/{BEST}", "superseded/1/selection.json", "superseded/1/a.csv")


@pytest.mark.parametrize(
    ("state", "arguments", "gone"),
    [
        ("done", ["--yes"], {"superseded/1/a.csv"}),
        ("done", ["--yes", "--models"], {"superseded/1/a.csv", BEST, LATEST, f"superseded/1/{BEST}"}),
        ("done", ["--yes", "--models", "--days", "41"], set()),
        ("requeue", ["--yes", "--models"], set()),
    ],
)
def test_finished_runs_give_up_what_was_replaced_and_weights_only_when_asked(config, tmp_path, state, arguments, gone):
    run, outside = made_run(config, 0, state, *FILES), tmp_path / "outside"
    for name in (BEST, "superseded/1/a.csv"):
        write_text(outside / name, "precious")
    (run.superseded / "link").symlink_to(outside)
    (run.root.parent / "run_link").symlink_to(outside)
    clean(config, *arguments)
    assert there(run) == set(FILES) - gone
    assert len([path for path in outside.rglob("*") if path.is_file()]) == 2


def test_a_busy_run_stays_and_another_runs_folder_is_not_touched(config, caches):
    run = made_run(config, 0, "done", *FILES)
    with run_lock(run.root):
        clean(config, "--yes")
    assert there(run) == set(FILES)
    assert all(path.exists() for path in caches)
    clean(config.model_copy(update={"runs_dir": f"{config.runs_dir}2"}), "--yes", "--days", "41")
    assert there(run) == set(FILES)


def test_a_full_disk_can_be_freed(config, tmp_path):
    with small_tmpfs(tmp_path / "runs", "1m") as disk:
        run = made_run(config, 1, "done", *FILES)
        disk.fill()
        clean(config, "--yes")
        assert "superseded/1/a.csv" not in there(run)
