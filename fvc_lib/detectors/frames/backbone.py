"""Backbones: networks from a picture to features, by name, with heads for a class and numbers, and files of weights.

A backbone's file in ``fvc_lib/detectors`` registers it with ``BACKBONES``. ``torchvision:NAME`` and ``timm:NAME`` come
through ``AdaptedBackbone``; their packages are imported on use.
"""

import importlib
import logging
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from fvc_lib.engine.task import Outputs
from fvc_lib.services.errors import UsageError, did_you_mean
from fvc_lib.services.registry import BACKBONES

# Of ImageNet's pictures, as fractions of white: what nearly all published weights were trained with.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_DEVIATION = (0.229, 0.224, 0.225)
# What a network's own class layer may be called in a file of weights; this project trains its own.
_HEADS = ("fc.", "classifier.", "head.", "heads.")
_NAMED_AT_MOST = 5
_TORCHVISION_WORKS = ("efficientnet_b0", "efficientnet_b3", "resnet50", "mobilenet_v3_large", "mobilenet_v3_small")

_logger = logging.getLogger(__name__)


class Backbone(nn.Module):
    """Features of pictures, in stages that can be frozen."""

    num_features: int  # of one picture

    def stages(self) -> tuple[tuple[nn.Parameter, ...], ...]:
        """From the input to the features: every parameter of the backbone, in one of them each."""
        raise NotImplementedError

    def recomputable_blocks(self) -> Sequence[nn.Module]:
        """Parts whose activations gradient checkpointing computes again instead of keeping them."""
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        """Features float (B, num_features) of images uint8 (B, 3, H, W)."""
        raise NotImplementedError


class Normalised(nn.Module):
    """uint8 (B, 3, H, W) as float of mean 0 and deviation 1 per colour; has no parameters and nothing to save."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, mean: Sequence[float] = IMAGENET_MEAN, deviation: Sequence[float] = IMAGENET_DEVIATION) -> None:
        super().__init__()
        # Not persistent: weights from elsewhere do not have them.
        self.register_buffer("mean", 255 * torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("deviation", 255 * torch.tensor(deviation).view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Float (B, 3, H, W)."""
        return (images.to(self.mean.dtype) - self.mean) / self.deviation


class AdaptedBackbone(Backbone):
    """Any network as a backbone. It is trained in evaluation mode.

    In training mode a batch norm would take its statistics from the micro-batch, and dropout and stochastic depth
    would draw anew for each, so that the result depended on how memory splits a batch. Weights and biases, a norm's
    too, learn like any others.

    Args:
        network: from float pictures (B, 3, H, W) to features (B, D) or (B, D, 1, 1); its own class layer is gone.
        num_features: D.
        mean: of each colour as a fraction of white, that pictures are brought to 0 from.
        deviation: likewise, brought to 1.
        recomputable: parts of it that are called with one tensor; see ``activation_checkpointing``.
    """

    def __init__(
        self,
        network: nn.Module,
        num_features: int,
        *,
        mean: Sequence[float] = IMAGENET_MEAN,
        deviation: Sequence[float] = IMAGENET_DEVIATION,
        recomputable: Sequence[nn.Module] = (),
    ) -> None:
        super().__init__()
        self.network = network
        self.num_features = num_features
        self.normalised = Normalised(mean, deviation)
        self._recomputable = tuple(recomputable)
        self.network.eval()

    def train(self, mode: bool = True) -> Self:
        """As any module's, but that the network stays in evaluation mode."""
        super().train(mode)
        self.network.eval()
        return self

    def stages(self) -> tuple[tuple[nn.Parameter, ...], ...]:
        """See ``parameters_by_stage``."""
        return parameters_by_stage(self.network)

    def recomputable_blocks(self) -> tuple[nn.Module, ...]:
        """Those it was made with; ``UsageError`` where none are known."""
        if not self._recomputable:
            raise UsageError(
                f"gradient_checkpointing: which parts of a {type(self.network).__name__} could be computed again is "
                f"not known. Turn gradient_checkpointing off or take -p backbone small_resnet."
            )
        return self._recomputable

    def forward(self, images: Tensor) -> Tensor:
        """Features float (B, num_features) of images uint8 (B, 3, H, W); ``UsageError`` where H x W is not for it."""
        try:
            features: Tensor = self.network(self.normalised(images))
        except (AssertionError, ValueError) as error:  # of timm's vision transformers, which are made for one size
            raise refused_size(self, images, error) from error
        return features.flatten(1)


def refused_size(backbone: Backbone, images: Tensor, error: Exception) -> UsageError:
    """That ``backbone`` does not take ``images`` (B, 3, H, W), and which size it was made for, as far as it says."""
    network = backbone_network(backbone)
    wanted = (getattr(network, "pretrained_cfg", None) or {}).get("input_size")
    remedy = f"Give -p image_size {wanted[-1]}, which it was made for" if wanted else "Give another image_size"
    height, width = images.shape[-2:]
    reason = (str(error).splitlines() or [type(error).__name__])[0].removesuffix(".")
    return UsageError(
        f"image_size: a {type(network).__name__} does not take pictures of {height} x {width} pixels: {reason}. "
        f"{remedy}, or take another backbone."
    )


def parameters_by_stage(network: nn.Module) -> tuple[tuple[nn.Parameter, ...], ...]:
    """The parameters of any network in the order in which its parts are registered, which is that from input to output.

    A stage is a part with parts of its own, such as ``layer1`` of a resnet. A part that holds more than half of
    all parameters stands for its parts (``features`` or ``blocks``). Single layers go with the stage before them, or
    the first; so do parameters that the network itself holds.
    """
    num_parameters = sum(parameter.numel() for parameter in network.parameters())
    stages: list[list[nn.Parameter]] = []
    pending = list(network.parameters(recurse=False))
    for part in _parts(network, num_parameters / 2):
        if next(part.children(), None) is not None:
            stages.append(pending + list(part.parameters()))
            pending = []
        elif stages:
            stages[-1] += part.parameters()
        else:
            pending += part.parameters()
    stages = stages or [pending]
    seen: set[nn.Parameter] = set()  # shared ones belong to the first stage that has them
    return tuple(tuple(p for p in stage if p not in seen and not seen.add(p)) for stage in stages)  # type: ignore[func-returns-value]


def _parts(module: nn.Module, more_than: float) -> Iterator[nn.Module]:
    for child in module.children():
        size = sum(parameter.numel() for parameter in child.parameters())
        if size > more_than and next(child.children(), None) is not None:
            yield from _parts(child, more_than)
        elif size:
            yield child


def build_backbone(name: str, weights: Path | None = None) -> Backbone:
    """The named backbone, initialised from torch's current random state, or with the weights of a file.

    Args:
        name: one of ``BACKBONES``: ``small_resnet``, ``torchvision:NAME`` or ``timm:NAME``.
        weights: a file of ``torch.save`` or safetensors with the network's ``state_dict``.

    Raises:
        UsageError: unknown name, a package that is not installed or does not start, a file that cannot be read or
            does not fit.
    """
    backbone = named_backbone(name)
    network = backbone_network(backbone)
    norms = [part for part in network.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    if weights is not None:
        network.load_state_dict(fitting_weights(network, weights))
    elif norms and backbone is not network:
        _logger.warning(
            "backbone %s: batch norm keeps the statistics it begins with, and without backbone_weights these are of "
            "no picture. Give weights, or take small_resnet, which learns from scratch.",
            name,
        )
    return backbone


def named_backbone(name: str) -> Backbone:
    """The named backbone from scratch; raises as ``build_backbone``."""
    backbone: Backbone = BACKBONES.get(name)(name.partition(":")[2])
    return backbone


def backbone_network(backbone: Backbone) -> nn.Module:
    """What a file of weights belongs to."""
    return backbone.network if isinstance(backbone, AdaptedBackbone) else backbone


def _imported(name: str, module: str) -> Any:
    """``module`` of the package ``name``; ``UsageError`` where it is not installed or does not start."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"backbone '{name}:...': {name} is not installed ({error}). Install it beside this torch "
            f"({torch.__version__}): pip install {name}; or take -p backbone small_resnet."
        ) from error
    except (ImportError, RuntimeError, OSError) as error:
        raise UsageError(
            f"backbone '{name}:...': {name} does not start: {error}. It is most often built for another torch than "
            f"{torch.__version__}: install torch, torchvision and {name} from one index, or take -p backbone "
            f"small_resnet."
        ) from error


@BACKBONES.register("torchvision:NAME")
def _of_torchvision(name: str) -> AdaptedBackbone:
    models = _imported("torchvision", "torchvision.models")
    known = models.list_models(module=models)
    if name not in known:
        raise UsageError(f"backbone 'torchvision:{name}': torchvision has no such model.{did_you_mean(name, known)}")
    return adapt_torchvision(models.get_model(name, weights=None), name)


def adapt_torchvision(network: Any, name: str) -> AdaptedBackbone:
    """One of torchvision's classifiers as a backbone: the pooled features that its class layer is given.

    Networks of ``features`` and ``classifier`` (efficientnet, mobilenet, densenet) lose the whole classifier, hidden
    layers too; networks of ``layer1`` to ``layer4`` and ``fc`` (resnet) lose ``fc``. ``UsageError`` for any other.
    """
    if isinstance(getattr(network, "features", None), nn.Sequential) and hasattr(network, "classifier"):
        linear = next((part for part in network.classifier.modules() if isinstance(part, nn.Linear)), None)
        if linear is not None:
            network.classifier = nn.Identity()
            return AdaptedBackbone(network, linear.in_features, recomputable=tuple(network.features))
    if hasattr(network, "layer4") and isinstance(getattr(network, "fc", None), nn.Linear):
        num_features = network.fc.in_features
        network.fc = nn.Identity()
        layers = tuple(getattr(network, f"layer{number}") for number in (1, 2, 3, 4))
        return AdaptedBackbone(network, num_features, recomputable=layers)
    raise UsageError(
        f"backbone 'torchvision:{name}': it is built in a way that is not known here. Known are networks of 'features' "
        f"and 'classifier' or of 'layer1' to 'layer4' and 'fc', such as {', '.join(_TORCHVISION_WORKS)}; or take "
        "timm:NAME."
    )


@BACKBONES.register("timm:NAME")
def _of_timm(name: str) -> AdaptedBackbone:
    timm = _imported("timm", "timm")
    if not timm.is_model(name):
        raise UsageError(f"backbone 'timm:{name}': timm has no such model.{did_you_mean(name, timm.list_models())}")
    return adapt_timm(timm.create_model(name, pretrained=False, num_classes=0))


def adapt_timm(network: Any) -> AdaptedBackbone:
    """One of timm's networks, made with ``num_classes=0``, so that its output are pooled features.

    How many is measured: ``num_features`` leaves out the hidden layer that some (mobilenetv3) still have behind it.
    """
    norms = getattr(network, "pretrained_cfg", None) or {}
    network.eval()
    with torch.inference_mode():
        features = network(torch.zeros(1, *norms.get("input_size", (3, 224, 224))))
    mean, deviation = norms.get("mean", IMAGENET_MEAN), norms.get("std", IMAGENET_DEVIATION)
    return AdaptedBackbone(network, features.flatten(1).shape[1], mean=mean, deviation=deviation)


class ImageModel(nn.Module):
    """A backbone with a class head and a regression head, either of which may be missing.

    The regression head ends linearly: a final ReLU would give zero, without a gradient to get away from it, to every
    picture that the first steps pushed below.

    Args:
        backbone: from pictures to features.
        num_classes: C; 0: no class head.
        num_targets: T; 0: no regression head.
    """

    def __init__(self, backbone: Backbone, num_classes: int, num_targets: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.class_head = _head(backbone.num_features, num_classes)
        self.target_head = _head(backbone.num_features, num_targets)

    def recomputable_blocks(self) -> Sequence[nn.Module]:
        """The backbone's."""
        return self.backbone.recomputable_blocks()

    def forward(self, images: Tensor) -> Outputs:
        """``class_logits`` float (B, C) and ``values`` float (B, T), scaled, of images uint8 (B, 3, H, W)."""
        features = self.backbone(images)
        none = features.new_zeros(len(features), 0)
        return {
            "class_logits": none if self.class_head is None else self.class_head(features),
            "values": none if self.target_head is None else self.target_head(features),
        }

    def train_stages(self, num_trained: int) -> None:
        """Let the heads and the backbone's last ``num_trained`` stages be trained, and nothing else."""
        stages = self.backbone.stages()
        for number, stage in enumerate(stages):
            for parameter in stage:
                parameter.requires_grad_(number >= len(stages) - num_trained)


def _head(num_features: int, num_outputs: int) -> nn.Linear | None:
    return nn.Linear(num_features, num_outputs) if num_outputs else None


def num_trained_stages(epoch: int, num_stages: int, *, freeze_epochs: int, stage_epochs: int) -> int:
    """How many of a backbone's last stages are trained in ``epoch`` (0-based): a function of the epoch alone.

    None for ``freeze_epochs``; then one, and another one after every ``stage_epochs`` more; all at once where that is
    0. After J. Howard and S. Ruder, "Universal language model fine-tuning" (ACL 2018), section 3.3.
    """
    if epoch < freeze_epochs:
        return 0
    if not stage_epochs:
        return num_stages
    return min(num_stages, 1 + (epoch - freeze_epochs) // stage_epochs)


def fitting_weights(network: nn.Module, path: Path) -> dict[str, Tensor]:
    """The weights of the file ``path`` for ``network``, of which only names and shapes are looked at.

    Those of a class layer that the file has beside them are left out.

    Raises:
        UsageError: the file cannot be read, lacks weights, or has some of another shape or name.
    """
    found = {name: tensor for name, tensor in read_weights(path).items() if not name.startswith("num_batches")}
    wanted = network.state_dict()
    missing = [name for name in wanted if name not in found and not name.endswith("num_batches_tracked")]
    unknown = [name for name in found if name not in wanted and not name.startswith(_HEADS)]
    other = [
        f"{name} {tuple(found[name].shape)} instead of {tuple(wanted[name].shape)}"
        for name in wanted
        if name in found and found[name].shape != wanted[name].shape
    ]
    problems = [
        f"{what}: {_some(names)}"
        for what, names in (("not in it", missing), ("unknown", unknown), ("of another shape", other))
        if names
    ]
    if problems:
        raise UsageError(
            f"backbone_weights {str(path)!r} does not fit the backbone ({type(network).__name__}): "
            f"{'; '.join(problems)}. Give the weights of the network that backbone names."
        )
    return {name: found.get(name, wanted[name]) for name in wanted}


def read_weights(path: Path) -> Mapping[str, Tensor]:
    """Tensors by name from a ``.safetensors`` file, or from one of ``torch.save`` without running any code of its.

    Raises:
        UsageError: no such file, damaged, or something else than tensors by name.
    """
    try:
        if path.suffix == ".safetensors":
            document: Any = safetensors.torch.load_file(path)
        else:
            document = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UsageError(f"backbone_weights {str(path)!r}: {error.strerror or error}. Give a readable file.") from error
    except (RuntimeError, pickle.UnpicklingError, EOFError, safetensors.SafetensorError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"backbone_weights {str(path)!r}: neither weights of torch.save nor safetensors: {reason}. Download the "
            "file anew, or save network.state_dict()."
        ) from error
    for name in ("state_dict", "model"):
        if isinstance(document, dict) and isinstance(document.get(name), dict):
            document = document[name]
    if not isinstance(document, dict) or not document or not all(isinstance(v, Tensor) for v in document.values()):
        raise UsageError(f"backbone_weights {str(path)!r}: wanted tensors by name, as network.state_dict() gives them.")
    return {str(name).removeprefix("module."): tensor for name, tensor in document.items()}


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED_AT_MOST} more" if len(names) > _NAMED_AT_MOST else ""
    return f"{', '.join(names[:_NAMED_AT_MOST])}{more}"
