import os
import signal
import time

import pytest
import torch

from fvc_lib.engine.loading import MAX_RESTARTS, LoaderDiedError, load_batches
from fvc_lib.engine.task import Sample

# A process that is killed while it sends a batch leaves an open socket to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:.*socket:pytest.PytestUnraisableExceptionWarning")
BATCHES = [[0, 1], [2], [3, 4, 5], [1], [0, 5]]


class Numbers:
    """Samples whose value is their index. Loading a sample in ``deadly`` kills the process, ``lives`` times."""

    classes = None

    def __init__(self, folder, deadly=(), lives=1):
        self.folder, self.deadly, self.lives = folder, set(deadly), lives

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index in self.deadly and len(list(self.folder.iterdir())) < self.lives:
            (self.folder / f"{index}_{time.monotonic_ns()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return Sample(f"s{index}", {"number": torch.tensor(float(index))})


def loaded(data, **options):
    return [batch.tensors["number"].tolist() for batch in load_batches(data, BATCHES, **options)]


@pytest.mark.fault(22)
@pytest.mark.parametrize(("deadly", "lives"), [([3], 1), ([0, 3], 2)], ids=str)
def test_a_killed_loader_process_is_reported_and_no_batch_is_lost_or_doubled(tmp_path, deadly, lives):
    reasons = []
    got = loaded(Numbers(tmp_path, deadly, lives), num_workers=2, on_restart=reasons.append)
    assert got == loaded(Numbers(tmp_path), num_workers=0)
    assert len(reasons) == len(list(tmp_path.iterdir())) == lives
    # Torch names the process, or the broken connection if the process died while it sent a batch.
    named = ("DataLoader worker", "a loader process ended", "Connection reset", "Connection refused", "Broken pipe")
    assert all(any(words in reason for words in named) for reason in reasons), reasons


@pytest.mark.fault(22)
def test_processes_that_die_again_and_again_end_it_with_what_to_try(tmp_path):
    data = Numbers(tmp_path, [3], lives=1000)
    with pytest.raises(LoaderDiedError, match=f"died {MAX_RESTARTS + 1} times at one batch.*-p num_workers 0"):
        loaded(data, num_workers=1)


@pytest.mark.fault(22)
def test_a_worker_that_dies_never_interrupts_a_step(tmp_path):
    """Torch's handler would raise at any line of the training."""
    reasons = []
    batches = load_batches(Numbers(tmp_path, [2]), [[0], [1], [2], [3]], num_workers=1, on_restart=reasons.append)
    first = next(batches)
    end = time.monotonic() + 300
    while not list(tmp_path.iterdir()) and time.monotonic() < end:
        time.sleep(0.01)  # a step, during which the worker reads ahead and dies
    time.sleep(0.2)
    assert list(tmp_path.iterdir())
    assert reasons == []
    assert [batch.tensors["number"].item() for batch in (first, *batches)] == [0, 1, 2, 3]
    assert len(reasons) == 1


def test_the_error_of_a_sample_is_not_taken_for_a_death(tmp_path):
    class Broken(Numbers):
        def __getitem__(self, index):
            raise RuntimeError("this sample is broken")

    with pytest.raises(RuntimeError, match="this sample is broken"):
        loaded(Broken(tmp_path), num_workers=1)


class Drawn:
    """Samples with the value 100 * epoch + index, and the pid of the process that loaded them."""

    classes = None

    def __init__(self, epoch=0):
        self.epoch = epoch

    def at_epoch(self, epoch):
        return Drawn(epoch)

    def __len__(self):
        return 6

    def __getitem__(self, index):
        tensors = {"number": torch.tensor(100 * self.epoch + index), "process": torch.tensor(os.getpid())}
        return Sample(f"s{index}", tensors)
