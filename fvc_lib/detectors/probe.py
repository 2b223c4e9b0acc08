"""``probe:TRUNK``: logistic regressions on the activations of a frozen network, and on forensic features.

A view is a kind of features. Each view of ``RunConfig.views`` has a logistic regression of its own, which
``tasks.video.classical`` fits:

* ``frames``: features of the trunk, any registered network with published weights. A frame is described by the trunk's
  output, and by the mean and standard deviation over the picture of every channel at several depths (the ends of
  stages). Early stages hold traces of encoding and generation that the output no longer shows. The features of a video
  are means over its frames. Of a trunk that takes whole clips, the output alone is used.
* ``pixels``: forensic features of pixels at native resolution, such as noise residuals and block effects.
* ``coding``: forensic features of the coded stream, such as packet sizes and motion vectors.

The logit of a video is the weighted mean over views. A weight is inversely proportional to the standard deviation of
the view's held-out logits, so every view has the same influence. The regressions have a fixed penalty, and are fitted
to all videos of the training part; none is set aside to choose settings. Frames are cropped to the middle square of the
picture, because black bars around the complete picture would tell the model the aspect ratio.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import fuse_conv_bn_eval

from fvc_lib.detectors.classical import LOGISTIC
from fvc_lib.detectors.network import PictureTrunk, built_trunk
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError
from fvc_lib.services.registry import DETECTORS, DetectorSpec, TrunkOptions

# The inverse of scikit-learn's C = 0.01, for standardised features. Of frames, a penalty chosen on inner folds was no
# better on two corpora of 41 and 158 clips; nor were other fixed penalties of the other views.
PROBE = replace(LOGISTIC, candidates=({"penalty": 100.0},))
_NUM_FRAMES = 4  # eight frames were no better on the same corpora
_EVEN_STAGES = 4  # stages of a network whose blocks all have outputs of one shape, such as a vision transformer


class StageTrunk(PictureTrunk):
    """A trunk on single frames whose features also include statistics of its intermediate stages.

    The statistics are the mean and standard deviation, over the picture, of every channel at the end of every stage.

    Args:
        trunk: the network. The ends of its stages are chosen among its ``recomputable`` blocks (those of gradient
            checkpointing).
        side: side of the frames in pixels. One picture of this size is computed to find the shapes of outputs.
    """

    def __init__(self, trunk: PictureTrunk, side: int) -> None:
        # On a CPU this layout takes a fifth less time for the default trunk.
        super().__init__(trunk.to(memory_format=torch.channels_last), 0, weights=trunk.weights)  # type: ignore[call-overload]
        self.normalised, self.notes = trunk.normalised, trunk.notes
        for part in trunk.eval().modules():
            _fold_norms(part)
        with torch.no_grad():
            picture = self.normalised(torch.zeros(1, 3, side, side, dtype=torch.uint8))
            blocks = trunk._recomputable
            outputs, features = _outputs(trunk.eval(), blocks, picture)
            places = _ends_of_stages(outputs)
            self._stages = [blocks[place] for place in places]
            self.frame_feature_size = _described([outputs[place] for place in places], features).shape[1]

    def encode_pictures(self, pictures: Tensor) -> Tensor:
        """Return features (N, F) of normalised pictures, float (N, 3, H, W): statistics of the stages, then output."""
        return _described(*_outputs(self.network, self._stages, pictures))


def _fold_norms(part: nn.Module) -> None:
    """Fold each batch norm of ``part`` into the convolution before it, in place.

    The network then takes a quarter less time on a CPU.
    """
    pairs = list(pairwise(part.named_children())) if isinstance(part, nn.Sequential) else []
    for (name, convolution), (following, norm) in pairs:
        if isinstance(convolution, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
            setattr(part, name, fuse_conv_bn_eval(convolution, norm))
            setattr(part, following, nn.Identity())


def _outputs(trunk: Any, parts: Sequence[nn.Module], pictures: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the outputs of ``parts`` during a forward pass of N pictures, and the trunk's features (N, F)."""
    seen: list[Tensor] = []

    def note(_part: nn.Module, _inputs: Any, output: Any) -> None:
        seen.append(output if isinstance(output, Tensor) else output[0])

    hooks = [part.register_forward_hook(note) for part in parts]
    try:
        features: Tensor = trunk.encode_pictures(pictures)
    finally:
        for hook in hooks:
            hook.remove()
    return seen, features.flatten(1)


def _described(outputs: Sequence[Tensor], features: Tensor) -> Tensor:
    """Return the statistics of the stages' outputs, then ``features`` (N, F), as one tensor (N, F')."""
    return torch.cat([*map(_statistics, outputs), features], 1)


def _ends_of_stages(outputs: Sequence[Tensor]) -> list[int]:
    """Return the index of the last block of every stage of a network.

    ``outputs`` holds the output of every block. A stage is a series of consecutive blocks with outputs of equal shape.
    If all outputs have the same shape, as in a vision transformer, up to four indices at even distances are returned;
    the last of them is the last block.
    """
    shapes = [output.shape for output in outputs]
    ends = [number for number, shape in enumerate(shapes) if number + 1 == len(shapes) or shapes[number + 1] != shape]
    if len(ends) == 1:
        quarters = range(1, _EVEN_STAGES + 1)
        ends = sorted({len(shapes) * quarter // _EVEN_STAGES - 1 for quarter in quarters} - {-1})
    return ends


def _statistics(output: Tensor) -> Tensor:
    """Return mean and standard deviation of every channel over the picture, (N, 2 C).

    ``output`` has shape (N, C, H, W), (N, H, W, C) with H = W, or (N, tokens, C).
    """
    if output.dim() == 3:
        values = output
    elif output.shape[1] == output.shape[2] != output.shape[3]:
        values = output.flatten(1, 2)
    else:
        values = output.flatten(2).transpose(1, 2)
    means = values.mean(1, keepdim=True)
    spread = (values - means).square().mean(1).sqrt()  # on a CPU a quarter of the time of ``values.std``
    return torch.cat([means.squeeze(1), spread], 1)


_PAPER = "G. Alain and Y. Bengio, Understanding intermediate layers using linear classifier probes, 2016"


def on_trunk(trunk: DetectorSpec, wrap: Callable[[Any, TrunkOptions], Any], **fields: Any) -> DetectorSpec:
    """Return the ``DetectorSpec`` of a model that classifies the features of a frozen trunk.

    Args:
        trunk: ``DetectorSpec`` of the trunk.
        wrap: function that takes the built trunk and its ``TrunkOptions``, and returns the trunk to use.
        fields: fields of ``DetectorSpec`` that replace those of the trunk.
    """

    def build(options: TrunkOptions) -> Any:
        return wrap(built_trunk(trunk, replace(options, name=trunk.name)), options)

    own = {"of_features": "embedding", **fields}
    return replace(trunk, build_trunk=build, of_name=None, tune="head", **own)


def on_frames(trunk: Any, options: TrunkOptions) -> PictureTrunk:
    """Return ``trunk`` unchanged if it computes features of every single frame; raise ``UsageError`` otherwise.

    Detectors that examine how features change over time need such a trunk. ``options`` holds the name of the detector,
    for the error message.

    Raises:
        UsageError: the trunk computes features of whole clips.
    """
    if isinstance(trunk, PictureTrunk):
        return trunk
    raise UsageError(
        f"model {options.name!r}: wants a trunk on single frames, such as dinov2_small or efficientnet_lite0."
    )


def published(
    recipe: DetectorSpec, default: str, wrap: Callable[[Any, TrunkOptions], Any] = on_frames, **on_default: Any
) -> DetectorSpec:
    """Return the ``DetectorSpec`` of a published method, such as D3, that can be used with any trunk on single frames.

    The name ``d3``, for example, stands for the method with the trunk ``default``, and ``d3:TRUNK`` for the method with
    another trunk. Input side, normalisation and weights are those of the trunk.

    Args:
        recipe: ``DetectorSpec`` with the citation, clips and estimator of the method.
        default: name of the trunk with which the method was published.
        wrap: function that takes the built trunk and its ``TrunkOptions``, and returns the trunk to use.
        on_default: fields of ``DetectorSpec`` that are replaced if the trunk is ``default``.
    """
    fields = ("family", "bibtex", "licence", "num_frames", "frame_sampling", "frame_fit", "estimator")
    own = {field: getattr(recipe, field) for field in fields}

    def of_name(name: str) -> DetectorSpec:
        trunk = DETECTORS.get(name.partition(":")[2] or default)
        more = own | (on_default if trunk.name == default else {})
        return on_trunk(trunk, wrap, name=name, paper=f"{recipe.paper}; {trunk.paper}", **more)

    return replace(recipe, of_name=of_name)


def _of_trunk(name: str) -> DetectorSpec:
    def staged(trunk: Any, options: TrunkOptions) -> Any:
        return StageTrunk(trunk, options.side) if isinstance(trunk, PictureTrunk) else trunk

    spec = DETECTORS.get(name.partition(":")[2])
    of_frames = spec.frame_sampling == "uniform"
    return on_trunk(
        spec,
        staged,
        name=name,
        family="probe",
        paper=f"{_PAPER}; {spec.paper}",
        num_frames=_NUM_FRAMES if of_frames else spec.num_frames,
        frame_fit="crop" if spec.frame_fit == "letterbox" else spec.frame_fit,
        estimator=PROBE,
        of_features="both",
    )


DETECTORS.register(
    DetectorSpec(
        name="probe:NAME",
        family="probe",
        paper=_PAPER,
        bibtex="@article{alain2016understanding, title={Understanding intermediate layers using linear classifier "
        "probes}, author={Alain, Guillaume and Bengio, Yoshua}, journal={arXiv:1610.01644}, year={2016}}",
        licence="this project's, and the trunk's",
        num_frames=_NUM_FRAMES,
        side=224,
        normalisation="the trunk's",
        micro_batch=2,
        frame_fit="crop",
        of_name=_of_trunk,
        of_features="both",
    )
)


def refuse_random_trunk(config: RunConfig) -> None:
    """Raise ``UsageError`` if the trunk would have random weights: none are given, and no package includes them."""
    kind = config.model.partition(":")[0]
    if not config.model_weights and not DETECTORS.get(config.model).brings_weights:
        raise UsageError(
            f"model {config.model!r}: its trunk begins without weights, so its features say nothing. Add "
            f"-p model_weights FILE_OR_FOLDER, or use a trunk that brings its weights: {kind}:efficientnet_lite0."
        )
