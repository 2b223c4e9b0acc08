"""``d3:TRUNK``: D3, which calls a video fake if its features change evenly from frame to frame. Nothing is trained.

The score of a video is the standard deviation of the second-order differences of its frames' features. The distance of
neighbouring frames is the Euclidean distance of their features; a second-order difference is the difference of two
neighbouring distances. Videos of cameras vary more than generated ones.

As published, 16 frames are taken, 8 a second, and a tenth of the longer side is cut off at both ends before a frame is
resized to a square. The publisher begins at a random second; here the frames are from the middle of the video.
"""

from dataclasses import replace

import numpy as np

from fvc_lib.detectors.classical import Arrays, ClassicalModel, Labels, Settings, Values
from fvc_lib.detectors.probe import published
from fvc_lib.services.registry import DETECTORS, DetectorSpec


def volatility(features: Values) -> Values:
    """Return the standard deviation of second-order differences for each of N videos, float64 (N,).

    ``features`` are those of T frames per video, (N, T, F), T at least 4. A second-order difference is the difference
    of two successive distances between neighbouring frames.
    """
    distances = np.linalg.norm(np.diff(features, axis=1), axis=2)
    return np.asarray(np.diff(distances, axis=1).std(1, ddof=1))


def _fit(features: Values, labels: Labels, weights: Values, settings: Settings) -> Arrays:
    """Return the median and the standard deviation of the training videos' scores; labels are not used.

    They only shift and scale the scores, so the order of the scores does not change.
    """
    scores = volatility(features)
    spread = scores.std()
    return {"median": np.array([np.median(scores)]), "spread": np.array([spread if spread > 0 else 1.0])}


def _logits(arrays: Arrays, features: Values) -> Values:
    return np.asarray((arrays["median"] - volatility(features)) / arrays["spread"])


D3 = ClassicalModel(({},), _fit, _logits, per_frame=True, fewest_frames=4)  # for two second-order differences


_SPEC = published(
    DetectorSpec(
        name="d3",
        family="training-free",
        paper="C. Zheng et al., D3: Training-free AI-generated video detection using second-order features, ICCV 2025",
        bibtex="@inproceedings{zheng2025d3, title={{D3}: Training-Free {AI}-Generated Video Detection Using "
        "Second-Order Features}, author={Zheng, Chende and Suo, Ruiqi and Lin, Chenhao and Zhao, Zhengyu and others}, "
        "booktitle={ICCV}, year={2025}}",
        licence="this project's (the publisher's: MIT), and the trunk's",
        num_frames=16,
        side=224,
        normalisation="the trunk's",
        micro_batch=1,
        frame_sampling="rate:8",
        frame_fit="squash:0.8",
        of_features="embedding",
        estimator=D3,
    ),
    "xclip_b16",
)
DETECTORS.register(_SPEC)
DETECTORS.register(replace(_SPEC, name="d3:NAME"))
