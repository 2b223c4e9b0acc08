"""How much memory the engine takes over the bare loop, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.training.bare import BareLoop
from benchmarks.training.cases import Training
from benchmarks.training.extras import CurrentObserver, Extras
from benchmarks.training.figures import Figure
from fvc_lib.engine.device import resolve_device
from fvc_lib.engine.loop import Engine
from fvc_lib.services.memory import ProcessTree, peak_rss_bytes
from fvc_lib.services.stage_logs import SAMPLE_INTERVAL_SECONDS

WINDOWS, EPOCHS, NUM_VALIDATION = 8, 2, 16

Side = Callable[[Training, Path], None]


def measure_peaks(training: Training, rounds: int) -> list[Figure]:
    """Growth of the resident memory from before the training to its peak, of both sides and between them, by round."""
    peaks = {side: [_in_a_process(side, training) / 1e6 for _ in range(rounds)] for side in (_engine, _bare)}
    ours, theirs = peaks[_engine], peaks[_bare]
    more = tuple(mine - other for mine, other in zip(ours, theirs, strict=True))
    return [
        Figure(str(training.case), "peak memory, bare loop", "MB", tuple(theirs)),
        Figure(str(training.case), "peak memory, engine over the bare loop", "MB", more),
    ]


def peak_growth(side: Side, training: Training) -> int:
    """Bytes; for a fresh process."""
    with tempfile.TemporaryDirectory(dir=training.folder) as name:
        before = ProcessTree().measure().rss_bytes
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
        side(training, Path(name))
        return peak_rss_bytes() - before


def _in_a_process(side: Side, training: Training) -> int:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(peak_growth, side, training).result()


def _engine(training: Training, folder: Path) -> None:
    extras = Extras(folder, logged=1, sample_seconds=SAMPLE_INTERVAL_SECONDS, checkpoint_seconds=0.0)
    task, settings = training.task(WINDOWS, NUM_VALIDATION), training.settings(EPOCHS, checkpoint_seconds=0.0)
    with extras.metrics() as metrics, extras.around():
        device, observer = resolve_device("cpu", "off"), CurrentObserver(extras)
        Engine(task, settings, device, extras.checkpoints, metrics, memory=observer).fit()


def _bare(training: Training, _folder: Path) -> None:
    for _ in BareLoop(training.task(WINDOWS, NUM_VALIDATION), training.settings(EPOCHS), training.loss_weights).turns():
        pass
