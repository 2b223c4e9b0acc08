from pathlib import Path

import pytest
import torch

from fvc_lib.services.checkpoint_files import (
    BEST,
    LATEST,
    PREVIOUS,
    CheckpointBinding,
    CheckpointFolder,
    CheckpointMismatchError,
    CheckpointWriteError,
    load_weights,
    write_weights_with_digest,
)

BINDING = CheckpointBinding({"epochs": 3, "names": ["a", "b"]}, "f" * 64)


@pytest.fixture
def reports():
    return []


@pytest.fixture
def place(tmp_path):
    return tmp_path / "fold_0"


@pytest.fixture
def open_folder(place, reports):
    return lambda binding=BINDING: CheckpointFolder(place, binding, report=reports.append)


def save(folder, epoch, *, best_epoch=None):
    """Save a state whose numbers are the epoch, so that a mix-up shows."""
    best_epoch = epoch if best_epoch is None else best_epoch
    folder.save(
        {"weights": torch.full((3,), float(epoch)), "history": [{"epoch": epoch}], "none": None},
        epoch=epoch,
        step=10 * epoch,
        best_epoch=best_epoch,
        best_model={"weights": torch.full((2, 2), float(best_epoch))} if best_epoch else {},
    )


def consistent(folder: CheckpointFolder) -> int:
    """Return the epoch that loads, after a check that state and best model belong to it."""
    checkpoint = folder.load()
    assert checkpoint.state == {**checkpoint.state, "history": [{"epoch": checkpoint.epoch}], "none": None}
    assert checkpoint.state["weights"].tolist() == [checkpoint.epoch] * 3
    assert checkpoint.best_model["weights"].eq(checkpoint.best_epoch).all()
    assert load_weights(folder.folder / BEST)["weights"].equal(checkpoint.best_model["weights"])
    return checkpoint.epoch


def test_the_latest_and_the_one_before_it_are_kept_and_come_back(open_folder, place):
    folder = open_folder()
    save(folder, 0, best_epoch=0)
    assert {path.name for path in place.iterdir()} == {LATEST}
    assert open_folder().load().best_model == {}
    for epoch in (1, 2, 3):
        save(folder, epoch, best_epoch=1)
    assert {path.name for path in place.iterdir()} == {LATEST, PREVIOUS, BEST}
    checkpoint = open_folder().load()
    assert (checkpoint.epoch, checkpoint.step, checkpoint.best_epoch) == (3, 30, 1)
    (place / LATEST).unlink()  # the state after a kill between the two renames
    assert consistent(open_folder()) == 2
    folder.drop_previous()
    assert open_folder().load() is None


@pytest.mark.fault(24)
def test_where_nothing_can_be_used_it_is_kept_and_training_begins_again(open_folder, place, reports):
    for epoch in (1, 2):
        save(open_folder(), epoch)
    for name in (LATEST, PREVIOUS):
        (place / name).write_bytes(b"x" * 100)
    again = open_folder()
    assert again.load() is None
    assert "training begins at step 0" in reports[-1]
    save(again, 1)
    assert consistent(open_folder()) == 1
    assert all((place / f"{name}.unusable").read_bytes() == b"x" * 100 for name in (LATEST, PREVIOUS))


def test_another_configuration_or_other_data_are_refused_with_what_differs(open_folder):
    save(open_folder(), 1)
    for other, why in (
        (CheckpointBinding({**BINDING.config, "epochs": 4, "new": 1}, "f" * 64), r"epochs: 3 -> 4; new: None -> 1\."),
        (CheckpointBinding(BINDING.config, "0" * 64), "training data: ffffffffffff -> 000000000000"),
    ):
        with pytest.raises(CheckpointMismatchError, match=why):
            open_folder(other).load()


@pytest.mark.fault(11)
def test_a_full_disk_keeps_the_previous_checkpoint_and_is_named(open_folder, tmp_path, monkeypatch):
    folder = open_folder()
    save(folder, 1)
    real = Path.open

    def full(path, mode="r", *arguments):
        return real(Path("/dev/full") if mode == "wb" else path, mode, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.raises(CheckpointWriteError, match=r"No space left on device; [0-9]+ MiB free on the disk") as got:
            save(folder, 2)
    assert str(tmp_path) in str(got.value)
    assert consistent(open_folder()) == 1


def test_a_lost_or_foreign_best_model_is_written_again(open_folder, place):
    save(open_folder(), 2)
    best = place / BEST
    whole = best.read_bytes()
    best.unlink()
    assert consistent(open_folder()) == 2
    assert best.read_bytes() == whole
    write_weights_with_digest(best, {"w": torch.zeros(3)}, {})
    assert consistent(open_folder()) == 2
