"""A few whole groups of a corpus, for a trial before the long run."""

import hashlib
from collections.abc import Mapping, Sequence


def trial_groups(labels_of_group: Mapping[str, Sequence[str]], number: int, seed: int) -> frozenset[str]:
    """``number`` of the groups, or all: by turns one with a real and one with a fake video, in an order drawn by seed.

    The choice depends on the groups' names and ``seed`` alone, and a smaller number chooses among a larger one's.

    Args:
        labels_of_group: the labels of each group's videos.
        number: how many to take.
        seed: of the order.
    """
    order = sorted(labels_of_group, key=lambda group: hashlib.sha256(f"{seed} {group}".encode()).digest())
    queues = [[group for group in order if label in labels_of_group[group]] for label in ("real", "fake")]
    chosen: list[str] = []
    while len(chosen) < number and any(queues):
        for queue in queues:
            while queue and queue[0] in chosen:
                queue.pop(0)
            if queue and len(chosen) < number:
                chosen.append(queue.pop(0))
    return frozenset(chosen)
