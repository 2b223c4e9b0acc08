"""Text encoders of the transformers package, from a local folder; the package is imported only where one is asked for.

Nothing is fetched, and no code that lies in the folder is run.
"""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from fvc_lib.detectors.packages import mend_torchvision
from fvc_lib.detectors.transformers_folders import quiet
from fvc_lib.detectors.weights import refuse_nan
from fvc_lib.services.atomic_files import sha256_of_file
from fvc_lib.services.errors import UsageError

OWN = "own"
TOKENS, THERE = "encoder_tokens", "encoder_there"  # names of a batch's tensors


class TransformersEncoder(nn.Module):
    """A pretrained encoder that is trained on; a text is the mean of what it makes of its tokens.

    It stays in evaluation mode: attention draws its dropout for a whole micro-batch, so the split would change it.

    Args:
        folder: with ``config.json``, weights and the tokenizer's files, as ``save_pretrained`` writes them.

    Raises:
        UsageError: transformers is not installed; no such folder; no model in it, or weights that are not all there.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.encoder = _loaded_encoder(folder)
        self.output_size = int(self.encoder.config.hidden_size)
        self.train()

    def train(self, mode: bool = True) -> Self:
        """As ever, but for the encoder."""
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """(B, W) from ``encoder_tokens`` int64 (B, L) and ``encoder_there`` int64 (B, L), 1 where a token is."""
        there = tensors[THERE]
        states = self.encoder(input_ids=tensors[TOKENS], attention_mask=there).last_hidden_state
        weights = there.to(states.dtype)[:, :, None]
        result: Tensor = (states * weights).sum(1) / weights.sum(1).clamp_min(1)  # a text may have no token at all
        return result


def encoder_tensors(folder: str, texts: Sequence[str], max_tokens: int) -> dict[str, Tensor]:
    """``encoder_tokens`` and ``encoder_there`` int64 (N, L) of ``texts``, by the tokenizer in ``folder``.

    Texts are cut at ``max_tokens`` and at what the encoder has places for. ``UsageError``: transformers is not
    installed or does not start, no such folder, no model of texts in it, or no tokenizer that can fill texts up.
    """
    require_folder(folder)
    transformers = _transformers()
    settings = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **settings)
        kind = transformers.MODEL_MAPPING.get(type(config), None)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"text_encoder: no model that can be read in {folder!r}: {_first_line(error)}") from error
    except (ImportError, RuntimeError) as error:
        raise _does_not_start(error) from error
    _require_model_of_texts(kind, folder)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **settings)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"text_encoder: no tokenizer that can be read in {folder!r}: {_first_line(error)}") from error
    except (ImportError, RuntimeError) as error:
        raise _does_not_start(error) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # of decoders; it is masked
    if tokenizer.pad_token is None:
        raise UsageError(f"text_encoder: the tokenizer in {folder!r} has no pad_token. Give it one and save it again.")
    places = getattr(config, "max_position_embeddings", None) or max_tokens
    longest = min(max_tokens, tokenizer.model_max_length, places)
    encoded = tokenizer(list(texts), padding=True, truncation=True, max_length=longest, return_tensors="pt")
    return {TOKENS: encoded["input_ids"], THERE: encoded["attention_mask"]}


def encoder_fingerprint(folder: str) -> list[list[str]]:
    """Names and SHA-256 of the files of ``folder``: what a training with its weights depends on."""
    files = sorted(path for path in require_folder(folder).iterdir() if path.is_file())
    return [[path.name, sha256_of_file(path)] for path in files]


def _loaded_encoder(folder: str) -> Any:
    require_folder(folder)
    transformers = _transformers()
    with quiet(transformers):
        try:
            model, loading = transformers.AutoModel.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, output_loading_info=True, dtype=torch.float32
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise UsageError(f"text_encoder: no model that can be read in {folder!r}: {_first_line(error)}") from error
        except ImportError as error:
            raise _does_not_start(error) from error
    _require_model_of_texts(type(model), folder)
    if model.config.is_encoder_decoder:
        model = model.get_encoder()
    if not hasattr(model.config, "hidden_size"):
        raise _no_model_of_texts(type(model), folder)
    without_pooler = "add_pooling_layer" in inspect.signature(type(model).__init__).parameters
    if without_pooler:
        model.pooler = None  # a head that is not used, and would never receive a gradient
    missing = sorted(name for name in loading["missing_keys"] if not (without_pooler and name.startswith("pooler.")))
    if missing:
        raise UsageError(
            f"text_encoder: {len(missing)} weights are missing in {folder!r}, the first {missing[0]!r}; they would be "
            "random. Give the folder of a whole model of this kind."
        )
    refuse_nan(model.state_dict(), "text_encoder", Path(folder))
    return model


def _require_model_of_texts(kind: Any, folder: str) -> None:
    """Models of pictures and clips have a ``hidden_size`` as well, and read something else than tokens."""
    if getattr(kind, "main_input_name", "") != "input_ids":
        raise _no_model_of_texts(kind, folder)


def _no_model_of_texts(kind: Any, folder: str) -> UsageError:
    return UsageError(
        f"text_encoder: {folder!r} holds a {getattr(kind, '__name__', 'model of no known kind')}, wanted an encoder of "
        f"texts (BERT, RoBERTa, DistilBERT, T5 and the like). Give the folder of one, or take text_encoder {OWN}."
    )


def _does_not_start(error: BaseException) -> UsageError:
    while error.__cause__ is not None:  # transformers names the class that was asked for, its cause the package
        error = error.__cause__
    return UsageError(
        f"text_encoder: transformers does not start: {_first_line(error)}. Mostly a torchvision beside it was built "
        f"for another torch than {torch.__version__}: install both from one index, or take torchvision away (pip "
        f"uninstall torchvision; text encoders need none); or take text_encoder {OWN}."
    )


def _transformers() -> Any:
    mend_torchvision()
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            "text_encoder: a folder needs the transformers package: pip install 'transformers>=5', or take "
            f"text_encoder {OWN}."
        ) from error
    return transformers


def require_folder(folder: str) -> Path:
    """``folder`` as a path; ``UsageError`` where it is none on this machine."""
    path = Path(folder)
    if not path.is_dir():
        raise UsageError(
            f"text_encoder: got {folder!r}, wanted {OWN} or the folder of a transformers model on this machine; "
            "nothing is fetched from elsewhere."
        )
    return path


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
