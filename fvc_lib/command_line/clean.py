"""``clean``: delete files that runs and caches no longer need, after a preview.

Only caches and files of runs are deleted, and no link is followed. If the command is killed, the next call deletes the
rest.
"""

import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import click

from fvc_lib.execution.run.status import is_worked_on, run_lock, status_now
from fvc_lib.services.atomic_files import size_of
from fvc_lib.services.errors import FvcError, UsageError
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.run_paths import RunPaths, list_runs

_FEATURES = re.compile(r"[0-9a-f]{32}(_[a-z0-9_]+)?")
_WEIGHTS = (".safetensors", ".pt")
# Ends of names of superseded files that stay. Records show which test folds were opened; training a model takes hours.
_STAY_SUPERSEDED = ("best_model.safetensors", ".json")
Part = tuple[Path, str, int, Callable[[], object]]  # folder, description, size in bytes, function that deletes the part


def parts_of_run(run: RunPaths, before: float, *, models: bool) -> Iterator[Part]:
    """Yield the part of ``run`` that can be deleted; nothing if there is none.

    A run that is unfinished or damaged, or on which a process works, has no such part.

    Args:
        run: the run.
        before: only a run that finished before this time counts, in seconds since 1970.
        models: whether all trained weights can be deleted, too.
    """
    superseded = list(_files(run.superseded))
    paths = {path for path in superseded if not path.name.endswith(_STAY_SUPERSEDED)}
    if models:
        paths |= {path for path in (*superseded, *_files(run.root / "checkpoints")) if path.suffix in _WEIGHTS}
    with suppress(FvcError, OSError):  # nothing of a damaged run is deleted
        is_old = run.status_json.stat().st_mtime <= before
        if paths and is_old and status_now(run).state == "done" and not is_worked_on(run):
            what = f"superseded attempts{' and trained weights' if models else ''}"
            yield run.root, what, sum(path.lstat().st_size for path in paths), partial(_delete_of_run, run, paths)


def parts_of_cache(cache: Path, before: float) -> Iterator[Part]:
    """Yield the parts of the folder ``cache`` that were last used before the time ``before``, in seconds since 1970.

    They are sets of clips, features and re-encoded videos, and folders of forensic measurements.
    """
    from fvc_lib.video.clips.store import prune_set, stored_sets  # PyAV takes a moment to load
    from fvc_lib.video.features.measuring import FEATURES_FOLDER

    for clips in stored_sets(cache):
        if clips.last_used <= before:
            yield clips.folder, f"{clips.kind} {clips.settings}", clips.size_bytes, partial(prune_set, clips)
    for folder in (cache / FEATURES_FOLDER).glob("*"):
        is_own = _FEATURES.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink()
        if is_own and max((path.lstat().st_mtime for path in _files(folder)), default=0.0) <= before:
            yield folder, "forensic measurements", size_of(folder), partial(shutil.rmtree, folder)


def _delete_of_run(run: RunPaths, paths: Collection[Path]) -> None:
    with run_lock(run):
        for path in paths:
            path.unlink(missing_ok=True)


def _lives(run: RunPaths) -> bool:
    """Return whether a process works on ``run``, or the run waits for a job or a resumption.

    True if the run's status cannot be read.
    """
    with suppress(FvcError, OSError):
        return status_now(run).state in ("waiting", "requeue") or is_worked_on(run)
    return True


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files in ``folder`` and its subfolders, without following links."""
    if not folder.is_symlink():
        for parent, _, names in os.walk(folder):
            yield from (Path(parent, name) for name in names)


@click.command(short_help="Make room: show what may go of runs and caches, and delete it with --yes.")
@click.option("--yes", is_flag=True, help="Delete what the preview shows.")
@click.option(
    "--days", type=click.FloatRange(min=0), default=30.0, show_default=True, metavar="DAYS",
    help="Only what was last used or finished at least this many days ago.",
)  # fmt: skip
@click.option("--models", is_flag=True, help="Also delete the trained weights of finished runs: a clean start.")
@click.option("--runs-dir", type=click.Path(path_type=Path), help="Runs folder, where it is not the default.")
def clean(yes: bool, days: float, models: bool, runs_dir: Path | None) -> None:
    """Show how many MB each run and cache can free; with --yes delete these files.

    Caches hold clips, re-encoded videos, features and measurements. They stay while a run is at work or waits. Of
    finished runs, files of superseded attempts go, except their best models and records. With --models all trained
    weights go, too. Tables, metrics and reports stay. Unfinished runs stay as they are.

    \b
    python run_notebooks.py clean                        what would go
    python run_notebooks.py clean --yes                  delete it
    python run_notebooks.py clean --models --days 0      weights of all finished runs as well
    """  # noqa: D301 - click wants the backspace character itself before lines it shall not re-wrap
    config = resolve_config()
    if runs_dir is not None and not runs_dir.is_dir():  # else the cache would look as if no run used it
        raise UsageError(f"--runs-dir {str(runs_dir)!r}: no such folder.")
    found = list_runs(runs_dir or config.runs_dir)
    runs = [run for run in found if not (run.root.is_symlink() or run.root.parent.is_symlink())]
    before, freed = time.time() - days * 86400, 0
    parts = [part for run in runs for part in parts_of_run(run, before, models=models)]
    if not any(map(_lives, runs)):  # a run at work needs the cache
        parts += parts_of_cache(Path(config.cache_dir), before)
    for path, what, size, delete in parts:
        click.echo(f"{size / 1e6:10,.1f} MB  {path}: {what}")
        try:
            if yes:
                delete()
            freed += size
        except (FvcError, OSError) as error:
            click.echo(f"left: {path}: {error}")
    click.echo(f"{freed / 1e6:,.1f} MB {'freed' if yes else 'would be freed; repeat with --yes to do so'}")
