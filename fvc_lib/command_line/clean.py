"""``clean`` and ``clips``: what runs and caches take on the disk, and making room, by preview and then on demand.

A run, or a folder of measurements, is moved to a name that nothing reads, in one step, and deleted there: a clean that
is killed leaves it whole or gone, and what is left under that name is deleted by the next one. Clips and superseded
files go one by one; the next clean goes on where one was killed.
"""

import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fvc_lib.analysis.wording import count_text
from fvc_lib.execution.run.lock import is_worked_on, run_lock
from fvc_lib.execution.run.status import status_now
from fvc_lib.execution.slurm.queue import has_command, job_states, submitted_jobs
from fvc_lib.services.atomic_files import left_temporaries, size_of
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import FvcError, UsageError, command_text, did_you_mean
from fvc_lib.services.parameters import resolve_config, run_config
from fvc_lib.services.run_paths import RunPaths, list_runs
from fvc_lib.services.tar_patterns import fixed_folder, is_pattern

if TYPE_CHECKING:
    from fvc_lib.video.clips.store import ClipSet

_FEATURES = re.compile(r"[0-9a-f]{32}(_[a-z0-9_]+)?")
_LEFT = re.compile(rf"\.clean_(run_.+|superseded|{_FEATURES.pattern})_[0-9]{{16,}}")  # as _moved names it
# Of superseded files: the records tell which test folds had been opened before, and what the models are.
_STAY_SUPERSEDED = ("best_model.safetensors", ".json")
_SAY_SECONDS = 5.0  # between lines about a long deletion
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
    remove: Callable[[], object]  # False: it stands, for it has been used since it was looked at


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
        yield from _of_cache(Path(config.cache_dir), runs_dir, before, kept)


def why_run_may_go(run: RunPaths) -> str:
    """Why nothing is lost with the run, half a sentence; empty: it is to stay."""
    with suppress(FvcError, OSError):
        if is_worked_on(run) or _is_needed(run):
            return ""
        state = status_now(run)
        if state.state == "done":
            return "finished without a model"
        finished = any(run.root.glob("checkpoints/stage_*.json")) or "done" in {s.state for s in state.stages.values()}
        # A stage in a notebook takes no lock and leaves no record: what it wrote may be all there is to see of it.
        if state.state in ("failed", "interrupted") and not finished and not any(run.tables.glob("*")):
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
        if run.superseded.is_dir() and not run.superseded.is_symlink():
            sizes = [
                status.st_size for path, status in _walk(run.superseded) if not path.name.endswith(_STAY_SUPERSEDED)
            ]
            if sizes:
                why = "attempts that later ones replaced, but for their best models and records"
                yield Removable(run.superseded, "superseded", why, sum(sizes), partial(_remove_superseded, run))
        yield from _temporaries(run.root, before, others)


def _is_needed(run: RunPaths) -> bool:
    """Whether it has weights, or a job that has not ended; where there is no SLURM to ask, whether it ever had a job.

    Raises:
        FvcError: SLURM does not answer, or the record of the jobs is damaged.
    """
    if any(path.suffix in _WEIGHTS for path, _ in _walk(run.root)):
        return True
    has_jobs = bool(submitted_jobs(run))
    return has_jobs and (not has_command("squeue") or any(not job.ended for job in job_states(run, must_answer=True)))


def _remove_run(run: RunPaths, last_change: float) -> bool:
    with run_lock(run):
        if _last_change(run) != last_change or _is_needed(run):
            return False
        moved = _moved(run.root)
    _delete(moved)
    return True


def _remove_superseded(run: RunPaths) -> None:
    with run_lock(run):
        _delete(run.superseded, keep=_STAY_SUPERSEDED)


def _remove_clips(clip_set: "ClipSet", runs_dir: Path) -> bool:
    from fvc_lib.video.clips.store import SETTINGS_FILE, prune_set

    settings = clip_set.folder / SETTINGS_FILE
    if settings.is_file() and settings.stat().st_mtime > clip_set.last_used:
        return False
    if clip_set.folder.parent.resolve() in clips_in_use(_living(list_runs(runs_dir))):
        return False
    said = time.monotonic()

    def say(num_deleted: int) -> None:
        nonlocal said
        if time.monotonic() - said >= _SAY_SECONDS:
            said = time.monotonic()
            click.echo(f"  {num_deleted:,} of {clip_set.num_files:,} files deleted", err=True)

    for path in prune_set(clip_set, say):
        click.echo(f"left: {path}: not a file of the cache's")
    return True


def _remove_measurements(folder: Path, last_change: float, runs_dir: Path) -> bool:
    if _newest(folder) > last_change or _living(list_runs(runs_dir)):
        return False
    _delete(_moved(folder))
    return True


def _living(runs: Sequence[RunPaths]) -> list[RunPaths]:
    """Those that are worked on, or wait for a job or to be resumed."""
    living = []
    for run in runs:
        state = ""
        with suppress(FvcError, OSError):
            state = status_now(run).state
        if state in ("waiting", "requeue") or is_worked_on(run):
            living.append(run)
    return living


def _left_waiting(runs_dir: Path) -> Iterator[RunPaths]:
    """Runs that wait for jobs of which the queue here knows none: they hold their caches for nothing, perhaps."""
    for run in list_runs(runs_dir):
        with suppress(FvcError, OSError):
            waits = status_now(run).state in ("waiting", "requeue") and not is_worked_on(run)
            if waits and all(job.ended for job in job_states(run, must_answer=True)):
                yield run


def _last_change(run: RunPaths) -> float:
    """When its status, its record or one of its tables was last written."""
    paths = (run.run_json, run.status_json, *run.tables.glob("*"))
    return max((path.stat().st_mtime for path in paths if path.is_file()), default=0.0)


def _newest(folder: Path) -> float:
    return max((status.st_mtime for _, status in _walk(folder)), default=0.0)


def _of_cache(cache: Path, runs_dir: Path, before: float, kept: Sequence[Path]) -> Iterator[Removable]:
    from fvc_lib.video.clips.store import stored_sets  # PyAV takes a moment to load
    from fvc_lib.video.features.measuring import FEATURES_FOLDER

    living = _living(list_runs(runs_dir))
    in_use = clips_in_use(living)
    for each in stored_sets(cache):
        is_free = each.folder.parent.resolve() not in in_use and not _holds(each.folder, kept)
        if is_free and each.last_used <= before:
            why = f"last used {_days(each.last_used)} ago: {_settings_text(each.settings)}"
            yield Removable(each.folder, each.kind, why, each.size_bytes, partial(_remove_clips, each, runs_dir))
    features = cache / FEATURES_FOLDER
    for folder in _folders(features) if not living else ():
        used = _newest(folder)
        if _FEATURES.fullmatch(folder.name) and used <= before and not _holds_foreign(folder, kept):
            why = f"last measured into {_days(used)} ago"
            remove = partial(_remove_measurements, folder, used, runs_dir)
            yield Removable(folder, "measurements", why, size_of(folder), remove)
    yield from _left_over([features])
    yield from _temporaries(cache, before, kept)


def _temporaries(folder: Path, before: float, kept: Sequence[Path]) -> Iterator[Removable]:
    inside = [each for each in kept if each.is_relative_to(folder.resolve())]
    before = min(before, time.time() - 86400)  # older names do not say on which machine the writer was
    for path in left_temporaries(folder):
        if any(path.parent.resolve().is_relative_to(each) for each in inside):
            continue
        with suppress(FileNotFoundError):
            status = path.lstat()
            if status.st_mtime <= before:
                remove = partial(path.unlink, missing_ok=True)
                yield Removable(path, "temporary", "its writer has died", status.st_size, remove)


def _left_over(folders: Sequence[Path]) -> Iterator[Removable]:
    for folder in folders:
        if folder.is_dir() and not folder.is_symlink():
            for path in _folders(folder):
                if _LEFT.fullmatch(path.name):
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
        corpora = (each.corpus, *each.more_corpora)
        places = (each.data_dir, *(fixed_folder(corpus) if is_pattern(corpus) else corpus for corpus in corpora))
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
    target = folder.with_name(f".clean_{folder.name}_{time.time_ns()}")
    folder.rename(target)
    return target


def _delete(folder: Path, keep: tuple[str, ...] = ()) -> None:
    """Everything below but files whose names end so, and the folders that are empty then; of links the link alone."""
    for parent, folders, files in os.walk(folder, topdown=False):
        for name in (*files, *folders):
            path = Path(parent, name)
            with suppress(FileNotFoundError):  # another clean is at it
                if name not in files and not path.is_symlink():
                    _remove_empty(path)
                elif not name.endswith(keep):
                    path.unlink()
    with suppress(FileNotFoundError):
        _remove_empty(folder)


def _remove_empty(folder: Path) -> None:
    if not any(folder.iterdir()):
        folder.rmdir()


def _days(since: float) -> str:
    days = int((time.time() - since) / 86400)
    return count_text(days, "day") if days > 0 else "less than a day"


def _settings_text(settings: Mapping[str, object]) -> str:
    """What a set of clips was made with, as parameters are written: ``num_frames 16, image_size 112``."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in settings.items()}
    return ", ".join(f"{name} {text}" for name, text in texts.items()) or "settings unknown"


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
    superseded attempts of finished runs, but for their best models and JSON records; temporary files of dead
    processes; with --state also whole runs that are finished without a model, or that ended before any stage was
    finished.

    What stays, whatever is asked for: every best model and a run's present weights, a run that is at work, waits for a
    job or can be resumed, a corpus, an archive, and all that lies outside the runs and cache folders; no link is
    followed. Of runs in another runs folder that share the cache only the last use is known.

    \b
    python run_notebooks.py clean                              what would go
    python run_notebooks.py clean --yes                        delete it
    python run_notebooks.py clean --state failed --days 1      runs that failed at their first stage
    """  # noqa: D301 - click wants the backspace character itself before lines it shall not re-wrap
    config = resolve_config()
    folders = {"cache_dir": cache_dir, "runs_dir": runs_dir}
    config = config.model_copy(update={name: str(path) for name, path in folders.items() if path is not None})
    if runs_dir is not None and not runs_dir.is_dir():  # misspelt, the cache would look as if no run used it
        raise UsageError(f"--runs-dir {str(runs_dir)!r}: no such folder.")
    if experiment is not None and not (Path(config.runs_dir) / experiment).is_dir():
        there = [folder.name for folder in _folders(Path(config.runs_dir))]
        raise UsageError(f"{config.runs_dir} has no experiment {experiment!r}.{did_you_mean(experiment, there)}")
    click.echo(f"looking through {config.runs_dir} and {config.cache_dir}", err=True)
    size = num = 0
    for each in removables(config, days=days, experiment=experiment, states=states):
        click.echo(f"{'delete' if yes else 'would delete':<12} {each.size_bytes / 1e6:10,.1f} MB  {each.kind:<12} "
                   f"{each.path}: {each.reason}")  # fmt: skip
        if yes:
            try:
                left = "it has been used since it was looked at" if each.remove() is False else ""
            except (FvcError, OSError) as error:
                left = str(error)
            if left:
                click.echo(f"left: {each.path}: {left}")
                continue
        size, num = size + each.size_bytes, num + 1
    if experiment is None and not states:
        for run in _left_waiting(Path(config.runs_dir)):
            go_on = command_text("--resume", run.root, *(["--executor", "slurm"] if submitted_jobs(run) else []))
            click.echo(
                f"held: the clips and measurements of {run.root}, which is not finished, though no job of it is in the "
                f"queue here: go on with it ({go_on}) or, if nothing shall come of it, delete its folder"
            )
    told = f"{count_text(num, 'item')}, {size / 1e6:,.1f} MB"
    if not num:
        click.echo("nothing to delete" + (f": all has been used within {days:g} days, or has to stay" if days else ""))
    else:
        click.echo(f"deleted {told}" if yes else f"would delete {told}; repeat with --yes to do so")


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
    being worked on or waits are kept; of runs elsewhere that share the cache only the last use is known. Videos
    written anew for -p canonical true or -p rescale 480 are such a set too.
    """
    from fvc_lib.video.clips.store import stored_sets

    command = command_text("clean", "--days", f"{unused_days:g}")
    if prune:
        raise UsageError(f"clips --prune is now: {command}, which shows what would go; with --yes it is deleted.")
    config = resolve_config()
    cache = cache_dir or Path(config.cache_dir)
    click.echo(f"looking through {cache}", err=True)  # a minute, where there are many clips
    sets = stored_sets(cache)
    in_use = clips_in_use(_living(list_runs(runs_dir or Path(config.runs_dir))))
    chosen = []
    for clip_set in sets:
        unused = max(0.0, time.time() - clip_set.last_used) / 86400
        used = clip_set.folder.parent.resolve() in in_use
        if not used and unused >= unused_days:
            chosen.append(clip_set)
        what = "in use" if used else "unused" if clip_set in chosen else "keep"
        size = f"{clip_set.size_bytes / 1e6:10,.1f} MB {clip_set.num_files:8,} files"
        settings = _settings_text(clip_set.settings)
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
