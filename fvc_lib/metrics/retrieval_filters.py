"""Fast approximate similarities of a block of queries and candidates, each with how far it may be from the truth.

What lies further from a threshold than that is settled by a comparison. Where the processor multiplies bytes several
times as fast as float32 numbers (AVX-512 VNNI does eight times), a product of rounded rows settles nearly all pairs of
a trained model. Where it leaves too many open, numbers of three bytes follow, by six products of bytes: finer than
float32 products, whose sums round, and faster still. Then float32 where bytes are of no use, then float64.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass

import numpy as np
import torch

from fvc_lib.metrics.retrieval_exact import double_rounding, flushed, single_rounding
from fvc_lib.metrics.retrieval_plan import ROWS_AT_ONCE, VIDEOS_AT_ONCE
from fvc_lib.metrics.weighting import FloatArray

# Whose BLAS is often the faster, and knows no lesser precision than it is asked for.
MULTIPLIED_BY_NUMPY = frozenset({"cpu"})
_CLIP = 4.0  # root mean squares: what lies outside is rounded to it; beyond five the steps get too coarse
_LIMB_BASE = 254  # what half a step leaves, times this, is a byte again


@dataclass(frozen=True)
class Operand:
    """One side of a product: ``scale * values`` is within ``errors`` (R,) of rows with ``norms`` (R,), by the norm.

    Attributes:
        values: (R, D) of the filter's format; of n limbs (R, n * D), from the first to the last for videos, from the
            last to the first for texts, so that one product of consecutive columns sums all of one weight.
        scale: of the last limb where there are several.
        norms: float64 (R,), not less than the true ones.
        errors: float64 (R,).
        parts: float64 (n, R), not less than the norm of what each of several limbs stands for.
    """

    values: torch.Tensor
    scale: float
    norms: FloatArray
    errors: FloatArray
    parts: FloatArray


@dataclass(frozen=True)
class Filter:
    """A number format in which similarities are computed first.

    Attributes:
        name: for the log.
        dtype: of the rows.
        scores: of the products.
        open_share: of the pairs that it may leave open until the next format costs less than settling them one by one.
        limbs: bytes per number; 0 of floats.
    """

    name: str
    dtype: torch.dtype
    scores: torch.dtype
    open_share: float
    limbs: int = 0

    def operand(
        self,
        rows: torch.Tensor,
        norms: FloatArray,
        *,
        reverse: bool = False,
        whole: bool = False,
        memory: torch.Tensor | None = None,
    ) -> Operand:
        """``rows`` in this format.

        Args:
            rows: float32 (R, D).
            norms: float64 (R,), not less than the true ones.
            reverse: the last limb first.
            whole: numbers that this format ``is_exact`` for.
            memory: int8, flat, where bytes are kept; none: in memory of their own.
        """
        none = np.zeros((0, len(rows)))
        if self.limbs == 0:
            return Operand(rows.to(self.dtype), 1.0, norms, np.zeros(len(rows)), none)
        size = self.limbs * rows.numel()
        memory = torch.empty(size, dtype=torch.int8, device=rows.device) if memory is None else memory[:size]
        if whole:
            return Operand(memory.view(rows.shape).copy_(rows), 1.0, norms, np.zeros(len(rows)), none)
        return self._in_limbs(rows, norms, reverse, memory.view(len(rows), self.limbs, -1))

    def _in_limbs(self, rows: torch.Tensor, norms: FloatArray, reverse: bool, values: torch.Tensor) -> Operand:
        dimensions = rows.shape[1]
        per_step = float(np.float32(1 / _step(rows, clip=self.limbs == 1)))
        lengths = torch.empty(self.limbs + 1, len(rows), device=rows.device)  # of all limbs and of what is left
        for start in range(0, len(rows), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            left = rows[part] * per_step
            for limb in range(self.limbs):
                whole = left.round().clamp_(-127, 127)
                values[part, self.limbs - 1 - limb if reverse else limb] = whole
                torch.linalg.vector_norm(whole, dim=1, out=lengths[limb, part])
                left.sub_(whole)
                if limb + 1 < self.limbs:
                    left.mul_(_LIMB_BASE)
            torch.linalg.vector_norm(left, dim=1, out=lengths[self.limbs, part])
        scale = 1 / per_step / _LIMB_BASE ** (self.limbs - 1)
        # Lengths are float32 sums of squares. The first factor rounds, and may flush what is no number of any limb;
        # each later one rounds by 2^-24 of half a step, which may be 0.002 of the last limb's unit.
        known = lengths.cpu().numpy().astype(np.float64) * (1 + 1e-3 + dimensions * 2.0**-22)
        unknown = dimensions**0.5 * (4e-3 if self.limbs > 1 else 1e-6)
        errors = scale * (known[-1] + unknown) + norms * (1.01 * 2.0**-24)
        weights = scale * float(_LIMB_BASE) ** np.arange(self.limbs - 1, -1, -1)
        return Operand(values.flatten(1), scale, norms, errors, weights[:, None] * (known[:-1] + 1e-9))

    def multiply(self, videos: Operand, texts: Operand, out: torch.Tensor, scratch: torch.Tensor) -> None:
        """``out`` (V, T) becomes the scores of all pairs; ``scratch`` is int32 (``VIDEOS_AT_ONCE`` * T,)."""
        left, right = videos.values, texts.values.T
        if self.limbs > 1:
            self._multiply_limbs(left, right, out, scratch)
        elif self.limbs == 1:
            torch._int_mm(left, right, out=out)
        elif out.device.type in MULTIPLIED_BY_NUMPY:
            np.matmul(left.numpy(), right.numpy(), out=out.numpy())
        else:
            torch.mm(left, right, out=out)

    def _multiply_limbs(
        self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor
    ) -> None:
        """The sum of all products of limbs whose weights are not less than that of the last limb."""
        dimensions = left.shape[1] // self.limbs
        for start in range(0, len(left), VIDEOS_AT_ONCE):
            rows, sums = left[start : start + VIDEOS_AT_ONCE], out[start : start + VIDEOS_AT_ONCE]
            product = scratch[: sums.numel()].view(sums.shape)
            for last in reversed(range(self.limbs)):  # limbs whose numbers, from 0, add up to this
                columns, skipped = (last + 1) * dimensions, (self.limbs - 1 - last) * dimensions
                torch._int_mm(rows[:, :columns], right[skipped:], out=product)
                if last == self.limbs - 1:
                    sums.copy_(product)
                else:
                    sums.add_(product, alpha=float(_LIMB_BASE ** (self.limbs - 1 - last)))

    def scale(self, videos: Operand, texts: Operand) -> float:
        """Similarity per score."""
        return videos.scale * texts.scale * float(_LIMB_BASE) ** max(0, self.limbs - 1)

    def margin(self, queries: Operand, candidates: Operand, dimensions: int) -> FloatArray:
        """float64 (Q,): how far ``scale * score`` of a query and any of the candidates may be from the truth.

        By Cauchy and Schwarz: the error of one side times the other, for both; products of limbs that are left out; and
        the rounding of the product.
        """
        norm, error = candidates.norms.max(), candidates.errors.max()
        margin = (queries.norms * error + queries.errors * (norm + error)) * (1 + 1e-9)
        if self.limbs > 1:
            margin += self._limb_margin(queries, candidates)
        elif self.limbs == 0:
            margin += self._rounding(dimensions, queries.values.device) * queries.norms * norm
        if self.dtype == torch.float32:
            margin += flushed(dimensions, queries.norms, norm)
        return np.asarray(margin)

    def _limb_margin(self, queries: Operand, candidates: Operand) -> FloatArray:
        rounding = 2 * self.limbs * 2.0**-24  # each product becomes a float32 number, is scaled and added
        margin = np.zeros(len(queries.norms))
        for place, most in enumerate(candidates.parts.max(axis=1)):
            for other, lengths in enumerate(queries.parts):
                margin += lengths * (most * (1.0 if place + other >= self.limbs else rounding))
        return margin

    def _rounding(self, dimensions: int, device: torch.device) -> float:
        if self.dtype == torch.float64:
            return double_rounding(dimensions)
        return single_rounding(dimensions) + (0.0 if device.type == "cpu" else _lesser_precision())

    def is_exact(self, largest: tuple[float | None, float | None], dimensions: int, device: torch.device) -> bool:
        """Whether products of rows of whole numbers up to ``largest`` (none: of others) are not rounded at all."""
        if largest[0] is None or largest[1] is None:
            return False
        if self.limbs:
            return self.limbs == 1 and max(largest[0], largest[1]) <= 127
        if self.dtype == torch.float32:
            full = device.type == "cpu" or _lesser_precision() == 0
            return full and dimensions * largest[0] * largest[1] <= 2**24
        return True


BYTES = Filter("int8", torch.int8, torch.int32, 0.015, limbs=1)
LIMBS = Filter("three of int8", torch.int8, torch.float32, 0.03, limbs=3)
SINGLE = Filter("float32", torch.float32, torch.float32, 0.03)
DOUBLE = Filter("float64", torch.float64, torch.float64, 1.0)


def filters_of(device: torch.device, dimensions: int) -> tuple[Filter, ...]:
    """The formats worth trying on ``device``, the fastest first; the last always settles all but ties."""
    bytes_only = _worth_trying(dimensions) if device.type == "cpu" and hasattr(torch, "_int_mm") else ()
    return *bytes_only, SINGLE, DOUBLE


@functools.cache
def _worth_trying(dimensions: int) -> tuple[Filter, ...]:
    """Of the formats of bytes; measured, as a processor without instructions for them is slower than with float32.

    Three bytes are worth a little more time than float32 takes, as they leave less open.
    """
    if dimensions not in dimensions_of(BYTES):
        return ()
    rows = torch.ones(VIDEOS_AT_ONCE, dimensions), torch.ones(4 * VIDEOS_AT_ONCE, dimensions)
    of_single = _seconds(SINGLE, *rows)
    return tuple(
        kind
        for kind, share in ((BYTES, 0.7), (LIMBS, 1.4))
        if dimensions in dimensions_of(kind) and _seconds(kind, *rows) < share * of_single
    )


def dimensions_of(kind: Filter) -> range:
    """With what numbers per row a format of bytes may be used.

    With one torch's product of bytes is wrong (2.13), with few there is nothing to gain; with more than these a product
    could leave int32.
    """
    return range(16, 2**31 // (127**2 * kind.limbs) - 1)


def _seconds(kind: Filter, videos: torch.Tensor, texts: torch.Tensor) -> float:
    """Processor seconds of a product."""
    left, right = (kind.operand(rows, np.ones(len(rows))) for rows in (videos, texts))
    out = torch.empty(len(videos), len(texts), dtype=kind.scores)
    scratch = torch.empty(out.numel(), dtype=torch.int32)
    taken = []
    for _ in range(5):
        start = time.thread_time()
        kind.multiply(left, right, out, scratch)
        taken.append(time.thread_time() - start)
    return min(taken)


def _step(rows: torch.Tensor, *, clip: bool) -> float:
    """The number that one unit of the first byte stands for."""
    largest = float(rows.abs().max())
    spread = _CLIP * float(torch.linalg.vector_norm(rows)) / rows.numel() ** 0.5
    return max((min(largest, spread) if clip else largest) / 127, 2.0**-100)


def _lesser_precision() -> float:
    """What a GPU's float32 product may lose besides where torch may round its operands to ten bits (TF32) or seven."""
    return {"highest": 0.0, "high": 2.0**-9}.get(torch.get_float32_matmul_precision(), 2.0**-6)
