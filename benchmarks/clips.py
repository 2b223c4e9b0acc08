#!/usr/bin/env python3
"""How fast stored clips are read back, beside other readers, and how long training waits for them.

Every reader gives each clip of one set once, as an array in memory that may be written to. They take turns, round after
round, and are compared by the median of clips per second: warm (the files are in the page cache) and cold (the kernel
was asked to forget them). One process reads throughout, as with ``num_workers 0``.

``wait`` is the share of its time for which a training waits for its next batch, where each step takes a given time on
a device that leaves the processor alone: here it sleeps. So the share says what handing clips over costs, and not which
of two busy programs the processor went to.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import polars as pl

from fvc_lib.engine import loading
from fvc_lib.engine.device import resolve_device
from fvc_lib.engine.loading import PlannedBatch, effective_batches, epoch_order, load_planned
from fvc_lib.engine.loop import Engine
from fvc_lib.services.checkpoint_files import CheckpointBinding, CheckpointFolder
from fvc_lib.services.config import RunConfig
from fvc_lib.services.tables import AUGMENTED
from fvc_lib.tasks.video.data import ClipDataset, ClipRow, ClipSource
from fvc_lib.tasks.video.training import VideoTask, engine_settings
from fvc_lib.video.clips.shards import ClipShards, write_shards
from fvc_lib.video.clips.store import ClipStore, Pixels

T = TypeVar("T")
Reader = Callable[[], Iterator[Pixels]]


@dataclass(frozen=True)
class Rate:
    """One reader's median clips per second of wall time and of CPU time, over the rounds."""

    warm: float
    warm_cpu: float
    cold: float


def fill(store: ClipStore, num_clips: int) -> pl.DataFrame:
    """Store ``num_clips`` originals of noise; returns their AUGMENTED rows."""

    def write(number: int) -> None:
        store.write(video_id(number), 0, np.random.default_rng(number).integers(0, 256, store.shape, np.uint8))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(num_clips)))
    rows = [
        (f"{video_id(n)}_0", video_id(n), str(n), ("real", "fake")[n % 2], 0, "[]", store.settings_hash, "-")
        for n in range(num_clips)
    ]
    return pl.DataFrame(rows, schema=list(AUGMENTED.columns), orient="row")


def video_id(number: int) -> str:
    """Ids are spread over the folders of the store as hashes would be."""
    return f"{number * 0x9E3779B97F4A7C15 % (1 << 64):016x}"


def listed(shards: ClipShards) -> list[tuple[str, int]]:
    """Video and number of each clip, in the order of the shards."""
    return [clip for shard in shards.manifest.shards for clip in shard.clips]


def readers(store: ClipStore, shards: ClipShards) -> dict[str, Reader]:
    """Ours and the peers; those that can, read in a shuffled order."""
    clips = listed(shards)
    ids = [clips[number][0] for number in epoch_order(len(clips), 0, 0).tolist()]
    paths = [store.clip_path(each, 0) for each in ids]
    tars = [str(shards.folder / entry.name) for entry in shards.manifest.shards]
    found: dict[str, Reader] = {
        "store, shuffled": lambda: (loaded(store, each) for each in ids),
        "store, mapped and copied": lambda: (np.array(store.read(each, 0)) for each in ids),
        "shards, shuffled": lambda: (loaded(shards, each) for each in ids),
        "np.load of the store's files": lambda: (np.load(path) for path in paths),
    }
    try:
        import webdataset
    except ImportError:
        print("webdataset is not installed: left out (pip install '.[bench]')")
        return found
    warnings.filterwarnings("ignore", category=ResourceWarning, module="webdataset")

    def with_webdataset(buffer: int) -> Iterator[Pixels]:
        data = webdataset.WebDataset(tars, shardshuffle=len(tars) if buffer else False, seed=0)
        for pixels, _ in (data.shuffle(buffer) if buffer else data).decode().to_tuple("npy", "json"):
            yield pixels if pixels.flags.writeable else np.array(pixels)

    found["webdataset with rows, in order"] = lambda: with_webdataset(0)
    found["webdataset with rows, shuffle(1000)"] = lambda: with_webdataset(1000)
    return found


def loaded(source: ClipSource, video: str) -> Pixels:
    """A clip in a new array."""
    frames = np.empty(source.shape, np.uint8)
    source.load(video, 0, frames)
    return frames


def forget(folder: Path) -> None:
    """Ask the kernel to drop the files under ``folder`` from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def read_all(reader: Reader, num_clips: int) -> tuple[float, float]:
    """Clips per second of wall and of CPU time."""
    wall, cpu = time.perf_counter(), time.process_time()
    count = sum(1 for _ in reader())
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if count != num_clips:
        raise RuntimeError(f"got {count} clips, wanted {num_clips}")
    return count / wall, count / cpu


def compare(found: Mapping[str, Reader], num_clips: int, rounds: int, folder: Path) -> dict[str, Rate]:
    """Warm rates over ``rounds``, after one cold reading each."""
    cold = {}
    for name, reader in found.items():
        forget(folder)
        cold[name] = read_all(reader, num_clips)[0]
    warm: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
    for reader in found.values():
        read_all(reader, num_clips)
    for _ in range(rounds):
        for name, reader in found.items():
            warm[name].append(read_all(reader, num_clips))
    return {
        name: Rate(*(statistics.median(column) for column in zip(*warm[name], strict=True)), cold=cold[name])
        for name in found
    }


class NoLog:
    """A metric sink that keeps nothing."""

    def log(self, **_: object) -> None:
        """Drop."""


@dataclass
class Waits:
    """Stands in for the engine's loader and times every wait for a batch."""

    seconds: float = 0.0

    def load(self, *args: object, **options: object) -> Iterator[object]:
        """``load_planned``, timed."""
        started = time.perf_counter()
        batches = load_planned(*args, **options)  # type: ignore[arg-type]
        while True:
            batch = next(batches, None)
            self.seconds += time.perf_counter() - started
            if batch is None:
                return
            yield batch
            started = time.perf_counter()


def data_wait(source: ClipSource, rows: Sequence[ClipRow], config: RunConfig, folder: Path) -> tuple[float, float]:
    """The share of one epoch's time that passes waiting for clips, and the training clips per second."""
    waits = Waits()
    task = VideoTask(ClipDataset(source, rows), ClipDataset(source, rows[:32]), config=config, weights=(1.0, 1.0))
    checkpoints = CheckpointFolder(folder, CheckpointBinding({}, "benchmark"))
    engine = Engine(task, engine_settings(config, 0), resolve_device(config.device, config.amp), checkpoints, NoLog())
    loading.load_planned = waits.load  # type: ignore[attr-defined]
    try:
        started = time.perf_counter()
        engine.fit()
        seconds = time.perf_counter() - started
    finally:
        loading.load_planned = load_planned  # type: ignore[attr-defined]
    return waits.seconds / seconds, len(rows) / seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=int, default=10_000)
    parser.add_argument("--frames", type=int, default=8)
    parser.add_argument("--size", type=int, default=112, help="side of a frame in pixels")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-ms", type=int, default=200, help="how long a step of 16 clips takes the device")
    parser.add_argument("--steps", type=int, default=100, help="steps that are timed")
    parser.add_argument("--folder", type=Path, help="where to write the clips (twice their size) for the time being")
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        config = RunConfig(cache_dir=name, num_frames=asked.frames, fixed_size=asked.size, epochs=1)
        store = ClipStore.of(config)
        clips = timed("store written", asked.clips, lambda: fill(store, asked.clips))
        folder = timed("shards written", asked.clips, lambda: write_shards(store, clips))
        shards = timed("shards verified, once a process", asked.clips, lambda: ClipShards(folder))
        print(f"\n{asked.clips:,} clips of {store.shape}, {np.prod(store.shape) / 1e6:.2f} MB each; clips per second:")
        rates = compare(readers(store, shards), asked.clips, asked.rounds, Path(name))
        print(f"  {'':<38}{'warm':>8}{'per CPU s':>11}{'cold':>8}")
        for reader, rate in rates.items():
            print(f"  {reader:<38}{rate.warm:8.0f}{rate.warm_cpu:11.0f}{rate.cold:8.0f}")
        show_waits({"store": store, "shards": shards}, listed(shards), asked)


def timed(what: str, num_clips: int, work: Callable[[], T]) -> T:
    """Do ``work`` and print its rate."""
    started = time.perf_counter()
    result = work()
    print(f"{what}: {num_clips / (time.perf_counter() - started):,.0f} clips/s")
    return result


def wait_beside_a_device(data: ClipDataset, num_workers: int, num_steps: int, step_seconds: float) -> list[float]:
    """Shares of the time for which steps of 16 clips wait for them: in all, and without the wait for the first."""
    planned, epoch = list[PlannedBatch](), 0
    while len(planned) < num_steps:
        order = epoch_order(len(data), epoch, 0)
        planned += [PlannedBatch(0, epoch, samples) for samples in effective_batches(order, 16)]
        epoch += 1
    waits, began = [], time.perf_counter()
    batches = load_planned([data], iter(planned[:num_steps]), num_workers=num_workers)
    for _ in range(num_steps):
        asked = time.perf_counter()
        batch = next(batches)
        waits.append(time.perf_counter() - asked)
        batch.tensors["frames"].view(-1)[::4096].sum()  # every page of it is read
        del batch
        time.sleep(step_seconds)
    seconds = time.perf_counter() - began
    batches.close()
    return [sum(waits) / seconds, sum(waits[1:]) / seconds]


def show_waits(sources: Mapping[str, ClipSource], clips: Sequence[tuple[str, int]], asked: argparse.Namespace) -> None:
    """From each source in turn, with and without loader processes."""
    rows = [ClipRow(video, copy, number % 2) for number, (video, copy) in enumerate(clips)]
    print(f"\nsteps of 16 clips that take a device {asked.step_ms} ms, {os.cpu_count()} cores:")
    for num_workers in (0, 2):
        found: dict[str, list[list[float]]] = {name: [] for name in sources}
        for _ in range(asked.rounds):
            for name, source in sources.items():
                data = ClipDataset(source, rows)
                found[name].append(wait_beside_a_device(data, num_workers, asked.steps, asked.step_ms / 1000))
        for name, values in found.items():
            whole, later = (statistics.median(column) for column in zip(*values, strict=True))
            print(
                f"  from {name:<8}{num_workers} loader processes: wait {whole:6.2%} of the time, {later:6.2%} after "
                f"the first batch (load {os.getloadavg()[0]:.1f})"
            )


if __name__ == "__main__":
    main()
