"""``restrav:TRUNK``: ReStraV, a small classifier on how straight and how even the path of a video's features is.

The features of 24 frames, over the two seconds in the middle of a video, are points of a path. A video is described by
21 numbers: the first seven distances of neighbouring points, the first six angles between neighbouring steps, and
mean, minimum, maximum and variance of all distances and of all angles. The classifier is a network of layers with 64,
32 and 1 units, trained for ten epochs, all as published. The publisher balances the labels by leaving out rows of the
more frequent one; here the loss gives both labels the same weight instead.

The default trunk is DINOv2 ViT-S/14 as published: all its output tokens are features, and pixels are fractions of
white, not normalised further. Other trunks are used with their own normalisation.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fvc_lib.detectors.classical import Arrays, ClassicalModel, Labels, Settings, Values
from fvc_lib.detectors.network import Normalised, PictureTrunk, Trunk
from fvc_lib.detectors.probe import on_frames, published
from fvc_lib.detectors.transformers_networks import TransformersFrames
from fvc_lib.engine.random_state import forked_random_state
from fvc_lib.services.registry import DETECTORS, DetectorSpec, TrunkOptions

_TRUNK = "dinov2_small"
_NUM_DISTANCES, _NUM_ANGLES = 7, 6
_NUM_FEATURES = _NUM_DISTANCES + _NUM_ANGLES + 8
_BATCH, _RATE = 32, 1e-3


class PathTrunk(Trunk):
    """A trunk (feature extractor) that describes a clip by 21 numbers: distances and angles along a path.

    The points of the path are the features of the clip's frames, computed by another trunk. See ``path_numbers``.
    """

    def __init__(self, trunk: PictureTrunk) -> None:
        super().__init__(trunk, _NUM_FEATURES, weights=trunk.weights)
        self.normalised, self.notes = trunk.normalised, trunk.notes

    def encode(self, clips: Tensor) -> Tensor:
        """Return 21 features of each clip, float (B, 21), from normalised clips, float (B, T, 3, H, W).

        The T frames of a clip are points in the trunk's feature space, which form a path; ``path_numbers`` computes the
        distances and angles along it. The point of a frame holds all output tokens of a transformer, or the feature
        vector of another trunk.
        """
        trunk: Any = self.network
        pictures = clips.flatten(0, 1)
        if isinstance(trunk, TransformersFrames):
            points = trunk.network(pixel_values=pictures).last_hidden_state
        else:
            points = trunk.encode_pictures(pictures)
        return path_numbers(points.reshape(*clips.shape[:2], -1))


def path_numbers(points: Tensor) -> Tensor:
    """Return the 21 features of B paths, float (B, 21), from their points, float (B, T, F), with T at least 8.

    A step leads from a point to the next. The features are the lengths of the first seven steps; the first six angles
    between neighbouring steps, in degrees; and mean, minimum, maximum and variance of all lengths and of all angles.
    """
    steps = points.diff(dim=1)
    distances = steps.norm(dim=2)
    angles = torch.rad2deg(torch.acos(F.cosine_similarity(steps[:, :-1], steps[:, 1:], dim=2).clamp(-1, 1)))
    moments = [
        torch.stack([each.mean(1), each.amin(1), each.amax(1), each.var(1, correction=0)], 1)
        for each in (distances, angles)
    ]
    return torch.cat([distances[:, :_NUM_DISTANCES], angles[:, :_NUM_ANGLES], *moments], 1)


def _classifier() -> nn.Sequential:
    return nn.Sequential(nn.Linear(_NUM_FEATURES, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))


def _fit(values: Values, labels: Labels, weights: Values, settings: Settings) -> Arrays:
    mean, deviation = values.mean(0), values.std(0) + 1e-8
    given = [torch.from_numpy(array.astype(np.float32)) for array in ((values - mean) / deviation, labels, weights)]
    with forked_random_state(0, torch.device("cpu")):
        network = _classifier()
        optimizer = torch.optim.Adam(network.parameters(), lr=_RATE)
        for _ in range(int(settings["epochs"])):
            order = torch.randperm(len(labels))
            for first in range(0, len(labels), _BATCH):
                inputs, targets, weight = (tensor[order[first : first + _BATCH]] for tensor in given)
                optimizer.zero_grad()
                loss = F.binary_cross_entropy_with_logits(network(inputs).squeeze(1), targets, weight)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    return {"mean": mean, "deviation": deviation, **{name: part.numpy() for name, part in network.state_dict().items()}}


def _logits(arrays: Arrays, values: Values) -> Values:
    network = _classifier()
    network.load_state_dict({name: torch.from_numpy(arrays[name]) for name in network.state_dict()})
    inputs = torch.from_numpy(((values - arrays["mean"]) / arrays["deviation"]).astype(np.float32))
    with torch.inference_mode():
        return network(inputs).squeeze(1).double().numpy()


RESTRAV = ClassicalModel(({"epochs": 10},), _fit, _logits, fewest_frames=_NUM_DISTANCES + 1)


def _on_path(built: object, options: TrunkOptions) -> PathTrunk:
    path = PathTrunk(on_frames(built, options))
    if options.name.partition(":")[2] in ("", _TRUNK):
        path.normalised = Normalised(((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)))
    return path


_AS_PUBLISHED = "fractions of white, not normalised further"
_SPEC = published(
    DetectorSpec(
        name="restrav",
        family="features over time",
        paper="C. Interno et al., AI-generated video detection via perceptual straightening, NeurIPS 2025",
        bibtex="@inproceedings{interno2025restrav, title={{AI}-Generated Video Detection via Perceptual "
        "Straightening}, author={Intern{\\`o}, Christian and Geirhos, Robert and Olhofer, Markus and Liu, Sunny and "
        "Hammer, Barbara and Klindt, David}, booktitle={NeurIPS}, year={2025}}",
        licence="this project's (the publisher's: Apache-2.0), and the trunk's",
        num_frames=24,
        side=224,
        normalisation=_AS_PUBLISHED,
        micro_batch=1,
        frame_sampling="rate:11.5",
        frame_fit="squash",
        of_features="embedding",
        estimator=RESTRAV,
    ),
    _TRUNK,
    _on_path,
    normalisation=_AS_PUBLISHED,
)
DETECTORS.register(_SPEC)
DETECTORS.register(replace(_SPEC, name="restrav:NAME"))
