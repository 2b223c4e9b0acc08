"""Detector networks: a trunk turns clips into features, and a head turns features into a logit.

``DetectorSpec`` (``services/registry.py``) declares a detector. ``build_detector`` builds the network of a
configuration. ``tune`` chooses which of its parts are trained.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fvc_lib.detectors.effort import adapt
from fvc_lib.detectors.weights import BEGUN_WITH, LoadedWeights, load_weights
from fvc_lib.engine.oom_detection import first_line, is_out_of_memory
from fvc_lib.services.checkpoint_files import weights_digest
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError
from fvc_lib.services.registry import DETECTORS, DetectorSpec, TrunkOptions

# Mean and standard deviation of red, green and blue, as fractions of white, with which published weights were trained.
Colours = tuple[Sequence[float], Sequence[float]]
IMAGENET: Colours = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
KINETICS: Colours = ((0.43216, 0.394666, 0.37645), (0.22803, 0.22145, 0.216989))
GREY: Colours = ((0.45, 0.45, 0.45), (0.225, 0.225, 0.225))
_GRU_WIDTH = 256
_SMALL = 1e-8
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm, nn.RMSNorm)
# Dropout layers, whose masks the training engine draws per sample.
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class Normalised(nn.Module):
    """A layer that normalises colours: it subtracts the mean and divides by the standard deviation of every channel.

    Args:
        colours: mean and standard deviation of red, green and blue, as fractions of white.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, colours: Colours = IMAGENET) -> None:
        super().__init__()
        mean, deviation = colours
        # Not persistent: files of published weights do not have them.
        self.register_buffer("mean", 255 * torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("deviation", 255 * torch.tensor(deviation).view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the normalised images, float (..., 3, H, W), of images uint8 (..., 3, H, W)."""
        return (images.to(self.mean.dtype) - self.mean) / self.deviation


class Trunk(nn.Module):
    """A published network without its class layer, which turns clips into features. Subclasses implement ``encode``.

    The result of a training step must not depend on how its batch is split into micro-batches to fit the memory. So
    only the dropout layers of the network are in training mode during training. Batch norms use their stored statistics
    instead of those of a micro-batch. Stochastic depth and dropout of attention, which draw once per micro-batch, are
    off. If training starts from scratch, group norms replace batch norms. ``notes`` are sentences about
    differences from the published network.

    Args:
        network: the publisher's module without class layer; files of weights hold its ``state_dict``.
        num_features: F, number of features of a clip or frame.
        colours: mean and standard deviation of red, green and blue in the publisher's training data, as fractions of
            white.
        recomputable: parts whose activations gradient checkpointing may compute again.
        weights: origin of the weights; None: the network starts from scratch.
    """

    per_frame = False  # whether features are computed for every frame alone, (B, T, F)
    is_frozen = False  # whether no part is trained; then ``state_dict`` holds only a digest of the weights

    def __init__(
        self,
        network: nn.Module,
        num_features: int,
        *,
        colours: Colours = KINETICS,
        recomputable: Sequence[nn.Module] = (),
        weights: LoadedWeights | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.frame_feature_size = num_features
        self.normalised = Normalised(colours)
        self.weights = weights
        self.notes: tuple[str, ...] = ()
        self._recomputable = tuple(recomputable)
        if weights is None and (replaced := batch_norms_to_group_norms(network)):
            self.notes += (
                f"trained from scratch with {replaced} group norms in place of batch norms: not the published network",
            )

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode; within the network only dropout layers enter training mode."""
        super().train(mode)
        for part in self.network.modules():
            part.training = mode and isinstance(part, _DROPOUTS)
        return self

    @cached_property
    def _digest(self) -> Tensor:
        """Return the SHA-256 of the weights, as a tensor uint8 (32,)."""
        return torch.frombuffer(bytearray.fromhex(weights_digest(super().state_dict())), dtype=torch.uint8)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """Return the weights by name.

        A frozen trunk has the published weights, so checkpoints need not store them. For a frozen trunk the result has
        a single entry ``digest``, the SHA-256 of the weights.
        """
        if not self.is_frozen:
            return super().state_dict(*args, **options)
        state = options.get("destination")
        state = {} if state is None else state
        state[f"{options.get('prefix', '')}digest"] = self._digest
        return state

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self.is_frozen:
            wanted = state_dict.pop(f"{prefix}digest", None)
            if wanted is None or not torch.equal(wanted.cpu(), self._digest):
                raise UsageError(
                    f"the frozen trunk ({type(self.network).__name__}) has other weights than the one that was trained "
                    "on. Give model_weights the file that the run used, or install the version of the package that it "
                    "used (run.json)."
                )
            state_dict |= super().state_dict(prefix=prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def recomputable_blocks(self) -> tuple[nn.Module, ...]:
        """Return the parts whose activations gradient checkpointing may recompute; empty if none are known."""
        return self._recomputable

    def encode(self, clips: Tensor) -> Tensor:
        """Return the features of normalised clips, float (B, T, 3, H, W).

        The features have shape (B, F), or (B, T, F) if ``per_frame`` is true.
        """
        raise NotImplementedError

    def forward(self, frames: Tensor) -> Tensor:
        """Return features (B, T', F) of frames uint8 (B, T, 3, H, W); T' is T if ``per_frame`` is true, else 1.

        Raises:
            UsageError: the network does not take clips of this shape.
        """
        try:
            features = self.encode(self.normalised(frames))
        except (AssertionError, ValueError, RuntimeError) as error:
            of_shapes = re.search("size|shape|dimension|match", str(error), re.IGNORECASE)
            if isinstance(error, RuntimeError) and (is_out_of_memory(error) or not of_shapes):
                raise
            num_frames, _, height, width = frames.shape[1:]
            raise UsageError(
                f"a {type(self.network).__name__} does not take clips of {num_frames} frames of {height} x {width} "
                f"pixels: {first_line(error).removesuffix('.')}. Give the values that it was made for "
                "(num_frames 0 and fixed_size 0; image_size for a backbone), or another network."
            ) from error
        return features if self.per_frame else features.unsqueeze(1)


class PictureTrunk(Trunk):
    """A trunk that computes the features of every frame independently of the other frames."""

    per_frame = True

    def encode(self, clips: Tensor) -> Tensor:
        """Return features (B, T, F) of normalised clips, float (B, T, 3, H, W)."""
        features = self.encode_pictures(clips.flatten(0, 1))
        return features.reshape(*clips.shape[:2], -1)

    def encode_pictures(self, pictures: Tensor) -> Tensor:
        """Return features (N, F) of normalised pictures, float (N, 3, H, W)."""
        return self.network(pictures)

    def stages(self) -> tuple[tuple[nn.Parameter, ...], ...]:
        """Return the parameters of the network, one tuple per stage; ``parameters_by_stage`` defines the stages."""
        return parameters_by_stage(self.network)


class Detector(nn.Module):
    """A network of a trunk and a head that returns one logit per clip, positive for fake.

    Args:
        trunk: turns frames uint8 (B, T, 3, H, W) into features (B, T', F) or (B, F).
        head: turns features (B, T', F) into logits (B,).
        l2_normalise: whether every feature vector is divided by its length before the head.
    """

    def __init__(self, trunk: Any, head: nn.Module, *, l2_normalise: bool = False) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = head
        self._l2_normalise = l2_normalise

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode; a trunk whose parameters are all frozen stays in evaluation mode."""
        super().train(mode)
        if not any(parameter.requires_grad for parameter in self.trunk.parameters()):
            self.trunk.eval()
        return self

    def recomputable_blocks(self) -> tuple[nn.Module, ...]:
        """Return the trunk's parts whose activations gradient checkpointing may recompute."""
        return recomputable_blocks_of(self.trunk)

    def forward(self, frames: Tensor) -> Tensor:
        """Return logits float (B,), positive for fake, of frames uint8 (B, T, 3, H, W)."""
        return self.logits_of(self.trunk(frames))

    def logits_of(self, features: Tensor) -> Tensor:
        """Return logits (B,) for features of the trunk: (B, T', F), or (B, F) with one vector per clip."""
        if features.dim() == 2:
            features = features.unsqueeze(1)
        return self.head(F.normalize(features, dim=-1) if self._l2_normalise else features)


def recomputable_blocks_of(trunk: Any) -> tuple[nn.Module, ...]:
    """Return the parts of ``trunk`` whose activations gradient checkpointing may recompute.

    Raises:
        UsageError: ``trunk`` has no method ``recomputable_blocks``, or it returns none.
    """
    blocks = tuple(trunk.recomputable_blocks()) if hasattr(trunk, "recomputable_blocks") else ()
    if not blocks:
        raise UsageError(
            f"gradient_checkpointing: a {type(getattr(trunk, 'network', trunk)).__name__} names no blocks to compute "
            "again (a method recomputable_blocks). Turn gradient_checkpointing off, or take another model."
        )
    return blocks


def build_detector(config: RunConfig) -> nn.Module:
    """Build the network of ``config`` with its published weights, or with random ones from torch's random state.

    Parameters that ``config.tune`` does not train require no gradient.

    Raises:
        UsageError: the name is unknown, a package is missing, the weights do not fit, or the network does not have the
            head or the trained parts that ``config`` names.
    """
    spec = DETECTORS.get(config.model)
    network: nn.Module = _headed(spec, config) if spec.build is None else spec.build()
    trunk = getattr(network, "trunk", None)
    trunk = trunk if isinstance(trunk, Trunk) else None
    if spec.build is not None:
        if config.head or config.l2_normalise:
            raise UsageError(f"model {spec.name!r} has a head of its own: leave head and l2_normalise out.")
        load_once(network, weights_path(config.model_weights), spec.weights_licence)
    random = trunk is not None and trunk.weights is None
    if random and config.tune not in ("", "all"):
        raise UsageError(
            f"tune: got {config.tune!r} for model {config.model!r} without weights: what is not trained would stay "
            "random. Give its weights with model_weights, or tune all."
        )
    tune(network, config.tune or ("all" if random else spec.tune))
    if trunk is not None:
        trunk.is_frozen = not any(parameter.requires_grad for parameter in trunk.parameters())
    return network


def _headed(spec: DetectorSpec, config: RunConfig) -> Detector:
    trunk = trunk_of_config(spec, config)
    name = config.head or spec.head
    size = trunk.frame_feature_size
    unit = config.l2_normalise or spec.l2_normalise
    head = Mean(size, normalise=not unit) if name == "mean" else HEADS[name](size)
    return Detector(trunk, head, l2_normalise=unit)


def trunk_of_config(spec: DetectorSpec, config: RunConfig) -> Any:
    """Build the trunk (network without head) of ``spec``, for the clip size and with the weights in ``config``.

    Raises:
        UsageError: the detector has no trunk; or the weights do not exist, do not fit, or belong to a run or bundle.
    """
    clips, weights = config.clips, weights_path(config.model_weights)
    return built_trunk(spec, TrunkOptions(config.model, clips.num_frames, clips.side, weights))


def built_trunk(spec: DetectorSpec, options: TrunkOptions) -> Any:
    """Build the trunk (network without head) of ``spec``, with the weights in ``options.weights`` if they are given.

    The number of its features is its attribute ``frame_feature_size``.

    Raises:
        UsageError: ``spec`` has no builder for a trunk.
    """
    if spec.build_trunk is None:
        raise UsageError(
            f"model {spec.name!r} has no trunk that gives features. Take frame_cnn, efficientnet_lite0 or another "
            "network; give a class of your own an attribute num_features."
        )
    trunk = spec.build_trunk(replace(options, licence=spec.weights_licence or "unknown"))
    load_once(trunk, options.weights, spec.weights_licence)
    trunk.frame_feature_size = getattr(trunk, "frame_feature_size", None) or trunk.num_features
    if isinstance(trunk, Trunk) and trunk.weights is None and spec.weights:
        trunk.notes += (f"trained from scratch, without its published weights ({spec.weights})",)
    return trunk


def load_once(network: Any, path: Path | None, licence: str) -> None:
    """Load the weights in the file or folder ``path`` into ``network``, unless it has loaded weights already.

    If ``path`` is None, nothing is loaded. ``licence`` is that of the weights, for the record.
    """
    if path is not None and not isinstance(getattr(network, "weights", None), LoadedWeights):
        network.loaded_weights = load_weights(network, path, licence=licence or "unknown")


def loaded_weights_of(network: nn.Module) -> LoadedWeights | None:
    """Return the origin of the weights that were loaded into a network or a part of it; None if all are random."""
    for part in network.modules():
        for name in ("weights", "loaded_weights"):
            found = getattr(part, name, None)
            if isinstance(found, LoadedWeights):
                return found
    return None


def weights_path(text: str) -> Path | None:
    """Return the value ``text`` of the parameter ``model_weights`` as a path; None for an empty text.

    Raises:
        UsageError: the path does not exist; or it lies in the folder of a run or bundle (exported detector), whose
            networks may have been trained on the test videos.
    """
    if not text:
        return None
    path = Path(text)
    above = (path, *path.absolute().parents, *path.resolve().parents)  # a link may lead into a run
    run = next((each for each in above if (each / "run.json").is_file() or (each / "bundle.json").is_file()), None)
    if run is not None and path.absolute() != run / BEGUN_WITH:
        raise UsageError(
            f"model_weights {text!r}: is of the run or bundle {run}, whose networks may have seen the videos that test "
            "this one. Give published weights."
        )
    if not path.exists():
        raise UsageError(
            f"model_weights {text!r}: no such file or folder on this machine. Weights of the Hugging Face hub: "
            "'hf download ORGANISATION/NAME --local-dir FOLDER', then -p model_weights FOLDER."
        )
    return path


def batch_norms_to_group_norms(network: nn.Module) -> int:
    """Replace all batch norms in ``network`` by group norms of up to 32 groups (Wu and He, ECCV 2018), in place.

    Returns:
        The number of replaced norms.
    """
    batch_norm = nn.modules.batchnorm._BatchNorm
    norms = [(name, part) for name, part in network.named_modules() if isinstance(part, batch_norm)]
    for name, part in norms:
        norm = nn.GroupNorm(math.gcd(32, part.num_features), part.num_features)
        after = [each for each in (getattr(part, "drop", None), getattr(part, "act", None)) if each is not None]
        network.set_submodule(name, nn.Sequential(norm, *after) if after else norm)  # timm's have dropout, activation
    return len(norms)


def without_class_layer(network: nn.Module) -> int:
    """Remove the class layer of a network of torchvision in place, and return the number of features below it.

    The layer is the attribute ``fc``, ``classifier`` or ``head``; hidden layers in it are removed, too.

    Raises:
        UsageError: the network has no such layer.
    """
    name = next((name for name in ("fc", "classifier", "head") if hasattr(network, name)), "")
    layers = [part for part in network.get_submodule(name).modules() if isinstance(part, nn.Linear | nn.Conv3d)]
    if not name or not layers:
        raise UsageError(
            f"a {type(network).__name__} is built in a way that is not known here: its class layer is no attribute fc, "
            "classifier or head. Take a network such as efficientnet_b0, mobilenet_v3_small or resnet50, or timm:NAME."
        )
    setattr(network, name, nn.Identity())
    return int(layers[0].weight.shape[1])


def blocks_of(network: nn.Module, *names: str) -> tuple[nn.Module, ...]:
    """Return the blocks of a network, the parts whose activations gradient checkpointing may recompute.

    They are the parts of the first attribute in ``names`` that is a list of modules. If there is no such attribute,
    they are the attributes ``layer1`` to ``layer4``. The result is empty if the network has none of these.
    """
    for name in names:
        parts = getattr(network, name, None)
        if isinstance(parts, nn.Sequential | nn.ModuleList):
            return tuple(parts)
    layers = [getattr(network, f"layer{number}", None) for number in (1, 2, 3, 4)]
    return tuple(layer for layer in layers if isinstance(layer, nn.Module))


# --- Heads over a clip's features: mean, attention, GRU, and statistics of the path of the features over time
#
# An encoder of frames gives features (B, T, F). For example, one clip of three frames with two features may have
# ``[[1, 0], [2, 1], [2, 3]]``. The mean is ``[5/3, 4/3]``. The first differences are ``[1, 1]`` and ``[0, 2]``, of
# length 1.41 and 2; between them the path turns by 45 degrees. A network on whole clips gives features (B, F), which
# are used as (B, 1, F).


class Mean(nn.Module):
    """A head: a linear layer on the mean of the features over the frames.

    With ``normalise``, the mean passes through a layer norm before the linear layer.
    """

    def __init__(self, num_features: int, *, normalise: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(num_features) if normalise else nn.Identity()
        self.linear = nn.Linear(num_features, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits (B,) of features (B, T, F)."""
        return self.linear(self.norm(features.mean(1))).squeeze(1)


class Attention(nn.Module):
    """A head: a linear layer on a weighted mean of the frames' features, with learned attention weights.

    The attention has no gate (M. Ilse et al., ICML 2018).
    """

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(num_features)
        self.weigh = nn.Linear(num_features, 1)
        self.linear = nn.Linear(num_features, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits (B,) of features (B, T, F)."""
        features = self.norm(features)
        weights = self.weigh(features).softmax(1)
        return self.linear((weights * features).sum(1)).squeeze(1)


class Gru(nn.Module):
    """A head: a linear layer on the last state of a gated recurrent unit over frames (K. Cho et al., EMNLP 2014)."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(num_features)
        self.gru = nn.GRU(num_features, _GRU_WIDTH, batch_first=True)
        self.linear = nn.Linear(_GRU_WIDTH, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits (B,) of features (B, T, F)."""
        _, last = self.gru(self.norm(features))
        return self.linear(last[-1]).squeeze(1)


class PathHead(nn.Module):
    """A head: a linear layer on statistics of how the features change from frame to frame.

    The statistics are the mean and standard deviation of every feature over the frames, the means of its absolute first
    and second differences, and the eight numbers of ``path_statistics``.

    The angles follow ReStraV (C. Interno et al., "AI-generated video detection via perceptual straightening", 2025),
    the second differences D3 (C. Zheng et al., ICCV 2025).
    """

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(num_features) for _ in range(4))
        self.linear = nn.Linear(4 * num_features + 8, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits (B,) of features (B, T, F), T at least 3.

        Raises:
            UsageError: T is less than 3.
        """
        if features.shape[1] < 3:
            raise UsageError(
                f"head path: got features of {features.shape[1]} points in time, wanted 3 or more. Give num_frames 3 "
                "or more and a network on frames (efficientnet_lite0, clip_vit_b16, timm:NAME ...), or another head."
            )
        moved = features.diff(dim=1)
        turned = moved.diff(dim=1)
        statistics = (features.mean(1), _spread(features), moved.abs().mean(1), turned.abs().mean(1))
        normed = [norm(each) for norm, each in zip(self.norms, statistics, strict=True)]
        return self.linear(torch.cat([*normed, path_statistics(features)], dim=1)).squeeze(1)


def path_statistics(features: Tensor) -> Tensor:
    """Return statistics of the steps (differences of the features) from frame to frame.

    Args:
        features: float (B, T, F), T at least 3.

    Returns:
        float (B, 8): mean, standard deviation, minimum and maximum of the steps' lengths; then the same four statistics
        of the angles between successive steps, in radians. Lengths are divided by the mean length of the clip's feature
        vectors.
    """
    moved = features.diff(dim=1)
    scale = features.norm(dim=2).mean(1, keepdim=True).clamp_min(_SMALL)
    lengths = (moved.square().sum(2) + _SMALL).sqrt() / scale
    cosines = F.cosine_similarity(moved[:, 1:], moved[:, :-1], dim=2, eps=_SMALL)
    angles = torch.acos(cosines.clamp(-1 + 1e-6, 1 - 1e-6))
    both = [torch.stack([each.mean(1), _spread(each), each.amin(1), each.amax(1)], dim=1) for each in (lengths, angles)]
    return torch.cat(both, dim=1)


def _spread(values: Tensor) -> Tensor:
    """Return the standard deviation along dimension 1; its gradient is finite at zero."""
    return (values.var(1, correction=0) + _SMALL).sqrt()


HEADS: dict[str, Callable[[int], nn.Module]] = {"mean": Mean, "attention": Attention, "gru": Gru, "path": PathHead}


# --- The choice of the parts that are trained


def tune(network: nn.Module, what: str) -> None:
    """Choose the parameters of ``network`` that are trained; the others require no gradient afterwards.

    Args:
        network: the network.
        what: ``all``: all parameters. ``head``: only the head. ``norms``: the head and all normalisation layers.
            ``last:N``: the head and the last N stages. ``effort`` or ``effort:RANK``: the head and parts of attention
            weights (see ``effort.py``).

    Raises:
        UsageError: ``what`` names a part that the network does not have.
    """
    if what == "all":
        return
    head = head_of(network)
    stages = trunk_stages(network)
    trained = set(head.parameters())
    if what == "norms":
        norms = [part for part in network.modules() if isinstance(part, _NORMS)]
        trained |= {parameter for norm in norms for parameter in norm.parameters()}
    elif what.startswith("last:"):
        number = int(what.removeprefix("last:"))
        if number > len(stages):
            raise UsageError(f"tune: got {what!r}, and the network has {len(stages)} stages. Give all, or fewer.")
        trained |= {parameter for stage in stages[-number:] for parameter in stage}
    elif what.startswith("effort"):
        trained |= set(adapt(getattr(network, "trunk", network), int(what.partition(":")[2] or 1)))
    for parameter in network.parameters():
        parameter.requires_grad_(parameter in trained)


def head_of(network: nn.Module) -> nn.Module:
    """Return the head of a network: its attribute ``head`` if that is a module, else its last linear layer.

    Raises:
        UsageError: the network has neither.
    """
    head = getattr(network, "head", None)
    linear = [part for part in network.modules() if isinstance(part, nn.Linear)]
    if not isinstance(head, nn.Module) and not linear:
        raise UsageError(
            f"a {type(network).__name__} names no head (an attribute) and has no linear layer, so no stages are below "
            "one: give tune all, and freeze_backbone_epochs and unfreeze_stage_epochs 0."
        )
    return head if isinstance(head, nn.Module) else linear[-1]


def trunk_stages(network: nn.Module) -> tuple[tuple[nn.Parameter, ...], ...]:
    """Return the parameters of a network without its head: one tuple per stage, from input to features.

    ``parameters_by_stage`` defines the stages.
    """
    head = set(head_of(network).parameters())
    stages = parameters_by_stage(getattr(network, "trunk", network))
    below = (tuple(parameter for parameter in stage if parameter not in head) for stage in stages)
    return tuple(stage for stage in below if stage)


def parameters_by_stage(network: nn.Module) -> tuple[tuple[nn.Parameter, ...], ...]:
    """Return the parameters of a network, one tuple per stage, in the order in which its parts are registered.

    This order is usually from input to output. A stage is a part that contains further parts, such as ``layer1`` of a
    resnet. A part with more than half of all parameters (``features`` or ``blocks``) is replaced by the parts in it. A
    single layer belongs to the stage before it, or to the first stage if there is none before. Parameters of the
    network itself belong to the first stage.
    """
    num_parameters = sum(parameter.numel() for parameter in network.parameters())
    stages = [list(network.parameters(recurse=False))]  # the first is what comes before the first stage
    for part in _parts(network, num_parameters / 2):
        if next(part.children(), None) is not None:
            stages.append([])
        stages[-1] += part.parameters()
    if len(stages) > 1:
        stages[:2] = [stages[0] + stages[1]]
    seen: set[nn.Parameter] = set()  # shared parameters belong to the first stage that has them
    by_stage: list[tuple[nn.Parameter, ...]] = []
    for stage in stages:
        unseen = tuple(parameter for parameter in dict.fromkeys(stage) if parameter not in seen)
        seen.update(unseen)
        by_stage.append(unseen)
    return tuple(by_stage)


def num_trained_stages(epoch: int, num_stages: int, *, freeze_epochs: int, stage_epochs: int) -> int:
    """Return the number of a network's last stages that are trained in ``epoch`` (0-based).

    No stage is trained for the first ``freeze_epochs`` epochs. Then the last stage is trained, and one more stage after
    every ``stage_epochs`` epochs. If ``stage_epochs`` is 0, all stages are trained after the first ``freeze_epochs``.

    After J. Howard and S. Ruder, "Universal language model fine-tuning" (ACL 2018), section 3.3.
    """
    if epoch < freeze_epochs:
        return 0
    if not stage_epochs:
        return num_stages
    return min(num_stages, 1 + (epoch - freeze_epochs) // stage_epochs)


def train_last(stages: Sequence[Iterable[nn.Parameter]], number: int) -> None:
    """Make the parameters of the last ``number`` stages trainable, and freeze the parameters of the other stages."""
    for place, stage in enumerate(stages):
        for parameter in stage:
            parameter.requires_grad_(place >= len(stages) - number)


def _parts(module: nn.Module, more_than: float) -> Iterator[nn.Module]:
    for child in module.children():
        size = sum(parameter.numel() for parameter in child.parameters())
        if size > more_than and next(child.children(), None) is not None:
            yield from _parts(child, more_than)
        elif size:
            yield child
