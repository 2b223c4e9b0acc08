"""``repeats``: features of neighbouring frames that are (nearly) equal, and of jumps where frames were left out.

Only frames of the same run (a few consecutive frames) are compared. The family ``packets`` uses all frames of a video,
but only the sizes of their packets.
"""

import numpy as np

from fvc_lib.services.registry import FEATURES
from fvc_lib.video.features.family import Feature, FeatureFamily, Run, Values

_FEWEST = 3  # least number of frames for ``dip`` and ``jump``, which compare a pair with other pairs
_FLOOR = 0.05  # grey levels, added before the logarithm, so that tiny differences in still scenes do not matter


def measure(run: Run) -> dict[str, Values]:
    """Return a mapping from the features of ``repeats`` to their values for a run of L frames.

    For each pair of neighbouring frames, shape (L - 1,): ``equal`` (1 if all compared pixels are equal),
    ``equal_tiles`` (share of equal tiles) and ``difference`` (mean absolute difference of tiles, in grey levels).

    For the run, shape (1,), or (0,) for fewer than 3 frames: ``dip`` and ``jump``. They compare binary logarithms of
    ``difference``. ``dip`` is the median of the other pairs minus the smallest value; it is large if a frame was
    repeated. ``jump`` is the largest value minus the median of the other pairs; it is large if frames were left out.

    If the run has no tiles, all features except ``equal`` are empty arrays.
    """
    num_pairs, num_tiles = len(run.luma) - 1, run.luma.shape[1]
    tiles = np.abs(run.luma[1:] - run.luma[:-1]).mean((2, 3))  # (L - 1, N)
    equal = ((run.small[1:] == run.small[:-1]).all((1, 2)) & (tiles == 0).all(1)).astype(np.float64)
    if not num_tiles:
        return {"equal": equal, **dict.fromkeys(("equal_tiles", "difference", "dip", "jump"), np.empty(0))}
    difference = tiles.mean(1)
    logarithm = np.sort(np.log2(difference + _FLOOR))
    has_others = num_pairs + 1 >= _FEWEST
    return {
        "equal": equal,
        "equal_tiles": (tiles == 0).mean(1),
        "difference": difference,
        "dip": np.atleast_1d(np.median(logarithm[1:]) - logarithm[:1]) if has_others else np.empty(0),
        "jump": np.atleast_1d(logarithm[-1:] - np.median(logarithm[:-1])) if has_others else np.empty(0),
    }


FEATURES.register(
    FeatureFamily(
        name="repeats",
        paper="Wang and Farid, Exposing digital forgeries in video by detecting duplication, MM&Sec 2007",
        features=(
            Feature("equal", "share", "Pairs of neighbouring frames that are equal in every compared pixel."),
            Feature("equal_tiles", "share", "Tiles of a frame that equal those of the frame before."),
            Feature("difference", "grey levels", "Mean absolute difference of neighbouring frames."),
            Feature("dip", "binary logarithm", "How much less the most alike pair differs than the others of its run."),
            Feature("jump", "binary logarithm", "How much more the most different pair differs than the others."),
        ),
        measure=measure,
        of="pairs",
    )
)
