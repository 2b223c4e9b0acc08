"""Rows 24 and 33: checkpoints that are not what was written, by accident or by intent."""

import io
import json
import logging
import os
import pickle
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from fvc_lib.services.checkpoint_files import (
    BEST,
    LATEST,
    PREVIOUS,
    CheckpointFolder,
    DamagedCheckpointError,
    append_digest,
    load_weights,
)
from fvc_lib.services.errors import StoppedError
from tests.faults import checkpoint_lives as lives
from tests.faults.conftest import STAGE, result_of, train
from tests.kits.engine_kit import stop_after


@pytest.mark.fault(24)
def test_a_flipped_bit_is_noticed_wherever_it_is_and_the_checkpoint_before_used(tmp_path, tally):
    chance, folder = random.Random(24), tmp_path / "fold"
    lives.three_epochs(tmp_path / "whole")
    for name, step in ((LATEST, 20), (BEST, 30)):
        content = (tmp_path / "whole" / name).read_bytes()
        for part in range(60):  # places all over the file, the last in its digest
            damaged = bytearray(content)
            damaged[chance.randrange(len(content) * part // 60, len(content) * (part + 1) // 60)] ^= 1 << part % 8
            shutil.copytree(tmp_path / "whole", folder)
            (folder / name).write_bytes(damaged)
            if name == BEST:
                with pytest.raises(DamagedCheckpointError, match=r"best_model\.safetensors'"):
                    load_weights(folder / BEST)
            complaints: list[str] = []
            checkpoint = CheckpointFolder(folder, lives.BINDING, report=complaints.append).load()
            assert checkpoint.step == step
            assert lives.same(checkpoint.state, lives.state_of(step))
            assert lives.same(load_weights(folder / BEST), lives.best_of(2))  # written again
            assert [f"{LATEST}' is damaged: its SHA-256" in text for text in complaints] == [True] * (name == LATEST)
            shutil.rmtree(folder)
            tally.add(survived=1)


@pytest.mark.fault(24)
def test_a_training_goes_on_from_the_epoch_before_a_damaged_checkpoint_and_ends_the_same(tiny, undisturbed, caplog):
    with pytest.raises(StoppedError):
        train(tiny, stop=stop_after(8))
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


class MakesFolder:
    """Make a folder when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def torch_saved(document: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(document, stream, **options)
    return stream.getvalue()


@pytest.mark.fault(33)
def test_a_pickle_that_runs_code_is_never_executed_wherever_it_lies(tmp_path, tally):
    lives.three_epochs(tmp_path / "before")
    trace, path = tmp_path / "it ran", tmp_path / "fold"
    evil = MakesFolder(trace)  # when a careless reader loads it
    good = {
        "format": 1, "config": dict(lives.BINDING.config), "data_fingerprint": lives.BINDING.data_fingerprint,
        "epoch": 9, "step": 90, "best_epoch": 9, "best_model": lives.best_of(9), "state": lives.state_of(90),
    }  # fmt: skip
    deep = {**good, "state": {"optimizer": {"state": {0: {"step": (evil,)}}}}}
    contents = {
        "torch, as a tensor": torch_saved({**good, "best_model": {"weight": evil}}),
        "torch, as a key": torch_saved({**good, "state": {evil: 1}}),
        "torch, deep": torch_saved(deep),
        "torch, alone": torch_saved(evil),
        "torch's old format": torch_saved(deep, _use_new_zipfile_serialization=False),
        "pickle": pickle.dumps(deep),
    }
    for how, content in contents.items():
        for name, step in ((LATEST, 20), (PREVIOUS, None), (BEST, 30)):
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
            assert (loaded and loaded.step) == step
            if loaded:
                assert lives.same(loaded.state, lives.state_of(step))
                assert lives.same(load_weights(path / BEST), lives.best_of(2))
            assert name == BEST or "cannot be loaded safely" in complaints[0]
            assert not trace.exists(), f"{how} in {name}"
            shutil.rmtree(path)
            tally.add(survived=1)
        if how == "pickle":
            pickle.loads(content)
        else:
            torch.load(io.BytesIO(content), weights_only=False)
        trace.rmdir()  # the payload works
