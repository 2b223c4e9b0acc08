"""``run_notebooks.py clips``: what the shared clip store holds, and deleting what nobody has used for long."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import click

from fvc_lib.execution.run_lock import is_worked_on
from fvc_lib.execution.session import run_config
from fvc_lib.services.config import resolve_config
from fvc_lib.services.run_paths import list_runs


@click.command(short_help="Show the shared clip store; delete what is unused.")
@click.option(
    "--prune", is_flag=True, help="Delete what the preview lists as 'delete'. Without this nothing is changed."
)
@click.option(
    "--unused-days", type=click.FloatRange(min=0), default=30.0, show_default=True, metavar="DAYS",
    help="What no run has used for so many days is marked; 0: all that no living run works with.",
)  # fmt: skip
@click.option("--cache-dir", type=click.Path(path_type=Path), help="Cache folder, where it is not the default.")
@click.option("--runs-dir", type=click.Path(path_type=Path), help="Runs folder, where it is not the default.")
def clips(prune: bool, unused_days: float, cache_dir: Path | None, runs_dir: Path | None) -> None:
    """Show what the shared clip store holds; delete clips unused for long with --prune.

    Clips are made once for all runs with the same settings and stay until they are deleted here; a run that needs
    them again makes them again. Each set is shown with its size and last use. Clips of a run in --runs-dir that is
    being worked on are kept; of runs elsewhere that share the cache only the last use is known. Nothing outside the
    cache's clips folder is touched, no link is followed, and files that are not ours stand.

    \b
    python run_notebooks.py clips                              what is there, and what would go
    python run_notebooks.py clips --prune                      delete what was unused for 30 days
    python run_notebooks.py clips --prune --unused-days 0      delete all that no living run works with
    """  # noqa: D301 - click wants the backspace character itself before lines it shall not re-wrap
    from fvc_lib.video.clip_pruning import prune_set, stored_sets

    config = resolve_config()
    sets = stored_sets(cache_dir or Path(config.cache_dir))
    in_use = _clips_in_use(runs_dir or Path(config.runs_dir))
    chosen = []
    for clip_set in sets:
        days = max(0.0, time.time() - clip_set.last_used) / 86400
        used = clip_set.folder.parent.resolve() in in_use
        if not used and days >= unused_days:
            chosen.append(clip_set)
        what = "in use" if used else "delete" if clip_set in chosen else "keep"
        size = f"{clip_set.size_bytes / 1e6:10,.1f} MB {clip_set.num_files:8,} files"
        settings = json.dumps(clip_set.settings)
        click.echo(f"{what:<7} {size}, used {days:6.1f} days ago: {clip_set.name} {settings}")
    size = f"{len(chosen)} of {len(sets)} sets of clips, {sum(each.size_bytes for each in chosen) / 1e6:,.1f} MB"
    if not prune:
        click.echo(f"would delete {size}; repeat with --prune to do so" if chosen else f"nothing to delete ({size})")
        return
    pruned = [prune_set(clip_set) for clip_set in chosen]
    click.echo(f"deleted {size}, {sum(each.num_files for each in pruned):,} files")
    for path in (path for each in pruned for path in each.left):
        click.echo(f"left, because it is no clip: {str(path)!r}")


def _clips_in_use(runs_dir: Path) -> set[Path]:
    """The clip folders that living runs work with, by their settings now and by what they have written."""
    from fvc_lib.video.clip_store import ClipStore

    folders = set()
    for run in list_runs(runs_dir):
        if is_worked_on(run):
            config = run_config(run)
            folders.add(ClipStore.of(config).decode_folder.resolve())
            if run.augmented_metadata.is_file():  # made by another version of the code, perhaps
                with run.augmented_metadata.open("rb") as stream:
                    names = re.findall(rb"clips/decode_[0-9a-f]+", stream.read(1 << 16))
                folders |= {(Path(config.cache_dir) / os.fsdecode(name)).resolve() for name in names}
    return folders
