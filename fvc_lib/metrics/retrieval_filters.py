"""Fast approximate similarities of a block of queries and candidates, each with how far it may be from the truth.

What lies further from a threshold than that is settled by a comparison. Where the processor multiplies bytes several
times as fast as float32 numbers (AVX-512 VNNI does eight times), a product of rounded rows settles all but a few pairs.
Where it leaves too many open, float32 follows, then float64.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from fvc_lib.metrics.retrieval_exact import double_rounding, flushed, single_rounding
from fvc_lib.metrics.weighting import FloatArray

# Whose BLAS is often the faster, and knows no lesser precision than it is asked for.
MULTIPLIED_BY_NUMPY = frozenset({"cpu"})
_CLIP = 4.0  # root mean squares: what lies outside is rounded to it; beyond five the steps get too coarse


@dataclass(frozen=True)
class Operand:
    """One side of a product: ``scale * values`` is within ``errors`` (R,) of rows with ``norms`` (R,), by the norm."""

    values: torch.Tensor
    scale: float
    norms: FloatArray
    errors: FloatArray

    def part(self, start: int, stop: int) -> Operand:
        """Rows ``[start, stop)``."""
        return Operand(self.values[start:stop], self.scale, self.norms[start:stop], self.errors[start:stop])


@dataclass(frozen=True)
class Filter:
    """A number format in which similarities are computed first.

    Attributes:
        name: for the log.
        dtype: of the rows.
        scores: of the products.
        open_share: of the pairs that it may leave open until the next format costs less than settling them one by one.
    """

    name: str
    dtype: torch.dtype
    scores: torch.dtype
    open_share: float

    def operand(self, rows: torch.Tensor, norms: FloatArray) -> Operand:
        """``rows`` (R, D) of float32 in this format; ``norms`` (R,) not less than the true ones."""
        if self.dtype != torch.int8:
            return Operand(rows.to(self.dtype), 1.0, norms, np.zeros(len(rows)))
        step = _step(rows)
        rounded = (rows * (1 / step)).round_().clamp_(-127, 127)
        values = rounded.to(torch.int8)
        errors = torch.linalg.vector_norm(rounded.mul_(step).sub_(rows), dim=1).cpu().numpy().astype(np.float64)
        dimensions = rows.shape[1]  # the error is itself a float32 sum, of squares that may be flushed to zero
        own_rounding = errors * (1e-3 + dimensions * 2.0**-22) + norms * 2.0**-20 + dimensions * 2.0**-60
        return Operand(values, step, norms, errors + own_rounding)

    def multiply(self, videos: Operand, texts: Operand, out: torch.Tensor) -> None:
        """``out`` (V, T) becomes the products of all rows."""
        left, right = videos.values, texts.values.T
        if self.dtype == torch.int8:
            torch._int_mm(left, right, out=out)
        elif out.device.type in MULTIPLIED_BY_NUMPY:
            np.matmul(left.numpy(), right.numpy(), out=out.numpy())
        else:
            torch.mm(left, right, out=out)

    def margin(self, queries: Operand, candidates: Operand, dimensions: int) -> FloatArray:
        """float64 (Q,): how far ``scale * product`` of a query and any of the candidates may be from the truth.

        By Cauchy and Schwarz: the error of one side times the other, for both; and the rounding of the product.
        """
        norm, error = candidates.norms.max(), candidates.errors.max()
        margin = (queries.norms * error + queries.errors * (norm + error)) * (1 + 1e-9)
        margin += self._rounding(dimensions, queries.values.device) * queries.norms * norm
        if self.dtype == torch.float32:
            margin += flushed(dimensions, queries.norms, norm)
        return np.asarray(margin)

    def _rounding(self, dimensions: int, device: torch.device) -> float:
        if self.dtype == torch.int8:
            return 0.0  # whole numbers below 2^31
        if self.dtype == torch.float64:
            return double_rounding(dimensions)
        return single_rounding(dimensions) + (0.0 if device.type == "cpu" else _lesser_precision())


BYTES = Filter("int8", torch.int8, torch.int32, 0.015)
SINGLE = Filter("float32", torch.float32, torch.float32, 0.03)
DOUBLE = Filter("float64", torch.float64, torch.float64, 1.0)
# With one dimension torch's product of bytes is wrong (2.13), with few there is nothing to gain; with more than these a
# product could leave int32.
DIMENSIONS_OF_BYTES = range(16, 2**31 // 127**2 - 1)


def filters_of(device: torch.device, dimensions: int) -> tuple[Filter, ...]:
    """The formats worth trying on ``device``, the fastest first; the last always settles all but ties.

    Whether bytes are worth it is measured: a processor without instructions for them is slower than with float32.
    """
    if device.type == "cpu" and dimensions in DIMENSIONS_OF_BYTES and _bytes_are_faster(dimensions):
        return BYTES, SINGLE, DOUBLE
    return SINGLE, DOUBLE


def _bytes_are_faster(dimensions: int) -> bool:
    if not hasattr(torch, "_int_mm"):
        return False
    rows = torch.ones(256, dimensions)
    return _seconds(BYTES, rows) < 0.7 * _seconds(SINGLE, rows)


def _seconds(kind: Filter, rows: torch.Tensor) -> float:
    operand = kind.operand(rows, np.ones(len(rows)))
    out = torch.empty(len(rows), len(rows), dtype=kind.scores)
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        kind.multiply(operand, operand, out)
        taken.append(time.perf_counter() - start)
    return min(taken)


def _step(rows: torch.Tensor) -> float:
    """The number that one unit of a byte stands for."""
    largest = float(rows.abs().max())
    spread = _CLIP * float(torch.linalg.vector_norm(rows)) / rows.numel() ** 0.5
    return float(np.float32(max(min(largest, spread) / 127, 2.0**-100)))


def _lesser_precision() -> float:
    """What a GPU's float32 product may lose besides where torch may round its operands to ten bits (TF32) or seven."""
    return {"highest": 0.0, "high": 2.0**-9}.get(torch.get_float32_matmul_precision(), 2.0**-6)
