"""``double_compression``: coefficients that lie at multiples of one step, as quantisation leaves them.

A picture that was compressed before, by a codec whose blocks lie in the same grid, keeps combs in the histograms of its
coefficients. Video limits this: H.264 and its successors quantise differences from a prediction out of neighbouring or
earlier pixels, so that the picture itself lies on no lattice but where the prediction is flat. Strong combs are left
by JPEG, MPEG-2 and MPEG-4 in frames without prediction, and by H.264 in smooth and still parts; later compression
with larger steps blurs them. The first frame of a run may be of any type: of a video look at the largest values.
"""

import numpy as np

from fvc_lib.services.registry import FEATURES
from fvc_lib.video.features.family import Feature, FeatureFamily, Float32, Pixels
from fvc_lib.video.features.spatial.block_transform import cosine_transform

_BINS_PER_LEVEL = 4
_MOST = 128  # grey levels: larger coefficients are too few to tell a comb
_BINS = _MOST * _BINS_PER_LEVEL
_CENTRES = np.arange(_BINS) / _BINS_PER_LEVEL
# Of whole grey levels some frequencies are multiples of an eighth, half of them at the limit of two bins: these go up.
_ROUND = np.float32(0.54)
_STEPS = 3 * 2 ** (np.arange(0, 4.01, 0.125))  # 3 to 48 grey levels
# Of a size in a bin (row) and a step (column): in the comb or between its teeth, of those beyond the first half step,
# whose number nothing but the scale of the distribution decides, up to the sixth tooth, where steps close by part.
_PHASE = _CENTRES[:, None] / _STEPS
_COUNTED = ((_PHASE > 0.5) & (_PHASE < 6.5)).astype(np.float32)
_COMB = (np.cos(2 * np.pi * _PHASE) * _COUNTED).astype(np.float32)


def measure(luma: Float32, _rgb: Pixels) -> dict[str, Float32]:
    """Values (N,) by feature."""
    histograms8 = _histograms(luma, 8, 4)
    comb8 = _combs(histograms8.sum(1))  # one step for all frequencies, as H.26x quantises
    comb4 = _combs(_histograms(luma, 4, 2).sum(1))
    is_flat = histograms8[:, :, _BINS_PER_LEVEL:].sum((1, 2)) == 0  # no coefficient of a grey level
    values = {
        "same_step": comb8.max(1),
        "own_steps": _combs(histograms8).max(2).mean(1),
        "fine_blocks": comb4.max(1),
        "step": _STEPS[comb8.argmax(1)],
    }
    return {name: np.where(is_flat, np.nan, value).astype(np.float32) for name, value in values.items()}


def _histograms(luma: Float32, side: int, highest: int) -> Float32:
    """(N, F, bins): sizes of coefficients by frequency, all of which row + column are 1 to ``highest``."""
    order = np.add.outer(np.arange(side), np.arange(side))
    sizes = np.abs(cosine_transform(luma, side)[:, :, (order > 0) & (order <= highest)])  # (N, B, F)
    count, _, frequencies = sizes.shape
    bins = np.minimum(sizes * np.float32(_BINS_PER_LEVEL) + _ROUND, _BINS).astype(np.int64)  # the last for all beyond
    row = np.arange(count)[:, None, None] * frequencies + np.arange(frequencies)
    counts = np.bincount((row * (_BINS + 1) + bins).ravel(), minlength=count * frequencies * (_BINS + 1))
    return counts.reshape(count, frequencies, _BINS + 1)[:, :, :_BINS].astype(np.float32)


def _combs(histograms: Float32) -> Float32:
    """(..., steps): how far sizes lie at multiples of each step, in standard deviations of values that lie anywhere."""
    return np.asarray((histograms @ _COMB) / np.sqrt(np.maximum(histograms @ _COUNTED, 1) / 2))


_UNIT = "standard deviations"
FEATURES.register(
    FeatureFamily(
        name="double_compression",
        paper="Popescu and Farid, Statistical tools for digital forensics, IH 2004; "
        "Wang and Farid, Exposing digital forgeries in video by detecting double MPEG compression, MM&Sec 2006",
        features=(
            Feature(
                "same_step",
                _UNIT,
                "How far coefficients of 8 x 8 blocks lie at multiples of one step.",
                size_proxy=True,
            ),
            Feature("own_steps", _UNIT, "The same where each frequency may have a step of its own.", size_proxy=True),
            Feature("fine_blocks", _UNIT, "How far coefficients of 4 x 4 blocks lie at multiples of one step."),
            Feature("step", "grey levels", "The step at whose multiples coefficients of 8 x 8 blocks lie most."),
        ),
        measure=measure,
        of="tiles",
    )
)
