"""``fvc shard``: process one shard (share of the files) of a stage before the stage's notebook runs."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click
import polars as pl

from fvc_lib.command_line.shared_options import RUNS_DIR
from fvc_lib.execution.run.shards import Shard, work_on
from fvc_lib.execution.stages import refuse_stage_of_another_task, stage_named
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import StoppedError, UsageError
from fvc_lib.services.parameters import run_config
from fvc_lib.services.run_paths import find_run
from fvc_lib.services.stage_logs import Report
from fvc_lib.services.tables import AUGMENTED, INDEX, read_table
from fvc_lib.services.tasks import AUGMENTATION, DATA_INDEX, FOLD_TRAINING, FORENSIC_FEATURES

if TYPE_CHECKING:
    from fvc_lib.corpus.listing import Listing

STAGES_WITH_SHARDS = (DATA_INDEX, AUGMENTATION, FORENSIC_FEATURES, FOLD_TRAINING)


@click.command()
@click.argument("run")
@click.argument("stage")
@click.argument("shard", metavar="NUMBER/OF")
@RUNS_DIR
def shard(run: str, stage: str, shard: str, runs_dir: Path) -> None:
    """Process the files of one shard (share) of STAGE of RUN before the stage's notebook runs.

    \b
    fvc shard latest 03 0/4        the first of four
    fvc --resume latest            then the notebooks, which also do what shards left

    STAGE is 01 (reads length, size and codec of the files), 03 (decodes them), 03b (measures forensic features), or 04
    (computes features of clips with a network's frozen trunk, the pretrained part that is not trained). Stage 04 has
    shards only if the model has such a trunk. On one machine you need no shards, because the notebooks use all cores.

    Name or content of a file decides its shard, so a file is in the same shard on every machine. Results go into the
    cache, which the notebook reads first. Shards may run at the same time, on any number of machines that share the
    cache. A repeated shard does only what is missing.
    """
    from fvc_lib.corpus.samples.videos import run_listing  # polars takes a second to load

    paths = find_run(runs_dir, run)
    one = Shard.named(shard)
    of_stage = stage_named(stage)
    config = run_config(paths.params_yaml)
    name = of_stage.name
    refuse_stage_of_another_task(config, of_stage)
    if not of_stage.sharded(config):
        raise UsageError(
            f"{name} of {paths.run_id} has no shards; those that have, of runs whose corpus has videos and is not the "
            f"sample: {', '.join(STAGES_WITH_SHARDS)}, the last where a frozen trunk sees the clips."
        )
    listing = run_listing(config)
    with stop_on_signals(), work_on(paths.root, name, one) as at_work:
        options: dict[str, Any] = {"progress": at_work.report, "workers": config.workers}
        if name == DATA_INDEX:  # two runs may probe the same corpus on different hosts
            _probe(config, listing, one, writer=f"{paths.run_id}.{one}", **options)
        elif name == AUGMENTATION:
            from fvc_lib.video.clips.making import make_clips
            from fvc_lib.video.clips.store import ClipStore

            mine = _mine(paths.index, one)
            make_clips(ClipStore.of(config), mine, listing.root, config.num_copies, None, **options)
        elif name == FORENSIC_FEATURES:
            from fvc_lib.video.features.measuring import measure_features

            families, cache = config.feature_families, config.cache_dir
            before = {paths.original_index: ""} if config.rescale else {}
            for index, recipe in {paths.index: config.recipe, **before}.items():
                measure_features(_mine(index, one), listing.root, families, cache, None, recipe=recipe, **options)
        else:
            _compute_features(config, read_table(paths.augmented_metadata, AUGMENTED), one, at_work.report)
    click.echo(f"{name}, shard {shard}: done")


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Raise an error in the block when the process receives SIGTERM or SIGUSR1, so that the block stops.

    Raises:
        StoppedError: a signal was received. The error's exit code makes a job of SLURM requeue itself.
    """

    def stop(number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        raise StoppedError(f"{name}: stopped; results are stored, and the same command goes on")

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _probe(config: RunConfig, listing: "Listing", shard: Shard, **options: Any) -> None:
    """Probe the files of ``shard``: read their length, size and codec into the cache of the stage ``01_data_index``.

    Args:
        config: the run's parameters.
        listing: the corpus.
        shard: the shard.
        options: ``progress``, called with the number of finished files and of all files of the shard; ``workers``, the
            number of processes; and ``writer``, a name for the files that this process writes into the cache, different
            from that of other processes.
    """
    from fvc_lib.corpus.index import probe_listing
    from fvc_lib.corpus.probing import probe_files, reencoded_files

    work_dir = Path(config.cache_dir) / "index"
    found, _ = probe_listing(listing, work_dir, chosen=shard.has, **options)
    # A trial (``dev_groups``) uses few videos. A shard cannot tell which, because the choice depends on all videos.
    if config.recipe and not config.dev_groups:
        kind = reencoded_files(config.recipe, config.cache_dir)
        paths = [path for path in found if found[path].probe]
        probe_files(kind, listing.root, paths, work_dir, **options)


def _mine(index: Path, shard: Shard) -> pl.DataFrame:
    """Read the table of a run's videos from the file ``index``, and return the rows whose files belong to ``shard``."""
    rows = read_table(index, INDEX)
    return rows.filter([shard.has(content) for content in rows["content_sha256"]])


def _compute_features(config: RunConfig, made: pl.DataFrame, shard: Shard, report: Report) -> None:
    """Compute features of the clips of ``shard`` with a frozen trunk, and store them in the cache.

    A frozen trunk is the pretrained part of a network, which is not trained.

    Args:
        config: the run's parameters.
        made: the table of all augmented clips of the run.
        shard: the shard.
        report: called with the number of finished clips and of all clips of the shard.
    """
    from fvc_lib.engine.device import resolve_device
    from fvc_lib.tasks.video.data import made_clips, open_clips
    from fvc_lib.tasks.video.features import with_features

    mine = [clip for clip in made_clips(made) if shard.has(clip[0])]
    device = resolve_device(config.device, config.amp).device
    with_features(open_clips(config, made), mine, config, device, begin=0.0, stop=lambda: False, progress=report)
