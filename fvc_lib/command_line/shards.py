"""``run_notebooks.py shard``: process one shard (share of the files) of a stage before the stage's notebook runs."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import click

from fvc_lib.execution.run.shards import Shard, ShardAtWork, work_on
from fvc_lib.execution.stages import refuse_stage_of_another_task, stage_named
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, StoppedError, UsageError, command_text
from fvc_lib.services.parameters import resolve_config, run_config
from fvc_lib.services.run_paths import RunPaths, find_run
from fvc_lib.services.tasks import AUGMENTATION, DATA_INDEX, FOLD_TRAINING, FORENSIC_FEATURES


@click.command(short_help="Do the work of one shard of a stage; the jobs of --executor slurm call it.")
@click.argument("run")
@click.argument("stage")
@click.argument("shard", metavar="NUMBER/OF")
@click.option("--runs-dir", type=click.Path(path_type=Path), help="Runs folder, where it is not the default.")
def shard(run: str, stage: str, shard: str, runs_dir: Path | None) -> None:
    """Process the files of one shard (share) of STAGE of RUN before the stage's notebook runs.

    \b
    python run_notebooks.py shard latest 03 0/4        the first of four
    python run_notebooks.py --resume latest            all tables, whatever shards were done

    STAGE is 01 (probes the files), 03 (decodes them), 03b (measures them), or 04. Stage 04 has shards only if a frozen
    trunk (the pretrained part of a network) sees the clips. Its shards compute the trunk's features. On one machine you
    need no shards, because the notebooks use all cores.

    Name or content of a file decides its shard, so a file is in the same shard on every machine. Results go into the
    cache, which the notebook reads first. Shards may run at the same time, on any number of machines that share the
    cache. A repeated shard does only what is missing.
    """  # noqa: D301 - click wants the backspace character itself before lines it shall not re-wrap
    paths = find_run(runs_dir or Path(resolve_config().runs_dir), run)
    config, one, of_stage = run_config(paths.params_yaml), Shard.named(shard), stage_named(stage)
    refuse_stage_of_another_task(config, of_stage)
    if not of_stage.sharded(config):
        raise UsageError(
            f"{of_stage.name} of {paths.run_id} has no shards; those that have, of runs whose corpus has videos and is "
            f"not the sample: {', '.join(_WORK)}, the last where a frozen trunk sees the clips."
        )
    if of_stage.name != DATA_INDEX and not paths.index.is_file():
        raise DataError(f"{paths.run_id} has no index yet: {command_text('--only', '01', '--resume', paths.root)}")
    with stop_on_signals(), work_on(paths, of_stage.name, one) as at_work:
        _WORK[of_stage.name](config, paths, one, at_work)
    click.echo(f"{of_stage.name}, shard {shard}: done")


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Raise ``StoppedError`` in the block when SIGTERM or SIGUSR1 comes.

    The error's exit code makes a job of SLURM requeue itself.
    """
    before = {number: signal.signal(number, _stop) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    del frame
    raise StoppedError(f"{signal.Signals(number).name}: stopped; results are stored, and the same command goes on")


def _probe(config: RunConfig, run: RunPaths, shard: Shard, at_work: ShardAtWork) -> None:
    from fvc_lib.corpus.index import files_of, probe_listing  # polars takes a second to load
    from fvc_lib.corpus.probing import measured_again
    from fvc_lib.corpus.samples.videos import run_listing

    listing, work_dir = run_listing(config), Path(config.cache_dir) / "index"
    writer = f"{run.run_id}.{shard}"  # two runs may probe the same corpus on different hosts
    found, _ = probe_listing(
        listing, work_dir, workers=config.workers, progress=at_work.report, chosen=shard.has, writer=writer
    )
    # A trial (``dev_groups``) uses few videos. A shard cannot tell which, because the choice depends on all videos.
    if config.recipe and not config.dev_groups:
        files = files_of(listing)
        sources = {result.content_sha256: files[path] for path, result in found.items() if result.probe}
        measured_again(sources, config.recipe, config.cache_dir, work_dir, workers=config.workers,
                       progress=at_work.report, writer=writer)  # fmt: skip


def _make_clips(config: RunConfig, run: RunPaths, shard: Shard, at_work: ShardAtWork) -> None:
    from fvc_lib.corpus.samples.videos import corpus_root
    from fvc_lib.services.tables import INDEX, read_table
    from fvc_lib.video.clips.making import make_clips
    from fvc_lib.video.clips.store import ClipStore

    index = read_table(run.index, INDEX)
    mine = index.filter([shard.has(content) for content in index["content_sha256"]])
    copies = config.augmentations_per_video
    make_clips(ClipStore.of(config), mine, corpus_root(config), copies, None,
               progress=at_work.report, workers=config.workers)  # fmt: skip


def _measure(config: RunConfig, run: RunPaths, shard: Shard, at_work: ShardAtWork) -> None:
    from fvc_lib.corpus.samples.videos import corpus_root
    from fvc_lib.services.tables import INDEX, read_table
    from fvc_lib.video.features.measuring import measure_features

    tables = [(run.index, config.recipe), *([(run.original_index, "")] if config.rescale else [])]
    for path, recipe in tables:
        index = read_table(path, INDEX)
        mine = index.filter([shard.has(content) for content in index["content_sha256"]])
        measure_features(mine, corpus_root(config), config.feature_families, config.cache_dir, None,
                         recipe=recipe, progress=at_work.report, workers=config.workers)  # fmt: skip


def _compute_features(config: RunConfig, run: RunPaths, shard: Shard, at_work: ShardAtWork) -> None:
    from fvc_lib.detectors.classical import trunk_config
    from fvc_lib.engine.device import resolve_device
    from fvc_lib.services.tables import AUGMENTED, read_table
    from fvc_lib.tasks.video.data import made_clips, open_clips
    from fvc_lib.tasks.video.features import with_features

    made = read_table(run.augmented_metadata, AUGMENTED)
    source = open_clips(config, made)
    mine = [clip for clip in made_clips(made) if shard.has(clip[0])]
    network = trunk_config(config) if config.of_features else config
    device = resolve_device(config.device, config.amp).device
    with_features(source, mine, network, device, begin=0.0, stop=lambda: False, progress=at_work.report)


_WORK: dict[str, Callable[[RunConfig, RunPaths, Shard, ShardAtWork], None]] = {
    DATA_INDEX: _probe,
    AUGMENTATION: _make_clips,
    FORENSIC_FEATURES: _measure,
    FOLD_TRAINING: _compute_features,
}
