import errno
import hashlib
import io
import os
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from fvc_lib.services import checkpoint_files as checkpoint_files
from fvc_lib.services.checkpoint_files import (
    BEST,
    LATEST,
    CheckpointBinding,
    CheckpointFolder,
    CheckpointMismatchError,
    CheckpointReadError,
    CheckpointWriteError,
    DamagedCheckpointError,
    load_weights,
    verify,
    write_weights_with_digest,
)

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


def consistent(folder: CheckpointFolder) -> int:
    """The epoch that loads, after checking that state and best model tell of the same one."""
    checkpoint = folder.load()
    assert checkpoint.state["weights"].tolist() == [checkpoint.epoch] * 3
    assert checkpoint.best_model["weights"].eq(checkpoint.best_epoch).all()
    assert load_weights(folder.folder / BEST)["weights"].equal(checkpoint.best_model["weights"])
    return checkpoint.epoch


def test_what_is_saved_comes_back(open_folder):
    save(open_folder(), 2, best_epoch=1, step=17)
    checkpoint = open_folder().load()
    assert (checkpoint.epoch, checkpoint.step, checkpoint.best_epoch) == (2, 17, 1)
    assert checkpoint.state["history"] == [{"epoch": 2}]
    assert checkpoint.state["none"] is None
    assert consistent(open_folder()) == 2


def test_only_the_last_epochs_are_kept(open_folder, tmp_path):
    folder = open_folder()
    for epoch in range(1, 5):
        save(folder, epoch)
    names = {path.name for path in (tmp_path / "fold_0").iterdir()}
    kept = {LATEST, BEST, "checkpoint_epoch_003.pt", "checkpoint_epoch_004.pt"}
    assert names == kept | {f"{name}.sha256" for name in kept}


def test_digests_are_those_that_sha256sum_writes(open_folder, tmp_path):
    save(open_folder(), 1)
    for path in (tmp_path / "fold_0").glob("*.sha256"):
        digest, name = path.read_text().rstrip("\n").split("  ")
        assert len(digest) == 64
        assert (path.parent / name).exists()


def test_mid_epoch_state_makes_no_epoch_file(open_folder, tmp_path):
    save(open_folder(), 0, epoch_ended=False)
    assert not list((tmp_path / "fold_0").glob("checkpoint_epoch*"))
    assert not (tmp_path / "fold_0" / BEST).exists()
    assert open_folder().load().best_model == {}


@pytest.mark.fault(24)
def test_a_flipped_bit_is_detected_and_the_epoch_before_used(open_folder, tmp_path, reports):
    folder = open_folder()
    save(folder, 1)
    save(folder, 2)
    paths = [tmp_path / "fold_0" / name for name in (LATEST, "checkpoint_epoch_002.pt")]
    whole = paths[0].read_bytes()
    for part in range(40):
        content = bytearray(whole)
        content[len(content) * part // 40] ^= 1 << part % 8
        for path in paths:
            path.write_bytes(content)
        assert consistent(open_folder()) == 1
        assert LATEST in reports[-2]
        assert "damaged" in reports[-2]
    assert len(reports) == 80


def test_a_damaged_latest_at_an_epochs_end_loses_nothing(open_folder, tmp_path, reports):
    save(open_folder(), 3)
    (tmp_path / "fold_0" / LATEST).write_bytes(b"")
    assert consistent(open_folder()) == 3
    assert len(reports) == 1


def test_a_file_without_digest_is_not_trusted(open_folder, tmp_path, reports):
    save(open_folder(), 1)
    for path in (tmp_path / "fold_0").glob("*.pt.sha256"):
        path.unlink()
    assert open_folder().load() is None
    assert len(reports) == 3


def test_a_damaged_file_does_not_become_trusted_by_the_next_save(open_folder, tmp_path, monkeypatch):
    folder = open_folder()
    save(folder, 1)
    path = tmp_path / "fold_0" / LATEST
    path.write_bytes(b"damaged")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_weights_with_digest(path, {"w": torch.zeros(3)}, {})
    with pytest.raises(DamagedCheckpointError, match="damaged"):
        verify(path)


def test_a_temporary_of_a_dead_writer_is_swept(open_folder, tmp_path):
    save(open_folder(), 1)
    stale = tmp_path / "fold_0" / f".{LATEST}.999999999.tmp"
    stale.write_bytes(b"half")
    open_folder()
    assert not stale.exists()


def test_another_configuration_is_refused_with_what_differs(open_folder):
    save(open_folder(), 1)
    other = CheckpointBinding({"epochs": 4, "names": ["a", "b"], "new": 1}, "f" * 64)
    with pytest.raises(CheckpointMismatchError, match=r"epochs: 3 -> 4; new: None -> 1\. Resume.*--fork") as caught:
        open_folder(other).load()
    assert caught.value.exit_code == 2


def test_other_data_is_refused(open_folder):
    save(open_folder(), 1)
    with pytest.raises(CheckpointMismatchError, match="training data: ffffffffffff -> 000000000000"):
        open_folder(CheckpointBinding(BINDING.config, "0" * 64)).load()


def put(content, temporary):
    temporary.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


class Malicious:
    def __reduce__(self):
        return (os.mkdir, ("ran",))


@pytest.mark.fault(33)
def test_a_malicious_pickle_is_never_executed(open_folder, tmp_path, monkeypatch, reports):
    """Even with a digest that fits."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "fold_0"
    folder.mkdir()
    plain, zipped = pickle.dumps(Malicious()), io.BytesIO()
    torch.save({"format": 1, "state": Malicious()}, zipped)
    for content in (plain, zipped.getvalue()):
        checkpoint_files._replace_with_digest(folder / LATEST, partial(put, content))
        assert open_folder().load() is None
        assert "cannot be loaded safely" in reports[-2]
        assert not Path("ran").exists()


@pytest.mark.fault(24)
def test_a_torchscript_file_in_a_checkpoints_place_is_damaged_and_the_one_before_used(open_folder, tmp_path, reports):
    folder = open_folder()
    save(folder, 1)
    save(folder, 2)
    script = io.BytesIO()
    with pytest.warns(DeprecationWarning, match="jit"):
        torch.jit.save(torch.jit.trace(torch.nn.Linear(1, 1), torch.zeros(1)), script)
    for name in (LATEST, "checkpoint_epoch_002.pt"):
        checkpoint_files._replace_with_digest(tmp_path / "fold_0" / name, partial(put, script.getvalue()))
    assert consistent(open_folder()) == 1
    assert "cannot be loaded safely" in reports[-2]


@pytest.mark.fault(11)
def test_a_full_disk_keeps_the_previous_checkpoint_and_is_named(open_folder, tmp_path, monkeypatch):
    folder = open_folder()
    save(folder, 1)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files._HashingStream, "_put", full)
        with pytest.raises(
            CheckpointWriteError, match=r"No space left on device; [0-9]+ MiB free on the disk"
        ) as caught:
            save(folder, 2)
    assert str(tmp_path) in str(caught.value)
    assert consistent(open_folder()) == 1


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointWriteError, match="previous checkpoint is intact"):
        save(CheckpointFolder(tmp_path / "file" / "fold_0", BINDING), 1)


def test_a_lost_or_foreign_best_model_is_written_again(open_folder, tmp_path):
    save(open_folder(), 2)
    best = tmp_path / "fold_0" / BEST
    whole = best.read_bytes()
    best.unlink()
    assert consistent(open_folder()) == 2
    assert best.read_bytes() == whole
    write_weights_with_digest(best, {"w": torch.zeros(3)}, {})
    assert consistent(open_folder()) == 2


@pytest.mark.fault(24)
def test_where_nothing_can_be_used_it_is_kept_and_the_new_training_has_its_own_fallback(open_folder, tmp_path, reports):
    for epoch in (1, 2, 3):
        save(open_folder(), epoch)
    folder = tmp_path / "fold_0"
    before = {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.endswith(".sha256")}
    for path in folder.glob("*.pt.sha256"):
        path.write_text("0" * 64 + "  x\n")
    again = open_folder()
    assert again.load() is None
    assert "training begins at step 0" in reports[-1]
    save(again, 1)
    (folder / LATEST).write_bytes(b"")
    assert consistent(open_folder()) == 1
    for name, content in before.items():
        assert (folder / f"{name}.unusable").read_bytes() == content


@pytest.mark.fault(24)
@pytest.mark.long
def test_a_checkpoint_for_which_memory_does_not_suffice_is_not_called_damaged(open_folder, tmp_path):
    code = """
import resource, sys
from pathlib import Path
from fvc_lib.services.checkpoint_files import CheckpointBinding, CheckpointFolder
from fvc_lib.services.checkpoint_files import CheckpointReadError
folder = CheckpointFolder(Path(sys.argv[1]), CheckpointBinding({"epochs": 3, "names": ["a", "b"]}, "f" * 64))
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (20 << 20),) * 2)
try:
    folder.load()
except CheckpointReadError as error:
    print(error)
"""
    folder = open_folder()
    folder.save({"w": torch.zeros(10 << 20)}, epoch=1, step=1, best_epoch=0, best_model={}, epoch_ended=True)
    names = sorted(path.name for path in (tmp_path / "fold_0").iterdir())
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "fold_0")], capture_output=True, text=True, check=False
    )
    assert "still cannot be read" in done.stdout, done.stderr
    assert "enough memory" in done.stdout
    assert sorted(path.name for path in (tmp_path / "fold_0").iterdir()) == names
    assert open_folder().load().step == 1


@pytest.mark.fault(24)
def test_a_disk_that_does_not_answer_is_not_a_damaged_checkpoint(open_folder, tmp_path, monkeypatch):
    save(open_folder(), 1)

    def ailing(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files.atomic_files, "sha256_of_file", ailing)
        with pytest.raises(CheckpointReadError, match=r"Input/output error\. It need not be damaged"):
            open_folder().load()
    assert consistent(open_folder()) == 1
