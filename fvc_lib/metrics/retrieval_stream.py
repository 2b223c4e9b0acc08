"""One pass over all similarities for both directions of retrieval."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from fvc_lib.metrics.retrieval_counting import Block, Direction
from fvc_lib.metrics.retrieval_filters import Filter, Operand, filters_of
from fvc_lib.metrics.retrieval_masks import Masks
from fvc_lib.metrics.retrieval_plan import VIDEOS_AT_ONCE, RetrievalPlan
from fvc_lib.metrics.retrieval_positives import Positives
from fvc_lib.metrics.retrieval_rows import Rows
from fvc_lib.metrics.weighting import FloatArray

_ALONE = threading.RLock()
_SAMPLED_VIDEOS, _SAMPLED_TEXTS = 64, 128  # of a row of blocks, to see how many pairs a format leaves open


class Stream:
    """Counts for both directions what is at least as similar as each positive.

    Attributes:
        videos: (N, D).
        texts: (M, D).
        directions: with the videos and with the texts as queries.
        plan: the blocks.
        device: where they are multiplied and compared.
        filters: formats to try, the fastest first.
        blocks_by_filter: how many blocks each format counted.
    """

    def __init__(
        self,
        videos: Rows,
        texts: Rows,
        positives: tuple[Positives, Positives],
        plan: RetrievalPlan,
        device: torch.device,
    ) -> None:
        self.videos, self.texts, self.plan, self.device = videos, texts, plan, device
        self._masks = Masks(plan.video_block, plan.text_block)
        self.directions = Direction(positives[0], 0, self._masks), Direction(positives[1], 1, self._masks)
        self.filters = filters_of(device, plan.dimensions)
        self.blocks_by_filter: dict[str, int] = {}
        self._converted: dict[int, Operand] = {}  # texts of the panel, by the first of each block
        self._converted_by: Filter | None = None
        self._sampled: dict[Filter, Operand] = {}  # some texts of the panel

    def run(self, progress: Callable[[int, int], None] | None) -> None:
        """Count all blocks; ``progress(done, total)`` is told the pairs after each row of blocks."""
        self._scores = self._room_for_scores(torch.float32)
        scratch = VIDEOS_AT_ONCE * self.plan.text_block if any(kind.limbs > 1 for kind in self.filters) else 0
        self._scratch = torch.empty(scratch, dtype=torch.int32, device=self.device)
        kept = max(kind.limbs for kind in self.filters) * self.plan.text_panel * self.plan.dimensions
        self._panel = torch.empty(kept, dtype=torch.int8, device=self.device)  # once: pieces would leave holes
        done, total = 0, self.plan.num_videos * self.plan.num_texts
        for panel in _parts(0, self.plan.num_texts, self.plan.text_panel):
            self._converted.clear()
            self._sampled.clear()
            for start, stop in _parts(0, self.plan.num_videos, self.plan.video_block):
                self._count_row(start, stop, panel)
                done += (stop - start) * (panel[1] - panel[0])
                if progress is not None:
                    progress(done, total)
        del self._scores, self._scratch, self._panel
        self._converted.clear()
        self._sampled.clear()
        self._masks.forget()

    def describe(self) -> str:
        """A line for the log: what it took."""
        blocks = ", ".join(f"{number:,} in {name}" for name, number in self.blocks_by_filter.items())
        compared = sum(direction.compared for direction in self.directions)
        return f"similarities: blocks {blocks}; {compared:,} pairs settled one by one without rounding"

    def _count_row(self, start: int, stop: int, panel: tuple[int, int]) -> None:
        """The blocks of videos ``[start, stop)`` and the texts of ``panel``, whose conversions are kept."""
        kind = self._choose(start, stop, panel)
        videos = self._operand(kind, self.videos, start, stop)
        for first, last in _parts(*panel, self.plan.text_block):
            block = self._block(kind, (start, first), videos, self._texts(kind, first, last))
            for direction in self.directions:
                direction.count(block)
            self.blocks_by_filter[kind.name] = self.blocks_by_filter.get(kind.name, 0) + 1

    def _choose(self, start: int, stop: int, panel: tuple[int, int]) -> Filter:
        """The fastest format that leaves few pairs open, by a sample from the middle of the row and of the panel."""
        start = (start + stop - min(stop - start, _SAMPLED_VIDEOS)) // 2
        stop = min(stop, start + _SAMPLED_VIDEOS)
        size = min(panel[1] - panel[0], self.plan.text_block, _SAMPLED_TEXTS)
        first = (panel[0] + panel[1] - size) // 2
        for kind in self.filters[:-1]:
            videos = self._operand(kind, self.videos, start, stop)
            if kind not in self._sampled:
                self._sampled[kind] = self._operand(kind, self.texts, first, first + size)
            block = self._block(kind, (start, first), videos, self._sampled[kind])
            if sum(direction.open_share(block) for direction in self.directions) <= kind.open_share:
                return kind
        return self.filters[-1]

    def _texts(self, kind: Filter, first: int, last: int) -> Operand:
        """Texts ``[first, last)``; those of bytes are kept for the next videos, others take too much."""
        if kind is not self._converted_by:
            self._converted.clear()
            self._converted_by = kind
        texts = self._converted.get(first)
        if texts is None:
            place = first % self.plan.text_panel * kind.limbs * self.plan.dimensions
            texts = self._operand(kind, self.texts, first, last, self._panel[place:])
            if kind.limbs:
                self._converted[first] = texts
        return texts

    def _operand(self, kind: Filter, rows: Rows, start: int, stop: int, memory: torch.Tensor | None = None) -> Operand:
        numbers = rows.between(start, stop).to(self.device).contiguous()
        whole = self._is_exact(kind)
        norms, reverse = rows.norms[start:stop], rows is self.texts
        return kind.operand(numbers, norms, reverse=reverse, whole=whole, memory=memory)

    def _block(self, kind: Filter, starts: tuple[int, int], videos: Operand, texts: Operand) -> Block:
        shape = len(videos.values), len(texts.values)
        if kind.scores.itemsize > self._scores.itemsize:  # doubles: seldom, and twice as much
            self._scores = self._room_for_scores(kind.scores)
        scores = self._scores.view(kind.scores)[: shape[0] * shape[1]].view(shape)
        kind.multiply(videos, texts, scores, self._scratch)
        dimensions, is_exact = self.plan.dimensions, self._is_exact(kind)
        if is_exact:
            margins = np.zeros(shape[0]), np.zeros(shape[1])
        else:
            margins = kind.margin(videos, texts, dimensions), kind.margin(texts, videos, dimensions)
        return Block(scores, kind.scale(videos, texts), starts, margins, kind.limbs == 1, is_exact)

    def _room_for_scores(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(self.plan.video_block * self.plan.text_block, dtype=dtype, device=self.device)

    def _is_exact(self, kind: Filter) -> bool:
        return kind.is_exact((self.videos.largest, self.texts.largest), self.plan.dimensions, self.device)


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
        rows = embeddings[start:stop].to(torch.float32)
        found[start:stop] = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).cpu().numpy()
    return found * (1 + embeddings.shape[1] * 2.0**-52)
