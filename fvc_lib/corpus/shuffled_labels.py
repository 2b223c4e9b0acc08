"""Labels shuffled by group: what an honest pipeline must score chance on."""

import numpy as np
import numpy.typing as npt
import polars as pl

from fvc_lib.services.tables import FOLDS, check_table

_STREAM = 2  # of the seed's random numbers; corpus.folds takes 0 and 1


def shuffle_labels_by_group(folds: pl.DataFrame, seed: int) -> pl.DataFrame:
    """The same folds with labels permuted among the groups of each fold: what an honest pipeline scores chance on.

    All videos of a group get one label. A fold with groups of one label each keeps its number of real and fake
    groups, so it is a permutation; groups with both labels count as the fraction that is fake, and the sum is
    rounded. Permuting within folds keeps both labels in every fold of at least two groups, and keeps a fold's test
    labels from being the complement of its training labels, which would push pooled scores below chance.

    In every fold the new labels are spread evenly over the old ones (a balanced permutation, Southworth, Kim and Owen
    2009). A plain one agrees with the true labels by chance, more in one fold and less in another, and a network that
    can tell the true labels then scores away from chance, either way, without any leak. How much narrower the balanced
    one scatters was not measured: over six of them the AUC still had a standard deviation of 0.09.

    Returns:
        FOLDS table sorted by ``video_id`` with the same groups and folds.
    """
    # A group that an official split has in two parts gets one label for both.
    home = folds.with_columns(pl.col("fold").min().over("group_id"))
    groups = home.group_by("group_id", "fold").agg((pl.col("label") == "fake").mean().alias("fake_share"))
    generator = np.random.default_rng([seed, _STREAM])
    drawn = []
    for members in groups.sort("fold", "group_id").partition_by("fold", maintain_order=True):
        labels = _draw_labels(members["fake_share"].to_numpy(), generator)
        drawn.append(members.select("group_id", pl.Series("label", labels, dtype=pl.String)))
    table = pl.concat(drawn)
    shuffled = folds.sort("video_id").drop("label").join(table, on="group_id", how="left", maintain_order="left")
    return check_table(shuffled.select(*FOLDS.columns), FOLDS, "shuffled folds")


def _draw_labels(fake_shares: npt.NDArray[np.float64], generator: np.random.Generator) -> list[str]:
    num_groups = len(fake_shares)
    # Half-way sums go up or down by chance, so that folds of one mixed group are not all of one label.
    num_fake = int(np.floor(round(float(fake_shares.sum()), 9) + generator.random()))
    if num_groups >= 2:
        num_fake = min(max(num_fake, 1), num_groups - 1)
    # Systematic sampling over the groups in the order of their old labels, equal ones in random order.
    order = np.lexsort((generator.permutation(num_groups), fake_shares))
    drawn = np.floor((np.arange(num_fake) + generator.random()) * num_groups / max(num_fake, 1)).astype(int)
    fakes = set(order[drawn].tolist())
    return ["fake" if group in fakes else "real" for group in range(num_groups)]
