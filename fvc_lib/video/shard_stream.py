"""Read shards one after the other in a shuffled order, shared among ranks and workers, from any position on.

The order of an epoch is a pure function of seed, epoch and manifest, so nothing has to be buffered, drawn or replayed:
the shards are shuffled, and within each few neighbours of that order all clips are. The ranks get consecutive parts of
the whole, which differ by one clip at most; each rank so reads its own part of the shards. Together they give every
clip exactly once an epoch, and a rank's sequence does not depend on how many workers read it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fvc_lib.video.clip_file import Pixels
from fvc_lib.video.shard_reading import ClipShards
from fvc_lib.video.shards import ClipRecord

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StreamPosition:
    """How far a rank has come: the epoch, and the clips it has been given of it. Saved, it resumes there exactly."""

    epoch: int = 0
    taken: int = 0


@dataclass(frozen=True)
class StreamedClip:
    """A clip, uint8 (T, 3, S, S), its row, and the position after it."""

    record: ClipRecord
    frames: Pixels
    position: StreamPosition


@dataclass(frozen=True)
class ClipStream:
    """One rank's shuffled sequence of clips, epoch after epoch.

    Attributes:
        shards: where the clips are.
        seed: of the shuffling.
        rank: which of ``world_size`` equal readers this is.
        shards_at_once: clips are shuffled among so many shards that are neighbours in the epoch's order.
        wanted: whether (video id, augmentation index) takes part, for example those of a fold; none: all.
    """

    shards: ClipShards
    seed: int
    rank: int = 0
    world_size: int = 1
    shards_at_once: int = 4
    wanted: Callable[[str, int], bool] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size or self.shards_at_once < 1:
            raise ValueError(
                f"clip stream: got rank {self.rank} of {self.world_size} and {self.shards_at_once} shards at once, "
                "wanted 0 <= rank < world_size and at least one shard"
            )

    def __len__(self) -> int:
        """Clips this rank is given in an epoch."""
        count = sum(len(numbers) for numbers in self._numbers_by_shard())
        return self._end(self.rank + 1, count) - self._end(self.rank, count)

    def order(self, epoch: int) -> IntArray:
        """int64 (len(self),): the clips of this rank in ``epoch``, as numbered in ``shards.clips``, in order."""
        generator = np.random.default_rng(_seed(self.seed, epoch))
        by_shard = self._numbers_by_shard()
        shuffled = generator.permutation(len(by_shard)).tolist()
        groups = [
            shuffled[start : start + self.shards_at_once] for start in range(0, len(shuffled), self.shards_at_once)
        ]
        parts = [generator.permutation(np.concatenate([by_shard[shard] for shard in group])) for group in groups]
        whole = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        return whole[self._end(self.rank, whole.size) : self._end(self.rank + 1, whole.size)]

    def clips(self, start: StreamPosition, *, worker: int = 0, num_workers: int = 1) -> Iterator[StreamedClip]:
        """The rest of ``start``'s epoch: of the clips still to come, numbers worker, worker + num_workers, ...

        Taking one clip of each worker in turn gives the sequence of a single worker.

        Raises:
            DataError: a shard is missing, damaged or holds what it must not; no clip of it was given.
        """
        order = self.order(start.epoch)
        for place in range(start.taken + worker, order.size, num_workers):
            number = int(order[place])
            position = StreamPosition(start.epoch, place + 1)
            yield StreamedClip(self.shards.record_number(number), self.shards.load_number(number), position)

    def _numbers_by_shard(self) -> list[IntArray]:
        wanted = np.array([self.wanted is None or self.wanted(*clip) for clip in self.shards.clips], bool)
        numbers = np.arange(wanted.size)
        counts = [len(shard.clips) for shard in self.shards.manifest.shards]
        parts = np.split(numbers, np.cumsum(counts)[:-1]) if counts else []
        return [part[wanted[part]] for part in parts]

    def _end(self, rank: int, count: int) -> int:
        """Where the part of the rank before ``rank`` ends in the whole of ``count`` clips."""
        return rank * count // self.world_size


def _seed(seed: int, epoch: int) -> int:
    key = json.dumps(["clip stream", seed, epoch])
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "big")
