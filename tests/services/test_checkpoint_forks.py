"""A run's checkpoints in a fork of it: gone on from, begun anew or refused."""

import json

import pytest
import torch

from fvc_lib.services.checkpoint_files import FORK_NOTE, CheckpointBinding, CheckpointFolder, CheckpointMismatchError

BINDING = CheckpointBinding({"epochs": 3, "names": ["a", "b"]}, "f" * 64)


@pytest.fixture
def reports():
    return []


@pytest.fixture
def open_folder(tmp_path, reports):
    return lambda binding=BINDING: CheckpointFolder(tmp_path / "fold_0", binding, report=reports.append)


def save(folder, epoch, *, best_epoch=None, epoch_ended=True, step=None):
    """A state whose numbers name the epoch, so that a mix-up shows."""
    best_epoch = epoch if best_epoch is None else best_epoch
    folder.save(
        {"weights": torch.full((3,), float(epoch)), "history": [{"epoch": epoch}], "none": None},
        epoch=epoch,
        step=10 * epoch if step is None else step,
        best_epoch=best_epoch,
        best_model={"weights": torch.full((2, 2), float(best_epoch))} if best_epoch else {},
        epoch_ended=epoch_ended,
    )
    folder.finish()


OTHER = CheckpointBinding({"epochs": 5, "names": ["a", "b"]}, BINDING.data_fingerprint)


def note(tmp_path, config=None):
    content = {"run_id": "run_1", "config": dict(BINDING.config) if config is None else config}
    (tmp_path / "fold_0" / FORK_NOTE).write_text(json.dumps(content))


@pytest.mark.fault(28)
def test_a_fork_goes_on_from_its_ancestors_checkpoint_and_says_so(open_folder, tmp_path, reports):
    save(open_folder(), 2)
    note(tmp_path)
    fork = open_folder(OTHER)
    checkpoint = fork.load()
    assert (checkpoint.epoch, checkpoint.ancestor) == (2, "run_1")
    assert "goes on from step 20 of run_1, with epochs: 3 -> 5" in reports[-1]
    save(fork, 3)
    assert open_folder(OTHER).load().ancestor is None


@pytest.mark.fault(28)
def test_a_fork_with_other_videos_begins_anew(open_folder, tmp_path, reports):
    """The ancestor's weights may have seen what is tested on now."""
    save(open_folder(), 2)
    note(tmp_path)
    assert open_folder(CheckpointBinding(OTHER.config, "0" * 64)).load() is None
    assert "was trained on other videos" in reports[-2]


@pytest.mark.fault(28)
def test_a_fork_does_not_take_what_is_not_its_ancestors(open_folder, tmp_path):
    save(open_folder(), 2)
    note(tmp_path, {"epochs": 99})
    with pytest.raises(CheckpointMismatchError, match="epochs: 3 -> 5"):
        open_folder(OTHER).load()
