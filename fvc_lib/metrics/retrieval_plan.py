"""In what blocks the similarities of all videos and texts are streamed through a given amount of memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

_MOST_VIDEOS, _MOST_TEXTS = 1024, 1024  # of a block: its scores, 4 MB, stay in the cache and calls cost little
MOST_TEXTS = 8 * 255  # a row's answers are summed up in bytes, eight at a time
_LEAST = 16
_SHARE_PLANNED = 0.8  # of what is free beside what is kept: allocators leave holes
ROWS_AT_ONCE = 128  # that are converted into another format, and stay in the cache
VIDEOS_AT_ONCE = 256  # that are multiplied limb by limb
_FIXED_BYTES = 10_000_000  # what settling single pairs takes, and small arrays
_BYTES_PER_ROW = 160  # positives, norms and counts of both directions, with one pair per video
_BYTES_PER_MORE_PAIR = 165


@dataclass(frozen=True)
class RetrievalPlan:
    """How a retrieval is streamed; the result does not depend on it.

    Attributes:
        num_videos: rows of the dense matrix.
        num_texts: its columns.
        dimensions: numbers per embedding.
        video_block: videos per block.
        text_block: texts per block.
        text_panel: texts that are converted once for all videos, a whole number of blocks.
        more_pairs: pairs that belong together beyond one per video.
    """

    num_videos: int
    num_texts: int
    dimensions: int
    video_block: int
    text_block: int
    text_panel: int
    more_pairs: int = 0

    def __post_init__(self) -> None:
        if min(self.video_block, self.text_block, self.text_panel) < 1 or self.text_block > MOST_TEXTS:
            raise ValueError(
                f"blocks of {self.video_block} x {self.text_block} in panels of {self.text_panel} texts; "
                f"give sizes from 1 on, and blocks of {MOST_TEXTS} texts at most"
            )

    @property
    def streamed_bytes(self) -> int:
        """About what is taken at most: a block, its operands, the panel's limbs, and some numbers per row."""
        block = _block_bytes(self.video_block, self.text_block, self.text_panel, self.dimensions)
        return block + _kept_bytes(self.num_videos + self.num_texts, self.more_pairs)

    @property
    def dense_bytes(self) -> int:
        """What all similarities would take at once, as float32."""
        return 4 * self.num_videos * self.num_texts

    def describe(self) -> str:
        """Lines for the log: what was gathered, what the dense matrix would have taken, how it is streamed."""
        blocks = _parts(self.num_videos, self.video_block) * _parts(self.num_texts, self.text_block)
        size = _size(self.streamed_bytes)
        lines = (
            f"samples accumulated: {self.num_videos:,} of {self.dimensions:,} numbers",
            f"unique texts: {self.num_texts:,}",
            f"dense similarities would take: {_size(self.dense_bytes)} as float32",
            f"streamed: {blocks:,} block{'s' * (blocks > 1)} of {self.video_block:,} x {self.text_block:,} in {size}",
        )
        return "\n".join(lines)


def plan_retrieval(
    num_videos: int, num_texts: int, dimensions: int, memory_bytes: int, more_pairs: int = 0
) -> RetrievalPlan:
    """The largest blocks that fit into ``memory_bytes`` and the cache.

    Raises:
        ValueError: not even blocks of 16 x 16 fit.
    """
    needed = least_memory_bytes(num_videos, num_texts, dimensions, more_pairs)
    if memory_bytes < needed:
        raise ValueError(
            f"memory_bytes={memory_bytes:,} is too little for {num_videos:,} videos and {num_texts:,} texts of "
            f"{dimensions:,} numbers, {num_videos + more_pairs:,} pairs of which belong together; give at least "
            f"{needed:,} (of a run: retrieval_memory_mb {math.ceil(needed / 1e6)})"
        )
    free = memory_bytes - _kept_bytes(num_videos + num_texts, more_pairs)
    videos, texts = min(_MOST_VIDEOS, num_videos), min(_MOST_TEXTS, num_texts)
    while _block_bytes(videos, texts, texts, dimensions) > free:
        if videos >= texts:
            videos = math.ceil(videos / 2)
        else:
            texts = math.ceil(texts / 2)
    blocks = _parts(num_texts, texts)
    while blocks > 1 and _block_bytes(videos, texts, texts * blocks, dimensions) > _SHARE_PLANNED * free:
        blocks -= 1
    return RetrievalPlan(num_videos, num_texts, dimensions, videos, texts, texts * blocks, more_pairs)


def least_memory_bytes(num_videos: int, num_texts: int, dimensions: int, more_pairs: int = 0) -> int:
    """The least that ``plan_retrieval`` accepts for such sizes, so that who will measure later may ask before."""
    videos, texts = min(_LEAST, num_videos), min(_LEAST, num_texts)
    return _kept_bytes(num_videos + num_texts, more_pairs) + _block_bytes(videos, texts, texts, dimensions)


def _kept_bytes(num_rows: int, more_pairs: int) -> int:
    return _FIXED_BYTES + _BYTES_PER_ROW * num_rows + _BYTES_PER_MORE_PAIR * more_pairs


def _parts(whole: int, part: int) -> int:
    return math.ceil(whole / part)


def _block_bytes(videos: int, texts: int, panel: int, dimensions: int) -> int:
    """What the blocks of one panel take at most.

    Scores as float64, masks of whole blocks and of parts, and sums of limbs. Then either both operands as float32 and
    once more as float64, or the videos' and the panel's limbs and what is being converted.
    """
    in_doubles = (videos + texts) * dimensions * 12
    in_limbs = (videos + panel) * dimensions * 3 + (max(videos, texts) + 2 * ROWS_AT_ONCE) * dimensions * 4
    return videos * texts * (8 + 3) + VIDEOS_AT_ONCE * texts * 4 + max(in_doubles, in_limbs)


def _size(num_bytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB"
