"""One pass over all similarities for both directions of retrieval."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from fvc_lib.metrics.retrieval_counting import Block, Direction
from fvc_lib.metrics.retrieval_exact import rows_between
from fvc_lib.metrics.retrieval_filters import Filter, Operand, filters_of
from fvc_lib.metrics.retrieval_plan import RetrievalPlan
from fvc_lib.metrics.weighting import FloatArray

_ALONE = threading.RLock()


@dataclass
class Stream:
    """Counts for both directions what is at least as similar as each positive.

    Attributes:
        videos: (N, D).
        texts: (M, D).
        norms: of the videos, float64 (N,), and of the texts, float64 (M,); not less than the true ones.
        directions: with the videos and with the texts as queries.
        plan: the blocks.
        device: where they are multiplied and compared.
        filters: formats to try, the fastest first.
        blocks_by_filter: how many blocks each format counted.
    """

    videos: torch.Tensor
    texts: torch.Tensor
    norms: tuple[FloatArray, FloatArray]
    directions: tuple[Direction, Direction]
    plan: RetrievalPlan
    device: torch.device
    filters: tuple[Filter, ...] = ()
    blocks_by_filter: dict[str, int] = field(default_factory=dict)

    def run(self, progress: Callable[[int, int], None] | None) -> None:
        """Count all blocks; ``progress(done, total)`` is told the pairs after each row of blocks."""
        largest = self.plan.video_block * self.plan.text_block
        self._scores = torch.empty(largest, dtype=torch.float64, device=self.device)
        self.filters = self.filters or filters_of(self.device, self.plan.dimensions)
        done, total = 0, self.plan.num_videos * self.plan.num_texts
        for panel in _parts(0, self.plan.num_texts, self.plan.text_panel):
            converted: dict[tuple[str, int], Operand] = {}
            for start, stop in _parts(0, self.plan.num_videos, self.plan.video_block):
                self._count_row(start, stop, panel, converted)
                done += (stop - start) * (panel[1] - panel[0])
                if progress is not None:
                    progress(done, total)
        del self._scores
        for direction in self.directions:
            direction.forget_masks()

    def describe(self) -> str:
        """A line for the log: what it took."""
        blocks = ", ".join(f"{number:,} in {name}" for name, number in self.blocks_by_filter.items())
        compared = sum(direction.compared for direction in self.directions)
        return f"similarities: blocks {blocks}; {compared:,} pairs settled one by one without rounding"

    def _count_row(
        self, start: int, stop: int, panel: tuple[int, int], converted: dict[tuple[str, int], Operand]
    ) -> None:
        """The blocks of videos ``[start, stop)`` and the texts of ``panel``, whose conversions are kept."""
        chosen, videos = self._choose(start, stop, panel, converted)
        for first, last in _parts(*panel, self.plan.text_block):
            block = self._block(chosen, start, videos, first, last, converted)
            for direction in self.directions:
                direction.count(block)
            self.blocks_by_filter[chosen.name] = self.blocks_by_filter.get(chosen.name, 0) + 1

    def _choose(
        self, start: int, stop: int, panel: tuple[int, int], converted: dict[tuple[str, int], Operand]
    ) -> tuple[Filter, Operand]:
        """The fastest format that leaves few pairs open, by a sample of the first block; and the videos in it."""
        first, last = panel[0], min(panel[0] + self.plan.text_block, panel[1])
        rows, norms = self._rows(self.videos, start, stop), self.norms[0][start:stop]
        for kind in self.filters:
            videos = kind.operand(rows, norms)
            if kind is self.filters[-1]:
                break
            block = self._block(kind, start, videos.part(0, 64), first, last, converted)
            if sum(direction.open_share(block) for direction in self.directions) <= kind.open_share:
                break
        return kind, videos

    def _block(
        self,
        kind: Filter,
        start: int,
        videos: Operand,
        first: int,
        last: int,
        converted: dict[tuple[str, int], Operand],
    ) -> Block:
        texts = converted.get((kind.name, first))
        if texts is None:
            texts = kind.operand(self._rows(self.texts, first, last), self.norms[1][first:last])
            if texts.values.element_size() == 1:  # the others take too much, or nothing to make
                converted[kind.name, first] = texts
        shape = len(videos.values), len(texts.values)
        scores = self._scores.view(kind.scores)[: shape[0] * shape[1]].view(shape)
        kind.multiply(videos, texts, scores)
        dimensions = self.plan.dimensions
        margins = kind.margin(videos, texts, dimensions), kind.margin(texts, videos, dimensions)
        return Block(scores, videos.scale * texts.scale, (start, first), margins, kind.dtype == torch.int8)

    def _rows(self, embeddings: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return rows_between(embeddings, start, stop).to(self.device).contiguous()


@contextmanager
def one_thread() -> Iterator[None]:
    """For work of small steps, a millisecond or less each, between which other threads would only wait and spin.

    Who calls it from several threads waits: two at once would each give back the other's limit for good.
    """
    with _ALONE:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with threadpool_limits(1, user_api="blas"):
                yield
        finally:
            torch.set_num_threads(before)


def _parts(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + size, stop)) for first in range(start, stop, size))


def measure_norms(embeddings: torch.Tensor, rows_at_once: int) -> FloatArray:
    """float64 (R,): the norm of each row, or a trace more; infinite or NaN where a number is."""
    found = np.empty(len(embeddings))
    for start, stop in _parts(0, len(embeddings), rows_at_once):
        rows = rows_between(embeddings, start, stop)
        found[start:stop] = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).cpu().numpy()
    return found * (1 + embeddings.shape[1] * 2.0**-52)
