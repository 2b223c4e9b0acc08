"""Weights with NaN are refused; the message names file and tensor."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from fvc_lib.detectors.weights import load_weights
from fvc_lib.services.checkpoint_files import (
    LATEST,
    CheckpointBinding,
    CheckpointFolder,
)
from fvc_lib.services.errors import UsageError

NAN = {"weight": torch.ones(2, 2), "bias": torch.full((2,), torch.nan)}


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors", "model.safetensors"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_file_of_weights_with_nan_is_refused(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    path, weights = tmp_path / name, {key: value.to(dtype) for key, value in NAN.items()}
    torch.save({"state_dict": weights}, path) if path.suffix == ".pt" else safetensors.torch.save_file(weights, path)
    named = tmp_path if name == "model.safetensors" else path  # a folder as on a hub
    with pytest.raises(UsageError, match=rf"{name}.*NaN in bias\."):
        load_weights(nn.Linear(2, 2), named, licence="CC0", field="backbone_weights")


@pytest.mark.parametrize("part", ["model", "best_model"])
def test_a_checkpoint_with_nan_is_passed_over_for_the_one_before(tmp_path: Path, part: str) -> None:
    reports: list[str] = []
    whole = {name: torch.ones_like(value) for name, value in NAN.items()}
    folder = CheckpointFolder(tmp_path, CheckpointBinding({}, "data"), report=reports.append)
    for epoch in (1, 2):
        parts = {"model": whole, "best_model": whole} | ({part: NAN} if epoch == 2 else {})
        folder.save(
            {"model": parts["model"]}, epoch=epoch, step=epoch, best_epoch=1, best_model=parts["best_model"],
        )  # fmt: skip
    found = CheckpointFolder(tmp_path, CheckpointBinding({}, "data"), report=reports.append).load()
    assert found is not None
    assert found.epoch == 1
    assert LATEST in reports[0]
    assert "NaN in bias" in reports[0]
