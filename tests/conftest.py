"""What holds for all tests, and small real videos for those that need some, made on the spot."""

import atexit
import gc
import os
import sys

# One thread of OpenMP and BLAS for each test process and the processes it starts, and none that waits spinning: there
# are as many test processes as cores. With two threads each a hash of six frames took 40 to 80 ms of CPU instead of
# 1.5, and a training of one second thirty. Whole runs (test_pipeline) compute with as many threads as a user's.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Many containers ask for no compiled modules; the many processes that tests start would compile the library each anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from collections.abc import Callable, Generator
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import settings

# Parameters in the user's environment would count in the tests' runs.
for name in ("FIXED_SIZE", "DATA_DIR", "RUNS_DIR", "CACHE_DIR", "MEM_GB", "TRACKER"):
    os.environ.pop(f"FVC_{name}", None)
sys.dont_write_bytecode = False
gc.disable()  # until all is imported and collected: nothing of that is garbage

# No deadline: a test must not depend on how busy the machine is. Derandomized: the same examples on every machine.
settings.register_profile("fvc", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("fvc")

pytest_plugins = [
    "tests.faults.table",  # the marker `fault` and the table of what was survived
    "tests.kits.training",  # the fixtures of everything that trains
    "tests.kits.warm_workers",  # the fixture `warm_workers`
]

MakeVideo = Callable[..., Path]


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """With ``-n auto`` two workers more than cores: while a test waits for a process or a disk, another computes."""
    return (yield) + 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest first: what is left at the end is short, so all workers end at about the same time, and none takes
    half of a module over whose fixtures are expensive.
    """
    items.sort(key=lambda item: [item.get_closest_marker(name) is None for name in ("long", "slow")])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Take all that was imported out of the garbage collector's way: a collection then costs no 0.3 s any more, each
    out-of-memory has one. What is garbage among it stays.
    """
    _freeze()
    gc.enable()


def pytest_runtest_logfinish() -> None:
    """Also what a test was the first to import."""
    if len(sys.modules) > _num_frozen_modules + 100:
        gc.collect()
        _freeze()


_num_frozen_modules = 0


def _freeze() -> None:
    global _num_frozen_modules
    gc.freeze()
    _num_frozen_modules = len(sys.modules)


# So that what is left at the exit is not reported as leaked; not before pytest's own last collections, each 0.5 s more.
atexit.register(gc.unfreeze)


def _write(path: Path, seed: int, num_frames: int, crf: int) -> None:
    # Blobs that differ from seed to seed and drift a little: no two seeds are near-duplicates.
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (6, 8, 3))
    picture = np.kron(coarse, np.ones((16, 16, 1))).astype(np.uint8)
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("h264", rate=10, options={"crf": str(crf), "preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = 128, 96, "yuv420p"
        for number in range(num_frames):
            frame = av.VideoFrame.from_ndarray(np.roll(picture, number, axis=1), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all test processes of this session: what one made under a lock, the others find."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def make_video(tmp_path_factory: pytest.TempPathFactory) -> MakeVideo:
    """``make_video(path, seed)`` writes an MP4; equal arguments give equal bytes, encoded once per test session."""
    made: dict[tuple[int, int, int], bytes] = {}
    scratch = tmp_path_factory.mktemp("encoded") / "video.mp4"

    def make(path: Path, seed: int, *, num_frames: int = 8, crf: int = 23) -> Path:
        key = (seed, num_frames, crf)
        if key not in made:
            _write(scratch, *key)
            made[key] = scratch.read_bytes()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(made[key])
        return path

    return make
