"""Load networks from folders that the transformers package wrote; nothing is downloaded, and no code in them is run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fvc_lib.detectors.weights import LoadedWeights, problems_of, refuse_nan
from fvc_lib.services.atomic_files import content_digest, read_json_object
from fvc_lib.services.errors import UsageError

Colours = tuple[float, float, float]


def from_folder(
    transformers: Any, model: str, folder: Path, settings: dict[str, Any], *, licence: str, class_layer: str = ""
) -> tuple[Any, LoadedWeights]:
    """Load a network of the transformers package from ``folder``; return (network, origin of its weights).

    Args:
        transformers: the imported package.
        model: name of the network's class in the package.
        folder: folder with ``config.json`` and weights, as ``save_pretrained`` writes them.
        settings: fields of the configuration that replace those of the folder, such as the number of frames.
        licence: licence of the weights, for the record.
        class_layer: prefix of the parameter names of the publisher's class layer, whose weights may be missing or of
            another shape. Empty: there is no such layer.

    Raises:
        UsageError: the folder does not exist or holds another kind of network, or weights are missing, of another shape
            or NaN.
    """
    kind = getattr(transformers, model)
    document = read_json_object(folder / "config.json")
    if not document:
        raise UsageError(
            f"model_weights {str(folder)!r}: wanted the folder of a transformers model, with config.json and weights."
        )
    wanted = kind.config_class.model_type
    if document.get("model_type") != wanted and document.get("vision_config", {}).get("model_type") != wanted:
        raise UsageError(
            f"model_weights {str(folder)!r}: got a network of type {document.get('model_type')!r}, wanted {wanted!r}. "
            "Give the folder of the network that model names, or another model."
        )
    try:
        config = kind.config_class.from_pretrained(folder, **settings)
        network, loading = kind.from_pretrained(
            folder, config=config, local_files_only=True, trust_remote_code=False, output_loading_info=True,
            dtype=torch.float32, ignore_mismatched_sizes=True,
        )  # fmt: skip
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"model_weights {str(folder)!r}: no weights that can be read: {reason}.") from error
    own = [name for name in loading["missing_keys"] if not (class_layer and name.startswith(class_layer))]
    other = [each[0] for each in loading["mismatched_keys"] if not (class_layer and each[0].startswith(class_layer))]
    unexpected = sorted(loading["unexpected_keys"])
    if problems := problems_of({"not in it": sorted(own), "of another shape": sorted(other)}):
        raise UsageError(
            f"model_weights {str(folder)!r} does not fit a {model}: {problems}. They would be random: give the folder "
            "of a whole network of this kind, and num_frames and fixed_size as it was made for."
        )
    refuse_nan(network.state_dict(), "model_weights", folder)
    own_class = {name for name in network.state_dict() if class_layer and name.startswith(class_layer)}
    left_out = tuple(sorted({*unexpected, *own_class}))
    return network, LoadedWeights(str(folder), content_digest(folder), licence, left_out)


def colours_of(folder: Path, otherwise: tuple[Colours, Colours]) -> tuple[Colours, Colours]:
    """Return the colour statistics by which the network in ``folder`` normalises pixels.

    They are read from ``preprocessor_config.json`` or ``video_preprocessor_config.json``; without either, ``otherwise``
    is returned. Some processors (ViViT's) scale pixels to [-1, 1] before they normalise; both steps are combined.

    Returns:
        A tuple (mean, standard deviation), each of red, green and blue as fractions of white.
    """
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        document = read_json_object(folder / name)
        if document.get("image_mean") and document.get("image_std"):
            scale = 255 * float(document.get("rescale_factor", 1 / 255))
            shift = 1.0 if document.get("offset") else 0.0
            red, green, blue = ((mean + shift) / scale for mean in document["image_mean"])
            wide = [deviation / scale for deviation in document["image_std"]]
            return (red, green, blue), (wide[0], wide[1], wide[2])
    return otherwise


# Settings in which the networks of a family differ.
_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "mlp_ratio", "patch_size",
    "tubelet_size", "attention_type", "num_register_tokens", "key_bias",
)  # fmt: skip


def note_of_another_network(found: Any, published: Any, name: str) -> tuple[str, ...]:
    """Return a tuple with one sentence on how a folder's network differs from the published one; empty if it does not.

    Args:
        found: configuration (of the transformers package) in the folder.
        published: configuration of the published network.
        name: name of the detector.
    """
    pairs = [(key, getattr(found, key, None), getattr(published, key, None)) for key in _SIZES]
    other = [f"{key} {got!r}" for key, got, want in pairs if _plain(got) != _plain(want)]
    return (f"the folder's network is not that of {name}: {', '.join(other)}",) if other else ()


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def blocks_of(network: nn.Module) -> tuple[nn.Module, ...]:
    """Return the layers of a transformer: the modules of its largest module list; empty if it has none."""
    lists = [part for part in network.modules() if isinstance(part, nn.ModuleList)]
    largest = max(lists, key=lambda part: sum(parameter.numel() for parameter in part.parameters()), default=())
    return tuple(largest)


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Turn off the progress bars and warnings of the package ``transformers`` inside the ``with`` block."""
    logging = transformers.utils.logging
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
