"""How much memory each stage of a run is expected to take, and how that is known."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PredictedPeak:
    """The expected peak resident memory of one task of a stage (kernel and children), and where the number is from.

    ``origin`` is a clause such as ``measured in run_20260101_120000_abcdef12``.
    """

    peak_bytes: int
    origin: str
