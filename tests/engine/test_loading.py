import os
import signal
import time

import pytest
import torch

from fvc_lib.engine.loading import LoaderDiedError, load_batches
from fvc_lib.engine.task import Sample

# A process that is killed while it sends a batch leaves an open socket to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:.*socket:pytest.PytestUnraisableExceptionWarning")
BATCHES = [[0, 1], [2], [3, 4, 5], [1], [0, 5]]


class Numbers:
    """Samples whose value is their index. Loading a sample in ``deadly`` kills the process."""

    def __init__(self, folder, deadly=()):
        self.folder, self.deadly = folder, set(deadly)

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index in self.deadly:
            (self.folder / str(index)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return Sample(f"s{index}", {"number": torch.tensor(float(index))})


def loaded(data, **options):
    return [batch.tensors["number"].tolist() for batch in load_batches(data, BATCHES, **options)]


def test_batches_are_the_same_with_loader_processes(tmp_path):
    assert loaded(Numbers(tmp_path), num_workers=2) == loaded(Numbers(tmp_path), num_workers=0)


@pytest.mark.fault(22)
@pytest.mark.parametrize("deadly", [0, 3])
def test_a_killed_loader_process_ends_it_with_what_to_try(tmp_path, deadly):
    with pytest.raises(LoaderDiedError, match=r"a loader process died, .*-p num_workers 0"):
        loaded(Numbers(tmp_path, [deadly]), num_workers=2)


@pytest.mark.fault(22)
def test_a_worker_that_dies_never_interrupts_a_step(tmp_path):
    """Torch's handler would raise at any line of the training."""
    batches = load_batches(Numbers(tmp_path, [3]), [[0], [1], [2], [3]], num_workers=1)
    next(batches)
    second = next(batches)
    end = time.monotonic() + 300
    while not list(tmp_path.iterdir()) and time.monotonic() < end:
        time.sleep(0.01)  # a step, during which the worker reads ahead and dies
    time.sleep(0.2)
    assert list(tmp_path.iterdir())
    assert second.tensors["number"].item() == 1
    with pytest.raises(LoaderDiedError):
        list(batches)


def test_the_error_of_a_sample_is_not_taken_for_a_death(tmp_path):
    class Broken(Numbers):
        def __getitem__(self, index):
            raise RuntimeError("this sample is broken")

    with pytest.raises(RuntimeError, match="this sample is broken"):
        loaded(Broken(tmp_path), num_workers=1)
