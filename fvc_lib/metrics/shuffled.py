"""What scores reach that have nothing to do with the labels: AUCs after labels are dealt to other groups."""

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

from fvc_lib.metrics.classification import FloatArray, check_labels, check_scores, divide
from fvc_lib.metrics.intervals import group_codes


def shuffled_label_aucs(
    labels: npt.ArrayLike, scores: npt.ArrayLike, groups: npt.ArrayLike, *, num: int = 200, seed: int = 0
) -> FloatArray:
    """AUCs of D scores in ``num`` deals of the labels, the same deals for all: (D, num), NaN where a class is empty.

    The groups' shares of fakes are permuted among the groups. In a group with both labels each row is then drawn
    with the share it was dealt, so that groups of one label stay so.

    Args:
        labels: int (N,) of 0 (real) and 1 (fake).
        scores: float (N, D).
        groups: (N,) of group ids.
        num: deals.
        seed: of the deals.

    Raises:
        ValueError: labels, scores or groups that cannot be meant.
    """
    checked = check_labels(labels)
    table = np.asarray(scores, dtype=np.float64)
    if table.ndim != 2:
        raise ValueError(f"scores: got shape {table.shape}, wanted (N, D).")
    ranks = np.stack([rankdata(check_scores(column, checked.size)) for column in table.T], axis=1)
    group_of_row, num_groups = group_codes(groups, checked.size)
    shares = np.bincount(group_of_row, weights=checked) / np.bincount(group_of_row, minlength=num_groups)
    generator = np.random.default_rng([seed, 2])
    found = np.empty((table.shape[1], num))
    for deal in range(num):
        is_fake = generator.random(checked.size) < generator.permutation(shares)[group_of_row]
        fakes = float(is_fake.sum())
        won = is_fake.astype(np.float64) @ ranks - fakes * (fakes + 1) / 2  # Mann and Whitney's U
        found[:, deal] = divide(won, np.array(fakes * (checked.size - fakes)))
    return found
