"""Columns that many tables have."""

from __future__ import annotations

import pandera.polars as pa
import polars as pl

LABELS = ("real", "fake")


def text_column(*, checks: pa.Check | None = None, unique: bool = False, nullable: bool = False) -> pa.Column:
    """Any text."""
    return pa.Column(pl.String, checks, unique=unique, nullable=nullable)


def label_column() -> pa.Column:
    """``real`` or ``fake``."""
    return text_column(checks=pa.Check.isin(LABELS))


def group_column() -> pa.Column:
    """What must stay on one side of a split; has no default."""
    return text_column(checks=pa.Check.str_length(min_value=1))


def finite_column(*, nullable: bool = False) -> pa.Column:
    """A float64 that is a number."""
    finite = pa.Check(lambda data: data.lazyframe.select(pl.col(data.key).is_finite()))
    return pa.Column(pl.Float64, finite, nullable=nullable)
