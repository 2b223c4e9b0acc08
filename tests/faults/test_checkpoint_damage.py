"""Rows 24 and 33: checkpoints that are not what was written, by accident or by intent."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import random
import shutil
import struct
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fvc_lib.services.checkpoint_files import (
    BEST,
    LATEST,
    PREVIOUS,
    Checkpoint,
    CheckpointBinding,
    CheckpointFolder,
    DamagedCheckpointError,
    append_digest,
    load_document,
    load_weights,
)
from fvc_lib.services.errors import StoppedError
from fvc_lib.services.stage_logs import MetricLog
from fvc_lib.tasks.video.training import train_fold
from tests.faults import checkpoint_lives as lives
from tests.faults.checkpoint_lives import same
from tests.faults.conftest import STAGE, result_of
from tests.kits.training import TinyTraining


@dataclass(frozen=True)
class Stopped:
    """A real training stopped in its third epoch: the checkpoint before lies beside the latest one."""

    folder: Path
    binding: CheckpointBinding
    by_name: dict[str, Checkpoint]

    def load(self) -> tuple[Checkpoint, list[str]]:
        """What a resume would find, and what it is told."""
        told: list[str] = []
        checkpoint = CheckpointFolder(self.folder, self.binding, report=told.append).load()
        assert checkpoint is not None
        return checkpoint, told

    def name_of(self, checkpoint: Checkpoint) -> str:
        """Which of the two it is, to the bit."""
        (name,) = [
            name
            for name, known in self.by_name.items()
            if same(checkpoint.state, known.state)
            and same(checkpoint.best_model, known.best_model)
            and (checkpoint.epoch, checkpoint.step, checkpoint.best_epoch)
            == (known.epoch, known.step, known.best_epoch)
        ]
        assert checkpoint.path.name == name
        assert same(load_weights(self.folder / BEST), checkpoint.best_model)
        return name


def train(tiny: TinyTraining, stop_after: int = 1_000) -> None:
    """Fold 0 from where it is, to the end or until so many steps are done."""
    done = [0]
    with MetricLog(tiny.paths.metrics(STAGE, 0), run_id=tiny.paths.run_id, fold=0) as log:
        train_fold(
            tiny.paths, tiny.config, 0, metric_log=log, stop=lambda: done[-1] >= stop_after,
            progress=lambda now, planned: done.append(now),
        )  # fmt: skip


@pytest.fixture
def stopped(tiny: TinyTraining, tmp_path: Path) -> Stopped:
    with pytest.raises(StoppedError):
        train(tiny.with_config(epochs=3, shuffled_label_control=False), stop_after=11)
    folder = tiny.paths.fold_checkpoints(0)
    document = load_document(folder / LATEST)
    binding = CheckpointBinding(document["config"], document["data_fingerprint"])
    by_name = {}
    for name in (LATEST, PREVIOUS):  # each from a folder in which it is the newest
        shutil.copytree(folder, tmp_path / name)
        for newer in by_name:
            (tmp_path / name / newer).unlink()
        loaded = CheckpointFolder(tmp_path / name, binding).load()
        assert loaded is not None
        by_name[name] = loaded
    assert by_name[LATEST].step > by_name[PREVIOUS].step
    return Stopped(folder, binding, by_name)


def regions(content: bytes) -> dict[str, list[int]]:
    """Every place of a torch archive, by what is there."""
    places: dict[str, list[int]] = {"pickle": [], "tensors": [], "other members": []}
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for member in archive.infolist():
            name_length, extra_length = struct.unpack_from("<HH", content, member.header_offset + 26)
            begin = member.header_offset + 30 + name_length + extra_length
            what = "pickle" if member.filename.endswith("data.pkl") else "other members"
            what = "tensors" if "/data/" in member.filename else what
            places[what] += range(begin, begin + member.compress_size)
        directory = archive.start_dir
    inside = {place for some in places.values() for place in some}
    places["headers"] = [place for place in range(directory) if place not in inside]
    places["directory"] = list(range(directory, len(content) - 64))
    places["digest"] = list(range(len(content) - 64, len(content)))
    return places


def flips(path: Path, places: list[int], count: int, chance: random.Random) -> Iterator[None]:
    """``path`` with one bit flipped, ``count`` times, and whole again."""
    whole = path.read_bytes()
    for _ in range(count):
        damaged = bytearray(whole)
        damaged[chance.choice(places)] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        yield
        path.write_bytes(whole)


@pytest.mark.fault(24)
@pytest.mark.parametrize("hundreds", [1, pytest.param(10, marks=pytest.mark.long)])
def test_a_flipped_bit_is_noticed_wherever_it_is_and_the_checkpoint_before_used(hundreds, stopped, tally):
    chance, latest = random.Random(24), stopped.folder / LATEST
    places = regions(latest.read_bytes())
    per_region = {"headers": 12, "pickle": 20, "tensors": 30, "other members": 6, "directory": 12, "digest": 10}
    assert places.keys() == per_region.keys()
    for region, some in places.items():
        for _ in flips(latest, some, hundreds * per_region[region], chance):
            checkpoint, (complaint,) = stopped.load()
            assert stopped.name_of(checkpoint) == PREVIOUS
            assert f"{LATEST}' is damaged: its SHA-256" in complaint
            latest.with_name(f"{LATEST}.unusable").unlink()
            tally.add(survived=1)

    best = stopped.folder / BEST
    for _ in flips(best, list(range(best.stat().st_size)), hundreds * 10, chance):
        with pytest.raises(DamagedCheckpointError, match=r"best_model\.safetensors'"):
            load_weights(best)
        checkpoint, _ = stopped.load()
        assert stopped.name_of(checkpoint) == LATEST  # and the best model is written again
        tally.add(survived=1)
    assert tally.survived == hundreds * 100


@pytest.mark.fault(24)
def test_a_training_goes_on_from_the_epoch_before_a_damaged_checkpoint_and_ends_the_same(tiny, undisturbed, caplog):
    with pytest.raises(StoppedError):
        train(tiny, stop_after=7)
    latest = tiny.paths.fold_checkpoints(0) / LATEST
    content = bytearray(latest.read_bytes())
    content[len(content) // 2] ^= 1
    latest.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        train(tiny)
    assert f"{str(latest)!r} is damaged" in caplog.text
    assert "Trying the one before it" in caplog.text
    assert result_of(tiny.paths) == undisturbed
    rows = [json.loads(line) for line in tiny.paths.metrics(STAGE, 0).read_text().splitlines()]
    taken = Counter(row["step"] for row in rows if (row["phase"], row["metric"]) == ("train", "loss"))
    assert taken == {**dict.fromkeys(range(1, 11), 1), 6: 2, 7: 2}  # from the end of epoch 1


class Runs:
    """Unpickled, it calls ``function`` with ``arguments``."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def zipped(document: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(document, stream, **options)
    return stream.getvalue()


def evil_contents(trace: Path) -> dict[str, bytes]:
    """Files that make a folder when they are loaded by who trusts them, by how."""
    good = {
        "format": 1, "config": dict(lives.BINDING.config), "data_fingerprint": lives.BINDING.data_fingerprint,
        "epoch": 9, "step": 90, "best_epoch": 9, "best_model": lives.best_of(9), "state": lives.state_of(90),
    }  # fmt: skip
    mkdir, code = Runs(os.mkdir, str(trace)), Runs(exec, f"import os; os.mkdir({str(trace)!r})")
    documents = {f"in {place}": {**good, place: mkdir} for place in good}
    documents |= {
        "in a tensor's place": {**good, "best_model": {"weight": mkdir}},
        "as a key": {**good, "state": {code: 1}},
        "as code": {**good, "state": {"training": [code]}},
        "deep": {**good, "state": {"optimizer": {"state": {0: {"step": (mkdir,)}}}}},
        "instead of a document": mkdir,
    }
    contents = {f"torch, {how}": zipped(document) for how, document in documents.items()}
    contents |= {f"pickle {number}": pickle.dumps(documents["as code"], number) for number in range(6)}
    contents["torch's old format"] = zipped(documents["deep"], _use_new_zipfile_serialization=False)
    return contents


def run_trustingly(how: str, content: bytes) -> None:
    if how.startswith("pickle"):
        pickle.loads(content)
    else:
        torch.load(io.BytesIO(content), weights_only=False)


@pytest.mark.fault(33)
def test_a_pickle_that_runs_code_is_never_executed_wherever_it_lies(tmp_path, tally):
    lives.three_epochs(tmp_path / "before")
    trace, path = tmp_path / "it ran", tmp_path / "fold"
    for how, content in evil_contents(trace).items():
        for name in (LATEST, PREVIOUS, BEST):
            shutil.copytree(tmp_path / "before", path)
            (path / name).write_bytes(content)
            if name == BEST:
                with pytest.raises(DamagedCheckpointError):
                    load_weights(path / BEST)
            else:
                append_digest(path / name)  # whoever can write the file can write the digest
            if name == PREVIOUS:
                (path / LATEST).unlink()
            complaints: list[str] = []
            loaded = CheckpointFolder(path, lives.BINDING, report=complaints.append).load()
            if name == PREVIOUS:
                assert loaded is None
            else:
                assert loaded is not None
                assert lives.same(loaded.state, lives.state_of(30 if name == BEST else 20))
            assert lives.same(load_weights(path / BEST), lives.best_of(2)) or name == PREVIOUS
            assert name == BEST or "cannot be loaded safely" in complaints[0]
            assert not trace.exists(), f"{how} in {name}"
            shutil.rmtree(path)
            tally.add(survived=1)
        run_trustingly(how, content)  # the payload works
        trace.rmdir()
