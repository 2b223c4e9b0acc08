"""Text encoders of the transformers package, from a local folder; the package is imported on use.

Nothing is downloaded, and no code in the folder is run.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from fvc_lib.detectors.packages import imported
from fvc_lib.detectors.weights import refuse_nan
from fvc_lib.engine.oom_detection import first_line
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError

OWN = "own"
TOKENS, THERE = "encoder_tokens", "encoder_there"  # names of tensors in a batch: token ids, attention mask


def encoder_folder(config: RunConfig) -> str:
    """Return the folder of the pretrained text encoder of the transformers package; an empty text if none is used.

    None is used if the run has no contrastive loss, or if it uses FVC's own text encoder.
    """
    return config.text_encoder if config.contrastive_weight and config.text_encoder != OWN else ""


class TransformersEncoder(nn.Module):
    """A pretrained text encoder that is trained further; the features of a text are the mean of its token states.

    It is in evaluation mode also during training. Otherwise dropout of attention would be drawn once per micro-batch,
    and the result would depend on how a batch is split.

    Args:
        folder: folder with ``config.json`` and weights, as ``save_pretrained`` writes them.

    Raises:
        UsageError: transformers is not installed, the folder does not exist or holds no model, or weights are missing.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.encoder = _loaded_encoder(folder)
        self.output_size = int(self.encoder.config.hidden_size)
        self.train()

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode of this module; the pretrained encoder in it stays in evaluation mode."""
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return features float (B, W) of texts; a text without tokens gets zeros.

        ``tensors`` holds ``encoder_tokens`` int64 (B, L), the token ids, and ``encoder_there`` int64 (B, L), 1 for a
        token and 0 for padding.
        """
        there = tensors[THERE]
        states = self.encoder(input_ids=tensors[TOKENS], attention_mask=there).last_hidden_state
        weights = there.to(states.dtype)[:, :, None]
        return (states * weights).sum(1) / weights.sum(1).clamp_min(1)  # a text may have no token at all


def encoder_tensors(folder: str, texts: Sequence[str], max_tokens: int) -> dict[str, Tensor]:
    """Tokenize N texts by the tokenizer in ``folder``.

    Texts are cut at ``max_tokens`` tokens, or at the encoder's limit if that is lower.

    Returns:
        A mapping with ``encoder_tokens``, the token ids, and ``encoder_there``, 1 for a token and 0 for padding. Both
        are int64 (N, L), where L is the length of the longest text.

    Raises:
        UsageError: transformers is missing or does not work, the folder does not exist or holds no tokenizer, or its
            tokenizer has no token for padding.
    """
    with _loading(folder) as transformers:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # padding is masked anyway
        longest = min(max_tokens, tokenizer.model_max_length)
        encoded = tokenizer(list(texts), padding=True, truncation=True, max_length=longest, return_tensors="pt")
    return {TOKENS: encoded["input_ids"], THERE: encoded["attention_mask"]}


def _loaded_encoder(folder: str) -> Any:
    with _loading(folder) as transformers:
        model, loading = transformers.AutoModel.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, output_loading_info=True, dtype=torch.float32
        )
    if model.config.is_encoder_decoder:
        model = model.get_encoder()
    if "add_pooling_layer" in inspect.signature(type(model).__init__).parameters:
        model.pooler = None  # it is not used, and would never receive a gradient
    if missing := sorted(name for name in loading["missing_keys"] if not name.startswith("pooler.")):
        raise UsageError(
            f"text_encoder: {len(missing)} weights are missing in {folder!r}, the first {missing[0]!r}; they would be "
            "random. Give the folder of a whole model of this kind."
        )
    refuse_nan(model.state_dict(), "text_encoder", Path(folder))
    return model


@contextmanager
def _loading(folder: str) -> Iterator[Any]:
    """Yield the transformers package; turn errors of loading from ``folder`` into ``UsageError``."""
    if not Path(folder).is_dir():
        raise UsageError(
            f"text_encoder: got {folder!r}, wanted {OWN} or the folder of a transformers model on this machine; "
            "nothing is fetched from elsewhere."
        )
    transformers = imported("transformers", "text_encoder", f"pip install 'transformers>=5', or use text_encoder {OWN}")
    try:
        yield transformers
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise UsageError(
            f"text_encoder: no model of texts can be read in {folder!r}: {first_line(error)}. Give a folder that "
            f"save_pretrained wrote, with its tokenizer, or use text_encoder {OWN}."
        ) from error
