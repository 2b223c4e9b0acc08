"""``clean`` and ``clips``: what runs and caches take on the disk, and making room, by preview and then on demand.

What goes is moved to a name that no run has, in one step, and deleted there: a clean that is killed leaves each run
whole or gone, and what is left under that name is deleted by the next one.
"""

import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from fvc_lib.execution.run.lock import is_worked_on, run_lock
from fvc_lib.execution.run.status import status_now
from fvc_lib.services.atomic_files import left_temporaries, size_of
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import FvcError, UsageError, command_text
from fvc_lib.services.parameters import resolve_config, run_config
from fvc_lib.services.run_paths import RunPaths, list_runs

LEFT = ".clean_"  # begins the name of what is being deleted
_FEATURES = re.compile(r"[0-9a-f]{32}(_[a-z0-9_]+)?")
_WEIGHTS = {".safetensors", ".pt"}
# Neither a run nor a cache has such files; where somebody put one into a run's folder, all of that stands.
_NOT_OURS = {
    ".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".rar", ".mp4", ".avi", ".mov", ".mkv", ".webm",
    ".m4v", ".mpg", ".mpeg", ".ts", ".jpg", ".jpeg",
}  # fmt: skip


@dataclass(frozen=True)
class Removable:
    """Something that may go: a folder, or a file."""

    path: Path
    kind: str
    reason: str
    size_bytes: int
    remove: Callable[[], object]


def removables(
    config: RunConfig, *, days: float, experiment: str | None = None, states: Collection[str] = ()
) -> Iterator[Removable]:
    """What may go of ``config``'s runs and cache, untouched for ``days``; looks without writing.

    Args:
        config: of the runs and cache folders, and of the corpus; all that a run was made of stands, too.
        days: least age, of a run since it ended, of a cache since its last use.
        experiment: only its runs, and no caches.
        states: only runs in these states (``done``, ``failed`` ...), and no caches; a run itself goes only where its
            state is named.
    """
    runs_dir, before = Path(config.runs_dir), time.time() - days * 86400
    known = list_runs(runs_dir)
    runs = [run for run in known if not run.root.is_symlink() and not run.root.parent.is_symlink()]
    runs = [run for run in runs if experiment in (None, run.experiment)]
    kept = _kept_folders(config, known)
    for run in runs:
        yield from _of_run(run, before, states, kept)
    for folder in _folders(runs_dir):
        if experiment in (None, folder.name):
            yield from _left_over([folder, *(run.root for run in runs if run.root.parent.name == folder.name)])
    if experiment is None and not states:
        yield from _of_cache(Path(config.cache_dir), before, known, kept)


def why_run_may_go(run: RunPaths) -> str:
    """Why nothing is lost with the run, half a sentence; empty: it is to stay."""
    with suppress(FvcError, OSError):
        if is_worked_on(run) or _has_weights(run):
            return ""
        state = status_now(run)
        if state.state == "done":
            return "finished without a model"
        finished = any(run.root.glob("checkpoints/stage_*.json")) or "done" in {s.state for s in state.stages.values()}
        if state.state in ("failed", "interrupted") and not finished:
            return "ended before any stage was finished: there is nothing to go on from"
    return ""


def _of_run(run: RunPaths, before: float, states: Collection[str], kept: Sequence[Path]) -> Iterator[Removable]:
    try:
        state = status_now(run).state
    except (FvcError, OSError):
        return  # of another version, or damaged: nobody knows what it is
    if (states and state not in states) or _last_change(run) > before:
        return
    others = [each for each in kept if each != run.root.resolve()]
    if _holds_foreign(run.root, others):
        return
    if state in states and (why := why_run_may_go(run)):
        yield Removable(run.root, "run", why, size_of(run.root), partial(_remove_run, run, _last_change(run)))
    elif state == "done" and not is_worked_on(run):
        if run.superseded.is_dir() and not run.superseded.is_symlink() and _is_replaced(run):
            why = "attempts that later ones replaced"
            yield Removable(
                run.superseded, "superseded", why, size_of(run.superseded), partial(_remove_superseded, run)
            )
        yield from _temporaries(run.root)


def _has_weights(run: RunPaths) -> bool:
    return any(path.suffix in _WEIGHTS for path, _ in _walk(run.root))


def _remove_run(run: RunPaths, last_change: float) -> None:
    with run_lock(run, say=lambda _: None, on_lost=lambda _: None):
        if _last_change(run) != last_change or _has_weights(run):
            return  # it was resumed since it was looked at
        moved = _moved(run.root)
    _delete(moved)


def _remove_superseded(run: RunPaths) -> None:
    with run_lock(run, say=lambda _: None, on_lost=lambda _: None):
        if not _is_replaced(run):
            return
        moved = _moved(run.superseded)
    _delete(moved)


def _remove_folder(folder: Path) -> None:
    _delete(_moved(folder))


def _is_replaced(run: RunPaths) -> bool:
    """Whether each model among the superseded files has a later one in the run."""
    for number in _folders(run.superseded):
        for path, _ in _walk(number):
            if path.name == "best_model.safetensors" and not (run.root / path.relative_to(number)).is_file():
                return False
    return True


def _last_change(run: RunPaths) -> float:
    """When its status or record was last written."""
    return max((path.stat().st_mtime for path in (run.run_json, run.status_json) if path.is_file()), default=0.0)


def _of_cache(cache: Path, before: float, runs: Sequence[RunPaths], kept: Sequence[Path]) -> Iterator[Removable]:
    from fvc_lib.video.clips.store import prune_set, stored_sets  # PyAV takes a moment to load
    from fvc_lib.video.features.measuring import FEATURES_FOLDER

    living = [run for run in runs if is_worked_on(run)]
    in_use = clips_in_use(living)
    for each in stored_sets(cache):
        is_free = each.folder.parent.resolve() not in in_use and not _holds(each.folder, kept)
        if is_free and each.last_used <= before:
            why = f"no run has used it for {_days(each.last_used)}: {json.dumps(each.settings)}"
            yield Removable(each.folder, each.kind, why, each.size_bytes, partial(prune_set, each))
    features = cache / FEATURES_FOLDER
    for folder in _folders(features) if not living else ():
        used = max((status.st_mtime for _, status in _walk(folder)), default=0.0)
        if _FEATURES.fullmatch(folder.name) and used <= before and not _holds_foreign(folder, kept):
            why = f"nothing was measured into it for {_days(used)}"
            yield Removable(folder, "measurements", why, size_of(folder), partial(_remove_folder, folder))
    yield from _left_over([features])
    yield from _temporaries(cache)


def _temporaries(folder: Path) -> Iterator[Removable]:
    for path in left_temporaries(folder):
        size = path.lstat().st_size
        yield Removable(path, "temporary", "its writer has died", size, partial(path.unlink, missing_ok=True))


def _left_over(folders: Sequence[Path]) -> Iterator[Removable]:
    for folder in folders:
        if folder.is_dir() and not folder.is_symlink():
            for path in sorted(folder.glob(f"{LEFT}*")):
                if path.is_dir() and not path.is_symlink():
                    why = "an earlier clean was ended while it deleted this"
                    yield Removable(path, "left over", why, size_of(path), partial(_delete, path))


def _kept_folders(config: RunConfig, runs: Sequence[RunPaths]) -> list[Path]:
    """The runs, and the corpora of this configuration and of each run, wherever they lie."""
    kept = [run.root.resolve() for run in runs]
    configs = [config]
    for run in runs:
        with suppress(FvcError, OSError, ValueError):
            configs.append(run_config(run))
    for each in configs:
        places = (each.data_dir, each.corpus, *each.more_corpora)
        kept += [Path(place).expanduser().resolve() for place in places if place]
    return sorted(set(kept))


def _holds(folder: Path, kept: Sequence[Path]) -> bool:
    """Whether something to be kept is ``folder`` or lies in it."""
    real = folder.resolve()
    return any(each.is_relative_to(real) for each in kept)


def _holds_foreign(folder: Path, kept: Sequence[Path]) -> bool:
    return _holds(folder, kept) or any(path.suffix.lower() in _NOT_OURS for path, _ in _walk(folder))


def _walk(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Every file below ``folder`` with its status, links unfollowed and among them."""
    for parent, folders, files in os.walk(folder):
        links = [name for name in folders if Path(parent, name).is_symlink()]
        for name in (*files, *links):
            path = Path(parent, name)
            with suppress(FileNotFoundError):
                yield path, path.lstat()


def _folders(parent: Path) -> list[Path]:
    if not parent.is_dir():
        return []
    return sorted(path for path in parent.iterdir() if path.is_dir() and not path.is_symlink())


def _moved(folder: Path) -> Path:
    """``folder`` under a name of its own that nothing reads; a step that happens as a whole or not at all."""
    target = folder.with_name(f"{LEFT}{folder.name}_{time.time_ns()}")
    folder.rename(target)
    return target


def _delete(folder: Path) -> None:
    """Everything below and the folder; of links the link alone."""
    for parent, folders, files in os.walk(folder, topdown=False):
        for name in (*files, *folders):
            path = Path(parent, name)
            if name in files or path.is_symlink():
                path.unlink()
            else:
                path.rmdir()
    folder.rmdir()


def _days(since: float) -> str:
    return f"{max(0.0, time.time() - since) / 86400:.0f} days"


@click.command(short_help="Make room: show what may go of runs and caches, and delete it with --yes.")
@click.option("--yes", is_flag=True, help="Delete what the preview shows. Without this nothing is changed.")
@click.option(
    "--days", type=click.FloatRange(min=0), default=30.0, show_default=True, metavar="DAYS",
    help="Only what has not been used or changed for so many days.",
)  # fmt: skip
@click.option("--experiment", help="Only runs of this experiment, and no caches.")
@click.option(
    "--state", "states", multiple=True, type=click.Choice(["done", "failed", "interrupted"]),
    help="Only runs in this state, and no caches; whole runs go only so. Repeatable.",
)  # fmt: skip
@click.option("--cache-dir", type=click.Path(path_type=Path), help="Cache folder, where it is not the default.")
@click.option("--runs-dir", type=click.Path(path_type=Path), help="Runs folder, where it is not the default.")
def clean(
    yes: bool, days: float, experiment: str | None, states: tuple[str, ...], cache_dir: Path | None,
    runs_dir: Path | None,
) -> None:  # fmt: skip
    """Show what may go, with sizes and reasons; delete it with --yes.

    Clips, re-encoded videos, features of a frozen network and forensic measurements that no run has used for long;
    superseded attempts of finished runs; temporary files of dead processes; with --state also whole runs that are
    finished without a model, or that ended before any stage was finished.

    What stays, whatever is asked for: a best model and any other weights, a run that is at work, waits for a job or
    can be resumed, a corpus, an archive, and all that lies outside the runs and cache folders; no link is followed.

    \b
    python run_notebooks.py clean                              what would go
    python run_notebooks.py clean --yes                        delete it
    python run_notebooks.py clean --state failed --days 1      runs that failed at their first stage
    """  # noqa: D301 - click wants the backspace character itself before lines it shall not re-wrap
    config = resolve_config()
    folders = {"cache_dir": cache_dir, "runs_dir": runs_dir}
    config = config.model_copy(update={name: str(path) for name, path in folders.items() if path is not None})
    size = num = 0
    for each in removables(config, days=days, experiment=experiment, states=states):
        click.echo(f"{'delete' if yes else 'would delete':<12} {each.size_bytes / 1e6:10,.1f} MB  {each.kind:<12} "
                   f"{each.path}: {each.reason}")  # fmt: skip
        if yes:
            each.remove()
        size, num = size + each.size_bytes, num + 1
    told = f"{num} item{'' if num == 1 else 's'}, {size / 1e6:,.1f} MB"
    if yes:
        click.echo(f"deleted {told}")
    else:
        click.echo(f"would delete {told}; repeat with --yes to do so" if num else "nothing to delete")


@click.command(short_help="Show the shared clip store.")
@click.option("--prune", is_flag=True, hidden=True)
@click.option(
    "--unused-days", type=click.FloatRange(min=0), default=30.0, show_default=True, metavar="DAYS",
    help="What no run has used for so many days is marked; 0: all that no living run works with.",
)  # fmt: skip
@click.option("--cache-dir", type=click.Path(path_type=Path), help="Cache folder, where it is not the default.")
@click.option("--runs-dir", type=click.Path(path_type=Path), help="Runs folder, where it is not the default.")
def clips(prune: bool, unused_days: float, cache_dir: Path | None, runs_dir: Path | None) -> None:
    """Show what the shared clip store holds; clean deletes what is unused.

    Clips are made once for all runs with the same settings and stay until they are deleted; a run that needs
    them again makes them again. Each set is shown with its size and last use. Clips of a run in --runs-dir that is
    being worked on are kept; of runs elsewhere that share the cache only the last use is known. Videos written anew for
    -p canonical true or -p rescale 480 are such a set too.
    """
    from fvc_lib.video.clips.store import stored_sets

    command = command_text("clean", "--days", f"{unused_days:g}")
    if prune:
        raise UsageError(f"clips --prune is now: {command}, which shows what would go; with --yes it is deleted.")
    config = resolve_config()
    sets = stored_sets(cache_dir or Path(config.cache_dir))
    in_use = clips_in_use([run for run in list_runs(runs_dir or Path(config.runs_dir)) if is_worked_on(run)])
    chosen = []
    for clip_set in sets:
        unused = max(0.0, time.time() - clip_set.last_used) / 86400
        used = clip_set.folder.parent.resolve() in in_use
        if not used and unused >= unused_days:
            chosen.append(clip_set)
        what = "in use" if used else "unused" if clip_set in chosen else "keep"
        size = f"{clip_set.size_bytes / 1e6:10,.1f} MB {clip_set.num_files:8,} files"
        settings = json.dumps(clip_set.settings)
        click.echo(f"{what:<7} {size}, used {unused:6.1f} days ago: {clip_set.name} {settings}")
    size = f"{len(chosen)} of {len(sets)} sets of clips, {sum(each.size_bytes for each in chosen) / 1e6:,.1f} MB"
    click.echo(f"unused: {size}" + (f"; to make room: {command}" if chosen else ""))


def clips_in_use(living: Sequence[RunPaths]) -> set[Path]:
    """The clip folders that these runs work with, by their settings now and by what they have written."""
    from fvc_lib.video.clips.store import ClipStore
    from fvc_lib.video.reencode import REENCODED_FOLDER

    folders = set()
    for run in living:
        config = run_config(run)
        folders.add(ClipStore.of(config).decode_folder.resolve())
        folders |= {(Path(config.cache_dir) / REENCODED_FOLDER).resolve()} if config.recipe else set()
        if run.augmented_metadata.is_file():  # made by another version of the code, perhaps
            with run.augmented_metadata.open("rb") as stream:
                names = re.findall(rb"clips/decode_[0-9a-f]+", stream.read(1 << 16))
            folders |= {(Path(config.cache_dir) / os.fsdecode(name)).resolve() for name in names}
    return folders
