"""The share of its time a training waits for clips, as ``benchmarks.clips`` measures it; with loaders too."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.clips import data_wait, fill
from benchmarks.training.figures import Figure
from fvc_lib.services.config import RunConfig
from fvc_lib.tasks.video.data import clip_rows
from fvc_lib.video.clips.store import ClipStore

TARGET_PERCENT = 5.0


def measure_waiting(folder: Path, num_clips: int, rounds: int, epochs: int = 12) -> list[Figure]:
    """The demo's network and epochs on a store of clips like the demo's, with 0 and 2 loader processes in turns.

    A fold of the sample corpus trains on about 160.
    """
    waits: dict[int, list[float]] = {0: [], 2: []}
    with tempfile.TemporaryDirectory(dir=folder) as name:
        configs = {
            workers: RunConfig(
                cache_dir=name, model="frame_cnn", fixed_size=96, epochs=epochs, num_workers=workers, device="cpu"
            )
            for workers in waits
        }
        store = ClipStore.of(configs[0])
        rows = clip_rows(fill(store, num_clips))
        for turn in range(rounds):
            for workers, config in configs.items():
                share, _ = data_wait(store, rows, config, Path(name) / f"checkpoints_{turn}_{workers}")
                waits[workers].append(100 * share)
    return [
        Figure("demo's clips", f"waits for clips, {workers} loader processes", "%", tuple(values), "at most",
               TARGET_PERCENT)
        for workers, values in waits.items()
    ]  # fmt: skip
