"""Weights that hold NaN are refused by file and tensor, wherever they are loaded from."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from fvc_lib.detectors.packages import mend_torchvision
from fvc_lib.detectors.texts.transformers_encoders import _loaded_encoder
from fvc_lib.detectors.transformers_folders import from_folder
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
    named = tmp_path if name == "model.safetensors" else path  # a folder as a hub has it
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


@pytest.mark.slow
def test_a_transformers_folder_with_nan_is_refused(tmp_path: Path) -> None:
    mend_torchvision()  # where it is installed next to CPU torch, transformers imports it
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    network = transformers.Dinov2Model(transformers.Dinov2Config(image_size=28, patch_size=14, **sizes))
    with torch.no_grad():
        network.layernorm.bias[0] = torch.nan
    network.save_pretrained(tmp_path / "pictures")
    with pytest.raises(UsageError, match=r"pictures.*NaN in layernorm\.bias"):
        from_folder(transformers, "Dinov2Model", tmp_path / "pictures", {}, licence="CC0")
    texts = transformers.BertModel(transformers.BertConfig(vocab_size=20, **sizes))
    with torch.no_grad():
        texts.embeddings.LayerNorm.bias[0] = torch.nan
    texts.save_pretrained(tmp_path / "texts")
    with pytest.raises(UsageError, match=r"texts.*NaN in embeddings\.LayerNorm\.bias"):
        _loaded_encoder(str(tmp_path / "texts"))
