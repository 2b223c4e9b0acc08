"""``repeats``: neighbouring frames that are equal or all but equal, and jumps where frames were left out.

Only the frames of the runs are compared; ``packets`` sees every frame of the video, by its size alone.
"""

import numpy as np
import numpy.typing as npt

from fvc_lib.services.registry import FEATURES
from fvc_lib.video.features.family import Feature, FeatureFamily, Run

Values = npt.NDArray[np.floating]

_FEWEST = 3  # frames: with a single pair there is nothing to compare it with
_FLOOR = 0.05  # grey levels, added before a logarithm: a still picture's pairs are all alike


def measure(run: Run) -> dict[str, Values]:
    """Values (L - 1,) by feature, one per pair; of ``dip`` and ``jump`` (1,), one per run of 3 frames or more."""
    num_pairs, num_tiles = len(run.luma) - 1, run.luma.shape[1]
    tiles = np.abs(run.luma[1:] - run.luma[:-1]).mean((2, 3))  # (L - 1, N)
    equal = (run.small[1:] == run.small[:-1]).all((1, 2)) & (tiles == 0).all(1)
    if not num_tiles:
        missing = np.empty(0)
        return {
            "equal": equal.astype(np.float64),
            **dict.fromkeys(("equal_tiles", "difference", "dip", "jump"), missing),
        }
    difference = tiles.mean(1)
    logarithm = np.sort(np.log2(difference + _FLOOR))
    has_others = num_pairs + 1 >= _FEWEST
    others = np.array([np.median(logarithm[1:]), np.median(logarithm[:-1])]) if has_others else np.empty((2, 0))
    return {
        "equal": equal.astype(np.float64),
        "equal_tiles": (tiles == 0).mean(1),
        "difference": difference,
        "dip": np.atleast_1d(others[0] - logarithm[:1]) if has_others else np.empty(0),
        "jump": np.atleast_1d(logarithm[-1:] - others[1]) if has_others else np.empty(0),
    }


_FEATURES = (
    Feature("equal", "share", "Pairs of neighbouring frames that are equal in every pixel that was looked at."),
    Feature("equal_tiles", "share", "Tiles of a frame that are equal to those of the frame before."),
    Feature("difference", "grey levels", "Mean absolute difference of neighbouring frames."),
    Feature("dip", "binary logarithm", "How much less than in the others of its run the least pair differs."),
    Feature("jump", "binary logarithm", "How much more than in the others of its run the most different pair differs."),
)

FEATURES.register(
    FeatureFamily(
        name="repeats",
        paper="Wang and Farid, Exposing digital forgeries in video by detecting duplication, MM&Sec 2007",
        features=_FEATURES,
        measure=measure,
        of="pairs",
    )
)
