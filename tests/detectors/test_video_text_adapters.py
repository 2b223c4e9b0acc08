import json
from pathlib import Path

import pytest
import torch

from fvc_lib.detectors.texts.transformers_encoders import TransformersEncoder, encoder_tensors
from fvc_lib.engine.random_state import forked_random_state
from fvc_lib.services.errors import UsageError
from tests.kits.video_text_kit import CPU, network, pairs, planned, write_tiny_bert

TEXTS = ["a red square", "a blue circle moves left over a green field", "red"]


@pytest.fixture(scope="module")
def tiny_bert(tmp_path_factory):
    return write_tiny_bert(tmp_path_factory.mktemp("bert"))


def test_a_text_is_the_mean_of_its_tokens_states(tiny_bert):
    from transformers import AutoModel

    encoder, plain = TransformersEncoder(tiny_bert), AutoModel.from_pretrained(tiny_bert, local_files_only=True)
    tensors = encoder_tensors(tiny_bert, TEXTS, 8)
    assert tensors["encoder_tokens"].shape == (3, 8), "the longest text is cut"
    found = encoder(tensors)
    for row, text in enumerate(TEXTS):
        alone = {name: t[row : row + 1, : int(tensors["encoder_there"][row].sum())] for name, t in tensors.items()}
        with torch.no_grad():
            states = plain.eval()(
                input_ids=alone["encoder_tokens"], attention_mask=alone["encoder_there"]
            ).last_hidden_state
        torch.testing.assert_close(found[row].detach(), states[0].mean(0), rtol=1e-4, atol=1e-5, msg=text)


def test_nothing_is_drawn_in_training_and_every_parameter_receives_a_gradient(tiny_bert):
    config = planned(text_encoder=tiny_bert, caption_weight=0.0)
    model = network(config).train()
    tensors = pairs(config=config).whole().tensors | encoder_tensors(tiny_bert, [TEXTS[i % 3] for i in range(6)], 8)
    first, second = model(tensors), model(tensors)
    assert first["text_embedding"].equal(second["text_embedding"])
    model.joint.scale.contrastive(
        first["video_embedding"], first["text_embedding"], torch.arange(6), torch.arange(6)
    ).backward()
    key_biases = {name for name, _ in model.named_parameters() if name.endswith("attention.self.key.bias")}
    without = {n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().max() <= 1e-7}
    assert without == key_biases, "the softmax cancels a key's bias"


def test_a_folder_without_a_model_is_refused(tmp_path):
    for load in (TransformersEncoder, lambda folder: encoder_tensors(folder, TEXTS, 8)):
        with pytest.raises(UsageError, match="no model of texts can be read"):
            load(str(tmp_path))


def test_weights_that_are_not_there_are_not_made_up(tiny_bert, tmp_path):
    from safetensors.torch import load_file, save_file

    for name in ("config.json",):
        (tmp_path / name).write_bytes((Path(tiny_bert) / name).read_bytes())
    weights = load_file(Path(tiny_bert) / "model.safetensors")
    del weights["encoder.layer.0.output.dense.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with forked_random_state(0, CPU), pytest.raises(UsageError, match="1 weights are missing"):
        TransformersEncoder(str(tmp_path))


def test_code_in_the_folder_is_not_run(tiny_bert, tmp_path):
    for file in Path(tiny_bert).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "of_its_own", "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit('was run')")
    with pytest.raises(UsageError, match="no model of texts can be read"):
        TransformersEncoder(str(tmp_path))
