"""``run_notebooks.py clean`` and ``clips``: a preview unless told otherwise; what is needed stays, killed or not."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings, strategies as st

from fvc_lib.command_line.clean import removables
from fvc_lib.execution.run.lock import run_lock
from fvc_lib.execution.run.record import begin_run
from fvc_lib.execution.run.status import RunStatus, StageStatus
from fvc_lib.services.atomic_files import write_json, write_text
from fvc_lib.services.config import RunConfig
from fvc_lib.services.run_paths import RunPaths, list_runs
from fvc_lib.video.clips.store import ClipStore
from run_notebooks import main
from tests.faults.disks import small_tmpfs


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


def said(config: RunConfig, command: str, *arguments: str, exit_code: int = 0) -> str:
    folders = ["--cache-dir", config.cache_dir, "--runs-dir", config.runs_dir]
    Path(config.runs_dir).mkdir(parents=True, exist_ok=True)
    result = CliRunner().invoke(main, [command, *folders, *arguments])
    assert result.exit_code == exit_code, result.output
    return result.output


def test_clips_are_listed_and_clean_shows_what_it_would_delete(config, stores):
    shown = said(config, "clips")
    assert shown.count("unused ") == 3
    assert "used   40.0 days ago" in shown
    assert "unused: 3 of 3 sets of clips" in shown
    assert "would delete 3 items" in said(config, "clean")
    assert all(path.exists() for path in stores)
    assert "nothing to delete" in said(config, "clean", "--days", "41")
    assert "clean --days 30" in said(config, "clips", "--prune", exit_code=2)
    assert all(path.exists() for path in stores)


def test_a_misspelt_folder_of_runs_is_refused_for_its_runs_hold_what_the_cache_has(config, stores):
    done = CliRunner().invoke(main, ["clean", "--yes", "--days", "0", "--cache-dir", config.cache_dir,
                                     "--runs-dir", f"{config.runs_dir}s"])  # fmt: skip
    assert (done.exit_code, done.stderr) == (2, f"error: --runs-dir '{config.runs_dir}s': no such folder.\n")
    assert all(path.exists() for path in stores)


def test_what_clips_were_made_with_is_told_in_words_of_parameters(config, stores):
    settings = ClipStore.of(config).decode_folder / "original" / "settings.json"
    settings.write_text('{"num_frames": 4, "av": "18.1.0", "augmentations": ["flip"]}')
    assert 'num_frames 4, av 18.1.0, augmentations ["flip"]' in said(config, "clean", "--days", "0")
    assert "less than a day ago" in said(config, "clean", "--days", "0")


def test_who_waits_is_told_where_it_looks_and_how_many_files_are_gone(config, stores, monkeypatch):
    monkeypatch.setattr("fvc_lib.command_line.clean._SAY_SECONDS", 0)
    assert f"looking through {config.cache_dir}" in said(config, "clips")
    assert "  1 of 1 files deleted" in said(config, "clean", "--yes")


def test_what_is_in_use_or_was_used_lately_is_kept(config, stores):
    own, _, older = stores
    run = begin_run(config, command="test")
    run.tables.mkdir(exist_ok=True)
    run.augmented_metadata.write_text(f"clip_path\nclips/{older.parents[2].name}/original/aa/aaaa.npy")
    with run_lock(run):
        assert said(config, "clips").count("in use") == 2
        said(config, "clean", "--yes")
        assert [path.exists() for path in stores] == [True, False, True]
    lately = Path(own).with_name("bbbb.npy")
    lately.write_bytes(b"")
    assert "deleted 1 item" in said(config, "clean", "--yes")
    assert [path.exists() for path in stores] == [True, False, False]
    said(config, "clean", "--yes", "--days", "0")
    assert not own.exists()
    assert not any((Path(config.cache_dir) / "clips").iterdir())


def made_run(config: RunConfig, number: int, state: str, *files: str, **stages: str) -> RunPaths:
    """A run that ended 40 days ago, with ``files`` (their content is their name) and stages in these states."""
    run = RunPaths(Path(config.runs_dir) / config.experiment / f"run_20260101_0000{number:02d}_abcdef01")
    run.root.mkdir(parents=True)
    write_json(run.run_json, {"params": config.model_dump(mode="json"), "attempts": [{}]})
    write_text(run.params_yaml, config.to_yaml())
    status = RunStatus(run_id=run.run_id, started_utc="2026-01-01T00:00:00Z", state=state)
    status.stages = {name.strip("_"): StageStatus(state=of) for name, of in stages.items()}
    status.write(run)
    for name in files:
        write_text(run.root / name, name)
    for path in (run.run_json, run.status_json, *run.tables.glob("*")):
        os.utime(path, (time.time() - 40 * 86400,) * 2)
    return run


BEST = "checkpoints/fold_0/best_model.safetensors"
OPENED = "superseded/0/checkpoints/fold_0/selection.json"  # tells that the fold was opened before


@pytest.fixture
def runs(config):
    """By name, runs that may go, whole or in part, and runs that may not."""
    files = {
        "trained": (
            "done",
            ("tables/index.parquet", BEST, f"superseded/0/{BEST}", "superseded/1/tables/a.csv", OPENED),
        ),
        "only_model": ("done", (BEST, "superseded/0/checkpoints/fold_1/best_model.safetensors")),
        "indexed": ("done", ("tables/index.parquet", "logs/a.log")),
        "refused": ("failed", ("logs/a.log",)),
        "resumable": ("failed", ("tables/index.parquet", "checkpoints/stage_01_data_index.json")),
        "archived": ("failed", ("exports/bundle.zip",)),
        "by_hand": ("interrupted", ("tables/rejected.parquet",)),
        "waiting": ("waiting", ()),
        "requeued": ("requeue", ()),
    }
    made = {name: made_run(config, n, state, *held) for n, (name, (state, held)) in enumerate(files.items())}
    outside = Path(config.runs_dir).parent / "outside"
    write_text(outside / "video.mp4", "precious")
    for name in ("refused", "trained"):
        (made[name].root / "superseded").mkdir(exist_ok=True)
        (made[name].root / "superseded" / "link").symlink_to(outside)
    (Path(config.runs_dir) / "elsewhere").symlink_to(outside)
    write_text(outside / "run_20260101_000099_abcdef01" / "run.json", "{}")
    return made


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


STATES = ("--state", "done", "--state", "failed", "--state", "interrupted")


def test_runs_go_only_where_their_state_is_named_and_nothing_is_lost_with_them(config, runs):
    before = contents(Path(config.runs_dir).parent)
    assert "would delete 1 item" in said(config, "clean")  # what later attempts replaced
    assert contents(Path(config.runs_dir).parent) == before
    assert "nothing to delete" in said(config, "clean", *STATES, "--days", "41")
    assert "has no experiment 'another'" in said(config, "clean", *STATES, "--experiment", "another", exit_code=2)
    shown = said(config, "clean", *STATES, "--yes")
    assert "finished without a model" in shown
    assert "ended before any stage was finished" in shown
    gone = {name for name, run in runs.items() if not run.root.exists()}
    assert gone == {"indexed", "refused"}
    for name, opened in (("trained", ["selection.json"]), ("only_model", [])):
        assert {path.name for path in runs[name].superseded.rglob("*") if path.is_file()} == {Path(BEST).name, *opened}
    left = contents(Path(config.runs_dir).parent)
    assert {name: left[name] for name in left if not name.endswith("run.lock")}.items() <= before.items()
    lost = {name.split("/")[2] for name in before.keys() - left.keys()}
    assert lost == {runs[name].run_id for name in ("indexed", "refused", "trained")}
    assert "nothing to delete" in said(config, "clean", *STATES)


def test_a_run_that_is_worked_on_or_was_resumed_since_the_preview_stays(config, runs):
    with run_lock(runs["indexed"]):
        assert runs["indexed"].run_id not in said(config, "clean", *STATES)
    found = {each.path: each for each in removables(config, days=30, states=["failed", "done"])}
    write_text(runs["refused"].status_json, runs["refused"].status_json.read_text())
    write_text(runs["indexed"].root / BEST, "weights")
    for run in (runs["refused"], runs["indexed"]):
        assert found[run.root].remove() is False
        assert run.root.exists()


def test_a_run_with_a_job_stays_where_slurm_says_that_it_waits_or_cannot_be_asked(config, tmp_path, monkeypatch):
    run = made_run(config, 0, "interrupted")
    (before,) = removables(config, days=30, states=["interrupted"])
    write_json(run.slurm / "submitted.json", {"jobs": [{"job_id": "7", "name": "a", "stages": ["01_data_index"]}]})

    def goes() -> bool:
        return before.remove() is not False if list(removables(config, days=30, states=["interrupted"])) else False

    monkeypatch.setenv("PATH", str(tmp_path))
    assert not goes()
    assert before.remove() is False  # submitted after the look
    for answer, expected in (("echo '7|PENDING||BeginTime'", False), ("exit 1", False), ("echo '7|FAILED||'", True)):
        write_text(tmp_path / "squeue", f"#!/bin/sh\n{answer}\n")
        (tmp_path / "squeue").chmod(0o755)
        assert goes() is expected
    assert not run.root.exists()


def test_clips_that_a_run_took_up_or_waits_for_since_the_look_stay(config, stores):
    own, other, older = stores
    found = {each.path: each for each in removables(config, days=30)}
    waiting = made_run(config, 0, "waiting")
    assert found[own.parents[1]].remove() is False
    assert own.parents[1] not in {each.path for each in removables(config, days=30)}
    shutil.rmtree(waiting.root)
    write_text(other.parents[1] / "settings.json", "{}")
    assert found[other.parents[1]].remove() is False
    write_text(older.with_name("notes.txt"), "of a person")
    shown = said(config, "clean", "--yes")
    assert "deleted 2 items" in shown
    assert f"left: {older.with_name('notes.txt')}" in shown
    assert [path.exists() for path in stores] == [False, True, False]


def test_a_run_that_waits_without_a_job_is_said_to_hold_its_clips_and_what_lets_them_go(config, stores):
    run = begin_run(config, command="test", state="waiting")
    shown = said(config, "clean", "--yes")
    assert f"held: the clips and measurements of {run.root}" in shown
    assert f"(python run_notebooks.py --resume {run.root})" in shown
    assert [path.exists() for path in stores] == [True, False, False]
    assert "held" not in said(config, "clean", "--state", "done")
    assert "held" not in said(config, "clean", "--experiment", config.experiment)
    assert f"Did you mean '{config.experiment}'?" in said(
        config, "clean", "--experiment", config.experiment[:-1], exit_code=2
    )
    shutil.rmtree(run.root)  # as it says
    assert "held" not in said(config, "clean", "--yes")
    assert not any(path.exists() for path in stores)


def test_what_is_busy_is_left_and_not_counted(config, runs):
    (runs["indexed"].root / "run.lock").symlink_to(Path(config.runs_dir) / "none" / "lock")  # it cannot be taken
    shown = said(config, "clean", "--state", "done", "--state", "failed", "--yes")
    assert f"left: {runs['indexed'].root}: " in shown
    assert runs["indexed"].root.exists()
    assert not runs["refused"].root.exists()
    assert "deleted 2 items" in shown


def test_temporaries_of_a_corpus_in_the_cache_stay_and_so_does_a_folder_that_only_looks_left_over(config):
    cache = Path(config.cache_dir)
    of_cache, of_corpus, lately = (
        cache / name for name in (".a.999999999.tmp", "corpus/.x.999999999.tmp", ".b.999999999.tmp")
    )
    for path in (of_cache, of_corpus, lately):
        write_text(path, "half")
    for path in (of_cache, of_corpus):
        os.utime(path, (time.time() - 40 * 86400,) * 2)
    folder = Path(config.runs_dir) / config.experiment
    left, mine = folder / f".clean_run_20260101_000000_abcdef01_{time.time_ns()}", folder / ".clean_room"
    for each in (left, mine):
        write_text(each / "a", "")
    inside = config.model_copy(update={"corpus": str(of_corpus.parent)})
    assert {each.path for each in removables(inside, days=0)} == {of_cache, left}


@pytest.mark.parametrize(("state", "gone"), [("done", "superseded"), ("failed", ".")])
def test_on_a_full_disk_room_can_be_made(config, tmp_path, state, gone):
    with small_tmpfs(tmp_path / "runs", "1m") as disk:
        run = made_run(config, 1, state, "superseded/0/tables/old.parquet")
        disk.fill()
        assert "deleted 1 item" in said(config, "clean", "--state", state, "--yes")
        assert not (run.root / gone).exists()


def test_a_corpus_inside_a_runs_folder_stays_with_it(config, runs):
    inside = config.model_copy(update={"corpus": str(runs["refused"].root / "tables")})
    assert runs["refused"].root not in {each.path for each in removables(inside, days=30, states=["failed"])}


KILLED = """
import os, signal, sys
left = int(sys.argv[1])
def counted(call):
    def at_work(*arguments, **named):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **named)
    return at_work
for name in ("unlink", "rename", "rmdir"):
    setattr(os, name, counted(getattr(os, name)))
from fvc_lib.command_line.clean import removables
from fvc_lib.services.config import RunConfig
from fvc_lib.services.run_paths import RunPaths, list_runs
config = RunConfig(cache_dir=sys.argv[2], runs_dir=sys.argv[3])
print("ready", flush=True)
for line in sys.stdin:
    left = int(line)
    if os.fork() == 0:
        for each in removables(config, days=30, states=["done", "failed"]):
            each.remove()
        for each in removables(config, days=30):
            each.remove()
        os._exit(0)
    print(os.waitpid(-1, 0)[1], flush=True)
"""


@pytest.mark.long
def test_killed_at_every_operation_each_run_is_whole_or_gone_and_the_next_clean_ends_it(config, stores, runs, tmp_path):
    """One process per kill, forked from one that has imported everything; its files are put back in between."""
    folders, kept = [Path(config.cache_dir), Path(config.runs_dir)], tmp_path / "kept"
    for folder in folders:
        shutil.copytree(folder, kept / folder.name, symlinks=True)
    outside = contents(tmp_path / "outside")
    whole = {run.run_id: contents(run.root) for run in runs.values()}
    command = [sys.executable, "-c", KILLED, "1000000000", config.cache_dir, config.runs_dir]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "ready\n"

        def clean_until(operations: int) -> int:
            parent.stdin.write(f"{operations}\n")
            parent.stdin.flush()
            return int(parent.stdout.readline())

        operations, killed = 0, signal.SIGKILL
        while killed:
            killed = clean_until(operations)
            for run in list_runs(config.runs_dir, "default"):
                now = contents(run.root)
                trained = run.run_id == runs["trained"].run_id
                expected = {name for name in whole[run.run_id] if not (trained and name.startswith("superseded"))}
                assert expected <= now.keys(), (operations, run.run_id)
            if killed:
                assert clean_until(10**9) == 0
            assert not list(Path(config.runs_dir).rglob(".clean_*")), operations
            assert {run.run_id for run in list_runs(config.runs_dir, "default")} == {
                run.run_id for name, run in runs.items() if name not in ("indexed", "refused")
            }
            assert contents(tmp_path / "outside") == outside
            for folder in folders:
                shutil.rmtree(folder)
                shutil.copytree(kept / folder.name, folder, symlinks=True)
            operations += 1
        parent.stdin.close()
    assert operations > 20


NAMES = st.sampled_from(
    ["logs/a.log", BEST, f"superseded/0/{BEST}", "superseded/1/logs/b.log", "corpus/real.mp4", "tables/a.parquet",
     "checkpoints/stage_01_data_index.json", "bundle.zip", "checkpoints/fold_0/latest_checkpoint.pt"]
)  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["done", "failed", "requeue"]), st.sets(NAMES), st.booleans()), max_size=3))
def test_whatever_lies_in_runs_models_corpora_archives_and_what_is_outside_stay(made):
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(cache_dir=f"{folder}/cache", runs_dir=f"{folder}/runs")
        write_text(Path(folder) / "outside" / "video.mp4", "precious")
        runs = []
        for number, (state, names, linked) in enumerate(made):
            run = made_run(config, number, state, *sorted(names))
            if linked:
                (run.root / "superseded").mkdir(exist_ok=True)
                (run.root / "superseded" / "link").symlink_to(Path(folder) / "outside")
            runs.append((run, state, contents(run.root)))
        for each in removables(config, days=30, states=["done", "failed"]):
            each.remove()
        assert contents(Path(folder) / "outside") == {"video.mp4": b"precious"}
        for run, state, before in runs:
            lost = before.keys() - contents(run.root).keys()
            foreign = any(name.endswith((".mp4", ".zip")) for name in before)
            if foreign or state == "requeue":
                assert not lost
            if any(name.endswith((".safetensors", ".pt")) for name in before):
                assert all(name.startswith("superseded") for name in lost)
                assert not {name for name in lost if name.endswith(".safetensors")}
            if state == "failed" and "checkpoints/stage_01_data_index.json" in before:
                assert not lost
