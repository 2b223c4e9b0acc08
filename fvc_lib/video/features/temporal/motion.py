"""``motion``: what block matching between neighbouring frames leaves, and how the blocks' vectors lie.

Filmed things move; what a generator draws anew in each frame, or what was pasted and follows nothing, does not come out
as a shifted copy of the frame before. Of each tile the nine blocks of 16 x 16 pixels that are 8 pixels or more from its
edge are looked for in the next frame, up to 8 pixels away: on a quarter of the size first, then twice as fine, and
again (M. Bierling, Displacement estimation by hierarchical blockmatching, SPIE VCIP 1988). Whole pixels only, so that
smooth motion between pixels leaves a little of every edge.
"""

import numpy as np
import numpy.typing as npt

from fvc_lib.services.registry import FEATURES
from fvc_lib.video.features.family import Feature, FeatureFamily, Float32, Run

IntArray = npt.NDArray[np.int64]

BLOCK = 16  # pixels on a side
ACROSS = 3  # blocks in a row of a tile, and rows of them
MARGIN = 8  # pixels around them, and the longest vector along each axis
# Of what was found at half the size. With 1 in place of 2, blocks of smooth pictures that move by whole pixels are
# missed in 6 % of cases; so, in 0.1 %.
_REACH = 2
_STEPS = range(-_REACH, _REACH + 1)
# From near to far, so that of equally good vectors the shorter one is taken.
_OFFSETS = np.array(sorted(((y, x) for y in _STEPS for x in _STEPS), key=lambda each: each[0] ** 2 + each[1] ** 2))


def measure(run: Run) -> dict[str, Float32]:
    """Values (L - 1, N) by feature; of ``unsteady`` (L - 2, N)."""
    num_frames, num_tiles = run.luma.shape[:2]
    if num_frames < 2 or not num_tiles:
        return {each: np.empty(0, np.float32) for each in _NAMES}
    shape = (num_frames - 1, num_tiles)
    before, after = (frames.reshape(-1, *frames.shape[2:]) for frames in (run.luma[:-1], run.luma[1:]))
    vectors, residuals = match_blocks(before, after)
    inner = slice(MARGIN, -MARGIN)
    still = np.abs(after[:, inner, inner] - before[:, inner, inner]).mean((1, 2))
    residual = residuals.mean(1)
    off = vectors - vectors.mean(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):  # two equal tiles leave nothing to explain: NaN
        unexplained = np.where(still > 0, residual / still, np.nan)
        of_pairs = residual.reshape(shape)
        unsteady = np.abs(np.diff(of_pairs, axis=0)) / (of_pairs[1:] + of_pairs[:-1])
    return {
        "residual": of_pairs,
        "residual_spread": residuals.std(1).reshape(shape),
        "unexplained": unexplained.reshape(shape),
        "speed": np.hypot(vectors[..., 0], vectors[..., 1]).mean(1).reshape(shape),
        "disorder": np.hypot(off[..., 0], off[..., 1]).mean(1).reshape(shape),
        "unsteady": unsteady,
    }


def match_blocks(before: Float32, after: Float32) -> tuple[Float32, Float32]:
    """Where the blocks of tiles lie in the next frame.

    Args:
        before: float32 (P, 64, 64), tiles of a frame.
        after: the same places in the frame behind it.

    Returns:
        float32 (P, 9, 2), down and right in pixels, at most 8; float32 (P, 9), mean absolute difference there.
    """
    halves = _halved(before), _halved(after)
    quarters = _halved(halves[0]), _halved(halves[1])
    vectors = np.zeros((len(before), ACROSS**2, 2), np.int64)
    for scale, (one, other) in ((4, quarters), (2, halves), (1, (before, after))):
        limit = MARGIN // scale - _REACH
        vectors = np.clip(2 * vectors, -limit, limit)
        vectors, residuals = _search(one, other, BLOCK // scale, MARGIN // scale, vectors)
    return vectors.astype(np.float32), residuals


def _search(before: Float32, after: Float32, block: int, margin: int, centres: IntArray) -> tuple[IntArray, Float32]:
    """The best vectors (P, 9, 2) at most 2 from ``centres`` along each axis, and what they leave (P, 9)."""
    inner = before[:, margin:-margin, margin:-margin].reshape(-1, ACROSS, block, ACROSS, block)
    blocks = inner.swapaxes(2, 3).reshape(-1, ACROSS**2, block, block)
    firsts = margin + block * np.arange(ACROSS)
    tops, lefts = np.repeat(firsts, ACROSS) - _REACH, np.tile(firsts, ACROSS) - _REACH
    side = block + 2 * _REACH
    windows = np.lib.stride_tricks.sliding_window_view(after, (side, side), (1, 2))
    around = windows[np.arange(len(after))[:, None], tops + centres[..., 0], lefts + centres[..., 1]]
    sums = np.empty((len(_OFFSETS), *blocks.shape[:2]), np.float32)
    for number, (down, right) in enumerate((_OFFSETS + _REACH).tolist()):
        difference = around[..., down : down + block, right : right + block] - blocks
        sums[number] = np.abs(difference, out=difference).sum((2, 3))
    best = sums.argmin(0)
    return centres + _OFFSETS[best], np.take_along_axis(sums, best[None], 0)[0] / block**2


def _halved(tiles: Float32) -> Float32:
    """(P, H / 2, W / 2): means of 2 x 2 pixels."""
    rows = tiles[:, ::2] + tiles[:, 1::2]
    return np.asarray((rows[:, :, ::2] + rows[:, :, 1::2]) / 4)


_FEATURES = (
    Feature("residual", "grey levels", "Mean absolute difference of blocks and their best match in the next frame."),
    Feature("residual_spread", "grey levels", "Standard deviation of that difference over the nine blocks of a tile."),
    Feature("unexplained", "ratio", "That difference over the one without motion: what block matching cannot explain."),
    Feature("speed", "pixels per frame", "Mean length of the blocks' motion vectors, at most 8 along each axis.", True),
    Feature("disorder", "pixels per frame", "Mean distance of a block's vector from the mean of its tile.", True),
    Feature("unsteady", "share", "How much the residual changes from one pair to the next: difference over sum."),
)
_NAMES = tuple(each.name for each in _FEATURES)

FEATURES.register(
    FeatureFamily(
        name="motion",
        paper="Bestagini et al., Local tampering detection in video sequences, MMSP 2013",
        features=_FEATURES,
        measure=measure,
        of="pairs",
    )
)
