"""``stall:TRUNK``: STALL, which calls a video fake if its frames or their changes are unlikely among real videos.

Nothing is trained, and no fake is looked at. Two Gaussians are fitted to the real videos of the training part: one to
the features of frames, one to the differences of neighbouring frames' features, divided by their length. A video has
two likelihoods: the largest of its frames under the first Gaussian, and the smallest of its differences under the
second. Each likelihood is replaced by the share of real training videos whose likelihood is not larger. The score is
the mean of both shares; a low score means fake.

As published, 16 frames are taken, 8 a second, and resized to a square. Unlike the published method, the frames are
from the middle of the video instead of a random place. The first Gaussian is fitted to the middle frame of every video
instead of a random one. The published Gaussians are fitted to 33,976 videos; with few videos the shares are coarse.
"""

from dataclasses import replace

import numpy as np

from fvc_lib.detectors.classical import Arrays, ClassicalModel, Labels, Settings, Values
from fvc_lib.detectors.probe import published
from fvc_lib.services.registry import DETECTORS, DetectorSpec

_LEAST_VARIANCE = 1e-5  # added to every variance, as published


def whitening(vectors: Values) -> tuple[Values, Values]:
    """Return the mean (F,) of N vectors (N, F), and the matrix (F, K) that whitens their differences from the mean.

    K is at most F and N - 1. Directions in which the vectors do not vary are left out.
    """
    mean = vectors.mean(0)
    _, singular, directions = np.linalg.svd(vectors - mean, full_matrices=False)
    varies = singular > singular.max() * np.finfo(float).eps * max(vectors.shape)
    varies[len(vectors) - 1 :] = False
    variances = singular[varies] ** 2 / (len(vectors) - 1)
    return mean, directions[varies].T / np.sqrt(variances + _LEAST_VARIANCE)


def log_likelihoods(vectors: Values, mean: Values, matrix: Values) -> Values:
    """Whiten ``vectors`` (..., F), and return the log of their density under a standard Gaussian, float64 (...).

    ``mean`` and ``matrix`` are the result of ``whitening``.
    """
    whitened = (vectors - mean) @ matrix
    return np.asarray(-0.5 * (matrix.shape[1] * np.log(2 * np.pi) + (whitened**2).sum(-1)))


def changes(features: Values) -> tuple[Values, Values]:
    """Return the differences of neighbouring frames' features (N, T, F), scaled to length 1, and their lengths.

    A difference of length 0 stays 0.

    Returns:
        A tuple: the scaled differences, float64 (N, T - 1, F), and their lengths before scaling, float64 (N, T - 1).
    """
    differences = np.diff(features, axis=1)
    lengths = np.linalg.norm(differences, axis=2)
    return differences / np.where(lengths > 0, lengths, 1.0)[:, :, None], lengths


def likelihoods(arrays: Arrays, features: Values) -> tuple[Values, Values]:
    """Return two log likelihoods for each of N videos with features (N, T, F), both float64 (N,).

    The first is the largest log likelihood of the video's frames. The second is the smallest log likelihood of the
    changes between neighbouring frames. Frames that equal their neighbour are left out; if all frames are equal, the
    second value is infinite. ``arrays`` holds the fitted Gaussians.
    """
    directions, lengths = changes(features)
    of_frames = log_likelihoods(features, arrays["frame_mean"], arrays["frame_matrix"])
    of_changes = log_likelihoods(directions, arrays["change_mean"], arrays["change_matrix"])
    return of_frames.max(1), np.where(lengths > 0, of_changes, np.inf).min(1)


def _fit(features: Values, labels: Labels, weights: Values, settings: Settings) -> Arrays:
    real = features[labels == 0]
    directions = changes(real)[0]
    frame_mean, frame_matrix = whitening(real[:, real.shape[1] // 2])
    change_mean, change_matrix = whitening(directions.reshape(-1, directions.shape[2]))
    arrays = {
        "frame_mean": frame_mean, "frame_matrix": frame_matrix,
        "change_mean": change_mean, "change_matrix": change_matrix,
    }  # fmt: skip
    of_changes = log_likelihoods(directions, change_mean, change_matrix).min(1)  # as published, equal frames included
    return {
        **arrays,
        "frame_likelihoods": np.sort(likelihoods(arrays, real)[0]),
        "change_likelihoods": np.sort(of_changes),
    }


def _logits(arrays: Arrays, features: Values) -> Values:
    """Return scores of N videos with features (N, T, F), float64 (N,), higher for fake.

    They are 0.5 minus the published score, which is higher for real videos.
    """
    of_frames, of_changes = likelihoods(arrays, features)
    found = [
        np.searchsorted(arrays[f"{kind}_likelihoods"], values, side="right") / len(arrays[f"{kind}_likelihoods"])
        for kind, values in (("frame", of_frames), ("change", of_changes))
    ]
    return np.asarray(0.5 - (found[0] + found[1]) / 2)


STALL = ClassicalModel(({},), _fit, _logits, per_frame=True, fewest_frames=2)


_SPEC = published(
    DetectorSpec(
        name="stall",
        family="training-free",
        paper="O. Ben Hayun et al., Training-free detection of generated videos via spatial-temporal likelihoods, CVPR "
        "2026",
        bibtex="@inproceedings{benhayun2026stall, title={Training-free Detection of Generated Videos via "
        "Spatial-Temporal Likelihoods}, author={Ben Hayun, Omer and Betser, Roy and Levi, Meir Yossef and Kassel, Levi "
        "and Gilboa, Guy}, booktitle={CVPR}, year={2026}}",
        licence="this project's (the publisher's: CC BY-NC 4.0), and the trunk's",
        num_frames=16,
        side=224,
        normalisation="the trunk's",
        micro_batch=1,
        frame_sampling="rate:8",
        frame_fit="squash",
        of_features="embedding",
        estimator=STALL,
    ),
    "dinov3_large",
)
DETECTORS.register(_SPEC)
DETECTORS.register(replace(_SPEC, name="stall:NAME"))
